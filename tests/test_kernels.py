"""The CPU kernel against the same computation in plain torch."""

import math
from types import SimpleNamespace

import pytest
import torch

from nanoengine.attention import CPUAttention, StepInputs


def reference(query, cache, positions, owners, block_tables, window):
    """Gathers every token's keys and values from the cache; softmax in float64."""
    rows = []
    for token, (position, owner) in enumerate(zip(positions.tolist(), owners.tolist())):
        blocks = cache[:, block_tables[owner].long()].transpose(1, 2).flatten(2, 3).double()
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = blocks[:, :, first:position + 1]
        group_size = query.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(group_size, 0) for part in (keys, values))
        scores = torch.einsum("hd,hnd->hn", query[token].double(), keys) / math.sqrt(keys.shape[-1])
        rows.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def make_step(num_tokens, computed, block_size):
    """A step over sequences that lie scattered in a cache, `num_tokens` behind `computed` each."""
    ends = [n + c for n, c in zip(num_tokens, computed)]
    width = max(-(-end // block_size) for end in ends)
    tables = (torch.randperm(len(ends) * width).view(len(ends), width) + 1).int()
    owners = torch.cat([torch.full((n,), i) for i, n in enumerate(num_tokens)]).int()
    positions = torch.cat([torch.arange(c, e) for c, e in zip(computed, ends)]).int()
    blocks = tables[owners.long(), positions.long() // block_size]
    return StepInputs(token_ids=owners, positions=positions, owners=owners, block_tables=tables,
                      slots=blocks * block_size + positions % block_size, sampled_rows=owners)


def make_attention(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int):
    return CPUAttention(SimpleNamespace(
        num_hidden_layers=1, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
        head_dim=head_dim), block_size)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window", [
    (2, 1, 32, 16, None), (1, 2, 64, 16, 7), (2, 4, 80, 5, None), (1, 8, 128, 16, 300),
    (3, 3, 24, 1, 40),
])
def test_against_plain_torch(kv_heads, group_size, head_dim, block_size, window, dtype, tolerance):
    torch.manual_seed(0)
    attention = make_attention(kv_heads * group_size, kv_heads, head_dim, block_size)
    step = make_step([1, 1, 9, 1, 40, 2], [0, 700, 0, 15, 260, 31], block_size)
    num_tokens = len(step.positions)
    cache = attention.make_caches(int(step.block_tables.max()) + 1, dtype)[0]
    cache.copy_(torch.randn(cache.shape))
    query = torch.randn(num_tokens, kv_heads * group_size, head_dim).to(dtype)
    key, value = (torch.randn(num_tokens, kv_heads, head_dim).to(dtype) for _ in range(2))
    before = cache.clone()
    out = attention(query, key, value, window, cache, step)
    expected = reference(query, cache, step.positions, step.owners, step.block_tables, window)
    assert out.dtype == dtype and out.shape == query.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    written = torch.zeros(cache.shape[1], block_size, dtype=torch.bool)
    written.view(-1)[step.slots.long()] = True
    assert torch.equal(cache.transpose(2, 3)[0][written], key[step.slots.argsort()])
    assert torch.equal(cache.transpose(2, 3)[1][written], value[step.slots.argsort()])
    assert torch.equal(cache.transpose(2, 3)[:, ~written], before.transpose(2, 3)[:, ~written])


def test_large_scores_do_not_overflow():
    attention = make_attention(1, 1, 32, 16)
    step = make_step([1], [600], 16)
    cache = attention.make_caches(60, torch.float32)[0]
    cache.copy_(torch.randn(cache.shape) * 100)
    query = torch.randn(1, 1, 32) * 100
    out = attention(query, query, query, None, cache, step)
    expected = reference(query, cache, step.positions, step.owners, step.block_tables, None)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-4)


def test_a_token_has_the_same_bits_alone_and_in_any_batch():
    torch.manual_seed(0)
    attention = make_attention(8, 2, 64, 16)
    step = make_step([30, 1, 50], [0, 99, 270], 16)
    cache = attention.make_caches(100, torch.bfloat16)[0]
    cache.copy_(torch.randn(cache.shape))
    query = torch.randn(81, 8, 64).bfloat16()
    key, value = torch.randn(2, 81, 2, 64).bfloat16()
    whole = attention(query, key, value, None, cache, step)
    for rows in (slice(0, 1), slice(7, 12), slice(30, 31), slice(60, 81)):
        part = StepInputs(step.token_ids[rows], step.positions[rows], step.slots[rows],
                          step.owners[rows], step.block_tables, step.sampled_rows)
        alone = attention(query[rows], key[rows], value[rows], None, cache, part)
        assert torch.equal(alone, whole[rows])
