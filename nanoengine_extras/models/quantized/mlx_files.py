"""Files of MLX, Apple's library, in its mode "affine":

    q_proj.weight   (outputs, inputs * bits / 32) uint32, the lowest bits first
    q_proj.scales   (outputs, groups), in floating point
    q_proj.biases   the same: what is added to number * scale

Experts have tensors of three dimensions, such as switch_mlp.gate_proj.weight. The config
says how many bits a number has, and how many inputs a group; it names modules that differ.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import FLOATS, Index, Opened, Stored, plain

WORDS = ("U32",)
PARTS = ("scales", "biases")
EXPERTS = re.compile(r"(\.experts)?\.switch_(mlp|glu)\.")
# the matrices of experts in a block_sparse_moe
OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def open_mlx(index: Index, entries: dict[str, Any], file: Path) -> Opened:
    """Returns the tensors of a file, with one weight instead of its parts, and one of each expert.

    entries: of the model's quantization_config
    """
    opened = Opened()
    for name, tensor in plain(file).items():
        module, _, part = name.rpartition(".")
        usual = EXPERTS.sub(".experts.", name)
        is_packed = f"{module}.scales" in index.files
        if tensor.kind in WORDS and not is_packed:
            raise rejected(f"{name} in {file}", tensor.kind, f"beside {module}.scales")
        if is_packed and part == "weight":
            own = entries[module] if isinstance(entries.get(module), dict) else entries
            shape = [*tensor.shape[:-1], tensor.shape[-1] * 32 // own["bits"]]
            for number, each in enumerate(names_of(usual, shape)):
                opened[each] = Stored("MLX", shape[-2:], partial(
                    read, index, module, own, shape, number if shape[2:] else None))
        elif not is_packed or part not in PARTS:
            opened[usual] = tensor if len(tensor.shape) < 4 else channels_first(tensor)
    return opened


def channels_first(tensor: Stored) -> Stored:
    """Returns the weight of a convolution in PyTorch's order. MLX has channels last."""
    outputs, *sizes, channels = tensor.shape
    return Stored(tensor.kind, [outputs, channels, *sizes],
                  lambda: tensor.read().movedim(-1, 1).contiguous())


def names_of(name: str, shape: list[int]) -> list[str]:
    """Returns the name of a weight, or those of all experts' weights."""
    if len(shape) == 2:
        return [name]
    parent, own, _ = name.rsplit(".", 2)
    own = OF_MIXTRAL[own] if "block_sparse_moe" in parent else own
    return [f"{parent}.{i}.{own}.weight" for i in range(shape[0])]


def read(index: Index, module: str, own: dict[str, Any], shape: list[int],
         number: int | None) -> Grouped:
    """Reads a matrix. own: the entries of its config; number: of an expert"""
    bits = own["bits"]
    *rows, inputs = shape
    groups = torch.arange(inputs) // own["group_size"]
    words = index.part(f"{module}.weight", WORDS, [(*rows, inputs * bits // 32)], number)
    size = (*rows, int(groups[-1]) + 1)
    scales = index.part(f"{module}.scales", FLOATS, [size], number)
    name = f"{module}.biases"
    if name not in index.files:
        raise ValueError(f"it lacks {name}")
    lows = index.part(name, (index.slice_of(f"{module}.scales").get_dtype(),), [size], number)
    numbers = formulas.unpack(words.view(torch.int32), bits, 1)
    return Grouped(numbers, scales, None, groups, 4 if bits <= 4 else 8, lows)
