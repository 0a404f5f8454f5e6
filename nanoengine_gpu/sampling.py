"""Sampling without a sort, and without a float32 matrix of logits. Nothing is read on the host.

    truncate  a radix select: the likeliest tokens of each row
    draw      a search in two levels: a token of each row, by weights or by logits
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanoengine_gpu.attention import IS_INTERPRETED

# the tokens of a group, whose weights are added up to one sum
GROUP = tl.constexpr(4096)
# the search for likely tokens reads at most MOST, whose scores are at least LOW
MOST, LOW = 8192, tl.constexpr(-16.0)


@triton.jit
def exp(x):
    # that of Triton is less exact than PyTorch's, but the interpreter has no other
    return tl.exp(x) if IS_INTERPRETED else libdevice.exp(x)


# ------------------------------------------------------------------------------- truncation


@triton.jit
def keys_of(scores, least, BY_WEIGHT: tl.constexpr):
    """A key for each score, at least 0: the likelier the token, the smaller its key. And what it
    adds to a sum: 1, or its weight in units of 2**-44."""
    if BY_WEIGHT:
        # NaN is not above anything
        weights = tl.where(scores >= least, exp(scores), 0.0)
        return 0x3F800000 - weights.to(tl.int32, bitcast=True), (weights * 2**44).to(tl.int64)
    return (0.0 - scores).to(tl.int32, bitcast=True), tl.full(scores.shape, 1, tl.int64)


@triton.jit
def sum_before(key, scores, size, least, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over all tokens whose keys are less."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(scores + columns, columns < size, -float("inf"))
        keys, numbers = keys_of(part, least, BY_WEIGHT)
        total += tl.where(keys < key, numbers, 0)
    return tl.sum(total, 0)


@triton.jit
def search_key(needed, scores, size, least, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the last token that is needed for a sum, bit by bit; and the sum before it."""
    key, reached = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    for place in range(31):
        larger = key + (1 << 30 - place)
        total = sum_before(larger, scores, size, least, BY_WEIGHT, BLOCK)
        if total < needed:
            key, reached = larger, total
    return key, reached


@triton.jit
def truncate_kernel(scores, all_least, top_ks, top_ps, candidates, size, MOST: tl.constexpr,
                    BLOCK: tl.constexpr):
    """A program has a row of scores. It overwrites them with weights.

    candidates: (rows, MOST) float32, memory for a row's scores from LOW on
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * size
    candidates += row * MOST
    least = tl.load(all_least + row)
    top_k = tl.minimum(tl.load(top_ks + row).to(tl.int32), size)
    top_p = tl.load(top_ps + row)

    # 1. copy the scores from LOW on, in their order
    count = 0
    total = tl.zeros([BLOCK], tl.int64)
    copied = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(scores + columns, columns < size, -float("inf"))
        is_high = part >= LOW
        places = count + tl.cumsum(is_high.to(tl.int32), 0) - 1
        tl.store(candidates + places, part, is_high & (places < MOST))
        count += tl.sum(is_high.to(tl.int32), 0)
        _, numbers = keys_of(part, least, True)
        total += numbers
        copied += tl.where(is_high, numbers, 0)
    total, copied = tl.sum(total, 0), tl.sum(copied, 0)
    # other threads of the program read them
    tl.debug_barrier()
    # do they decide all? If not, all scores are searched
    is_enough = (count >= top_k) & ((top_k > 0) | (copied >= top_p * total)) & (count <= MOST)
    origin = tl.where(is_enough, candidates, scores)
    length = tl.where(is_enough, count, size)

    # 2. search for the last token that is kept
    if top_k > 0:
        key, _ = search_key(top_k, origin, length, least, False, BLOCK)
        least = tl.maximum(least, 0.0 - key.to(tl.float32, bitcast=True))
        total = sum_before(0x7FFFFFFF, origin, length, least, True, BLOCK)
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    num_equal = tl.full([], 0, tl.int64)
    if top_p < 1:
        needed = tl.ceil(top_p * total).to(tl.int64)
        last, reached = search_key(needed, origin, length, least, True, BLOCK)
        weight = (0x3F800000 - last).to(tl.float32, bitcast=True)
        # of equal weights, as many as what is missing takes
        num_equal = (needed - reached - 1) // tl.maximum((weight * 2**44).to(tl.int64), 1) + 1

    # 3. write the weights
    count = 0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(scores + columns, columns < size, -float("inf"))
        keys, _ = keys_of(part, least, True)
        is_equal = keys == last
        places = count + tl.cumsum(is_equal.to(tl.int32), 0)
        count += tl.sum(is_equal.to(tl.int32), 0)
        is_kept = (keys < last) | is_equal & (places <= num_equal)
        weights = tl.where(is_kept & (part >= least), exp(part), 0.0)
        tl.store(scores + columns, weights, columns < size)


def truncate(scores: Tensor, draws: Any, truncations: set[str],
             top_ks: list[int]) -> tuple[Tensor, Tensor]:
    """The function of nanoengine/sampler.py, with the same weights, in place of the scores.

    draws: columns `min_p`, `top_k` and `top_p`, (rows,) float64 each

    This is a radix select (Alabi et al., 2012, "Fast k-selection algorithms for graphics processing
    units"), one bit of a key after the other, for top-k by counts and for top-p by sums of weights.
    Few tokens of a large vocabulary matter: those with a weight of at least exp(LOW) are copied
    first, and the search reads these, if they are few and suffice, and else the whole row.

    Weights are added as whole numbers, in units of 2**-44: the sum of integers does not depend on
    their order. What is smaller than a unit is cut off: less than 2**-25 in a row, and nothing of
    weights from 2**-21 on. 64 bits are enough for the sum of fewer than 2**19 tokens.
    """
    rows, size = scores.shape
    tokens = torch.arange(size, device=scores.device)
    if not truncations:
        return tokens, scores.exp_()
    scores = scores.contiguous()
    truncate_kernel[(rows,)](
        scores, draws.min_p.log().float(), draws.top_k, draws.top_p, scores.new_empty(rows, MOST),
        size, MOST, 4096, num_warps=8, enable_fp_fusion=False)
    return tokens, scores


# ------------------------------------------------------------------------------------- draws


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
