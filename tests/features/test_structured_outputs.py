"""Structured outputs: texts that follow a grammar, whatever else the engine does meanwhile."""

import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable
from datetime import date
from enum import Enum
from typing import Annotated, Literal

import pytest
from conftest import check_idle, check_refused, complete, slow
from pydantic import BaseModel, Field
from random_schemas import ByteGrammar, random_schema, verdict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams
from nanoengine_extras.sampling.structured_outputs.grammar import (
    Grammar, make_matcher, make_vocabulary, permitted, to_lark)

MONTH = "20[0-9][0-9]-(0[1-9]|1[0-2])"
MANY = [f"number {number} of many" for number in range(2000)]
CHOICES = ["cat", 'a "dog"', "füchse\n", "🦊", "back\\slash"]
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["age", "kind"],
          "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99},
                         "kind": {"enum": ["cat", "dog"]}}}


OPTIONS = dict(dtype="float32", attention_backend="gather", num_kv_blocks=24, block_size=16)


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, **OPTIONS) as llm:
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
    ({"choice": CHOICES}, CHOICES.__contains__), ({"choice": MANY}, MANY.__contains__),
    ({"json": SCHEMA}, lambda text: json.loads(text).keys() == {"age", "kind"}),
    ({"json": json.dumps(SCHEMA), "regex": None}, lambda text: 0 <= json.loads(text)["age"] <= 99),
    ({"regex": MONTH, "json_object": False}, re.compile(MONTH).fullmatch),
    ({"grammar": 'start: "ab"+ "c"'}, re.compile("(ab)+c").fullmatch)])
def test_every_text_fits(llm, wanted, fits):
    prompts = ["Once upon a time", "12 + 34 =", "sort d b e a ="] * 3
    found = texts(llm, prompts, structured_outputs=wanted, n=3)
    assert len(found) == 27 and all(map(fits, found)) and len({*found}) > 2


def test_the_tokens_are_those_of_a_request_alone(llm, bundled):
    """With forks, beside others, with preemptions, and in steps that run ahead."""
    wanted = [{"regex": "[a-f ]{30,40}"}, {"json": SCHEMA}, {"choice": CHOICES}, None] * 5
    params = [SamplingParams(structured_outputs=each, n=2, seed=seed, max_tokens=45)
              for seed, each in enumerate(wanted)]
    alone = [llm.generate("Once upon a time", each, use_tqdm=False)[0].outputs for each in params]
    with LLM(bundled, **OPTIONS, run_ahead=True) as ahead:
        for each in (llm, ahead):
            outputs = each.generate(["Once upon a time"] * 20, params, use_tqdm=False)
            assert each.metrics()["num_preemptions"] > 0
            assert [output.outputs for output in outputs] == alone


def test_together_with_a_bias(llm):
    (b,) = llm.get_tokenizer().encode("b")
    found = texts(llm, "Once", structured_outputs={"choice": ["a", "b"]}, logit_bias={b: 100})
    assert found == ["b"]


def test_a_grammar_needs_a_tokenizer(tiny_llm):
    params = SamplingParams(structured_outputs={"regex": "a"})
    check_refused("there is no tokenizer", tiny_llm.generate, [5, 6], params)


# ----------------------------------------------------------------------- schemas: refused, or right


TEXT = {"type": "string"}
DECIDING = {"$ref": "#/$defs/text", "const": "bb", "enum": ["bb"], "anyOf": [TEXT],
            "oneOf": [TEXT], "allOf": [TEXT]}
LIMITS = {"maxLength": 1, "pattern": "^a$", "format": "date", "minimum": 0, "maxItems": 0,
          "properties": {"a": TEXT}, "additionalProperties": False, "required": ["a"]}
TOGETHER = [
    {"type": "array", "items": TEXT, "uniqueItems": True},
    {"type": "array", "items": TEXT, "contains": {"const": "a"}},
    {"type": "number", "multipleOf": 0.5}, {"type": "integer", "multipleOf": 3, "minimum": 0},
    {"type": "string", "pattern": "^a+$", "minLength": 2},
    {"type": "string", "pattern": "^a+$", "maxLength": 2},
    {"type": "string", "format": "email", "maxLength": 9},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"not": TEXT}, {"type": "integer", "if": {"minimum": 5}, "then": {}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": TEXT}},
    {"type": "object", "properties": {"a": TEXT}, "propertyNames": {"enum": ["b"]}},
    {"type": "object", "patternProperties": {"^a": TEXT}, "propertyNames": {"enum": ["b"]}},
    {"type": "object", "patternProperties": {"^a": TEXT}, "properties": {"a": {"const": 1}}},
    {"type": "object", "patternProperties": {"^a": TEXT, "b$": {"const": 1}}},
    {"allOf": [TEXT, {"type": "string", "minLength": 2}]},
    {"type": "string", "pattern": "^a+$", "maxLength": 0},
    {"type": "object", "properties": {"a": TEXT}, "required": ["b"]},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^a", "minLength": 2}},
    *({"type": "object", "propertyNames": {"enum": ["a", "b b"]}, **more} for more in (
        {}, {"additionalProperties": TEXT}, {"additionalProperties": False}, {"required": ["a"]},
        {"minProperties": 1}, {"maxProperties": 1}, {"minProperties": 2}, {"required": ["c"]})),
    {"type": "object", "propertyNames": {"enum": ["a", "bb"], "minLength": 2}},
    {"type": "object", "propertyNames": {"enum": ["a", 5]}},
    {"type": "object", "propertyNames": {"enum": ["a"], "type": "integer"}},
    {"type": "object", "propertyNames": {"const": "a.*", "type": "string"}},
    {"const": None, "anyOf": [TEXT]}, {"type": "integer", "enum": [1, "a", 2.5]},
    {"type": "integer", "const": "x"}, {"minimum": 1e-8}, {"unevaluatedProperties": False},
    *({limit: value} for limit, value in LIMITS.items()),
    *({name: value, "type": "string"} for name, value in DECIDING.items()),
    *({name: value, limit: limits} for name, value in DECIDING.items()
      for limit, limits in LIMITS.items()),
    *({name: DECIDING[name], other: DECIDING[other]}
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


@pytest.mark.parametrize("places", [
    slice(None, None, 5), slow(slice(None))], ids=["some", "all"])
@pytest.mark.parametrize("schema", TOGETHER, ids=json.dumps)
def test_keywords_together_are_enforced_or_refused(schema, places):
    rng = random.Random(1)
    found = [verdict(each | {"$defs": each.get("$defs", {}) | {"text": TEXT}}, rng)
             for each in nested(schema)[places]]
    assert {*found} <= {"refused", "right"}


def test_random_schemas():
    """Most of them are accepted, and no text breaks its schema."""
    found = [verdict(random_schema(random.Random(seed)), random.Random(seed))
             for seed in range(150)]
    assert {*found} <= {"refused", "right"} and found.count("right") > 70


QUOTES = ['^[^"]$', r"^[^\\]$", '^[^a"]$', '^"[a-z]"$', r"^\\[a-z]$", r"^a\na$", r"^[^!-~]$",
          r"^\W$", r"^[^\w]$", r"^[^\t\n]$", r"^\S$", r"^[^\\/:*?\"<>|]{1,2}$"]


@pytest.mark.parametrize("pattern", QUOTES)
def test_quotes_and_backslashes_in_a_pattern(pattern):
    """llguidance takes [^"] for a class with a quote."""
    grammar = ByteGrammar("json", {"type": "string", "pattern": pattern})
    letters = [chr(code) for code in range(128)] + ["é", "🦊"]
    texts = {"".join(each) for count in (1, 2, 3) for each in itertools.product(
        letters if count == 1 else ['"', "\\", "a", "\n"], repeat=count)}
    accepted = {text for text in texts if grammar.accepts(json.dumps(text, ensure_ascii=False))}
    fits = re.compile(pattern.replace("$", r"\Z")).match
    written = "\b\t\n\f\r"
    plain = {text for text in texts if all(
        letter in written or " " <= letter != "\x7f" for letter in text)}
    assert accepted == {text for text in plain if fits(text)} and accepted


UNENFORCEABLE = [
    {"const": "a\x01b"}, {"enum": ["a", ["\x7f"]]}, {"const": {"\x1f": 1}},
    {"pattern": r"^a\x01b$"}, {"pattern": "^a\x01b$"}, {"pattern": r"[\x00-\x1f]"},
    {"pattern": r"\u0001"},
    {"pattern": r"\cA"}, {"pattern": r"\x{1}"}, {"patternProperties": {r"\v": {}}},
    {"properties": {"\x01": {}}}, {"required": ["\x01"]}, {"pattern": "[a-z&&[^b]]"},
    {"pattern": "[[a]"}, {"pattern": "a[b"}, {"patternProperties": {"[a--b]": {}}},
    {"additionalProperties": {"const": 1}, "minProperties": 2},
    {"patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 3},
    {"const": 2**53 + 1}, {"type": "integer", "minimum": 10**30 + 1},
    {"items": {"enum": [2**60 + 1]}},
    {"$ref": "#"}, {"$ref": "https://example.com/a.json"}, {"format": "regex"}, True, [1], "true",
    {"pattern": r"\v"}, {"pattern": r"\x1f"}, {"pattern": r"\p{L}"}, {"pattern": "(?=a)."},
    {"uniqueItems": True}, {"not": {}}, {"if": {}, "then": False},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": TEXT}}],
     "$defs": {"a": {"properties": {"a": TEXT}, "required": ["a"]}}}]


# elsewhere, "#" and "$defs" are others
@pytest.mark.parametrize("schema", [
    schema for schema in UNENFORCEABLE if isinstance(schema, dict) and "$ref" not in str(schema)])
def test_what_cannot_be_enforced_is_refused_in_each_place(schema):
    for each in nested(schema):
        with pytest.raises(ValueError):
            ByteGrammar("json", each)


# they add properties to each other
ADDING = [
    {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
    {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    {"$ref": "#/$defs/A", "properties": {"b": {"const": 1}}, "required": ["b"]},
    {"allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": {"const": 1}}, "required": ["b"]},
    {"properties": {"a": {"const": 1}}, "required": ["a"], "anyOf": [
        {"properties": {"b": {"const": 1}}, "required": ["b"]}, {"$ref": "#/$defs/C"}]}]
PARTS = {name.upper(): {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}
         for name in "abc"}
KEYWORDS = ["uniqueItems", "not", "if", "multipleOf", "allOf", "pattern", "minLength"]
VALUE = dict.fromkeys(KEYWORDS, [1, 2])


class Color(Enum):
    RED = "red"
    SKY = "sky (light)"


class Colors(BaseModel):
    counts: dict[Color, int]
    names: dict[Literal["a.b", "ü\""], Color] = {}


class Cat(BaseModel):
    kind: Literal["cat"]
    name: Annotated[str, Field(max_length=5, pattern="^[a-z]+$")]
    legs: Annotated[int, Field(multiple_of=2, ge=0, le=8)]
    born: date | None


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Share(BaseModel):
    percent: Annotated[float, Field(ge=0, le=100, multiple_of=0.01)]


NAMED = {"type": "object", "properties": {"a": {"type": "object"}}}
ONE = {"type": "object", "properties": {"a": {"const": 1}}}
LETTERS = {"type": "object", "patternProperties": {"^[a-z]$": {"type": "integer"}}}
DATE_TIME = "2024-12-31T23:59:59"
UUID = "f47ac10b-58cc-{}372-a567-0e02b2c3d479"
# schemas, texts that they permit, and texts that they do not
PERMITTED = [
    # no other spelling of a name
    ({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
     ['{"a": 1}', '{"b": 2}'], ['{"a": 2}', r'{"\u0061": 2}']),
    # what other libraries get wrong
    ({"type": "string", "maxLength": 5, "minLength": 2}, [r'"a\nb"'],
     ['"a\nb"', '"a\x01b"', '"a"', '"abcdef"']),
    ({"type": "number", "minimum": 1e-8}, ["1", "0.5"], ["0", "-1"]),
    ({"type": "integer", "enum": [1, "a", 2.5]}, ["1"], ['"a"', "2.5"]),
    ({"type": "string", "pattern": '^"a\\\\"$'}, [r'"\"a\\\""'], ['""a\\""']),
    # it says nothing
    ({"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": False},
     ["[1, 1]"], ["[1]"]),
    # objects are closed where they name their properties, or patterns of these
    (NAMED, ['{"a": {"b": 1}}'], ['{"b": 1}']),
    (NAMED | {"additionalProperties": True}, ['{"a": {}}', '{"a": {}, "b": 1}'], []),
    ({"allOf": [NAMED, {"type": "object", "properties": {"b": {"const": 1}}}]},
     ['{"a": {}, "b": 1}'], []),
    (LETTERS, ['{"a": 1, "b": 2}'], ['{"a": "b"}', '{"A": 1}']),
    (LETTERS | {"additionalProperties": True}, ['{"a": 1, "b": 2}', '{"A": 1}'], ['{"a": "b"}']),
    *((schema | {"$defs": PARTS}, ['{"a": 1, "b": 1}'],
       ['{"a": 1}', '{"a": 1, "b": 2}', '{"a": 2, "b": 1}']) for schema in ADDING),
    # one schema of an object closes it
    *((schema | {"$defs": {"A": ONE}}, ['{"a": 1}'], ['{"a": 1, "b": 1}']) for schema in (
        {"$ref": "#/$defs/A"}, {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        ONE | {"anyOf": [{"required": ["a"]}, {"description": "a"}]})),
    # properties with the names of keywords
    ({"type": "object", "properties": {"properties": TEXT, "default": NAMED, "pattern": TEXT}},
     ['{"properties": "a"}', '{"pattern": "[["}'],
     ['{"default": {"b": 1}}', '{"additionalProperties": 1}']),
    ({"type": "object", "properties": {"propertyNames": {"enum": ["b"]}}},
     ['{"propertyNames": "b"}'], ['{"b": 1}']),
    ({"type": "object", "properties": dict.fromkeys(KEYWORDS, {"type": "boolean"}),
      "required": KEYWORDS[:2], "default": VALUE, "examples": [VALUE], "title": "not",
      "$defs": {"if": {"enum": [VALUE], "default": VALUE}, "not": {"const": VALUE}}},
     ['{"uniqueItems": true, "not": false}'], ['{"uniqueItems": true}']),
    # formats of pydantic and OpenAPI
    *(({"type": "string", "format": name}, ['"a/b"'], ["5"]) for name in (
        "binary", "password", "path")),
    ({"type": "string", "format": "uuid4"}, [f'"{UUID.format(4)}"'],
     [f'"{UUID.format(1)}"', '"a"']),
    ({"type": "string", "format": "uuid"}, [f'"{UUID.format(4)}"', f'"{UUID.format(1)}"'],
     ['"a"']),
    # days and hours that exist, written as RFC 3339 recommends
    ({"type": "string", "format": "date"}, ['"2024-02-28"', '"2024-12-31"'],
     ['"2023-02-29"', '"0000-01-01"']),
    ({"format": "date-time"}, [f'"{DATE_TIME}Z"', f'"{DATE_TIME}.5+01:00"'],
     [f'"{DATE_TIME[:-2]}60Z"', f'"{DATE_TIME}z"', f'"{DATE_TIME}Z"'.replace("T", "t")]),
    ({"format": "time"}, ['"12:30:00Z"', '"12:30:00.25-23:59"'],
     ['"12:30:60Z"', '"12:30:00z"', '"12:30:00.25z"', '"12:30:00"']),
    ({"type": "string", "format": "hostname"}, ['"a.b"', f'"{"a" * 60 + "." + "b" * 60}"'],
     ['"a."', f'"{"a." * 127}a"', f'"{"a" * 64}"']),
    # a least number of properties: more alternatives at one place than llguidance's own limit
    ({"type": "object", "minProperties": 2, "required": ["c"],
      "properties": {name: {"const": 1} for name in "abc"}},
     ['{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'], ['{"c": 1}', '{"a": 1, "b": 1}']),
    ({"minProperties": 2, "properties": {f"p{number}": {"const": 1} for number in range(20)}},
     ['{"p3": 1, "p19": 1}'], ['{"p19": 1}']),
    # pydantic's dicts with keys of an enum, in `$defs` or in place: each name once
    (Colors, ['{"counts": {"red": 1, "sky (light)": 2}}', '{"counts": {}}',
              '{"counts": {}, "names": {"ü\\"": "red"}}',
              '{"counts": {}, "names": {"a.b": "red"}}'],
     ['{"counts": {"sky": 1}}', '{"counts": {"red": "a"}}', '{"counts": {"red": 1, "red": 2}}',
      '{"counts": {}, "names": {"aXb": "red"}}']),
    (Owner, ['{"pet": {"kind": "dog", "barks": true}}', '{"pet": {"kind": "cat", "name": "tom", '
             '"legs": 4, "born": null}}'],
     ['{"pet": {"kind": "dog", "name": "tom"}}', '{"pet": {"kind": "cat", "barks": true}}',
      '{"pet": {"kind": "cat", "name": "tom", "legs": 3, "born": null}}']),
    # a float can have digits without end, unless it is a multiple of something
    (Share, ['{"percent": 12.34}', '{"percent": 5}'], ['{"percent": 0.123}', '{"percent": 101}']),
    # a pattern that lists names has each once, and limits properties of these names
    ({"patternProperties": {"^(a|b)$": {"const": 1}}}, ['{"a": 1, "b": 1}'],
     ['{"a": 1, "a": 1}', '{"ab": 1}']),
    ({"properties": {"a": {"enum": [1, 2]}, "b": {"const": 5}}, "patternProperties": {
        "^(?:a|c)$": {"enum": [2, 3]}}},
     ['{"a": 2, "b": 5, "c": 3}'], ['{"a": 1}', '{"a": 3}', '{"c": 1}', '{"b": 5, "b": 5}']),
    ({"properties": {"ab": {"enum": [1, 2]}}, "patternProperties": {"^a": {"enum": [2, 3]}}},
     ['{"ab": 2, "a": 3}'], ['{"ab": 1}', '{"ab": 3}', '{"b": 2}']),
    ({"allOf": [{"properties": {"a": {"enum": [1, 2]}}}, {
        "patternProperties": {"^a$": {"enum": [2, 3]}}}]}, ['{"a": 2}'], ['{"a": 1}', '{"a": 3}']),
    # only Python finds these names, only JavaScript others: they fit no pattern
    ({"patternProperties": {r"^\w$": {"const": 1}}, "additionalProperties": {"const": 2}},
     ['{"a": 1, ".": 2}'], ['{"é": 1}', '{"é": 2}', '{"a": 2}', '{"a\\n": 2}']),
    ({"patternProperties": {"^a+$": {"const": 1}}, "additionalProperties": {"const": 2}},
     ['{"aa": 1, "é": 2}'], ['{"a\\n": 1}', '{"a\\n": 2}']),
    ({"properties": {"é": {"const": 1}, "b": {"const": 2}}, "patternProperties": {
        r"^\w+$": {"enum": [2, 3]}}}, ['{"b": 2, "a": 3}'], ['{"é": 1}', '{"é": 2}', '{"b": 3}'])]


@pytest.mark.parametrize("schema, yes, no", PERMITTED, ids=str)
def test_texts_of_a_schema(schema, yes, no):
    grammar = ByteGrammar("json", schema)
    assert [text for text in yes if not grammar.accepts(text)] == []
    assert [text for text in no if grammar.accepts(text)] == []


# ------------------------------------------------------------------------- regexes and grammars


@pytest.mark.parametrize("regex", [
    r"\w{2}", r"\W", r"\d", r"\S\s", r"[\w-]", r"[^\w]", r"[^\d]", "^ab|^cd", "[^]a]{2}",
    "a.b", "(?i)ab", "(?P<name>a)+", "(?i-x:a)", r"a\++", "[+*]+",
    # a repetition after a repetition
    "[ab]+[cd]+", r"a*\d+", r"a?[bc]+", r"\d{1,2}[ab]+",
    r"[^\s\d]", r"[^a\S]", r"\.\t[\]\-]", "/", "",
    # letters by their numbers, as in JavaScript, and letters that mean something for Rust alone
    r"\x41\x2a", r"[\x5d\x2d-\x3a]", r"\x5cd", r"\\x41", r"[\u4e00-\u9fff]+", r"\u005b",
    r"\<\w+\>", r"\_[\_]", r"[\<-\>]", "[]-a]", "[^]-a]", "[:alpha:]", "[^:alpha:]",
    "[a[]", r"[^[\]{}]+", r'{"a": {"b": \d+}}', "a{", "a{b}+", "a}+", "a{}", r"\{[^{}]*\}",
    "x{1}{a",
    r"\\", r"a\\", r"[\\]", r"(\\)+", r"\\\\", r"[a\\]{2}", r"a{1}?b", "(?:ab)+?"])
def test_a_regex_means_what_python_reads(regex):
    grammar = ByteGrammar("regex", regex)
    rng = random.Random(3)
    found = {grammar.walk(rng, 9) for _ in range(150)} - {None}
    assert found and all(re.fullmatch(regex, text) for text in found)
    letters = [chr(code) for code in range(32, 127)]
    pairs = [first + second for first in "ab1{]:" for second in letters]
    for text in ["", *letters, *pairs]:
        assert grammar.accepts(text) == bool(re.fullmatch(regex, text))


@pytest.mark.parametrize("regex", [
    "(?=a)a", "(?!b)a", "(?<=b)a", r"\Aa", r"\x4", r"\ud800", r"\p{L}",
    r"(a)\1", r"\bfoo", r"a\Z", "a$b", "[a-z&&[^b]]", "[[:alpha:]]", "[a~~b]", "[[a]",
    "((", "a[b", "a++b", "a{2}+", "a{,3}", "a{,}", "(?x)a b", "(?ix:a)", "(?U)a*",
    # a backslash at the end, of a part, too
    "\\", "a\\", "a|\\", "(a\\", "(a)\\", "[a]\\", "[a\\", "[\\]", "a\\\\\\", "(\\)", "日\\",
    # what only Rust permits, or nobody
    "a**", "a+*", "a{2}{3}", "a??*", "^*", "$+", "a(?i)", "[1-\\d", "[z-a]", "*a", "a)", "a{2,1}",
    "(?P<1>a)", "(?P<a>b)(?P<a>c)", "(?", "[", "[^]", "[]"])
def test_other_regexes_are_refused(regex):
    for kind, value in (("regex", regex), ("json", {"pattern": regex}),
                        ("json", {"patternProperties": {regex: {}}})):
        with pytest.raises(ValueError):
            ByteGrammar(kind, value)


@pytest.mark.parametrize("regex", [
    "[^" * 5000, "[" * 10_000, "(" * 10_000, "(?" * 5000, "\\" * 9999, "a{" * 5000, "[a" * 5000,
    "[]" * 5000, "{" + "1" * 9999, "(?" + "a" * 9998, "(?i)[" + "!-\uffff" * 3000, "a+" * 5000,
    "[\\" * 5000, "(?P<" * 2500, "[a-" * 3333, "a{1," * 2500, "(a|" * 3333, "(?:" * 3333])
def test_the_time_grows_as_the_length_of_a_regex(regex):
    """The longest that is accepted takes a second at most. It is a regex, or a ValueError."""
    started = time.process_time()
    with contextlib.suppress(ValueError):
        to_lark("regex", regex)
    with contextlib.suppress(ValueError):
        to_lark("grammar", "\n" * 64_000 + regex)
    assert time.process_time() - started < 1


def tag(begin="<", schema=None, end=">", **options) -> dict:
    """A structural tag with one kind of tag, or with several: begin is then a list of texts."""
    content = {"type": "json_schema", "json_schema": {"type": "boolean"} | (schema or {})}
    tags = [{"type": "tag", "begin": each, "content": content, "end": end}
            for each in ([begin] if isinstance(begin, str) else begin)]
    return {"type": "structural_tag", "format": {
        "type": "tags_with_separator", "tags": tags, "separator": ", "} | options}


TAGS = [
    (tag(), ["", "<true>", "<true>, <false>"], ["<5>", "<true>,", "<true><true>", "true"]),
    (tag(at_least_one=True), ["<true>", "<true>, <false>"], [""]),
    (tag(stop_after_first=True), ["", "<true>"], ["<true>, <false>"]),
    (tag(at_least_one=True, stop_after_first=True), ["<true>"], ["", "<true>, <false>"]),
    (tag(separator="", at_least_one=True), ["<true>", "<true><false>"], ["<true>, <false>"]),
    (tag(["a", 'b"\n'], end=""), ["atrue", 'b"\nfalse, atrue'], ["a", "true", "b\ntrue"]),
    (tag(schema={"$ref": "#/$defs/A", "$defs": {"A": {"const": True}}}), ["<true>"], ["<false>"]),
    (json.dumps(tag()), ["<true>"], ["<5>"])]


@pytest.mark.parametrize("kind, value, yes, no", [
    ("json_object", True, ["{}", '{"a": [1, {}]}'], ["[]", "1", "{"]),
    # the names of groups are those of both languages
    *(("regex", regex, [text], ["b"]) for regex, text in (
        ("(?<name>a)+", "aa"), ("(?P<name>a)+", "aa"), (r"\(?<a>", "(<a>"), ("[(?<]a", "<a"))),
    ("grammar", 'start: "a" B\nB: /[0-9]+/', ["a1", "a12"], ["a", "ab"]),
    ("grammar", 'start: ("ha"){1,3} "!"', ["ha!", "hahaha!"], ["!", "hahahaha!"]),
    ("grammar", 'start: start "a" | "b"', ["b", "baa"], ["a", "ab"]),
    # EBNF; a text can begin like what follows it
    ("grammar", 'root ::= many-a "a" [^"\\]]? # root\nmany-a ::= "a"+ | "root"',
     ["aa", "aaab", "roota", "rootaa"], ["a", "root", 'aa"', "aa]", "aabb"]),
    ("grammar", 'root ::= "(" root ")" | [0-9]{2}', ["12", "((34))"], ["1", "(12", "()"]),
    ("grammar", 'root ::= Start\nStart ::= "(" Start ")" | "a"', ["a", "(a)"], ["(a", "b"]),
    ("grammar", 'root ::= (start)? (("a"){2} # c)\n [)(])+\nstart ::= ("b"*)?', ["aa)", "bbaa(aa)"],
     ["aa", "a)", "b", "bb)"]),
    ("grammar", 'start: pair ("," pair)*\npair: NAME "=" NAME\nNAME: /[a-z]+/',
     ["a=b", "a=b,c=dd"], ["a", "a=b,"]),
    *(("structural_tag", *row) for row in TAGS)])
def test_grammars(kind, value, yes, no):
    found = ByteGrammar(kind, value)
    assert all(map(found.accepts, yes)) and not any(map(found.accepts, no))


class Odd(BaseModel):
    call: Callable


LOOK_AROUND = "parse error: look-around, .* is not supported"
ANY = "it must be one of"
REFUSED = {
    ANY: [{}, {"regex": "(("}, {"json": "{"}, {"json": 5}, {"choice": []}, {"choice": 5},
         {"choice": [5, None]}, {"choice": "yes"}, {"regex": "a", "json": {}}, {"regex": None},
         {"choice": 'root ::= "a"'}, {"json_schema": {"type": "integer", "multipleOf": 3}},
         *({"json": schema} for schema in UNENFORCEABLE),
         # neither schemas nor classes of pydantic
         *({"json": kind} for kind in (
             int, object, Odd, Share(percent=1.0), BaseModel.model_json_schema)),
         *({"grammar": grammar} for grammar in (
             "root =", "start: b", "start: start", "start: (?=a)", 'start: "a', "", 5,
             'start: "a" %json {"minLength": 1}')),
         *({"structural_tag": value} for value in (
             5, "x", "{}", {}, tag() | {"type": "x"}, tag() | {"format": 5},
             tag(type="triggered_tags"), tag(tags=[]), tag(tags=[5]), tag(separator=5),
             tag(seperator="x"), tag(begin=[5]), tag(end=5), tag(schema={"uniqueItems": True}),
             tag(schema={"pattern": "(?=a)", "type": "string"})))],
    "Invalid type": [{"json": {"properties": {f"key {i}": {"type": "text"} for i in range(99)}}}],
    "Invalid grammar specification: line 1: Expected token": [{"grammar": "not a grammar"}],
    "Invalid grammar specification: line 1: unknown name": [{"grammar": 'start: "a" b\n'}],
    "line 2: unknown name": [{"grammar": 'start: "a" b\nb: c'}],
    LOOK_AROUND: [{"regex": "(?=a)b"}, {"regex": "(?<!a)b"}, {"grammar": "start: /(?=a)b/"},
                  {"json": {"pattern": "(?=a)"}}],
    r"\+\+ is not supported in a regex": [{"regex": "a++"}],
    r"\(\?x is not supported in a regex": [{"regex": "(?x)a"}],
    "'rgex' is not known": [{"rgex": "a"}],
    "EBNF with .* is not supported": [{"grammar": f"root ::= {part}"} for part in (
        r'"\u0061b"', r"[\x41]", r'"\\\u0061"', ".", "[a-z&&b]", "[a]\nb ::= [a--b]")],
    "EBNF needs a rule with the name root": [{"grammar": grammar} for grammar in (
        'start ::= "a"', "list ::= item\n  item-1 ::= [a-z]", 'root ::= "a"\nroot ::= "b"',
        'root ::= a-b\na-b ::= "a"\nA_b ::= "b"', 'Root ::= "a"',
        # this takes no time, although no class ends
        "a ::= " + '["\\' * 20_000)],
    "a regex cannot have 64000 letters: at most 10000": [
        {"regex": "[^" * 32_000}, {"json": {"pattern": "a" * 64_000}},
        {"json": {"patternProperties": {"(" * 64_000: {}}}}],
    "a grammar can have at most 1000 rules": [{"grammar": "start: r0\n" + "".join(
        f'r{i}: "a" r{i + 1}\n' for i in range(5000)) + 'r5000: "b"'}],
    "it has more than 300 levels, with those that .ref adds": [
        {"json": {"$ref": "#/$defs/r0", "$defs": {
            f"r{i}": nest({"$ref": f"#/$defs/r{i + 1}"}) for i in range(1500)}}} for nest in (
                lambda each: {"properties": {"a": each}}, lambda each: {"allOf": [each]},
                lambda each: {"items": each}, lambda each: {"anyOf": [each, {"type": "null"}]})],
    "the pattern '.*' permits only names that are in `properties`, too: leave it out": [
        {"json": {"properties": {"a": {"const": 1}, "b": {"const": 1}},
                  "patternProperties": {"^[ab]$": {}}}},
        {"json": {"allOf": [{"properties": {"a": {"const": 1}}}, {
            "patternProperties": {"^[a]$": {}}, "additionalProperties": False}]}}]}


@pytest.mark.parametrize("wanted, reason", [
    (wanted, reason) for reason, all_wanted in REFUSED.items() for wanted in all_wanted])
def test_what_is_not_a_grammar_is_refused(llm, wanted, reason):
    """In one short sentence with neither a whole schema nor the grammar that was made of it."""
    good = SamplingParams(max_tokens=3)
    with pytest.raises(ValueError, match=reason) as error:
        llm.generate(["Once", "Once"], [good, SamplingParams(structured_outputs=wanted)])
    message = str(error.value)
    assert message.startswith("structured_outputs={") and " it must be one of {'json'" in message
    assert reason == ANY or len(message) < 500 and "\n" not in message
    assert "no_forcing" not in message


# ------------------------------------------------------------------------- tokens and vocabularies


def tokenizer(model, decoder, **options):
    made = Tokenizer(model)
    made.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


ALPHABET = {letter: number for number, letter in enumerate(sorted(
    pre_tokenizers.ByteLevel.alphabet()))}


def allowed(wanted, tokenizer, vocab_size, ends, taken=()) -> list[int]:
    """The tokens that come next after some."""
    grammar = Grammar(wanted, tokenizer, vocab_size, ends, 1)
    grammar.take([0, *taken])
    mask = permitted([grammar], vocab_size)
    assert mask.shape == (1, vocab_size)
    return mask[0].nonzero()[0].tolist()


def test_a_vocabulary_without_bytes_is_refused():
    words = models.WordPiece({"[UNK]": 0, "cat": 1, "##s": 2}, unk_token="[UNK]")
    pieces = models.Unigram([("<unk>", 0.0), ("▁cat", -1.0), ("s", -2.0)], unk_id=0)
    for model, decoder in ((words, decoders.WordPiece()), (pieces, decoders.Metaspace())):
        check_refused("structured_outputs=.*neither ByteLevel nor Byte", Grammar,
                      {"regex": "cat"}, tokenizer(model, decoder), 3, [], 0)


@pytest.mark.parametrize("vocab_size", [200, 256, 257, 300])
def test_no_end_token(vocab_size):
    """Every token is a letter, in a vocabulary of the model that is smaller, or larger."""
    letters = tokenizer(models.BPE(ALPHABET, []), decoders.ByteLevel())
    first, a = ALPHABET["!"], ALPHABET["a"]
    assert first == 0, "llguidance would take this token for the end"
    assert allowed({"regex": "a!"}, letters, vocab_size, []) == [a]
    assert allowed({"regex": "a!"}, letters, vocab_size, [], [a]) == [first]
    assert allowed({"regex": "a!"}, letters, vocab_size, [], [a, first]) == []


def test_end_tokens_that_are_words():
    letters = tokenizer(models.BPE(ALPHABET, []), decoders.ByteLevel(), eos_token="<eos>")
    a, b, eos = ALPHABET["a"], ALPHABET["b"], 256
    wanted = {"regex": "[ab]{2,3}"}
    assert allowed(wanted, letters, 260, [a, eos]) == [b], "the text would end in the middle"
    assert allowed(wanted, letters, 260, [a, eos], [b, b]) == [a, b, eos]
    assert allowed(wanted, letters, 260, [259], [b, b, b]) == [eos, 259], "padding can be an end"
    assert allowed(wanted, letters, 256, [a], [b, b, b]) == [a], "the model has no EOS"
    # after an end token that is ignored, the text goes on
    assert allowed(wanted, letters, 260, [eos], [b, b, eos]) == [a, b, eos]


def test_special_tokens_are_no_letters(llm):
    known = llm.get_tokenizer()
    special = [*known.added_tokens_decoder]
    assert special
    for wanted in ({"regex": r"(?s:.)*"}, {"regex": "[^a]*"}, {"json": {"type": "string"}}):
        found = allowed(wanted, known, llm.inputs.vocab_size, [])
        assert found and {*found} & {*special} <= {known.eos_token_id}
    name = next(iter(known.get_added_vocab()))
    found = texts(llm, "Once", structured_outputs={"choice": [name]}, skip_special_tokens=True)
    assert found == [name], "it is spelled, and does not vanish from the text"


@pytest.mark.parametrize("special", [False, True])
def test_a_tag_can_be_a_token(special):
    """Or be spelled, as everywhere. One that is no token is only spelled."""
    letters = tokenizer(models.BPE(ALPHABET, []), decoders.ByteLevel())
    letters.add_tokens(["<tool>", "</tool>"], special_tokens=special)
    less, slash = ALPHABET["<"], ALPHABET["/"]
    wanted = {"structural_tag": tag("<tool>", end="</tool>", at_least_one=True)}
    assert allowed(wanted, letters, 258, []) == [less, 256]
    true = [ALPHABET[letter] for letter in "true"]
    assert allowed(wanted, letters, 258, [], [256, *true]) == [less, 257]
    assert allowed(wanted, letters, 258, [], [256, *true, less]) == [slash]
    assert allowed({"structural_tag": tag("<other>")}, letters, 258, []) == [less]


def test_any_tokens_can_spell_a_text(llm):
    """Also where the grammar permits one text only."""
    known = llm.get_tokenizer()
    letters = sorted({token for letter in "once upn" for token in known.encode(letter)})
    found = complete(llm, "Once", structured_outputs={"choice": ["once upon"]},
                     allowed_token_ids=[*letters, *llm.inputs.eos_tokens])
    assert found.text == "once upon"
    assert len(found.token_ids) == 10, "a letter for each token, and EOS"


def test_stop_tokens_share_a_vocabulary(llm):
    make_vocabulary.cache_clear()
    params = [SamplingParams(structured_outputs={"regex": f"[0-9]{{{number}}}"}, max_tokens=5,
                             stop_token_ids=[number], ignore_eos=number % 2 == 0)
              for number in range(1, 5)]
    outputs = llm.generate(["Once"] * 4, params, use_tqdm=False)
    assert make_vocabulary.cache_info().misses == 1
    for number, output in enumerate(outputs, 1):
        # where EOS is ignored, nothing else can follow a complete text
        assert re.fullmatch(f"[0-9]{{{number}}}", output.outputs[0].text)


def test_an_ignored_eos_follows_a_complete_text(llm):
    completion = complete(llm, "Once", structured_outputs={"regex": "[0-9]{2}"}, ignore_eos=True,
                          max_tokens=6)
    assert re.fullmatch("[0-9]{2}", completion.text) and completion.finish_reason == "length"


def test_grammars_are_kept_up_to_a_number(llm):
    for number in range(100):
        Grammar({"choice": [str(number)]}, llm.get_tokenizer(), llm.inputs.vocab_size, [], 0)
    assert make_matcher.cache_info().currsize <= 32


def test_a_grammar_that_becomes_too_complex_ends_its_own_request(llm):
    """llguidance has limits, which it meets only on the way."""
    wide = " | ".join(f'"n{number} y"' for number in range(20_001))
    hard = SamplingParams(structured_outputs={"grammar": f'start: "x" ({wide})'})
    plain = SamplingParams(structured_outputs={"regex": "[0-9]{3}"}, seed=1)
    first, second = llm.generate(["Once"] * 2, [hard, plain], use_tqdm=False)
    assert first.outputs[0].finish_reason == "error"
    assert "forbid all tokens" in first.outputs[0].stop_reason
    assert second.outputs[0].finish_reason == "stop" and second.outputs[0].text.isdigit()


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
    wanted = dict(structured_outputs={"regex": "ab"})
    for allowed in ([a], [a, *llm.inputs.eos_tokens]):
        for min_tokens in (0, 8):
            found = complete(llm, "Once", **wanted, min_tokens=min_tokens,
                             allowed_token_ids=allowed)
            assert (found.text, found.finish_reason) == ("a", "error")
            assert "forbid all tokens" in found.stop_reason
    # a text that is complete, where EOS is allowed, and where it is not
    for allowed, reason in (([a, b, *llm.inputs.eos_tokens], "stop"), ([a, b], "error")):
        found = complete(llm, "Once", **wanted, min_tokens=8, allowed_token_ids=allowed)
        assert (found.text, found.finish_reason) == ("ab", reason)


def test_an_own_processor_runs_last_and_sees_no_end_before_min_tokens(llm):
    seen = []

    def note(input_ids, scores):
        seen.append(bool(scores[0, list(llm.inputs.eos_tokens)].isfinite().any()))
        assert scores.isfinite().sum() <= 20, "what the grammar permits"
        return scores

    completion = complete(
        llm, "Once", structured_outputs={"regex": "[0-9]{1,3}"}, min_tokens=2, max_tokens=9,
        logits_processors=[note], stop_token_ids=[5], bad_words=["7"])
    assert completion.finish_reason == "stop" and "7" not in completion.text
    assert seen[:3] == [False, False, True]
