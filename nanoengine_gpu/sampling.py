"""Sampling without a sort: `nucleus` is a radix select, with one kernel, and `draw` is a search in
two levels, in plain PyTorch. Nothing is read on the host.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


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
    to_sum = sums + row * 1024 + (bits >> shift & 1023)
    tl.atomic_add(to_sum, number, is_counted, sem="relaxed")


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
        radix_kernel[(rows, triton.cdiv(size, 1024))](
            bits, found, sums, size, shift, 1024, num_warps=4, enable_fp_fusion=False)
        # the sum of all larger digits
        above = sums.sum(dim=1, keepdim=True) - sums.cumsum(dim=1)
        digit = (above >= missing).sum(dim=1, keepdim=True).clamp(max=1023)
        missing -= above.gather(1, digit)
        found = found * 1024 + digit
    is_tie = bits == found
    # of equal weights, as many as what is missing takes
    of_tie = (found.int().view(torch.float32) * 2**44).long()
    num_ties = (missing - 1) // of_tie.clamp(min=1) + 1
    return (bits > found) | is_tie & (is_tie.cumsum(dim=1, dtype=torch.int32) <= num_ties)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: returns for each row the first place whose cumulated weight exceeds
    u * total, or -1 if the total is NaN or 0: (rows,) int64.

    weights: (rows, tokens) float32; uniform: (rows,) float64. u is at most 1 - 2**-52.

    A scan over all tokens would write and read 8 bytes for each. This sums groups of up to 128
    tokens, scans the sums, and then scans one group. All sums are float64.
    """
    groups = weights.unflatten(1, (-1, math.gcd(weights.shape[1], 128)))
    sums = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform[:, None].clamp(max=1 - 2.0**-52) * sums[:, -1:]
    group = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = nn.functional.pad(sums, (1, 0)).gather(1, group)
    chosen = groups.take_along_dim(group[:, :, None], dim=1)[:, 0]
    inside = chosen.cumsum(dim=-1, dtype=torch.float64)
    # a rounded difference must not go beyond the last token that has weight
    target = (target - before).minimum(inside[:, -1:] * (1 - 2.0**-52))
    place = torch.searchsorted(inside, target, right=True)
    return torch.where(sums[:, -1:] > 0, group * groups.shape[-1] + place, -1)[:, 0]
