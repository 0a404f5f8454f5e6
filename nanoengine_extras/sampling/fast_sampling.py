"""Samples like nanoengine/sampler.py, with fewer copies of logits: fills the slot "sample".

Rows that need the same operations are sampled together:

    a row that is    needs
    greedy           its likeliest logit, without a copy
    plain            a copy: scale ──▶ draw; none if a library can draw from the logits
    truncated        a copy: scale ──▶ truncate ──▶ draw
    edited           a copy: features ──▶ scale ──▶ truncate ──▶ draw

The library of kernels for the device can have faster functions for some of these:

    first_max(logits)              the largest logit of each row, and its first index
    truncate(…)                    as in sampler.py; given also which of "min_p", "top_k", "top_p"
                                   the rows need, and each row's top_k on the host; returns the
                                   tokens that some row can still draw, and their weights
    draw(numbers, uniform, …)      as in sampler.py; with a third argument, the temperature of each
                                   row, it draws from the logits themselves
"""

from typing import Any

import torch
from torch import Tensor

from nanoengine import sampler
from nanoengine.features import kernels
from nanoengine.observers import Feature
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine.step_inputs import Draws
from nanoengine_extras.sampling import max_rows, send


def sample(logits: Tensor, draws: Draws, seqs: list[Sequence], last_sampled: Tensor,
           features: dict[str, Feature]) -> Tensor:
    """In place of the function of this name in sampler.py."""
    library = kernels(logits.device.type)

    # 1. What does each row need? A row that is edited or truncated needs a copy. A plain draw needs
    #    one only if the library cannot draw from logits. All other rows are greedy.
    changed = []
    drawn = []
    for row, seq in enumerate(seqs):
        if seq.edits or seq.params.truncations:
            changed.append(row)
        elif not seq.params.is_greedy:
            drawn.append(row)

    # 2. Tokens from the logits, computed for all rows: those of copied rows are replaced below.
    of_seqs = logits[:len(seqs)]
    copied = changed
    if drawn and hasattr(library, "draw"):
        # a greedy row gets its likeliest token
        tokens = library.draw(of_seqs, draws.uniform, draws.temperature)
        tokens.masked_fill_(tokens < 0, NO_TOKEN)
    else:
        copied = changed + drawn
        tokens = torch.empty_like(draws.top_k, dtype=torch.int64)
        if len(copied) < len(seqs):
            first_max = getattr(library, "first_max", lambda rows: rows.max(dim=-1))
            largest, likeliest = first_max(of_seqs)
            tokens = likeliest.where(largest.isfinite(), NO_TOKEN)

    # 3. Tokens from copies. An edit is applied to a whole copy, even if only one of its rows needs
    #    it, so rows that need the same edits are put side by side.
    copied.sort(key=lambda row: (seqs[row].edits, seqs[row].params.truncations))
    size = max_rows(logits)
    for start in range(0, len(copied), size):
        rows = copied[start:start + size]
        index = send(rows, logits.device)
        scores = logits[index].float()
        copied_seqs = [seqs[row] for row in rows]
        sampler.edit(scores, copied_seqs, last_sampled, features)
        tokens[index] = sample_scores(scores, draws.of(index), copied_seqs, library)
    return tokens


def sample_scores(scores: Tensor, draws: Draws, seqs: list[Sequence], library: Any) -> Tensor:
    """Scales and truncates edited float32 logits, and draws a token from each row."""
    sampler.scale(scores, draws.temperature)
    asked = {name for seq in seqs for name in seq.params.truncations}
    tokens = torch.arange(scores.shape[1], device=scores.device)
    if not asked:
        weights = scores.exp_()
    elif hasattr(library, "truncate"):
        top_ks = [seq.params.top_k for seq in seqs]
        tokens, weights = library.truncate(scores, draws, asked, top_ks)
    else:
        weights = sampler.truncate(scores, draws)
    places = getattr(library, "draw", sampler.draw)(weights, draws.uniform)
    return tokens[places.clamp(min=0)].where(places >= 0, NO_TOKEN)


PARTS = {"sample": sample}
