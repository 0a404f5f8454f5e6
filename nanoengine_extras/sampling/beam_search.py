"""Beam search: a client of the engine, which forks and ends sequences between two steps.

A beam is a greedy sequence with `logprobs`. After each step that samples it, its new token is
removed. The beam then has no token left to compute, so it pauses. Once all beams of a prompt have
paused, the search decides which of them continue, fork, end or are dropped.

To `LLM` a search is a request like any other, and to the scheduler its beams are sequences like any
others. An observer calls `update` for each of them that has a new token. This file uses:

    llm.driver.run(searches), llm.driver.change(work)
    Scheduler.finish(seq, reason)
    Scheduler.fork(parent, child)           the child shares the blocks of its parent
    Scheduler.enqueue(seq), .running, BlockManager.deallocate(seq)
                                            only for paused beams: see `make_way`
    BlockManager.num_blocks_to_hold(seq), .num_blocks_for(num_tokens)
                                            the blocks that a search can need
    Sequence.needs_tokens                   no step runs ahead of a beam
    Sequence.end_tokens, .edits             are taken away: the search itself ends its beams
    Sequence.kept                           the log-probabilities of a beam: see logprobs.py
"""

import math
from contextlib import closing
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any
from weakref import WeakValueDictionary

from nanoengine.errors import Options, rejected
from nanoengine.llm import LLM
from nanoengine.observers import Feature
from nanoengine.requests import Request
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched


@dataclass
class BeamSearchParams(Options):
    """How one request is completed by beam search.

    beam_width: how many beams are kept, and returned.
    max_tokens: the most tokens to generate.
    ignore_eos: continue after EOS.
    temperature: divides the logits; 0 leaves them as they are. No token is drawn at random.
    length_penalty: the score of a finished beam is its summed log-probability divided by its
        number of generated tokens to this power, -40 to 40; larger values favour longer beams.
    include_stop_str_in_output: keep the text of EOS in the text of a beam that ended with it.
    skip_special_tokens: leave other special tokens out of the text.
    structured_outputs: must be None: beams are ranked by raw log-probabilities, without a grammar.
    allowed_token_ids: the only tokens that may be generated. Log-probabilities are computed
        over the whole vocabulary, so they have no rank. There can be fewer beams than beam_width.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: None = None
    allowed_token_ids: list[int] | None = None


@dataclass
class BeamSearchSequence:
    """A finished beam.

    tokens: the tokens of prompt and completion; the last one is EOS if the beam ended with it.
    cum_logprob: the summed log-probability of the completion.
    score: cum_logprob divided by the length to the power length_penalty.
    text: the text of prompt and completion; None without a tokenizer.
    finish_reason: "stop" (EOS), "length", or "error" if no beam has finite log-probabilities.
    logprobs: for each token of the completion, the likeliest tokens there: a dict from token ids to
        `Logprob`, without texts.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str
    text: str | None = None
    logprobs: list[dict[int, Any]] = field(default_factory=list)


@dataclass
class BeamSearchOutput:
    """The finished beams of a prompt, the highest score first."""

    sequences: list[BeamSearchSequence]


def beam_search(llm: LLM, prompts: Any, params: BeamSearchParams,
                priority: Any = None) -> list[BeamSearchOutput]:
    """Returns the `params.beam_width` best completions of each prompt.

    priority: as in `LLM.generate`.

    Raises ValueError for bad input, and if the beams might not fit into the engine.
    """
    if not isinstance(params, BeamSearchParams):
        raise rejected("params", type(params), "a BeamSearchParams")
    llm.inputs.check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
    sampling_params = SamplingParams(
        temperature=0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
        logprobs=params.beam_width * max(2, 1 + len(llm.inputs.eos_tokens)))
    requests = llm.inputs.make_requests(prompts, sampling_params, priority)
    scheduler = llm.engine.scheduler
    searches = [BeamSearch(request, params, scheduler) for request in requests]
    features = llm.engine.features
    features.load(["sampling.beam_search"])
    beams: Any = features["Beams"]
    beams.searches |= {search.request_id: search for search in searches}
    num_steps = beams.num_steps
    # some beams of a search always wait for a place
    is_wide = params.beam_width > scheduler.config.max_num_seqs
    with closing(llm.driver.run(searches)) as steps:
        # queues them
        next(steps)
        for updated in steps:
            # no step could be launched
            is_stuck = not updated and num_steps == beams.num_steps
            if is_stuck or is_wide:
                llm.driver.change(lambda: make_way(scheduler))
            num_steps = beams.num_steps
    tokenizer = llm.inputs.tokenizer
    for beam in [beam for search in searches for beam in search.finished]:
        if tokenizer:
            end = len(beam.tokens) - (beam.finish_reason == "stop")
            text = tokenizer.decode(beam.tokens[:end], params.skip_special_tokens)
            eos = tokenizer.decode(beam.tokens[end:]) if params.include_stop_str_in_output else ""
            beam.text = str(text) + str(eos)
    return [BeamSearchOutput(search.finished) for search in searches]


class Beams(Feature):
    """Observes the steps of all searches.

    searches: all that are running, or have not been collected yet, by their number.
    """

    def __init__(self) -> None:
        self.searches: Any = WeakValueDictionary()
        self.num_steps = 0

    def scheduled(self, batch: Batch) -> None:
        self.num_steps += bool(batch)

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if search := self.searches.get(seq.request_id):
                search.update(seq)


def make_way(scheduler: Scheduler) -> None:
    """Parks all paused beams, if nothing can run, or if there is no place for the next sequence.

    Paused beams wait for other beams of their prompts. They lose their blocks, and leave the
    scheduler until their search continues. Nothing computes them again before that, since their
    log-probabilities are known.

    So a search always ends: the head of the queue now fits. The next step computes it: a beam then
    pauses, another sequence gets a token.
    """
    running = scheduler.running
    paused = [seq for seq in running if not seq.num_uncomputed_tokens]
    is_full = len(running) == scheduler.config.max_num_seqs and scheduler.waiting
    if is_full or len(paused) == len(running):
        for beam in paused:
            running.remove(beam)
            scheduler.block_manager.deallocate(beam)
            beam.kept["is_parked"] = True


class BeamSearch(Request):
    """Beam search of one prompt, as in transformers with `early_stopping=False`.

    It considers the likeliest continuations of all beams, a few for each beam to be kept. Those
    that end are finished, if they are among the `beam_width` likeliest; the best `beam_width`
    others are the next beams. The search is over when none of these, ending now, would beat the
    worst of `beam_width` finished beams. Raises ValueError for beams that might not fit.
    """

    def __init__(self, request: Request, params: BeamSearchParams, scheduler: Scheduler) -> None:
        super().__init__(request.prompt, request.seqs)
        seq = self.seq
        manager = scheduler.block_manager
        of_longest = manager.num_blocks_for(seq.max_num_tokens)
        most = manager.num_blocks // max(of_longest, manager.num_blocks_to_hold(seq))
        if params.beam_width > most:
            raise rejected("beam_width", params.beam_width,
                           f"at most {most} with num_kv_blocks={manager.num_blocks}")
        self.params = params
        self.scheduler = scheduler
        # the search, not the engine, ends a beam that samples one of these tokens
        self.end_tokens = seq.end_tokens
        seq.end_tokens = {}
        seq.needs_tokens = True
        # raw log-probabilities decide: an edit would change nothing
        seq.edits = ()
        allowed = frozenset(params.allowed_token_ids or ()) or None
        self.for_logprobs: dict[str, Any] = {"temperature": params.temperature, "allowed": allowed}
        # chosen: the log-probabilities that its tokens were chosen by
        seq.kept.update(self.for_logprobs, chosen=[])
        # the summed log-probability of each beam; at the end, of the last beams
        self.scores = {seq: 0.0}
        # beams have no text
        seq.kept.pop("text", None)
        # the log-probabilities of the next tokens of paused beams
        self.found: dict[Sequence, dict[int, Any]] = {}
        self.finished: list[BeamSearchSequence] = []

    def update(self, beam: Sequence) -> None:
        """Pauses a beam with new log-probabilities; continues once all beams have paused.

        A beam that was preempted during its pause gets its log-probabilities again.
        """
        self.found[beam] = {}
        if beam.finish_reason != "error":
            beam.token_ids.pop()
            self.found[beam] = beam.kept["logprobs"].pop(beam.num_tokens).read()
            if allowed := self.for_logprobs["allowed"]:
                self.found[beam] = {token_id: replace(each, rank=None) for token_id, each
                                    in self.found[beam].items() if token_id in allowed}
        if len(self.found) == len(self.scores) and all(
                beam.finish_reason or "is_parked" in beam.kept or not beam.num_uncomputed_tokens
                for beam in self.scores):
            self._go_on(self._choose())

    def _choose(self) -> list[tuple[float, Sequence, int]]:
        """Returns the next beams, the best first: score, the beam to continue, its next token."""
        width = self.params.beam_width
        continuations = ((self.scores[beam] + found.logprob, beam, token_id)
                         for beam, logprobs in self.found.items()
                         for token_id, found in logprobs.items() if math.isfinite(found.logprob))
        candidates = nlargest(self.seq.params.logprobs or 0, continuations, lambda each: each[0])
        length = next(iter(self.scores)).num_tokens + 1
        penalty = (length - self.seq.num_prompt_tokens) ** self.params.length_penalty
        ended = [] if candidates else [
            (score, beam.token_ids, "error", beam.kept["chosen"])
            for beam, score in self.scores.items()]
        chosen = []
        for rank, (score, beam, token_id) in enumerate(candidates):
            is_end = token_id in self.end_tokens
            if not is_end and length < beam.max_num_tokens:
                chosen.append((score, beam, token_id))
            elif rank < width:
                reason = "stop" if is_end else "length"
                found = [*beam.kept["chosen"], self.found[beam]]
                ended.append((score, [*beam.token_ids, token_id], reason, found))
        self.finished += [
            BeamSearchSequence(tokens, score, score / penalty, reason, logprobs=found)
            for score, tokens, reason, found in ended]
        self.finished = nlargest(width, self.finished, lambda beam: beam.score)
        worst = self.finished[-1].score if len(self.finished) == width else -math.inf
        return chosen[:width] if chosen and chosen[0][0] / penalty > worst else []

    def _go_on(self, chosen: list[tuple[float, Sequence, int]]) -> None:
        """Drops the beams that do not continue, and forks those with several continuations."""
        kept = {beam for _, beam, _ in chosen}
        for beam in self.scores:
            if beam.kept.pop("is_parked", False):
                self.scheduler.enqueue(beam, in_front=True)
            if beam not in kept and not beam.finish_reason:
                self.scheduler.finish(beam, "abort")
        scores: dict[Sequence, float] = {}
        for score, beam, token_id in chosen:
            # the beam already has its next token: this one is for a fork
            if beam in scores:
                parent = beam
                beam = parent.fork(token_ids=[*parent.token_ids[:-1], token_id])
                beam.kept.update(self.for_logprobs, chosen=[*parent.kept["chosen"]])
                if parent.is_running:
                    self.scheduler.fork(parent, beam)
                else:
                    self.scheduler.enqueue(beam, in_front=True)
            else:
                beam.token_ids.append(token_id)
                beam.kept["chosen"].append(self.found[beam])
            scores[beam] = score
        self.scores = scores or self.scores
        self.seqs = [*self.scores]
        self.found = {}
