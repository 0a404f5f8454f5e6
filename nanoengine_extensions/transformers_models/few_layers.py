"""A few layers of each kind, for the check of a model: the first, one in the middle and the last.

Layers are of one kind if they have the same class and shapes of parameters, get the same arguments
but for the hidden states, and do the same: they call the same functions of PyTorch with the same
numbers, and attention with the same shapes, mask and options. So a layer without positions, with
another window or other angles, with experts, or with keys of another layer is of a kind of its own.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Few(NamedTuple):
    """layers: of a model; chosen: the numbers of some; calls: the numbers of their attention."""

    layers: Any
    chosen: list[int]
    calls: list[int]


class Skipped(nn.Module):
    """In place of a layer: returns the hidden states as they are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        vars(self).update(layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return (*arguments, *options.values())[0]


@contextmanager
def noted_kinds(model: nn.Module, log: list[Any]) -> Iterator[dict[nn.Module, Any]]:
    """Notes the kinds of the layers that run. log: what they do, so far"""
    kinds: dict[nn.Module, Any] = {}
    begun: dict[nn.Module, int] = {}

    def begin(layer: nn.Module, arguments: Any) -> None:
        begun[layer] = len(log)

    def end(layer: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        x, *others = *arguments, *options.values()
        # others do more than to change hidden states
        is_plain = isinstance(output, Tensor) and output.shape == x.shape
        has_state = any(isinstance(each, (dict, list)) for each in others)
        shapes = tuple((name, each.shape) for name, each in layer.named_parameters())
        kind = type(layer), shapes, frozenset(log[begun[layer]:]), *map(id, tree_leaves(others))
        kinds[layer] = kind if is_plain and not has_state else layer

    layers = [layer for each in model.modules() if isinstance(each, nn.ModuleList)
              for layer in each]
    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
    yield kinds
    for each in hooks:
        each.remove()


def choose(layers: Any, kinds: dict[nn.Module, Any], owners: list[Any]) -> Few:
    """Returns some layers of each kind. owners: the modules that call attention"""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        groups[kinds[layer]].append(i)
    chosen = {i for each in groups.values() for i in (each[0], each[len(each) // 2], each[-1])}
    left_out = {module for i, layer in enumerate(layers) if i not in chosen
                for module in layer.modules()}
    calls = [i for i, owner in enumerate(owners) if owner not in left_out]
    return Few(layers, sorted(chosen), calls)


@contextmanager
def only(model: Any, few: Few) -> Iterator[None]:
    """Lets a model run the chosen layers only."""
    layers = [*few.layers]
    calls = model.calls
    stack = model.stack
    own = [*stack.layers] if stack else []
    model.calls = nn.ModuleList([call for i, call in enumerate(calls) if i in few.calls])
    for i, layer in enumerate(layers):
        few.layers[i] = layer if i in few.chosen else Skipped(layer)
    if stack:
        stack.layers = nn.ModuleList([own[i] for i in few.chosen])
    try:
        yield
    finally:
        model.calls = calls
        for i, layer in enumerate(layers):
            few.layers[i] = layer
        if stack:
            stack.layers = nn.ModuleList(own)
