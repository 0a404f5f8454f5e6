"""Weights beside their scales: compressed-tensors, FP8 of DeepSeek, FBGEMM and ModelOpt, NVFP4. The
types of the tensors say what a weight is:

    q_proj.weight           (outputs, inputs) float8_e4m3fn or int8
    q_proj.weight           (outputs, inputs / 2) uint8: two numbers of 4 bits in floating point,
        or …_packed         the first one in the lower bits
    q_proj.weight_packed    (outputs, inputs * bits / 32) int32: see `formulas.compressed`
    q_proj.weight_scale     (blocks of outputs, blocks or groups of inputs), or one for each output,
        or …_scale_inv      or one for all; in uint8: exponents of powers of two
    q_proj.weight_scale_2, weight_global_scale      what scales are multiplied, or divided by

What such models say about activations and the KV cache is left out: these are not rounded.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.features import rejected
from nanoengine_extensions.quantized import formulas
from nanoengine_extensions.quantized.formulas import E4M3, MXFP4, Grouped
from nanoengine_extensions.quantized.stored import (
    Index, Opened, Stored, part_size, plain, with_groups)

# the ends of the names of scales, after that of a weight, and of its other parts
SCALES = ("_scale_inv", "_scale")
PARTS = (*SCALES, "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx")
# scales of what is not rounded here
OTHERS = re.compile(r"(\.|_proj_|prob_)(input|output|activation|kv|[qkv])_(global_)?"
                    r"(scale|scale_ub|zero_point)$")
# what a weight is, by the type of its numbers
KINDS = {"F8_E4M3": "FP8", "I8": "INT8", "U8": "FP4", "I32": "INT4 or INT8"}


def open_scaled(index: Index, entries: dict[str, Any], file: Path) -> Opened:
    """Returns the tensors of a file. entries: of the model's quantization_config"""
    opened = Opened()
    for name, tensor in plain(file).items():
        weight = name.removesuffix("_packed")
        scale = next((weight + end for end in SCALES if weight + end in index.files), None)
        ends = [end for end in PARTS if name.endswith(end)]
        owners = {name.removesuffix(end) + more for end in ends for more in ("", "_packed")}
        if scale:
            kind = KINDS.get(tensor.kind, tensor.kind)
            shape = [*tensor.shape]
            if tensor.kind == "U8":
                shape[-1] *= 2
            if tensor.kind == "I32":
                shape = index.read(f"{weight}_shape").tolist()
            opened[weight] = Stored(kind, shape, partial(read, index, name, scale, entries))
        elif not OTHERS.search(name) and not owners.intersection(index.files):
            if tensor.is_quantized or (weight.endswith("weight") and tensor.kind in KINDS):
                raise rejected(name, tensor.kind, f"beside its scale, {weight}{SCALES[1]}")
            opened[name] = tensor
    return opened


def read(index: Index, name: str, scale: str, entries: dict[str, Any]) -> Tensor | Grouped:
    weight = name.removesuffix("_packed")
    numbers, scales = index.read(name), index.read(scale)
    zeros, groups, above, below = (index.find(weight + end) for end in (
        "_zero_point", "_g_idx", "_scale_2", "_global_scale"))
    if numbers.dtype == torch.int32:
        found = formulas.compressed(numbers, scales, index.read(f"{weight}_shape").tolist(), zeros,
                                    groups)
        return with_groups(found, entries)
    # of NVFP4
    if scales.dtype == torch.float8_e4m3fn and above is None and below is None:
        raise ValueError(f"it lacks {weight}_scale_2 or {weight}_global_scale")
    if above is not None:
        scales = scales.float() * with_dims(above, scales.ndim)
    if below is not None:
        scales = scales.float() / with_dims(below, scales.ndim)
    return scaled(numbers, scales, entries, zeros, groups)


def with_dims(scales: Tensor, ndim: int) -> Tensor:
    """Returns one for all, or one for each output or matrix, with as many dimensions as others."""
    return scales.reshape(*scales.shape, *[1] * (ndim - scales.ndim))


def scaled(numbers: Tensor, scales: Tensor, entries: dict[str, Any], zeros: Tensor | None = None,
           groups: Tensor | None = None) -> Tensor | Grouped:
    """Returns a matrix; a tensor with the matrices of many experts is dequantized.

    Raises ValueError for scales that do not fit the numbers.
    """
    # ModelOpt's are (blocks of outputs, 1, blocks of inputs, 1)
    scales = with_dims(scales[:, 0, :, 0] if scales.ndim == 4 else scales, numbers.ndim)
    if numbers.ndim > 2:
        if zeros is not None or groups is not None:
            raise ValueError("matrices of several experts have zeros or an order of inputs")
        parts = zip(numbers, scales.expand(len(numbers), -1, -1))
        found: Any = [scaled(*each, entries) for each in parts]
        return torch.stack([each.dequantized() for each in found])
    size = part_size(len(numbers), len(scales), entries, 0)
    scales = scales.repeat_interleave(size, 0)[:len(numbers)]
    if numbers.dtype == torch.uint8:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
        if scales.dtype == torch.uint8:
            found = formulas.mxfp4(numbers, scales)
        else:
            # the table has doubled values
            found = Grouped(numbers, scales.float() / 2, bits=4, values=MXFP4)
    elif numbers.dtype == torch.int8:
        found = Grouped(numbers, scales)
        if zeros is not None:
            # without signs, like their zeros
            zeros = zeros.reshape(-1, scales.shape[1]).to(torch.int16) + 128
            zeros = zeros.repeat_interleave(size, 0)[:len(numbers)]
            found = Grouped(numbers.view(torch.uint8) ^ 128, scales, zeros)
    elif numbers.dtype == torch.float8_e4m3fn:
        is_exponent = scales.dtype == torch.uint8
        scales = (scales.view(torch.float8_e8m0fnu) if is_exponent else scales).float()
        found = Grouped(numbers.view(torch.uint8), scales, values=E4M3)
    else:
        raise rejected("the dtype of a weight with scales", numbers.dtype,
                       "torch.float8_e4m3fn, torch.int8, torch.uint8 or torch.int32")
    return with_groups(found._replace(groups=groups), entries)
