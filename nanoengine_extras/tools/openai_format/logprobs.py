"""OpenAI's format of log-probabilities."""

from functools import lru_cache
from itertools import accumulate
from typing import Any

from nanoengine_extras.sampling import bytes_of

# a token and its log-probabilities; the first token of a prompt has none
Tokens = list[tuple[int, dict[int, Any] | None]]


def of_chat(token_id: int, found: dict[int, Any] | None, tokenizer: Any,
            most: int | None) -> dict[str, Any]:
    """Returns OpenAI's entry for a token of a chat, with the likeliest tokens in its place."""
    assert found
    entries = {each: {"token": at.decoded_token or "", "logprob": number_of(at),
                      "bytes": bytes_in(tokenizer.backend_tokenizer, each)}
               for each, at in sorted(found.items(), key=lambda item: item[1].rank)}
    top = [each for each in entries if most == -1 or found[each].rank <= (most or 0)]
    return entries[token_id] | {"top_logprobs": [entries[each] for each in top]}


def of_completion(tokens: Tokens, tokenizer: Any, offset: int) -> dict[str, list[Any]]:
    """Returns OpenAI's lists for completions. Nothing comes before the first token of an echo,
    so it has only its text."""
    texts = [found[token_id].decoded_token or "" if found
             else tokenizer.decode([token_id]) for token_id, found in tokens]
    return {"tokens": texts, "text_offset": [*accumulate(map(len, texts[:-1]), initial=offset)],
            "token_logprobs": [at and number_of(at[token_id]) for token_id, at in tokens],
            "top_logprobs": [found and by_text(found) for _, found in tokens]}


def by_text(found: dict[int, Any]) -> dict[str, float]:
    """Returns OpenAI's `top_logprobs` of a completion, the likeliest first.

    Several tokens can have the same text, such as parts of characters, which have none. The first
    of them has the text as its name, and the others have vLLM's name of a token: token_id:5.
    """
    named: dict[str, float] = {}
    for token_id, each in sorted(found.items(), key=lambda item: item[1].rank):
        text = each.decoded_token or ""
        named[f"token_id:{token_id}" if text in named else text] = number_of(each)
    return named


@lru_cache(maxsize=2**16)
def bytes_in(tokenizer: Any, token_id: int) -> list[int]:
    """Returns the bytes of a token, which can be a part of a character.

    tokenizer: from the library `tokenizers`.
    """
    # some decoders strip spaces at the start of a text
    once, twice = (tokenizer.decode([token_id] * count, False) for count in (1, 2))
    return [*bytes_of(tokenizer.id_to_token(token_id) or "", twice[len(once):])]


def number_of(logprob: Any) -> float:
    """Returns a log-probability; JSON has no infinity, so it is -9999 as in vLLM."""
    return max(logprob.logprob, -9999.0)
