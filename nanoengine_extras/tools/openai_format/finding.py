"""Finds what a model marks with tags, thoughts and calls, in whole answers and in streams."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any


class Finder:
    """Takes what is marked out of the choices of one answer. An event costs what is new in it, not
    what has been sent.

    held: the end of the text of each choice that the client has not received: spaces, and what can
        still become a tag.
    """

    def __init__(self) -> None:
        self.held = defaultdict[int, str](str)

    def find(self, choice: dict[str, Any], message: dict[str, Any], text: str,
             is_whole: bool) -> tuple[str | None, str]:
        """Moves what is marked in a text into the message. Returns what stays text, and what is
        held."""
        raise NotImplementedError

    def edit(self, choices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the choices of a whole answer, or of an event. A choice of an event with nothing
        new is left out."""
        for choice in choices:
            message = choice.get("delta") or choice["message"]
            is_whole = choice["finish_reason"] is not None
            text = self.held[choice["index"]] + message["content"]
            message["content"], self.held[choice["index"]] = self.find(
                choice, message, text, is_whole)
            if is_whole or len(message) > 1 or message["content"] or choice["logprobs"]:
                yield choice


def cut(text: str, tag: str, is_whole: bool) -> tuple[str, str]:
    """Returns a text without its end that can still become a tag, and this end."""
    sizes = [] if is_whole else [size for size in range(1, len(tag)) if text.endswith(tag[:size])]
    end = len(text) - max(sizes, default=0)
    return text[:end], text[end:]
