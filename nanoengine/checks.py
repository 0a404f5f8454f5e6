"""A user's input: what is refused.

The engine itself refuses what would hang, compute something else in silence, or fail in the middle
of a step. The types of all options are checked by nanoengine_extensions/strict.py, if it is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nanoengine.errors import rejected
from nanoengine.features import asked_by, extension, is_installed

Kind = TypeVar("Kind", bound=type)
# the name of a field, whether the options can be used, and what is accepted
Condition = tuple[str, Callable[[Any], bool], str]


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Turns an error that a library or a user's function raises for some input into a ValueError
    that names the input. The first error is its cause."""
    try:
        yield
    except Exception as error:
        message = str(error) or repr(error)
        if is_installed("strict"):
            message = extension("strict").message_of(error, message)
        raise ValueError(f"{what}: {message}") from error


def strict(kind: Kind) -> Kind:
    """Decorates a dataclass of options: if strict.py is there, it checks their names and types."""
    return extension("strict").checked_options(kind) if is_installed("strict") else kind


def check(options: Any, conditions: list[Condition]) -> None:
    """Raises ValueError for the first condition that does not hold, and for an option of a feature
    that is not installed. A feature can have further CONDITIONS in its file."""
    for feature, asked in asked_by(options).items():
        conditions = conditions + getattr(extension(feature, asked), "CONDITIONS", [])
    for name, holds, accepted in conditions:
        if not holds(options):
            raise rejected(name, getattr(options, name), accepted.format(**vars(options)))
