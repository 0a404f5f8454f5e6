"""A user's own functions on logits: what they see, what they may return, and what they raise."""

import itertools
import math
import re

import pytest
import torch
from conftest import (
    GREEDY, check_idle, generate, random_prompts, token_ids, use_policies)
from test_sampler import make, sample

from nanoengine import SamplingParams
from nanoengine.sequence import NO_TOKEN


def test_own_processors_come_last_see_all_tokens_and_get_copies():
    """They may keep them, and they don't change. They may overwrite them: the engine's own stay."""
    kept = []

    def keep(input_ids, scores):
        kept.append((input_ids, scores))
        return scores

    def overwrite(input_ids, scores):
        input_ids.zero_()
        return scores.neg_()

    processors = [keep, overwrite, keep, overwrite, overwrite]
    seq = make(output=[4], logit_bias={0: 9.0}, logits_processors=processors, temperature=0)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert sample(logits, [seq])[0] == [1]
    assert logits.tolist() == [[0.0, 1.0, 2.0]], "the raw logits are left alone"
    # in both samplers
    assert [scores.tolist() for _, scores in kept] == [[[9, 1, 2]], [[-9, -1, -2]]] * 2
    assert all(input_ids.tolist() == [[1, 2, 3, 4]] for input_ids, _ in kept)


def give(*results):
    """A processor that gives these results in turn."""
    results = itertools.cycle(results)
    return lambda input_ids, scores: next(results)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("options", [
    dict(allowed_token_ids=[2], min_tokens=1, end_tokens=[2]),
    dict(logits_processors=[give(torch.full((1, 5), math.nan))]),
    dict(logits_processors=[give(torch.full((1, 5), -math.inf))])])
def test_a_row_whose_processors_leave_nothing_has_no_token(options, temperature):
    rows = [make(temperature=temperature), make(temperature=temperature, **options), make()]
    expected = sample(torch.zeros(3, 5), [rows[0], rows[0], rows[2]])[0]
    assert sample(torch.zeros(3, 5), rows)[0] == [expected[0], NO_TOKEN, expected[2]]


@pytest.mark.parametrize("result, described", [
    *((result, "") for result in (
        torch.zeros(20), torch.zeros(1, 19), torch.zeros(1, 1), torch.zeros(2, 20),
        torch.tensor(0.0), torch.zeros(1, 20, device="meta"), torch.zeros(1, 20).to_sparse(),
        torch.zeros(1, 20, dtype=torch.int64), torch.ones(1, 20, dtype=torch.bool), None)),
    (torch.zeros(1, 20).numpy(), "array([[0., 0., 0."), ([[0.0] * 10**5], "[[0.0, 0.0, 0.0"),
    (torch.zeros(1, 20, dtype=torch.int32), "torch.int32 of shape (1, 20) on cpu (torch.strided)")])
def test_a_result_of_another_shape_or_kind_is_an_error_that_names_the_request(result, described):
    """And says in short what was returned."""
    for processors in ([give(result)], [give(result), give(torch.zeros(1, 20))]):
        seq = make(logits_processors=processors)
        assert sample(torch.zeros(1, 20), [seq])[0] == [NO_TOKEN]
        message = str(seq.error)
        assert re.match(r"(?s)request 7: .* not floats of shape \(1, 20\)", message)
        assert f": it returned {described}" in message and len(message) < 500


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_result_of_another_precision_counts(dtype):
    forced = torch.tensor([[0.0, 5.0, -math.inf, math.inf]], dtype=dtype)
    assert sample(torch.zeros(1, 4), [make(logits_processors=[give(forced)], seed=1)])[0] == [3]
    chosen = torch.full((1, 4), -math.inf, dtype=dtype).index_fill(1, torch.tensor([2]), 1.5)
    assert sample(torch.zeros(1, 4), [make(logits_processors=[give(chosen)], seed=1)])[0] == [2]


@pytest.mark.needs("running.strict")
@pytest.mark.parametrize("temperature", [0, 0.5, 3.0])
def test_an_infinite_score_forces_a_token(temperature):
    def force(input_ids, scores):
        scores[0, 7] = math.inf
        return scores

    for options in (dict(logits_processors=[force]), dict(logit_bias={7: 1e39})):
        seq = make(temperature=temperature, **options)
        assert sample(torch.randn(1, 20), [seq])[0] == [7]


def test_a_processor_that_returns_nan_at_its_third_token(llm):
    def poison(input_ids, scores):
        return scores * math.nan if input_ids.shape[1] == num_prompt_tokens + 2 else scores

    (expected,) = generate(llm, "Once upon a time")
    num_prompt_tokens = len(expected.prompt_token_ids)
    params = SamplingParams(temperature=0, max_tokens=12, logits_processors=[poison])
    good, bad = generate(llm, ["Once upon a time"] * 2, [GREEDY, params])
    assert good.outputs == expected.outputs
    (completion,) = bad.outputs
    assert completion.token_ids == expected.outputs[0].token_ids[:2]
    assert expected.outputs[0].text.startswith(completion.text) and len(completion.text) > 1
    assert completion.finish_reason == "error" and "not finite" in completion.stop_reason


# ----------------------------------------------------------------- beside other requests


def fail_with(error: BaseException):
    def failing(input_ids, scores):
        if input_ids.shape[1] > 5:
            raise error
        return scores
    return failing


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("error", [
    ZeroDivisionError(), AssertionError(), RuntimeError("reused"), StopIteration()])
def test_a_processor_that_raises_ends_its_own_request(tiny_llm, error, run_ahead):
    use_policies(tiny_llm, run_ahead=run_ahead)
    prompts = random_prompts([3, 4, 3, 4, 5], seed=9)
    plain = [GREEDY, *[SamplingParams(seed=number, n=2) for number in range(4)]]
    expected = [output.outputs for output in generate(tiny_llm, prompts, plain)]
    params = plain[:]
    failing = fail_with(error)
    params[1] = SamplingParams(seed=0, n=2, logits_processors=[failing])
    params[3] = SamplingParams(logits_processors=[fail_with(KeyError("other"))], seed=1)
    # one that leaves no token has no error of its own
    nothing = SamplingParams(logits_processors=[lambda _, scores: scores - math.inf])
    requests = tiny_llm.add([*prompts, prompts[0]], [*params, nothing])
    while tiny_llm.engine.has_unfinished():
        tiny_llm.step()
    check_idle(tiny_llm)
    assert requests[5].seq.finish_reason == "error" and requests[5].seq.error is None
    outputs = [request.output() for request in requests]
    assert isinstance(requests[1].error, ValueError) and requests[1].error.__cause__ is error
    for number in (0, 2, 4):
        assert [completion.token_ids for completion in outputs[number].outputs] == [
            completion.token_ids for completion in expected[number]]
    request_id = outputs[1].request_id
    for found, wanted in zip(outputs[1].outputs, expected[1]):
        assert found.finish_reason == "error" and found.token_ids == wanted.token_ids[:2]
        assert found.stop_reason.startswith(f"request {request_id}: its logits processor {failing}")
        assert found.stop_reason.endswith(str(error) or repr(error))
    assert "other" in outputs[3].outputs[0].stop_reason


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_breaks_the_step(tiny_llm, error):
    """Nor is it taken for the end of a stream."""
    prompts = random_prompts([3, 4])
    expected = token_ids(generate(tiny_llm, prompts))
    params = [GREEDY, SamplingParams(logits_processors=[fail_with(error())])]
    for call in (tiny_llm.generate, lambda *given: [*tiny_llm.stream(*given)]):
        with pytest.raises((error, RuntimeError)):
            call(prompts, params)
        check_idle(tiny_llm)
    requests = tiny_llm.add(prompts, params)
    with pytest.raises(error):
        while tiny_llm.engine.has_unfinished():
            tiny_llm.step()
    assert token_ids(generate(tiny_llm, prompts)) == expected
    assert {request.seq.finish_reason for request in requests} == {"abort"}
