"""`SamplingParams.logits_processors`: a user's own functions on the logits, called row by row."""

import math
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import naming
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Sequence


class Processors(Feature):
    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        if seqs[0].params.logits_processors:
            for seq in seqs:
                seq.edits += ("Processors",)
                seq.needs_tokens = True

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        for row, seq in enumerate(seqs):
            if seq.params.logits_processors:
                scores[row] = run_processors(scores[row, None], seq)[0]


def run_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """Returns a row of float32 logits, (1, vocab_size), after the processors of its request.

    Each processor gets copies, which it can keep or overwrite. Processors cannot repair NaN or
    infinity from the model. If a processor raises, or returns another shape or type, the row
    becomes NaN, which ends this sequence only. `seq.error` says why.
    """
    input_ids = torch.tensor([seq.token_ids], dtype=torch.int64, device=logits.device)
    scores = logits
    for processor in seq.params.logits_processors:
        try:
            with naming(f"request {seq.request_id}: its logits processor {processor}"):
                scores = processor(input_ids.clone(), scores.clone())
                if described(scores) != described(logits):
                    raise TypeError(
                        f"it returned {described(scores):.200}, and not {described(logits)}")
        except ValueError as error:
            seq.error = error
            return torch.full_like(logits, math.nan)
    # some processors force a token with +inf
    scores = scores.float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(logits.amax() < math.inf, scores, math.nan)


def described(scores: Any) -> str:
    """Describes what a processor must not change in a result, or what else it has returned."""
    if not isinstance(scores, Tensor):
        return repr(scores)
    kind = "floats" if scores.is_floating_point() else scores.dtype
    return f"{kind} of shape {tuple(scores.shape)} on {scores.device} ({scores.layout})"
