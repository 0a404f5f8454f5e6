"""Matrix products with a packed weight (packed.py), for a CPU, fused with the operations around
them. A row has the same bits whatever other rows there are: see weights.py.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from nanoengine_extras.cpu.compiling import compile_kernel, take_tasks
from nanoengine_extras.cpu.products import (
    COPY, MOST_ROWS, PART, STEP, norm_row, write_block)
from nanoengine_extras.cpu.tiles import HAS_TILES, TILE_SIZES, begin_tiles, end_tiles
from nanoengine_extras.cpu.vectors import (
    DTYPES, LANES, array_at, copy_rows, inlined, numbers_at, stack)
from nanoengine_extras.cpu.packed.expanding import FEW
from nanoengine_extras.cpu.packed.order import BLOCKS, WIDE
from nanoengine_extras.cpu.packed.weights import (
    LINES, add_count, add_few, add_floats, add_many, expand, expand_floats)

# as in products.py, for blocks of WIDE outputs
SUMS = 2 * MOST_ROWS * WIDE


@inlined()
def part_of(parts, number):
    """Returns where the part with a block of outputs lies, and the block's number in the part."""
    first, end_1, second, end_2, third = parts
    if number < end_1:
        return first, number
    if number < end_2:
        return second, number - end_1
    return third, number - end_2


@functools.cache
def product(dtype: torch.dtype, has_floats: bool = False) -> Callable:
    """kernel(norm, bias, words, outputs, halves, eps_bits, x, residual, out, rows, *parts)

    As `products.product`, except for the weight. parts: for each of three parts of the weight, its
    address and the number of the first block after it; the third has no such number. With two
    halves, the second begins with its own block.

    has_floats: whether the numbers are FP8, and not whole ones or those of a table
    """
    uint = DTYPES[dtype]
    per_word = 4 // dtype.itemsize
    block_size = BLOCKS[dtype]
    on_tiles = HAS_TILES and dtype == torch.bfloat16
    few = FEW if block_size == WIDE else 0
    step = 2 * LANES if on_tiles else STEP

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
        space = stack(COPY)
        copy = array_at(space, COPY, np.float32)
        lines = array_at(stack(LINES), LINES, np.uint32)
        sums = array_at(stack(SUMS), (2, MOST_ROWS, block_size), np.float32)
        copied = -1
        begin_tiles(TILE_SIZES[min(LANES, rows)])
        for task in take_tasks(tasks, -(-tasks // (8 * threads)), arguments_at):
            block, begin = task % blocks, task // blocks * most
            size = min(most, rows - begin)
            if copied != begin:
                copied = begin
                copy_rows(x[begin * words:], words, copy, line, size, words // LANES)
                for r in range(size if norm_at else 0):
                    row = array_at(space, COPY * per_word, uint)[r * line * per_word:]
                    norm_row(row, norm, eps_bits)
            for half in range(halves):
                part, number = part_of(parts, half * blocks + block)
                own = bias[(half * blocks + block) * block_size:]
                copy_rows(own, 0, sums[half], block_size, -(-size // step) * step,
                          block_size // LANES)
                here = sums[half, :size]
                # chosen here: a kernel with a function among its free variables would be compiled
                # anew in each process
                if size <= few and has_floats:
                    add_few(add_floats, part, number, copy, line, words, here.ravel(), per_word,
                            size)
                elif size <= few:
                    add_few(add_count, part, number, copy, line, words, here.ravel(), per_word,
                            size)
                elif has_floats:
                    add_many(expand_floats, part, number, copy, line, words, here, lines, on_tiles,
                             per_word)
                else:
                    add_many(expand, part, number, copy, line, words, here, lines, on_tiles,
                             per_word)
            write_block(out, residual, begin, block * block_size, outputs, sums[:, :size], halves)
        end_tiles()

    return compile_kernel(kernel)
