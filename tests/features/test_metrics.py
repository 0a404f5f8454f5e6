"""Counters, times, the trace, the log and the progress bar."""

import logging
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import GREEDY, generate, random_prompts
from forks import run_in_fork

from nanoengine import LLM, SamplingParams
from nanoengine.features import kernels
from nanoengine_extras.running.metrics import metrics_of


def test_the_progress_bar_shows_tokens_per_second(llm, capsys):
    llm.generate(["Once upon a time"] * 3, GREEDY)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "3/3" in last
    found = re.search(r"(\d+) output tokens/s", last)
    assert found and int(found[1]) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("has_instructions", [False, True])
def test_a_cpu_without_bfloat16_is_told(make_llm, caplog, monkeypatch, dtype, has_instructions):
    monkeypatch.setattr(kernels("cpu"), "has_bfloat16", lambda: has_instructions)
    with make_llm(num_kv_blocks=8, max_model_len=64, dtype=dtype):
        is_slow = dtype == "bfloat16" and not has_instructions
        assert ("dtype='float32'" in caplog.text) == is_slow


def test_weights_that_are_not_in_huge_pages_are_told(make_llm, caplog, monkeypatch):
    """Small ones do not matter, and other systems do not tell."""
    with make_llm(num_kv_blocks=8, max_model_len=64) as llm:
        assert not any("huge" in message for message in caplog.messages)
        log_pages = metrics_of(llm.engine).log_pages
        few, many = (f"AnonHugePages:  {size} kB" for size in (0, 2**30))
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=[few, many, FileNotFoundError]))
        log_pages(2**40)
        assert caplog.messages[-1].startswith("0% of the weights are in huge pages")
        caplog.clear()
        log_pages(2**40)
        log_pages(2**40)
        monkeypatch.setattr(Path, "read_text", lambda path: few)
        log_pages(2**20)
        assert not caplog.messages


def test_what_is_logged(make_llm, caplog):
    with caplog.at_level(logging.INFO, logger="nanoengine"):
        with make_llm(num_kv_blocks=8, max_model_len=64) as llm:
            assert caplog.messages[-1].endswith(
                ": 0 MiB, 8 KV blocks of 16 tokens hold 2.0 requests of 64 tokens at once")
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            for _ in range(2):
                generate(llm, random_prompts([30] * 4), params)
            assert llm.metrics()["num_preemptions"] > 1
    warnings = [record.getMessage() for record in caplog.records
                if record.levelno == logging.WARNING and "preempted" in record.getMessage()]
    assert len(warnings) == 1, "of several preemptions the first is reported"
    assert "num_kv_blocks" in warnings[0]


def test_the_log_is_shown_until_the_user_says_otherwise(tiny):
    """Each setting has a process of its own."""
    logger = "logging.getLogger('nanoengine')"
    settings = {
        "": 1, f"{logger}.setLevel('ERROR')": 0, "logging.basicConfig(level='INFO')": 1,
        "logging.basicConfig(level='ERROR')": 1, f"{logger}.addHandler(logging.StreamHandler())": 1,
        f"import nanoengine; {logger}.addHandler(logging.NullHandler())": 0}
    script = f"""if True:
        import logging, os, sys
        import numba, pydantic
        for setting in {[*settings]!r}:
            if os.fork() == 0:
                exec(setting)
                from nanoengine import LLM
                LLM({tiny!r}, num_kv_blocks=4, kernels=False)
                os._exit(0)
            assert os.wait()[1] == 0
            print("the next one", file=sys.stderr)"""
    result = run_in_fork(script)
    assert not result.returncode, result.stderr
    *logs, rest = result.stderr.split("the next one\n")
    assert not rest, result.stderr
    assert [log.count("KV blocks of") for log in logs] == [*settings.values()], logs


def test_metrics_and_close(bundled):
    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        before = llm.metrics()
        assert before.pop("attention_backend") == "numba"
        assert all(isinstance(value, (int, float)) for value in before.values())
        params = SamplingParams(max_tokens=7, ignore_eos=True)
        outputs = generate(llm, ["Once upon a time"] * 3, params)
        after = llm.metrics()
        assert set(before) < set(after) and before["num_steps"] == before["swapped_bytes"] == 0
        assert after["generation_tokens"] == 21
        assert after["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
        assert after["num_steps"] == 7 and after["computed_tokens"] == after["prompt_tokens"] + 18
        times = outputs[0].metrics
        assert (times.arrival_time <= times.first_scheduled_time <= times.first_token_time
                <= times.finished_time)
        assert 0 <= times.queue_time <= times.time_to_first_token <= times.end_to_end_time
        assert times.time_per_output_token * 6 == pytest.approx(
            times.end_to_end_time - times.time_to_first_token)
        assert after["guessed_tokens"] == after["num_requests_swapped"] == 0, "not in use"
        with pytest.raises(KeyError):
            after["num_step"]
        assert after["mean_batch"] == 3 and after["max_blocks_used"] > 0
    assert llm.metrics() == after, "they can still be read"
    llm.close()


def test_the_metrics_of_an_output_are_a_value(llm):
    stream = llm.stream("Once upon a time", GREEDY)
    first = next(stream).metrics
    before = vars(first).copy()
    last = [*stream][-1].metrics
    assert vars(first) == before and last.num_decoded_tokens == 11 > first.num_decoded_tokens == 0


def test_a_trace_has_every_step(make_llm):
    prompts = random_prompts([40, 20, 30])
    with make_llm(trace=True, num_kv_blocks=7, preemption_mode="swap",
                  max_num_batched_tokens=16) as llm:
        outputs = generate(llm, prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        trace, metrics = llm.trace, llm.metrics()
    assert len(trace) == metrics["num_steps"]
    batches = [record.batch for record in trace]
    assert sum(sum(batch.num_tokens) for batch in batches) == metrics["computed_tokens"]
    preempted = [mode for batch in batches for _, mode, _ in batch.preempted]
    assert preempted == ["swap"] * metrics["swap_preemptions"] != []
    assert sum(output.metrics.num_preemptions for output in outputs) == len(preempted)
    for record, after in zip(trace, trace[1:]):
        assert record.started < record.began < record.done <= record.ended
        assert record.ended <= after.started
        then = record.metrics
        assert then["num_blocks_used"] + then["num_blocks_free"] == 7
        assert then["internal_waste"] < 16 * max(1, then["num_requests_running"])
    with make_llm() as llm:
        generate(llm, prompts)
        assert llm.trace == []


def test_cached_tokens_are_reported(make_llm):
    prompt = random_prompts([17])[0]
    with make_llm() as llm:
        assert [generate(llm, [prompt])[0].num_cached_tokens for _ in range(2)] == [0, 16]
        assert generate(llm, [prompt[:16]])[0].num_cached_tokens == 0
