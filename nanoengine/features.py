"""Optional features: how the engine finds them, and their options.

A feature is a file in one of the four folders of nanoengine_extras, such as running/swapping.py,
and can be deleted on its own. It plugs into the engine in one of four ways:

    an observer    a `Feature`: the engine calls it when something happens, and it may edit logits:
                   see observers.py
    a function     named in a table, or a user's own: see policies.py
    a slot         a class or function that replaces one of the engine's, where the engine says
                   `part("the name of the slot", config, its own)`: see `part`
    a client       uses public calls only: chats, beam search, scores, vLLM's names

Fast kernels for a device come from two libraries, nanoengine_extras.cpu and nanoengine_extras.gpu:
see `kernels`. The engine needs neither. With `LLM(model, kernels=False)` it uses neither.

The engine loads a feature if something needs it: an option (`of`), a method of `LLM`, the name of a
policy or a backend, or the model's files. Some features are always loaded if they are
installed: tables in nanoengine_extras/__init__.py name them.
"""

import logging
from dataclasses import MISSING, field, fields
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

# ------------------------------------------------------------------------------- finding them


@cache
def optional(module: str) -> ModuleType | None:
    """Returns an optional module; None if it is absent or cannot be imported. If it is present but
    a package that it needs is not, a warning says so."""
    try:
        return import_module(module)
    except ImportError as error:
        if not module.startswith(str(error.name)):
            logging.getLogger("nanoengine").warning(f"{module} is not used: {error}")
        return None


def is_installed(name: str) -> bool:
    """Whether a feature, such as "running.swapping", and its packages are installed; tries to
    import it."""
    return bool(optional(f"nanoengine_extras.{name}"))


def extension(name: str, asked: str = "") -> ModuleType:
    """Returns the module of a feature. Raises ValueError if it is not installed.

    asked: the option or the call that needs it, for the message.
    """
    if module := optional(f"nanoengine_extras.{name}"):
        return module
    path = name.replace(".", "/")
    raise ValueError(f"{asked or name} needs nanoengine_extras/{path}.py and its packages")


def declared(name: str) -> Any:
    """Returns what nanoengine_extras/__init__.py declares under this name; an empty dict if the
    folder is absent."""
    return getattr(optional("nanoengine_extras"), name, {})


def part(slot: str, options: Any, default: Any) -> Any:
    """Returns what fills a slot of the engine: a class, a function or a table.

    A feature says in its file what it replaces:

        PARTS = {"block_manager": SwappingBlockManager}

    A feature fills the slot if an option asks for the feature, or if the table STANDARD of
    nanoengine_extras names the feature for this slot and it is installed. If several features have
    a class for the slot, the result inherits from all of them.

    options: None if no option decides.
    """
    asked = asked_by(options) if options else {}
    standard = declared("STANDARD").get(slot)
    if standard and is_installed(standard):
        asked[standard] = slot
    modules = [extension(*each) for each in asked.items()]
    found = [module.PARTS[slot] for module in modules if slot in getattr(module, "PARTS", {})]
    if len(found) > 1:
        return type(slot, tuple(found), {})
    return found[0] if found else default


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
            found[each.metadata["feature"]] = f"{each.name}={shown(value)}"
    return found


def shown(value: object) -> str:
    """Returns the start of the repr of a value, for messages."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"an object of the class {type(value).__name__}, whose repr raises"


# -------------------------------------------------------------------------- libraries of kernels


@cache
def kernels(device: str, enabled: bool = True) -> Any:
    """Returns the library of kernels for "cpu" or "cuda"; None if it is not installed, or not
    `enabled`. The one for a CPU needs numba; the one for a GPU needs Triton.

    A library is a module. The engine itself uses these functions:

    optimize(model, has_attention): replaces a finished model's forwards with faster ones; returns
        whether a row then has the same bits whatever other rows are in its step.
    Only the CPU's library has these:
    has_bfloat16(): whether it computes faster in bfloat16 than in float32.
    knows_attention(model): whether `optimize` replaces the attention of a model.
    empty_cache(…): makes a KV cache in the library's own layout, for that attention.
    """
    name = "nanoengine_extras.gpu" if device == "cuda" else "nanoengine_extras.cpu"
    return optional(name) if enabled else None
