"""`BeamSearch`: the beams of one prompt, as forks of one sequence.

The engine runs beams as it runs any sequences and returns the likeliest next tokens of each; here
it is decided, for all beams of a prompt at once, which of them go on, fork, end or are dropped.
"""

from dataclasses import dataclass, replace
from heapq import nlargest

from nanoengine.sampler import Logprobs
from nanoengine.sampling_params import BeamSearchParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence


@dataclass
class BeamSearchSequence:
    """A finished beam.

    tokens, text: prompt and completion; EOS is the last token where the beam ended by it.
    cum_logprob: the sum over the completion; score: that over length ** length_penalty.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str | None = None


@dataclass
class BeamSearchOutput:
    """The finished beams of a prompt, the one with the highest score first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """Beam search as transformers does it with `early_stopping=False`.

    Of all continuations of all beams a few times `beam_width` are looked at, the likeliest first.
    Those that end are finished, if they are among the `beam_width` best; the best `beam_width`
    others are the next beams. It is over when none of them, ending now, would beat the worst of
    `beam_width` finished ones. Raises ValueError for beams that might not fit the engine.
    """

    def __init__(self, seq: Sequence, params: BeamSearchParams, scheduler: Scheduler) -> None:
        scheduler.check_room(seq, params.beam_width)
        self.seq, self.params, self.scheduler = seq, params, scheduler
        self.scores = {seq: 0.0}  # of each beam, the summed log-probabilities
        self.finished: list[BeamSearchSequence] = []
        seq.group = [seq]

    def update(self, seq: Sequence, logprobs: Logprobs) -> None:
        """Takes in a beam's candidates; goes on once it has those of all beams.

        They may come in several steps, after the group was preempted.
        """
        if seq.num_uncomputed_tokens:  # preempted with some, it has gone on by those meanwhile
            return
        seq.logprobs = [logprobs]
        if all(beam.logprobs and not beam.num_uncomputed_tokens for beam in self.scores):
            self._advance(self._choose())

    def _advance(self, chosen: list[tuple[float, Sequence, int]]) -> None:
        """Drops the beams that do not go on, and forks those that go on several times."""
        for beam in [b for b in self.scores if all(b is not beam for _, beam, _ in chosen)]:
            self.scheduler.finish(beam, "abort")
        self.scores = {}
        for score, beam, token_id in chosen:
            if beam in self.scores:  # which has gone on by a token already
                fork = replace(beam, token_ids=[*beam.token_ids[:-1], token_id])
                self.scheduler.fork(beam, fork)
                beam = fork
            else:
                beam.token_ids.append(token_id)
            self.scores[beam] = score
        beams = list(self.scores)
        for beam in beams:
            beam.group, beam.logprobs = beams, []
        if not all(beam.block_table for beam in beams):  # some fork has found no room
            self.scheduler.preempt(beams[0])

    def _choose(self) -> list[tuple[float, Sequence, int]]:
        """The next beams, best first: score, the beam that goes on, its next token."""
        width = self.params.beam_width
        candidates = nlargest(self.seq.params.logprobs or 0, (
            (score + found.logprob, beam, token_id) for beam, score in self.scores.items()
            for token_id, found in beam.logprobs[0].items()), key=lambda choice: choice[0])
        length = candidates[0][1].num_tokens + 1
        penalty = (length - self.seq.num_prompt_tokens) ** self.params.length_penalty
        chosen = []
        for rank, (score, beam, token_id) in enumerate(candidates):
            if token_id not in beam.end_tokens and length < beam.max_num_tokens:
                chosen.append((score, beam, token_id))
            elif rank < width:
                tokens = [*beam.token_ids, token_id]
                self.finished.append(BeamSearchSequence(tokens, score, score / penalty))
        self.finished = nlargest(width, self.finished, key=lambda beam: beam.score)
        worst = self.finished[-1].score if len(self.finished) == width else float("-inf")
        return chosen[:width] if chosen and chosen[0][0] / penalty > worst else []
