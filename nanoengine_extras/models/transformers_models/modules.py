"""Replaces parts of a transformers model with modules that a kernel library makes fast.

    a norm        RMSNorm with a weight of w, or of 1 + w
    a gated MLP   down(SiLU(gate(x)) * up(x)): gate and up become one product
    linears       with the same input, such as queries, keys and values: they become one product

Norms and MLPs are recognised by what they compute (trial.py). A part that differs stays as it is.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoengine.model import MLP, RMSNorm
from nanoengine_extras.models.transformers_models.trial import InFloat32, is_same, random_rows

# .attend: computes the attention of the model that this thread runs
# .step, .angles: the inputs of its step, and the angles that it was given so far
current = threading.local()
# the replacements of modules, by the replaced module
Others = dict[nn.Module, nn.Module]


class Run(NamedTuple):
    """A call of a module.

    log: the functions that it calls, see `Watch`
    """

    arguments: tuple
    options: dict[str, Any]
    output: Any = None
    log: Any = ()


# the calls of each module; modules are in the order of their first calls
Inputs = dict[nn.Module, list[Run]]


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


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Returns a linear with a weight, (outputs, inputs), that is not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, False)
    return linear


def side_by_side(linears: list[Any]) -> Any:
    """Returns one linear with the outputs of all; their weights become views of its weight. Returns
    None if quantized ones cannot be computed by one product."""
    if any(map(is_quantized, linears)):
        fused = linears[0].join(linears) if all(map(is_quantized, linears)) else None
        if fused is None:
            return None
    else:
        fused = linear_of(torch.cat([each.weight for each in linears]))
        parts = fused.weight.split([each.out_features for each in linears])
        for each, weight in zip(linears, parts):
            each.weight = nn.Parameter(weight, False)
    given = [each.bias for each in linears if each.bias is not None]
    if given:
        biases = [given[0].new_zeros(each.out_features) if each.bias is None else each.bias
                  for each in linears]
        fused.bias = nn.Parameter(torch.cat(biases), False)
    return fused


# ------------------------------------------------------------------------------ recognition


@contextmanager
def given_inputs(model: nn.Module, log: Sequence[Any] = ()) -> Iterator[Inputs]:
    """Notes what each module gets and returns in each call. log: see `Watch`"""
    inputs: Inputs = defaultdict(list)

    def begin(module: nn.Module, arguments: Any, options: Any) -> None:
        inputs[module].append(Run(arguments, options, log=len(log)))

    def end(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        *_, run = inputs[module]
        inputs[module][-1] = run._replace(output=output, log=log[run.log:])

    handles = []
    for each in model.modules():
        handles.append(each.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(each.register_forward_hook(end, with_kwargs=True))
    yield inputs
    for handle in handles:
        handle.remove()


def in_order(modules: Iterable[nn.Module], inputs: Inputs) -> list[Any]:
    """Returns the modules that were called, in the order of their first calls."""
    wanted = {*modules}
    return [each for each in inputs if each in wanted and inputs[each]]


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
        if len(linears) > 1 and (fused := side_by_side(linears)):
            sizes, kept = [each.out_features for each in linears], dict[Any, Tensor]()
            others |= {each: Part(fused, sizes, kept, i) for i, each in enumerate(linears)}


def only_tensors(calls: list[Run]) -> list[Tensor]:
    """Returns the inputs of a module's calls, if each is one tensor."""
    given = [run.arguments[0] for run in calls if len(run.arguments) == 1 and not run.options]
    is_all = len(given) == len(calls) and all(isinstance(each, Tensor) for each in given)
    return given if is_all else []


def known_part(module: nn.Module, calls: list[Run], dtype: torch.dtype) -> nn.Module | None:
    """Returns a norm or an MLP with the same results, or None. calls: see `given_inputs`"""
    given = only_tensors(calls)
    if not given:
        return None
    x = random_rows(5, given[0].shape[-1], 30).to(given[0].device)[None]
    return next((each for each in candidates(module) if is_same(
        module, each, lambda one, kind: [one(x.to(kind))], dtype)), None)


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
    with InFloat32():
        large, small = (module(x * ones) for x in (1e3, 1e-5))
    eps = 1e-10 * (float(large.norm() / small.norm()) ** 2 - 1)
    for scale in (weight, 1 + weight.float()):
        norm = RMSNorm(len(weight), float(f"{eps:.2g}"))
        norm.weight = nn.Parameter(scale, False)
        yield norm


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
    if runner.kernels:
        runner.kernels.optimize(nn.ModuleList(fast), has_attention=False)
    if hasattr(runner.kernels, "empty_cache") and runner.dtype != torch.half:
        from nanoengine_extras.models.transformers_models.row_norms import RowNorm
        exchange(causal, {each: RowNorm(each) for each in fast if isinstance(each, RMSNorm)})
