"""Paged attention for the CPU, compiled by numba, with what its heads go through before.

The kernel walks the block table, so nothing is gathered, padded or repeated. Each token of a step,
be it one of a prompt or the newest, attends on its own to the keys up to its position, in an order
that depends on that position alone: its result has the same bits whatever runs beside it, and in
however many chunks its prompt came. What the kernel computes is written in plain torch in
`tests/test_attention.py`, which compares the two; norm and rotation also in `rms_norm` (model.py)
and `rotate` (attention.py), of which each operation would go through memory on its own.

numba runs its loops on OpenMP where it can. On Linux that is the very libgomp that torch has
loaded, so that there is one pool of threads and the two never fight over the cores.

What numba keeps on disk it has optimised once more than what it runs at first, and sums may then be
in another order: at its level "max", where all is optimised twice, both are the same code.
"""

import functools
import math
from collections.abc import Callable

import numba
import numpy as np
from numba import carray, float32, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore
numba.config.OPT = type(numba.config.OPT)("max")  # type: ignore


@intrinsic(prefer_literal=True)
def registers(typing_context, size):
    """Room for `size` float32 numbers that LLVM sees every use of, and so can keep in registers.

    Sums in an array of NumPy's it has to write back after each addition: others might read there.
    """
    def generate(context, builder, signature, arguments):
        return cgutils.alloca_once(builder, context.get_value_type(float32), size.literal_value)
    return types.CPointer(float32)(size), generate


# ln(2)^k / k!: the Taylor series of 2^x, good to 1e-7 for |x| <= 1/2
EXP2_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))


@njit(fastmath=True, inline="always")
def exp(x):
    """e^x for x <= 0 in plain arithmetic, which LLVM vectorises; `expf` it would call in a loop.

    2^t = 2^n * 2^(t - n) with n the integer next to t, shifted into a float's exponent.
    """
    t = max(x * np.float32(math.log2(math.e)), np.float32(-126))
    n = np.int32(t - np.float32(0.5))
    power = EXP2_SERIES[6]
    for k in (5, 4, 3, 2, 1, 0):
        power = power * (t - np.float32(n)) + EXP2_SERIES[k]
    return power * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always")
def to_float32(bits, shift):
    """A number from its bits, which are the upper ones of a float32: bfloat16 lacks the last 16."""
    return np.uint32(np.uint32(bits) << shift).view(np.float32)


@njit(inline="always")
def to_bits(number, shift):
    """The bits of a float32, or of the bfloat16 next to it; of two, the even one."""
    bits = np.float32(number).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if shift else bits


@functools.cache
def paged_attention(head_dim: int, group_size: int, block_size: int, shift: int) -> Callable:
    """The kernel for a shape; as constants these let LLVM unroll and vectorise.

    kernel(qkv, kv, out, norms, rope, blocks, offsets, tables, owners, positions, eps, window),
    with numbers as their bits, uint32 of float32 (shift 0), or uint16 of bfloat16 (shift 16):
        qkv: (tokens, heads + 2 * kv_heads, head_dim), queries, then keys, then values; queries and
            keys are normed and rotated in place, then K and V are written to the cache
        kv: the cache, (2, blocks, kv_heads, block_size, head_dim)
        out: (tokens, heads, head_dim), is written
        norms: (2, head_dim) float32, weights of the norms of queries and of keys
        rope: (2, tokens, head_dim / 2) float32, cos and sin of a token's angles
        blocks, offsets: (tokens,) int64, where in the cache a token's K and V go
        tables: (sequences, width) int32, of blocks; owners: (tokens,) int32, rows of tables
        positions: (tokens,) int32; a token sees keys 0 to its own, or the last `window` of them
        eps: of the norms; -1 for a model that has none

    First a token after the other is normed, rotated and stored, in one pass over its heads. Then
    each (kv head, token) is one task; heads are split over threads first, since tokens far down a
    prompt take longer. It takes all scores first, then one softmax, then the values. What it sums
    up, its queries and the key of the moment stay in registers; only scores go through memory.
    """
    size, half = group_size * head_dim, head_dim // 2

    @njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
    def kernel(qkv, kv, out, norms, rope, blocks, offsets, tables, owners, positions, eps, window):
        num_heads, num_kv_heads = out.shape[1], kv.shape[2]
        for row in prange(len(qkv)):
            cos, sin = rope[0, row], rope[1, row]
            for head in range(num_heads + num_kv_heads):
                line, norm = qkv[row, head], norms[int(head >= num_heads)]
                squares = np.float32(0)
                for d in range(head_dim):
                    squares += to_float32(line[d], shift) ** 2
                scale = np.float32(1 / np.sqrt(squares / head_dim + eps) if eps >= 0 else 1)
                for d in range(half):
                    left = to_float32(line[d], shift) * norm[d] * scale
                    right = to_float32(line[half + d], shift) * norm[half + d] * scale
                    line[d] = to_bits(left * cos[d] - right * sin[d], shift)
                    line[half + d] = to_bits(right * cos[d] + left * sin[d], shift)
            kv[0, blocks[row], :, offsets[row]] = qkv[row, num_heads:-num_kv_heads]
            kv[1, blocks[row], :, offsets[row]] = qkv[row, -num_kv_heads:]
        for task in prange(num_kv_heads * len(qkv)):
            kv_head, row = task // len(qkv), task % len(qkv)
            table, last = tables[owners[row]], positions[row]
            start = max(0, last + 1 - window)
            queries = carray(registers(size), (group_size, head_dim), np.float32)
            numbers = carray(registers(head_dim), (head_dim,), np.float32)
            total = carray(registers(size), (group_size, head_dim), np.float32)
            for g in range(group_size):
                for d in range(head_dim):
                    number = to_float32(qkv[row, kv_head * group_size + g, d], shift)
                    queries[g, d] = number * np.float32(head_dim ** -0.5)
                    total[g, d] = 0
            weights = np.empty((group_size, last + 1 - start), np.float32)
            for i in range(last + 1 - start):
                index, offset = divmod(start + i, block_size)
                line = kv[0, table[index], kv_head, offset]
                for d in range(head_dim):
                    numbers[d] = to_float32(line[d], shift)
                for g in range(group_size):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += queries[g, d] * numbers[d]
                    weights[g, i] = score
            for g in range(group_size):
                maximum, denominator = weights[g].max(), np.float32(0)
                for i in range(last + 1 - start):
                    weights[g, i] = exp(weights[g, i] - maximum)
                    denominator += weights[g, i]
                weights[g] /= denominator
            for i in range(last + 1 - start):
                index, offset = divmod(start + i, block_size)
                line = kv[1, table[index], kv_head, offset]
                for g in range(group_size):
                    for d in range(head_dim):
                        total[g, d] += weights[g, i] * to_float32(line[d], shift)
            for g in range(group_size):
                for d in range(head_dim):
                    out[row, kv_head * group_size + g, d] = to_bits(total[g, d], shift)

    return kernel
