"""Turns conversations into prompts, by the tokenizer's chat template, for `LLM.chat`."""

import json
import logging
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from nanoengine.checks import naming, rejected
from nanoengine.llm import LLM
from nanoengine.outputs import RequestOutput
from nanoengine.requests import InputProcessor, Params

logger = logging.getLogger("nanoengine")


def chat(llm: LLM, messages: list[Any], sampling_params: Params = None, use_tqdm: bool = True, *,
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

    messages: the content of each is a text, or a list of texts and {"type": "text", "text": …},
        which are joined by newlines, unless the template goes through the parts itself.
    chat_template: in place of the tokenizer's own.
    add_generation_prompt: let the assistant begin its answer; by default True.
    continue_final_message: leave the last message open, so that the model continues it; by
        default False, and True needs add_generation_prompt=False.
    tools: functions or JSON schemas, for templates that know tools.
    chat_template_kwargs: further template variables: {"enable_thinking": False} for Qwen3; they
        override the arguments above, as in vLLM.
    chat_template_content_format: "string" gives the content of a message to the template as one
        text, "openai" as a list of text parts; "auto": see `takes_parts`.

    Raises ValueError if there is no template.
    """
    for name in unknown:
        known = [each for each in signature(render).parameters if each != "unknown"][2:]
        near = get_close_matches(name, known, 1)
        raise TypeError(f"{name} is not known: " + (
            f"the nearest is {near[0]}" if near else
            "leave it out, or if the template has such a variable, put it in chat_template_kwargs"))
    encoder = inputs.get_tokenizer()
    # the user's copy can have another template, but must not change how texts are encoded
    tokenizer = vars(inputs).get("tokenizer_of_user", encoder)
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
        ids = encoder(texts, add_special_tokens=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids)]


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
