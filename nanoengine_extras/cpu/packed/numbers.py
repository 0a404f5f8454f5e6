"""Turns packed words into numbers, in LLVM IR.

With AVX-512, numbers of 4 bits are looked up in a table that one register holds: the weight brings
it (packed.py). Numbers of 5 or 6 bits are put together from their two parts, then looked up in a
table in bfloat16, of one or two registers.
"""

import struct
from itertools import chain

from llvmlite import ir

from nanoengine_extras.cpu.vectors import FLOATS, LANES, WORDS, call, has, opened, rounded, same
from nanoengine_extras.cpu.packed.order import HAS_TABLES, UPPER

PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)


def at_vector(builder, array, place):
    place = ir.IntType(64)(place) if isinstance(place, int) else place
    return builder.bitcast(builder.gep(array, [place]), FLOATS.as_pointer())


def load_words(builder, data, place):
    start = builder.bitcast(at_vector(builder, data, place), WORDS.as_pointer())
    return builder.load(start, align=4)


def in_place(builder, words):
    """The numbers of 4 bits of some words, from the lowest bits up, in float32. They stay where
    they are in a half of a word, which saves shifting: number i is 16 ** (i % 4) times too large.
    """
    for half in (words, builder.lshr(words, same(WORDS, 16))):
        for shift in range(0, 16, 4):
            yield builder.sitofp(builder.and_(half, same(WORDS, 15 << shift)), FLOATS)


def looked_up(builder, words, table):
    """The numbers of 4 bits of some words, from the lowest bits up. table: 16 numbers"""
    for shift in range(0, 32, 4):
        # the instruction reads only the four lowest bits of each word
        index = builder.lshr(words, same(WORDS, shift))
        yield call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, index)


def small_floats(builder, data, place):
    """Four vectors of bytes, numbers of FP8 (e4m3), in float32, divided by 256.

    They become float16, whose exponent has one bit more and is 8 larger.
    """
    kind = ir.VectorType(ir.IntType(8), 2 * LANES)
    start = builder.bitcast(at_vector(builder, data, place), kind.as_pointer())
    for i in range(2):
        both = builder.load(builder.gep(start, [ir.IntType(64)(i)]), align=4)
        # two copies of the sign come first; the mask clears the second, which is that bit
        bits = builder.shl(builder.sext(both, PAIRS), ir.Constant(PAIRS, [7] * 2 * LANES))
        bits = builder.and_(bits, ir.Constant(PAIRS, [0xBF80] * 2 * LANES))
        for first in (0, LANES):
            order = ir.Constant(WORDS, [*range(first, first + LANES)])
            halves = builder.shuffle_vector(bits, bits, order)
            yield builder.fpext(builder.bitcast(halves, HALF_FLOATS), FLOATS)


def in_bytes(builder, data, place, upper, shift, width):
    """Two vectors of words. Each word has four numbers of 5 or 6 bits, one in each byte; the other
    bits of a byte are arbitrary.

    place: of the words with the lower bits; upper: of those with the upper bits
    shift: the place, in each byte there, of the upper bits of these numbers
    """
    below, above = [load_words(builder, data, at) for at in (place, upper)]
    places = builder.insert_element(same(WORDS, 0), builder.trunc(shift, WORDS.element),
                                    ir.IntType(32)(0))
    above = builder.lshr(above, builder.shuffle_vector(places, places, same(WORDS, 0)))
    for number in range(2):
        few = builder.lshr(below, same(WORDS, 4 * number))
        more = builder.shl(above, same(WORDS, 4 - UPPER[width] * number))
        yield builder.or_(builder.and_(few, same(WORDS, 0x0F0F0F0F)),
                          builder.and_(more, same(WORDS, 0xF0F0F0F0)))


def pairs_of(builder, words, width):
    """The numbers of 5 or 6 bits of some bytes, as words of two numbers in bfloat16."""
    first, *others = bfloat16_table(width)
    name = "vpermi2var" if others else "permvar"
    for shift in (0, 8):
        # the instruction reads only the five lowest bits of an index, or six with two registers
        index = builder.lshr(builder.bitcast(words, PAIRS), ir.Constant(PAIRS, [shift] * 32))
        found = call(builder, f"llvm.x86.avx512.{name}.hi.512", PAIRS, first, index, *others)
        yield builder.bitcast(found, WORDS)


def bfloat16_table(width):
    """A lookup table for numbers of 5 or 6 bits, in bfloat16, in one or two registers."""
    halves = [struct.unpack("<HH", struct.pack("<f", number))[1] for number in range(2**width)]
    return [ir.Constant(PAIRS, halves[i:i + 32]) for i in range(0, len(halves), 32)]


def opened_pairs(builder, words, width):
    """The same numbers in float32, from the lowest bits of words up."""
    pairs = [opened(builder, found) for found in pairs_of(builder, words, width)]
    return [*chain(*zip(*pairs))]


# ----------------------------------------------------------------- words that are multiplied


def in_turn(builder, left, right):
    """32 numbers, rounded to bfloat16, as 16 words: first those on the left."""
    if has("avx512bf16"):
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.bitcast(call(builder, name, PAIRS, right, left), FLOATS)
    halves = [rounded(builder, numbers) for numbers in (left, right)]
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [*range(2 * LANES)])
    return builder.bitcast(builder.shuffle_vector(*halves, order), FLOATS)


def in_words(builder, numbers, per_word):
    """The words that are multiplied: of one float32 number, or of two in bfloat16. With AVX-512,
    one is from the first half of some numbers, and one from the second; else they are neighbours.
    """
    if per_word == 1:
        yield from numbers
    elif HAS_TABLES:
        numbers = [*numbers]
        half = len(numbers) // 2
        for pair in zip(numbers[:half], numbers[half:]):
            yield in_turn(builder, *pair)
    else:
        for pair in zip(numbers, numbers):
            lower, upper = [builder.zext(rounded(builder, each), WORDS) for each in pair]
            word = builder.or_(lower, builder.shl(upper, same(WORDS, 16)))
            yield builder.bitcast(word, FLOATS)
