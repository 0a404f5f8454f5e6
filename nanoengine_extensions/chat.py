"""Turns conversations into prompts, by the tokenizer's chat template, for `LLM.chat`."""

import json
from functools import lru_cache
from inspect import signature
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from nanoengine.seams import naming, rejected
from nanoengine_extensions.metrics import logger


def render(tokenizer: Any, messages: Any, encoder: Any = None, *, chat_template: str | None = None,
           add_generation_prompt: bool = True, continue_final_message: bool = False,
           tools: Any = None, chat_template_kwargs: Any = None,
           chat_template_content_format: str = "auto") -> list[dict[str, Any]]:
    """Returns a prompt for each conversation.

    tokenizer: its template counts; encoder: turns texts into tokens, by default the same one.
    The options are those of `LLM.chat`; chat_template_kwargs override the others, as in vLLM.
    chat_template_content_format: "string" gives the content of a message to the template as one
        text, "openai" as a list of text parts; "auto": see `takes_parts`.
    """
    chats = [messages] if is_chat(messages) else messages
    if not isinstance(chats, list) or not chats or not all(map(is_chat, chats)):
        raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
    further = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(further, dict) or "tokenize" in further:
        raise rejected("chat_template_kwargs", further, "a dict of variables, without 'tokenize'")
    formats = {"auto": None, "string": False, "openai": True}
    if chat_template_content_format not in formats:
        raise rejected("chat_template_content_format", chat_template_content_format,
                       f"one of {[*formats]}")
    options = dict(chat_template=chat_template, tools=tools, tokenize=False,
                   add_generation_prompt=add_generation_prompt,
                   continue_final_message=continue_final_message) | further
    with naming("messages"):
        template = tokenizer.get_chat_template(options["chat_template"], options["tools"])
        as_parts = formats[chat_template_content_format]
        if as_parts is None:
            as_parts = takes_parts(template)
        if options["tools"] and "tools" not in template:
            logger.warning("tools are dropped: the chat template knows none")
        chats = [[prepared(message, as_parts) for message in chat] for chat in chats]
        texts = tokenizer.apply_chat_template(chats, **options)
        # The template has written the special tokens.
        ids = (encoder or tokenizer)(texts, add_special_tokens=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids)]


OPTIONS = [*signature(render).parameters][3:]


def is_chat(messages: Any) -> bool:
    """Returns whether this is one conversation."""
    return isinstance(messages, list) and len(messages) > 0 and all(
        isinstance(message, dict) and "role" in message for message in messages)


def prepared(message: dict[str, Any], as_parts: bool) -> dict[str, Any]:
    """Returns a message of OpenAI's format as templates expect it, and as vLLM passes it.

    Its content is one text, with text parts joined by newlines, or a list of text parts. Arguments
    of tool calls are objects, and an empty list of tool calls is left out.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    if not parts and not message.get("tool_calls"):
        logger.warning(f"a message without content, of {message['role']!r}, counts as empty")
    with naming(rejected("content", content, 'a text, or parts {"type": "text", "text": …}')):
        texts = [part if isinstance(part, str) else part["text"] for part in parts]
        joined = "\n".join(texts)
    in_parts = [{"type": "text", "text": text} for text in texts]
    found = message | {"content": in_parts if as_parts else joined}
    calls = found.pop("tool_calls", None)
    if calls:
        with naming(rejected("tool_calls", calls, "a list of OpenAI's tool calls")):
            found["tool_calls"] = [with_object(call) for call in calls]
    return found


def with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call with its arguments, perhaps a text of JSON, as an object."""
    if "function" in call:
        return call | {"function": with_object(call["function"])}
    arguments = call.get("arguments") or {}
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict):
        raise rejected("arguments", arguments, "an object, or its JSON")
    return call | {"arguments": found}


@lru_cache
def takes_parts(template: str) -> bool:
    """Returns whether a template goes through the parts of a content: `for part in m.content`.

    Like vLLM, it looks for such a loop in the template's syntax tree.
    """
    tree = _compile_jinja_template(template).environment.parse(template)
    names = {"content"}

    def is_content(node: Any) -> bool:
        match node:
            case (nodes.Filter(node=inner) | nodes.Test(node=inner)
                  | nodes.Getitem(node=inner, arg=nodes.Slice())):
                return is_content(inner)
            case (nodes.Name(name=name) | nodes.Getattr(attr=name)
                  | nodes.Getitem(arg=nodes.Const(value=name))):
                return name in names
        return False

    names |= {each.target.name for each in tree.find_all(nodes.Assign)
              if isinstance(each.target, nodes.Name) and is_content(each.node)}
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
