"""What a decoder does to each row on its own, once over memory: RMSNorm and SwiGLU.

    for each row:                                for each row:
        squares, added up in 16 lanes                gate / (1 + e^-gate) * up
        each number times weight / rms

Every sum has one order, so that a row has the same bits whatever rows are beside it. The plain
versions, with which the tests compare, are `rms_norm` and `swiglu` in `model.py`.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from numba import prange

from nanoengine.kernels.compiling import compile_kernel
from nanoengine.kernels.vectors import LANES, array_at, fill, inlined, load, store, total

# ln(2)^k / k!: the Taylor series of 2^x, good to 1e-7 for |x| <= 1/2
EXP2_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))


@inlined()
def to_float32(bits, shift):
    """A number from its bits: bfloat16 is the upper half of a float32 (shift 16)."""
    return np.uint32(np.uint32(bits) << shift).view(np.float32)


@inlined()
def to_bits(number, shift):
    """The bits of a float32, or of the nearest bfloat16; of two, the even one."""
    bits = np.float32(number).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if shift else bits


@inlined()
def copy_rows(source, from_pitch, target, to_pitch, rows, vectors):
    """Rows of so many vectors; each row begins a pitch behind the row before."""
    for r in range(rows):
        for c in range(0, vectors * LANES, LANES):
            store(target, r * to_pitch + c, load(source, r * from_pitch + c))


@inlined()
def store_row(row, first, numbers, size, scale, shift):
    """row[first + i] = numbers[i] * scale, for all i below size.

    Of two nearest bfloat16 numbers, vectors take the larger, and the rest takes the even one.
    """
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store(row, first + i, load(numbers, i) * fill(np.float32(scale)))
    for i in range(whole, size):
        row[first + i] = to_bits(numbers[i] * np.float32(scale), shift)


@inlined()
def inverse_rms(row, size, eps, shift):
    """1 / sqrt(the mean of all squares + eps)."""
    squares = fill(np.float32(0))
    rest = size - size % LANES
    for i in range(0, rest, LANES):
        numbers = load(row, i)
        squares = squares + numbers * numbers
    mean = total(squares)
    for i in range(rest, size):
        mean += to_float32(row[i], shift) ** 2
    return np.float32(1) / np.sqrt(mean / np.float32(size) + np.float32(eps))


@inlined()
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
            scale = inverse_rms(row, size, eps, shift)
            for i in range(size):
                number = to_float32(row[i], shift) * scale * to_float32(weights[i], shift)
                line[i] = to_bits(number, shift)

    return compile_kernel(kernel, "(int64, int64, int64, int64, int64, float64)")


@functools.cache
def swiglu(shift: int) -> Callable:
    """kernel(gate_up, out, rows, size), with addresses of (rows, 2, size) numbers, gate before up,
    and of (rows, size)."""
    uint = np.uint16 if shift else np.uint32

    def kernel(gate_up, out, rows, size):
        for r in prange(rows):
            both = array_at(gate_up, (rows, 2, size), uint)[r]
            line = array_at(out, (rows, size), uint)[r]
            for i in range(size):
                gate = to_float32(both[0, i], shift)
                small = exp(-abs(gate))
                sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
                # rounded in between, as two operators of PyTorch do it
                activated = to_float32(to_bits(gate * sigmoid, shift), shift)
                line[i] = to_bits(activated * to_float32(both[1, i], shift), shift)

    return compile_kernel(kernel, "(int64, int64, int64, int64)")
