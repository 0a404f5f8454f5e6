"""The small operations of a decoder, one kernel each. They are limited by memory, so each number is
read and written only once.

    rms_norm      residual sum and RMSNorm
    swiglu        SiLU(gate) * up
    store_heads   norm and rotation of all heads of a token; K and V go to the cache

All compute in float32, and round where PyTorch's operators would round, one after the other: a sum,
a normed head and SiLU(gate) have the model's dtype before they are used. Products and sums are not
contracted to FMAs (`enable_fp_fusion=False`), since PyTorch's are not.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# ------------------------------------------------------------------------------- RMSNorm


@triton.jit
def norm_kernel(x, delta, weight, total, out, size, eps, BLOCK: tl.constexpr):
    """A program computes one row. Without a sum, delta is None and total is not written."""
    columns = tl.arange(0, BLOCK)
    is_used = columns < size
    places = tl.program_id(0).to(tl.int64) * size + columns
    numbers = tl.load(x + places, is_used, 0.0).to(tl.float32)
    if delta is not None:
        numbers += tl.load(delta + places, is_used, 0.0).to(tl.float32)
        numbers = numbers.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + places, numbers, is_used)
    mean = tl.sum(numbers * numbers) / size
    weights = tl.load(weight + columns, is_used, 0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(mean + eps) * weights
    tl.store(out + places, normed.to(out.dtype.element_ty), is_used)


def rms_norm(x: Tensor, weight: Tensor, eps: float,
             delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns x + delta, and its RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467).

    x, delta: (..., size), of one dtype; weight: (size,). Without delta, the first result is x.
    """
    x = x.contiguous()
    size = x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    # up to 16 numbers for each thread
    norm_kernel[(x.numel() // size,)](
        x, None if delta is None else delta.contiguous(), weight, total, out, size, eps, block,
        num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False)
    return total, out


# -------------------------------------------------------------------------------- SwiGLU


@triton.jit
def swiglu_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used = columns < size
    gates = gate_up + row * size * 2 + columns
    gate = tl.load(gates, is_used, 0.0).to(tl.float32)
    up = tl.load(gates + size, is_used, 0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, activated * up, is_used)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up (Shazeer, 2020, arXiv:2002.05202): from (…, 2 * size) to (…, size)."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = min(1024, triton.next_power_of_2(size))
    swiglu_kernel[(out.numel() // size, triton.cdiv(size, block))](
        gate_up.contiguous(), out, size, block, num_warps=4, enable_fp_fusion=False)
    return out


# ----------------------------------------------------------- heads: norm, rotation, storing


def parts_of(cache: Any) -> tuple[Tensor, Any]:
    """Returns the numbers of a cache, and the scales in the same memory: each for K and for V.
    Without scales, they are None.

    Such a cache has `memory`, int8, (2, num_blocks, block_size, kv_heads, head_dim + 4), and says
    how the numbers are `stored`: int8 or float8_e4m3fn. In a block lie first all numbers, and then
    a float32 scale for each head of each token.
    """
    if not hasattr(cache, "stored"):
        return cache, (None, None)
    return cache.memory.view(cache.stored), cache.memory.view(torch.float32)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def heads_kernel(qkv, query, cache, scales, slots, angles, query_norm, key_norm, eps, num_tokens,
                 half_cache, BLOCK_SIZE: tl.constexpr, NUM_QUERIES: tl.constexpr,
                 NUM_KEYS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
                 COLUMNS: tl.constexpr):
    """A program computes some heads of one token: the left and the right half of each.

    Heads are those of queries, then of keys, then of values. scales: see `parts_of`
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    is_query = heads < NUM_QUERIES
    is_value = heads >= NUM_QUERIES + NUM_KEYS
    is_used = (heads < NUM_QUERIES + 2 * NUM_KEYS) & (columns < HALF)
    dtype: tl.constexpr = query.dtype.element_ty

    source = qkv + (token * (NUM_QUERIES + 2 * NUM_KEYS) + heads) * (2 * HALF) + columns
    left = tl.load(source, is_used, 0.0).to(tl.float32)
    right = tl.load(source + HALF, is_used, 0.0).to(tl.float32)

    if query_norm is not None:
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        weights = tl.where(is_query, query_norm, key_norm) + columns
        left_weight = tl.load(weights, columns < HALF, 0.0).to(tl.float32)
        right_weight = tl.load(weights + HALF, columns < HALF, 0.0).to(tl.float32)
        left = tl.where(is_value, left, (left * scale * left_weight).to(dtype).to(tl.float32))
        right = tl.where(is_value, right, (right * scale * right_weight).to(dtype).to(tl.float32))

    angle = angles + token * HALF + columns
    cos = tl.load(angle, columns < HALF, 0.0)
    sin = tl.load(angle + num_tokens.to(tl.int64) * HALF, columns < HALF, 0.0)
    rotated_left = tl.where(is_value, left, left * cos - right * sin).to(dtype)
    rotated_right = tl.where(is_value, right, right * cos + left * sin).to(dtype)

    slot = tl.load(slots + token).to(tl.int64)
    key = heads - NUM_QUERIES - tl.where(is_value, NUM_KEYS, 0)
    stored = (slot * NUM_KEYS + key) * (2 * HALF) + tl.where(is_value, half_cache, 0)
    to_query = query + (token * NUM_QUERIES + heads) * (2 * HALF)
    if scales is None:
        target = tl.where(is_query, to_query, cache + stored) + columns
        tl.store(target, rotated_left, is_used)
        tl.store(target + HALF, rotated_right, is_used)
    else:
        tl.store(to_query + columns, rotated_left, is_used & is_query)
        tl.store(to_query + columns + HALF, rotated_right, is_used & is_query)
        left, right = rotated_left.to(tl.float32), rotated_right.to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(left), 1, keep_dims=True),
                          tl.max(tl.abs(right), 1, keep_dims=True))
        # the sum is 0, or NaN if a number is not finite
        check = tl.sum((left + right) * 0, 1, keep_dims=True)
        is_float: tl.constexpr = cache.dtype.element_ty != tl.int8
        scale = tl.div_rn(tl.maximum(size, 1e-30), 448.0 if is_float else 127.0) + check
        is_stored = (heads >= NUM_QUERIES) & (heads < NUM_QUERIES + 2 * NUM_KEYS)
        # in front of a block are the scales of all blocks before it
        block = slot // BLOCK_SIZE
        target = cache + stored + block * (BLOCK_SIZE * NUM_KEYS * 4) + columns
        tl.store(target, in_8_bits(tl.div_rn(left, scale), cache), is_used & is_stored)
        tl.store(target + HALF, in_8_bits(tl.div_rn(right, scale), cache), is_used & is_stored)
        place = (block + 1) * (BLOCK_SIZE * NUM_KEYS * 2 * HALF // 4) + slot * NUM_KEYS + key
        place += tl.where(is_value, half_cache // 4, 0)
        tl.store(scales + place, scale, is_stored)


@triton.jit
def in_8_bits(numbers, cache):
    """To the nearest, ties to even, in the dtype of a cache."""
    if cache.dtype.element_ty == tl.int8:
        # in so large a number the last bits count units
        numbers = (numbers + 12582912.0) - 12582912.0
    return numbers.to(cache.dtype.element_ty)


def store_heads(qkv: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
                angles: Tensor, cache: Any, slots: Tensor) -> Tensor:
    """Norms and rotates the heads of queries and keys, and writes K and V to the cache.

    qkv: (T, heads + 2 * kv_heads, head_dim), side by side
    query_norm, key_norm: (head_dim,), weights of RMSNorm, or None for no norm
    angles: (2, T, ..., head_dim / 2) float32, cos and sin. Each pair (x[i], x[i + head_dim / 2]) is
        turned (RoPE; Su et al., 2021, arXiv:2104.09864).
    cache: (2, num_blocks, block_size, kv_heads, head_dim), contiguous; for 8 bits, see `parts_of`
    slots: (T,) int64, block * block_size + place in the block

    Returns the queries, (T, heads, head_dim).
    """
    if not cache.is_contiguous():
        raise ValueError(f"cache={tuple(cache.shape)} is not accepted: it must be contiguous")
    num_tokens, num_heads, head_dim = qkv.shape
    numbers, (scales, _) = parts_of(cache)
    _, _, block_size, num_keys, _ = numbers.shape
    num_queries = num_heads - 2 * num_keys
    query = qkv.new_empty(num_tokens, num_queries, head_dim)
    columns = triton.next_power_of_2(head_dim // 2)
    # 1,024 numbers in a program
    heads = min(512 // columns, triton.next_power_of_2(num_heads))
    heads_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv.contiguous(), query, numbers, scales, slots, angles.contiguous(), query_norm, key_norm,
        eps, num_tokens, numbers.stride(0), block_size, num_queries, num_keys, head_dim // 2, heads,
        columns, num_warps=2, enable_fp_fusion=False)
    return query
