"""One kernel for each of the model's small operations: norm, rotation and SwiGLU.

PyTorch would launch a kernel for each of their products and sums. Importing this file replaces
these functions of nanoengine/model.py; on a CPU they still run unchanged.
"""

import functools
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine import model


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the function one kernel on a GPU. On a CPU, and for no tokens, it runs unchanged."""
    @functools.wraps(function)
    def run(x: Tensor, *others: Any) -> Tensor:
        on_gpu = x.is_cuda and len(x) > 0
        return (compiled(function) if on_gpu else function)(x, *others)
    return run


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a kernel of a function, by torch.compile, or the function if that cannot work.

    The first dimension of each matrix counts tokens. All others are constants of a model: each has
    its own kernels, for one token and for several.
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
    """Whether torch.compile has what Triton needs. Warns if not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return True
    logging.getLogger("nanoengine").warning("torch.compile lacks a C compiler or Python.h")
    return False


for name in ("rms_norm", "rotate", "swiglu"):
    setattr(model, name, fused(getattr(model, name)))
