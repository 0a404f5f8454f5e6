"""Thoughts before an answer: apart from it, without calls, and the same in streams."""

import random

import pytest
from streams import choice_of, in_turn

from nanoengine_extras.tools.openai_format import CHAT, Body
from nanoengine_extras.tools.reasoning import Reasoning
from nanoengine_extras.tools.tool_calls import ToolCalls

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# what a model writes, whether <think> is in its prompt; thoughts, answer, number of calls
ANSWERS = [
    ("46", False, "", "46", 0), (" 46 \n", False, "", " 46 \n", 0), ("", False, "", "", 0),
    (" \n", False, "", " \n", 0), ("<thin", False, "", "<thin", 0), ("<b>", False, "", "<b>", 0),
    ("<think>\nhm\n</think>\n\n46", False, "hm", "46", 0),
    ("\n <think>a\n\n b</think>46 ", False, "a\n\n b", "46 ", 0),
    ("hm\n</think>\n\n46", True, "hm", "46", 0), ("\n\nhm</think>46", True, "hm", "46", 0),
    ("<think>\nhm</think>46", True, "hm", "46", 0),
    ("</think>46", True, "", "46", 0), ("<think>\n\n</think>\n\n46", False, "", "46", 0),
    # cut off, within a tag, too
    ("hm so", True, "hm so", "", 0), ("<think>hm\n</thin", False, "hm\n</thin", "", 0),
    ("hm </think>\n", True, "hm", "", 0), ("<think>", False, "", "", 0), ("", True, "", "", 0),
    # other tags, and a second pair
    ("a <b> </thin> < </think>c</think> <think>d</think>", True, "a <b> </thin> <",
     "c</think> <think>d</think>", 0),
    # only an answer begins with thoughts
    ("46 <think>hm</think>", False, "", "46 <think>hm</think>", 0),
    ("hm</think>46", False, "", "hm</think>46", 0),
    # calls in thoughts are none
    (f"I could {CALL}</think>46", True, f"I could {CALL}", "46", 0),
    (f"<think>{CALL}</think>\n{CALL}", False, CALL, "", 1),
    (f"{CALL}\n", True, CALL, "", 0), (f"<think><tool_call>\n</think>{CALL}{CALL}", False,
                                       "<tool_call>", "", 2),
    (CALL, False, "", "", 1)]


def body_of(is_open: bool) -> Body:
    body = Body(CHAT, "1")
    body.reasoning = Reasoning(is_open)
    body.calls = ToolCalls("1").edit
    return body


def added(messages: list[dict]) -> tuple[str, str, int]:
    """Thoughts, answer and number of calls in a message, or in those of a stream."""
    for each in messages:
        assert each.get("reasoning") == each.get("reasoning_content") != ""
    return ("".join(each.get("reasoning", "") for each in messages),
            "".join(each["content"] or "" for each in messages),
            sum(len(each.get("tool_calls", ())) for each in messages))


@pytest.mark.parametrize("text, is_open, expected", [
    (text, is_open, expected) for text, is_open, *expected in ANSWERS])
def test_whole_answers_and_streams(text, is_open, expected):
    found, = body_of(is_open).edit([choice_of(text)])
    assert added([found["message"]]) == tuple(expected)
    for seed in range(9):
        body = body_of(is_open)
        events = in_turn(random.Random(seed), [text], ["stop"], most=9 if seed else 1)
        deltas = [each["delta"] for event in events for each in body.edit([event])]
        assert added(deltas) == tuple(expected), seed


def test_choices_of_one_stream_and_events_without_news():
    reasoning = Reasoning()
    parts = [(0, "<think>"), (1, "46"), (0, "a"), (1, " 47"), (0, " "), (0, "b</think>\n"),
             (0, "c")]
    found = [[*reasoning.edit([choice_of(text, index, None, "delta")])] for index, text in parts]
    assert [bool(each) for each in found] == [False, True, True, True, False, True, True]
    deltas = [each[0]["delta"] for each in found if each]
    assert [(each.get("reasoning"), each["content"]) for each in deltas] == [
        (None, "46"), ("a", ""), (None, " 47"), (" b", ""), (None, "c")]


def test_an_event_costs_what_is_new_in_it():
    reasoning = Reasoning(True)
    most = 0
    for _ in range(1000):
        [*reasoning.edit([choice_of("word </thin ", 0, None, "delta")])]
        most = max(most, len(reasoning.held[0]))
    assert most < 9


THINKS = {"chat_template_kwargs": {"thinks": True}}


@pytest.mark.needs("tools.chat", "sampling.structured_outputs", "sampling.texts")
@pytest.mark.parametrize("changes, is_open", [
    ({}, False), (THINKS, True),
    ({"continue_final_message": True, "add_generation_prompt": False}, True),
    # a grammar that leaves no place for thoughts
    (THINKS | {"response_format": {"type": "json_object"}}, False),
    (THINKS | {"structured_outputs": {"choice": ["hm</think>46"]}}, True),
    (THINKS | {"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "a", "parameters": {"properties": {"x": {"const": "</think>"}}}}}]}, False)])
def test_what_is_open(llm, changes, is_open):
    template = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                "assistant: {{ '<think>\n' if thinks }}")
    messages = [{"role": "user", "content": "a <think>"}]
    if "continue_final_message" in changes:
        messages.append({"role": "assistant", "content": "<think>I see"})
    body = Body(CHAT, "1")
    body.read({"messages": messages, "chat_template": template} | changes, llm)
    assert body.reasoning.is_open == is_open
    if "structured_outputs" in changes:
        outputs = llm.generate(body.prompts, body.params, use_tqdm=False)
        message = body.response(outputs, "m")["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "46")
