"""Reads the integers and scales of a GGUF matrix, with which `gguf.dequantize` computes.

Layouts are those of llama.cpp's `ggml-common.h`: blocks of 32 inputs, or super-blocks of 256 in the
K-quants, whose scales are integers, too, times one in float16. Numbers of IQ4_NL, IQ4_XS and MXFP4
are indices into a table. The package gguf dequantizes the other types that begin with IQ, whose
numbers of 1 to 3 bits are indices into grids.
"""

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nanoengine_extras.models.quantized.formulas import Grouped, mxfp4

# the inputs and the bytes of a block
SIZES = {kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4")}
# the table of IQ4_NL and IQ4_XS
IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
                   dtype=torch.float32, device="cpu")


def halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def signed(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int8)


def parts(raw: Tensor, bits: int) -> Tensor:
    """The numbers of `bits` bits in bytes: first the lowest of each byte, then the next ones."""
    # copied once, since the bytes of a block are few
    raw = raw.contiguous()
    found = [raw >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.stack(found, -2)


def grouped(raw: Tensor, kind: str) -> Grouped:
    """raw: (outputs, bytes of a row) uint8; kind: the name of its type."""
    inputs, size = SIZES[kind]
    found = (of_256 if inputs == 256 else of_32)(raw.unflatten(1, (-1, size)), kind)
    inputs = found.numbers.shape[1]
    return found._replace(groups=torch.arange(inputs) // (inputs // found.scales.shape[1]))


def of_32(x: Tensor, kind: str) -> Grouped:
    if kind == "MXFP4":
        return mxfp4(parts(x[..., 1:], 4).flatten(1), x[..., 0])
    scales = halves(x[..., :2])[..., 0]
    if kind == "Q8_0":
        return Grouped(signed(x[..., 2:]).flatten(1), scales)
    numbers = parts(x[..., -16:], 4).flatten(-2)
    if kind == "IQ4_NL":
        return Grouped(numbers.flatten(1), scales, bits=4, values=IQ4)
    if kind[1] == "5":
        # the fifth bits are in four bytes before the others
        numbers |= parts(x[..., -20:-16], 1).transpose(-1, -2).flatten(-2) << 4
    bits = 4 if kind[1] == "4" else 8
    if kind[-1] == "1":
        return Grouped(numbers.flatten(1), scales, bits=bits, lows=halves(x[..., 2:4])[..., 0])
    zeros = torch.full(scales.shape, 8 if bits == 4 else 16, dtype=torch.uint8)
    return Grouped(numbers.flatten(1), scales, zeros, bits=bits)


def of_256(x: Tensor, kind: str) -> Grouped:
    if kind in ("Q4_K", "Q5_K"):
        numbers = parts(x[..., -128:].unflatten(-1, (4, 32)), 4)
        if kind == "Q5_K":
            numbers |= parts(x[..., 16:48], 1).unflatten(-2, (4, 2)) << 4
        # eight scales and eight lows of 6 bits
        a, b, c = x[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
        scales = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
        lows = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
        return nested(numbers, scales, 4 if kind == "Q4_K" else 8, halves(x[..., :4]), lows)
    if kind == "Q2_K":
        numbers = parts(x[..., 16:80].unflatten(-1, (2, 32)), 2)
        return nested(numbers, x[..., :16] & 15, 4, halves(x[..., 80:]), x[..., :16] >> 4)
    if kind == "Q3_K":
        numbers = parts(x[..., 32:96].unflatten(-1, (2, 32)), 2)
        numbers |= parts(x[..., :32], 1).unflatten(-2, (2, 4)) << 2
        low, high = parts(x[..., 96:104], 4), parts(x[..., 104:108], 2)
        scales = signed(low.flatten(-2) | high.flatten(-2) << 4) - 32
        return nested(numbers, scales, 4, halves(x[..., 108:]), zero=4)
    if kind == "IQ4_XS":
        numbers = parts(x[..., 8:].unflatten(-1, (8, 16)), 4)
        # eight scales of 6 bits
        low, high = parts(x[..., 4:8, None], 4), parts(x[..., 2:4, None], 2)
        scales = signed(low.flatten(-3) | high.flatten(-3) << 4) - 32
        found = nested(numbers, scales, 4, halves(x[..., :2]))
        return found._replace(values=IQ4)
    low = parts(x[..., :128].unflatten(-1, (2, 64)), 4).unflatten(-1, (2, 32)).flatten(-3, -2)
    numbers = low | parts(x[..., 128:192].unflatten(-1, (2, 32)), 2) << 4
    return nested(numbers, signed(x[..., 192:208]), 8, halves(x[..., 208:]), zero=32)


def nested(numbers: Tensor, scales: Tensor, bits: int, above: Tensor, lows: Tensor | None = None,
           zero: int = 0) -> Grouped:
    """above: for each block, the scale of the scales, then that of the lows, which are subtracted.
    zero: the zero of all groups."""
    scales = scales.to(torch.int8).flatten(1)
    zeros = torch.full(scales.shape, zero, dtype=torch.uint8) if zero else None
    if lows is not None:
        lows = -lows.to(torch.int8).flatten(1)
    return Grouped(numbers.flatten(1), scales, zeros, None, bits, lows, above.unbind(-1))
