"""Files of MLX, Apple's library, and of "metal", which transformers writes in the same format:

    q_proj.weight   (outputs, inputs * bits / 32) uint32, the lowest bits first
    q_proj.scales   (outputs, groups), in floating point
    q_proj.biases   the same: what is added to number * scale; of "metal", q_proj.qbiases

In the modes "mxfp4", "mxfp8" and "nvfp4", scales are uint8, of exponents or of FP8, and nothing is
added. Experts have tensors of three dimensions, such as switch_mlp.gate_proj.weight. The config
says how many bits a number has, and how many inputs a group; it names modules that differ.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.scaled_files import scaled
from nanoengine_extras.models.quantized.stored import (
    EXPONENTS, FLOATS, Index, Opened, Stored, plain)

WORDS, BYTES = ("U32",), ("U8",)
BIASES = ("biases", "qbiases")
PARTS = ("scales", *BIASES)
# the types of scales, by mode
KINDS = {"affine": FLOATS, "nvfp4": BYTES, "mxfp4": EXPONENTS, "mxfp8": EXPONENTS}
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
            kind = "FP8" if own.get("mode") == "mxfp8" else "MLX"
            for number, each in enumerate(names_of(usual, shape)):
                opened[each] = Stored(kind, shape[-2:], partial(
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
         number: int | None) -> Tensor | Grouped:
    """Reads a matrix. own: the entries of its config; number: of an expert"""
    bits, mode = own["bits"], own.get("mode", "affine")
    *rows, inputs = shape
    groups = torch.arange(inputs) // own["group_size"]
    words = index.part(f"{module}.weight", WORDS, [(*rows, inputs * bits // 32)], number)
    size = (*rows, int(groups[-1]) + 1)
    scales = index.part(f"{module}.scales", KINDS[mode], [size], number)
    if mode == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
        if scales.isnan().any():
            raise rejected(f"{module}.scales", "nan", "finite numbers")
    if mode != "affine":
        numbers = words.view(torch.float8_e4m3fn if bits == 8 else torch.uint8)
        return scaled(numbers, scales, 1, groups)
    found = [each for end in BIASES if (each := f"{module}.{end}") in index.files]
    if not found:
        raise ValueError(f"it lacks {module}.{BIASES[0]}")
    lows = index.part(found[0], (index.slice_of(f"{module}.scales").get_dtype(),), [size], number)
    numbers = formulas.unpack(words.view(torch.int32), bits, 1)
    return Grouped(numbers, scales, None, groups, 4 if bits <= 4 else 8, lows)
