"""Constraints: what a request may generate, and what it should avoid, as changes of its logits.

The seam has two ends. `requests.py` gives a sequence whose parameters ask for it its `Constraints`,
and the sampler calls `apply` on its rows before anything else:

    logits ── biases ──▶ penalties ──▶ own processors ──▶ temperature, truncations, draw

What is done to a matrix of rows is data: the host sends numbers, and the device works with them, so
that nothing here waits for a GPU. Only a user's own processors are functions, called row by row.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import known_ids, send


@dataclass
class Constraints:
    """What a sequence keeps for its constraints.

    late_tokens: the token ids that may not come before `min_tokens`.
    bad_words: the token ids of each word that may not come.
    """

    late_tokens: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)


def constrain(seq: Sequence, late_tokens: list[int], tokenizer: Any) -> None:
    """Makes a sequence ready for what its parameters ask for.

    Bad words and processors look at all its tokens, so that its steps cannot run ahead.
    """
    bad_words = encode_bad_words(seq.params, tokenizer)
    seq.constraints = Constraints(late_tokens, bad_words)
    seq.needs_tokens = bool(bad_words or seq.params.logits_processors)


def apply(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """In place on float32 logits, a row for each sequence.

    last_sampled: the tokens for which pending ones stand.
    """
    add_biases(scores, seqs)
    penalize(scores, seqs, last_sampled)
    for row, seq in enumerate(seqs):
        if seq.params.logits_processors:
            scores[row] = run_processors(scores[row, None], seq)[0]


def encode_bad_words(params: SamplingParams, tokenizer: Any) -> list[list[int]]:
    """The tokens of each bad word, at the beginning of a text and behind a space."""
    words = [word.lstrip() or word for word in params.bad_words]
    encoded = [tokenizer.encode(space + word, add_special_tokens=False)
               for word in words for space in ("", " ")]
    return [token_ids for token_ids in encoded if token_ids]


def biases(seq: Sequence) -> dict[int, float]:
    """What is added to the logits of which tokens in the next step: -inf makes one impossible.

    Where only some tokens are allowed, these are all here, and all others are impossible. The last
    token of a bad word is impossible behind the word's other tokens.
    """
    p = seq.params
    found = dict(p.logit_bias or {})
    if p.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in p.allowed_token_ids}
    own = seq.constraints or Constraints()
    if seq.num_tokens - seq.num_prompt_tokens < p.min_tokens:
        found |= dict.fromkeys(own.late_tokens, -math.inf)
    for *beginning, last in own.bad_words:
        start = max(seq.num_prompt_tokens, seq.num_tokens - len(beginning))
        if seq.token_ids[start:] == beginning:
            found[last] = -math.inf
    return found


def add_biases(scores: Tensor, seqs: list[Sequence]) -> None:
    """In place: what `biases` says, and -inf for tokens that are not among those allowed."""
    found = [biases(seq) for seq in seqs]
    if any(found):
        vocab_size = scores.shape[1]
        others = [-math.inf if seq.params.allowed_token_ids else 0.0 for seq in seqs]
        places = [row * vocab_size + token for row, each in enumerate(found) for token in each]
        added = [bias for each in found for bias in each.values()]
        bias = send(others, scores.device).float()[:, None].repeat(1, vocab_size)
        places = np.array(places, np.int64)
        bias.view(-1)[send(places, scores.device)] = send(added, scores.device).float()
        scores += bias


def penalize(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """In place: the repetition penalty (Keskar et al., 2019, arXiv:1909.05858), for prompts, too.
    Then OpenAI's: generated tokens lose once (presence) and for each time (frequency)."""
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                 for p in (seq.params for seq in seqs)]
    if set(penalties) == {(1, 0, 0)}:
        return
    starts = [0 if repetition != 1 else seq.num_prompt_tokens
              for seq, (repetition, _, _) in zip(seqs, penalties)]
    tokens = [np.array(seq.token_ids[start:], np.int64) for seq, start in zip(seqs, starts)]
    is_generated = [np.arange(start, seq.num_tokens) >= seq.num_prompt_tokens
                    for seq, start in zip(seqs, starts)]
    owners = np.arange(len(seqs)).repeat([len(each) for each in tokens])
    arrays = owners, np.concatenate(tokens), np.concatenate(is_generated, dtype=float), penalties
    rows, token_ids, amounts, of_rows = (send(each, scores.device) for each in arrays)
    flat = scores.view(-1)
    places = rows * scores.shape[1] + known_ids(token_ids, last_sampled)
    counts = torch.zeros_like(flat).index_add_(0, places, amounts.float())[places]
    repetition, presence, frequency = of_rows.float()[rows].T
    seen = flat[places]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    flat[places] = seen - presence * (counts > 0) - frequency * counts


def run_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """A row of float32 logits, (1, vocab_size), after the processors of its request.

    Each processor gets copies, which it may keep or overwrite. NaN or infinity from the model
    cannot be mended by them. Raises ValueError for a result of another shape or kind.
    """
    input_ids = torch.tensor([seq.token_ids], device=logits.device)
    scores = logits
    for processor in seq.params.logits_processors:
        scores = processor(input_ids.clone(), scores.clone())
        is_row = isinstance(scores, Tensor) and scores.shape == logits.shape
        if not (is_row and scores.is_floating_point() and scores.layout == logits.layout
                and scores.device == logits.device):
            shown = (scores.shape, scores.dtype) if isinstance(scores, Tensor) else scores
            raise ValueError(f"request {seq.request_id}: its logits processor {processor} returned "
                             f"{shown}, and not floats of shape {tuple(logits.shape)}")
    # +inf is how some force a token
    scores = scores.float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(logits.amax() < math.inf, scores, math.nan)
