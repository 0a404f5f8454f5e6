"""What reaches a chat template, and so the prompt."""

import copy
import json
from typing import Any

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from nanoengine import LLM
from nanoengine_extensions.chat import render, takes_parts

TO_JSON = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
    {{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
    {%- endfor %}{% endfor %}"""
ITEMS = """{% for m in messages %}{{ m.content }}{% for c in m['tool_calls'] or [] %}
    {%- for name, value in c['function']['arguments'] | items %}{{ name }}={{ value }};{% endfor %}
    {%- endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(bundled):
    return AutoTokenizer.from_pretrained(bundled)


@pytest.fixture
def prompt(tokenizer):
    def prompt(messages: Any, template: str | None = None, **options: Any) -> str:
        (found,) = render(SimpleNamespace(get_tokenizer=lambda: tokenizer), messages, chat_template=template, **options)
        assert found["prompt_token_ids"] == tokenizer.encode(
            found["prompt"], add_special_tokens=False)
        return found["prompt"]
    return prompt


# ---------------------------------------------------------------------------------- tool calls


def conversation(arguments: Any, **call: Any) -> list[dict]:
    function = {"name": "weather", "arguments": arguments}
    return [{"role": "user", "content": "rain?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": function} | call] * 2},
            {"role": "tool", "tool_call_id": "1", "content": "no"}]


@pytest.mark.parametrize("template", [TO_JSON, ITEMS])
@pytest.mark.parametrize("arguments, value", [
    ('{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}),
    ('{"b":{"x":[1,null]} ,"a":"ø"}', {"b": {"x": [1, None]}, "a": "ø"}),
    ("{}", {}), ("", {}), (None, {}), ({"a": "{}"}, {"a": "{}"})])
def test_arguments_of_tool_calls_are_objects(tokenizer, prompt, template, arguments, value):
    messages = conversation(arguments)
    before = copy.deepcopy(messages)
    plain = conversation(value)
    # what transformers makes of objects; it would write None for a content of None
    plain[1]["content"] = ""
    expected = tokenizer.apply_chat_template(
        plain, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert prompt(messages, template) == expected
    assert messages == before, "a user's messages stay as they are"


def test_arguments_that_are_left_out(prompt):
    messages = conversation("")
    del messages[1]["tool_calls"][0]["function"]["arguments"]
    assert prompt(messages, TO_JSON).count('"arguments": {}') == 2
    # the form of transformers' own documents
    direct = "{{ messages[1].tool_calls[0].arguments | tojson }}"
    messages[1]["tool_calls"] = [{"name": "weather", "arguments": '{"a": 1}'}]
    assert prompt(messages, direct) == '{"a": 1}'


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "null", [1], 5, "nan,"])
def test_arguments_that_are_no_object(prompt, arguments):
    with pytest.raises(ValueError, match=r"arguments|Expecting"):
        prompt(conversation(arguments), TO_JSON)
    for calls in (5, ["x"], [None], [{"function": "x"}]):
        messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
        with pytest.raises(ValueError, match="tool_calls="):
            prompt(messages, TO_JSON)


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_none(prompt, calls):
    template = "{{ 'calls' if 'tool_calls' in messages[0] else messages[0].content }}"
    assert prompt([{"role": "assistant", "content": "a", "tool_calls": calls}], template) == "a"


# ------------------------------------------------------------------------------------- content


def loop(parts: str, test: str = "") -> str:
    """A template that shows the text parts of a content."""
    return (f"{{% for p in {parts} {test} %}}{{% if p.type == 'text' %}}[{{{{ p.text }}}}]"
            "{% endif %}{% endfor %}")


def each(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


TAKE_PARTS = [
    each(loop("m.content")),
    each(loop("m['content']")),
    each(loop("m['content'][:9]")),
    each(loop("m.content | list")),
    each(loop("m.content", "if p.type == 'text'")),
    each("{% if m.content is string %}{{ m.content }}{% else %}" + loop("m.content")
         + "{% endif %}"),
    "{% set all = messages[0:] %}{% for m in all %}" + loop("m.content") + "{% endfor %}",
    "{% macro show(content) %}" + loop("content") + "{% endmacro %}"
    + each("{{ show(m.content) }}"),
    each("{% set parts = m.content %}" + loop("parts")),
    each("{% generation %}" + loop("m.content") + "{% endgeneration %}{% continue %}")]
TAKE_TEXTS = [
    each("{{ m.content }}"),
    each("{{ m['content'] | trim }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"),
    each("{% for word in m.content.split(' ') %}{{ word }} {% endfor %}"),
    each("{% if m.content is string %}{{ m.content }}{% else %}lost{% endif %}")]


@pytest.mark.parametrize("template", TAKE_PARTS)
def test_templates_that_go_through_parts_get_parts(prompt, template):
    assert takes_parts(template)
    for content in ("What is", [{"type": "text", "text": "What is"}], ["What is"]):
        assert prompt([{"role": "user", "content": content}], template) == "[What is]"
    two = [{"type": "text", "text": "What "}, "is"]
    assert prompt([{"role": "user", "content": two}], template) == "[What ][is]"
    for nothing in ({"role": "user"}, {"role": "user", "content": None}):
        assert prompt([nothing], template) == ""


@pytest.mark.parametrize("template", TAKE_TEXTS)
def test_other_templates_get_one_text(prompt, template):
    assert not takes_parts(template)
    for content in ("a\nb", ["a", {"type": "text", "text": "b"}]):
        assert prompt([{"role": "user", "content": content}], template).strip() == "a\nb"


def test_the_form_can_be_given(prompt):
    chat = [{"role": "user", "content": "a"}]
    template = "{{ messages[0].content | tojson }}"
    found = {name: prompt(chat, template, chat_template_content_format=name)
             for name in ("auto", "string", "openai")}
    assert found == {"auto": '"a"', "string": '"a"',
                     "openai": json.dumps([{"type": "text", "text": "a"}])}
    with pytest.raises(ValueError, match="chat_template_content_format='list'"):
        prompt(chat, chat_template_content_format="list")


@pytest.mark.parametrize("content", [5, [5], [{"type": "text"}], [{"type": "text", "text": 5}], {}])
@pytest.mark.parametrize("template", [TAKE_PARTS[0], TAKE_TEXTS[0]])
def test_contents_that_are_no_text(prompt, content, template):
    with pytest.raises(ValueError, match="content="):
        prompt([{"role": "user", "content": content}], template)


# ------------------------------------------------------------------------------------- options


def test_template_kwargs_override_named_keywords(prompt):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt(chat, chat_template_kwargs={"add_generation_prompt": False}) == prompt(
        chat, add_generation_prompt=False) != prompt(chat)
    assert prompt(chat, add_generation_prompt=False, chat_template_kwargs={
        "continue_final_message": True}) == prompt(
            chat, add_generation_prompt=False, continue_final_message=True)
    for tools in (None, [{"type": "other"}]):
        assert prompt(chat, "{{ tools[0].type }}", tools=tools, chat_template_kwargs={
            "tools": [{"type": "mine"}]}) == "mine"
    assert prompt(chat, "x", chat_template_kwargs={"chat_template": "y"}) == "y"
    assert prompt(chat, "{{ z }}", chat_template_kwargs={"z": "<"}) == "<"


@pytest.mark.parametrize("bad", [5, "", "x", [], [("a", 1)], True, {"tokenize": True}])
def test_template_kwargs_that_are_no_dict(prompt, bad):
    with pytest.raises(ValueError, match="chat_template_kwargs="):
        prompt([{"role": "user", "content": "a"}], chat_template_kwargs=bad)


def test_a_template_that_the_user_sets_counts_and_truncation_does_not(bundled):
    chat = [{"role": "user", "content": "12 + 34"}]
    with LLM(bundled, dtype="float32", num_kv_blocks=16) as llm:
        tokenizer = llm.get_tokenizer()
        expected = tokenizer.encode("12 + 34 =", add_special_tokens=False)
        tokenizer.chat_template = "{{ messages[0].content }} ="
        tokenizer(["12 + 34"], truncation=True, max_length=1)
        output, = llm.chat(chat, use_tqdm=False)
        assert (output.prompt, output.prompt_token_ids) == ("12 + 34 =", expected)


def test_what_is_dropped_is_said(prompt, caplog):
    """A message without content, and tools that the template does not know."""
    prompt([{"role": "user", "content": "12 + 34"}], ITEMS)
    assert not caplog.messages
    assert prompt([{"role": "user"}], ITEMS) == ""
    assert caplog.messages == ["a message without content, of 'user', counts as empty"]
    caplog.clear()
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    prompt([{"role": "assistant", "content": None, "tool_calls": [call]}], ITEMS)
    assert not caplog.messages
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    prompt([{"role": "user", "content": "12 + 34"}], ITEMS, tools=[tool])
    assert caplog.messages == ["tools are dropped: the chat template knows none"]
