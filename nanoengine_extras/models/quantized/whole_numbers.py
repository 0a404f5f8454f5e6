"""Turns packed words into numbers, in LLVM IR.

With AVX-512, numbers of 4 bits are looked up in a table that one register holds: the weight brings
it (packed.py). Numbers of 5 or 6 bits are put together from their two parts, then looked up in a
table in bfloat16, of one or two registers.
"""

import struct
from itertools import chain

from llvmlite import ir

from nanoengine_extras.cpu.vectors import FLOATS, LANES, WORDS, call, has, opened, rounded, same
from nanoengine_extras.models.quantized.order import HAS_TABLES, LOWER, UPPER

BYTES = ir.VectorType(ir.IntType(8), LANES)
PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)


def at_vector(builder, array, place):
    place = ir.IntType(64)(place) if isinstance(place, int) else place
    return builder.bitcast(builder.gep(array, [place]), FLOATS.as_pointer())


def load_words(builder, data, place):
    start = builder.bitcast(at_vector(builder, data, place), WORDS.as_pointer())
    return builder.load(start, align=4)


def floats_of(builder, words, bits, has_sign):
    """The numbers of some words, from the lowest bits up, in float32."""
    drop = builder.ashr if has_sign else builder.lshr
    numbers = [builder.shl(words, same(WORDS, above)) for above in range(32 - bits, -1, -bits)]
    return [builder.sitofp(drop(each, same(WORDS, 32 - bits)), FLOATS) for each in numbers]


def bytes_of(builder, data, place):
    """The numbers of four vectors of bytes, with a sign, in float32."""
    start = builder.bitcast(at_vector(builder, data, place), BYTES.as_pointer())
    numbers = [builder.load(builder.gep(start, [ir.IntType(64)(i)]), align=4) for i in range(4)]
    return [builder.sitofp(builder.sext(each, WORDS), FLOATS) for each in numbers]


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


def pairs_of(builder, words, width, has_sign, table):
    """The numbers of some words, as words of two numbers in bfloat16.

    width: 4, or 5 or 6 in bytes; has_sign: of 5 or 6 bits
    table: of 4 bits, 16 numbers twice, since an index also has a fifth bit, of the number above
    """
    own = [builder.bitcast(table, PAIRS)]
    first, *others = own if width == 4 else bfloat16_table(width, has_sign)
    name = "vpermi2var" if others else "permvar"
    for shift in range(0, 16, 4 if width == 4 else 8):
        # the instruction reads only the five lowest bits of an index, or six with two registers
        index = builder.lshr(builder.bitcast(words, PAIRS), ir.Constant(PAIRS, [shift] * 32))
        found = call(builder, f"llvm.x86.avx512.{name}.hi.512", PAIRS, first, index, *others)
        yield builder.bitcast(found, WORDS)


def bfloat16_table(width, has_sign):
    """A lookup table for numbers of 5 or 6 bits, in bfloat16, in one or two registers."""
    below = 2 ** (width - has_sign)
    numbers = [number if number < below else number - 2**width for number in range(2**width)]
    halves = [struct.unpack("<HH", struct.pack("<f", number))[1] for number in numbers]
    return [ir.Constant(PAIRS, halves[i:i + 32]) for i in range(0, len(halves), 32)]


def opened_pairs(builder, *numbers):
    """The same numbers in float32, from the lowest bits of words up. numbers: as in `pairs_of`"""
    pairs = [opened(builder, found) for found in pairs_of(builder, *numbers)]
    return [*chain(*zip(*pairs))]


# ----------------------------------------------------------------- words that are multiplied


def joined(builder, lower, upper):
    """Words of two numbers in bfloat16. These are exact: the lower bits of float32 are 0."""
    lower, upper = [builder.bitcast(side, WORDS) for side in (lower, upper)]
    return builder.bitcast(builder.or_(builder.lshr(lower, same(WORDS, 16)), upper), FLOATS)


def in_turn(builder, left, right):
    """32 numbers, rounded to bfloat16, as 16 words: first those on the left."""
    if has("avx512bf16"):
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.bitcast(call(builder, name, PAIRS, right, left), FLOATS)
    halves = [rounded(builder, numbers) for numbers in (left, right)]
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [*range(2 * LANES)])
    return builder.bitcast(builder.shuffle_vector(*halves, order), FLOATS)


def in_words(builder, numbers, per_word, join):
    """The words that are multiplied: of one float32 number, or of one of the first half of some
    numbers and one of the others."""
    if per_word == 1:
        return numbers
    half = len(numbers) // 2
    return [join(builder, *pair) for pair in zip(numbers[:half], numbers[half:])]


def whole_numbers(builder, data, place, upper, shift, table, width, per_word):
    """The numbers of 16 packed words, with a sign, as the words that are multiplied.

    upper, shift: see `in_bytes`
    """
    if width == 8:
        return in_words(builder, bytes_of(builder, data, place), per_word, in_turn)
    vectors = [load_words(builder, data, place)]
    if UPPER[width]:
        vectors = [*in_bytes(builder, data, place, upper, shift, width)]
    if HAS_TABLES and per_word == 2:
        return [builder.bitcast(pairs, FLOATS) for each in vectors
                for pairs in pairs_of(builder, each, width, True, table)]
    if UPPER[width]:
        return [number for each in vectors
                for number in opened_pairs(builder, each, width, True, table)]
    if HAS_TABLES:
        return [*looked_up(builder, *vectors, table)]
    numbers = floats_of(builder, *vectors, LOWER[width], True)
    return in_words(builder, numbers, per_word, joined)
