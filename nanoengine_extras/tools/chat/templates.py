"""How a chat template uses messages: what it writes of short ones with a mark in them.

Templates expect messages in different forms: contents as strings or as lists of parts, arguments of
tool calls as objects or as JSON strings, and different contents of a message that has only calls.
As in llama.cpp, a template is tried with each form, since its source can say it in many ways.
"""

import json
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

MARK = "mark5of7"
USER = {"role": "user", "content": "a"}
# a message that has only calls; some templates write them only if the content is None, or is absent
CONTENTS: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": ""})
# that of a call: some templates want nine characters
ID = "123456789"
TOKENS = dict.fromkeys(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "")


def shows(template: str, message: dict[str, Any], spoilt: str,
          *chats: list[dict[str, Any]]) -> bool | None:
    """Returns whether a template writes the mark in a message, and nothing that matches `spoilt`;
    None if it raises an error.

    The message comes after each of these chats, after a message of a user, and at the beginning.
    """
    show = _compile_jinja_template(template).render
    found = None
    for before in (*chats, [USER], []):
        # a template can check what it is given
        with suppress(Exception):
            text = show(messages=[*before, message], **TOKENS)
            found = found or MARK in text.lower() and not re.search(spoilt, text)
    return found


def is_lost(*found: bool | None) -> bool:
    """Returns whether a template writes none of several messages, though it raises no error."""
    return False in found and True not in found


@lru_cache
def takes(template: str, role: str) -> tuple[bool | None, bool | None]:
    """Returns whether a template writes contents of a role that are strings, and those that are
    lists of parts. It can print the contents of one role, and loop over those of another."""
    form, content, _ = form_of_calls(template)
    call = called("f", "{}" if form == "text" else {}) | content
    message = {"role": role, "name": "f", "tool_call_id": ID}
    as_text, as_parts = (
        shows(template, message | {"content": each}, "[\"']type[\"']", [USER, call])
        for each in (MARK, [{"type": "text", "text": MARK}]))
    return as_text, as_parts


def called(name: str, arguments: Any) -> dict[str, Any]:
    """Returns a message that calls a tool, without its content."""
    function = {"name": name, "arguments": arguments}
    call = {"id": ID, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call], "function_call": function}


@lru_cache
def form_of_calls(template: str) -> tuple[str, dict[str, Any], bool]:
    """Returns the form of the arguments of a call that a template expects, the content of a message
    that has only calls, and whether it leaves out all calls.

    "object": most templates expect it; they write `arguments | tojson` or the whole call.
    "text": a JSON string, which they print or add to other strings.
    "given": either; the template looks at the type itself.
    """
    # Python's form of an object, or JSON within JSON
    spoilt = rf"'{MARK}|\\\"{MARK}"
    as_object, as_text = (
        [shows(template, called("f", each) | content, spoilt) for content in CONTENTS]
        for each in ({MARK: 1}, json.dumps({MARK: 1})))
    form = "object" if not any(as_text) else "given" if any(as_object) else "text"
    message = called(MARK, json.dumps({MARK: 1}) if form == "text" else {MARK: 1})
    written = [each for each in CONTENTS if shows(template, message | each, "None|null")]
    return form, written[0] if written else {"content": ""}, is_lost(*as_object, *as_text)
