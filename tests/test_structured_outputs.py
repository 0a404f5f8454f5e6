"""Structured outputs: texts that follow a grammar, whatever else the engine does meanwhile."""

import json
import re

import pytest
from conftest import check_idle

from nanoengine import LLM, SamplingParams

MONTH = "20[0-9][0-9]-(0[1-9]|1[0-2])"
CHOICES = ["cat", 'a "dog"', "füchse\n", "🦊", "back\\slash"]
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["age", "kind"],
          "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99},
                         "kind": {"enum": ["cat", "dog"]}}}


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", attention_backend="gather", num_kv_blocks=24,
             block_size=16) as llm:
        yield llm
        check_idle(llm)


def texts(llm, prompts, **options) -> list[str]:
    params = SamplingParams(**{"max_tokens": 60} | options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    completions = [completion for output in outputs for completion in output.outputs]
    assert all(completion.finish_reason == "stop" for completion in completions)
    return [completion.text for completion in completions]


@pytest.mark.parametrize("wanted, fits", [
    ({"regex": MONTH}, re.compile(MONTH).fullmatch),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"json": SCHEMA}, lambda text: json.loads(text).keys() == {"age", "kind"}),
    ({"json": json.dumps(SCHEMA), "regex": None}, lambda text: 0 <= json.loads(text)["age"] <= 99),
    ({"regex": MONTH, "json_object": False}, re.compile(MONTH).fullmatch),
    ({"grammar": 'root ::= ("ab")+ "c"'}, re.compile("(ab)+c").fullmatch)])
def test_every_text_fits(llm, wanted, fits):
    prompts = ["Once upon a time", "12 + 34 =", "sort d b e a ="] * 3
    found = texts(llm, prompts, structured_outputs=wanted, n=3)
    assert len(found) == 27 and all(map(fits, found)) and len({*found}) > 2


def test_any_object_of_json(llm):
    params = SamplingParams(n=6, max_tokens=100, structured_outputs={"json_object": True})
    completions = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert all(completion.text.startswith("{") for completion in completions)
    whole = [each.text for each in completions if each.finish_reason == "stop"]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)


def test_the_tokens_are_those_of_a_request_alone(llm):
    """With forks, beside others, and with preemptions."""
    wanted = [{"regex": "[a-f ]{30,40}"}, {"json": SCHEMA}, {"choice": CHOICES}, None] * 5
    params = [SamplingParams(structured_outputs=each, n=2, seed=seed, max_tokens=45)
              for seed, each in enumerate(wanted)]
    together = llm.generate(["Once upon a time"] * 20, params, use_tqdm=False)
    assert llm.metrics()["num_preemptions"] > 0
    for output, each in zip(together, params):
        alone, = llm.generate("Once upon a time", each, use_tqdm=False)
        assert [completion.token_ids for completion in alone.outputs] == [
            completion.token_ids for completion in output.outputs]


def test_no_text_ends_before_it_is_complete(llm):
    """The bundled model has several tokens that end a text: none is permitted within a string."""
    params = SamplingParams(structured_outputs={"json": {"type": "string"}}, max_tokens=30)
    for output in llm.generate(["Once upon a time"] * 40, params, use_tqdm=False):
        completion, = output.outputs
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), str)
        else:
            assert completion.text.startswith('"')


def test_together_with_other_constraints(llm):
    calls = []

    def note(input_ids, scores):
        calls.append(int(scores.isfinite().sum()))
        return scores

    found = texts(llm, "Once", structured_outputs={"choice": ["a", "b"]}, logits_processors=[note],
                  logit_bias={llm.get_tokenizer().encode("b")[0]: 100})
    assert found == ["b"]
    assert calls[0] == 2, "a user's own processor runs after the grammar"


@pytest.mark.parametrize("wanted", [
    {}, {"regex": "(("}, {"rgex": "a"}, {"json": "{"}, {"json": 5}, {"choice": []}, {"choice": 5},
    {"choice": [5, None]}, {"choice": "yes"}, {"regex": "a", "json": {}}, {"regex": None},
    {"grammar": "root ="}])
def test_what_is_not_a_grammar_is_refused(llm, wanted):
    good = SamplingParams(max_tokens=3)
    with pytest.raises(ValueError, match=r"structured_outputs=\{.* it must be one of \{'json'"):
        llm.generate(["Once", "Once"], [good, SamplingParams(structured_outputs=wanted)])
    check_idle(llm)


def test_a_grammar_needs_a_tokenizer(tiny):
    with LLM(tiny, num_kv_blocks=8) as llm:
        with pytest.raises(ValueError, match="tokenizer=None .* grammars"):
            llm.generate([5, 6], SamplingParams(structured_outputs={"regex": "a"}))


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="structured_outputs=5 is not accepted"):
        SamplingParams(structured_outputs=5)
