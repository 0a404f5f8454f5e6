"""Matrix products, a tile at a time, by AMX, which Intel's servers have had since 2023.

    sums    32 rows x 32, float32, in two by two tiles
    for each 16 words of depth:
        left    32 rows x 16 words, two tiles, upper and lower
        right   16 lines x 32 words, two tiles
        each sum += its left times its right

A word is two bfloat16 numbers. Each step adds one number to each sum: 16 products of first numbers,
plus 16 of second ones. So the order of a sum is fixed, whatever other rows there are. An
instruction contains the numbers of its tile registers, of which a CPU has eight.

The lower tiles begin `below` rows under the upper ones. If it is 0, there are no lower ones; if it
is less than 16, some rows are in both.
"""

import ctypes
import sys

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine_extras.cpu.vectors import LANES, call, has, instruction

SUMS, LEFT, RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)


def may_use_tiles() -> bool:
    """Whether the CPU that numba compiles for has tiles, and Linux lets this process use them."""
    if sys.platform != "linux" or not has("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_TILES = may_use_tiles()


def tile_sizes(rows: int) -> np.ndarray:
    """The sizes of all eight tiles, as the CPU reads them; sums and left have `rows` lines."""
    sizes = np.zeros(64, np.uint8)
    sizes[0] = 1
    # the bytes of a line, and how many lines
    sizes[16:32:2] = 4 * LANES
    sizes[48:56] = [*[rows] * 6, *[LANES] * 2]
    return sizes


# By the number of rows. 0 rows have the sizes of one: some CPUs refuse a tile that has no lines.
TILE_SIZES = np.array([tile_sizes(max(1, rows)) for rows in range(LANES + 1)])


def emit(builder, name, *operands):
    """Writes one instruction, or none on a CPU without tiles: LLVM could not compile it."""
    if HAS_TILES:
        operands = [ir.IntType(8)(each) if isinstance(each, int) else each for each in operands]
        call(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)


def at(builder, array, first, line):
    """Where a tile begins, and how many bytes apart its lines begin."""
    place = builder.bitcast(builder.gep(array, [first]), ir.IntType(8).as_pointer())
    return place, builder.mul(line, line.type(4))


def access_mxcsr(builder, name, place):
    """Reads or writes MXCSR, which says how a thread rounds in registers."""
    if HAS_TILES:
        pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
        call(builder, f"llvm.x86.sse.{name}", ir.VoidType(), pointer)


@instruction(types.void)
def round_as_tiles(builder, saved):
    """From here on, subnormal numbers count as 0. saved: two words, of which `round_as_before`
    reads the first."""
    before = builder.bitcast(saved, ir.IntType(32).as_pointer())
    now = builder.gep(before, [ir.IntType(32)(1)])
    access_mxcsr(builder, "stmxcsr", before)
    builder.store(builder.or_(builder.load(before), ir.IntType(32)(0x8040)), now)
    access_mxcsr(builder, "ldmxcsr", now)


@instruction(types.void)
def round_as_before(builder, saved):
    access_mxcsr(builder, "ldmxcsr", saved)


@instruction(types.void)
def begin_tiles(builder, sizes):
    """The sizes apply to the calling thread, until `end_tiles`."""
    emit(builder, "ldtilecfg", sizes)


@instruction(types.void)
def end_tiles(builder):
    emit(builder, "tilerelease")


def upper_and_lower(builder, below):
    """Yields the number and the first row of the upper tile, and of the lower one if there is
    one."""
    yield 0, below.type(0)
    with builder.if_then(builder.icmp_unsigned("!=", below, below.type(0))):
        yield 1, below


def emit_sums(builder, name, array, line, below):
    for row, start in upper_and_lower(builder, below):
        for column, tile in enumerate(SUMS[row]):
            first = builder.add(builder.mul(start, line), line.type(column * LANES))
            emit(builder, name, tile, *at(builder, array, first, line))


@instruction(types.void)
def load_sums(builder, array, line, below):
    """Loads sums from an array whose rows begin `line` numbers apart."""
    emit_sums(builder, "tileloadd64", array, line, below)


@instruction(types.void)
def store_sums(builder, array, line, below):
    emit_sums(builder, "tilestored64", array, line, below)


@instruction(types.void)
def add_tiles(builder, left, left_line, below, right, place, across, line):
    """One step.

    left: it is loaded with the hint that the L1 cache need not keep it
    right: words; its two tiles begin at `place` plus across[0] and plus across[1]
    """
    for row, start in upper_and_lower(builder, below):
        lines = at(builder, left, builder.mul(start, left_line), left_line)
        emit(builder, "tileloaddt164", LEFT[row], *lines)
        for column, tile in enumerate(RIGHT):
            if row == 0:
                first = builder.load(builder.gep(across, [line.type(column)]))
                lines = at(builder, right, builder.add(place, first), line)
                emit(builder, "tileloadd64", tile, *lines)
            emit(builder, "tdpbf16ps", SUMS[row][column], LEFT[row], tile)
