"""Vectors of 16 float32 numbers, as values that functions compiled by numba can compute with.

    x = load(numbers, 32)                       numbers[32:48], of an array of 32-bit words
    store(numbers, 0, x * x + fill(one))        numbers[0:16] = x * x + one

numba has no vectors, and LLVM may not vectorise the loop of a sum that must keep its order. So each
operation here is written in LLVM IR, and LLVM fits it to the CPU: a vector is one register of
AVX-512, two of AVX2, four of SSE. The CPU that numba compiles for decides which instructions exist.
"""

import functools
import math
import operator

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import np_cfarray


# the dtypes that kernels know, and the integers with the same bits
DTYPES = {torch.float32: np.uint32, torch.bfloat16: np.uint16}
LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)

# Part of a kernel, and never called from Python; some read places that need not exist. LLVM also
# compiles each of them alone, unless numba has inlined it before that: `inlined(inline="always")`.
inlined = functools.partial(njit, forceinline=True, error_model="numpy", no_cpython_wrapper=True,
                            no_cfunc_wrapper=True, boundscheck=False)


class Vector(types.Type):
    """The type of a vector in numba."""


register_model(Vector)(lambda manager, kind: models.PrimitiveModel(manager, kind, FLOATS))
vector = Vector("vector")


def has(feature: str) -> bool:
    """Whether the CPU that numba compiles for has these instructions, by LLVM's name for them."""
    return f"+{feature}," in cpu_target.target_context.codegen().magic_tuple()[2] + ","


def instruction(result, constants=0):
    """Makes a numba function from `write(builder, *operands)`, which writes LLVM's instructions.

    `write` gets pointers for arrays. result: the type of what the function returns. constants: how
    many of the last operands are constants where it is called: `write` gets them as numbers.
    """
    def decorate(write):
        @functools.wraps(write)
        def typed(context, *kinds):
            count = len(kinds) - constants
            known = [kind.literal_value for kind in kinds[count:]]

            def generate(context, builder, signature, values):
                operands = [context.make_array(kind)(context, builder, value).data
                            if isinstance(kind, types.Array) else value
                            for kind, value in zip(signature.args[:count], values)]
                return write(builder, *operands, *known) or context.get_dummy_value()
            return result(*kinds), generate
        return intrinsic(prefer_literal=constants > 0)(typed)
    return decorate


def call(builder, name, kind, *operands, **options):
    """Calls one of LLVM's intrinsics."""
    signature = ir.FunctionType(kind, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, operands, **options)


def same(kind, number):
    """A constant with one number in all lanes."""
    return ir.Constant(kind, [number] * LANES)


# ---------------------------------------------------------------------------------- memory


@intrinsic
def array_at(context, place, shape, dtype):
    """A contiguous array at an address, or in `stack`.

    Kernels are called with addresses, because making an array from a tensor takes longer than a
    small kernel runs, most of all after a matrix product has emptied the caches. numba's own
    `carray` takes longer to compile.
    """
    kind = types.Array(dtype.dtype, getattr(shape, "count", 1), "C")

    def generate(context, builder, signature, values):
        change = builder.bitcast if isinstance(place, types.CPointer) else builder.inttoptr
        start = change(values[0], context.get_value_type(types.voidptr))
        return np_cfarray(context, builder, kind(types.voidptr, shape), (start, values[1]))
    return kind(place, shape, dtype), generate


@intrinsic(prefer_literal=True)
def numbers_at(context, address, count):
    """Reads `count` int64 numbers, a constant, at an address: the arguments of a kernel."""
    kind = types.UniTuple(types.int64, count.literal_value)

    def generate(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], context.get_value_type(kind).as_pointer()))
    return kind(address, count), generate


@instruction(types.int64)
def add_atomic(builder, at, number):
    """Adds to the int64 number at an address, and returns what it was, in one step."""
    place = builder.inttoptr(at, number.type.as_pointer())
    return builder.atomic_rmw("add", place, number, "monotonic")


@intrinsic(prefer_literal=True)
def stack(context, size):
    """Memory for `size` 32-bit words, a constant. If LLVM sees all uses, they become registers."""
    def generate(context, builder, signature, values):
        with builder.goto_entry_block():
            space = builder.alloca(ir.FloatType(), size.literal_value)
        space.align = 64
        return space
    return types.CPointer(types.float32)(size), generate


def is_half(array):
    """Whether its numbers are bfloat16, the upper halves of float32."""
    return array.type.pointee == ir.IntType(16)


@instruction(vector)
def load(builder, array, first):
    """16 numbers of an array of 32-bit words, or of bfloat16."""
    place = builder.gep(array, [first])
    if not is_half(array):
        return builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(place, HALVES.as_pointer()), align=2)
    words = builder.shl(builder.zext(halves, WORDS), same(WORDS, 16))
    return builder.bitcast(words, FLOATS)


def rounded(builder, numbers):
    """16 numbers in bfloat16 (ties to even)."""
    bits = builder.bitcast(numbers, WORDS)
    is_odd = builder.and_(builder.lshr(bits, same(WORDS, 16)), same(WORDS, 1))
    up = builder.add(builder.add(bits, same(WORDS, 0x7FFF)), is_odd)
    return builder.trunc(builder.lshr(up, same(WORDS, 16)), HALVES)


@instruction(vector, constants=1)
def load_bytes(builder, array, first, is_float):
    """16 numbers of 8 bits of an array of bytes: int8, or, if is_float, a constant, e4m3."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    numbers = builder.load(builder.bitcast(builder.gep(array, [first]), kind.as_pointer()), align=1)
    if not is_float:
        return builder.sitofp(numbers, FLOATS)
    words = builder.zext(numbers, WORDS)
    # the sign, and the rest, which float32 has in the same order; its exponents are 120 larger
    sign = builder.shl(builder.and_(words, same(WORDS, 0x80)), same(WORDS, 24))
    rest = builder.shl(builder.and_(words, same(WORDS, 0x7F)), same(WORDS, 20))
    bits = builder.bitcast(builder.or_(sign, rest), FLOATS)
    return builder.fmul(bits, same(FLOATS, 2.0**120))


@instruction(vector)
def as_words(builder, lower, upper, per_word):
    """16 words of one float32 number each, `lower`, or of two bfloat16 numbers."""
    halves = [builder.zext(rounded(builder, each), WORDS) for each in (lower, upper)]
    pairs = builder.or_(halves[0], builder.shl(halves[1], same(WORDS, 16)))
    # LLVM knows per_word, and drops the other case
    are_pairs = builder.icmp_signed("==", per_word, per_word.type(2))
    return builder.select(are_pairs, builder.bitcast(pairs, FLOATS), lower)


def store_bits(builder, array, first, numbers):
    place = builder.gep(array, [first])
    builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=2)


@instruction(types.void)
def store(builder, array, first, numbers):
    """Stores to an array of 32-bit words, or of bfloat16."""
    store_bits(builder, array, first, rounded(builder, numbers) if is_half(array) else numbers)


@instruction(types.void)
def store_normal(builder, array, first, numbers):
    """As `store`, but subnormal numbers may become 0: then one instruction can round."""
    if is_half(array):
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        can_round = has("avx512bf16")
        numbers = call(builder, name, HALVES, numbers) if can_round else rounded(builder, numbers)
    store_bits(builder, array, first, numbers)


@inlined()
def load_part(row, first, size):
    """The 16 numbers from `first` on, or those before `size` and then zeros."""
    if size - first >= LANES:
        return load(row, first)
    part = array_at(stack(LANES), LANES, row.dtype)
    part[:] = 0
    for i in range(size - first):
        part[i] = row[first + i]
    return load(part, 0)


@inlined()
def store_part(row, first, size, numbers):
    """16 numbers from `first` on, or only those that have a place before `size`."""
    if size - first >= LANES:
        store(row, first, numbers)
    else:
        part = array_at(stack(LANES), LANES, row.dtype)
        store(part, 0, numbers)
        for i in range(size - first):
            row[first + i] = part[i]


@inlined()
def copy_rows(source, from_pitch, target, to_pitch, rows, vectors):
    """Copies rows of `vectors` vectors. A pitch is the distance between rows, in numbers.

    numba compiles a variant for each constant argument, but not for np.int64(6).
    """
    for r in range(rows):
        for c in range(0, vectors * LANES, LANES):
            store(target, r * to_pitch + c, load(source, r * from_pitch + c))


@instruction(types.void, constants=1)
def prefetch(builder, array, place, level):
    """Prefetches a number into all caches from a level on. The number need not exist."""
    pointer = builder.bitcast(builder.gep(array, [place]), ir.IntType(8).as_pointer())
    # to read, as data
    options = [ir.IntType(32)(option) for option in (0, 4 - level, 1)]
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, *options)


# ------------------------------------------------------------------------------ arithmetic


def let_compute(function, name):
    """Lets numba apply + or - or * or / to two vectors."""
    @instruction(vector)
    def compute(builder, left, right):
        return getattr(builder, name)(left, right)

    @overload(function)
    def typed(left, right):
        if left is right is vector:
            return lambda left, right: compute(left, right)


for function, name in zip((operator.add, operator.sub, operator.mul, operator.truediv),
                          ("fadd", "fsub", "fmul", "fdiv")):
    let_compute(function, name)


@instruction(vector)
def fill(builder, number):
    """One float32 number in all lanes."""
    first = builder.insert_element(same(FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, same(WORDS, 0))


@instruction(vector)
def where_less(builder, left, right, then, otherwise):
    """`then` where left < right; `otherwise` elsewhere, also where one of them is NaN."""
    return builder.select(builder.fcmp_ordered("<", left, right), then, otherwise)


@instruction(types.float32)
def largest(builder, numbers):
    """The largest of 16 numbers; none of them may be NaN."""
    name = "llvm.vector.reduce.fmax.v16f32"
    return call(builder, name, ir.FloatType(), numbers, fastmath=["nnan"])


@instruction(types.float32)
def total(builder, numbers):
    """The sum of 16 numbers, in halves: 8 sums, then 4, 2 and 1."""
    name, zero = "llvm.vector.reduce.fadd.v16f32", ir.FloatType()(0)
    return call(builder, name, ir.FloatType(), zero, numbers, fastmath=["reassoc"])


def multiply_add(builder, left, right, total):
    """left * right + total, rounded once where the CPU can."""
    return call(builder, "llvm.fmuladd.v16f32", FLOATS, left, right, total)


def opened(builder, words):
    """The lower and the upper numbers of words of two bfloat16 numbers, in float32."""
    return (builder.bitcast(builder.shl(words, same(WORDS, 16)), FLOATS),
            builder.bitcast(builder.and_(words, same(WORDS, 0xFFFF0000)), FLOATS))


def add_pairs(builder, left, right, total):
    """total + left * right, of both bfloat16 numbers in each word."""
    words = [builder.bitcast(side, WORDS) for side in (left, right)]
    if has("avx512bf16"):
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *words)
    lower, upper = zip(*[opened(builder, side) for side in words])
    return multiply_add(builder, *upper, multiply_add(builder, *lower, total))


@instruction(vector)
def add_products(builder, left, right, total, per_word):
    """total + left * right: of the one float32 number in each word, or of both bfloat16 numbers."""
    pairs = add_pairs(builder, left, right, total)
    # LLVM knows per_word, and drops the other case
    are_pairs = builder.icmp_signed("==", per_word, per_word.type(2))
    return builder.select(are_pairs, pairs, multiply_add(builder, left, right, total))


@instruction(vector)
def add_half(builder, left, right, total, upper):
    """total + left * right, of only one bfloat16 number in each word: the lower (0) or the upper
    (1), which is a constant."""
    both = zip(*[opened(builder, builder.bitcast(side, WORDS)) for side in (left, right)])
    of_lower, of_upper = [multiply_add(builder, *numbers, total) for numbers in both]
    return builder.select(builder.icmp_signed("==", upper, upper.type(1)), of_upper, of_lower)


@instruction(vector)
def exp2(builder, x, out):
    """2^x for x < 127, as 2^n * 2^(x - n), with n an integer next to x; about 0 for x < -127.

    It is as exact as the dtype of `out` requires.
    """
    lowest = same(FLOATS, -127.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    # In so large a number the last bits count units: they are n + 127, the exponent of 2^n. For
    # x = -127 they are 0, and so is the result.
    shift = same(FLOATS, 1.5 * 2**23 + 127)
    shifted = builder.fadd(x, shift)
    fraction = builder.fsub(x, builder.fsub(shifted, shift))
    # the Taylor series for |x - n| <= 1/2, good to 4e-5 or 1e-7
    *terms, power = [same(FLOATS, math.log(2) ** k / math.factorial(k))
                     for k in range(5 if is_half(out) else 7)]
    for term in reversed(terms):
        power = multiply_add(builder, power, fraction, term)
    exponent = builder.shl(builder.bitcast(shifted, WORDS), same(WORDS, 23))
    return builder.fmul(power, builder.bitcast(exponent, FLOATS))
