"""Experts of a transformers model as the engine's own gated MLPs, for a CPU.

A layer with experts sends each token to a few of them. transformers keeps the matrices of all
experts of a layer in one tensor. Here each expert has linears of its own, so that the kernels of
nanoengine_cpu compute them, and quantized ones stay packed.

    tokens          a b c, each with two experts
    rows            b | a c | a b | c       sorted by experts: 0, 2, 5, 7
    experts         each is a gated MLP of its rows
    tokens again    the rows of a token, times its weights, are summed

A module is recognised by what it computes: small random matrices must give the same results.
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoengine_cpu.compiling import run_call, run_together
from nanoengine_cpu.modules import changes
from nanoengine_extensions.transformers_models.modules import GatedMLP, are_close

NAMES = ("gate_up_proj", "down_proj")
# stand for the arguments of a kernel call: its other numbers are never -1 to -3
ROWS, X, OUT = range(-1, -4, -1)


class Experts(nn.Module):
    """Takes the place of the module with all experts of a layer.

    calls: the calls of each expert's two kernels, (experts, numbers) each: see `make_calls`
    version: the version of the weights that the calls use
    """

    calls: Any = None
    version = -1

    def __init__(self, experts: Iterator[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """From (T, hidden_size) to (T, hidden_size).

        top_k_index, top_k_weights: the experts of each token, and their weights, (T, count)
        """
        ids = top_k_index.flatten().numpy()
        order = ids.argsort(kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        rows = hidden_states.index_select(0, torch.from_numpy(order // top_k_index.shape[1]))
        counts = np.bincount(ids)
        used = counts.nonzero()[0]
        outs = torch.empty_like(rows)
        self.compute(rows, outs, used, counts[used])
        found = outs.index_select(0, torch.from_numpy(places)).unflatten(0, top_k_index.shape)
        return (found * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def compute(self, rows: Tensor, outs: Tensor, used: Any, counts: Any) -> None:
        """Writes the results of rows to `outs`.

        used, counts: the experts' numbers, in the order of the rows, and how many rows each has
        """
        # in the check of a model, functions see 16-bit tensors as float32
        with torch._C.DisableTorchFunction():
            if self.version != changes["weights"]:
                self.calls = self.make_calls()
                self.version = changes["weights"]
            is_fast = self.calls is not None and rows.dtype == self.dtype
        if not is_fast:
            parts = rows.split(counts.tolist()), outs.split(counts.tolist())
            for number, x, out in zip(used, *parts):
                out.copy_(self.experts[number](x))
            return
        middle = rows.new_empty(len(rows), self.size)
        starts = counts.cumsum() - counts
        first, last = [calls[used] for calls in self.calls]
        for calls, places, x, out in zip((first, last), self.places, (rows, middle),
                                         (middle, outs)):
            for place, tensor in ((X, x), (OUT, out)):
                calls[:, places[place]] = (
                    tensor.data_ptr() + starts * tensor.stride(0) * tensor.itemsize)
            calls[:, places[ROWS]] = counts
        run = run_together()
        ends = [(calls.ctypes.data, calls.ctypes.data + calls.nbytes) for calls in (first, last)]
        run_call(run(*ends[0]) + run(*ends[1]))

    def make_calls(self: Any) -> Any:
        """Returns the kernel calls, with ROWS and the others in place of arguments; None if some
        expert has no kernel, or not the same as the others."""
        found: Any = [], []
        for mlp in self.experts:
            first, last = mlp.gate_up_proj, mlp.down_proj
            if not all(getattr(each, "is_packed", False) and not each.padding
                       for each in (first, last)) or not first.is_fused:
                return None
            for calls, linear in zip(found, (first, last)):
                calls.append(linear.call(X, 0, OUT, ROWS))
        # experts of one layer can have kernels with other arguments, if some are not quantized
        if any(len({*map(len, calls)}) > 1 for calls in found):
            return None
        self.size, self.dtype = last.in_features, last._parameters["weight"].dtype
        self.places = [{place: calls[0].index(place) for place in (X, OUT, ROWS)}
                       for calls in found]
        return [*map(np.array, found)]


def of_matrices(module: Any) -> Experts:
    """Returns the experts of a module, with views of its matrices."""
    def linear(weight: Tensor) -> nn.Linear:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(weight, False)
        return made

    return Experts(GatedMLP(linear(first), linear(last))
                   for first, last in zip(module.gate_up_proj, module.down_proj))


def of_linears(linears: list[nn.Linear]) -> Experts:
    """linears: first those with gates and ups of all experts, then the others"""
    count = len(linears) // 2
    return Experts(map(GatedMLP, linears[:count], linears[count:]))


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
    """Whether a module, given two small experts, computes what `Experts` computes with them, for
    small and large rows."""
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
