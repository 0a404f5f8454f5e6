"""The engine as its users see it: text in, text out, strict with input, hard to break."""

import gc
import itertools
import logging
import math
from pathlib import Path

import pytest
import torch
from conftest import (
    GREEDY, check_idle, check_refused, complete, generate, random_prompts, token_ids)
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.model_runner import ModelRunner


def test_the_bundled_model_is_right(llm):
    questions = ["47 + 85 =", "sort d b e a =", "count 17 to 23 =", "copy ball fox red ="]
    texts = [output.outputs[0].text for output in
             generate(llm, questions, SamplingParams(temperature=0, max_tokens=40))]
    assert texts == [" 132", " a b d e", " 17 18 19 20 21 22 23", " ball fox red"]


def test_ends(llm):
    greedy = dict(temperature=0, max_tokens=30)
    story = complete(llm, "Once upon a time", **greedy)
    full = story.token_ids
    assert (len(full), story.finish_reason) == (30, "length")
    stop_id = full[9]
    ended = complete(llm, "Once upon a time", **greedy, stop_token_ids=[stop_id])
    assert ended.token_ids == full[:full.index(stop_id) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop_id)
    assert story.text.startswith(ended.text)

    answer = complete(llm, "47 + 85 =", **greedy)
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", 0, 0)
    assert llm.inputs.eos_tokens == {0: 0, 2: None}, "only the tokenizer's own has no reason"
    assert len(complete(llm, "47 + 85 =", **greedy, ignore_eos=True).token_ids) == 30
    held = complete(llm, "47 + 85 =", **greedy, min_tokens=10)
    assert len(held.token_ids) >= 10 and not llm.inputs.eos_tokens.keys() & held.token_ids[:10]
    for ignore_eos, reason in ((False, None), (True, 2)):
        ended = complete(llm, "47 + 85 =", max_tokens=3, logit_bias={2: 1e9}, stop_token_ids=[2],
                         ignore_eos=ignore_eos)
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([2], "stop", reason)


def test_max_model_len(bundled):
    with LLM(bundled, max_model_len=20) as llm:
        output = generate(llm, "Once upon a time", SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output[0].prompt_token_ids) + len(token_ids(output)[0]) == 20
        assert output[0].outputs[0].finish_reason == "length"
        output = generate(llm, [[5] * 19], SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(token_ids(output)[0]) == 1


def test_streams_say_whose_text_it_is(llm):
    for _ in range(2):
        prompts = ["Once upon a time", "47 + 85 =", "count 17 to 23 ="]
        seen = {}
        for output in llm.stream(prompts, GREEDY):
            assert output.prompt == prompts[output.index]
            seen[output.request_id] = output.index
        assert [*seen.values()] == [0, 1, 2]
    assert [output.index for output in generate(llm, prompts)] == [0, 1, 2]
    chats = [[{"role": "user", "content": text}] for text in ("12 + 34", "sort c b a")]
    assert [output.index for output in llm.chat(chats, GREEDY, use_tqdm=False)] == [0, 1]


# ------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("run_ahead", [False, True])
def test_streaming(bundled, run_ahead):
    prompts = ["Once upon a time", "47 + 85 ="]
    params = SamplingParams(temperature=0, max_tokens=25)
    with LLM(bundled, dtype="float32", run_ahead=run_ahead) as llm:
        expected = {o.prompt: o.outputs[0] for o in generate(llm, prompts, params)}
        seen: dict = {}
        for output in llm.stream(prompts, params):
            assert all(type(token_id) is int for token_id in output.outputs[0].token_ids)
            before = seen.get(output.prompt)
            assert before is None or not before.finished
            new, old = output.outputs[0], before.outputs[0] if before else None
            assert new.token_ids[:-1] == (old.token_ids if old else []), "each token once"
            assert old is None or new.text.startswith(old.text)
            seen[output.prompt] = output
        assert {prompt: output.outputs[0] for prompt, output in seen.items()} == expected
        assert all(output.finished for output in seen.values())
        check_idle(llm)
        for num_read in (0, 1, 4):
            # some of them wait
            stream = llm.stream(prompts[:1] * 300, params)
            for _ in range(num_read):
                next(stream)
                assert bool(llm.engine.in_flight) == run_ahead
            del stream
            gc.collect()
            check_idle(llm)
        assert generate(llm, prompts[0], params)[0].outputs[0] == expected[prompts[0]]


@pytest.mark.needs("running.strict")
def test_out_of_memory_at_start_says_what_helps(bundled, monkeypatch):
    def exhausted(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. 2.00 GiB is free.")

    monkeypatch.setattr(ModelRunner, "allocate", exhausted)
    check_refused("2.00 GiB is free. Lower max_num_batched_tokens", LLM, bundled)


# ------------------------------------------------------------------ logits that are not finite


@pytest.fixture(scope="module")
def broken(make_model) -> str:
    """A model with a NaN in the embedding of token 300, and tokens 1 to 100 as they should be."""
    folder, _ = make_model(num_hidden_layers=2)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.embed_tokens.weight"][300, 5] = math.nan
    save_file(tensors, Path(folder) / "model.safetensors")
    return folder


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0, max_tokens=9), SamplingParams(max_tokens=9, logprobs=2, seed=1),
    SamplingParams(max_tokens=9, n=3, seed=6), SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=9, top_p=0.9, min_tokens=3, stop_token_ids=[9], seed=1)])
def test_a_prompt_that_gives_nan_ends_with_an_error_and_its_neighbours_lose_nothing(
        broken, caplog, params, run_ahead):
    prompts = [[i % 100 + 1 for i in range(start, start + 20)] for start in (0, 7, 9)]
    with LLM(broken, dtype="float32", block_size=16, num_kv_blocks=64, run_ahead=run_ahead) as llm:
        expected = generate(llm, prompts, [params] * 3)
        for position in (0, 5, 19):
            bad = [*prompts[1]]
            bad[position] = 300
            llm.inputs.numbers = itertools.count()
            caplog.clear()
            outputs = generate(llm, [prompts[0], bad, prompts[2]], [params] * 3)
            assert [o.outputs for o in outputs[::2]] == [o.outputs for o in expected[::2]]
            assert outputs[1].finished and len(outputs[1].outputs) == params.n
            for completion in outputs[1].outputs:
                assert (completion.token_ids, completion.text) == ([], "")
                assert completion.finish_reason == "error" and not completion.logprobs
                assert completion.stop_reason.startswith("request 1: ")
                assert "logits are not finite" in completion.stop_reason
            assert len(caplog.records) == params.n and caplog.records[0].levelno == logging.ERROR
            metrics = outputs[1].metrics
            assert metrics.num_decoded_tokens == 0 <= metrics.end_to_end_time
        num_sampled = sum(len(c.token_ids) for o in [*expected, *outputs, *outputs[::2] * 2]
                          for c in o.outputs)
        assert llm.metrics()["generation_tokens"] == num_sampled


@pytest.mark.parametrize("options", [dict(), dict(attention_backend="gather"),
                                     dict(attention_backend="gather", dtype="float16")])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_nan_is_not_found_in_the_prefix_cache(broken, options, max_tokens):
    """A prompt that begins alike gets what it gets alone, in the same step or later."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    stem = [*range(1, 33)]
    prompts = [[*stem, 300, 7], [*stem, 5], [*stem, 300], [*stem]]
    with LLM(broken, num_kv_blocks=64, **dict(dtype="float32", block_size=16) | options) as llm:
        (expected,) = token_ids(generate(llm, [prompts[1]], params))
        assert 300 not in expected
        llm.reset_prefix_cache()
        for batch in ([0], [1], [0, 1], [1, 0], [2], [1], [3, 0, 2, 1], [1]):
            outputs = generate(llm, [prompts[i] for i in batch], params)
            for index, output in zip(batch, outputs):
                (completion,) = output.outputs
                assert (completion.finish_reason == "error") == (index in (0, 2))
                assert index != 1 or completion.token_ids == expected


def test_a_completion_that_meets_nan_keeps_what_it_has(broken):
    """In a stream too, whose last output of the request says so."""
    bias = [None, {300: 1e9}]
    params = [SamplingParams(max_tokens=9, seed=1, logit_bias=each, logprobs=0) for each in bias]
    with LLM(broken, dtype="float32", block_size=16, num_kv_blocks=64) as llm:
        last = {}
        for output in llm.stream([[1, 2], [3, 4]], params):
            assert not (output.request_id in last and last[output.request_id].finished)
            last[output.request_id] = output
        check_idle(llm)
    good, bad = (output.outputs[0] for output in last.values())
    assert (len(good.token_ids), good.finish_reason) == (9, "length")
    assert (bad.token_ids, bad.finish_reason, len(bad.logprobs)) == ([300], "error", 1)
    assert bad.stop_reason.startswith("request 1: no token can be sampled") and last["1"].finished


# ----------------------------------------------------------------------------- requests


@pytest.mark.needs("running.strict")
def test_priorities(make_llm):
    prompts = random_prompts([5] * 6)
    with make_llm(max_num_seqs=1, scheduling_policy="priority") as llm:
        outputs = generate(llm, prompts, GREEDY)
        assert finishing_order(outputs) == [0, 1, 2, 3, 4, 5]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=[2, 1, 0, 2, -1, 0])
        assert finishing_order(outputs) == [4, 2, 5, 1, 0, 3]
        stream = llm.stream(prompts, GREEDY, priority=[2, 1, 0, 2, -1, 0])
        finished = [prompts.index(o.prompt_token_ids) for o in stream if o.finished]
        assert finished == [4, 2, 5, 1, 0, 3]
    with make_llm() as llm:
        for bad in ([1, 2], ["high"] * 6, 1.5, "high"):
            check_refused("priority=.*must be one int, or 6 of them", llm.generate, prompts,
                          GREEDY, priority=bad)
        for without_effect in (0, 1, [2] * 6, [5, 4, 3, 2, 1, 0]):
            assert len(llm.generate(prompts, GREEDY, False, priority=without_effect)) == 6
        calls = [*llm.add(prompts[0], GREEDY, 5), *llm.add(prompts[1], GREEDY, -1)]
        assert [*llm.engine.scheduler.waiting] == [call.seq for call in calls], "fcfs"
        llm.abort(calls)


def finishing_order(outputs) -> list[int]:
    return sorted(range(len(outputs)), key=lambda i: outputs[i].metrics.finished_time)
