"""Tests whether one module can take the place of another: both must compute the same.

A class has a different name in each model, so a module is recognised by what it computes. Each kind
of part says how a module of its kind runs on random inputs: norms and MLPs in modules.py, experts
in experts.py, attention and layers in own_layers.py.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALVES = (torch.half, torch.bfloat16)
# functions that look at a tensor, or at a part of it: `each.dtype` is a `__get__`
VIEWING = {"__get__", "__getitem__", "transpose", "unbind", "chunk", "split", "view", "t"}
# results differ if they are more than this many roundings apart
MOST_ROUNDINGS = 16


def is_same(one: nn.Module, two: nn.Module, run: Callable[[Any, torch.dtype], list[Tensor]],
            dtype: torch.dtype = torch.float32) -> bool:
    """Whether two modules give the same results, up to rounding, in float32 and in a dtype.

    run: from a module and a dtype to its results for random inputs. It raises an error of any kind
        if the module needs other inputs.
    """
    for kind in {torch.float32, dtype}:
        with InFloat32() if kind == torch.float32 else nullcontext():
            try:
                pairs = [*zip(run(one, kind), run(two, kind), strict=True)]
                if not all(are_close(*pair, kind) for pair in pairs):
                    return False
            except Exception:
                return False
    return True


def are_close(one: Tensor, two: Tensor, dtype: torch.dtype) -> bool:
    """Whether all rows are equal, except for rounding in a dtype."""
    error = (one.double() - two.double()).norm(dim=-1)
    most = one.double().norm(dim=-1) * MOST_ROUNDINGS * torch.finfo(dtype).eps
    return one.shape == two.shape and bool((error < most).all())


def random_rows(count: int, size: int, largest: float) -> Tensor:
    """Returns small and large rows, to reveal modules that clamp their values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, size, generator=generator, dtype=torch.float32)
    scales = torch.logspace(-3, math.log10(largest), count, dtype=torch.float32)
    return rows * scales[:, None]


class InFloat32(TorchFunctionMode):
    """Lets a model compute in float32: each function gets weights that are converted for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in VIEWING:
            result = function(*args, **(kwargs or {}))
            return torch.float32 if any(result is each for each in HALVES) else result
        options = widened([*(kwargs or {}).items()])
        return widened(function(*widened(args), **dict(options)))


def widened(value: Any) -> Any:
    """A value with its halves in float32. `tree_map` would take most of the time of a check."""
    if type(value) in (tuple, list):
        return type(value)(map(widened, value))
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
