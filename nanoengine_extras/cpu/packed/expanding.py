"""Expands packed numbers into weights and multiplies them, in LLVM IR, for kernel.py.

    weight = number * scale + added             added: the low, or minus the zero times the scale

Numbers are small, and scales have so few bits that products with a zero are exact. So a fused
multiply-add rounds once, as the definition of a weight does. A number u of 8 bits needs no
conversion to floating point with AVX-512: put into the mantissa of 1, it gives f = 1 + u / 256, and
u * scale + added = f * (256 * scale) + (added - 256 * scale). This difference is exact, too.
"""

from itertools import chain

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine_extras.cpu.vectors import (
    FLOATS, LANES, WORDS, add_pairs, array_at, call, fill, has, inlined, instruction,
    multiply_add, same, store, vector)
from nanoengine_extras.cpu.packed import assembly
from nanoengine_extras.cpu.packed.order import FLOAT8, HAS_TABLES, LOWER, UPPER
from nanoengine_extras.cpu.packed.layout import ANY, EXPONENT, FLOAT, NESTED, TABLE
from nanoengine_extras.cpu.packed.numbers import (
    at_vector, in_bytes, in_place, in_words, load_words, looked_up, opened_pairs,
    small_floats)

# up to this many rows are multiplied while the weight is expanded: registers hold their sums
FEW = 4
# so many vectors of outputs are multiplied at once, and twice as many with one row
COLUMNS = 2 if has("avx512f") else 1
# few rows take little time, so the weight is prefetched this many words before it is needed
SOON = 2**10 if has("clzero") else 2**11
# for 16 outputs, of each of two halves: the numbers that are added, and scales; without AVX-512,
# halves have the same, and numbers of 4 bits have four scales
SCALES = 2 * 2 * LANES if HAS_TABLES else assembly.SCALES
# 16, where AVX-512 and ARM have 32
FEW_REGISTERS = has("avx2") and not has("avx512f")


def load_of(builder, kind, data, first):
    """16 numbers of a type that begin at a byte, or at a word of an array of words."""
    place = builder.bitcast(builder.gep(data, [first]), ir.VectorType(kind, LANES).as_pointer())
    return builder.load(place, align=1)


@instruction(vector)
def load_bytes(builder, data, first):
    """16 signed bytes that begin at a byte."""
    numbers = builder.sext(load_of(builder, ir.IntType(8), data, first), WORDS)
    return builder.sitofp(numbers, FLOATS)


@instruction(vector)
def load_halves(builder, data, first):
    """16 float16 numbers that begin at a byte."""
    return builder.fpext(load_of(builder, ir.HalfType(), data, first), FLOATS)


@instruction(vector)
def load_floats(builder, data, first):
    """16 float32 numbers that begin at a byte."""
    return load_of(builder, ir.FloatType(), data, first)


@instruction(vector)
def load_exponents(builder, data, first):
    """2^(n - 127) for 16 bytes n, above 0, that begin at a byte."""
    numbers = builder.zext(load_of(builder, ir.IntType(8), data, first), WORDS)
    return builder.bitcast(builder.shl(numbers, same(WORDS, 23)), FLOATS)


@instruction(vector)
def doubled(builder, numbers, half):
    """Each of the first or of the last 8 numbers twice."""
    parts = [builder.shuffle_vector(numbers, numbers, ir.Constant(WORDS, [
        first + i // 2 for i in range(LANES)])) for first in (0, LANES // 2)]
    return builder.select(builder.icmp_signed("==", half, half.type(0)), *parts)


# ------------------------------------------------------------------- numbers become weights


def marked(builder, words):
    """1 + u / 256 for each byte u of some words, from the lowest up."""
    numbers = []
    for shift in range(0, 32, 8):
        turn = same(WORDS, (shift - 15) % 32)
        turned = call(builder, "llvm.fshr.v16i32", WORDS, words, words, turn)
        byte = builder.and_(turned, same(WORDS, 255 << 15))
        numbers.append(builder.bitcast(builder.or_(byte, same(WORDS, 0x3F800000)), FLOATS))
    return numbers


def weights_of(builder, data, place, upper, shift, table, scales, width, per_word, turn=None):
    """Yields the weights of 16 packed words, as the words that are multiplied. Each is computed
    when it is needed: AVX2 has few registers.

    upper, shift: see `in_bytes`; turn: see `hidden`, None: scales may take registers
    """
    if UPPER[width]:
        for each in in_bytes(builder, data, place, upper, shift, width):
            numbers = opened_pairs(builder, each, width)
            yield from scaled(builder, numbers, len(numbers), scales, per_word)
        return
    words = load_words(builder, data, place)
    if width == FLOAT8:
        numbers = small_floats(builder, data, place)
    elif not HAS_TABLES:
        numbers = in_place(builder, words) if width == 4 else (builder.uitofp(
            load_of(builder, ir.IntType(8), data, builder.add(place, place.type(4 * i))), FLOATS)
            for i in range(4))
    else:
        numbers = looked_up(builder, words, table) if width == 4 else marked(builder, words)
    yield from scaled(builder, numbers, 32 // LOWER[width], scales, per_word, turn)


def hidden(builder, pointer, turn):
    """The same pointer, which LLVM does not know to be the same. What lies there is an operand in
    memory each time, and takes no register. turn: a number that is new in each turn of a loop"""
    kind = ir.FunctionType(pointer.type, [pointer.type, turn.type])
    found = builder.asm(kind, "", "=r,0,r", [pointer, turn], False)
    found.attributes.add("readnone")
    return found


def scaled(builder, numbers, count, scales, per_word, turn=None):
    """Yields the weights of `count` vectors of numbers, as the words that are multiplied."""
    # loaded here, since LLVM would load them anew after each store
    factors = [builder.load(at_vector(builder, scales, i)) for i in range(0, SCALES, LANES)]

    def weights():
        own = scales
        for i, number in enumerate(numbers):
            half = i * per_word // count if HAS_TABLES else 0
            added, scale = factors[2 * half:2 * half + 2]
            if not HAS_TABLES:
                own = hidden(builder, own, turn) if turn else own
                scale = builder.load(at_vector(builder, own, LANES * (1 + i % 4 * (count == 8))))
            yield call(builder, "llvm.fma.v16f32", FLOATS, number, scale, added)
    yield from in_words(builder, weights(), per_word)


def add_word(builder, rows, line, k, word, sums, first, per_word, count):
    """Adds the products of word k of `count` rows with 16 outputs' words to their sums, 16 numbers
    each."""
    add = add_pairs if per_word == 2 else multiply_add
    for r in range(count):
        at = at_vector(builder, sums, first + r * LANES)
        place = builder.add(builder.mul(line, line.type(r)), k)
        number = builder.load(builder.gep(rows, [place]))
        x = builder.insert_element(same(FLOATS, ir.Undefined), number, ir.IntType(32)(0))
        x = builder.shuffle_vector(x, x, same(WORDS, 0))
        builder.store(add(builder, word, x, builder.load(at, align=64)), at, align=64)


def store_words(builder, lines, to, pitch, words):
    """Stores vectors of words, each `pitch` words after the last."""
    for k, each in enumerate(words):
        at = builder.add(to, builder.mul(pitch, pitch.type(k)))
        builder.store(each, at_vector(builder, lines, at), align=64)


@instruction(types.void, constants=3)
def add_weights(builder, rows, line, word, data, place, upper, shift, table, scales, sums, width,
                per_word, count):
    """Adds the products of `count` rows with some vectors of weights to their sums."""
    if FEW_REGISTERS and width == 4 and per_word == 1:
        return assembly.add_by_hand(builder, rows, line, word, data, place, scales, sums, count)

    def add_column(i):
        own = builder.gep(scales, [place.type(i * SCALES)])
        places = [builder.add(each, place.type(i * LANES)) for each in (place, upper)]
        turn = place if FEW_REGISTERS and count != 2 else None
        words = weights_of(builder, data, *places, shift, table, own, width, per_word, turn)
        for k, each in enumerate(words):
            at = builder.add(word, word.type(k))
            yield add_word(builder, rows, line, at, each, sums, i * count * LANES, per_word, count)
    columns = map(add_column, range(max(COLUMNS, 2 * COLUMNS // count)))
    # AVX2 has few registers, and takes a word of each column in turn
    for _ in chain(*columns) if COLUMNS > 1 else zip(*columns):
        pass


@instruction(types.void, constants=2)
def store_weights(builder, lines, to, pitch, data, place, upper, shift, table, scales, width,
                  per_word):
    """Stores the weights of 16 packed words, each vector of them `pitch` words after the last."""
    weights = weights_of(builder, data, place, upper, shift, table, scales, width, per_word)
    store_words(builder, lines, to, pitch, weights)


# ---------------------------------------------------------------------- scales


@inlined()
def open_half(numbers, scales, to, per_word):
    """Stores 16 numbers as vectors have their outputs: see `in_order`."""
    if HAS_TABLES and per_word == 2:
        store(scales, to + SCALES // 2, doubled(numbers, 1))
        numbers = doubled(numbers, 0)
    store(scales, to, numbers)


@inlined()
def load_stored(data, at, above, storage):
    """16 scales or lows that begin at a byte. above: where those of their 256 inputs are"""
    if storage == FLOAT:
        return load_floats(data, at)
    if storage == NESTED:
        return load_bytes(data, at) * load_halves(data, above)
    if storage == EXPONENT:
        return load_exponents(data, at)
    return load_halves(data, at)


@inlined()
def find_upper(first, v, group, block_size, width):
    """Returns the word where the upper bits of the numbers of some inputs are, and their place in
    a byte. first: the word where the numbers of a group begin; v: the first input in the group"""
    lower, upper = LOWER[width], UPPER[width]
    words = group * lower // 32 + v * upper // 32
    # four inputs take `upper` bits of each byte
    return first + words * block_size, v * upper // 4 % 8


@inlined()
def table_of(part):
    """The table of a weight's numbers of 4 bits."""
    return load_floats(array_at(part, ANY, np.uint8), TABLE)


@inlined()
def open_scales(data, at, above, kind, width, block_size, per_word, scales):
    """Stores the factors of a group's numbers, and the numbers that are added to the products.

    at: where its record begins; above: where the scales of its 256 inputs begin, in float16
    """
    storage, has_zeros, has_lows, zero = kind
    size = 1 << storage % 3
    # lows or zeros: a weight with lows has no zeros
    others = at + block_size * size
    # FP8 numbers were divided by 256; with AVX-512, 8-bit numbers as well, in the mantissa of 1
    is_marked = HAS_TABLES and width == 8
    times = 256 if is_marked or width == FLOAT8 else 1
    unit = 256 if is_marked else 0
    for c in range(0, block_size, LANES):
        scale = load_stored(data, at + c * size, above + 2 * c, storage)
        if has_lows:
            added = load_stored(data, others + c * size, above + 2 * (block_size + c), storage)
            if is_marked:
                added = scale * fill(np.float32(-unit)) + added
        elif has_zeros:
            # they are stored minus 128
            added = scale * (fill(np.float32(-unit - 128)) - load_bytes(data, others + c))
        else:
            added = scale * fill(np.float32(-unit - zero))
        to = SCALES // LANES * c
        open_half(added, scales, to, per_word)
        open_half(scale * fill(np.float32(times)), scales, to + LANES, per_word)
        for i in range(2, 5 if not HAS_TABLES and width == 4 else 2):
            scale = scale * fill(np.float32(1 / 16))
            store(scales, to + i * LANES, scale)
