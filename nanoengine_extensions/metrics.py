"""Metrics, trace and log.

The engine calls `launched` before each step and `done` after it. Counters and times come from the
batch and its sequences; gauges are read between two steps (`LLM.metrics`). Each request has a
`RequestMetrics`.
"""

import logging
import re
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Messages go to stderr, or to the user's own handlers if there are any.
# logging.getLogger("nanoengine").setLevel("ERROR") silences them.
logger = logging.getLogger("nanoengine")
handler = logging.StreamHandler()
handler.addFilter(lambda record: not (logging.getLogger().handlers or logger.handlers[1:]))
logger.addHandler(handler)
logger.setLevel(logger.level or "INFO")
# messages of the library are handled like those of the engine
logging.getLogger("nanoengine_cpu").parent = logger


@dataclass
class RequestMetrics:
    """What happened to a request, with all its completions together.

    arrival_time: when it was queued; times are seconds of `time.monotonic()`, 0 until the event.
    first_scheduled_time: when its first step began.
    first_token_time: when its first token was known.
    finished_time: when the last token of its longest completion was known.
    last_run_time: when the last step that computed it began.
    num_decoded_tokens: tokens of the longest completion, without its first.
    num_cached_tokens: tokens of the prompt that the prefix cache had at the first admission.
    num_preemptions: how often one of its completions was preempted.
    queue_time: seconds from arrival to the first step.
    time_to_first_token: seconds from arrival to the first token.
    end_to_end_time: seconds from arrival to the last token.
    decode_time: seconds from the first token to the last.
    time_per_output_token: decode_time over num_decoded_tokens.
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

    def so_far(self, outputs: list[Any]) -> "RequestMetrics":
        """Returns a copy, for the output of a request with these completions."""
        most = max(len(each.token_ids) for each in outputs)
        return replace(self, num_decoded_tokens=max(0, most - 1))


COUNTERS = """num_steps batched_sequences max_blocks_used prompt_tokens computed_tokens
    generation_tokens prefix_cache_queries prefix_cache_hits num_preemptions recompute_preemptions
    swap_preemptions recomputed_tokens swap_out_blocks swap_in_blocks copy_on_write_blocks
    guessed_tokens right_guesses""".split()


class Metrics:
    """Counters and times of one engine, and with trace=True a record of each step.

    trace: a `Launched` for each step, with three more attributes: `started` and `ended`, the times
        when it was scheduled and when its tokens were taken in, and `metrics`, the gauges then.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.counters = Counter[str](dict.fromkeys(COUNTERS, 0))
        self.trace: list[Any] = []
        # kept for when the runner is gone
        self.block_bytes = engine.runner.block_bytes
        self.backend = engine.runner.backend

    @classmethod
    def of(cls, engine: Any) -> "Metrics":
        """Returns the metrics of an engine that holds them.

        They do not hold the engine: without a cycle of references, an engine that is dropped frees
        its memory at once.
        """
        return cls(weakref.proxy(engine))

    def launched(self, batch: Any, started: float) -> None:
        """Counts a step that began at this time."""
        copied = {f"{name}_blocks": len(pairs) for name, pairs in vars(batch.copies).items()}
        self.counters.update(copied, num_steps=1, batched_sequences=len(batch),
                             computed_tokens=sum(batch.num_tokens))
        manager = self.engine.scheduler.block_manager
        num_used = manager.num_blocks - manager.num_free_blocks
        self.counters["max_blocks_used"] = max(self.counters["max_blocks_used"], num_used)
        for seq in batch.sequences:
            seq.metrics.last_run_time = started
        for seq, num_hits in batch.admitted:
            num_lost = max(0, seq.num_preempted_tokens - seq.num_computed_tokens)
            self.counters.update(prefix_cache_queries=seq.num_tokens, prefix_cache_hits=num_hits,
                                 recomputed_tokens=num_lost)
            if not seq.metrics.first_scheduled_time:
                seq.metrics.first_scheduled_time = started
                seq.metrics.num_cached_tokens = num_hits
                self.counters["prompt_tokens"] += seq.num_prompt_tokens
        for seq, mode in batch.preempted:
            if not self.counters["num_preemptions"]:
                logger.warning(f"the KV cache is full: request {seq.request_id} is preempted "
                               f"({mode}). More num_kv_blocks or a lower max_num_seqs help")
            self.counters.update(["num_preemptions", f"{mode}_preemptions"])
            seq.metrics.num_preemptions += 1

    def done(self, launched: Any, seqs: list[Any]) -> None:
        """Records which sequences have a new token. launched: None if it was drawn before."""
        now = self.engine.clock()
        for seq in seqs:
            seq.metrics.finished_time = now
            seq.metrics.first_token_time = seq.metrics.first_token_time or now
            if seq.finish_reason == "error":
                logger.error(seq.stop_reason)
        self.counters["generation_tokens"] += sum(seq.finish_reason != "error" for seq in seqs)
        if self.engine.config.trace and launched:
            vars(launched).update(ended=now, metrics=self.gauges())
            # a copy, so that a later step can use this pinned memory
            if hasattr(launched, "tokens"):
                launched.tokens = launched.tokens.clone()
            self.trace.append(launched)

    def log_room(self, config: Any, runner: Any) -> None:
        """Logs how many requests the KV cache can hold."""
        most = runner.num_kv_blocks * config.block_size / runner.max_model_len
        num_mib = runner.num_kv_blocks * runner.block_bytes / 2**20
        logger.info(f"{config.model}: {num_mib:.3g} MiB, {runner.num_kv_blocks} KV blocks of "
                    f"{config.block_size} tokens hold {most:.1f} requests of "
                    f"{runner.max_model_len} tokens at once")
        if config.device == "cpu" and hasattr(runner, "model"):
            self.log_pages(sum(weights.nbytes for weights in runner.model.parameters()))

    def log_pages(self, num_bytes: int) -> None:
        """Warns if this process has fewer bytes in huge pages than half of its weights, which are
        num_bytes. Only Linux tells."""
        with suppress(OSError):
            pages = Path("/proc/self/smaps_rollup").read_text()
            in_huge_pages = 1024 * sum(map(int, re.findall(r"AnonHugePages: +(\d+)", pages)))
            if in_huge_pages < num_bytes / 2 > 2**26:
                logger.warning(f"{in_huge_pages / num_bytes:.0%} of the weights are in huge pages: "
                               "decodes take longer, see docs/tutorial/tuning.md")

    def gauges(self) -> Counter:
        """Returns current gauges, and counters since the start, as a flat dict.

        num_requests_waiting: completions that wait, swapped ones included.
        num_requests_running: completions that run.
        num_requests_swapped: completions whose blocks are on the host.
        num_blocks_used: blocks that sequences hold.
        num_blocks_free: blocks that no sequence holds.
        num_blocks_cached: free blocks that the prefix cache can still find.
        num_host_blocks_used: blocks of the host's pool that are in use.
        kv_cache_bytes: the memory of all blocks, used or free.
        max_blocks_used: the largest num_blocks_used so far.
        reserved_waste: slots in whole blocks that a sequence holds for later tokens.
        internal_waste: slots after the newest token of a sequence, in its last block.
        num_steps: steps so far.
        batched_sequences: sequences in these steps, added up.
        mean_batch: batched_sequences over num_steps.
        prompt_tokens: tokens of prompts that were admitted for the first time.
        computed_tokens: tokens that steps computed.
        generation_tokens: tokens that were sampled.
        prefix_cache_queries: tokens that were looked up on admission.
        prefix_cache_hits: tokens that the prefix cache had.
        num_preemptions: recompute_preemptions and swap_preemptions together.
        recompute_preemptions: preemptions that dropped the blocks.
        swap_preemptions: preemptions that copied the blocks to the host.
        recomputed_tokens: tokens that were computed again after a preemption.
        swap_out_blocks: blocks that were copied to the host.
        swap_in_blocks: blocks that were copied back.
        swapped_bytes: bytes of both.
        shared_blocks: blocks that forks took over from their parent, without a copy.
        copy_on_write_blocks: blocks that were copied for forks.
        guessed_tokens: guesses of next tokens that steps computed.
        right_guesses: those of them that were right.
        attention_backend: the name of the backend that was chosen.
        """
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        # by sequence, if there is a pool on the host
        host_tables = getattr(manager, "host_tables", {})
        # another thread can call this during a step
        running = list(scheduler.running)
        size = manager.block_size
        unused = [max(0, len(seq.block_table) * size - seq.num_tokens) for seq in running]
        internal_waste = sum(count % size for count in unused)
        num_swapped = self.counters["swap_out_blocks"] + self.counters["swap_in_blocks"]
        return Counter(self.counters | {
            "shared_blocks": manager.num_shared_blocks,
            "num_requests_running": len(running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_swapped": len(host_tables),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks,
            "num_blocks_cached": len(manager.free.keys() & manager.hash_of_block),
            "num_host_blocks_used": sum(map(len, host_tables.values())),
            "kv_cache_bytes": manager.num_blocks * self.block_bytes,
            "reserved_waste": sum(unused) - internal_waste,
            "internal_waste": internal_waste,
            "mean_batch": self.counters["batched_sequences"] / max(1, self.counters["num_steps"]),
            "swapped_bytes": num_swapped * self.block_bytes,
            "attention_backend": self.backend})
