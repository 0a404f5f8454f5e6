"""Paged attention for the CPU, compiled by numba, with head norms, rotation and the cache writes.

    for each token of the step:                 for each KV head and each token:
        norm and rotate its queries and keys        scores   of its group of queries with each key
        write its K and V to the cache              softmax  over them
                                                    values   summed up by these weights

    kv[0 or 1, block, kv_head, offset, :]       the cache: K, then V; the vectors of a head are
                                                adjacent within a block

The kernel walks the block table, so that nothing is gathered, padded or repeated. Each token of a
step, of a prompt or the newest, attends on its own to the keys up to its position, in an order of
sums that depends on its position alone. So its result has the same bits whatever runs beside it,
and in however many chunks its prompt came. The plain version that the tests compare with is
`plain_attention` in `tests/test_attention.py`.

numba runs its loops on OpenMP where it can. On Linux that is the very libgomp that torch has
loaded: there is one pool of threads, and the two never fight over the cores.

Kernels loaded from numba's disk cache went through one more optimisation pass, which can reorder
sums. At numba's level "max" all kernels are optimised twice, and both have the same bits.
"""

import functools
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, njit, prange

# once in a process: compiling one kernel raises an event for each function in it
say_once = functools.cache(logging.getLogger(__name__).info)

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore
numba.config.OPT = type(numba.config.OPT)("max")  # type: ignore


@numba.extending.intrinsic(prefer_literal=True)
def registers(typing_context, rows, columns):
    """Room for rows * columns float32 numbers that LLVM can keep in registers: it sees every use.

    Sums in a NumPy array would go back to memory after each addition: others might read there.
    """
    def generate(context, builder, signature, arguments):
        return numba.core.cgutils.alloca_once(builder, context.get_value_type(numba.float32),
                                              rows.literal_value * columns.literal_value)
    return numba.types.CPointer(numba.float32)(rows, columns), generate


# ln(2)^k / k!: the Taylor series of 2^x, good to 1e-7 for |x| <= 1/2
EXP2_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))


@njit(fastmath=True, inline="always")
def exp(x):
    """e^x for x <= 0, in plain arithmetic that LLVM vectorises. (A loop would call `expf`.)

    2^t = 2^n * 2^(t - n), with n the integer next to t, shifted into the exponent of a float.
    """
    t = max(x * np.float32(math.log2(math.e)), np.float32(-126))
    n = np.int32(t - np.float32(0.5))
    power = EXP2_SERIES[6]
    for k in (5, 4, 3, 2, 1, 0):
        power = power * (t - np.float32(n)) + EXP2_SERIES[k]
    return power * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always")
def to_float32(bits, shift):
    """A number from its bits: bfloat16 is the upper half of a float32 (shift 16)."""
    return np.uint32(np.uint32(bits) << shift).view(np.float32)


@njit(inline="always")
def to_bits(number, shift):
    """The bits of a float32, or of the nearest bfloat16; of two, the even one."""
    bits = np.float32(number).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if shift else bits


@njit(inline="always")
def norm_and_rotate(head, weight, cos, sin, eps, head_dim, shift):
    """RMSNorm (unless eps is negative) and RoPE of one head, (head_dim,), in place."""
    squares = np.float32(0)
    for d in range(head_dim):
        squares += to_float32(head[d], shift) ** 2
    scale = np.float32(1 / np.sqrt(squares / head_dim + eps) if eps >= 0 else 1)
    half = head_dim // 2
    for d in range(half):
        left = to_float32(head[d], shift) * weight[d] * scale
        right = to_float32(head[half + d], shift) * weight[half + d] * scale
        head[d] = to_bits(left * cos[d] - right * sin[d], shift)
        head[half + d] = to_bits(right * cos[d] + left * sin[d], shift)


@njit(inline="always")
def attend(heads, kv, kv_head, table, last, window, out, group_size, head_dim, block_size, shift):
    """One token's queries of one KV head over the keys up to `last`, or the last `window` of them.

    heads, out: (heads, head_dim), of the token; table: the blocks of its sequence. Queries, the key
    at hand and the sums stay in registers; only scores go through memory.
    """
    first = max(0, last + 1 - window)
    query = carray(registers(group_size, head_dim), (group_size, head_dim), np.float32)
    total = carray(registers(group_size, head_dim), (group_size, head_dim), np.float32)
    key = carray(registers(1, head_dim), (head_dim,), np.float32)
    for g in range(group_size):
        for d in range(head_dim):
            number = to_float32(heads[kv_head * group_size + g, d], shift)
            query[g, d] = number * np.float32(head_dim ** -0.5)
            total[g, d] = 0

    # scores
    weights = np.empty((group_size, last + 1 - first), np.float32)
    for i in range(last + 1 - first):
        index, offset = divmod(first + i, block_size)
        vector = kv[0, table[index], kv_head, offset]
        for d in range(head_dim):
            key[d] = to_float32(vector[d], shift)
        for g in range(group_size):
            score = np.float32(0)
            for d in range(head_dim):
                score += query[g, d] * key[d]
            weights[g, i] = score

    # softmax
    for g in range(group_size):
        maximum = weights[g].max()
        denominator = np.float32(0)
        for i in range(last + 1 - first):
            weights[g, i] = exp(weights[g, i] - maximum)
            denominator += weights[g, i]
        weights[g] /= denominator

    # values
    for i in range(last + 1 - first):
        index, offset = divmod(first + i, block_size)
        vector = kv[1, table[index], kv_head, offset]
        for g in range(group_size):
            for d in range(head_dim):
                total[g, d] += weights[g, i] * to_float32(vector[d], shift)
    for g in range(group_size):
        for d in range(head_dim):
            out[kv_head * group_size + g, d] = to_bits(total[g, d], shift)


def set_num_threads(count: int) -> None:
    """On how many threads the kernels run that the calling thread starts."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore


class Announcement(numba.core.event.Listener):
    """Says that a kernel is being compiled, which takes seconds."""

    def on_start(self, event):
        say_once("compiling the attention kernel, which takes seconds; it is kept on disk")

    def on_end(self, event):
        pass


def compile_kernel(kernel: Callable, signature: str) -> Callable:
    """The compiled kernel, from numba's cache on disk if it has it.

    Where the cache cannot be read or written, it warns, and the kernel is compiled without.
    """
    jit: Any = functools.partial(njit, parallel=True, fastmath=True, error_model="numpy")
    folder = f"{Path(__file__).parent}/__pycache__ or the user's cache folder"
    try:
        compiled = jit(cache=True)(kernel)
        folder = compiled.stats.cache_path
        with numba.core.event.install_listener("numba:compile", Announcement()):
            compiled.compile(signature)
    # a folder that is read-only, a full disk, a damaged file: all kinds of errors
    except Exception as error:
        warnings.warn(f"numba cannot use {folder}: kernels are compiled anew in each process "
                      f"({error})", stacklevel=2)
        compiled = jit(signature)(kernel)
    return compiled


@functools.cache
def paged_attention(head_dim: int, group_size: int, block_size: int, shift: int) -> Callable:
    """The kernel for a shape: LLVM unrolls and vectorises over these constants.

    kernel(qkv, kv, out, norms, rope, slot_blocks, slot_offsets, block_tables, sequence_of_token,
           positions, eps, window), where uint is uint32 with the bits of a float32 (shift 0), or
    uint16 with those of a bfloat16 (shift 16):

        qkv: (tokens, heads + 2 * kv_heads, head_dim) uint, queries, then keys, then values; queries
            and keys are normed and rotated in place
        kv: (2, blocks, kv_heads, block_size, head_dim) uint, the cache; K and V are written to it
        out: (tokens, heads, head_dim) uint, is written
        norms: (2, head_dim) float32, the weights of the norms of queries and of keys
        rope: (2, tokens, head_dim / 2) float32, cos and sin of a token's angles
        slot_blocks, slot_offsets: (tokens,) int64, where in the cache a token's K and V go
        block_tables: (sequences, width) int32
        sequence_of_token: (tokens,) int32, rows of block_tables
        positions: (tokens,) int32; a token sees keys 0 to its own, or the last `window` of them
        eps: of the norms; -1 for a model that has none
    """
    def kernel(qkv, kv, out, norms, rope, slot_blocks, slot_offsets, block_tables,
               sequence_of_token, positions, eps, window):
        for token in prange(len(qkv)):
            for head in range(len(qkv[token]) - kv.shape[2]):
                norm_and_rotate(qkv[token, head], norms[int(head >= out.shape[1])], rope[0, token],
                                rope[1, token], eps, head_dim, shift)
            key_and_value = qkv[token, out.shape[1]:].reshape((2, kv.shape[2], head_dim))
            kv[:, slot_blocks[token], :, slot_offsets[token]] = key_and_value
        # heads first: tokens far down a prompt take longer, and each thread gets a share of them
        for task in prange(kv.shape[2] * len(qkv)):
            token = task % len(qkv)
            table = block_tables[sequence_of_token[token]]
            attend(qkv[token], kv, task // len(qkv), table, positions[token], window, out[token],
                   group_size, head_dim, block_size, shift)

    uint = "uint16" if shift else "uint32"
    return compile_kernel(kernel, f"""(
        {uint}[:,:,::1], {uint}[:,:,:,:,::1], {uint}[:,:,::1], float32[:,::1], float32[:,:,::1],
        int64[::1], int64[::1], int32[:,::1], int32[::1], int32[::1], float64, int64)""")
