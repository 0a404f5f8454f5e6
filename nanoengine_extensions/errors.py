"""Errors of pydantic about a user's input, in the engine's words.

`sampling_params.explained`, which decorates EngineConfig and SamplingParams, calls `explain`.
"""

from difflib import get_close_matches
from inspect import signature
from typing import Any

from pydantic_core import ValidationError


def explain(error: ValidationError, checked: Any) -> ValueError:
    """Returns an error in the style of `rejected`, with all mistakes in a dataclass's arguments."""
    return ValueError("; ".join(explain_one(found, checked) for found in error.errors()))


def explain_one(found: Any, checked: Any) -> str:
    """Describes one mistake. For an unknown keyword, it names the nearest known one."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] in ("unexpected_keyword_argument", "no_such_attribute"):
        nearest, = get_close_matches(name, signature(checked).parameters, 1, cutoff=0)
        return f"{name} is not known: the nearest is {nearest}"
    value = "nothing" if found["type"] == "missing" else repr(found["input"])
    message = found["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    return f"{name}={value:.1000} is not accepted: {message}" if name else message
