"""Errors of pydantic about a user's input, in the engine's words.

`sampling_params.explained`, which decorates EngineConfig, SamplingParams and BeamSearchParams,
calls `explain`.
"""

from difflib import get_close_matches
from inspect import signature
from typing import Any


def explain(found: Any, checked: Any) -> str:
    """Describes a mistake in the arguments of a dataclass, in the style of `rejected`. For an
    unknown keyword, it names the nearest known one."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] in ("unexpected_keyword_argument", "no_such_attribute"):
        nearest, = get_close_matches(name, signature(checked).parameters, 1, cutoff=0)
        return f"{name} is not known: the nearest is {nearest}"
    if found["type"] == "missing":
        return f"{name} is missing"
    _, should, rest = found["msg"].partition(" should ")
    message = f"it must {rest}" if should else found["msg"].removeprefix("Value error, ")
    return f"{name}={found['input']!r:.1000} is not accepted: {message}" if name else message
