"""From logits to tokens: temperature, the three truncations, and one draw for each row.

    a matrix of logits ── constrain ──▶ scale ──▶ truncate ──▶ draw ──▶ a token for each row

`StepInputs.draws` has a row of parameters for each row of logits. It came to the device with the
other inputs, so that nothing here waits for a GPU. Rows with the same needs are sampled as one
matrix, and rows without any cost nothing. There is no generator state: a draw depends only on the
seed of its sequence and on its position.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import nanoengine_cpu
from nanoengine.sequence import NO_TOKEN, NONE_LEFT, Sequence
from nanoengine.step_inputs import send

# The most logits of one matrix. On a CPU it fits the cores' caches; on a GPU it is small compared
# with the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**24}


# ------------------------------------------------------------------------- rows that are alike


def max_rows(logits: Tensor) -> int:
    """Returns the most rows that a matrix can have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def matrices(keys: dict[int, Any], logits: Tensor) -> Iterator[tuple[Any, list[int], Tensor]]:
    """Groups rows with the same key, at most as many at a time as fit a matrix.

    keys: one for each row. Yields a key, and its rows on host and device.
    """
    rows_by_key = defaultdict(list)
    for row, key in keys.items():
        rows_by_key[key].append(row)
    most = max_rows(logits)
    for key, alike in rows_by_key.items():
        for start in range(0, len(alike), most):
            rows = alike[start:start + most]
            yield key, rows, send(rows, logits.device)


def sample(logits: Tensor, draws: Tensor, seqs: list[Sequence], last_sampled: Tensor,
           drawn: Tensor | None = None) -> Tensor:
    """Returns one token for each sequence, from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows after those of the sequences are padding.
    draws: (rows, 5), from `StepInputs`.
    last_sampled: the values of pending tokens.
    drawn: the result of `sample_plain`, if known; then only rows that need more are sampled.

    A row with NaN or infinity gets NO_TOKEN; a row whose constraints permit no token, NONE_LEFT.
    """
    edits = {row: seq.params.edits for row, seq in enumerate(seqs) if seq.params.edits}
    if drawn is None:
        plain = logits[:len(seqs)]
        is_greedy = not any(seq.params.temperature for seq in seqs if not seq.params.edits)
        drawn = likeliest(plain) if is_greedy else sample_plain(plain, draws)
    for kind, rows, index in matrices(edits, logits):
        members = [seqs[row] for row in rows]
        scores = logits.index_select(0, index).float()
        if "constraints" in kind:
            from nanoengine_extensions import constraints
            constraints.apply(scores, members, last_sampled)
        is_left = scores.amax(dim=-1) != -math.inf
        scale(scores, draws[index])
        # greedy rows are not truncated, whatever their top_k
        largest_k = max(seq.params.top_k for seq in members) if "top_k" in kind else 0
        tokens, scores = truncate(scores, draws[index], kind, largest_k)
        places = draw(scores, draws[index])
        drawn[index] = tokens[places].where(places >= 0, places).where(is_left, NONE_LEFT)
    return drawn[:len(seqs)]


def sample_plain(logits: Tensor, draws: Tensor) -> Tensor:
    """Returns one token for each row by temperature alone. A CUDA graph can end here."""
    most = max_rows(logits)
    return torch.cat([
        draw(scale(part.to(torch.float32, copy=True), part_draws), part_draws)
        for part, part_draws in zip(logits.split(most), draws.split(most))])


def likeliest(logits: Tensor) -> Tensor:
    """Returns the token with the largest logit of each row; the first one of several."""
    largest, tokens = nanoengine_cpu.first_max(logits)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


# ----------------------------------------------------------------------------- steps, on float32


def scale(scores: Tensor, draws: Tensor) -> Tensor:
    """Shifts each row to a maximum of 0, then divides it by its temperature, in place.

    Greedy rows are divided by 1e-30: only the maximum keeps weight, and float32 has this number.
    """
    temperature = draws[:, :1].float()
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature.clamp(min=1e-30))


def truncate(scores: Tensor, draws: Tensor, kind: tuple[str, ...],
             largest_k: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens that some row can still draw, (few,), and their scores, (rows, few): -inf
    where the token is truncated. All rows need the truncations in `kind`, if there are any.

    The order is vLLM's: temperature, min-p (Nguyen et al., 2024, arXiv:2407.01082), top-k (Fan et
    al., 2018, arXiv:1805.04833; with all tokens as likely as the k-th), then top-p of the rest,
    renormalised. largest_k: that of these rows, known without waiting; 0 without top-k.
    """
    if kind == ("constraints",):
        return torch.arange(scores.shape[1], device=scores.device), scores
    min_p, top_k, top_p = draws[:, 1:4, None].unbind(1)
    # lower scores cannot be drawn
    least = bound = min_p.log().float()
    total = None
    if "top_p" in kind and not {"min_p", "top_k"} & {*kind}:
        total = scores.exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # together, all tokens with lower scores weigh less than half of 1 - top_p
        bound = (total * (1 - top_p) / (2 * scores.shape[1])).log().float()
    tokens = nanoengine_cpu.columns_above(scores, bound, largest_k)
    scores = scores[:, tokens]
    if largest_k:
        count = min(largest_k, len(tokens))
        kth = scores.topk(count).values.gather(1, top_k.long().clamp(max=count) - 1)
        least = least.maximum(kth)
    scores = scores.masked_fill(scores < least, -math.inf)
    if "top_p" in kind:
        # The nucleus (Holtzman et al., 2019, arXiv:1904.09751): the fewest likeliest tokens that
        # together reach top_p, including the one that crosses it. Of equally likely tokens, the
        # first ones count.
        ordered, order = scores.exp().sort(dim=-1, descending=True, stable=True)
        cumulated = ordered.cumsum(dim=-1, dtype=torch.float64)
        is_kept = cumulated - ordered < top_p * (cumulated[:, -1:] if total is None else total)
        scores = scores.masked_fill(~is_kept.scatter(1, order, is_kept), -math.inf)
    return tokens, scores


def draw(scores: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling: returns for each row the first place whose cumulated weight exceeds u *
    total, or NO_TOKEN if the total is NaN or 0. A place is a token, unless `truncate` has left few.

    scores: (rows, tokens) float32 with maximum 0, overwritten.

    All sums are float64, which loses nothing with 152k tokens. u is at most 1 - 2**-52: total times
    that is rounded to less than total, so that a token exceeds it. Rows do not depend on each
    other.
    """
    uniform = draws[:, 4:].clamp(max=1 - 2.0**-52)
    cumulated = scores.exp_().cumsum(dim=-1, dtype=torch.float64)
    totals = cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, uniform * totals, right=True)
    return torch.where(totals > 0, tokens, NO_TOKEN)[:, 0]
