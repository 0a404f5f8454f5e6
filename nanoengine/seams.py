"""Where the engine meets what is outside of it: a user's input, optional features, fast kernels.

The engine needs none of the packages beside it. It reaches each of them here alone, by name:

    nanoengine_extensions   `extension(name)`: a module, when a user asks for its feature
    nanoengine_cpu          `kernels(device)`: functions on tensors that replace those of this file,
                            as `_heapq` in C replaces those of heapq in CPython

For a GPU, `kernels` would find a library nanoengine_gpu, which is not there yet.
"""

from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

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
    """Returns the functions below, for "cpu" or "cuda", replaced by those of its library."""
    name = "nanoengine_gpu" if device == "cuda" else "nanoengine_cpu"
    library = vars(import_module(name)) if find_spec(name) else {}
    return SimpleNamespace(**globals() | library)


# attention over the paged KV cache in one kernel, if a library has it
paged_attention: Any = None


def optimize(model: nn.Module, **options: bool) -> bool:
    """Gives the modules of a finished model faster forwards; returns whether a row of a step then
    has the same bits whatever rows are beside it."""
    return False


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest number of each row, and its first place."""
    return x.max(dim=-1)


def columns_above(x: Tensor, thresholds: Tensor, count: int) -> Tensor:
    """Returns columns of x. A column may be left out if no row has a number there that reaches its
    threshold, and is among its `count` largest (0: any)."""
    return torch.arange(x.shape[1], device=x.device)


def has_bfloat16() -> bool:
    """Whether a CPU computes faster in bfloat16 than in float32."""
    return False


def check_process() -> None:
    """Raises RuntimeError if this process is a fork in which computing would hang."""


def end_threads() -> None:
    """Ends threads of this thread's operators that would slow down those of another thread."""


def mem_get_info() -> tuple[int, int]:
    """Returns the free and the total bytes of the host's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
