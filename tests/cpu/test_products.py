"""Products with packed weights, against PyTorch's in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F

from nanoengine_extras.cpu import compiling
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.cpu.products import BLOCKS, MOST_WORDS
from nanoengine_extras.cpu.tiles import TILE_SIZES

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 15, 16, 17, 31, 32, 33, 47, 50, 128, 300, 513, 1024, 1056]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# relative errors: half a unit in the last place of a result, and what float32 sums differ by
RTOL = {torch.float32: 1e-4, torch.bfloat16: 2**-8}


def make_layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False,
               halves: int = 1) -> tuple[PackedLinear, torch.Tensor]:
    """A packed layer, and its weight as it was."""
    torch.manual_seed(inputs + outputs)
    layer = PackedLinear(inputs, outputs, bias).requires_grad_(False).to(dtype)
    layer.halves = halves
    plain = layer.weight.clone()
    layer.pack()
    assert layer.is_packed
    return layer, plain


def exact_product(x, plain, layer):
    bias = None if layer.bias is None else layer.bias.double()
    product = F.linear(x.double(), plain.double(), bias)
    if layer.halves == 1:
        return product
    gate, up = product.chunk(2, dim=1)
    return F.silu(gate) * up


def check_products(layer, plain, dtype, rows=ROWS, scale=1.0, atol=1e-5) -> None:
    for num_rows in rows:
        x = scale * torch.randn(num_rows, layer.in_features).to(dtype)
        exact = exact_product(x, plain, layer)
        found = layer(x)
        assert found.dtype == x.dtype and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=RTOL[dtype], atol=atol)


@DTYPES
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100, 1008, 1024])
@pytest.mark.parametrize("inputs", [2, 31, 32, 100, 1024])
def test_products(inputs, outputs, bias, dtype):
    check_products(*make_layer(inputs, outputs, dtype, bias), dtype)


@DTYPES
@pytest.mark.parametrize("words", [MOST_WORDS // 2, MOST_WORDS])
def test_long_rows(words, dtype):
    """Of which only 32, or only 16, are in a part."""
    inputs = words * 4 // dtype.itemsize - 1
    check_products(*make_layer(inputs, 70, dtype), dtype, (1, 16, 17, 40, 100), atol=1e-4)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs, inner", [
    (32, 64), (100, 192), (1024, 512), (64, 33), (64, 16), (7, 1)])
def test_swiglu_behind_a_product(inputs, inner, bias, dtype):
    """In the same pass. Each half is in blocks of its own, whole or not."""
    layer, plain = make_layer(inputs, 2 * inner, dtype, bias, halves=2)
    check_products(layer, plain, dtype, scale=10.0, atol=1e-4)


def make_gate(inner: int, dtype: torch.dtype) -> PackedLinear:
    """All its gates are the first number of a row, all ups the second one."""
    layer = PackedLinear(32, 2 * inner, bias=False).requires_grad_(False).to(dtype)
    layer.halves = 2
    layer.weight.zero_()
    layer.weight[:inner, 0] = layer.weight[inner:, 1] = 1
    layer.pack()
    return layer


@DTYPES
def test_swiglu_behind_a_product_from_end_to_end(dtype):
    """Gates from -88 to 88, where e^x is a number of float32; and what lies beyond."""
    layer = make_gate(32, dtype)
    gates = torch.cat([torch.linspace(-88, 88, 4001), torch.tensor([-1e4, 1e4, 1e30, torch.nan])])
    x = torch.zeros(len(gates), 32).to(dtype)
    x[:, 0], x[:, 1] = gates, 1
    expected = F.silu(x[:, :1].double()).expand(-1, 32)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=1e-30,
                               equal_nan=True)


def test_tiny_results_have_the_same_bits_in_few_and_in_many_rows():
    layer = make_gate(1024, torch.bfloat16)
    x = torch.zeros(600, 32).bfloat16()
    x[:, 0], x[:, 1] = -80, 2.0 ** torch.arange(-30, 30).repeat(10)
    together = layer(x)
    assert together.count_nonzero()
    for row in range(60):
        assert torch.equal(layer(x[row:row + 1]).view(torch.int16), together[row:row + 1].view(
            torch.int16))


@pytest.mark.parametrize("scale", [1, 1e-20, 1e-38])
def test_subnormal_numbers_have_the_same_bits_in_few_and_in_many_rows(scale):
    """In weights, in rows and in results: AMX takes them for 0."""
    layer = PackedLinear(1024, 100, bias=False).requires_grad_(False).bfloat16()
    torch.manual_seed(0)
    layer.weight.copy_(torch.randn_like(layer.weight) * scale)
    layer.weight[:, ::7] *= 1e-30
    layer.pack()
    x = torch.randn(40, 1024).bfloat16()
    x[:, ::5] *= 1e-37
    together = layer(x)
    for num_rows in range(1, 6):
        assert torch.equal(layer(x[7:7 + num_rows]), together[7:7 + num_rows])


def multiply(layer, x, norm=None, residual=None):
    out = x.new_empty(len(x), layer.out_features // layer.halves)
    residual_at = 0 if residual is None else residual.data_ptr()
    compiling.Program(layer.call(x.data_ptr(), residual_at, out.data_ptr(), len(x), norm)).run()
    return out


@DTYPES
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("inputs, outputs", [(32, 100), (1024, 64), (64, 2)])
def test_a_norm_before_a_product(inputs, outputs, halves, dtype):
    """Of each row alone; its result is rounded, as if it were written."""
    layer, plain = make_layer(inputs, outputs, dtype, halves=halves)
    norm = torch.nn.RMSNorm(inputs, eps=1e-3).requires_grad_(False).to(dtype)
    norm.weight.uniform_(0.5, 1.5)
    for num_rows in ROWS:
        x = (torch.randn(num_rows, inputs) * 10 ** torch.randn(num_rows, 1)).to(dtype)
        before = x.clone()
        normed = F.rms_norm(x.float(), (inputs,), norm.weight.float(), norm.eps).to(dtype)
        found = multiply(layer, x, norm)
        torch.testing.assert_close(
            found.double(), exact_product(normed, plain, layer), rtol=4 * RTOL[dtype],
            atol=1e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(x, before)
        assert torch.equal(multiply(layer, x[-1:], norm), found[-1:])


def test_nan_stays_in_its_row():
    layer, _ = make_layer(32, 10, torch.float32)
    x = torch.randn(3, 32)
    x[1, 5] = torch.nan
    norm = torch.nn.RMSNorm(32, eps=1e-6).requires_grad_(False)
    found = multiply(layer, x, norm, residual=torch.randn(3, 10))
    assert found.isnan().any(dim=1).tolist() == [False, True, False]


@DTYPES
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("outputs", [2, 66, 1024])
def test_a_residual_is_added_as_pytorch_adds_it(outputs, halves, dtype):
    layer, _ = make_layer(64, outputs, dtype, halves=halves)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 64).to(dtype)
        residual = torch.randn(num_rows, outputs // halves).to(dtype)
        assert torch.equal(multiply(layer, x, residual=residual), layer(x) + residual)


@DTYPES
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("inputs, outputs", [(1024, 192), (100, 66), (MOST_WORDS, 64)])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(
        monkeypatch, inputs, outputs, halves, dtype):
    layer, _ = make_layer(inputs, outputs, dtype, halves=halves)
    x = torch.randn(2048, inputs).to(dtype)
    together = layer(x)
    for num_rows in ROWS:
        for first in {0, 1, 2048 - num_rows}:
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(x[rows]), together[rows])
    for threads in (1, 3, 100):
        monkeypatch.setattr(compiling, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(layer(x), together)


@DTYPES
@pytest.mark.parametrize("inputs", [64, 100])
def test_rows_know_nothing_of_what_lies_around_them(inputs, dtype):
    """Neither of other rows, of which some are multiplied twice, nor of memory behind the last."""
    layer, _ = make_layer(inputs, 40, dtype)
    memory = torch.randn(60, inputs).to(dtype)
    expected = layer(memory[10:33])
    memory[:10] = memory[20] = memory[33:] = torch.nan
    found = layer(memory[10:33])
    assert found[10].isnan().all()
    found[10] = expected[10]
    assert torch.equal(found, expected)


@DTYPES
@pytest.mark.parametrize("halves", [1, 2])
def test_a_packed_weight_has_every_number_once(halves, dtype):
    layer, plain = make_layer(37, 2 * 41, dtype, bias=True, halves=halves)
    size, per_word = BLOCKS[dtype], 4 // dtype.itemsize
    packed = layer._parameters["weight"]
    lines = packed.unflatten(2, (size, per_word)).transpose(1, 2).flatten(2).flatten(0, 1)
    of_half = lines.unflatten(0, (halves, -1))[:, :82 // halves]
    assert torch.equal(of_half[:, :, :37].flatten(0, 1), plain)
    assert packed.count_nonzero() == plain.count_nonzero()
    assert torch.equal(layer.weight, plain)
    biases = layer.packed_bias.unflatten(0, (halves, -1))[:, :82 // halves].flatten()
    assert torch.equal(biases.to(dtype), layer.bias)


@pytest.mark.parametrize("inputs, outputs, halves", [(1024, 192, 1), (100, 66, 1), (100, 66, 2)])
def test_a_float32_weight_in_bfloat16_takes_half_the_memory(inputs, outputs, halves):
    """And gives the bits of the same weight in words, which one number with more bits forces."""
    short, plain = make_layer(inputs, outputs, torch.bfloat16, bias=True, halves=halves)
    short = short.float()
    whole = copy.deepcopy(short)
    plain = plain.float()
    plain[-1, -1] = 1 / 3
    whole.weight = torch.nn.Parameter(plain, requires_grad=False)
    whole.pack()
    assert 2 * short._parameters["weight"].nbytes == whole._parameters["weight"].nbytes
    assert torch.equal(short.weight[:-1], plain[:-1]) and torch.equal(whole.weight, plain)
    for num_rows in ROWS:
        x = torch.randn(num_rows, inputs)
        assert torch.equal(short(x)[:, :-1], whole(x)[:, :-1])


def largest_error(dtype):
    """Of products and SwiGLU of them, also called in processes of their own."""
    errors = []
    for halves in (1, 2):
        layer, plain = make_layer(200, 2 * 70, dtype, bias=True, halves=halves)
        for num_rows in (1, 3, 5, 40):
            x = torch.randn(num_rows, 200).to(dtype)
            errors.append((layer(x).double() - exact_product(x, plain, layer)).abs().max().item())
    return max(errors)


def test_each_tile_has_lines():
    """Also where a product has no rows: some CPUs refuse tiles that have only a width."""
    for sizes in TILE_SIZES:
        assert all(sizes[48:56]) and all(sizes[16:32:2])
