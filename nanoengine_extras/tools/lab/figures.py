"""Computes the figures of a run from the engine's trace and metrics; prints and saves them.

A figure is a number with a name: the table and the JSON file have the same names.
"""

import json
from typing import Any

import numpy as np

from nanoengine.engine import Engine
from nanoengine_extras.running.metrics import RequestMetrics, metrics_of

Step = Any  # a `StepRecord` of `LLM.trace`
Figures = dict[str, float]
Runs = dict[str, list[Figures]]  # of each engine or variant
COUNTED = ("num_steps", "mean_batch", "num_preemptions", "recomputed_tokens", "prefix_cache_hits",
           "prefix_cache_queries", "shared_blocks")  # by the engine


def figures_of(engine: Engine, seconds: float, requests: list[RequestMetrics]) -> Figures:
    """Returns the figures of a run on a new engine."""
    metrics = metrics_of(engine).gauges()
    trace = metrics_of(engine).trace
    rate = metrics["generation_tokens"] / seconds
    figures = {"output_tokens_per_second": rate, "seconds": seconds}
    first_token = [request.time_to_first_token for request in requests]
    per_token = [request.time_per_output_token for request in requests]
    for name, times in (("first_token_ms", first_token), ("per_token_ms", per_token)):
        figures[name], figures[f"{name}_p99"] = 1000 * np.percentile(times, [50, 99])
    figures |= {name: metrics[name] for name in COUNTED}
    figures["swapped_mib"] = metrics["swapped_bytes"] / 2**20
    figures |= figures_of_steps(trace, engine.config.block_size, metrics["right_guesses"])
    if len(trace) == metrics["num_steps"]:
        gaps = [elapsed(one.done, two.began) for one, two in zip(trace, trace[1:])]
        # of the device
        figures["idle_percent"] = 100 * sum(gaps) / elapsed(trace[0].began, trace[-1].done)
        figures["idle_ms_per_step"] = 1000 * sum(gaps) / len(trace)
    return figures


def figures_of_steps(trace: list[Step], block_size: int, num_right: int = 0) -> Figures:
    """Returns the speed of steps, and how full the KV cache was. A sample of steps is enough.

    num_right: the tokens that decodes gained from right guesses.
    """
    figures: Figures = {}
    for phase in ("prefill", "decode"):
        steps = [(end - start, sum(record.batch.num_tokens), len(record.batch))
                 for start, end, record in spans(trace) if phase_of(record) == phase]
        if steps:
            seconds, num_tokens, figures[f"{phase}_batch"] = np.mean(steps, axis=0)
            num_tokens += num_right / len(steps) if phase == "decode" else 0
            figures[f"{phase}_tokens_per_second"] = num_tokens / seconds
            figures[f"{phase}_step_ms"] = 1000 * seconds
    usage = [(end - start, *blocks_of(record, block_size)) for start, end, record in spans(trace)]
    times, used, empty, _, free = np.array(usage).T
    figures["kv_used_percent"] = 100 * (times @ used) / (times @ (used + free))
    figures["kv_waste_percent"] = 100 * (times @ empty) / (times @ used)
    return figures


def spans(trace: list[Step]) -> list[tuple[float, float, Step]]:
    """Returns start and end of each step. A step launched ahead starts when the last one ends."""
    ends = [0.0, *(record.ended for record in trace)]
    return [(max(before, record.started), record.ended, record)
            for before, record in zip(ends, trace)]


def phase_of(record: Step) -> str:
    return "decode" if max(record.batch.num_tokens) == 1 else "prefill"


def blocks_of(record: Step, block_size: int) -> tuple[float, ...]:
    """Returns blocks in use; their empty slots, in blocks; cached blocks; free blocks."""
    now = record.metrics
    empty = (now["reserved_waste"] + now["internal_waste"]) / block_size
    return now["num_blocks_used"], empty, now["num_blocks_cached"], now["num_blocks_free"]


def elapsed(start: Any, end: Any) -> float:
    """Returns the seconds between two times of a device: numbers on a CPU, CUDA events on a GPU."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def medians_of(runs: Runs) -> dict[str, Figures]:
    return {name: {figure: float(np.median([run[figure] for run in found])) for figure in found[0]}
            for name, found in runs.items()}


def in_short(values: list[float]) -> str:
    """Returns the median of several runs, and the lowest and highest if they differ."""
    three = (float(np.median(values)), min(values), max(values))
    middle, *ends = (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in three)
    return middle if ends == [middle, middle] else f"{middle} ({'-'.join(ends)})"


def report(args: Any, runs: Runs, **about: Any) -> None:
    """Prints a column for each engine or variant; writes --json, with every single run."""
    rows = [("", *runs)]
    for name in dict.fromkeys(name for found in runs.values() for name in found[0]):
        columns = [[run[name] for run in found if name in run] for found in runs.values()]
        rows.append((name.replace("_", " "), *(in_short(c) if c else "-" for c in columns)))
    width = 2 + max(len(cell) for row in rows for cell in row[1:])
    for label, *cells in rows:
        print(f"{label:30}" + "".join(f"{cell:>{width}}" for cell in cells))
    if args.json:
        results = {**about, "medians": medians_of(runs), "runs": runs}
        args.json.write_text(json.dumps(results, indent=2) + "\n")
