"""Watches a transformers model in a step: finds the layers that do the same thing, tokens that the
model counts, and places where the host waits for the GPU.

The check of a model runs a few layers of each kind: the first, one in the middle and the last.
Layers are of one kind if three things hold. Their classes and the shapes of their parameters are
the same. They get the hidden states of the layer before, and otherwise the same arguments. They
call the same functions of PyTorch with the same numbers, and attention with the same shapes, mask
and options. So a layer without positions, with a different window or different angles, with
experts, or with keys of another layer is of a different kind.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from nanoengine_extras.models.transformers_models.modules import Inputs, Run

# functions that count, and functions that only move rows of their first argument
COUNTING = {"arange", "cumsum"}
MOVING = {"__getitem__", "__setitem__", "index_select", "gather", "index_add", "index_add_"}


def kind_of(layer: nn.Module, run: Run, last: Any) -> Any:
    """Returns the kind of a layer, from one call of it. last: the output of the layer before"""
    x, *others = *run.arguments, *run.options.values()
    is_same = isinstance(run.output, Tensor) and run.output.shape == getattr(x, "shape", 0)
    if not is_same or {dict, list} & {*map(type, others)}:
        # it does more than change hidden states
        return layer
    shapes = tuple((name, each.shape) for name, each in layer.named_parameters())
    return type(layer), shapes, frozenset(run.log), x is last, *map(id, tree_leaves(others))


def choose(layers: Any, inputs: Inputs, owners: list[Any]) -> tuple[Any, Any, Any]:
    """Returns the layers, the numbers of a few layers of each kind, and of their attention calls.

    inputs: see `given_inputs`; owners: the modules that call attention
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    last = None
    for i, layer in enumerate(layers):
        run, = inputs[layer]
        groups[kind_of(layer, run, last)].append(i)
        last = run.output
    chosen = {i for each in groups.values() for i in (each[0], each[len(each) // 2], each[-1])}
    left_out = {module for i, layer in enumerate(layers) if i not in chosen
                for module in layer.modules()}
    return layers, chosen, {i for i, owner in enumerate(owners) if owner not in left_out}


def skip(*arguments: Any, **options: Any) -> Any:
    """Takes the place of a layer's forward: returns the hidden states as they are."""
    return (*arguments, *options.values())[0]


@contextmanager
def replaced(layers: Any, forward: Callable) -> Iterator[None]:
    """Gives some modules another forward."""
    for each in layers:
        each.forward = forward
    try:
        yield
    finally:
        for each in layers:
            del each.forward


@contextmanager
def only(model: Any, layers: Any, chosen: set[int], numbers: set[int]) -> Iterator[None]:
    """Makes a model run only some of its layers: see `choose`."""
    calls = model.calls
    stack = model.stack or SimpleNamespace(layers=nn.ModuleList())
    own = stack.layers
    model.calls = nn.ModuleList([call for i, call in enumerate(calls) if i in numbers])
    stack.layers = nn.ModuleList([layer for i, layer in enumerate(own) if i in chosen])
    try:
        with replaced([layer for i, layer in enumerate(layers) if i not in chosen], skip):
            yield
    finally:
        model.calls = calls
        stack.layers = own


@contextmanager
def noted_waits(device: str) -> Iterator[list[str]]:
    """Notes the lines of code in which the host waits for the GPU: CUDA graphs cannot capture
    them."""
    places: list[str] = []
    if device == "cpu":
        yield places
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        # no errors: other threads may wait for the GPU
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    places += [f"{Path(each.filename).name}:{each.lineno}" for each in found
               if "a synchronizing CUDA operation" in str(each.message)]


# ---------------------------------------------------------------------------- counted tokens


class LikeLast(TorchFunctionMode):
    """Gives all later tokens the numbers of the last recorded one, for masks that look up which
    image a token belongs to, or whether it is text."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        is_part = getattr(function, "__name__", "") == "__getitem__" and isinstance(args[1], tuple)
        if is_part and isinstance(args[1][-1], Tensor):
            table, (*rows, places) = args
            args = table, (*rows, places.clamp(max=table.shape[-1] - 1))
        return function(*args, **(kwargs or {}))


class Watch(TorchFunctionMode):
    """Notices a model that counts its tokens: it would mistake places in a step for positions.

    No check of a few tokens finds that in Llama 4, where it matters from position 8,192 on. Counts
    may be indices of rows of the step, for example where tokens are sorted by their experts. They
    must not become part of a computation, or indices into a table of positions.

    num_tokens: how many tokens the step has
    log: gets the functions that are called, with their arguments except tensors and sizes
    """

    def __init__(self, num_tokens: int, log: list[Any]) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.log = log
        self.has_counted = False
        # the counts, by their ids; they are kept, so that no other object gets their ids
        self.counts: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        self.log.append((name, *(each for each in leaves if isinstance(each, float))))
        if self.counts.keys() & map(id, leaves):
            # a tensor that counts are written to has counts, too
            self.follow(name, args[0], args[0] if name == "__setitem__" else result)
        elif name in COUNTING and result.shape[-1:] == (self.num_tokens,):
            self.counts[id(result)] = result
        return result

    def follow(self, name: str, table: Any, written: Any) -> None:
        """Keeps integers that were made from counts; notices counts that enter a computation."""
        is_step = isinstance(table, Tensor) and table.shape[:1] == (self.num_tokens,)
        moves_rows = name in MOVING and is_step and id(table) not in self.counts
        for each in tree_leaves(written):
            if isinstance(each, Tensor) and not each.is_floating_point():
                self.counts[id(each)] = each
            elif isinstance(each, Tensor) and not moves_rows:
                self.has_counted = True
