"""flash-attn, and PyTorch's own build of it, over the paged KV cache: two entries of `BACKENDS`.

Arguments and results are those of `nanoengine.attention.gather_attention`.
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention import BACKENDS, Backend
from nanoengine.step_inputs import StepInputs


def flash_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """flash-attn 2 (Dao, 2023, arXiv:2307.08691).

    Its decode kernel splits the keys into a number of parts that depends on the width of the block
    tables, which each CUDA graph fixes (`key_buckets` in runner.py). It reads the keys once for all
    heads of a group only without a window.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    keys, values = cache
    options: Any = dict(block_table=step.block_tables, causal=True,
                        window_size=(window - 1, 0) if window else (-1, -1))
    if step.longest_query == 1:
        return flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=step.lengths, **options)[:, 0]
    bounds = step.query_starts, step.key_starts, step.longest_query, step.longest_keys
    return flash_attn_varlen_func(query, keys, values, *bounds, **options)


def varlen_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """PyTorch's own build of these kernels, which accepts block tables from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn
    keys, values = cache
    # (keys to the left, keys to the right); a decode sees all keys anyway
    window_size = (window - 1, 0) if window else (-1, 0 if step.longest_query > 1 else -1)
    return varlen_attn(  # type: ignore
        query, keys, values, step.query_starts, step.key_starts, step.longest_query,
        step.longest_keys, enable_gqa=True, seqused_k=step.lengths, window_size=window_size,
        block_table=step.block_tables)


def has_flash_attn(device: str, dtype: torch.dtype) -> bool:
    """Warns about a package that is installed but cannot be imported."""
    try:
        return device == "cuda" and dtype != torch.float32 and bool(import_module("flash_attn"))
    except Exception as error:
        if find_spec("flash_attn"):
            logging.getLogger("nanoengine").warning(f"flash_attn cannot be imported: {error}")
        return False


def has_varlen(device: str, dtype: torch.dtype) -> bool:
    return device == "cuda" and dtype != torch.float32 and torch.__version__ >= "2.12"


BACKENDS.update({
    "flash-attn": Backend(flash_attention, has_flash_attn, 3, block_multiple=256, has_graphs=True),
    "varlen": Backend(varlen_attention, has_varlen, 2, block_multiple=256, has_graphs=True)})
