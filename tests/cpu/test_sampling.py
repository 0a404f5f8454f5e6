"""What sampling asks of the library: maxima, and the columns that can be drawn."""

import math

import pytest
import torch

from nanoengine_extras.cpu.sampling import columns_above, first_max


def numbers(rows: int, columns: int, levels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns * levels)
    return torch.randint(levels, (rows, columns), generator=generator).float()


@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 7), (2, 151), (1, 1280), (5, 1152)])
@pytest.mark.parametrize("levels", [2, 30, 10_000])  # few: many numbers are equal
def test_against_plain_torch(rows, columns, levels):
    x = numbers(rows, columns, levels)
    largest, place = first_max(x)
    assert torch.equal(largest, x.amax(dim=1))
    assert place.tolist() == [row.index(max(row)) for row in x.tolist()]
    for count in (0, 1, 2, 8, 9, 10, columns, columns + 5):
        for threshold in (-math.inf, levels / 2, levels - 1.0, math.inf):
            thresholds = torch.full((rows, 1), threshold)
            thresholds[-1] = -math.inf if count else threshold
            found = columns_above(x, thresholds, count)
            assert torch.equal(found, found.unique()), "in order, and each once"
            kth = x.sort(dim=1, descending=True).values[:, [min(count or columns, columns) - 1]]
            wanted = ((x >= thresholds) & (x >= kth)).any(dim=0).nonzero()[:, 0]
            assert {*wanted.tolist()} <= {*found.tolist()}
            if not count:
                assert torch.equal(found, wanted)


def test_few_columns_are_left_of_many():
    x = torch.randn(3, 128 * 1000, generator=torch.Generator().manual_seed(0))
    none = torch.full((3, 1), -math.inf)
    assert 60 <= len(columns_above(x, none, 20)) < 100
    assert len(columns_above(x, none, 0)) == x.shape[1]


def test_nan_is_kept():
    x = numbers(2, 256, 50)
    x[1, 200] = math.nan
    assert 200 in columns_above(x, torch.full((2, 1), 49.0), 0)
    assert columns_above(x, torch.tensor([[49.0], [math.nan]]), 0).tolist() == [*range(256)]
