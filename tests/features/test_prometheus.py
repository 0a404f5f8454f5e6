"""The text format of Prometheus: each line can be read, and no number is lost."""

import re
from types import SimpleNamespace

import pytest

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine_extras.tools import prometheus
from nanoengine_extras.tools.prometheus import FIRST_TOKEN, NEXT_TOKEN, WHOLE, Times, as_text

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


@pytest.mark.needs("running.metrics")
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


@pytest.mark.needs("running.metrics")
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


# -------------------------------------------------------------------------------- histograms


METRICS = {"num_blocks_used": 0, "num_blocks_free": 5, "attention_backend": "gather"}


def histograms_of(times: Times) -> dict[str, dict[str, float]]:
    """The values of each histogram: of its buckets by their ends, and its sum and count."""
    plain = as_text(METRICS, "m")
    text = as_text(METRICS, "m", times)
    assert text.startswith(plain)
    found: dict[str, dict[str, float]] = {}
    for line in text.removeprefix(plain).splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split()
            assert kind == "histogram"
            found[name] = {}
            continue
        match = re.fullmatch(r'(\S+?)(_bucket|_sum|_count)\{model_name="m",'
                             r'attention_backend="gather"(?:,le="(\S+)")?\} (\S+)', line)
        assert match and match[1] == name and (match[2] == "_bucket") == (match[3] is not None)
        found[name][match[3] or match[2]] = float(match[4])
    return found


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
    found = histograms_of(times)
    assert [*found] == [FIRST_TOKEN, NEXT_TOKEN, WHOLE]
    first, following, whole = found.values()
    assert (first["0.1"], first["0.25"], first["2560.0"], first["+Inf"]) == (0, 2, 2, 2)
    assert (following["0.01"], following["0.025"], following["80.0"], following["+Inf"]) == (
        0, 2, 2, 3)
    assert (whole["0.3"], whole["7680.0"], whole["+Inf"]) == (1, 1, 2)
    assert [each["_count"] for each in found.values()] == [2, 3, 2]
    assert first["_sum"] == 0.5 and following["_sum"] == pytest.approx(1e5 + 0.04)
    assert whole["_sum"] == pytest.approx(1e5 + 2 * 0.27)
    # a beam that its search drops
    seqs[2].finish_reason = "abort"
    times.done(None, seqs[2:])
    assert [each["_count"] for each in histograms_of(times).values()] == [3, 3, 2]


def test_times_of_an_engine(make_llm):
    """Each completion has a first token, others, and an end unless it is aborted."""
    times = Times()
    params = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    with make_llm(num_kv_blocks=32, max_num_seqs=4, features=[times]) as llm:
        llm.generate([[5, 6], [7, 8]], params, use_tqdm=False)
        requests = llm.add([[5, 6]], params)
        llm.step()
        llm.abort(requests)
    found = histograms_of(times)
    assert [each["_count"] for each in found.values()] == [6, 16, 4]
    for each in found.values():
        *buckets, last = [count for end, count in each.items() if end[0] != "_"]
        assert buckets == sorted(buckets) and last == each["_count"]
    assert 0 < found[FIRST_TOKEN]["_sum"] < found[WHOLE]["_sum"] + found[FIRST_TOKEN]["_sum"]


def test_times_of_beams(make_llm):
    """A search arrives once; the beams that it forks do not."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with make_llm(num_kv_blocks=32, max_num_seqs=4, features=[times := Times()]) as llm:
        assert len(llm.beam_search([[5, 6]], params)[0].sequences) == 3
    first, following, whole = [each["_count"] for each in histograms_of(times).values()]
    assert first == 1 and following <= 5 and whole <= 1


@pytest.mark.parametrize("options", [{}, {"preemption": True}, {"speculation": "prompt-lookup"}])
def test_times_change_no_token(tiny, options):
    """Preempted and guessed tokens are counted once: a step of several guesses is one gap."""
    if options.pop("preemption", False):
        options = {"num_kv_blocks": 5, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for features in ([], [times := Times()]):
        with LLM(tiny, **{"block_size": 16, "num_kv_blocks": 32, "max_num_seqs": 4} | options,
                 features=features) as llm:
            outputs = llm.generate([[5, 6], [7, 8], [9] * 9], params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    first, following, whole = [each["_count"] for each in histograms_of(times).values()]
    assert first == whole == 3 and following <= 3 * 39
    assert following == 3 * 39 or "speculation" in options
