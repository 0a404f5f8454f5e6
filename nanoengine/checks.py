"""A user's input: what is refused, and how the error says so.

The engine itself refuses what would hang, silently compute the wrong thing, or fail in the middle
of a step. The types of all options are checked by nanoengine_extensions/strict.py, if it is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nanoengine.features import asked_by, extension, is_installed

Kind = TypeVar("Kind", bound=type)
# the name of a field, whether the options can be used, and what is accepted
Condition = tuple[str, Callable[[Any], bool], str]


def rejected(name: str, value: Any, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={value!r:.1000} is not accepted: it must be {accepted}")


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Re-raises an error of a library, or of a user's function, as a ValueError that names the
    input."""
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
