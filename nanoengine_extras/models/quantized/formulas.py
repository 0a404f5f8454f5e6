"""Turns the numbers of quantized weights into values, by scales, zeros and tables.

    weight[o, i] = (number[o, i] - zero[o, g]) * scale[o, g]        g: the group of input i

AWQ (Lin et al., 2023, arXiv:2306.00978), GPTQ (Frantar et al., 2022, arXiv:2210.17323) and
compressed-tensors store this in different orders. `rounded` makes it from other weights.

This file knows neither files nor models.
"""

from math import lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# how AutoAWQ orders the outputs of a word
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
# the values of FP8 (e4m3), by byte
E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
# the values of FP4 (e2m1), doubled
MXFP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
                     dtype=torch.float32, device="cpu")
# inputs of a group that `rounded` makes
GROUP = 32
# rows that are dequantized at a time
ROWS = 256


class Grouped(NamedTuple):
    """A weight in groups of inputs: (number - zero) * scale + low, or values[number] * scale.

    numbers: (outputs, inputs), integers of `bits` bits; signed if the dtype is int8.
    scales, zeros, lows: (outputs, groups); missing zeros or lows are 0.
    groups: the group of each input.
    above: the scales of the scales, and of the lows: (outputs, groups of 256 inputs) each;
        llama.cpp's scales of super-blocks.
    values: a table in float32, into which the numbers are indices; there are no zeros and lows
        then.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Any = None
    bits: int = 8
    lows: Tensor | None = None
    above: tuple[Tensor, ...] = ()
    values: Tensor | None = None

    def group_size(self) -> int:
        """How many neighbours form a group; 0 if the inputs of a group are not neighbours."""
        size = int((self.groups == 0).sum())
        usual = torch.arange(len(self.groups)) // max(1, size)
        return size if torch.equal(self.groups, usual) else 0

    def dequantized(self) -> Tensor:
        """Returns the weight in float32. A product of a number and a scale in 16 bits is exact."""
        weight = torch.empty(self.numbers.shape, dtype=torch.float32)
        # some rows at a time, which stay in the cache
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            part = weight[rows]
            if self.values is not None:
                torch.take(self.values, self.numbers[rows].long(), out=part)
            else:
                part.copy_(self.numbers[rows])
            if self.zeros is not None:
                part -= self.zeros[rows].float()[:, self.groups]
            part *= self.floats(self.scales, 0, rows)[:, self.groups]
            if self.lows is not None:
                part += self.floats(self.lows, 1, rows)[:, self.groups]
        return weight

    def floats(self, numbers: Tensor, which: int, rows: slice) -> Tensor:
        """Returns some rows of scales (0) or lows (1) in float32."""
        found = numbers[rows].float()
        if self.above:
            above = self.above[which][rows].float()
            found *= above.repeat_interleave(found.shape[1] // above.shape[1], 1)
        return found


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Returns the numbers in int32 words, the lowest bits first, along a dimension, in uint8.

    Of 32 numbers of 3 bits in three words, two begin in one word and end in the next.
    """
    each = lcm(bits, 32) // 32
    words = words.unflatten(dim, (-1, each))
    parts = []
    for place in range(0, 32 * each, bits):
        number, shift = divmod(place, 32)
        found = words.select(dim + 1, number) >> shift
        if shift + bits > 32:
            low = found & 2 ** (32 - shift) - 1
            found = low | words.select(dim + 1, number + 1) << 32 - shift
        parts.append((found & 2**bits - 1).to(torch.uint8))
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Grouped:
    """Version "gemm": (inputs, outputs / 8), (groups, outputs / 8), (groups, outputs)."""
    numbers, zeros = (
        unpack(words, 4, 1).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).T
        for words in (qweight, qzeros))
    return Grouped(numbers, scales.T, zeros, bits=4)


def gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int, version: int) -> Grouped:
    """(inputs * bits / 32, outputs), (groups, outputs * bits / 32), (groups, outputs).

    Version 1 stores each zero minus 1. GPTQModel subtracts from whole words, so a zero of 0 borrows
    from its neighbour, unless numbers have 3 bits. Unused bits fill the last word in a row.
    """
    if version == 1 and bits != 3:
        qzeros = qzeros + sum(1 << place for place in range(0, 32, bits))
    # 3 bits: whole numbers of words
    zeros = unpack(F.pad(qzeros, (0, -qzeros.shape[1] % bits)), bits, 1)[:, :scales.shape[1]].T
    if version == 1 and bits == 3:
        zeros = zeros + 1 & 7
    return Grouped(unpack(qweight, bits, 0).T, scales.T, zeros, bits=max(4, bits))


def nibbles(words: Tensor) -> Tensor:
    """Returns the two numbers in each byte of a matrix, the one in the lower bits first."""
    return torch.stack((words & 15, words >> 4), -1).flatten(1)


def bits_in(packed: Tensor, inputs: int) -> int:
    return 8 if 4 * packed.shape[1] >= inputs else 4


def compressed(packed: Tensor, scale: Tensor, shape: list[int],
               zeros: Tensor | None) -> Grouped:
    """Format "pack-quantized": (outputs, inputs * bits / 32), (outputs, groups), (outputs, inputs),
    (outputs * bits / 32, groups).

    Numbers and zeros are stored plus 8, or plus 128 with 8 bits. Unused bits fill the last word in
    a row. One scale can serve all outputs, and zeros that are not int32 are not packed.
    """
    outputs, inputs = map(int, shape)
    bits = bits_in(packed, inputs)
    numbers = unpack(packed, bits, 1)[:, :inputs].reshape(outputs, inputs)
    scale = scale.reshape(-1, scale.shape[-1]).expand(outputs, -1)
    middles = torch.tensor(2 ** (bits - 1), dtype=torch.int16)
    if zeros is not None and zeros.dtype == torch.int32:
        middles = unpack(zeros, bits, 0)[:outputs]
    elif zeros is not None:
        middles = middles + zeros.to(torch.int16)
    return Grouped(numbers, scale, middles.expand(scale.shape), bits=bits)


def mxfp4(numbers: Tensor, exponents: Tensor) -> Grouped:
    """Groups of 32 inputs, (outputs, inputs) uint8 and (outputs, groups): a number is an FP4 code
    (e2m1), and an exponent e means 2^(e - 127). The table has doubled values, which are whole
    numbers, so scales are half as large.

    Source: OCP Microscaling Formats (MX) Specification 1.0
    """
    exponents = exponents.view(torch.uint8)
    scales = (exponents - 1).view(torch.float8_e8m0fnu)
    # the smallest and the largest have no such scale
    if ((exponents < 2) | (exponents == 255)).any():
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128)
    return Grouped(numbers, scales, bits=4, values=MXFP4)


def in_turn(first: Grouped, second: Grouped) -> Grouped:
    """Interleaves the rows of two weights of one format."""
    def mixed(*both: Any) -> Any:
        if both[0] is None:
            return None
        if both[0].dtype != both[1].dtype:
            # exponents, of which some are the smallest or the largest
            both = both[0].float(), both[1].float()
        return torch.stack(both, 1).flatten(0, 1)

    names = "numbers", "scales", "zeros", "lows"
    found = {name: mixed(getattr(first, name), getattr(second, name)) for name in names}
    return first._replace(**found, above=tuple(map(mixed, first.above, second.above)))


def rounded(weight: Tensor, bits: int) -> Grouped:
    """Rounds a weight to numbers of 8 or 4 bits in groups of 32 inputs, with scales in float16.

    As in llama.cpp's Q8_0 and Q4_0, the largest of a group becomes 127 or -127; with 4 bits, -8.
    """
    inputs = weight.shape[1]
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), -(-inputs // GROUP), dtype=torch.float16)
    most = 2 ** (bits - 1)
    # some rows at a time, since they are copied
    for part, to, scale in zip(*(each.split(ROWS) for each in (weight, numbers, scales))):
        x = F.pad(part.float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
        largest = x.gather(2, x.abs().argmax(2, keepdim=True))[:, :, 0]
        scale.copy_(largest.abs() / 127 if bits == 8 else largest / -8)
        inverse = torch.where(scale == 0, 0, 1 / scale.float())
        found = (x * inverse[:, :, None]).round().clamp(-most, most - 1)
        to.copy_(found.flatten(1)[:, :inputs])
    return Grouped(numbers, scales, groups=torch.arange(inputs) // GROUP, bits=bits)
