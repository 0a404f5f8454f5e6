"""Sampling without a sort, and without a float32 matrix of logits. Nothing is read on the host.

    truncate  a radix select: the likeliest tokens of each row
    draw      a search in two levels: a token of each row, by weights or by logits
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanoengine_extras.gpu.attention import IS_INTERPRETED

# the tokens of a group, whose weights are added up to one sum
GROUP = tl.constexpr(4096)


@triton.jit
def exp(x):
    # that of Triton is less exact than PyTorch's, but the interpreter has no other
    return tl.exp(x) if IS_INTERPRETED else libdevice.exp(x)


# ------------------------------------------------------------------------------- truncation


@triton.jit
def keys_of(scores, least, BY_WEIGHT: tl.constexpr):
    """Returns a key for each score, at least 0: the likelier the token, the smaller its key. Also
    returns what it adds to a sum: 1, or its weight in units of 2**-44."""
    if BY_WEIGHT:
        # 0x3F800000 has the bits of 1.0, the largest weight; NaN is not above anything
        weights = tl.where(scores >= least, exp(scores), 0.0)
        return 0x3F800000 - weights.to(tl.int32, bitcast=True), (weights * 2**44).to(tl.int64)
    return (0.0 - scores).to(tl.int32, bitcast=True), tl.full(scores.shape, 1, tl.int64)


@triton.jit(do_not_specialize=["shift"])
def radix_kernel(scores, all_least, prefixes, sums, size, shift, BINS: tl.constexpr,
                 BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """A program reads a part of a row. For each key that begins with the row's prefix, it adds the
    number of the token to the sum of the next digit: the bits from `shift` on.

    prefixes: (rows,) int64, what the rounds before found
    sums: (rows, BINS) int64
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(scores + row * size + columns, columns < size, 0.0)
    keys, numbers = keys_of(part, tl.load(all_least + row), BY_WEIGHT)
    digits = (keys >> shift) - tl.load(prefixes + row) * 1024
    is_counted = (columns < size) & (digits >= 0) & (digits < BINS) & (numbers > 0)
    tl.atomic_add(sums + row * BINS + digits, numbers, is_counted, sem="relaxed")


def select(scores: Tensor, least: Tensor, needed: Callable[[Tensor], Tensor],
           by_weight: bool) -> tuple[Tensor, Tensor]:
    """Finds, in each row, the key of the last token that is needed, and the sum that is still
    missing when all smaller keys are kept: (rows,) int64 each.

    needed: turns the sum of all, (rows,) int64, into the part of it that is needed

    This is a radix select (Alabi et al., 2012, "Fast k-selection algorithms for graphics processing
    units"). Three rounds find the bits of the key: first 11, then 10 and 10. A round takes the last
    digit before which the sum is less than what is needed.

    Atomic additions come in any order, so they add whole numbers: weights are rounded down to
    multiples of 2**-44, which takes less than 2**-25 from a row, and nothing from weights of at
    least 2**-21. 64 bits are enough for the sum of fewer than 2**19 tokens.
    """
    rows, size = scores.shape
    found = least.new_zeros(rows, dtype=torch.int64)
    missing = found
    for shift, bins in ((20, 2048), (10, 1024), (0, 1024)):
        sums = found.new_zeros(rows, bins)
        radix_kernel[rows, triton.cdiv(size, 1024)](
            scores, least, found, sums, size, shift, bins, by_weight, 1024, enable_fp_fusion=False)
        if shift == 20:
            missing = needed(sums.sum(dim=1))
        before = sums.cumsum(dim=1) - sums
        digit = ((before < missing[:, None]).sum(dim=1) - 1).clamp(min=0)
        missing = missing - before.gather(1, digit[:, None])[:, 0]
        found = found * 1024 + digit
    return found, missing


@triton.jit
def keep_kernel(scores, all_least, last_keys, all_missing, size, BLOCK: tl.constexpr):
    """A program overwrites a row of scores with weights: those of all keys smaller than the last
    one, and those of the first tokens with the last key, until nothing is missing."""
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(all_least + row)
    last = tl.load(last_keys + row).to(tl.int32)
    each = ((0x3F800000 - last).to(tl.float32, bitcast=True) * 2**44).to(tl.int64)
    num_equal = (tl.load(all_missing + row) - 1) // tl.maximum(each, 1) + 1
    count = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(scores + row * size + columns, columns < size, -float("inf"))
        keys, _ = keys_of(part, least, True)
        is_equal = (keys == last).to(tl.int32)
        places = count + tl.cumsum(is_equal, 0)
        count += tl.sum(is_equal, 0)
        is_kept = (keys < last) | (is_equal > 0) & (places <= num_equal)
        weights = tl.where(is_kept, (0x3F800000 - keys).to(tl.float32, bitcast=True), 0.0)
        tl.store(scores + row * size + columns, weights, columns < size)


def truncate(scores: Tensor, draws: Any, truncations: set[str],
             top_ks: list[int]) -> tuple[Tensor, Tensor]:
    """The function of nanoengine/sampler.py, with the same weights, without a sort. Returns all
    tokens, (vocab_size,), and their weights, (rows, vocab_size).

    scores: overwritten
    draws: columns `min_p`, `top_k` and `top_p`, (rows,) float64 each
    truncations: those of "min_p", "top_k" and "top_p" that some row needs
    top_ks: not read here
    """
    rows, size = scores.shape
    tokens = torch.arange(size, device=scores.device)
    scores = scores.contiguous()
    least = draws.min_p.log().float()
    if "top_k" in truncations:
        top_k = draws.top_k.long().clamp(max=size)
        key, _ = select(scores, least, lambda _: top_k, by_weight=False)
        least = least.maximum((-key.int().view(torch.float32)).where(top_k > 0, -torch.inf))
    if "top_p" not in truncations:
        return tokens, scores.masked_fill_(scores < least[:, None], -torch.inf).exp_()
    # without top-p, tokens whose weight is cut off are kept, too: no sum reaches total + 1
    last, missing = select(scores, least, lambda total: torch.where(
        draws.top_p < 1, (draws.top_p * total).ceil().long(), total + 1), by_weight=True)
    keep_kernel[(rows,)](scores, least, last, missing, size, 4096, num_warps=16,
                         enable_fp_fusion=False)
    return tokens, scores


# ------------------------------------------------------------------------------------- draws


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniform"])
def draw_kernel(numbers, largest, temperature, uniform, sums, size, GROUPS: tl.constexpr, tokens):
    """A program reads a group of a row's tokens. Without `tokens`, it adds up their weights; with
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
        exponents = tl.div_rn(weights - tl.load(largest + row).to(tl.float32), divisor)
        weights = exp(exponents)
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
    """Inverse-CDF sampling: returns for each row the first token whose cumulative weight exceeds
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
    largest = None if temperature is None else numbers.amax(dim=1)
    sums = uniform.new_empty(rows, num_groups)
    tokens = uniform.new_empty(rows, dtype=torch.int64)
    given = (numbers.contiguous(), largest, temperature, uniform, sums, size, num_groups)
    draw_kernel[rows, num_groups](*given, None, enable_fp_fusion=False)
    draw_kernel[rows, 1](*given, tokens, enable_fp_fusion=False)
    return tokens
