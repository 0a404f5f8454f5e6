"""`Scheduler`: which sequences run in the next step, for how many tokens, and which give way.

Two deques, waiting and running, and one `Batch` a step. Plain Python: it knows tokens and blocks,
but no tensor and no text. The policies are small functions and tables at the end.

                 admit: gets blocks for all its tokens                  finish: frees its blocks
    add ──▶ waiting ─────────────────────────────────▶ running ──────────────────────────▶ done
               ▲   swapped in, from the prefix cache      │
               │   or computed again                      │
               └──────────────── preempt ─────────────────┘
                 to the front; loses its blocks, keeps its tokens; what was computed is swapped
                 out, or dropped (then the prefix cache may still have it when it comes back)
"""

import logging
import time
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter

from nanoengine.batch import Batch
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.sequence import NO_TOKEN, PendingToken, Sequence

BY_PRIORITY = attrgetter("priority")
logger = logging.getLogger(__name__)


class Scheduler:
    """Decides each step's batch, and takes in the tokens that come of it.

    config: how many sequences run and how many tokens a step computes at most (tokens from the
        prefix cache are not computed and do not count), and the policies by name.
    max_model_len: the most tokens of any sequence.
    clock: gives the time in seconds.
    """

    def __init__(self, block_manager: BlockManager, config: EngineConfig, max_model_len: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.block_manager = block_manager
        self.config = config
        self.max_model_len = max_model_len
        self.clock = clock
        # what each of them counts is said in LLM.metrics
        self.counters: Counter[str] = Counter()
        # whether the last step was all decode: then "static" admits no more
        self.is_decoding = False
        self.reset()

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, whatever state a broken step has left."""
        # sorted by priority, then by arrival
        self.waiting: deque[Sequence] = deque()
        # in the order of admission
        self.running: deque[Sequence] = deque()
        # since the last step
        self.preempted: list[tuple[Sequence, str]] = []
        self.block_manager.reset()

    def num_held_tokens(self, seq: Sequence) -> int:
        """For how many tokens a sequence holds blocks at least, from its admission on.

        "on-demand": for those that it has, and then it may have to be preempted; "reserve": for all
        that it may come to have, so that it is never preempted for want of blocks (`max_waiting`
        can do so, and a fork of a beam that finds no place); "max-length": for the most that any
        sequence may have, as engines did before paging.
        """
        return {"on-demand": 0, "reserve": seq.max_num_tokens,
                "max-length": self.max_model_len}[self.config.kv_allocation]

    def check_fits(self, seq: Sequence, beam_width: int = 1) -> None:
        """Raises ValueError for a sequence that with all its beams would not fit, even alone."""
        manager, max_num_seqs = self.block_manager, self.config.max_num_seqs
        num_tokens = max(seq.max_num_tokens, self.num_held_tokens(seq))
        num_blocks = beam_width * manager.num_blocks_for(num_tokens)
        if beam_width > max_num_seqs or num_blocks > manager.num_blocks:
            raise ValueError(f"{beam_width=} x {num_tokens} tokens do not fit: {max_num_seqs=}, "
                             f"num_kv_blocks={manager.num_blocks}, block_size={manager.block_size}")

    def add(self, seq: Sequence) -> None:
        """Queues a sequence and its forks. Raises ValueError if one could never run."""
        self.check_fits(seq)
        for each in (seq, *seq.forks):
            each.num_held_tokens = self.num_held_tokens(each)
        insort_right(self.waiting, seq, key=BY_PRIORITY)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # ---------------------------------------------------------------------- building a step

    def schedule(self) -> Batch:
        """Chooses the sequences of the next step and gives them the blocks that they need."""
        batch = BATCHING[self.config.scheduling](self)
        # all that could run are awaited
        if not batch.sequences:
            return batch
        batch.copies = self.block_manager.take_copies()
        batch.preempted, self.preempted = self.preempted, []
        copied = {f"{name}_blocks": len(pairs) for name, pairs in vars(batch.copies).items()}
        self.counters.update(copied, num_steps=1, batched_sequences=len(batch),
                             computed_tokens=sum(batch.num_tokens))
        num_used = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        self.counters["max_blocks_used"] = max(num_used, self.counters["max_blocks_used"])
        return batch

    def build(self, candidates: list[Sequence], admit: bool) -> Batch:
        """A batch of running sequences and, if asked for, of prompts from the head of waiting.

        1. All candidates get the blocks that they need, if need be by preempting others. So a
           preempted sequence is never in the batch.
        2. The batch is filled with decodes, then with prompts that were begun.
        3. Waiting prompts are admitted, unless the step has preempted.
        """
        batch = Batch(self.config.max_num_batched_tokens, self.clock())
        admit = self._make_room(candidates) and admit
        if admit:
            self._overtake()

        left = [seq for seq in candidates if seq.block_table and not (
            seq.needs_tokens and seq.is_pending)]
        # decodes, with one token left, come first
        left.sort(key=lambda seq: len(seq.token_ids) - seq.num_computed_tokens > 1)
        for seq in left:
            self._place(batch, seq)

        while admit and batch.budget and self._can_admit_head():
            for seq in self.waiting[0].group_or_self:
                self._admit(seq)
                self._place(batch, seq)
        return batch

    def _place(self, batch: Batch, seq: Sequence) -> None:
        """Adds as many of a sequence's next tokens to a batch as its budget allows."""
        start = seq.num_computed_tokens
        stop = min(start + batch.budget, len(seq.token_ids))
        num_tokens = stop - start
        if not num_tokens:
            return
        if seq.is_scored:
            positions = range(start, min(stop, seq.num_prompt_tokens - 1))
            batch.scored += [(len(batch.sequences), position) for position in positions]
        if stop == len(seq.token_ids):
            # The parent comes last: it may finish at once, and its forks share its blocks before.
            for each in (*seq.forks, seq):
                batch.sampled.append((len(batch.sequences), each))
                if each.needs_tokens or each.group:
                    batch.num_awaited += 1
            seq.forks = []
        # a sequence that is admitted in this very step can share these blocks
        if num_tokens > 1:
            self.block_manager.register(seq, min(stop, seq.num_known_tokens))
        batch.sequences.append(seq)
        batch.starts.append(start)
        batch.num_tokens.append(num_tokens)
        batch.budget -= num_tokens
        seq.last_step = self.counters["num_steps"]

    def _make_room(self, candidates: list[Sequence]) -> bool:
        """Gives each candidate the block that its newest token needs, if it needs one.

        Sequences are preempted until all candidates that are left can have theirs. Returns whether
        there was room without that.
        """
        manager = self.block_manager
        size = manager.block_size
        lacking = [seq for seq in candidates if len(seq.token_ids) > len(seq.block_table) * size]
        has_room = manager.can_append(len(lacking))
        while not manager.can_append(len(lacking)):
            self.preempt(VICTIMS[self.config.preemption_victim](self.running))
            lacking = [seq for seq in lacking if seq.is_running]
        for seq in lacking:
            manager.may_append(seq)
        return has_room

    def _overtake(self) -> None:
        """In a long queue, a head that does not fit takes the place of the longest sequence.

        The victim goes to the front, right behind the head. A sequence gives way only once, so
        that this comes to an end. A head that only waits for its pending token takes no place.
        """
        limit, manager = self.config.max_waiting, self.block_manager
        if limit is None or len(self.waiting) <= limit or self._can_admit_head():
            return
        head = self.waiting[0]
        num_missing = manager.num_blocks_to_hold(head) - manager.num_free_blocks
        victims = [seq for seq in self.running if not (seq.gave_way or head.is_awaited)
                   and seq.priority >= head.priority and len(seq.block_table) >= num_missing]
        if victims:
            victim = max(victims, key=attrgetter("num_tokens"))
            victim.gave_way = True
            self.preempt(victim)
            # it waits already: it only moves in front of the victim again
            self.preempt(head)

    # ---------------------------------------------------------------------- after a step

    def advance(self, batch: Batch) -> None:
        """Counts a step that was launched as computed, so that the next one can be scheduled.

        The tokens that it samples join their sequences as pending ones; a sequence that thereby
        reaches its maximum length is finished. Two kinds of sequences are passed over: beams, whose
        tokens are chosen for the whole group (beam_search.py), and sequences that have finished
        since the step was scheduled.
        """
        batch.is_advanced = True
        for seq, start, num_tokens in zip(batch.sequences, batch.starts, batch.num_tokens):
            if not seq.finish_reason:
                stop = start + num_tokens
                # this block became full
                if stop % self.block_manager.block_size == 0:
                    self.block_manager.register(seq, stop)
                seq.num_computed_tokens = stop
        for row, (index, seq) in enumerate(batch.sampled):
            if not (seq.finish_reason or seq.group):
                seq.token_ids.append(PendingToken(row))
                if seq is not batch.sequences[index]:
                    self.fork(batch.sequences[index], seq)
                if len(seq.token_ids) == seq.max_num_tokens:
                    self.finish(seq, "length")

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[tuple[int, Sequence]]:
        """Takes in the sampled tokens, one for each of `batch.sampled`, and ends sequences.

        Returns (row, sequence) for each token that counts, and for each sequence that ends because
        none could be sampled ("error"). The tokens of sequences that had ended before do not count.
        """
        if not batch.is_advanced:
            self.advance(batch)
        now = self.clock()
        taken = [(row, seq) for row, (_, seq) in enumerate(batch.sampled)
                 if seq.group or type(seq.token_ids[-1]) is PendingToken]
        for row, seq in taken:
            seq.metrics.first_token_time = seq.metrics.first_token_time or now
            seq.metrics.finished_time = now
            if not seq.group:
                token_id = seq.token_ids[-1] = token_ids[row]
                if token_id == NO_TOKEN:
                    self._fail(seq)
                elif token_id in seq.end_tokens:
                    self.finish(seq, "stop", seq.end_tokens[token_id])
        self.counters["generation_tokens"] += len(taken)
        return taken

    def _fail(self, seq: Sequence) -> None:
        """Ends a sequence for which no token can be sampled. Its blocks are forgotten: their K and
        V may be NaN, too."""
        del seq.token_ids[-1]
        self.counters["generation_tokens"] -= 1
        self.block_manager.forget(seq)
        cause = "its logits are NaN or infinite"
        if seq.params.kind.is_edited:
            cause = f"its processors (bad_words, min_tokens, …) leave no token, or {cause}"
        self.finish(seq, "error", f"request {seq.request_id}: {cause}")
        logger.error(seq.stop_reason)

    # ---------------------------------------------------------------------- one sequence

    def _can_admit_head(self) -> bool:
        """Whether there are places and blocks for the head of waiting, with all its group."""
        group = self.waiting[0].group_or_self if self.waiting else []
        has_places = 0 < len(group) <= self.config.max_num_seqs - len(self.running)
        return has_places and not group[0].is_awaited and self.block_manager.can_allocate(group)

    def _admit(self, seq: Sequence) -> None:
        """Moves a sequence to the tail of running, with all its blocks."""
        num_hits = self.block_manager.allocate(seq)
        self.waiting.remove(seq)
        self.running.append(seq)
        num_lost = max(0, seq.num_preempted_tokens - seq.num_computed_tokens)
        self.counters.update(prefix_cache_queries=seq.num_tokens, prefix_cache_hits=num_hits,
                             recomputed_tokens=num_lost)
        if not seq.metrics.first_scheduled_time:
            seq.metrics.first_scheduled_time = self.clock()
            seq.metrics.num_cached_tokens = num_hits
            self.counters["prompt_tokens"] += seq.num_prompt_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` run on from where `parent` is, or wait, if there is no room for it."""
        has_place = len(self.running) < self.config.max_num_seqs
        if has_place and self.block_manager.can_allocate([child], parent):
            num_shared_tokens = self.block_manager.allocate(child, parent)
            self.running.append(child)
            self.counters["shared_blocks"] += num_shared_tokens // self.block_manager.block_size
        else:
            insort_left(self.waiting, child, key=BY_PRIORITY)

    def preempt(self, seq: Sequence) -> None:
        """Sends a sequence and its group to the front of waiting, without their blocks.

        Members that wait already, as they have found no room, have none to lose.
        """
        manager = self.block_manager
        for member in reversed(seq.group_or_self):
            (self.running if member.is_running else self.waiting).remove(member)
            insort_left(self.waiting, member, key=BY_PRIORITY)
            if member.is_running:
                member.num_preempted_tokens = member.num_computed_tokens
                can_swap = self.config.preemption_mode == "swap" and manager.can_swap_out(member)
                (manager.swap_out if can_swap else manager.deallocate)(member)
                mode = "swap" if can_swap else "recompute"
                self.preempted.append((member, mode))
                if not self.counters["num_preemptions"]:
                    logger.warning("the KV cache is full: request %s is preempted (%s). More "
                                   "num_kv_blocks, a higher gpu_memory_utilization or a lower "
                                   "max_num_seqs help", seq.request_id, mode)
                self.counters.update(["num_preemptions", f"{mode}_preemptions"])
                member.metrics.num_preemptions += 1

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is, and frees its blocks.

        A sequence that ended by its length is ended again if its last token, which was pending
        then, turns out to be EOS or to complete a stop string: "stop" replaces "length".
        """
        if not seq.finish_reason:
            (self.running if seq.is_running else self.waiting).remove(seq)
            self.block_manager.deallocate(seq)
        seq.metrics.num_decoded_tokens = max(
            seq.metrics.num_decoded_tokens, seq.num_tokens - seq.num_prompt_tokens - 1)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason


# -------------------------------------------------------------------------------- policies


def prefill_first(scheduler: Scheduler, admit: bool = True) -> Batch:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm.

    Prompts have had all their blocks since their admission, so that only `max_waiting` can make a
    sequence give way to them.
    """
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    prefills = scheduler.build(begun, admit)
    scheduler.is_decoding = not prefills.sequences
    return scheduler.build([*scheduler.running], False) if scheduler.is_decoding else prefills


def mixed(scheduler: Scheduler) -> Batch:
    """Decodes first; what is left of the budget goes to prompts, in chunks.

    So decodes never wait for a prompt, but for a fork that begins: Sarathi-Serve (Agrawal et al.,
    2024, arXiv:2403.02310).
    """
    return scheduler.build([*scheduler.running], admit=True)


def static(scheduler: Scheduler) -> Batch:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    So engines worked before continuous batching (Orca: Yu et al., OSDI 2022); to be compared with.
    """
    return prefill_first(scheduler, admit=not (scheduler.is_decoding and scheduler.running))


def highest(rank: Callable[[Sequence], float]) -> Callable[[deque[Sequence]], Sequence]:
    """Of the running sequences the one with the highest rank; of several, the youngest."""
    return lambda running: max(reversed(running), key=rank)


BATCHING = {"prefill-first": prefill_first, "mixed": mixed, "static": static}

# which running sequence is preempted; `running` is in the order of admission
VICTIMS: dict[str, Callable[[deque[Sequence]], Sequence]] = {
    "youngest": lambda running: running[-1],
    "longest": highest(lambda seq: seq.num_tokens),
    "lowest-priority": highest(lambda seq: seq.priority),
    "least-recently-run": highest(lambda seq: -seq.last_step),
    "random": highest(lambda seq: hash((seq.seed, seq.num_tokens)))}
