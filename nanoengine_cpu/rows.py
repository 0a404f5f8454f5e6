"""What a decoder does to each row on its own, once over memory: RMSNorm and SwiGLU.

    for each row:                                for each row:
        squares, added up in 16 lanes                gate / (1 + e^-gate) * up
        each number times weight / rms

Every sum has one order, so that a row has the same bits whatever rows are beside it. The plain
versions, with which the tests compare, are `rms_norm` and `swiglu` in `functions.py`.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from nanoengine_cpu.compiling import compile_kernel
from nanoengine_cpu.vectors import (
    LANES, array_at, bits_of, exp2, fill, inlined, load_part, numbers_at, share, store_part, total,
    where_less)


@inlined()
def inverse_rms(row, size, eps):
    """1 / sqrt(the mean of all squares + eps)."""
    squares = fill(np.float32(0))
    for i in range(0, size, LANES):
        numbers = load_part(row, i, size)
        squares = squares + numbers * numbers
    return np.float32(1) / np.sqrt(total(squares) / np.float32(size) + np.float32(eps))


@inlined()
def silu(x, out):
    """x / (1 + e^-x) of 16 numbers, as exact as the numbers of `out` need it."""
    # e^87 is near the largest float32; what is further below gives about 0, too
    least = fill(np.float32(-87))
    x = where_less(x, least, least, x)
    return x / (fill(np.float32(1)) + exp2(x * fill(np.float32(-np.log2(np.e))), out))


@functools.cache
def rms_norm(dtype: torch.dtype) -> Callable:
    """kernel(x, weight, out, rows, size, eps), with addresses of (rows, size), (size,) and (rows,
    size) numbers of `dtype`, float32 or bfloat16."""
    uint = bits_of(dtype)

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
def swiglu(dtype: torch.dtype) -> Callable:
    """kernel(gate_up, out, rows, size), with addresses of (rows, 2, size) numbers of `dtype`, gate
    before up, and of (rows, size)."""
    uint = bits_of(dtype)

    def kernel(phase, thread, threads, arguments_at):
        gate_up, out, rows, size = numbers_at(arguments_at, 4)
        for r in range(*share(rows, thread, threads)):
            gate, up = array_at(gate_up, (rows, 2, size), uint)[r]
            line = array_at(out, (rows, size), uint)[r]
            for i in range(0, size, LANES):
                activated = silu(load_part(gate, i, size), line)
                store_part(line, i, size, activated * load_part(up, i, size))

    return compile_kernel(kernel)
