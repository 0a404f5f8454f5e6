"""`ModelRunner`: from a `Batch` to sampled tokens.

It owns the model, the memory of the KV cache, the inputs of a step and the CUDA graphs. Who runs,
and why, is not its business.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.attention import StepInputs, choose_backend, make_caches
from nanoengine.block_manager import Copies
from nanoengine.config import EngineConfig
from nanoengine.loader import load_model
from nanoengine.model import rope_table
from nanoengine.sampler import Logprobs, is_edited, logprobs_of, sample, uniform
from nanoengine.sampling_params import rejected
from nanoengine.scheduler import Batch
from nanoengine.sequence import PendingToken, Sequence


class ModelRunner:
    """Runs batches on one device.

    num_kv_blocks: blocks that can be handed out; block 0, which cannot, comes on top.
    num_host_blocks: blocks of the host pool, where preempted sequences are swapped out.
    block_bytes: K and V of one block in all layers.
    max_model_len: tokens that a sequence can have, as the model, the cache and the user allow.
    buckets: the sizes of decode steps for which there are CUDA graphs.

    Raises torch.OutOfMemoryError where a GPU has no room for weights, largest step and graphs.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        self.config, self.is_gpu = config, config.device == "cuda"
        dtype = choose_dtype(config.dtype, config.device)
        backend = config.attention_backend = choose_backend(  # type: ignore
            config.attention_backend, config.device, dtype, config.block_size)
        self.max_num_seqs, self.max_num_batched_tokens = config.limits()
        has_graphs = self.is_gpu and backend != "gather" and not config.enforce_eager
        self.buckets = bucket_sizes(self.max_num_seqs) if has_graphs else []
        self.graphs: dict[Any, Any] = {}  # by the layout of their inputs
        self.model = load_model(folder, model_config, dtype, config.device, config.load_format)
        is_invariant = backend == "numba" and self.model.lm_head.weight.is_mkldnn
        if config.batch_invariant and not is_invariant:
            raise rejected("batch_invariant", True, "False without packed weights, numba and a CPU")
        limit = model_config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or limit, limit)
        self.rope = rope_table(model_config, self.max_model_len).to(config.device)
        self.tokens = torch.zeros(self.max_num_seqs, dtype=torch.int32, device=config.device)
        self.caches = make_caches(model_config, 1, config.block_size, dtype, config.device)
        self.block_bytes = self.caches.nbytes
        free = 0 if config.num_kv_blocks else self.free_bytes()
        self.num_kv_blocks, self.max_model_len = size_cache(config, limit, self.block_bytes, free)
        self.caches = make_caches(model_config, self.num_kv_blocks + 1, config.block_size, dtype,
                                  config.device)
        self.blocks = self.caches.movedim(2, 0)  # (num_kv_blocks + 1, layers, 2, …)
        swap_bytes = config.swap_space * 2**30 if config.preemption_mode == "swap" else 0
        self.num_host_blocks = int(swap_bytes // self.block_bytes)
        self.host_blocks = torch.empty(self.num_host_blocks, *self.blocks.shape[1:], dtype=dtype,
                                       pin_memory=self.is_gpu)
        self.capture()

    def free_bytes(self) -> int:
        """What the KV cache may take: on a CPU a quarter of the free memory, or what can be used.

        On a GPU what `gpu_memory_utilization` of it leaves when everything else, ours or of other
        processes, is at its largest: the largest step and all graphs are tried out for that.
        """
        if not self.is_gpu:
            blocks = self.max_num_seqs * -(-self.max_model_len // self.config.block_size)
            return min(psutil.virtual_memory().available // 4, blocks * self.block_bytes)
        torch.cuda.empty_cache()  # what engines before this one have left
        length = min(-(-self.max_num_batched_tokens // self.max_num_seqs), self.max_model_len)
        self.capture()  # first, as it gives back what the allocator keeps
        self.launch(self.dummy_batch(self.max_num_seqs, length))
        free, total = torch.cuda.mem_get_info()
        self.graphs.clear()
        torch.cuda.empty_cache()
        return int(free - total * (1 - self.config.gpu_memory_utilization))

    def dummy_batch(self, num_seqs: int, length: int) -> Batch:
        """Sequences of nobody, to measure and to capture: they read and write block 0."""
        seq = Sequence("", [0] * length, length, length)
        return Batch(0, [seq] * num_seqs, [length] * num_seqs, [(i, seq) for i in range(num_seqs)])

    @torch.inference_mode()
    def capture(self) -> None:
        """A CUDA graph for each bucket, the largest first: the others fit into its memory.

        Only their logits are kept apart, for rows that need more than a temperature.
        """
        pool = torch.cuda.graph_pool_handle() if self.buckets else None
        for size in reversed(self.buckets):
            buffer, layout = self.prepare(self.dummy_batch(size, 1))
            step = StepInputs(buffer.to(self.config.device), layout)
            self.compute(step)  # compiles, and warms up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self.compute(step)
            self.graphs[layout] = graph, step, outputs

    def compute(self, step: StepInputs, seqs: Any = ()) -> tuple[Tensor, Tensor]:
        """Logits and tokens of a step. Without sequences the host reads nothing of it, and a CUDA
        graph can hold it: tokens are then sampled by temperature alone."""
        before = self.tokens[(-1 - step.token_ids).clamp(min=0)]
        token_ids = torch.where(step.token_ids < 0, before, step.token_ids)
        logits = self.model(token_ids, step, self.rope, self.config.attention_backend, self.caches)
        return logits, sample(logits, step.temperatures, step.numbers, seqs)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> tuple[Tensor, list[Logprobs | None], Callable[[], None]]:
        """Begins a step, whose tokens stay on the device for the next one as well.

        Returns for each of `batch.sampled` its token, on the host, its logprobs, and a function
        that waits until the tokens are there.
        """
        buffer, layout = self.prepare(batch)
        seqs = [seq for _, seq in batch.sampled]
        if layout in self.graphs:
            graph, step, (logits, tokens) = self.graphs[layout]
            step.buffer.copy_(buffer, non_blocking=True)
            graph.replay()
            if any(map(is_edited, seqs)):
                tokens = sample(logits, step.temperatures, step.numbers, seqs)
        else:
            step = StepInputs(buffer.to(self.config.device, non_blocking=True), layout)
            logits, tokens = self.compute(step, seqs)
        tokens = tokens[:len(seqs)]
        self.tokens[:len(seqs)] = tokens[:self.max_num_seqs]  # more only where forks begin
        logprobs = [logprobs_of(logits, tokens, row, seq) for row, seq in enumerate(seqs)]
        on_host = tokens.to("cpu", non_blocking=True, copy=True)  # pinned
        done = torch.cuda.current_stream().record_event() if self.is_gpu else None
        return on_host, logprobs, done.synchronize if done else lambda: None

    def copy_blocks(self, copies: Copies) -> float:
        """Does the block copies of a step, in the order that they are meant in.

        Returns the seconds that it took, on a GPU only to launch them.
        """
        started = time.monotonic()
        for pairs, source, target in ((copies.swap_out, self.blocks, self.host_blocks),
                                      (copies.copy_on_write, self.blocks, self.blocks),
                                      (copies.swap_in, self.host_blocks, self.blocks)):
            for to, origin in pairs.items():
                target[to].copy_(source[origin], non_blocking=True)
        return time.monotonic() - started

    def prepare(self, batch: Batch) -> tuple[Tensor, Any]:
        """The inputs of a step in one buffer on the host, and their layout, for `StepInputs`.

        One loop over sequences, none over tokens or blocks. A decode step is filled up to the size
        of a graph, by sequences of nobody. PyTorch hands out a pinned buffer again only when the
        copy from it is done, so that none is rewritten in flight.
        """
        seqs, counts, sampled = batch.sequences, batch.num_tokens, batch.sampled
        size, longest_keys = self.config.block_size, 0
        if self.buckets and max(counts) == 1 and [row for row, _ in sampled] == [*range(len(seqs))]:
            missing = min(size - len(seqs) for size in self.buckets if size >= len(seqs))
            seqs = seqs + self.dummy_batch(missing, 1).sequences
            counts, sampled, longest_keys = [1] * len(seqs), [*enumerate(seqs)], self.max_model_len
        lengths = np.add(counts, [seq.num_computed_tokens for seq in seqs])
        longest_keys = longest_keys or int(lengths.max())
        block_tables = np.zeros((len(seqs), -(-longest_keys // size)), np.int32)
        token_ids: list[Any] = []
        for table, seq, length in zip(block_tables, seqs, lengths.tolist()):
            table[:len(seq.block_table)] = seq.block_table[:len(table)]
            token_ids += seq.token_ids[seq.num_computed_tokens:length]
            if type(token_ids[-1]) is PendingToken:
                token_ids[-1] = -1 - token_ids[-1].row
        stops = np.cumsum(counts)
        owners = np.repeat(np.arange(len(seqs)), counts)
        positions = np.arange(len(token_ids)) + (lengths - stops)[owners]
        int32 = partial(np.asarray, dtype=np.int32)
        arrays = dict(
            numbers=np.array([uniform(seq) for _, seq in sampled], float), offsets=positions % size,
            blocks=block_tables[owners, positions // size].astype(np.int64),
            temperatures=np.array([seq.params.temperature for _, seq in sampled], np.float32),
            token_ids=int32(token_ids), positions=int32(positions), owners=int32(owners),
            query_starts=int32(np.append(0, stops)), lengths=int32(lengths),
            key_starts=int32(np.append(0, lengths.cumsum())), block_tables=block_tables,
            sampled_rows=int32(stops[[row for row, _ in sampled]] - 1))
        parts = [array.view(np.int32).ravel() for array in arrays.values()]
        kinds = tuple((name, array.dtype.name, array.shape, len(part))
                      for (name, array), part in zip(arrays.items(), parts))
        buffer = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=self.is_gpu)
        np.concatenate(parts, out=buffer.numpy())
        return buffer, (max(counts), longest_keys, kinds)


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … up to and including `most`, whatever it is."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


def choose_device(device: str) -> Any:
    """"auto" is the GPU if there is one. Raises ValueError for "cuda" where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise rejected("device", device, "'cpu' or 'auto', as PyTorch finds no GPU")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """What was asked for; "auto" is bfloat16, but float32 on a CPU that does not compute in it."""
    has = get_host_cpu_features().get
    if dtype == "auto" and device == "cpu":
        dtype = "bfloat16" if has("avx512bf16") or has("amx-bf16") or has("bf16") else "float32"
    return getattr(torch, dtype if dtype != "auto" else "bfloat16")


def size_cache(config: EngineConfig, limit: int, block_bytes: int, free: int) -> tuple[int, int]:
    """How many blocks the KV cache has, and how many tokens a sequence can have.

    limit: the model's max_position_embeddings; block_bytes: K and V of a block in all layers; free:
    the bytes that all may take. Raises ValueError where an explicit max_model_len is more than the
    model or the cache allows.
    """
    num_blocks = config.num_kv_blocks or max(0, free // block_bytes)
    longest = min(limit, num_blocks * config.block_size)
    if (config.max_model_len or 2) > longest:
        raise rejected("max_model_len", config.max_model_len or limit, f"at most {longest}: "
                       f"{num_blocks} blocks of {config.block_size}, and the model's own {limit}")
    return num_blocks, config.max_model_len or longest
