"""Replaces parts of a transformers model with modules that a kernel library makes fast.

    a norm        RMSNorm with a weight of w, or of 1 + w
    a gated MLP   down(SiLU(gate(x)) * up(x)): gate and up become one product
    linears       with the same input, such as queries, keys and values: they become one product

They are recognised by what they compute, not by their names: each is compared with its replacement
on random inputs, in float32 (`InFloat32`) and in the dtype of the model. A part that differs stays
as it is.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanoengine.model import MLP, RMSNorm

# .attend: computes the attention of the model that this thread runs
# .step, .angles: the inputs of its step, and the angles that it was given so far
current = threading.local()
# the replacements of modules, by the replaced module
Others = dict[nn.Module, nn.Module]
# the arguments and options of each call of a module
Inputs = dict[nn.Module, list[tuple[tuple, dict[str, Any]]]]
HALVES = (torch.half, torch.bfloat16)
# functions that look at a tensor, or at a part of it: `each.dtype` is a `__get__`
VIEWING = {"__get__", "__getitem__", "transpose", "unbind", "chunk", "split", "view", "t"}
# results differ if they are more than this many roundings apart
MOST_ROUNDINGS = 16


class GatedMLP(MLP):
    """The engine's own MLP, made of existing linears."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj: Any = gate_up
        self.down_proj = down


class Part(nn.Module):
    """One of several linears with the same input. The first one that is called computes all.

    linear: all of them; sizes: how many outputs each has; kept: the input, and by index the outputs
        of each linear that has not been called yet
    """

    def __init__(self, linear: nn.Linear, sizes: list[int], kept: dict[Any, Tensor],
                 index: int) -> None:
        super().__init__()
        self.linear = linear
        self.state = sizes, kept, index

    def forward(self, x: Tensor) -> Tensor:
        sizes, kept, index = self.state
        if kept.get("x") is not x or index not in kept:
            kept |= {"x": x} | dict(enumerate(self.linear(x).split(sizes, dim=-1)))
        part = kept.pop(index)
        # after the last one, nothing is kept until the next step
        if len(kept) == 1:
            kept.clear()
        return part


def is_quantized(module: Any) -> bool:
    """Whether it is a linear with packed numbers: see cpu/packed"""
    return hasattr(module, "join")


def is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or is_quantized(module)


def side_by_side(linears: list[Any]) -> Any:
    """Returns one linear with the outputs of all; their weights become views of its weight. Returns
    None if quantized ones cannot be computed by one product."""
    sizes = [each.out_features for each in linears]
    fused: Any = None
    if any(map(is_quantized, linears)):
        if all(map(is_quantized, linears)):
            fused = linears[0].join(linears)
        if fused is None:
            return None
    else:
        fused = nn.Linear(linears[0].in_features, sum(sizes), bias=False, device="meta")
        fused.weight = nn.Parameter(torch.cat([each.weight for each in linears]), False)
        for each, weight in zip(linears, fused.weight.split(sizes)):
            each.weight = nn.Parameter(weight, False)
    given = [each.bias for each in linears if each.bias is not None]
    if given:
        biases = [given[0].new_zeros(each.out_features) if each.bias is None else each.bias
                  for each in linears]
        fused.bias = nn.Parameter(torch.cat(biases), False)
    return fused


# ------------------------------------------------------------------------------ recognition


@contextmanager
def given_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Notes what each module gets in each call."""
    inputs: Inputs = defaultdict(list)

    def note(module: nn.Module, arguments: Any, options: Any) -> None:
        inputs[module].append((arguments, options))

    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in model.modules()]
    yield inputs
    for handle in handles:
        handle.remove()


def layers_of(model: nn.Module, inputs: Inputs) -> Any:
    """Returns the layers of a model, if each runs once in a step."""
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each))
    return next((each for each in lists if all(len(inputs[one]) == 1 for one in each)), ())


def fast_modules(inputs: Inputs, dtype: torch.dtype, others: Others) -> None:
    """Adds replacements of modules that are faster. inputs: see `given_inputs`

    others: replacements of larger modules
    """
    groups: dict[Any, list[Any]] = defaultdict(list)
    known = {part for module in others for part in module.modules()}
    for module, calls in inputs.items():
        given = only_tensors(calls)
        if module in known or not given:
            continue
        if is_linear(module):
            weight: Any = module._parameters["weight"]
            groups[(*map(id, given), weight.dtype, is_quantized(module))].append(module)
        if other := known_part(module, calls, dtype):
            others[module] = other
            known.update(module.modules())
    for linears in groups.values():
        if len(linears) > 1:
            sizes, kept = [each.out_features for each in linears], dict[Any, Tensor]()
            if fused := side_by_side(linears):
                others |= {each: Part(fused, sizes, kept, i) for i, each in enumerate(linears)}


def only_tensors(calls: list[Any]) -> list[Tensor]:
    """Returns the inputs of a module's calls, if each is one tensor."""
    given = [arguments[0] for arguments, options in calls if len(arguments) == 1 and not options]
    is_all = len(given) == len(calls) and all(isinstance(each, Tensor) for each in given)
    return given if is_all else []


def known_part(module: nn.Module, calls: list[Any], dtype: torch.dtype) -> nn.Module | None:
    """Returns a norm or an MLP with the same results, or None. calls: see `given_inputs`"""
    return next((each for given in only_tensors(calls)[:1] for each in candidates(module)
                 if is_same(each, module, given, dtype)), None)


def candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yields norms and MLPs that may give the same results."""
    weights = [*module.parameters()]
    linears: list[Any] = [each for each in module.children() if is_linear(each)]
    if [weight.ndim for weight in weights] == [1]:
        yield from norms(module, weights[0])
    elif len(linears) in (2, 3) and {*nn.ModuleList(linears).parameters()} == {*weights}:
        for *first, down in permutations(linears):
            sizes = {(each.in_features, len(first) * each.out_features) for each in first}
            if sizes == {(down.out_features, 2 * down.in_features)}:
                gate_up = side_by_side(first) if len(first) > 1 else first[0]
                if gate_up:
                    yield GatedMLP(gate_up, down)


def norms(module: nn.Module, weight: Tensor) -> Iterator[nn.Module]:
    # rows of one number x become x * w / sqrt(x^2 + eps)
    ones = torch.ones_like(weight, dtype=torch.float32)[None, None]
    large, small = (module(x * ones) for x in (1e3, 1e-5))
    eps = 1e-10 * (float(large.norm() / small.norm()) ** 2 - 1)
    for scale in (weight, 1 + weight.float()):
        norm = RMSNorm(len(weight), float(f"{eps:.2g}"))
        norm.weight = nn.Parameter(scale, False)
        yield norm


def is_same(other: nn.Module, module: nn.Module, given: Tensor, dtype: torch.dtype) -> bool:
    """Whether two modules give the same results for random rows of the given length, up to
    rounding, in float32 and in a dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, given.shape[-1], generator=generator).to(given.device, torch.float32)
    x *= torch.tensor([1e-3, 0.1, 1.0, 1.0, 30.0], device=x.device)[:, None]
    with InFloat32():
        is_close = are_close(module(x), other(x), torch.float32)
    return is_close and are_close(module(x.to(dtype)), other(x.to(dtype)), dtype)


def are_close(one: Tensor, two: Tensor, dtype: torch.dtype) -> bool:
    """Whether all rows are equal, except for rounding in a dtype."""
    error = (one.double() - two.double()).norm(dim=-1)
    most = one.double().norm(dim=-1) * MOST_ROUNDINGS * torch.finfo(dtype).eps
    return one.shape == two.shape and bool((error < most).all())


def exchange(model: nn.Module, others: Others) -> None:
    """Replaces modules of a model."""
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:
            if child in others:
                setattr(parent, name, others[child])


def optimize_modules(causal: nn.Module, runner: Any) -> None:
    """Gives linears, gated MLPs and norms of a model the kernels of the runner's device."""
    fast = [each for each in causal.modules() if type(each) in (nn.Linear, GatedMLP, RMSNorm)]
    for each in fast:
        if isinstance(each, GatedMLP) and is_quantized(each.gate_up_proj):
            each.gate_up_proj.fuse()
    runner.kernels.optimize(nn.ModuleList(fast), has_attention=False)
    if runner.kernels.empty_cache and runner.dtype != torch.half:
        from nanoengine_extras.models.transformers_models.row_norms import RowNorm
        exchange(causal, {each: RowNorm(each) for each in fast if isinstance(each, RMSNorm)})


class InFloat32(TorchFunctionMode):
    """Lets a model compute in float32: each function gets weights that are converted for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in VIEWING:
            result = function(*args, **(kwargs or {}))
            return torch.float32 if any(result is each for each in HALVES) else result
        options = widened([*(kwargs or {}).items()])
        return widened(function(*widened(args), **dict(options)))


def widened(value: Any) -> Any:
    """A value with its halves in float32. `tree_map` would take most of the time of a check."""
    if type(value) in (tuple, list):
        return type(value)(map(widened, value))
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
