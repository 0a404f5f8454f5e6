"""What a decoder does to each row on its own, once over memory: RMSNorm and SwiGLU.

    for each row:                                for each row:
        squares, added up in 16 lanes                gate / (1 + e^-gate) * up
        each number times weight / rms

Every sum has one order, so that a row has the same bits whatever rows are beside it. The plain
versions, with which the tests compare, are `rms_norm` and `swiglu` in `model.py`.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import carray, prange

from nanoengine.kernels.compiling import compile_kernel
from nanoengine.kernels.vectors import (
    LANES, array_at, exp2, fill, inlined, load, stack, store, total, where_less)


@inlined()
def load_part(row, first, size):
    """The 16 numbers from `first` on, or those before `size` and then zeros."""
    if size - first >= LANES:
        return load(row, first)
    part = carray(stack(LANES), LANES, np.float32).view(row.dtype)
    part[:] = 0
    for i in range(size - first):
        part[i] = row[first + i]
    return load(part, 0)


@inlined()
def store_part(row, first, size, numbers):
    """16 numbers from `first` on, or only those that have a place before `size`."""
    if size - first >= LANES:
        store(row, first, numbers)
    else:
        part = carray(stack(LANES), LANES, np.float32).view(row.dtype)
        store(part, 0, numbers)
        for i in range(size - first):
            row[first + i] = part[i]


@inlined()
def copy_rows(source, from_pitch, target, to_pitch, rows, vectors):
    """Rows of so many vectors; each row begins a pitch behind the row before."""
    for r in range(rows):
        for c in range(0, vectors * LANES, LANES):
            store(target, r * to_pitch + c, load(source, r * from_pitch + c))


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
    power, most = x * fill(np.float32(-np.log2(np.e))), fill(np.float32(126))
    return x / (fill(np.float32(1)) + exp2(where_less(power, most, power, most), out))


@functools.cache
def rms_norm(shift: int) -> Callable:
    """kernel(x, weight, out, rows, size, eps), with addresses of (rows, size), (size,) and (rows,
    size) numbers: float32 (shift 0) or bfloat16 (shift 16)."""
    uint = np.uint16 if shift else np.uint32

    def kernel(x, weight, out, rows, size, eps):
        weights = array_at(weight, size, uint)
        for r in prange(rows):
            row = array_at(x, (rows, size), uint)[r]
            line = array_at(out, (rows, size), uint)[r]
            scale = fill(inverse_rms(row, size, eps))
            whole = size - size % LANES
            for i in range(0, whole, LANES):
                store(line, i, load(row, i) * scale * load(weights, i))
            if whole < size:
                normed = load_part(row, whole, size) * scale * load_part(weights, whole, size)
                store_part(line, whole, size, normed)

    return compile_kernel(kernel, "(int64, int64, int64, int64, int64, float64)")


@functools.cache
def swiglu(shift: int) -> Callable:
    """kernel(gate_up, out, rows, size), with addresses of (rows, 2, size) numbers, gate before up,
    and of (rows, size)."""
    uint = np.uint16 if shift else np.uint32

    def kernel(gate_up, out, rows, size):
        for r in prange(rows):
            gate, up = array_at(gate_up, (rows, 2, size), uint)[r]
            line = array_at(out, (rows, size), uint)[r]
            for i in range(0, size, LANES):
                activated = silu(load_part(gate, i, size), line)
                store_part(line, i, size, activated * load_part(up, i, size))

    return compile_kernel(kernel, "(int64, int64, int64, int64)")
