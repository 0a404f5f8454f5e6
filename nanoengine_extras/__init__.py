"""Optional features of the engine. Each is a file, imported on demand, that can be deleted.

The engine reads these tables, and the class `Calls`. A row whose file is deleted does nothing. Only
functions import the engine, since the libraries of kernels must not.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

# the file of each observer, and its class, in the order in which the engine calls them
OBSERVERS = {
    "running.metrics": "Metrics",
    "sampling.texts": "Texts",
    "running.guards": "Guards",
    "running.threads": "Threads",
    "sampling.logprobs": "Logprobs",
    "sampling.beam_search": "Beams",
    "sampling.constraints": "Constraints",
    "sampling.structured_outputs": "Grammars",
    "sampling.logits_processors": "Processors"}
# the observers that every engine has; the others come when a request asks for them
ALWAYS = ("running.metrics", "sampling.texts", "running.guards", "running.threads")
# the slots that a file fills in every engine, with what it has in its PARTS
STANDARD = {
    "driver": "running.shared_steps",
    "checks": "running.strict",
    "check_process": "running.threads",
    "progress_bar": "running.metrics",
    "text_of": "sampling.texts",
    "texts_of_tokens": "sampling.texts",
    "default_params": "models.generation_config",
    "graphs": "running.graphs",
    "sample": "sampling.fast_sampling",
    "free_bytes": "running.memory",
    "backends": "running.backends",
    **dict.fromkeys(("find_model", "load_config", "any_loader"), "models.sources"),
    "check_folder": "models.explain",
    "check_names": "models.explain"}
# the classes that `from nanoengine import …` finds in a file
EXPORTS = dict.fromkeys(
    ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"), "sampling.beam_search")


def extension(name: str, asked: str = "") -> ModuleType:
    """Calls the function of this name in nanoengine/features.py. An import at the top of this file
    would be a circle."""
    return import_module("nanoengine.features").extension(name, asked)


def exported(name: str) -> type:
    """Returns a class of EXPORTS: the `__getattr__` of the package nanoengine."""
    if name in EXPORTS:
        return getattr(extension(EXPORTS[name]), name)
    raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")


def call_of(name: str, call: str) -> Callable:
    """Returns a method of `LLM`: the function `call` in the file of a feature."""
    def method(llm: Any, *args: object, **options: object) -> Any:
        return getattr(extension(name, f"LLM.{call}"), call)(llm, *args, **options)

    method.__name__ = call
    method.__doc__ = f'See `help("nanoengine_extras.{name}.{call}")`.'
    return method


class Calls:
    """The methods of `LLM` that need features; a base class of `LLM`."""

    chat = call_of("tools.chat", "chat")
    stream_chat = call_of("tools.chat", "stream_chat")
    beam_search = call_of("sampling.beam_search", "beam_search")
    score = call_of("tools.scores", "score")
    metrics = call_of("running.metrics", "metrics")
    # with trace=True: a record of each step
    trace = property(call_of("running.metrics", "trace"))
    # steps by hand
    add = call_of("running.shared_steps", "add")
    step = call_of("running.shared_steps", "step")
    abort = call_of("running.shared_steps", "abort")
    # the requests that have not ended, by their ids
    active = property(call_of("running.shared_steps", "active"))
    turn = call_of("running.shared_steps", "turn")
