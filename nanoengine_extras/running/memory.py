"""Finds how much memory is left for the KV cache. The runner calls this unless num_kv_blocks is
given.

On a CPU it is at most a quarter of the free memory, or of what a container has left
(`free_memory`). On a GPU it is measured, not guessed: the weights are loaded, all CUDA graphs are
captured, and the largest step runs once. The KV cache gets the rest of `gpu_memory_utilization`.
"""

from typing import Any

import psutil
import torch

from nanoengine.engine import Engine
from nanoengine.features import is_installed
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine_extras import OBSERVERS
from nanoengine_extras.running import free_memory

# the parameters of features with which a step needs the most memory
MOST: dict[str, dict[str, Any]] = {
    "sampling.logprobs": {"logprobs": 20},
    "sampling.constraints": {"presence_penalty": 1.0, "logit_bias": {0: 1.0}}}


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
    files = [file for file in MOST if is_installed(file)]
    options = {name: value for file in files for name, value in MOST[file].items()}
    params = SamplingParams(min_p=0.1, top_p=0.9, **options)
    runner.features.load(files)
    # a dummy, which uses block 0
    seq = Sequence("", [0] * longest, longest, longest, params)
    seq.edits = tuple(OBSERVERS[file] for file in files)
    return Batch(sequences=[seq] * num_seqs, starts=[longest - num_tokens] * num_seqs,
                 num_tokens=[num_tokens] * num_seqs,
                 sampled=[Row(i % num_seqs, seq, longest) for i in range(len(runner.last_sampled))])


class AllWritten(Feature):
    """Writes the whole KV cache at the start. The system gives memory to a page when it is first
    written, so a server does not grow later."""

    def begin(self, engine: Engine) -> None:
        engine.runner.blocks.add_(0)


PARTS = {"free_bytes": free_bytes}
