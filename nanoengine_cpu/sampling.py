"""Parts of sampling that PyTorch's operators alone would do slowly on a CPU."""

import math

from torch import Tensor


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row of a matrix, and its place, the first if there are several.

    On a CPU PyTorch finds a maximum in vectors, but its place one number at a time. So this first
    takes the maximum of each group of neighbours, and looks for places in one group alone.
    """
    groups = x.unflatten(1, (-1, math.gcd(x.shape[1], 128)))
    largest, group = groups.amax(dim=-1).max(dim=-1, keepdim=True)
    place = groups.take_along_dim(group[:, :, None], dim=1).max(dim=-1).indices
    return largest[:, 0], (group * groups.shape[-1] + place)[:, 0]


def columns_above(x: Tensor, thresholds: Tensor) -> Tensor | slice:
    """The columns of a matrix where some row is not below its threshold, or is its maximum; on a
    GPU all, as the host would have to wait for them."""
    if not x.is_cpu:
        return slice(None)
    thresholds = x.amax(dim=-1, keepdim=True).minimum(thresholds)
    return (~(x < thresholds)).any(dim=0).nonzero()[:, 0]
