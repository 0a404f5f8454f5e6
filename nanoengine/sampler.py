"""Logits to tokens: temperature, the three truncations, and one draw a row.

    a matrix of logits ── constrain ──▶ scale ──▶ truncate ──▶ draw ──▶ a token for each row

What a row is drawn by is a row of `StepInputs.draws`: it came to the device with the other inputs,
so that nothing here waits for a GPU. Rows that need the same are sampled as one matrix, and rows
that need nothing pay nothing. There is no generator state: a draw depends on the seed of its
sequence and on its position alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import nanoengine_cpu
from nanoengine.sequence import NO_TOKEN, NONE_LEFT, Sequence
from nanoengine.step_inputs import send

# The most logits of one matrix. On a CPU it stays in the cores' caches, on a GPU it is small beside
# the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**24}


# ------------------------------------------------------------------------- rows that are alike


def max_rows(logits: Tensor) -> int:
    """How many rows a matrix may have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def matrices(keys: dict[int, Any], logits: Tensor) -> Iterator[tuple[Any, list[int], Tensor]]:
    """The rows with the same key, as many at a time as a matrix may have.

    keys: by row. Yields a key, and its rows, on host and device.
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
    """One token for each sequence from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows behind those of the sequences are padding.
    draws: (rows, 5), of `StepInputs`.
    last_sampled: the tokens for which pending ones stand.
    drawn: what `sample_plain` gives, if that is known: only rows that need more are then sampled.

    A row with NaN or infinity gets NO_TOKEN, and one of which constraints leave no token NONE_LEFT.
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
        truncate(scores, draws[index], kind, max(seq.params.top_k for seq in members))
        drawn[index] = draw(scores, draws[index]).where(is_left, NONE_LEFT)
    return drawn[:len(seqs)]


def sample_plain(logits: Tensor, draws: Tensor) -> Tensor:
    """One token for each row by temperature alone. A CUDA graph can end here."""
    most = max_rows(logits)
    return torch.cat([
        draw(scale(part.to(torch.float32, copy=True), part_draws), part_draws)
        for part, part_draws in zip(logits.split(most), draws.split(most))])


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row, of several the first."""
    largest, tokens = nanoengine_cpu.first_max(logits)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


# ------------------------------------------------------------------- steps, in place on float32


def scale(scores: Tensor, draws: Tensor) -> Tensor:
    """A maximum of 0, then divided by the temperature of the row.

    1e-30 for greedy rows leaves weight to the maximum alone, and float32 can divide by it.
    """
    temperature = draws[:, :1].float()
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature.clamp(min=1e-30))


def truncate(scores: Tensor, draws: Tensor, kind: Iterable[str], largest_k: int) -> None:
    """Truncated tokens get -inf. All rows need the truncations that `kind` names.

    The order is vLLM's: temperature, min-p, top-k (with all that are as likely as the last of
    them), top-p of what is left, renormalised. largest_k: of these rows, known without a wait.
    """
    vocab_size = scores.shape[1]
    min_p, top_k, top_p = draws[:, 1:4, None].unbind(1)
    if "min_p" in kind:
        scores.masked_fill_(scores < min_p.log().float(), -math.inf)
    if "top_k" in kind:
        count = min(largest_k, vocab_size)
        last = top_k.long().clamp(max=count) - 1
        least = scores.topk(count).values.gather(1, last)
        scores.masked_fill_(scores < least, -math.inf)
    if "top_p" in kind:
        weights = scores.double().softmax(dim=-1)
        # all other tokens of a row weigh less than 1 - top_p together
        columns = nanoengine_cpu.columns_above(weights, (1 - top_p) / vocab_size)
        # The nucleus (Holtzman et al., 2019, arXiv:1904.09751): the fewest likeliest tokens that
        # reach top_p together, with the one that crosses it. Of several that are equally likely,
        # the first ones.
        ordered, order = weights[:, columns].sort(dim=-1, descending=True, stable=True)
        is_kept = ordered.cumsum(dim=-1) - ordered < top_p
        kept = is_kept.scatter(1, order, is_kept)
        left = scores[:, columns].masked_fill(~kept, -math.inf)
        scores.fill_(-math.inf)[:, columns] = left


def draw(scores: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling: for each row the first token whose cumulated weight exceeds u * total,
    or NO_TOKEN where the total is NaN or 0.

    scores: (rows, vocab_size) float32 with maximum 0, overwritten.

    All sums are float64: with 152k tokens nothing is lost. u is at most 1 - 2**-52, as total times
    that is rounded to less than total, so that some token exceeds it. A row's draw depends on no
    other row.
    """
    uniform = draws[:, 4:].clamp(max=1 - 2.0**-52)
    cumulated = scores.exp_().cumsum(dim=-1, dtype=torch.float64)
    totals = cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, uniform * totals, right=True)
    return torch.where(totals > 0, tokens, NO_TOKEN)[:, 0]
