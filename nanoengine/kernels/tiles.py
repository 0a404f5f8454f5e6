"""Products of matrices, a tile at a time: AMX, which Intel's servers have since 2023.

    sums    16 rows x 64, float32, in four tiles side by side
    for each 16 words of depth:
        left    16 rows x 16 words, one tile
        for each sum:
            right   16 lines x 16 words, one tile
            sum += left times right

A word is two bfloat16 numbers. In each step a sum gets two numbers: the products of the first
numbers of 16 words, and those of the second ones. So it has one order, whatever rows are beside it.
The CPU's eight registers for tiles have numbers, which are part of an instruction.
"""

import ctypes
import sys

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine.kernels.vectors import LANES, call, has, instruction

SUMS, LEFT, RIGHT = (0, 1, 2, 3), 4, (5, 6, 7, 5)


def may_use_tiles() -> bool:
    """Whether the CPU that numba compiles for has tiles, and Linux lets this process use them."""
    if sys.platform != "linux" or not has("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_TILES = may_use_tiles()


def tile_sizes(rows: int) -> np.ndarray:
    """The sizes of all eight tiles, as the CPU reads them: sums and left have so many lines."""
    sizes = np.zeros(64, np.uint8)
    sizes[0] = 1
    bytes_of_a_line, lines = sizes[16:32:2], sizes[48:56]
    bytes_of_a_line[:] = 4 * LANES
    lines[:] = [*[rows] * 5, *[LANES] * 3]
    return sizes


# by rows
TILE_SIZES = np.array([tile_sizes(rows) for rows in range(LANES + 1)])


def emit(builder, name, *operands):
    """One instruction; nothing where there are no tiles, which LLVM could not compile."""
    if HAS_TILES:
        operands = [ir.IntType(8)(each) if isinstance(each, int) else each for each in operands]
        call(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)


def at(builder, array, first, line):
    """Where a tile lies, and how many bytes each of its lines begins behind the line before."""
    place = builder.bitcast(builder.gep(array, [first]), ir.IntType(8).as_pointer())
    return place, builder.mul(line, line.type(4))


@instruction(types.void)
def begin_tiles(builder, sizes):
    """Sizes hold for the calling thread, until `end_tiles`."""
    emit(builder, "ldtilecfg", sizes)


@instruction(types.void)
def end_tiles(builder):
    emit(builder, "tilerelease")


@instruction(types.void)
def load_sums(builder, array, line):
    """From an array of which a row begins `line` numbers behind the row before."""
    for tile in SUMS:
        emit(builder, "tileloadd64", tile, *at(builder, array, line.type(tile * LANES), line))


@instruction(types.void)
def store_sums(builder, array, line):
    for tile in SUMS:
        emit(builder, "tilestored64", tile, *at(builder, array, line.type(tile * LANES), line))


@instruction(types.void)
def add_tiles(builder, left, left_line, right, place, across, line):
    """One step. right: words; the tile for a sum begins at `place` plus the sum's in `across`."""
    emit(builder, "tileloadd64", LEFT, *at(builder, left, line.type(0), left_line))
    for tile, register in zip(SUMS, RIGHT):
        first = builder.add(place, builder.load(builder.gep(across, [line.type(tile)])))
        emit(builder, "tileloadd64", register, *at(builder, right, first, line))
        emit(builder, "tdpbf16ps", tile, LEFT, register)
