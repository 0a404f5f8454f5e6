"""Products with a weight that oneDNN has packed, and SwiGLU of them, on a CPU that multiplies pairs
of bfloat16 numbers: on tiles (`tiles.py`), or on registers.

    each thread, for its share of the parts and blocks:
        for each part of the rows:
            copy    of the part
            for each block of outputs, or of gates and then their ups:
                for each slice of the inputs:
                    for each few rows of the part:
                        sums    rows x outputs, which begin with the bias
                        for each input of the slice:
                            sums += rows times weight
                            ask for a share of the next slice
                        out     behind the last slice: the sums, or SwiGLU, as bfloat16

                   outputs of a block    inputs of a slice    rows at a time
    on tiles       32                    512                  32
    on registers   64                    256                  6

Rows are read from far away once, the weight once for each part. A part, at most 1 MiB, stays in the
second cache while the blocks go by. The weight of a slice, 32 KiB, stays in the first one while the
rows go by. Results that no cache could keep are written past them.

A block of the packed weight is read as words, two inputs of an output in each:

    w0[0:2] w1[0:2] … w31[0:2]        a line: the first two inputs of each output
    w0[2:4] w1[2:4] … w31[2:4]        …

Each sum goes over the inputs in one order, so that a row has the same bits whatever rows are beside
it. The plain versions that the tests compare with are PyTorch's, and `swiglu` in `functions.py`.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import carray

from nanoengine_cpu.compiling import compile_kernel
from nanoengine_cpu.rows import silu
from nanoengine_cpu.tiles import (
    HAS_TILES, TILE_SIZES, add_tiles, begin_tiles, end_tiles, load_sums, store_sums)
from nanoengine_cpu.vectors import (
    LANES, add_products, array_at, copy_rows, fill, has, inlined, load, numbers_at, prefetch,
    prefetch_far, share, stack, store, store_part, store_past)

# whether this CPU has the instructions
HAS_PRODUCTS = HAS_TILES or has("avx512bf16")
# A packed weight is padded to a multiple of so many outputs, and of so many inputs.
BLOCK, DEPTH = 2 * LANES if HAS_TILES else 4 * LANES, 2 * LANES
# so many rows are multiplied at a time; their sums are in so many numbers
STEP = 2 * LANES if HAS_TILES else 6
HELD = STEP * BLOCK
# where in a line the two tiles begin
ACROSS = np.array([0, LANES])
# a slice and a part of the rows, in words
SLICE, PART = 2**13 // BLOCK, 2**18
# so many rows are in a part, even if they are short
MOST_ROWS = 512
# so long may rows be: 16 of them are a part
MOST_INPUTS = 2 * PART // LANES
# both are on the stack of each thread: 1.3 MB at most
COPY = PART + MOST_ROWS * LANES
SUMS = 2 * MOST_ROWS * BLOCK
# so many numbers may stay in a cache until they are read again
CACHED = 2**18
# few rows go by quickly: the weight is asked for so many words before it is needed
SOON = 2**11 if HAS_TILES else 2**10


@inlined()
def place_of(number, halves, slices, blocks, words):
    """Where a slice of the weight begins: they are read in blocks, a gate's before its up's."""
    half, block = number // slices % halves, number // slices // halves
    return ((half * blocks + block) * words + number % slices * SLICE) * BLOCK


@inlined()
def add_slice(rows, line, below, weight, piece, is_few):
    """Adds products of 32 rows with a slice of the weight, on tiles.

    piece: (place, depth, ahead, share): where the slice begins, and how deep it is, in words; where
        words lie that are needed later, and for how many of them each word of depth asks
    is_few: whether they are needed soon
    """
    place, depth, ahead, share = piece
    for k in range(0, depth, LANES):
        add_tiles(rows[k:], line, below, weight, place + k * BLOCK, ACROSS, BLOCK)
        for i in range(k * share, (k + LANES) * share, LANES):
            if is_few:
                prefetch(weight, ahead + i)
            else:
                prefetch_far(weight, ahead + i)


@inlined()
def add_rows(rows, line, weight, piece, sums, count):
    """The same on registers, for `count` rows, a constant: sums of six rows are 24 of the 32."""
    place, depth, ahead, share = piece
    held = stack(HELD)
    copy_rows(sums, BLOCK, held, BLOCK, count, BLOCK // LANES)
    for k in range(depth):
        for i in range(k * share, (k + 1) * share, LANES):
            prefetch_far(weight, ahead + i)
        for c in range(0, BLOCK, LANES):
            numbers = load(weight, place + k * BLOCK + c)
            for r in range(count):
                i = r * BLOCK + c
                word = fill(rows[r * line + k])
                store(held, i, add_products(word, numbers, load(held, i), 2))
    copy_rows(held, BLOCK, sums, BLOCK, count, BLOCK // LANES)


@inlined()
def write_block(out, row, first, outputs, sums, halves, is_large):
    """Results of some rows, from `row` on, and a block of outputs, from `first` on."""
    for i in range(sums.shape[1]):
        gates, ups = sums[0, i], sums[1, i]
        begin, end = (row + i) * outputs + first, (row + i + 1) * outputs
        if halves == 2:
            for j in range(0, BLOCK, LANES):
                store(gates, j, silu(load(gates, j), out) * load(ups, j))
        if is_large:
            for j in range(0, BLOCK, 2 * LANES):
                store_past(out, begin + j, load(gates, j), load(gates, j + LANES))
        else:
            for j in range(0, min(BLOCK, end - begin), LANES):
                store_part(out, begin + j, end, load(gates, j))


@functools.cache
def product() -> Callable:
    """kernel(x, weight, bias, out, rows, words, outputs, halves)

    out = x times weight + bias. With two halves it is SwiGLU of that: the first half are gates, the
    second one ups. The first four arguments are addresses. `x` is read as words, two bfloat16
    numbers in each:

        x: (rows, words) uint32; words % 16 == 0, at most MOST_INPUTS / 2
        weight: (halves * outputs / BLOCK, rounded up, words, BLOCK) uint32
        bias: (halves * outputs,) float32, padded as the weight is
        out: (rows, outputs) bfloat16, at a multiple of 64 bytes; is written; with two halves,
            outputs % BLOCK == 0
    """
    def kernel(phase, thread, threads, arguments_at):
        x_at, weight_at, bias_at, out_at, rows, words, outputs, halves = numbers_at(
            arguments_at, 8)
        blocks = -(-outputs // BLOCK)
        is_large = rows * outputs > CACHED and outputs % BLOCK == 0
        # about equal parts, each of whole steps if one fits
        unit = STEP if PART // words >= STEP else LANES
        parts = -(-rows // (min(MOST_ROWS, PART // words) // unit * unit))
        part = -(-rows // parts // unit) * unit
        # rows a power of two apart would share a few places of the first cache
        line = words + LANES
        tasks, slices = parts * blocks, -(-words // SLICE)

        x = array_at(x_at, rows * words, np.float32)
        weight = array_at(weight_at, halves * blocks * words * BLOCK, np.uint32)
        bias = array_at(bias_at, halves * blocks * BLOCK, np.float32)
        out = array_at(out_at, rows * outputs, np.uint16)
        copy = carray(stack(COPY), COPY, np.float32)
        sums = carray(stack(SUMS), (2, MOST_ROWS, BLOCK), np.float32)
        copied = -1
        begin_tiles(TILE_SIZES[min(LANES, rows)])
        for task in range(*share(tasks, thread, threads)):
            block, begin = task % blocks, task // blocks * part
            size = min(part, rows - begin)
            if copied != begin:
                copied = begin
                copy_rows(x[begin * words:], words, copy, line, size, words // LANES)
            is_few = size <= STEP
            asked = -(-BLOCK // -(-size // STEP))
            for turn in range(halves * slices):
                half, first = turn // slices, turn % slices * SLICE
                depth = min(SLICE, words - first)
                number = block * halves * slices + turn
                place = place_of(number, halves, slices, blocks, words)
                ahead = (place + SOON if is_few
                         else place_of(number + 1, halves, slices, blocks, words))
                for r in range(0, size, STEP):
                    # rows behind the last one hold anything
                    left, here, rest = copy[r * line + first:], sums[half, r:], size - r
                    if first == 0:
                        copy_rows(bias[(half * blocks + block) * BLOCK:], 0, here, BLOCK, STEP,
                                  BLOCK // LANES)
                    piece = place, depth, ahead + r // STEP * asked * depth, asked
                    if HAS_TILES:
                        below = LANES if rest > LANES else 0
                        load_sums(here, BLOCK, below)
                        add_slice(left, line, below, weight, piece, is_few)
                        store_sums(here, BLOCK, below)
                    elif rest > 4:
                        add_rows(left, line, weight, piece, here, 6)
                    elif rest > 2:
                        add_rows(left, line, weight, piece, here, 4)
                    else:
                        add_rows(left, line, weight, piece, here, 2)
                    if turn + 1 == halves * slices:
                        write_block(out, begin + r, block * BLOCK, outputs,
                                    sums[:, r:min(r + STEP, size)], halves, is_large)
        end_tiles()

    return compile_kernel(kernel)
