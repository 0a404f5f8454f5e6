"""Packed weights: products have the bits of those with dequantized weights."""

import pytest
import torch
from quantizing import PACKED, compare_products, draw

from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.quantized.loading import pack
from nanoengine_extras.models.quantized import formulas

DTYPES = [torch.bfloat16, torch.float32]


def test_the_smallest_exponents_are_kept():
    """2^-127 and 2^-128 are no normal float32 numbers."""
    numbers = torch.randint(16, (64, 128), dtype=torch.uint8)
    weight = formulas.mxfp4(numbers, torch.randint(129, (64, 4), dtype=torch.uint8))
    weight = weight._replace(groups=torch.arange(128) // 32)
    assert weight.scales.dtype == torch.float32 and weight.scales.min() < 2.0**-126
    part = pack(weight, torch.bfloat16)
    assert torch.equal(part.rows(torch.arange(64)), weight.dequantized())


def test_small_scales_of_4_bits():
    """A 4096th of them, which AVX2 needs, is not always a float32 number."""
    weight = formulas.Grouped(torch.randint(4, (64, 128), dtype=torch.uint8),
                              torch.full((64, 4), 2.0**-147), None, torch.arange(128) // 32, bits=4)
    assert (pack(weight, torch.float32) is not None) == HAS_TABLES


@pytest.mark.parametrize("least, most, group, zero, width", [
    (-16, 15, 32, None, 5), (-32, 31, 16, None, 6), (40, 71, 32, None, 5), (-33, 31, 32, None, 8),
    (0, 31, 32, 16, 5), (0, 63, 16, 40, 6), (0, 64, 32, 40, 8)])
def test_weights_of_5_or_6_bits(least, most, group, zero, width):
    kind = torch.int8 if zero is None else torch.uint8
    numbers = torch.randint(least, most + 1, (70, 256), dtype=kind)
    numbers[5, 7], numbers[60, 9] = least, most
    scales = torch.rand(70, 256 // group).half()
    zeros = None if zero is None else torch.full(scales.shape, zero, dtype=torch.uint8)
    weight = formulas.Grouped(numbers, scales, zeros, torch.arange(256) // group)
    for dtype in DTYPES:
        form = pack(weight, dtype).form
        assert form.width == width if HAS_TABLES else form.width in (6, 8)
        compare_products([weight], dtype, (1, 2, 4, 9))


@pytest.mark.parametrize("least, width", [(-32, 6), (-64, 6), (-65, 8), (-127, 8)])
def test_a_zero_that_is_moved_stays_small(least, width):
    """With scales of 18 bits, products with a larger zero would be rounded."""
    weight = draw(70, 256, *PACKED["Q6_K"])
    numbers = torch.randint(least, least + 32, (70, 256), dtype=torch.int8)
    numbers[3, 5] = least
    weight = weight._replace(numbers=numbers)
    form = pack(weight, torch.float32).form
    assert form.width == width if HAS_TABLES else form.width in (6, 8)
    compare_products([weight], torch.float32, (1, 4, 9))


def fp8(numbers: torch.Tensor, scale: float) -> formulas.Grouped:
    """With one scale for each output."""
    scales = torch.full((len(numbers), 1), scale)
    return formulas.Grouped(numbers, scales, groups=torch.zeros(numbers.shape[1]).long(),
                            values=formulas.E4M3)


def test_every_number_of_fp8():
    """Also those that are no normal float16."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    numbers[numbers % 128 == 127] = 126
    weight = fp8(numbers, 0.5)
    assert torch.equal(weight.dequantized(), numbers.view(torch.float8_e4m3fn).float() / 2)
    for dtype in DTYPES:
        part = pack(weight, dtype)
        found = part.rows(torch.arange(64))
        assert torch.equal(found, weight.dequantized())
        linear = QuantizedLinear([part])
        unit = torch.eye(256).to(dtype)
        for rows in (1, 2, 4, 40):
            assert torch.equal(linear.multiply(unit[-rows:]).float(), found.T[-rows:])


def test_what_is_no_number_has_no_packed_form():
    weight = fp8(torch.full((64, 128), 127, dtype=torch.uint8), 1.0)
    assert pack(weight, torch.bfloat16) is None and weight.dequantized().isnan().all()
