"""Every attention backend against the same computation in plain torch."""

import functools
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, Qwen3Config

import nanoengine_extensions.gpu  # noqa: F401  adds its backends
from nanoengine import LLM, SamplingParams
from nanoengine.attention import BACKENDS, Backend, choose_backend, gather_attention, make_caches
from nanoengine.model import Attention, RMSNorm
from nanoengine.step_inputs import StepInputs, to_buffer
from nanoengine_cpu import attention as kernels
from nanoengine_cpu import rms_norm, swiglu
from nanoengine_cpu import rows as row_kernels
from nanoengine_cpu.attention import LANES
from nanoengine_cpu.functions import paged_attention as cpu_attention
from nanoengine_cpu.modules import PagedAttention


def plain_attention(query, cache, window, step):
    """Gathers every token's keys and values from the cache; softmax in float64.

    Arguments and result are those of `flash_attention`, but for the float64.
    """
    rows = []
    for token, position in enumerate(step.positions.tolist()):
        table = step.block_tables[step.sequence_of_token[token]]
        first = 0 if window is None else max(0, position + 1 - window)
        blocks = cache[:, table.long()].flatten(1, 2).double()
        keys, values = blocks[:, first:position + 1].transpose(1, 2)
        group_size = query.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(group_size, 0) for part in (keys, values))
        scores = torch.einsum("hd,hnd->hn", query[token].double(), keys) / math.sqrt(keys.shape[-1])
        rows.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def norm_and_rotate(x, norm, angles):
    """What is done with queries and keys, head by head, in float64."""
    x, (cos, sin) = x.double(), angles.double()[:, :, None]
    if isinstance(norm, RMSNorm):
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


NO_NORMS = nn.Identity(), nn.Identity()


def no_turn(num_tokens, head_dim):
    """Angles of 0."""
    return torch.tensor([1.0, 0.0])[:, None, None].repeat(1, num_tokens, head_dim // 2)


def make_step(num_tokens, computed, block_size):
    """A step over sequences that lie scattered in a cache, `num_tokens` behind `computed` each."""
    lengths = torch.tensor(num_tokens) + torch.tensor(computed)
    width = -(-int(lengths.max()) // block_size)
    tables = (torch.randperm(len(lengths) * width).view(len(lengths), width) + 1).int()
    sequence_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(num_tokens))
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(computed, num_tokens)])
    return StepInputs(
        slot_mapping=tables[sequence_of_token, positions // block_size].long() * block_size
        + positions % block_size,
        positions=positions.int(), sequence_of_token=sequence_of_token.int(),
        query_starts=F.pad(torch.tensor(num_tokens).cumsum(0), (1, 0)).int(),
        key_starts=F.pad(lengths.cumsum(0), (1, 0)).int(),
        lengths=lengths.int(), block_tables=tables,
        longest_query=max(num_tokens), longest_keys=int(lengths.max()))


def make_cache(num_heads, head_dim, block_size, step, dtype, backend):
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=num_heads, head_dim=head_dim)
    num_blocks = int(step.block_tables.max()) + 1
    return make_caches(config, num_blocks, block_size, dtype, "cpu", backend)[0]


def random_cache(num_heads, head_dim, block_size, step, dtype, scale=1.0):
    """In the plain layout, which all backends but numba have."""
    cache = make_cache(num_heads, head_dim, block_size, step, dtype, "gather")
    assert cache.shape == (2, len(cache[0]), block_size, num_heads, head_dim)
    return cache.copy_(torch.randn(cache.shape) * scale)


def places_in_tiles(cache, head_dim):
    """Views of numba's layout, for keys (blocks, kv_heads, tiles, 16, words, numbers of a word) and
    for values (blocks, kv_heads, tiles, words of 16 keys, numbers of a word, width)."""
    numbers = 2 if cache.dtype == torch.bfloat16 else 1
    width, tiles = -(-head_dim // LANES) * LANES, -(-cache.shape[2] // LANES)
    memory = cache.transpose(2, 3).flatten(3)[..., :tiles * LANES * width]
    keys = memory[0].unflatten(-1, (tiles, width // numbers, LANES, numbers)).transpose(-3, -2)
    values = memory[1].unflatten(-1, (tiles, LANES // numbers, width, numbers)).transpose(-2, -1)
    return keys, values


def to_tiles(plain, tiled):
    """Writes the numbers of a plain cache to one in numba's layout; the padding is NaN."""
    block_size, head_dim = plain.shape[2], plain.shape[4]
    tiled.fill_(torch.nan)
    keys, values = places_in_tiles(tiled, head_dim)
    block_padding, width_padding = -block_size % LANES, -head_dim % LANES
    plain = F.pad(plain.transpose(2, 3), (0, width_padding, 0, block_padding), value=torch.nan)
    if block_size % 2:
        plain[1, :, :, block_size:block_size + 1] = 0
    plain = plain.unflatten(3, (-1, LANES))
    keys.copy_(plain[0].unflatten(-1, keys.shape[-2:]))
    values.copy_(plain[1].unflatten(-2, (-1, values.shape[-2])))
    return tiled


def from_tiles(tiled, head_dim):
    """The numbers of a cache in numba's layout, in the plain one."""
    keys, values = places_in_tiles(tiled, head_dim)
    both = torch.stack((keys.flatten(-2), values.flatten(-3, -2)))
    return both.flatten(3, 4)[:, :, :, :tiled.shape[2], :head_dim].transpose(2, 3)


def attend_by_kernel(qkv, norms, *rest):
    """`cpu_attention` with the norms as modules."""
    ones = torch.ones(qkv.shape[2])
    weights = torch.stack([getattr(norm, "weight", ones).float() for norm in norms])
    angles, cache, window, step = rest
    return cpu_attention(qkv, weights, getattr(norms[0], "eps", -1.0), angles, cache, window,
                         step.slot_mapping, step.block_tables, step.sequence_of_token,
                         step.positions)


def attend_in_tiles(qkv, norms, angles, plain, window, step):
    """`cpu_attention` for a plain cache, to which it writes."""
    tiled = make_cache(plain.shape[3], qkv.shape[2], plain.shape[2], step, plain.dtype, "numba")
    out = attend_by_kernel(qkv, norms, angles, to_tiles(plain, tiled), window, step)
    plain[:] = from_tiles(tiled, qkv.shape[2])
    return out


def random_norms(head_dim, dtype):
    norms = [RMSNorm(head_dim, 1e-3).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
        norm.to(dtype)
    return norms


def make_layer(kv_heads, group_size, head_dim, window, norms):
    """A layer of a decoder whose hidden states are queries, keys and values already."""
    config_class = LlamaConfig if norms is NO_NORMS else Qwen3Config
    layer = Attention(config_class(
        hidden_size=kv_heads * group_size, num_attention_heads=kv_heads * group_size,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=1), 0)
    assert isinstance(layer.q_norm, nn.Identity) == (norms is NO_NORMS)
    layer.qkv_proj = layer.o_proj = nn.Identity()
    layer.q_norm, layer.k_norm = norms
    layer.window = window
    return layer


F32, BF16 = torch.float32, torch.bfloat16
# For numba each is a kernel to compile, which takes seconds; most are those of other tests.
SHAPES = [(2, 1, 32, 16, None), (1, 2, 64, 128, 7), (2, 4, 80, 5, None), (1, 8, 128, 32, 300),
          (3, 3, 24, 1, 40), (1, 4, 256, 32, None), (1, 24, 64, 32, None)]


@pytest.mark.parametrize("num_tokens, has_norms", [
    ([1, 1, 9, 1, 40, 2], True), ([1] * 6, False), ([1] * 6, True)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_plain_torch(backend, kv_heads, group_size, head_dim, block_size, window, dtype,
                             num_tokens, has_norms, stand_ins):
    torch.manual_seed(0)
    tolerance = 3e-6 if dtype == F32 else 2e-2
    step = make_step(num_tokens, [0, 700, 0, 15, 260, 31], block_size)
    cache = random_cache(kv_heads, head_dim, block_size, step, dtype)
    heads, before = kv_heads * group_size, cache.clone()
    qkv = torch.randn(sum(num_tokens), heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.randn(sum(num_tokens), head_dim // 2)
    angles = torch.stack((angles.cos(), angles.sin()))
    norms = random_norms(head_dim, dtype) if has_norms else NO_NORMS
    layer = make_layer(kv_heads, group_size, head_dim, window, norms)
    if backend == "numba":
        tiled = make_cache(kv_heads, head_dim, block_size, step, dtype, backend)
        layer.__class__ = PagedAttention
        layer.cache = to_tiles(cache, tiled)
        out = layer(qkv.clone().flatten(1), angles, step)
        cache = from_tiles(tiled, head_dim)
    else:
        layer.cache, layer.backend = cache, BACKENDS[backend].attend
        out = layer(qkv.clone().flatten(1), angles[:, :, None], step, slice(None))
    out = out.unflatten(1, (heads, head_dim))
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    query, key = (norm_and_rotate(x, norm, angles) for x, norm in zip((query, key), norms))
    written = cache.flatten(1, 2)[:, step.slot_mapping]
    torch.testing.assert_close(written[0].double(), key, atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], value)
    before.flatten(1, 2)[:, step.slot_mapping] = written
    assert torch.equal(cache, before), "and nothing else was written"
    expected = plain_attention(query, cache, window, step)
    assert out.dtype == dtype and out.shape == query.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    decodes = "flash_attn_with_kvcache" if max(num_tokens) == 1 else "flash_attn_varlen_func"
    called = {"flash-attn": [decodes], "varlen": ["varlen_attn"]}
    assert stand_ins == called.get(backend, [])


@pytest.fixture
def stand_ins(monkeypatch):
    """The GPU kernels' signatures (flash-attn 2.8.3, torch 2.13), computed in plain torch."""
    calls = []

    def paged(query, cache, starts, lengths, tables, window):
        """query: (T, heads, head_dim); causal, aligned to the bottom right."""
        assert all(t.dtype == torch.int32 for t in (starts, lengths, tables))
        counts = starts.diff()
        sequence_of_token = torch.arange(len(counts)).repeat_interleave(counts)
        ends = (lengths - starts[1:])[sequence_of_token]
        step = SimpleNamespace(positions=torch.arange(len(query)) + ends, block_tables=tables,
                               sequence_of_token=sequence_of_token)
        assert window[1] == 0 or window == (-1, -1)
        window = None if window[0] < 0 else window[0] + 1
        return plain_attention(query, torch.stack(cache), window, step).to(query.dtype)

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
                                rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                cache_leftpad=None, block_table=None, softmax_scale=None,
                                causal=False, window_size=(-1, -1)):
        calls.append("flash_attn_with_kvcache")
        assert q.ndim == 4 and q.shape[1] == 1 and causal
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        out = paged(q[:, 0], (k_cache, v_cache), starts, cache_seqlens, block_table, window_size)
        return out[:, None]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1), block_table=None):
        calls.append("flash_attn_varlen_func")
        lengths = cu_seqlens_k.diff()
        assert causal and cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == lengths.max()
        return paged(q, (k, v), cu_seqlens_q, lengths, block_table, window_size)

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                    scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None,
                    block_table=None, num_splits=None):
        calls.append("varlen_attn")
        assert enable_gqa and torch.equal(cu_seq_k.diff(), seqused_k)
        assert window_size[1] == 0 or max_q == 1, "causal is (…, 0) here"
        assert max_q == cu_seq_q.diff().max() and max_k == seqused_k.max()
        return paged(query, (key, value), cu_seq_q, seqused_k, block_table, window_size)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(
        __spec__=True, flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen",
                        SimpleNamespace(varlen_attn=varlen_attn))
    return calls


@pytest.mark.parametrize("num_sequences, num_tokens, num_rows, width", [
    (1, 1, 1, 1), (3, 7, 2, 3), (2, 5, 0, 4), (5, 5, 5, 1), (1, 3, 3, 2)])
def test_what_is_packed_is_unpacked(num_sequences, num_tokens, num_rows, width):
    generator = np.random.default_rng(0)
    arrays = {"draws": generator.random((num_rows, 5)),
              "slot_mapping": generator.integers(-2**63, 2**63 - 1, num_tokens)}
    shapes = dict(token_ids=num_tokens, positions=num_tokens, sequence_of_token=num_tokens,
                  query_starts=num_sequences + 1, key_starts=num_sequences + 1,
                  lengths=num_sequences, block_tables=(num_sequences, width), sampled_rows=num_rows)
    arrays |= {name: generator.integers(-2**31, 2**31, shape, np.int32)
               for name, shape in shapes.items()}
    arrays["next_tokens"] = generator.integers(-2**31, 2**31, num_rows, np.int32)
    buffer, layout = to_buffer(arrays, "cpu")
    assert buffer.dtype == torch.int32 and buffer.shape == (
        sum(array.nbytes for array in arrays.values()) // 4,)
    assert {layout: "a key"}[to_buffer(arrays, "cpu")[1]], "as of a CUDA graph"
    step = StepInputs.from_buffer(buffer, (layout, 12, 34))
    assert (step.longest_query, step.longest_keys) == (12, 34) and step.buffer is buffer
    begin = buffer.data_ptr()
    for name, array in arrays.items():
        tensor = getattr(step, name)
        assert tensor.numpy().dtype == array.dtype and tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % tensor.itemsize == 0, "aligned"
        if tensor.numel():
            assert begin <= tensor.data_ptr() < begin + buffer.nbytes, "a view"
    turned = {name: array[::-1].copy() for name, array in arrays.items()}
    buffer.copy_(to_buffer(turned, "cpu")[0])
    for name, array in arrays.items():
        assert np.array_equal(getattr(step, name).numpy(), array[::-1]), "over the same memory"


def test_large_scores_do_not_overflow():
    step = make_step([1], [600], 16)
    cache = random_cache(1, 32, 16, step, torch.float32, scale=100)
    query = torch.randn(1, 1, 32) * 100
    qkv = query.repeat(1, 3, 1)
    out = attend_in_tiles(qkv, NO_NORMS, no_turn(1, 32), cache, None, step)
    expected = plain_attention(query, cache, None, step)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-4)


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
    qkv = torch.stack((query.repeat(41, 1), *torch.randn(2, 41, 32)), dim=1).to(dtype)
    out = attend_in_tiles(qkv, NO_NORMS, no_turn(41, 32), cache, None, step)
    expected = plain_attention(qkv[:, :1], cache, None, step)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(block_size):
    torch.manual_seed(0)
    step = make_step([30, 1, 50], [0, 99, 270], block_size)
    cache = random_cache(2, 128, block_size, step, torch.bfloat16)
    qkv, angles = torch.randn(81, 20, 128).bfloat16(), torch.rand(2, 81, 64)
    norms = random_norms(128, torch.bfloat16)
    whole = attend_in_tiles(qkv.clone(), norms, angles, cache, None, step)
    for rows in (slice(0, 1), slice(7, 12), slice(30, 31), slice(60, 81)):
        part = StepInputs(**vars(step) | {name: getattr(step, name)[rows] for name in (
            "positions", "sequence_of_token", "slot_mapping")})
        turns = angles[:, rows].contiguous()
        alone = attend_in_tiles(qkv[rows].clone(), norms, turns, cache, None, part)
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("device, dtype, flash, version, expected", [
    ("cpu", torch.float32, True, "2.13.0", "numba"),
    ("cpu", torch.bfloat16, True, "2.13.0", "numba"),
    ("cuda", torch.bfloat16, True, "2.11.0", "flash-attn"),
    ("cuda", torch.float16, False, "2.12.0", "varlen"),
    ("cuda", torch.bfloat16, False, "2.9.1", "gather"),
    ("cuda", torch.float32, True, "2.13.0", "gather"),
    ("cpu", torch.float16, True, "2.13.0", "gather"),
])
def test_the_choice_of_a_backend(monkeypatch, recwarn, device, dtype, flash, version, expected):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace() if flash else None)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert choose_backend("auto", device, dtype, 256) == expected
    warnings = [str(warning.message) for warning in recwarn]
    assert len(warnings) == (expected == "gather")
    assert all("nanoengine[flash]" in warning for warning in warnings)
    assert choose_backend("gather", device, dtype, 16) == "gather", "it can always be asked for"
    assert len(recwarn) == len(warnings), "and then there is no warning"
    assert choose_backend(expected, device, dtype, 256) == expected
    for name in BACKENDS.keys() - {expected, "gather"}:
        if not (name == "varlen" and expected == "flash-attn" and version >= "2.12"):
            with pytest.raises(ValueError, match=f"attention_backend='{name}' .* one of"):
                choose_backend(name, device, dtype, 256)
    if expected in ("flash-attn", "varlen"):
        with pytest.raises(ValueError, match="block_size=16 .* multiple of 256"):
            choose_backend("auto", device, dtype, 16)


def test_a_package_that_cannot_be_imported_falls_through_to_the_next_backend(
        monkeypatch, recwarn, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: of a torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.0"))
    assert choose_backend("auto", "cuda", torch.bfloat16, 256) == "varlen"
    (warning,) = recwarn
    assert "flash_attn is there, but cannot be imported: undefined" in str(warning.message)
    with pytest.raises(ValueError, match="attention_backend='flash-attn'"):
        choose_backend("flash-attn", "cuda", torch.bfloat16, 256)


def test_a_backend_from_outside_works_by_its_name(tiny, monkeypatch):
    calls = []

    def attend(query, cache, window, step):
        calls.append(len(query))
        return gather_attention(query, cache, window, step)

    def works(device, dtype):
        return device == "cpu" and dtype == torch.float32

    options = dict(block_size=16, num_kv_blocks=20, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4)
    for backend in (Backend(attend, works), Backend(attend, works, rank=9)):
        monkeypatch.setitem(BACKENDS, "mine", backend)
        name = choose_backend("auto", "cpu", torch.float32, 16)
        assert name == ("mine" if backend.rank else "numba"), "a candidate only if it says so"
        with LLM(tiny, dtype="float32", attention_backend="mine", **options) as llm:
            assert llm.metrics()["attention_backend"] == "mine"
            tokens = llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids
    assert calls == [3, 3, 1, 1, 1, 1, 1, 1] * 2
    with LLM(tiny, dtype="float32", attention_backend="gather", **options) as llm:
        assert llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids == tokens
    accepted = "one of .*'numba'.* for torch.bfloat16 on cpu"
    for dtype, name in (("bfloat16", "mine"), ("bfloat16", "unknown")):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' .* must be {accepted}"):
            LLM(tiny, dtype=dtype, attention_backend=name)
    monkeypatch.setitem(BACKENDS, "mine", Backend(attend, works, block_multiple=32))
    with pytest.raises(ValueError, match="block_size=16 .* a multiple of 32 for mine"):
        LLM(tiny, dtype="float32", attention_backend="mine", **options)


@pytest.mark.parametrize("window", [None, 4])
def test_gathered_nan_reaches_the_queries_that_see_it_and_no_others(window):
    """A later token of the same chunk, or one that left the window, has a weight of 0."""
    torch.manual_seed(0)
    step = make_step([9, 3], [2, 0], 4)
    outs = []
    for rest in (torch.nan, 0.0):
        cache = random_cache(2, 16, 4, step, F32).fill_(rest)
        places = cache.flatten(1, 2)
        torch.manual_seed(1)
        table = step.block_tables[0].repeat_interleave(4) * 4 + torch.arange(12) % 4
        places[:, table[:11].long()] = torch.randn(2, 11, 2, 16)
        places[:, step.slot_mapping[9:]] = torch.randn(2, 3, 2, 16)
        places[1, table[6].long()] = torch.nan
        outs.append(gather_attention(torch.randn(12, 4, 16), cache, window, step))
    is_nan = outs[0].isnan().flatten(1)
    seen = (step.positions >= 6) & (step.positions < 6 + (window or 99))
    seen[9:] = False
    assert torch.equal(is_nan.all(1), seen) and torch.equal(is_nan.any(1), seen)
    assert torch.equal(outs[0][~seen], outs[1][~seen]), "what nobody has written does not matter"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("block_size, head_dim", [(5, 32), (16, 32), (32, 64)])
def test_what_is_unwritten_and_what_others_wrote_may_be_nan(block_size, head_dim, dtype):
    """The cache is memory that nothing has written yet, or that has been used before."""
    torch.manual_seed(0)
    lengths, heads = [1, 2, 17, 33], 2
    qkv, norms = torch.randn(53, 3 * heads, head_dim).to(dtype), random_norms(head_dim, dtype)
    # K and V of the second sequence are NaN
    qkv[1, heads] = qkv[2, 2 * heads] = torch.nan
    outs = []
    for rest in (torch.nan, 0.0):
        step = make_step(lengths, [0] * 4, block_size)
        tiled = make_cache(heads, head_dim, block_size, step, dtype, "numba").fill_(rest)
        angles = no_turn(53, head_dim)
        outs.append(attend_by_kernel(qkv.clone(), norms, angles, tiled, None, step))
        assert outs[-1][1:3].isnan().any(dim=0).any()
        finite = torch.ones(53, dtype=torch.bool)
        finite[1:3] = False
        assert outs[-1][finite].isfinite().all()
    assert torch.equal(outs[0][finite], outs[1][finite])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [1, 3, 16, 37])
@pytest.mark.parametrize("block_size, head_dim", [(16, 32), (32, 64)])
def test_same_bits_however_a_prompt_is_chunked(block_size, head_dim, chunk, dtype):
    torch.manual_seed(0)
    total = 150
    qkv, norms = torch.randn(total, 6, head_dim).to(dtype), random_norms(head_dim, dtype)
    angles = torch.rand(2, total, head_dim // 2)
    whole = make_step([total], [0], block_size)

    def run(step, tiled, rows):
        turns = angles[:, rows].contiguous()
        return attend_by_kernel(qkv[rows].clone(), norms, turns, tiled, 40, step)

    unwritten = make_cache(2, head_dim, block_size, whole, dtype, "numba").fill_(torch.nan)
    expected = run(whole, unwritten.clone(), slice(0, total))
    tiled, found = unwritten.clone(), []
    for first in range(0, total, chunk):
        rows = slice(first, min(first + chunk, total))
        step = StepInputs(**vars(whole) | {name: getattr(whole, name)[rows] for name in (
            "positions", "sequence_of_token", "slot_mapping")})
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


@pytest.mark.parametrize("name, features", [
    ("haswell", "+avx,+avx2,+fma"), ("generic", ""), ("", "")])
def test_other_cpus(name, features, tmp_path):
    """The instructions follow the CPU that numba compiles for, not the one it runs on."""
    script = """if True:
        import torch
        from nanoengine_cpu.tiles import HAS_TILES
        from nanoengine_cpu.vectors import has
        from tests.test_attention import largest_error
        print(has("avx512f"), has("avx512bf16"), HAS_TILES)
        print(largest_error(torch.float32), largest_error(torch.bfloat16))"""
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(folder)}
    if name:
        environment |= {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    printed = subprocess.check_output(
        [sys.executable, "-c", script], env=environment, cwd=folder, text=True).split()
    assert not name or printed[:3] == ["False"] * 3
    assert float(printed[3]) < 3e-6 and float(printed[4]) < 2e-2


def test_the_compiled_kernel_can_be_kept_on_disk():
    """numba finds it again only if what it closes over is the same in every process."""
    kernel = kernels.paged_attention(32, 2, 16, 16)
    assert {type(cell.cell_contents) for cell in kernel.py_func.__closure__} == {int, bool, type}


@pytest.fixture
def new_kernels(monkeypatch):
    """The kernels of attention that are called. No kernel is known from another test."""
    make, made = kernels.paged_attention.__wrapped__, []
    for kernel in (row_kernels.rms_norm, row_kernels.swiglu):
        kernel.cache_clear()

    @functools.cache
    def paged_attention(*shape, **named):
        made.append(make(*shape, **named))
        return made[-1]

    monkeypatch.setattr(kernels, "paged_attention", paged_attention)
    return made


def bits_of_a_large_step():
    """A hash of what all kernels compute, also called in a process of its own."""
    torch.manual_seed(0)
    step = make_step([200] * 4, [0] * 4, 128)
    cache = random_cache(8, 128, 128, step, torch.bfloat16)
    norms, angles = random_norms(128, torch.bfloat16), torch.rand(2, 800, 64)
    qkv = torch.randn(800, 32, 128).bfloat16()
    out = attend_in_tiles(qkv, norms, angles, cache, None, step)
    normed = rms_norm(torch.randn(9, 72).bfloat16(), torch.rand(72).bfloat16(), 1e-6)
    results = qkv[:, :16], out, swiglu(normed)
    return hashlib.sha1(
        torch.cat([result.flatten() for result in results]).view(torch.int16).numpy()).hexdigest()


def test_a_second_process_compiles_nothing_and_gets_the_same_bits(
        new_kernels, tmp_path, monkeypatch):
    """In the process in which it was compiled, numba would not take the one on disk."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = bits_of_a_large_step()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert [file.suffix for file in files].count(".nbc") == 3
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(folder)}
    loaded = subprocess.check_output(
        [sys.executable, "-c", "from tests import test_attention as test\n"
         "print(test.bits_of_a_large_step())"], env=environment, cwd=folder, text=True)
    assert loaded.strip() == compiled
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}


def test_a_token_that_is_the_first_of_its_sequence_sees_itself_alone():
    for num_tokens in (1, 3):
        tables = torch.arange(num_tokens, dtype=torch.int32)[:, None]
        indices = torch.arange(num_tokens)
        step = SimpleNamespace(slot_mapping=indices * 16, block_tables=tables,
                               sequence_of_token=indices.int(), positions=indices.int() * 0)
        qkv = torch.nn.Linear(5, 192)(torch.randn(4, 5))[:num_tokens].detach().view(-1, 6, 32)
        cache = torch.zeros(2, 3, 2, 16, 32).transpose(2, 3)  # in any layout
        turns = no_turn(9, 32)[:, indices]
        out = attend_by_kernel(qkv, NO_NORMS, turns, cache, None, step)
        assert torch.allclose(out, qkv[:, 4:])
