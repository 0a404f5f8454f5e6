"""Constraints: changes of logits that forbid, discourage or favour tokens.

The engine uses it in two places. `requests.py` calls `constrain` for a sequence whose parameters
need any, and the sampler first calls `apply` on its rows:

    logits ── biases ──▶ penalties ──▶ own processors ──▶ temperature, truncations, draw

The changes of a matrix of rows are data: the host sends numbers, and the device applies them, so
that nothing waits for a GPU. Only processors (a user's own, or of structured_outputs.py) are
functions, called row by row.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.sampling_params import SamplingParams, naming
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import known_ids, send


def constrain(seq: Sequence, end_tokens: list[int], tokenizer: Any, vocab_size: int) -> None:
    """Prepares a sequence for the constraints in its parameters.

    vocab_size: that of the model. Its tokenizer can know more tokens, which are never generated.

    `seq.constraints` is a list of (word, until): a word as token ids, and the num_tokens from which
    it is permitted: infinity for bad words, and for tokens that end the sequence, where
    `min_tokens` ends. Bad words and processors need all tokens of the sequence, so that its steps
    cannot run ahead. A grammar becomes one more processor. `min_tokens` becomes another one after
    it, which does nothing once the text is complete.
    """
    p = seq.params
    until = seq.num_prompt_tokens + p.min_tokens
    ends = [token for token in end_tokens if token < vocab_size]
    if p.structured_outputs is not None:
        from nanoengine_extensions.structured_outputs import make_processor
        grammar = make_processor(p.structured_outputs, tokenizer, vocab_size, tuple(ends))

        def delay_end(input_ids: Tensor, scores: Tensor) -> Tensor:
            others = scores.index_fill(1, send(ends, scores.device).long(), -math.inf)
            return others if seq.num_tokens < until and others.amax() > -math.inf else scores

        p = seq.params = replace(p, logits_processors=[grammar, delay_end, *p.logits_processors])
    seq.constraints = [(word, math.inf) for word in encode_bad_words(p, tokenizer, vocab_size)]
    seq.needs_tokens = bool(seq.constraints or p.logits_processors)
    if p.structured_outputs is None:
        seq.constraints += [([token], until) for token in ends]


def apply(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """Changes float32 logits in place; there is a row for each sequence.

    last_sampled: the values of pending tokens.
    """
    add_biases(scores, seqs)
    penalize(scores, seqs, last_sampled)
    for row, seq in enumerate(seqs):
        if seq.params.logits_processors:
            scores[row] = run_processors(scores[row, None], seq)[0]


def encode_bad_words(params: SamplingParams, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Returns the tokens of each bad word, at the beginning of a text and after a space.

    A word with a token that the model does not know can never occur, and is left out.
    """
    encoded = [tokenizer.encode(space + (word.lstrip() or word), add_special_tokens=False)
               for word in params.bad_words for space in ("", " ")]
    return [token_ids for token_ids in encoded if 0 <= max(token_ids, default=-1) < vocab_size]


def biases(seq: Sequence) -> dict[int, float]:
    """Returns the biases for the next step, by token id; -inf forbids a token.

    If only some tokens are allowed, the result lists all of them, and all others are forbidden. The
    last token of a forbidden word is forbidden after the word's other tokens.
    """
    p = seq.params
    found = dict(p.logit_bias or {})
    if p.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in p.allowed_token_ids}
    for (*beginning, last), until in seq.constraints or ():
        start = max(seq.num_prompt_tokens, seq.num_tokens - len(beginning))
        if seq.num_tokens < until and seq.token_ids[start:] == beginning:
            found[last] = -math.inf
    return found


def add_biases(scores: Tensor, seqs: list[Sequence]) -> None:
    """Applies the result of `biases` in place, and -inf to tokens that are not allowed."""
    found = [(row, *each) for row, seq in enumerate(seqs) for each in biases(seq).items()]
    if found:
        others = [-math.inf if seq.params.allowed_token_ids else 0.0 for seq in seqs]
        bias = send(others, scores.device).float()[:, None].repeat(1, scores.shape[1])
        rows, token_ids, added = (send(each, scores.device) for each in zip(*found))
        bias[rows, token_ids] = added.float()
        scores += bias


def penalize(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """Applies, in place, the repetition penalty (Keskar et al., 2019, arXiv:1909.05858), also to
    tokens of the prompt; then OpenAI's penalties for generated tokens, once (presence) and for each
    occurrence (frequency)."""
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
    places = rows, known_ids(token_ids, last_sampled)
    counts = torch.zeros_like(scores).index_put_(places, amounts.float(), accumulate=True)[places]
    repetition, presence, frequency = of_rows.float()[rows].T
    seen = scores[places]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    scores[places] = seen - presence * (counts > 0) - frequency * counts


def run_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """Returns a row of float32 logits, (1, vocab_size), after the processors of its request.

    Each processor gets copies, which it can keep or overwrite. Processors cannot repair NaN or
    infinity from the model. If a processor raises, or returns another shape or type, the row
    becomes NaN, which ends this sequence only. `seq.error` says why.
    """
    input_ids = torch.tensor([seq.token_ids], device=logits.device)
    scores = logits
    for processor in seq.params.logits_processors:
        try:
            with naming(f"request {seq.request_id}: its logits processor {processor}"):
                scores = processor(input_ids.clone(), scores.clone())
                if kind_of(scores) != kind_of(logits):
                    raise TypeError(f"it returned {kind_of(scores) or scores}, and not floats of "
                                    f"shape {tuple(logits.shape)} on {logits.device}")
        except ValueError as error:
            seq.error = error
            return torch.full_like(logits, math.nan)
    # some processors force a token with +inf
    scores = scores.float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(logits.amax() < math.inf, scores, math.nan)


def kind_of(scores: Any) -> Any:
    """Returns what a processor must not change."""
    return isinstance(scores, Tensor) and (
        scores.shape, scores.is_floating_point(), scores.layout, scores.device)
