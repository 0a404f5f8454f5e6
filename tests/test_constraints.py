"""Constraints: token ids that a model does not know, and processors that fail.

What constraints do to logits is tested in test_sampler.py.
"""

import math

import pytest
import torch
from conftest import GREEDY, check_idle, generate, random_prompts, token_ids, use_policies

from nanoengine import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine_extensions import constraints
from nanoengine_extensions.constraints import encode_bad_words

NONE_PENDING = torch.zeros(1, dtype=torch.int32)


class Letters:
    """A tokenizer with one token for each letter; a space has none."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text if letter != " "]


def make(prompt: list[int], output=(), **params) -> Sequence:
    return Sequence("7", [*prompt, *output], len(prompt), 100, SamplingParams(**params))


# --------------------------------------------------------------------- tokens of another vocabulary


def test_a_bad_word_that_cannot_be_generated_is_left_out():
    params = SamplingParams(bad_words=["ab", "abz", "zab", "y", "z"])
    assert encode_bad_words(params, Letters(), 26) == [[1, 2]] * 2 + [[25]] * 2
    seq = Sequence("7", [1], 1, 9, params)
    constraints.constrain(seq, [3, 26, 25], Letters(), 26)
    bad_words, end_tokens = [[1, 2]] * 2 + [[25]] * 2, [[3], [25]]
    assert seq.constraints == [(word, math.inf) for word in bad_words] + [
        (word, 1) for word in end_tokens]
    assert seq.needs_tokens
    seq = Sequence("7", [1], 1, 9, SamplingParams(bad_words=["z"]))
    constraints.constrain(seq, [], Letters(), 26)
    assert not seq.needs_tokens, "nothing is left that looks at its tokens"


@pytest.mark.parametrize("beyond", [5, 6, 9])
@pytest.mark.parametrize("options", [
    dict(bad_words=["a"]), dict(min_tokens=5), dict(logit_bias={1: 1.0}),
    dict(allowed_token_ids=[1]), dict(repetition_penalty=2.0), dict(presence_penalty=1.0)])
def test_no_token_id_reaches_another_row(options, beyond):
    """Whatever ids come: those of another vocabulary are an error."""
    if "logit_bias" in options:
        options = dict(logit_bias={beyond: 1.0})
    if "allowed_token_ids" in options:
        options = dict(allowed_token_ids=[1, beyond])
    first, second = make([1, beyond], [beyond], **options), make([1], presence_penalty=1.0)
    if not options.keys() & {"repetition_penalty", "presence_penalty"}:
        first.token_ids = [1, 1, 1]
    first.constraints = [([beyond], math.inf)]
    scores = torch.ones(3, 5)
    with pytest.raises(IndexError):
        constraints.apply(scores, [first, second, second], NONE_PENDING)
    assert scores.tolist() == [[1.0] * 5] * 3


def test_tokens_that_only_the_tokenizer_knows_change_nothing(wide_llm):
    """Alone, and in a batch, where the next request's row lies behind."""
    biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={20: 0.001})
    expected = token_ids(generate(wide_llm, ["a", "b"], biased))
    extra = [f"<extra{number}>" for number in (*range(0, 860, 200), 336, 283, 285)]
    for options in (dict(min_tokens=2), *(dict(bad_words=[word]) for word in extra)):
        edited = SamplingParams(temperature=0, max_tokens=3, **options)
        assert token_ids(generate(wide_llm, "a", edited)) == expected[:1]
        found = generate(wide_llm, ["a", "b", "b"], [edited, biased, edited])
        assert token_ids(found) == [*expected, expected[1]]
    assert wide_llm.inputs.eos_tokens.keys() == {0, 2}
    with pytest.raises(ValueError, match=r"prompts\[0\]: token id 1203 is out of vocabulary"):
        wide_llm.generate("<extra336>")


# ----------------------------------------------------------------------------------- processors


def run(llm, prompts: list, params: list[SamplingParams]) -> list:
    """Adds requests by hand and runs them to their end."""
    requests = llm.add(prompts, params)
    while llm.engine.has_unfinished():
        llm.step()
    check_idle(llm)
    return requests


def fail_with(error: BaseException):
    def failing(input_ids, scores):
        if input_ids.shape[1] > 5:
            raise error
        return scores
    return failing


@pytest.fixture(scope="module")
def tiny_llm(make_llm):
    with make_llm(num_kv_blocks=128, max_num_seqs=8) as llm:
        yield llm


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
    outputs = [request.output() for request in run(tiny_llm, prompts, params)]
    for number in (0, 2, 4):
        assert [completion.token_ids for completion in outputs[number].outputs] == [
            completion.token_ids for completion in expected[number]]
    request_id = outputs[1].request_id
    for found, wanted in zip(outputs[1].outputs, expected[1]):
        assert found.finish_reason == "error" and found.token_ids == wanted.token_ids[:2]
        assert found.stop_reason.startswith(f"request {request_id}: its logits processor {failing}")
        assert str(error) in found.stop_reason and type(error).__name__ in found.stop_reason + str(
            error and repr(error))
    assert "KeyError('other')" in repr(outputs[3].outputs[0].stop_reason) or (
        "other" in outputs[3].outputs[0].stop_reason)


def test_the_error_of_a_processor_has_its_cause(tiny_llm):
    use_policies(tiny_llm)
    for error in (ZeroDivisionError("x"), AssertionError()):
        params = SamplingParams(logits_processors=[lambda _, scores: scores, fail_with(error)])
        (request,) = run(tiny_llm, random_prompts([3]), params)
        assert isinstance(request.seq.error, ValueError)
        assert request.seq.error.__cause__ is error
        assert str(request.seq.error) == request.seq.stop_reason
        assert request.seq.stop_reason.endswith(str(error) or repr(error))


@pytest.mark.parametrize("result", [
    torch.zeros(320), torch.zeros(1, 319), torch.zeros(2, 320), torch.tensor(0.0),
    torch.zeros(1, 320, device="meta"), torch.zeros(1, 320).to_sparse(),
    torch.zeros(1, 320, dtype=torch.int64), None, [[0.0] * 320]])
def test_a_result_of_another_shape_or_kind_ends_its_own_request(tiny_llm, result):
    use_policies(tiny_llm)
    prompts = random_prompts([3, 4])
    expected = token_ids(generate(tiny_llm, prompts))
    for processors in ([lambda *_: result], [lambda *_: result, lambda _, scores: scores]):
        params = [GREEDY, SamplingParams(logits_processors=processors)]
        good, bad = run(tiny_llm, prompts, params)
        assert good.output().outputs[0].token_ids == expected[0]
        assert bad.seq.finish_reason == "error" and not bad.output().outputs[0].token_ids
        assert isinstance(bad.seq.error.__cause__, TypeError)
        assert "and not floats of shape (1, 320)" in bad.seq.stop_reason


def test_a_processor_that_leaves_no_token_is_no_error_of_its_own(tiny_llm):
    use_policies(tiny_llm)
    nothing = SamplingParams(logits_processors=[lambda _, scores: scores - math.inf])
    (request,) = run(tiny_llm, random_prompts([3]), [nothing])
    assert request.seq.finish_reason == "error" and request.seq.error is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_breaks_the_step(tiny_llm, error):
    prompts = random_prompts([3, 4])
    expected = token_ids(generate(tiny_llm, prompts))
    params = [GREEDY, SamplingParams(logits_processors=[fail_with(error())])]
    requests = tiny_llm.add(prompts, params)
    with pytest.raises(error):
        while tiny_llm.engine.has_unfinished():
            tiny_llm.step()
    assert token_ids(generate(tiny_llm, prompts)) == expected
    check_idle(tiny_llm)
    assert {request.seq.finish_reason for request in requests} == {"abort"}
