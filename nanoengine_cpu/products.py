"""Products with a weight that oneDNN has packed for AMX (`tiles.py`), and SwiGLU of them.

    each thread, for its share of the parts and blocks:
        for each part of the rows:
            copy    of the part
            for each block of 32 outputs, or of 32 gates and then their 32 ups:
                for each slice of 512 inputs:
                    for each 32 rows of the part:
                        sums    32 rows x 32, which begin with the bias
                        for each 32 inputs of the slice:
                            sums += rows times weight
                            ask for a share of the next slice
                        out     behind the last slice: the sums, or SwiGLU, as bfloat16

Rows are read from far away once, the weight once for each part. A part, at most 1 MiB, stays in the
second cache while the blocks go by. The weight of a slice, 32 KiB, stays in the first one while the
rows go by. Results that no cache could keep are written past them.

A block of the packed weight is read as words, two inputs of an output in each:

    w0[0:2] w1[0:2] … w31[0:2]        a line: the first two inputs of 32 outputs
    w0[2:4] w1[2:4] … w31[2:4]        …

Each sum goes over the inputs in one order, so that a row has the same bits whatever rows are beside
it. The plain versions that the tests compare with are PyTorch's, and `swiglu` in `functions.py`.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import carray, prange

from nanoengine_cpu.compiling import compile_kernel
from nanoengine_cpu.rows import silu
from nanoengine_cpu.tiles import (
    TILE_SIZES, add_tiles, begin_tiles, end_tiles, load_sums, store_sums)
from nanoengine_cpu.vectors import (
    LANES, array_at, copy_rows, inlined, load, prefetch, prefetch_far, stack, store, store_part,
    store_past)

# a packed weight is padded to a multiple of so many outputs, and of so many inputs
BLOCK = 2 * LANES
# where in a line the two tiles begin
ACROSS = np.array([0, LANES])
# a slice and a part of the rows, in words
SLICE, PART = 256, 2**18
# so many rows are in a part, even if they are short
MOST_ROWS = 512
# so long may rows be: 16 of them are a part
MOST_INPUTS = 2 * PART // LANES
# both are on the stack of each thread: 1.2 MB
COPY = PART + MOST_ROWS * LANES
SUMS = 2 * MOST_ROWS * BLOCK
# so many numbers may stay in a cache until they are read again
CACHED = 2**18
# few rows go by quickly: the weight is asked for so many words before it is needed
SOON = 4 * LANES * BLOCK


@inlined()
def place_of(number, halves, slices, blocks, words):
    """Where a slice of the weight begins: they are read in blocks, a gate's before its up's."""
    half, block = number // slices % halves, number // slices // halves
    return ((half * blocks + block) * words + number % slices * SLICE) * BLOCK


@inlined()
def add_slice(rows, line, below, weight, place, depth, ahead, share, is_few):
    """Adds products of 32 rows with a slice. Each step asks for `share` cache lines of a later one.

    depth: of the slice, in words; ahead: where the later one begins; is_few: whether it is soon
    """
    for k in range(0, depth, LANES):
        add_tiles(rows[k:], line, below, weight, place + k * BLOCK, ACROSS, BLOCK)
        for i in range(k * share, (k + LANES) * share, LANES):
            if is_few:
                prefetch(weight, ahead + i)
            else:
                prefetch_far(weight, ahead + i)


@inlined()
def write_block(out, row, first, outputs, sums, halves, is_large):
    """Results of some rows, from `row` on, and 32 outputs, from `first` on."""
    for i in range(sums.shape[1]):
        gates, ups = sums[0, i], sums[1, i]
        begin, end = (row + i) * outputs + first, (row + i + 1) * outputs
        if halves == 2:
            for j in range(0, BLOCK, LANES):
                store(gates, j, silu(load(gates, j), out) * load(ups, j))
        if is_large:
            store_past(out, begin, load(gates, 0), load(gates, LANES))
        else:
            for j in range(0, min(BLOCK, end - begin), LANES):
                store_part(out, begin + j, end, load(gates, j))


@functools.cache
def product() -> Callable:
    """kernel(x, weight, bias, out, rows, words, outputs, halves, threads)

    out = x times weight + bias. With two halves it is SwiGLU of that: the first half are gates, the
    second one ups. The first four arguments are addresses. `x` is read as words, two bfloat16
    numbers in each:

        x: (rows, words) uint32; words % 16 == 0, at most MOST_INPUTS / 2
        weight: (halves * outputs / 32, rounded up, words, 32) uint32
        bias: (halves * outputs,) float32, padded as the weight is
        out: (rows, outputs) bfloat16, at a multiple of 64 bytes; is written; with two halves,
            outputs % 32 == 0
    """
    def kernel(x_at, weight_at, bias_at, out_at, rows, words, outputs, halves, threads):
        blocks = -(-outputs // BLOCK)
        is_large = rows * outputs > CACHED and outputs % BLOCK == 0
        # about equal parts, each of whole blocks of 32 rows if that many fit
        unit = BLOCK if PART // words >= BLOCK else LANES
        parts = -(-rows // min(MOST_ROWS, PART // words // unit * unit))
        part = -(-rows // parts // unit) * unit
        # rows a power of two apart would share a few places of the first cache
        line = words + LANES
        tasks, slices = parts * blocks, -(-words // SLICE)

        for thread in prange(threads):
            # made here, where numba sees that no one owns them, and counts no references
            x = array_at(x_at, rows * words, np.float32)
            weight = array_at(weight_at, halves * blocks * words * BLOCK, np.uint32)
            bias = array_at(bias_at, halves * blocks * BLOCK, np.float32)
            out = array_at(out_at, rows * outputs, np.uint16)
            copy = carray(stack(COPY), COPY, np.float32)
            sums = carray(stack(SUMS), (2, MOST_ROWS, BLOCK), np.float32)
            copied = -1
            begin_tiles(TILE_SIZES[min(LANES, rows)])
            for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
                block, begin = task % blocks, task // blocks * part
                size = min(part, rows - begin)
                if copied != begin:
                    copied = begin
                    copy_rows(x[begin * words:], words, copy, line, size, words // LANES)
                is_few = size <= BLOCK
                share = -(-BLOCK // -(-size // BLOCK))
                for turn in range(halves * slices):
                    half, first = turn // slices, turn % slices * SLICE
                    depth = min(SLICE, words - first)
                    number = block * halves * slices + turn
                    place = place_of(number, halves, slices, blocks, words)
                    ahead = (place + SOON if is_few
                             else place_of(number + 1, halves, slices, blocks, words))
                    for r in range(0, size, BLOCK):
                        # rows behind the last one hold anything
                        below = LANES if size - r > LANES else 0
                        if first == 0:
                            load_sums(bias[(half * blocks + block) * BLOCK:], 0, below)
                        else:
                            load_sums(sums[half, r:], BLOCK, below)
                        add_slice(copy[r * line + first:], line, below, weight, place, depth,
                                  ahead + r // BLOCK * share * depth, share, is_few)
                        store_sums(sums[half, r:], BLOCK, below)
                        if turn + 1 == halves * slices:
                            write_block(out, begin + r, block * BLOCK, outputs,
                                        sums[:, r:min(r + BLOCK, size)], halves, is_large)
            end_tiles()

    return compile_kernel(kernel, f"({8 * 'int64, '}int64)")
