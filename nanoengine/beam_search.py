"""`BeamSearch`: the beams of one prompt, as forks of one sequence.

The engine runs beams like any other sequences, and gives each the log-probabilities of its
likeliest next tokens instead of a token. Here it is decided, for all beams of a prompt at once,
which of them go on, fork, end or are dropped.
"""

import math
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter, itemgetter

from nanoengine.sampling_params import BeamSearchParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence


@dataclass
class BeamSearchSequence:
    """A finished beam.

    tokens, text: prompt and completion; EOS is the last token where the beam ended by it.
    cum_logprob: the sum over the completion; score: that over length ** length_penalty.
    finish_reason: "stop" (EOS), "length", or "error" where no beam has log-probabilities that are
        finite.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str
    text: str | None = None


@dataclass
class BeamSearchOutput:
    """The finished beams of a prompt, the one with the highest score first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """Beam search as transformers does it with `early_stopping=False`.

    Of all continuations of all beams, a few times `beam_width` are looked at, the likeliest first.
    Those that end are finished, if they are among the `beam_width` likeliest; the best `beam_width`
    others are the next beams. The search is over when none of them, ending now, would beat the
    worst of `beam_width` finished beams. Raises ValueError for beams that might not fit the engine.
    """

    def __init__(self, seq: Sequence, params: BeamSearchParams, scheduler: Scheduler) -> None:
        scheduler.check_fits(seq, params.beam_width)
        self.seq = seq
        self.params = params
        self.scheduler = scheduler
        # the summed log-probabilities of each beam
        self.scores = {seq: 0.0}
        self.finished: list[BeamSearchSequence] = []
        seq.group = [seq]

    is_finished = property(lambda self: not self.scores)

    def update(self, seq: Sequence) -> None:
        """To be called for each beam that has new log-probabilities.

        The group goes on once all its beams have theirs. They may come in several steps: a group
        that was preempted is computed again in chunks. And when they come in one step, the first
        call goes on with all of them, and the others find nothing to do.
        """
        if self.scores and all(
                beam.logprobs and beam.num_uncomputed_tokens == 0 for beam in self.scores):
            self._go_on(self._choose())

    def _choose(self) -> list[tuple[float, Sequence, int]]:
        """The next beams, the best first: score, the beam that goes on, its next token."""
        width = self.params.beam_width
        continuations = (
            (score + found.logprob, beam, token_id) for beam, score in self.scores.items()
            for token_id, found in beam.logprobs[-1].items() if math.isfinite(found.logprob))
        candidates = nlargest(self.seq.params.logprobs or 0, continuations, key=itemgetter(0))
        length = next(iter(self.scores)).num_tokens + 1
        penalty = (length - self.seq.num_prompt_tokens) ** self.params.length_penalty
        if not candidates:
            for beam in self.scores:
                self.scheduler.block_manager.forget(beam)
            self.finished += [BeamSearchSequence(beam.token_ids, score, score / penalty, "error")
                              for beam, score in self.scores.items()]
        chosen = []
        for rank, (score, beam, token_id) in enumerate(candidates):
            if token_id not in beam.end_tokens and length < beam.max_num_tokens:
                chosen.append((score, beam, token_id))
            elif rank < width:
                tokens = [*beam.token_ids, token_id]
                reason = "stop" if token_id in beam.end_tokens else "length"
                self.finished.append(BeamSearchSequence(tokens, score, score / penalty, reason))
        self.finished = nlargest(width, self.finished, key=attrgetter("score"))
        worst = self.finished[-1].score if len(self.finished) == width else float("-inf")
        is_over = not chosen or chosen[0][0] / penalty <= worst
        return [] if is_over else chosen[:width]

    def _go_on(self, chosen: list[tuple[float, Sequence, int]]) -> None:
        """Drops the beams that do not go on, and forks those that go on several times."""
        kept = {beam for _, beam, _ in chosen}
        for beam in self.scores:
            if beam not in kept:
                self.scheduler.finish(beam, "abort")
        self.scores = {}
        for score, beam, token_id in chosen:
            # it has its next token already: this one is for a fork
            if beam in self.scores:
                parent = beam
                beam = parent.fork(token_ids=[*parent.token_ids[:-1], token_id])
                self.scheduler.fork(parent, beam)
            else:
                beam.token_ids.append(token_id)
            self.scores[beam] = score
        beams = list(self.scores)
        for beam in beams:
            beam.group = beams
            beam.logprobs = []
        # some fork has found no room
        if not all(beam.is_running for beam in beams):
            self.scheduler.preempt(beams[0])
