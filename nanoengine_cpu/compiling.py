"""Kernels: how numba compiles them, keeps them on disk, and runs them on all threads.

A kernel is what one thread does. All threads run it at the same time, and each does its share:

    def kernel(phase, thread, threads, arguments_at):
        x, out, rows = numbers_at(arguments_at, 3)
        for r in range(*share(rows, thread, threads)):
            …

In compiled form it is called as kernel(x, out, rows), with int64 numbers, most of them addresses.
Where a kernel has several phases, each begins when all threads have ended the one before.

numba runs its loops on OpenMP where it can. On Linux that is the very libgomp that torch has
loaded (`memory.py` sees to it, for ARM): there is one pool of threads, and the two never fight over
the cores. numba compiles a loop over threads four times, with all that it calls. So there is one
such loop, `run_phases`, which calls kernels by their addresses.
"""

import ctypes
import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import cfunc, njit, prange, types
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from torch import get_num_threads

from nanoengine_cpu.vectors import instruction

# Each message once in a process: compiling one kernel raises many events, and a model has many
# products.
say_once = functools.cache(logging.getLogger(__name__).info)
warn_once = functools.cache(logging.getLogger(__name__).warning)

# numba imports this when it first compiles. Ctrl-C in there would leave it half imported, and
# nothing could be compiled any more.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

# of a kernel, and of the loop that runs it
SIGNATURE = "void(int64, int64, int64, int64)"
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore


class Announcement(numba.core.event.Listener):
    """Says, once, that kernels are being compiled, which takes seconds."""

    def on_start(self, event):
        say_once("compiling the kernels, which takes seconds; they are kept on disk")

    on_end = on_start


def compile_cached(jit: Any, function: Any) -> Any:
    """Returns what `jit` makes of a function, from numba's cache on disk if it has it.

    Where the cache cannot be read or written, it warns, and the function is compiled without.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    # numba looks for changes only in the function's own file, not in those of what it calls
    function.__qualname__ = f"{function.__name__}-{zlib.crc32(sources):08x}"
    folder = f"{Path(__file__).parent}/__pycache__ or the user's cache folder"
    try:
        folder = FunctionCache(function).cache_path
        with numba.core.event.install_listener("numba:run_pass", Announcement()):
            return jit(cache=True)(function)
    # a folder that is read-only, a full disk, a damaged file: all kinds of errors
    except Exception as error:
        warn_once(f"numba cannot use {folder}: kernels are compiled anew in each process ({error})")
        return jit()(function)


@instruction(types.void)
def call_at(builder, function, phase, thread, threads, arguments):
    """Calls a compiled kernel, whose address is `function`."""
    numbers = phase, thread, threads, arguments
    kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
    builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)


@functools.cache
def run_phases() -> Callable:
    """run(function, phases, threads, arguments): runs all phases of a kernel, by its address."""
    def run(function, phases, threads, arguments):
        for phase in range(phases):
            for thread in prange(threads):
                call_at(function, phase, thread, threads, arguments)

    return compile_cached(functools.partial(njit, SIGNATURE, parallel=True), run)


def compile_kernel(kernel: Callable, phases: int = 1) -> Callable[..., None]:
    """Returns the compiled kernel: a function of its arguments, which runs it on all threads."""
    compiled = compile_cached(functools.partial(cfunc, SIGNATURE, error_model="numpy"), kernel)
    run = run_phases()

    @functools.wraps(kernel)
    def launch(*arguments: int) -> None:
        # kept until the kernel has ended
        numbers = (ctypes.c_int64 * len(arguments))(*arguments)
        run(compiled.address, phases, get_num_threads(), ctypes.addressof(numbers))
    return launch
