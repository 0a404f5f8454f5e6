"""Choices of OpenAI's format, whole or in the events of a stream."""

import random
from collections.abc import Iterable, Iterator


def choice_of(text: str, index: int = 0, reason: str | None = "stop",
              kind: str = "message") -> dict:
    return {kind: {"content": text}, "index": index, "logprobs": None, "finish_reason": reason}


def in_turn(rng: random.Random, texts: list[str], reasons: list[str],
            most: int = 9) -> Iterator[dict]:
    """The events of choices that take turns, with up to `most` characters each."""
    rest = dict(enumerate(texts))
    while rest:
        index = rng.choice([*rest])
        text = rest.pop(index)
        size = rng.randint(0, most)
        is_last = size > len(text)
        if not is_last:
            rest[index] = text[size:]
        yield choice_of(text[:size], index, reasons[index] if is_last else None, "delta")


def joined(choices: Iterable[dict]) -> list[dict]:
    """What is in each choice, in all its events together or in a whole answer."""
    found: dict[int, dict] = {}
    for choice in choices:
        part = found.setdefault(choice["index"], {"reason": None})
        assert part["reason"] is None, "nothing comes after the end"
        part["reason"] = choice["finish_reason"]
        news = choice.get("delta") or choice.get("message") or {"content": choice["text"]}
        logprobs = (choice["logprobs"] or {}).items()
        for name, value in (news | {f"logprobs.{name}": each for name, each in logprobs}).items():
            if value:
                part[name] = part[name] + value if name in part else value
    return [found[index] for index in sorted(found)]
