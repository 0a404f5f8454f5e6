"""Calls of tools: what is one, what stays text, and the same in whole answers and in streams."""

import json
import random
from itertools import pairwise

import pytest
from conftest import check_refused
from jsonschema import Draft202012Validator
from streams import choice_of, in_turn, joined

from nanoengine import LLM
from nanoengine_extras.tools.openai_format import CHAT, Body
from nanoengine_extras.tools import tool_calls
from nanoengine_extras.tools.tool_calls import ToolCalls, check, read

ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
OSLO = {"name": "weather", "arguments": '{"city": "Oslo"}'}


def written(name: object = "weather", **arguments: object) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


NO_CALLS = [
    "", "46", "a < b and <tool", " 46 \n", "<tool_call>", "<<tool_call>46", "<tool<tool_call>",
    "<tool_call>\n46\n</tool_call>",
    "<tool_call>[1]</tool_call> so", "<tool_call>{}</tool_call>", written(5), written(""),
    '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
    '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
    # what is not JSON, and what cannot be sent
    '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
    "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>", "<tool_call>" + "[" * 100_000,
    # cut off
    written(city="Rome")[:-20], written(city="Rome")[:-3]]
CALLS = [
    (written(city="Rome"), "", [ROME]),
    (written(city="Rome").removesuffix("\n</tool_call>"), "", [ROME]),
    (f"I look.\n\n{written(city='Rome')}\n", "I look.", [ROME]),
    (f"{written(city='Rome')}\n{written(city='Oslo')}", "", [ROME, OSLO]),
    (f"a {written(city='Rome')} b {written(city='Oslo')} c", "a  b  c", [ROME, OSLO]),
    (written(), "", [{"name": "weather", "arguments": "{}"}]),
    ('<tool_call>{"name": "now"}</tool_call>', "", [{"name": "now", "arguments": "{}"}]),
    (written(city="Zürich"), "", [{"name": "weather", "arguments": '{"city": "Zürich"}'}]),
    # a tag in a text of JSON
    (written(html="</tool_call>"), "",
     [{"name": "weather", "arguments": '{"html": "</tool_call>"}'}]),
    # what is no call stays text, beside one
    (f"<tool_call>5</tool_call>{written(city='Oslo')}", "<tool_call>5</tool_call>", [OSLO])]


def streamed(pieces: list[str], reason: str | None = "stop") -> tuple[str, list[dict]]:
    """The text and the calls of a stream; the last piece has the reason of the end."""
    stream = ToolCalls("1")
    found = [choice["delta"] for number, piece in enumerate(pieces, 1) for choice in stream.edit(
        [choice_of(piece, 0, reason if number == len(pieces) else None, "delta")])]
    return ("".join(delta["content"] or "" for delta in found),
            [call["function"] for delta in found for call in delta.get("tool_calls", [])])


@pytest.mark.parametrize("text, content, calls", [*CALLS, *((text, text, []) for text in NO_CALLS)])
def test_calls(text, content, calls):
    """What is no call stays text, in a whole answer and in a stream."""
    for reason in ("stop", "length"):
        whole, = ToolCalls("1").edit([choice_of(text, 0, reason)])
        assert whole["finish_reason"] == ("tool_calls" if calls and reason == "stop" else reason)
        found = whole["message"].get("tool_calls")
        assert (found and [call["function"] for call in found]) == (calls or None)
        assert whole["message"]["content"] == (content or None if calls else content)
    assert streamed([text]) == (content, calls)
    if len(text) < 1000:
        # of single characters
        assert streamed([*text]) == streamed([*text, ""]) == (content, calls)
        # both only grow: the calls in the beginning of a text stay calls of the whole
        begun = [streamed([text[:size]], None) for size in range(len(text))]
        for (before, some), (after, more) in pairwise([*begun, (content, calls)]):
            assert after.startswith(before) and more[:len(some)] == some


def test_a_call_is_found_when_its_tag_ends():
    text = written(city="Rome")
    assert streamed([text[:-1]], None) == ("", [])
    assert streamed([text[:-1], text[-1]], None) == streamed([text], None) == ("", [ROME])


@pytest.mark.parametrize("text", [
    "word " * 1000, written(text="word " * 1000), written(city="Rome") * 100])
def test_an_event_costs_what_is_new_in_it(monkeypatch, text):
    """All calls of the parser together read each character a few times."""
    sizes = []
    split = tool_calls.split
    monkeypatch.setattr(tool_calls, "split", lambda text, *rest: (
        sizes.append(len(text)) or split(text, *rest)))
    streamed([text[place:place + 5] for place in range(0, len(text), 5)])
    assert sum(sizes) < 9 * len(text)


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_is_the_whole_answer(seed):
    """In pieces of a few characters, of choices that take turns."""
    rng = random.Random(seed)
    texts = rng.choices([text for text, *_ in CALLS] + NO_CALLS[:8], k=3)
    reasons = rng.choices(["stop", "length"], k=3)
    wholes = joined(ToolCalls("1").edit(map(choice_of, texts, range(3), reasons)))
    stream = ToolCalls("1")
    parts = joined(choice for event in in_turn(rng, texts, reasons)
                   for choice in stream.edit([event]))
    for part in parts:
        calls = part.get("tool_calls", [])
        assert [call.pop("index") for call in calls] == [*range(len(calls))]
    assert parts == wholes


def test_each_call_has_an_id_of_its_own():
    text = written(city="Rome") * 2
    choices = [*ToolCalls("7").edit([choice_of(text), choice_of(text, 1)])]
    choices += ToolCalls("8").edit([choice_of(text)])
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 6


def test_an_event_without_news_is_left_out():
    """But for one with log-probabilities."""
    stream = ToolCalls("1")
    assert not [*stream.edit([choice_of("<tool", reason=None, kind="delta")])]
    event = choice_of("", reason=None, kind="delta") | {"logprobs": {"content": [1]}}
    choice, = stream.edit([event])
    assert choice["logprobs"] and choice["delta"]["content"] == ""


# ------------------------------------------------------------------------ calls that are required


def tool(name: object = "weather", **parameters: object) -> dict:
    return {"type": "function", "function": {"name": name, **parameters}}


def schema_of(**properties: object) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties]}


SCHEMAS = {
    "weather": schema_of(city={"enum": ["Rome", "Zürich"]}, days={"type": "integer", "minimum": 1,
                                                                "maximum": 9}),
    "now": {"properties": {}, "additionalProperties": False},
    "by reference": {"$ref": "#/$defs/A", "$defs": {
        "A": schema_of(html={"const": "</tool_call>"})}},
    'a "quoted"\nname': schema_of(points={"type": "array", "maxItems": 2, "items": schema_of(
        x={"type": "boolean"})})}
# a function without parameters takes none
TOOLS = [tool(name, parameters=schema) if name != "now" else tool(name)
         for name, schema in SCHEMAS.items()]
MESSAGES = [{"role": "user", "content": "Which?"}]


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", num_kv_blocks=400) as llm:
        yield llm


def body_of(llm: LLM, choice: object, finds_calls: bool = False, **changes: object) -> Body:
    body = Body(CHAT, "1")
    body.read({"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "temperature": 2,
               "max_tokens": 400, "seed": 1, "n": 24} | changes, llm, finds_calls)
    return body


def answers(llm: LLM, choice: object, **changes: object) -> list[dict]:
    """The choices of an answer. All are nothing but calls with valid arguments."""
    body = body_of(llm, choice, **changes)
    outputs = llm.generate(body.prompts, body.params, use_tqdm=False)
    found = body.response(outputs, "m")["choices"]
    assert len(found) == 24
    for each in found:
        message = each["message"]
        assert message["content"] is None
        for call in message["tool_calls"]:
            schema = SCHEMAS[call["function"]["name"]]
            Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))
    return found


@pytest.mark.needs("sampling.structured_outputs", "tools.chat")
@pytest.mark.parametrize("parallel", [None, True, False])
def test_one_call_or_more(llm, parallel):
    found = answers(llm, "required", parallel_tool_calls=parallel)
    names = {call["function"]["name"] for each in found for call in each["message"]["tool_calls"]}
    assert names == SCHEMAS.keys()
    counts = {len(each["message"]["tool_calls"]) for each in found}
    assert counts == {1} if parallel is False else max(counts) > 1
    whole = [each["finish_reason"] for each in found if each["finish_reason"] != "length"]
    assert {*whole} == {"tool_calls"} and len(whole) >= (24 if parallel is False else 1)


@pytest.mark.needs("sampling.structured_outputs", "tools.chat")
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_of_a_named_function(llm, name, parallel):
    """OpenAI's finish_reason is then "stop". The text has the form of Hermes."""
    found = answers(llm, tool(name), parallel_tool_calls=parallel)
    assert {each["finish_reason"] for each in found} == {"stop"}
    assert [call["function"]["name"] for each in found
            for call in each["message"]["tool_calls"]] == [name] * 24
    body = body_of(llm, tool(name), n=1)
    output, = llm.generate(body.prompts, body.params, use_tqdm=False)
    begin, call, end = output.outputs[0].text.split("\n")
    assert (begin, end, [*json.loads(call)]) == (
        "<tool_call>", "</tool_call>", ["name", "arguments"])


@pytest.mark.needs("sampling.structured_outputs", "tools.chat")
@pytest.mark.parametrize("choice", ["required", tool("weather")], ids=str)
def test_a_parser_of_calls_changes_no_required_ones(llm, choice):
    """serve.py looks for calls itself, with --tool-call-parser."""
    found = []
    for finds_calls in (False, True):
        body = body_of(llm, choice, finds_calls, n=1)
        found += [*body.edit([choice_of(written(city="Rome"), 0, "stop")])]
    assert found[0] == found[1] and found[0]["message"]["tool_calls"]


def test_at_most_one_call_if_they_may_not_be_parallel():
    """Of those that a model writes by itself, a client gets the first."""
    text = "I look. " + written(city="Rome") + written(city="Oslo")
    for more, count in (({}, 2), ({"parallel_tool_calls": True}, 2),
                        ({"parallel_tool_calls": False}, 1)):
        body = Body(CHAT, "1")
        read(body, {"tools": TOOLS} | more, True)
        choice, = body.edit([choice_of(text)])
        message = choice["message"]
        assert [call["function"] for call in message["tool_calls"]] == [ROME, OSLO][:count]
        assert message["content"] == "I look." and choice["finish_reason"] == "tool_calls"


@pytest.mark.needs("sampling.structured_outputs", "tools.chat")
@pytest.mark.parametrize("changes, error", [
    ({"response_format": {"type": "json_object"}}, "tool_choice=.* not accepted together"),
    ({"structured_outputs": {"regex": "a"}}, "tool_choice=.* not accepted together"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools: parameters of weather must be"),
    ({"tools": [tool(parameters=5)]}, "tools: parameters of weather must be"),
    ({"tools": [tool(parameters=schema_of(x={"uniqueItems": True}))]}, "tools: .*uniqueItems"),
    ({"tools": [tool(parameters=schema_of(x={"pattern": "\\b"}))]}, "tools: .* not supported")])
def test_what_no_grammar_can_require_is_refused(llm, changes, error):
    check_refused(f"^{error}", body_of, llm, "required", **changes)


@pytest.mark.parametrize("body, name", [
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools"), ({"tools": [{}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": tool()}, "tool_choice"),
    *(({"tools": tools, "tool_choice": "required"}, "tool_choice") for tools in (
        [], [{"type": "function"}], [tool(5)], [tool("")], [tool(), tool()])),
    *(({"tools": [tool()], "tool_choice": choice}, "tool_choice") for choice in (
        "any", 5, ["weather"], {"type": "function"}, {"type": "function", "name": "weather"})),
    ({"tools": [tool(), tool("now")], "tool_choice": tool("wether")},
     r"tool_choice=.*'wether'.* names: weather, now$"),
    *(({"tools": [tool()], "parallel_tool_calls": wrong}, "parallel_tool_calls")
      for wrong in ("no", 0))])
def test_what_is_refused(body, name):
    check_refused(f"^{name}", check, body)
