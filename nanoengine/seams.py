"""Where the engine meets what is outside of it: a user's input, optional features, fast kernels.

The engine needs none of the packages beside it. Only this file imports them, by name:

    nanoengine_extensions            `extension(name)`: a module, when a user asks for its feature
    nanoengine_cpu, nanoengine_gpu   `kernels(device)`: functions on tensors that replace those
                                     below and some of sampler.py, as `_heapq`, in C, replaces
                                     those of heapq in CPython
"""

from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# --------------------------------------------------------------------------- optional features


@cache
def has_extensions() -> bool:
    return find_spec("nanoengine_extensions") is not None


def extension(name: str) -> Any:
    """Returns a module of the extensions. Raises ValueError if they are not installed."""
    if not has_extensions():
        raise ValueError(f"{name} needs the package nanoengine_extensions, which is not installed")
    return import_module(f"nanoengine_extensions.{name}")


# ------------------------------------------------------------------------------ a user's input
# The engine itself refuses what would hang, compute something else in silence, or fail in the
# middle of a step. Strict types, and errors that name the nearest keyword, are an extension.


def rejected(name: str, value: Any, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={value!r:.1000} is not accepted: it must be {accepted}")


def check(options: Any, conditions: Any) -> None:
    """Raises ValueError for the first condition that does not hold.

    conditions: each the name of a field, whether the options can be used, and what is accepted.
    """
    for name, holds, accepted in conditions:
        if not holds(options):
            raise rejected(name, getattr(options, name), accepted.format(**vars(options)))


def naming(what: object) -> Any:
    """A context in which the extension turns an error that a library raises for some input into a
    ValueError that names the input. Without the extension, the error stays as it is."""
    return extension("checks").naming(what) if has_extensions() else nullcontext()


# --------------------------------------------------------------------------------- fast kernels


@cache
def kernels(device: str) -> Any:
    """Returns the functions below, for "cpu" or "cuda", replaced by those of its library.

    The library for a GPU needs Triton, which PyTorch brings along on Linux only.
    """
    needed = ["nanoengine_gpu", "triton"] if device == "cuda" else ["nanoengine_cpu"]
    library = vars(import_module(needed[0])) if all(map(find_spec, needed)) else {}
    return SimpleNamespace(**globals() | library)


def fastest(function: Any, device: torch.device) -> Any:
    """Returns the function of this name of a device's library, or this plain one if it has none."""
    return getattr(kernels(device.type), function.__name__, function)


# attention over the paged KV cache in one kernel, if a library has it
paged_attention: Any = None


def optimize(model: nn.Module, **options: bool) -> bool:
    """Gives the modules of a finished model faster forwards; returns whether a row of a step then
    has the same bits whatever rows are beside it."""
    return False


def has_bfloat16() -> bool:
    """Whether a CPU computes faster in bfloat16 than in float32."""
    return False


def check_process() -> None:
    """Raises RuntimeError if this process is a fork in which computing would hang."""


def end_threads() -> None:
    """Ends the OpenMP threads of this thread, which would slow down those of another thread."""
