"""Turns conversations into prompts, with the tokenizer's chat template, for `LLM.chat`.

Templates expect messages in different forms: contents as strings or as lists of parts, arguments of
tool calls as objects or as JSON strings. `uses` reads a template's syntax tree to find how it uses
a field.
"""

import json
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from typing import Any

from jinja2 import nodes
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from nanoengine.errors import logger, naming, rejected
from nanoengine.features import extension, is_installed
from nanoengine.llm import LLM
from nanoengine.requests import InputProcessor, Params, RequestOutput


def chat(llm: LLM, messages: list[Any], sampling_params: Params = None, use_tqdm: Any = True, *,
         priority: Any = None, **options: Any) -> list[RequestOutput]:
    """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

    The options are those of `render`; the other arguments are those of `LLM.generate`.
    """
    prompts = render(llm.inputs, messages, **options)
    return llm.generate(prompts, sampling_params, use_tqdm, priority)


def stream_chat(llm: LLM, messages: list[Any], sampling_params: Params = None, *,
                priority: Any = None, **options: Any) -> Iterator[RequestOutput]:
    """Like `chat`, but yields the answer so far whenever it has new tokens, like `LLM.stream`."""
    return llm.stream(render(llm.inputs, messages, **options), sampling_params, priority)


def render(inputs: InputProcessor, messages: Any, *, chat_template: str | None = None,
           add_generation_prompt: bool = True, continue_final_message: bool = False,
           tools: Any = None, chat_template_kwargs: Any = None,
           chat_template_content_format: str = "auto", **unknown: Any) -> list[dict[str, Any]]:
    """Returns a prompt for each conversation.

    messages: the content of each is a string, or a list of strings and {"type": "text", "text":
        …}, joined by newlines unless the template loops over the parts itself. Arguments of
        tool calls are objects, or JSON strings. Other fields are passed on as they are.
    chat_template: the template to use instead of the tokenizer's own.
    add_generation_prompt: let the assistant begin its answer; by default True.
    continue_final_message: leave the last message open, so that the model continues it; by
        default False, and True needs add_generation_prompt=False.
    tools: functions or JSON schemas, for templates that support tools.
    chat_template_kwargs: other template variables: {"enable_thinking": False} for Qwen3; they
        override the arguments above, as in vLLM.
    chat_template_content_format: "string" gives the content of a message to the template as one
        string, "openai" as a list of text parts. "auto" looks at the template: one that loops over
        the parts gets a list, any other gets a string.

    Raises ValueError if there is no template.
    """
    for name in unknown:
        known = [each for each in signature(render).parameters if each != "unknown"][2:]
        near = [f"the nearest is {each}" for each in get_close_matches(name, known, 1)]
        advice = extension("tools.vllm").advice(name) if is_installed("tools.vllm") else ""
        last = "leave it out, or if the template has such a variable, use chat_template_kwargs"
        raise TypeError(f"{name} is not known: {advice or [*near, last][0]}")
    encoder = inputs.get_tokenizer()
    # the user's copy can have another template, but must not change how texts are encoded
    tokenizer = vars(inputs).get("tokenizer_of_user", encoder)
    chats = [messages] if is_chat(messages) else messages
    if not isinstance(chats, list) or not chats or not all(map(is_chat, chats)):
        raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
    further = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(further, dict) or "tokenize" in further:
        raise rejected("chat_template_kwargs", further, "a dict of variables, without 'tokenize'")
    if chat_template_content_format not in ("auto", "string", "openai"):
        raise rejected("chat_template_content_format", chat_template_content_format,
                       "'auto', 'string' or 'openai'")
    options = dict(chat_template=chat_template, tools=tools, documents=None,
                   add_generation_prompt=add_generation_prompt,
                   continue_final_message=continue_final_message) | further
    if options["continue_final_message"] and options["add_generation_prompt"]:
        raise rejected("continue_final_message", options["continue_final_message"],
                       "False, or used with add_generation_prompt=False")
    template = find_template(tokenizer, options.pop("chat_template"), options["tools"])
    if options["tools"]:
        if "tools" not in template:
            logger.warning("tools are dropped: the chat template does not use any")
        if not isinstance(options["tools"], (list, tuple)):
            raise rejected("tools", options["tools"], "a list of functions, or of dicts")
        with naming("tools"):
            options["tools"] = [tool if isinstance(tool, dict) else get_json_schema(tool)
                                for tool in options["tools"]]
    with naming("messages"):
        variables = tokenizer.special_tokens_map | options
        is_openai = chat_template_content_format == "openai"
        is_auto = chat_template_content_format == "auto"
        keeps_lists = is_openai or (is_auto and takes_parts(template))
        chats = [[prepared(each, template, keeps_lists) for each in chat] for chat in chats]
        for each in chats if keeps_lists else ():
            make_lists(each, template, variables, every=is_openai)
        # `apply_chat_template` would leave out a content of None
        texts = render_jinja_template(chats, chat_template=template, **variables)[0]
        # The template has written the special tokens.
        ids = encoder(texts, add_special_tokens=False, verbose=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids)]


def is_chat(messages: Any) -> bool:
    """Returns whether this is one conversation."""
    return isinstance(messages, list) and len(messages) > 0 and all(
        isinstance(message, dict) and "role" in message for message in messages)


def find_template(tokenizer: Any, given: Any, tools: Any) -> str:
    """Returns the template to use: the given one, one given by name, or the tokenizer's own."""
    is_text = isinstance(given, str) and not given.endswith((".jinja", ".txt"))
    if given is not None and not is_text:
        raise rejected("chat_template", given, "None, or a Jinja template: Path(…).read_text()")
    if not given and not tokenizer.chat_template:
        raise rejected("chat_template", given, "given, since the tokenizer has none; for a base "
                       "model, use `generate` instead")
    with naming("chat_template"):
        template = tokenizer.get_chat_template(given, tools)
        _compile_jinja_template(template)
    return template


# ------------------------------------------------------------------------------------- messages


def prepared(message: dict[str, Any], template: str, keeps_lists: bool) -> dict[str, Any]:
    """Returns a message of OpenAI's format as its template expects it.

    Fields that are None are left out, as in transformers, except the content: see
    `missing_content`.

    keeps_lists: a list of text parts stays a list; otherwise, they are joined by newlines.
    """
    content = message.get("content")
    calls = message.get("tool_calls")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    if not parts and not calls:
        logger.warning(f"a message of {message['role']!r} has no content, and counts as empty")
    with naming(rejected("content", content, 'a text, or parts {"type": "text", "text": …}')):
        texts = [part if isinstance(part, str) else part["text"] for part in parts]
        joined = "\n".join(texts)
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = joined
    if keeps_lists and isinstance(content, list):
        found["content"] = parts_of(texts)
    if content is None and (calls or message.get("function_call")):
        del found["content"]
        found |= missing_content(template)
    found.pop("tool_calls", None)
    if calls:
        form = form_of_arguments(template)
        with naming(rejected("tool_calls", calls, "a list of OpenAI's tool calls")):
            found["tool_calls"] = [with_arguments(call, form) for call in calls]
    return found


class Asked(str):
    """A string that records whether a template loops over its parts."""

    is_asked = False

    def __iter__(self) -> Any:
        self.is_asked = True
        return iter(parts_of([self] if self else []))

    def __getitem__(self, key: Any) -> Any:
        # a template can loop over a slice
        return self if isinstance(key, slice) else [*self][key]


def parts_of(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": str(text)} for text in texts]


def make_lists(chat: list[dict[str, Any]], template: str, variables: dict[str, Any],
               every: bool) -> None:
    """Turns contents that are strings into lists of parts: those that the template loops over, or
    every one.

    A template can loop in one place, and print the content of a message in another. So only
    rendering shows what it does with each message.
    """
    asked = [message | {"content": Asked(message["content"])}
             if isinstance(message.get("content"), str) else message for message in chat]
    if not every:
        _compile_jinja_template(template).render(messages=asked, **variables)
    for message, seen in zip(chat, asked):
        text = seen.get("content")
        if isinstance(text, Asked) and (every or text.is_asked):
            message["content"] = [*text]


def missing_content(template: str) -> dict[str, Any]:
    """Returns the content that a template expects in a message that has only tool calls.

    Some templates write a call only if the content is None, or is not defined; others would print
    "None". With `if message.content`, a template cannot tell None from an empty string.
    """
    # templates often test the first message, usually the system's, separately
    found = uses(template, "content", but_first=True)
    is_shown = {"for", "| tojson"} & found
    if "is none" in found or ("is string" in found and not is_shown):
        return {"content": None}
    return {} if "is defined" in found else {"content": ""}


def with_arguments(call: dict[str, Any], form: str) -> dict[str, Any]:
    """Returns a tool call with its arguments, an object or its JSON, in one of the forms of
    `form_of_arguments`. Missing arguments become an empty object."""
    if "function" in call:
        return call | {"function": with_arguments(call["function"], form)}
    given = call.get("arguments") or {}
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise rejected("arguments", given, "an object, or its JSON")
    if form == "text" and not isinstance(given, str):
        return call | {"arguments": json.dumps(given, ensure_ascii=False)}
    return call | {"arguments": found if form == "object" else given}


# ------------------------------------------------------------------------------------ templates


def takes_parts(template: str) -> bool:
    """Returns whether a template loops over the parts of a message: `for part in m.content`.

    Like vLLM, it looks for such a loop in the template's syntax tree.
    """
    return "for" in uses(template, "content")


def form_of_arguments(template: str) -> str:
    """Returns the form of a tool call's arguments that a template expects.

    "object": most templates expect it; they write `arguments | tojson` or the whole call.
    "text": a JSON string, which they print or add to other strings.
    "given": either; the template looks at the type itself.
    """
    found = uses(template, "arguments")
    if {"is string", "is mapping"} & found:
        return "given"
    as_text = {"print", "| string", *(f".{name}" for name in dir(str))}
    as_object = {"for", "[]", "| tojson", "| items", "| dictsort"} | {
        use for use in found if use.startswith(".") and use not in as_text}
    return "text" if as_text & found and not as_object & found else "object"


# filters that change a value
CONVERTING = {"tojson", "string", "items", "dictsort", "length", "count"}


@lru_cache
def uses(template: str, field: str, but_first: bool = False) -> frozenset[str]:
    """Returns how a template uses a field of its messages or of their tool calls.

    "print": it is printed, or added to a string; "for": the template loops over it; "is string",
    "| tojson", ".items": this test, filter or method is applied to it; "[]": it is indexed.

    but_first: except for `messages[0]`
    """
    tree = _compile_jinja_template(template).environment.parse(template)
    first = nodes.Getitem(nodes.Name("messages", "load"), nodes.Const(0), "load")
    # the names of the field, and of variables that it is assigned to
    names = {field}

    def is_field(node: Any) -> bool:
        match node:
            case nodes.Getattr(node=base) | nodes.Getitem(node=base) if but_first and base == first:
                return False
            case nodes.Getitem(node=base, arg=nodes.Slice()):
                return is_field(base)
            case nodes.Filter(node=base, name=name):
                return name not in CONVERTING and is_field(base)
            case nodes.Or() | nodes.And() | nodes.CondExpr():
                return any(map(is_field, node.iter_child_nodes(exclude=["test"])))
            case (nodes.Name(name=name) | nodes.Getattr(attr=name)
                  | nodes.Getitem(arg=nodes.Const(value=name))
                  | nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_])):
                return name in names
        return False

    while bound := assigned(tree, is_field) - names:
        names |= bound
    found = set()
    for node in tree.find_all(nodes.Node):
        match node:
            case nodes.Test(node=base, name=name) if is_field(base):
                found.add("is defined" if name == "undefined" else f"is {name}")
            case nodes.Filter(node=base, name=name) if is_field(base):
                found.add(f"| {name}")
            case nodes.For(iter=base) if is_field(base):
                found.add("for")
            case nodes.Getattr(node=base, attr=name) if is_field(base):
                found.add(f".{name}")
            case nodes.Getitem(node=base, arg=key) if is_field(base):
                found.add("print" if isinstance(key, nodes.Slice) else "[]")
            case nodes.Compare(expr=nodes.Const(value=name)) if name in names:
                # 'content' in message
                found.add("is defined")
            case nodes.Compare(expr=base, ops=[nodes.Operand(expr=nodes.Const(value=None))]):
                found |= {"is none"} if is_field(base) else set()
            case nodes.Output() | nodes.Add() | nodes.Concat() | nodes.Mod():
                found |= {"print"} if any(map(is_field, node.iter_child_nodes())) else set()
    return frozenset(found)


def assigned(tree: nodes.Template, is_field: Callable[[Any], bool]) -> set[str]:
    """Returns the variables to which a template assigns a field, and parameters of its macros."""
    found = {each.target.name for each in tree.find_all(nodes.Assign)
             if isinstance(each.target, nodes.Name) and is_field(each.node)}
    macros = {each.name: each.args for each in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            arguments = zip(macros.get(call.node.name, ()), call.args)
            found |= {name.name for name, value in arguments if is_field(value)}
            found |= {each.key for each in call.kwargs if is_field(each.value)}
    return found
