"""What reaches a chat template, and so the prompt."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import GREEDY, check_refused, token_ids
from transformers import AutoTokenizer

from nanoengine import LLM
from nanoengine_extras.tools.chat import form_of_calls, render, takes

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
        inputs = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        (found,) = render(inputs, messages, chat_template=template, **options)
        assert found["prompt_token_ids"] == tokenizer.encode(
            found["prompt"], add_special_tokens=False)
        return found["prompt"]
    return prompt


# ---------------------------------------------------------------------------------- tool calls


OBJECT = {"city": "Ås", "days": [2]}


def called(content: Any, arguments: Any, count: int = 1) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    return [{"role": "assistant", "content": content, "tool_calls": [call] * count}]


def conversation(arguments: Any, count: int = 2) -> list[dict]:
    return [{"role": "user", "content": "rain?"}, *called(None, arguments, count),
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
    messages[1]["tool_calls"] = [{"name": "rain", "arguments": '{"a": 1}'}]
    assert prompt(messages, direct) == '{"a": 1}'


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "null", [1], 5, "nan,"])
def test_arguments_that_are_no_object(prompt, arguments):
    check_refused(r"arguments|Expecting", prompt, conversation(arguments), TO_JSON)
    for calls in (5, ["x"], [None], [{"function": "x"}]):
        messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
        check_refused("tool_calls=", prompt, messages, TO_JSON)


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_none(prompt, calls):
    template = each("{{ 'calls' if 'tool_calls' in m else m.content }}")
    assert prompt([{"role": "assistant", "content": "a", "tool_calls": calls}], template) == "a"


# what real templates do with the calls of a message `m`; functions of the call below
LLAMA = """{%- if 'tool_calls' in m %}{%- set tool_call = m.tool_calls[0].function %}
    {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}
    {{- "}" }}{%- else %}{{- m['content'] | trim }}{%- endif %}"""
QWEN = """{%- if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}
    {{- m.role + ':' + m.content }}{%- elif m.role == "assistant" %}
    {%- if m.content %}{{- m.content }}{%- endif %}
    {%- for tool_call in m.tool_calls %}
        {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
        {{- '{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}{%- endfor %}{%- endif %}"""
QWEN3 = QWEN.replace("{{- tool_call.arguments | tojson }}", """
    {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
    {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}""")
MISTRAL = """{%- if m.tool_calls is defined and m.tool_calls is not none %}
    {%- for tool_call in m.tool_calls %}{%- set out = tool_call.function | tojson %}
        {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}{%- endfor %}
    {%- elif m.role == "assistant" %}{{- " " + m["content"] | trim + eos_token }}{%- endif %}"""
DEEPSEEK = """{%- if m['role'] == 'assistant' and m['content'] is none %}
    {%- for tool in m['tool_calls'] %}{{- '<call>' + tool['type'] + '<sep>' +
        tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
    {%- endfor %}{%- endif %}
    {%- if m['role'] == 'assistant' and m['content'] is not none %}
    {{- '<answer>' + m['content'] }}{%- endif %}"""
GPT_OSS = """{%- if m.role == 'assistant' %}{%- if 'tool_calls' in m and m.tool_calls %}
    {%- if m.content and m.thinking %}{{- raise_exception('not both') }}{%- endif %}
    {%- set tool_call = m.tool_calls[0].function %}
    {{- 'to=functions.' + tool_call.name + ' json<|message|>' }}
    {{- tool_call.arguments | tojson }}{%- endif %}{%- endif %}"""
PHI = """{%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}"""
SMOLLM = """{%- set content = m.content if m.content is string else "" %}
    {%- if m.role == "assistant" %}{{- content.lstrip("\\n") }}
    {%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}{%- endif %}"""
GLM = """{%- for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
    {{- tc.name }}{%- set _args = tc.arguments %}{%- for k, v in _args.items() %}
    {{- '<k>' + k + '<v>' }}{{- v if v is string else v | tojson }}{%- endfor %}{%- endfor %}"""
KIMI = """{%- for tool_call in m['tool_calls'] %}
    {%- set args = tool_call['function']['arguments'] %}
    {{- args if args is string else args | tojson }}{%- endfor %}"""
TEXT = '{"city":"Ås","days":[2]}'
WRITTEN = json.dumps(OBJECT, ensure_ascii=False)
IN_CALL = '"name": "rain", "arguments": ARGUMENTS'
# the form that each expects, and what it writes; a user's text is used as it is but for an object
REAL = {
    "Llama": ("object", LLAMA, '{"name": "rain", "parameters": ARGUMENTS}'),
    "Qwen 2.5": ("object", QWEN, f"{{{IN_CALL}}}"),
    "Mistral": ("object", MISTRAL, f'{{{IN_CALL}, "id": "1"}}'),
    "gpt-oss": ("object", GPT_OSS, "to=functions.rain json<|message|>ARGUMENTS"),
    "Phi": ("object", PHI, f'[{{"id": "1", "type": "function", "function": {{{IN_CALL}}}}}]'),
    "SmolLM": ("object", SMOLLM, f"{{{IN_CALL}}}"),
    "GLM": ("object", GLM, "rain<k>city<v>Ås<k>days<v>[2]"),
    "Qwen 3": ("given", QWEN3, f"{{{IN_CALL}}}"), "Kimi": ("given", KIMI, "ARGUMENTS"),
    "DeepSeek": ("text", DEEPSEEK, "<call>function<sep>rain\n```json\nARGUMENTS\n```"),
    "printed": ("text", "{{ m.tool_calls[0].function.arguments }}", "ARGUMENTS"),
    "method": ("text", "{% set c = m.tool_calls[0].function %}{{ c.get('arguments').strip() }}",
               "ARGUMENTS"),
    "macro": ("text", "{% macro show(a, b) %}{{ a ~ b }}{% endmacro %}"
              "{{ show('x', m.tool_calls[0].function.arguments) }}", "xARGUMENTS")}


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
@pytest.mark.parametrize("name", REAL)
def test_real_templates_write_the_call(prompt, name, arguments, content):
    """Also one that writes it only where the content is None."""
    messages = called(content, arguments)
    if content == "absent":
        del messages[0]["content"]
    form, template, expected = REAL[name]
    if (name, content) == ("DeepSeek", ""):
        expected = "<answer>"
    text = WRITTEN if form == "object" or arguments is OBJECT else TEXT
    assert prompt(messages, each(template)) == expected.replace("ARGUMENTS", text)
    assert form_of_calls(each(template))[0] == form


@pytest.mark.parametrize("template, expected", [
    ("{% if m.content is none %}call{% else %}[{{ m.content }}]{% endif %}", "call"),
    ("{% if m.content != none %}text{% else %}call{% endif %}", "call"),
    ("{% if m.content %}text{% else %}call{% endif %}", "call"),
    ("{% if not m.content %}call{% endif %}[{{ m.content }}]", "call[]"),
    ("{% if m.content is defined %}[{{ m.content }}]{% else %}call{% endif %}", "call"),
    ("{% if 'content' in m %}[{{ m.content }}]{% endif %}call", "call"),
    ("{% if m.content is string %}[{{ m.content }}]{% else %}call{% endif %}", "call"),
    # it cannot tell, or would go through None or print it
    ("[{{ m.content }}]call", "[]call"), ("{{ 'x' + m.content }}call", "xcall"),
    ("{% if m.content is string %}[{{ m.content }}]{% else %}{% for p in m.content %}{{ p.text }}"
     "{% endfor %}{% endif %}call", "call"),
    ("{% if m.content is string %}[{{ m.content }}]{% else %}{{ m.content | tojson }}{% endif %}",
     "[]"),
    # these are tests of the first message
    ("{% set system = messages[0].content %}{% if system is none %}{% endif %}{{ m.content }}", ""),
    ("{% if messages[0]['content'] is defined %}{% endif %}{{ 'x' + m.content }}", "x")])
def test_a_call_without_content(prompt, template, expected):
    template = each(template.replace("call", "{{ m.tool_calls[0].function.name }}"))
    for arguments in (OBJECT, TEXT):
        assert prompt(called(None, arguments), template) == expected.replace("call", "rain")
    # without a call, it counts as empty, as everywhere
    assert "None" not in prompt([{"role": "user", "content": None}], each("[{{ m.content }}]"))


def test_other_fields_reach_the_template(prompt):
    # thoughts, by both names
    for name in ("reasoning", "reasoning_content"):
        thought = {"role": "assistant", "content": "46", name: "hm"}
        assert prompt([thought], each("[{{ m.reasoning_content }}]{{ m.content }}")) == "[hm]46"
    message = {"role": "tool", "tool_call_id": "7", "name": "rain", "content": "no",
               "refusal": None, "reasoning_content": "hm", "own": {"a": [None]}}
    shown = json.loads(prompt([message], "{{ messages[0] | tojson }}"))
    # newer releases of transformers add what templates of gpt-oss read
    assert shown.pop("thinking", "hm") == "hm"
    assert shown == {"role": "tool", "tool_call_id": "7", "name": "rain", "content": "no",
                     "reasoning_content": "hm", "own": {"a": [None]}}
    legacy = {"role": "assistant", "content": None,
              "function_call": {"name": "rain", "arguments": TEXT}}
    template = """{% if m.content is none %}{{ m.function_call.arguments }}{% endif %}"""
    assert prompt([legacy], each(template)) == TEXT


def test_a_call_in_a_conversation(prompt):
    """The whole conversation, in a template that adds texts."""
    chat = [*conversation(OBJECT, 1), {"role": "assistant", "content": "It is dry."}]
    assert prompt(chat, each(DEEPSEEK)).endswith(f"{WRITTEN}\n```<answer>It is dry.")
    written = IN_CALL.replace("ARGUMENTS", WRITTEN)
    assert prompt(chat, each(QWEN)) == f"user:rain?{{{written}}}assistant:It is dry."


# ------------------------------------------------------------------------------------- content


def loop(parts: str, test: str = "") -> str:
    """A template that shows the text parts of a content."""
    return (f"{{% for p in {parts} {test} %}}{{% if p.type == 'text' %}}[{{{{ p.text }}}}]"
            "{% endif %}{% endfor %}")


def each(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


TAKE_PARTS = [
    each(loop("m.content")),
    each(loop("m['content'][:9]")),
    each(loop("m.content", "if p.type == 'text'")),
    each("{% if m.content is string %}{{ m.content }}{% else %}" + loop("m.content")
         + "{% endif %}"),
    "{% macro show(content) %}" + loop("content") + "{% endmacro %}"
    + each("{{ show(m.content) }}"),
    each("{% generation %}" + loop("m.content") + "{% endgeneration %}{% continue %}")]
TAKE_TEXTS = [
    each("{{ m.content }}"),
    each("{{ m['content'] | trim }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"),
    each("{% for word in m.content.split(' ') %}{{ word }} {% endfor %}"),
    each("{% if m.content is string %}{{ m.content }}{% else %}lost{% endif %}")]


@pytest.mark.parametrize("template", TAKE_PARTS)
def test_templates_that_go_through_parts_get_parts(prompt, template):
    assert takes(template, "user")[1]
    for content in ("What is", [{"type": "text", "text": "What is"}], ["What is"]):
        is_shown = content == "What is" and "is string" in template
        expected = "What is" if is_shown else "[What is]"
        assert prompt([{"role": "user", "content": content}], template) == expected
    two = [{"type": "text", "text": "What "}, "is"]
    assert prompt([{"role": "user", "content": two}], template) == "[What ][is]"
    for nothing in ({"role": "user"}, {"role": "user", "content": None}):
        assert prompt([nothing], template) == ""


@pytest.mark.parametrize("template", TAKE_TEXTS)
def test_other_templates_get_one_text(prompt, template):
    as_text, as_parts = takes(template, "user")
    assert as_text and not as_parts
    for content in ("a\nb", ["a", {"type": "input_text", "text": "b"}]):
        message = {"role": "user", "content": content}
        assert prompt([message], template).strip() == "a\nb"
        assert message == {"role": "user", "content": content}, "the user's message is left alone"
    for nothing in ({}, {"content": None}, {"content": []}):
        assert prompt([{"role": "user"} | nothing], template) == prompt(
            [{"role": "user", "content": ""}], template)


PRINTED = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
PARTS = loop("m.content")


@pytest.mark.parametrize("template, expected", [
    (PRINTED + "{% for m in messages[1:] %}" + PARTS + "{% endfor %}", "be brief[hi][hello]"),
    (PRINTED + each("{% if m.role != 'system' %}" + PARTS + "{% endif %}"), "be brief[hi][hello]"),
    (PRINTED + each("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS
                    + "{% endif %}"), "be briefbe briefhihello"),
    (each("{% if m.role == 'assistant' %}{{ '<' + m.content + '>' }}{% else %}" + PARTS
          + "{% endif %}"), "[be brief][hi]<hello>"),
    (each("{% if m.role == 'assistant' %}{{ m.content | trim }}{% else %}"
          + loop("m['content'][:3]") + "{% endif %}"), "[be brief][hi]hello"),
    (each("{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }};"
          "{% endfor %}"), "be brief;hi;hello;"),
    (each("{% if m.role == 'user' %}{{ m.content[0].text }}{% for p in m.content %}{% endfor %}"
          "{% else %}{{ m.content }}{% endif %}"), "be briefhihello")])
def test_texts_stay_texts_where_they_are_printed(prompt, template, expected):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"}]
    assert prompt(chat, template, add_generation_prompt=False) == expected
    assert chat[0]["content"] == "be brief", "a user's messages stay as they are"
    assert type(chat[0]["content"]) is str
    users = [{"role": "user", "content": "hi"}]
    if template.startswith(PRINTED) and "[1:]" not in template:
        assert prompt(users, template) in ("[hi]", "hi")


def test_tools_can_be_functions_where_a_template_takes_parts(prompt):
    def rain(city: str) -> bool:
        """Says whether it rains.

        Args:
            city: the city
        """

    template = "{% if tools %}{{ tools[0].function.name }}:{% endif %}" + each(loop("m.content"))
    chat = [{"role": "user", "content": "a"}]
    assert prompt(chat, template, tools=[rain]) == "rain:[a]"
    check_refused("tools: ", prompt, chat, template, tools=[5])
    for tools in (5, 0, False):
        check_refused(f"tools={tools} is not accepted: it must be a list of functions", prompt,
                      chat, template, tools=tools)


def test_the_form_can_be_given(prompt):
    chat = [{"role": "user", "content": "a"}]
    template = "{{ messages[0].content | tojson }}"
    found = {name: prompt(chat, template, chat_template_content_format=name)
             for name in ("auto", "string", "openai")}
    assert found == {"auto": '"a"', "string": '"a"',
                     "openai": json.dumps([{"type": "text", "text": "a"}])}
    with pytest.raises(ValueError, match="chat_template_content_format='list'"):
        prompt(chat, chat_template_content_format="list")


@pytest.mark.parametrize("messages, message", [
    *(([{"role": "user", "content": content}], "content=") for content in (
        5, [5], [{"type": "text"}], [{"type": "text", "text": 5}], {},
        [{"type": "image_url", "image_url": "…"}])),
    *((each, "messages=") for each in (
        [5], [[5]], [{"content": "hello"}], [[]], [[{"role": "user", "content": "a"}], []], [],
        "hello", None, [{"role": "user", "content": "a"}, "b"]))])
@pytest.mark.parametrize("template", [None, TAKE_PARTS[0], TAKE_TEXTS[0]])
def test_what_is_no_conversation_is_refused_by_name(prompt, messages, message, template):
    check_refused(message, prompt, messages, template)


# ------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("template", [None, ""])
def test_without_a_template_the_error_says_what_to_do(bundled, template):
    base = AutoTokenizer.from_pretrained(bundled)
    base.chat_template = None
    inputs = SimpleNamespace(get_tokenizer=lambda: base)
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="^chat_template=.* is not accepted: .*the tokenizer has "
                       "none; for a base model, use `generate` instead"):
        render(inputs, chat, chat_template=template)
    assert render(inputs, chat, chat_template="x{{ messages[0].content }}")[0]["prompt"] == "xa"
    base.chat_template = {"rag": "r", "tool_use": "t"}
    check_refused(r"chat_template: .*\['rag', 'tool_use'\]", render, inputs, chat)
    assert render(inputs, chat, chat_template="rag")[0]["prompt"] == "r"
    assert render(inputs, chat, tools=[{"type": "x"}])[0]["prompt"] == "t"


@pytest.mark.parametrize("template, message", [
    *((dict(chat_template_kwargs=bad), "chat_template_kwargs=") for bad in (
        5, "", "x", [], [("a", 1)], True, {"tokenize": True}, {1: "a"})),
    (5, "chat_template=5 is not accepted"), ("{% if %}", "chat_template: "),
    ("{{ 5 | nothing }}", "chat_template: "), ("{{ 1 / 0 }}", "messages: division by zero"),
    ("chat_template.jinja", "chat_template=.*a Jinja template: Path\\(…\\).read_text"),
    ("a/template.txt", "chat_template=.*a Jinja template: Path\\(…\\).read_text")])
def test_what_is_no_template_is_refused(prompt, template, message):
    options = template if isinstance(template, dict) else dict(template=template)
    check_refused(message, prompt, [{"role": "user", "content": "a"}], **options)


def test_a_message_is_continued_or_answered(prompt):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="continue_final_message=True is not accepted"):
        prompt(chat, continue_final_message=True)
    for template in (each("<{{ m.content }}>"), each("<" + loop("m.content") + ">")):
        found = prompt(chat, template, continue_final_message=True, add_generation_prompt=False)
        assert found in ("<a><b", "<[a]><[b")


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
    assert caplog.messages == ["a message of 'user' has no content, and counts as empty"]
    caplog.clear()
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    prompt([{"role": "assistant", "content": None, "tool_calls": [call]}], ITEMS)
    assert not caplog.messages
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    prompt([{"role": "user", "content": "12 + 34"}], ITEMS, tools=[tool])
    assert caplog.messages == ["tools are dropped: the chat template does not use any"]


# templates that leave out what they do not know, one that names roles, one that checks a text
BRANCHES = each("{% if m.role == 'system' %}S:{{ m.content }}{% elif m.role == 'user' %}"
                "U:{{ m.content }}{% elif m.role == 'assistant' %}A:{{ m.content }}{% endif %}")
NAMES_IT = each("{% if m.role in ['developer', 'tool'] %}{{ m.role }}:{{ m.content }}{% endif %}")
CHECKED = each("{% if m.content[0] != '[' %}{{ raise_exception('a list') }}{% endif %}"
               "{{ m.content | length }}")


@pytest.mark.parametrize("content", ["be brief", [{"type": "text", "text": "be brief"}]])
@pytest.mark.parametrize("template, expected", [
    (BRANCHES, "S:be brief"), (NAMES_IT, "developer:be brief"),
    (each("{{ m.role }}:{{ m.content }}"), "system:be brief"),
    (each("{% if m.role == 'system' %}" + loop("m.content") + "{% endif %}"), "[be brief]")])
def test_a_developer_is_the_system_unless_the_template_names_it(prompt, template, expected,
                                                                content):
    assert prompt([{"role": "developer", "content": content}], template) == expected


@pytest.mark.parametrize("messages, template, lost", [
    (conversation(OBJECT), BRANCHES, ["tool calls", "messages of 'tool'"]),
    (conversation(OBJECT), ITEMS, []), (conversation(OBJECT), TO_JSON, []),
    (conversation(OBJECT), NAMES_IT, ["tool calls"]),
    (conversation(TEXT), each(QWEN3), ["messages of 'tool'"]),
    ([{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}],
     BRANCHES, ["tool calls"]),
    ([{"role": "function", "content": [{"type": "text", "text": "no"}]}], BRANCHES,
     ["messages of 'function'"]),
    ([{"role": "system", "content": "be brief"}], NAMES_IT, ["messages of 'system'"]),
    # not in other letters, and not if the template checks the text
    ([{"role": "tool", "content": "straße"}], each("{{ m.content | upper }}"), []),
    ([{"role": "tool", "content": "[1]"}], CHECKED, []),
    ([{"role": "tool", "content": " a \n"}], each("{{ m.content | trim }}"), [])])
def test_what_a_template_leaves_out_is_said(prompt, caplog, messages, template, lost):
    prompt(messages, template, tools=None)
    assert [text.partition(" are dropped: the chat template does not write any")[0]
            for text in caplog.messages] == lost


# -------------------------------------------------------------------------- through the engine


def test_chat(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("12 + 34", "sort c b a")]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["46", "a b c"]
    assert outputs[0].prompt == "<|im_start|>user\n12 + 34<|im_end|>\n<|im_start|>assistant\n"
    assert outputs[0].prompt_token_ids.count(1) == 2, "special tokens are taken from the template"
    assert token_ids(llm.chat(conversations[1], GREEDY, use_tqdm=False)) == token_ids(outputs[1:])
    again = llm.chat(conversations, GREEDY, False, priority=[1, 0], add_generation_prompt=False,
                     chat_template="{{ messages[0].content }} ={{ x }}",
                     chat_template_kwargs={"x": "!"})
    assert [output.prompt for output in again] == ["12 + 34 =!", "sort c b a =!"]
