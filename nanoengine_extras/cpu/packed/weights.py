"""Products with a packed weight (packed.py), whose numbers are expanded into weights on the fly.

    few rows, without tiles      some words are expanded and multiplied at once
    more rows, or on tiles       a slice is expanded into the caches, and multiplied as
                                 `nanoengine_extras.cpu/products.py` does it

A result has the same bits as the product with a weight that was dequantized first, and rounded to
the dtype of the rows.
"""

import numpy as np

from nanoengine_extras.cpu.products import BLOCK, LEVEL, SLICE, STEP, add_slice, add_step
from nanoengine_extras.cpu.tiles import load_sums, store_sums
from nanoengine_extras.cpu.vectors import (
    LANES, array_at, copy_rows, inlined, numbers_at, prefetch, stack)
from nanoengine_extras.cpu.packed.expanding import (
    COLUMNS, FEW, SCALES, SOON, add_weights, find_upper, open_scales, store_weights, table_of)
from nanoengine_extras.cpu.packed.order import FLOAT8, HAS_TABLES, LOWER, UPPER, WIDE
from nanoengine_extras.cpu.packed.layout import ANY, HEADER

# the sums of two vectors of outputs for FEW rows
HELD = 2 * FEW * LANES
# the scales of a group of a block
OPEN = WIDE // LANES * SCALES
# the words of a slice. If a product computes only part of a block at once, a part of the slice has
# to fit the L1 cache
LINES = SLICE if BLOCK == WIDE else 2 * SLICE
# the depth of a slice while tiles hold all sums, in words: that of the largest group
DEPTH = 64


@inlined()
def expand_groups(part, number, first, depth, lines, soon, block_size, width, per_word):
    """Expands words `first` to `first` + `depth` of a block, for the outputs that a product
    computes at once, then for the next ones.

    soon: each line that is `soon` words further on is prefetched; 0: nothing new is
    """
    (_, group, record, head, storage, has_zeros, has_lows, zero, nested, begin,
     size) = numbers_at(part, 11)
    at = part + 8 * HEADER + number * size
    data, words = array_at(at, ANY, np.uint8), array_at(at, ANY, np.uint32)
    scales = array_at(stack(OPEN), OPEN, np.float32)
    kind, table = (storage, has_zeros, has_lows, zero), table_of(part)
    step = group // per_word
    across = min(BLOCK, block_size)
    for n in range(first // step, (first + depth) // step):
        place = begin + n * record
        numbers = (place + head) // 4
        above = n // max(1, nested) * 2 * block_size * (1 + has_lows)
        for i in range(place // 4, numbers, LANES):
            prefetch(words, i + soon, LEVEL)
        open_scales(data, place, above, kind, width, block_size, per_word, scales)
        for v in range(0, group, 32 // LOWER[width]):
            line = (n * step - first + v // per_word) * across
            packed = numbers + v * LOWER[width] // 32 * block_size
            upper, shift = find_upper(numbers, v, group, block_size, width)
            for c in range(0, block_size, LANES):
                to = c // across * across * depth + line + c % across
                prefetch(words, packed + c + soon, LEVEL)
                if UPPER[width]:
                    prefetch(words, upper + c + soon, LEVEL)
                store_weights(lines, to, across, words, packed + c, upper + c, shift, table,
                              scales[SCALES // LANES * c:], width, per_word)
    # where the next words lie, and how many of them each word in a row needs
    bits = LOWER[width] + UPPER[width]
    return at + begin + (first + depth) // step * record, block_size * bits // 16


@inlined()
def add_groups(part, number, rows, line, size_of_row, sums, width, per_word, count):
    """Adds products of `count` rows, a constant, with a whole block of 64 outputs to their sums."""
    (_, group, record, head, storage, has_zeros, has_lows, zero, nested, begin,
     size) = numbers_at(part, 11)
    at = part + 8 * HEADER + number * size
    data, words = array_at(at, ANY, np.uint8), array_at(at, ANY, np.uint32)
    scales = array_at(stack(OPEN), OPEN, np.float32)
    kind, table = (storage, has_zeros, has_lows, zero), table_of(part)
    step = group // per_word
    across = max(COLUMNS, 2 * COLUMNS // count)
    # of a block, what was not prefetched with the one before
    for i in range(0, SOON, LANES):
        prefetch(words, begin // 4 + i, LEVEL)
    for n in range(size_of_row // step):
        place = begin + n * record
        numbers = (place + head) // 4
        above = n // max(1, nested) * 2 * WIDE * (1 + has_lows)
        for i in range(place // 4, numbers, LANES):
            prefetch(words, i + SOON, LEVEL)
        open_scales(data, place, above, kind, width, WIDE, per_word, scales)
        for c in range(0, WIDE, across * LANES):
            # registers: all places are constants
            held = stack(HELD)
            space = array_at(held, HELD, np.float32)
            for i in range(across):
                copy_rows(sums[c + i * LANES:], WIDE, space[i * count * LANES:], LANES, count, 1)
            own = scales[SCALES // LANES * c:]
            for v in range(0, group, 32 // LOWER[width]):
                # numba would check the bounds of a part of the rows
                word = n * step + v // per_word
                packed = numbers + v * LOWER[width] // 32 * WIDE + c
                upper, shift = find_upper(numbers, v, group, WIDE, width)
                for i in range(0, across * LANES, LANES):
                    prefetch(words, packed + i + SOON, LEVEL)
                    if UPPER[width]:
                        prefetch(words, upper + c + i + SOON, LEVEL)
                add_weights(rows, line, word, words, packed, upper + c, shift, table, own, held,
                            width, per_word, count)
            for i in range(across):
                copy_rows(space[i * count * LANES:], LANES, sums[c + i * LANES:], WIDE, count, 1)


# One function is compiled for each width: 4, 5, 6 and 8 bits; 4 and 8 without AVX-512. FP8 has
# kernels of its own, which need only one function.


@inlined(inline="always")
def expand(part, number, first, depth, lines, soon, block_size, per_word):
    width = numbers_at(part, 13)[12]
    if width == 8:
        return expand_groups(part, number, first, depth, lines, soon, block_size, 8, per_word)
    if HAS_TABLES and width == 6:
        return expand_groups(part, number, first, depth, lines, soon, block_size, 6, per_word)
    if HAS_TABLES and width == 5:
        return expand_groups(part, number, first, depth, lines, soon, block_size, 5, per_word)
    return expand_groups(part, number, first, depth, lines, soon, block_size, 4, per_word)


@inlined(inline="always")
def expand_floats(part, number, first, depth, lines, soon, block_size, per_word):
    return expand_groups(part, number, first, depth, lines, soon, block_size, FLOAT8, per_word)


@inlined(inline="always")
def add_floats(part, number, rows, line, size_of_row, sums, per_word, count):
    add_groups(part, number, rows, line, size_of_row, sums, FLOAT8, per_word, count)


@inlined(inline="always")
def add_count(part, number, rows, line, size_of_row, sums, per_word, count):
    width = numbers_at(part, 13)[12]
    if width == 8:
        add_groups(part, number, rows, line, size_of_row, sums, 8, per_word, count)
    elif HAS_TABLES and width == 6:
        add_groups(part, number, rows, line, size_of_row, sums, 6, per_word, count)
    elif HAS_TABLES and width == 5:
        add_groups(part, number, rows, line, size_of_row, sums, 5, per_word, count)
    else:
        add_groups(part, number, rows, line, size_of_row, sums, 4, per_word, count)


@inlined(inline="always")
def add_few(add, part, number, rows, line, size_of_row, sums, per_word, size):
    """Adds products of up to FEW rows with a block of the weight to their sums.

    add: `add_count` or `add_floats`
    """
    if size == 1:
        add(part, number, rows, line, size_of_row, sums, per_word, 1)
    elif size == 2:
        add(part, number, rows, line, size_of_row, sums, per_word, 2)
    else:
        add(part, number, rows, line, size_of_row, sums, per_word, FEW)


@inlined(inline="always")
def add_many(open_slice, part, number, rows, line, size_of_row, sums, lines, on_tiles, per_word):
    """The same for any number of rows: slice by slice. open_slice: `expand` or `expand_floats`

    The sums of up to 32 rows stay in tiles from slice to slice. Then slices are short, and the CPU
    expands one while it still multiplies by the one before.
    """
    size, block_size = sums.shape
    step = 2 * LANES if on_tiles else STEP
    stride = 4 if size in (7, 8) and not on_tiles else step
    across = min(BLOCK, block_size)
    in_tiles = on_tiles and size <= step
    below = LANES if size > LANES else 0
    if in_tiles:
        load_sums(sums, block_size, below)
    most_depth = DEPTH if in_tiles else LINES // block_size
    # few rows take little time, so the weight is prefetched while it is expanded
    soon = SOON if size <= step else 0
    for first in range(0, size_of_row, most_depth):
        depth = min(most_depth, size_of_row - first)
        after, asked = open_slice(part, number, first, depth, lines, soon, block_size, per_word)
        if in_tiles:
            add_slice(rows[first:], line, below, lines, (0, depth, 0, 0))
            continue
        # each step of the rows asks for a share of the next slice
        steps = -(-size // stride)
        asked = 0 if soon else -(-asked // (steps * (block_size // across)))
        ahead = (after - np.int64(lines.ctypes.data)) // 4
        for c in range(0, block_size, across):
            for r in range(0, size, stride):
                piece = c * depth, depth, ahead, asked
                add_step(rows[r * line + first:], line, lines, piece, sums[r:, c:c + across],
                         min(size - r, stride), on_tiles, per_word, False)
                ahead += asked * depth
    if in_tiles:
        store_sums(sums, block_size, below)
