"""`Engine`: a scheduler, a runner, and the one loop that runs steps. It handles tokens, not text.

One forward of the model gives each sequence at most one new token, so a completion needs as many
steps as it has tokens. Between two steps the engine can do everything that does not fit a fixed
batch: sequences end, others join, memory changes hands.

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

A │ separates two calls to `step`. A call begins by adding the pending tokens of the step in flight,
and gives them their ids before it returns. So a client never sees a pending token.

If step 1 samples the token that ends a sequence, step 2 is already in flight with this sequence.
What step 2 samples for it is dropped. Its blocks are freed at once, although step 2 still writes to
them. This is safe: a device runs its steps in order, so a new owner writes after step 2. But the
blocks may belong to a new owner by then, so `Scheduler.advance` does not register them.

Optional features observe these steps: see observers.py.
"""

import torch

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.features import part
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature, Features
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched


class Engine:
    """Runs sequences until they finish.

    runner: a `ModelRunner`, or another object with the same `launch`, `close` and sizes.
    features: the observers, which the engine calls.
    in_flight: the step that has been launched, but whose tokens are not collected yet.

    Between two steps, a client can call `add` and `finish`, and the scheduler's `fork` and
    `preempt` for sequences that are not in flight.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, features: Features) -> None:
        self.config = config
        self.runner = runner
        self.features = features
        manager = part("block_manager", config, BlockManager).of(config, runner)
        self.scheduler = Scheduler(manager, config)
        self.in_flight: Launched | None = None
        # a policy of the scheduler can be a feature, too: it gets a name that no class has
        features.update({str(each): each for each in vars(self.scheduler).values()
                         if isinstance(each, Feature)})
        features.call("begin", self)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises RuntimeError if the engine is closed."""
        self.check_open()
        self.scheduler.enqueue(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence between two steps, and frees its blocks: see `Scheduler.finish`."""
        self.scheduler.finish(seq, reason, stop_reason)

    def has_unfinished(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that have a new token, or end with an error.

        An engine that runs ahead launches the next step, and then waits for the step in flight,
        whose sequences it returns. If no step is in flight, it only launches, and returns none.
        """
        self.check_open()
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
        self.features.call("scheduled", batch)
        return self.launch(batch) if batch else None

    def launch(self, batch: Batch) -> Launched:
        """Begins the computation of a step."""
        return self.runner.launch(batch)

    def _must_wait_for(self, batch: Batch) -> bool:
        """Whether the tokens of this step, which is in flight, must come before the next launch.

        As a rule, no: the next step looks up pending tokens on the device, in
        `ModelRunner.last_sampled`. This tensor has room for at least `max_num_seqs` tokens; when
        forks begin, a step can draw more.

        Some features need a token on the host before its sequence can go on: a grammar, for
        example, has to read a token before it knows what may follow. They set
        `Sequence.needs_tokens`.
        """
        too_many = len(batch.sampled) > self.config.max_num_seqs
        return too_many or any(row.seq.needs_tokens for row in batch.sampled)

    def _collect(self, launched: Launched | None) -> list[Sequence]:
        """Waits for the tokens of a step and gives them to their sequences."""
        if launched is None:
            return []
        seqs = self.scheduler.postprocess(launched.batch, launched.wait())
        self.features.call("done", launched, seqs)
        return seqs

    def check_open(self) -> None:
        if not self.runner:
            raise RuntimeError("the LLM is closed: make a new one")

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, even after a broken step."""
        self.scheduler.reset()
        self.in_flight = None

    def close(self) -> None:
        """Frees the runner's memory; a later step raises RuntimeError."""
        if self.runner:
            self.runner.close()
        self.runner = None  # type: ignore
        # does nothing without a GPU
        torch.cuda.empty_cache()
