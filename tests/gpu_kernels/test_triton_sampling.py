"""The draw in two levels gives the tokens of the engine's own; interpreted.py tests `nucleus`."""

import math

import pytest
import torch

from nanoengine import sampler

pytest.importorskip("triton", minversion="3.6")

from nanoengine_gpu import draw  # noqa: E402


@pytest.mark.parametrize("size", [151_936, 20_000, 32_000, 320, 257, 1])
def test_the_same_tokens(size):
    torch.manual_seed(size)
    rows = 40
    logits = (torch.randn(rows, size) * 3).bfloat16().float()
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[::10] = 0
    # the largest number below 1, and 1, are taken as 1 - 2**-52
    uniform[3::10], uniform[4::10] = 1 - 2.0**-53, 1
    logits[7, size // 2] = torch.nan
    logits[9] = -math.inf
    logits[11, 3:] = -math.inf
    logits[12, :-1] = -math.inf
    temperatures = torch.linspace(2, 0.05, rows)[:, None]
    weights = ((logits - logits.amax(dim=1, keepdim=True)) / temperatures).exp()
    found = draw(weights, uniform)
    assert found.dtype == torch.int64 and torch.equal(found, sampler.draw(weights, uniform))
    assert found[7] == found[9] == -1 and found[12] == size - 1 and found.max() < size


def test_no_weight_at_all():
    weights = torch.zeros(2, 256)
    weights[1, 5] = torch.nan
    assert draw(weights, torch.rand(2, dtype=torch.float64)).tolist() == [-1, -1]


def test_a_place_with_weight_is_drawn_whatever_the_number():
    weights = torch.zeros(300, 640)
    places = torch.arange(300)
    weights[places, places * 2] = torch.rand(300) + 1e-3
    for number in (0.0, 0.3, 1 - 2.0**-52, 1.0):
        uniform = torch.full((300,), number, dtype=torch.float64)
        assert torch.equal(draw(weights, uniform), places * 2)


def test_rows_do_not_depend_on_each_other():
    torch.manual_seed(0)
    weights, uniform = torch.rand(9, 1280), torch.rand(9, dtype=torch.float64)
    together = draw(weights, uniform)
    for row in range(9):
        assert together[row] == draw(weights[row:row + 1], uniform[row:row + 1])
