"""Experts of a transformers model as the engine's own gated MLPs, for a CPU.

A layer with experts sends each token to a few of them. transformers keeps the matrices of all
experts of a layer in one tensor. Here each expert has linears of its own, so that the kernels of
nanoengine_extras.cpu compute them, and quantized ones stay packed.

    tokens          a b c, each with two experts
    rows            b | a c | a b | c       sorted by experts: 0, 2, 5, 7
    experts         each is a gated MLP of its rows, or has the activation of the module
    tokens again    the rows of a token, times its weights, are summed

A module is recognised by what it computes (transformers_models/trial.py): small random matrices
must give the same results.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoengine_extras.cpu.compiling import run_call, run_together
from nanoengine_extras.cpu.modules import changes
from nanoengine_extras.models.transformers_models.modules import GatedMLP, linear_of
from nanoengine_extras.models.transformers_models.trial import is_same, random_rows

NAMES = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
# placeholders for the arguments of a kernel call, whose other numbers are never -1 to -3
ROWS, X, OUT = range(-1, -4, -1)


class Expert(nn.Module):
    """An expert with its module's own activation.

    act: from the outputs of the first linear to the inputs of the second
    """

    def __init__(self, first: nn.Linear, last: nn.Linear, act: Callable) -> None:
        super().__init__()
        self.gate_up_proj = first
        self.down_proj = last
        vars(self)["act"] = act

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Experts(nn.Module):
    """Takes the place of the module with all experts of a layer.

    act: of all experts; None if they are gated MLPs, whose activation is part of a kernel
    calls: the calls of each expert's two kernels, (experts, numbers) each: see `make_calls`
    version: the version of the weights that the calls use
    """

    calls: Any = None
    version = -1

    def __init__(self, experts: Iterator[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.act = getattr(self.experts[0], "act", None)

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
        both = [calls[used] for calls in self.calls]
        spans = counts.cumsum() - counts, counts
        first = self.placed(both, 0, rows, middle, spans)
        if self.act:
            run_call(first)
            first, middle = [], self.act(middle).to(rows.dtype)
        run_call(first + self.placed(both, 1, middle, outs, spans))

    def placed(self, both: Any, which: int, x: Tensor, out: Tensor, spans: Any) -> list[int]:
        """Returns one call that runs the calls of some experts' first (0) or second (1) linears.

        x, out: the inputs and outputs of all rows
        spans: each expert's first row, and how many rows it has
        """
        calls, places = both[which], self.places[which]
        starts, counts = spans
        for place, tensor in ((X, x), (OUT, out)):
            calls[:, places[place]] = (
                tensor.data_ptr() + starts * tensor.stride(0) * tensor.itemsize)
        calls[:, places[ROWS]] = counts
        return run_together()(calls.ctypes.data, calls.ctypes.data + calls.nbytes)

    def make_calls(self: Any) -> Any:
        """Returns the kernel calls, with ROWS and the others in place of arguments; None if an
        expert has no kernel, or if the kernels of experts differ."""
        found: Any = [], []
        for mlp in self.experts:
            first, last = mlp.gate_up_proj, mlp.down_proj
            if not all(getattr(each, "is_packed", False) and not each.padding
                       for each in (first, last)) or first.is_fused != (self.act is None):
                return None
            for calls, linear in zip(found, (first, last)):
                calls.append(linear.call(X, 0, OUT, ROWS))
        # experts of one layer can have kernels with other arguments, if some are not quantized
        if any(len({*map(len, calls)}) > 1 for calls in found):
            return None
        self.size, self.dtype = last.in_features, last._parameters["weight"].dtype
        if self.act:
            self.size = first.out_features
        self.places = [{place: calls[0].index(place) for place in (X, OUT, ROWS)}
                       for calls in found]
        return [*map(np.array, found)]


def build(module: Any, linears: Any = None, kind: Any = None) -> Experts:
    """Returns the experts of a module, with views of its matrices, or with other linears.

    linears: first those with gates and ups of all experts, then the others; without biases
    kind: makes an expert of its two linears; None: see `kind_of`
    """
    kind = kind or kind_of(module)
    linears = linears or [linear_of(each) for name in NAMES for each in matrices_of(module, name)]
    biases = [each for name in BIASES for each in module._parameters.get(name, ())]
    for linear, bias in zip(linears, biases):
        linear.bias = nn.Parameter(bias, False)
    count = len(linears) // 2
    return Experts(map(kind, linears[:count], linears[count:]))


def matrices_of(module: Any, name: str) -> Tensor:
    """Returns the matrices of all experts, (experts, outputs, inputs)."""
    found = module._parameters[name]
    return found.mT if getattr(module, "is_transposed", False) else found


# ---------------------------------------------------------------------------- recognition


def kind_of(module: Any) -> Any:
    """Returns the function that makes an expert of its two linears: `GatedMLP`, or one with the
    activation of the module. Returns None if neither computes what the module computes: with two
    small experts, for small and large rows.

    module: the experts of a layer, with two parameters:
        gate_up_proj: (experts, 2 * intermediate_size, hidden_size)
        down_proj: (experts, hidden_size, intermediate_size)
        both can be transposed, and have biases: (experts, outputs)
    """
    names = [*module._parameters]
    if {*names} not in ({*NAMES}, {*NAMES, *BIASES}) or module._modules.keys() - {"act_fn"}:
        return None
    generator = torch.Generator().manual_seed(0)
    trial = copy.copy(module)
    sizes = dict(zip((*NAMES, *BIASES), ((2, 32, 8), (2, 8, 16), (2, 32), (2, 8))))
    trial._parameters = {
        name: torch.randn(sizes[name], generator=generator, dtype=torch.float32) for name in names}
    trial._parameters |= {name: matrices_of(trial, name) for name in NAMES}
    trial.num_experts = 2
    given = (random_rows(5, 8, 30), torch.tensor([[0, 1], [1, 0]] * 3)[:5],
             torch.rand(5, 2, generator=generator, dtype=torch.float32))
    kinds: list[Callable] = [GatedMLP]
    if hasattr(module, "_apply_gate"):
        # without matrices, which it would keep in memory
        bare = copy.copy(module)
        bare._parameters = {}
        kinds.append(partial(Expert, act=bare._apply_gate))
    return next((kind for kind in kinds if is_same(
        trial, build(trial, kind=kind), lambda each, _: [each(*given)])), None)
