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
from typing import Any

from nanoengine_extras.tools.openai_format.finding import Finder, cut

BEGIN = "<think>"
END = "</think>"
# grammars that can describe thoughts: all others are JSON
FREE = {"choice", "regex", "grammar"}


class Reasoning(Finder):
    """The thoughts in one answer.

    is_open: whether the answer begins with thoughts, whatever its text begins with.
    thinks: whether a choice is within its thoughts; None before its first letter.
    """

    def __init__(self, is_open: bool = False) -> None:
        super().__init__()
        self.is_open = is_open
        self.thinks = defaultdict[int, bool | None](lambda: None)

    def find(self, choice: dict[str, Any], message: dict[str, Any], text: str,
             is_whole: bool) -> tuple[str, str]:
        index = choice["index"]
        if self.thinks[index] is None:
            tag = re.match(rf"\s*({BEGIN}\s*)?", text)
            assert tag
            rest = text[tag.end():]
            if not is_whole and (not rest or BEGIN.startswith(rest)):
                return "", text
            self.thinks[index] = self.is_open or bool(tag[1])
            text = rest if self.thinks[index] else text
        if not self.thinks[index]:
            return text, ""
        thoughts, end, rest = text.partition(END)
        # also spaces between the tag and the answer
        answer = rest.lstrip()
        self.thinks[index] = not (end and (answer or is_whole))
        thoughts = cut(thoughts, END, is_whole or not self.thinks[index])[0].rstrip()
        if thoughts:
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        return answer, text[len(thoughts):] if self.thinks[index] else ""


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
