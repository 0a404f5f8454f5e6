"""Loads quantized weights into the engine's decoder, where their numbers stay packed.

`Loading.place` leaves the weights of linears and of the embedding without memory. Each tensor of a
file is packed when it is read, so that at most one matrix exists in the model's dtype. When all
parts of a weight are there, its module is replaced by one with packed numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoengine_extras.cpu.compiling import warn_once
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.modules import GatedMLP, PackedLinear, kind_of
from nanoengine_extras.cpu.packed import PackedWeight, QuantizedEmbedding
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import Stored

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


def packed_module(module: Any, parts: list[Any], halves: int = 1) -> Any:
    """Returns a module for the place of another, with the rows of some parts. Returns None if these
    are not packed, or if one product cannot compute them all."""
    if not all(isinstance(part, PackedWeight) for part in parts):
        return None
    if isinstance(module, nn.Embedding):
        is_plain = type(module).forward is nn.Embedding.forward
        return QuantizedEmbedding(parts[0], None if is_plain else module)
    found = PackedWeight.linear(parts, halves)
    if found is not None:
        found.bias = getattr(module, "bias", None)  # type: ignore
    return found


def one_matrix(parts: list[Any]) -> nn.Parameter:
    """Returns the rows of some parts as a weight in the model's dtype."""
    found = [part if isinstance(part, Tensor) else part.dequantized() for part in parts]
    # the head and the embedding can share it
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return nn.Parameter(whole, requires_grad=False)


def storage_of(tensor: Tensor) -> int:
    """Returns a key that a parameter shares with its views, even if they have no `_base`."""
    return tensor.untyped_storage()._cdata


class Place(NamedTuple):
    """Where a module is in the model. halves: 2 for gates and ups of an MLP with a kernel.

    parts: of its weight, as far as they are loaded, by their first number in it
    """

    parent: nn.Module
    name: str
    halves: int
    parts: dict[int, Part]


class Loading:
    """Packs the weights of one model while they are read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # the last tensor: the head and the embedding can have the same, one after the other
        self.last: tuple[Any, Any] = None, None
        # by the storage of a weight
        self.places: dict[int, Place] = {}

    def place(self, model: nn.Module, device: str) -> None:
        """Allocates memory for all weights but those that can be packed."""
        for parent in model.modules():
            has_halves = hasattr(parent, "gate_up_proj") and kind_of(parent) is GatedMLP
            module: Any
            for name, module in parent.named_children():
                if isinstance(module, nn.Embedding) or kind_of(module) is PackedLinear:
                    halves = 2 if has_halves and name == "gate_up_proj" else 1
                    self.places[storage_of(module.weight)] = Place(parent, name, halves, {})
                    if getattr(module, "bias", None) is not None:
                        empty = torch.empty_like(module.bias, device=device)
                        module.bias = nn.Parameter(empty, requires_grad=False)
                else:
                    module.to_empty(device=device, recurse=False)

    def read(self, tensor: Stored, target: Tensor) -> Tensor:
        """Reads a tensor of a file. If it can be packed, the result has only a shape."""
        if not target.is_meta:
            return tensor[:]
        if tensor.get_shape() == [*target.shape]:
            place = self.places[storage_of(target)]
            if self.last[0] is not tensor:
                # frees it
                self.last = None, None
                self.last = tensor, read_part(tensor, self.dtype)
            place.parts[int(target.storage_offset())] = self.last[1]
            self.finish(place)
        return torch.empty(tensor.get_shape(), device="meta")

    def finish(self, place: Place) -> None:
        """Gives a module its weight if it has all parts."""
        module: Any = getattr(place.parent, place.name)
        parts = [place.parts[first] for first in sorted(place.parts)]
        if sum(part.shape[0] for part in parts) < module.weight.shape[0]:
            return
        found = packed_module(module, parts, place.halves)
        if found is not None:
            setattr(place.parent, place.name, found)
        else:
            if any(isinstance(part, PackedWeight) for part in parts):
                warn_once("quantized weights of some fused projections are dequantized when they "
                          "are loaded, since one product cannot combine all of their parts")
            module.weight = one_matrix(parts)
        place.parts.clear()
