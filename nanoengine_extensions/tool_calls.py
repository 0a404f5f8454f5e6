"""Tools of a chat in OpenAI's format: what a client may ask for, and the calls in an answer.

Tools go to the chat template, which tells the model about them. The model writes its calls as
text. `--tool-call-parser hermes` of serve.py and batch.py finds them there, in the format of
Hermes, Qwen2.5 and Qwen3:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

A client gets them as `tool_calls`, with "tool_calls" in place of "stop" as `finish_reason`. A
stream sends each call as a whole, as soon as it is complete. What is no such call stays text.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from re import finditer
from typing import Any

BEGIN = "<tool_call>"
END = "</tool_call>"


def check(body: dict[str, Any]) -> None:
    """Raises ValueError for tools that are not OpenAI's, and for a choice among no tools."""
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise ValueError('tools must be a list of {"type": "function", "function": …}')
    choice = body.get("tool_choice", "none")
    if choice != "none" and (choice != "auto" or not tools):
        raise ValueError(f"tool_choice={choice!r} is not supported: it must be 'none', or 'auto' "
                         "with tools")


def call_of(text: str) -> dict[str, str] | None:
    """Returns the function and the arguments that a text between the two tags calls, if it does."""
    try:
        found = json.loads(text)
        arguments = json.dumps(found.get("arguments", {}), ensure_ascii=False, allow_nan=False)
        name = found["name"]
        # half a character cannot be sent
        (name + arguments).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_call = name and arguments.startswith("{")
    return {"name": name, "arguments": arguments} if is_call else None


def first_call(text: str, is_whole: bool) -> tuple[dict[str, str] | None, str]:
    """Returns the call at the start of a text, and the text after it. A text of JSON can contain
    the last tag itself; at the end of an answer it can be missing."""
    ends = [match.start() for match in finditer(END, text)] + [len(text)] * is_whole
    calls = ((call_of(text[:end]), text[end + len(END):]) for end in ends)
    return next((found for found in calls if found[0]), (None, text))


def parsed(text: str, is_whole: bool) -> tuple[str, list[dict[str, str]]]:
    """Returns a text without its calls, and the calls.

    Both only grow with the text: what can still become a call, or a space before one, is left out
    until the text is whole.
    """
    content = ""
    calls = []
    while BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        call, after = first_call(rest, is_whole)
        if call:
            calls.append(call)
        elif not is_whole:
            text = before
            break
        content += before if call else before + BEGIN
        text = after
    if not is_whole:
        num_held = max(size for size in range(len(BEGIN)) if text.endswith(BEGIN[:size]))
        text = text[:len(text) - num_held]
    content += text
    return content if is_whole and not calls else content.rstrip(), calls


class ToolCalls:
    """The calls in one answer.

    texts: of its choices, so far. sent: the characters and the calls that the client has had.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.texts = defaultdict[int, str](str)
        self.sent = defaultdict[int, tuple[int, int]](lambda: (0, 0))

    def edit(self, choices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the choices of a whole answer, or of an event, with calls in place of their text.
        A choice of an event with nothing new is left out."""
        for choice in choices:
            index = choice["index"]
            message = choice.get("delta") or choice["message"]
            self.texts[index] += message["content"]
            content, calls = parsed(self.texts[index], choice["finish_reason"] is not None)
            num_characters, num_calls = self.sent[index]
            self.sent[index] = len(content), len(calls)
            message["content"] = content[num_characters:] or (None if calls else "")
            for number, call in [*enumerate(calls)][num_calls:]:
                # only in events
                place = {"index": number} if "delta" in choice else {}
                message.setdefault("tool_calls", []).append(place | {
                    "id": f"call_{self.name}_{index}_{number}", "type": "function",
                    "function": call})
            if calls and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
            is_new = len(message) > 1 or message["content"] or choice["logprobs"]
            if is_new or choice["finish_reason"]:
                yield choice


def find(body: Any, given: dict[str, Any]) -> None:
    """Lets the answer to a body have calls, if what was given allows them."""
    if given.get("tools") and given.get("tool_choice") != "none":
        # the tags can be special tokens
        body.params.skip_special_tokens = False
        body.edit = ToolCalls(body.name).edit
