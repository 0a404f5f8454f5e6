"""What a model thinks before it answers, apart from the answer: `reasoning_content`.

    <think>
    The user asks for a city.
    </think>

    Rome

An answer begins with thoughts if its text begins with <think>, or if the chat template has put
<think> at the end of the prompt. They end at </think>. A client gets them as `reasoning_content`,
and as `reasoning`, vLLM's newer name, without the spaces around them. No tool is called in them.
An answer that ends before </think> has thoughts only.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

BEGIN = "<think>"
END = "</think>"
# grammars that can describe thoughts: all others are JSON
FREE = {"choice", "regex", "grammar"}


@dataclass
class Reasoning:
    """The thoughts in one answer. An event costs what is new in it.

    is_open: whether the answer begins with thoughts, whatever its text begins with.
    held: the end of the text of each choice that the client has not received yet: spaces, and what
        can become a tag.
    thinks: whether a choice is within its thoughts; None before its first letter.
    """

    is_open: bool = False
    held: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    thinks: dict[int, bool | None] = field(default_factory=lambda: defaultdict(lambda: None))

    def edit(self, choices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the choices of a whole answer, or of an event, with their thoughts apart. A choice
        of an event with nothing new is left out."""
        for choice in choices:
            message = choice.get("delta") or choice["message"]
            is_whole = choice["finish_reason"] is not None
            thoughts, message["content"] = self.split(
                choice["index"], message["content"], is_whole)
            if thoughts:
                message |= {"reasoning": thoughts, "reasoning_content": thoughts}
            if is_whole or len(message) > 1 or message["content"] or choice["logprobs"]:
                yield choice

    def split(self, index: int, new: str, is_whole: bool) -> tuple[str, str]:
        """Returns the thoughts and the answer in the new text of a choice, as far as both are
        certain."""
        text = self.held.pop(index, "") + new
        thoughts = ""
        if self.thinks[index] is None:
            tag = re.match(rf"\s*{BEGIN}\s*" if text.lstrip().startswith(BEGIN) else r"\s*", text)
            assert tag
            rest = text[tag.end():]
            if not is_whole and (not rest or BEGIN.startswith(rest)):
                self.held[index] = text
                return "", ""
            self.thinks[index] = self.is_open or BEGIN in tag[0]
            text = rest if self.thinks[index] else text
        if self.thinks[index]:
            thoughts, end, rest = text.partition(END)
            text = rest.lstrip()
            # also spaces between the tag and the answer
            self.thinks[index] = not (end and (text or is_whole))
            if self.thinks[index]:
                num_held = max(size for size in range(len(END)) if thoughts.endswith(END[:size]))
                cut = len(thoughts) if is_whole else len(thoughts) - num_held
                self.held[index] = thoughts[len(thoughts[:cut].rstrip()):] + end
                thoughts = thoughts[:cut]
            thoughts = thoughts.rstrip()
        return thoughts, text


def find(body: Any, is_continued: bool, last: str, tokenizer: Any) -> Reasoning:
    """Returns what finds thoughts in the answer to a chat.

    body: its `prompts` and `params` are already set. is_continued: whether the answer continues the
        last message, whose text is `last`.
    """
    prompt = body.prompts[0]["prompt"]
    is_open = last.rfind(BEGIN) > last.rfind(END) if is_continued else (
        prompt.rstrip().endswith(BEGIN))
    grammar = body.params.structured_outputs
    if grammar is not None:
        is_open = is_open and bool(FREE & {*grammar}) and END in str(grammar)
    # where the tags are special tokens, the text must keep them
    special = tokenizer.backend_tokenizer.get_added_tokens_decoder().get(
        tokenizer.backend_tokenizer.token_to_id(END))
    if special and special.special:
        body.params.skip_special_tokens = False
    return Reasoning(is_open)
