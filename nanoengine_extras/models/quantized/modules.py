"""Linears and embeddings whose weights stay packed (cpu/packed), and how they are loaded.

`Loading.place` puts them into a model before memory is allocated. Each tensor of a file is packed
when it is read, so that at most one matrix exists in the model's dtype.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine.loader import place_on
from nanoengine_extras.cpu.compiling import bits_of_number, warn_once
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.modules import GatedMLP, PackedLinear, kind_of
from nanoengine_extras.cpu.packed import kernel, layout, order
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import Stored

# rows that are dequantized at a time
ROWS = 1024
# more blocks than any weight has
END = 2**40


def storage_of(tensor: Tensor) -> int:
    """Returns a key that a parameter shares with its views, even if they have no `_base`."""
    return tensor.untyped_storage()._cdata


def without_weight(dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight without numbers, which keeps the dtype of a packed weight."""
    empty = torch.empty(0, 0, 0, dtype=dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=False)


def dequantized(parts: list[Tensor], rows: list[int], inputs: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows of some packed parts, as one matrix in `dtype`."""
    weight = torch.empty(sum(rows), inputs, dtype=dtype, device="cpu")
    for part, to in zip(parts, weight.split(rows)):
        ids_of_part = torch.arange(len(to), device="cpu")
        for ids, out in zip(ids_of_part.split(ROWS), to.split(ROWS)):
            out.copy_(layout.rows_of(part, ids, inputs, dtype))
    return weight


class QuantizedLinear(PackedLinear):
    """A linear whose weight is packed numbers and scales: one part, or up to three for projections
    that are fused, each with a format of its own.

    weight: the dequantized weight, a copy. If another one is set, this becomes an ordinary linear.
    part_rows: how many outputs each part has.
    packed_bias: in float32, padded; made when it is first needed, since the bias is loaded later.
    """

    part_rows: list[int]
    packed_bias: Any = None

    @property
    def packed_parts(self) -> list[Tensor]:
        return [*self._buffers.values()] if self.is_packed else []  # type: ignore[list-item]

    @property
    def is_quantized(self) -> bool:
        return self._parameters["weight"].shape[:1] == (0,)  # type: ignore[union-attr]

    @property
    def weight(self) -> Any:  # type: ignore[override]
        if not self.is_quantized:
            return PackedLinear.weight.fget(self)  # type: ignore[attr-defined]
        empty: Any = self._parameters["weight"]
        return dequantized(self.packed_parts, self.part_rows, self.in_features, empty.dtype)

    def keep(self: Any, parts: list[Tensor], rows: list[int], dtype: torch.dtype) -> None:
        """Replaces the weight by packed parts."""
        for number, part in enumerate(parts):
            self.register_buffer(f"part_{number}", part, persistent=False)
        self.part_rows = rows
        self.padding = layout.padding(self.in_features, layout.form_of(parts[0]).group, dtype)
        # compiled now, not when it is first needed
        form = layout.form_of(parts[0])
        self.kernel = kernel.product(dtype, form.width == order.FLOAT8)
        self._parameters["weight"] = without_weight(dtype)

    def pack(self) -> None:
        """Packs another weight that was set."""
        for name in [*self._buffers]:
            del self._buffers[name]
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
            block = layout.form_of(self.packed_parts[0]).block
            more = -self.out_features // self.halves % block
            bias = F.pad(bias.unflatten(0, (self.halves, -1)), (0, more))
            self.packed_bias = bias.flatten()
        # the address of each part, and the number of the first block after it
        parts = []
        end = 0
        for part in self.packed_parts:
            end += layout.blocks_of(part)
            parts += [part.data_ptr(), end]
        parts = (parts[:-1] + [END, parts[0], END, parts[0]])[:5]
        return self.kernel(
            norm_at, self.packed_bias.data_ptr(), words, self.out_features // self.halves,
            self.halves, bits_of_number(eps), x, residual, out, rows, *parts)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super(PackedLinear, self)._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class QuantizedEmbedding(nn.Embedding):
    """An embedding whose rows are dequantized when they are looked up.

    part_0: the packed weight; a head with the same weight has the same tensor.
    """

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        ids = torch.arange(self.num_embeddings, device="cpu")
        return nn.Parameter(self(ids), requires_grad=False)

    def forward(self: Any, ids: Tensor) -> Tensor:
        dtype = self._parameters["weight"].dtype
        rows = [layout.rows_of(self.part_0, each, self.embedding_dim, dtype).to(dtype)
                for each in ids.flatten().split(ROWS)]
        return torch.cat(rows).view(*ids.shape, -1)


# --------------------------------------------------------------------------------------- loading


def in_packed_form(tensor: Stored, dtype: torch.dtype,
                   space: Callable[[int], Tensor] = in_huge_pages) -> Tensor:
    """Reads a matrix as bytes, or if it has no packed form, as a matrix in `dtype`."""
    found = tensor.load()
    if isinstance(found, Grouped):
        part = layout.pack(found, dtype, space)
        if part is not None:
            return part
        found = found.dequantized()
    if tensor.is_quantized:
        warn_once("quantized weights of some matrices are dequantized when they are loaded, since "
                  "kernels support no act-order and no scales of more than 15 bits, and need "
                  "AVX-512 for NF4, groups of 16, 32, 64 or 128 inputs, or of multiples of these, "
                  "and rows of at most 64 KiB in the model's dtype")
    return found.to(dtype)


def are_one(parts: list[Tensor], rows: list[int], inputs: int, dtype: torch.dtype,
            is_whole: bool = True) -> bool:
    """Whether one product can combine some parts: all are packed for the same kernel, with the same
    inputs. If they are whole, not halves, each part but the last must fill whole blocks of
    outputs."""
    if any(part.ndim > 1 for part in parts):
        return False
    forms = [layout.form_of(part) for part in parts]
    kinds = {(form.width == order.FLOAT8, layout.padding(inputs, form.group, dtype))
             for form in forms}
    follow = not is_whole or not any(count % forms[0].block for count in rows[:-1])
    return len(kinds) == 1 and follow


def one_matrix(parts: list[Tensor], rows: list[int], inputs: int, dtype: torch.dtype) -> Tensor:
    """Returns some parts, packed or not, as one matrix in `dtype`."""
    found = [part if part.ndim == 2 else dequantized([part], [count], inputs, dtype)
             for part, count in zip(parts, rows)]
    # the head and the embedding can share it
    return found[0] if len(found) == 1 else torch.cat(found)


@functools.cache
def packed_class(kind: Any, own: Any) -> Any:
    """Returns a class like `own`, with packed weights: one for all modules of a class."""
    return type(own.__name__, (kind, own), {})


class Loading:
    """Replaces modules of one model, then packs their weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # the last tensor: the head and the embedding can have the same, one after the other
        self.last: tuple[Any, Any] = None, None
        # by the storage of a parameter: its module, the module's own class, and the loaded parts
        self.modules: dict[int, tuple[Any, type, dict[int, Tensor]]] = {}

    def place(self, model: nn.Module, device: str) -> None:
        """Allocates memory for all weights but those that will be packed."""
        for module in [*model.modules()]:
            if hasattr(module, "gate_up_proj") and kind_of(module) is GatedMLP:
                vars(module.gate_up_proj).update(halves=2, is_fused=True)
        embedding: Any = model.embed_tokens
        linears: Any = model.modules()
        taken = {module: QuantizedLinear for module in linears
                 if kind_of(module) is PackedLinear}
        taken |= {embedding: QuantizedEmbedding}
        weights = [module._parameters.pop("weight") for module in taken]
        place_on(model, device)
        for (module, kind), weight in zip(taken.items(), weights):
            # the weight comes first, as it did before
            module._parameters = {"weight": weight} | module._parameters
            own: Any = type(module)
            self.modules[storage_of(weight)] = module, own, {}
            module.__class__ = packed_class(kind, own)

    def read(self, tensor: Stored, target: Tensor) -> Tensor:
        """Reads a tensor of a file. If it is packed, the result has only a shape."""
        if not target.is_meta:
            return tensor[:]
        module, own, parts = self.modules[storage_of(target)]
        if self.last[0] is not tensor:
            # frees it
            self.last = None, None
            self.last = tensor, in_packed_form(tensor, self.dtype)
        parts[target.storage_offset() // target.shape[1]] = self.last[1]
        rows = [*getattr(module, "parts", {own: module._parameters["weight"].shape[0]}).values()]
        if len(parts) == len(rows):
            self.finish(module, own, [parts[first] for first in sorted(parts)], rows)
            parts.clear()
        return torch.empty(tensor.get_shape(), device="meta")

    def finish(self, module: Any, own: type, parts: list[Tensor], rows: list[int]) -> None:
        """Gives a module its packed parts; dequantizes them where there is no kernel for them."""
        is_linear = isinstance(module, QuantizedLinear)
        inputs = module._parameters["weight"].shape[1]
        fit = are_one(parts, rows, inputs, self.dtype, is_linear and module.halves == 1)
        if fit and is_linear:
            return module.keep(parts, rows, self.dtype)
        if fit:
            module._parameters["weight"] = without_weight(self.dtype)
            return module.register_buffer("part_0", parts[0], persistent=False)
        if any(part.ndim == 1 for part in parts):
            warn_once("quantized weights of some fused projections are dequantized when they are "
                      "loaded, since one product cannot combine all of their parts")
        weight = one_matrix(parts, rows, inputs, self.dtype)
        for name in ("halves", "is_fused"):
            vars(module).pop(name, None)
        module.__class__ = own
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
