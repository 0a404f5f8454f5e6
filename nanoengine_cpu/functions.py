"""The kernels as functions of tensors, and the smallest of the kernels, RMSNorm."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine_cpu import attention as attention_kernels
from nanoengine_cpu.attention import inverse_rms
from nanoengine_cpu.compiling import compile_kernel
from nanoengine_cpu.memory import in_huge_pages
from nanoengine_cpu.vectors import (
    DTYPES, LANES, array_at, fill, load_part, numbers_at, share, store_part)


@functools.cache
def rms_norm_kernel(dtype: torch.dtype) -> Callable:
    """kernel(x, weight, out, rows, size, eps_bits), with addresses of (rows, size), (size,) and
    (rows, size) numbers of `dtype`, float32 or bfloat16."""
    uint = DTYPES[dtype]

    def kernel(phase, thread, threads, arguments_at):
        x, weight, out, rows, size, eps_bits = numbers_at(arguments_at, 6)
        eps = np.int32(eps_bits).view(np.float32)
        weights = array_at(weight, size, uint)
        for r in range(*share(rows, thread, threads)):
            row = array_at(x, (rows, size), uint)[r]
            line = array_at(out, (rows, size), uint)[r]
            scale = fill(inverse_rms(row, size, eps))
            for i in range(0, size, LANES):
                normed = load_part(row, i, size) * scale * load_part(weights, i, size)
                store_part(line, i, size, normed)

    return compile_kernel(kernel)


@functools.cache
def bits_of_number(number: float) -> int:
    """The bits of a float32 number, as kernels take it."""
    return int(np.float32(number).view(np.int32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich, 2019, arXiv:1910.07467. In float32."""
    # all that the kernel cannot read
    if x.dtype not in DTYPES or not x.is_cpu or x.ndim != 2 or not x.is_contiguous():
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    out = torch.empty_like(x)
    rms_norm_kernel(x.dtype)(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, bits_of_number(eps))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up (Shazeer, 2020, arXiv:2002.05202), from both side by side, in PyTorch's
    operators. A packed MLP has it within its product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def empty_cache(layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int,
                dtype: torch.dtype) -> Tensor:
    """K and V of all layers, (layers, 2, num_blocks, block_size, kv_heads, numbers).

    It becomes memory when it is written to. How the numbers of a head lie within a block, and are
    padded, is the kernel's own business: only whole blocks can be copied.
    """
    numbers = attention_kernels.numbers_per_token(head_dim, block_size)
    shape = (layers, 2, num_blocks, kv_heads, block_size, numbers)
    memory = in_huge_pages(math.prod(shape) * dtype.itemsize)
    return memory.view(dtype).view(shape).transpose(3, 4)


def paged_attention(qkv: Tensor, norms: Tensor, eps: float, angles: Tensor, cache: Tensor,
                    window: int | None, slot_mapping: Tensor, block_tables: Tensor,
                    sequence_of_token: Tensor, positions: Tensor) -> Tensor:
    """All between two projections: head norms, rotation, cache and attention, for tokens of
    prompts and decodes alike.

    qkv: (T, heads + 2 * kv_heads, head_dim)
    norms: (2, head_dim) float32, weights of the norms of query heads and key heads
    eps: of these norms; -1 for a model without them
    angles: (2, T, head_dim / 2), cos and sin, float32
    cache: of a layer, from `empty_cache`; K and V are written to it
    slot_mapping: (T,) int64, where: block * block_size + offset
    block_tables: (sequences, width) int32; sequence_of_token, positions: (T,) int32

    Returns (T, heads, head_dim). All other tensors must be contiguous: the kernel gets addresses,
    and can't check what lies there.
    """
    _, num_blocks, block_size, kv_heads, _ = cache.shape
    num_tokens, num_heads, head_dim = qkv.shape
    num_queries = num_heads - 2 * kv_heads
    out = qkv.new_empty(num_tokens, num_queries, head_dim)
    arrays = (qkv, cache, out, norms, angles, slot_mapping, block_tables, sequence_of_token,
              positions)
    kernel = attention_kernels.paged_attention(
        head_dim, num_queries // kv_heads, block_size, qkv.dtype)
    kernel(*[array.data_ptr() for array in arrays], num_tokens, kv_heads, num_blocks,
           *block_tables.shape, window or 2**31 - 1, bits_of_number(eps))
    return out


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row of a matrix, and its place, of several the first.

    On a CPU PyTorch finds a maximum in vectors, but its place one number at a time. So this first
    takes the maximum of each group of neighbours, and looks for places in one group alone.
    """
    groups = x.unflatten(1, (-1, math.gcd(x.shape[1], 128)))
    largest, group = groups.amax(dim=-1).max(dim=-1, keepdim=True)
    place = groups.take_along_dim(group[:, :, None], dim=1).max(dim=-1).indices
    return largest[:, 0], (group * groups.shape[-1] + place)[:, 0]


def columns_above(x: Tensor, thresholds: Tensor) -> Any:
    """The columns of a matrix where some row is not below its threshold, or is its maximum; on a
    GPU all, as the host would have to wait for them."""
    if not x.is_cpu:
        return slice(None)
    thresholds = x.amax(dim=-1, keepdim=True).minimum(thresholds)
    return (~(x < thresholds)).any(dim=0).nonzero()[:, 0]
