"""Every attention backend against the same computation in plain torch."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanoengine import attention
from nanoengine.attention import StepInputs, attend, choose_backend, make_caches
from nanoengine.kernels import paged_attention
from nanoengine.model import RMSNorm


def reference(query, cache, positions, owners, block_tables, window):
    """Gathers every token's keys and values from the cache; softmax in float64."""
    rows = []
    for token, (position, owner) in enumerate(zip(positions.tolist(), owners.tolist())):
        blocks = cache[:, block_tables[owner].long()].flatten(1, 2).double()
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = blocks[:, first:position + 1].transpose(1, 2)
        group_size = query.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(group_size, 0) for part in (keys, values))
        scores = torch.einsum("hd,hnd->hn", query[token].double(), keys) / math.sqrt(keys.shape[-1])
        rows.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def norm_and_rotate(x, norm, angles):
    """What is done with queries and keys, head by head, in float64."""
    x, (cos, sin) = x.double(), angles.double()[:, :, None]
    if norm is not None:
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
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(num_tokens))
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(computed, num_tokens)])
    step = StepInputs.__new__(StepInputs)
    step.__dict__.update(
        owners=owners.int(), positions=positions.int(), block_tables=tables, lengths=lengths.int(),
        blocks=tables[owners, positions // block_size].long(), offsets=positions % block_size,
        query_starts=F.pad(torch.tensor(num_tokens).cumsum(0), (1, 0)).int(),
        longest_query=max(num_tokens))
    key_starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    step.bounds = step.query_starts, key_starts, max(num_tokens), int(lengths.max())
    return step


def random_cache(num_heads, head_dim, block_size, step, dtype, scale=1.0):
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=num_heads, head_dim=head_dim)
    num_blocks = int(step.block_tables.max()) + 1
    cache = make_caches(config, num_blocks, block_size, dtype, "cpu")[0]
    assert cache.shape == (2, num_blocks, block_size, num_heads, head_dim)
    return cache.copy_(torch.randn(cache.shape) * scale)


BACKENDS = {"numba", *attention.BACKENDS}
SHAPES = pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window", [
    (2, 1, 32, 16, None), (1, 2, 64, 16, 7), (2, 4, 80, 5, None), (1, 8, 128, 16, 300),
    (3, 3, 24, 1, 40)])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", ["numba", "gather", "flash-attn", "varlen"])
@pytest.mark.parametrize("num_tokens, has_norms", [
    ([1, 1, 9, 1, 40, 2], True), ([1] * 6, False), ([1] * 6, True)])
@SHAPES
def test_against_plain_torch(kv_heads, group_size, head_dim, block_size, window, num_tokens,
                             has_norms, backend, dtype, tolerance, stand_ins):
    torch.manual_seed(0)
    step = make_step(num_tokens, [0, 700, 0, 15, 260, 31], block_size)
    cache = random_cache(kv_heads, head_dim, block_size, step, dtype)
    heads, before = kv_heads * group_size, cache.clone()
    qkv = torch.randn(sum(num_tokens), heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.randn(sum(num_tokens), head_dim // 2)
    angles = torch.stack((angles.cos(), angles.sin()))
    norms = [RMSNorm(head_dim, 1e-3).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
        norm.to(dtype)
    given = norms if has_norms else NO_NORMS
    out = attend(backend, qkv.clone(), given, angles, window, cache, step)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    query, key = (norm_and_rotate(x, norm if has_norms else None, angles)
                  for x, norm in zip((query, key), norms))
    written = cache[:, step.blocks, step.offsets]
    torch.testing.assert_close(written[0].double(), key, atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], value)
    before[:, step.blocks, step.offsets] = written
    assert torch.equal(cache, before), "and nothing else was written"
    expected = reference(query, cache, step.positions, step.owners, step.block_tables, window)
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
        owners = torch.arange(len(counts)).repeat_interleave(counts)
        ends = (lengths - starts[1:])[owners]
        positions = torch.arange(len(query)) + ends
        assert window[1] == 0 or window == (-1, -1)
        window = None if window[0] < 0 else window[0] + 1
        out = reference(query, torch.stack(cache), positions, owners, tables, window)
        return out.to(query.dtype)

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


def test_large_scores_do_not_overflow():
    step = make_step([1], [600], 16)
    cache = random_cache(1, 32, 16, step, torch.float32, scale=100)
    query = torch.randn(1, 1, 32) * 100
    qkv = query.repeat(1, 3, 1)
    out = attend("numba", qkv, NO_NORMS, no_turn(1, 32), None, cache, step)
    expected = reference(query, cache, step.positions, step.owners, step.block_tables, None)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-4)


def test_a_token_has_the_same_bits_alone_and_in_any_batch():
    torch.manual_seed(0)
    step = make_step([30, 1, 50], [0, 99, 270], 16)
    cache = random_cache(2, 64, 16, step, torch.bfloat16)
    qkv, angles = torch.randn(81, 12, 64).bfloat16(), torch.rand(2, 81, 32)
    norms = [RMSNorm(64, 1e-6).bfloat16().requires_grad_(False) for _ in range(2)]
    whole = attend("numba", qkv.clone(), norms, angles, None, cache, step)
    for rows in (slice(0, 1), slice(7, 12), slice(30, 31), slice(60, 81)):
        part = StepInputs.__new__(StepInputs)
        part.__dict__.update({name: getattr(step, name)[rows] for name in (
            "positions", "owners", "blocks", "offsets")}, block_tables=step.block_tables)
        turns = angles[:, rows].contiguous()
        alone = attend("numba", qkv[rows].clone(), norms, turns, None, cache, part)
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
    monkeypatch.setattr(attention, "find_spec", lambda name: flash or None)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert choose_backend("auto", device, dtype, 256) == expected
    warnings = [str(warning.message) for warning in recwarn]
    assert len(warnings) == (expected == "gather")
    assert all("nanoengine[flash]" in warning for warning in warnings)
    assert choose_backend("gather", device, dtype, 16) == "gather", "it can always be asked for"
    assert len(recwarn) == len(warnings), "and then there is no warning"
    assert choose_backend(expected, device, dtype, 256) == expected
    for name in BACKENDS - {expected, "gather"}:
        if not (name == "varlen" and expected == "flash-attn" and version >= "2.12"):
            with pytest.raises(ValueError, match=f"attention_backend='{name}' .* one of"):
                choose_backend(name, device, dtype, 256)
    if expected in ("flash-attn", "varlen"):
        with pytest.raises(ValueError, match="block_size=16 .* multiple of 256"):
            choose_backend("auto", device, dtype, 16)


def test_the_compiled_kernel_can_be_kept_on_disk():
    """numba finds it again only if what it closes over is the same in every process."""
    kernel = paged_attention(32, 2, 16, 16)
    assert {type(cell.cell_contents) for cell in kernel.py_func.__closure__} == {int}


BITS = """
import hashlib, torch
from tests.test_attention import RMSNorm, attend, make_step, random_cache
torch.manual_seed(0)
step = make_step([200] * 4, [0] * 4, 128)
norms = [RMSNorm(128, 1e-6).bfloat16().requires_grad_(False) for _ in range(2)]
qkv, angles = torch.randn(800, 32, 128).bfloat16(), torch.rand(2, 800, 64)
cache = random_cache(8, 128, 128, step, torch.bfloat16)
out = attend("numba", qkv, norms, angles, None, cache, step)
print(hashlib.sha1(torch.cat((qkv[:, :16], out)).view(torch.int16).numpy()).hexdigest())
"""


def test_same_bits_from_a_kernel_just_compiled_and_from_one_kept_on_disk(tmp_path):
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(folder)}
    first, second = (subprocess.check_output(
        [sys.executable, "-c", BITS], env=environment, cwd=folder) for _ in range(2))
    assert [*tmp_path.rglob("*paged_attention*.nbc")] and first == second


def test_one_compiled_kernel_for_one_token_and_many():
    """A tensor of one row is contiguous whatever its strides: numba would compile for it anew."""
    kernel = paged_attention(16, 1, 4, 0)
    for num_tokens in (1, 3):
        tables = torch.arange(num_tokens, dtype=torch.int32)[:, None]
        indices = torch.arange(num_tokens)
        step = SimpleNamespace(blocks=indices, offsets=indices * 0, block_tables=tables,
                               owners=indices.int(), positions=indices.int() * 0)
        qkv = torch.nn.Linear(5, 96)(torch.randn(4, 5))[:num_tokens].detach().view(-1, 6, 16)
        cache = torch.zeros(2, 3, 2, 4, 16).transpose(2, 3)
        turns = no_turn(9, 16)[:, indices]
        out = attention.numba_attention(qkv, NO_NORMS, turns, None, cache, step)
        assert torch.allclose(out, qkv[:, 4:]), "each sees itself alone"
    assert len(kernel.signatures) == 1
