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
    edit(scores, seqs, last_sampled, features)
    scale(scores, draws.temperature)
    is_truncated = any(seq.params.truncations for seq in seqs)
    weights = truncate(scores, draws) if is_truncated else scores.exp_()
    tokens = draw(weights, draws.uniform)
    return tokens.where(tokens >= 0, NO_TOKEN)


# ----------------------------------------------------------------------------- steps, on float32


def edit(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor,
         features: dict[str, Feature]) -> None:
    """Lets the features that these sequences name edit their logits, in place."""
    edits = {name for seq in seqs for name in seq.edits}
    for name, feature in features.items():
        if name in edits:
            feature.edit(scores, seqs, last_sampled)


def scale(scores: Tensor, temperature: Tensor) -> Tensor:
    """Shifts each row to a maximum of 0, then divides it by its temperature, in place.

    Greedy rows are divided by 1e-30, a normal float32, so only the maximum has a weight above 0. Of
    several maxima, the first is drawn, since their u is 0.
    """
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature[:, None].float().clamp(min=1e-30))


def truncate(scores: Tensor, draws: Draws) -> Tensor:
    """Returns the weights of all tokens, (rows, vocab_size), 0 where a token is truncated. The
    likeliest token is never truncated, so a greedy row keeps its token.

    The order is vLLM's: temperature, min-p (Nguyen et al., 2024, arXiv:2407.01082), top-k (Fan et
    al., 2018, arXiv:1805.04833; ties with the k-th token are kept), then top-p. Top-p
    renormalises what is left, and keeps the nucleus (Holtzman et al., 2019, arXiv:1904.09751): the
    fewest tokens, likeliest first, that together reach top_p.
    """
    least = draws.min_p[:, None].log().float()
    # top_k=0 keeps all tokens
    top_k = draws.top_k.where(draws.top_k > 0, torch.inf).clamp(max=scores.shape[1]).long()
    kth = scores.sort(dim=-1, descending=True).values.gather(1, top_k[:, None] - 1)
    weights = scores.masked_fill(scores < least.maximum(kth), -torch.inf).exp_()
    # of equal weights, the first ones are kept
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    sums = ordered.cumsum(dim=-1, dtype=torch.float64)
    is_kept = sums - ordered < draws.top_p[:, None] * sums[:, -1:]
    # back into the order of the vocabulary
    return weights.scatter(1, order, ordered.where(is_kept, 0))


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
