"""What only a GPU needs: attention, CUDA graphs, memory that is measured, and fused functions.

The seams: on a GPU `choose_backend` (attention.py) imports this file, which adds its backends to
the table there. `ModelRunner` makes `CudaGraphs` where the backend can be held by graphs; it shows
them each decode step in `prepare`, and replays one in `forward`. `ModelRunner.measure_free_bytes`
asks here on a GPU. The functions that model.py marks as `fused` get their compiled form here.
"""

import functools
import os
import shutil
import sysconfig
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention import BACKENDS, Backend, flash_attention
from nanoengine.batch import Batch, Row
from nanoengine.config import EngineConfig
from nanoengine.model_runner import ModelRunner
from nanoengine.sampler import sample_plain
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import StepInputs, StepShape
from nanoengine_extensions.varlen import varlen_attention

# ---------------------------------------------------------------------------------- attention


def has_flash_attn(device: str, dtype: torch.dtype) -> bool:
    """Warns about a package that is there and cannot be imported."""
    try:
        return device == "cuda" and dtype != torch.float32 and bool(import_module("flash_attn"))
    except Exception as error:
        if find_spec("flash_attn"):
            warnings.warn(f"flash_attn is there, but cannot be imported: {error}", stacklevel=2)
        return False


def has_varlen(device: str, dtype: torch.dtype) -> bool:
    """PyTorch's kernel takes block tables from this version on."""
    return device == "cuda" and dtype != torch.float32 and torch.__version__ >= "2.12"


BACKENDS.update({
    "flash-attn": Backend(flash_attention, has_flash_attn, 3, block_multiple=256, has_graphs=True),
    "varlen": Backend(varlen_attention, has_varlen, 2, block_multiple=256, has_graphs=True)})


# -------------------------------------------------------------------------------- CUDA graphs


class CudaGraphs(dict[StepShape, Any]):
    """Decode steps that were recorded once for each size of a batch, and are launched as one.

    A graph holds a step from its numbers to tokens, as if all rows needed only a temperature; rows
    that need more are then sampled again, from the graph's logits.

    sizes: of the batches for which there are graphs; others are padded to the next one.
    """

    def __init__(self, runner: ModelRunner) -> None:
        # a cycle would keep the device's memory until the garbage collector runs
        self.runner = weakref.proxy(runner)
        self.sizes = bucket_sizes(runner.config.max_num_seqs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Records all graphs, the largest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            for longest_keys in reversed(key_buckets(size, self.runner.max_model_len)):
                buffer, shape = self.runner.prepare(dummy_batch(size, 1, longest_keys))
                step = StepInputs.from_buffer(buffer.to(self.runner.device), shape)
                # compiles, and warms up
                self.compute(step)
                graph = torch.cuda.CUDAGraph()
                # other threads may ask the device meanwhile: NCCL's does
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    outputs = self.compute(step)
                self[shape] = graph, step, outputs

    def compute(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """What a graph holds: logits, for rows that need more than a temperature, and tokens."""
        logits = self.runner.model.lm_head(self.runner.hidden_states(step))
        return logits, sample_plain(logits, step.draws)

    def pad(self, batch: Batch, longest_keys: int) -> tuple[Batch, int]:
        """A decode step with dummy sequences at its end, as long and as wide as a graph's."""
        size = at_least(len(batch), self.sizes)
        dummy = Sequence("", [0], 1, 1)
        missing = range(len(batch), size)
        padded = Batch(sequences=batch.sequences + [dummy] * len(missing),
                       starts=batch.starts + [0] * len(missing), num_tokens=[1] * size,
                       sampled=batch.sampled + [Row(index, dummy, 1) for index in missing])
        return padded, at_least(longest_keys, key_buckets(size, self.runner.max_model_len))

    def replay(self, shape: StepShape, buffer: Tensor) -> tuple[StepInputs, list[Any]]:
        """Launches the graph of this shape; returns what `ModelRunner.forward` returns."""
        graph, step, outputs = self[shape]
        step.buffer.copy_(buffer, non_blocking=True)
        graph.replay()
        return step, [outputs]


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … up to and including `most`, whatever it is."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


def key_buckets(size: int, most: int) -> list[int]:
    """For so many keys of a sequence there are CUDA graphs of a decode step of this size.

    flash-attn shares out the keys of a small batch among all cores of a GPU, by the width of the
    block tables: if that is far too large, most of them get nothing to do.
    """
    return [length for length in (1024, 4096, 16384) if length < most and size <= 32] + [most]


def at_least(number: int, buckets: list[int]) -> int:
    """The smallest bucket that holds so many."""
    return buckets[bisect_left(buckets, number)]


# ------------------------------------------------------------------------------------- memory


def measure_free_bytes(runner: ModelRunner) -> int:
    """What `gpu_memory_utilization` leaves for the KV cache when everything else, ours or of other
    processes, is at its largest. For that, all graphs and the largest step are tried out."""
    # what engines before this one have left
    torch.cuda.empty_cache()
    # first, as it gives back what the allocator keeps
    runner.capture()
    # each rank for itself
    ModelRunner.launch(runner, largest_batch(runner.config, runner.max_model_len))
    free, total = torch.cuda.mem_get_info()
    if runner.graphs:
        runner.graphs.clear()
    torch.cuda.empty_cache()
    return int(free - total * (1 - runner.config.gpu_memory_utilization))


def dummy_batch(num_seqs: int, num_tokens: int, length: int, **params: Any) -> Batch:
    """The last tokens of dummy sequences, which use block 0."""
    seq = Sequence("", [0] * length, length, length, SamplingParams(**params))
    return Batch(sequences=[seq] * num_seqs, starts=[length - num_tokens] * num_seqs,
                 num_tokens=[num_tokens] * num_seqs,
                 sampled=[Row(index, seq, length) for index in range(num_seqs)])


def largest_batch(config: EngineConfig, max_model_len: int) -> Batch:
    """A step that takes the most memory: as many tokens as a step may have, of as few sequences as
    possible, at their very end; and rows for all sequences that might be sampled, in the way that
    takes most."""
    num_seqs = min(config.max_num_seqs, -(-config.max_num_batched_tokens // max_model_len))
    num_tokens = min(config.max_num_batched_tokens // num_seqs, max_model_len)
    batch = dummy_batch(num_seqs, num_tokens, max_model_len, logprobs=20, min_p=0.1, top_p=0.9,
                        presence_penalty=1.0, logit_bias={0: 1.0})
    batch.sampled = [batch.sampled[row % num_seqs] for row in range(config.max_num_seqs)]
    return batch


# ---------------------------------------------------------------------------- fused functions


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One kernel of a function of the model, by torch.compile; where that cannot work, itself.

    The first dimension of each matrix counts tokens. All others are constants of a model: each gets
    kernels of its own, for one token and for several.
    """
    if not can_compile():
        return function
    kernel = torch.compile(function, dynamic=False)

    def run(*arguments: Any) -> Tensor:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return kernel(*arguments)
    return run


@functools.cache
def can_compile() -> bool:
    """Whether torch.compile has what Triton needs. Warns where it has not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return True
    warnings.warn("slower model: torch.compile lacks a C compiler or Python.h", stacklevel=2)
    return False
