"""The text format of Prometheus: each line can be read, and no number is lost."""

import re

import pytest

from nanoengine import SamplingParams
from nanoengine_extensions.prometheus import as_text

LINE = re.compile(r'([a-z_:]+)\{model_name="((?:[^"\\\n]|\\.)*)",attention_backend="(\w+)"\} (\S+)')


def values_of(text: str) -> dict[str, float]:
    found = {}
    kinds = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split()
            kinds[name] = kind
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert match[1] in kinds and match[1] not in found, "the type comes first"
        found[match[1]] = float(match[4])
    assert found.keys() == kinds.keys()
    assert all(kind == ("counter" if name.endswith("_total") else "gauge")
               for name, kind in kinds.items())
    return found


@pytest.mark.needs("metrics")
def test_all_numbers_are_there(llm):
    llm.generate(["Once", "The fox"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    metrics = llm.metrics()
    text = as_text(metrics, "models/tiny")
    found = values_of(text)
    numbers = [value for value in metrics.values() if not isinstance(value, str)]
    assert len(found) == len(numbers) + 1 and text.endswith("\n")
    for name in ("num_requests_running", "num_requests_waiting"):
        assert found[f"vllm:{name}"] == metrics[name]
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries",
                 "prefix_cache_hits", "num_preemptions"):
        assert found[f"vllm:{name}_total"] == metrics[name]
    assert found["nanoengine:num_steps"] == metrics["num_steps"]
    assert found["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.needs("metrics")
def test_the_part_of_the_cache_that_is_in_use(llm):
    requests = llm.add("Once upon a time", SamplingParams(max_tokens=5, ignore_eos=True))
    llm.step()
    metrics = llm.metrics()
    used = values_of(as_text(metrics, "m"))["vllm:kv_cache_usage_perc"]
    assert used == metrics["num_blocks_used"] / llm.engine.scheduler.block_manager.num_blocks > 0
    llm.abort(requests)


@pytest.mark.parametrize("name, written", [
    ("a\\b", r"a\\b"), ('a"b', r'a\"b'), ("a\nb", r"a\nb"), ("modèle", "modèle")])
def test_names_of_models_are_escaped(name, written):
    metrics = {"num_blocks_used": 0, "num_blocks_free": 5, "attention_backend": "gather"}
    text = as_text(metrics, name)
    assert f'{{model_name="{written}",' in text and values_of(text)
