"""quantization="…_sums": scales multiply the sums of groups. Where nothing is rounded, the bits are
those of products with dequantized weights; a row has the same bits whatever rows are beside it."""

from typing import Any

import pytest
import torch
from conftest import token_ids
from quantizing import (BFLOAT16, GREEDY, OPTIONS, OTHER_CPUS, PACKED, PROMPTS, REAL, SCHEDULES,
    WITH_SUMS, draw, expected, generated, linear_of, linears_of, logprobs_of, make_gguf,
    make_quantized, num_bytes, run_on_another_cpu)
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu.compiling import Program
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.models.quantized import formulas, order, packed
from nanoengine_extras.models.quantized.modules import QuantizedLinear

fixtures = make_gguf, make_quantized
DTYPES = [torch.bfloat16, torch.float32]
# the kernel of float32 takes 13 seconds to compile
IN_BOTH = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])


def run(linear: Any, x: Tensor, residual: Tensor | None = None, norm: Any = None) -> Tensor:
    out = torch.full((len(x), linear.out_features // linear.halves), torch.nan, dtype=x.dtype)
    rows = torch.nn.functional.pad(x, (0, linear.padding))
    residual_at = 0 if residual is None else residual.data_ptr()
    Program(linear.call(rows.data_ptr(), residual_at, out.data_ptr(), len(x), norm)).run()
    return out


def by_sums(weights: list[formulas.Grouped], dtype: torch.dtype, halves: int = 1,
            bias: Tensor | None = None) -> Any:
    linear = linear_of(weights, dtype, halves, bias, QuantizedLinear)
    rows = [len(weight.numbers) for weight in weights]
    linear.keep([packed.pack(weight, dtype, True) for weight in weights], rows, dtype)
    return linear


def with_exact_sums(weight: formulas.Grouped) -> formulas.Grouped:
    """With scales that are powers of two, and numbers so small that nothing is ever rounded."""
    numbers, shape = weight.numbers, weight.scales.shape
    scales = (2.0 ** torch.randint(0, 3, shape)).to(weight.scales.dtype)
    return weight._replace(
        numbers=numbers, scales=scales, lows=None if weight.lows is None else scales,
        above=tuple(torch.full_like(each, 2.0**-5) for each in weight.above))


def compare_exactly(weights, dtype, num_rows, halves=1, bias=None) -> None:
    weights = [with_exact_sums(weight) for weight in weights]
    linears = [by_sums(weights, dtype, halves, bias),
               linear_of(weights, dtype, halves, bias, PackedLinear)]
    assert torch.equal(linears[0].weight, linears[1].weight)
    outputs = linears[0].out_features // halves
    for count in num_rows:
        x = torch.randint(-2, 3, (count, linears[0].in_features)).to(dtype)
        residual = torch.randn(count, outputs).to(dtype)
        for more in (residual, None):
            found, wanted = (run(linear, x, more) for linear in linears)
            assert found.isfinite().all() and torch.equal(found, wanted), (count, more is None)


@IN_BOTH
@pytest.mark.parametrize("name", WITH_SUMS)
def test_exact_sums(name, dtype):
    weight = draw(192, 512, *PACKED[name])
    bias = torch.randint(-9, 9, (192,)).float()
    compare_exactly([weight], dtype, (1, 2, 3, 4, 5, 7, 8, 40), bias=bias)


@IN_BOTH
def test_exact_sums_of_several_parts(dtype):
    """Queries, keys and values of several formats; gates and ups; 1,280 inputs are five slices."""
    names = ["Q4_K", "Q6_K", "Q4_0"]
    weights = [draw(rows, 1280, *PACKED[name]) for rows, name in zip((128, 64, 70), names)]
    compare_exactly(weights, dtype, (1, 3, 7, 20))
    weights = [draw(100, 512, *PACKED[name]) for name in names[:2]]
    compare_exactly(weights, dtype, (1, 6), halves=2, bias=torch.randint(-9, 9, (200,)).float())


@pytest.mark.parametrize("num_rows", [(1, 2, 3, 5, 40), pytest.param(
    (*range(1, 41), 64, 100, 512), marks=pytest.mark.slow)], ids=["few", "all"])
@IN_BOTH
@pytest.mark.parametrize("name", WITH_SUMS)
def test_rows_do_not_depend_on_each_other(name, dtype, num_rows):
    """With a norm; and their sums are those of float64, but for rounding."""
    weight = draw(128, 512, *PACKED[name])
    linear = by_sums([weight], dtype)
    norm = torch.nn.RMSNorm(512, 1e-6, dtype=dtype)
    x = torch.randn(num_rows[-1], 512).to(dtype)
    wanted = run(linear, x, norm=norm)
    for count in num_rows:
        for first in (0, len(x) - count):
            some = slice(first, first + count)
            assert torch.equal(run(linear, x[some].contiguous(), norm=norm), wanted[some]), count
    right = norm(x).double() @ weight.dequantized().double().T
    bound = (2**-7 if dtype == torch.bfloat16 else 2**-18) * right.abs().max()
    assert (wanted.double() - right).abs().max() < bound


@pytest.mark.parametrize("zero", [0, 3, 8, 15])
def test_one_zero_of_all_groups(zero):
    """It is moved to the middle where the numbers have room, and only there."""
    numbers = torch.randint(2, 11, (64, 64), dtype=torch.uint8)
    zeros = torch.full((64, 2), zero, dtype=torch.uint8)
    weight = formulas.Grouped(numbers, torch.ones(64, 2).half(), zeros,
                              torch.arange(64) // 32, 4)
    part = packed.pack(weight, torch.bfloat16, True)
    assert packed.form_of(part).zero == (8 if zero in (3, 8) else zero)
    found = packed.rows_of(part, torch.arange(64), 64, torch.bfloat16)
    assert torch.equal(found, weight.dequantized())
    compare_exactly([weight], torch.bfloat16, (1, 9))


def mxfp4(outputs: int, inputs: int, least: int = 120) -> formulas.Grouped:
    """Random numbers of 4 bits in floating point, with exponents from the given one on."""
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    exponents = torch.randint(least, 129, (outputs, inputs // 32), dtype=torch.uint8)
    found = formulas.mxfp4(numbers, exponents)
    return found._replace(groups=torch.arange(inputs) // 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_scale_sums(dtype):
    """In bfloat16, without being asked for: the weight is the same, and the kernel is faster."""
    weight = mxfp4(192, 512)
    assert packed.form_of(packed.pack(weight, dtype)).by_sums == (dtype == torch.bfloat16)
    linears = [linear_of([weight], dtype, 1, None, kind)
               for kind in (QuantizedLinear, PackedLinear)]
    assert torch.equal(linears[0].weight, linears[1].weight)
    for count in (1, 2, 3, 4, 9, 40):
        # so small that no sum is rounded
        x = torch.randint(-2, 3, (count, 512)).to(dtype)
        found, wanted = (run(linear, x) for linear in linears)
        assert torch.equal(found, wanted), count


def test_the_smallest_exponents_are_kept():
    """2^-127 and 2^-128 are no normal float32 numbers."""
    weight = mxfp4(64, 128, least=0)
    assert weight.scales.dtype == torch.float32 and weight.scales.min() < 2.0**-126
    part = packed.pack(weight, torch.bfloat16)
    found = packed.rows_of(part, torch.arange(64), 128, torch.bfloat16)
    assert torch.equal(found, weight.dequantized())


@pytest.mark.parametrize("least, most, group, has_lows, width", [
    (-16, 15, 32, False, 5), (-17, 15, 32, False, 6), (-16, 16, 64, False, 6),
    (-16, 15, 16, False, 6), (-32, 31, 16, False, 6), (-33, 31, 32, False, 8),
    (-32, 32, 32, False, 8), (0, 31, 128, True, 5), (20, 51, 32, True, 5), (20, 52, 32, True, 6),
    (0, 63, 16, True, 6)])
def test_numbers_of_5_or_6_bits(least, most, group, has_lows, width):
    """Lows let the zero be moved, and with AVX-512, numbers of fewer bits take less memory."""
    kind = torch.uint8 if has_lows else torch.int8
    numbers = torch.randint(least, most + 1, (128, 256), dtype=kind)
    numbers[5, 7], numbers[60, 9] = least, most
    scales = torch.rand(128, 256 // group).half()
    weight = formulas.Grouped(numbers, scales, groups=torch.arange(256) // group,
                              lows=scales if has_lows else None)
    part = packed.pack(weight, torch.bfloat16, True)
    form = packed.form_of(part)
    if not order.HAS_TABLES:
        width = 6 if -32 <= least and most < 32 else 8
    assert form.bits == 8 and form.width == width
    stored = 8 if width == 8 or not order.HAS_TABLES else width
    num_scales = 128 * 256 // group * (1 + has_lows)
    assert len(part) == 8 * packed.HEADER + 128 * 256 * stored // 8 + 2 * num_scales
    found = packed.rows_of(part, torch.arange(128), 256, torch.bfloat16)
    assert torch.equal(found, weight.dequantized())
    compare_exactly([weight], torch.bfloat16, (1, 2, 4, 9))


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
        form = packed.form_of(packed.pack(weight, dtype))
        assert form.width == width if order.HAS_TABLES else form.width in (6, 8)
        for count in (1, 2, 4, 9):
            x = torch.randn(count, 256).to(dtype)
            found, wanted = [run(linear_of([weight], dtype, 1, None, kind), x)
                             for kind in (QuantizedLinear, PackedLinear)]
            assert torch.equal(found, wanted), count


@pytest.mark.parametrize("least, width", [(-32, 6), (-64, 6), (-65, 8), (-127, 8)])
def test_a_zero_that_is_moved_stays_small(least, width):
    """With scales of 18 bits, products with a larger zero would be rounded."""
    weight = draw(70, 256, *PACKED["Q6_K"])
    numbers = torch.randint(least, least + 32, (70, 256), dtype=torch.int8)
    numbers[3, 5] = least
    weight = weight._replace(numbers=numbers)
    form = packed.form_of(packed.pack(weight, torch.float32))
    assert form.width == width if order.HAS_TABLES else form.width in (6, 8)
    linears = [linear_of([weight], torch.float32, 1, None, kind)
               for kind in (QuantizedLinear, PackedLinear)]
    for count in (1, 4, 9):
        x = torch.randn(count, 256)
        assert torch.equal(*[run(linear, x) for linear in linears])


def test_inputs_that_fill_no_vector():
    for bits in (4, 8):
        for inputs in (96, 100):
            weight = formulas.rounded(torch.randn(70, inputs), bits)
            compare_exactly([weight], torch.bfloat16, (1, 9))


def sums_of_another_cpu() -> None:
    """Called in processes of their own."""
    for dtype in DTYPES:
        for name in WITH_SUMS:
            compare_exactly([draw(192, 512, *PACKED[name])], dtype, (1, 4, 6, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name, features", OTHER_CPUS)
def test_on_other_cpus(name, features, tmp_path):
    run_on_another_cpu("test_quantized_sums.sums_of_another_cpu", name, features, tmp_path)


# ---------------------------------------------------------------------------------- whole models


def all_by_sums(llm: LLM) -> bool:
    parts = [part for linear in linears_of(llm) for part in linear.packed_parts]
    return bool(parts) and all(packed.form_of(part).by_sums for part in parts)


def test_a_gguf_in_bfloat16(make_gguf):
    path, model = make_gguf(["Q4_K", "Q6_K"])
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(path, quantization="gguf_sums", **BFLOAT16) as llm:
        assert all_by_sums(llm)
        output = llm.generate([prompt], params, use_tqdm=False)[0]
    found = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:])]
    with torch.inference_mode():
        right = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    right = right[range(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(torch.tensor(found), right, atol=0.1, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["Q8_0"], ["Q4_K", "Q6_K"], ["IQ4_XS"]])
def test_tokens_of_a_gguf(make_gguf, kinds):
    path, model = make_gguf(kinds)
    with LLM(path, quantization="gguf_sums", **OPTIONS) as llm:
        assert all_by_sums(llm)
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)


@pytest.mark.parametrize(
    "name", ["int4", pytest.param("int8", marks=pytest.mark.slow), "gguf",
             pytest.param("awq", marks=pytest.mark.slow)])
def test_schedules_do_not_matter(bundled, make_quantized, name):
    model = bundled
    if name == "gguf":
        model = REAL
    elif name == "awq":
        model = make_quantized("awq")[0]
    options = dict(quantization=f"{name}_sums")
    wanted = logprobs_of(model, **options)
    assert wanted[:5] == wanted[5:]
    for schedule in SCHEDULES:
        assert logprobs_of(model, **options, **schedule) == wanted, schedule


def test_the_memory_is_the_same(bundled):
    found = []
    for quantization in ("int4", "int4_sums"):
        with LLM(bundled, quantization=quantization, **BFLOAT16) as llm:
            found.append(num_bytes(llm.engine.runner.model))
    assert found[0] == found[1]


@pytest.mark.parametrize("options, accepted", [
    (dict(quantization="gguf_sums"), "since the model is not quantized"),
    (dict(quantization="int5_sums"), "'int8', 'int4' or None, or what the model has"),
    (dict(quantization="_sums"), "'int8', 'int4' or None, or what the model has"),
    (dict(kernels=False), "without '_sums' unless weights stay packed"),
    (dict(dtype="float16"), "without '_sums' unless weights stay packed")])
def test_where_it_is_refused(tiny, options, accepted):
    given = OPTIONS | dict(quantization="int4_sums") | options
    with pytest.raises(ValueError, match=f"quantization='{given['quantization']}' is.*{accepted}"):
        LLM(tiny, **given)
    assert generated(tiny, quantization="int4_sums", dtype="bfloat16")
