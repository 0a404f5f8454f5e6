"""`Scheduler`: who runs in the next step, for how many tokens, and who gives way.

Two deques, waiting and running, and one `Batch` a step. Plain Python: it knows tokens and blocks,
but no tensor and no text. The policies are the small functions and tables at the end.
"""

import time
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from nanoengine.block_manager import BlockManager, Copies
from nanoengine.config import EngineConfig
from nanoengine.sequence import PendingToken, Sequence


@dataclass
class Batch:
    """The whole message from scheduler to runner.

    `num_tokens[i]` tokens of `sequences[i]` are to be computed, from its `num_computed_tokens` on.
    `sampled` has the index of each sequence whose last known token is among them, and who gets the
    token drawn there: where forks begin, an index comes several times. `copies` are to be done
    first. `budget`: how many more tokens the step may compute. `preempted`: since the last one.
    `is_under_way`: whether its tokens count as computed already (`Scheduler.advance`).
    `is_awaited`: whether the next step depends on what is sampled: for processors, beams and forks.
    `started`: when it was begun to be built, of `time.monotonic()`.
    """

    budget: int
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, Sequence]] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    preempted: list[tuple[Sequence, str]] = field(default_factory=list)
    is_under_way: bool = False
    is_awaited: bool = False
    started: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return len(self.sequences)


class Scheduler:
    """Decides each step's batch, and takes in what came of it.

    config: how many sequences run and how many tokens a step computes at most (those that the
        prefix cache has are not computed and do not count), and the policies by name.
    """

    def __init__(self, block_manager: BlockManager, config: EngineConfig) -> None:
        self.block_manager, self.config = block_manager, config
        self.max_num_seqs, self.max_num_batched_tokens = config.limits()
        self.is_closed = False  # to prompts, once a static batch decodes
        self.waiting: deque[Sequence] = deque()  # by priority
        self.running: deque[Sequence] = deque()  # as admitted
        self.counters: Counter[str] = Counter()  # see LLM.metrics
        self.preempted: list[tuple[Sequence, str]] = []  # since the last step, and how

    def check_room(self, seq: Sequence, beam_width: int = 1) -> None:
        """Raises ValueError for a sequence that would not fit with all its beams, even alone."""
        manager = self.block_manager
        num_tokens = max(seq.max_num_tokens, seq.num_held_tokens)
        num_blocks = beam_width * manager.num_blocks_for(num_tokens)
        if beam_width > self.max_num_seqs or num_blocks > manager.num_blocks:
            raise ValueError(f"{beam_width=} x {num_tokens} tokens do not fit {manager.num_blocks} "
                             f"blocks of {manager.block_size} tokens and {self.max_num_seqs} seqs")

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that could never run."""
        self.check_room(seq)
        insort_right(self.waiting, seq, key=attrgetter("priority"))

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # ----------------------------------------------------------------------------- one step

    def schedule(self) -> Batch:
        """Chooses the sequences of the next step and gives them the blocks that it needs."""
        manager = self.block_manager
        batch = BATCHING[self.config.scheduling](self)
        batch.copies, manager.copies = manager.copies, Copies()
        manager.free_host_blocks += batch.copies.swap_in.values()  # for the next step to write
        batch.preempted, self.preempted = self.preempted, []
        copied = {f"{name}_blocks": len(blocks) for name, blocks in vars(batch.copies).items()}
        self.counters.update(copied, num_steps=1, batched_sequences=len(batch),
                             computed_tokens=sum(batch.num_tokens))
        num_used = manager.num_blocks - manager.num_free_blocks
        self.counters["max_blocks_used"] = max(num_used, self.counters["max_blocks_used"])
        return batch

    def build(self, candidates: Iterable[Sequence], admit: bool) -> Batch:
        """A batch of running sequences and, if asked, of the prompts at the head of waiting.

        First all candidates get their blocks, then the batch is filled: a victim is never in it.
        A step that preempts admits nobody.
        """
        admit = not self._make_room(candidates) and admit
        if admit:
            self._overtake()
        batch = Batch(self.max_num_batched_tokens)
        for seq in candidates:  # but for who has just been overtaken, or waits for other beams
            if batch.budget and seq.block_table and len(seq.token_ids) > seq.num_computed_tokens:
                self._place(batch, seq)
        while admit and batch.budget and self.waiting and self._fits(self.waiting[0]):
            for seq in [self.waiting.popleft() for _ in self.waiting[0].members]:
                self._admit(seq)
                if batch.budget:
                    self._place(batch, seq)
        return batch

    def _place(self, batch: Batch, seq: Sequence) -> None:
        """Adds as many of a sequence's tokens to a batch as the budget allows."""
        num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, batch.budget)
        stop = seq.num_computed_tokens + num_tokens
        if stop == len(seq.token_ids):
            batch.is_awaited |= bool(seq.processors or seq.group or seq.forks)
            batch.sampled += [(len(batch.sequences), each) for each in (*seq.forks, seq)]
            seq.forks = []
        batch.sequences.append(seq)
        batch.num_tokens.append(num_tokens)
        batch.budget -= num_tokens
        seq.last_step = self.counters["num_steps"]
        is_pending = type(seq.token_ids[stop - 1]) is PendingToken
        self.block_manager.register(seq, stop - is_pending)

    def advance(self, batch: Batch) -> None:
        """Counts a step that is under way as computed, so that the next can be scheduled.

        The tokens that it samples join their sequences as pending ones; who has all its tokens
        with that is finished. Beams are left alone: their tokens are chosen for a whole group
        (beam_search.py). Who ended in the meantime (EOS, in the step before) is passed over.
        """
        batch.is_under_way = True
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens):
            if not seq.finish_reason:
                stop = seq.num_computed_tokens + num_tokens
                if stop % self.block_manager.block_size == 0:
                    self.block_manager.register(seq, stop)  # its last token may have been pending
                seq.num_computed_tokens = stop
        for row, (index, seq) in enumerate(batch.sampled):
            if not (seq.group or seq.finish_reason):
                seq.token_ids.append(PendingToken(row))
                if seq is not batch.sequences[index]:
                    self.fork(batch.sequences[index], seq)
                if len(seq.token_ids) == seq.max_num_tokens:
                    self.finish(seq, "length")

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[tuple[int, Sequence]]:
        """Takes in the sampled tokens, one for each in `batch.sampled`, and ends who is finished.

        Returns which of them, and whose, count: not those for sequences that had ended before.
        """
        if not batch.is_under_way:
            self.advance(batch)
        now = time.monotonic()
        rows = [(row, seq) for row, (_, seq) in enumerate(batch.sampled)
                if seq.group or type(seq.token_ids[-1]) is PendingToken]
        for row, seq in rows:
            seq.metrics.first_token_time = seq.metrics.first_token_time or now
            seq.metrics.finished_time = now
            if not seq.group:
                token_id = seq.token_ids[-1] = token_ids[row]
                if token_id in seq.end_tokens:
                    self.finish(seq, "stop", seq.end_tokens[token_id])
        self.counters["generation_tokens"] += len(rows)
        return rows

    # -------------------------------------------------------------- how a sequence moves

    def _fits(self, seq: Sequence, parent: Sequence | None = None) -> bool:
        """Whether there are places and blocks for a sequence with all its group."""
        if len(self.running) + len(seq.members) > self.max_num_seqs:
            return False
        manager = self.block_manager
        num_blocks = sum(manager.num_blocks_to_allocate(member, parent) for member in seq.members)
        return num_blocks <= manager.num_free_blocks

    def _admit(self, seq: Sequence) -> None:
        """Moves a sequence to the tail of running, with all its blocks."""
        num_hits = self.block_manager.allocate(seq)
        self.running.append(seq)
        num_lost = max(0, seq.num_preempted_tokens - seq.num_computed_tokens)
        self.counters.update(prefix_cache_queries=seq.num_tokens, prefix_cache_hits=num_hits,
                             recomputed_tokens=num_lost)
        if not seq.metrics.first_scheduled_time:
            seq.metrics.first_scheduled_time = time.monotonic()
            seq.metrics.num_cached_tokens = num_hits
            self.counters["prompt_tokens"] += seq.num_prompt_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` run on from where `parent` is, or wait, if there is no room for it."""
        if self._fits(child, parent):
            num_shared = self.block_manager.allocate(child, parent)
            self.running.append(child)
            self.counters["shared_blocks"] += num_shared // self.block_manager.block_size
        else:
            insort_left(self.waiting, child, key=attrgetter("priority"))

    def _make_room(self, candidates: Iterable[Sequence]) -> bool:
        """Gives the candidates their next blocks, after preempting until all that are left can
        have them; returns whether anybody was preempted."""
        manager, num_running = self.block_manager, len(self.running)
        size = manager.block_size
        lacking = [seq for seq in candidates if len(seq.token_ids) > len(seq.block_table) * size]
        while len(lacking) > manager.num_free_blocks:
            self.preempt(max(reversed(self.running), key=VICTIMS[self.config.preemption_victim]))
            lacking = [seq for seq in lacking if seq.block_table]
        for seq in lacking:
            seq.block_table.append(manager.take_fresh())
        return len(self.running) < num_running

    def preempt(self, seq: Sequence) -> None:
        """Sends a sequence and its group to the front of waiting, without their blocks."""
        for member in reversed(seq.members):
            (self.running if member.block_table else self.waiting).remove(member)
            insort_left(self.waiting, member, key=attrgetter("priority"))
            if member.block_table:
                member.num_preempted_tokens = member.num_computed_tokens
                mode = "swap" if self.block_manager.swap_out(member) else "recompute"
                self.counters.update(["num_preemptions", f"{mode}_preemptions"])
                self.preempted.append((member, mode))
                member.metrics.num_preemptions += 1

    def _overtake(self) -> None:
        """In a long queue, a head that does not fit takes the place of the longest running one.

        That one goes to the front, behind it. Nobody gives way twice, so this comes to an end.
        """
        limit, manager = self.config.max_waiting, self.block_manager
        if limit is None or len(self.waiting) <= limit or self._fits(self.waiting[0]):
            return
        head = self.waiting[0]
        num_missing = manager.num_blocks_to_hold(head) - manager.num_free_blocks
        victims = [seq for seq in self.running if not seq.gave_way
                   and seq.priority >= head.priority and len(seq.block_table) >= num_missing]
        if victims:
            victim = max(victims, key=lambda seq: seq.num_tokens)
            victim.gave_way = True
            self.preempt(victim)
            self.preempt(head)  # which has no blocks: it only moves ahead

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is, and frees its blocks."""
        if not seq.finish_reason:
            (self.running if seq.block_table else self.waiting).remove(seq)
            self.block_manager.deallocate(seq)
        seq.metrics.num_decoded_tokens = seq.num_tokens - seq.num_prompt_tokens - 1
        seq.finish_reason, seq.stop_reason = reason, stop_reason

    def abort(self) -> None:
        """Ends all sequences, between two steps. What the prefix cache knows stays."""
        for seq in [*self.waiting, *self.running]:
            self.finish(seq, "abort")

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, whatever a broken step has left of them."""
        self.waiting, self.running = deque(), deque()
        self.block_manager.reset()

    def metrics(self) -> Counter:
        """Gauges of now and counters since the start; what they mean is said in `LLM.metrics`."""
        manager = self.block_manager
        size = manager.block_size
        unused = [max(0, len(seq.block_table) * size - seq.num_tokens) for seq in self.running]
        internal = sum(num_tokens % size for num_tokens in unused)
        return Counter({
            **self.counters, "attention_backend": self.config.attention_backend,
            "num_requests_running": len(self.running), "num_requests_waiting": len(self.waiting),
            "num_requests_swapped": len(manager.host_tables),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks,
            "num_blocks_cached": len(manager.free.keys() & manager.keys),
            "num_host_blocks_used": manager.num_host_blocks - len(manager.free_host_blocks),
            "reserved_waste": sum(unused) - internal, "internal_waste": internal,
            "mean_batch": self.counters["batched_sequences"] / max(1, self.counters["num_steps"])})


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
    batch = prompts(scheduler, admit=not (scheduler.is_closed and scheduler.running))
    scheduler.is_closed = not batch
    return batch or scheduler.build(scheduler.running, admit=False)


def prompts(scheduler: Scheduler, admit: bool) -> Batch:
    """A batch of prefills alone; they have all blocks from the start, so this preempts nobody."""
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    return scheduler.build(begun, admit)


BATCHING = {"prefill-first": prefill_first, "mixed": mixed, "static": static}
VICTIMS: dict[str, Callable[[Sequence], int]] = {  # who ranks highest; if equal, the youngest
    "youngest": lambda seq: 0,
    "longest": lambda seq: seq.num_tokens,
    "lowest-priority": lambda seq: seq.priority,
    "least-recently-run": lambda seq: -seq.last_step,
    "random": lambda seq: hash((seq.seed, seq.num_tokens)),
}
