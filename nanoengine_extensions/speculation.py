"""`speculation="prompt-lookup"`: a decode step also computes guesses of the next tokens.

It plugs into the engine's loop: `SpeculatingEngine.launch` adds guesses to a scheduled batch, and
`step` gives the tokens that they have brought to their sequences. The scheduler, the runner, stop
strings and outputs know nothing of guesses.

A step reads all weights, be it for one token of a sequence or for a few. So it can also compute the
tokens that come next if a guess is right, and draw a token after each of them:

    tokens    the fox saw the crow . the fox
    guess                                    saw the crow        what followed "the fox" before
    drawn                                    saw the cat  ran    after "fox", "saw", "the", "crow"

Of the guesses, "saw" and "the" are right, so the step has drawn three tokens: "saw", "the", "cat".
It has drawn "ran" after a wrong guess, and drops it. Nothing is approximate: a draw depends only on
the logits, the seed and the position, so these are the tokens that three steps would have drawn,
greedy or not. (Leviathan et al., 2023, arXiv:2211.17192, guess with a small model. Their draws have
no fixed seed for a position, so they need a rule for which guesses to accept. Here it is `==`.)

The first drawn token joins its sequence at the end of the step, as usual. Each of the next calls of
`step` gives one more to each sequence that has some, and computes nothing. A guess uses only slots
that its sequence holds anyway. K and V of a wrong one lie after the last token, where no query sees
them until a later step overwrites them.

How many guesses pay? `StepCosts` knows how long steps of so many tokens take on this machine, and
`odds` how often the guesses of each sequence were right of late. A guess is computed only if it
raises the expected number of tokens a second (`_worthwhile`). The decision can depend on the time,
since the tokens do not depend on the decision.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, islice, takewhile
from operator import eq, index
from typing import Any

import numpy as np

from nanoengine.batch import Batch, Copies, Row
from nanoengine.seams import naming
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine_extensions.engine import Engine
from nanoengine_extensions.policies import find_policy

# the most rows of a step with guesses, and the most guesses of a sequence in a step
MOST_ROWS = 64
MOST_GUESSES = 16
# a guess that is right less often is not computed
LEAST_ODDS = 0.1
# the weight of the newest guess in the odds of its sequence, and in those of a new sequence
WEIGHT = 0.2
WEIGHT_FOR_NEW = 0.02
# what a step with guesses has to gain: less than this can be an error of measurement
LEAST_GAIN = 1.02


class PromptLookup:
    """Guesses that a text goes on as it did after the same four, three or two tokens before (prompt
    lookup decoding: Saxena, 2023).

    It looks in the sequence itself, then in all others, also those that have ended. Each token is
    indexed once.

    own: for each sequence, from a few tokens to the place after them, where they stood last.
    seen: the same for all sequences, with their tokens; only the newest entries.
    """

    SIZES = (4, 3, 2)
    MOST_SEEN = 2**17

    def __init__(self) -> None:
        self.own: dict[Sequence, dict[Any, int]] = {}
        self.seen: OrderedDict[Any, tuple[list[int], int]] = OrderedDict()

    def __call__(self, seq: Sequence) -> Iterable[int]:
        tokens = seq.token_ids
        if seq not in self.own:
            self.own = {each: own for each, own in self.own.items() if not each.finish_reason}
        own = self.own.setdefault(seq, {})
        # after no tokens at all: how far the text is indexed
        for place in range(own.get((), 0) + 1, len(tokens)):
            for size in (*self.SIZES, 0):
                key = tuple(tokens[place - min(size, place):place])
                own[key] = place
                self.seen[key] = tokens, place
        while len(self.seen) > self.MOST_SEEN:
            self.seen.popitem(last=False)
        keys = [tuple(tokens[-size:]) for size in self.SIZES]
        found = [(tokens, own[key]) for key in keys if key in own]
        found += [self.seen[key] for key in keys if key in self.seen]
        text, place = found[0] if found else ([], 0)
        # a repetition goes on for ever
        return cycle(text[place:place + MOST_GUESSES])


class StepCosts:
    """The seconds of decode steps, by their number of tokens.

    seconds: the shortest of the last measurements. What disturbs a step makes it longer.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def learn(self, count: int, seconds: float) -> None:
        """Takes in a measurement.

        What is known of larger steps comes a little closer to it: so a step that was too long by
        chance, and is avoided since, is tried again some time.
        """
        # it can rise by 5 % a step
        found = min(seconds, 1.05 * self.seconds.get(count, math.inf))
        for other, known in self.seconds.items():
            if other > count and known > found:
                self.seconds[other] = known - 0.01 * (known - found)
        self.seconds[count] = found

    def estimates(self, first: int, last: int) -> Any:
        """Returns the seconds of steps of `first` to `last` tokens, interpolated.

        A token more than in the largest step so far is assumed to cost half as much as each of its
        tokens, until it is measured.
        """
        counts = sorted(self.seconds)
        # more tokens never take less time
        seconds = np.maximum.accumulate([self.seconds[count] for count in counts])
        return np.interp(range(first, last + 1), [*counts, 99 * counts[-1]],
                         [*seconds, 50 * seconds[-1]])


class SpeculatingEngine(Engine):
    """An engine that guesses.

    guess: the policy, from a sequence to its next tokens, as many as it likes.
    drawn: the tokens of each sequence that are drawn, but have yet to join it.
    odds: how often guesses of each sequence were right of late; None is for a new sequence.
    most_rows: the most rows of a step with guesses.
    """

    def __init__(self, config: Any, runner: Any, *clock: Any) -> None:
        super().__init__(config, runner, *clock)
        self.guess = find_policy("speculation", config.speculation) or PromptLookup()
        self.drawn: dict[Sequence, list[int]] = {}
        self.odds: dict[Sequence | None, float] = {None: 0.25}
        self.costs = StepCosts()
        self.most_rows = min(MOST_ROWS, config.max_num_seqs)
        # logits of more rows in one product; graphs of a GPU, and other ranks, have a fixed number
        if config.device == "cpu" and config.tensor_parallel_size == 1:
            self.most_rows = MOST_ROWS
            size = max(MOST_ROWS, config.max_num_seqs)
            runner.last_sampled = runner.last_sampled.new_zeros(size)

    def step(self) -> list[Sequence]:
        """Runs a step, or takes in tokens that the last one has drawn after right guesses."""
        seqs = [seq for seq in self.scheduler.running if self.drawn.get(seq)]
        if not seqs:
            return super().step()
        batch = self.scheduler.build(seqs, admit=False)
        tokens = [self.drawn[row.seq].pop(0) for row in batch.sampled]
        taken = self.scheduler.postprocess(batch, tokens)
        self.num_generated_tokens += len(taken)
        self.metrics.done(None, taken)
        return taken

    def launch(self, batch: Batch) -> Any:
        """Runs a step with guesses, and keeps the tokens that it draws after right ones."""
        began = self.clock()
        self.drawn = {}
        self.odds = {seq: each for seq, each in self.odds.items()
                     if seq is None or not seq.finish_reason}
        asked = self._guesses(batch)
        guesses = self._worthwhile(batch, asked)
        launched = self.runner.launch(with_guesses(batch, guesses, self.config.device))
        tokens = launched.wait()
        num_rows = len(batch.sampled)
        num_guesses = len(tokens) - num_rows
        if guesses and min(tokens[:num_rows]) < 0:
            # K and V of a guess can be NaN, and then reach the token before it: without guesses,
            # and with the block copies already done
            guesses = {}
            launched = self.runner.launch(replace(batch, copies=Copies()))
            tokens = launched.wait()
        elif max(batch.num_tokens) == 1:
            self.costs.learn(len(batch) + num_guesses, self.clock() - began)
        following = iter(tokens[num_rows:])
        for row, guess in asked.items():
            drawn = [tokens[row], *islice(following, len(guesses.get(row, ())))]
            self._compare(batch.sampled[row].seq, guess, drawn)
        self.metrics.counters.update(guessed_tokens=num_guesses, computed_tokens=num_guesses)
        tokens = [NO_TOKEN if row.seq.error else token
                  for row, token in zip(batch.sampled, tokens)]
        # for the scheduler, a step like any other
        vars(launched).update(batch=batch, wait=lambda: tokens)
        return launched

    def _guesses(self, batch: Batch) -> dict[int, list[int]]:
        """Returns guesses for rows of `batch.sampled`, by row, as many as could be computed.

        Only a decode step waits for memory rather than computes. If guesses of a sequence were
        wrong of late, the policy is asked in every eighth step only.
        """
        asked = {}
        for row, (_, seq, position) in enumerate(batch.sampled):
            # beams, and draws that depend on more than logits and seed
            is_fixed = not seq.needs_tokens and "constraints" not in seq.params.edits
            # slots that it holds, and tokens that it can still get
            most = min(MOST_GUESSES, len(seq.block_table) * self.config.block_size - position,
                       seq.max_num_tokens - position - 1)
            if max(batch.num_tokens) > 1 or not is_fixed or most < 1:
                continue
            if self.odds.setdefault(seq, self.odds[None]) >= LEAST_ODDS or position % 8 == 0:
                asked[row] = self._ask(seq, most)
        return asked

    def _ask(self, seq: Sequence, most: int) -> list[int]:
        """Returns the guess of the policy; an error of the policy becomes that of the sequence."""
        vocab_size = self.runner.model_config.vocab_size
        try:
            with naming(f"request {seq.request_id}: its speculation {self.guess}"):
                guess = [index(token) for token in islice(self.guess(seq), most)]
                if not all(0 <= token < vocab_size for token in guess):
                    raise ValueError(f"{guess} are not all token ids, 0 to {vocab_size - 1}")
                return guess
        except ValueError as error:
            seq.error = error
            return []

    def _worthwhile(self, batch: Batch, asked: dict[int, list[int]]) -> dict[int, list[int]]:
        """Returns the guesses, cut so that most tokens a second are expected.

        The i-th guess of a sequence brings a token with probability odds**i. The likeliest ones
        come first; as many are taken as the seconds of the larger step allow.
        """
        room = min(self.most_rows - len(batch.sampled), batch.budget)
        chances = sorted(
            ((chance, row) for row, guess in asked.items() for i in range(len(guess))
             if (chance := self.odds[batch.sampled[row].seq] ** (i + 1)) >= LEAST_ODDS),
            reverse=True)[:max(0, room)]
        # its time without guesses has to be known
        if not chances or len(batch) not in self.costs.seconds:
            return {}
        seconds = self.costs.estimates(len(batch), len(batch) + len(chances))
        gains = np.cumsum([0.0, *(chance for chance, _ in chances)])
        rates = (len(batch) + gains) / seconds
        best = int(rates.argmax()) if rates.max() > LEAST_GAIN * rates[0] else 0
        counts = Counter(row for _, row in chances[:best])
        return {row: guess[:counts[row]] for row, guess in asked.items() if counts[row]}

    def _compare(self, seq: Sequence, guess: list[int], drawn: list[int]) -> None:
        """Keeps the tokens that were drawn after right guesses, and learns the odds.

        drawn: the token at the first guess's place, and one after each guess that was computed. So
        one guess more can be compared than was computed.
        """
        are_right = [*map(eq, guess, drawn)]
        num_right = (are_right + [False]).index(False)
        self.drawn[seq] = [*takewhile(lambda token: token >= 0, drawn[1:num_right + 1])]
        self.metrics.counters["right_guesses"] += min(num_right, len(drawn) - 1)
        for is_right in are_right[:num_right + 1]:
            self.odds[seq] += WEIGHT * (is_right - self.odds[seq])
            self.odds[None] += WEIGHT_FOR_NEW * (is_right - self.odds[None])


def with_guesses(batch: Batch, guesses: dict[int, list[int]], device: str) -> Batch:
    """Returns a batch that also computes guesses, and draws a token after each.

    They stand in copies of the sequences, which share the block tables. On a CPU, the guesses of a
    sequence and its own token are one chunk, which reads the keys once. On a GPU, each is a decode
    of its own, so that the step has a CUDA graph.

    guesses: by row of `batch.sampled`. The additional rows come last.
    """
    wider = replace(batch, sequences=batch.sequences[:], starts=batch.starts[:],
                    num_tokens=batch.num_tokens[:], sampled=batch.sampled[:])
    for row, guess in guesses.items():
        source, seq, position = batch.sampled[row]
        copy = seq.fork(token_ids=seq.token_ids + guess)
        copy.block_table = seq.block_table
        wider.budget -= len(guess)
        if device == "cpu":
            wider.sequences[source] = copy
            wider.num_tokens[source] += len(guess)
        for place in range(position, position + len(guess)):
            if device == "cuda":
                source = len(wider)
                wider.sequences.append(copy)
                wider.starts.append(place)
                wider.num_tokens.append(1)
            wider.sampled.append(Row(source, seq, place + 1))
    return wider
