"""`Scheduler`: who runs in the next step, for how many tokens, and who gives way.

Two deques, waiting and running, and one `Batch` a step. Plain Python: it knows tokens and blocks,
but no tensor and no text. The policies are the small functions and tables at the end.
"""

import math
import random
import time
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nanoengine.block_manager import BlockManager, Copies
from nanoengine.config import EngineConfig
from nanoengine.sequence import Sequence

COUNTERS = (
    "num_steps", "prefill_steps", "decode_steps", "prefill_tokens", "decode_tokens",
    "prefill_seconds", "decode_seconds", "host_seconds", "batched_sequences", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "recompute_preemptions",
    "swap_preemptions", "recomputed_tokens", "swap_out_blocks", "swap_in_blocks", "swapped_bytes",
    "swap_seconds", "copy_on_write_blocks", "shared_blocks", "max_blocks_used")
PRIORITY = attrgetter("priority")


@dataclass
class Batch:
    """The whole message from scheduler to runner.

    `num_tokens[i]` tokens of `sequences[i]` are to be computed, from its `num_computed_tokens` on.
    `sampled` are the indices of the sequences whose last known token is among them, and
    `receivers` who gets the token drawn there: where forks begin, an index comes several times.
    `budget` is how many more tokens the step may compute; `copies` are to be done first.
    """

    budget: int
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    receivers: list[Sequence] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)

    def __len__(self) -> int:
        return len(self.sequences)


class Scheduler:
    """Decides each step's batch, and takes in what came of it.

    config: how many sequences run and how many tokens a step computes at most (those that the
        prefix cache has are not computed and do not count), and the policies by name.
    max_model_len: how many tokens any sequence can have.
    """

    def __init__(self, block_manager: BlockManager, config: EngineConfig,
                 max_model_len: int) -> None:
        self.block_manager = block_manager
        self.config = config
        self.max_model_len = max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = config.limits()
        self.max_waiting = math.inf if config.max_waiting is None else config.max_waiting
        self.random = random.Random(config.seed)
        self.is_closed = False  # to prompts, once a static batch decodes
        self.waiting: deque[Sequence] = deque()  # by priority
        self.running: deque[Sequence] = deque()  # as admitted
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.preempted: deque[tuple] = deque(maxlen=None if config.trace else 0)  # for the trace

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that would not fit even alone."""
        manager, num_tokens = self.block_manager, max(seq.max_num_tokens, self.num_held_tokens(seq))
        if manager.num_blocks_for(num_tokens) > manager.num_blocks:
            raise ValueError(f"a request of up to {num_tokens} tokens does not fit the KV "
                             f"cache of {manager.num_blocks} blocks of {manager.block_size} tokens")
        insort_right(self.waiting, seq, key=PRIORITY)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # ----------------------------------------------------------------------------- one step

    def schedule(self) -> Batch:
        """Chooses the sequences of the next step and gives them the blocks that it needs."""
        manager, counters = self.block_manager, self.counters
        batch = BATCHING[self.config.scheduling](self)
        assert batch, "nothing can run: a sequence alone always has its blocks"
        batch.copies, manager.copies = manager.copies, Copies()
        for name, copies in vars(batch.copies).items():
            counters[f"{name}_blocks"] += len(copies)
        counters["num_steps"] += 1
        counters["batched_sequences"] += len(batch)
        num_used = manager.num_blocks - manager.num_free_blocks
        counters["max_blocks_used"] = max(num_used, counters["max_blocks_used"])
        return batch

    def build(self, candidates: Iterable[Sequence], admit: bool) -> Batch:
        """A batch of running sequences and, if asked, of the prompts at the head of waiting.

        First blocks are made free for all candidates, then they are given out: a victim is never
        in the batch. A step that preempts admits nobody.
        """
        admit = not self._make_room(candidates) and admit
        candidates = list(candidates)
        overtaken = admit and self._overtake(candidates)
        batch = Batch(self.max_num_batched_tokens)
        for seq in candidates:
            if batch.budget and seq.block_table:  # else it has just been overtaken
                self.block_manager.may_append(seq)
                self._place(batch, seq)
        if overtaken:
            self._place(batch, self.running[-1])
            return batch
        while admit and batch.budget and self.waiting and self._fits(self.waiting[0]):
            for seq in [self.waiting.popleft() for _ in self.waiting[0].members]:
                self._admit(seq)
                self._place(batch, seq)
        return batch

    def _place(self, batch: Batch, seq: Sequence) -> None:
        """Adds as many of a sequence's tokens to a batch as the budget allows."""
        num_tokens = min(seq.num_uncomputed_tokens, batch.budget)
        if not num_tokens:  # a beam that waits for others in its group
            return
        if num_tokens == seq.num_uncomputed_tokens:
            batch.sampled += [len(batch)] * (1 + len(seq.forks))
            batch.receivers += [*seq.forks, seq]
            seq.forks = []
        batch.sequences.append(seq)
        batch.num_tokens.append(num_tokens)
        batch.budget -= num_tokens
        seq.last_step = self.counters["num_steps"]
        self.block_manager.register(seq, num_tokens)

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Appends the sampled tokens, one for each of `batch.receivers`; returns who is finished.

        Beams are left alone: their tokens are chosen for a whole group (beam_search.py).
        """
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens):
            seq.num_computed_tokens += num_tokens
            if seq.host_blocks:
                self.block_manager.free_host(seq)
        now = time.monotonic()
        for index, seq, token_id in zip(batch.sampled, batch.receivers, token_ids):
            seq.metrics.first_token_time = seq.metrics.first_token_time or now
            if seq.group:
                continue
            seq.token_ids.append(token_id)
            if seq is not batch.sequences[index]:
                self.fork(batch.sequences[index], seq)
            if token_id in seq.end_tokens:
                self.finish(seq, "stop", seq.end_tokens[token_id])
            elif seq.num_tokens == seq.max_num_tokens:
                self.finish(seq, "length")
        self.counters["generation_tokens"] += len(token_ids)
        return [seq for seq in batch.receivers if seq.is_finished]

    # -------------------------------------------------------------- how a sequence moves

    def num_held_tokens(self, seq: Sequence) -> int:
        """How many tokens' blocks a sequence holds from its admission on."""
        return KV_ALLOCATION[self.config.kv_allocation](self, seq)

    def _fits(self, seq: Sequence, parent: Sequence | None = None) -> bool:
        """Whether there are places and blocks for a sequence with all its group."""
        if len(self.running) + len(seq.members) > self.max_num_seqs:
            return False
        manager = self.block_manager
        num_blocks = [manager.num_blocks_to_allocate(member, self.num_held_tokens(member), parent)
                      for member in seq.members]
        return sum(num_blocks) <= manager.num_free_blocks

    def _admit(self, seq: Sequence, parent: Sequence | None = None) -> None:
        """Moves a sequence to the tail of running, with all its blocks."""
        num_hits = self.block_manager.allocate(seq, self.num_held_tokens(seq), parent)
        self.running.append(seq)
        num_lost = seq.num_preempted_tokens - seq.num_computed_tokens
        self.counters["recomputed_tokens"] += max(0, num_lost)
        if parent:
            self.counters["shared_blocks"] += num_hits // self.block_manager.block_size
            return
        self.counters["prefix_cache_queries"] += seq.num_tokens
        self.counters["prefix_cache_hits"] += num_hits
        if not seq.metrics.first_scheduled_time:
            seq.metrics.first_scheduled_time = time.monotonic()
            seq.metrics.num_cached_tokens = num_hits
            self.counters["prompt_tokens"] += seq.num_prompt_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` run on from where `parent` is, or wait, if there is no room for it."""
        if self._fits(child, parent):
            self._admit(child, parent)
        else:
            insort_left(self.waiting, child, key=PRIORITY)

    def _make_room(self, candidates: Iterable[Sequence]) -> bool:
        """Preempts until all candidates that are left can have their blocks."""
        manager, num_running = self.block_manager, len(self.running)
        rank = VICTIMS[self.config.preemption_victim]
        while sum(map(manager.num_blocks_to_append, candidates)) > manager.num_free_blocks:
            self.preempt(max(reversed(self.running), key=lambda seq: rank(self, seq)))
        return len(self.running) < num_running

    def preempt(self, seq: Sequence) -> None:
        """Takes the blocks of a sequence and its group; they wait at the front."""
        for member in reversed(seq.members):
            (self.running if member.block_table else self.waiting).remove(member)
            insort_left(self.waiting, member, key=PRIORITY)
            member.num_preempted_tokens = member.num_computed_tokens
            kind = self.config.preemption_mode
            if kind == "recompute" or not self.block_manager.swap_out(member):
                kind = "recompute"
                self.block_manager.deallocate(member)
            self.counters[f"{kind}_preemptions"] += 1
            self.preempted.append((member.request_id, member.index, kind))
            member.metrics.num_preemptions += 1

    def _overtake(self, candidates: list[Sequence]) -> bool:
        """In a long queue, a head that does not fit takes the place of the longest running one.

        That one goes to the front; it never gives way like this again, so this comes to an end.
        What the candidates lack is left to them.
        """
        if len(self.waiting) <= self.max_waiting or self._fits(self.waiting[0]):
            return False
        manager, head = self.block_manager, self.waiting[0]
        victims = [seq for seq in self.running if not (seq.gave_way or seq.group)
                   and seq.priority >= head.priority]
        victim = max(victims, key=lambda seq: seq.num_tokens, default=None)
        if not victim or head.group:
            return False
        num_freed = sum(manager.ref_counts[block_id] == 1 for block_id in victim.block_table)
        num_needed = (manager.num_blocks_for(self.num_held_tokens(head))
                      + sum(map(manager.num_blocks_to_append, candidates)))
        if num_needed <= manager.num_free_blocks + num_freed:
            victim.gave_way = True
            self.waiting.popleft()
            self.preempt(victim)
            self._admit(head)
        return victim.gave_way

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is, and frees its blocks."""
        if not seq.is_finished:
            (self.running if seq.block_table else self.waiting).remove(seq)
            self.block_manager.deallocate(seq)
            seq.metrics.finished_time = time.monotonic()
            num_output_tokens = seq.num_tokens - seq.num_prompt_tokens
            seq.metrics.num_output_tokens = max(seq.metrics.num_output_tokens, num_output_tokens)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def abort(self) -> None:
        """Ends all sequences, between two steps. What the prefix cache knows stays."""
        for seq in [*self.waiting, *self.running]:
            self.finish(seq, "abort")

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, whatever a broken step has left of them."""
        self.waiting.clear()
        self.running.clear()
        self.block_manager.reset()

    def gauges(self) -> dict[str, int]:
        """How things stand. Waste, in tokens, is of blocks that nobody else can have: those held
        for later, and the slots behind the newest token in its block."""
        manager, size = self.block_manager, self.block_manager.block_size
        tables = [(len(seq.block_table) * size, seq.num_tokens) for seq in self.running]
        return {
            "num_requests_waiting": len(self.waiting), "num_requests_running": len(self.running),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks, "num_blocks_cached": len(manager.cached),
            "num_host_blocks_used": manager.num_host_blocks - len(manager.free_host_blocks),
            "reserved_waste": sum(max(0, (slots - tokens) // size * size)
                                  for slots, tokens in tables),
            "internal_waste": sum(max(0, slots - tokens) % size for slots, tokens in tables)}

    def record(self, batch: Batch, start: float, end: float) -> dict[str, Any]:
        """A step, for a trace: its time in seconds of `time.monotonic()`, how many tokens it
        computed of whom, who was preempted how since the step before, and how things stand."""
        tokens = [(seq.request_id, seq.index, num_tokens)
                  for seq, num_tokens in zip(batch.sequences, batch.num_tokens)]
        preempted = [self.preempted.popleft() for _ in range(len(self.preempted))]
        return self.gauges() | {
            "start": start, "end": end, "tokens": tokens, "preempted": preempted}


# ---------------------------------------------------------------------------------- policies


def prefill_first(scheduler: Scheduler) -> Batch:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    return prompts(scheduler, admit=True) or scheduler.build(scheduler.running, admit=False)


def mixed(scheduler: Scheduler) -> Batch:
    """Running sequences first, what is left of the budget to prompts in chunks.

    Decodes never wait for a prompt: Sarathi-Serve (Agrawal et al., 2024, arXiv:2403.02310).
    """
    return scheduler.build(scheduler.running, admit=True)


def static(scheduler: Scheduler) -> Batch:
    """A batch is filled until its first decode, then nobody joins until all have finished.

    What engines did before continuous batching (Orca: Yu et al., OSDI 2022); to be compared with.
    """
    scheduler.is_closed = scheduler.is_closed and bool(scheduler.running)
    batch = prompts(scheduler, admit=not scheduler.is_closed)
    scheduler.is_closed = not batch
    return batch or scheduler.build(scheduler.running, admit=False)


def prompts(scheduler: Scheduler, admit: bool) -> Batch:
    """A batch of prefills alone; they have all blocks from the start, so this preempts nobody."""
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    return scheduler.build(begun, admit)


BATCHING: dict[str, Callable[[Scheduler], Batch]] = {
    "prefill-first": prefill_first, "mixed": mixed, "static": static}
KV_ALLOCATION: dict[str, Callable[[Scheduler, Sequence], int]] = {
    "on-demand": lambda scheduler, seq: seq.num_tokens,
    "reserve": lambda scheduler, seq: seq.max_num_tokens,  # so it never has to be preempted
    "max-length": lambda scheduler, seq: scheduler.max_model_len,  # as before paging
}
VICTIMS: dict[str, Callable[[Scheduler, Sequence], Any]] = {  # the highest; if equal, the youngest
    "youngest": lambda scheduler, seq: 0,
    "longest": lambda scheduler, seq: seq.num_tokens,
    "lowest-priority": lambda scheduler, seq: seq.priority,
    "least-recently-run": lambda scheduler, seq: -seq.last_step,
    "random": lambda scheduler, seq: scheduler.random.random(),
}
