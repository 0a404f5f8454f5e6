"""Memory, threads and features of the CPU, as the operating system and its libraries provide
them."""

import ctypes
import functools
import importlib
import mmap
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numba
import torch


def read_system(name: str) -> str:
    """Returns the text of a file in /proc on Linux, and an empty string on other systems."""
    with suppress(FileNotFoundError):
        return os.fsdecode(Path("/proc", name).read_bytes())
    return ""


def count_threads() -> int:
    """Returns how many threads this process has besides Python's. Only Linux can tell."""
    count = re.search(r"(?m)^Threads:\s*(\d+)", read_system("self/status"))
    return int(count[1]) - threading.active_count() if count else 0


# numba loads this part of scipy where it is installed. It starts threads of its own, which in this
# process say nothing about OpenMP's
num_others = {os.getpid(): -count_threads()}
with suppress(ImportError):
    importlib.import_module("scipy.linalg.cython_blas")
num_others[os.getpid()] += count_threads()


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16. Linux says so; LLVM does not, for ARM."""
    return bool(re.search(r"\b(avx512_|amx_)?bf16\b", read_system("cpuinfo")))


def in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory from the system, in pages of 2 MiB if it has them, as (num_bytes,) uint8.

    The system clears each page when it is first written to, in a sixth of the time that pages of 4
    KiB take.

    Raises MemoryError for more than the system gives.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}.") from error
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class SharedPages:
    """Memory for many tensors that are smaller than a page of 2 MiB, such as those of experts. It
    lives as long as any of them. Any thread can call it."""

    def __init__(self) -> None:
        self.rest = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.lock = threading.Lock()

    def __call__(self, num_bytes: int) -> torch.Tensor:
        """Like `in_huge_pages`."""
        # each begins with a line of the cache
        size = -(-num_bytes // 64) * 64
        with self.lock:
            if len(self.rest) < size:
                self.rest = in_huge_pages(max(size, 2**26))
            taken, self.rest = self.rest[:num_bytes], self.rest[size:]
        return taken


def release_memory() -> None:
    """Gives free memory back to the system. glibc keeps the memory of large objects that are gone
    if small ones between them live on: up to half as much again as packed experts need."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# ------------------------------------------------------------------------------ forks


@functools.cache
def is_fork(process: int) -> bool:
    """Whether this process was forked, and has run the same program since. Only Linux can tell."""
    flags = read_system("self/stat").rpartition(")")[2].split()[6:7]
    # PF_FORKNOEXEC
    return any(int(each) & 0x40 for each in flags)


@functools.cache
def inherits_numba(process: int) -> bool:
    """Whether numba had started threads before the fork. If so, numba ends the fork when it
    computes in threads. The result of the first call is kept."""
    return is_fork(process) and numba.np.ufunc.parallel._is_initialized


@functools.cache
def can_compute(process: int) -> bool:
    """Whether the thread that called fork can compute in OpenMP's threads.

    If it did so before the fork, OpenMP silently waits forever for threads that are missing here.
    So a fork of this fork tries it, and an alarm ends it after 5 seconds.
    """
    # there are threads of OpenMP, so it has already computed in this process
    if count_threads() > num_others.get(process, 0):
        return True
    if (trial := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            torch.ones(2**20, dtype=torch.float32, device="cpu").exp()
        finally:
            os._exit(0)
    return os.waitpid(trial, 0)[1] == 0


def has_threads() -> bool:
    """Whether the OpenMP threads of the calling thread, if it has any, exist in this process."""
    process = os.getpid()
    # a thread that began after the fork has started its own
    is_main = threading.current_thread() is threading.main_thread()
    return not (is_main and is_fork(process)) or (
        torch.get_num_threads() > 1 and can_compute(process))


def check_process(made_in: int | None = None) -> Callable[[], object]:
    """Raises RuntimeError in a fork in which PyTorch would hang because its threads are missing. It
    does not hang if it computes in one thread, or computed nothing before the fork.

    made_in: the process that made the caller's object, which cannot be used in a fork

    Returns a function that checks the same later, for an object that was made in this process.
    """
    process = os.getpid()
    # also while PyTorch computes in one thread, since the result of the first call is kept
    inherits = inherits_numba(process)
    is_broken = torch.get_num_threads() > 1 and (inherits or not has_threads())
    if is_broken or made_in not in (None, process):
        raise RuntimeError("this process was forked from one that computes in threads, and would "
                           "hang: start it with multiprocessing's 'spawn'")
    return functools.partial(check_process, process)


# ---------------------------------------------------------------------------- threads

# Libraries that are loaded from now on find torch's libgomp before any other. On ARM its name
# differs, and numba would otherwise load the system's, with other threads. Another one can already
# be loaded: one that replaces torch's (LD_PRELOAD), or that of another package.
files = set(re.findall(r"(?m)/.*/libgomp[-\w]*\.so[.\d]*$", read_system("self/maps")))
ordered = sorted(files, key=lambda f: not f.startswith(str(Path(torch.__file__).resolve().parent)))
LIBGOMPS = [ctypes.CDLL(file, ctypes.RTLD_GLOBAL) for file in ordered]


def stack_size() -> int:
    """Returns the smallest stack that a kernel's thread can get, in bytes: from `ulimit -s` and
    libgomp's variables, whose values look like "512", "512 K" or "1m"; no unit means KiB."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    sizes = [limit] if limit > 0 else []
    for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE"):
        match = re.fullmatch(r"(?i)\s*(\d+)\s*([BKMG]?)\s*", os.environ.get(name, ""))
        sizes += [int(match[1]) << 10 * "BKMG".index(match[2].upper() or "K")] if match else []
    return min(sizes, default=2**23)


def limit_threads(*_: object) -> None:
    """Lets the kernels that this thread starts run on as many threads as PyTorch's operators.

    Raises RuntimeError if numba cannot start any.
    """
    check_process()
    num_threads = torch.get_num_threads()
    try:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore
    except ValueError as error:
        layer = numba.config.THREADING_LAYER  # type: ignore
        raise RuntimeError(f"numba cannot use NUMBA_THREADING_LAYER={layer}: unset it") from error
    # when numba starts, it makes the shared OpenMP use every core
    torch.set_num_threads(num_threads)


def end_threads() -> None:
    """Ends the OpenMP threads that belong to the calling thread; its next product starts new ones.

    Each thread that has computed keeps its own team. Once all teams together have more threads than
    there are cores, libgomp's threads no longer spin while they wait: a small model took 40 %
    longer when two threads called it in turn. Other versions of OpenMP are left alone.
    """
    # it would wait for threads that are missing
    if has_threads():
        for libgomp in LIBGOMPS:
            # libgomp before GCC 9 does not have this function
            with suppress(AttributeError):
                libgomp.omp_pause_resource_all(1)  # omp_pause_soft
