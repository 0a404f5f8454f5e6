"""Text while it is generated: whole characters, special tokens, stop strings.

Text is made token by token, as in vLLM: a token adds the difference between the decoded texts with
it and without it, in the context of the tokens before. An incomplete character is held back until
its last token comes.

An observer: `done` decodes the newest tokens, and ends sequences whose text has a stop string.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from nanoengine.errors import Condition, logger, rejected
from nanoengine.observers import Feature, Launched
from nanoengine.requests import InputProcessor, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence

CONDITIONS: list[Condition] = [
    ("stop", lambda p: isinstance(p.stop, list) and all(p.stop), "a list of strings, none empty"),
    ("detokenize", lambda p: p.detokenize or not p.stop, "True for stop={stop!r}")]

# U+FFFD in a vocabulary: as itself, in the letters of ByteLevel, in the bytes of ByteFallback
REPLACEMENT = ("\ufffd", "\u00ef\u00bf\u00bd", "<0xEF><0xBF><0xBD>")


class Texts(Feature):
    """Keeps the `Text` of a sequence, if the model has a tokenizer and detokenize is True.

    has_warned: whether a warning has said that there is no tokenizer.
    """

    has_warned = False

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        params = seqs[0].params
        tokenizer = inputs.get_tokenizer() if params.stop else inputs.tokenizer
        if tokenizer and params.detokenize:
            for seq in seqs:
                seq.kept["text"] = Text(seq, tokenizer)
        elif params.detokenize and not (inputs.config.skip_tokenizer_init or self.has_warned):
            self.has_warned = True
            logger.warning(f"{inputs.config.tokenizer or inputs.config.model} has no tokenizer, so "
                           "outputs have no text: give tokenizer=… or skip_tokenizer_init=True")

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if text := seq.kept.get("text"):
                if stop := text.update(seq):
                    self.engine.finish(seq, "stop", stop)

    def output(self, seqs: list[Sequence], output: RequestOutput) -> None:
        for seq, each in zip(seqs, output.outputs):
            if text := seq.kept.get("text"):
                each.text = text.so_far(seq)


class Text:
    """The text of a sequence so far."""

    def __init__(self, seq: Sequence, tokenizer: Any) -> None:
        self.text = ""
        self.tokenizer = tokenizer.backend_tokenizer
        self.skip_special = seq.params.skip_special_tokens
        self.unseen = special_tokens(self.tokenizer) if self.skip_special else frozenset()
        # the tokens that come before the next ones, and are decoded together with them
        self.context = self._last_seen(seq.token_ids)
        # tokens whose text is not complete: they end in the middle of a character
        self.undecoded: list[int] = []
        # characters at the end that could become a stop string
        self.num_held_back = max(map(len, seq.params.stop), default=1) - 1
        self.find_stop = stop_finder(tuple(seq.params.stop))

    def update(self, seq: Sequence) -> str | None:
        """Adds the newest token; returns the stop string that its text completes, if any.

        The text then ends before the stop string, or after it if it is to be included."""
        # there is no new token
        if seq.finish_reason == "error":
            return None
        num_seen = len(self.text)
        # an EOS or stop token adds its text only with include_stop_str_in_output
        if seq.finish_reason != "stop" or seq.params.include_stop_str_in_output:
            self.text += self._decode(seq.token_ids[-1])
        if seq.num_tokens - seq.num_prompt_tokens <= seq.params.min_tokens:
            return None
        end, stop = self.find_stop(self.text, num_seen)
        if stop:
            cut = 0 if seq.params.include_stop_str_in_output else len(stop)
            self.text = self.text[:end - cut]
        return stop

    def _decode(self, token_id: int) -> str:
        """Returns the text that the newest tokens complete: none in the middle of a character."""
        if token_id in self.unseen:
            return ""
        skip = self.skip_special
        self.undecoded.append(token_id)
        # if there are many tokens, only the last eight matter: if these begin within a character,
        # their text begins with at most three replacement characters, which are ignored
        if len(self.undecoded) > 8:
            tail = self.tokenizer.decode(self.undecoded[-8:], skip)
            # an empty text: the tokenizer knows none of them
            if not tail or is_half(tail[3:], self.undecoded, self.tokenizer):
                return ""
        before = self.tokenizer.decode(self.context, skip)
        piece = self.tokenizer.decode(self.context + self.undecoded, skip)[len(before):]
        if is_half(piece, self.undecoded, self.tokenizer):
            return ""
        if piece:
            self.context = self.undecoded
        elif not before:
            # a decoder can strip a space, but only at the beginning of a text
            self.context = self._last_seen(self.context + self.undecoded)
        self.undecoded = []
        return piece

    def _last_seen(self, token_ids: list[int]) -> list[int]:
        """Returns the last six tokens that the decoder sees, or a few more, so that they do not
        begin within a character of ByteFallback. The decoder can leave out special tokens."""
        seen = (token for token in reversed(token_ids) if token not in self.unseen)
        last = []
        for token in seen:
            last.append(token)
            goes_on = "<0x80>" <= (self.tokenizer.id_to_token(token) or "") <= "<0xBF>"
            if len(last) == 9 or (len(last) >= 6 and not goes_on):
                break
        return last[::-1]

    def so_far(self, seq: Sequence) -> str:
        """Returns the text without characters that could become a stop string."""
        if seq.finish_reason or seq.params.include_stop_str_in_output:
            return self.text
        return self.text[:max(0, len(self.text) - self.num_held_back)]


def is_half(text: str, token_ids: list[int], tokenizer: Any) -> bool:
    """Returns whether the text of some tokens ends within a character.

    A decoder writes U+FFFD for an incomplete character. A model can also write U+FFFD itself: then
    the names of its tokens spell it.
    """
    if not text.endswith("\ufffd"):
        return False
    names = "".join(tokenizer.id_to_token(token) or "" for token in token_ids[-3:])
    return not names.endswith(REPLACEMENT)


@lru_cache(maxsize=1)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that a decoder leaves out if it skips special ones."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)


@lru_cache(maxsize=16)
def stop_finder(stops: tuple[str, ...]) -> Callable[[str, int], tuple[int, str | None]]:
    """Returns a search function for stop strings. Its time grows with the number of their different
    lengths, not with their own.

    The function takes a text, and how much of it was searched before. It returns where a stop
    string ends, and the string. This is the one that ends first; if several end there, the first in
    the list.
    """
    places: dict[str, int] = {}
    for place, stop in enumerate(stops):
        places.setdefault(stop, place)
    lengths = {*map(len, stops)}

    def find(text: str, num_seen: int) -> tuple[int, str | None]:
        for end in range(num_seen + 1, len(text) + 1) if stops else ():
            ends = {text[end - length:end] for length in lengths if length <= end}
            if found := ends & places.keys():
                return end, min(found, key=places.__getitem__)
        return 0, None

    return find


# ------------------------------------------------------------------- texts of single tokens


def texts_of_tokens(token_ids: list[int], before: list[int], tokenizer: Any) -> list[str | None]:
    """Returns the texts of single tokens, as vLLM does: with the space that each begins with.

    If several tokens spell one character, the last of them has the character as its text, and the
    others have no text. So the texts of all tokens of a sequence, joined, are its whole text.

    before: the tokens before each of them; at least the last eight.
    tokenizer: without one, the texts are None.
    """
    if not tokenizer:
        return [None] * len(token_ids)
    begun = begun_in(before, tokenizer)
    return [text_after(begun, token_id, tokenizer) for token_id in token_ids]


def text_after(begun: list[int], token_id: int, tokenizer: Any) -> str:
    """Returns the text of a token after the result of `begun_in`."""
    text = tokenizer.decode([*begun, token_id], skip_special_tokens=False)
    if is_half(text, [*begun, token_id], tokenizer):
        return ""
    if begun:
        return text
    # what it adds after itself: some decoders strip spaces at the start of a text
    return tokenizer.decode([token_id] * 2, skip_special_tokens=False)[len(text):]


def begun_in(token_ids: list[int], tokenizer: Any) -> list[int]:
    """Returns the last of these tokens, if they have no text yet because they end within a
    character."""
    end = len(token_ids)
    # a character has at most four bytes
    while end and all(
            is_half(tokenizer.decode(part, skip_special_tokens=False), part, tokenizer)
            for part in (token_ids[start:end] for start in range(end - 1, max(end - 5, -1), -1))):
        end -= 1
    return token_ids[end:]


# ------------------------------------------------------------------------- truncated prompts


def truncated(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Returns the last tokens of a prompt: as many as are asked for; for -1, as many as leave room
    for `max_tokens`. Raises ValueError if there is no such room."""
    kept = params.truncate_prompt_tokens
    assert kept is not None
    if kept < 0:
        kept = max_model_len - (params.max_tokens or 1)
    if kept < 1:
        raise rejected("truncate_prompt_tokens", params.truncate_prompt_tokens, "at least 1, or -1 "
                       f"with max_tokens below max_model_len={max_model_len}")
    return token_ids[-kept:]


# `Texts.output` fills in the texts
PARTS = {"text_of": lambda seq: "", "texts_of_tokens": texts_of_tokens, "truncate": truncated}
