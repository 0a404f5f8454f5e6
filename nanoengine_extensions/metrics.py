"""Metrics, trace, log and progress bar: what the engine and its requests have done, and show.

The engine calls `launched` before each step and `done` behind it (`Engine.step`), and knows nothing
else of this: counters and times come from the batch and its sequences, and a gauge is what can be
seen between two steps. `LLM` calls `log_room` once, and `show_progress` in `generate`.
"""

import logging
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

# What the engine has to say is shown on stderr, or by the handlers that the user has made, if there
# are any. logging.getLogger("nanoengine").setLevel("ERROR") silences it.
logger = logging.getLogger("nanoengine")
handler = logging.StreamHandler()
handler.addFilter(lambda record: not (logging.getLogger().handlers or logger.handlers[1:]))
logger.addHandler(handler)
logger.setLevel(logger.level or "INFO")
# what the library says is shown, or not, as what the engine says
logging.getLogger("nanoengine_cpu").parent = logger


@dataclass
class RequestMetrics:
    """What happened to a request, with all its completions together.

    Times are seconds of `time.monotonic()`, and 0 until the event. `queue_time`,
    `time_to_first_token`, `time_per_output_token` and `end_to_end_time` are seconds between two.

    finished_time: of the last token of the longest completion.
    last_run_time: of the last step that it had a part in.
    num_decoded_tokens: tokens of the longest completion, without its first (set in an output).
    num_cached_tokens: tokens of the prompt that the prefix cache had at the first admission.
    """

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    last_run_time: float = 0.0
    num_decoded_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    queue_time = property(lambda m: m.first_scheduled_time - m.arrival_time)
    time_to_first_token = property(lambda m: m.first_token_time - m.arrival_time)
    end_to_end_time = property(lambda m: m.finished_time - m.arrival_time)
    decode_time = property(lambda m: m.finished_time - m.first_token_time)
    time_per_output_token = property(lambda m: m.decode_time / max(1, m.num_decoded_tokens))


class Metrics:
    """Counters and times of one engine, and with trace=True a record of each step.

    trace: a `Launched` for each step, with two more attributes: `ended`, when its tokens were taken
        in, by the engine's clock (it began at `batch.started`), and `metrics`, the gauges of then.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.counters: Counter[str] = Counter()
        self.trace: list[Any] = []
        # also when the runner is gone
        self.block_bytes = engine.runner.block_bytes
        self.backend = engine.runner.backend

    def launched(self, batch: Any) -> None:
        """Counts a step that is about to begin."""
        batch.started = self.engine.clock()
        copied = {f"{name}_blocks": len(pairs) for name, pairs in vars(batch.copies).items()}
        self.counters.update(copied, num_steps=1, batched_sequences=len(batch),
                             computed_tokens=sum(batch.num_tokens))
        manager = self.engine.scheduler.block_manager
        num_used = manager.num_blocks - manager.num_free_blocks
        self.counters["max_blocks_used"] = max(self.counters["max_blocks_used"], num_used)
        for seq in batch.sequences:
            seq.metrics.last_run_time = batch.started
        for seq, num_hits in batch.admitted:
            num_lost = max(0, seq.num_preempted_tokens - seq.num_computed_tokens)
            self.counters.update(prefix_cache_queries=seq.num_tokens, prefix_cache_hits=num_hits,
                                 recomputed_tokens=num_lost)
            if not seq.metrics.first_scheduled_time:
                seq.metrics.first_scheduled_time = batch.started
                seq.metrics.num_cached_tokens = num_hits
                self.counters["prompt_tokens"] += seq.num_prompt_tokens
        for seq, mode in batch.preempted:
            if not self.counters["num_preemptions"]:
                logger.warning("the KV cache is full: request %s is preempted (%s). More "
                               "num_kv_blocks, a higher gpu_memory_utilization or a lower "
                               "max_num_seqs help", seq.request_id, mode)
            self.counters.update(["num_preemptions", f"{mode}_preemptions"])
            seq.metrics.num_preemptions += 1

    def done(self, launched: Any, seqs: list[Any]) -> None:
        """Takes in which sequences have a new token."""
        now = self.engine.clock()
        for seq in seqs:
            seq.metrics.finished_time = now
            if not seq.metrics.first_token_time:
                seq.metrics.first_token_time = now
        failed = [seq for seq in seqs if seq.finish_reason == "error"]
        self.counters["generation_tokens"] += len(seqs) - len(failed)
        for seq in failed:
            logger.error(seq.stop_reason)
        if self.engine.config.trace:
            launched.ended = now
            launched.metrics = self.gauges()
            self.trace.append(launched)

    def log_room(self) -> None:
        """Says how many requests the KV cache has room for."""
        config = self.engine.config
        runner = self.engine.runner
        logger.info("%s: %s KV blocks of %s tokens are room for %.1f requests of %s at once",
                    config.model, runner.num_kv_blocks, config.block_size,
                    runner.num_kv_blocks * config.block_size / runner.max_model_len,
                    runner.max_model_len)

    def show_progress(self, steps: Generator, num_requests: int, is_shown: bool) -> None:
        """Runs the steps of a call to their end, with a progress bar.

        steps: yields, for each of the call's requests with new tokens, whether it has finished.

        The bar says how many tokens of all requests a second the engine computes.
        """
        before = self.counters.copy()
        start = time.perf_counter()
        bar = tqdm(total=num_requests, desc="Generating", disable=not is_shown)
        with bar, closing(steps):
            for are_finished in steps:
                new = self.counters - before
                seconds = time.perf_counter() - start
                bar.set_postfix_str(f"{new['prompt_tokens'] / seconds:.0f} prompt tokens/s, "
                                    f"{new['generation_tokens'] / seconds:.0f} output tokens/s",
                                    refresh=False)
                bar.update(sum(are_finished))

    def gauges(self) -> Counter:
        """Gauges of now and counters since the start, flat. What has never happened counts 0.

        num_requests_waiting, num_requests_running, num_requests_swapped: completions, where a
            prompt has several; swapped ones are among the waiting.
        num_blocks_used, num_blocks_free, num_blocks_cached: of the free blocks, those with a hash
            are cached. max_blocks_used: the high-water mark. num_host_blocks_used: swapped out.
        reserved_waste, internal_waste: tokens that there is room for, but only for one sequence: in
            blocks that it holds for later, and behind its newest token in its last block.
        num_steps, batched_sequences: steps, and sequences in them; mean_batch: their ratio.
        prompt_tokens, computed_tokens, generation_tokens: admitted, computed, sampled.
        prefix_cache_queries, prefix_cache_hits: tokens looked for on admission, and found.
        num_preemptions: recompute_preemptions + swap_preemptions. recomputed_tokens: for them.
        swap_out_blocks, swap_in_blocks, swapped_bytes: to the host and back.
        shared_blocks, copy_on_write_blocks: taken over by forks, and copied for them.
        attention_backend: the name of the backend that was chosen.
        """
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        counters = self.counters
        # with a pool on the host: by sequence
        host_tables = getattr(manager, "host_tables", {})
        # another thread may ask
        running = list(scheduler.running)
        slots = [len(seq.block_table) * manager.block_size for seq in running]
        unused = [max(0, n - seq.num_tokens) for n, seq in zip(slots, running)]
        internal_waste = sum(num_tokens % manager.block_size for num_tokens in unused)
        num_swapped = counters["swap_out_blocks"] + counters["swap_in_blocks"]
        return Counter(counters | {
            "shared_blocks": manager.num_shared_blocks,
            "num_requests_running": len(running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_swapped": len(host_tables),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks,
            "num_blocks_cached": len(manager.free.keys() & manager.hash_of_block),
            "num_host_blocks_used": sum(map(len, host_tables.values())),
            "reserved_waste": sum(unused) - internal_waste,
            "internal_waste": internal_waste,
            "mean_batch": counters["batched_sequences"] / max(1, counters["num_steps"]),
            "swapped_bytes": num_swapped * self.block_bytes,
            "attention_backend": self.backend})
