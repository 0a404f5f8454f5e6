"""What the operating system and its libraries do for us: memory, threads, what the CPU can."""

import ctypes
import functools
import mmap
import os
import re
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


# the process that computed first: a fork of it inherits this number
first_process = functools.cache(os.getpid)


def check_process() -> None:
    """Raises RuntimeError in a process that was forked from one that computes: its threads are
    missing, and it would wait for them forever."""
    if os.getpid() != first_process():
        raise RuntimeError("this process was forked from one that computes in threads, and would "
                           "hang: start it by multiprocessing's 'spawn'")


# Libraries that are loaded from now on find torch's libgomp before any other. On ARM it has a name
# of its own, and numba would otherwise load the system's, with other threads. There can be another
# one by now: one that replaces torch's (LD_PRELOAD), or one of some other package.
files = set(re.findall(r"(?m)/.*/libgomp[-\w]*\.so[.\d]*$", read_system("self/maps")))
ordered = sorted(files, key=lambda f: not f.startswith(str(Path(torch.__file__).resolve().parent)))
LIBGOMPS = [ctypes.CDLL(file, ctypes.RTLD_GLOBAL) for file in ordered]


def limit_threads() -> None:
    """Lets the kernels that this thread starts run on as many threads as PyTorch's operators."""
    num_threads = torch.get_num_threads()
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore
    # when numba starts, it sets the OpenMP that both share to use every core
    torch.set_num_threads(num_threads)


def end_threads() -> None:
    """Ends the OpenMP threads that belong to the calling thread; its next product starts them anew.

    Each thread that has ever computed keeps a team of its own. Once all teams together have more
    threads than there are cores, libgomp's no longer spin while they wait: a small model took 40 %
    longer where it was called in two threads in turn. Other OpenMPs are left alone.
    """
    if os.getpid() == first_process():
        for libgomp in LIBGOMPS:
            # libgomp before GCC 9 does not have this function
            with suppress(AttributeError):
                libgomp.omp_pause_resource_all(1)  # omp_pause_soft
