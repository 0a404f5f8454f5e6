"""Products with the integers themselves: a scale multiplies the sum of a group, not each number.

    row * ((number - zero) * scale + low)
        = (row * (number - middle)) * scale + row * (low + (middle - zero) * scale)

The packed numbers are the numbers minus `middle`, which is 8 or 128. The last term is the sum of
the row itself in the group, times what is added to all weights there; if that is 0, the term is
left out. The sum of a group begins with 0, and goes over its inputs in their order, for any number
of rows.
"""

import numpy as np

from nanoengine_extras.cpu.products import BLOCK, MOST_ROWS, PART, SLICE, STEP
from nanoengine_extras.cpu.vectors import (
    LANES, add_products, array_at, copy_rows, fill, inlined, load, numbers_at, prefetch, stack,
    store, total)
from nanoengine_extras.models.quantized.expanding import (
    COLUMNS, FEW, SOON, add_numbers, find_upper, read_scales, store_numbers, table_of)
from nanoengine_extras.models.quantized.order import HAS_TABLES, LOWER, UPPER
from nanoengine_extras.models.quantized.packed import ANY, HEADER

# each row keeps the sums of this many neighbouring inputs; the size of a group is a multiple
UNIT = 16
# the units of all rows that a thread has copied
UNITS = 2 * (PART + MOST_ROWS * LANES) // UNIT
# the scales of the groups of a slice; a group has at least 8 words
SCALES_OF_SLICE = 2 * SLICE // 8
# rows at a time: registers hold their sums of a group, and of all groups
FEWER = 3
# the most sums in registers
HELD = STEP * BLOCK
# the scales of a group of a block, and the numbers that are added to its weights
OPEN = 2 * BLOCK


@inlined()
def sum_units(row, inputs, units):
    """Sums of neighbouring inputs of a row, UNIT at a time."""
    for i in range(0, inputs, UNIT):
        units[i // UNIT] = total(load(row, i))


@inlined()
def group_and_shift(part):
    """The inputs of a group, and whether something is added to all weights of a group."""
    bits, group, _, _, _, has_zeros, has_lows, zero = numbers_at(part, 8)
    return group, has_zeros or has_lows or zero != 2 ** (bits - 1)


@inlined()
def open_sums(part, number, n, has_shift, scales):
    """Reads the scales of group `n` of a block, and the factors of the sums of rows."""
    (bits, _, record, _, storage, has_zeros, has_lows, zero, nested, begin,
     size) = numbers_at(part, 11)
    at = part + 8 * HEADER + number * size
    data = array_at(at, ANY, np.uint8)
    above = n // max(1, nested) * 2 * BLOCK * (1 + has_lows)
    kind = storage, has_zeros, has_lows, zero
    middle = fill(np.float32(2 ** (bits - 1)))
    for c in range(0, BLOCK, LANES):
        scale, offset, low = read_scales(data, begin + n * record, above, kind, BLOCK, c)
        store(scales, c, scale)
        if has_shift:
            store(scales, BLOCK + c, add_products(middle - offset, scale, low, 1))


@inlined()
def add_scaled(held, pitch, times, scales, sums, count, size):
    """Adds the sums of a group, each times its scale, to those of all groups: `size` outputs."""
    for r in range(count):
        for c in range(0, size, LANES):
            own, at = load(held, r * pitch + c * times), r * BLOCK + c
            store(sums, at, add_products(own, load(scales, c), load(sums, at), 1))


@inlined()
def add_shifts(units, pitch, in_group, scales, sums, count):
    """Adds the sums of the rows' own numbers, times what is added to all weights of a group."""
    for r in range(count):
        number = np.float32(0)
        for u in range(in_group):
            number += units[r * pitch + u]
        for c in range(0, BLOCK, LANES):
            at = r * BLOCK + c
            store(sums, at, add_products(fill(number), load(scales, BLOCK + c), load(sums, at), 1))


@inlined()
def add_groups_by_sums(part, number, rows, line, size_of_row, units, sums, width, per_word,
                       count):
    """Adds products of `count` rows, a constant, with a whole block of outputs to their sums."""
    _, group, record, head, _, _, _, _, _, begin, size = numbers_at(part, 11)
    words = array_at(part + 8 * HEADER + number * size, ANY, np.uint32)
    scales = array_at(stack(OPEN), OPEN, np.float32)
    _, has_shift = group_and_shift(part)
    step = group // per_word
    in_group, pitch = group // UNIT, size_of_row * per_word // UNIT
    across = COLUMNS if count == 1 or width < 8 else 2
    table = table_of(part)
    for n in range(size_of_row // step):
        first = (begin + n * record + head) // 4
        open_sums(part, number, n, has_shift, scales)
        for c in range(0, BLOCK, across * LANES):
            # registers: all places are constants
            held = stack(HELD)
            space = array_at(held, HELD, np.float32)
            for i in range(0, across * count * LANES, LANES):
                store(space, i, fill(np.float32(0)))
            for v in range(0, group, 32 // LOWER[width]):
                here = rows[n * step + v // per_word:]
                packed = first + v * LOWER[width] // 32 * BLOCK + c
                upper, shift = find_upper(first, v, group, BLOCK, width)
                for i in range(0, across * LANES, LANES):
                    prefetch(words, packed + i + SOON)
                    if UPPER[width]:
                        prefetch(words, upper + c + i + SOON)
                add_numbers(here, line, words, packed, upper + c, shift, table, held, width,
                            per_word, count)
            add_scaled(space, LANES, count, scales[c:], sums[c:], count, across * LANES)
        if has_shift:
            add_shifts(units[n * in_group:], pitch, in_group, scales, sums, count)


@inlined(inline="always")
def add_count_by_sums(part, number, rows, line, size_of_row, units, sums, per_word, count):
    width = numbers_at(part, 14)[13]
    if width == 8:
        add_groups_by_sums(part, number, rows, line, size_of_row, units, sums, 8, per_word, count)
    elif width == 6:
        add_groups_by_sums(part, number, rows, line, size_of_row, units, sums, 6, per_word, count)
    elif HAS_TABLES and width == 5:
        add_groups_by_sums(part, number, rows, line, size_of_row, units, sums, 5, per_word, count)
    else:
        add_groups_by_sums(part, number, rows, line, size_of_row, units, sums, 4, per_word, count)


@inlined()
def store_group(words, first, lines, to, group, table, width, per_word):
    """Stores the numbers of a group of a block. first: the word where they begin; to: where the
    first one is stored"""
    for v in range(0, group, 32 // LOWER[width]):
        packed, here = first + v * LOWER[width] // 32 * BLOCK, to + v // per_word * BLOCK
        upper, shift = find_upper(first, v, group, BLOCK, width)
        for c in range(0, BLOCK, LANES):
            store_numbers(lines, here + c, BLOCK, words, packed + c, upper + c, shift, table, width,
                          per_word)


@inlined(inline="always")
def expand_by_sums(part, number, first, depth, lines, scales, per_word):
    """Stores the numbers of words `first` to `first` + `depth` of a block, and their scales."""
    _, group, record, head, _, _, _, _, _, begin, size = numbers_at(part, 11)
    _, has_shift = group_and_shift(part)
    width, table = numbers_at(part, 14)[13], table_of(part)
    at = part + 8 * HEADER + number * size
    words = array_at(at, ANY, np.uint32)
    step = group // per_word
    for n in range(first // step, (first + depth) // step):
        own = scales[(n - first // step) * OPEN:]
        open_sums(part, number, n, has_shift, own)
        place, to = (begin + n * record + head) // 4, (n * step - first) * BLOCK
        if width == 8:
            store_group(words, place, lines, to, group, table, 8, per_word)
        elif width == 6:
            store_group(words, place, lines, to, group, table, 6, per_word)
        elif HAS_TABLES and width == 5:
            store_group(words, place, lines, to, group, table, 5, per_word)
        else:
            store_group(words, place, lines, to, group, table, 4, per_word)
    bits = LOWER[width] + UPPER[width]
    return at + begin + (first + depth) // step * record, BLOCK * bits // 16


@inlined()
def add_rows_by_sums(part, rows, line, lines, piece, units, pitch, scales, sums, count, per_word):
    """Adds products of `count` rows, a constant, with a slice of the weight.

    Registers hold the sums of a group, and those of all groups.
    """
    group, has_shift = group_and_shift(part)
    _, depth, ahead, asked = piece
    step, in_group = group // per_word, group // UNIT
    held, totals = stack(HELD), stack(HELD)
    copy_rows(sums, BLOCK, totals, BLOCK, np.int64(count), BLOCK // LANES)
    g = 0
    for n in range(0, depth, step):
        for i in range(0, count * BLOCK, LANES):
            store(held, i, fill(np.float32(0)))
        for k in range(n, n + step):
            for i in range(k * asked, (k + 1) * asked, LANES):
                prefetch(lines, ahead + i)
            for c in range(0, BLOCK, LANES):
                numbers = load(lines, k * BLOCK + c)
                for r in range(count):
                    word = fill(rows[np.uint64(r * line + k)])
                    i = r * BLOCK + c
                    store(held, i, add_products(word, numbers, load(held, i), per_word))
        own = scales[g * OPEN:]
        add_scaled(held, BLOCK, 1, own, totals, count, BLOCK)
        if has_shift:
            add_shifts(units[g * in_group:], pitch, in_group, own, totals, count)
        g += 1
    copy_rows(totals, BLOCK, sums, BLOCK, np.int64(count), BLOCK // LANES)


@inlined(inline="always")
def add_by_sums(part, number, rows, line, size_of_row, units, sums, lines, are_few, per_word):
    """Adds products of some rows with a block of the weight to their sums.

    units: see `sum_units`; lines: memory for a slice of the weight
    """
    size = len(sums)
    flat = sums.ravel()
    if are_few:
        if size == 1:
            add_count_by_sums(part, number, rows, line, size_of_row, units, flat, per_word, 1)
        elif size == 2:
            add_count_by_sums(part, number, rows, line, size_of_row, units, flat, per_word, 2)
        else:
            add_count_by_sums(part, number, rows, line, size_of_row, units, flat, per_word, FEW)
        return
    scales = array_at(stack(SCALES_OF_SLICE), SCALES_OF_SLICE, np.float32)
    pitch = size_of_row * per_word // UNIT
    most_depth = SLICE // BLOCK
    for first in range(0, size_of_row, most_depth):
        depth = min(most_depth, size_of_row - first)
        after, asked = expand_by_sums(part, number, first, depth, lines, scales, per_word)
        # each step of the rows asks for a share of the next slice
        asked = -(-asked // -(-size // FEWER))
        ahead = (after - np.int64(lines.ctypes.data)) // 4
        r = 0
        while r < size:
            piece = 0, depth, ahead + r // FEWER * asked * depth, asked
            left, here = rows[r * line + first:], flat[r * BLOCK:]
            mine = units[r * pitch + first * per_word // UNIT:]
            # a last step of one row would take as long as one of two
            if size - r == FEWER or size - r > 4:
                add_rows_by_sums(part, left, line, lines, piece, mine, pitch, scales, here, FEWER,
                                 per_word)
                r += FEWER
            else:
                add_rows_by_sums(part, left, line, lines, piece, mine, pitch, scales, here, 2,
                                 per_word)
                r += 2
