"""Turns 16 words of packed numbers into weights, in LLVM's language, for kernel.py.

Numbers become floating point without a conversion: u is put into the mantissa of 1, which gives
f = 1 + u / unit, and (u - zero) * scale = f * (unit * scale) - (unit + zero) * scale. Scales have
so few bits that the last product is exact, and a fused multiply-add rounds once, as defined.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoengine_cpu.vectors import (
    FLOATS, LANES, WORDS, add_pairs, call, fill, has, inlined, instruction, multiply_add, rounded,
    same, store, vector)
from nanoengine_extensions.quantized.packed import FLOAT, NESTED

# up to this many rows are multiplied while the weight is expanded: registers hold their sums
FEW = 4
# vectors of outputs that one row is multiplied with at once; more rows have two, or as many where
# numbers are looked up
COLUMNS = 4
# the mantissa of 1 holds numbers of 4 bits from bit 16 on, of 8 bits from bit 15 on
FIRST = {4: 16, 8: 15}
# for 16 outputs, of each of two halves: scales, what is added to them, lows
SCALES = 2 * 3 * LANES
PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)


def load_of(builder, kind, data, first):
    """16 numbers of a type, from a byte on."""
    place = builder.bitcast(builder.gep(data, [first]), ir.VectorType(kind, LANES).as_pointer())
    return builder.load(place, align=1)


@instruction(vector)
def load_bytes(builder, data, first):
    """16 signed bytes, from a byte on."""
    numbers = builder.sext(load_of(builder, ir.IntType(8), data, first), WORDS)
    return builder.sitofp(numbers, FLOATS)


@instruction(vector)
def load_halves(builder, data, first):
    """16 float16 numbers, from a byte on."""
    return builder.fpext(load_of(builder, ir.HalfType(), data, first), FLOATS)


@instruction(vector)
def load_floats(builder, data, first):
    """16 float32 numbers, from a byte on."""
    return load_of(builder, ir.FloatType(), data, first)


@instruction(vector)
def doubled(builder, numbers, half):
    """Each of the first or of the last 8 numbers twice."""
    parts = [builder.shuffle_vector(numbers, numbers, ir.Constant(WORDS, [
        first + i // 2 for i in range(LANES)])) for first in (0, LANES // 2)]
    return builder.select(builder.icmp_signed("==", half, half.type(0)), *parts)


# --------------------------------------------------------------------- 16 words become numbers


def at_vector(builder: Any, array: Any, place: Any) -> Any:
    place = ir.IntType(64)(place) if isinstance(place, int) else place
    return builder.bitcast(builder.gep(array, [place]), FLOATS.as_pointer())


def in_pairs(builder: Any, left: Any, right: Any) -> Any:
    """32 numbers, rounded to bfloat16, as 16 words."""
    if has("avx512bf16"):
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.bitcast(call(builder, name, PAIRS, right, left), FLOATS)
    halves = [rounded(builder, numbers) for numbers in (left, right)]
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [*range(2 * LANES)])
    return builder.bitcast(builder.shuffle_vector(*halves, order), FLOATS)


def numbers_of(builder: Any, packed: Any, scales: Any, bits: int, has_lows: bool) -> Iterator[Any]:
    """The weights of 16 packed words, in their order."""
    mask = same(WORDS, 2**bits - 1 << FIRST[bits])
    for i in range(32 // bits):
        turn = same(WORDS, (bits * i - FIRST[bits]) % 32)
        words = call(builder, "llvm.fshr.v16i32", WORDS, packed, packed, turn)
        words = builder.or_(builder.and_(words, mask), same(WORDS, 0x3F800000))
        half = i % 2 * SCALES // 2
        scale, shift, low = [builder.load(at_vector(builder, scales, half + part * LANES))
                             for part in range(3)]
        x = builder.bitcast(words, FLOATS)
        x = call(builder, "llvm.fma.v16f32", FLOATS, x, scale, shift)
        yield builder.fadd(x, low) if has_lows else x


def expanded(builder: Any, data: Any, place: Any, scales: Any, bits: int, has_lows: bool,
             per_word: int) -> list[Any]:
    """The words that are multiplied, in their order."""
    packed = builder.load(builder.bitcast(at_vector(builder, data, place), WORDS.as_pointer()),
                          align=4)
    found = [*numbers_of(builder, packed, scales, bits, has_lows)]
    if per_word == 1:
        return found
    return [in_pairs(builder, *pair) for pair in zip(found[::2], found[1::2])]


def with_constants(count: int) -> Callable:
    """Makes a function for numba of `write(builder, *operands, *constants)`: the last `count`
    arguments are constants where it is called. LLVM gets straight code, without a loop."""
    def decorate(write):
        @functools.wraps(write)
        def typed(context, *kinds):
            constants = [each.literal_value for each in kinds[-count:]]

            def generate(context, builder, signature, values):
                operands = [context.make_array(kind)(context, builder, value).data
                            if isinstance(kind, types.Array) else value
                            for kind, value in zip(signature.args[:-count], values)]
                write(builder, *operands, *constants)
                return context.get_dummy_value()
            return types.void(*kinds), generate
        return intrinsic(prefer_literal=True)(typed)
    return decorate


def add_weights(builder, rows, line, weights, sums, first, per_word, count):
    """Adds the products of `count` rows with 16 outputs' words to their sums, 16 numbers each."""
    add = add_pairs if per_word == 2 else multiply_add
    for r in range(count):
        at = at_vector(builder, sums, first + r * LANES)
        row = builder.gep(rows, [builder.mul(line, line.type(r))])
        total = builder.load(at, align=64)
        for k, each in enumerate(weights):
            number = builder.load(builder.gep(row, [line.type(k)]))
            x = builder.insert_element(same(FLOATS, ir.Undefined), number, ir.IntType(32)(0))
            x = builder.shuffle_vector(x, x, same(WORDS, 0))
            total = add(builder, each, x, total)
        builder.store(total, at, align=64)


def store_weights(builder, lines, to, pitch, weights):
    """Stores vectors of words, each `pitch` words after the last."""
    for k, each in enumerate(weights):
        at = builder.add(to, builder.mul(pitch, pitch.type(k)))
        builder.store(each, at_vector(builder, lines, at), align=64)


def columns(builder: Any, place: Any, count: int, width: int = 8) -> Iterator[tuple[int, Any]]:
    """The number and the place of each vector of packed words that `count` rows are multiplied
    with at once. width: of numbers that are looked up"""
    for i in range(COLUMNS if count == 1 or width < 8 else 2):
        yield i, builder.add(place, place.type(i * LANES))


@with_constants(4)
def add_expanded(builder, rows, line, data, place, scales, sums, bits, has_lows, per_word, count):
    """Adds the products of `count` rows with some vectors of packed words to their sums."""
    for i, packed in columns(builder, place, count):
        own = builder.gep(scales, [place.type(i * SCALES)])
        weights = expanded(builder, data, packed, own, bits, has_lows, per_word)
        add_weights(builder, rows, line, weights, sums, i * count * LANES, per_word, count)


@with_constants(3)
def store_expanded(builder, lines, to, pitch, data, place, scales, bits, has_lows, per_word):
    """Stores the weights of 16 packed words."""
    weights = expanded(builder, data, place, scales, bits, has_lows, per_word)
    store_weights(builder, lines, to, pitch, weights)


# ---------------------------------------------------------------------- scales


@inlined()
def open_half(numbers, scales, to, per_word):
    """Stores 16 numbers as vectors have their outputs: those of bfloat16 have two inputs of 8."""
    store(scales, to, doubled(numbers, 0) if per_word == 2 else numbers)
    store(scales, to + SCALES // 2, doubled(numbers, 1) if per_word == 2 else numbers)


@inlined()
def load_stored(data, at, above, storage):
    """16 scales or lows, from a byte on. above: where those of their 256 inputs are"""
    if storage == FLOAT:
        return load_floats(data, at)
    if storage == NESTED:
        return load_bytes(data, at) * load_halves(data, above)
    return load_halves(data, at)


@inlined()
def read_scales(data, at, above, kind, block_size, c):
    """Returns the scales, zeros and lows of 16 outputs of a block, from `c` on, in a group.

    at: where its record begins; above: where the scales of its 256 inputs begin, in float16
    """
    storage, has_zeros, has_lows, zero = kind
    size = 1 << storage
    lows = at + block_size * size
    zeros = lows + block_size * size * has_lows
    low, offset = fill(np.float32(0)), fill(np.float32(zero))
    scale = load_stored(data, at + c * size, above + 2 * c, storage)
    if has_lows:
        low = load_stored(data, lows + c * size, above + 2 * (block_size + c), storage)
    if has_zeros:
        # they are stored minus 128
        offset = load_bytes(data, zeros + c) + fill(np.float32(128))
    return scale, offset, low


@inlined()
def open_scales(data, at, above, kind, unit, block_size, per_word, scales):
    """Stores what the numbers of a group are multiplied by, and what is added."""
    for c in range(0, block_size, LANES):
        scale, offset, low = read_scales(data, at, above, kind, block_size, c)
        to = SCALES // LANES * c
        added = scale * (fill(np.float32(-unit)) - offset)
        open_half(scale * fill(np.float32(unit)), scales, to, per_word)
        open_half(added, scales, to + LANES, per_word)
        open_half(low, scales, to + 2 * LANES, per_word)
