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
It has drawn "ran" after a wrong guess, and drops it. Nothing is approximate: a draw depends on the
logits, the seed and the position alone, and with constraints on the tokens so far, which its row
knows. So these are the tokens that three steps would have drawn, greedy or not. (Leviathan et al.,
2023, arXiv:2211.17192, guess with a small model. Their draws have no fixed seed for a position, so
they need a rule for which guesses to accept. Here it is `==`.)

The first drawn token joins its sequence at the end of the step, as usual. Each of the next calls of
`step` gives one more to each sequence that has some, and computes nothing. A guess uses only slots
that its sequence holds anyway. K and V of a wrong one lie after the last token, where no query sees
them until a later step overwrites them.

Constraints look at the tokens so far: the row after a guess has a copy of its sequence that has the
guess (`constraints.after`). Where a grammar forces a text, this text is the guess.

How many guesses pay? `StepCosts` knows how long steps of so many tokens take on this machine, and
`odds` how often recent guesses of each sequence and each kind were right: a lookup that has found
eight tokens is right more often than one that has found two. A guess is computed only if it raises
the expected number of tokens a second (`_worthwhile`). The decision can depend on the time, since
the tokens do not depend on the decision.
"""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, islice
from operator import eq, index
from typing import Any

from nanoengine.batch import Batch, Copies, Row
from nanoengine.seams import naming
from nanoengine.sequence import NO_TOKEN, Sequence
from nanoengine_extensions.constraints import after
from nanoengine_extensions.engine import Engine
from nanoengine_extensions.policies import PromptLookup, find_policy

Guesses = dict[Sequence, list[int]]
# the most guesses of a step
MOST_GUESSES = 32
# the weight of the newest guess in the odds
WEIGHT = 0.2
# a guess that is right less often is not computed
LEAST_ODDS = 0.1
# a step with guesses has to promise so many times the tokens a second: odds and seconds are rough
LEAST_GAIN = 1.1


class StepCosts(dict[int, float]):
    """The seconds of decode steps, by their number of tokens: the shortest of the last ones, since
    what disturbs a step makes it longer."""

    def learn(self, count: int, seconds: float) -> None:
        """Takes in a measurement.

        No smaller step takes longer. What is known of larger steps comes a little closer to it: so
        a step that was too long by chance, and is avoided since, is tried again some time.
        """
        # it can rise by 5 % a step; a clock can stand still
        found = self[count] = max(1e-9, min(seconds, 1.05 * self.get(count, seconds)))
        self.update({other: found if other < count else known - 0.001 * (known - found)
                     for other, known in self.items() if known > found})

    def estimate(self, count: int, without: int) -> float:
        """Returns the seconds of a step of `count` tokens, of which `without` are no guesses.

        The next smaller step that is known is taken as a base. Each token more costs as much as the
        guesses in that step; if there are none, half as much as each of its tokens.
        """
        base = max(known for known in self if without <= known <= count)
        cost = self[base] - self[without] if base > without else self[base] / 2
        # a little less: so larger steps are tried
        return self[base] + 0.9 * cost * (count - base) / (base - without or base)


class SpeculatingEngine(Engine):
    """An engine that guesses.

    guess: the policy, from a sequence to its next tokens, as many as it likes. If it has an
        attribute `kind`, that says how the last guess was found.
    drawn: the tokens of each sequence that are drawn, but have yet to join it.
    odds: how often recent guesses of a sequence were right, by their kind: the policy's, or
        "forced" by a grammar.
    all_odds: the same for the guesses of all sequences; a new sequence begins with them.
    """

    def __init__(self, config: Any, runner: Any, *clock: Any) -> None:
        super().__init__(config, runner, *clock)
        self.guess = find_policy("speculation", config.speculation) or PromptLookup()
        self.drawn: Guesses = {}
        self.odds: dict[Sequence, dict[str, float]] = {}
        self.all_odds: dict[str, float] = {}
        self.costs = StepCosts()
        # the logits of all guesses in one product; several ranks have agreed on max_num_seqs rows
        if config.tensor_parallel_size == 1:
            runner.last_sampled = runner.last_sampled.new_zeros(config.max_num_seqs + MOST_GUESSES)

    def step(self) -> list[Sequence]:
        """Runs a step, or takes in tokens that the last one has drawn after right guesses."""
        seqs = [seq for seq in self.scheduler.running if self.drawn.get(seq)]
        if not seqs:
            return super().step()
        batch = self.scheduler.build(seqs, admit=False)
        taken = self.scheduler.postprocess(batch, [self.drawn[seq].pop(0) for seq in seqs])
        for seq in taken:
            # in place of the tokens of its copy, which are the same
            if found := seq.logprobs.get(seq.num_tokens - 1):
                found.token_ids = seq.token_ids
        self.num_generated_tokens += len(taken)
        self.metrics.done(None, taken)
        return taken

    def launch(self, batch: Batch) -> Any:
        """Runs a step with guesses, and keeps the tokens that it draws after right ones.

        1. The policy guesses, and the guesses that pay are computed.
        2. Guesses are compared with the tokens that were drawn in their places.
        """
        self.drawn = {}
        # a step with a prompt computes, and does not wait for memory
        if max(batch.num_tokens) > 1:
            return self.runner.launch(batch)
        began = self.clock()
        asked = self._ask(batch)
        guesses = self._worthwhile(asked, batch)
        launched = self.runner.launch(with_guesses(batch, guesses))
        tokens = launched.wait()
        num_rows = len(batch.sampled)
        num_guesses = len(tokens) - num_rows
        self.costs.learn(len(batch) + num_guesses, self.clock() - began)
        if num_guesses and min(tokens[:num_rows]) < 0:
            # K and V of a guess can be NaN, and then reach the token before it: once more without
            # guesses, and without the block copies, which are done
            guesses, launched = {}, self.runner.launch(replace(batch, copies=Copies()))
            tokens = launched.wait()

        self.metrics.counters.update(guessed_tokens=num_guesses, computed_tokens=num_guesses)
        after_guesses = iter(tokens[num_rows:])
        for row, (_, seq, _) in enumerate(batch.sampled):
            drawn = [tokens[row], *islice(after_guesses, len(guesses.get(seq, ())))]
            # also compares, for nothing, the first guess that was not computed
            guess, kind, odds = asked.get(seq, ((), "", {}))
            are_right = [*map(eq, guess, drawn)]
            num_right = [*are_right, False].index(False)
            self.metrics.counters["right_guesses"] += min(num_right, len(drawn) - 1)
            # NaN after a guess need not be its own: the next step will tell
            self.drawn[seq] = [token for token in drawn[1:num_right + 1] if token >= 0]
            for is_right in are_right[:num_right + 1]:
                odds[kind] += WEIGHT * (is_right - odds[kind])
                self.all_odds[kind] += WEIGHT * (is_right - self.all_odds[kind])
            tokens[row] = NO_TOKEN if seq.error else tokens[row]
        # for the scheduler, a step like any other
        vars(launched).update(batch=batch, wait=lambda: tokens)
        return launched

    def _ask(self, batch: Batch) -> dict[Sequence, Any]:
        """Returns (guess, kind, odds) of sequences: as many tokens as could be computed, and how
        often recent guesses of each kind were right. Guessed is the text that a grammar forces, or
        else what the policy guesses and a grammar permits.

        Forced text that was wrong of late gives way to the policy. Where all kinds were wrong, none
        is looked at, except in every eighth step. An error of the policy becomes that of the
        sequence.
        """
        self.odds = {row.seq: self.odds.get(row.seq, {}) for row in batch.sampled}
        asked: dict[Sequence, Any] = {}
        vocabulary = range(self.runner.model_config.vocab_size)
        for _, seq, position in batch.sampled:
            # in slots that it holds, and before its end
            most = min(MOST_GUESSES, len(seq.block_table) * self.config.block_size - position,
                       seq.max_num_tokens - position - 1)
            # a user's processors, which can keep a state, and beams
            params: Any = seq.params
            is_alone = params.logits_processors or (seq.needs_tokens and not seq.constraints)
            odds, grammar = self.odds[seq], seq.constraints and seq.constraints[2]
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
                        # raises an error for what is no token
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
        """Returns guesses cut so that the most tokens a second are expected. asked: from `_ask`

        The i-th guess of a sequence brings a token with probability odds**i. The likeliest ones
        come first; as many are computed as the seconds of the larger step allow.
        """
        count = len(batch)
        # the seconds without guesses have to be known
        if count not in self.costs:
            return {}
        chances = [(odds[kind] ** i, place)
                   for place, (guess, kind, odds) in enumerate(asked.values())
                   for i in range(1, len(guess) + 1) if odds[kind] ** i >= LEAST_ODDS]
        room = min(MOST_GUESSES, len(self.runner.last_sampled) - len(batch.sampled), batch.budget)
        chances = sorted(chances, reverse=True)[:max(0, room)]
        gains = accumulate((chance for chance, _ in chances), initial=count)
        rates = [gain / self.costs.estimate(count + i, count) for i, gain in enumerate(gains)]
        rates[0] *= LEAST_GAIN
        counts = Counter(place for _, place in chances[:rates.index(max(rates))])
        return {seq: asked[seq][0][:counts[place]] for place, seq in enumerate(asked)}


def with_guesses(batch: Batch, guesses: Guesses) -> Batch:
    """Returns a batch that also computes guesses, and draws a token after each.

    A sequence's own token and its guesses are one chunk of a copy, which shares the block table.
    The additional rows come last.
    """
    wider = replace(batch, sequences=batch.sequences[:], num_tokens=batch.num_tokens[:],
                    sampled=batch.sampled[:])
    for source, seq, position in batch.sampled:
        if guess := guesses.get(seq):
            copy = wider.sequences[source] = seq.fork(token_ids=seq.token_ids + guess)
            copy.block_table = seq.block_table
            wider.num_tokens[source] += len(guess)
            wider.sampled += [Row(source, after(seq, guess[:i]), position + i)
                              for i in range(1, len(guess) + 1)]
    return wider
