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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# functions that count, and functions that only move rows of their first argument
COUNTING = {"arange", "cumsum"}
MOVING = {"__getitem__", "__setitem__", "index_select", "gather", "index_add", "index_add_"}


class Skipped(nn.Module):
    """Takes the place of a layer: returns the hidden states as they are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        vars(self).update(layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return (*arguments, *options.values())[0]


@contextmanager
def noted_kinds(model: nn.Module) -> Iterator[tuple[dict[nn.Module, Any], list[Any]]]:
    """Notes the kinds of the layers that run, from a log of what they do."""
    log: list[Any] = []
    kinds: dict[nn.Module, Any] = {}
    begun: dict[nn.Module, int] = {}
    done: list[Any] = []

    def begin(layer: nn.Module, arguments: Any) -> None:
        begun[layer] = len(log)

    def end(layer: nn.Module, arguments: tuple, options: dict, output: Any) -> None:
        x, *others = *arguments, *options.values()
        # other layers do more than change hidden states
        is_same = isinstance(output, Tensor) and output.shape == getattr(x, "shape", 0)
        is_plain = is_same and not {dict, list} & {*map(type, others)}
        shapes = tuple((name, each.shape) for name, each in layer.named_parameters())
        # whether anything comes between the layers
        is_next = any(x is each for each, _ in done)
        kind = type(layer), shapes, frozenset(log[begun[layer]:]), is_next, *map(
            id, tree_leaves(others))
        # kept, so that no other object can get its id
        done.append((output, others))
        kinds[layer] = kind if is_plain else layer

    layers = [layer for each in model.modules() if isinstance(each, nn.ModuleList)
              for layer in each]
    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
    yield kinds, log
    for each in hooks:
        each.remove()


def choose(layers: Any, kinds: dict[nn.Module, Any], owners: list[Any]) -> tuple[Any, Any, Any]:
    """Returns the layers, the numbers of a few layers of each kind, and of their attention calls.

    owners: the modules that call attention
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        groups[kinds[layer]].append(i)
    chosen = {i for each in groups.values() for i in (each[0], each[len(each) // 2], each[-1])}
    left_out = {module for i, layer in enumerate(layers) if i not in chosen
                for module in layer.modules()}
    return layers, chosen, {i for i, owner in enumerate(owners) if owner not in left_out}


@contextmanager
def only(model: Any, layers: Any, chosen: set[int], numbers: set[int]) -> Iterator[None]:
    """Makes a model run only some of its layers: see `choose`."""
    whole = [*layers]
    calls = model.calls
    stack = model.stack or SimpleNamespace(layers=nn.ModuleList())
    own = stack.layers
    model.calls = nn.ModuleList([call for i, call in enumerate(calls) if i in numbers])
    for i, layer in enumerate(whole):
        layers[i] = layer if i in chosen else Skipped(layer)
    stack.layers = nn.ModuleList([layer for i, layer in enumerate(own) if i in chosen])
    try:
        yield
    finally:
        model.calls = calls
        for i, layer in enumerate(whole):
            layers[i] = layer
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
