"""Turns conversations into prompts, with the tokenizer's chat template, for `LLM.chat`.

Each message gets the form that the template expects: see templates.py. Instructions, tool calls and
results that a template leaves out are reported.
"""

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from inspect import signature
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from nanoengine.errors import logger, naming, rejected
from nanoengine.llm import LLM
from nanoengine.requests import InputProcessor, Params, RequestOutput
from nanoengine_extras.tools.chat.templates import form_of_calls, is_lost, takes


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
        tool calls are objects, or JSON strings. The role "developer" becomes "system" unless the
        template names it. Other fields are passed on as they are.
    chat_template: the template to use instead of the tokenizer's own.
    add_generation_prompt: let the assistant begin its answer; by default True.
    continue_final_message: leave the last message open, so that the model continues it; by
        default False, and True needs add_generation_prompt=False.
    tools: functions or JSON schemas, for templates that support tools.
    chat_template_kwargs: other template variables: {"enable_thinking": False} for Qwen3; they
        override the arguments above, as in vLLM.
    chat_template_content_format: "string" gives the content of a message to the template as one
        string, "openai" as a list of text parts. "auto" tries the template: one that loops over
        the parts gets a list, any other gets a string.

    Raises ValueError if there is no template.
    """
    for name in unknown:
        known = [*signature(render).parameters][2:-1]
        near = [f"the nearest is {each}" for each in get_close_matches(name, known, 1)]
        last = "leave it out, or if the template has such a variable, use chat_template_kwargs"
        raise TypeError(f"{name} is not known: {[*near, last][0]}")
    encoder = inputs.get_tokenizer()
    # the user's copy can have another template, but must not change how texts are encoded
    tokenizer = vars(inputs).get("tokenizer_of_user", encoder)
    chats = [messages] if is_chat(messages) else messages
    if not isinstance(chats, list) or not chats or not all(map(is_chat, chats)):
        raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
    further = {} if chat_template_kwargs is None else chat_template_kwargs
    is_named = isinstance(further, dict) and all(isinstance(name, str) for name in further)
    if not is_named or "tokenize" in further:
        raise rejected("chat_template_kwargs", further, "a dict of variables, without 'tokenize'")
    if chat_template_content_format not in ("auto", "string", "openai"):
        raise rejected("chat_template_content_format", chat_template_content_format,
                       "'auto', 'string' or 'openai'")
    options = dict(chat_template=chat_template, tools=tools, documents=None,
                   add_generation_prompt=add_generation_prompt,
                   continue_final_message=continue_final_message) | further
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(options[name], bool):
            raise rejected(name, options[name], "True or False")
    if options["continue_final_message"] and options["add_generation_prompt"]:
        raise rejected("continue_final_message", options["continue_final_message"],
                       "False, or used with add_generation_prompt=False")
    if not isinstance(options["tools"], (list, tuple, type(None))):
        raise rejected("tools", options["tools"], "a list of functions, or of dicts")
    template = find_template(tokenizer, options.pop("chat_template"), options["tools"])
    if options["tools"]:
        if "tools" not in template:
            logger.warning("tools are dropped: the chat template does not use any")
        with naming("tools"):
            options["tools"] = [tool if isinstance(tool, dict) else get_json_schema(tool)
                                for tool in options["tools"]]
    with naming("messages"):
        variables = tokenizer.special_tokens_map | options
        chats = [[prepared(each, template, chat_template_content_format) for each in chat]
                 for chat in chats]
        # `apply_chat_template` would leave out a content of None
        texts = render_jinja_template(chats, chat_template=template, **variables)[0]
        lost = [each for chat in chats for message in chat for each in left_out(message, template)]
        for each in dict.fromkeys(lost):
            logger.warning(f"{each} are dropped: the chat template does not write any, so the "
                           "model does not see them")
        # The template has written the special tokens.
        ids = encoder(texts, add_special_tokens=False, verbose=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids)]


def is_chat(messages: Any) -> bool:
    """Returns whether this is one conversation."""
    return isinstance(messages, list) and len(messages) > 0 and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


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


def prepared(message: dict[str, Any], template: str, content_format: str) -> dict[str, Any]:
    """Returns a message of OpenAI's format as its template expects it.

    Fields that are None are left out, as in transformers, except the content of a message that has
    only calls: see `form_of_calls`.
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
    if message["role"] == "developer" and not re.search("[\"']developer[\"']", template):
        # most templates leave out roles that they do not know
        found["role"] = "system"
    if "reasoning" in found:
        # vLLM's name in answers; templates have the other one
        found.setdefault("reasoning_content", found["reasoning"])
    as_text, as_parts = takes(template, found["role"])
    is_list = as_parts and (isinstance(content, list) or not as_text)
    is_list = {"auto": is_list, "openai": True, "string": False}[content_format]
    found["content"] = parts_of(texts if joined else []) if is_list else joined
    form, missing, _ = form_of_calls(template)
    if content is None and (calls or message.get("function_call")):
        del found["content"]
        found |= missing
    found.pop("tool_calls", None)
    if calls:
        with naming(rejected("tool_calls", calls, "a list of OpenAI's tool calls")):
            found["tool_calls"] = [with_arguments(call, form) for call in calls]
    return found


def parts_of(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def with_arguments(call: dict[str, Any], form: str) -> dict[str, Any]:
    """Returns a tool call with its arguments, an object or its JSON, in one of the forms of
    `form_of_calls`. Missing arguments become an empty object."""
    if "function" in call:
        return call | {"function": with_arguments(call["function"], form)}
    given = call.get("arguments") or {}
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise rejected("arguments", given, "an object, or its JSON")
    if form == "text" and not isinstance(given, str):
        return call | {"arguments": json.dumps(given, ensure_ascii=False)}
    return call | {"arguments": found if form == "object" else given}


def left_out(message: dict[str, Any], template: str) -> Iterator[str]:
    """Yields what a template writes of no message: calls, instructions, or results of tools."""
    if {"tool_calls", "function_call"} & message.keys() and form_of_calls(template)[2]:
        yield "tool calls"
    role = message["role"]
    if role not in ("user", "assistant") and message.get("content"):
        if is_lost(*takes(template, role)):
            yield f"messages of {role!r}"
