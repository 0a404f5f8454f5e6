"""`@fused`: torch.compile for the few small functions of the model, on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On a GPU torch.compile makes one kernel of the function; on a CPU, and for no tokens, it runs
    as it stands.

    The first dimension of each matrix counts tokens. All others are constants of a model: each gets
    kernels of its own, for one token and for several.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False))

    @functools.wraps(function)
    def run(x: Tensor, *others: Any) -> Tensor:
        if not x.is_cuda or len(x) == 0:
            return function(x, *others)
        for argument in (x, *others):
            if isinstance(argument, Tensor) and argument.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(x, *others)
    return run
