"""The kernel of paged attention against the same computation in plain PyTorch."""

import functools
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from conftest import slow

from cpu.reference import (
    BF16, F32, NO_NORMS, attend_by_kernel, attend_in_tiles, cpu_cache, make_step, no_turn,
    norm_and_rotate, plain_attention, random_cache, random_norms)
from nanoengine_extras.cpu import attention as kernels
from nanoengine_extras.cpu import compiling

# of processes of their own: the packages, and the tests
PATHS = f"{Path(__file__).parents[2]}{os.pathsep}{Path(__file__).parents[1]}"
# Each is a kernel to compile, which takes seconds: so most have one precision, not both, and the
# tests below have shapes of these, or of the small models: with a soft cap, the shape of Gemma 2.
SHAPES = [(2, 1, 16, 16, None, F32), (2, 2, 32, 16, None, F32), (2, 2, 32, 16, None, BF16),
          (1, 2, 64, 32, 7, BF16), (2, 4, 80, 5, None, BF16)]
CAP, SINKS = dict(soft_cap=5.0), dict(sinks=torch.tensor([3.0, -2.0, 0.5, -4.0]))
WITH_OPTIONS = [(2, 2, 16, 16, window, dtype, options) for window in (None, 40)
                for dtype, options in ((BF16, CAP), (BF16, SINKS), (F32, CAP | SINKS))]
# shapes that no test of a small model has
RARE = [slow(*shape, {}) for shape in (
    (1, 8, 128, 32, 300, BF16), (2, 2, 32, 3, 40, F32),
    (1, 4, 256, 32, None, F32), (1, 24, 64, 32, None, F32), (1, 24, 256, 32, None, F32),
    (1, 8, 512, 32, None, BF16), (2, 1, 512, 16, 40, F32), (3, 3, 24, 1, 40, F32),
    (3, 3, 24, 16, 40, BF16), (2, 1, 32, 16, None, F32), (1, 1, 64, 128, 7, BF16),
    (1, 2, 64, 128, 7, BF16))]


@pytest.mark.parametrize("num_tokens, has_norms", [
    ([1, 1, 9, 1, 40, 2], True), ([1] * 6, False), ([1] * 6, True)])
@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window, dtype, options", [
    *((*shape, {}) for shape in SHAPES), *WITH_OPTIONS, *RARE])
def test_against_plain_torch(kv_heads, group_size, head_dim, block_size, window, dtype, options,
                             num_tokens, has_norms):
    torch.manual_seed(0)
    tolerance = 3e-6 if dtype == F32 else 2e-2
    step = make_step(num_tokens, [0, 700, 0, 15, 260, 31], block_size)
    cache = random_cache(kv_heads, head_dim, block_size, step, dtype)
    heads, before = kv_heads * group_size, cache.clone()
    qkv = torch.randn(sum(num_tokens), heads + 2 * kv_heads, head_dim).to(dtype)
    # without norms, scores from -24 to 24: most are far above the cap
    qkv[:, :heads] *= 6 if options else 1
    angles = torch.randn(sum(num_tokens), head_dim // 2)
    angles = torch.stack((angles.cos(), angles.sin()))
    norms = random_norms(head_dim, dtype) if has_norms else NO_NORMS
    out = attend_in_tiles(qkv.clone(), norms, angles, cache, window, step, **options)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    query, key = (norm_and_rotate(x, norm, angles) for x, norm in zip((query, key), norms))
    written = cache.flatten(1, 2)[:, step.slot_mapping]
    torch.testing.assert_close(written[0].double(), key, atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], value)
    before.flatten(1, 2)[:, step.slot_mapping] = written
    assert torch.equal(cache, before), "and nothing else was written"
    expected = plain_attention(query, cache, window, step, **options)
    assert out.dtype == dtype and out.shape == query.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    if options:
        assert (expected - plain_attention(query, cache, window, step)).abs().max() > 0.1


def compare(qkv, cache, window, step, atol, rtol, **options):
    """Without norms and angles. Returns what the kernel and plain PyTorch compute."""
    _, heads, head_dim = qkv.shape
    out = attend_in_tiles(
        qkv.clone(), NO_NORMS, no_turn(len(qkv), head_dim), cache, window, step, **options)
    query = qkv[:, :heads - 2 * cache.shape[3]]
    expected = plain_attention(query, cache, window, step, **options)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)
    return out, expected


@pytest.mark.parametrize("dtype, tolerance", [(F32, 1e-4), (BF16, 2e-2)])
@pytest.mark.parametrize("growth", [-200, 4, 20, 200])
def test_scores_that_grow_from_span_to_span(growth, dtype, tolerance):
    """By 2^growth over 600 keys: maxima are raised never, once or twice, and in each span."""
    torch.manual_seed(0)
    step = make_step([1, 40], [599, 560], 16)
    cache = random_cache(1, 32, 16, step, dtype)
    query = torch.ones(32) / math.log2(math.e) / 32 ** 0.5
    for table in step.block_tables.long():
        ramp = torch.arange(len(table) * 16) * growth / 600
        cache[0, table] = ramp.view(-1, 16, 1, 1).expand(-1, -1, 1, 32).to(dtype)
    qkv = torch.stack((*query.repeat(2, 41, 1), *torch.randn(2, 41, 32)), dim=1).to(dtype)
    compare(qkv, cache, None, step, tolerance, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [
    slow(F32, 1e-5), (BF16, 2e-2)])
def test_a_sink_can_be_any_number(dtype, tolerance):
    """It takes all of the weight, or nothing; and a window hides all keys of the first spans."""
    torch.manual_seed(0)
    sinks = torch.tensor([-torch.inf, -1e30, -100, 0, 20, 80, 200, 1e30])
    step = make_step([1, 40], [599, 560], 16)
    cache = random_cache(4, 16, 16, step, dtype)
    qkv = torch.randn(41, 16, 16).to(dtype)
    for window in (None, 5):
        out, expected = compare(qkv, cache, window, step, tolerance, tolerance, sinks=sinks)
        assert out[:, 6:].count_nonzero() == 0 and expected[:, 0].abs().min() > 0


@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_small_and_huge_scores_with_a_soft_cap(scale):
    torch.manual_seed(0)
    step = make_step([1, 7], [299, 100], 16)
    cache = random_cache(1, 16, 16, step, F32)
    qkv = torch.randn(8, 4, 16) * scale
    compare(qkv, cache, None, step, 1e-5 * max(1, scale), 1e-5, soft_cap=5.0)


def test_a_soft_cap_hides_no_nan():
    step = make_step([3], [0], 16)
    cache = random_cache(1, 16, 16, step, F32)
    qkv = torch.randn(3, 4, 16)
    qkv[1, 0] = torch.nan
    out = attend_in_tiles(qkv, NO_NORMS, no_turn(3, 16), cache, None, step, soft_cap=5.0)
    assert out[1, 0].isnan().all() and out[1, 1].isfinite().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("block_size, head_dim, group_size", [
    (32, 64, 2), slow(32, 128, 8)])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(block_size, head_dim, group_size):
    torch.manual_seed(0)
    step = make_step([30, 1, 50], [0, 99, 270], block_size)
    cache = random_cache(2, head_dim, block_size, step, torch.bfloat16)
    qkv = torch.randn(81, 2 * group_size + 4, head_dim).bfloat16()
    angles = torch.rand(2, 81, head_dim // 2)
    norms = random_norms(head_dim, torch.bfloat16)
    whole = attend_in_tiles(qkv.clone(), norms, angles, cache, None, step)
    for rows in (slice(0, 1), slice(7, 12), slice(30, 31), slice(60, 81)):
        part = step.part(rows)
        turns = angles[:, rows].contiguous()
        alone = attend_in_tiles(qkv[rows].clone(), norms, turns, cache, None, part)
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("block_size, head_dim, group_size, dtype", [
    (5, 80, 4, BF16), slow(3, 32, 2, F32), (16, 32, 2, F32), (16, 32, 2, BF16), (32, 64, 2, F32),
    (32, 64, 2, BF16)])
def test_what_is_unwritten_and_what_others_wrote_may_be_nan(
        block_size, head_dim, group_size, dtype):
    """The cache is memory that nothing has written yet, or that has been used before."""
    torch.manual_seed(0)
    lengths, heads = [1, 2, 17, 33], 2
    qkv = torch.randn(53, (group_size + 2) * heads, head_dim).to(dtype)
    norms = random_norms(head_dim, dtype)
    # K and V of the second sequence are NaN
    qkv[1, group_size * heads] = qkv[2, (group_size + 1) * heads] = torch.nan
    outs = []
    for rest in (torch.nan, 0.0):
        step = make_step(lengths, [0] * 4, block_size)
        tiled = cpu_cache(heads, head_dim, block_size, step, dtype).fill_(rest)
        angles = no_turn(53, head_dim)
        outs.append(attend_by_kernel(qkv.clone(), norms, angles, tiled, None, step))
        assert outs[-1][1:3].isnan().any(dim=0).any()
        finite = torch.ones(53, dtype=torch.bool)
        finite[1:3] = False
        assert outs[-1][finite].isfinite().all()
    assert torch.equal(outs[0][finite], outs[1][finite])


PLAIN, CAPPED = {}, dict(soft_cap=5.0, sinks=torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [1, 3, 16, 37])
@pytest.mark.parametrize("block_size, head_dim, group_size, options", [
    (16, 32, 2, PLAIN), (32, 64, 2, PLAIN), (16, 16, 2, CAPPED),
    slow(32, 64, 2, CAPPED)])
def test_same_bits_however_a_prompt_is_chunked(
        block_size, head_dim, group_size, options, chunk, dtype):
    torch.manual_seed(0)
    total = 150
    qkv = torch.randn(total, 2 * group_size + 4, head_dim).to(dtype)
    norms = random_norms(head_dim, dtype)
    if "sinks" in options:
        options = options | dict(sinks=options["sinks"].repeat(group_size))
    angles = torch.rand(2, total, head_dim // 2)
    whole = make_step([total], [0], block_size)

    def run(step, tiled, rows):
        turns = angles[:, rows].contiguous()
        return attend_by_kernel(qkv[rows].clone(), norms, turns, tiled, 40, step, **options)

    unwritten = cpu_cache(2, head_dim, block_size, whole, dtype).fill_(torch.nan)
    expected = run(whole, unwritten.clone(), slice(0, total))
    tiled, found = unwritten.clone(), []
    for first in range(0, total, chunk):
        rows = slice(first, min(first + chunk, total))
        step = whole.part(rows)
        found.append(run(step, tiled, rows))
    assert torch.equal(torch.cat(found), expected) and expected.isfinite().all()


def largest_error(dtype):
    """Of a step against plain torch, also called in processes of their own."""
    torch.manual_seed(0)
    step = make_step([20, 1, 3], [0, 150, 37], 32)
    plain = random_cache(2, 64, 32, step, dtype)
    qkv = torch.randn(24, 8, 64).to(dtype)
    out = attend_in_tiles(qkv, NO_NORMS, no_turn(24, 64), plain, None, step)
    return (out.double() - plain_attention(qkv[:, :4], plain, None, step)).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("name, features", [("haswell", "+avx,+avx2,+fma"), ("generic", "")])
def test_other_cpus(name, features, tmp_path):
    """The instructions follow the CPU that numba compiles for, not the one it runs on."""
    script = """if True:
        import torch
        from nanoengine_extras.cpu.tiles import HAS_TILES
        from nanoengine_extras.cpu.vectors import has
        from cpu import test_paged_attention, test_products
        print(has("avx512f"), has("avx512bf16"), HAS_TILES)
        for tests in (test_paged_attention, test_products):
            print(tests.largest_error(torch.float32), tests.largest_error(torch.bfloat16))"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": PATHS,
                   "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    printed = subprocess.check_output(
        [sys.executable, "-c", script], env=environment, text=True).split()
    assert printed[:3] == ["False"] * 3
    errors = [*map(float, printed[3:])]
    assert max(errors[::2]) < 3e-6 and max(errors[1::2]) < 2e-2


def bits_of_a_large_step():
    """A hash of what all kernels compute, also called in a process of its own."""
    torch.manual_seed(0)
    step = make_step([200] * 4, [0] * 4, 128)
    cache = random_cache(8, 64, 128, step, torch.bfloat16)
    norms, angles = random_norms(64, torch.bfloat16), torch.rand(2, 800, 32)
    qkv = torch.randn(800, 32, 64).bfloat16()
    out = attend_in_tiles(qkv, norms, angles, cache, None, step)
    results = torch.cat((qkv[:, :16], out))
    return hashlib.sha1(results.view(torch.int16).numpy()).hexdigest()


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_gets_the_same_bits(tmp_path, monkeypatch):
    """In the process in which it was compiled, numba would not take the one on disk."""
    # no kernel is known from another test
    monkeypatch.setattr(kernels, "make_kernel", functools.cache(kernels.make_kernel.__wrapped__))
    compiling.run_calls.cache_clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = bits_of_a_large_step()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert [file.suffix for file in files].count(".nbc") == 2
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": PATHS}
    loaded = subprocess.check_output(
        [sys.executable, "-c", "from cpu import test_paged_attention as test\n"
         "print(test.bits_of_a_large_step())"], env=environment, text=True)
    assert loaded.strip() == compiled
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
