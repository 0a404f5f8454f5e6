"""`Engine`: a scheduler and a runner, and the one loop in which steps run. Tokens, no text.

    while engine.has_unfinished():
        sequences_with_a_new_token = engine.step()

A plain step is three lines:

    batch = scheduler.schedule()        # which sequences, how many tokens of each
    launched = runner.launch(batch)     # device work
    take_in(launched)                   # waits; scheduler.postprocess(batch, its tokens)

Running ahead is the same with a step in flight: step 2 is scheduled and launched before the tokens
of step 1 are waited for, so that the device never waits for the host. `Engine.step` does both.

    host     schedule 1  launch 1 │ advance 1  schedule 2  launch 2  take in 1 │ advance 2  sche…
    device                     ├────────── step 1 ──────────┤├────────── step 2 ──────────┤├───
    tokens of step 1              ▲ pending tokens begin              ▲ and get their numbers

Between two calls of `step` no token is pending: a step is advanced when the next one begins, and
its tokens are taken in before that one ends.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from nanoengine.batch import Batch
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.model_runner import Launched
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence


class Engine:
    """Runs sequences to their end.

    runner: a `ModelRunner`, or anything else with its `launch` and its sizes.
    clock: gives the time in seconds.

    `add` and `finish` are the scheduler's: sequences can come and go between two steps.
    """

    def __init__(self, config: EngineConfig, runner: Any,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.runner = runner
        self.clock = clock
        manager = BlockManager(runner.num_kv_blocks, config.block_size,
                               config.enable_prefix_caching, runner.num_host_blocks)
        self.scheduler = Scheduler(manager, config, runner.max_model_len, clock)
        # for `metrics`, also when the runner is gone
        self.block_bytes = runner.block_bytes
        self.backend = runner.backend
        self.add = self.scheduler.add
        self.finish = self.scheduler.finish
        self.in_flight: Launched | None = None
        self.trace: list[Launched] = []

    def has_unfinished(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_unfinished()

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that have a new token, or, for beams, logprobs.

        When the engine runs ahead, these are the tokens of the step before. Sequences whose tokens
        are awaited (`Sequence.is_awaited`) are left out of the step: they run in every second one.
        If they are many, the whole step is left to the next call.
        """
        before, self.in_flight = self.in_flight, None
        if before:
            # as if its tokens were known
            self.scheduler.advance(before.batch)
        if self.scheduler.has_unfinished() and not (before and self._is_awaited(before.batch)):
            batch = self.scheduler.schedule()
            if batch.sequences:
                self.in_flight = self.runner.launch(batch)
        if not self.config.run_ahead:
            before, self.in_flight = self.in_flight, None
        return self._take_in(before) if before else []

    def _is_awaited(self, batch: Batch) -> bool:
        """Whether the next step waits for the tokens of this one.

        A fourth of the sequences at half their speed cost an eighth of the tokens: about as much as
        a device loses that waits for the host. And no more pending tokens can be looked up than
        `max_num_seqs`; where forks begin there can be more.
        """
        are_many = 4 * batch.num_awaited >= len(batch)
        return are_many or len(batch.sampled) > self.config.max_num_seqs

    def _take_in(self, launched: Launched) -> list[Sequence]:
        """Waits for the tokens of a step and gives them to their sequences."""
        batch = launched.batch
        tokens, logprobs = launched.wait()
        taken = self.scheduler.postprocess(batch, tokens)
        for row, (index, position) in enumerate(batch.scored, len(batch.sampled)):
            seq = batch.sequences[index]
            seq.prompt_logprobs[position + 1] = logprobs[row]
            seq.is_scored = len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
        for row, seq in taken:
            if row in logprobs and seq.finish_reason != "error":
                seq.logprobs.append(logprobs[row])
        if self.config.trace:
            launched.ended = self.clock()
            launched.metrics = self.metrics()
            self.trace.append(launched)
        return [seq for _, seq in taken]

    def abort(self) -> None:
        """Ends all sequences, between two steps. The prefix cache stays as it is."""
        for seq in [*self.scheduler.waiting, *self.scheduler.running]:
            self.finish(seq, "abort")
        self.in_flight = None

    def reset(self) -> None:
        """Drops all sequences and forgets all blocks, whatever state a broken step has left."""
        self.scheduler.reset()
        self.in_flight = None

    def metrics(self) -> Counter:
        """Gauges of now and counters since the start; `LLM.metrics` explains each."""
        scheduler = self.scheduler
        manager = scheduler.block_manager
        counters = scheduler.counters
        # another thread may ask
        running = list(scheduler.running)
        slots = [len(seq.block_table) * manager.block_size for seq in running]
        unused = [max(0, n - seq.num_tokens) for n, seq in zip(slots, running)]
        internal_waste = sum(num_tokens % manager.block_size for num_tokens in unused)
        num_swapped = counters["swap_out_blocks"] + counters["swap_in_blocks"]
        return Counter(counters | {
            "num_requests_running": len(running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_swapped": len(manager.host_tables),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks,
            "num_blocks_cached": len(manager.free.keys() & manager.hash_of_block),
            "num_host_blocks_used": manager.num_host_blocks - len(manager.free_host_blocks),
            "reserved_waste": sum(unused) - internal_waste,
            "internal_waste": internal_waste,
            "mean_batch": counters["batched_sequences"] / max(1, counters["num_steps"]),
            "swapped_bytes": num_swapped * self.block_bytes,
            "attention_backend": self.backend})
