"""The text format of Prometheus: each line can be read, and no number is lost."""

from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from nanoengine import LLM, BeamSearchParams, SamplingParams

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from nanoengine_extras.tools import prometheus  # noqa: E402
from nanoengine_extras.tools.prometheus import (  # noqa: E402
    FIRST_TOKEN, NEXT_TOKEN, WHOLE, Times, as_text)

METRICS = {"num_blocks_used": 0, "num_blocks_free": 5, "attention_backend": "gather"}


def values_of(text: str, model: str = "m", is_histogram: bool = False) -> dict[str, float]:
    """The value of each sample; of a bucket by the histogram's name and its end."""
    found = {}
    for family in text_string_to_metric_families(text):
        if (family.type == "histogram") == is_histogram:
            for sample in family.samples:
                labels = dict(sample.labels)
                end = labels.pop("le", "")
                assert labels == {"model_name": model, "attention_backend": ANY}
                assert is_histogram or sample.name.endswith("_total") == (family.type == "counter")
                found[sample.name.removesuffix("_bucket") + end] = sample.value
    return found


@pytest.mark.needs("running.metrics")
def test_all_numbers_are_there(llm):
    requests = llm.add(["Once", "The fox"], SamplingParams(max_tokens=5, ignore_eos=True))
    llm.step()
    metrics = llm.metrics()
    text = as_text(metrics, "models/tiny")
    found = values_of(text, "models/tiny")
    numbers = [value for value in metrics.values() if not isinstance(value, str)]
    assert len(found) == len(numbers) + 1 and text.endswith("\n")
    for name in ("num_requests_running", "num_requests_waiting"):
        assert found[f"vllm:{name}"] == metrics[name]
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries",
                 "prefix_cache_hits", "num_preemptions"):
        assert found[f"vllm:{name}_total"] == metrics[name]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == metrics["guessed_tokens"]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == metrics["right_guesses"]
    assert found["nanoengine:num_steps"] == metrics["num_steps"]
    num_blocks = llm.engine.scheduler.block_manager.num_blocks
    assert found["vllm:kv_cache_usage_perc"] == metrics["num_blocks_used"] / num_blocks > 0
    llm.abort(requests)


@pytest.mark.parametrize("name", ["a\\b", 'a"b', "a\nb", "modèle"])
def test_names_of_models_are_escaped(name):
    assert values_of(as_text(METRICS, name), name)["vllm:kv_cache_usage_perc"] == 0


# -------------------------------------------------------------------------------- histograms


def counts_of(times: Times) -> list[float]:
    """How many first tokens, next tokens and ends there were."""
    found = values_of(as_text(METRICS, "m", times), is_histogram=True)
    return [found[f"{name}_count"] for name in (FIRST_TOKEN, NEXT_TOKEN, WHOLE)]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_times(clock):
    """A bucket has all values up to its end, which is one of them."""
    times = Times()
    seqs = [SimpleNamespace(kept={}, finish_reason=None) for _ in range(3)]
    times.enter(seqs, None)
    clock.seconds += 0.25
    times.done(None, seqs[:2])
    clock.seconds += 0.02
    seqs[1].finish_reason = "stop"
    times.done(None, seqs[:2])
    clock.seconds += 1e5
    seqs[0].finish_reason = "length"
    times.done(None, seqs[:1])
    # a failed one has no times
    seqs[2].finish_reason = "error"
    times.done(None, seqs[2:])
    found = values_of(as_text(METRICS, "m", times), is_histogram=True)
    for name, buckets in {
            FIRST_TOKEN: {"0.1": 0, "0.25": 2, "2560.0": 2, "+Inf": 2, "_sum": 0.5},
            NEXT_TOKEN: {"0.01": 0, "0.025": 2, "80.0": 2, "+Inf": 3, "_sum": 1e5 + 0.04},
            WHOLE: {"0.3": 1, "7680.0": 1, "+Inf": 2, "_sum": 1e5 + 2 * 0.27}}.items():
        for end, value in buckets.items():
            assert found[name + end] == pytest.approx(value), (name, end)
    assert counts_of(times) == [2, 3, 2]
    # a beam that its search drops
    seqs[2].finish_reason = "abort"
    times.done(None, seqs[2:])
    assert counts_of(times) == [3, 3, 2]


def test_times_of_an_engine(make_llm):
    """Each completion has a first token, others, and an end unless it is aborted."""
    params = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with make_llm(num_kv_blocks=32, max_num_seqs=4, features=[times := Times()]) as llm:
        llm.generate([[5, 6], [7, 8]], params, use_tqdm=False)
        requests = llm.add([[5, 6]], params)
        llm.step()
        llm.abort(requests)
        assert counts_of(times) == [6, 16, 4]
        # a search arrives once; the beams that it forks do not
        assert len(llm.beam_search([[5, 6]], beams)[0].sequences) == 3
    first, following, whole = counts_of(times)
    assert first == 6 + 1 and following <= 16 + 5 and whole <= 4 + 1


@pytest.mark.parametrize("options", [
    {}, {"num_kv_blocks": 5, "max_model_len": 64}, {"speculation": "prompt-lookup"}])
def test_times_change_no_token(tiny, options):
    """Preempted and guessed tokens are counted once: a step of several guesses is one gap."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for features in ([], [times := Times()]):
        with LLM(tiny, **{"block_size": 16, "num_kv_blocks": 32, "max_num_seqs": 4} | options,
                 features=features) as llm:
            outputs = llm.generate([[5, 6], [7, 8], [9] * 9], params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    first, following, whole = counts_of(times)
    assert first == whole == 3 and following <= 3 * 39
    assert following == 3 * 39 or "speculation" in options
