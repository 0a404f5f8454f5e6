"""Structured outputs: texts that follow a grammar, whatever else the engine does meanwhile."""

import itertools
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
    {"grammar": "root ="}, {"choice": 'root ::= "a"'}, {"structural_tag": "{}"},
    {"json_schema": {"type": "integer", "multipleOf": 3}}])
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


# --------------------------------------------------------------- what would not be enforced


TEXT = {"type": "string"}
# xgrammar enforces the first of these, and then none of the others, and no limit
DECIDING = {"$ref": "#/$defs/text", "const": "bb", "enum": ["bb"], "anyOf": [TEXT],
            "oneOf": [TEXT], "allOf": [TEXT]}
LIMITS = {"maxLength": 1, "pattern": "^a$", "format": "date", "minimum": 0, "maxItems": 0,
          "properties": {"a": TEXT}, "additionalProperties": False}
IGNORED = [
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": TEXT, "contains": {"const": "a"}}, "contains"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "multipleOf"),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, "minLength"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength"),
    ({"type": "string", "format": "email", "maxLength": 9}, "maxLength"),
    ({"type": "string", "format": "date", "pattern": "^2"}, "pattern"),
    ({"not": TEXT}, "not"), ({"type": "integer", "if": {"minimum": 5}, "then": {}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": TEXT}}, "dependentSchemas"),
    ({"type": "object", "properties": {"a": TEXT}, "propertyNames": {"enum": ["b"]}},
     "propertyNames"),
    ({"type": "object", "patternProperties": {"^a": TEXT}, "propertyNames": {"enum": ["b"]}},
     "propertyNames"),
    ({"type": "object", "patternProperties": {"^a": TEXT}, "properties": {"a": {"const": 1}}},
     "patternProperties"),
    ({"type": "object", "patternProperties": {"^a": TEXT, "b$": {"const": 1}}},
     "patternProperties"),
    ({"allOf": [TEXT, {"type": "string", "minLength": 2}]}, "allOf"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 0}, "maxLength"),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, "required"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": False},
     "additionalProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^a", "minLength": 2}}, "minLength"),
    ({"const": None, "anyOf": [TEXT]}, "anyOf"),
    *(({limit: limits}, limit) for limit, limits in (LIMITS | {"required": ["a"]}).items()
      if limit not in ("properties", "additionalProperties")),
    *(({name: DECIDING[name], "type": "string"}, "type")
      for name in ("$ref", "anyOf", "oneOf", "allOf")),
    *(({name: value, limit: limits}, limit) for name, value in DECIDING.items()
      for limit, limits in LIMITS.items()),
    *(({name: DECIDING[name], other: DECIDING[other]}, other)
      for name, other in itertools.combinations(DECIDING, 2))]


def nested(schema: dict) -> list:
    """The schema in each place where a schema can be."""
    return [
        schema, {"type": "object", "properties": {"a": schema}}, {"type": "array", "items": schema},
        {"type": "array", "prefixItems": [TEXT, schema]}, {"anyOf": [TEXT, schema]},
        {"oneOf": [TEXT, schema]}, {"allOf": [schema]},
        {"type": "object", "additionalProperties": schema},
        {"type": "object", "patternProperties": {"^a": schema}},
        {"$ref": "#/$defs/a", "$defs": {"a": schema}},
        {"$ref": "#/definitions/a", "definitions": {"a": schema}},
        {"anyOf": [{"type": "object", "properties": {"not": {"items": schema, "type": "array"}}}]}]


@pytest.mark.parametrize("schema, name", IGNORED)
def test_a_schema_that_would_not_be_enforced_is_refused(llm, schema, name):
    good = SamplingParams(max_tokens=3)
    for each in nested(schema):
        for wanted in ({"json": each}, {"json": json.dumps(each)}):
            params = SamplingParams(structured_outputs=wanted)
            with pytest.raises(ValueError, match=rf"structured_outputs=.*not enforce \['{name}'\]"):
                llm.generate(["Once", "Once"], [good, params])
    check_idle(llm)


def test_names_and_values_are_no_keywords(llm):
    names = ["uniqueItems", "not", "if", "multipleOf", "allOf", "pattern", "minLength"]
    value = dict.fromkeys(names, [1, 2])
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "boolean"}),
              "required": names[:2], "default": value, "examples": [value], "title": "not",
              "$defs": {"if": {"enum": [value], "default": value}, "not": {"const": value}}}
    texts(llm, "Once", structured_outputs={"json": schema}, max_tokens=400)
    without_effect = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": False,
                      "maxItems": 2, "not": False}
    found = texts(llm, "Once", structured_outputs={"json": without_effect}, n=3)
    assert all(len(json.loads(text)) <= 2 for text in found)
    named = {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "minProperties": 1}
    params = SamplingParams(structured_outputs={"json": named}, n=3, max_tokens=12)
    for completion in llm.generate("Once", params, use_tqdm=False)[0].outputs:
        assert re.match('{"[ab]": ', completion.text)
    empty = {"anyOf": [{"type": "boolean"}], "required": [], "properties": {}, "items": {}}
    assert {*texts(llm, "Once", structured_outputs={"json": empty}, n=3)} <= {"true", "false"}


# -------------------------------------------------------------------------------- min_tokens


def test_a_complete_text_ends_before_min_tokens(llm):
    """The grammar permits only tokens that end the text. Others are awaited as far as it can go."""
    wanted = [{"regex": "[0-9]{2}"}, {"regex": "[0-9]+"}, {"json": {"type": "boolean"}}, None] * 2
    params = [SamplingParams(structured_outputs=each, min_tokens=8, max_tokens=40, n=2, seed=seed)
              for seed, each in enumerate(wanted)]
    outputs = llm.generate(["Once"] * len(params), params, use_tqdm=False)
    ends = llm.inputs.eos_tokens
    for output, each in zip(outputs, wanted):
        for completion in output.outputs:
            if each is None:
                assert len(completion.token_ids) >= 8
            elif each == {"regex": "[0-9]+"}:
                assert completion.text.isdigit() and len(completion.token_ids) >= 8
            else:
                assert re.fullmatch("true|false|[0-9]{2}", completion.text)
                assert completion.finish_reason == "stop" and completion.token_ids[-1] in ends
                assert len(completion.token_ids) < 8


def test_an_incomplete_text_does_not_end(llm):
    """No token is permitted: neither by `allowed_token_ids`, nor EOS by the grammar."""
    a, b = (llm.get_tokenizer().encode(letter)[0] for letter in "ab")
    for allowed in ([a], [a, *llm.inputs.eos_tokens]):
        for min_tokens in (0, 8):
            params = SamplingParams(structured_outputs={"regex": "ab"}, min_tokens=min_tokens,
                                    allowed_token_ids=allowed)
            completion = llm.generate("Once", params, use_tqdm=False)[0].outputs[0]
            assert (completion.text, completion.finish_reason) == ("a", "error")
            assert "leave no token" in completion.stop_reason
    # a text that is complete, where EOS is allowed, and where it is not
    for allowed, reason in (([a, b, *llm.inputs.eos_tokens], "stop"), ([a, b], "error")):
        params = SamplingParams(structured_outputs={"regex": "ab"}, min_tokens=8,
                                allowed_token_ids=allowed)
        completion = llm.generate("Once", params, use_tqdm=False)[0].outputs[0]
        assert (completion.text, completion.finish_reason) == ("ab", reason)


def test_an_own_processor_sees_no_end_before_min_tokens(llm):
    seen = []

    def note(input_ids, scores):
        seen.append(bool(scores[0, list(llm.inputs.eos_tokens)].isfinite().any()))
        return scores

    params = SamplingParams(structured_outputs={"regex": "[0-9]{1,3}"}, min_tokens=2, max_tokens=9,
                            logits_processors=[note], stop_token_ids=[5], bad_words=["7"])
    completion = llm.generate("Once", params, use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == "stop" and "7" not in completion.text
    assert seen[:3] == [False, False, True]
