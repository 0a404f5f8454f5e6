"""Sampling without a sort, and without a float32 matrix of logits. Nothing is read on the host.

    nucleus   a radix select: the largest weights of each row
    draw      a search in two levels: a token of each row, by weights or by logits
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanoengine_gpu.attention import IS_INTERPRETED

# the tokens of a group, whose weights are added up to one sum
GROUP = tl.constexpr(4096)


@triton.jit(do_not_specialize=["shift"])
def radix_kernel(all_bits, prefixes, sums, size, shift, BLOCK: tl.constexpr):
    """A program has a part of a row. It adds each weight whose bits begin with the row's prefix to
    the sum of its next digit: the 10 bits from `shift` on.

    all_bits: (rows, size) int32, those of the weights
    prefixes: (rows,) int64, what the rounds before found
    sums: (rows, 1024) int64, in units of 2**-44
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(all_bits + row * size + columns, columns < size, 0)
    weight = bits.to(tl.float32, bitcast=True)
    # NaN is not above 0
    number = tl.where(weight > 0, weight * 2**44, 0.0).to(tl.int64)
    is_counted = (number > 0) & (bits >> shift + 10 == tl.load(prefixes + row))
    tl.atomic_add(sums + row * 1024 + (bits >> shift & 1023), number, is_counted, sem="relaxed")


def nucleus(weights: Tensor, needed: Tensor) -> Tensor:
    """Finds, in each row, the fewest largest weights that together reach `needed`; of equal ones,
    the first. Returns whether each weight is one of them: (rows, tokens) bool.

    weights: (rows, tokens) float32, from 0 to 1
    needed: (rows, 1) float64; if all weights of a row are less, all above 0 are kept

    This is a radix select (Alabi et al., 2012, "Fast k-selection algorithms for graphics processing
    units") that adds weights up instead of counting them. Numbers from 0 to 1 have the same order
    as their bits, and need 30 of them. Three rounds find the bits of the smallest weight that is
    kept, 10 in each round, from the highest on. A round takes the largest digit at which the
    weights with this digit and with larger ones reach what is needed.

    Atomic additions come in any order. So weights are added as whole numbers, in units of 2**-44:
    the sum of integers does not depend on their order, and the result is the same in each run. What
    is smaller than a unit is cut off: less than 2**-25 in a row, and nothing of weights from 2**-21
    on. 64 bits are enough for the sum of fewer than 2**19 tokens.
    """
    bits = weights.contiguous().view(torch.int32)
    rows, size = bits.shape
    # what is missing where all larger weights are kept
    missing = (needed * 2**44).ceil().long()
    found = torch.zeros_like(missing)
    for shift in (20, 10, 0):
        sums = missing.new_zeros(rows, 1024)
        radix_kernel[rows, triton.cdiv(size, 1024)](
            bits, found, sums, size, shift, 1024, enable_fp_fusion=False)
        # the sum of all larger digits
        above = sums.sum(dim=1, keepdim=True) - sums.cumsum(dim=1)
        digit = (above >= missing).sum(dim=1, keepdim=True).clamp(max=1023)
        missing -= above.gather(1, digit)
        found = found * 1024 + digit
    is_tie = bits == found
    # of equal weights, as many as what is missing takes
    num_ties = (missing - 1) // (found.int().view(torch.float32) * 2**44).long().clamp(min=1) + 1
    return (bits > found) | is_tie & (is_tie.cumsum(dim=1, dtype=torch.int32) <= num_ties)


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniform"])
def draw_kernel(numbers, largest, temperature, uniform, sums, size, GROUPS: tl.constexpr, tokens):
    """A program has a group of a row's tokens. Without `tokens`, it adds up their weights; with
    `tokens`, the group is the one that these sums lead to, and the program picks a token of it.

    sums: (rows, GROUPS) float64
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if tokens is not None:
        of_groups = tl.load(sums + row * GROUPS + tl.arange(0, GROUPS))
        total = tl.sum(of_groups, 0)
        group, target = search(of_groups, tl.load(uniform + row) * total)
    columns = group * GROUP + tl.arange(0, GROUP)
    weights = tl.load(numbers + row * size + columns, columns < size, 0.0).to(tl.float32)
    if temperature is not None:
        divisor = tl.maximum(tl.load(temperature + row).to(tl.float32), 1e-30)
        exponents = tl.div_rn(weights - tl.load(largest + row), divisor)
        # that of Triton is less exact than PyTorch's, but the interpreter has no other
        weights = tl.exp(exponents) if IS_INTERPRETED else libdevice.exp(exponents)
    weights = tl.where(columns < size, weights, 0.0).to(tl.float64)
    if tokens is None:
        tl.store(sums + row * GROUPS + group, tl.sum(weights, 0))
    else:
        # NaN is not above 0
        tl.store(tokens + row, tl.where(total > 0, group * GROUP + search(weights, target)[0], -1))


@triton.jit
def search(weights, target):
    """The first place with weight at which the sum of weights so far exceeds the target; and what
    the weights before it leave of the target."""
    sums = tl.where(weights > 0, tl.cumsum(weights, 0), 0.0)
    # a sum that was rounded must not lead beyond the last weight; a bare number would be float32
    target = tl.minimum(target, tl.max(sums, 0) * tl.full([], 1 - 2**-52, tl.float64))
    before = tl.max(tl.where(sums > target, 0.0, sums), 0)
    return tl.argmax((sums > target).to(tl.int32), 0), target - before


def draw(numbers: Tensor, uniform: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Inverse-CDF sampling: returns for each row the first token whose cumulated weight exceeds
    u * total, or -1 if the total is NaN or 0: (rows,) int64.

    numbers: (rows, tokens) float32 weights; with `temperature`, logits of any precision, whose
        weights are exp((logit - largest) / temperature). They are read twice, and written nowhere.
    uniform, temperature: (rows,) float64. u counts as at most 1 - 2**-52, and a temperature as at
        least 1e-30.

    A scan over all tokens would write and read 8 bytes for each. This sums groups of tokens, scans
    the sums, and then scans one group. All sums are float64.
    """
    rows, size = numbers.shape
    num_groups = triton.next_power_of_2(triton.cdiv(size, GROUP.value))
    largest = None if temperature is None else numbers.amax(dim=1).float()
    sums = uniform.new_empty(rows, num_groups)
    tokens = uniform.new_empty(rows, dtype=torch.int64)
    given = (numbers.contiguous(), largest, temperature, uniform, sums, size, num_groups)
    draw_kernel[rows, num_groups](*given, None, enable_fp_fusion=False)
    draw_kernel[rows, 1](*given, tokens, enable_fp_fusion=False)
    return tokens
