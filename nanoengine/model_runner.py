"""`ModelRunner`: from a `Batch` to sampled tokens, on a CPU or on a GPU.

A step of one sequence reads all weights of the model to compute one token. A step of many sequences
reads them only once, so it takes hardly longer: this is why an engine computes batches. The runner
owns the model, the memory of the KV cache and the inputs of a step. It does not decide which
sequences run.

    launch(batch)
      prepare(batch)        on the host: turns a batch into one buffer of numbers
      forward(buffer)       on the device: copies blocks; computes hidden states, with the model or,
                            for a decode step on a GPU, with a CUDA graph (cuda_graphs.py)
      sample(hidden)        logits, and a token for each row (sampler.py)
"""

import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.attention import backends, choose_backend, make_caches
from nanoengine.config import EngineConfig
from nanoengine.cuda_graphs import CudaGraphs
from nanoengine.errors import rejected
from nanoengine.features import kernels, part
from nanoengine.loader import load_model
from nanoengine.model import Decoder, rope_table
from nanoengine.observers import Features
from nanoengine.sampler import sample
from nanoengine.sequence import Batch, Copies
from nanoengine.step_inputs import (
    Launched, StepInputs, StepShape, known_ids, step_arrays, to_buffer)


class BlockCopier:
    """Makes the copies that a step begins with. blocks: see `ModelRunner.allocate`."""

    def __init__(self, blocks: Tensor, config: EngineConfig) -> None:
        self.blocks = blocks

    def copy(self, copies: Copies) -> None:
        for target, origin in copies.copy_on_write.items():
            self.blocks[target].copy_(self.blocks[origin], non_blocking=True)


class ModelRunner:
    """Runs batches on one device.

    backend: the name of the attention backend that was chosen; attention: its `Backend`.
    is_invariant: whether other sequences in a step never change a bit of a sequence's logits. With
        most kernels they can: the order of a sum depends on the size of the batch. The feature
        guards.py reads it.
    graphs: the CUDA graphs of decode steps; there are none on a CPU.
    sample_rows: `sample` of sampler.py, or of fast_sampling.py, a feature.
    last_sampled: the tokens of the previous step, on the device.
    block_bytes: the size of K and V of one block in all layers.
    num_kv_blocks: the blocks that can be handed out, block 0 not included.
    max_model_len: the longest sequence that the model, the cache and the user allow, in tokens.

    Raises torch.OutOfMemoryError if weights, the largest step and graphs do not fit, and ValueError
    if an explicit max_model_len is more than the model or the cache allows.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 features: Features) -> None:
        self.config = config
        self.features = features
        self.model_config = model_config
        self.device = config.device
        self.dtype = choose_dtype(config.dtype, self.device, config.kernels)
        self.kernels = kernels(self.device, config.kernels)
        choose = part("choose_backend", config, choose_backend)
        self.backend = choose(config, self.dtype)
        self.sample_rows = part("sample", None, sample) if config.kernels else sample
        self.graphs = part("graphs", None, CudaGraphs)(config.max_num_seqs)
        # the rows that are sampled at a time: with the guesses of speculation.py, 32 more
        num_rows = config.max_num_seqs + 32
        self.last_sampled = torch.zeros(num_rows, dtype=torch.int32, device=self.device)

        # 1. the model
        self.model = self.load_model(folder)
        if self.attention.is_in_model and not self.kernels.knows_attention(self.model):
            # the library has its attention only for the modules of model.py and a few others
            self.backend = "gather"
        self.is_invariant = self.kernels is not None and self.kernels.optimize(
            self.model, has_attention=self.attention.is_in_model)

        # 2. the size of its KV cache
        asked = config.max_model_len
        limit = model_config.max_position_embeddings
        self.block_bytes = self.make_caches(num_blocks=1).nbytes
        num_blocks = config.num_kv_blocks
        if not num_blocks:
            free_bytes = self.measure_free_bytes(min(asked or limit, limit))
            num_blocks = free_bytes // self.block_bytes
        longest = min(limit, num_blocks * config.block_size)
        # at least one token of a prompt and one of output
        if not 2 <= (asked or 2) <= longest:
            cache = f"{num_blocks} blocks of {config.block_size} tokens"
            raise rejected("max_model_len", asked or limit,
                           f"2 to {longest} ({cache}; the model allows {limit})")

        # 3. its memory, and the graphs that use it
        self.allocate(num_blocks, asked or longest)

    attention = property(lambda self: backends()[self.backend])

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        """Returns the model; `options` go to the loader; tensor parallelism passes some."""
        load = part("load_model", self.config, load_model)
        # sources.py, a feature, loads quantized weights, and models of transformers
        extend = part("any_loader", None, lambda runner, load: load)
        return extend(self, load)(self.config, self.model_config, folder, self.dtype, **options)

    def close(self) -> None:
        """Does nothing here; a runner with other ranks ends their processes."""

    # ----------------------------------------------------------------------------- memory

    def make_caches(self, num_blocks: int) -> Tensor:
        """Returns memory for K and V of these blocks: see attention.py."""
        make = part("make_caches", self.config, make_caches)
        return make(self.config, self.model_config, num_blocks, self.dtype, self.attention)

    def allocate(self, num_kv_blocks: int, max_model_len: int) -> None:
        """Gives the model its rotary angles and its KV cache, with block 0 in front, and records
        the CUDA graphs of decode steps over this cache, if the device and the model allow them.

        blocks: a view of the cache, (num_kv_blocks + 1, layers, 2, …).
        """
        self.num_kv_blocks = num_kv_blocks
        self.max_model_len = max_model_len
        # graphs from an earlier call use the memory of the earlier cache
        self.graphs.captured.clear()
        caches = self.make_caches(num_kv_blocks + 1)
        rope = rope_table(self.model_config, max_model_len)
        self.model.bind(rope.to(self.device), caches, self.attention.attend)
        self.blocks = caches.movedim(2, 0)
        self.copier = part("copier", self.config, BlockCopier)(self.blocks, self.config)
        # a graph cannot capture a step in which the host waits, as in some transformers models
        has_graphs = self.attention.has_graphs and self.model.has_graphs
        if has_graphs and not self.config.enforce_eager:
            with torch.autocast(self.device, enabled=False):
                self.graphs.capture(self)

    def measure_free_bytes(self, max_model_len: int) -> int:
        """Returns how many bytes the KV cache gets. The feature memory.py measures what is free;
        without it, 1 GiB. No sequence gets longer than `max_model_len`."""
        return part("free_bytes", None, lambda *_: 2**30)(self, max_model_len)

    # ----------------------------------------------------------------------------- a step

    def launch(self, batch: Batch) -> Launched:
        """Begins a step. Its tokens also stay on the device, for the next step."""
        return self.run(batch, *self.prepare(batch))

    @torch.inference_mode()
    def run(self, batch: Batch, buffer: Tensor, shape: StepShape) -> Launched:
        """Begins a step on this device; `buffer` and `shape` come from `prepare`."""
        # the caller's thread may have autocast enabled, or another current device
        with torch.autocast(self.device, enabled=False), torch.cuda.device_of(self.last_sampled):
            step, hidden = self.forward(batch.copies, buffer, shape)
            return self.sample(batch, step, hidden)

    def prepare(self, batch: Batch, longest_keys: int = 0) -> tuple[Tensor, StepShape]:
        """Returns the inputs of a step, in one buffer on the host, and their shape.

        longest_keys: the block tables are wide enough for at least this many keys.
        """
        lengths = [start + count for start, count in zip(batch.starts, batch.num_tokens)]
        longest_keys = max(longest_keys, *lengths)
        if self.graphs.can_replay(batch):
            batch, longest_keys = self.graphs.fit(batch, longest_keys, self.max_model_len)
        arrays = step_arrays(batch, self.config.block_size, longest_keys)
        buffer, layout = to_buffer(arrays, self.device)
        # decodes come before the first sequence with several tokens
        num_decodes = len([*takewhile(lambda count: count == 1, batch.num_tokens)])
        return buffer, StepShape(layout, num_decodes, max(batch.num_tokens), longest_keys)

    def forward(self, copies: Copies, buffer: Tensor,
                shape: StepShape) -> tuple[StepInputs, Tensor]:
        """Copies blocks and computes a step; returns its inputs, and the hidden states of the rows
        that get logits, (rows, hidden_size)."""
        self.copier.copy(copies)
        if shape in self.graphs.captured:
            return self.graphs.replay(buffer, shape)
        step = StepInputs.from_buffer(buffer.to(self.device, non_blocking=True), shape)
        return step, self.hidden_states(step)

    def hidden_states(self, step: StepInputs) -> Tensor:
        """Runs the model. Pending tokens are looked up in the results of the previous step."""
        return self.model(known_ids(step.token_ids, self.last_sampled), step)

    def sample(self, batch: Batch, step: StepInputs, hidden: Tensor) -> Launched:
        """Computes logits and tokens, for at most len(last_sampled) rows at a time. Memory was
        measured for that many rows; when forks begin, there can be more."""
        size = len(self.last_sampled)
        tokens = hidden.new_empty(len(batch.sampled), dtype=torch.int64)
        for start in range(0, len(tokens), size):
            logits = self.model.lm_head(hidden[start:start + size])
            rows = batch.sampled[start:start + size]
            these = slice(start, start + len(rows))
            tokens[these] = self.sample_rows(
                logits, step.draws.of(these), [row.seq for row in rows], self.last_sampled,
                self.features)
            self.features.call("drawn", rows, logits, tokens[these])
        # If there are more rows than last_sampled can hold, the engine waits for this step's tokens
        # before the next launch. NO_TOKEN is stored as token 0: a step that is in flight may
        # compute with it; the host drops the result.
        self.last_sampled[:len(tokens)] = tokens[:size].clamp(min=0)
        # into pinned memory
        tokens = tokens.to("cpu", non_blocking=True)
        if self.device == "cpu":
            return Launched(batch, tokens, time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        return Launched(batch, tokens, torch.cuda.current_stream().record_event(event))


def choose_device(device: str) -> str:
    """"auto" is the GPU if there is one. Raises ValueError for "cuda" without a GPU."""
    # once this process has asked PyTorch, processes that it forks cannot always use a GPU
    found = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cuda" and found == "cpu":
        raise rejected("device", device, "'cpu': there is no GPU")
    return found if device == "auto" else device


def choose_dtype(dtype: str, device: str, enabled: bool = True) -> torch.dtype:
    """Returns the dtype with this name; "auto": bfloat16, or float32 on a CPU without bfloat16."""
    if dtype == "auto":
        library = kernels(device, enabled)
        is_fast = device == "cuda" or (library and library.has_bfloat16())
        dtype = "bfloat16" if is_fast else "float32"
    return getattr(torch, dtype)
