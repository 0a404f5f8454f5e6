"""Paged attention for the CPU, compiled by numba.

The kernel walks the block table, so nothing is gathered, padded or repeated. Each token of a step,
be it one of a prompt or the newest, attends on its own to the keys up to its position, in an order
that depends on that position alone: its result has the same bits whatever runs beside it, and in
however many chunks its prompt came. What the kernel computes is written in plain torch in
`tests/test_kernels.py`, which compares the two.

numba runs its loops on OpenMP where it can. On Linux that is the very libgomp that torch has
loaded, so that there is one pool of threads and the two never fight over the cores.
"""

import functools
import math
from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore

WORD = ir.IntType(32)
TILE = 256  # keys whose scores are held at a time
LOWEST = np.float32(-1e30)  # below any score; finite, as fastmath knows no infinity
LOG2_E = np.float32(math.log2(math.e))
# ln(2)^k / k!: the Taylor series of 2^x, good to 1e-7 for |x| <= 1/2
EXP2_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))


@intrinsic
def as_float32(typing_context, x):
    """A float32 from a float32, from its bits (uint32), or from bfloat16 bits (uint16)."""
    def codegen(context, builder, signature, args):
        value = args[0]
        if x == types.uint16:  # bfloat16 is the upper half of a float32
            value = builder.shl(builder.zext(value, WORD), ir.Constant(WORD, 16))
        return value if x == types.float32 else builder.bitcast(value, ir.FloatType())

    return types.float32(x), codegen


@intrinsic
def prefetch(typing_context, array, index):
    """Asks for the cache line of array[index], which will be read soon."""
    def codegen(context, builder, signature, args):
        address = builder.gep(make_array(array)(context, builder, args[0]).data, [args[1]])
        kind = ir.FunctionType(ir.VoidType(), [address.type, WORD, WORD, WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # hints: to be read, keep it in L2, data
        builder.call(function, [address, *(ir.Constant(WORD, hint) for hint in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@njit(fastmath=True, inline="always")
def exp(x):
    """e^x for x <= 0 in plain arithmetic, which LLVM vectorises; `expf` it would call in a loop.

    2^t = 2^n * 2^f with n the integer next to t, made by shifting n into a float's exponent.
    """
    t = max(x * LOG2_E, np.float32(-126))
    n = math.floor(t + np.float32(0.5))
    f = np.float32(t - n)
    power = EXP2_SERIES[6]
    for k in (5, 4, 3, 2, 1, 0):
        power = power * f + EXP2_SERIES[k]
    return power * as_float32(np.uint32((np.int32(n) + 127) << 23))


@functools.cache
def paged_attention(head_dim: int, group_size: int, block_size: int) -> Callable:
    """The kernel for a shape; as constants these let LLVM unroll and vectorise.

    kernel(query, key_cache, value_cache, block_tables, owners, positions, window, out):
        query: (tokens, heads, head_dim) float32, scaled by head_dim ** -0.5
        key_cache, value_cache: (blocks, kv_heads, block_size, head_dim) float32, or uint16 for bf16
        block_tables: (sequences, width) int32; owners: (tokens,) int32, rows of block_tables
        positions: (tokens,) int32; a token sees keys 0 to its own, or the last `window` of them
        out: (tokens, heads, head_dim) float32, written

    Each (kv head, token) is one task; heads are split over threads first, since tokens far down a
    prompt take longer. Scores of a tile of keys, then its values: the online softmax (Milakov &
    Gimelshein, 2018, arXiv:1805.02867), rescaled once a tile.
    """

    @njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
    def kernel(query, key_cache, value_cache, block_tables, owners, positions, window, out):
        num_tokens = query.shape[0]
        for task in prange(num_tokens * key_cache.shape[1]):
            kv_head, row = task // num_tokens, task % num_tokens
            first_head, last = kv_head * group_size, positions[row]
            table = block_tables[owners[row]]

            def cached(cache, position):
                soon = min(position + 16, last)  # hardware can't guess where the next block is
                for d in range(0, head_dim, 32):  # in bfloat16, a cache line of 64 bytes
                    prefetch(cache[table[soon // block_size], kv_head, soon % block_size], d)
                return cache[table[position // block_size], kv_head, position % block_size]

            weights = np.empty((group_size, TILE), np.float32)
            total = np.zeros((group_size, head_dim), np.float32)
            maximum = np.full(group_size, LOWEST, np.float32)
            denominator = np.zeros(group_size, np.float32)
            for tile in range(max(0, last + 1 - window), last + 1, TILE):
                size = min(TILE, last + 1 - tile)
                for i in range(size):
                    key = cached(key_cache, tile + i)
                    for g in range(group_size):
                        score = np.float32(0)
                        for d in range(head_dim):
                            score += query[row, first_head + g, d] * as_float32(key[d])
                        weights[g, i] = score
                for g in range(group_size):
                    new_maximum = max(maximum[g], weights[g, :size].max())
                    tile_sum = np.float32(0)
                    for i in range(size):
                        weights[g, i] = exp(weights[g, i] - new_maximum)
                        tile_sum += weights[g, i]
                    rescale = exp(maximum[g] - new_maximum)
                    denominator[g] = denominator[g] * rescale + tile_sum
                    maximum[g] = new_maximum
                    total[g] *= rescale
                for i in range(size):
                    value = cached(value_cache, tile + i)
                    for g in range(group_size):
                        for d in range(head_dim):
                            total[g, d] += weights[g, i] * as_float32(value[d])
            for g in range(group_size):
                out[row, first_head + g] = total[g] / denominator[g]

    return kernel
