"""Metrics, trace and log.

An observer of all steps: counters and times come from the batch and its sequences; gauges are read
between two steps (`LLM.metrics`). Each request has a `RequestMetrics`.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoengine.engine import Engine
from nanoengine.errors import logger
from nanoengine.llm import LLM
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor, RequestOutput
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched

# Messages go to stderr, or to the user's own handlers if there are any.
# logging.getLogger("nanoengine").setLevel("ERROR") silences them.
handler = logging.StreamHandler()
handler.addFilter(lambda record: not (logging.getLogger().handlers or logger.handlers[1:]))
logger.addHandler(handler)
logger.setLevel(logger.level or "INFO")
# messages of the library are handled like those of the engine
logging.getLogger("nanoengine_extras.cpu").parent = logger


@dataclass
class RequestMetrics:
    """The times and counts of a request, all its completions together.

    arrival_time: when it was queued; times are seconds of `time.monotonic()`, 0 until the event.
    first_scheduled_time: when its first step began.
    first_token_time: when its first token became known.
    finished_time: when the last token of its longest completion became known.
    num_decoded_tokens: tokens of the longest completion, without its first.
    num_cached_tokens: tokens of the prompt that the prefix cache had at the first admission.
    num_preemptions: how often one of its completions was preempted.
    num_generation_tokens: tokens of all completions together.
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
    num_decoded_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_generation_tokens: int = 0

    queue_time = property(lambda m: m.first_scheduled_time - m.arrival_time)
    time_to_first_token = property(lambda m: m.first_token_time - m.arrival_time)
    end_to_end_time = property(lambda m: m.finished_time - m.arrival_time)
    decode_time = property(lambda m: m.finished_time - m.first_token_time)
    time_per_output_token = property(lambda m: m.decode_time / max(1, m.num_decoded_tokens))
    # vLLM's names for some of these
    queued_ts = property(lambda m: m.arrival_time)
    scheduled_ts = property(lambda m: m.first_scheduled_time)
    first_token_ts = property(lambda m: m.first_token_time)
    last_token_ts = property(lambda m: m.finished_time)
    first_token_latency = property(lambda m: m.time_to_first_token)


COUNTERS = """num_steps batched_sequences max_blocks_used prompt_tokens computed_tokens
    generation_tokens prefix_cache_queries prefix_cache_hits num_preemptions recompute_preemptions
    swap_preemptions recomputed_tokens swap_out_blocks swap_in_blocks shared_blocks
    copy_on_write_blocks num_requests_swapped num_host_blocks_used guessed_tokens
    right_guesses""".split()


@dataclass
class StepRecord:
    """A step in the trace.

    started, ended: when it was scheduled, and when its tokens were collected: seconds of the clock.
    began, done: when the device began and finished it: seconds on a CPU, CUDA events on a GPU.
    tokens: one for each row of `batch.sampled`.
    metrics: the gauges after the step ended.
    """

    batch: Batch
    started: float
    began: Any
    done: Any = None
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


class Metrics(Feature):
    """Counters and times of one engine, and with trace=True a record of each step.

    All sequences of a request keep the same `RequestMetrics`.

    trace: the records.
    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.counters = Counter[str](dict.fromkeys(COUNTERS, 0))
        self.trace: list[StepRecord] = []
        # the steps whose tokens are not collected yet
        self.records: list[StepRecord] = []

    def begin(self, engine: Engine) -> None:
        # kept, since the runner may be gone when it is needed
        self.block_bytes = engine.runner.block_bytes
        self.backend = engine.runner.backend
        super().begin(engine)
        self.log_room(engine.config, engine.runner)

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        metrics = RequestMetrics(self.clock())
        for seq in seqs:
            seq.kept["metrics"] = metrics

    def scheduled(self, batch: Batch) -> None:
        if not batch:
            return
        started = self.clock()
        if self.engine.config.trace:
            self.records.append(StepRecord(batch, started, self.timestamp()))
        copied = {f"{name}_blocks": len(pairs) for name, pairs in vars(batch.copies).items()}
        self.counters.update(copied, num_steps=1, batched_sequences=len(batch),
                             computed_tokens=sum(batch.num_tokens))
        manager = self.engine.scheduler.block_manager
        num_used = manager.num_blocks - manager.num_free_blocks
        self.counters["max_blocks_used"] = max(self.counters["max_blocks_used"], num_used)
        for seq, mode, num_computed in batch.preempted:
            if not self.counters["num_preemptions"]:
                logger.warning(f"the KV cache is full: request {seq.request_id} is preempted "
                               f"({mode}). A larger num_kv_blocks or a smaller max_num_seqs helps")
            self.counters.update(["num_preemptions", f"{mode}_preemptions"])
            if metrics := seq.kept.get("metrics"):
                metrics.num_preemptions += 1
            seq.kept["num_lost"] = num_computed
        for seq, num_hits in batch.admitted:
            seq.kept["has_run"] = True
            num_lost = max(0, seq.kept.pop("num_lost", 0) - seq.num_computed_tokens)
            self.counters.update(prefix_cache_queries=seq.num_tokens, prefix_cache_hits=num_hits,
                                 recomputed_tokens=num_lost)
            metrics = seq.kept.get("metrics")
            if metrics and not metrics.first_scheduled_time:
                metrics.first_scheduled_time = started
                metrics.num_cached_tokens = num_hits
                self.counters["prompt_tokens"] += seq.num_prompt_tokens
        for seq, start in zip(batch.sequences, batch.starts):
            # a sequence that begins without being admitted is a fork
            if "has_run" not in seq.kept:
                self.counters["shared_blocks"] += start // manager.block_size
                seq.kept["has_run"] = True

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        now = self.clock()
        for seq in seqs:
            if metrics := seq.kept.get("metrics"):
                metrics.finished_time = now
                metrics.first_token_time = metrics.first_token_time or now
            if seq.finish_reason == "error":
                logger.error(seq.stop_reason)
        self.counters["generation_tokens"] += sum(seq.finish_reason != "error" for seq in seqs)
        # the records before that of this step are of steps that were interrupted
        while self.records:
            record = self.records.pop(0)
            if record.batch is step.batch:
                record.done = step.done
                record.ended = now
                record.tokens = step.tokens.tolist()
                record.metrics = self.gauges()
                self.trace.append(record)
                break

    def output(self, seqs: list[Sequence], output: RequestOutput) -> None:
        if metrics := seqs[0].kept.get("metrics"):
            counts = [len(each.token_ids) for each in output.outputs]
            # a copy, which does not change
            output.metrics = replace(metrics, num_decoded_tokens=max(0, max(counts) - 1),
                                     num_generation_tokens=sum(counts))
            output.num_cached_tokens = metrics.num_cached_tokens

    def timestamp(self) -> Any:
        """Returns the time; on a GPU an event after all work that is queued."""
        if self.engine.config.device == "cuda":
            # the stream of the engine's GPU, which need not be this thread's current one
            stream = torch.cuda.current_stream(self.engine.runner.last_sampled.device)
            return stream.record_event(torch.cuda.Event(enable_timing=True))
        return self.clock()

    def log_room(self, config: Any, runner: Any) -> None:
        """Logs how many requests the KV cache can hold."""
        most = runner.num_kv_blocks * config.block_size / runner.max_model_len
        size = runner.num_kv_blocks * runner.block_bytes / 2**20
        logger.info(f"{config.model}: {size:,.0f} MiB, {runner.num_kv_blocks} KV blocks of "
                    f"{config.block_size} tokens hold {most:.1f} requests of "
                    f"{runner.max_model_len} tokens at once")
        if config.device == "cpu" and hasattr(runner, "model"):
            is_known = runner.dtype == torch.bfloat16 and runner.kernels
            if is_known and not runner.kernels.has_bfloat16():
                logger.warning("this CPU has no instructions for bfloat16, and is faster with "
                               "dtype='float32'")
            self.log_pages(sum(weights.nbytes for weights in runner.model.parameters()))

    def log_pages(self, num_bytes: int) -> None:
        """Warns if this process has less memory in huge pages than half the size of its weights,
        num_bytes. Only Linux reports this."""
        # caches hold most of a small model
        if num_bytes <= 2**27:
            return
        with suppress(OSError):
            pages = Path("/proc/self/smaps_rollup").read_text()
            in_huge_pages = 1024 * sum(map(int, re.findall(r"AnonHugePages: +(\d+)", pages)))
            if in_huge_pages < num_bytes / 2:
                logger.warning(f"{in_huge_pages / num_bytes:.0%} of the weights are in huge pages, "
                               "so decodes take longer: see docs/tutorial/tuning.md")

    def gauges(self) -> dict[str, Any]:
        """Returns current gauges, and counters since the start, as a flat dict.

        num_requests_waiting: completions that wait, swapped ones included.
        num_requests_running: completions that run.
        num_requests_swapped: completions whose blocks are on the host (swapping.py).
        num_blocks_used: blocks that sequences hold.
        num_blocks_free: blocks that no sequence holds.
        num_blocks_cached: free blocks that the prefix cache can still find.
        num_host_blocks_used: blocks of the host's pool that are in use (swapping.py).
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
        shared_blocks: blocks that forks share with their parents, without a copy.
        copy_on_write_blocks: blocks that were copied for forks.
        guessed_tokens: guesses of next tokens that steps computed (speculation.py).
        right_guesses: guesses that were right.
        attention_backend: the name of the backend that was chosen.
        """
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        # another thread can call this during a step
        running = list(scheduler.running)
        size = manager.block_size
        unused = [max(0, len(seq.block_table) * size - seq.num_tokens) for seq in running]
        internal_waste = sum(count % size for count in unused)
        num_swapped = self.counters["swap_out_blocks"] + self.counters["swap_in_blocks"]
        counters = Counter(self.counters)
        # speculation counts, too
        counters.update(getattr(self.engine, "counts", {}))
        return {
            **counters, **getattr(manager, "gauges", dict)(),
            "num_requests_running": len(running), "num_requests_waiting": len(scheduler.waiting),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks, "internal_waste": internal_waste,
            "num_blocks_cached": len(manager.free.keys() & manager.hash_of_block),
            "kv_cache_bytes": manager.num_blocks * self.block_bytes,
            "reserved_waste": sum(unused) - internal_waste, "attention_backend": self.backend,
            "mean_batch": self.counters["batched_sequences"] / max(1, self.counters["num_steps"]),
            "swapped_bytes": num_swapped * self.block_bytes}


def metrics_of(engine: Engine) -> Any:
    """Returns the `Metrics` of an engine."""
    return engine.features["Metrics"]


def metrics(llm: LLM) -> dict[str, Any]:
    """Returns current gauges, and counters since the start: see `Metrics.gauges`."""
    return metrics_of(llm.engine).gauges()


def trace(llm: LLM) -> list[StepRecord]:
    """Returns the records of all steps; there are none without trace=True."""
    return metrics_of(llm.engine).trace


class Bar(tqdm):
    """A progress bar that also shows the tokens per second of all calls together."""

    def __init__(self, metrics: Metrics, **options: Any) -> None:
        self.metrics = metrics
        self.num_before = metrics.counters["generation_tokens"]
        super().__init__(**options)

    def update(self, n: float | None = 1) -> Any:
        num_tokens = self.metrics.counters["generation_tokens"] - self.num_before
        rate = num_tokens / (self.format_dict["elapsed"] or 1)
        self.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
        return super().update(n)


# a function that makes bars for an engine
PARTS = {"progress_bar": lambda engine: partial(Bar, metrics_of(engine))}
