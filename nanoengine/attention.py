"""Attention over the paged KV cache: its memory, and the backends.

A backend is one function. The runner chooses it, and the model calls it (`model.py`). Which model
asks is not known here, nor why a step consists of the tokens that it has.
"""

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

import nanoengine_cpu
from nanoengine.sampling_params import rejected
from nanoengine.step_inputs import StepInputs


def make_caches(config: PretrainedConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
                device: str, backend: str) -> Tensor:
    """K and V, (layers, 2, num_blocks, block_size, kv_heads, head_dim).

    Zeros, since the padded rows of a CUDA graph read block 0. The CPU's kernel has a layout of its
    own, in which only whole blocks can be copied.
    """
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    if backend == "numba":
        return nanoengine_cpu.empty_cache(config.num_hidden_layers, *shape, dtype)
    return torch.zeros(config.num_hidden_layers, 2, *shape, dtype=dtype, device=device)


# -------------------------------------------------------------------------------- backends


def flash_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """flash-attn 2 (Dao, 2023, arXiv:2307.08691).

    query: (T, heads, head_dim), rotated; cache: of a layer, with K and V of this step in it
    window: a query sees its last `window` keys, None for all

    Returns (T, heads, head_dim). The number of parts in which its decode kernel sums over the keys
    depends on the width of the block tables, which a CUDA graph fixes at `max_model_len`. The
    kernel reads the keys once for all heads of a group only where no window is given.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    keys, values = cache
    options = dict(block_table=step.block_tables, causal=True,
                   window_size=(window - 1, 0) if window else (-1, -1))
    if step.longest_query == 1:
        return flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=step.lengths, **options)[:, 0]
    return flash_attn_varlen_func(
        query, keys, values, step.query_starts, step.key_starts, step.longest_query,
        step.longest_keys, **options)


def varlen_attention(*inputs: Any) -> Tensor:
    """PyTorch's own build of these kernels; arguments and result are those of `flash_attention`."""
    from nanoengine_extensions.varlen import varlen_attention
    return varlen_attention(*inputs)


def gather_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """Plain PyTorch, slow, but anywhere and in any precision: it gathers each sequence's keys.

    Arguments and result are those of `flash_attention`. It reads lengths on the host, so that CUDA
    graphs cannot hold it.
    """
    out = torch.empty_like(query)
    starts = step.query_starts.tolist()
    for seq, length in enumerate(step.lengths.tolist()):
        gathered = cache[:, step.block_tables[seq]].flatten(1, 2)[:, :length]
        keys, values = gathered.transpose(1, 2)
        # not all queries at once: in float32 their weights for all keys are one tensor
        for first in range(starts[seq], starts[seq + 1], 256):
            rows = slice(first, min(first + 256, starts[seq + 1]))
            ages = step.positions[rows, None] - torch.arange(length, device=query.device)
            mask = (ages >= 0) & (ages < (window or length))
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1), keys, values, mask, enable_gqa=True)
            out[rows] = attended.transpose(0, 1)
    return out


# What the model calls. With "numba" it calls none: `nanoengine_cpu.optimize` puts the kernel, which
# also norms, rotates and stores, in place of the model's `Attention`.
BACKENDS = {"numba": None, "flash-attn": flash_attention, "varlen": varlen_attention,
            "gather": gather_attention}


def choose_backend(name: str, device: str, dtype: torch.dtype, block_size: int) -> str:
    """The backend of that name, or for "auto" the fastest for this device and precision.

    Raises ValueError for a backend that cannot work here; warns where only the slow one can.
    """
    is_fast = device == "cuda" and dtype != torch.float32
    # the fastest first
    works = {"numba": device == "cpu" and dtype != torch.float16,
             "flash-attn": is_fast and find_spec("flash_attn") is not None,
             # compared as versions
             "varlen": is_fast and torch.__version__ >= "2.12",
             "gather": True}
    usable = [backend for backend in works if works[backend]]
    chosen = usable[0] if name == "auto" else name
    if chosen not in usable:
        raise rejected("attention_backend", name, f"one of {usable} for {dtype} on {device}")
    if name == "auto" and chosen == "gather":
        warnings.warn("slow attention: bfloat16 and nanoengine[flash] are fast", stacklevel=2)
    if chosen in ("flash-attn", "varlen") and block_size % 256:
        raise rejected("block_size", block_size, f"a multiple of 256 with {chosen} attention")
    return chosen
