"""Experts of a model of transformers as the engine's own gated MLPs, for a CPU.

A layer with experts sends each token to a few of them. transformers keeps the matrices of all
experts of a layer in one tensor. Here each expert has linears of its own, so that the kernels of
nanoengine_cpu compute them, and quantized ones stay packed.

    tokens          a b c, each with two experts
    rows            b | a c | a b | c       sorted by experts: 0, 2, 5, 7
    experts         each is a gated MLP of its rows
    tokens again    the rows of a token, times its weights, are summed

A module is known by what it computes: with small random matrices, it must give the same.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine_cpu.compiling import run_call
from nanoengine_cpu.modules import PackedLinear
from nanoengine_extensions.transformers_models.modules import GatedMLP, are_close

NAMES = ("gate_up_proj", "down_proj")


class Experts(nn.Module):
    """In place of a module with all experts of a layer."""

    def __init__(self, experts: Iterator[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns (T, hidden_size), as it gets.

        top_k_index, top_k_weights: the experts of each token, and their weights, (T, count)
        """
        numbers, order = top_k_index.flatten().sort(stable=True)
        count = top_k_index.shape[1]
        rows = hidden_states[order // count]
        outs = torch.empty_like(rows)
        parts = [*runs(numbers)]
        mlps: Any = [self.experts[number] for number, _, _ in parts]
        # the check of a model lets functions take each number for one in float32
        with torch._C.DisableTorchFunction():
            are_fast = all(is_fast(mlp, rows) for mlp in mlps)
        if are_fast:
            self.run_all(mlps, parts, rows, outs)
        else:
            for mlp, (_, start, stop) in zip(mlps, parts):
                outs[start:stop] = mlp(rows[start:stop])
        weighted = outs * top_k_weights.flatten()[order, None]
        found = torch.empty_like(weighted)
        found[order] = weighted
        return found.unflatten(0, (-1, count)).sum(1).to(hidden_states.dtype)

    def run_all(self, mlps: list[Any], parts: Any, rows: Tensor, outs: Tensor) -> None:
        """Runs the kernels of all experts in one call."""
        middle = rows.new_empty(len(rows), mlps[0].down_proj.in_features)
        calls: list[int] = []
        for mlp, (_, start, stop) in zip(mlps, parts):
            x, between, out = (each[start:].data_ptr() for each in (rows, middle, outs))
            calls += mlp.gate_up_proj.call(x, 0, between, stop - start)
            calls += mlp.down_proj.call(between, 0, out, stop - start)
        run_call(calls)


def is_fast(mlp: Any, rows: Tensor) -> bool:
    """Whether an expert has kernels for these rows."""
    first, last = mlp.gate_up_proj, mlp.down_proj
    return (getattr(first, "is_fused", False) and isinstance(last, PackedLinear)
            and not first.padding and not last.padding and first.takes(rows)
            and last.is_packed)


def runs(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields each of some sorted numbers, and the places where it begins and ends."""
    found, counts = numbers.unique_consecutive(return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    for number, (start, stop) in zip(found.tolist(), pairwise(ends)):
        yield number, start, stop


def of_matrices(module: Any) -> Experts:
    """Returns the experts of a module, with views of its matrices."""
    def linear(weight: Tensor) -> nn.Linear:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(weight, False)
        return made

    return Experts(GatedMLP(linear(first), linear(last))
                   for first, last in zip(module.gate_up_proj, module.down_proj))


def of_parts(module: Any, linear: Callable[[Any], nn.Linear]) -> Experts:
    """Returns the experts of a module whose matrices have parts: see quantized/origins.py.

    linear: makes one of the parts of a matrix
    """
    return Experts(GatedMLP(linear(first), linear(last)) for first, last in zip(
        module.gate_up_proj.parts, module.down_proj.parts))


# ---------------------------------------------------------------------------- recognition


def are_known(module: Any) -> bool:
    """Whether a module has the experts of a layer, each a gated MLP.

    gate_up_proj: (experts, 2 * intermediate_size, hidden_size), gates first
    down_proj: (experts, hidden_size, intermediate_size)
    """
    if {*module._parameters} != {*NAMES} or module._modules.keys() - {"act_fn"}:
        return False
    first, last = (module._parameters[name].shape for name in NAMES)
    has_sizes = len(first) == len(last) == 3 and first[1:] == (2 * last[2], last[1])
    return has_sizes and hasattr(module, "num_experts") and is_same(module)


def is_same(module: Any) -> bool:
    """Whether a module with two small experts computes the same as these, from small and large
    rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    trial = copy.copy(module)
    trial._parameters = dict(zip(NAMES, (random(2, 32, 8), random(2, 8, 16))))
    trial.num_experts = 2
    x = random(5, 8) * torch.tensor([1e-3, 0.1, 1.0, 1.0, 30.0])[:, None]
    given = x, torch.tensor([[0, 1], [1, 0]] * 3)[:5], random(5, 2).abs()
    try:
        right = trial(*given)
    except Exception:
        # it needs other sizes, or other arguments
        return False
    return are_close(right, of_matrices(trial)(*given), torch.float32)
