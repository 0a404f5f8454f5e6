"""Products of a few float32 rows with numbers of 4 bits, in assembly for AVX2, whose 16 registers
LLVM fills with so much that most of its instructions load or store.

    for each number in the words of 32 outputs, or of 16 if there are several rows:
        weight = number * scale + added         see `numbers.in_place`
        for each row: sum += weight * x
"""

from llvmlite import binding, ir
from numba.core import cgutils

from nanoengine_extras.cpu.vectors import LANES

binding.initialize_native_asmparser()
ADDRESS, HALF = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES // 2)
# for 16 outputs: what is added, and the scales of numbers that are 1, 16, 256, 4096 times too large
SCALES = 5 * LANES


def text_of(count, vectors):
    """The instructions for words of `vectors` * 8 outputs. Their operands are the sums, by register
    of outputs and by row, and then addresses: of words, scales, masks, x of each row."""
    # a sum is two operands, since it is read and written
    data, scales, masks, *rows = (f"${2 * vectors * count + i}" for i in range(3 + count))
    free = [f"%ymm{i}" for i in range(vectors * count, 16)]
    words, added, (*weights, mask, x) = free[:vectors], free[vectors:2 * vectors], free[-4:]
    places = [4 * (v // 2 * SCALES + v % 2 * LANES // 2) for v in range(vectors)]
    for v, place in enumerate(places):
        yield f"vmovdqu {32 * v}({data}), {words[v]}; vmovaps {place}({scales}), {added[v]}"
    for i in range(8):
        if i == 4:
            yield from (f"vpsrld $$16, {word}, {word}" for word in words)
        yield f"vbroadcastss {4 * (i % 4)}({masks}), {mask}"
        for v, place in enumerate(places):
            weight = weights[v % 2]
            yield f"vpand {mask}, {words[v]}, {weight}; vcvtdq2ps {weight}, {weight}"
            yield f"vfmadd132ps {place + 64 * (1 + i % 4)}({scales}), {added[v]}, {weight}"
            for r in range(count if v % 2 else 0):
                if count > 1 or v == 1:
                    yield f"vbroadcastss {4 * i}({rows[r]}), {x}"
                yield f"vfmadd231ps {weights[0]}, {x}, ${(v - 1) * count + r}"
                yield f"vfmadd231ps {weights[1]}, {x}, ${v * count + r}"


def add_by_hand(builder, rows, line, word, data, place, scales, sums, count):
    """As `expanding.add_weights`."""
    masks = cgutils.global_constant(builder, "masks", ir.Constant(
        ir.ArrayType(ir.IntType(32), 4), [15, 15 << 4, 15 << 8, 15 << 12]))
    pointers = [builder.gep(data, [place]), scales, masks] + [
        builder.gep(rows, [builder.add(builder.mul(line, line.type(r)), word)])
        for r in range(count)]
    held = [builder.bitcast(builder.gep(sums, [ADDRESS(first)]), HALF.as_pointer())
            for c in range(0, max(count, 2), count) for half in (0, LANES // 2)
            for first in range(c * LANES + half, (c + count) * LANES, LANES)]
    size = len(held)
    kind = ir.FunctionType(ir.LiteralStructType([HALF] * size),
                           [HALF] * size + [ADDRESS] * len(pointers))
    operands = ["=x"] * size + [*map(str, range(size))] + ["r"] * len(pointers)
    changed = [f"~{{xmm{i}}}" for i in range(size, 16)] + ["~{memory}"]
    found = builder.asm(
        kind, "; ".join(text_of(count, size // count)), ",".join(operands + changed),
        [builder.load(each, align=32) for each in held] + [
            builder.ptrtoint(each, ADDRESS) for each in pointers], True)
    for i, each in enumerate(held):
        builder.store(builder.extract_value(found, i), each, align=32)
