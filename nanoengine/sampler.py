"""From logits to tokens: temperature, the three truncations, and one draw for each row.

    a matrix of logits ── constrain ──▶ scale ──▶ truncate ──▶ draw ──▶ a token for each row

`StepInputs.draws` has the parameters of each row of logits. They came to the device with the other
inputs, so that nothing here waits for a GPU. Greedy rows without constraints take the likeliest
token. All others are sampled as one matrix, in parts that fit a cache. There is no generator state:
a draw depends only on the seed of its sequence and on its position.
"""

import math

import torch
from torch import Tensor

from nanoengine.seams import extension, fastest
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine.step_inputs import Draws, send

# The most logits of one matrix. On a CPU it fits the cores' caches; on a GPU it is small compared
# with the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**24}


def max_rows(logits: Tensor) -> int:
    """Returns the most rows that a matrix can have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def sample(logits: Tensor, draws: Draws, seqs: list[Sequence], last_sampled: Tensor) -> Tensor:
    """Returns one token for each sequence, from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows after those of the sequences are padding.
    draws: the draws of the step, for these rows.
    last_sampled: the values of pending tokens.

    A row with NaN or infinity, or whose constraints permit no token, gets NO_TOKEN.
    """
    rest = [row for row, seq in enumerate(seqs) if seq.params.temperature or seq.params.edits]
    # without greedy rows, any numbers of this shape: all of them are overwritten
    found = likeliest(logits[:len(seqs)]) if len(rest) < len(seqs) else draws.top_k.long()
    # rows with the same edits side by side: a matrix gets the edits that some of its rows need
    rest.sort(key=lambda row: seqs[row].params.edits)
    for start in range(0, len(rest), max_rows(logits)):
        rows = rest[start:start + max_rows(logits)]
        index = send(rows, logits.device)
        found[index] = sample_matrix(
            logits[index].float(), draws.of(index), [seqs[row] for row in rows], last_sampled)
    return found


def sample_matrix(scores: Tensor, draws: Draws, seqs: list[Sequence],
                  last_sampled: Tensor) -> Tensor:
    """Returns one token for each row of scores, which it overwrites."""
    edits = {edit for seq in seqs for edit in seq.params.edits}
    if "constraints" in edits:
        extension("constraints").apply(scores, seqs, last_sampled)
    scale(scores, draws.temperature)
    tokens, weights = truncate(scores, draws, edits, [seq.params.top_k for seq in seqs])
    places = fastest(draw, scores.device)(weights, draws.uniform)
    return tokens[places.clamp(min=0)].where(places >= 0, NO_TOKEN)


def likeliest(logits: Tensor) -> Tensor:
    """Returns the token with the largest logit of each row; the first one of several."""
    largest, tokens = fastest(first_max, logits.device)(logits)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


# ----------------------------------------------------------------------------- steps, on float32


def scale(scores: Tensor, temperature: Tensor) -> Tensor:
    """Shifts each row to a maximum of 0, then divides it by its temperature, in place.

    Greedy rows are divided by 1e-30: only the maximum keeps weight, and float32 has this number.
    """
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature[:, None].float().clamp(min=1e-30))


def truncate(scores: Tensor, draws: Draws, edits: set[str],
             top_ks: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the tokens that some row can still draw, (few,), and their weights, (rows, few): 0
    where the token is truncated. The likeliest token is never truncated, nor are greedy rows.

    The order is vLLM's: temperature, min-p (Nguyen et al., 2024, arXiv:2407.01082), top-k (Fan et
    al., 2018, arXiv:1805.04833; with all tokens as likely as the k-th), then top-p of the rest,
    renormalised: the nucleus (Holtzman et al., 2019, arXiv:1904.09751), the fewest likeliest tokens
    that together reach top_p, including the one that crosses it.

    scores: overwritten; edits: what some row needs; top_ks: of the rows, known without waiting.
    """
    if edits <= {"constraints"}:
        return torch.arange(scores.shape[1], device=scores.device), scores.exp_()
    # a token below `least` gets weight 0; a token below `bound` in every row can be left out
    least = bound = draws.min_p[:, None].log().float()
    total = None
    if edits <= {"constraints", "top_p"}:
        total = scores.exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # together, all tokens with lower scores weigh less than half of 1 - top_p
        bound = (total * (1 - draws.top_p[:, None]) / (2 * scores.shape[1])).log().float()
    # a row without top_k can draw any token
    few = fastest(columns_above, scores.device)
    tokens = few(scores, bound, max(top_ks) if min(top_ks) > 0 else 0)
    if len(tokens) < scores.shape[1]:
        scores = scores[:, tokens]
    if "top_k" in edits:
        count = min(max(top_ks), len(tokens))
        places = draws.top_k[:, None].long().clamp(1, count) - 1
        kth = scores.topk(count).values.gather(1, places)
        least = least.maximum(kth.where(draws.top_k[:, None] > 0, -math.inf))
    weights = scores.masked_fill(scores < least, -math.inf).exp_()
    if "top_p" in edits:
        if total is None:
            total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        is_kept = fastest(nucleus, scores.device)(weights, draws.top_p[:, None] * total)
        weights = weights.where(is_kept, 0)
    return tokens, weights


def columns_above(x: Tensor, thresholds: Tensor, count: int) -> Tensor:
    """Returns columns of x. A column may be left out if no row has a number there that reaches its
    threshold, and is among its `count` largest (0: any)."""
    return torch.arange(x.shape[1], device=x.device)


def nucleus(weights: Tensor, needed: Tensor) -> Tensor:
    """Finds, in each row, the fewest largest weights that together reach `needed`, (rows, 1)
    float64; of equal weights, the first ones. Returns whether each weight is one of them."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    cumulated = ordered.cumsum(dim=-1, dtype=torch.float64)
    is_kept = cumulated - ordered < needed
    return is_kept.scatter(1, order, is_kept)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: returns for each row the first place whose cumulated weight exceeds u *
    total, or -1 if the total is NaN or 0.

    weights: (rows, tokens) float32, the largest one 1; uniform: (rows,) float64.

    All sums are float64, which loses nothing with 152k tokens. u is at most 1 - 2**-52: total times
    that is rounded to less than total, so that a token exceeds it. Rows do not depend on each
    other.
    """
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    sought = uniform[:, None].clamp(max=1 - 2.0**-52) * cumulated[:, -1:]
    places = torch.searchsorted(cumulated, sought, right=True)
    return places.where(cumulated[:, -1:] > 0, -1)[:, 0]


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest number of each row, and its first place."""
    return x.max(dim=-1)
