"""A picture of a trace, drawn with matplotlib.

A trace is what `LLM(model, trace=True)` keeps, so a run of your own can be drawn too:

    from nanoengine_extras.tools.lab.drawing import draw_timeline
    from nanoengine import LLM, SamplingParams

    llm = LLM("models/tiny-qwen3", trace=True, num_kv_blocks=8)
    llm.generate(["Once upon a time"] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
    draw_timeline(llm.trace, "steps.png", llm.config.block_size)
"""

from pathlib import Path
from typing import Any

import numpy as np

from .figures import Step, blocks_of, spans

STATES = {"waiting": "#d9d9d9", "prefill": "#3b6fb6", "decode": "#74b66b", "paused": "#d5ecd0",
          "preempted": "#e8853a", "swapped": "#8e63a8"}
BLOCKS = {"used": "#3b6fb6", "held, but empty": "#b6453b", "free, cached": "#a8c6ea",
          "free, blank": "#f2f2f2"}


def lanes(trace: list[Step]) -> dict[str, list[tuple[float, float, str]]]:
    """Returns what each completion did from its arrival on: (start, end, one of STATES).

    Paused: the completion holds its blocks, but the step is for others.
    """
    found: dict[Any, list[tuple[float, float, str]]] = {}
    since: dict[Any, tuple[float, str]] = {}  # the current state of each: since when, and which
    begin = before = trace[0].started
    for start, end, record in spans(trace):
        for seq, mode, _ in record.batch.preempted:
            since[seq] = (before, "swapped" if mode == "swap" else "preempted")
        for seq, num_tokens in zip(record.batch.sequences, record.batch.num_tokens):
            metrics = seq.kept.get("metrics")
            arrival = max(begin, metrics.arrival_time) if metrics and seq.index == 0 else start
            left, state = since.get(seq, (min(arrival, before), "waiting"))
            lane = found.setdefault(seq, [])
            if left < before:
                lane.append((left, before, state))
            decodes = num_tokens == 1 and state == "paused"
            lane.append((before, end, "decode" if decodes else "prefill"))
            since[seq] = (end, "paused")
        before = end
    return {f"{seq.request_id}.{seq.index}": lane for seq, lane in found.items()}


def draw_timeline(trace: list[Step], path: str | Path, block_size: int) -> None:
    """Draws over time: a lane for each completion, the KV blocks, and the batch."""
    from matplotlib.figure import Figure
    rows = list(lanes(trace).values())
    height = min(9.0, 1.2 + 0.16 * len(rows))
    figure = Figure(figsize=(13, height + 3.6), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[height, 2.0, 1.3])
    begin = trace[0].started
    for name, colour in STATES.items():
        bars = [(row, start - begin, end - begin) for row, lane in enumerate(rows)
                for start, end, state in lane if state == name]
        top.hlines(*np.reshape(bars, (-1, 3)).T, colour, lw=50 * height / len(rows), label=name)
    top.set(ylabel="requests, in order of admission", ylim=(len(rows) - 0.3, -0.7))

    records = [trace[0], *trace]  # the state that each step left, from the end of the one before
    times = [0.0, *(record.ended - begin for record in trace)]
    used, empty, cached, free = np.array([blocks_of(each, block_size) for each in records]).T
    middle.stackplot(times, used - empty, empty, cached, free - cached, step="pre",
                     labels=list(BLOCKS), colors=list(BLOCKS.values()))
    middle.set(ylabel="KV blocks", ylim=(0, used[0] + free[0]))
    in_step = [len(record.batch) for record in records]
    running = [record.metrics["num_requests_running"] for record in records]
    bottom.step(times, in_step, where="pre", color="#74b66b", label="in the step")
    bottom.step(times, running, where="pre", color="#444", linewidth=0.8, label="running")
    bottom.set(xlabel="seconds", ylabel="sequences", ylim=(0, None), xlim=(0, times[-1]))
    for axis in (top, middle, bottom):
        axis.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=6, frameon=False)
    figure.savefig(path, dpi=110)
