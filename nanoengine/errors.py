"""Checks of input, and their errors: a `ValueError` names the argument, its value and what is
accepted.

The engine itself refuses input that would hang it, silently give wrong results, or fail in the
middle of a step. nanoengine_extras/running/strict.py, if installed, checks more: see `Checks`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nanoengine.features import asked_by, extension, part, shown

logger = logging.getLogger("nanoengine")
# the name of a field, whether the options can be used, and what is accepted
Condition = tuple[str, Callable[[Any], bool], str]


class Checks:
    """Additional checks, which do nothing here; a feature can fill the slot "checks"."""

    def names(self, kind: type, arguments: tuple, options: dict) -> None:
        """Raises ValueError for keywords that a class of options does not have."""

    def values(self, options: Any) -> None:
        """Checks the types of options, and writes out shorthands."""

    def assigned(self, options: Any, name: str, value: Any) -> Any:
        """Returns the value for an option that is assigned later, or raises ValueError."""
        return value

    def call(self, prompts: Any, params: Any, priority: Any, kind: type) -> None:
        """Checks the form of the arguments of `LLM.generate`. kind: the class of the params."""

    def memory(self, weights: Iterable[Any], device: str) -> None:
        """Raises ValueError if weights do not fit a device."""

    def message(self, error: Exception) -> str:
        """Returns the message of an error inside `naming`. It can raise the error instead."""
        return str(error) or repr(error)


@cache
def checks() -> Checks:
    """Returns the additional checks."""
    return part("checks", None, Checks)()


# --------------------------------------------------------------------------------- the errors


def rejected(name: str, value: object, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={shown(value)} is not accepted: it must be {accepted}")


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Any error inside, from a library or from a user's function, becomes a ValueError that begins
    with `what`: the name of the input, or an error from `rejected`."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {checks().message(error):.2000}") from error


def check(options: object, conditions: list[Condition]) -> None:
    """Raises ValueError for the first condition that does not hold."""
    for name, holds, accepted in conditions:
        if not holds(options):
            raise rejected(name, getattr(options, name), accepted.format(**vars(options)))


# -------------------------------------------------------------------------------- of options


class Options:
    """The base of the dataclasses of options."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        # a subclass with an `__init__` of its own can take other arguments
        if "__init__" not in vars(cls) or "__dataclass_fields__" in vars(cls):
            checks().names(cls, arguments, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        checks().values(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, checks().assigned(self, name, value))

    def check(self, conditions: list[Condition]) -> None:
        """Checks these conditions, and the CONDITIONS of the features that the options ask for.
        Raises ValueError also for a feature that is not installed."""
        for feature, asked in asked_by(self).items():
            conditions = conditions + getattr(extension(feature, asked), "CONDITIONS", [])
        check(self, conditions)
