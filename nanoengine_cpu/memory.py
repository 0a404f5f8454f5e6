"""What the operating system and its libraries do for us: memory, threads, what the CPU can."""

import ctypes
import functools
import mmap
import os
import re
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path

import numba
import torch


def read_system(name: str) -> str:
    """What Linux writes into a file of /proc; nothing on other systems."""
    with suppress(FileNotFoundError):
        return os.fsdecode(Path("/proc", name).read_bytes())
    return ""


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16. Linux says so; LLVM does not, for ARM."""
    return bool(re.search(r"\b(avx512_|amx_)?bf16\b", read_system("cpuinfo")))


def in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory of the system, in pages of 2 MiB where it has them, as (num_bytes,) uint8.

    Each page is cleared when it is first written to, in a sixth of the time of pages of 4 KiB.

    Raises MemoryError for more than the system gives.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}.") from error
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# ------------------------------------------------------------------------------ forks


@functools.cache
def is_fork(process: int) -> bool:
    """Whether this process was forked, and runs the same program since. Linux alone tells."""
    flags = read_system("self/stat").rpartition(")")[2].split()[6:7]
    # PF_FORKNOEXEC
    return any(int(each) & 0x40 for each in flags)


@functools.cache
def inherits_numba(process: int) -> bool:
    """Whether numba has started threads before the fork: it ends a fork that computes in threads.
    The first call counts."""
    return is_fork(process) and numba.np.ufunc.parallel._is_initialized


@functools.cache
def can_compute(process: int) -> bool:
    """Whether the thread that went through a fork can compute in OpenMP's threads.

    If it did so before the fork, OpenMP waits forever for threads that are missing here, and tells
    nobody. So a fork of this fork tries it, and an alarm ends it after 5 seconds.
    """
    # more than Python's: it has computed here
    if len(os.listdir("/proc/self/task")) > threading.active_count():
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
    """Whether this process has OpenMP's threads of the calling thread, if there are any."""
    process = os.getpid()
    # threads that began after a fork miss nothing
    is_main = threading.current_thread() is threading.main_thread()
    return not (is_main and is_fork(process)) or (
        torch.get_num_threads() > 1 and can_compute(process))


def check_process(made_in: int | None = None) -> int:
    """Returns the number of this process. Raises RuntimeError in a fork in which PyTorch would hang
    since its threads are missing: not if PyTorch computes in one thread, or had not computed.

    made_in: the process that has made what is used now; it cannot be used in a fork of it
    """
    process = os.getpid()
    # also while PyTorch computes in one thread, since the first call counts
    inherits = inherits_numba(process)
    is_broken = torch.get_num_threads() > 1 and (inherits or not has_threads())
    if is_broken or made_in not in (None, process):
        raise RuntimeError("this process was forked from one that computes in threads, and would "
                           "hang: start it by multiprocessing's 'spawn'")
    return process


# ---------------------------------------------------------------------------- threads

# Libraries that are loaded from now on find torch's libgomp before any other. On ARM it has a name
# of its own, and numba would otherwise load the system's, with other threads. There can be another
# one by now: one that replaces torch's (LD_PRELOAD), or one of some other package.
files = set(re.findall(r"(?m)/.*/libgomp[-\w]*\.so[.\d]*$", read_system("self/maps")))
ordered = sorted(files, key=lambda f: not f.startswith(str(Path(torch.__file__).resolve().parent)))
LIBGOMPS = [ctypes.CDLL(file, ctypes.RTLD_GLOBAL) for file in ordered]


def stack_size() -> int:
    """The least stack that a thread of a kernel gets, in bytes: by `ulimit -s`, and by variables
    that libgomp reads, "512", "512 K" or "1m"; without a unit, they are in KiB."""
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
    # when numba starts, it sets the OpenMP that both share to use every core
    torch.set_num_threads(num_threads)


def end_threads() -> None:
    """Ends the OpenMP threads that belong to the calling thread; its next product starts them anew.

    Each thread that has ever computed keeps a team of its own. Once all teams together have more
    threads than there are cores, libgomp's no longer spin while they wait: a small model took 40 %
    longer where it was called in two threads in turn. Other OpenMPs are left alone.
    """
    # it would wait for threads that are missing
    if has_threads():
        for libgomp in LIBGOMPS:
            # libgomp before GCC 9 does not have this function
            with suppress(AttributeError):
                libgomp.omp_pause_resource_all(1)  # omp_pause_soft
