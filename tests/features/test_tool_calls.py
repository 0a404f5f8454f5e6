"""Calls of tools: what is one, what stays text, and the same in whole answers and in streams."""

import copy
import json
import random

import pytest

from nanoengine_extensions.tool_calls import ToolCalls, check, parsed

ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
OSLO = {"name": "weather", "arguments": '{"city": "Oslo"}'}


def written(name: object = "weather", **arguments: object) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


NO_CALLS = [
    "", "46", "a < b and <tool", " 46 \n", "<tool_call>", "<tool_call>\n46\n</tool_call>",
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


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_text(text):
    assert parsed(text, True) == (text, [])


@pytest.mark.parametrize("text, content, calls", CALLS)
def test_calls(text, content, calls):
    assert parsed(text, True) == (content, calls)


@pytest.mark.parametrize("text", [text for text in NO_CALLS if len(text) < 1000]
                         + [text for text, *_ in CALLS])
def test_both_only_grow(text):
    """What a stream has sent stays true."""
    content, calls = "", []
    for size in range(len(text)):
        more, further = parsed(text[:size], False)
        assert more.startswith(content) and further[:len(calls)] == calls
        content, calls = more, further
    whole, found = parsed(text, True)
    assert whole.startswith(content) and found[:len(calls)] == calls


def test_a_call_is_found_when_its_tag_ends():
    text = written(city="Rome")
    assert parsed(text[:-1], False) == ("", [])
    assert parsed(text, False) == ("", [ROME])


def whole_of(text: str, index: int, reason: str) -> dict:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"message": message, "index": index, "logprobs": None, "finish_reason": reason}


def events_of(text: str, index: int, reason: str, rng: random.Random) -> list[dict]:
    """The choices of a stream, as the server makes them: pieces of a few characters."""
    found = []
    place = 0
    while place < len(text) or not found:
        size = rng.randint(1, 9)
        role = {} if found else {"role": "assistant"}
        found.append({"delta": role | {"content": text[place:place + size]}, "index": index,
                      "logprobs": None, "finish_reason": None})
        place += size
    if rng.random() < 0.5:
        found.append({"delta": {"content": ""}, "index": index, "logprobs": None,
                      "finish_reason": None})
    found[-1]["finish_reason"] = reason
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_is_the_whole_answer(seed):
    """In pieces, of choices that take turns."""
    rng = random.Random(seed)
    texts = rng.choices([text for text, *_ in CALLS] + NO_CALLS[:8], k=3)
    reasons = rng.choices(["stop", "length"], k=3)
    wholes = [*ToolCalls("1").edit(map(whole_of, texts, range(3), reasons))]
    events = [events_of(*each, rng) for each in zip(texts, range(3), reasons)]
    stream = ToolCalls("1")
    found: list[dict] = [{"content": "", "calls": [], "role": 0, "reason": None} for _ in texts]
    while any(events):
        event = rng.choice([each for each in events if each]).pop(0)
        for choice in stream.edit([copy.deepcopy(event)]):
            delta = choice["delta"]
            part = found[choice["index"]]
            assert part["reason"] is None, "nothing comes after the end"
            part["content"] += delta["content"] or ""
            part["calls"] += delta.get("tool_calls", [])
            part["role"] += "role" in delta
            part["reason"] = choice["finish_reason"]
    for whole, part in zip(wholes, found):
        message = whole["message"]
        assert part["content"] == (message["content"] or "")
        assert [call.pop("index") for call in part["calls"]] == [*range(len(part["calls"]))]
        assert part["calls"] == message.get("tool_calls", [])
        assert part["role"] == 1 and part["reason"] == whole["finish_reason"]
        assert (message["content"] is None) == bool(part["calls"] and not part["content"])


def test_the_reason_of_the_end():
    for reason, expected in (("stop", "tool_calls"), ("length", "length")):
        choice, = ToolCalls("1").edit([whole_of(written(city="Rome"), 0, reason)])
        assert choice["finish_reason"] == expected
        choice, = ToolCalls("1").edit([whole_of("46", 0, reason)])
        assert choice["finish_reason"] == reason and "tool_calls" not in choice["message"]


def test_each_call_has_an_id_of_its_own():
    text = written(city="Rome") * 2
    choices = [*ToolCalls("7").edit([whole_of(text, 0, "stop"), whole_of(text, 1, "stop")])]
    choices += ToolCalls("8").edit([whole_of(text, 0, "stop")])
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 6


def test_an_event_without_news_is_left_out():
    """But for one with log-probabilities."""
    stream = ToolCalls("1")
    event = {"delta": {"content": "<tool"}, "index": 0, "logprobs": None, "finish_reason": None}
    assert not [*stream.edit([copy.deepcopy(event)])]
    event = {"delta": {"content": ""}, "index": 0, "logprobs": {"content": [1]},
             "finish_reason": None}
    choice, = stream.edit([event])
    assert choice["logprobs"] and choice["delta"]["content"] == ""


@pytest.mark.parametrize("body, name", [
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools"), ({"tools": [{}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice")])
def test_what_is_refused(body, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        check(body)
