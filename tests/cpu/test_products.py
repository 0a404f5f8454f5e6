"""Products of our own with weights that oneDNN has packed, against PyTorch's."""

import pytest
import torch

from nanoengine import LLM
from nanoengine_cpu import modules as model
from nanoengine_cpu import swiglu
from nanoengine_cpu.modules import PackedLinear, is_in_blocks
from nanoengine_cpu.products import BLOCK, HAS_PRODUCTS, HAS_TILES, MOST_INPUTS


class Linear(PackedLinear):
    def __init__(self, inputs, parts, bias=False):
        super().__init__(inputs, sum(parts.values()), bias)


class GatedLinear(Linear):
    """The product and SwiGLU of it, as the MLP calls them."""

    def __call__(self, x):
        self.__class__ = Linear
        try:
            return self.gated(x)
        finally:
            self.__class__ = GatedLinear


pytestmark = pytest.mark.skipif(not HAS_PRODUCTS, reason="the CPU has no pairs of bf16")
ROWS = [1, 2, 3, 5, 6, 7, 9, 15, 16, 17, 31, 32, 33, 47, 50, 128, 300, 513, 1024, 1056]


def make_layer(inputs: int, outputs: int, bias: bool = False,
               kind: type[Linear] = Linear) -> tuple[Linear, torch.Tensor]:
    """A packed layer, and its weight as it was."""
    torch.manual_seed(inputs + outputs)
    layer = kind(inputs, {"all": outputs}, bias).requires_grad_(False).bfloat16()
    plain = layer.weight.clone()
    layer.pack()
    assert layer.uses_own
    return layer, plain


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100, 1008, 1024])
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


@pytest.mark.parametrize("inputs", [MOST_INPUTS // 2, MOST_INPUTS - 1])
def test_long_rows(inputs):
    """Of which only 32, or only 16, are in a part."""
    layer, plain = make_layer(inputs, 70)
    for num_rows in (1, 16, 17, 40, 100):
        x = torch.randn(num_rows, inputs).bfloat16()
        exact = torch.nn.functional.linear(x.double(), plain.double())
        torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8, atol=1e-4)


def test_longer_rows_are_left_to_onednn():
    layer, plain = make_layer(MOST_INPUTS, 40)
    longer = Linear(MOST_INPUTS + 1, {"all": 40}).requires_grad_(False).bfloat16()
    longer.weight.copy_(torch.nn.functional.pad(plain, (0, 1)))
    longer.pack()
    assert not longer.uses_own
    x = torch.randn(20, MOST_INPUTS + 1).bfloat16()
    torch.testing.assert_close(longer(x), layer(x[:, :-1]), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs, inner", [
    (32, BLOCK), (100, 3 * BLOCK), (1024, 512), (64, 33), (64, 16)])
def test_swiglu_behind_a_product(inputs, inner, bias):
    """In the same pass where gates and ups are in whole blocks."""
    layer, plain = make_layer(inputs, 2 * inner, bias, GatedLinear)
    for num_rows in ROWS:
        x = 10 * torch.randn(num_rows, inputs).bfloat16()
        gate, up = torch.nn.functional.linear(
            x.double(), plain.double(), layer.bias.double() if bias else None).chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        found = layer(x)
        assert found.dtype == x.dtype and found.shape == exact.shape
        rtol = 2**-8 if inner % BLOCK == 0 else 2**-5
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-4)


def test_swiglu_behind_a_product_from_end_to_end():
    """Gates from -300 to 300, and what lies beyond."""
    layer = GatedLinear(32, {"all": 2 * BLOCK}).requires_grad_(False).bfloat16()
    layer.weight.zero_()
    layer.weight[:BLOCK, 0] = layer.weight[BLOCK:, 1] = 1
    layer.pack()
    gates = torch.cat([torch.linspace(-300, 300, 4001), torch.tensor([-1e4, 1e4, 1e30, torch.nan])])
    x = torch.zeros(len(gates), 32).bfloat16()
    x[:, 0], x[:, 1] = gates, 1
    both = torch.stack([x[:, 0], torch.ones(len(x)).bfloat16()], dim=1)
    torch.testing.assert_close(layer(x), swiglu(both).expand(-1, BLOCK), rtol=2**-7, atol=1e-30,
                               equal_nan=True)


def test_tiny_results_have_the_same_bits_in_few_and_in_many_rows():
    """Many rows are written past the caches, by another instruction."""
    layer = GatedLinear(32, {"all": 2048}).requires_grad_(False).bfloat16()
    layer.weight.zero_()
    layer.weight[:1024, 0] = layer.weight[1024:, 1] = 1
    layer.pack()
    x = torch.zeros(600, 32).bfloat16()
    x[:, 0], x[:, 1] = -80, 2.0 ** torch.arange(-30, 30).repeat(10)
    together = layer(x)
    assert together.count_nonzero() and not together.all()
    for row in range(60):
        assert torch.equal(layer(x[row:row + 1]).view(torch.int16), together[row:row + 1].view(
            torch.int16))


@pytest.mark.parametrize("kind", [Linear, GatedLinear])
@pytest.mark.parametrize("inputs, outputs", [(1024, 192), (100, 66), (MOST_INPUTS, 64)])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(
        monkeypatch, inputs, outputs, kind):
    layer, _ = make_layer(inputs, outputs, kind=kind)
    x = torch.randn(2048, inputs).bfloat16()
    together = layer(x)
    for num_rows in ROWS:
        for first in {0, 1, 2048 - num_rows}:
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(x[rows]), together[rows])
    for threads in (1, 3, 100):
        monkeypatch.setattr(model, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(layer(x), together)


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
    assert not layer.uses_own
    x = torch.randn(5, 96).bfloat16()
    torch.testing.assert_close(layer(x), expected(x), rtol=2**-7, atol=1e-5)
    if HAS_TILES:
        with pytest.raises(ValueError, match="batch_invariant=True"):
            LLM(tiny, batch_invariant=True, dtype="bfloat16")
