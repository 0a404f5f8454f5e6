"""Constraints: changes to logits that forbid, discourage or favour tokens.

    logits ── biases ──▶ forbidden tokens ──▶ penalties ──▶ other features ──▶ temperature, draw

A bad word is forbidden as text, whatever tokens spell it: a token is forbidden if it completes the
word, after the text that was generated before it. Tokens that end the sequence are forbidden until
there are `min_tokens`.

The changes to a matrix of rows are data: the host sends numbers, and the device applies them, so
that nothing waits for a GPU.
"""

import math
import re
from array import array
from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.errors import Condition, naming, rejected
from nanoengine.features import asked_by
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Launched, known_ids
from nanoengine_extras.sampling import bytes_of, send

CONDITIONS: list[Condition] = [
    ("min_tokens", lambda p: 0 <= p.min_tokens <= (p.max_tokens or p.min_tokens),
     "0 to max_tokens={max_tokens}")]

# repetition, presence, frequency
NO_PENALTIES = (1, 0, 0)
NO_TOKENS = np.array([], np.int64)


@dataclass
class BadWords:
    """Which tokens complete one of several words.

    texts: the text of each token.
    anywhere: the tokens with a word in their own text.
    after: for each beginning of a word, arrays of the tokens that begin with its rest.
    lengths: the lengths of these beginnings, in bytes.
    """

    texts: list[bytes]
    anywhere: np.ndarray
    after: dict[bytes, list[np.ndarray]]
    lengths: list[int]


@dataclass(eq=False)
class Constraint:
    """The changes to the logits of one sequence.

    It reads each token of the sequence once (`take_in`), so that no step goes through all of them.

    bias_ids, biases: token ids, and the numbers to add to their logits.
    ends: the tokens that are forbidden until the sequence has `until` tokens.
    bad_words: None if no token completes one.

    num_taken: how many tokens it has read.
    text: the end of the text that they spell after the prompt, at most as long as a bad word.
    seen, counts: the distinct tokens that are penalized, and how often each was generated.
    places: the index of a token in these.
    """

    bias_ids: np.ndarray
    biases: np.ndarray
    ends: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    until: int = 0
    bad_words: BadWords | None = None

    num_taken: int = field(default=0, init=False)
    text: bytes = field(default=b"", init=False)
    seen: array = field(default_factory=lambda: array("q"), init=False)
    counts: array = field(default_factory=lambda: array("d"), init=False)
    places: dict[int, int] = field(default_factory=dict, init=False)

    def take_in(self, seq: Sequence) -> None:
        """Reads the tokens that are new since the last call; all of them are known."""
        if self.bad_words:
            self.text = self.text_of(seq)[-max(self.bad_words.lengths, default=1):]
        for token_id, amount in zip(*self.new_tokens(seq)):
            place = self.places.setdefault(token_id, len(self.seen))
            if place == len(self.seen):
                self.seen.append(token_id)
                self.counts.append(0)
            self.counts[place] += amount
        self.num_taken = seq.num_tokens

    def text_of(self, seq: Sequence) -> bytes:
        """Returns the end of the generated text, with the tokens that have not been read yet."""
        assert self.bad_words
        new = seq.token_ids[max(self.num_taken, seq.num_prompt_tokens):]
        return self.text + b"".join(self.bad_words.texts[token_id] for token_id in new)

    def new_tokens(self, seq: Sequence) -> tuple[list[int], list[float]]:
        """Returns the penalized tokens that have not been read yet, and for each of them 1 if it
        was generated, 0 if it is from the prompt."""
        penalties = penalties_of(seq.params)
        if penalties == NO_PENALTIES:
            return [], []
        start = max(self.num_taken, 0 if penalties[0] != 1 else seq.num_prompt_tokens)
        num_given = max(0, seq.num_prompt_tokens - start)
        new = seq.token_ids[start:]
        return new, [0.0] * num_given + [1.0] * (len(new) - num_given)

    def next_to(self, seq: Sequence) -> Iterator[np.ndarray]:
        """Yields the token ids that are forbidden in the next step, in several arrays."""
        if seq.num_tokens < self.until:
            yield self.ends
        if self.bad_words:
            yield self.bad_words.anywhere
            text = self.text_of(seq)
            ends = {text[-length:] for length in self.bad_words.lengths}
            for end in ends & self.bad_words.after.keys():
                yield from self.bad_words.after[end]


class Constraints(Feature):
    """Keeps the `Constraint` of a sequence."""

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        """Bad words need all tokens of the sequence, so its steps cannot run ahead."""
        p = seqs[0].params
        if "sampling.constraints" not in asked_by(p):
            return
        inputs.check_vocabulary("allowed_token_ids", p.allowed_token_ids or ())
        inputs.check_vocabulary("logit_bias", p.logit_bias or ())
        # the model's tokenizer can know more tokens, which are never generated
        size = inputs.vocab_size
        found = Constraint(*biases_of(p))
        if p.bad_words:
            tokenizer = inputs.get_tokenizer()
            with naming(rejected("bad_words", p.bad_words, "strings that UTF-8 can encode")):
                words = tuple(word.encode() for word in p.bad_words)
            found.bad_words = find_bad_words(words, tokenizer, size)
        # with a grammar, the grammar decides where the text can end
        if p.structured_outputs is None:
            ends = [token for token in {*p.stop_token_ids, *inputs.eos_tokens} if token < size]
            found.ends = np.array(ends, np.int64)
            found.until = seqs[0].num_prompt_tokens + p.min_tokens
        for seq in seqs:
            seq.edits += ("Constraints",)
            seq.kept["constraints"] = replace(found)
            seq.needs_tokens |= bool(found.bad_words)

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        """The copy shares the constraint. Its guesses are never taken in."""
        copy.kept["constraints"] = seq.kept.get("constraints")

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        add_biases(scores, seqs)
        forbid(scores, seqs)
        penalize(scores, seqs, last_sampled)

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if found := seq.kept.get("constraints"):
                found.take_in(seq)


def constraint_of(seq: Sequence) -> Constraint:
    """Returns the constraint that is kept for a sequence, or in a trial step a new one."""
    return seq.kept.get("constraints") or Constraint(*biases_of(seq.params))


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


# ----------------------------------------------------------------------------- bad words


@lru_cache(maxsize=2)
def spellings(tokenizer: Any, vocab_size: int) -> tuple[list[bytes], bytes, list[int]]:
    """Returns the bytes that each token adds to a text, in UTF-8; they can be a part of a
    character.

    Also returns these spellings in one string, each after a byte 0xFF, which occurs in no text, and
    the place where each begins. A special token spells nothing.
    """
    backend = tokenizer.backend_tokenizer
    # a token twice, minus the token once: some decoders strip spaces at the start of a text
    once, twice = (backend.decode_batch([[number] * count for number in range(vocab_size)])
                   for count in (1, 2))
    added = [both[len(first):] for first, both in zip(once, twice)]
    texts = [bytes_of(backend.id_to_token(number), text) for number, text in enumerate(added)]
    starts = accumulate((len(text) + 1 for text in texts), initial=0)
    return texts, b"".join(b"\xff" + text for text in texts), [*starts]


@lru_cache(maxsize=2)
def sorted_spellings(tokenizer: Any, vocab_size: int) -> tuple[list[bytes], np.ndarray]:
    """Returns the texts of `spellings` in order, and their tokens."""
    texts, *_ = spellings(tokenizer, vocab_size)
    order = sorted(range(vocab_size), key=texts.__getitem__)
    return [texts[token_id] for token_id in order], np.array(order, np.int64)


@lru_cache(maxsize=10_000)
def tokens_completing(word: bytes, tokenizer: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns, for each i, the tokens that complete a word after its first i bytes: those that
    begin with its rest. For i = 0, these are the tokens that contain the word."""
    _, joined, starts = spellings(tokenizer, vocab_size)
    places = (match.start() for match in re.finditer(re.escape(word), joined))
    found = [np.array(sorted({bisect(starts, place) - 1 for place in places}), np.int64)]
    texts, token_ids = sorted_spellings(tokenizer, vocab_size)
    for i in range(1, len(word)):
        rest = word[i:]
        end = bisect(texts, rest, key=lambda text: text[:len(rest)])
        found.append(token_ids[bisect_left(texts, rest):end])
    return found


@lru_cache(maxsize=16)
def find_bad_words(words: tuple[bytes, ...], tokenizer: Any, vocab_size: int) -> BadWords | None:
    """Returns which tokens complete these words, or None if no token does."""
    names = {token.content.encode(): number
             for number, token in tokenizer.added_tokens_decoder.items() if number < vocab_size}
    # special tokens spell nothing
    anywhere = [np.array([names[word] for word in words if word in names], np.int64)]
    after: dict[bytes, list[np.ndarray]] = defaultdict(list)
    for word in words:
        for i, token_ids in enumerate(tokens_completing(word, tokenizer, vocab_size)):
            if len(token_ids):
                (after[word[:i]] if i else anywhere).append(token_ids)
    found = BadWords(spellings(tokenizer, vocab_size)[0], np.unique(np.concatenate(anywhere)),
                     dict(after), sorted({*map(len, after)}))
    return found if len(found.anywhere) or after else None


# -------------------------------------------------------------------------- edits of a matrix


def biases_of(params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids, and the numbers to add to their logits.

    If only some tokens are allowed, the result has all of those, and all others are forbidden.
    """
    found = params.logit_bias or {}
    if params.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in params.allowed_token_ids}
    return np.array([*found], np.int64), np.array([*found.values()], np.float32)


def places_of(arrays: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rows and the columns of token ids; there is an array of these for each row."""
    rows = np.arange(len(arrays)).repeat([len(token_ids) for token_ids in arrays])
    return send(rows, device), send(np.concatenate(arrays), device)


def add_biases(scores: Tensor, seqs: list[Sequence]) -> None:
    """Applies the result of `biases_of` in place, and -inf to tokens that are not allowed."""
    found = [constraint_of(seq) for seq in seqs]
    biased = [each.bias_ids for each in found]
    if any(map(len, biased)):
        others = [-math.inf if seq.params.allowed_token_ids else 0.0 for seq in seqs]
        bias = send(others, scores.device).float()[:, None].repeat(1, scores.shape[1])
        added = send(np.concatenate([each.biases for each in found]), scores.device)
        bias[places_of(biased, scores.device)] = added
        scores += bias


def forbid(scores: Tensor, seqs: list[Sequence]) -> None:
    """Applies -inf in place to the tokens that are forbidden in this step."""
    found = [np.concatenate([NO_TOKENS, *constraint_of(seq).next_to(seq)]) for seq in seqs]
    if any(map(len, found)):
        # a Python number would be copied to the GPU, and the host would wait for that
        scores[places_of(found, scores.device)] = scores.new_full((), -math.inf)


def penalize(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """Applies, in place, the repetition penalty (Keskar et al., 2019, arXiv:1909.05858), also to
    tokens of the prompt; then OpenAI's penalties for generated tokens, once (presence) and for each
    occurrence (frequency)."""
    penalties = [penalties_of(seq.params) for seq in seqs]
    if {*penalties} == {NO_PENALTIES}:
        return
    found = [constraint_of(seq) for seq in seqs]
    new = [each.new_tokens(seq) for each, seq in zip(found, seqs)]
    tokens = [np.append(each.seen, np.array(token_ids, np.int64))
              for each, (token_ids, _) in zip(found, new)]
    amounts = [np.append(each.counts, added) for each, (_, added) in zip(found, new)]
    rows, token_ids = places_of(tokens, scores.device)
    counts = send(np.concatenate(amounts), scores.device)
    of_rows = send(penalties, scores.device)
    places = rows, known_ids(token_ids, last_sampled)
    counts = torch.zeros_like(scores).index_put_(places, counts.float(), accumulate=True)[places]
    repetition, presence, frequency = of_rows.float()[rows].T
    seen = scores[places]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    scores[places] = seen - presence * (counts > 0) - frequency * counts
