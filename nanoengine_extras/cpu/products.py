"""Matrix products with a packed weight, and SwiGLU of them: in tiles of AMX (`tiles.py`), or in
registers.

    each thread, for the parts and blocks that it takes:
        for each part of the rows:
            copy the part
            for each block of outputs, or of gates and then their ups:
                for each slice of the words of an input row:
                    for every few rows of the part:
                        sums    rows x outputs, which begin with the bias
                        for each word in the slice:
                            sums += rows times weight
                            prefetch a share of the next slice, or what comes soon
                        out     after the last slice: the sums, or SwiGLU

                                   outputs of a block    words of a slice    rows at a time
    in tiles                       32                    256                 32
    in registers of AVX-512        64                    128                 6
    in registers of AVX2           16                    512                 4

Even with tiles, products of up to four rows use registers, in the order of tiles: such a product
waits for the weight, and registers read it faster.

Rows are read from memory once, the weight once for each part. A part, at most 1 MiB, stays in the
caches for all blocks. The weight of a slice, 32 KiB, stays in the L1 cache for all rows of the
part.

A word is one float32 number, or two of bfloat16. The packed weight is in blocks of outputs, and a
line of a block holds a word from each of its outputs. In bfloat16, with 32 outputs:

    w0[0:2] w1[0:2] … w31[0:2]        a line: the first two inputs of each output
    w0[2:4] w1[2:4] … w31[2:4]        …

A float32 weight whose numbers all have their last 16 bits 0, as in a model that is stored in
bfloat16, is packed in half the memory: of each word, the upper half.

Each sum adds the inputs in a fixed order, so a row has the same bits whatever other rows there are.
The operations before and after a product are fused into it: RMSNorm (Zhang & Sennrich, 2019,
arXiv:1910.07467), SwiGLU (Shazeer, 2020, arXiv:2002.05202), which is SiLU(gate) * up, and the sum
with a residual.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine_extras.cpu.attention import inverse_rms
from nanoengine_extras.cpu.compiling import compile_kernel, take_tasks
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.tiles import (
    HAS_TILES, TILE_SIZES, add_tiles, begin_tiles, end_tiles, load_sums, round_as_before,
    round_as_tiles, store_sums)
from nanoengine_extras.cpu.vectors import (
    DTYPES, LANES, add_half, add_products, array_at, copy_rows, exp2, fill, has, inlined, load,
    load_part, numbers_at, prefetch, stack, store, store_part, where_less)

# registers hold the sums of STEP rows and BLOCK outputs
STEP, BLOCK = (6, 4 * LANES) if has("avx512f") else (4, LANES)
HELD = STEP * BLOCK
# how many outputs a block of weights has, for each dtype that can be multiplied
BLOCKS = {torch.float32: BLOCK, torch.bfloat16: 2 * LANES if HAS_TILES else BLOCK}
# where in a line the two tiles begin
ACROSS = np.array([0, LANES])
# a slice of the weight and a part of the rows, in words
SLICE, PART = 2**13, 2**18
# the most rows of a part, even if they are short
MOST_ROWS = 512
# the most words of a row: 16 rows of this length fill a part
MOST_WORDS = PART // LANES
# both are on the stack of each thread: 1.3 MB at most
COPY = PART + MOST_ROWS * LANES
SUMS = 2 * MOST_ROWS * BLOCK
# from this many rows on, tiles multiply, if there are any
TILED = 5
# for each of fewer rows, two sums of 32 outputs
HELD_APART = (TILED - 1) * 4 * LANES
# the rows of one step take little time, so each line of the weight is prefetched by itself, this
# many words before it is needed
SOON = 2**11 if HAS_TILES else 2**10
# into this cache: into the second alone, AMD's CPUs read packed weights half as fast (Zen 4)
LEVEL = 1 if has("clzero") else 2
# for more rows, it is prefetched once every EVERY words of a row; with AVX-512, LLVM keeps sums of
# 6 rows in registers only if EVERY is at least 8
EVERY = 8 if has("avx512f") else LANES


@torch.no_grad()
def pack(weight: Tensor, bias: Tensor | None, halves: int) -> tuple[Tensor, Tensor]:
    """Packs a weight, (outputs, inputs), as (blocks, words, numbers of a line), and its bias as
    float32. Both are padded with zeros: each half to whole blocks, words to whole vectors. If upper
    halves of words are enough, two of them share a number of a line.

    halves: 2 if the outputs are gates, then ups; otherwise 1. Raises ValueError for a weight that
    no kernel can read.
    """
    outputs, inputs = len(weight) // halves, weight.shape[1]
    is_known = weight.dtype in BLOCKS and weight.device.type == "cpu" and len(weight) % halves == 0
    if not is_known or not outputs or not 0 < inputs * weight.itemsize <= 4 * MOST_WORDS:
        raise ValueError(f"there is no kernel for {inputs} inputs and {len(weight)} outputs of "
                         f"{weight.dtype} on {weight.device}")
    block_size, depth = BLOCKS[weight.dtype], LANES * 4 // weight.itemsize
    more = -inputs % depth, 0, -outputs % block_size
    if any(more):
        weight = F.pad(weight.unflatten(0, (halves, -1)), (0, *more)).flatten(0, 1)
    words = weight.contiguous().view(torch.int32)
    lower, upper = words.view(torch.int16).unflatten(1, (-1, 2)).unbind(2)
    if weight.dtype == torch.float32 and not lower.any():
        words = upper
    lines = words.unflatten(0, (-1, block_size)).transpose(1, 2)
    if bias is None:
        bias = torch.zeros(halves * outputs, dtype=torch.float32, device="cpu")
    padded = F.pad(bias.float().unflatten(0, (halves, -1)), (0, more[-1])).flatten()
    # with fewer pages, the CPU caches more of their addresses
    packed = in_huge_pages(lines.nbytes).view(lines.dtype).view(lines.shape).copy_(lines)
    return packed.view(weight.dtype), padded


def has_uppers(packed: Tensor) -> bool:
    """Whether a packed weight has only the upper halves of words."""
    return packed.shape[2] * packed.itemsize < 4 * BLOCKS[packed.dtype]


def unpack(packed: Tensor, outputs: int, inputs: int, halves: int) -> Tensor:
    """Returns a copy of the weight that was packed, (outputs, inputs)."""
    if has_uppers(packed):
        packed = packed.view(torch.bfloat16).float()
    lines = packed.unflatten(2, (BLOCKS[packed.dtype], -1)).transpose(1, 2)
    padded = lines.flatten(2).flatten(0, 1).unflatten(0, (halves, -1))
    return padded[:, :outputs // halves, :inputs].flatten(0, 1)


@inlined()
def place_of(number, halves, slices, depth, blocks, words, block_size):
    """Where a slice of the weight begins. Slices are read by block, a gate's before its up's."""
    half, block = number // slices % halves, number // slices // halves
    return ((half * blocks + block) * words + number % slices * depth) * block_size


@inlined()
def add_slice(rows, line, below, weight, piece):
    """Adds products of 32 rows with a slice of the weight, on tiles.

    piece: (place, depth, ahead, asked): where the slice begins, and how deep it is, in words; where
        the words needed later are, and how many of them are prefetched for each word
    """
    place, depth, ahead, asked = piece
    for k in range(0, depth, LANES):
        add_tiles(rows[k:], line, below, weight, place + k * 2 * LANES, ACROSS, 2 * LANES)
        for i in range(k * asked, (k + LANES) * asked, LANES):
            prefetch(weight, ahead + i, 2)


@inlined()
def add_rows(rows, line, weight, piece, sums, count, per_word, is_all):
    """The same in registers, for `count` rows, a constant.

    AVX-512 has 32, of which sums of 6 x 64 take 24. AVX2 has 16, of which sums of 4 x 16 take 8.

    is_all: a constant, whether there are no other rows: see SOON
    """
    place, depth, ahead, asked = piece
    held = stack(HELD)
    pitch = sums.strides[0] // 4
    copy_rows(sums, pitch, held, BLOCK, np.int64(count), BLOCK // LANES)
    every = 1 if is_all else EVERY
    for k in range(0, depth, every):
        if not is_all:
            for i in range(k * asked, (k + every) * asked, 64 // weight.itemsize):
                prefetch(weight, ahead + i, 2)
        for j in range(k, k + every):
            for c in range(0, BLOCK, LANES):
                numbers = load(weight, place + j * BLOCK + c)
                if is_all and c * weight.itemsize % 64 == 0:
                    prefetch(weight, ahead + j * BLOCK + c, LEVEL)
                for r in range(count):
                    i = r * BLOCK + c
                    word = fill(rows[np.uint64(r * line + j)])
                    store(held, i, add_products(word, numbers, load(held, i), per_word))
    copy_rows(held, BLOCK, sums, pitch, np.int64(count), BLOCK // LANES)


@inlined()
def add_few(rows, line, weight, piece, sums, count):
    """The same in registers, for up to `count` rows, a constant, with the bits of tiles. These add
    up the products of 16 first numbers, those of 16 second ones, and then both to the sum."""
    place, depth, ahead, _ = piece
    held = stack(HELD_APART)
    saved = stack(2)
    round_as_tiles(saved)
    for start in range(0, depth, LANES):
        for i in range(0, 4 * count * LANES, LANES):
            store(held, i, fill(np.float32(0)))
        for k in range(start, start + LANES):
            for c in range(2):
                at = (2 * k + c) * LANES
                numbers = load(weight, place + at)
                prefetch(weight, ahead + at, 2)
                for r in range(count):
                    word = fill(rows[np.uint64(r * line + k)])
                    for upper in range(2):
                        i = (4 * r + 2 * c + upper) * LANES
                        store(held, i, add_half(word, numbers, load(held, i), upper))
        for i in range(0, 2 * count * LANES, LANES):
            both = load(held, 2 * i) + load(held, 2 * i + LANES)
            store(sums, i, load(sums, i) + both)
    round_as_before(saved)


@inlined(inline="always")
def add_few_rows(rows, line, weight, piece, sums, size):
    """Calls `add_few` with a constant: as many rows, or a few more."""
    if size == 1:
        add_few(rows, line, weight, piece, sums, 1)
    elif size == 2:
        add_few(rows, line, weight, piece, sums, 2)
    else:
        add_few(rows, line, weight, piece, sums, TILED - 1)


@inlined(inline="always")
def add_step(rows, line, weight, piece, sums, count, on_tiles, per_word, is_all):
    """Adds products of the next `count` rows, at most a step, with a slice of the weight. Rows
    after the last one hold arbitrary numbers. is_all: see `add_rows`"""
    if on_tiles:
        below = LANES if count > LANES else 0
        load_sums(sums, sums.strides[0] // 4, below)
        add_slice(rows, line, below, weight, piece)
        store_sums(sums, sums.strides[0] // 4, below)
    # the last rows need not fill a step, which with AVX2 has four rows
    elif count > STEP - 2:
        add_rows(rows, line, weight, piece, sums, STEP, per_word, is_all)
    elif count > 2:
        add_rows(rows, line, weight, piece, sums, 4, per_word, is_all)
    else:
        add_rows(rows, line, weight, piece, sums, 2, per_word, is_all)


@inlined()
def silu(x, out):
    """x / (1 + e^-x) of 16 numbers, as exact as the dtype of `out` requires."""
    # e^87 is near the largest float32; numbers below -87 also give about 0
    least = fill(np.float32(-87))
    x = where_less(x, least, least, x)
    return x / (fill(np.float32(1)) + exp2(x * fill(np.float32(-np.log2(np.e))), out))


@inlined()
def norm_row(row, weight, eps_bits):
    """RMSNorm, in place, of as many numbers as `weight` has."""
    end = len(weight)
    scale = fill(inverse_rms(row, end, np.int32(eps_bits).view(np.float32)))
    for i in range(0, end, LANES):
        store_part(row, i, end, load_part(row, i, end) * scale * load_part(weight, i, end))


@inlined()
def write_block(out, residual, row, first, outputs, sums, halves):
    """Results of some rows, from `row` on, and a block of outputs, from `first` on.

    residual: is added to them, unless it is empty
    """
    for i in range(sums.shape[1]):
        gates, ups = sums[0, i], sums[1, i]
        begin, end = (row + i) * outputs + first, (row + i + 1) * outputs
        for j in range(0, sums.shape[2], LANES):
            numbers = load(gates, j)
            if halves == 2:
                numbers = silu(numbers, out) * load(ups, j)
            if len(residual):
                # rounded before the sum, as in PyTorch
                store_part(out, begin + j, end, numbers)
                numbers = load_part(out, begin + j, end) + load_part(residual, begin + j, end)
            store_part(out, begin + j, end, numbers)


@functools.cache
def product(dtype: torch.dtype, has_uppers: bool = False) -> Callable:
    """kernel(norm, weight, bias, words, outputs, halves, eps_bits, x, residual, out, rows)

    out = RMSNorm of x times weight + bias + residual. With two halves, the product becomes SwiGLU
    before the last sum: its first half contains the gates, its second half the ups. Arrays are
    addresses, of numbers of `dtype` or words of them:

        norm: (inputs,) of `dtype`, the weight of the norm; 0 for no norm
        weight: (halves * blocks, words, outputs of a block) uint32, see `pack`; uint16 if it
            has_uppers
        bias: (halves * blocks * outputs of a block,) float32
        eps_bits: of the norm's eps as float32
        x: (rows, words) uint32; words % 16 == 0, at most MOST_WORDS
        residual: as `out`; 0 for none
        out: (rows, outputs) of `dtype`, at a multiple of 64 bytes; is written
    """
    uint = DTYPES[dtype]
    per_word = 4 // dtype.itemsize
    on_tiles, block_size = HAS_TILES and dtype == torch.bfloat16, BLOCKS[dtype]
    step = 2 * LANES if on_tiles else STEP
    most_depth = SLICE // block_size
    stored = np.uint16 if has_uppers else np.uint32

    def kernel(phase, threads, arguments_at):
        (norm_at, weight_at, bias_at, words, outputs, halves, eps_bits, x_at, residual_at, out_at,
         rows) = numbers_at(arguments_at, 11)
        blocks = -(-outputs // block_size)
        # about equal parts, each of whole steps if one fits
        unit = step if PART // words >= step else LANES
        parts = -(-rows // (min(MOST_ROWS, PART // words) // unit * unit))
        part = -(-rows // parts // unit) * unit
        # rows a power of two apart would share a few places of the L1 cache
        line = words + LANES
        tasks, slices = parts * blocks, -(-words // most_depth)

        norm = array_at(norm_at, words * per_word, uint)
        x = array_at(x_at, rows * words, np.float32)
        weight = array_at(weight_at, halves * blocks * words * block_size, stored)
        bias = array_at(bias_at, halves * blocks * block_size, np.float32)
        residual = array_at(residual_at, rows * outputs if residual_at else 0, uint)
        out = array_at(out_at, rows * outputs, uint)
        space = stack(COPY)
        copy = array_at(space, COPY, np.float32)
        lines = array_at(stack(SLICE), SLICE, np.uint32)
        sums = array_at(stack(SUMS), (2, MOST_ROWS, block_size), np.float32)
        copied = -1
        is_few = on_tiles and rows < TILED
        if not is_few:
            begin_tiles(TILE_SIZES[min(LANES, rows)])
        # each thread takes blocks about eight times
        for task in take_tasks(tasks, -(-tasks // (8 * threads)), arguments_at):
            block, begin = task % blocks, task // blocks * part
            size = min(part, rows - begin)
            if copied != begin:
                copied = begin
                copy_rows(x[begin * words:], words, copy, line, size, words // LANES)
                if norm_at:
                    for r in range(size):
                        row = array_at(space, COPY * per_word, uint)[r * line * per_word:]
                        norm_row(row, norm, eps_bits)
            # 7 or 8 rows: two steps of four, since two rows take as long as four (on Zen 4)
            stride = 4 if size in (7, 8) and not on_tiles else step
            # more rows read copies of slices, in whole words
            is_copied = has_uppers and size > step
            asked = block_size // 2 if is_copied else block_size
            asked = -(-asked // -(-size // stride))
            for turn in range(halves * slices):
                half, first = turn // slices, turn % slices * most_depth
                depth = min(most_depth, words - first)
                number = block * halves * slices + turn
                place = place_of(number, halves, slices, most_depth, blocks, words, block_size)
                ahead = place + SOON * 4 // weight.itemsize if size <= step else place_of(
                    number + 1, halves, slices, most_depth, blocks, words, block_size)
                if is_copied:
                    copy_rows(weight[place:], 0, lines, 0, 1, depth * block_size // LANES)
                    ahead = (weight_at + 2 * ahead - lines.ctypes.data) // 4
                for r in range(0, size, stride):
                    left, here = copy[r * line + first:], sums[half, r:]
                    if first == 0:
                        copy_rows(bias[(half * blocks + block) * block_size:], 0, here, block_size,
                                  step, block_size // LANES)
                    piece = place, depth, ahead + r // stride * asked * depth, asked
                    if is_copied:
                        add_step(left, line, lines, (0, *piece[1:]), here, min(size - r, stride),
                                 on_tiles, per_word, False)
                    elif is_few:
                        add_few_rows(left, line, weight, piece, here.ravel(), size)
                    elif size <= step:
                        add_step(left, line, weight, piece, here, size, on_tiles, per_word, True)
                    else:
                        add_step(left, line, weight, piece, here, min(size - r, stride), on_tiles,
                                 per_word, False)
                    if turn + 1 == halves * slices:
                        write_block(out, residual, begin + r, block * block_size, outputs,
                                    sums[:, r:min(r + stride, size)], halves)
        if not is_few:
            end_tiles()

    return compile_kernel(kernel)
