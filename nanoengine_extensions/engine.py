"""The engine, observed: metrics and the trace; with all policies, swapping and log-probabilities.

`nanoengine_extensions.llm.LLM` uses it in place of the engine that it extends.
"""

import time
from collections.abc import Callable
from typing import Any

import nanoengine.engine
from nanoengine.batch import Batch
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence
from nanoengine_extensions.logprobs import ScoringScheduler
from nanoengine_extensions.metrics import Metrics
from nanoengine_extensions.policies import HoldingBlockManager, find_policy


class Engine(nanoengine.engine.Engine):
    """clock: returns the time in seconds; num_idle: how many steps in a row have run nothing."""

    def __init__(self, config: Any, runner: Any,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, runner)
        self.clock = clock
        self.metrics = Metrics.of(self)
        self.metrics.log_room(config, runner)
        self.num_idle = 0

    def make_scheduler(self) -> Scheduler:
        return make_scheduler(self.config, self.runner.num_kv_blocks, self.runner.max_model_len,
                              getattr(self.runner, "num_host_blocks", 0))

    def _launch(self) -> Any:
        started = self.clock()
        batch = self.scheduler.schedule() if self.scheduler.has_unfinished() else None
        launched = self.launch(batch) if batch else None
        if launched:
            vars(launched)["started"] = started
            self.metrics.launched(launched.batch, started)
        # a step can preempt all its sequences; after it, a policy has to run something
        self.num_idle = 0 if launched else self.num_idle + 1
        if self.num_idle > 2 and self._can_run():
            raise RuntimeError(f"scheduling={self.config.scheduling!r} runs nothing, although "
                               f"{len(self.scheduler.waiting)} sequences wait, "
                               f"{len(self.scheduler.running)} run")
        return launched

    def launch(self, batch: Batch) -> Any:
        """Launches a step; speculation.py has a subclass that adds guesses to it."""
        return self.runner.launch(batch)

    def _can_run(self) -> bool:
        running = self.scheduler.running
        return any(seq.num_uncomputed_tokens and not seq.is_awaited for seq in running) or (
            not running and self.scheduler.can_admit_head())

    def _take_in(self, launched: Any) -> list[Sequence]:
        seqs = super()._take_in(launched)
        if launched:
            for row, found in launched.logprobs.items():
                # a row of a prompt is that of a `Scorer`
                getattr(row.seq, "prompt", row.seq).logprobs[row.position] = found
            self.metrics.done(launched, seqs)
        return seqs

    def reset(self) -> None:
        super().reset()
        self.num_idle = 0


def make_engine(config: Any, runner: Any, *clock: Callable[[], float]) -> Engine:
    """Returns an engine, which speculates if the config says so."""
    if config.speculation == "none":
        return Engine(config, runner, *clock)
    from nanoengine_extensions.speculation import SpeculatingEngine
    return SpeculatingEngine(config, runner, *clock)


def make_scheduler(config: Any, num_blocks: int, max_model_len: int,
                   num_host_blocks: int = 0) -> ScoringScheduler:
    """Returns a scheduler with all features; num_host_blocks: of the pool for swapping."""
    kind: Any = HoldingBlockManager
    more: dict[str, int] = {}
    if config.preemption_mode == "swap":
        from nanoengine_extensions.swapping import SwappingBlockManager
        kind = SwappingBlockManager
        more = {"num_host_blocks": num_host_blocks}
    hold = find_policy("kv_allocation", config.kv_allocation)
    manager = kind(num_blocks, config.block_size, config.enable_prefix_caching,
                   hold=hold, max_model_len=max_model_len, **more)
    return ScoringScheduler(manager, config)
