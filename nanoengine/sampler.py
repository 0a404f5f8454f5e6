"""From logits to tokens: temperature, the three truncations, and one draw for each row.

The requests of a step differ: one is greedy, the next wants top-p 0.9, another a ban of some words.
If each row of logits were sampled on its own, a GPU would wait for Python hundreds of times a step.
So all rows are sampled together, in a float32 copy of the logits:

    copy ──▶ features edit it ──▶ scale ──▶ truncate ──▶ draw

The parameters of each row (`StepInputs.draws`) reach the device with the other inputs, so nothing
here waits for a GPU. There is no generator state: a draw depends only on the seed of its sequence
and on its position.

The copy takes memory, and most of the time. nanoengine_extras/sampling/fast_sampling.py, if
installed, copies only the rows that are edited or truncated. Their tokens are the same.
"""

from typing import Any

import torch
from torch import Tensor

from nanoengine.observers import Feature
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine.step_inputs import Draws


def sample(logits: Tensor, draws: Draws, seqs: list[Sequence], last_sampled: Tensor,
           features: dict[str, Feature]) -> Tensor:
    """Returns one token for each sequence, from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows after those of the sequences are padding.
    draws: the draws of the step, for these rows.
    last_sampled: the values of pending tokens.
    features: by name; a sequence's `edits` names those that change its row of logits.

    A row with NaN or a positive infinity, or whose constraints permit no token, gets NO_TOKEN.
    """
    scores = logits[:len(seqs)].to(torch.float32, copy=True)
    return sample_copy(scores, draws, seqs, last_sampled, features)


def sample_copy(scores: Tensor, draws: Draws, seqs: list[Sequence], last_sampled: Tensor,
                features: dict[str, Feature], library: Any = None) -> Tensor:
    """Edits, scales and truncates float32 logits, in place, and draws a token from each row.

    library: its `truncate` and `draw`, if it has them, take the place of those below.
    """
    edits = {name for seq in seqs for name in seq.edits}
    for name, feature in features.items():
        if name in edits:
            feature.edit(scores, seqs, last_sampled)
    scale(scores, draws.temperature)
    asked = {name for seq in seqs for name in seq.params.truncations}
    top_ks = [seq.params.top_k for seq in seqs]
    tokens, weights = getattr(library, "truncate", truncate)(scores, draws, asked, top_ks)
    places = getattr(library, "draw", draw)(weights, draws.uniform)
    return tokens[places.clamp(min=0)].where(places >= 0, NO_TOKEN)


# ----------------------------------------------------------------------------- steps, on float32


def scale(scores: Tensor, temperature: Tensor) -> Tensor:
    """Shifts each row to a maximum of 0, then divides it by its temperature, in place.

    Greedy rows are divided by 1e-30, a normal float32, so only the maximum has a weight above 0. Of
    several maxima, the first is drawn, since their u is 0.
    """
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature[:, None].float().clamp(min=1e-30))


# Of the libraries of kernels, the CPU's version first drops the tokens that no row can draw; the
# GPU's version does not sort.
def truncate(scores: Tensor, draws: Draws, truncations: set[str],
             top_ks: list[int]) -> tuple[Tensor, Tensor]:
    """Returns two tensors: the tokens that at least one row can still draw, (few,); and their
    weights, (rows, few), 0 where a token is truncated. Here, "few" is all tokens. The likeliest
    token is never truncated, so a greedy row keeps its token.

    The order is vLLM's: temperature, min-p (Nguyen et al., 2024, arXiv:2407.01082), top-k (Fan et
    al., 2018, arXiv:1805.04833; ties with the k-th token are kept), then top-p. Top-p
    renormalises what is left, and keeps the nucleus (Holtzman et al., 2019, arXiv:1904.09751): the
    fewest tokens, likeliest first, that together reach top_p.

    scores: overwritten; truncations: those of "min_p", "top_k" and "top_p" that some row needs;
    top_ks: the top_k of each row, on the host.
    """
    tokens = torch.arange(scores.shape[1], device=scores.device)
    if not truncations:
        return tokens, scores.exp_()
    least = draws.min_p[:, None].log().float()
    if "top_k" in truncations:
        count = min(max(top_ks), len(tokens))
        places = draws.top_k[:, None].long().clamp(1, count) - 1
        kth = scores.topk(count).values.gather(1, places)
        has_top_k = draws.top_k[:, None] > 0
        least = least.maximum(kth.where(has_top_k, -torch.inf))
    weights = scores.masked_fill(scores < least, -torch.inf).exp_()
    if "top_p" in truncations:
        total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # of equal weights, the first ones are kept
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        kept = ordered.where(before < draws.top_p[:, None] * total, 0)
        # back into the order of the vocabulary
        weights = weights.scatter(1, order, kept)
    return tokens, weights


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: returns the first place of each row whose cumulative weight exceeds
    u * total, or -1 if the total is NaN or 0.

    weights: (rows, tokens) float32, with a maximum of 1 in each row; uniform: (rows,) float64.

    For example, weights of 1, 0.5 and 0.5 add up to 1, 1.5 and 2. If u is 0.6, the first of these
    sums that exceeds 1.2 is the second: its token is drawn.

    All sums are float64, which is precise enough for 152k tokens. u is at most 1 - 2**-52, so u *
    total rounds to less than total, and there is always a place that exceeds it. Rows do not depend
    on each other.
    """
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    u = uniform[:, None].clamp(max=1 - 2.0**-52)
    places = torch.searchsorted(cumulated, u * total, right=True)
    return places.where(total > 0, -1)[:, 0]
