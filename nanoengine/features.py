"""Optional features, and the checks of user input. Each feature is a file in nanoengine_extras,
in one of four folders ("running.swapping"), and can be deleted on its own.

A feature plugs into the engine in one of four ways:

    an observer    a `Feature`: the engine calls it when something happens, and it may edit logits:
                   see observers.py
    a function     named in a table, or a user's own: see policies.py
    a slot         replaces one part: the block manager, the runner, the weights, …
    a client       uses public calls only: chats, beam search, scores, vLLM's names

`EngineConfig` and `SamplingParams` have every feature's options; `of` names the feature.
`extension` imports a feature by its name, when it is asked for.

The engine itself refuses input that would hang it, silently give wrong results, or fail in the
middle of a step. nanoengine_extras/running/strict.py, if installed, also checks the types of all
options.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

logger = logging.getLogger("nanoengine")
# the name of a field, whether the options can be used, and what is accepted
Condition = tuple[str, Callable[[Any], bool], str]
# the file of each observer, and its class, in the order in which they are called
OBSERVERS = {"running.metrics": "Metrics", "sampling.texts": "Texts", "running.guards": "Guards",
             "running.threads": "Threads", "sampling.logprobs": "Logprobs",
             "sampling.beam_search": "Beams", "sampling.constraints": "Constraints",
             "sampling.structured_outputs": "Grammars",
             "sampling.logits_processors": "Processors"}
# the features that every engine has, if they are installed
ALWAYS = ("running.metrics", "sampling.texts", "running.guards", "running.threads")


# ------------------------------------------------------------------------------- finding them


@cache
def optional(module: str) -> ModuleType | None:
    """Returns an optional module; None if it is absent or cannot be imported. If it is present but
    a package that it needs is not, a warning says so."""
    try:
        return import_module(module)
    except ImportError as error:
        if not module.startswith(str(error.name)):
            logger.warning(f"{module} is not used: {error}")
        return None


def is_installed(name: str) -> bool:
    """Whether a feature and its packages are installed; tries to import it."""
    return bool(optional(f"nanoengine_extras.{name}"))


def extension(name: str, asked: str = "") -> ModuleType:
    """Returns the module of a feature. Raises ValueError if it is not installed.

    asked: the option or the call that needs it, for the message.
    """
    if module := optional(f"nanoengine_extras.{name}"):
        return module
    path = name.replace(".", "/")
    raise ValueError(f"{asked or name} needs nanoengine_extras/{path}.py and its packages")


# ------------------------------------------------------------------------------ their options


def of(name: str, default: Any = MISSING) -> Any:
    """A dataclass field that belongs to a feature. A value other than the default asks for the
    feature. Without `default`, the default is an empty list."""
    make: Any = list if default is MISSING else MISSING
    return field(default=default, default_factory=make, metadata={"feature": name})


def asked_by(options: Any) -> dict[str, str]:
    """Returns the features that the options ask for, each with one option that asks for it."""
    found = {}
    for each in fields(options):
        value = getattr(options, each.name)
        # the class has the default, unless it is a list
        if "feature" in each.metadata and value != getattr(type(options), each.name, []):
            found[each.metadata["feature"]] = f"{each.name}={value!r:.100}"
    return found


# --------------------------------------------------------------------------- a user's input


def rejected(name: str, value: object, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={value!r:.200} is not accepted: it must be {accepted}")


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Re-raises an error from a library, or from a user's function, as a ValueError that names the
    input: `what` is a name, or an error from `rejected`."""
    try:
        yield
    except Exception as error:
        message = str(error) or repr(error)
        if is_installed("running.strict"):
            message = extension("running.strict").message_of(error, message)
        raise ValueError(f"{what}: {message}") from error


def strict(kind: type) -> type:
    """Decorates a dataclass of options: strict.py, if installed, checks their names and types."""
    if is_installed("running.strict"):
        return extension("running.strict").checked_options(kind)
    return kind


def check(options: object, conditions: list[Condition]) -> None:
    """Raises ValueError for the first condition that does not hold, and for an option of a feature
    that is not installed. A feature can have more CONDITIONS in its file."""
    for feature, asked in asked_by(options).items():
        conditions = conditions + getattr(extension(feature, asked), "CONDITIONS", [])
    for name, holds, accepted in conditions:
        if not holds(options):
            raise rejected(name, getattr(options, name), accepted.format(**vars(options)))
