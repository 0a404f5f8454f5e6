"""Tools in OpenAI's format: the choices of a client, and the calls in an answer.

Tools go to the chat template, which tells the model about them. The model writes its calls as
text. `--tool-call-parser hermes` of serve.py and batch.py finds them there, in the format of
Hermes, Qwen2.5 and Qwen3:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

A client gets them as `tool_calls`, with "tool_calls" in place of "stop" as `finish_reason`. A
stream sends each call as a whole, as soon as it is complete. Everything else stays text. What a
model writes while it thinks is no call: see reasoning.py.

Where `tool_choice` is "required" or names a function, a grammar makes the model write calls in this
format and nothing else, with arguments that match the function's `parameters`. A client gets them
as `tool_calls` without --tool-call-parser, too.
"""

import json
from collections import defaultdict
from re import finditer
from typing import Any

from nanoengine.features import extension
from nanoengine_extras.tools.openai_format.finding import Finder, cut

BEGIN = "<tool_call>"
END = "</tool_call>"


def check(body: dict[str, Any]) -> None:
    """Raises ValueError for tools that are not OpenAI's, and for a choice that is not among them.

    body: of a chat. "auto" lets the model decide whether it calls any; "required" makes it call at
        least one of the tools, {"type": "function", "function": {"name": …}} makes it call this one
        once.
    """
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise ValueError('tools must be a list of {"type": "function", "function": …}')
    if not isinstance(body.get("parallel_tool_calls", True), bool):
        raise ValueError("parallel_tool_calls must be true or false")
    choice = body.get("tool_choice", "none")
    schemas = schemas_of(tools)
    is_any = choice == "auto" and tools or (
        choice == "required" and len(schemas) == len(tools) > 0)
    if choice != "none" and not is_any and named(choice) not in schemas:
        known = f": {', '.join(schemas)}" if schemas else ""
        raise ValueError(
            f"tool_choice={choice!r} is not supported: it must be 'none'; or, with tools, 'auto', "
            "'required' (if each has its own name), or {'type': 'function', 'function': "
            f"{{'name': …}}}} with one of their names{known}")


def named(choice: Any) -> str | None:
    """Returns the name of the function that a tool_choice asks for."""
    match choice:
        case {"type": "function", "function": {"name": str(name), **others}} if not others:
            return name
    return None


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of the arguments of each tool that has a name."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    # a function without `parameters` takes no arguments
    return {each["name"]: each.get("parameters") or {"properties": {}} for each in functions
            if isinstance(each.get("name"), str) and each["name"]}


def read(body: Any, given: dict[str, Any], finds_calls: bool) -> None:
    """Checks the tools of a chat, and makes a model write the calls that are required.

    body: its `params` are already set. given: the object that the client has sent. finds_calls:
        whether to look for calls that a model writes by itself.

    Raises ValueError, also for parameters of a function that no grammar can enforce.
    """
    check(given)
    choice = given.get("tool_choice", "auto")
    is_one = given.get("parallel_tool_calls") is False
    if choice not in ("none", "auto"):
        if body.params.structured_outputs is not None:
            raise ValueError(f"tool_choice={choice!r} is not accepted together with "
                             "response_format or structured_outputs: leave one of them out")
        name = named(choice)
        schemas = schemas_of(given["tools"])
        wanted = calls_of({name: schemas[name]}, True) if name else calls_of(schemas, is_one)
        body.params.structured_outputs = extension(
            "sampling.structured_outputs", "tool_choice").check("tools", {"structural_tag": wanted})
    elif choice == "none" or not finds_calls or not given.get("tools"):
        return
    # the tags can be special tokens
    body.params.skip_special_tokens = False
    # OpenAI's reason after a call that the client has named
    reason = "stop" if isinstance(choice, dict) else "tool_calls"
    body.calls = ToolCalls(body.name, 1 if is_one else None, reason).edit


def calls_of(schemas: dict[str, Any], is_one: bool) -> dict[str, Any]:
    """Returns the structural tag of calls of some functions, or of one call."""
    tags = []
    for name, schema in schemas.items():
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise ValueError(f"tools: parameters of {name} must be the JSON schema of an object")
        begin = f'{BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        content = {"type": "json_schema", "json_schema": {**schema, "type": "object"}}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": f"}}\n{END}"})
    return {"type": "structural_tag", "format": {
        "type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True,
        "stop_after_first": is_one}}


def call_of(text: str) -> dict[str, str] | None:
    """Returns the function and the arguments of the call in a text between the two tags; None if it
    is not a call."""
    try:
        found = json.loads(text)
        arguments = json.dumps(found.get("arguments", {}), ensure_ascii=False, allow_nan=False)
        name = found["name"]
        # half a surrogate pair cannot be sent
        (name + arguments).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_call = name and arguments.startswith("{")
    return {"name": name, "arguments": arguments} if is_call else None


def first_call(text: str, is_whole: bool) -> tuple[dict[str, str] | None, str]:
    """Returns the call at the start of a text, and the text after it. The end tag can be missing at
    the end of an answer, and it can occur in a JSON string."""
    ends = [match.start() for match in finditer(END, text)] + [len(text)] * is_whole
    calls = ((call_of(text[:end]), text[end + len(END):]) for end in ends)
    return next((found for found in calls if found[0]), (None, text))


def split(text: str, is_whole: bool) -> tuple[str, list[dict[str, str]], str]:
    """Returns a text without its calls, the calls, and the rest, which can still become a call. If
    the text is whole, there is no rest."""
    content = ""
    calls = []
    while BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        call, after = first_call(rest, is_whole)
        if call:
            calls.append(call)
        elif not is_whole:
            return content + before, calls, BEGIN + rest
        content += before if call else before + BEGIN
        text = after
    sure, held = cut(text, BEGIN, is_whole)
    return content + sure, calls, held


class ToolCalls(Finder):
    """The calls in one answer.

    most: how many it may have; None for any number. reason: the finish_reason after calls.
    num_calls: how many calls of each choice the client has received.
    """

    def __init__(self, name: str, most: int | None = None, reason: str = "tool_calls") -> None:
        super().__init__()
        self.name = name
        self.most = most
        self.reason = reason
        self.num_calls = defaultdict[int, int](int)

    def find(self, choice: dict[str, Any], message: dict[str, Any], text: str,
             is_whole: bool) -> tuple[str | None, str]:
        index = choice["index"]
        held = self.held[index]
        # without another end tag, a call that has begun stays incomplete
        is_open = BEGIN in held and END not in text[max(0, len(held) - len(END) + 1):]
        if is_open and not is_whole:
            return "", text
        content, calls, rest = split(text, is_whole)
        for number, call in enumerate(calls, self.num_calls[index]):
            if number == self.most:
                break
            self.num_calls[index] += 1
            # only in events
            place = {"index": number} if "delta" in choice else {}
            message.setdefault("tool_calls", []).append(place | {
                "id": f"call_{self.name}_{index}_{number}", "type": "function", "function": call})
        has_calls = self.num_calls[index] > 0
        if has_calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = self.reason
        new = content if is_whole and not has_calls else content.rstrip()
        return new or (None if has_calls else ""), content[len(new):] + rest
