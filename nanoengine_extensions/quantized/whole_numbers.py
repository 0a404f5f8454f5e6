"""Turns 16 words of packed numbers into whole numbers with a sign, in LLVM's language.

In bfloat16, whole numbers of 8 bits are exact. Those of 4 bits are looked up in a table, which a
register holds: two operations for 32 of them. Those of 6 bits, in bytes, have a table in two
registers.
"""

import struct

from llvmlite import ir

from nanoengine_cpu.vectors import FLOATS, LANES, WORDS, call, has, same
from nanoengine_extensions.quantized.expanding import (
    PAIRS, add_weights, at_vector, columns, in_pairs, store_weights, with_constants)
from nanoengine_extensions.quantized.packed import stored_bits

BYTES = ir.VectorType(ir.IntType(8), LANES)


def paired(builder, lower, upper):
    """Words of two bfloat16 numbers, which are exact: the lower halves of float32 are 0."""
    lower, upper = [builder.bitcast(side, WORDS) for side in (lower, upper)]
    return builder.bitcast(builder.or_(builder.lshr(lower, same(WORDS, 16)), upper), FLOATS)


def looked_up(builder, packed, width):
    """Vectors of 32 numbers in bfloat16: one of the lowest numbers in each 16 bits, then others."""
    numbers = [number - (number >> width - 1 << width) for number in range(2**width)]
    halves = [struct.unpack("<HH", struct.pack("<f", number))[1] for number in numbers]
    # an index of 4 bits has a fifth one, of the number above
    halves *= 2 if width == 4 else 1
    table, *others = [ir.Constant(PAIRS, halves[i:i + 32]) for i in range(0, len(halves), 32)]
    name = "vpermi2var" if others else "permvar"
    for shift in range(0, 16, stored_bits(width)):
        index = builder.lshr(builder.bitcast(packed, PAIRS), ir.Constant(PAIRS, [shift] * 32))
        found = call(builder, f"llvm.x86.avx512.{name}.hi.512", PAIRS, table, index, *others)
        yield builder.bitcast(found, FLOATS)


def words_of(builder, data, place, width, per_word):
    """The words that are multiplied, of 16 packed words."""
    start = builder.bitcast(at_vector(builder, data, place), WORDS.as_pointer())
    packed = builder.load(start, align=4)
    if per_word == 2 and width < 8 and has("avx512bw"):
        return [*looked_up(builder, packed, width)]
    bits = stored_bits(width)
    numbers = []
    for i in range(32 // bits):
        if per_word == 2 and bits == 8:
            place = builder.gep(builder.bitcast(start, BYTES.as_pointer()), [ir.IntType(64)(i)])
            number = builder.sext(builder.load(place, align=4), WORDS)
        else:
            upper = builder.shl(packed, same(WORDS, 32 - bits * (i + 1)))
            number = builder.ashr(upper, same(WORDS, 32 - bits))
        numbers.append(builder.sitofp(number, FLOATS))
    if per_word == 1:
        return numbers
    if bits == 8:
        return [in_pairs(builder, *pair) for pair in zip(numbers[::2], numbers[1::2])]
    return [paired(builder, *pair) for pair in zip(numbers[:4], numbers[4:])]


@with_constants(3)
def add_numbers(builder, rows, line, data, place, sums, width, per_word, count):
    """Adds the products of `count` rows with some vectors of packed words to their sums."""
    for i, packed in columns(builder, place, count, width):
        words = words_of(builder, data, packed, width, per_word)
        add_weights(builder, rows, line, words, sums, i * count * LANES, per_word, count)


@with_constants(2)
def store_numbers(builder, lines, to, pitch, data, place, width, per_word):
    """Stores the numbers of 16 packed words, each vector of them `pitch` words after the last."""
    store_weights(builder, lines, to, pitch, words_of(builder, data, place, width, per_word))
