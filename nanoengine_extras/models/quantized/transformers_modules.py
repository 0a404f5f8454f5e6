"""Linears and embeddings of transformers' models whose weights stay packed (modules.py).

Their weights can also be read as a whole, and a model is checked in float32, whatever its dtype is.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine_extras.cpu.packed import layout
from nanoengine_extras.models.quantized.modules import (
    QuantizedEmbedding, QuantizedLinear, are_one, packed_class)

# in the check of a model (check.py), functions see 16-bit tensors as float32
as_stored = torch._C.DisableTorchFunction


class Linear(QuantizedLinear):
    """was_read: whether the model has read the weight directly. In an expert, gate and up are
    the two halves of one linear."""

    was_read = False

    @property
    def weight(self) -> Any:  # type: ignore[override]
        self.was_read = True
        with as_stored():
            return super().weight

    def forward(self: Any, x: Tensor) -> Tensor:
        with as_stored():
            own = self._parameters["weight"].dtype
            if self.is_quantized and (own, x.dtype) == (torch.bfloat16, torch.float32):
                return self.in_float32(x)
            if self.is_quantized and x.dtype != own:
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return F.linear(x, super().weight.to(x.dtype), bias)
        return super().forward(x)

    def join(self, linears: list[Any], fused: Any) -> bool:
        """Gives a linear the outputs of several, if one product can compute them."""
        parts = [part for each in linears for part in each.packed_parts]
        rows = [count for each in linears for count in each.part_rows]
        dtype = self._parameters["weight"].dtype  # type: ignore[union-attr]
        can_join = len(parts) <= 3 and are_one(parts, rows, self.in_features, dtype)
        if can_join:
            fused.__class__ = packed_class(Linear, nn.Linear)
            fused.keep(parts, rows, dtype)
        return can_join

    def fuse(self) -> None:
        """Lets an MLP compute SwiGLU with the product, if ups begin with a block of their own."""
        if self.out_features // 2 % layout.form_of(self.packed_parts[0]).block == 0:
            vars(self).update(halves=2, is_fused=True, packed_bias=None)

    def in_float32(self, x: Tensor) -> Tensor:
        """Multiplies rows in float32 by the kernel for bfloat16, with errors of up to 2^-16.
        Dequantizing the weight for each product would take minutes."""
        if self.halves == 2:
            # without the activation of gates
            part = self.packed_parts[0]
            if self.part_rows[0] % layout.form_of(part).block:
                return F.linear(x, super().weight.float())
            whole = copy.copy(self)
            vars(whole).update(halves=1, packed_bias=None)
            return whole.in_float32(x)
        rows = x.reshape(-1, self.in_features)
        upper = rows.bfloat16()
        out = self.multiply(upper).float()
        bias = self.packed_bias
        # compute each row again, minus its rounded result: this leaves what rounding has lost
        for row, result in zip(upper.split(1), out):
            self.packed_bias = bias - F.pad(result, (0, len(bias) - len(result)))
            result += self.multiply(row)[0]
        self.packed_bias = torch.zeros_like(bias)
        out += self.multiply((rows - upper.float()).bfloat16())
        self.packed_bias = bias
        return out.view(*x.shape[:-1], self.out_features)


class Embedding(QuantizedEmbedding):
    """Looks up rows, and gives them as the weight to the forward of its original class, which may
    scale them.

    was_read: see `Linear`. rows: this weight, during a forward.
    """

    was_read = False
    rows: Tensor | None = None

    @property
    def weight(self) -> Any:  # type: ignore[override]
        if self.rows is not None:
            return self.rows
        self.was_read = True
        return self.look_up(torch.arange(self.num_embeddings, device="cpu"))

    def look_up(self, ids: Tensor) -> Tensor:
        with as_stored():
            return super().forward(ids)

    def forward(self, ids: Tensor) -> Tensor:
        vars(self)["rows"] = self.look_up(ids.flatten())
        with as_stored():
            places = torch.arange(ids.numel(), device="cpu").view(ids.shape)
        try:
            return super(QuantizedEmbedding, self).forward(places)
        finally:
            del vars(self)["rows"]
