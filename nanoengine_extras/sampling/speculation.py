"""`speculation="prompt-lookup"`: a decode step also checks guesses at the next tokens (drafts).

A `SpeculatingEngine` takes the place of the engine. It launches its steps with guesses in them, and
hands out the tokens that these have gained, one by one. The scheduler, the runner, stop strings and
outputs know nothing about guesses.

A step reads all weights, whether for one token of a sequence or for a few. So it can also compute
the tokens that come next if a guess is right, and draw a token after each of them:

    tokens    the fox saw the crow . the fox
    guess                                    saw the crow        what followed "the fox" before
    drawn                                    saw the cat  ran    after "fox", "saw", "the", "crow"

Of the guesses, "saw" and "the" are right, so the step has drawn three tokens: "saw", "the", "cat".
It has drawn "ran" after a wrong guess, and drops it. Nothing is approximate: a draw depends only on
the logits, the seed, the position and, with constraints, the tokens so far, which are known for its
row. So these are the tokens that three steps would have drawn, greedy or not. (Leviathan et al.,
2023, arXiv:2211.17192, guess with a small model. Their draws have no fixed seed for a position, so
they need a rule for which guesses to accept. Here it is `==`.)

The first drawn token joins its sequence at the end of the step, as usual. Each of the next steps
gives one more token to each sequence that has some left, and computes nothing: so it is not
scheduled, only done. A guess uses only
slots that its sequence holds anyway. K and V of a wrong one lie after the last token, where no
query sees them until a later step overwrites them.

Edits of logits look at the tokens so far, so the row after a guess has a copy of its sequence with
the guess (`_after`). Where a grammar forces a text, this text is the guess.

How many guesses are worth checking? `StepCosts` knows how long a step of each size takes on this
machine, and `odds` how often recent guesses of each sequence and each kind were right: a lookup
that has found eight tokens is right more often than one that has found two. A guess is computed
only if it raises the expected number of tokens a second (`_worthwhile`). The decision can depend on
the time, since the tokens do not depend on the decision.
"""

import time
from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import accumulate, cycle, islice
from operator import eq, index
from typing import Any

import torch

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import Condition, naming
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature, Features
from nanoengine.sequence import NO_TOKEN, Batch, Copies, Row, Sequence
from nanoengine.step_inputs import Launched

Guesses = dict[Sequence, list[int]]
# the most guesses of a step
MOST_GUESSES = 32
# the weight of the newest guess in the odds
WEIGHT = 0.2
# a guess that is right less often is not computed
LEAST_ODDS = 0.1
# guesses must promise this many times as many tokens a second: the estimates are rough
LEAST_GAIN = 1.1


class StepCosts(dict[int, float]):
    """The seconds of decode steps, by their number of tokens: those of the shortest recent step,
    since any disturbance makes a step longer."""

    def learn(self, count: int, seconds: float) -> None:
        """Adds a measurement.

        No smaller step takes longer than this. The known times of larger steps move a little
        towards it. So a size that was slow by chance, and then avoided, is tried again.
        """
        # it rises by at most 5 % a step; at least 1e-9, since a clock can measure 0
        found = self[count] = max(1e-9, min(seconds, 1.05 * self.get(count, seconds)))
        self.update({other: found if other < count else known - 0.001 * (known - found)
                     for other, known in self.items() if known > found})

    def estimate(self, count: int, without: int) -> float:
        """Returns the seconds of a step of `count` tokens, of which `without` are not guesses.

        The next smaller step that is known is the base. Each additional token costs as much as each
        guess in that step; if there are none, half as much as each of its tokens.
        """
        base = max(known for known in self if without <= known <= count)
        cost = self[base] - self[without] if base > without else self[base] / 2
        # a little less, so that larger steps are tried
        return self[base] + 0.9 * cost * (count - base) / (base - without or base)


class PromptLookup:
    """Looks for the last tokens of a sequence, at most eight, in all texts so far, and guesses that
    it continues as the newest of these texts did (prompt lookup decoding: Saxena, 2023). These are
    the texts of all sequences, including its own and those that have ended. Each token is indexed
    once, when its sequence is looked at; a sequence keeps how many of its tokens are.


    seen: for a few tokens, the text with them and the place after them; only the newest entries.
    kind: how many tokens the last guess was found with; with more tokens, it is more often right.
    """

    SIZES = (8, 4, 2, 1)

    def __init__(self) -> None:
        self.seen: OrderedDict[tuple[int, ...], tuple[list[int], int]] = OrderedDict()

    def __call__(self, seq: Sequence) -> Any:
        text = seq.token_ids
        for place in range(seq.kept.get("num_indexed", 1), len(text)):
            for size in self.SIZES:
                self.seen[tuple(text[max(0, place - size):place])] = text, place
        seq.kept["num_indexed"] = len(text)
        while len(self.seen) > 2**17:
            self.seen.popitem(last=False)
        ends = [tuple(text[-size:]) for size in self.SIZES]
        end = next((end for end in ends if end in self.seen), ())
        self.kind = len(end)
        found, place = self.seen.get(end, ([], 0))
        # The text of a call that was interrupted can end with the mark of a token not yet drawn.
        # `cycle`, since a repetition never ends.
        return cycle(token_id for token_id in found[place:place + 32] if token_id >= 0)


# functions from a sequence to a guess of its next tokens, of any length
SPECULATION: dict[str, Any] = {"none": None, "prompt-lookup": PromptLookup}

CONDITIONS: list[Condition] = [
    ("speculation", lambda c: callable(c.speculation) or c.speculation in [*SPECULATION],
     f"one of {[*SPECULATION]}, or a function like these"),
    ("speculation", lambda c: c.device != "cuda", "'none' on a GPU"),
    ("run_ahead", lambda c: not c.run_ahead, "False with speculation, which needs each token")]


class SpeculatingEngine(Engine):
    """Launches its steps with guesses.

    guess: the policy. Its attribute `kind`, if it has one, says how the last guess was found.
    all_odds: how often recent guesses of all sequences were right, by their kind: the policy's, or
        "forced" by a grammar. A new sequence begins with them.

    For each sequence it keeps:

    stock: the number of a launch, and the tokens that it drew, but that have not joined yet.
    odds: how often recent guesses of the sequence were right, by their kind.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, features: Features) -> None:
        policy = config.speculation
        self.guess = policy if callable(policy) else SPECULATION[policy]()
        self.clock = time.monotonic
        self.most_rows = len(runner.last_sampled)
        self.vocabulary = range(runner.model_config.vocab_size)
        self.num_launches = 0
        self.all_odds: dict[str, float] = {}
        self.costs = StepCosts()
        self.counts = Counter[str]()
        super().__init__(config, runner, features)

    def step(self) -> list[Sequence]:
        """A step of tokens that are already drawn, if there are any; else as in `Engine`."""
        self.check_open()
        seqs = [seq for seq in self.scheduler.running if self.stock_of(seq)]
        if not seqs:
            return super().step()
        batch = self.scheduler.build(seqs, admit=False)
        tokens = [self.stock_of(seq).pop(0) for seq in batch.sequences]
        return self._collect(Launched(batch, torch.tensor(tokens, device="cpu"), self.clock()))

    def stock_of(self, seq: Sequence) -> list[int]:
        """Returns the tokens of the last launch that have not joined a sequence yet."""
        number, tokens = seq.kept.get("stock", (0, []))
        return tokens if number == self.num_launches else []

    def launch(self, batch: Batch) -> Launched:
        """Runs a step with guesses, and keeps the tokens that are drawn after right guesses.

        1. The policy guesses, and the guesses that are worth it are computed.
        2. Guesses are compared with the tokens that were drawn in their places.
        """
        self.num_launches += 1
        # a step with a prompt is limited by computation, not by memory: guesses would slow it down
        if max(batch.num_tokens) > 1:
            return super().launch(batch)
        began = self.clock()
        asked = self._ask(batch)
        guesses = self._worthwhile(asked, batch)
        launched = super().launch(self._with_guesses(batch, guesses))
        tokens = launched.wait()
        num_rows = len(batch.sampled)
        num_guesses = len(tokens) - num_rows
        self.costs.learn(len(batch) + num_guesses, self.clock() - began)
        if num_guesses and min(tokens[:num_rows]) < 0:
            # K and V of a guess can be NaN, and spoil the token before it: so the step runs again
            # without guesses, and without the block copies, which are done
            guesses = {}
            launched = super().launch(replace(batch, copies=Copies()))
            tokens = launched.wait()

        self.counts.update(guessed_tokens=num_guesses, computed_tokens=num_guesses)
        after_guesses = iter(tokens[num_rows:])
        for row, (_, seq, _) in enumerate(batch.sampled):
            drawn = [tokens[row], *islice(after_guesses, len(guesses.get(seq, ())))]
            # also compares, at no cost, the first guess that was not computed
            guess, kind, odds = asked.get(seq, ((), "", {}))
            are_right = [*map(eq, guess, drawn)]
            num_right = [*are_right, False].index(False)
            self.counts["right_guesses"] += min(num_right, len(drawn) - 1)
            # NaN after a guess need not be caused by that guess; the next step will show
            gained = [token for token in drawn[1:num_right + 1] if token >= 0]
            seq.kept["stock"] = self.num_launches, gained
            for is_right in are_right[:num_right + 1]:
                odds[kind] += WEIGHT * (is_right - odds[kind])
                self.all_odds[kind] += WEIGHT * (is_right - self.all_odds[kind])
            tokens[row] = NO_TOKEN if seq.error else tokens[row]
        # for the scheduler, a step like any other
        return Launched(batch, torch.tensor(tokens, device="cpu"), launched.done)

    def _ask(self, batch: Batch) -> dict[Sequence, Any]:
        """Returns (guess, kind, odds) of sequences: as many tokens as could be computed, and how
        often recent guesses of each kind were right. A guess is the text that a grammar forces, or
        else what the policy guesses and a grammar permits.

        If forced text was wrong recently, the policy guesses instead. If all kinds were wrong, no
        guess is made, except in every eighth step. An error of the policy becomes the
        sequence's.
        """
        asked: dict[Sequence, Any] = {}
        vocabulary = self.vocabulary
        sharing = {name for name, feature in self.features.items()
                   if type(feature).fork != Feature.fork}
        for _, seq, position in batch.sampled:
            # in slots that the sequence holds, and before its maximum length
            most = min(MOST_GUESSES, len(seq.block_table) * self.config.block_size - position,
                       seq.max_num_tokens - position - 1)
            grammar = seq.kept.get("grammar")
            # no guesses for beams, nor if a feature without `fork` edits the sequence, since it can
            # keep a state, as a user's processors do
            is_beam = seq.needs_tokens and not (grammar or seq.params.bad_words)
            is_alone = is_beam or not sharing.issuperset(seq.edits)
            odds = seq.kept.setdefault("odds", {})
            hopeless = {each for each in odds if odds[each] < LEAST_ODDS and position % 8}
            # with a grammar, one of the kinds is its own
            if most < 1 or is_alone or len(odds) == len(hopeless) > bool(grammar):
                continue
            kind = "forced"
            # also moves the grammar on to this place
            guess = grammar.forced(seq.token_ids, vocabulary)[:most] if grammar else []
            if not guess or kind in hopeless:
                try:
                    with naming(f"request {seq.request_id}: its speculation {self.guess}"):
                        # raises an error for anything but tokens
                        guess = [vocabulary.index(index(token))
                                 for token in islice(self.guess(seq), most)]
                        kind = str(getattr(self.guess, "kind", ""))
                except ValueError as error:
                    seq.error = error
            odds.setdefault(kind, self.all_odds.setdefault(kind, 0.25))
            guess = guess[:grammar.matcher.validate_tokens(guess)] if grammar else guess
            asked[seq] = guess, kind, odds
        return asked

    def _worthwhile(self, asked: dict[Sequence, Any], batch: Batch) -> Guesses:
        """Returns as many of the guesses as give the most expected tokens a second.

        The i-th guess of a sequence gains a token with probability odds**i. The likeliest come
        first, and each makes the step longer. asked: from `_ask`
        """
        count = len(batch)
        # the time without guesses must be known
        if count not in self.costs:
            return {}
        chances = [(odds[kind] ** i, place)
                   for place, (guess, kind, odds) in enumerate(asked.values())
                   for i in range(1, len(guess) + 1) if odds[kind] ** i >= LEAST_ODDS]
        most = min(MOST_GUESSES, self.most_rows - len(batch.sampled), batch.budget)
        chances = sorted(chances, reverse=True)[:max(0, most)]
        gains = accumulate((chance for chance, _ in chances), initial=count)
        rates = [gain / self.costs.estimate(count + i, count) for i, gain in enumerate(gains)]
        rates[0] *= LEAST_GAIN
        counts = Counter(place for _, place in chances[:rates.index(max(rates))])
        return {seq: asked[seq][0][:counts[place]] for place, seq in enumerate(asked)}

    def _with_guesses(self, batch: Batch, guesses: Guesses) -> Batch:
        """Returns a batch that also computes guesses, and draws a token after each.

        A sequence's own token and its guesses are one chunk of a copy, which shares the block
        table. The additional rows come last.
        """
        wider = replace(batch, sequences=batch.sequences[:], num_tokens=batch.num_tokens[:],
                        sampled=batch.sampled[:])
        for source, seq, position in batch.sampled:
            if guess := guesses.get(seq):
                copy = wider.sequences[source] = seq.fork(token_ids=seq.token_ids + guess)
                copy.block_table = seq.block_table
                wider.num_tokens[source] += len(guess)
                wider.sampled += [Row(source, self._after(seq, guess[:i]), position + i)
                                  for i in range(1, len(guess) + 1)]
        return wider

    def _after(self, seq: Sequence, guess: list[int]) -> Sequence:
        """Returns the sequence for the row after these guesses. If features edit its logits, it is
        a copy that has the guesses; otherwise `seq` itself."""
        if not seq.edits:
            return seq
        copy = seq.fork(token_ids=seq.token_ids + guess)
        self.features.call("fork", seq, copy)
        return copy


PARTS = {"engine": SpeculatingEngine}
