"""`Scheduler`: decides which sequences the next step computes, how many tokens of each, and which
sequences are preempted.

A step that generates tokens reads all weights of the model, whether for one sequence or for a
hundred. So the engine puts many sequences into each step. They end at different times. If a batch
ran until its longest sequence ended, the places of the others would stay empty. So the scheduler
plans each step anew, and a prompt joins as soon as a place and memory are free (continuous
batching).

Two deques, waiting and running, and one `Batch` for each step. Plain Python: it knows tokens and
blocks, but not tensors or text. The policies are functions in policies.py.

                     admit: gets blocks for all its tokens           finish: frees its blocks
    enqueue ──▶ waiting ─────────────────────────────▶ running ───────────────────────▶ done
                   ▲   computed again, but for what       │
                   │   the prefix cache still has         │
                   └────────────── preempt ───────────────┘
                     to the front; loses its blocks, keeps its tokens

With nanoengine_extras/running/swapping.py, the blocks of a preempted sequence can be copied to the
host, and back.
"""

from bisect import insort_left, insort_right
from collections import deque

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.errors import naming
from nanoengine.policies import find_policy
from nanoengine.sequence import Batch, Row, Sequence


class Scheduler:
    """Decides the batch of each step, and gives the sampled tokens to their sequences.

    config: the most sequences that run, the most tokens that a step computes (tokens from the
        prefix cache do not count), and the policies.
    fill: how a step is filled; order: the rank of a waiting sequence; victim: which running
        sequence is preempted: see policies.py.
    """

    def __init__(self, manager: BlockManager, config: EngineConfig) -> None:
        self.block_manager = manager
        self.config = config
        self.fill = find_policy("scheduling", config.scheduling)
        self.order = find_policy("scheduling_policy", config.scheduling_policy)
        self.victim = find_policy("preemption_victim", config.preemption_victim)
        self.reset()

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, even after a broken step."""
        self.waiting: deque[Sequence] = deque()
        # in order of admission
        self.running: deque[Sequence] = deque()
        # since the last step
        self.preempted: list[tuple[Sequence, str, int]] = []
        self.block_manager.reset()

    def enqueue(self, seq: Sequence, in_front: bool = False) -> None:
        """Queues a sequence, at the back or at the front of its rank."""
        insert = insort_left if in_front else insort_right
        insert(self.waiting, seq, key=self.order)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # ---------------------------------------------------------------------- building a step

    def schedule(self) -> Batch:
        """Chooses the sequences of the next step, and gives them the blocks that they need."""
        # one of policies.py, such as `mixed`: it chooses candidates, and calls `build` with them
        batch = self.fill(self)
        # empty if a feature has paused all sequences
        if batch:
            batch.copies = self.block_manager.take_copies()
            batch.preempted, self.preempted = self.preempted, []
        return batch

    def build(self, candidates: list[Sequence], admit: bool) -> Batch:
        """Builds a batch of running sequences and, if `admit`, of prompts at the queue's head.

        1. Sequences are preempted until all others have the blocks that they need. So the batch
           never contains a preempted sequence.
        2. The batch is filled with decodes, then with partly computed prompts.
        3. Waiting prompts are admitted, unless the step has preempted a sequence.
        """
        batch = Batch(self.config.max_num_batched_tokens)
        admit = self.make_room(candidates) and admit

        left = [seq for seq in candidates if seq.is_running]
        # decodes, with one token left, come first
        left.sort(key=lambda seq: seq.num_uncomputed_tokens > 1)
        for seq in left:
            self._add_tokens(batch, seq)

        while admit and batch.budget and self.can_admit_head():
            seq = self.waiting.popleft()
            batch.admitted.append((seq, self.block_manager.allocate(seq)))
            self.running.append(seq)
            self._add_tokens(batch, seq)
        return batch

    def make_room(self, candidates: list[Sequence]) -> bool:
        """Gives the candidates the blocks that their newest tokens need.

        Preempts sequences until all remaining candidates have their blocks. Returns True if it
        preempted none.
        """
        manager = self.block_manager
        # A running sequence has blocks for all its tokens, or for all but the newest. So each
        # sequence here lacks exactly one block. A policy may choose a waiting sequence, too: it has
        # no blocks, and is skipped.
        lacking = [seq for seq in candidates
                   if 0 < len(seq.block_table) * manager.block_size < len(seq.token_ids)]
        has_room = len(lacking) <= manager.num_free_blocks
        while len(lacking) > manager.num_free_blocks:
            with naming(f"preemption_victim={self.victim} must return a running sequence"):
                self.preempt(self.victim(self.running))
            lacking = [seq for seq in lacking if seq.is_running]
        for seq in lacking:
            manager.may_append(seq)
        return has_room

    def _add_tokens(self, batch: Batch, seq: Sequence) -> None:
        """Adds as many of a sequence's next tokens to a batch as the budget allows."""
        start = seq.num_computed_tokens
        stop = min(start + batch.budget, len(seq.token_ids))
        num_tokens = stop - start
        if not num_tokens:
            return
        if stop == len(seq.token_ids):
            # its index, once it is appended below
            source = len(batch)
            # The parent comes last: its forks must share its blocks before it can finish.
            batch.sampled += [Row(source, each, stop) for each in (*seq.forks, seq)]
            seq.forks = []
        # a sequence admitted later in this step can share these blocks
        if num_tokens > 1:
            self.block_manager.register(seq, min(stop, seq.num_known_tokens))
        batch.sequences.append(seq)
        batch.starts.append(start)
        batch.num_tokens.append(num_tokens)
        batch.budget -= num_tokens

    def can_admit_head(self) -> bool:
        """Whether the first waiting sequence can run: a place and enough blocks are free."""
        if not self.waiting or len(self.running) == self.config.max_num_seqs:
            return False
        return self.block_manager.can_allocate(self.waiting[0])

    # ---------------------------------------------------------------------- after a step

    def advance(self, batch: Batch) -> None:
        """Counts a launched step as computed, so that the next one can be scheduled.

        Its sampled tokens join their sequences as pending tokens. Forks begin here. A sequence that
        reaches its maximum length with its pending token is finished at once. Sequences that
        finished since the step was scheduled are skipped.
        """
        batch.is_advanced = True
        for seq, start, num_tokens in zip(batch.sequences, batch.starts, batch.num_tokens):
            if not seq.finish_reason:
                stop = start + num_tokens
                # A block's hash needs all its token ids. When this step was scheduled, the id of
                # its last token could still be pending; now it is known. `_add_tokens` has already
                # registered the full blocks of prefills.
                if stop % self.block_manager.block_size == 0:
                    self.block_manager.register(seq, stop)
                seq.num_computed_tokens = stop
        for number, row in enumerate(batch.sampled):
            seq = row.seq
            if not seq.finish_reason:
                seq.token_ids.append(-1 - number)
                parent = batch.sequences[row.source]
                if seq is not parent:
                    self.fork(parent, seq)
                if len(seq.token_ids) == seq.max_num_tokens:
                    self.finish(seq, "length")

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Gives sequences the sampled tokens, one for each of `batch.sampled`. A stop token, or a
        row without a token, ends its sequence.

        Without running ahead, nothing has advanced this step yet. Then this method does it first:
        its tokens are pending for a moment, and then get their ids.

        Returns the sequences that have a new token, and those that end because no token could
        be sampled ("error"). Tokens of sequences that have already ended are dropped.
        """
        if not batch.is_advanced:
            self.advance(batch)
        taken = []
        for row, token_id in zip(batch.sampled, token_ids):
            seq = row.seq
            # a sequence that ended before this step was advanced got no pending token, and its draw
            # is dropped
            if seq.token_ids[-1] < 0:
                taken.append(seq)
                seq.token_ids[-1] = token_id
                if token_id < 0:
                    # the prefix cache forgets its blocks, whose K and V can be NaN as well
                    self.block_manager.forget(seq.block_hashes)
                    del seq.token_ids[-1]
                    reason = ("no token can be sampled: "
                              "the logits are not finite, or constraints forbid all tokens")
                    error = seq.error or f"request {seq.request_id}: {reason}"
                    self.finish(seq, "error", str(error))
                elif token_id in seq.end_tokens:
                    self.finish(seq, "stop", seq.end_tokens[token_id])
        return taken

    # ---------------------------------------------------------------------- one sequence

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` continue from where `parent` is; queues it if there is no room."""
        has_place = len(self.running) < self.config.max_num_seqs
        if has_place and self.block_manager.can_allocate(child, parent):
            self.block_manager.allocate(child, parent)
            self.running.append(child)
        else:
            self.enqueue(child, in_front=True)

    def preempt(self, seq: Sequence) -> None:
        """Moves a running sequence to the front of `waiting`, and frees its blocks."""
        self.running.remove(seq)
        self.enqueue(seq, in_front=True)
        num_computed = seq.num_computed_tokens
        self.preempted.append((seq, self.block_manager.preempt(seq), num_computed))

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, waiting or running, and frees its blocks.

        A sequence that reaches its maximum length is finished while its last token is still
        pending. If this token turns out to be EOS, or to complete a stop string, "stop" replaces
        "length".
        """
        if not seq.finish_reason:
            (self.running if seq.is_running else self.waiting).remove(seq)
            self.block_manager.deallocate(seq)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
