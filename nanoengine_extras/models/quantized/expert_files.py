"""Experts that have a matrix each in a file, where transformers has one tensor for a layer.

In gpt-oss, the outputs of gates and ups are interleaved, and matrices are transposed:

    MXFP4     experts.gate_up_proj_blocks, …_scales
                  (experts, outputs, groups, 16) and (experts, outputs, groups) uint8
    GGUF      experts.0.gate_proj, experts.0.up_proj, …
                  (outputs, inputs) each; biases (experts, outputs)
    others    the same, and biases (outputs,) of each expert
    here      experts.gate_up_proj, gate_up_proj_bias: outputs of gates and ups interleaved
                  (experts, inputs, outputs), as transformers has them; (experts, outputs)
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import EXPONENTS, Index, Opened, Stored, plain

# inputs that have one exponent
GROUP = 32


class Matrices(Stored):
    """The matrices of a layer's experts as one tensor, (experts, outputs, inputs).

    parts: for each expert, matrices (outputs, inputs), whose rows are concatenated
    is_transposed: whether the tensor is (experts, inputs, outputs)
    """

    def __init__(self, parts: list[list[Stored]], is_transposed: bool = False) -> None:
        shape = [sum(each.shape[0] for each in parts[0]), parts[0][0].shape[1]]
        super().__init__(parts[0][0].kind, [
            len(parts), *(shape[::-1] if is_transposed else shape)], self.stack)
        self.parts = parts
        self.matrices = sum(parts, [])
        self.is_transposed = is_transposed

    def stack(self) -> Tensor:
        found = torch.empty(self.shape, dtype=torch.float32)
        for to, own in zip(found.mT if self.is_transposed else found, self.parts):
            to.copy_(torch.cat([each.read() for each in own]))
        return found


def in_turn(first: Stored, second: Stored, dim: int = 0) -> Stored:
    """Interleaves the rows of two tensors, or their columns if `dim` is 1."""
    def load() -> Tensor | Grouped:
        if first.is_quantized and first.kind == second.kind:
            both: Any = first.load(), second.load()
            return formulas.in_turn(*both)
        return torch.stack((first.read(), second.read()), dim + 1).flatten(dim, dim + 1)

    shape = [*first.shape]
    shape[dim] *= 2
    return Stored(first.kind, shape, load)


def open_mxfp4(index: Index, file: Path) -> Opened:
    """Returns the tensors of a file of safetensors, with a matrix for each expert."""
    opened = Opened()
    for name, tensor in plain(file).items():
        if name.endswith("_blocks"):
            module, _, own = name.removesuffix("_blocks").rpartition(".")
            shape = tensor.shape[:3]
            for number in range(shape[0]):
                opened[f"{module}.{number}.{own}.weight"] = Stored(
                    "MXFP4", [shape[1], shape[2] * GROUP],
                    partial(read_mxfp4, index, f"{module}.{own}", shape, number))
        elif not name.endswith("_scales"):
            opened[name] = tensor
    return opened


def read_mxfp4(index: Index, name: str, shape: list[int], number: int) -> Grouped:
    """Reads the matrix of an expert. A byte has two neighbours, the first one in its lower bits."""
    # opened for each expert: pages of a mapped file count as memory until it is closed
    words = index.part(f"{name}_blocks", EXPONENTS[:1], [(*shape, GROUP // 2)], number)
    exponents = index.part(f"{name}_scales", EXPONENTS, [shape], number).view(torch.uint8)
    numbers = torch.stack((words & 15, words >> 4), -1).flatten(1)
    groups = torch.arange(numbers.shape[1]) // GROUP
    return formulas.mxfp4(numbers, exponents)._replace(groups=groups)


def add_experts(tensors: Opened, module: Any, name: str) -> None:
    """Replaces the matrices of experts by the tensors that a module has for all of them.

    name: of the module, in the files
    """
    def take(part: str, end: str = "weight") -> list[Stored]:
        return [tensors.pop(f"{name}.{i}.{part}.{end}") for i in range(module.num_experts)]

    def biases(part: str) -> Stored:
        if f"{name}.{part}.bias" in tensors:
            return tensors.pop(f"{name}.{part}.bias")
        parts = take(part, "bias")
        return Stored("F32", [len(parts), *parts[0].shape],
                      lambda: torch.stack([each.read() for each in parts]))

    is_transposed = getattr(module, "is_transposed", False)
    if f"{name}.0.down_proj.weight" not in tensors:
        return
    if f"{name}.0.gate_proj.weight" not in tensors:
        both = [[each] for each in take("gate_up_proj")]
    elif not getattr(module, "is_concatenated", True):
        both = [[in_turn(*each)] for each in zip(take("gate_proj"), take("up_proj"))]
        tensors[f"{name}.gate_up_proj_bias"] = in_turn(biases("gate_proj"), biases("up_proj"), 1)
        tensors[f"{name}.down_proj_bias"] = biases("down_proj")
    else:
        both = [[*each] for each in zip(take("gate_proj"), take("up_proj"))]
    down = [[each] for each in take("down_proj")]
    tensors[f"{name}.gate_up_proj"] = Matrices(both, is_transposed)
    tensors[f"{name}.down_proj"] = Matrices(down, is_transposed)
