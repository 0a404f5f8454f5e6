"""A quantized weight as a kernel reads it: numbers and scales, in blocks of outputs.

    header      24 int64: those of `Form`, and from the 16th on, a lookup table for 4-bit numbers:
                16 values in float32
    each block of outputs
        scales of 256 inputs, in float16, where the scales of groups are multiplied by them
        each group of inputs: a record
            scales      of each output; then lows and zeros, where there are any
            numbers     16 words, one for each of 16 outputs, with 4 or 8 numbers in each. With
                        AVX-512, numbers of 5 or 6 bits are in two places: first the 4 lower bits
                        of all numbers, then their upper bits; else they take 8 bits, and 16
                        neighbouring bytes are of 16 outputs

    weight = (number - zero) * scale + low          or table[number] * scale
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine_extras.cpu.products import MOST_WORDS
from nanoengine_extras.cpu.vectors import LANES
from nanoengine_extras.cpu.packed.fitting import (
    Weight, can_add, has_many_bits, in_short, width_of, without_table, zero_of)
from nanoengine_extras.cpu.packed.order import (
    BLOCKS, FLOAT8, HAS_TABLES, LOWER, UPPER, orders_of, place)

# the numbers of a header, and the byte where its table begins
HEADER, TABLE = 24, 8 * 16
# how scales and lows are stored: as int8 times one in float16, in float16, in float32, or as a
# power of two in a byte. The number modulo 3 is the logarithm of the size in bytes
NESTED, HALF, FLOAT, EXPONENT = range(4)
STORAGE = {torch.float16: HALF, torch.float32: FLOAT, torch.int8: NESTED,
           torch.float8_e8m0fnu: EXPONENT}
# the inputs of a super-block, whose groups' scales share one scale
ABOVE = 256
# an address is enough: arrays that kernels read have no end
ANY = 2**40


class Form(NamedTuple):
    """The first numbers of a header.

    bits: 4 or 8, those of a number before it is packed; the middle is half of their range.
    group, record, head: inputs of a group, bytes of its record, and bytes before its numbers.
    storage: how scales are stored; zero: the zero of all groups, unless they have_zeros.
    nested: how many groups a super-block has; 0: there are no super-blocks.
    begin, size: bytes of a block before the first record, and in all.
    block: outputs of a block.
    width: the bits that a stored number needs: 4, 5, 6 or 8; FLOAT8. See LOWER in order.py.
    has_table: whether numbers are only indices into a table.
    """

    bits: int
    group: int
    record: int
    head: int
    storage: int
    has_zeros: int
    has_lows: int
    zero: int
    nested: int
    begin: int
    size: int
    block: int
    width: int
    has_table: int


def padding(inputs: int, group: int, dtype: torch.dtype) -> int:
    """Returns how many inputs are added: to whole groups, and to whole vectors of words."""
    return -inputs % max(group, LANES * 4 // dtype.itemsize)


def to_bytes(weight: Weight, size: int, dtype: torch.dtype,
             space: Callable[[int], Tensor]) -> tuple[Tensor, Form] | None:
    """Returns a weight as bytes, and what their header says; None if there is no such form of it.

    size: how many neighbouring inputs have one scale; 0: they are not neighbours
    """
    outputs, inputs = weight.numbers.shape
    group = next((each for each in (128, 64, 32, 16) if size and size % each == 0), 0)
    # a scale can be missing
    if not group or -(-inputs // size) != weight.scales.shape[1]:
        return None
    if inputs * dtype.itemsize > 4 * MOST_WORDS:
        return None
    has_floats = weight.table is not None and weight.bits == 8
    if has_floats and (weight.numbers & 127 == 127).any():
        # no number: kernels do not know it
        return None
    if weight.table is not None and not has_floats and not HAS_TABLES:
        weight = without_table(weight)
        if weight.table is not None:
            return None
    weight = in_short(weight)
    if has_many_bits(weight):
        return None
    # what is added to all numbers, so that none is negative
    added = 2 ** (weight.bits - 1) if weight.numbers.dtype == torch.int8 else 0
    zero = zero_of(weight, added)
    width, moved = (FLOAT8, 0) if has_floats else width_of(weight, group, added, zero)
    added, zero = added + moved, zero + moved
    if weight.lows is not None and not can_add(weight, zero, width):
        return None
    columns = (inputs + padding(inputs, group, dtype)) // group
    block = BLOCKS[dtype]

    def in_blocks(x: Tensor, columns: int) -> Tensor:
        """(outputs, columns) to bytes: (blocks, columns, outputs of a block)."""
        # a power of two cannot be 0
        x = x.view(torch.uint8) if x.element_size() == 1 else x
        x = F.pad(x, (0, columns - x.shape[1], 0, -outputs % block)).unflatten(0, (-1, block))
        return x.transpose(1, 2).contiguous().view(torch.uint8)

    heads = [weight.scales]
    if weight.lows is not None:
        heads.append(weight.lows.to(weight.scales.dtype))
    if isinstance(zero, Tensor):
        heads.append((zero.to(torch.int16) - 128).to(torch.int8))
    heads = [in_blocks(each.repeat_interleave(size // group, 1), columns) for each in heads]
    above = [in_blocks(each, each.shape[1]) for each in weight.above]
    begin = sum(each[0].numel() for each in above)
    head = sum(each.shape[2] for each in heads)
    record = head + block * group * (LOWER[width] + UPPER[width]) // 8
    form = Form(
        weight.bits, group, record, head, STORAGE[weight.scales.dtype], isinstance(zero, Tensor),
        weight.lows is not None, 0 if isinstance(zero, Tensor) else zero,
        ABOVE // group if above else 0, begin, begin + columns * record, block, width,
        weight.table is not None)
    blocks = -(-outputs // block)
    data = space(8 * HEADER + blocks * form.size)
    data[:8 * len(form)] = torch.tensor(form).view(torch.uint8)
    table = weight.table
    if table is None or has_floats:
        table = torch.arange(16, dtype=torch.float32, device="cpu")
    data[TABLE:8 * HEADER] = table.view(torch.uint8)
    written = data[8 * HEADER:].view(blocks, form.size)
    if above:
        written[:, :begin] = torch.cat(above, 2).flatten(1)
    records = written[:, begin:].unflatten(1, (columns, record))
    records[:, :, :head] = torch.cat(heads, 2)
    below = 0
    for bits, order in orders_of(group, width, dtype):
        end = head + block * group * bits // 8
        place(weight.numbers, order, records[:, :, head:end], group, added, below)
        head, below = end, below + bits
    return data, form


@functools.cache
def places(form: Form, dtype: torch.dtype) -> list[tuple[int, Tensor, Tensor]]:
    """Returns where the parts of a group's numbers are: see `orders_of`. Of each part: how many
    bits it has, its byte in a record, and its first bit in that byte; the last two are (outputs of
    a block, inputs)."""
    found, begin = [], form.head
    for bits, order in orders_of(form.group, form.width, dtype):
        first = bits * order.argsort().view(form.block, -1)
        found.append((bits, begin + first // 8, (first % 8).to(torch.uint8)))
        begin += len(order) * bits // 8
    return found


def rows_of(packed: Tensor, form: Form, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of a weight, padded, in float32. dtype: for which it was packed."""
    block = form.block
    blocks, own = ids // block, ids % block
    data = packed[8 * HEADER:].view(-1, form.size)
    records = data[:, form.begin:].unflatten(1, (-1, form.record))
    groups = torch.arange(records.shape[1], device="cpu")
    size = 1 << form.storage % 3
    kind = next(kind for kind, storage in STORAGE.items() if storage == form.storage)

    def find(records: Tensor, first: int, size: int, kind: torch.dtype) -> Tensor:
        at = first + size * own[:, None] + torch.arange(size, device="cpu")
        rows = groups[None, :records.shape[1], None]
        return records[blocks[:, None, None], rows, at[:, None]].view(kind).float()

    found, width = torch.zeros((), dtype=torch.uint8, device="cpu"), 0
    for bits, byte, shift in places(form, dtype):
        part = records[blocks[:, None, None], groups[None, :, None], byte[own][:, None]]
        found = found | (part >> shift[own][:, None] & 2**bits - 1) << width
        width += bits
    if form.width == FLOAT8:
        weight = found.view(torch.float8_e4m3fn).float()
    elif form.has_table:
        weight = packed[TABLE:8 * HEADER].view(torch.float32)[found.int()]
    else:
        weight = found.float() - form.zero
    scales = find(records, 0, size, kind)
    lows = find(records, size * block, size, kind) if form.has_lows else None
    if form.nested:
        above = data[:, :form.begin].unflatten(1, (groups.numel() // form.nested, -1))
        scales *= find(above, 0, 2, torch.float16).repeat_interleave(form.nested, 1)
        if lows is not None:
            lows *= find(above, 2 * block, 2, torch.float16).repeat_interleave(form.nested, 1)
    if form.has_zeros:
        weight -= find(records, size * block * (1 + form.has_lows), 1, torch.int8) + 128
    weight *= scales
    if lows is not None:
        weight += lows
    return weight.flatten(1)
