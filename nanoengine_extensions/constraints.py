"""Constraints: changes of logits that forbid, discourage or favour tokens.

The engine uses it in two places. `requests.py` calls `constrain` for a sequence whose parameters
need any, and the sampler first calls `apply` on its rows:

    logits ── biases ──▶ penalties ──▶ grammars ──▶ processors ──▶ temperature, truncations, draw

A bad word is forbidden as a text, whatever tokens spell it: a token is forbidden if its own text,
after the text that was generated before it, completes the word.

The changes of a matrix of rows are data: the host sends numbers, and the device applies them, so
that nothing waits for a GPU. Only a user's own processors are functions, called row by row.
"""

import math
import re
from bisect import bisect
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoengine.seams import naming, rejected
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import known_ids, send


def constrain(seq: Any, end_tokens: list[int], tokenizer: Any, vocab_size: int) -> None:
    """Prepares a sequence for the constraints in its parameters.

    vocab_size: that of the model. Its tokenizer can know more tokens, which are never generated.

    `seq.constraints` is what tokens spell; a list of (word, completing, until): a word, the result
    of `tokens_completing` for it, and the num_tokens from which it is permitted: infinity for bad
    words; tokens that end the sequence complete an empty word, until `min_tokens` are there; and
    the grammar, or None, which then says where the sequence may end. Bad words, grammars and
    processors need all tokens of the sequence, so that its steps cannot run ahead.
    """
    p = seq.params
    until = seq.num_prompt_tokens + p.min_tokens
    ends = [token for token in end_tokens if token < vocab_size]
    grammar = None
    if p.structured_outputs is not None:
        with naming("structured_outputs need llguidance"):
            from nanoengine_extensions.structured_outputs import Grammar
        grammar = Grammar(p.structured_outputs, tokenizer, vocab_size, ends, seq.num_tokens)
    words: list[Any] = []
    texts: list[bytes] = []
    if p.bad_words:
        texts, *_ = spellings(tokenizer, vocab_size)
        with naming(rejected("bad_words", p.bad_words, "texts in Unicode")):
            found = [(word, tokens_completing(word, tokenizer, vocab_size))
                     for word in map(str.encode, p.bad_words)]
        words = [(*each, math.inf) for each in found if any(map(len, each[1]))]
    seq.needs_tokens = bool(words or p.logits_processors or grammar)
    if grammar is None:
        words.append((b"", [np.array(ends, np.int64)], until))
    seq.constraints = texts, words, grammar


def apply(scores: Tensor, seqs: list[Any], last_sampled: Tensor) -> None:
    """Changes float32 logits in place; there is a row for each sequence.

    last_sampled: the values of pending tokens.
    """
    add_biases(scores, seqs)
    penalize(scores, seqs, last_sampled)
    follow_grammars(scores, seqs)
    for row, seq in enumerate(seqs):
        if seq.params.logits_processors:
            scores[row] = run_processors(scores[row, None], seq)[0]


def after(seq: Sequence, token_ids: list[int]) -> Sequence:
    """Returns the sequence for the row after these guesses. With constraints, which look at the
    tokens so far, it is a copy that has the guesses; otherwise `seq` itself."""
    if "constraints" not in seq.params.edits:
        return seq
    copy = seq.fork(token_ids=seq.token_ids + token_ids)
    copy.logprobs = seq.logprobs
    texts, words, grammar = seq.constraints
    copy.constraints = texts, words, grammar and grammar.copy()
    return copy


@lru_cache(maxsize=2)
def spellings(tokenizer: Any, vocab_size: int) -> tuple[list[bytes], bytes, list[int]]:
    """Returns what each token adds to a text, in UTF-8; for some, it is a part of a character.

    Then all of it in one, each after a byte 0xFF, which is in no text, and where each begins. A
    special token spells nothing.
    """
    backend = tokenizer.backend_tokenizer
    # what a token adds after itself: some decoders strip spaces where a text begins
    once, twice = (backend.decode_batch([[number] * count for number in range(vocab_size)])
                   for count in (1, 2))
    added = [both[len(first):] for first, both in zip(once, twice)]
    texts = [bytes_of(backend.id_to_token(number), text) if "\ufffd" in text else text.encode()
             for number, text in enumerate(added)]
    starts = accumulate((len(text) + 1 for text in texts), initial=0)
    return texts, b"".join(b"\xff" + text for text in texts), [*starts]


def bytes_of(piece: str, text: str) -> bytes:
    """Returns the bytes of a token that has a part of a character, from its name in the vocabulary.

    text: with a replacement letter; it holds if the name does not stand for bytes.
    """
    # byte fallback
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    # byte-level BPE: a letter for each byte
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    is_spelled = byte_of.keys() >= {*piece}
    return bytes(byte_of[letter] for letter in piece) if is_spelled else text.encode()


@lru_cache(maxsize=10_000)
def tokens_completing(word: bytes, tokenizer: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns the tokens that complete a word after its first i bytes, by i.

    For i = 0, the word is anywhere in a token, or it is the name of a special token.
    """
    _, joined, starts = spellings(tokenizer, vocab_size)
    rests = [b"\xff" + word[i:] for i in range(1, len(word))]
    found = [{bisect(starts, match.start()) - 1 for match in re.finditer(re.escape(part), joined)}
             for part in [word, *rests]]
    names = {token.content.encode(): number
             for number, token in tokenizer.added_tokens_decoder.items() if number < vocab_size}
    found[0] |= {names[word]} if word in names else set()
    return [np.array(sorted(each), np.int64) for each in found]


def biases(seq: Any) -> dict[int, float]:
    """Returns the biases for the next step, by token id.

    If only some tokens are allowed, the result lists all of them, and all others are forbidden.
    """
    p = seq.params
    found = dict(p.logit_bias or {})
    if p.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in p.allowed_token_ids}
    return found


def forbidden(seq: Sequence) -> Iterator[np.ndarray]:
    """Yields the token ids that are forbidden in the next step, in several arrays."""
    texts, words, _ = seq.constraints or ([], [], None)
    # as much of the text as the beginning of a word can take
    longest = max((len(word) for word, *_ in words), default=0)
    text = b""
    place = seq.num_tokens
    while place > seq.num_prompt_tokens and len(text) + 1 < longest:
        place -= 1
        text = texts[seq.token_ids[place]] + text
    for word, completing, until in words:
        for i, token_ids in enumerate(completing):
            if seq.num_tokens < until and text.endswith(word[:i]):
                yield token_ids


def add_biases(scores: Tensor, seqs: list[Any]) -> None:
    """Applies the result of `biases` in place, and -inf to tokens that are not allowed, or that are
    forbidden."""
    found = [(row, *each) for row, seq in enumerate(seqs) for each in biases(seq).items()]
    if found:
        others = [-math.inf if seq.params.allowed_token_ids else 0.0 for seq in seqs]
        bias = send(others, scores.device).float()[:, None].repeat(1, scores.shape[1])
        rows, token_ids, added = (send(each, scores.device) for each in zip(*found))
        bias[rows, token_ids] = added.float()
        scores += bias
    not_next = [(row, token_ids) for row, seq in enumerate(seqs) for token_ids in forbidden(seq)]
    if not_next:
        numbers, arrays = zip(*not_next)
        owners = np.repeat(numbers, [len(token_ids) for token_ids in arrays])
        rows, token_ids = send(owners, scores.device), send(np.concatenate(arrays), scores.device)
        scores[rows, token_ids] = -math.inf


def penalize(scores: Tensor, seqs: list[Any], last_sampled: Tensor) -> None:
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


def follow_grammars(scores: Tensor, seqs: list[Any]) -> None:
    """Forbids, in place, the tokens that a sequence's grammar does not permit.

    The masks of all rows cross to the device together. Before `min_tokens`, tokens that end the
    sequence are forbidden, too, unless nothing else is left: a complete text can end.
    """
    grammars = {row: seq.constraints[2] for row, seq in enumerate(seqs)
                if seq.params.structured_outputs is not None}
    if not grammars:
        return
    from nanoengine_extensions.structured_outputs import permitted
    for row, grammar in grammars.items():
        grammar.take(seqs[row].token_ids)
    mask = np.ones(tuple(scores.shape), bool)
    mask[[*grammars]] = permitted([*grammars.values()], scores.shape[1])
    scores.masked_fill_(send(~mask, scores.device), -math.inf)
    for row, grammar in grammars.items():
        seq = seqs[row]
        if seq.num_tokens < seq.num_prompt_tokens + seq.params.min_tokens:
            ends = send(np.array(grammar.ends, np.int64), scores.device)
            others = scores[row].index_fill(0, ends, -math.inf)
            scores[row] = others.where(others.amax() > -math.inf, scores[row])


def run_processors(logits: Tensor, seq: Any) -> Tensor:
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
