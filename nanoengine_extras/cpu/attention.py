"""Paged attention on a CPU, fused with head norms, rotation and the writing of K and V.

    for each tile of tokens of a sequence and each KV head:
        norm and rotate its keys, write its K and V to the cache
    for each KV head and each tile (the rows are its tokens' queries for this head):
        norm and rotate the queries
        for each span of 128 keys, up to the last token's:
            scores    rows x keys: queries times keys
            softmax   of each row: scores become weights; sums so far may shrink
            values    rows x head_dim: weights times values are added to the sums

kv[0 or 1, block, kv_head] is the K or V of one head in a block, in 32-bit words: one float32 or two
bfloat16 each. Keys and values lie in tiles of 16 keys; each line is read as vectors (`vectors.py`).

    a tile of K: [word: head_dim][16 keys]           a tile of V: [word: keys][head_dim]
        k0[0:2] k1[0:2] k2[0:2] …                       v0[0],v1[0]  v0[1],v1[1]  …
        k0[2:4] k1[2:4] k2[2:4] …                       v2[0],v3[0]  v2[1],v3[1]  …

Blocks are padded to whole tiles, head_dim to whole vectors. A slot that was never written can hold
NaN: its scores are masked, and its values never reach a result. In a pair of values, `write` sets
the other half to 0 if it is NaN or infinity. (NaN or infinity that was written does reach all
tokens of its tile, since 0 times NaN is NaN.)

On a CPU with AMX (`tiles.py`), 16 of these lines form a tile of AMX.

With few tokens, a tile is limited by memory. So while it reads the keys of a span, it prefetches
the values, and while it reads the values, it prefetches the keys of the next span or task. In
`qkv`, the same head of two tokens is far apart, so each head is prefetched a few tokens ahead.

The softmax is online (Milakov & Gimelshein, 2018, arXiv:1805.02867; FlashAttention-2: Dao, 2023,
arXiv:2307.08691), and the keys lie in blocks (PagedAttention: Kwon et al., 2023, arXiv:2309.06180).
Spans begin at fixed positions, and each sum adds them in a fixed order. So a token has the same
bits whatever else runs, and however its prompt was chunked. The tests compare it with
`plain_attention` in `tests/cpu/reference.py`.

A cache can also hold numbers of 8 bits, with a float32 scale for each head of K and of V of a
token. A tile is then [head_dim][16 keys] or [16 keys][head_dim] bytes, and 16 scales. A span is
converted (`open_span`) before it is multiplied.

Scores can have a soft cap (Gemma 2: Gemma Team, 2024, arXiv:2408.00118). A head can have a sink
(Xiao et al., 2023, arXiv:2309.17453): one more score in its softmax, without a value.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanoengine_extras.cpu.compiling import bits_of_number, compile_kernel, run_call, take_tasks
from nanoengine_extras.cpu.memory import in_huge_pages
from nanoengine_extras.cpu.tiles import (
    HAS_TILES, TILE_SIZES, add_tiles, begin_tiles, end_tiles, load_sums, store_sums)
from nanoengine_extras.cpu.vectors import (
    DTYPES, LANES, add_products, array_at, as_words, copy_rows, exp2, fill, has, inlined, largest,
    load, load_bytes, load_part, numbers_at, prefetch, stack, store, store_normal, store_part,
    total, where_less)

# the keys of one step of the softmax, and the index of each
SPAN = 128
INDICES = np.arange(SPAN, dtype=np.float32)
# the start of lines that lie in one piece
ONE_PIECE = np.zeros(1, np.int64)
# a row of new sums: two vectors
ZEROS = np.zeros(2 * LANES, np.float32)
# where the vectors of a line of V begin, for a head_dim of up to 4,096
COLUMNS = np.arange(0, 4096, LANES)
# The sums of this many rows, in this many vectors in all, stay in registers.
MOST_ROWS, MOST_VECTORS = (8, 16) if has("avx512f") else (4, 4)
SUMS = MOST_VECTORS * LANES
# AMX multiplies two vectors, and 16 words of depth, at a time. Heads of these sizes fit exactly.
TILED_HEAD_DIMS = range(2 * LANES, 257, 2 * LANES)
TAIL = LANES * max(TILED_HEAD_DIMS)
# how many tokens ahead a head is prefetched
AHEAD = 4
# the state of a row: 16 partial sums of its weights, and the scaled maximum of its scores
WEIGHTS, MAXIMUM, STATE = 0, LANES, 2 * LANES
# a masked score, and the maximum before the first score: 2^(HIDDEN - LOWEST) is 0
HIDDEN = np.float32(-1e30)
LOWEST = np.float32(-1e20)
# A row's sums shrink when its maximum is raised. So the maximum is kept until a weight would be
# above 2^8.
MOST_EXPONENT = np.float32(8)
# the size of a scale, in bytes
SCALE = 4


@inlined()
def round_up(number, multiple):
    return -(-number // multiple) * multiple


def numbers_per_token(head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Returns how many numbers a token's K, or its V, takes up in a block, with padding and, in 8
    bits, a scale."""
    size = round_up.py_func(head_dim, LANES) + (SCALE if dtype == torch.int8 else 0)
    numbers = size * round_up.py_func(block_size, LANES)
    # whole words
    return round_up.py_func(-(-numbers // block_size), 4 if dtype == torch.int8 else 2)


def largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def empty_cache(layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int,
                dtype: torch.dtype) -> Tensor:
    """K and V of all layers, (layers, 2, num_blocks, block_size, kv_heads, numbers).

    dtype: int8 for all numbers of 8 bits. The system provides the memory when it is first written
    to. Only the kernel knows the layout and the padding within a block, so copy whole blocks only.
    """
    size = numbers_per_token(head_dim, block_size, dtype)
    shape = layers, 2, num_blocks, kv_heads, block_size, size
    return in_huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape).transpose(3, 4)


# --------------------------------------------------------------------- norm, rotation, cache


@inlined()
def ask_for(head):
    """Prefetches a head that is needed soon. The token need not exist."""
    for d in range(0, len(head), 64 // head.itemsize):
        prefetch(head, d, 2)


@inlined()
def inverse_rms(row, size, eps):
    """1 / sqrt(the mean of all squares + eps)."""
    squares = fill(np.float32(0))
    for i in range(0, size, LANES):
        numbers = load_part(row, i, size)
        squares = squares + numbers * numbers
    return np.float32(1) / np.sqrt(total(squares) / np.float32(size) + np.float32(eps))


@inlined()
def norm_and_rotate(head, weight, cos, sin, out, eps, head_dim):
    """RMSNorm (unless eps is negative) and RoPE of one head, (head_dim,)."""
    # numba knows head_dim as a constant, but not `end`: so it compiles fewer variants, see
    # `copy_rows`
    half, end = head_dim // 2, head_dim // 2 * 2
    scale = fill(inverse_rms(head, end, eps) if eps >= 0 else np.float32(1))
    for d in range(0, half, LANES):
        left = load_part(head, d, half) * load_part(weight, d, half) * scale
        right = load_part(head, half + d, end) * load_part(weight, half + d, end) * scale
        c, s = load_part(cos, d, half), load_part(sin, d, half)
        store_part(out, d, half, left * c - right * s)
        store_part(out, half + d, end, right * c + left * s)


@inlined()
def write(space, value, keys, values, offset, head_dim, width, per_word):
    """Writes K (in `space`) and V, (head_dim,) each, to their place in a block, (words,)."""
    words = array_at(space, head_dim // per_word, np.uint32)
    tile, lane = divmod(offset, LANES)
    for w in range(head_dim // per_word):
        keys[tile * LANES * width // per_word + w * LANES + lane] = words[w]
    pair, second = divmod(offset, per_word)
    line = values[pair * width:]
    kept = np.uint32(0 if per_word == 1 else 0xFFFF if second else 0xFFFF0000)
    for d in range(head_dim):
        other = line[d] & kept
        # a second half that was never written can be NaN or infinity
        is_number = other & 0x7F800000 != 0x7F800000
        line[d] = (other if is_number else np.uint32(0)) | np.uint32(value[d]) << 16 * second


@inlined()
def in_8_bits(number, is_float):
    """The byte of a number: e4m3 or int8, to nearest, ties to even."""
    if not is_float:
        # in so large a number the last bits count units
        return np.uint8(np.float32(number + np.float32(1.5 * 2**23)).view(np.int32))
    size = np.float32(abs(number))
    sign = np.uint8(0x80 if number < 0 else 0)
    if size < np.float32(2**-6):
        # the last bits count the subnormal numbers, which are multiples of 2^-9
        return sign | np.uint8(np.float32(size + np.float32(2**14)).view(np.int32))
    bits = size.view(np.int32)
    # exponents of float32 are 120 larger
    return sign | np.uint8((bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3))


@inlined()
def write_rounded(head, block, offset, between, along, head_dim, width, is_float):
    """Writes K or V of one head, (head_dim,), in 8 bits to its place in a block, (bytes,).

    between: from one token of a tile to the next; along: from one number of the head to the next
    """
    tile, lane = divmod(offset, LANES)
    place = tile * LANES * (width + SCALE)
    numbers = array_at(stack(width), width, np.float32)
    for d in range(0, width, LANES):
        store(numbers, d, load_part(head, d, head_dim))
    # the second is NaN if a number is not finite, or else 0
    size, check = np.float32(1e-30), np.float32(0)
    for number in numbers:
        size = max(size, abs(number))
        check += number * np.float32(0)
    scale = np.float32(size / np.float32(448 if is_float else 127) + check)
    block.view(np.float32)[(place + LANES * width) // SCALE + lane] = scale
    for d in range(head_dim):
        block[place + lane * between + d * along] = in_8_bits(numbers[d] / scale, is_float)


# -------------------------------------------------------------------------------- attention


@inlined()
def multiply(left, right, starts, lines, columns, depth, out, pitch, panel, soon):
    """out[r, c] = or += the sum over k < depth of left[r, k] * right[k, c], in a fixed order.

                 left       a line of right                 a piece of lines    columns are in
        scores   queries    one word from each of 16 keys   all                 tiles of keys
        values   weights    one word from each of head_dim  a tile of values    vectors of head_dim

    left, out: words, and float32; a row begins `pitch` words after the row before
    right: words; each piece of its lines begins at one of `starts`
    lines: (how many a piece has, the distance between two)
    columns: where each vector begins, in the first line
    panel: (rows, vectors, per_word, is_tiled, adds): how much is multiplied, how many numbers a
        word holds, whether AMX multiplies: it takes 16 lines at a time, all of them finite; and
        whether the sum is added to what `out` holds
    soon: (words, starts, all_rows): lines that are needed soon, laid out like `right`. With each
        line that is multiplied, one of them is prefetched. AMX does so only for few rows, which
        wait for memory.
    """
    in_piece, line = lines
    words_soon, starts_soon, all_rows = soon
    rows, vectors, per_word, is_tiled, adds = panel
    # if this global says that there are no tiles, numba drops this branch, and compiles faster
    if HAS_TILES and is_tiled:
        below = rows - min(rows, LANES)
        if adds:
            load_sums(out, pitch, below)
        else:
            load_sums(ZEROS, 0, below)
        for k in range(0, depth, LANES):
            start = starts[k // in_piece] + k % in_piece * line
            add_tiles(left[:, k:], pitch, below, right, start, columns, line)
            start = starts_soon[k // in_piece] + k % in_piece * line
            for i in range(LANES * vectors if all_rows <= LANES else 0):
                prefetch(words_soon, start + columns[i % vectors] + i // vectors * line, 2)
        store_sums(out, pitch, below)
        return
    sums = stack(SUMS)
    if adds:
        copy_rows(out, pitch, sums, vectors * LANES, np.int64(rows), np.int64(vectors))
    else:
        copy_rows(ZEROS, 0, sums, vectors * LANES, np.int64(rows), np.int64(vectors))
    for first in range(0, depth, in_piece):
        start = starts[first // in_piece]
        ahead = starts_soon[first // in_piece] - start
        for k in range(first, min(first + in_piece, depth)):
            for c in range(vectors):
                numbers = load(right, start + columns[c])
                prefetch(words_soon, start + columns[c] + ahead, 2)
                for r in range(rows):
                    i = (r * vectors + c) * LANES
                    word = fill(left[r, k])
                    store(sums, i, add_products(word, numbers, load(sums, i), per_word))
            start += line
    copy_rows(sums, vectors * LANES, out, pitch, np.int64(rows), np.int64(vectors))


@inlined()
def limited(score, cap, space):
    """cap * tanh(score / cap). space: float32 numbers, see `exp2`"""
    most, one, two = fill(np.float32(64)), fill(np.float32(1)), fill(np.float32(2))
    exponent = score * fill(np.float32(2 * math.log2(math.e)) / cap)
    # 2^64 gives a tanh of 1. A NaN stays
    exponent = where_less(most, exponent, most, exponent)
    return fill(cap) * (one - two / (exp2(exponent, space) + one))


@inlined()
def soften(scores, weights, totals, state, oldest, newest, scale, cap):
    """The scores of a row in a span become weights: 2^(score * scale - maximum).

    weights: the same memory as scores
    totals: the row's weighted values so far; state: see WEIGHTS and MAXIMUM
    oldest, newest: the first and the last key of the span that the row sees
    cap: the soft cap of scores that are not scaled, a constant; 0 for none
    """
    hides = oldest > 0 or newest < len(scores) - 1
    highest = fill(LOWEST)
    for i in range(0, len(scores), LANES):
        score = load(scores, i)
        if cap:
            score = limited(score, cap, state)
            store(scores, i, score)
        if hides:
            index = load(INDICES, i)
            score = where_less(index, fill(oldest), fill(HIDDEN), score)
            score = where_less(fill(newest), index, fill(HIDDEN), score)
            store(scores, i, score)
        highest = where_less(highest, score, score, highest)

    maximum = state[MAXIMUM]
    new = largest(highest) * scale
    if new > maximum + MOST_EXPONENT:
        shrink = exp2(fill(maximum - new), state)
        store(state, WEIGHTS, load(state, WEIGHTS) * shrink)
        for d in range(0, len(totals), LANES):
            store(totals, d, load(totals, d) * shrink)
        maximum = state[MAXIMUM] = new

    added = load(state, WEIGHTS)
    for i in range(0, len(scores), LANES):
        exponent = add_products(load(scores, i), fill(scale), fill(-maximum), 1)
        weight = exp2(exponent, weights)
        store_normal(weights, i, weight)
        added = added + weight
    store(state, WEIGHTS, added)


@inlined()
def find_tile(task, starts, tiles, positions, sequence_of_token):
    """Returns (begin, end, last, kv_head, sequence) of a task, which computes the queries for one
    KV head of a tile: the tokens from `begin` to `end` of a step. The last token's position is
    `last`."""
    begin, end = starts[task % tiles], starts[task % tiles + 1]
    return begin, end, positions[end - 1], task // tiles, sequence_of_token[begin]


@inlined()
def find_keys(base, tile, block_tables, window, kv, shape):
    """Returns the first key of the first span, at or after `base`, that a tile of tokens sees, and
    the places where the span's tiles of keys begin in K or V of a layer. Tiles after the last key
    repeat its tile."""
    begin, end, last, kv_head, sequence = tile
    _, _, _, block_size, _, unit, tile_size, _ = shape
    base = max(base, (last + 2 - (end - begin) - window) // unit * unit)
    places = np.empty(SPAN // LANES, np.int64)
    for t in range(len(places)):
        index, offset = divmod(min(base + t * LANES, last), block_size)
        block = np.int64(block_tables[sequence, index]) * kv.shape[2] + kv_head
        places[t] = block * kv.shape[3] + offset // LANES * tile_size
    return base, places


@inlined()
def as_it_is(kv, here, later, num_tiles, num_keys, opened, shape):
    """Keys, values, and the places of this span and of a later one, of a cache of words."""
    return kv[0], kv[1], here, later


@inlined()
def open_span(kv, here, later, num_tiles, num_keys, opened, shape):
    """The same for a cache of bytes: they are converted to words, in memory that is `opened`.

    here, later: see `find_keys`; tiles at `later` are prefetched
    """
    _, width, _, _, per_word, _, tile_size, is_float = shape
    size = LANES * width // per_word
    keys, values = opened, opened[SPAN // LANES * size:]
    places = np.arange(SPAN // LANES) * size
    scales = array_at(stack(LANES), LANES, np.float32)
    second = per_word - 1
    for t in range(num_tiles):
        for i in range(0, tile_size, 64):
            prefetch(kv[0], later[t] + i, 2)
            prefetch(kv[1], later[t] + i, 2)
        scale = load(kv[0], here[t] + LANES * width)
        for w in range(width // per_word):
            at = here[t] + w * per_word * LANES
            upper = load_bytes(kv[0], at + second * LANES, is_float) * scale
            store(keys, places[t] + w * LANES,
                  as_words(load_bytes(kv[0], at, is_float) * scale, upper, per_word))
        store(scales, 0, load(kv[1], here[t] + LANES * width))
        # values that were never written: their weights are 0
        scales[max(0, min(num_keys - t * LANES, LANES)):] = 0
        for k in range(0, LANES, per_word):
            for d in range(0, width, LANES):
                at = here[t] + k * width + d
                lower = load_bytes(kv[1], at, is_float) * fill(scales[k])
                upper = load_bytes(kv[1], at + second * width, is_float) * fill(scales[k + second])
                place = places[t] + k // per_word * width + d
                store(values, place, as_words(lower, upper, per_word))
    return keys, values, places, places


@inlined(inline="always")
def attend(qkv, kv, out, rope, of_heads, tile, after, block_tables, window, space, shape, key_panel,
           panel, opening):
    """Computes attention for a tile of tokens of one sequence. The rows are its queries for one KV
    head.

    of_heads: (norm, eps, sinks, cap): the norm of queries; a sink of each query head, or none; see
        `soften`
    tile, after: see `find_tile`; keys of the tile after this one are prefetched
    space: for each row a query, the scores of a span, the weighted values so far, and a state, see
        WEIGHTS and MAXIMUM; weights take the place of the scores. Then what `opening` needs
    shape: (head_dim, the same in whole vectors, group_size, block_size, per_word, unit, tile_size,
        is_float): spans begin again after `unit` keys; a tile of keys has `tile_size` places in
        `kv`; numbers of 8 bits are e4m3
    key_panel, panel: of scores and of values, see `multiply`
    opening: `as_it_is` or `open_span`
    """
    begin, end, last, kv_head, _ = tile
    head_dim, width, group_size, _, per_word, unit, _, _ = shape
    norm, eps, sinks, cap = of_heads
    rows, vectors, _, is_tiled, _ = panel
    begin_tiles(TILE_SIZES[min(rows, LANES)])
    tail = stack(TAIL)
    words = head_dim // per_word
    num_rows = (end - begin) * group_size
    pitch = words + SPAN + width + STATE
    scratch = array_at(space, (round_up(num_rows, rows), pitch), np.float32)
    opened = array_at(space, scratch.size + 2 * SPAN * width, np.float32)[scratch.size:]
    # the same memory, as numbers of the type of `qkv`
    numbers = array_at(space, (num_rows, pitch * per_word), qkv.dtype)
    scores, weights = scratch[:, words:], numbers[:, head_dim:]
    totals = scratch[:, words + SPAN:][:, :width]
    states = scratch[:, words + SPAN + width:]
    # totals and states
    scratch[:, words + SPAN:] = 0
    for r in range(num_rows):
        token = begin + r // group_size
        head = kv_head * group_size + r % group_size
        ask_for(qkv[token + AHEAD, head])
        norm_and_rotate(qkv[token, head], norm, rope[0, token], rope[1, token], numbers[r],
                        eps, head_dim)
        states[r, MAXIMUM] = LOWEST
        if len(sinks):
            states[r, WEIGHTS] = 1
            states[r, MAXIMUM] = sinks[head] * np.float32(math.log2(math.e))

    scale = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    first = last + 1 - (end - begin)
    # for a plain 0, numba would compile one more variant
    base, places = find_keys(np.int64(0), tile, block_tables, window, kv, shape)
    while base <= last:
        stop = min(base + SPAN, (base // unit + 1) * unit)
        num_keys = min(stop, last + 1) - base
        num_tiles = round_up(num_keys, LANES * per_word if is_tiled else LANES) // LANES
        _, places_ahead = (find_keys(stop, tile, block_tables, window, kv, shape) if stop <= last
                    else find_keys(np.int64(0), after, block_tables, window, kv, shape))
        keys, values, here, later = opening(
            kv, places, places_ahead, num_tiles, num_keys, opened, shape)

        # scores: a line holds one word from each key of a tile
        for t in range(0, num_tiles, key_panel[1]):
            for r in range(0, num_rows, rows):
                multiply(scratch[r:], keys, ONE_PIECE, (words, LANES), here[t:], words,
                         scores[r:, t * LANES:], pitch, key_panel, (values, ONE_PIECE, num_rows))

        # softmax
        for r in range(num_rows):
            newest = first + r // group_size - base
            soften(scores[r, :num_tiles * LANES], weights[r], totals[r], states[r],
                   np.float32(newest + 1 - window), np.float32(min(newest, num_keys - 1)), scale,
                   cap)

        # values: a line holds words from one key, or two; with AMX, the last tile's lines that are
        # unwritten become 0
        depth = (num_keys + per_word - 1) // per_word
        rest = depth % LANES if is_tiled else 0
        whole = (depth - rest) // (LANES // per_word)
        if HAS_TILES and rest:
            for i in range(0, LANES * width, LANES):
                line = load(values, here[whole] + i) if i < rest * width else fill(np.float32(0))
                store(tail, i, line)
        for c in range(0, width, vectors * LANES):
            across = COLUMNS[c // LANES:]
            for r in range(0, num_rows, rows):
                multiply(scores[r:], values, here, (LANES // per_word, width), across, depth - rest,
                         totals[r:, c:], pitch, panel, (keys, later, num_rows))
                if HAS_TILES and rest:
                    multiply(scores[r:, depth - rest:], tail, ONE_PIECE, (LANES, width), across,
                             rest, totals[r:, c:], pitch, panel, (keys, later[whole:], num_rows))
        base, places = stop, places_ahead

    end_tiles()
    for r in range(num_rows):
        inverse = fill(np.float32(1) / total(load(states[r], WEIGHTS)))
        result = out[begin + r // group_size, kv_head * group_size + r % group_size]
        for d in range(0, head_dim, LANES):
            store_part(result, d, head_dim, load(totals[r], d) * inverse)


@functools.cache
def make_kernel(head_dim: int, group_size: int, block_size: int, dtype: torch.dtype,
                soft_cap: float | None = None, stored: torch.dtype | None = None) -> Callable:
    """Returns the kernel for these sizes.

    soft_cap: limits scaled scores; None for none. stored: int8 or float8_e4m3fn for a cache of 8
    bits, or None

    kernel(kv, norms, sinks, kv_heads, blocks, window, eps_bits,
           qkv, out, rope, slot_mapping, block_tables, sequence_of_token, positions,
           tokens, sequences, table_width)

    The arguments in the first line are the same in all steps. Arrays are addresses. uint: the bits
    of a number in `dtype`, float32 or bfloat16:

        kv: (2, blocks, kv_heads, words) uint32, or bytes, the cache; K and V are written to it
        norms: (2, head_dim) float32, the weights of the norms of queries and of keys
        sinks: (heads,) float32; 0 for none
        eps_bits: the bits of the norms' eps in float32, which is -1 without norms
        qkv: (tokens, heads + 2 * kv_heads, head_dim) uint, queries, then keys, then values
        out: (tokens, heads, head_dim) uint, is written
        rope: (2, tokens, head_dim / 2) float32, cos and sin of a token's angles
        slot_mapping: (tokens,) int64, where in the cache a token's K and V go: block * block_size
            + offset
        block_tables: (sequences, table_width) int32
        sequence_of_token: (tokens,) int32, rows of block_tables
        positions: (tokens,) int32; a token sees keys 0 to its own, or the last `window` of them
    """
    uint = DTYPES[dtype]
    per_word = 4 // dtype.itemsize
    cap = np.float32((soft_cap or 0) * math.sqrt(head_dim))
    width = round_up.py_func(head_dim, LANES)
    # even, so that a pair of values is written within one task
    most_tokens = 2 * max(1, 32 // group_size)
    is_tiled = (HAS_TILES and per_word == 2 and head_dim in TILED_HEAD_DIMS
                and block_size % (LANES * per_word) == 0)

    def panel_of(rows: int, size: int, adds: bool) -> tuple[int, int, int, bool, bool]:
        vectors = 2 if is_tiled else largest_divisor(size // LANES, MOST_VECTORS // rows)
        return rows, vectors, per_word, is_tiled, adds

    # A tile of keys lies in one block. So for other block sizes, spans begin again in each block.
    unit = SPAN if block_size % LANES == 0 else block_size
    # LLVM unrolls and vectorises over these numbers. numba knows those in plain tuples when it
    # compiles a function; it would not know those in named tuples, and would compile for longer.
    is_float, is_rounded = stored == torch.float8_e4m3fn, stored is not None
    tile_size = LANES * (width + SCALE) if is_rounded else LANES * width // per_word
    shape = (head_dim, width, group_size, block_size, per_word, unit, tile_size, is_float)
    rows = 2 * LANES if is_tiled else MOST_ROWS
    decode_rows = largest_divisor(group_size, rows)
    key_panel, panel = panel_of(rows, 2 * LANES, False), panel_of(rows, width, True)
    decode_key_panel = panel_of(decode_rows, 2 * LANES, False)
    decode_panel = panel_of(decode_rows, width, True)
    most_rows = round_up.py_func(most_tokens * group_size, rows)
    # see `attend`: a query, scores, values and a state
    scratch_size = most_rows * (head_dim // per_word + SPAN + width + STATE)
    scratch_size += 2 * SPAN * width // per_word if is_rounded else 0
    in_cache = torch.int8 if is_rounded else dtype
    place = np.uint8 if is_rounded else np.uint32
    block_places = block_size * numbers_per_token(head_dim, block_size, in_cache)
    block_places //= 1 if is_rounded else per_word

    def kernel(phase, threads, arguments_at):
        (kv_at, norms_at, sinks_at, kv_heads, blocks, window, eps_bits, qkv_at, out_at, rope_at,
         slots_at, tables_at, sequence_of_token_at, positions_at, tokens, sequences,
         table_width) = numbers_at(arguments_at, 17)
        eps = np.int32(eps_bits).view(np.float32)
        heads = group_size * kv_heads
        qkv = array_at(qkv_at, (tokens, heads + 2 * kv_heads, head_dim), uint)
        kv = array_at(kv_at, (2, blocks, kv_heads, block_places), place)
        out = array_at(out_at, (tokens, heads, head_dim), uint)
        norms = array_at(norms_at, (2, head_dim), np.float32)
        of_heads = norms[0], eps, array_at(sinks_at, heads if sinks_at else 0, np.float32), cap
        rope = array_at(rope_at, (2, tokens, head_dim // 2), np.float32)
        slot_mapping = array_at(slots_at, tokens, np.int64)
        block_tables = array_at(tables_at, (sequences, table_width), np.int32)
        sequence_of_token = array_at(sequence_of_token_at, tokens, np.int32)
        positions = array_at(positions_at, tokens, np.int32)
        # every thread finds all tiles: consecutive tokens of a sequence, within a block
        starts = np.zeros(tokens + 1, np.int64)
        # for a plain 0, numba would compile one more variant of `find_tile`
        tiles = np.int64(0)
        for token in range(1, tokens + 1):
            if (token == tokens or sequence_of_token[token] != sequence_of_token[token - 1]
                    or slot_mapping[token] % block_size % most_tokens == 0):
                tiles += 1
                starts[tiles] = token
        tasks = tiles * kv_heads
        # decodes are small tasks, and each reads what the one before it has prefetched
        size = -(-tasks // (8 * threads)) if tiles == tokens else 1

        if phase == 0:
            # tile by tile: the heads of its tokens lie side by side in qkv
            for task in take_tasks(tasks, size, arguments_at):
                tile, kv_head = divmod(task, kv_heads)
                # memory for a rotated key
                space = stack(head_dim)
                for token in range(starts[tile], starts[tile + 1]):
                    block, offset = divmod(slot_mapping[token], block_size)
                    ask_for(qkv[token + AHEAD, heads + kv_head])
                    ask_for(qkv[token + AHEAD, heads + kv_heads + kv_head])
                    norm_and_rotate(qkv[token, heads + kv_head], norms[1], rope[0, token],
                                    rope[1, token], array_at(space, head_dim, uint), eps, head_dim)
                    value = qkv[token, heads + kv_heads + kv_head]
                    if is_rounded:
                        write_rounded(array_at(space, head_dim, uint), kv[0, block, kv_head],
                                      offset, 1, LANES, head_dim, width, is_float)
                        write_rounded(value, kv[1, block, kv_head], offset, width, 1, head_dim,
                                      width, is_float)
                    else:
                        write(space, value, kv[0, block, kv_head], kv[1, block, kv_head], offset,
                              head_dim, width, per_word)
            return

        opening = open_span if is_rounded else as_it_is
        # head by head: its keys and values stay in the cache while its tiles read them
        for task in take_tasks(tasks, size, arguments_at):
            tile = find_tile(task, starts, tiles, positions, sequence_of_token)
            after = find_tile(min(task + 1, tasks - 1), starts, tiles, positions, sequence_of_token)
            space = stack(scratch_size)
            if tile[1] - tile[0] == 1:
                attend(qkv, kv, out, rope, of_heads, tile, after, block_tables, window, space,
                       shape, decode_key_panel, decode_panel, opening)
            else:
                attend(qkv, kv, out, rope, of_heads, tile, after, block_tables, window, space,
                       shape, key_panel, panel, opening)

    return compile_kernel(kernel, phases=2)


# --------------------------------------------------------------------------- of tensors


def paged_attention(qkv: Tensor, norms: Tensor, eps: float, angles: Tensor, cache: Tensor,
                    window: int | None, *step: Tensor, soft_cap: float | None = None,
                    sinks: Tensor | None = None) -> Tensor:
    """Computes everything between the two projections: head norms, rotation, cache and attention,
    for tokens of prompts and decodes alike.

    qkv: (T, heads + 2 * kv_heads, head_dim)
    norms: (2, head_dim) float32, weights of the norms of query heads and key heads
    eps: of these norms; -1 for a model without them
    angles: (2, T, head_dim / 2), cos and sin, float32
    cache: of a layer, from `empty_cache`; K and V are written to it
    window: how many keys a token sees; None for all
    soft_cap: scores, scaled, become soft_cap * tanh(score / soft_cap); None for none. There is a
        kernel for each
    sinks: (heads,) float32: e^sink is one more weight of a head's softmax; None for none
    step: slot_mapping (T,) int64; block_tables (sequences, width), sequence_of_token (T,) and
        positions (T,) int32

    Returns (T, heads, head_dim). All tensors except the cache must be contiguous: the kernel gets
    addresses, and cannot check what is there.
    """
    out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * cache.shape[3], qkv.shape[2])
    run_call(call_attention(
        cache, out.shape[1], norms, eps, window, soft_cap, sinks,
        *step_numbers(qkv, out, angles, *step)))
    return out


def call_attention(cache: Tensor, num_queries: int, norms: Tensor, eps: float,
                   window: int | None, soft_cap: float | None, sinks: Tensor | None,
                   *step: int) -> list[int]:
    """Returns the call of the kernel. step: see `step_numbers`"""
    _, num_blocks, block_size, kv_heads, _ = cache.shape
    kernel = make_kernel(norms.shape[1], num_queries // kv_heads, block_size, cache.dtype, soft_cap,
                         getattr(cache, "stored", None))
    return kernel(cache.data_ptr(), norms.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
                  kv_heads, num_blocks, window or 2**31 - 1, bits_of_number(eps), *step)


def step_numbers(qkv: Tensor, out: Tensor, angles: Tensor, slot_mapping: Tensor,
                 block_tables: Tensor, sequence_of_token: Tensor, positions: Tensor) -> list[int]:
    """Returns the kernel's arguments that differ between steps, in the kernel's order."""
    tensors = qkv, out, angles, slot_mapping, block_tables, sequence_of_token, positions
    return [*map(Tensor.data_ptr, tensors), len(positions), *block_tables.shape]
