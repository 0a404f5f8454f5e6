"""The mistakes that pydantic finds in what a user gave, in the engine's words.

`sampling_params.explained`, which EngineConfig and SamplingParams are decorated with, calls
`explain` when there is a mistake.
"""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from pydantic_core import ValidationError


def explain(error: ValidationError, checked: Any) -> ValueError:
    """An error that reads like `rejected`, with all mistakes in the arguments of a dataclass."""
    return ValueError("; ".join(explain_one(found, checked) for found in error.errors()))


def explain_one(found: Any, checked: Any) -> str:
    """One of the mistakes. A keyword that is not known comes with the nearest that is."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] == "unexpected_keyword_argument":
        nearest, = get_close_matches(name, [field.name for field in fields(checked)], 1, cutoff=0)
        return f"{name} is not known: the nearest is {nearest}"
    message = found["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    return f"{name}={found['input']!r} is not accepted: {message}" if name else message
