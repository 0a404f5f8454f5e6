"""Stands in for tensors of files while transformers fills a model, and tells where each one goes.

transformers renames tensors, ties them, and merges those of experts. It does so with `Origin`s,
which have no numbers: each parameter of the model then says from which tensors it was made.

    experts.0.gate_proj.weight ──┐
    experts.0.up_proj.weight ────┴─ stack, cat ──>  gate_up_proj.parts = [[gate, up], …]
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# they return the same numbers
SAME = ("detach", "alias", "clone", "_to_copy", "view")


class Origin(Tensor):
    """A tensor of a model, without numbers.

    sources: itself, and those of which it can be a view
    parts: the matrices of files (`Stored`) whose rows it concatenates; if it has three dimensions,
        such a list for each of its matrices; None: it was made in another way
    """

    parts: Any
    sources: list[Any]

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, parts: Any, sources: Any = ()) -> Any:
        made: Any = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.parts, made.sources = parts, [made, *sources]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "equal":
            return torch.equal(*map(numbers_of, args))
        found = func(*tree_map(as_meta, args), **tree_map(as_meta, kwargs or {}))
        first = args[0] if isinstance(args[0], list) else [args[0]]
        if func._schema.is_mutable:
            # written values are not in the files
            for each in first[0].sources:
                each.parts = None
            return first[0]
        if not isinstance(found, Tensor):
            return [Origin(each.shape, each.dtype, None, first[0].sources) for each in found]
        dim = args[1] if len(args) > 1 else 0
        parts = None
        if all(isinstance(each, Origin) and each.parts for each in first):
            of_all = [each.parts for each in first]
            if name in SAME and (found.shape, found.dtype) == (first[0].shape, first[0].dtype):
                parts = of_all[0]
            elif name == "stack" and dim == 0:
                parts = of_all
            elif name == "cat" and dim == found.ndim - 2:
                parts = joined(of_all, dim)
        return Origin(found.shape, found.dtype, parts, getattr(first[0], "sources", ()))


def joined(of_all: list[Any], dim: int) -> list[Any]:
    """Returns the parts of matrices whose rows are concatenated."""
    if dim == 0:
        return [part for parts in of_all for part in parts]
    return [joined([*each], 0) for each in zip(*of_all)]


def as_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Origin):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def numbers_of(value: Any) -> Tensor:
    """Returns the numbers that a matrix will have."""
    if not isinstance(value, Origin):
        return value.float()
    return torch.cat([part.read() for part in value.parts]).float()
