"""`Guards`: refuses guarantees that an engine cannot keep, and policies that would break it.

An observer of requests and steps.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nanoengine.engine import Engine
from nanoengine.errors import logger, naming, rejected
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Batch, Sequence


class Guards(Feature):
    """num_idle: how many steps in a row have run nothing."""

    num_idle = 0

    def begin(self, engine: Engine) -> None:
        if engine.config.batch_invariant and not engine.runner.is_invariant:
            raise rejected("batch_invariant", True, "False without packed weights and numba")
        asked = engine.config.attention_backend
        if asked not in ("auto", engine.runner.backend):
            raise rejected("attention_backend", asked, "'auto' or 'gather', since the attention of "
                           "this model has its own forward")
        if asked == "auto" and engine.runner.backend in ("triton", "varlen", "gather"):
            warn_of_slower_attention(engine.runner)
        super().begin(engine)

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        """Raises ValueError if one of the sequences could never run."""
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        policy = scheduler.config.scheduling_policy
        with naming(rejected("scheduling_policy", policy, "one whose ranks can be compared")):
            sorted(seqs[:1] * 2, key=scheduler.order)
        num_tokens = max(each.max_num_tokens for each in seqs)
        num_blocks = max(manager.num_blocks_for(num_tokens), *map(manager.num_blocks_to_hold, seqs))
        if num_blocks > manager.num_blocks:
            raise ValueError(f"request {seqs[0].request_id}: {num_tokens} tokens do not fit: "
                             f"num_kv_blocks={manager.num_blocks}, "
                             f"block_size={manager.block_size}, "
                             f"kv_allocation={scheduler.config.kv_allocation!r}")

    def scheduled(self, batch: Batch) -> None:
        """A step can preempt all its sequences; after it, a policy has to run something."""
        self.num_idle = 0 if batch else self.num_idle + 1
        scheduler = self.engine.scheduler
        if batch and len({*map(id, batch.sequences)}) < len(batch):
            raise RuntimeError(f"scheduling={scheduler.config.scheduling!r} must give `build` each "
                               "sequence once: a second time, it would get wrong tokens")
        # without a feature of this name, no edit would happen
        for _, seq, _ in batch.sampled if batch else ():
            features = self.engine.features
            for name in {*seq.edits} - features.keys():
                seq.error = rejected("edits", name, f"the name of a class in {[*features]}")
                seq.edits = ("Guards",)
        if self.num_idle > 2 and can_run(scheduler):
            self.num_idle = 0
            raise RuntimeError(f"scheduling={scheduler.config.scheduling!r} runs nothing, although "
                               f"{len(scheduler.waiting)} sequences are waiting and "
                               f"{len(scheduler.running)} are running")

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        """Ends the sequences with an error from `scheduled`: NaN leaves no token."""
        for row, seq in enumerate(seqs):
            if "Guards" in seq.edits:
                scores[row] = torch.nan


def warn_of_slower_attention(runner: Any) -> None:
    """Warns if the fastest attention for this device is not used, and says why."""
    if runner.device == "cuda" and runner.dtype != torch.float32:
        try:
            assert callable(import_module("flash_attn").flash_attn_with_kvcache)
        except (ImportError, AttributeError) as error:
            logger.warning(f"flash-attn is not used: {error}")
    if runner.backend == "gather":
        logger.warning(f"slow attention for {runner.dtype} on {runner.device}: "
                       "no kernel computes it")


def can_run(scheduler: Scheduler) -> bool:
    """Whether a sequence could run now; paused beams wait."""
    ready = any(seq.num_uncomputed_tokens for seq in scheduler.running)
    return ready or (not scheduler.running and scheduler.can_admit_head())
