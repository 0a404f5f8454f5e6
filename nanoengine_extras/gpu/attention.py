"""Paged attention, in one kernel for prompts, chunks and decodes.

The kernel is FlashAttention-2 (Dao, 2023, arXiv:2307.08691) over PagedAttention's block tables
(Kwon et al., 2023, arXiv:2309.06180):

    a tile     some queries of one sequence, and all heads of a group, so that these read each key
               once. A decode has one query: its tile has only the heads of the group
    its keys   come in groups of KEYS. The softmax is online: it keeps the largest score so far, the
               sum of weights, and the weighted sum of values, and scales them when a larger score
               comes (Milakov & Gimelshein, 2018, arXiv:1805.02867)
    a split    a part of the keys. If there are too few tiles to keep a GPU busy, several
               programs share the keys of a tile, and a second kernel joins their results
               (Flash-Decoding)

Numbers of 8 bits are multiplied without their scales. The scale of a key is then a factor of its
scores, and that of a value a factor of its weights.

Scores can have a soft cap (Gemma 2: Gemma Team, 2024, arXiv:2408.00118). A head can have a sink
(gpt-oss): one more score in its softmax, without a value.

The grid depends only on the shape of a step, and the host reads no numbers from the GPU, so CUDA
graphs can capture the kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine_extras.gpu.norms import parts_of

# these change from step to step: without this list, each new alignment would compile a new kernel
CHANGING = ["starts", "lengths", "tables", "num_seqs", "num_tokens", "width", "window"]

# the kernel computes powers of 2
LOG2_E = tl.constexpr(1.4426950408889634)

# The rows and keys of a tile, num_warps and num_stages: of decodes, of steps with both, of prompts.
# By (is_float32, the most numbers in a head, as a power of 2). Larger ones spill registers.
TILES = {
    (False, 128): ((16, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3)),
    (False, 256): ((16, 32, 4, 3), (64, 32, 8, 2), (64, 32, 8, 2)),
    (False, 512): ((16, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 2)),
    (True, 128): ((16, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 2)),
    (True, 256): ((16, 16, 4, 2), (32, 16, 8, 2), (32, 16, 8, 2)),
    (True, 512): ((16, 16, 4, 2), (16, 16, 8, 2), (16, 16, 8, 2))}


@triton.jit(do_not_specialize=CHANGING)
def attention_kernel(query, keys, values, key_scales, value_scales, out, sums, starts, lengths,
                     tables, num_seqs, num_tokens, width, window, scale, soft_cap, sinks,
                     BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                     HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr,
                     ROWS: tl.constexpr, KEYS: tl.constexpr):
    """A program computes a split of a tile, for one head of keys.

    key_scales, value_scales: see `parts_of`; None for a cache in the dtype of `query`

    out: (splits, T, heads, head_dim); sums: (splits, T, heads), log2 of the sums of weights; None
        without splits
    scale: of scores in powers of 2; soft_cap, sinks: see `paged_attention`
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    dtype: tl.constexpr = query.dtype.element_ty
    # the interpreter multiplies the bits of bfloat16 as if they were integers
    factor: tl.constexpr = tl.float32 if IS_INTERPRETED else dtype
    # weights times a small scale could be too small for float16
    is_rounded: tl.constexpr = key_scales is not None
    weight: tl.constexpr = tl.bfloat16 if is_rounded and dtype == tl.float16 else dtype
    value: tl.constexpr = tl.float32 if IS_INTERPRETED else weight

    # 1. The sequence of this tile: the last one whose first tile does not come after it.
    tile = tl.program_id(0)
    seq = -1
    for begin in range(0, num_seqs, 256):
        seqs = begin + tl.arange(0, 256)
        begins = tl.load(starts + seqs, seqs < num_seqs, 2**30) + seqs * (QUERIES - 1)
        seq += tl.sum((begins // QUERIES <= tile).to(tl.int32))
    start = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - start
    first = (tile - (start + seq * (QUERIES - 1)) // QUERIES) * QUERIES
    if first >= num_queries:
        return

    # 2. The queries. A row of the tile is a head of a query.
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    queries = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < num_queries)
    places = (start + queries).to(tl.int64) * (KV_HEADS * GROUP) + heads
    is_used = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    q = tl.load(query + places[:, None] * HEAD_DIM + columns[None, :], is_used, 0.0)

    # 3. The keys that the tile sees, and this program's share of them.
    length = tl.load(lengths + seq)
    positions = length - num_queries + queries
    least = tl.maximum(length - num_queries + first - window + 1, 0)
    most = tl.minimum(length - num_queries + first + QUERIES, length)
    share = tl.cdiv(tl.cdiv(most - least, tl.num_programs(2)), KEYS) * KEYS
    least += split * share
    most = tl.minimum(least + share, most)
    table = tables + tl.cast(seq, tl.int64) * width

    # 4. The online softmax, in powers of 2.
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    if sinks is not None:
        # one split counts their weights; they have no values
        if split == 0:
            largest = tl.load(sinks + heads) * LOG2_E
            total += 1
    for begin in range(least, most, KEYS):
        places_of_keys = begin + tl.arange(0, KEYS)
        is_key = places_of_keys < most
        blocks = tl.load(table + places_of_keys // BLOCK_SIZE, is_key, 0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + places_of_keys % BLOCK_SIZE
        heads_of_keys = slots * KV_HEADS + kv_head
        numbers = heads_of_keys[:, None] * HEAD_DIM + columns[None, :]
        if is_rounded:
            # in front of a block are the scales of all blocks before it
            blocks = blocks.to(tl.int64)
            numbers += (blocks * (BLOCK_SIZE * KV_HEADS * 4))[:, None]
            scales = (blocks + 1) * (BLOCK_SIZE * KV_HEADS * HEAD_DIM // 4) + heads_of_keys
        # values that are not read are 0: a weight of 0 would not stop another sequence's NaN
        is_number = is_key[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(keys + numbers, is_number, 0.0)
        scores = tl.dot(q.to(factor), k.to(factor).T, input_precision="ieee") * scale
        if is_rounded:
            scores *= tl.load(key_scales + scales, is_key, 0.0)[None, :]
        if soft_cap is not None:
            tanh = 1 - 2 / (tl.exp2(scores * (2 / soft_cap)) + 1)
            scores = tanh * (soft_cap * LOG2_E)
        ages = positions[:, None] - places_of_keys[None, :]
        is_seen = (ages >= 0) & (ages < window) & is_key[None, :]
        scores = tl.where(is_seen, scores, -float("inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # a row that has seen no key yet: -inf - -inf would be NaN
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(weights, 1)
        if is_rounded:
            weights *= tl.load(value_scales + scales, is_key, 0.0)[None, :]
        v = tl.load(values + numbers, is_number, 0.0)
        weighted = tl.dot(weights.to(weight).to(value), v.to(value),
                          weighted * shrink[:, None], input_precision="ieee")
        largest = new_largest

    # 5. The result. A split in which a row sees no key has no effect: its sum is 2 ** -inf.
    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    places += split.to(tl.int64) * num_tokens * (KV_HEADS * GROUP)
    to_out = out + places[:, None] * HEAD_DIM + columns[None, :]
    tl.store(to_out, result.to(out.dtype.element_ty), is_used)
    if sums is not None:
        tl.store(sums + places, largest + tl.log2(total), is_row)


# the interpreter behaves differently in a few places
IS_INTERPRETED = tl.constexpr(not isinstance(attention_kernel, triton.JITFunction))


@triton.jit
def join_kernel(parts, sums, out, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
                SPLITS: tl.constexpr):
    """A program joins the splits of one head of one query."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    places = tl.arange(0, SPLITS).to(tl.int64) * tl.num_programs(0) + head
    sum_of_split = tl.load(sums + places)
    weights = tl.exp2(sum_of_split - tl.max(sum_of_split, 0))
    is_column = columns < HEAD_DIM
    part = tl.load(parts + places[:, None] * HEAD_DIM + columns[None, :], is_column[None, :], 0.0)
    joined = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + head * HEAD_DIM + columns, joined.to(out.dtype.element_ty), is_column)


def paged_attention(query: Tensor, cache: Any, window: int | None, step: Any,
                    soft_cap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Each query attends to the keys of its sequence up to its own.

    query: (T, heads, head_dim), rotated
    cache: (2, num_blocks, block_size, kv_heads, head_dim), contiguous: K and V, those of this step
        included; for 8 bits, see `parts_of`
    window: a query sees its last `window` keys, None for all
    step: has S sequences with T tokens: query_starts, (S + 1,), where the tokens of each begin, and
        T; lengths, (S,), how many keys each has; block_tables, (S, width); all int32. And numbers
        that the host knows: longest_query and longest_keys, the most of any sequence.
    soft_cap: scores, scaled, become soft_cap * tanh(score / soft_cap); None for none
    sinks: (heads,) float32: e^sink is one more weight of a head's softmax; None for none

    Returns (T, heads, head_dim). Heads and dtype are those of the model; float32 stays float32.
    """
    if not cache.is_contiguous():
        raise ValueError(f"cache={tuple(cache.shape)} is not accepted: it must be contiguous")
    num_tokens, num_heads, head_dim = query.shape
    if head_dim > 512:
        raise ValueError(f"head_dim={head_dim} is not accepted: it must be at most 512")
    numbers, scales = parts_of(cache)
    _, _, block_size, kv_heads, _ = numbers.shape
    num_seqs = len(step.lengths)
    group = num_heads // kv_heads
    columns = triton.next_power_of_2(head_dim)
    # Tiles of prompts are large: all of their rows share the keys that are read. A step with
    # decodes and prompts has smaller ones, since most rows of a decode's tile are empty.
    kind = 0 if step.longest_query == 1 else 1 if num_tokens * group < 128 * num_seqs else 2
    rows, keys, warps, stages = TILES[query.dtype == torch.float32, max(columns, 128)][kind]
    # a group always fits
    rows = max(rows, triton.next_power_of_2(group))
    queries = rows // group
    # a sequence has at most one tile that is not full
    tiles = (num_tokens + num_seqs * (queries - 1)) // queries
    splits = num_splits(tiles * kv_heads, step.longest_keys, query.device)

    out = query.new_empty(query.shape)
    parts = query.new_empty(splits, *query.shape, dtype=torch.float32) if splits > 1 else out
    sums = parts.new_empty(parts.shape[:-1]) if splits > 1 else None
    attention_kernel[(tiles, kv_heads, splits)](
        query.contiguous(), *numbers, *scales, parts, sums, step.query_starts, step.lengths,
        step.block_tables, num_seqs, num_tokens, step.block_tables.stride(0), window or 2**30,
        LOG2_E.value / head_dim**0.5, soft_cap, sinks, block_size, kv_heads, group, head_dim,
        columns, queries, rows, keys, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    if splits > 1:
        join_kernel[num_tokens * num_heads,](
            parts, sums, out, head_dim, columns, splits, enable_fp_fusion=True)
    return out


def num_splits(programs: int, longest_keys: int, device: torch.device) -> int:
    """Returns how many parts, a power of 2, each tile's keys are split into.

    Two programs for each core of the GPU are enough, and 128 keys are the least for one.
    """
    most = min(2 * num_cores(device) // max(programs, 1), longest_keys // 128, 64)
    return 1 << max(most, 1).bit_length() - 1


def num_cores(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has; for a CPU, whose kernels are interpreted, 8."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 8
