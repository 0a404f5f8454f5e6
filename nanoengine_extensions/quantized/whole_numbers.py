"""Turns 16 words of packed numbers into whole numbers with a sign, in LLVM's language.

In bfloat16, whole numbers of 8 bits are exact. Those of 4 bits are looked up in a table of 16
numbers, which a register holds: two operations for 32 of them.
"""

import struct

from llvmlite import ir

from nanoengine_cpu.vectors import FLOATS, LANES, WORDS, call, has, same
from nanoengine_extensions.quantized.expanding import (
    PAIRS, add_weights, at_vector, columns, in_pairs, store_weights, with_constants)

BYTES = ir.VectorType(ir.IntType(8), LANES)


def paired(builder, lower, upper):
    """Words of two bfloat16 numbers, which are exact: the lower halves of float32 are 0."""
    lower, upper = [builder.bitcast(side, WORDS) for side in (lower, upper)]
    return builder.bitcast(builder.or_(builder.lshr(lower, same(WORDS, 16)), upper), FLOATS)


def looked_up(builder, packed):
    """Four times 32 words of bfloat16, of four numbers in each 16 bits."""
    numbers = [number - 16 * (number > 7) for number in range(16)]
    halves = [struct.unpack("<HH", struct.pack("<f", number))[1] for number in numbers]
    # an index has a fifth bit, of the number above
    table = ir.Constant(PAIRS, halves * 2)
    for i in range(4):
        index = builder.lshr(builder.bitcast(packed, PAIRS), ir.Constant(PAIRS, [4 * i] * 32))
        found = call(builder, "llvm.x86.avx512.permvar.hi.512", PAIRS, table, index)
        yield builder.bitcast(found, FLOATS)


def words_of(builder, data, place, bits, per_word):
    """The words that are multiplied, of 16 packed words."""
    start = builder.bitcast(at_vector(builder, data, place), WORDS.as_pointer())
    packed = builder.load(start, align=4)
    if per_word == 2 and bits == 4 and has("avx512bw"):
        return [*looked_up(builder, packed)]
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
def add_numbers(builder, rows, line, data, place, sums, bits, per_word, count):
    """Adds the products of `count` rows with some vectors of packed words to their sums."""
    for i, packed in columns(builder, place, count):
        words = words_of(builder, data, packed, bits, per_word)
        add_weights(builder, rows, line, words, sums, i * count * LANES, per_word, count)


@with_constants(2)
def store_numbers(builder, lines, to, pitch, data, place, bits, per_word):
    """Stores the numbers of 16 packed words, each vector of them `pitch` words after the last."""
    store_weights(builder, lines, to, pitch, words_of(builder, data, place, bits, per_word))
