"""One kernel for each of the model's small operations: norm, rotation and SwiGLU.

PyTorch would launch a kernel for each of their products and sums. Importing this file puts these
functions in place of those of nanoengine/model.py, which they still are on a CPU.
"""

import functools
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine import model


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On a GPU the function becomes one kernel. On a CPU, and for no tokens, it runs as it is."""
    @functools.wraps(function)
    def run(x: Tensor, *others: Any) -> Tensor:
        on_gpu = x.is_cuda and len(x) > 0
        return (compiled(function) if on_gpu else function)(x, *others)
    return run


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One kernel of a function of the model, by torch.compile; where that cannot work, itself.

    The first dimension of each matrix counts tokens. All others are constants of a model: each gets
    kernels of its own, for one token and for several.
    """
    if not can_compile():
        return function
    kernel = torch.compile(function, dynamic=False)

    def run(*arguments: Any) -> Tensor:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return kernel(*arguments)
    return run


@functools.cache
def can_compile() -> bool:
    """Whether torch.compile has what Triton needs. Warns where it has not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return True
    warnings.warn("slower model: torch.compile lacks a C compiler or Python.h", stacklevel=2)
    return False


for name in ("rms_norm", "rotate", "swiglu"):
    setattr(model, name, fused(getattr(model, name)))
