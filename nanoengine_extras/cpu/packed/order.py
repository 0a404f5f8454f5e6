"""The order of numbers in the record of a packed weight (packed.py); the loop that stores them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from nanoengine_extras.cpu.compiling import compile_cached
from nanoengine_extras.cpu.products import BLOCKS as PRODUCT_BLOCKS
from nanoengine_extras.cpu.vectors import LANES, has

# the width of numbers in floating point: see `packed.Form`
FLOAT8 = 9
# whether kernels look up numbers of up to 6 bits
HAS_TABLES = has("avx512bw")
# the outputs of a block: those that a product computes at once, or several times as many
WIDE = 4 * LANES
BLOCKS = {dtype: size if HAS_TABLES else WIDE for dtype, size in PRODUCT_BLOCKS.items()}
# by width: how many lower bits of a number lie together, and how many upper bits elsewhere
LOWER = (0, 0, 0, 0, 4, 4, 4, 8, 8, 8) if HAS_TABLES else (0, 0, 0, 0, 4, 8, 8, 8, 8, 8)
UPPER = (0, 0, 0, 0, 0, 1, 2, 0, 0, 0) if HAS_TABLES else (0,) * 10
# the arguments of `placing`
ARGUMENTS = "void(uint8[:, ::1], uint16[::1], uint8[:, :, :], int64, uint8, uint8)"


def in_order(numbers: Tensor, group: int, width: int, dtype: torch.dtype) -> Tensor:
    """From (outputs, inputs) to (blocks, groups, numbers of a group): as they are stored.

    A vector has 16 numbers: of 16 outputs; with AVX-512 in bfloat16, of two inputs of 8 outputs,
    interleaved, or of the other 8. The lanes of 16 words have the numbers of some vectors: of the
    first 8 outputs, then of the others. A vector of FP8 numbers is 16 bytes. So is one of 8 bits
    without AVX-512.
    """
    block, per_word = BLOCKS[dtype], 4 // dtype.itemsize if HAS_TABLES else 1
    x = numbers.unflatten(1, (-1, group // per_word, per_word))
    x = x.unflatten(0, (-1, block // LANES, per_word, LANES // per_word))
    x = x.permute(0, 4, 5, 2, 1, 3, 6).flatten(5)
    # blocks, groups, words of a row, halves of a word, vectors of a block, lanes. A word has 8
    # numbers of 4 bits, or 4 bytes; here, numbers of 5 and 6 bits count as bytes
    x = x.unflatten(2, (-1, (8 if width == 4 else 4) // per_word))
    x = x.unflatten(3, (-1, 2 if width == 4 else 1))
    are_bytes = width == FLOAT8 or width == 8 and not HAS_TABLES
    order = (0, 1, 2, 6, 5, 3, 7, 4) if are_bytes else (0, 1, 2, 6, 7, 5, 3, 4)
    return x.permute(order).flatten(2)


@functools.cache
def order_of(group: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns which number of a group, of all outputs of a block, is in each place: the number of
    the output times `group`, plus that of the input."""
    block = BLOCKS[dtype]
    numbers = torch.arange(block * group, device="cpu").view(block, -1)
    return in_order(numbers, group, width, dtype).flatten()


def orders_of(group: int, width: int, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """Returns the parts that numbers consist of, the lower one first: how many bits each has, and
    the order in which they are stored.

    If there is one part, the order is that of `order_of`. If there are two, `order_of` gives
    vectors of 64 bytes, with a number in each. A stored vector has the parts of 8 / bits such
    vectors: byte i has those of byte i of each, the first vector's in its lowest bits.
    """
    order = order_of(group, width, dtype)
    if not UPPER[width]:
        return [(LOWER[width], order)]
    across = BLOCKS[dtype] // LANES, 4 * LANES
    return [(bits, order.view(-1, 8 // bits, *across).permute(0, 2, 3, 1).flatten())
            for bits in (LOWER[width], UPPER[width])]


def place(numbers: Tensor, order: Tensor, records: Tensor, group: int, added: int,
          below: int) -> None:
    """Stores some bits of numbers in records, in an order. The size of a record says how many bits.

    numbers: (outputs, inputs), of 8 bits; records: (blocks, groups, bytes), is written
    order: of one record, see `orders_of`; if numbers share a byte, the first one is lowest
    added: is added to all numbers. The sum has the right bits for numbers with a sign, too.
    below: how many lower bits of the sums are left out
    """
    assert numbers.element_size() == 1
    numbers = numbers.contiguous().view(torch.uint8)
    placing()(numbers.numpy(), order.to(torch.uint16).numpy(), records.numpy(), group, added % 256,
              below)


@functools.cache
def placing() -> Callable[..., None]:
    """Returns the compiled loop. While it runs, other threads can run Python.

    A group of a block's outputs is copied to a tile, which stays in the L1 cache. There, numbers
    are taken in order.
    """
    def run(numbers: Any, order: Any, records: Any, group: int, added: int, below: int) -> None:
        outputs, inputs = numbers.shape
        blocks, groups, size = records.shape
        block = len(order) // group
        bits = np.uint8(8 * size // len(order))
        mask = np.uint8(2**bits - 1)
        tile = np.empty(len(order), np.uint8)
        for b in range(blocks):
            for g in range(groups):
                # outside of the weight
                tile[:] = 0
                count = min(group, inputs - g * group)
                for o in range(min(block, outputs - b * block)):
                    row, to = numbers[b * block + o, g * group:], tile[o * group:]
                    for i in range(count):
                        to[i] = np.uint8(row[i] + added) >> below & mask
                record = records[b, g]
                # numba would count places from the end if they could be negative
                for i in range(size):
                    if bits == 8:
                        record[i] = tile[order[np.uint64(i)]]
                    elif bits == 4:
                        first, second = order[np.uint64(2 * i)], order[np.uint64(2 * i + 1)]
                        record[i] = tile[first] | tile[second] << np.uint8(4)
                    else:
                        record[i] = 0
                        for j in range(8 // bits):
                            number = tile[order[np.uint64(8 // bits * i + j)]]
                            record[i] |= number << np.uint8(bits * j)

    return compile_cached(functools.partial(njit, ARGUMENTS, nogil=True, boundscheck=False), run)
