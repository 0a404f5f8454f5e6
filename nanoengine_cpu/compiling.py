"""numba, set up for the kernels: its threads, and its cache on disk.

numba runs its loops on OpenMP where it can. On Linux that is the very libgomp that torch has
loaded (`memory.py` sees to it, for ARM): there is one pool of threads, and the two never fight over
the cores.
"""

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.registry import cpu_target

# Each message once in a process: compiling one kernel raises an event for each function in it, and
# a model has many products.
say_once = functools.cache(logging.getLogger(__name__).info)
warn_once = functools.cache(logging.getLogger(__name__).warning)

# numba imports this when it first compiles. Ctrl-C in there would leave it half imported, and
# nothing could be compiled any more.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore


class Announcement(numba.core.event.Listener):
    """Says, once, that kernels are being compiled, which takes seconds."""

    def on_start(self, event):
        say_once("compiling the kernels, which takes seconds; they are kept on disk")

    on_end = on_start


def compile_kernel(kernel: Callable, signature: str) -> Callable:
    """The compiled kernel, from numba's cache on disk if it has it.

    Where the cache cannot be read or written, it warns, and the kernel is compiled without.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    # numba looks for changes only in the kernel's own file, not in those of what the kernel calls
    kernel.__qualname__ = f"{kernel.__name__}-{zlib.crc32(sources):08x}"
    jit: Any = functools.partial(njit, parallel=True, error_model="numpy")
    folder = f"{Path(__file__).parent}/__pycache__ or the user's cache folder"
    try:
        compiled = jit(cache=True)(kernel)
        folder = compiled.stats.cache_path
        with numba.core.event.install_listener("numba:compile", Announcement()):
            compiled.compile(signature)
    # a folder that is read-only, a full disk, a damaged file: all kinds of errors
    except Exception as error:
        warn_once(f"numba cannot use {folder}: kernels are compiled anew in each process ({error})")
        compiled = jit(signature)(kernel)
    return compiled
