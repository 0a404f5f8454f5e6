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
from numba import carray, prange

from nanoengine.kernels.compiling import compile_kernel
from nanoengine.kernels.vectors import LANES, fill, inlined, load, stack, store

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
def inverse_rms(row, size, eps, shift):
    """1 / sqrt(the mean of all squares + eps)."""
    squares = fill(np.float32(0))
    rest = size - size % LANES
    for i in range(0, rest, LANES):
        numbers = load(row, i)
        squares = squares + numbers * numbers
    lanes = carray(stack(LANES), LANES, np.float32)
    store(lanes, 0, squares)
    total = lanes.sum()
    for i in range(rest, size):
        total += to_float32(row[i], shift) ** 2
    return np.float32(1 / np.sqrt(total / size + eps))


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
    """kernel(x, weight, eps, out): x and out are (rows, size), weight is (size,); all are bits."""
    def kernel(x, weight, eps, out):
        for r in prange(len(x)):
            row = x[r]
            line = out[r]
            scale = inverse_rms(row, len(row), eps, shift)
            for i in range(len(row)):
                number = to_float32(row[i], shift) * scale * to_float32(weight[i], shift)
                line[i] = to_bits(number, shift)

    uint = "uint16" if shift else "uint32"
    return compile_kernel(kernel, f"({uint}[:,::1], {uint}[::1], float64, {uint}[:,::1])")


@functools.cache
def swiglu(shift: int) -> Callable:
    """kernel(gate_up, out): (rows, 2 * size), gate before up, and (rows, size); both are bits."""
    def kernel(gate_up, out):
        for r in prange(len(out)):
            line = out[r]
            gates = gate_up[r, :len(line)]
            ups = gate_up[r, len(line):]
            for i in range(len(line)):
                gate = to_float32(gates[i], shift)
                small = exp(-abs(gate))
                sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
                # rounded in between, as two operators of PyTorch do it
                activated = to_float32(to_bits(gate * sigmoid, shift), shift)
                line[i] = to_bits(activated * to_float32(ups[i], shift), shift)

    uint = "uint16" if shift else "uint32"
    return compile_kernel(kernel, f"({uint}[:,::1], {uint}[:,::1])")
