"""Products of a few rows with a weight that oneDNN has packed for AMX (`tiles.py`).

    for each block of 32 outputs:
        for each 32 rows:
            sums    32 rows x 32, which begin with the bias
            for each 32 inputs:
                ask for the next lines of the weight
                sums += rows times weight
            out     the sums, as bfloat16

A block of the packed weight is read as words, two inputs of an output in each:

    w0[0:2] w1[0:2] … w31[0:2]        a line: the first two inputs of 32 outputs
    w0[2:4] w1[2:4] … w31[2:4]        …

Few rows wait for the weight, which these loops read faster than oneDNN's. Of many rows more has to
stay in the caches: oneDNN is faster. Each sum goes over the inputs in one order, so that a row has
the same bits whatever rows are beside it. The plain version that the tests compare with is
PyTorch's.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import carray, prange

from nanoengine.kernels.compiling import compile_kernel
from nanoengine.kernels.rows import store_row
from nanoengine.kernels.tiles import (
    TILE_SIZES, add_tiles, begin_tiles, end_tiles, load_sums, store_sums)
from nanoengine.kernels.vectors import LANES, array_at, prefetch, stack

# a packed weight is padded to a multiple of so many outputs, and of so many inputs
BLOCK = 2 * LANES
SUMS = BLOCK * BLOCK
# where in a line the two tiles begin
ACROSS = np.array([0, LANES])


@functools.cache
def product() -> Callable:
    """kernel(x, weight, bias, out, rows, words, outputs): out = x times weight + bias.

    The first four are addresses, of which `x` is read as words, two bfloat16 numbers in each:

        x: (rows, words) uint32
        weight: (outputs / 32, rounded up, words, 32) uint32
        bias: (outputs,) float32, padded as the weight is
        out: (rows, outputs) bfloat16, is written
    """
    def kernel(x_at, weight_at, bias_at, out_at, rows, words, outputs):
        blocks = -(-outputs // BLOCK)
        x = array_at(x_at, (rows, words), np.uint32)
        weight = array_at(weight_at, blocks * words * BLOCK, np.uint32)
        bias = array_at(bias_at, blocks * BLOCK, np.float32)
        out = array_at(out_at, (rows, outputs), np.uint16)
        height = min(LANES, rows)
        # where the last tile of rows begins
        last = rows - height
        for block in prange(blocks):
            sums = carray(stack(SUMS), (BLOCK, BLOCK), np.float32)
            column = block * BLOCK
            begin_tiles(TILE_SIZES[height])
            for r in range(0, rows, BLOCK):
                top = min(r, last)
                below = min(r + LANES, last) - top
                load_sums(bias[column:], 0, below)
                for k in range(0, words, LANES):
                    place = (block * words + k) * BLOCK
                    add_tiles(x[top, k:], words, below, weight, place, ACROSS, BLOCK)
                    # later rows find the weight in the cache
                    if r == 0:
                        for i in range(0, LANES * BLOCK, LANES):
                            prefetch(weight, place + LANES * BLOCK + i)
                store_sums(sums, BLOCK, below)
                for i in range(below + height):
                    store_row(out[top + i], column, sums[i], min(BLOCK, outputs - column), 1, 16)
            end_tiles()

    return compile_kernel(kernel, f"({6 * 'int64, '}int64)")
