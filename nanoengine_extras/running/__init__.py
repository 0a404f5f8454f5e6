"""What several features of this folder share: the memory of the host, and of a container; and a
check for forked processes."""

import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.features import kernels

# Linux puts each process into control groups (cgroups), one inside the other. Each can have a
# limit, which is how containers work. If a process takes more, the kernel kills it, without an
# error. psutil only knows the host. The files are described in the kernel's
# admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.

# files of a cgroup, in versions 2 and 1: its limit, the memory that its processes use, and the part
# of this that caches files, which the kernel takes back before it kills a process
FILES = (("memory.max", "memory.current", "inactive_file"),
         ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
# the cgroups of a process, and where their files are: see proc_pid_cgroup(5), …_mountinfo(5)
CGROUP = r"^\d+:(?:[^:]*,)?(memory|)(?:,[^:]*)?:(.*)"
MOUNT = r"^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup(2?) "


def free_memory(host: int, root: Path = Path("/")) -> int:
    """Returns the smallest of the host's free bytes and of what each cgroup has left.

    root: where the file system begins; without Linux's files there, the result is `host`.
    """
    groups = dict(find(CGROUP, root / "proc/self/cgroup"))
    for top, point, version in find(MOUNT, root / "proc/self/mountinfo"):
        # a container may see only the cgroups below `top`
        own = groups.get("" if version else "memory", top).removeprefix(top)
        folder = root / point[1:] / own.strip("/")
        # with the cgroups around it; the folders further out have no such files
        for group in (folder, *folder.parents):
            for limit, usage, cache in FILES:
                for most in find(r"^\d+", group / limit):
                    used = find(r"^\d+", group / usage)
                    unneeded = find(rf"^{cache} (\d+)", group / "memory.stat")
                    host = min(host, int(most) - sum(map(int, used)) + sum(map(int, unneeded)))
    return max(0, host)


def find(pattern: str, file: Path) -> list:
    """Returns the matches of a pattern in one of the kernel's files; none if it cannot be read."""
    with suppress(OSError):
        return re.findall(pattern, file.read_text(errors="ignore"), re.MULTILINE)
    return []


def pin(tensor: Tensor) -> Tensor:
    """Lets a GPU copy from this host memory while the host continues; returns the tensor.

    `Tensor.pin_memory` would round its size up to a power of two.
    """
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    weakref.finalize(tensor, cuda.cudaHostUnregister, tensor.data_ptr())
    return tensor


def check_process(config: Any) -> Callable[[], object]:
    """Raises RuntimeError if this is a forked process, in which a computation would hang. Returns a
    function that makes this check again, and also raises in any later fork of this process.

    config: the `EngineConfig`
    """
    library = kernels(config.device, config.kernels)
    return library.check_process() if hasattr(library, "check_process") else lambda: None
