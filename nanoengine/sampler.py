"""From logits to tokens: temperature, the three truncations, and one draw for each row.

    a matrix of logits ── features ──▶ scale ──▶ truncate ──▶ draw ──▶ a token for each row

`StepInputs.draws` has the parameters of each row of logits. They reach the device with the other
inputs, so that nothing here waits for a GPU. Greedy rows without constraints take the likeliest
token. The other rows are sampled in matrices of at most MATRIX_SIZE logits. There is no generator
state: a draw depends only on the seed of its sequence and on its position.

A kernel library can have faster versions of `truncate` and `draw`: see kernels.py. With its `draw`,
rows without edits or truncations need no matrix.
"""

import torch
from torch import Tensor

from nanoengine.kernels import PLAIN, Kernels
from nanoengine.observers import Feature
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine.step_inputs import Draws, send

# The most logits in one matrix. On a CPU it fits in the cores' caches; on a GPU it is small
# compared with the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**26}


def max_rows(logits: Tensor) -> int:
    """Returns the most rows that a matrix can have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def sample(logits: Tensor, draws: Draws, seqs: list[Sequence], last_sampled: Tensor,
           features: dict[str, Feature], library: Kernels = PLAIN) -> Tensor:
    """Returns one token for each sequence, from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows after those of the sequences are padding.
    draws: the draws of the step, for these rows.
    last_sampled: the values of pending tokens.
    features: by name; a sequence's `edits` names those that change its row of logits.

    A row with NaN or infinity, or whose constraints permit no token, gets NO_TOKEN.
    """
    rest = [row for row, seq in enumerate(seqs) if seq.params.temperature or seq.edits]
    edited = [row for row in rest if seqs[row].edits or seqs[row].params.truncations]
    # every row is overwritten below
    found = torch.empty_like(draws.top_k, dtype=torch.int64)
    if library.draw and len(edited) < len(rest):
        # from raw logits; greedy rows get the likeliest token, and edited rows are drawn again
        # below
        found = library.draw(logits[:len(seqs)], draws.uniform, draws.temperature)
        rest = edited
    elif len(rest) < len(seqs):
        largest, tokens = library.first_max(logits[:len(seqs)])
        found = tokens.where(largest.isfinite(), NO_TOKEN)
    # rows with the same edits are put side by side, since a matrix gets every edit that any of its
    # rows needs
    rest.sort(key=lambda row: (seqs[row].edits, seqs[row].params.truncations))
    for start in range(0, len(rest), max_rows(logits)):
        rows = rest[start:start + max_rows(logits)]
        index = send(rows, logits.device)
        scores = logits[index].float()
        chosen = [seqs[row] for row in rows]
        edits = {edit for seq in chosen for edit in seq.edits}
        truncations = {each for seq in chosen for each in seq.params.truncations}
        for name, feature in features.items():
            if name in edits:
                feature.edit(scores, chosen, last_sampled)
        part = draws.of(index)
        scale(scores, part.temperature)
        tokens, weights = (library.truncate or truncate)(
            scores, part, truncations, [seq.params.top_k for seq in chosen])
        places = (library.draw or draw)(weights, part.uniform)
        found[index] = tokens[places.clamp(min=0)].where(places >= 0, NO_TOKEN)
    return found.where(found >= 0, NO_TOKEN)


# ----------------------------------------------------------------------------- steps, on float32


def scale(scores: Tensor, temperature: Tensor) -> Tensor:
    """Shifts each row to a maximum of 0, then divides it by its temperature, in place.

    Greedy rows are divided by 1e-30, a normal float32, so only the maximum has a weight above 0.
    """
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperature[:, None].float().clamp(min=1e-30))


# The kernel libraries replace this function. The CPU's version first drops the tokens that no row
# can draw; the GPU's version does not sort.
def truncate(scores: Tensor, draws: Draws, truncations: set[str],
             top_ks: list[int]) -> tuple[Tensor, Tensor]:
    """Returns two tensors: the tokens that at least one row can still draw, (few,); and their
    weights, (rows, few), 0 where a token is truncated. Here, "few" is all tokens. The likeliest
    token is never truncated, nor are greedy rows.

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
        least = least.maximum(kth.where(draws.top_k[:, None] > 0, -torch.inf))
    weights = scores.masked_fill(scores < least, -torch.inf).exp_()
    if "top_p" in truncations:
        total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # of equal weights, the first ones are kept
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        is_kept = before < draws.top_p[:, None] * total
        weights = weights.where(is_kept.scatter(1, order, is_kept), 0)
    return tokens, weights


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: returns the first place of each row whose cumulative weight exceeds
    u * total, or -1 if the total is NaN or 0.

    weights: (rows, tokens) float32, with a maximum of 1 in each row; uniform: (rows,) float64.

    All sums are float64, which is precise enough for 152k tokens. u is at most 1 - 2**-52, so u *
    total rounds to less than total, and there is always a place that exceeds it. Rows do not depend
    on each other.
    """
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    sought = uniform[:, None].clamp(max=1 - 2.0**-52) * cumulated[:, -1:]
    places = torch.searchsorted(cumulated, sought, right=True)
    return places.where(cumulated[:, -1:] > 0, -1)[:, 0]
