"""Constraints: changes of logits that forbid, discourage or favour tokens.

    logits ── biases ──▶ forbidden tokens ──▶ penalties ──▶ other features ──▶ temperature, draw

A bad word is forbidden as a text, whatever tokens spell it: a token is forbidden if its own text,
after the text that was generated before it, completes the word. Tokens that end the sequence are
forbidden until `min_tokens` are there.

The changes of a matrix of rows are data: the host sends numbers, and the device applies them, so
that nothing waits for a GPU.
"""

import math
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoengine.checks import Condition, naming, rejected
from nanoengine.features import asked_by
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import known_ids, send

CONDITIONS: list[Condition] = [
    ("min_tokens", lambda p: 0 <= p.min_tokens <= (p.max_tokens or p.min_tokens),
     "0 to max_tokens={max_tokens}")]


@dataclass
class Forbidden:
    """What one sequence must not generate.

    texts: what each token spells.
    words: (word, completing, until): a word, the result of `tokens_completing` for it, and the
        num_tokens from which it is permitted: infinity for bad words. Tokens that end the sequence
        complete an empty word, until `min_tokens` are there.
    """

    texts: list[bytes] = field(default_factory=list)
    words: list[tuple[bytes, list[np.ndarray], float]] = field(default_factory=list)

    def next_to(self, seq: Sequence) -> Iterator[np.ndarray]:
        """Yields the token ids that are forbidden in the next step, in several arrays."""
        # as much of the text as the beginning of a word can take
        longest = max((len(word) for word, *_ in self.words), default=0)
        text = b""
        place = seq.num_tokens
        while place > seq.num_prompt_tokens and len(text) + 1 < longest:
            place -= 1
            text = self.texts[seq.token_ids[place]] + text
        for word, completing, until in self.words:
            for i, token_ids in enumerate(completing):
                if seq.num_tokens < until and text.endswith(word[:i]):
                    yield token_ids


class Constraints(Feature):
    """Keeps, of a sequence, what it must not generate, which is `Forbidden`."""

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        """Bad words need all tokens of the sequence, so that its steps cannot run ahead."""
        p = seqs[0].params
        if "constraints" not in asked_by(p):
            return
        inputs.check_vocabulary("allowed_token_ids", p.allowed_token_ids or ())
        inputs.check_vocabulary("logit_bias", p.logit_bias or ())
        # the model's tokenizer can know more tokens, which are never generated
        size = inputs.vocab_size
        found = Forbidden()
        if p.bad_words:
            tokenizer = inputs.get_tokenizer()
            found.texts, *_ = spellings(tokenizer, size)
            with naming(rejected("bad_words", p.bad_words, "texts in Unicode")):
                words = [word.encode() for word in p.bad_words]
            completing = [tokens_completing(word, tokenizer, size) for word in words]
            found.words = [(word, token_ids, math.inf) for word, token_ids in zip(words, completing)
                           if any(map(len, token_ids))]
        needs_tokens = bool(found.words)
        # a grammar says itself where its text can end
        if p.structured_outputs is None:
            ends = [token for token in {*p.stop_token_ids, *inputs.eos_tokens} if token < size]
            until = seqs[0].num_prompt_tokens + p.min_tokens
            found.words.append((b"", [np.array(ends, np.int64)], until))
        for seq in seqs:
            seq.edits += ("Constraints",)
            seq.kept["constraints"] = found
            seq.needs_tokens |= needs_tokens

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        copy.kept["constraints"] = seq.kept.get("constraints")

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        add_biases(scores, seqs)
        found = [(row, seq, seq.kept.get("constraints")) for row, seq in enumerate(seqs)]
        forbidden = [(row, token_ids) for row, seq, each in found if each
                     for token_ids in each.next_to(seq)]
        forbid(scores, forbidden)
        penalize(scores, seqs, last_sampled)


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


def biases(seq: Sequence) -> dict[int, float]:
    """Returns the biases for the next step, by token id.

    If only some tokens are allowed, the result lists all of them, and all others are forbidden.
    """
    p = seq.params
    found = dict(p.logit_bias or {})
    if p.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in p.allowed_token_ids}
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


def forbid(scores: Tensor, found: list[tuple[int, np.ndarray]]) -> None:
    """Applies -inf in place to some token ids of some rows."""
    if found:
        numbers, arrays = zip(*found)
        owners = np.repeat(numbers, [len(token_ids) for token_ids in arrays])
        rows, token_ids = send(owners, scores.device), send(np.concatenate(arrays), scores.device)
        scores[rows, token_ids] = -math.inf


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
