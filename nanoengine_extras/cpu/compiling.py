"""Kernels: how numba compiles them, keeps them on disk, and runs them on all threads.

A kernel is the code of one thread. All threads run it at the same time. Each takes a few tasks, and
then more, until none are left. So a slow core computes less than a fast one.

    def kernel(phase, threads, arguments_at):
        x, out, rows = numbers_at(arguments_at, 3)
        for r in take_tasks(rows, 1, arguments_at):
            …

Once it is compiled, kernel(x, out, rows) returns a call: a list of numbers, most of them
addresses. A `Program` runs one call or many. Where a kernel has several phases, each begins when
all threads have ended the one before.

numba runs its loops on OpenMP where it can. On Linux it uses the libgomp that torch has loaded (on
ARM, `memory.py` makes sure of it). So the two share one pool of threads, and never compete for the
cores. numba compiles a loop over threads four times, with every function that it calls. So there is
one such loop, `run_calls`, which calls kernels by their addresses.
"""

import functools
import gc
import logging
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from torch import get_num_threads

try:
    import numba
except ValueError as error:
    raise ValueError(f"NUMBA_NUM_THREADS must be at least 1, or unset: {error}") from error
from numba import cfunc, njit, prange, types

from nanoengine_extras.cpu.memory import stack_size
from nanoengine_extras.cpu.vectors import add_atomic, array_at, inlined, instruction, numbers_at

# Each message appears once in a process: compiling one kernel raises many events, and a model has
# many products.
say_once = functools.cache(logging.getLogger(__name__).info)
warn_once = functools.cache(logging.getLogger(__name__).warning)

# numba imports this when it first compiles. Ctrl-C during the import would leave it half done, and
# nothing could be compiled any more.
numba.core.registry.cpu_target.typing_context.refresh()
numba.core.registry.cpu_target.target_context.refresh()

# of a kernel, and of what runs kernels
SIGNATURE = "void(int64, int64, int64)"
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore


class Announcement(numba.core.event.Listener):
    """Says, once, that kernels are being compiled, which takes a few seconds.

    Meanwhile Python's garbage collector skips all older objects, which saves a tenth of the time.
    """

    def on_start(self, event):
        say_once("compiling the kernels, which takes a few seconds; they are kept on disk")
        gc.freeze()

    def on_end(self, event):
        gc.unfreeze()


def compile_cached(jit: Any, function: Any) -> Any:
    """Returns a function compiled by `jit`, from numba's cache on disk if it is there.

    Where the cache cannot be read or written, it warns, and compiles without a cache.
    """
    # numba looks for changes only in the function's own file, not in those of its callees. Each
    # kernel gets files of its own: numba's index is wrong if two processes add to it at once
    folders = {Path(__file__).parent, Path(function.__code__.co_filename).parent}
    parts = sorted(file.read_bytes() for folder in folders for file in folder.glob("*.py"))
    parts.append(numba.core.serialize.dumps([c.cell_contents for c in function.__closure__ or ()]))
    version = f"{zlib.crc32(b''.join(parts)):08x}-{int(numba.config.OPT)}"  # type: ignore
    function.__qualname__ = f"{function.__name__}-{version}"
    folder = f"{Path(__file__).parent}/__pycache__ or the user's cache folder"
    try:
        folder = numba.core.caching.FunctionCache(function).cache_path
        with numba.core.event.install_listener("numba:run_pass", Announcement()):
            return jit(cache=True)(function)
    # a folder that is read-only, a full disk, a damaged file: all kinds of errors
    except Exception as error:
        warn_once(f"numba cannot use {folder}: kernels are compiled anew in each process ({error})")
        return jit()(function)


@instruction(types.void)
def call_at(builder, function, phase, threads, arguments):
    """Calls a compiled kernel, whose address is `function`."""
    kind = ir.FunctionType(ir.VoidType(), [phase.type] * 3)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [phase, threads, arguments])


@inlined()
def take_tasks(tasks, size, arguments_at):
    """The tasks that one thread takes, `size` neighbours at a time, until none are left.

    The number before a call's arguments counts the tasks that were taken.
    """
    first = add_atomic(arguments_at - 8, size)
    while first < tasks:
        for task in range(first, min(first + size, tasks)):  # noqa: UP028, not in numba
            yield task
        first = add_atomic(arguments_at - 8, size)


@functools.cache
def run_calls(in_threads: bool) -> Callable:
    """run(at, end, threads): runs the calls of kernels that lie between two addresses.

    in_threads: False for one thread, without OpenMP, which a fork can break
    """
    def run(at, end, threads):
        while at < end:
            function, phases, count, _ = numbers_at(at, 4)
            arguments = at + 4 * 8
            for phase in range(phases):
                array_at(arguments - 8, 1, np.int64)[0] = 0
                for _ in prange(threads):
                    call_at(function, phase, threads, arguments)
            at = arguments + count * 8

    # numba's cache tells functions apart by their names
    run.__name__ = "run_in_threads" if in_threads else "run_alone"
    options: Any = dict(parallel=in_threads, boundscheck=False)
    return compile_cached(functools.partial(njit, SIGNATURE, **options), run)


def compile_kernel(kernel: Callable, phases: int = 1) -> Callable[..., list[int]]:
    """Returns the compiled kernel: a function of its arguments that returns a call.

    Raises RuntimeError if it would not work with the settings of this process.
    """
    if stack_size() < 2**21:
        raise RuntimeError("kernels need stacks of 2 MiB: raise `ulimit -s` and OMP_STACKSIZE")
    for name in ("DISABLE_JIT", "BOUNDSCHECK"):
        if getattr(numba.config, name):
            raise RuntimeError(f"kernels cannot be compiled with NUMBA_{name}=1: unset it")
    options: Any = dict(error_model="numpy", boundscheck=False)
    compiled = compile_cached(functools.partial(cfunc, SIGNATURE, **options), kernel)
    run_calls(get_num_threads() > 1)

    # the 0 counts the tasks that threads have taken
    return lambda *arguments: [compiled.address, phases, len(arguments), 0, *arguments]


@functools.cache
def run_together() -> Callable[..., list[int]]:
    """kernel(at, end): runs the calls that lie between two addresses, each of one phase and not run
    before. A thread that finds no task left in one call goes on to the next."""
    def together(phase, threads, arguments_at):
        at, end = numbers_at(arguments_at, 2)
        while at < end:
            function, _, count, _ = numbers_at(at, 4)
            call_at(function, phase, threads, at + 4 * 8)
            at += (4 + count) * 8

    return compile_kernel(together)


class Program:
    """Calls of kernels, one after the other, each on all threads.

    The CPU's counterpart of a CUDA graph: Python makes the calls once, not in each step. A negative
    number stands for an argument of `run`: -1 for the first one, and so on.
    """

    def __init__(self, *calls: list[int]) -> None:
        self.numbers = np.concatenate(calls)
        self.at = self.numbers.ctypes.data
        # the bits of a negative float32 number are far smaller
        self.places = np.flatnonzero((self.numbers < 0) & (self.numbers > -100))
        self.which = -1 - self.numbers[self.places]

    def run(self, *arguments: int) -> None:
        self.numbers[self.places] = np.array(arguments, np.int64)[self.which]
        run_at(self.at, self.numbers.nbytes)


def run_call(call: list[int]) -> None:
    """Runs one call, once."""
    numbers = array("q", call)
    at, count = numbers.buffer_info()
    run_at(at, 8 * count)


def run_at(at: int, num_bytes: int) -> None:
    """Runs the calls at an address."""
    threads = get_num_threads()
    run_calls(threads > 1)(at, at + num_bytes, threads)


@functools.lru_cache
def bits_of_number(number: float) -> int:
    """Returns the bits of a float32 number, the form in which kernels take it."""
    return int(np.float32(number).view(np.int32))
