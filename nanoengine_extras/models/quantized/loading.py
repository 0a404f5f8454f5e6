"""Loads quantized weights into the engine's decoder, where their numbers stay packed.

`place` leaves the weights of linears and of the embedding without memory, and `read` only compares
their shapes. At last, `pack_weights` reads and packs them one by one, so that at most one matrix
exists in the model's dtype, and replaces their modules by ones with packed numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine_extras.cpu.compiling import warn_once
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.modules import GatedMLP, PackedLinear, kind_of
from nanoengine_extras.cpu.packed import PackedWeight, QuantizedEmbedding
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import Opened, Stored

# a matrix of a file: packed, or in the model's dtype
Part = PackedWeight | Tensor


def pack(weight: Grouped, dtype: torch.dtype,
         space: Callable[[int], Tensor] = in_huge_pages) -> PackedWeight | None:
    return PackedWeight.pack(
        weight.numbers, weight.scales, weight.zeros, weight.lows, weight.values, dtype,
        group=weight.group_size(), bits=weight.bits, above=weight.above, space=space)


def read_part(tensor: Stored, dtype: torch.dtype,
              space: Callable[[int], Tensor] = in_huge_pages) -> Part:
    """Reads a matrix as packed numbers, or if the kernels have no form for it, in `dtype`."""
    found = tensor.load()
    if isinstance(found, Grouped):
        part = pack(found, dtype, space)
        if part is not None:
            return part
        found = found.dequantized()
    if tensor.is_quantized:
        warn_once("quantized weights of some matrices are dequantized when they are loaded, since "
                  "kernels support no act-order and no scales of more than 15 bits, and need "
                  "AVX-512 for NF4, groups of 16, 32, 64 or 128 inputs, or of multiples of these, "
                  "and rows of at most 64 KiB in the model's dtype")
    return found.to(dtype)


def with_rows(module: Any, parts: list[Any], halves: int = 1) -> Any:
    """Returns a module for the place of another, with packed rows; or the module itself, with rows
    in the model's dtype, if not all parts are packed, or if one product cannot compute them all."""
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    if len(packed) == len(parts):
        if isinstance(module, nn.Embedding):
            is_plain = type(module).forward is nn.Embedding.forward
            return QuantizedEmbedding(parts[0], None if is_plain else module)
        found: Any = PackedWeight.linear(parts, halves)
        if found is not None:
            found.bias = module.bias
            return found
    if packed:
        warn_once("quantized weights of some fused projections are dequantized when they are "
                  "loaded, since one product cannot combine all of their parts")
    rows = [part if isinstance(part, Tensor) else part.dequantized() for part in parts]
    # the head and the embedding can share it
    whole = rows[0] if len(rows) == 1 else torch.cat(rows)
    module.weight = nn.Parameter(whole, requires_grad=False)
    return module


# ------------------------------------------------------------------------- the engine's decoder


def can_be_packed(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or kind_of(module) is PackedLinear


def place(model: nn.Module, device: str) -> None:
    """Allocates memory for all weights but those that can be packed."""
    for module in model.modules():
        if not can_be_packed(module):
            module.to_empty(device=device, recurse=False)
        elif getattr(module, "bias", None) is not None:
            empty = torch.empty_like(module.bias, device=device)  # type: ignore[arg-type]
            module.bias = nn.Parameter(empty, requires_grad=False)


def read(tensor: Stored, target: Tensor) -> Tensor:
    """Reads a tensor of a file. If it can be packed, the result has only a shape."""
    return torch.empty(tensor.get_shape(), device="meta") if target.is_meta else tensor[:]


def pack_weights(tensors: Opened, dtype: torch.dtype, model: Any) -> Any:
    """Reads the weights that `place` has left out, packed if possible. Returns the model."""
    tensors = Opened({name.removeprefix("model."): each for name, each in tensors.items()})
    last: dict[Stored, Part] = {}
    for path, parent in [*model.named_modules()]:
        has_halves = hasattr(parent, "gate_up_proj") and kind_of(parent) is GatedMLP
        for name, module in [*parent.named_children()]:
            if not can_be_packed(module):
                continue
            names = [f"{path}.{own}.weight" for own in getattr(module, "parts", [name])]
            stored = [tensors[each.removeprefix(".")] for each in names]
            parts = [last[each] if each in last else read_part(each, dtype) for each in stored]
            # the head comes after the embedding, and can have the same tensor
            last = dict(zip(stored, parts)) if isinstance(module, nn.Embedding) else {}
            halves = 2 if has_halves and name == "gate_up_proj" else 1
            setattr(parent, name, with_rows(module, parts, halves))
    return model
