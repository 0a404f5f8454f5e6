"""Products of our own with weights that oneDNN has packed, against PyTorch's. They need AMX."""

import pytest
import torch

from nanoengine import LLM, model
from nanoengine.kernels.tiles import HAS_TILES
from nanoengine.model import Linear, is_in_blocks

pytestmark = pytest.mark.skipif(not HAS_TILES, reason="the CPU has no AMX")
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 50, 128]


def make_layer(inputs: int, outputs: int, bias: bool = False) -> tuple[Linear, torch.Tensor]:
    """A packed layer, and its weight as it was."""
    torch.manual_seed(inputs + outputs)
    layer = Linear(inputs, {"all": outputs}, bias).requires_grad_(False).bfloat16()
    plain = layer.weight.clone()
    layer.pack()
    assert layer.own_rows == 128
    return layer, plain


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100, 1008])
@pytest.mark.parametrize("inputs", [2, 31, 32, 100, 1024])
def test_products(inputs, outputs, bias):
    layer, plain = make_layer(inputs, outputs, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, inputs).bfloat16()
        exact = torch.nn.functional.linear(
            x.double(), plain.double(), layer.bias.double() if bias else None)
        found = layer(x)
        assert found.dtype == x.dtype and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("inputs, outputs", [(1024, 96), (100, 33)])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(inputs, outputs):
    layer, _ = make_layer(inputs, outputs)
    x = torch.randn(128, inputs).bfloat16()
    together = layer(x)
    for num_rows in ROWS:
        for first in {0, 1, 128 - num_rows} - {128}:
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(x[rows]), together[rows])
    layer.own_rows = 1000
    assert torch.equal(layer(torch.cat((x, x, x[:7])))[128:256], together)


@pytest.mark.parametrize("inputs", [64, 100])
def test_rows_know_nothing_of_what_lies_around_them(inputs):
    """Neither of other rows, of which some are multiplied twice, nor of memory behind the last."""
    layer, _ = make_layer(inputs, 40)
    memory = torch.randn(60, inputs).bfloat16()
    expected = layer(memory[10:33])
    memory[:10] = memory[20] = memory[33:] = torch.nan
    found = layer(memory[10:33])
    assert found[10].isnan().all()
    found[10] = expected[10]
    assert torch.equal(found, expected)


def test_rows_that_do_not_lie_in_one_piece():
    layer, _ = make_layer(64, 40)
    x = torch.randn(64, 20).bfloat16()
    assert torch.equal(layer(x.T), layer(x.T.clone(memory_format=torch.contiguous_format)))
    assert layer(x.T[:0]).shape == (0, 40)


def test_a_weight_in_another_order_is_recognised():
    layer, plain = make_layer(96, 80)
    assert is_in_blocks(plain, layer.weight)
    for row, column in ((0, 0), (31, 95), (64, 1), (79, 95)):
        other = plain.clone()
        other[row, column] += 1
        assert not is_in_blocks(other, layer.weight)
    assert not is_in_blocks(plain[:64], layer.weight)
    assert not is_in_blocks(plain.float(), layer.weight)


def test_a_weight_in_another_order_is_left_to_onednn(tiny, monkeypatch):
    expected, plain = make_layer(96, 80)
    monkeypatch.setattr(model, "is_in_blocks", lambda plain, packed: False)
    layer = Linear(96, {"all": 80}).requires_grad_(False).bfloat16()
    layer.weight.copy_(plain)
    layer.pack()
    assert layer.own_rows == 0
    x = torch.randn(5, 96).bfloat16()
    torch.testing.assert_close(layer(x), expected(x), rtol=2**-7, atol=1e-5)
    with pytest.raises(ValueError, match="batch_invariant=True"):
        LLM(tiny, batch_invariant=True, dtype="bfloat16")
