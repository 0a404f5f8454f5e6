"""`ModelRunner`: from a `Batch` to sampled tokens.

It owns the model, the memory of the KV cache, the inputs of a step and the CUDA graphs. Which
sequences run, and why, is not its business.

    launch(batch)         rank 0: a step, which other ranks `follow`
      prepare(batch)      host: a batch to one buffer of numbers
      step(buffer)
        run(buffer)       device, all ranks: copies blocks, then
          compute(step)   these numbers to hidden states
          logits(hidden)  these to logits, part by part
        sample(parts)     device, rank 0: logits to tokens (sampler.py)

A CUDA graph does compute, logits and sample at once, as if all rows needed only a temperature; rows
that need more are then sampled again, from the graph's logits.
"""

import ctypes
import os
import shutil
import sysconfig
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.attention import BACKENDS, StepInputs, StepShape, choose_backend, known_ids
from nanoengine.attention import limit_threads, make_caches, pack
from nanoengine.batch import Batch, Copies
from nanoengine.config import EngineConfig
from nanoengine.distributed import Group, Ranks, uninterrupted
from nanoengine.loader import load_model
from nanoengine.model import Linear, num_weights, rope_table, shard
from nanoengine.sampler import Logprob, Logprobs, find_logprobs, sample, sample_plain, uniform
from nanoengine.sampling_params import SamplingParams, rejected
from nanoengine.sequence import Sequence

# of steps without log-probabilities
NO_ENTRIES = torch.empty(0, 3, device="cpu")


@dataclass
class Launched:
    """A step on its way through the device, and later the record of it in `LLM.trace`.

    tokens: one for each of `batch.sampled`, on the host; to be read after `wait`.
    entries: all log-probabilities (`find_logprobs`), one row behind the other; the same holds.
    num_entries: how many of them each row has that asked for some; the rows of `batch.scored` are
        behind those of `batch.sampled`.
    began, done: when the device could begin with the inputs, and when the tokens are on the host:
        seconds of `time.monotonic()` on a CPU, CUDA events on a GPU.
    check: raises an error if a rank that had a part in it has died.
    ended, metrics: when its tokens were taken in (`Engine`'s clock; it began at `batch.started`),
        and what `metrics()` gave then; with trace=True.
    """

    batch: Batch
    tokens: Tensor
    entries: Tensor
    num_entries: dict[int, int]
    began: Any
    done: Any
    check: Callable[[], None] = lambda: None
    ended: float = 0.0
    metrics: Any = None

    def wait(self) -> tuple[list[int], dict[int, Logprobs]]:
        """The tokens, and the log-probabilities by row, once the device has them."""
        if isinstance(self.done, torch.cuda.Event):
            self.done.synchronize()
        self.check()
        parts = self.entries.split(list(self.num_entries.values()))
        logprobs = {row: {int(token_id): Logprob(value, int(rank))
                          for token_id, value, rank in part.tolist()}
                    for row, part in zip(self.num_entries, parts)}
        return self.tokens.tolist(), logprobs


class ModelRunner:
    """Runs batches on one device, or with the other ranks of its group on several.

    backend: the name of the attention backend that was chosen.
    num_kv_blocks: the blocks that can be handed out; block 0 comes on top.
    num_host_blocks: the blocks of the host pool, for swapped sequences.
    block_bytes: the size of K and V of one block in all layers.
    max_model_len: the most tokens of a sequence, as the model, the cache and the user allow.
    buckets: the sizes of decode steps for which there are CUDA graphs.

    Raises torch.OutOfMemoryError where a GPU has no room for weights, largest step and graphs.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 group: Group | None = None) -> None:
        self.config = config
        self.vocab_size = model_config.vocab_size
        size = config.tensor_parallel_size
        part = shard(model_config, size)
        num_gpus = torch.cuda.device_count()
        if config.device == "cuda" and size > max(1, num_gpus):
            raise rejected("tensor_parallel_size", size, f"at most {num_gpus}, the GPUs there are")
        self.group = group or Group(size=size)
        self.ranks = Ranks(self.group, config, model_config, folder)
        try:
            with self.ranks.explained():
                self.group.connect(config.device)
                self.load(part, folder)
        except BaseException:
            self.ranks.close()
            raise

    def load(self, model_config: PretrainedConfig, folder: Path) -> None:
        """Weights, KV cache and CUDA graphs. model_config: of this rank's part of the model."""
        config = self.config
        self.model_config = model_config
        self.device = config.device
        self.is_gpu = config.device == "cuda"
        self.dtype = choose_dtype(config.dtype, self.device)
        self.backend = choose_backend(
            config.attention_backend, self.device, self.dtype, config.block_size)
        limit = model_config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or limit, limit)
        num_bytes = num_weights(model_config) * self.dtype.itemsize
        # the table of angles, with what is needed to make it
        num_bytes += 16 * self.max_model_len * model_config.head_dim
        offload_bytes = config.cpu_offload_gb * 2**30
        check_memory(self.device, "model", str(folder), num_bytes - offload_bytes)
        check_memory("cpu", "cpu_offload_gb", config.cpu_offload_gb, min(offload_bytes, num_bytes))
        self.model = load_model(folder, model_config, self.dtype, self.device, config.load_format,
                                self.group, offload_bytes)
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        has_amx = get_host_cpu_features().get("amx-bf16") and self.dtype == torch.bfloat16
        is_invariant = self.backend == "numba" and self.group.size == 1 and all(
            linear.uses_amx if has_amx else linear.weight.is_mkldnn for linear in linears)
        if config.batch_invariant and not is_invariant:
            raise rejected("batch_invariant", True,
                           "False without packed weights, numba, a CPU and a single rank")

        if not self.is_gpu:
            keep_memory()
        self.rope = rope_table(model_config, self.max_model_len).to(self.device)
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        has_graphs = self.is_gpu and self.backend != "gather" and not config.enforce_eager
        self.buckets = bucket_sizes(config.max_num_seqs) if has_graphs else []
        self.graphs: dict[StepShape, Any] = {}
        # then the model's functions run as they stand, as on a CPU
        self.is_plain = self.is_gpu and (config.enforce_eager or not can_compile())

        # block 0 alone is enough to try a step
        self.allocate(num_blocks=0, num_host_blocks=0)
        self.block_bytes = self.caches.nbytes
        # also where it is not needed: then all ranks have their weights
        free_bytes = self.group.least(0 if config.num_kv_blocks else self.measure_free_bytes())
        self.num_kv_blocks, self.max_model_len = size_cache(
            config, limit, self.block_bytes, free_bytes)
        host_bytes = config.swap_space * 2**30 if config.preemption_mode == "swap" else 0
        check_memory("cpu", "swap_space", config.swap_space, host_bytes)
        cache_bytes = self.num_kv_blocks * self.block_bytes
        check_memory(self.device, "num_kv_blocks", self.num_kv_blocks, cache_bytes)
        self.num_host_blocks = int(host_bytes // self.block_bytes)
        self.allocate(self.num_kv_blocks, self.num_host_blocks)
        self.capture()
        if self.is_gpu:
            self.compile()

    # ----------------------------------------------------------------------------- memory

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Makes the KV cache, with block 0 in front, and the host pool."""
        self.caches = make_caches(self.model_config, num_blocks + 1, self.config.block_size,
                                  self.dtype, self.device, self.backend)
        # (num_blocks + 1, layers, 2, …)
        self.blocks = self.caches.movedim(2, 0)
        self.host_blocks = torch.empty(num_host_blocks, *self.blocks.shape[1:], dtype=self.dtype,
                                       device="cpu", pin_memory=self.is_gpu)

    def measure_free_bytes(self) -> int:
        """What the KV cache may take.

        On a CPU: a quarter of the free memory, or as much as can be used. On a GPU: what
        `gpu_memory_utilization` leaves when everything else, ours or of other processes, is at its
        largest. For that, all graphs and the largest step are tried out.
        """
        num_seqs = self.config.max_num_seqs
        if not self.is_gpu:
            num_blocks = num_seqs * -(-self.max_model_len // self.config.block_size)
            available = psutil.virtual_memory().available // 4 // self.group.size
            return min(available, num_blocks * self.block_bytes)
        # what engines before this one have left
        torch.cuda.empty_cache()
        # first, as it gives back what the allocator keeps
        self.capture()
        largest = largest_batch(self.config, self.max_model_len)
        self.step(largest, *self.prepare(largest))
        free, total = torch.cuda.mem_get_info()
        self.graphs.clear()
        torch.cuda.empty_cache()
        return int(free - total * (1 - self.config.gpu_memory_utilization))

    @torch.inference_mode()
    def capture(self) -> None:
        """A CUDA graph for each bucket, the largest first: the others fit into its memory.

        Only their logits are kept apart, for rows that need more than a temperature.
        """
        def run(step: StepInputs) -> tuple[Tensor, Tensor]:
            logits = self.logits(self.compute(step))
            return logits, sample_plain(logits, step.temperatures, step.uniforms)

        pool = torch.cuda.graph_pool_handle() if self.buckets else None
        for size in reversed(self.buckets):
            for longest_keys in reversed(key_buckets(size, self.max_model_len)):
                buffer, shape = self.prepare(dummy_batch(size, 1, longest_keys))
                step = StepInputs.unpack(buffer.to(self.device), shape)
                # compiles, and warms up
                run(step)
                graph = torch.cuda.CUDAGraph()
                # other threads may ask the device meanwhile: NCCL's does
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    outputs = run(step)
                self.graphs[shape] = graph, step, outputs

    def compile(self) -> None:
        """Runs a step for each of torch.compile's cases: one token or several, and none, one or
        several rows. So none of them is compiled in the middle of a run."""
        for num_seqs, length in ((1, 1), (1, 2), (2, 2)):
            batch = dummy_batch(num_seqs, length, length)
            for each in (batch, replace(batch, sampled=[])):
                self.step(each, *self.prepare(each))

    # ----------------------------------------------------------------------------- a step

    def launch(self, batch: Batch) -> Launched:
        """Begins a step on all ranks."""
        buffer, shape = self.prepare(batch)
        with uninterrupted() if self.group.size > 1 else nullcontext(), self.ranks.explained():
            self.ranks.send(batch.copies, buffer.numpy(), shape)
            return self.step(batch, buffer, shape)

    @torch.inference_mode()
    def step(self, batch: Batch, buffer: Tensor, shape: StepShape) -> Launched:
        """Begins a step on this rank. Its tokens stay on the device for the next step as well."""
        began = self.timestamp()
        step, parts = self.run(batch.copies, buffer, shape)
        try:
            tokens, entries, num_entries = self.sample(batch, step, parts)
        finally:
            self.finish(parts)
        # into pinned memory
        tokens = tokens.to("cpu", non_blocking=True)
        entries = entries.to("cpu", non_blocking=True)
        return Launched(batch, tokens, entries, num_entries, began, self.timestamp(),
                        self.ranks.check)

    @torch.inference_mode()
    def follow(self, copies: Copies, numbers: np.ndarray, shape: StepShape) -> None:
        """What another rank does for a step that rank 0 launches."""
        _, parts = self.run(copies, torch.from_numpy(numbers), shape)
        self.finish(parts)

    def run(self, copies: Copies, buffer: Tensor,
            shape: StepShape) -> tuple[StepInputs, Iterator[Any]]:
        """The inputs of a step, and the logits of its rows, part by part, each with the tokens that
        a CUDA graph has drawn, or None.

        A part has at most `max_num_seqs` rows, however many rows forks and scored prompts have: the
        memory for so many was measured.
        """
        self.copy_blocks(copies)
        if shape in self.graphs:
            graph, step, outputs = self.graphs[shape]
            step.buffer.copy_(buffer, non_blocking=True)
            graph.replay()
            return step, iter([outputs])
        step = StepInputs.unpack(buffer.to(self.device, non_blocking=True), shape)
        hidden = self.compute(step)
        starts = range(0, len(hidden), self.config.max_num_seqs)
        return step, ((self.logits(hidden[start:start + self.config.max_num_seqs]), None)
                      for start in starts)

    def sample(self, batch: Batch, step: StepInputs,
               parts: Iterator[Any]) -> tuple[Tensor, Tensor, dict[int, int]]:
        """Tokens and log-probabilities of a step: see `Launched`, where they are on the host."""
        seqs = [seq for _, seq in batch.sampled]
        asked = logprobs_asked(batch)
        tokens = torch.empty(len(seqs), dtype=torch.int64, device=self.device)
        entries = []
        num_entries: dict[int, int] = {}
        for first, (logits, drawn) in zip(range(0, len(asked), self.config.max_num_seqs), parts):
            rows = slice(first, first + self.config.max_num_seqs)
            tokens[rows] = sample(logits, step.temperatures[rows], step.uniforms[rows], seqs[rows],
                                  self.last_sampled, drawn)
            if any(asked[rows]):
                targets = step.next_tokens[rows].long()
                targets[:len(tokens[rows])] = tokens[rows]
                for alike, found in find_logprobs(logits, targets, asked[rows]):
                    num_entries |= {first + row: found.shape[1] for row in alike}
                    entries.append(found.flatten(0, 1))
        # There are more than max_num_seqs only where forks begin, and then the next step waits for
        # their tokens. For NO_TOKEN the next step computes token 0, which nobody reads.
        self.last_sampled[:len(seqs)] = tokens[:len(self.last_sampled)].clamp(min=0)
        return tokens, torch.cat(entries) if entries else NO_ENTRIES, num_entries

    def finish(self, parts: Iterator[Any]) -> None:
        """What is left of a step for all ranks, also if an error has kept rank 0 from sampling."""
        for _ in parts:
            pass
        if self.config.run_ahead:
            self.group.share(self.last_sampled)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size), of all ranks' parts."""
        return self.group.join(self.model.lm_head(hidden))[:, :self.vocab_size]

    def timestamp(self) -> Any:
        """The device's present: seconds, or on a GPU an event behind all its work so far."""
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=self.config.trace)
            return torch.cuda.current_stream().record_event(event)
        return time.monotonic()

    def copy_blocks(self, copies: Copies) -> None:
        """Does the block copies of a step, in the order of `Copies`."""
        for pairs, source, target in ((copies.swap_out, self.blocks, self.host_blocks),
                                      (copies.copy_on_write, self.blocks, self.blocks),
                                      (copies.swap_in, self.host_blocks, self.blocks)):
            for to, origin in pairs.items():
                target[to].copy_(source[origin], non_blocking=True)

    def prepare(self, batch: Batch) -> tuple[Tensor, StepShape]:
        """The inputs of a step in one buffer on the host, and their shape.

        A decode step is filled up to the size of a CUDA graph, and its block tables to the width.
        """
        longest_keys = max(map(add, batch.starts, batch.num_tokens))
        if self.buckets and batch.is_decode:
            batch = pad(batch, self.buckets[bisect_left(self.buckets, len(batch))])
            lengths = key_buckets(len(batch), self.max_model_len)
            longest_keys = lengths[bisect_left(lengths, longest_keys)]
        arrays = step_arrays(batch, self.config.block_size, longest_keys)
        buffer, layout = pack(arrays, self.device)
        return buffer, (layout, max(batch.num_tokens), longest_keys)

    def compute(self, step: StepInputs) -> Tensor:
        """The last hidden states of the rows that have logits, (rows, hidden_size)."""
        limit_threads()
        token_ids = known_ids(step.token_ids, self.last_sampled)
        with torch.compiler.set_stance("force_eager") if self.is_plain else nullcontext():
            return self.model(token_ids, step, self.rope, self.caches, BACKENDS[self.backend])


# ------------------------------------------------------------------------- inputs of a step


def dummy_batch(num_seqs: int, num_tokens: int, length: int, **params: Any) -> Batch:
    """The last tokens of dummy sequences, for measuring, for graph capture and as padding.

    They use block 0."""
    seqs = [Sequence("", [0] * length, length, length, SamplingParams(**params))] * num_seqs
    return Batch(sequences=seqs, starts=[length - num_tokens] * num_seqs,
                 num_tokens=[num_tokens] * num_seqs, sampled=list(enumerate(seqs)))


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


def pad(batch: Batch, size: int) -> Batch:
    """A decode step with dummy sequences behind its own, `size` together."""
    dummies = dummy_batch(size - len(batch), 1, 1)
    seqs = batch.sequences + dummies.sequences
    return Batch(sequences=seqs, starts=batch.starts + dummies.starts, num_tokens=[1] * size,
                 sampled=list(enumerate(seqs)))


def step_arrays(batch: Batch, block_size: int, longest_keys: int) -> dict[str, np.ndarray]:
    """The arrays of `StepInputs`, those of 64-bit numbers first.

    longest_keys: block tables are as wide as so many keys need. There is one loop over sequences,
    none over tokens or blocks.
    """
    token_ids: list[int] = []
    for seq, start, count in zip(batch.sequences, batch.starts, batch.num_tokens):
        token_ids += seq.device_ids(start, start + count)
    lengths = np.add(batch.starts, batch.num_tokens)
    stops = np.cumsum(batch.num_tokens)
    owners = np.arange(len(batch)).repeat(batch.num_tokens)
    positions = np.arange(len(token_ids)) + (lengths - stops)[owners]
    width = -(-longest_keys // block_size)
    rows = [seq.block_table[:width].tobytes().ljust(4 * width, b"\0") for seq in batch.sequences]
    block_tables = np.frombuffer(b"".join(rows), np.int32).reshape(-1, width)
    sampled, seqs = zip(*batch.sampled) if batch.sampled else ([], [])
    starts = np.append(0, stops)
    scored = [starts[index] + position - batch.starts[index] for index, position in batch.scored]
    scored_tokens = [batch.sequences[index].token_ids[position + 1]
                     for index, position in batch.scored]
    draws = map(uniform, seqs, lengths[list(sampled)].tolist())
    int32 = partial(np.asarray, dtype=np.int32)
    return {
        "uniforms": np.fromiter(draws, float),
        "slot_blocks": block_tables[owners, positions // block_size].astype(np.int64),
        "slot_offsets": positions % block_size,
        "temperatures": np.array([seq.params.temperature for seq in seqs], np.float32),
        "token_ids": int32(token_ids),
        "positions": int32(positions),
        "sequence_of_token": int32(owners),
        "query_starts": int32(starts),
        "key_starts": int32(np.append(0, lengths.cumsum())),
        "lengths": int32(lengths),
        "block_tables": block_tables,
        "sampled_rows": int32(np.append(stops[list(sampled)] - 1, scored)),
        "next_tokens": int32([-1] * len(seqs) + scored_tokens)}


def logprobs_asked(batch: Batch) -> list[tuple[int, float] | None]:
    """For each row of logits, sampled or scored, what `find_logprobs` wants to know."""
    sampled = [None if seq.params.logprobs is None else
               (seq.params.logprobs, seq.params.temperature if seq.group else 0.0)
               for _, seq in batch.sampled]
    scored = [(batch.sequences[index].params.prompt_logprobs or 0, 0.0)
              for index, _ in batch.scored]
    return [*sampled, *scored]


# -------------------------------------------------------------------------------- choices


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … up to and including `most`, whatever it is."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


def key_buckets(size: int, most: int) -> list[int]:
    """For so many keys of a sequence there are CUDA graphs of a decode step of this size.

    flash-attn shares out the keys of a small batch among all cores of a GPU, by the width of the
    block tables: if that is far too large, most of them get nothing to do.
    """
    return [length for length in (1024, 4096, 16384) if length < most and size <= 32] + [most]


def can_compile() -> bool:
    """Whether torch.compile has what Triton needs: a C compiler and Python's headers.

    Warns where it has not.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if compiler and has_headers:
        return True
    warnings.warn("slower model: torch.compile lacks a C compiler or Python.h", stacklevel=2)
    return False


def choose_device(device: str) -> Any:
    """"auto" is the GPU if there is one. Raises ValueError for "cuda" where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise rejected("device", device, "'cpu' or 'auto', as PyTorch finds no GPU")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16, or float32 on a CPU that lacks bfloat16."""
    has = get_host_cpu_features().get
    if dtype == "auto" and device == "cpu":
        dtype = "bfloat16" if has("avx512bf16") or has("amx-bf16") or has("bf16") else "float32"
    return getattr(torch, dtype if dtype != "auto" else "bfloat16")


def check_memory(device: str, name: str, value: Any, num_bytes: float) -> None:
    """Raises ValueError for an argument that needs more memory than the device has in all."""
    is_gpu = device == "cuda"
    total = torch.cuda.mem_get_info()[1] if is_gpu else psutil.virtual_memory().total
    if num_bytes > total:
        raise rejected(name, value, f"smaller: it needs {num_bytes / 2**30:.3g} GiB of memory, and "
                       f"there are {total / 2**30:.1f} (device {device!r})")


def keep_memory() -> None:
    """Lets glibc keep what a step frees, for the next step: up to 1 GiB, in parts below 32 MiB, the
    most that it allows. Larger parts go back to the system, as before. What goes back has to be
    cleared when it is used again, which took 10 % of a step of prompts."""
    with suppress(OSError, AttributeError):
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)


def end_threads() -> None:
    """Ends the OpenMP threads that belong to the calling thread; its next product starts them anew.

    Each thread that has ever computed keeps a team of its own. Once all teams together have more
    threads than there are cores, libgomp's no longer spin while they wait: steps of a small model
    took 40 % longer for an engine that was used in two threads. Other OpenMPs are left alone.
    """
    with suppress(OSError, AttributeError):
        soft_pause = 1
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(soft_pause)


def size_cache(config: EngineConfig, limit: int, block_bytes: int, free: int) -> tuple[int, int]:
    """How many blocks the KV cache has, and how many tokens a sequence can have.

    limit: the model's max_position_embeddings; block_bytes: K and V of a block in all layers;
    free: the bytes that all blocks may take.

    Raises ValueError where an explicit max_model_len is more than the model or the cache allows.
    """
    num_blocks = config.num_kv_blocks or max(0, free // block_bytes)
    longest = min(limit, num_blocks * config.block_size)
    if (config.max_model_len or 2) > longest:
        raise rejected("max_model_len", config.max_model_len or limit, f"at most {longest}: "
                       f"{num_blocks} blocks of {config.block_size}, and the model's own {limit}")
    return num_blocks, config.max_model_len or longest
