"""`LLM.metrics` in the text format of Prometheus, for `/metrics` of serve.py.

Names are vLLM's where it has one; all others begin with "nanoengine:".
"""

import json
from typing import Any

GAUGES = {"num_requests_running": "vllm:num_requests_running",
          "num_requests_waiting": "vllm:num_requests_waiting"}
COUNTERS = {name: f"vllm:{name}_total" for name in (
    "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions")}


def as_text(metrics: dict[str, Any], model: str) -> str:
    """Returns what `LLM.metrics` has returned for a model with this name.

    The name of the attention backend is a label. A counter never falls, but begins at 0 again when
    the server is restarted.
    """
    num_blocks = metrics["num_blocks_used"] + metrics["num_blocks_free"]
    found = {"vllm:kv_cache_usage_perc": metrics["num_blocks_used"] / num_blocks}
    for name, value in metrics.items():
        if not isinstance(value, str):
            found[GAUGES.get(name) or COUNTERS.get(name) or f"nanoengine:{name}"] = value
    labels = {"model_name": model, "attention_backend": metrics["attention_backend"]}
    # a label escapes like a text of JSON
    inner = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}"
                     for name, value in labels.items())
    return "".join(
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        f"{name}{{{inner}}} {value}\n" for name, value in found.items())
