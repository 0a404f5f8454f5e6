"""Paged attention in plain PyTorch, and steps and caches for it to be compared in."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine_extras.cpu import empty_cache, paged_attention
from nanoengine_extras.cpu.attention import LANES

F32, BF16 = torch.float32, torch.bfloat16


class Step(SimpleNamespace):
    """Where the tokens of a step are: `slot_mapping`, `positions` and `sequence_of_token`, (T,)
    each, and the `block_tables` of their sequences; and what attention on a GPU also asks for."""

    def part(self, rows: slice) -> "Step":
        """Some of its tokens, for our own kernel."""
        names = ("positions", "sequence_of_token", "slot_mapping")
        return Step(**vars(self) | {name: getattr(self, name)[rows] for name in names})


def plain_attention(query, cache, window, step, soft_cap=None, sinks=None):
    """Gathers every token's keys and values from the cache; softmax in float64.

    Arguments and result are those of `flash_attention`, but for the float64.
    soft_cap: of scores; sinks: (heads,), a further score of each, whose weight is dropped
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
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        weights = scores.softmax(-1)[:, :keys.shape[1]]
        rows.append(torch.einsum("hn,hnd->hd", weights, values))
    return torch.stack(rows)


def norm_and_rotate(x, norm, angles):
    """What is done with queries and keys, head by head, in float64."""
    x, (cos, sin) = x.double(), angles.double()[:, :, None]
    if isinstance(norm, nn.RMSNorm):
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
    return Step(
        slot_mapping=tables[sequence_of_token, positions // block_size].long() * block_size
        + positions % block_size,
        positions=positions.int(), sequence_of_token=sequence_of_token.int(),
        query_starts=F.pad(torch.tensor(num_tokens).cumsum(0), (1, 0)).int(),
        key_starts=F.pad(lengths.cumsum(0), (1, 0)).int(),
        lengths=lengths.int(), block_tables=tables,
        num_decodes=[count > 1 for count in (*num_tokens, 2)].index(True),
        longest_query=max(num_tokens), longest_keys=int(lengths.max()))


def random_cache(num_heads, head_dim, block_size, step, dtype, scale=1.0):
    """In the plain layout: (2, blocks, block_size, kv_heads, head_dim)."""
    num_blocks = int(step.block_tables.max()) + 1
    return (torch.randn(2, num_blocks, block_size, num_heads, head_dim) * scale).to(dtype)


def cpu_cache(num_heads, head_dim, block_size, step, dtype):
    """In the kernel's own layout, and not written to."""
    num_blocks = int(step.block_tables.max()) + 1
    return empty_cache(1, num_blocks, block_size, num_heads, head_dim, dtype)[0]


def places_in_tiles(cache, head_dim):
    """Views of the kernel's layout: keys (blocks, kv_heads, tiles, 16, words, numbers of a word)
    and values (blocks, kv_heads, tiles, words of 16 keys, numbers of a word, width)."""
    numbers = 2 if cache.dtype == torch.bfloat16 else 1
    width, tiles = -(-head_dim // LANES) * LANES, -(-cache.shape[2] // LANES)
    memory = cache.transpose(2, 3).flatten(3)[..., :tiles * LANES * width]
    keys = memory[0].unflatten(-1, (tiles, width // numbers, LANES, numbers)).transpose(-3, -2)
    values = memory[1].unflatten(-1, (tiles, LANES // numbers, width, numbers)).transpose(-2, -1)
    return keys, values


def to_tiles(plain, tiled):
    """Writes the numbers of a plain cache to one in the kernel's layout; the padding is NaN."""
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
    """The numbers of a cache in the kernel's layout, in the plain one."""
    keys, values = places_in_tiles(tiled, head_dim)
    both = torch.stack((keys.flatten(-2), values.flatten(-3, -2)))
    return both.flatten(3, 4)[:, :, :, :tiled.shape[2], :head_dim].transpose(2, 3)


def attend_by_kernel(qkv, norms, *rest, **options):
    """`paged_attention` with the norms as modules."""
    ones = torch.ones(qkv.shape[2])
    weights = torch.stack([getattr(norm, "weight", ones).float() for norm in norms])
    angles, cache, window, step = rest
    return paged_attention(qkv, weights, getattr(norms[0], "eps", -1.0), angles, cache, window,
                           step.slot_mapping, step.block_tables, step.sequence_of_token,
                           step.positions, **options)


def attend_in_tiles(qkv, norms, angles, plain, window, step, **options):
    """`paged_attention` for a plain cache, to which it writes."""
    tiled = cpu_cache(plain.shape[3], qkv.shape[2], plain.shape[2], step, plain.dtype)
    out = attend_by_kernel(qkv, norms, angles, to_tiles(plain, tiled), window, step,
                           **options)
    plain[:] = from_tiles(tiled, qkv.shape[2])
    return out


def random_norms(head_dim, dtype):
    norms = [nn.RMSNorm(head_dim, 1e-3).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
        norm.to(dtype)
    return norms
