"""Parts of sampling that are slow on a CPU with PyTorch's operators alone.

They look at groups of neighbours first: most groups are ruled out by their largest number.
"""

import math
from typing import Any

import numpy as np
import torch


def grouped(x: torch.Tensor) -> torch.Tensor:
    """Divides each row of a matrix into groups of equal size: (rows, groups, size)."""
    return x.unflatten(1, (-1, math.gcd(x.shape[1], 128)))


def first_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row of a matrix, and its index, the first if there are several.

    On a CPU, PyTorch finds a maximum with vector instructions, but its index one number at a time.
    So this looks for the index in one group only.
    """
    groups = grouped(x)
    largest, group = groups.amax(dim=-1).max(dim=-1, keepdim=True)
    place = groups.take_along_dim(group[:, :, None], dim=1).max(dim=-1).indices
    return largest[:, 0], (group * groups.shape[-1] + place)[:, 0]


def columns_above(x: torch.Tensor, thresholds: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of a matrix in which some row has a number that is not below its threshold and
    can be among its `count` largest. NaN is not below anything.

    thresholds: (rows, 1); count: 0 for no limit.
    """
    groups = grouped(x)
    largest = groups.amax(dim=-1)
    if 0 < count <= largest.shape[1]:
        # at least `count` groups have a number that is not below this one
        thresholds = thresholds.maximum(largest.topk(count).values[:, -1:])
    near = (~(largest < thresholds)).any(dim=0).nonzero()
    columns = (near * groups.shape[-1] + torch.arange(groups.shape[-1], device="cpu")).flatten()
    return columns[(~(x[:, columns] < thresholds)).any(dim=0)]


def nucleus(weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Whether each weight of a row is one of the fewest, largest first, that together reach
    `needed`, (rows, 1). Of equal weights, the first ones are taken; NaN never is.

    NumPy sorts numbers alone ten times as fast as PyTorch sorts them together with their indices.
    """
    ordered = torch.from_numpy(np.sort(weights.numpy(), axis=1)).flip(1)
    before = ordered.cumsum(dim=1, dtype=torch.float64) - ordered
    count = (before < needed).sum(dim=1, keepdim=True)
    least = ordered.gather(1, (count - 1).clamp(min=0))
    is_above, is_tie = weights > least, weights == least
    num_ties = count - is_above.sum(dim=1, keepdim=True)
    return is_above | (is_tie & (is_tie.cumsum(dim=1) <= num_ties))


def truncate(scores: torch.Tensor, draws: Any, truncations: set[str],
             top_ks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The function of nanoengine/sampler.py, with the same weights, but only for the tokens that
    some row can still draw. Returns these tokens, (few,), and their weights, (rows, few).

    scores: overwritten.
    draws: columns `min_p`, `top_k` and `top_p`, (rows,) float64 each.
    truncations: those of "min_p", "top_k" and "top_p" that some row needs.
    top_ks: the top_k of each row, on the host.
    """
    # a token below `least` gets weight 0; a token below `bound` in every row can be left out
    least = bound = draws.min_p[:, None].log().float()
    total = None
    if truncations == {"top_p"}:
        total = scores.exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # together, all tokens with lower scores weigh less than half of 1 - top_p
        bound = (total * (1 - draws.top_p[:, None]) / (2 * scores.shape[1])).log().float()
    # a row without top_k can draw any token
    tokens = columns_above(scores, bound, max(top_ks) if min(top_ks) > 0 else 0)
    if len(tokens) < scores.shape[1]:
        scores = scores[:, tokens]
    if "top_k" in truncations:
        count = min(max(top_ks), len(tokens))
        places = draws.top_k[:, None].long().clamp(1, count) - 1
        kth = scores.topk(count).values.gather(1, places)
        least = least.maximum(kth.where(draws.top_k[:, None] > 0, -math.inf))
    weights = scores.masked_fill(scores < least, -math.inf).exp_()
    if "top_p" in truncations:
        if total is None:
            total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        weights = weights.where(nucleus(weights, draws.top_p[:, None] * total), 0)
    return tokens, weights
