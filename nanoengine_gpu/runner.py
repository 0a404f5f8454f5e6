"""`GpuRunner`: the engine's runner with CUDA graphs of decode steps and measured memory.

A decode step is always the same sequence of kernels over the same memory; only the numbers in it
change. So it is recorded once for each of a few numbers of sequences and of keys, and launched as
one.
"""

from bisect import bisect_left
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

import nanoengine_gpu.attention
import nanoengine_gpu.operations  # noqa: F401
from nanoengine.attention import BACKENDS
from nanoengine.batch import Batch, Copies, Row
from nanoengine.config import EngineConfig
from nanoengine.model import Decoder
from nanoengine.model_runner import ModelRunner
from nanoengine.sampler import sample_plain
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import StepInputs, StepShape


class GpuRunner(ModelRunner):
    """Runs batches on a GPU.

    graphs: for each shape of a step's inputs: a graph, the inputs that it reads, and its outputs. A
        graph computes a step from its numbers to tokens, as if all rows needed only a temperature;
        rows that need more are sampled again, from the graph's logits.
    sizes: the batch sizes that have graphs; others are padded to the next one.

    Raises torch.OutOfMemoryError if weights, the largest step and graphs do not fit.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 *more: Any) -> None:
        self.graphs: dict[StepShape, Any] = {}
        self.sizes = bucket_sizes(config.max_num_seqs)
        super().__init__(config, model_config, folder, *more)
        self.capture()

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        if not self.config.cpu_offload_gb:
            return super().load_model(folder, **options)
        from nanoengine_gpu.offload import load_offloaded
        load = partial(super().load_model, folder, **options)
        return load_offloaded(self.config.cpu_offload_gb, load)

    # ------------------------------------------------------------------------------- memory

    def measure_free_bytes(self) -> int:
        """Returns what `gpu_memory_utilization` leaves for the KV cache when everything else,
        including other processes, is at its largest. It runs all graphs and the largest step to
        find out."""
        # left over from earlier engines
        torch.cuda.empty_cache()
        # first, since it returns what the allocator keeps
        self.capture()
        # each rank on its own
        ModelRunner.launch(self, largest_batch(self.config, self.max_model_len))
        free, total = torch.cuda.mem_get_info()
        self.graphs.clear()
        torch.cuda.empty_cache()
        return int(free - total * (1 - self.config.gpu_memory_utilization))

    # ------------------------------------------------------------------------------- graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Records all graphs, the largest first: the others fit into its memory."""
        if self.config.enforce_eager or not BACKENDS[self.backend].has_graphs:
            return
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            for longest_keys in reversed(key_buckets(size, self.max_model_len)):
                buffer, shape = self.prepare(dummy_batch(size, 1, longest_keys))
                step = StepInputs.from_buffer(buffer.to(self.device), shape)
                # compiles and warms up
                self.compute(step)
                graph = torch.cuda.CUDAGraph()
                # other threads, such as NCCL's, may query the device meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    outputs = self.compute(step)
                self.graphs[shape] = graph, step, outputs

    def compute(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Computes what a graph captures: tokens, and logits for rows that need more."""
        logits = self.model.lm_head(self.hidden_states(step))
        return logits, sample_plain(logits, step.draws)

    # ------------------------------------------------------------------------------- a step

    def prepare(self, batch: Batch, longest_keys: int = 0) -> tuple[Tensor, StepShape]:
        """Pads a decode step with dummy sequences, to the size and width of a graph."""
        if self.graphs and is_decode(batch):
            size = at_least(len(batch), self.sizes)
            longest_keys = at_least(max(batch.starts) + 1, key_buckets(size, self.max_model_len))
            batch = padded(batch, size)
        return super().prepare(batch, longest_keys)

    def forward(self, copies: Copies, buffer: Tensor,
                shape: StepShape) -> tuple[StepInputs, list[Any]]:
        """Launches the graph of this shape, if there is one."""
        if shape not in self.graphs:
            return super().forward(copies, buffer, shape)
        self.began = self.timestamp()
        self.copy_blocks(copies)
        graph, step, outputs = self.graphs[shape]
        step.buffer.copy_(buffer, non_blocking=True)
        graph.replay()
        return step, [outputs]

    def hidden_states(self, step: StepInputs) -> Tensor:
        is_eager = self.config.enforce_eager
        with torch.compiler.set_stance("force_eager") if is_eager else nullcontext():
            return super().hidden_states(step)

    def logits(self, part: Any) -> tuple[Tensor, Tensor | None]:
        """Returns both from the graph, if there is one."""
        return part if isinstance(part, tuple) else super().logits(part)

    def timestamp(self) -> Any:
        """Records an event after all queued work of the GPU; with trace=True it can be timed."""
        event = torch.cuda.Event(enable_timing=self.config.trace)
        return torch.cuda.current_stream().record_event(event)


def is_decode(batch: Batch) -> bool:
    """Whether each sequence computes one token and draws one."""
    sampled = [source for source, _, _ in batch.sampled]
    return max(batch.num_tokens) == 1 and sampled == list(range(len(batch)))


def bucket_sizes(most: int) -> list[int]:
    """Returns 1, 2, 4, 8, 16, 24, … up to and including `most`."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


def key_buckets(size: int, most: int) -> list[int]:
    """Returns the numbers of keys for which a decode step of this size has CUDA graphs.

    flash-attn distributes the keys of a small batch over all cores of a GPU, by the width of the
    block tables: if that is far too large, most cores get no work.
    """
    return [length for length in (1024, 4096, 16384) if length < most and size <= 32] + [most]


def at_least(number: int, buckets: list[int]) -> int:
    """Returns the smallest bucket that holds this many."""
    return buckets[bisect_left(buckets, number)]


def padded(batch: Batch, size: int) -> Batch:
    """Returns a decode step of this many sequences; the last ones are dummies, in block 0."""
    dummy = Sequence("", [0], 1, 1)
    missing = range(len(batch), size)
    return Batch(sequences=batch.sequences + [dummy] * len(missing),
                 starts=batch.starts + [0] * len(missing), num_tokens=[1] * size,
                 sampled=batch.sampled + [Row(index, dummy, 1) for index in missing])


def dummy_batch(num_seqs: int, num_tokens: int, length: int, **params: Any) -> Batch:
    """Returns the last tokens of dummy sequences, which use block 0."""
    seq = Sequence("", [0] * length, length, length, SamplingParams(**params))
    return Batch(sequences=[seq] * num_seqs, starts=[length - num_tokens] * num_seqs,
                 num_tokens=[num_tokens] * num_seqs,
                 sampled=[Row(index, seq, length) for index in range(num_seqs)])


def largest_batch(config: EngineConfig, max_model_len: int) -> Batch:
    """Returns the step that takes the most memory: as many tokens as a step can have, at the end of
    as few sequences as possible, and rows for all sequences that could be sampled, with the
    parameters that take the most."""
    num_seqs = min(config.max_num_seqs, -(-config.max_num_batched_tokens // max_model_len))
    num_tokens = min(config.max_num_batched_tokens // num_seqs, max_model_len)
    batch = dummy_batch(num_seqs, num_tokens, max_model_len, logprobs=20, min_p=0.1, top_p=0.9,
                        presence_penalty=1.0, logit_bias={0: 1.0})
    batch.sampled = [batch.sampled[row % num_seqs] for row in range(config.max_num_seqs)]
    return batch
