"""`Engine`: a scheduler, a runner, and the one loop that runs steps. It handles tokens, not text.

    while engine.has_unfinished():
        sequences_with_a_new_token = engine.step()

A plain step is three lines:

    batch = scheduler.schedule()                        # which sequences, how many tokens of each
    launched = runner.launch(batch)                     # queue the kernels
    scheduler.postprocess(batch, launched.wait())       # the tokens join their sequences

Running ahead keeps a step in flight: the engine schedules and launches step 2 before it waits for
the tokens of step 1, so that the device never waits for the host. Before it schedules step 2, it
advances step 1: the tokens join their sequences as pending tokens, whose ids come later.

    host     schedule 1  launch 1 │ advance 1  schedule 2  launch 2  collect 1 │ advance 2  sche…
    device                     ├────────── step 1 ──────────┤├────────── step 2 ──────────┤├───
    tokens of step 1              ▲ they are pending                  ▲ and get their ids

A │ separates two calls to `step`. Between two calls no token is pending: a call begins
by advancing the step in flight, and collects its tokens before it returns.

Optional features observe these steps: see observers.py.
"""

import torch

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.features import extension
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature, Features
from nanoengine.policies import find_policy
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched


class Engine:
    """Runs sequences until they finish.

    runner: a `ModelRunner`, or another object with the same `launch`, `close` and sizes.
    features: the observers, which the engine calls.
    launcher: begins a step: the runner, or speculation, which adds guesses to a batch and passes
        it to the runner.

    Between two steps, a client can call `add` and `finish`, and the scheduler's `fork` and
    `preempt` for sequences that are not in flight. Beam search, which spans several steps, needs
    no other calls.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, features: Features) -> None:
        self.config = config
        self.runner = self.launcher = runner
        self.features = features
        self.scheduler = Scheduler(make_block_manager(config, runner), config)
        if config.speculation != "none":
            speculation = extension("sampling.speculation")
            self.launcher = guesser = speculation.Speculation(config, runner, features)
            # steps whose tokens are already known come first
            self.scheduler.fill = guesser.around(self.scheduler.fill)
        # a policy can also be an observer; no class of a user has this name
        if isinstance(self.scheduler.victim, Feature):
            features["a victim"] = self.scheduler.victim
        self.add = self.scheduler.enqueue
        self.finish = self.scheduler.finish
        self.in_flight: Launched | None = None
        for feature in features.values():
            feature.begin(self)

    def has_unfinished(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that have a new token, or end with an error.

        If the engine runs ahead, it launches the next step before it waits for the step in
        flight, whose sequences it returns. A sequence that needs its last token
        on the host (`Sequence.is_awaited`) is left out of the next step, and so runs only every
        other step. If there are many such sequences, this call launches no step.
        """
        if not self.runner:
            raise RuntimeError("the LLM is closed: make a new one")
        if not self.config.run_ahead:
            return self._collect(self._launch())
        before = self.in_flight
        if before:
            # its tokens join their sequences as pending tokens
            self.scheduler.advance(before.batch)
        must_wait = before and self._must_wait_for(before.batch)
        self.in_flight = None if must_wait else self._launch()
        return self._collect(before)

    def _launch(self) -> Launched | None:
        """Schedules and launches a step; returns None if no sequence can run."""
        if not self.scheduler.has_unfinished():
            return None
        batch = self.scheduler.schedule()
        for feature in self.features.values():
            feature.scheduled(batch)
        return self.launcher.launch(batch) if batch else None

    def _must_wait_for(self, batch: Batch) -> bool:
        """Whether the next step must wait for the tokens of this batch.

        An awaited sequence runs only every other step. If a quarter of the sequences are
        awaited, steps have an eighth fewer tokens, which costs about as much as waiting for the
        host. The device can look up at most `max_num_seqs` pending tokens; when forks begin, there
        can be more.
        """
        too_many = len(batch.sampled) > self.config.max_num_seqs
        awaited = sum(row.seq.needs_tokens for row in batch.sampled)
        return too_many or 4 * awaited >= len(batch)

    def _collect(self, launched: Launched | None) -> list[Sequence]:
        """Waits for the tokens of a step and gives them to their sequences."""
        if launched is None:
            return []
        seqs = self.scheduler.postprocess(launched.batch, launched.wait())
        for feature in self.features.values():
            feature.done(launched, seqs)
        return seqs

    def abort(self, request_ids: set[str]) -> None:
        """Ends the sequences of these requests, between two steps. Forks that are not queued yet
        are left to the caller. Full blocks stay in the prefix cache."""
        for seq in [*self.scheduler.waiting, *self.scheduler.running]:
            if seq.request_id in request_ids:
                self.finish(seq, "abort")
        if not self.scheduler.has_unfinished():
            self.in_flight = None

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, even after a broken step."""
        self.scheduler.reset()
        self.in_flight = None

    def close(self) -> None:
        """Frees the runner's memory; a later step raises RuntimeError."""
        if self.runner:
            self.runner.close()
        self.runner = self.launcher = None  # type: ignore
        # does nothing without a GPU
        torch.cuda.empty_cache()


def make_block_manager(config: EngineConfig, runner: ModelRunner) -> BlockManager:
    """Returns the manager of a runner's blocks, and of its pool on the host if there is one."""
    longest = runner.max_model_len
    policy = find_policy("kv_allocation", config.kv_allocation)
    sizes = (runner.num_kv_blocks, config.block_size, config.enable_prefix_caching,
             lambda seq: min(policy(seq, longest), longest))
    if config.preemption_mode == "recompute":
        return BlockManager(*sizes)
    return extension("running.swapping").SwappingBlockManager(
        *sizes, num_host_blocks=len(runner.host_blocks))
