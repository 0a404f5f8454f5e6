"""`Scheduler`: who runs in the next step, for how many tokens, and who gives way.

Two deques, waiting and running, and one `Batch` a step. Plain Python: it knows tokens and blocks,
but no tensor and no text. The policies are the small functions at the end.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Sequence

COUNTERS = (
    "num_steps", "prefill_steps", "decode_steps", "prefill_tokens", "decode_tokens",
    "prefill_seconds", "decode_seconds", "host_seconds", "batched_sequences", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
    "preempted_tokens")


@dataclass
class Batch:
    """The whole message from scheduler to runner.

    `num_tokens[i]` tokens of `sequences[i]` are to be computed, from its `num_computed_tokens` on;
    `sampled` are the indices of the sequences whose last known token is among them. `budget` is how
    many more tokens the step may compute.
    """

    budget: int
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)


class Scheduler:
    """Decides each step's batch, and takes in what came of it.

    max_num_seqs: how many sequences are running at most.
    max_num_batched_tokens: how many tokens a step computes at most; tokens that the prefix cache
        has are not computed and do not count.
    scheduling: a name in `BATCHING`.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int,
                 scheduling: str = "prefill-first") -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.batching = BATCHING[scheduling]
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that would not fit even alone."""
        manager = self.block_manager
        if manager.num_blocks_for(seq.max_num_tokens) > manager.num_blocks:
            raise ValueError(f"a request of up to {seq.max_num_tokens} tokens does not fit the KV "
                             f"cache of {manager.num_blocks} blocks of {manager.block_size} tokens")
        self.waiting.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # ----------------------------------------------------------------------------- one step

    def schedule(self) -> Batch:
        """Chooses the sequences of the next step and gives them the blocks that it needs."""
        batch = self.batching(self)
        assert batch, "nothing can run: a sequence alone always has its blocks"
        return batch

    def build(self, candidates: Iterable[Sequence], admit: bool) -> Batch:
        """A batch of running sequences and, if asked, of the prompts at the head of waiting.

        First blocks are made free for all candidates, then they are given out: a victim is never
        in the batch. A step that preempts admits nobody.
        """
        preempted = self._make_room(candidates)
        batch = Batch(self.max_num_batched_tokens)
        for seq in candidates:
            if batch.budget and seq.block_table:  # else it has just been preempted
                self.block_manager.may_append(seq)
                self._place(batch, seq)
        while admit and not preempted and batch.budget and self._admit_head():
            self._place(batch, self.running[-1])
        return batch

    def _place(self, batch: Batch, seq: Sequence) -> None:
        """Adds as many of a sequence's tokens to a batch as the budget allows."""
        num_tokens = min(seq.num_uncomputed_tokens, batch.budget)
        if num_tokens == seq.num_uncomputed_tokens:
            batch.sampled.append(len(batch))
        batch.sequences.append(seq)
        batch.num_tokens.append(num_tokens)
        batch.budget -= num_tokens
        self.block_manager.register(seq, num_tokens)

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Appends the sampled tokens, one for each of `batch.sampled`; returns who is finished."""
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens):
            seq.num_computed_tokens += num_tokens
        now = time.monotonic()
        for index, token_id in zip(batch.sampled, token_ids):
            seq = batch.sequences[index]
            seq.token_ids.append(token_id)
            seq.metrics.first_token_time = seq.metrics.first_token_time or now
            if token_id in seq.end_tokens:
                self.finish(seq, "stop", seq.end_tokens[token_id])
            elif seq.num_tokens == seq.max_num_tokens:
                self.finish(seq, "length")
        self.counters["generation_tokens"] += len(token_ids)
        return [seq for seq in batch.sequences if seq.is_finished]

    # -------------------------------------------------------------- how a sequence moves

    def _admit_head(self) -> bool:
        """Moves the head of waiting to the tail of running, if there are a place and blocks."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        seq = self.waiting[0]
        if not self.block_manager.allocate(seq):
            return False
        self.running.append(self.waiting.popleft())
        self.counters["prefix_cache_queries"] += seq.num_tokens
        self.counters["prefix_cache_hits"] += seq.num_computed_tokens
        if not seq.metrics.first_scheduled_time:
            seq.metrics.first_scheduled_time = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
            self.counters["prompt_tokens"] += seq.num_prompt_tokens
        return True

    def _make_room(self, candidates: Iterable[Sequence]) -> bool:
        """Preempts from the tail of running until all candidates left can have their blocks."""
        needed = sum(map(self.block_manager.num_blocks_to_append, candidates))
        num_running = len(self.running)
        while needed > self.block_manager.num_free_blocks:
            victim = self.running[-1]
            needed -= self.block_manager.num_blocks_to_append(victim)
            self.preempt(victim)
        return len(self.running) < num_running

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks; it waits at the front and will be computed again."""
        self.counters["num_preemptions"] += 1
        self.counters["preempted_tokens"] += seq.num_computed_tokens
        self.running.remove(seq)
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is, and frees its blocks."""
        if not seq.is_finished:
            (self.running if seq.block_table else self.waiting).remove(seq)
            self.block_manager.deallocate(seq)
            seq.metrics.finished_time = time.monotonic()
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, whatever a broken step has left of them."""
        self.waiting.clear()
        self.running.clear()
        self.block_manager.reset()


# --------------------------------------------------------------------------------- batching


def prefill_first(scheduler: Scheduler) -> Batch:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    return scheduler.build(begun, admit=True) or scheduler.build(scheduler.running, admit=False)


def mixed(scheduler: Scheduler) -> Batch:
    """Running sequences first, what is left of the budget to prompts in chunks.

    Decodes never wait for a prompt: Sarathi-Serve (Agrawal et al., 2024, arXiv:2403.02310).
    """
    return scheduler.build(scheduler.running, admit=True)


BATCHING: dict[str, Callable[[Scheduler], Batch]] = {"prefill-first": prefill_first, "mixed": mixed}
