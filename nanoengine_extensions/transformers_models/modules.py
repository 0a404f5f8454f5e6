"""Parts of a model of transformers, as modules that a library of kernels makes fast.

    a norm        RMSNorm with a weight of w, or of 1 + w
    a gated MLP   down(act(gate(x)) * up(x)): gate and up become one product
    linears       with the same input, as queries, keys and values: they become one product

They are known by what they compute, not by their names: each is compared with what takes its place,
on random inputs, in float32 and in the dtype of the model. What differs stays what it is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from nanoengine.model import MLP, RMSNorm

ACTIVATIONS = partial(F.gelu, approximate="tanh"), F.gelu, F.relu
HALVES = (torch.half, torch.bfloat16)
# functions that look at a tensor, or at a part of it: `each.dtype` is a `__get__`
VIEWING = {"__get__", "__getitem__", "transpose", "unbind", "chunk", "split", "view", "t"}
# how many roundings make a difference
MOST_ROUNDINGS = 16


class GatedMLP(MLP):
    """The engine's own MLP."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj: Any = gate_up
        self.down_proj = down


class OtherMLP(GatedMLP):
    """With another activation than SiLU."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear,
                 activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(gate_up, down)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


class Shared(nn.Module):
    """Linears with the same input. The first one that is called computes all."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.linear = side_by_side(linears)
        self.sizes = [each.out_features for each in linears]
        self.x: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        if x is not self.x or index not in self.parts:
            self.x = x
            self.parts = dict(enumerate(self.linear(x).split(self.sizes, dim=-1)))
        found = self.parts.pop(index)
        # no step keeps the memory of the one before it
        self.x = self.x if self.parts else None
        return found


class Part(nn.Module):
    """In place of one of these linears."""

    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self.index, x)


def side_by_side(linears: list[Any]) -> nn.Linear:
    """Returns one linear with the outputs of all. Their weights become views of its weight."""
    sizes = [each.out_features for each in linears]
    fused: Any = nn.Linear(linears[0].in_features, sum(sizes), device="meta")
    fused.weight = nn.Parameter(torch.cat([each.weight for each in linears]), False)
    fused.bias = None
    if any(each.bias is not None for each in linears):
        biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias
                  for each in linears]
        fused.bias = nn.Parameter(torch.cat(biases), False)
    for each, weight in zip(linears, fused.weight.split(sizes)):
        each.weight = nn.Parameter(weight, False)
    return fused


# ------------------------------------------------------------------------------ recognition


@contextmanager
def given_inputs(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor | None]]]:
    """Notes what each module gets in each call: a tensor, or None for anything else."""
    inputs: dict[nn.Module, list[Tensor | None]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        inputs.setdefault(module, []).append(args[0] if is_one else None)

    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in model.modules()]
    yield inputs
    for handle in handles:
        handle.remove()


def fast_modules(inputs: dict[nn.Module, list[Any]],
                 dtype: torch.dtype) -> dict[nn.Module, nn.Module]:
    """Returns what can take the place of modules, by the module. inputs: see `given_inputs`"""
    found: dict[nn.Module, nn.Module] = {}
    groups = defaultdict[Any, list[nn.Linear]](list)
    known: set[nn.Module] = set()
    for module, given in inputs.items():
        if any(x is None for x in given):
            continue
        if type(module) is nn.Linear and module not in known:
            groups[(*map(id, given), module.weight.dtype)].append(module)
        other = next((each for each in candidates(module)
                      if is_same(each, module, given[0].shape[-1], dtype)), None)
        if other:
            found[module] = other
            known.update(module.modules())
    for linears in groups.values():
        if len(linears) > 1:
            shared = Shared(linears)
            found.update((each, Part(shared, i)) for i, each in enumerate(linears))
    return found


def candidates(module: Any) -> Iterator[nn.Module]:
    """Yields modules that may compute the same."""
    weights = [*module.parameters()]
    linears = [each for each in module.children() if type(each) is nn.Linear]
    num_weights = sum(len([*each.parameters()]) for each in linears)
    if len(weights) == 1 and weights[0].ndim == 1 and not linears:
        yield from norms(module, weights[0])
    elif len(linears) in (2, 3) and num_weights == len(weights):
        yield from mlps(linears)


def norms(module: Any, weight: Tensor) -> Iterator[nn.Module]:
    for scale in (weight, 1 + weight.float()):
        norm = RMSNorm(len(weight), eps_of(module, weight))
        norm.weight = nn.Parameter(scale, False)
        yield norm


def eps_of(module: Any, weight: Tensor) -> float:
    """Returns the eps of a norm, which is x * w / sqrt(x^2 + eps) for rows of one number x."""
    large, small = (module(torch.full_like(weight, x, dtype=torch.float32)) for x in (1e3, 1e-3))
    ratio = float(large.norm() / small.norm())
    return float(f"{1e-6 * (ratio**2 - 1):.2g}")


def mlps(linears: list[nn.Linear]) -> Iterator[nn.Module]:
    for *first, down in permutations(linears):
        sizes = {(each.in_features, len(first) * each.out_features) for each in first}
        if sizes == {(down.out_features, 2 * down.in_features)}:
            gate_up = side_by_side(first) if len(first) == 2 else first[0]
            yield GatedMLP(gate_up, down)
            yield from (OtherMLP(gate_up, down, each) for each in ACTIVATIONS)


def is_same(other: nn.Module, module: nn.Module, size: int, dtype: torch.dtype) -> bool:
    """Whether two modules compute the same of random rows, but for roundings, in float32 and in a
    dtype. size: of a row"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, size, generator=generator).to(next(module.parameters()).device)
    x *= torch.tensor([1e-3, 0.1, 1.0, 1.0, 30.0], device=x.device)[:, None]
    with InFloat32():
        pairs = [(torch.float32, other(x), module(x))]
    if dtype != torch.float32:
        pairs.append((dtype, other(x.to(dtype)), module(x.to(dtype))))
    for kind, computed, expected in pairs:
        error = (computed.double() - expected.double()).norm(dim=-1)
        most = expected.double().norm(dim=-1) * MOST_ROUNDINGS * torch.finfo(kind).eps
        if not (error < most).all():
            return False
    return True


def exchange(model: nn.Module, others: dict[nn.Module, nn.Module]) -> None:
    """Puts other modules in the place of some."""
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:
            if child in others:
                setattr(parent, name, others[child])


class InFloat32(TorchFunctionMode):
    """Lets a model compute in float32: each function gets weights that are converted for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in VIEWING:
            result = function(*args, **(kwargs or {}))
            return torch.float32 if any(result is each for each in HALVES) else result
        args, kwargs = tree_map(widened, (args, kwargs or {}))
        return tree_map(widened, function(*args, **kwargs))


def widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
