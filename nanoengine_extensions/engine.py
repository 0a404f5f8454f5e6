"""The engine, observed: metrics and the trace; with swapping, and with guards for own policies.

`nanoengine_extensions.llm.LLM` uses it in place of the engine that it extends.
"""

import time
from collections.abc import Callable
from typing import Any

import nanoengine.engine
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.model_runner import Launched
from nanoengine.seams import rejected
from nanoengine.sequence import Sequence
from nanoengine_extensions.metrics import Metrics


class Engine(nanoengine.engine.Engine):
    """clock: returns the time in seconds; num_idle: how many steps in a row have run nothing."""

    def __init__(self, config: EngineConfig, runner: Any,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, runner)
        self.clock = clock
        self.metrics = Metrics.of(self)
        self.metrics.log_room(config, runner)
        self.num_idle = 0
        if callable(config.preemption_victim):
            self.scheduler.choose_victim = checked_victim(config.preemption_victim)

    def make_block_manager(self) -> BlockManager:
        """Returns one with a pool on the host if preempted sequences are swapped."""
        if self.config.preemption_mode == "recompute":
            return super().make_block_manager()
        from nanoengine_extensions.swapping import SwappingBlockManager
        return SwappingBlockManager(
            self.runner.num_kv_blocks, self.config.block_size, self.config.enable_prefix_caching,
            num_host_blocks=self.runner.num_host_blocks)

    def _launch(self) -> Launched | None:
        started = self.clock()
        launched = super()._launch()
        if launched:
            vars(launched)["started"] = started
            self.metrics.launched(launched.batch, started)
        # a step can preempt all its sequences; after it, a policy has to run something
        self.num_idle = 0 if launched else self.num_idle + 1
        scheduler = self.scheduler
        if self.num_idle > 2 and (not scheduler.running and scheduler.can_admit_head() or any(
                seq.num_uncomputed_tokens and not seq.is_awaited for seq in scheduler.running)):
            raise RuntimeError(f"scheduling={self.config.scheduling!r} runs nothing, although "
                               f"{len(scheduler.waiting)} sequences wait, "
                               f"{len(scheduler.running)} run")
        return launched

    def _take_in(self, launched: Launched | None) -> list[Sequence]:
        seqs = super()._take_in(launched)
        if launched:
            self.metrics.done(launched, seqs)
        return seqs

    def reset(self) -> None:
        super().reset()
        self.num_idle = 0


def checked_victim(choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a user's policy, with an error that names it if it returns no running sequence."""
    def choose_victim(running: Any) -> Any:
        victim = choose(running)
        if victim not in running:
            raise rejected("preemption_victim", choose,
                           f"one that returns a running sequence, not {victim!r}")
        return victim
    return choose_victim
