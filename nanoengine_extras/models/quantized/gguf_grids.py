"""The GGUF types of 1 to 3 bits, IQ1_S to IQ3_S: an index selects a row of a grid, which gives four
or eight weights at once. The package gguf has the grids.

Each type has 16 possible weights, times the scale of a group: a number of the grid with a sign, or
in IQ1, plus or minus 1/8. So the weights become numbers of 4 bits, with a table.

    bytes of a block   IQ2_XXS   scale, 8 x (4 indices, a tail)
                       IQ2_XS    scale, 32 x (index, signs), scales of groups
                       IQ2_S     scale, indices, signs, high bits of indices, scales of groups
                       IQ3_XXS   scale, indices, 8 x a tail
                       IQ3_S     scale, indices, their high bits, signs, scales of groups
                       IQ1_S     scale, indices, 8 x (4 high bits of indices, scale, sign)
                       IQ1_M     indices, their high bits and signs, scales of groups and a scale
                       a tail    the signs of 32 weights, the scale of their group
"""

import functools
from typing import Any

import torch
from gguf import quants
from torch import Tensor

# the bytes of a block of 256 inputs
SIZES = {"IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ1_S": 50,
         "IQ1_M": 56}
# the factors of the grids, 1 for others; with a factor, the scale of a group is odd
FACTORS = {"IQ2_XXS": 1 / 8, "IQ2_XS": 1 / 8, "IQ2_S": 1 / 8, "IQ3_XXS": 1 / 4}
# for eight bits, a byte each: 8 for a bit that is set
EIGHTS = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1) * 8
EIGHTS = EIGHTS.to(torch.uint8).view(torch.int64)[:, 0]
# an even number of 8 signs are minus, so that 7 bits are enough
SIGNS = torch.tensor([*quants.IQ2_XXS.ksigns], device="cpu")


def values_of(kind: str) -> Tensor:
    """Returns the numbers that a type's grid consists of."""
    return torch.tensor(getattr(quants, kind).grid_map, dtype=torch.float32, device="cpu")


def table_of(kind: str) -> Tensor:
    """Returns the 16 possible weights of a type; those from 8 on have a minus."""
    values = values_of(kind)
    halves = (values + 1 / 8, values - 1 / 8) if kind[2] == "1" else (values, -values)
    table = torch.zeros(2, 8, dtype=torch.float32, device="cpu")
    table[:, :len(values)] = torch.stack(halves) * FACTORS.get(kind, 1)
    return table.flatten()


@functools.cache
def rows_of(kind: str) -> Tensor:
    """Returns the rows of a type's grid. Each is one int64 or int32: a byte says which of
    `values_of` stands there."""
    own = getattr(quants, kind)
    own.init_grid()
    places = torch.searchsorted(values_of(kind), torch.from_numpy(own.grid).view(own.grid_shape))
    whole = torch.int64 if own.grid_shape[1] == 8 else torch.int32
    return places.to(torch.uint8).view(whole)[:, 0]


def bits_of(words: Tensor, shifts: range, count: int) -> Tensor:
    """Returns `count` bits of each word, from each of these places on, one after the other."""
    return (words[..., None] >> torch.tensor(shifts, device="cpu") & 2**count - 1).flatten(-2)


def words_of(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype).int()


def of_grid(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers, what their scales are times `above`, and `above`, in float16.

    x: (outputs, blocks, bytes) uint8; kind: the name of the type
    """
    above = x[..., :2]
    if kind == "IQ1_M":
        scales = words_of(x[..., 48:], torch.int16)
        # four bits of each word together
        whole: Any = sum((scales[..., i] >> 12 & 15) << 4 * i for i in range(4))
        above = whole.to(torch.int16)[..., None].view(torch.uint8)
        high = bits_of(x[..., 32:48], range(0, 8, 4), 4)
        indices = x[..., :32] | (high.int() & 7) << 8
        signs = (high >> 3) * 255
        scales = bits_of(scales, range(0, 12, 3), 3)
    elif kind == "IQ1_S":
        words = words_of(x[..., 34:], torch.int16)
        indices = x[..., 2:34] | bits_of(words, range(0, 12, 3), 3) << 8
        signs = (words >> 15 & 255).repeat_interleave(4, -1)
        scales = words >> 12 & 7
    elif kind == "IQ2_XS":
        words = words_of(x[..., 2:66], torch.int16)
        indices = words & 511
        signs = SIGNS[words >> 9 & 127]
        scales = bits_of(x[..., 66:], range(0, 8, 4), 4)
    elif kind == "IQ2_S":
        low, signs, high, scales = x[..., 2:].split((32, 32, 8, 8), -1)
        indices = low | bits_of(high, range(0, 8, 2), 2).int() << 8
        scales = bits_of(scales, range(0, 8, 4), 4)
    elif kind == "IQ3_S":
        low, high, signs, scales = x[..., 2:].split((64, 8, 32, 4), -1)
        indices = low | bits_of(high, range(8), 1).int() << 8
        scales = bits_of(scales, range(0, 8, 4), 4)
    else:
        indices, tails = x[..., 2:66], x[..., 66:]
        if kind == "IQ2_XXS":
            both = x[..., 2:].unflatten(-1, (8, 8)).split(4, -1)
            indices, tails = (each.flatten(-2) for each in both)
        tails = words_of(tails, torch.int32)
        signs = SIGNS[bits_of(tails, range(0, 28, 7), 7)]
        scales = tails >> 28 & 15
    numbers = rows_of(kind)[indices.int()].view(torch.uint8)
    numbers |= EIGHTS[signs.int()].view(torch.uint8)
    return numbers, 2 * scales + 1, above.contiguous().view(torch.float16)
