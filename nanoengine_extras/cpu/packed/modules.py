"""Linears and embeddings whose weights stay packed, and the interface to their kernels."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nanoengine_extras.cpu.compiling import bits_of_number
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.cpu.packed.fitting import Weight
from nanoengine_extras.cpu.packed.kernel import product
from nanoengine_extras.cpu.packed.layout import Form, padding, rows_of, to_bytes
from nanoengine_extras.cpu.packed.order import FLOAT8

# rows that are dequantized at a time
ROWS = 1024
# more blocks than any weight has
END = 2**40
# a mode of torch functions may show tensors in another dtype
as_stored = torch._C.DisableTorchFunction


class PackedWeight(NamedTuple):
    """A matrix of numbers and scales, as kernels read it: see layout.py.

    shape: (outputs, inputs); dtype: of the rows that it is multiplied with
    """

    data: Tensor
    form: Form
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None,
             lows: Tensor | None = None, table: Tensor | None = None,
             dtype: torch.dtype = torch.float32, *, group: int, bits: int = 8,
             above: tuple[Tensor, ...] = (),
             space: Callable[[int], Tensor] = in_huge_pages) -> "PackedWeight | None":
        """Packs a weight: (number - zero) * scale + low, or table[number] * scale.

        numbers: (outputs, inputs) uint8 or int8; scales, zeros, lows: (outputs, groups)
        table: (16,), or (256,) the values of FP8; group: how many neighbouring inputs a group has,
        or 0 if they are not neighbours; bits: 4 or 8, which all numbers have
        above: scales of the scales, and of the lows, (outputs, inputs / 256) float16
        space: gives memory

        Returns None if the kernels have no form for it.
        """
        weight = Weight(numbers, scales, zeros, lows, table, above, bits)
        found = to_bytes(weight, group, dtype, space)
        return found and cls(*found, (len(numbers), numbers.shape[1]), dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of the weight, (ids, inputs), in float32."""
        return rows_of(self.data, self.form, ids, self.dtype)[:, :self.shape[1]]

    def dequantized(self) -> Tensor:
        """Returns the whole weight in its dtype."""
        weight = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        ids = torch.arange(self.shape[0], device="cpu")
        for some, to in zip(ids.split(ROWS), weight.split(ROWS)):
            to.copy_(self.rows(some))
        return weight

    def padding(self) -> int:
        """How many inputs the kernel needs after the last one."""
        return padding(self.shape[1], self.form.group, self.dtype)

    @staticmethod
    def linear(weights: "list[PackedWeight]", halves: int = 1) -> "QuantizedLinear | None":
        """Returns a linear with the outputs of up to three weights, one after the other; None if
        one product cannot combine them: it needs the same kernel and inputs for all.

        halves: 2 if there are two weights, of gates and ups; then they need not fill whole blocks.
        """
        kinds = {(each.form.width == FLOAT8, each.padding()) for each in weights}
        ends = 0 if halves == 2 else sum(each.shape[0] % each.form.block for each in weights[:-1])
        fits = len(weights) <= 3 and len(kinds) == 1 and ends == 0
        return QuantizedLinear(weights, halves) if fits else None


class QuantizedLinear(PackedLinear):
    """A linear whose weight is packed numbers and scales: of up to three parts, for projections
    that are fused, each with a format of its own.

    weight: the dequantized weight, a copy. If another one is set, this becomes an ordinary linear.
    was_read: whether anybody has read it.
    packed_bias: in float32, padded; made when it is first needed, since the bias is loaded later.
    """

    was_read = False

    def __init__(self, weights: list[PackedWeight], halves: int = 1) -> None:
        nn.Module.__init__(self)
        self.weights = weights
        self.in_features = weights[0].shape[1]
        self.out_features = sum(each.shape[0] for each in weights)
        self.halves = halves
        self.is_fused = halves == 2
        self.padding = weights[0].padding()
        self._parameters["weight"] = without_weight(weights[0].dtype)
        self.register_parameter("bias", None)
        self.packed_bias: Any = None
        for number, each in enumerate(weights):
            self.register_buffer(f"part_{number}", each.data, persistent=False)
        # compiled now, not when it is first needed
        self.kernel: Any = product(weights[0].dtype, weights[0].form.width == FLOAT8)

    @property
    def is_quantized(self) -> bool:
        return self._parameters["weight"].shape[:1] == (0,)  # type: ignore[union-attr]

    @property
    def weight(self) -> Any:  # type: ignore[override]
        self.was_read = True
        with as_stored():
            if self.is_quantized:
                return torch.cat([each.dequantized() for each in self.weights])
            return PackedLinear.weight.fget(self)  # type: ignore[attr-defined]

    def pack(self) -> None:
        """Packs another weight that was set."""
        self.weights = []
        self._buffers.clear()
        super().pack()

    def call(self: Any, x: int, residual: int, out: int, rows: int, norm: Any = None) -> list[int]:
        if not self.is_quantized:
            return super().call(x, residual, out, rows, norm)
        norm_at, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        dtype = self._parameters["weight"].dtype
        words = (self.in_features + self.padding) * dtype.itemsize // 4
        if self.packed_bias is None:
            none = torch.zeros(self.out_features, dtype=torch.float32, device="cpu")
            bias = none if self.bias is None else self.bias.float()
            more = -self.out_features // self.halves % self.weights[0].form.block
            bias = F.pad(bias.unflatten(0, (self.halves, -1)), (0, more))
            self.packed_bias = bias.flatten()
        # three parts, and the number of the first block after each but the last
        places = [each.data.data_ptr() for each in self.weights]
        sizes = [-(-each.shape[0] // each.form.block) for each in self.weights[:-1]]
        first, second, third = places + places[:1] * (3 - len(places))
        end, next_end = [*accumulate(sizes)] + [END] * (2 - len(sizes))
        return self.kernel(
            norm_at, self.packed_bias.data_ptr(), words, self.out_features // self.halves,
            self.halves, bits_of_number(eps), x, residual, out, rows, first, end, second, next_end,
            third)

    def forward(self: Any, x: Tensor) -> Tensor:
        with as_stored():
            own = self._parameters["weight"].dtype
            if self.is_quantized and (own, x.dtype) == (torch.bfloat16, torch.float32):
                return self.in_float32(x)
            if self.is_quantized and x.dtype != own:
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return F.linear(x, self.weight.to(x.dtype), bias)
        return super().forward(x)

    def in_float32(self, x: Tensor) -> Tensor:
        """Multiplies rows in float32 by the kernel for bfloat16, with errors of up to 2^-16.
        Dequantizing the weight for each product would take minutes."""
        if self.halves == 2:
            # without the activation of gates
            whole: Any = PackedWeight.linear(self.weights)
            if whole is None:
                return F.linear(x, self.weight.float(), self.bias)
            whole.bias = self.bias
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

    def join(self, linears: list[Any]) -> "QuantizedLinear | None":
        """Returns one linear with the outputs of several, without their biases; None if one product
        cannot compute them."""
        return PackedWeight.linear([part for each in linears for part in each.weights])

    def fuse(self) -> None:
        """Lets an MLP compute SwiGLU with the product, if ups begin with a block of their own."""
        if self.out_features // 2 % self.weights[0].form.block == 0:
            self.halves, self.is_fused, self.packed_bias = 2, True, None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super(PackedLinear, self)._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class QuantizedEmbedding(nn.Embedding):
    """An embedding whose rows are dequantized when they are looked up.

    part_0: the packed weight; a head with the same weight has the same tensor.
    plain: an embedding of a class with a forward of its own, which may scale rows; it gets the rows
        as its weight. was_read: see `QuantizedLinear`
    """

    was_read = False
    # what a printed embedding shows
    padding_idx = max_norm = None
    norm_type, scale_grad_by_freq, sparse = 2.0, False, False

    def __init__(self, packed: PackedWeight, plain: nn.Embedding | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.packed = packed
        self._parameters["weight"] = without_weight(packed.dtype)
        self.register_buffer("part_0", packed.data, persistent=False)
        self.plain = plain
        if plain is not None:
            plain.weight = without_weight(packed.dtype)
            # it matters only for gradients, and need not be one of the rows
            plain.padding_idx = None

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        self.was_read = True
        with as_stored():
            return nn.Parameter(self.packed.dequantized(), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        with as_stored():
            dtype = self.packed.dtype
            some = ids.flatten().split(ROWS)
            rows = torch.cat([self.packed.rows(each).to(dtype) for each in some])
            places = torch.arange(ids.numel(), device="cpu").view(ids.shape)
        # a mode can show the result in another dtype
        if self.plain is None:
            return F.embedding(places, rows)
        return functional_call(self.plain, {"weight": rows}, (places,))


def without_weight(dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight without numbers, which keeps the dtype of a packed weight."""
    empty = torch.empty(0, 0, 0, dtype=dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=False)
