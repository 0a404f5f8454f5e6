"""`ModelRunner`: from a `Batch` to sampled tokens.

It owns the model, the memory of the KV cache, and the arrays that a step's inputs are written into.
Who runs, and why, is not its business.
"""

from pathlib import Path

import numpy as np
import psutil
import torch
from llvmlite.binding import get_host_cpu_features
from transformers import PretrainedConfig

from nanoengine.attention import CPUAttention, StepInputs
from nanoengine.block_manager import Copies
from nanoengine.config import EngineConfig
from nanoengine.loader import load_model
from nanoengine.model import rotary_table
from nanoengine.sampler import Logprobs, sample
from nanoengine.sampling_params import rejected
from nanoengine.scheduler import Batch


class ModelRunner:
    """Runs batches on one device.

    num_kv_blocks: blocks that can be handed out; block 0, which cannot, comes on top.
    num_host_blocks: blocks of the host pool, where preempted sequences are swapped out.
    block_bytes: K and V of one block in all layers.
    max_model_len: tokens that a sequence can have, as the model, the cache and the user allow.
    """

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        self.block_size = config.block_size
        self.dtype = choose_dtype(config.dtype)
        self.model = load_model(folder, model_config, self.dtype, config.load_format == "dummy")
        self.attention = CPUAttention(model_config, config.block_size)
        self.block_bytes = self.attention.make_caches(1, self.dtype).nbytes
        self.num_kv_blocks, self.max_model_len = size_cache(
            config, model_config.max_position_embeddings, self.block_bytes)
        swap_bytes = config.swap_space * 2**30 if config.preemption_mode == "swap" else 0
        self.num_host_blocks = int(swap_bytes // self.block_bytes)
        self.caches = self.attention.make_caches(self.num_kv_blocks + 1, self.dtype)
        self.host_caches = self.attention.make_caches(self.num_host_blocks + 1, self.dtype)
        self.rotary = rotary_table(model_config, self.max_model_len)

    @torch.inference_mode()
    def run(self, batch: Batch, step: StepInputs) -> tuple[list[int], list[Logprobs | None]]:
        """Computes a batch's tokens and samples one for each of `batch.sampled`."""
        logits = self.model(step, self.rotary, self.attention, self.caches)
        return sample(logits, [seq for _, seq in batch.sampled])

    def copy_blocks(self, copies: Copies) -> None:
        """Does the block copies of a step, in the order that they are meant in."""
        for blocks, source, target in ((copies.swap_out, self.caches, self.host_caches),
                                       (copies.copy_on_write, self.caches, self.caches),
                                       (copies.swap_in, self.host_caches, self.caches)):
            if blocks:
                target[:, :, list(blocks)] = source[:, :, list(blocks.values())]

    def prepare(self, batch: Batch) -> StepInputs:
        """The arrays of a step. One loop over sequences, none over tokens or blocks."""
        width = max(len(seq.block_table) for seq in batch.sequences)
        block_tables = np.zeros((len(batch), width), np.int32)
        token_ids: list[int] = []
        for table, seq, count in zip(block_tables, batch.sequences, batch.num_tokens):
            table[:len(seq.block_table)] = seq.block_table
            token_ids += seq.token_ids[-seq.num_uncomputed_tokens:][:count]
        num_tokens = np.array(batch.num_tokens)
        computed = np.array([seq.num_computed_tokens for seq in batch.sequences])
        stops = num_tokens.cumsum()  # the row behind each sequence's last
        owners = np.repeat(np.arange(len(batch)), num_tokens)
        positions = np.arange(len(token_ids)) + (computed + num_tokens - stops)[owners]
        blocks = block_tables[owners, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        sampled_rows = stops[[index for index, _ in batch.sampled]] - 1
        return StepInputs(*(torch.from_numpy(np.asarray(array, np.int32)) for array in (
            token_ids, positions, slots, owners, block_tables, sampled_rows)))


def choose_dtype(dtype: str) -> torch.dtype:
    """What was asked for; "auto" is bfloat16 where the CPU computes in it, else float32."""
    if dtype == "auto":
        has = get_host_cpu_features().get
        dtype = "bfloat16" if has("avx512bf16") or has("amx-bf16") or has("bf16") else "float32"
    return getattr(torch, dtype)


def size_cache(config: EngineConfig, model_limit: int, block_bytes: int) -> tuple[int, int]:
    """How many blocks the KV cache has, and how many tokens a sequence can have.

    model_limit: max_position_embeddings; block_bytes: K and V of a block in all layers.
    Raises ValueError where an explicit max_model_len is more than the model or the cache allows.
    """
    max_model_len = config.max_model_len or model_limit
    if max_model_len > model_limit:
        raise rejected("max_model_len", max_model_len, f"at most {model_limit}, the model's own")
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        wanted = config.limits()[0] * -(-max_model_len // config.block_size)
        num_blocks = min(wanted, psutil.virtual_memory().available // 4 // block_bytes)
    capacity = num_blocks * config.block_size
    if (config.max_model_len or 2) > capacity:
        raise rejected("max_model_len", max_model_len, f"at most {capacity}, as the KV cache has "
                       f"room for {num_blocks} blocks of {config.block_size} tokens")
    return num_blocks, min(max_model_len, capacity)
