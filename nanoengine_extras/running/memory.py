"""Finds how much memory is left for the KV cache. The runner calls this unless num_kv_blocks is
given.

On a CPU it is at most a quarter of the free memory, or of what a container has left
(`free_memory`). On a GPU it is
measured, not guessed: the weights are loaded, all CUDA graphs are captured, and the largest step
runs once. The KV cache gets the rest of `gpu_memory_utilization`.
"""

import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import psutil
import torch

from nanoengine.engine import Engine
from nanoengine.features import asked_by, is_installed
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine_extras import OBSERVERS

# with these parameters, a step needs the most memory
MOST = {"min_p": 0.1, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {0: 1.0}, "logprobs": 20}


def free_bytes(runner: ModelRunner, max_model_len: int) -> int:
    """Returns the bytes for the KV cache, of each rank."""
    if runner.device == "cuda":
        return max(0, free_bytes_on_gpu(runner, max_model_len))
    config = runner.config
    free = free_memory(psutil.virtual_memory().available)
    # no more than the sequences can use
    num_blocks = config.max_num_seqs * -(-max_model_len // config.block_size)
    return min(free // (4 * config.tensor_parallel_size), num_blocks * runner.block_bytes)


def free_bytes_on_gpu(runner: ModelRunner, max_model_len: int) -> int:
    """Returns `gpu_memory_utilization` of the GPU's memory, minus the peak of everything else,
    other processes included."""
    # left over from earlier engines
    torch.cuda.empty_cache()
    # block 0 alone is enough for a trial step; graphs are captured first, since capturing frees the
    # memory that the allocator keeps
    runner.allocate(0, max_model_len)
    batch = largest_batch(runner)
    runner.run(batch, *runner.prepare(batch))
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    return int(free - total * (1 - runner.config.gpu_memory_utilization))


def largest_batch(runner: ModelRunner) -> Batch:
    """Returns the step that takes the most memory: as many tokens as a step can have, at the end of
    as few sequences as possible, and a row for each sequence that could be sampled, with the
    parameters that take the most."""
    config, longest = runner.config, runner.max_model_len
    num_seqs = min(config.max_num_seqs, -(-config.max_num_batched_tokens // longest))
    num_tokens = min(config.max_num_batched_tokens // num_seqs, longest)
    features = {each.name: each.metadata.get("feature") for each in fields(SamplingParams)}
    params = SamplingParams(**{  # type: ignore[arg-type]
        name: value for name, value in MOST.items()
        if not (feature := features[name]) or is_installed(feature)})
    files = [*asked_by(params)]
    runner.features.load(files)
    # a dummy, which uses block 0
    seq = Sequence("", [0] * longest, longest, longest, params)
    seq.edits = tuple(OBSERVERS[file] for file in files)
    return Batch(sequences=[seq] * num_seqs, starts=[longest - num_tokens] * num_seqs,
                 num_tokens=[num_tokens] * num_seqs,
                 sampled=[Row(i % num_seqs, seq, longest) for i in range(config.max_num_seqs)])


class AllWritten(Feature):
    """Writes the whole KV cache at the start. The system gives memory to a page when it is first
    written, so a server does not grow later."""

    def begin(self, engine: Engine) -> None:
        engine.runner.blocks.add_(0)


# ------------------------------------------------------------------------------ of a container

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


PARTS = {"free_bytes": free_bytes}
