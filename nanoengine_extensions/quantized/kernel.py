"""Products with a packed weight (packed.py), which is expanded on the way: for a CPU.

    few rows, on registers of AVX-512      16 words are expanded and multiplied at once
    more rows, on tiles, with AVX2         a slice is expanded into the first cache, and multiplied
                                           as `nanoengine_cpu/products.py` does it

A result has the bits of the product with the weight that was dequantized before, rounded to the
dtype of the rows. So a row has the same bits whatever rows are beside it.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from nanoengine_cpu.compiling import compile_kernel, take_tasks
from nanoengine_cpu.products import (
    BLOCK, BLOCKS, COPY, MOST_ROWS, PART, SLICE, STEP, SUMS, add_rows, add_slice, norm_row,
    write_block)
from nanoengine_cpu.tiles import (
    HAS_TILES, TILE_SIZES, begin_tiles, end_tiles, load_sums, store_sums)
from nanoengine_cpu.vectors import (
    DTYPES, LANES, array_at, copy_rows, has, inlined, numbers_at, stack)
from nanoengine_extensions.quantized.expanding import (
    SCALES, add_expanded, open_scales, store_expanded)
from nanoengine_extensions.quantized.packed import HEADER

# up to this many rows are multiplied while the weight is expanded: registers hold their sums
FEW = 4
# sums of two vectors of outputs
HELD = 2 * FEW * LANES
# the most vectors of outputs in a block
COLUMNS = 4
# the scales of a group of a block
OPEN = COLUMNS * SCALES
# an address is enough: arrays that kernels read have no end
ANY = 2**40


@inlined()
def part_of(parts, number):
    """Where the part lies that has a block of outputs, and the block's number in it."""
    first, end_1, second, end_2, third = parts
    if number < end_1:
        return first, number
    if number < end_2:
        return second, number - end_1
    return third, number - end_2


@inlined()
def expand_groups(part, number, first, depth, lines, block_size, bits, has_lows, per_word):
    """Expands words `first` to `first` + `depth` of a block."""
    (_, group, record, head, storage, has_zeros, _, zero, nested, begin,
     size) = numbers_at(part, 11)
    at = part + 8 * HEADER + number * size
    data, words = array_at(at, ANY, np.uint8), array_at(at, ANY, np.uint32)
    scales = array_at(stack(OPEN), OPEN, np.float32)
    kind = storage, has_zeros, has_lows, zero, 128 if bits == 4 else 256
    step = group // per_word
    for n in range(first // step, (first + depth) // step):
        place = begin + n * record
        above = n // max(1, nested) * 2 * block_size * (1 + has_lows)
        open_scales(data, place, above, kind, block_size, per_word, scales)
        for v in range(0, group, 32 // bits):
            to = (n * step - first + v // per_word) * block_size
            packed = (place + head) // 4 + v * bits // 32 * block_size
            for c in range(0, block_size, LANES):
                store_expanded(lines, to + c, block_size, words, packed + c,
                               scales[SCALES // LANES * c:], bits, has_lows, per_word)
    # where the next words lie, and how many of them a word of a row needs
    return at + begin + (first + depth) // step * record, block_size * bits // 16


@inlined()
def add_groups(part, number, rows, line, size_of_row, sums, bits, has_lows, per_word, count):
    """Adds products of `count` rows, a constant, with a whole block of 64 outputs to their sums."""
    (_, group, record, head, storage, has_zeros, _, zero, nested, begin,
     size) = numbers_at(part, 11)
    at = part + 8 * HEADER + number * size
    data, words = array_at(at, ANY, np.uint8), array_at(at, ANY, np.uint32)
    scales = array_at(stack(OPEN), OPEN, np.float32)
    kind = storage, has_zeros, has_lows, zero, 128 if bits == 4 else 256
    step = group // per_word
    across = COLUMNS if count == 1 else 2
    for n in range(size_of_row // step):
        place = begin + n * record
        above = n // max(1, nested) * 2 * BLOCK * (1 + has_lows)
        open_scales(data, place, above, kind, BLOCK, per_word, scales)
        for c in range(0, BLOCK, across * LANES):
            # registers: all places are constants
            held = stack(HELD)
            room = array_at(held, HELD, np.float32)
            for i in range(across):
                copy_rows(sums[c + i * LANES:], BLOCK, room[i * count * LANES:], LANES, count, 1)
            own = scales[SCALES // LANES * c:]
            for v in range(0, group, 32 // bits):
                here = rows[n * step + v // per_word:]
                packed = (place + head) // 4 + v * bits // 32 * BLOCK + c
                add_expanded(here, line, words, packed, own, held, 0, bits, has_lows, per_word,
                             count)
                add_expanded(here, line, words, packed + LANES, own[SCALES:], held, count * LANES,
                             bits, has_lows, per_word, count)
                if across == COLUMNS:
                    add_expanded(here, line, words, packed + 2 * LANES, own[2 * SCALES:], held,
                                 2 * count * LANES, bits, has_lows, per_word, count)
                    add_expanded(here, line, words, packed + 3 * LANES, own[3 * SCALES:], held,
                                 3 * count * LANES, bits, has_lows, per_word, count)
            for i in range(across):
                copy_rows(room[i * count * LANES:], LANES, sums[c + i * LANES:], BLOCK, count, 1)


# numbers of 4 or 8 bits, with lows or without: for each a function is compiled


@inlined()
def expand(part, number, first, depth, lines, block_size, per_word):
    bits, _, _, _, _, _, has_lows = numbers_at(part, 7)
    if bits == 8:
        if has_lows:
            return expand_groups(part, number, first, depth, lines, block_size, 8, True, per_word)
        return expand_groups(part, number, first, depth, lines, block_size, 8, False, per_word)
    if has_lows:
        return expand_groups(part, number, first, depth, lines, block_size, 4, True, per_word)
    return expand_groups(part, number, first, depth, lines, block_size, 4, False, per_word)


@inlined()
def add_few(part, number, rows, line, size_of_row, sums, per_word, count):
    bits, _, _, _, _, _, has_lows = numbers_at(part, 7)
    if bits == 8:
        if has_lows:
            add_groups(part, number, rows, line, size_of_row, sums, 8, True, per_word, count)
        else:
            add_groups(part, number, rows, line, size_of_row, sums, 8, False, per_word, count)
    elif has_lows:
        add_groups(part, number, rows, line, size_of_row, sums, 4, True, per_word, count)
    else:
        add_groups(part, number, rows, line, size_of_row, sums, 4, False, per_word, count)


@functools.cache
def product(dtype: torch.dtype) -> Callable:
    """kernel(norm, bias, words, outputs, halves, eps_bits, x, residual, out, rows, *parts)

    As `products.product`, but for the weight. parts: the address of one part of the weight, the
    number of the first block after it, and the same of a second and of a third, without the last
    number. With two halves, the second begins with its own block.
    """
    uint = DTYPES[dtype]
    per_word = 4 // dtype.itemsize
    on_tiles, block_size = HAS_TILES and dtype == torch.bfloat16, BLOCKS[dtype]
    few = FEW if block_size == COLUMNS * LANES and has("avx512f") else 0
    step = 2 * LANES if on_tiles else STEP
    most_depth = SLICE // block_size

    def kernel(phase, threads, arguments_at):
        (norm_at, bias_at, words, outputs, halves, eps_bits, x_at, residual_at, out_at,
         rows) = numbers_at(arguments_at, 10)
        parts = numbers_at(arguments_at + 10 * 8, 5)
        blocks = -(-outputs // block_size)
        # about equal parts of the rows, each of whole steps if one fits
        unit = step if PART // words >= step else LANES
        turns = -(-rows // (min(MOST_ROWS, PART // words) // unit * unit))
        most = -(-rows // turns // unit) * unit
        line = words + LANES
        tasks = turns * blocks

        norm = array_at(norm_at, words * per_word, uint)
        x = array_at(x_at, rows * words, np.float32)
        bias = array_at(bias_at, halves * blocks * block_size, np.float32)
        residual = array_at(residual_at, rows * outputs if residual_at else 0, uint)
        out = array_at(out_at, rows * outputs, uint)
        room = stack(COPY)
        copy = array_at(room, COPY, np.float32)
        lines = array_at(stack(SLICE), SLICE, np.uint32)
        sums = array_at(stack(SUMS), (2, MOST_ROWS, block_size), np.float32)
        copied = -1
        begin_tiles(TILE_SIZES[min(LANES, rows)])
        for task in take_tasks(tasks, -(-tasks // (8 * threads)), arguments_at):
            block, begin = task % blocks, task // blocks * most
            size = min(most, rows - begin)
            if copied != begin:
                copied = begin
                copy_rows(x[begin * words:], words, copy, line, size, words // LANES)
                if norm_at:
                    for r in range(size):
                        row = array_at(room, COPY * per_word, uint)[r * line * per_word:]
                        norm_row(row, norm, eps_bits)
            stride = 4 if size in (7, 8) and not on_tiles else step
            for half in range(halves):
                part, number = part_of(parts, half * blocks + block)
                own = bias[(half * blocks + block) * block_size:]
                copy_rows(own, 0, sums[half], block_size, -(-size // step) * step,
                          block_size // LANES)
                if size <= few:
                    here = sums[half].ravel()
                    if size == 1:
                        add_few(part, number, copy, line, words, here, per_word, 1)
                    elif size == 2:
                        add_few(part, number, copy, line, words, here, per_word, 2)
                    else:
                        add_few(part, number, copy, line, words, here, per_word, FEW)
                    continue
                for first in range(0, words, most_depth):
                    depth = min(most_depth, words - first)
                    after, asked = expand(
                        part, number, first, depth, lines, block_size, per_word)
                    # each step of the rows asks for a share of the next slice
                    asked = -(-asked // -(-size // stride))
                    ahead = (after - np.int64(lines.ctypes.data)) // 4
                    for r in range(0, size, stride):
                        piece = 0, depth, ahead + r // stride * asked * depth, asked
                        left, here, rest = copy[r * line + first:], sums[half, r:], size - r
                        if on_tiles:
                            below = LANES if rest > LANES else 0
                            load_sums(here, block_size, below)
                            add_slice(left, line, below, lines, piece)
                            store_sums(here, block_size, below)
                        elif min(rest, stride) > STEP - 2:
                            add_rows(left, line, lines, piece, here, STEP, per_word)
                        elif rest > 2:
                            add_rows(left, line, lines, piece, here, 4, per_word)
                        else:
                            add_rows(left, line, lines, piece, here, 2, per_word)
            write_block(out, residual, begin, block * block_size, outputs, sums[:, :size], halves)
        end_tiles()

    return compile_kernel(kernel)
