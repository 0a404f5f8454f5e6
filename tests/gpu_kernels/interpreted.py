"""The tests that test_kernels.py runs in Triton's interpreter, on tensors of a CPU.

To run one: TRITON_INTERPRET=1 pytest -n 0 tests/gpu_kernels/interpreted.py -k NAME
On a machine with a GPU, and without TRITON_INTERPRET, they run on the GPU.
"""

import os
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import triton.language as tl
from conftest import check_refused
from feature_helpers import FEATURES, constrain
from triton.runtime import interpreter

import fake_gpu
import nanoengine_extras.gpu
from nanoengine import SamplingParams, sampler
from nanoengine import model as plain
from nanoengine.attention import gather_attention
from nanoengine.config import EngineConfig
from nanoengine.loader import load_model
from nanoengine.sequence import NO_TOKEN, Row, Sequence
from nanoengine.step_inputs import Draws, draws_of
from nanoengine_extras.gpu import (
    attention, draw, few_rows, few_rows_linear, modules, optimize, paged_attention, rms_norm,
    store_heads, swiglu, truncate)
from nanoengine_extras.sampling import fast_sampling

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# how far results may be from those of PyTorch: sums in another order; a step of bfloat16
CLOSE = {torch.float32: dict(rtol=2e-6, atol=2e-6), torch.bfloat16: dict(rtol=1.6e-2, atol=1e-3),
         torch.float16: dict(rtol=2e-3, atol=2e-4)}
# numbers that are not finite are part of some tests
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"),
              pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(),
                                 reason="needs TRITON_INTERPRET=1, or a CUDA device")]
if DEVICE == "cuda":
    # conftest.py would hide the GPU from Triton, too
    pytestmark.append(pytest.mark.gpu)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True)
def rounded_as_on_a_gpu(monkeypatch):
    """The interpreter cuts bits off where a GPU rounds float32 to bfloat16 or e4m3."""
    convert = interpreter._convert_float
    kinds = {tl.bfloat16: (torch.bfloat16, torch.uint16),
             tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def rounded(numbers, from_dtype, to_dtype, mode):
        if from_dtype != tl.float32 or to_dtype not in kinds:
            return convert(numbers, from_dtype, to_dtype, mode)
        dtype, bits = kinds[to_dtype]
        return torch.from_numpy(numbers.copy()).to(dtype).view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def is_close(x: torch.Tensor, y: torch.Tensor) -> None:
    assert x.dtype == y.dtype
    torch.testing.assert_close(x, y, **CLOSE[x.dtype], equal_nan=True)


def check_attention(query, cache, window, step, soft_cap=None, sinks=None) -> None:
    """The results are those of float64, up to the rounding of weights and results."""
    out = paged_attention(query, cache, window, step, soft_cap, sinks)
    expected = exact_attention(query, cache, window, step, soft_cap, sinks)
    assert out.dtype == query.dtype and expected.isfinite().all()
    away = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[query.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=away, atol=away)


def exact_attention(query, cache, window, step, soft_cap=None, sinks=None) -> torch.Tensor:
    left = window - 1 if window else -1
    return fake_gpu.paged_attention(
        query.double(), *cache.double(), step.block_tables, step.query_starts.diff().tolist(),
        step.lengths.tolist(), left, True, soft_cap, sinks)


# ------------------------------------------------------------------------- small operations


@DTYPES
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("rows, size", [(3, 64), (1, 1), (2, 896), (5, 257), (0, 64), (2, 5120)])
def test_rms_norm(dtype, rows, size, has_delta):
    """A row with NaN or infinity is alone."""
    x, delta = torch.randn(2, rows, size, dtype=dtype)
    x.mul_(30)
    if rows == 5:
        x[1, 5], x[2, 90] = torch.nan, torch.inf
    weight = torch.randn(size, dtype=dtype)
    before = x.clone()
    total, normed = rms_norm(x, weight, 1e-6, delta if has_delta else None)
    # of the rounded sum
    expected = x + delta if has_delta else x
    torch.testing.assert_close((total, x), (expected, before), rtol=0, atol=0, equal_nan=True)
    assert has_delta or total is x
    is_close(normed, plain.rms_norm(expected, weight, 1e-6))


def test_norm_of_other_strides():
    x, delta = torch.randn(2, 8, 3, 64).transpose(1, 2)[..., ::2]
    weight = torch.randn(32)
    total, normed = rms_norm(x, weight, 1e-6, delta)
    assert torch.equal(total, x + delta)
    is_close(normed, plain.rms_norm(x + delta, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("rows, size", [(3, 64), (1, 1), (2, 1300), (4, 77), (0, 64)])
def test_swiglu(dtype, rows, size):
    x = (torch.randn(rows, 2 * size) * 5).to(dtype)
    if size > 60:
        x[:2, :6] = torch.tensor([-1e4, -100.0, 100.0, 1e4, torch.nan, 1.0]).to(dtype)
    is_close(swiglu(x), plain.swiglu(x))


def heads_inputs(tokens: int, heads: int, head_dim: int,
                 dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(tokens, 1, head_dim // 2) * 6.3
    angles = torch.stack((turns.cos(), turns.sin()))
    return torch.randn(tokens, heads, head_dim, dtype=dtype), angles


@DTYPES
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no-norm"])
@pytest.mark.parametrize("tokens, queries, keys, head_dim", [
    (3, 4, 2, 64), (2, 7, 1, 80), (1, 16, 16, 128), (2, 32, 2, 256), (4, 3, 1, 6), (0, 4, 2, 64)])
def test_store_heads(dtype, has_norm, tokens, queries, keys, head_dim):
    qkv, angles = heads_inputs(tokens, queries + 2 * keys, head_dim, dtype)
    weights = torch.randn(2, head_dim, dtype=dtype) if has_norm else (None, None)
    cache = torch.randn(2, 5, 16, keys, head_dim, dtype=dtype)
    slots = torch.randperm(80)[:tokens]
    expected = cache.clone()
    query = store_heads(qkv, *weights, 1e-6, angles, cache, slots)
    wanted = fake_gpu.heads_kernel(qkv, *weights, 1e-6, angles, expected, None, slots)
    is_close(query, wanted)
    is_close(cache[0], expected[0])
    assert torch.equal(cache[1], expected[1])
    if not has_norm:
        # nothing is summed, so all bits are PyTorch's
        assert torch.equal(query, wanted) and torch.equal(cache, expected)


STORED = pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)


def eight_bits(stored, dtype, num_blocks, block_size, kv_heads, head_dim):
    """A cache of 8 bits, in which anything lies."""
    kv_cache = pytest.importorskip("nanoengine_extras.running.kv_cache")
    memory = torch.empty(2, num_blocks, block_size, kv_heads, head_dim + 4, dtype=torch.int8)
    return kv_cache.EightBits(memory.random_(-128, 127), stored, dtype)


@DTYPES
@STORED
@pytest.mark.parametrize("number", [0.0, 1e30, torch.nan, torch.inf])
@pytest.mark.parametrize("tokens, queries, keys, head_dim", [(3, 4, 2, 64), (2, 7, 1, 80)])
def test_store_heads_in_8_bits(dtype, stored, tokens, queries, keys, head_dim, number):
    """All bytes are those of plain PyTorch."""
    qkv, angles = heads_inputs(tokens, queries + 2 * keys, head_dim, dtype)
    qkv[1, queries:] *= 100
    qkv[1, queries, 5] = number
    qkv[0, -1] = 0
    slots = torch.randperm(40)[:tokens]
    cache = eight_bits(stored, dtype, 5, 8, keys, head_dim)
    expected = eight_bits(stored, dtype, 5, 8, keys, head_dim)
    expected.memory.copy_(cache.memory)
    query = store_heads(qkv, None, None, 0.0, angles, cache, slots)
    wanted = fake_gpu.heads_kernel(
        qkv, None, None, 0.0, angles, *fake_gpu.in_parts(expected), slots)
    assert torch.equal(query, wanted)
    if number != number or number == torch.inf:
        blocks = torch.arange(5)
        assert torch.equal(cache[:, blocks].isfinite().all(-1),
                           expected[:, blocks].isfinite().all(-1))
    else:
        assert torch.equal(cache.memory, expected.memory)


def test_what_kernels_refuse():
    cache, step = torch.zeros(2, 3, 2, 16, 64).transpose(2, 3), step_of([(0, 1)])
    check_refused("cache=.* contiguous", store_heads, torch.zeros(1, 6, 64), None, None, 0.0,
                  torch.zeros(2, 1, 32), cache, torch.zeros(1, dtype=torch.int64))
    check_refused("cache=.* contiguous", paged_attention, torch.zeros(1, 4, 64), cache, None, step)
    check_refused("head_dim=513 is not accepted: .* at most 512", paged_attention,
                  torch.zeros(1, 4, 513), torch.zeros(2, 1, 16, 2, 513), None, step)


# ----------------------------------------------------------------------- products of few rows


def linear_inputs(rows: int, size: int, columns: int, parts: str,
                  dtype: torch.dtype) -> dict[str, Any]:
    """parts: those of "bias", "norm", "delta" and "gated" that a product has"""
    num_weights = columns * (1 + ("gated" in parts))
    inputs = {"x": torch.randn(rows, size),
              "weight": torch.randn(num_weights, size) / size**0.5}
    more = {"bias": torch.randn(num_weights), "norm": 1 + 0.1 * torch.randn(size),
            "delta": torch.randn(rows, size)}
    inputs |= {name: tensor for name, tensor in more.items() if name in parts}
    return {"eps": 1e-6, "is_gated": "gated" in parts} | {
        name: tensor.to(dtype) for name, tensor in inputs.items()}


def check_few_rows(**inputs) -> None:
    total, found = few_rows_linear(**inputs)
    expected_total, expected = fake_gpu.few_rows_kernel(**inputs)
    assert torch.equal(total, expected_total) and found.dtype == expected.dtype
    rtol, atol = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1.6e-2, 4e-3),
                  torch.float16: (2e-3, 5e-4)}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    # sums in another order change a few last bits
    assert found.dtype == torch.float32 or (found != expected).sum() <= 3 + found.numel() / 25


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("size, columns, parts", [
    (1024, 4096, "norm delta"), (2048, 1024, ""), (1024, 3072, "norm delta gated"),
    (3072, 1024, "")], ids=["qkv", "o", "gate_up", "down"])
def test_few_rows_of_qwen3_06b(rows, size, columns, parts, monkeypatch):
    if DEVICE == "cpu":
        # fewer and larger programs, which the interpreter runs one by one
        monkeypatch.setattr(few_rows, "COLUMNS", 128)
    check_few_rows(**linear_inputs(rows, size, columns, parts, torch.bfloat16))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("size, columns, parts", [
    (64, 48, "bias"), (100, 33, "norm"), (1000, 26, "bias norm delta"), (513, 9, "bias gated"),
    (1, 1, "norm delta gated"), (1030, 7, "bias norm delta gated")])
def test_few_rows_of_odd_sizes(dtype, rows, size, columns, parts):
    check_few_rows(**linear_inputs(rows, size, columns, parts, dtype))


@pytest.mark.parametrize("parts", ["", "bias norm delta gated"])
def test_each_of_few_rows_is_alone(parts):
    """It has the same bits whatever other rows there are, and keeps its NaN."""
    inputs = linear_inputs(8, 1100, 30, parts, torch.bfloat16)

    def results(rows: slice) -> torch.Tensor:
        per_row = {name: inputs[name][rows] for name in ("x", "delta") if name in inputs}
        return torch.cat(few_rows_linear(**inputs | per_row), dim=1)

    expected = results(slice(None))
    for count in range(1, 8):
        assert torch.equal(results(slice(count)), expected[:count])
        assert torch.equal(results(slice(count, None)), expected[count:])
    inputs["x"][3, 1090] = torch.nan
    found = results(slice(None))
    others = torch.arange(8) != 3
    assert torch.equal(found[others], expected[others]) and found[3, 1100:].isnan().all()


def test_few_rows_of_other_shapes():
    inputs = linear_inputs(6, 64, 20, "norm delta", torch.bfloat16)
    expected = few_rows_linear(**inputs)
    inputs |= {name: inputs[name].view(3, 2, 64).mT.contiguous().mT for name in ("x", "delta")}
    found = few_rows_linear(**inputs)
    assert all(torch.equal(each, whole.view(3, 2, -1)) for each, whole in zip(found, expected))


@pytest.mark.parametrize("shape, dtype, columns, expected", [
    ((1, 64), torch.bfloat16, 20, True), ((2, 4, 64), torch.float16, 20, True),
    ((0, 64), torch.bfloat16, 20, False), ((9, 64), torch.bfloat16, 20, False),
    ((3, 3, 64), torch.bfloat16, 20, False), ((1, 64), torch.float32, 20, False),
    ((1, 64), torch.bfloat16, 2**19, True), ((1, 64), torch.bfloat16, 2**19 + 1, False)], ids=str)
def test_which_products_have_few_rows(shape, dtype, columns, expected):
    x = torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(columns, 64, dtype=dtype, device="meta")
    assert few_rows.is_for_few_rows(x, weight) == expected
    assert not few_rows.is_for_few_rows(x, weight.T.contiguous().T)
    assert not few_rows.is_for_few_rows(x, weight.double())
    assert not few_rows.is_for_few_rows(x, weight[:, :60].contiguous())


# -------------------------------------------------------------------------------- attention


def step_of(seqs: list[tuple[int, int]], block_size: int = 16, width: int = 0,
            longest_keys: int = 0) -> SimpleNamespace:
    """A step of sequences with (computed tokens, new tokens); block 0 belongs to none."""
    lengths = [computed + new for computed, new in seqs]
    widths = [-(-length // block_size) for length in lengths]
    blocks = (1 + torch.randperm(sum(widths))).tolist()
    tables = torch.zeros(len(seqs), max([width, *widths]), dtype=torch.int32)
    for row, count in enumerate(widths):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    news = [new for _, new in seqs]
    owners = torch.arange(len(seqs)).repeat_interleave(torch.tensor(news, dtype=torch.int64))
    positions = [position for computed, new in seqs for position in range(computed, computed + new)]
    return SimpleNamespace(
        query_starts=torch.tensor([0, *accumulate(news)], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32), block_tables=tables,
        positions=torch.tensor(positions, dtype=torch.int32), sequence_of_token=owners.int(),
        longest_query=max([0, *news]), longest_keys=max([longest_keys, *lengths]))


def inputs_of(step, heads: int, kv_heads: int, head_dim: int, block_size: int = 16,
              dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks = 1 + int(step.block_tables.max())
    query = torch.randn(len(step.positions), heads, head_dim, dtype=dtype)
    cache = torch.randn(2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)
    # what is free can hold anything: only keys that a query sees count
    is_used = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for table, length in zip(step.block_tables.long(), step.lengths):
        places = torch.arange(int(length))
        is_used[table[places // block_size] * block_size + places % block_size] = True
    cache.flatten(1, 2)[:, ~is_used] = torch.nan
    return query, cache


MIXED = [(40, 1), (0, 1), (15, 1), (5, 20), (0, 9), (33, 2)]
DECODES = [(40, 1), (0, 1), (15, 1), (16, 1), (63, 1), (64, 1)]


@DTYPES
@pytest.mark.parametrize("seqs", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size, window", [
    (4, 4, 64, 16, None), (6, 2, 80, 16, 7), (7, 1, 128, 32, None), (16, 1, 64, 48, 20),
    (8, 1, 256, 16, 33), (2, 1, 64, 256, 1), (2, 1, 264, 16, 30), (2, 1, 512, 16, 30)])
def test_attention(dtype, seqs, heads, kv_heads, head_dim, block_size, window):
    step = step_of(seqs, block_size)
    check_attention(*inputs_of(step, heads, kv_heads, head_dim, block_size, dtype), window, step)


@STORED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqs, cores", [(DECODES, 1), (MIXED, 1), ([(300, 3), (40, 1)], 24)],
                         ids=["decodes", "mixed", "splits"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size, window, soft_cap", [
    (4, 2, 64, 16, None, None), (6, 2, 80, 8, 7, 2.0)])
def test_attention_over_8_bits(dtype, stored, seqs, cores, heads, kv_heads, head_dim, block_size,
                               window, soft_cap, monkeypatch):
    monkeypatch.setattr(attention, "num_cores", lambda device: cores)
    step = step_of(seqs, block_size)
    query, exact = inputs_of(step, heads, kv_heads, head_dim, block_size)
    # values that float16 has no weights for, if they are multiplied by scales
    exact[1] *= 1e-3 if dtype == torch.float16 else 1
    cache = eight_bits(stored, torch.float32, *exact.shape[1:])
    cache[:, torch.arange(exact[0, :, :, 0, 0].numel())] = exact.flatten(1, 2)
    query = query.to(dtype)
    out = paged_attention(query, cache, window, step, soft_cap)
    read = cache[:, torch.arange(exact.shape[1])]
    expected = exact_attention(query, read, window, step, soft_cap).float()
    away = 4e-6 if dtype == torch.float32 else 1e-2
    assert expected.isfinite().all() and out.dtype == dtype
    scale = expected.abs().mean()
    torch.testing.assert_close(out.float() / scale, expected / scale, rtol=away, atol=3 * away)


@pytest.mark.parametrize("seqs, heads, kv_heads, dtype", [
    (MIXED, 4, 2, torch.float16), ([(20, 1), (3, 4)], 71, 1, torch.float32),
    # of any lengths, sequences have no more tiles than the grid
    *[([(3, new) for new in news], 3, 1, torch.float32)
      for news in ([1, 23, 1, 11, 5], [7] * 5, [70, 1])],
    # many, of which all but a few have no query in this step
    ([(5, 0)] * 100 + [(3, 1)] + [(5, 0)] * 160 + [(20, 1), (3, 4)], 16, 1, torch.float32)],
    ids=["float16", "more heads than rows in a tile", *"123", "many"])
def test_attention_of_other_steps(seqs, heads, kv_heads, dtype):
    step = step_of(seqs)
    check_attention(*inputs_of(step, heads, kv_heads, 64, dtype=dtype), None, step)


@DTYPES
@pytest.mark.parametrize("soft_cap, has_sinks", [
    (None, False), (2.0, False), (None, True), (0.7, True)])
@pytest.mark.parametrize("seqs, window, cores, longest_keys", [
    (DECODES, None, 1, 0), (MIXED, 7, 1, 0), ([(600, 1), (2, 1), (0, 1)], None, 24, 0),
    ([(300, 3)], 200, 24, 0), ([(40, 1)], None, 24, 40_960)],
    ids=["decodes", "mixed", "splits", "a window of splits", "width of a graph"])
def test_splits_soft_caps_and_sinks(dtype, seqs, window, cores, longest_keys, soft_cap, has_sinks,
                                    monkeypatch):
    monkeypatch.setattr(attention, "num_cores", lambda device: cores)
    grids = record_grids(monkeypatch)
    step = step_of(seqs, longest_keys=longest_keys)
    query, cache = inputs_of(step, 6, 2, 40, dtype=dtype)
    # without much weight, with as much as keys have, with nearly all
    sinks = torch.tensor([-20, -1, 0, 1, 4, 20.0]) if has_sinks else None
    check_attention(query, cache, window, step, soft_cap, sinks)
    (splits,) = {grid[2] for grid in grids}
    assert (splits > 1) == (cores > 1)


def record_grids(monkeypatch) -> list[tuple[int, ...]]:
    grids = []
    kernel = attention.attention_kernel
    recorder = type("Recorder", (), {
        "__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})
    monkeypatch.setattr(attention, "attention_kernel", recorder())
    return grids


def test_a_grid_is_fixed_by_the_shape_of_a_step(monkeypatch):
    """So a graph that was captured with some numbers can be replayed with others."""
    grids = record_grids(monkeypatch)
    for seqs in ([(0, 1)] * 5, DECODES[:5], [(200, 1), (0, 1)] * 2 + [(3, 1)]):
        step = step_of(seqs, width=16, longest_keys=256)
        paged_attention(*inputs_of(step, 4, 2, 64), None, step)
    assert len(grids) == 3 and len({*grids}) == 1


def test_padded_rows_read_block_0():
    step = step_of([(40, 1), (20, 1), (0, 1), (0, 1)], width=8)
    query, cache = inputs_of(step, 4, 2, 64)
    expected = gather_attention(query, cache, None, step)
    step.block_tables[2:] = 0
    cache[:, 0] = torch.randn(2, 16, 2, 64)
    out = paged_attention(query, cache, None, step)
    is_close(out[:2], expected[:2])
    assert torch.equal(out[2:], cache[1, 0, 0].repeat_interleave(2, dim=0).expand(2, 4, 64))


@pytest.mark.parametrize("which, number, cores", [
    (0, torch.nan, 1), (1, torch.nan, 24), (1, torch.inf, 1), (0, torch.inf, 24)])
def test_nan_stays_in_its_sequence(which, number, cores, monkeypatch):
    monkeypatch.setattr(attention, "num_cores", lambda device: cores)
    step = step_of([(280, 1), (260, 1), (0, 1), (33, 3)])
    query, cache = inputs_of(step, 4, 2, 64)
    expected = paged_attention(query, cache, None, step)
    place = step.block_tables[1, 3]
    cache[which, place, 2] = number
    out = paged_attention(query, cache, None, step)
    others = step.sequence_of_token != 1
    assert torch.equal(out[others], expected[others])
    assert not out[~others].isfinite().any()
    # and a window that has left it behind does not see it
    assert paged_attention(query, cache, 64, step).isfinite().all()


def test_attention_in_chunks():
    """A prompt at once, in chunks, or token by token: the same results but for rounding."""
    whole = step_of([(0, 20)])
    query, cache = inputs_of(whole, 4, 2, 64)
    expected = paged_attention(query, cache, 13, whole)
    for size in (1, 7, 19):
        for start in range(0, 20, size):
            new = min(size, 20 - start)
            step = step_of([(start, new)])
            step.block_tables = whole.block_tables
            rows = slice(start, start + new)
            is_close(paged_attention(query[rows], cache, 13, step), expected[rows])


# --------------------------------------------------------------------------------- sampling


# min_p, top_k, top_p
TRUNCATIONS = [
    (0, 0, 1.0), (0, 0, 0.95), (0, 0, 0.5), (0, 0, 1e-12), (0, 1, 1.0), (0, 20, 1.0), (0, 20, 0.9),
    (0.01, 0, 1.0), (0.05, 0, 0.8), (0.001, 50, 0.99), (0, 10**6, 0.999)]


def kinds_of_rows(size: int) -> torch.Tensor:
    """Scores of all kinds of rows, the largest one 0: (kinds, size)."""
    logits = torch.randn(6, size) * 3
    # many are equal
    logits[1:3] = logits[1:3].bfloat16().float()
    logits[2] /= 30
    logits[3] = 0
    logits[4, torch.rand(size) < 0.5] = -torch.inf
    logits[4, size // 2] = 0
    logits[5] = -torch.inf
    logits[5, size // 3] = 0
    return logits - logits.amax(dim=1, keepdim=True)


def truncations_of(rows: list[tuple]) -> SimpleNamespace:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T.contiguous()
    return SimpleNamespace(**dict(zip(("min_p", "top_k", "top_p"), columns)))


def check_truncated(scores: torch.Tensor, rows: list[tuple]) -> torch.Tensor:
    """Compares with plain PyTorch: the same tokens, and their weights; returns these."""
    given = truncations_of(rows), {"min_p", "top_k", "top_p"}, [int(top_k) for _, top_k, _ in rows]
    expected = sampler.truncate(scores.clone(), given[0])
    tokens, found = truncate(scores.clone(), *given)
    assert tokens.tolist() == [*range(scores.shape[1])]
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected)
    return found


@pytest.mark.parametrize("size", [1, 257, 5_000])
def test_truncate(size):
    scores = kinds_of_rows(size).repeat_interleave(len(TRUNCATIONS), dim=0)
    found = check_truncated(scores, TRUNCATIONS * 6).unflatten(0, (6, len(TRUNCATIONS)))
    assert (found[:3, 3] > 0).sum(dim=-1).eq(1).all(), "the likeliest one alone"


def test_truncate_a_vocabulary():
    rows = [(0, 0, 0.9), (0, 50, 0.99), (0, 0, 0.3), (0.1, 1000, 0.8)]
    found = check_truncated(kinds_of_rows(20_000)[:4], rows)
    assert ((found > 0).sum(dim=1) > 10).all()


def test_truncate_what_is_less_than_a_unit_of_the_sums():
    scores = torch.tensor([[-40.0, 0.0, -torch.inf, -42.0]]).repeat(2, 1)
    _, found = truncate(scores, truncations_of([(0, 3, 1.0), (0, 0, 1 - 1e-9)]), {"top_p"}, [3, 0])
    assert (found > 0).tolist() == [[True, True, False, True], [False, True, False, False]]


def test_truncate_with_nan():
    scores = kinds_of_rows(300)
    rows = [(0, 0, 0.9), (0, 20, 0.9), (0.01, 0, 1.0)] * 2
    expected = check_truncated(scores, rows)
    scores[1] = torch.nan
    scores[2] = -torch.tensor(torch.nan)
    scores[4] = torch.nan
    _, found = truncate(scores, truncations_of(rows), {"top_p"}, [0, 20, 0] * 2)
    assert torch.equal(found[[0, 3, 5]], expected[[0, 3, 5]])
    tokens = draw(found, torch.rand(6, dtype=torch.float64))
    assert ((tokens == -1) == torch.tensor([0, 1, 1, 0, 1, 0])).all()


def test_truncate_does_not_depend_on_the_order_of_sums():
    """These weights have rounding errors in sums of float64."""
    scores = -30 * torch.rand(2, 3000)
    given = truncations_of([(0, 0, 0.7), (0, 2000, 0.999_999)]), {"top_p"}, [0, 2000]
    expected = truncate(scores.clone(), *given)[1]
    order = torch.randperm(3000)
    assert torch.equal(truncate(scores[:, order], *given)[1], expected[:, order])
    # of other strides
    assert torch.equal(truncate(scores.T.contiguous().T, *given)[1], expected)


def weights_of(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return sampler.scale(logits.to(torch.float32, copy=True), temperature).exp_()


@pytest.mark.parametrize("is_logits", [False, True], ids=["weights", "logits"])
@DTYPES
@pytest.mark.parametrize("size", [151_936, 32_000, 4_097, 4_096, 320, 257, 1])
def test_a_draw_is_the_engine_s_own(size, dtype, is_logits):
    torch.manual_seed(size)
    rows = 18 if size > 100_000 else 40
    logits = (torch.randn(rows, size) * 3).to(dtype)
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[::10] = 0
    # the largest number below 1, and 1, are taken as 1 - 2**-52
    uniform[3::10], uniform[4::10] = 1 - 2.0**-53, 1
    logits[7, size // 2] = torch.nan
    logits[8, 0] = torch.inf
    logits[9] = -torch.inf
    logits[11, 3:] = -torch.inf
    logits[12, :-1] = -torch.inf
    # many of the largest, and many of each number
    logits[13] = 0
    logits[14] = logits[14].round()
    temperature = torch.linspace(2, 0.05, rows, dtype=torch.float64)
    # greedy rows
    temperature[15:17] = 0
    uniform[15:17] = 0
    weights = weights_of(logits, temperature)
    found = draw(logits, uniform, temperature) if is_logits else draw(weights, uniform)
    expected = sampler.draw(weights, uniform)
    # where the number is nearly 1, weights can be behind it that no sum of float64 notices
    at_end = (uniform > 0.9999) & (expected >= 0)
    assert found.dtype == torch.int64 and torch.equal(found[~at_end], expected[~at_end])
    for of_row, place in zip(weights[at_end].double(), found[at_end]):
        assert of_row[place] > 0 and of_row[place + 1:].sum() < 1e-15 * of_row.sum()
    assert (found[7:10] == -1).all() and found[12] == size - 1 and found.max() < size
    assert torch.equal(found[15:17], logits[15:17].argmax(dim=1))


@pytest.mark.parametrize("size", [640, 10_000])
def test_a_token_with_weight_is_drawn_whatever_the_number(size):
    weights = torch.zeros(2, 256)
    weights[1, 5] = torch.nan
    none = draw(weights, torch.rand(2, dtype=torch.float64))
    assert none.tolist() == [-1, -1], "without any weight"
    assert draw(weights[:0], torch.rand(0, dtype=torch.float64)).tolist() == []
    weights = torch.zeros(50, size)
    places = torch.arange(50) * (size // 50)
    weights[torch.arange(50), places] = torch.rand(50) + 1e-3
    for number in (0.0, 0.3, 1 - 2.0**-52, 1.0):
        uniform = torch.full((50,), number, dtype=torch.float64)
        assert torch.equal(draw(weights, uniform), places)
        # the temperature of greedy rows leaves no other token any weight
        logits = weights.where(weights > 0, -torch.inf)
        assert torch.equal(draw(logits, uniform, torch.zeros(50).double()), places)


def test_rows_of_a_draw_do_not_depend_on_each_other():
    logits = torch.randn(9, 5000).bfloat16()
    uniform, temperature = torch.rand(2, 9, dtype=torch.float64)
    together = draw(logits, uniform, temperature)
    for row in range(9):
        part = slice(row, row + 1)
        assert together[row] == draw(logits[part], uniform[part], temperature[part])
    # of other strides
    assert torch.equal(draw(logits.T.contiguous().T, uniform, temperature), together)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "warm": dict(temperature=1.4), "greedy": dict(temperature=0.0),
    "top_k": dict(top_k=9), "top_p": dict(top_p=0.8), "min_p": dict(min_p=0.05),
    "bias": dict(logit_bias={5: 3.0}), "greedy bias": dict(temperature=0.0, logit_bias={5: 30.0}),
    "penalty": dict(repetition_penalty=1.5)}


@pytest.mark.parametrize("kinds", [
    ["plain"] * 5, ["greedy"] * 3, ["top_p"] * 4, ["plain", "greedy"] * 3, [*KINDS] * 2,
    ["greedy", "bias", "top_k"]], ids=lambda kinds: f"{len(kinds)} {kinds[0]}")
@DTYPES
def test_rows_of_all_kinds_side_by_side(monkeypatch, kinds, dtype):
    """Each gets the token that it gets alone without the library; and one that is not finite gets
    none, and takes it from no other."""
    seqs = [Sequence(str(n), [1, 2, 3, 40 + n], 3, 99, SamplingParams(**KINDS[kind]), seed=n)
            for n, kind in enumerate(kinds)]
    for seq in seqs:
        constrain(seq, [], None, 500)
    logits = (torch.randn(len(seqs) + 2, 500) * 3).to(dtype)
    draws = Draws(*torch.tensor([draws_of(Row(0, seq, 4)) for seq in seqs]).double().T.contiguous())
    others = torch.zeros(1, dtype=torch.int32), FEATURES
    expected = torch.cat([
        sampler.sample(logits[n:n + 1], draws.of(slice(n, n + 1)), [seq], *others)
        for n, seq in enumerate(seqs)])
    monkeypatch.setattr(fast_sampling, "kernels", lambda device: nanoengine_extras.gpu)
    assert torch.equal(fast_sampling.sample(logits, draws, seqs, *others), expected)
    for broken in range(0, len(seqs), 2):
        logits[broken, 77] = torch.nan if broken % 4 else torch.inf
        expected[broken] = NO_TOKEN
    assert torch.equal(fast_sampling.sample(logits, draws, seqs, *others), expected)


# ---------------------------------------------------------------------------------- modules


def decoder(folder, dtype: torch.dtype, backend):
    config = transformers.AutoConfig.from_pretrained(folder)
    options = EngineConfig("m", device=DEVICE)
    model = load_model(options, config, Path(folder), dtype)
    shape = 12, 16, config.num_key_value_heads, config.head_dim
    caches = torch.zeros(config.num_hidden_layers, 2, *shape, dtype=dtype)
    model.bind(plain.rope_table(config, 256).to(DEVICE), caches, backend)
    return model, caches


def next_step(histories: list[list[int]], computed: list[int]) -> tuple[torch.Tensor, Any]:
    """A step that computes all tokens of some sequences that are not computed yet."""
    step = step_of([(done, len(ids) - done) for ids, done in zip(histories, computed)])
    # sequence i has the blocks 1 + 3 * i and so on
    width = step.block_tables.shape[1]
    step.block_tables = 1 + torch.arange(len(histories))[:, None] * 3 + torch.arange(width)
    step.block_tables = step.block_tables.int()
    owners, positions = step.sequence_of_token.long(), step.positions.long()
    step.slot_mapping = step.block_tables[owners, positions // 16] * 16 + positions % 16
    step.slot_mapping = step.slot_mapping.long()
    step.logits_indices = step.query_starts[1:] - 1
    new = [token for ids, done in zip(histories, computed) for token in ids[done:]]
    return torch.tensor(new, dtype=torch.int32), step


@torch.inference_mode()
def generate(model, prompts: list[list[int]], count: int) -> list[list[int]]:
    histories = [prompt.copy() for prompt in prompts]
    computed = [0] * len(prompts)
    for _ in range(count):
        token_ids, step = next_step(histories, computed)
        tokens = model.lm_head(model(token_ids, step)).argmax(dim=-1)
        computed = [len(ids) for ids in histories]
        for ids, token in zip(histories, tokens.tolist()):
            ids.append(token)
    return histories


def test_the_bundled_model_generates_the_same_tokens():
    folder = ROOT / "models" / "tiny-qwen3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode(text) for text in ("47 + 85 =", "9")]
    model, caches = decoder(folder, torch.float32, gather_attention)
    fast, fast_caches = decoder(folder, torch.float32, paged_attention)
    assert optimize(fast) is False
    expected = generate(model, prompts, 4)
    assert generate(fast, prompts, 4) == expected
    is_used = (caches != 0).flatten(4).any(dim=-1)
    assert torch.equal(is_used, (fast_caches != 0).flatten(4).any(dim=-1)) and is_used.any()
    torch.testing.assert_close(fast_caches, caches, rtol=1e-4, atol=1e-4)


FAMILIES = [("Qwen2", {}), ("Llama", {"attention_bias": True, "mlp_bias": True}),
            ("Mistral", {"sliding_window": 8}), ("Qwen3", {"attention_bias": True})]


@pytest.fixture(params=FAMILIES, ids=[family for family, _ in FAMILIES])
def models(request, make_model):
    """A random model of a family: plain, and optimized."""
    family, changes = request.param
    folder, _ = make_model(family, num_hidden_layers=2, **changes)
    model, _ = decoder(folder, torch.float32, gather_attention)
    fast, _ = decoder(folder, torch.float32, paged_attention)
    optimize(fast)
    return model, fast


PROMPTS = [[*range(20, 39)], [7, 8, 9]]


@torch.inference_mode()
def test_families(models):
    """They generate the same tokens, and take a step without any."""
    model, fast = models
    assert generate(fast, PROMPTS, 2) == generate(model, PROMPTS, 2)
    token_ids, step = next_step([], [])
    step.logits_indices = torch.zeros(0, dtype=torch.int32)
    step.block_tables = torch.zeros(0, 1, dtype=torch.int32)
    assert fast(token_ids, step).shape == (0, 64)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in fast.named_parameters()] == names
    assert all(isinstance(b, type(a)) for a, b in zip(model.modules(), fast.modules()))
    kinds = [type(module) for module in fast.modules()]
    optimize(fast)
    assert [type(module) for module in fast.modules()] == kinds, "a second time changes nothing"


# without norms of heads, and with them
TWO_FAMILIES = pytest.mark.parametrize("models", FAMILIES[::3], indirect=True, ids=lambda of: of[0])


@torch.inference_mode()
@TWO_FAMILIES
@pytest.mark.parametrize("rows", [[], [3, 18, 18, 21]], ids=str)
def test_rows_that_need_an_output(models, rows):
    token_ids, step = next_step(PROMPTS, [0, 0])
    step.logits_indices = torch.tensor(rows, dtype=torch.int32)
    expected, found = (model(token_ids, step) for model in models)
    assert expected.shape == (len(rows), 64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@TWO_FAMILIES
def test_hooks_run_and_change_what_they_change(models):
    """Ranks have hooks on products, offloaded weights on layers, and a user anywhere."""
    token_ids, step = next_step(PROMPTS, [0, 0])
    calls = []
    for model in models:
        names = []
        calls.append(names)
        for name, module in model.named_modules():
            # one kernel does the work of both head norms
            if name and not name.endswith(("q_norm", "k_norm", "lm_head")):
                module.register_forward_pre_hook(lambda *_, n=name, to=names: to.append(n))
        for layer in model.layers:
            layer.self_attn.o_proj.register_forward_hook(lambda m, inputs, out: out.mul_(2))
            layer.mlp.down_proj.register_forward_hook(lambda m, inputs, out: out.add_(0.5))
    expected, found = (model(token_ids, step) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert "layers.1.self_attn.o_proj" in calls[0] and calls[0] == calls[1] and [*calls[0]] != []


@torch.inference_mode()
def check_changed(folder, change, inputs=None, dtype=torch.float32, away=1e-5) -> tuple:
    """A changed model computes the same when it is optimized; returns it, and its results.

    inputs: of a step; by default of all of PROMPTS.
    """
    results = []
    for backend in (gather_attention, paged_attention):
        model, _ = decoder(folder, dtype, backend)
        change(model)
        if results:
            optimize(model)
        results.append(model(*inputs or next_step(PROMPTS, [0, 0])))
    torch.testing.assert_close(*results, rtol=away, atol=away)
    return model, results[1]


def test_a_norm_that_is_not_known_keeps_its_layers(make_model):
    """A norm of another kind cannot take a residual sum: each layer runs as it is."""
    def change(model) -> None:
        model.layers[1].input_layernorm = torch.nn.LayerNorm(64)

    check_changed(make_model("Qwen2", num_hidden_layers=2)[0], change)


@torch.inference_mode()
def test_bfloat16_of_the_bundled_model():
    folder = ROOT / "models" / "tiny-qwen3"
    token_ids, step = next_step(PROMPTS, [0, 0])
    model, caches = decoder(folder, torch.bfloat16, gather_attention)
    fast, fast_caches = decoder(folder, torch.bfloat16, paged_attention)
    optimize(fast)
    expected, found = model(token_ids, step), fast(token_ids, step)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    # the first layer's K and V come before any attention: all but the last bit is the same
    is_close(fast_caches[0], caches[0])


# products: whether a norm comes before, and SwiGLU behind
QKV, OTHER, GATE_UP = (True, False), (False, False), (True, True)


@torch.inference_mode()
@pytest.mark.parametrize("hooked, rows, expected", [
    ([], None, [QKV, OTHER, GATE_UP, OTHER] * 2),
    # forks that begin: more rows than tokens
    ([], [4] * 9, [QKV, OTHER, GATE_UP, OTHER, QKV]),
    ([], [], [QKV, OTHER, GATE_UP, OTHER, QKV]),
    # as those of ranks
    (["self_attn.o_proj", "mlp.down_proj"], None, [QKV, GATE_UP] * 2),
    (["self_attn"], None, [OTHER, OTHER, GATE_UP, OTHER] * 2),
    (["input_layernorm", "mlp"], None, [OTHER] * 8),
    (["self_attn.qkv_proj", "mlp.gate_up_proj"], None, [OTHER] * 4)], ids=str)
def test_few_rows_of_a_model(make_model, monkeypatch, hooked, rows, expected):
    """A step of few rows, with hooks on some modules of each layer."""
    folder, _ = make_model("Qwen3", num_hidden_layers=2, attention_bias=True)
    token_ids, step = next_step([[7, 8, 9], [20, 21]], [0, 0])
    if rows is not None:
        step.logits_indices = torch.tensor(rows, dtype=torch.int32)
    products, calls = [], []

    def noted(*arguments: Any, **options: Any) -> tuple:
        names = ("x", "weight", "bias", "norm", "eps", "delta", "is_gated")
        given = dict(zip(names, arguments)) | options
        products.append(("norm" in given, "is_gated" in given))
        return few_rows_linear(*arguments, **options)

    def add_hooks(model: Any) -> None:
        names: list[str] = []
        calls.append(names)
        for layer in model.layers:
            for name in hooked:
                layer.get_submodule(name).register_forward_hook(
                    lambda *_, name=name: names.append(name))

    monkeypatch.setattr(modules, "few_rows_linear", noted)
    check_changed(folder, add_hooks, (token_ids, step), torch.bfloat16, 0.05)
    assert products == expected and calls[0] == calls[1] == hooked * 2


# ------------------------------------------------------------- what keeps its own forward


def small_mlp(kind=plain.MLP):
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    return kind(config).requires_grad_(False)


class Gelu(plain.MLP):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(torch.nn.functional.gelu(gate) * up)


class Again(plain.MLP):
    def forward(self, x):
        return super().forward(x)


class Centered(torch.nn.RMSNorm):
    """1 + w, as in Gemma."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def patched(module):
    module.forward = lambda x: 3 * x
    return module


@pytest.mark.parametrize("make", [
    lambda: small_mlp(Gelu), lambda: small_mlp(Again), lambda: patched(small_mlp()),
    lambda: Centered(64, 1e-6), lambda: torch.nn.LayerNorm(64), lambda: torch.nn.RMSNorm(64),
    lambda: patched(torch.nn.RMSNorm(64, 1e-6)),
    lambda: torch.nn.RMSNorm((2, 64), 1e-6), lambda: torch.nn.RMSNorm(64, 1e-6, False)])
def test_other_mlps_and_norms_keep_their_forward(make):
    module = make().requires_grad_(False)
    kind, x = type(module), torch.randn(3, 2, 64)
    expected = module(x)
    optimize(module)
    assert type(module) is kind and torch.equal(module(x), expected)


def test_a_function_of_the_model_s_file_can_be_another(monkeypatch):
    monkeypatch.setattr(plain, "swiglu", lambda x: x[..., :96])
    mlp, x = small_mlp(), torch.randn(3, 64)
    expected = mlp(x)
    optimize(mlp)
    assert type(mlp) is plain.MLP and torch.equal(mlp(x), expected)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 0, 64)])
def test_known_mlps_and_norms_take_any_shape(shape):
    x = torch.randn(*shape)
    for module in (small_mlp(), torch.nn.RMSNorm(64, 1e-6).requires_grad_(False)):
        expected = module(x)
        optimize(module)
        assert type(module).__mro__[1].__module__ == "nanoengine_extras.gpu.modules"
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_gradients_and_other_dtypes_are_pytorch_s_own():
    for make in (small_mlp, lambda: torch.nn.RMSNorm(64, 1e-6).requires_grad_(False)):
        gradients = []
        for is_fast in (False, True):
            torch.manual_seed(1)
            module = make()
            if is_fast:
                optimize(module)
            x = torch.linspace(-1, 1, 64).requires_grad_()
            module(x).square().sum().backward()
            gradients.append(x.grad)
            double = module.double()(torch.linspace(-1, 1, 64).double())
            gradients.append(double)
        assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])


@pytest.mark.parametrize("norms", [
    (torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)), (Centered(32, 1e-6), Centered(32, 1e-6)),
    (torch.nn.RMSNorm(32, 1e-6), torch.nn.RMSNorm(32, 1e-5)),
    (torch.nn.RMSNorm(32, 1e-6), torch.nn.Identity())])
def test_attention_with_other_norms_of_heads_keeps_its_forward(make_model, norms):
    def change(model) -> None:
        for layer in model.layers:
            layer.self_attn.q_norm, layer.self_attn.k_norm = (each.to(DEVICE) for each in norms)

    model, _ = check_changed(make_model("Qwen3", num_hidden_layers=2)[0], change)
    assert type(model.layers[0].self_attn) is plain.Attention


class Weaker(plain.DecoderLayer):
    def forward(self, x, angles, step, rows):
        x = x[rows] + 0.3 * self.self_attn(self.input_layernorm(x), angles, step, rows)
        return x + 0.3 * self.mlp(self.post_attention_layernorm(x))


def test_layers_of_another_kind_keep_their_forward(make_model, monkeypatch):
    folder, _ = make_model("Qwen2", num_hidden_layers=2)
    _, usual = check_changed(folder, lambda model: None)
    monkeypatch.setattr(plain, "DecoderLayer", Weaker)
    _, found = check_changed(folder, lambda model: None)
    assert not torch.allclose(usual, found, rtol=1e-2)
