"""`LLM.metrics` in the text format of Prometheus, for `/metrics` of serve.py, and histograms.

Names are vLLM's if vLLM has the metric; all others begin with "nanoengine:".
"""

import time
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Launched
from nanoengine_extras.tools import METRIC_NAMES

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
            "num_preemptions", *METRIC_NAMES.values()}
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
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.histograms = {name: Histogram(name, "seconds", buckets=ends, registry=self.registry)
                           for name, ends in BUCKETS.items()}

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
                self.histograms[FIRST_TOKEN].observe(now - came)
            else:
                self.histograms[NEXT_TOKEN].observe(now - last)
            # a beam search aborts the beams that it drops, and then goes on
            if seq.finish_reason in ("stop", "length"):
                self.histograms[WHOLE].observe(now - came)


def as_text(metrics: dict[str, Any], model: str, times: Times | None = None) -> str:
    """Returns the result of `LLM.metrics` for a model with this name, and its times.

    The name of the attention backend is a label. A counter never falls, but begins at 0 again when
    the server is restarted.
    """
    num_blocks = metrics["num_blocks_used"] + metrics["num_blocks_free"]
    labels = {"model_name": model, "attention_backend": metrics["attention_backend"]}
    values = metrics | {"kv_cache_usage_perc": metrics["num_blocks_used"] / num_blocks}
    found: list[Any] = []
    for own_name, value in values.items():
        if not isinstance(value, str):
            name = METRIC_NAMES.get(own_name, own_name)
            kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            prefix = "vllm" if name in COUNTERS | GAUGES else "nanoengine"
            found.append(kind(f"{prefix}:{name}", name, labels=[*labels]))
            found[-1].add_metric([*labels.values()], value)
    for family in times.registry.collect() if times else ():
        family.samples = [each._replace(labels=labels | each.labels) for each in family.samples]
        found.append(family)
    # anything that collects
    registry: Any = SimpleNamespace(collect=lambda: found)
    return generate_latest(registry).decode()
