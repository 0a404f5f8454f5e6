"""Checks of input, and their errors: a `ValueError` names the argument, its value and what is
accepted.

The engine itself refuses options that would hang it, silently give wrong results, or fail in the
middle of a step. (A policy of your own can still hang it: see policies.py.)
nanoengine_extras/running/strict.py, if installed, checks more: `also_check`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nanoengine.features import asked_by, extension, part, shown

logger = logging.getLogger("nanoengine")
# the name of a field, whether the options can be used, and what is accepted
Condition = tuple[str, Callable[[Any], bool], str]


@cache
def checks() -> Any:
    """Returns what fills the slot "checks": the additional checks of a feature, or None."""
    return part("checks", None, None)


def also_check(name: str, *arguments: Any) -> Any:
    """Makes one of the additional checks. It returns the last argument, or what replaces it; it
    raises ValueError if that cannot be used."""
    return getattr(checks(), name)(*arguments) if checks() else arguments[-1]


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
        message = also_check("message", error, str(error) or repr(error))
        raise ValueError(f"{what}: {message:.2000}") from error


# -------------------------------------------------------------------------------- of options


class Options:
    """The base of the dataclasses of options."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        also_check("names", cls, arguments, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        also_check("values", self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, also_check("assigned", self, name, value))

    def check(self, conditions: list[Condition]) -> None:
        """Checks these conditions, and the CONDITIONS of the features that the options ask for.

        Raises ValueError for the first one that does not hold, and for a feature that is not
        installed.
        """
        for feature, asked in asked_by(self).items():
            conditions = conditions + getattr(extension(feature, asked), "CONDITIONS", [])
        for name, holds, accepted in conditions:
            if not holds(self):
                raise rejected(name, getattr(self, name), accepted.format(**vars(self)))
