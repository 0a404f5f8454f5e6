"""Attention over the paged KV cache.

A backend owns the layout of the cache: it makes a layer's cache, writes the K and V of a step into
it, and lets the step's queries attend. What a step consists of comes as `StepInputs`; which model
asks is not known here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.kernels import paged_attention


@dataclass
class StepInputs:
    """What the device needs for one step: T tokens of S sequences. All tensors are int32."""

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: Tensor  # (T,) where K and V go: block * block_size + offset
    owners: Tensor  # (T,) which sequence a token belongs to: a row of block_tables
    block_tables: Tensor  # (S, width), padded with 0
    sampled_rows: Tensor  # which of the T rows are to be sampled


class CPUAttention:
    """Every token of a step, be it of a prompt or the newest, goes through one paged kernel."""

    def __init__(self, config: PretrainedConfig, block_size: int) -> None:
        self.config = config
        self.block_size = block_size
        group_size = config.num_attention_heads // config.num_key_value_heads
        self.kernel = paged_attention(config.head_dim, group_size, block_size)

    def make_caches(self, num_blocks: int, dtype: torch.dtype) -> Tensor:
        """K and V: (layers, 2, num_blocks, kv_heads, block_size, head_dim), zeros.

        NumPy's zeros are memory only once they are written to; torch's are at once.
        """
        shape = (self.config.num_hidden_layers, 2, num_blocks, self.config.num_key_value_heads,
                 self.block_size, self.config.head_dim * dtype.itemsize)
        return torch.from_numpy(np.zeros(shape, np.uint8)).view(dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None,
                 cache: Tensor, step: StepInputs) -> Tensor:
        """Writes the K and V of the whole step, then attends with its queries.

        query: (T, heads, head_dim); key, value: (T, kv_heads, head_dim); window: a query sees
        its last `window` keys, None for all. Returns (T, heads, head_dim).
        """
        blocks, offsets = step.slots // self.block_size, step.slots % self.block_size
        cache[0, blocks, :, offsets] = key
        cache[1, blocks, :, offsets] = value
        query = query.to(torch.float32, copy=True).mul_(self.config.head_dim ** -0.5)
        out = torch.empty_like(query)
        bits = cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache  # for NumPy
        self.kernel(query.numpy(), *bits.numpy(), step.block_tables.numpy(), step.owners.numpy(),
                    step.positions.numpy(), window or 2**31 - 1, out.numpy())
        return out.to(key.dtype)
