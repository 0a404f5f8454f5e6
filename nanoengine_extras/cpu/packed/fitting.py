"""Which weights can be packed, and in how many bits, so that products have the bits of those with
dequantized weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine_extras.cpu.packed.order import HAS_TABLES, UPPER


class Weight(NamedTuple):
    """A weight before it is packed: see `PackedWeight.pack`."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    lows: Tensor | None
    table: Tensor | None
    above: tuple[Tensor, ...]
    bits: int


def without_table(weight: Weight) -> Weight:
    """Returns the same weight with whole numbers, if the values, or 8 times them, are whole."""
    table: Tensor = weight.table  # type: ignore[assignment]
    for factor in (1, 8):
        whole = (table * factor).to(torch.int8)
        if torch.equal(whole.float(), table * factor):
            scales = weight.scales
            if factor == 8:
                scales = scales.float()
                for each in weight.above:
                    scales = scales * each.float().repeat_interleave(
                        scales.shape[1] // each.shape[1], 1)
                weight = weight._replace(scales=scales / 8, above=())
            return weight._replace(numbers=whole[weight.numbers.int()], bits=8, table=None)
    return weight


def in_short(weight: Weight) -> Weight:
    """Returns a weight with scales and lows in float16 if it has all these numbers; otherwise,
    floats are float32."""
    scales, lows = weight.scales, weight.lows

    def fits(numbers: Tensor) -> bool:
        # as bits, since a comparison can take the smallest numbers for 0
        halves, floats = (each.float().view(torch.int32) for each in (numbers.half(), numbers))
        return torch.equal(halves, floats)

    if scales.dtype in (torch.bfloat16, torch.float32):
        kind = torch.half if fits(scales) and (lows is None or fits(lows)) else torch.float32
        return weight._replace(scales=scales.to(kind))
    return weight


def has_many_bits(weight: Weight) -> bool:
    """Whether products with scales need more bits than float32 has: those of a scale, and of a
    number minus its zero, or of 384, which expanding.py subtracts from numbers of 8 bits. Or
    whether the smallest part of a scale that expanding.py needs for 4 bits would be rounded."""
    if weight.scales.dtype != torch.float32 or weight.table is not None:
        return False
    parts = weight.scales / 16**3
    if weight.bits == 4 and not HAS_TABLES and not torch.equal(parts * 16**3, weight.scales):
        return True
    width = max(2, *(abs(int(each)).bit_length() for each in weight.numbers.aminmax()))
    width = width if weight.zeros is None else 9
    return bool((weight.scales.view(torch.int32) & 2**width - 1).any())


def zero_of(weight: Weight, added: int) -> Tensor | int:
    """Returns the zeros of the nonnegative numbers, or one number if all zeros are equal."""
    zeros = weight.zeros
    if weight.table is not None:
        return 0
    if zeros is None:
        return added
    first = int(zeros.flatten()[0])
    return first if (zeros == first).all() else zeros.expand_as(weight.scales)


def width_of(weight: Weight, group: int, added: int, zero: Tensor | int) -> tuple[int, int]:
    """Returns how many bits the numbers need, and what is added to fit them into so few."""
    least, most = (int(each) + added for each in weight.numbers.aminmax())
    # the one zero of all groups can be moved, where something is added to weights anyway
    can_move = HAS_TABLES and isinstance(zero, int) and weight.lows is None
    widths = (5, 6) if HAS_TABLES else ()
    for width in widths if weight.bits == 8 else ():
        move = -least if can_move else 0
        fits = 0 <= least + move <= most + move < 2**width
        # the zero times a scale of 18 bits must be exact
        fits &= not move or abs(int(zero) + move) <= 64
        # the upper bits of an output's group fill whole words
        if fits and group * UPPER[width] % 32 == 0:
            return width, move
    return weight.bits, 0


def can_add(weight: Weight, zero: Tensor | int, width: int) -> bool:
    """Whether expanding.py can add the lows: to no zeros, and with AVX-512 to numbers of 8 bits,
    less 256 times the scale, which has to be exact."""
    if isinstance(zero, Tensor) or zero != 0:
        return False
    if width != 8 or not HAS_TABLES:
        return True
    difference = weight.lows.double() - 256 * weight.scales.double()  # type: ignore[union-attr]
    return not weight.above and torch.equal(difference.float().double(), difference)
