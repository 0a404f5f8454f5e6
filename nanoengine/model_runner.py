"""`ModelRunner`: from a `Batch` to sampled tokens.

It owns the model, the memory of the KV cache and the inputs of a step. It does not decide which
sequences run.

    launch(batch)
      prepare(batch)        on the host: a batch to one buffer of numbers
      forward(buffer)       on the device: block copies; these numbers to hidden states, in parts
      sample(parts)         of each part: logits, tokens and log-probabilities (sampler.py)

The library nanoengine_cpu has what a CPU needs for this. nanoengine_gpu has what a GPU needs, such
as CUDA graphs: its runner is a subclass of this one.
"""

import time
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

import nanoengine_cpu
from nanoengine.attention import BACKENDS, choose_backend, make_caches
from nanoengine.batch import Batch, Copies, Row
from nanoengine.config import EngineConfig
from nanoengine.loader import context_length, load_model
from nanoengine.model import Decoder, rope_table
from nanoengine.sampler import sample
from nanoengine.sampling_params import rejected
from nanoengine.step_inputs import StepInputs, StepShape, known_ids, step_arrays, to_buffer


@dataclass
class Launched:
    """A step that the device computes; later its record in `LLM.trace`.

    tokens: one for each of `batch.sampled`, on the host; read them after `wait`.
    logprobs: the log-probabilities of each row that needs them (`find_logprobs`); likewise.
    began, done: the moments when the inputs are on the device, and the tokens on the host: seconds
        of `time.monotonic()` on a CPU, CUDA events on a GPU.

    metrics.py adds `ended` and `metrics` to a record.
    """

    batch: Batch
    tokens: Tensor
    logprobs: dict[Row, Any]
    began: Any
    done: Any

    def wait(self) -> list[int]:
        """Waits for the tokens and the log-probabilities; returns the tokens."""
        if isinstance(self.done, torch.cuda.Event):
            self.done.synchronize()
        return self.tokens.tolist()


class ModelRunner:
    """Runs batches on one device.

    backend: the name of the attention backend that was chosen.
    num_kv_blocks: the blocks that can be handed out, block 0 not included.
    block_bytes: the size of K and V of one block in all layers.
    max_model_len: the most tokens of a sequence that the model, the cache and the user allow.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        self.config = config
        self.model_config = model_config
        self.device = config.device
        self.dtype = choose_dtype(config.dtype, self.device)
        self.backend = choose_backend(
            config.attention_backend, self.device, self.dtype, config.block_size)
        self.model = self.load_model(folder)
        is_invariant = self.device == "cpu" and nanoengine_cpu.optimize(
            self.model, has_attention=BACKENDS[self.backend].attend is None)
        if config.batch_invariant and not is_invariant:
            raise rejected("batch_invariant", True, "False without packed weights and numba")

        limit = context_length(model_config)
        # for now: size_cache may lower it
        self.max_model_len = min(config.max_model_len or limit, limit)
        # a CPU measures its memory without a step of the longest sequence
        longest = self.max_model_len if self.device == "cuda" else min(self.max_model_len, 2**16)
        self.rope = rope_table(model_config, longest)
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)

        # block 0 alone is enough for a trial step, and its bytes are those of one block
        self.allocate(num_blocks=0)
        self.block_bytes = self.caches.nbytes
        free_bytes = 0 if config.num_kv_blocks else self.measure_free_bytes()
        self.num_kv_blocks, self.max_model_len = size_cache(
            config, limit, self.block_bytes, free_bytes)
        self.rope = rope_table(model_config, self.max_model_len)
        self.allocate(self.num_kv_blocks)
        if config.preemption_mode == "swap":
            from nanoengine_extensions import swapping
            swapping.add_host_pool(self)

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        """Returns the model; `options` are those of the loader."""
        return load_model(folder, self.model_config, self.dtype, self.device,
                          self.config.load_format, **options)

    def close(self) -> None:
        """Ends the processes of an extension, if there are any."""

    # ----------------------------------------------------------------------------- memory

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache, with block 0 in front.

        blocks: a view of it, (num_blocks + 1, layers, 2, …).
        """
        self.caches = make_caches(self.model_config, num_blocks + 1, self.config.block_size,
                                  self.dtype, self.device, self.backend)
        self.model.bind(self.rope.to(self.device), self.caches, BACKENDS[self.backend].attend)
        self.blocks = self.caches.movedim(2, 0)

    def measure_free_bytes(self) -> int:
        """Returns the bytes for the KV cache: a quarter of the free memory, or what can be used."""
        free, _ = nanoengine_cpu.mem_get_info()
        num_blocks = self.config.max_num_seqs * -(-self.max_model_len // self.config.block_size)
        quarter = free // (4 * self.config.tensor_parallel_size)
        return min(quarter, num_blocks * self.block_bytes)

    # ----------------------------------------------------------------------------- a step

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Begins a step. Its tokens also stay on the device, for the next step."""
        buffer, shape = self.prepare(batch)
        step, parts = self.forward(batch.copies, buffer, shape)
        return self.sample(batch, step, parts)

    def prepare(self, batch: Batch, longest_keys: int = 0) -> tuple[Tensor, StepShape]:
        """Returns the inputs of a step, in one buffer on the host, and their shape.

        longest_keys: block tables have room for at least this many keys of a sequence.
        """
        longest_keys = max(longest_keys, *map(add, batch.starts, batch.num_tokens))
        arrays = step_arrays(batch, self.config.block_size, longest_keys)
        buffer, layout = to_buffer(arrays, self.device)
        return buffer, (layout, max(batch.num_tokens), longest_keys)

    def forward(self, copies: Copies, buffer: Tensor,
                shape: StepShape) -> tuple[StepInputs, list[Any]]:
        """Computes a step up to the hidden states of its rows.

        Returns its inputs, and the rows in parts, for `logits`. A part has at most `max_num_seqs`
        rows, even with many forks or scored prompts: the memory for this many was measured.
        """
        self.began = self.timestamp()
        self.copy_blocks(copies)
        step = StepInputs.from_buffer(buffer.to(self.device, non_blocking=True), shape)
        return step, list(self.hidden_states(step).split(self.config.max_num_seqs))

    def copy_blocks(self, copies: Copies) -> None:
        """Does the block copies of a step. swapping.py adds copies to and from the host."""
        for target, source in copies.copy_on_write.items():
            self.blocks[target].copy_(self.blocks[source])

    def hidden_states(self, step: StepInputs) -> Tensor:
        """Returns the last hidden states of the rows that get logits, (rows, hidden_size)."""
        return self.model(known_ids(step.token_ids, self.last_sampled), step)

    def logits(self, part: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of a part, (rows, vocab_size), and its tokens if already drawn."""
        return self.model.lm_head(part), None

    def sample(self, batch: Batch, step: StepInputs, parts: list[Any]) -> Launched:
        """Computes tokens and log-probabilities of each part, and removes it from the list."""
        size = self.config.max_num_seqs
        rows = batch.sampled + batch.scored
        tokens = step.next_tokens.long()
        logprobs: dict[Row, Any] = {}
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits, drawn = self.logits(parts.pop(0))
            seqs = [row.seq for row in batch.sampled[part]]
            sampled = sample(logits, step.draws[part], seqs, self.last_sampled, drawn)
            tokens[start:start + len(seqs)] = sampled
            if batch.scored or any(seq.params.logprobs is not None for seq in seqs):
                from nanoengine_extensions.logprobs import find_logprobs
                logprobs |= find_logprobs(logits, tokens[part], rows[part])
        tokens = tokens[:len(batch.sampled)]
        # There are more than max_num_seqs only when forks begin, and then the next step waits for
        # their tokens. For NO_TOKEN the next step computes token 0, whose result is not used.
        self.last_sampled[:len(tokens)] = tokens[:size].clamp(min=0)
        # into pinned memory
        tokens = tokens.to("cpu", non_blocking=True)
        return Launched(batch, tokens, logprobs, self.began, self.timestamp())

    def timestamp(self) -> Any:
        """Returns the current time of the device."""
        return time.monotonic()


def make_runner(config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> ModelRunner:
    """Returns a runner for a CPU, for a GPU, or for several devices."""
    if config.tensor_parallel_size > 1:
        from nanoengine_extensions.tensor_parallel import TensorParallelRunner, on_device
        return on_device(TensorParallelRunner, config.device)(config, model_config, folder)
    if config.device == "cuda":
        from nanoengine_gpu.runner import GpuRunner
        return GpuRunner(config, model_config, folder)
    return ModelRunner(config, model_config, folder)


# -------------------------------------------------------------------------------- choices


def choose_device(device: str) -> Any:
    """"auto" is the GPU if there is one. Raises ValueError for "cuda" without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise rejected("device", device, "'cpu' or 'auto', as PyTorch finds no GPU")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """Returns the dtype of a name; "auto" is bfloat16, or float32 on a CPU without bfloat16."""
    fastest = torch.bfloat16 if device == "cuda" or nanoengine_cpu.has_bfloat16() else torch.float32
    return fastest if dtype == "auto" else getattr(torch, dtype)


def size_cache(config: EngineConfig, limit: int, block_bytes: int, free: int) -> tuple[int, int]:
    """Returns the number of blocks of the KV cache, and the most tokens of a sequence.

    limit: the model's own, see `context_length`; block_bytes: K and V of a block in all layers;
    free: the bytes available for all blocks.

    Raises ValueError if an explicit max_model_len is more than the model or the cache allows.
    """
    num_blocks = config.num_kv_blocks or max(0, free // block_bytes)
    longest = min(limit, num_blocks * config.block_size)
    if (config.max_model_len or 2) > longest:
        raise rejected("max_model_len", config.max_model_len or limit, f"at most {longest}: "
                       f"{num_blocks} blocks of {config.block_size}, and the model's own {limit}")
    return num_blocks, config.max_model_len or longest
