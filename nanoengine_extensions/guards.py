"""Guards: an engine that cannot keep a promise is refused, and so are policies that would hang it.

An observer that wraps two policies of each engine, and what adds a sequence to it.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from nanoengine.batch import Batch
from nanoengine.block_manager import BlockManager
from nanoengine.checks import rejected
from nanoengine.engine import Engine
from nanoengine.observers import Feature
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence


class Guards(Feature):
    """Refuses what an engine cannot guarantee, and policies that do not what they should."""

    def begin(self, engine: Engine) -> None:
        if engine.config.batch_invariant and not engine.runner.is_invariant:
            raise rejected("batch_invariant", True, "False without packed weights and numba")
        runner = engine.runner
        if engine.config.attention_backend == "auto" and runner.backend == "gather":
            logging.getLogger("nanoengine").warning(
                f"slow attention for {runner.dtype} on {runner.device}")
        engine.add = partial(self.add, engine.add, engine.scheduler.block_manager)
        # how many steps in a row have run nothing
        self.num_idle = 0
        scheduler = engine.scheduler
        scheduler.fill = partial(self.fill, scheduler.fill)
        scheduler.victim = partial(self.victim, scheduler.victim, engine.config.preemption_victim)

    def add(self, add: Callable[[Sequence], None], manager: BlockManager, seq: Sequence) -> None:
        """Raises ValueError if the sequence, or a fork, could never run."""
        num_tokens = max(max(each.max_num_tokens, manager.hold(each)) for each in (seq, *seq.forks))
        if manager.num_blocks_for(num_tokens) > manager.num_blocks:
            raise ValueError(f"request {seq.request_id}: {num_tokens} tokens do not fit: "
                             f"num_kv_blocks={manager.num_blocks}, block_size={manager.block_size}")
        add(seq)

    def fill(self, fill: Callable[[Scheduler], Batch], scheduler: Scheduler) -> Batch:
        """A step can preempt all its sequences; after it, a policy has to run something."""
        batch = fill(scheduler)
        self.num_idle = 0 if batch else self.num_idle + 1
        if self.num_idle > 2 and can_run(scheduler):
            self.num_idle = 0
            raise RuntimeError(f"scheduling={scheduler.config.scheduling!r} runs nothing, although "
                               f"{len(scheduler.waiting)} sequences wait, "
                               f"{len(scheduler.running)} run")
        return batch

    def victim(self, choose: Callable[..., Any], policy: Any,
               running: deque[Sequence]) -> Sequence:
        """A victim has to run: otherwise its place and its blocks would be counted twice."""
        victim = choose(running)
        if victim not in running:
            raise rejected("preemption_victim", policy,
                           f"one that returns a running sequence, not {victim!r}")
        return victim


def can_run(scheduler: Scheduler) -> bool:
    """Whether a sequence could run now; paused beams and pending tokens wait."""
    ready = any(seq.num_uncomputed_tokens and not seq.is_awaited for seq in scheduler.running)
    return ready or (not scheduler.running and scheduler.can_admit_head())
