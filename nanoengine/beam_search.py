"""`BeamSearch`: the beams of one prompt, as forks of one sequence.

The engine runs beams as it runs any sequences and returns the likeliest next tokens of each; here
it is decided, for all beams of a prompt at once, which of them go on, fork, end or are dropped.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from nanoengine.sampling_params import BeamSearchParams, rejected
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence


@dataclass
class BeamSearchSequence:
    """A finished beam.

    tokens, text: prompt and completion; EOS is the last token where the beam ended by it.
    cum_logprob: the sum over the completion; score: that over length ** length_penalty.
    finish_reason: "stop" for EOS, or "length".
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

    Of all continuations of all beams the `num_candidates` likeliest are looked at. Those that end
    are finished, if they are among the `beam_width` best; the best `beam_width` others are the next
    beams. It is over when none of them, ending now, would beat the worst of `beam_width` finished.
    Raises ValueError for beams that might not fit the engine.
    """

    def __init__(self, seq: Sequence, params: BeamSearchParams, scheduler: Scheduler) -> None:
        self.params = params
        self.scheduler = scheduler
        self.beams = seq.group = [seq]
        self.scores = {seq: 0.0}  # summed log-probabilities
        self.finished: list[BeamSearchSequence] = []
        manager = scheduler.block_manager
        num_tokens = max(seq.max_num_tokens, scheduler.num_held_tokens(seq))
        if (params.beam_width * manager.num_blocks_for(num_tokens) > manager.num_blocks
                or params.beam_width > scheduler.max_num_seqs):
            raise rejected("beam_width", params.beam_width, f"at most {scheduler.max_num_seqs}, "
                           f"and {num_tokens} tokens for each must fit {manager.num_blocks} blocks")

    def advance(self) -> None:
        """Takes the next step, once all beams are computed; after a preemption some come later."""
        if any(beam.num_uncomputed_tokens for beam in self.beams):
            return
        chosen: dict[Sequence, list[tuple[float, int]]] = defaultdict(list)
        for score, beam, token_id in self._choose():
            chosen[beam].append((score, token_id))
        for beam in [beam for beam in self.beams if beam not in chosen]:
            self.beams.remove(beam)
            self.scheduler.finish(beam, "abort")
        for beam, ((score, token_id), *others) in chosen.items():
            for other in others:
                self._fork(beam, *other)
            beam.token_ids.append(token_id)
            self.scores[beam] = score
        if not all(beam.block_table for beam in self.beams):  # some fork found no room
            self.scheduler.preempt(self.beams[0])

    def _choose(self) -> list[tuple[float, Sequence, int]]:
        """The next beams, best first: score, the beam that goes on, its next token."""
        width, first = self.params.beam_width, self.beams[0]
        candidates = [(self.scores[beam] + found.logprob, beam, token_id)
                      for beam in self.beams for token_id, found in beam.logprobs[0].items()]
        candidates.sort(key=itemgetter(0), reverse=True)
        num_generated = first.num_tokens + 1 - first.num_prompt_tokens
        penalty = num_generated ** self.params.length_penalty
        chosen = []
        for rank, (score, beam, token_id) in enumerate(candidates[:first.params.logprobs]):
            reason = "stop" if token_id in beam.end_tokens else "length"
            if reason == "length" and first.num_tokens + 1 < first.max_num_tokens:
                chosen.append((score, beam, token_id))
            elif rank < width:
                self.finished.append(BeamSearchSequence(
                    [*beam.token_ids, token_id], score, score / penalty, reason))
        self.finished = sorted(self.finished, key=attrgetter("score"), reverse=True)[:width]
        best = chosen[0][0] / penalty if chosen else -math.inf
        is_over = len(self.finished) == width and best <= self.finished[-1].score
        return [] if is_over else chosen[:width]

    def _fork(self, beam: Sequence, score: float, token_id: int) -> None:
        child = Sequence(
            beam.request_id, [*beam.token_ids, token_id], beam.num_prompt_tokens,
            beam.max_num_tokens, beam.params, end_tokens=beam.end_tokens, metrics=beam.metrics)
        self.scheduler.fork(beam, child)
        child.group = self.beams
        self.beams.append(child)
        self.scores[child] = score

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        for beam in self.finished:
            beam.text = tokenizer and tokenizer.decode(beam.tokens, skip_special_tokens=True)
        return BeamSearchOutput(self.finished)
