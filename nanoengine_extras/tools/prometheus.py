"""`LLM.metrics` in the text format of Prometheus, for `/metrics` of serve.py, and histograms.

Names are vLLM's if vLLM has the metric; all others begin with "nanoengine:".
"""

import json
import time
from bisect import bisect_left
from typing import Any

from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Launched

GAUGES = {"num_requests_running": "vllm:num_requests_running",
          "num_requests_waiting": "vllm:num_requests_waiting"}
COUNTERS = {name: f"vllm:{name}_total" for name in (
    "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions")}
# the ends of buckets, in seconds, as in vLLM
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
NEXT_TOKEN = "vllm:inter_token_latency_seconds"
WHOLE = "vllm:e2e_request_latency_seconds"
BUCKETS = {
    FIRST_TOKEN: (
        .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1., 2.5, 5., 7.5, 10., 20., 40., 80.,
        160., 640., 2560.),
    NEXT_TOKEN: (
        .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1., 2.5, 5., 7.5, 10., 20., 40., 80.),
    WHOLE: (
        .3, .5, .8, 1., 1.5, 2., 2.5, 5., 10., 15., 20., 30., 40., 50., 60., 120., 240., 480., 960.,
        1920., 7680.)}


class Times(Feature):
    """How long completions have taken since the start: histograms for `as_text`.

    A completion whose client has left, or that ended with an error, has no total time.

    counts: how many values are in each bucket; the last bucket has no end. sums: the values added
        up, in seconds.
    """

    def __init__(self) -> None:
        self.counts = {name: [0] * (len(ends) + 1) for name, ends in BUCKETS.items()}
        self.sums = dict.fromkeys(BUCKETS, 0.0)

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        now = time.monotonic()
        for seq in seqs:
            # when it arrived, and when it had its last token
            seq.kept["Times"] = now, None

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            # beams that were forked have not arrived
            if seq.finish_reason == "error" or "Times" not in seq.kept:
                continue
            came, last = seq.kept["Times"]
            seq.kept["Times"] = came, now
            if last is None:
                self.add(FIRST_TOKEN, now - came)
            else:
                self.add(NEXT_TOKEN, now - last)
            # a beam search aborts the beams that it drops, and then goes on
            if seq.finish_reason in ("stop", "length"):
                self.add(WHOLE, now - came)

    def add(self, name: str, seconds: float) -> None:
        self.counts[name][bisect_left(BUCKETS[name], seconds)] += 1
        self.sums[name] += seconds


def as_text(metrics: dict[str, Any], model: str, times: Times | None = None) -> str:
    """Returns the result of `LLM.metrics` for a model with this name, and its times.

    The name of the attention backend is a label. A counter never falls, but begins at 0 again when
    the server is restarted.
    """
    num_blocks = metrics["num_blocks_used"] + metrics["num_blocks_free"]
    found = {"vllm:kv_cache_usage_perc": metrics["num_blocks_used"] / num_blocks}
    for name, value in metrics.items():
        if not isinstance(value, str):
            found[GAUGES.get(name) or COUNTERS.get(name) or f"nanoengine:{name}"] = value
    labels = {"model_name": model, "attention_backend": metrics["attention_backend"]}
    # labels are escaped like JSON strings
    inner = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}"
                     for name, value in labels.items())
    lines = []
    for name, value in found.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"{name}{{{inner}}} {value}")
    if times:
        for name in BUCKETS:
            lines += histogram(name, inner, times)
    return "\n".join(lines) + "\n"


def histogram(name: str, inner: str, times: Times) -> list[str]:
    """Returns the lines of a histogram: for each bucket, how many values are at most its end."""
    lines = [f"# TYPE {name} histogram"]
    total = 0
    for end, count in zip([*BUCKETS[name], "+Inf"], times.counts[name]):
        total += count
        lines.append(f'{name}_bucket{{{inner},le="{end}"}} {total}')
    return [*lines, f"{name}_sum{{{inner}}} {times.sums[name]}", f"{name}_count{{{inner}}} {total}"]
