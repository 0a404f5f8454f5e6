"""Weights with their scales: compressed-tensors, FP8 of DeepSeek and ModelOpt, NVFP4. The
types of the tensors say what a weight is:

    q_proj.weight           (outputs, inputs) float8_e4m3fn or int8
    q_proj.weight           (outputs, inputs / 2) uint8: two numbers of 4 bits in floating point,
        or …_packed         the first one in the lower bits
    q_proj.weight_packed    (outputs, inputs * bits / 32) int32: see `formulas.compressed`
    q_proj.weight_scale     (blocks of outputs, blocks or groups of inputs), or one for each output,
        or …_scale_inv      or one for all; in uint8: exponents of powers of two
    q_proj.weight_scale_2, weight_global_scale      what scales are multiplied, or divided by

Entries about activations and the KV cache are ignored: these are not rounded.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized import formulas, methods
from nanoengine_extras.models.quantized.formulas import E4M3, MXFP4, Grouped
from nanoengine_extras.models.quantized.stored import (
    EXPONENTS, FLOATS, INTEGERS, WORDS, Index, Opened, Stored, layouts_of, plain)

# the ends of the names of scales, after that of a weight, and of its other parts
SCALES = ("_scale_inv", "_scale")
PARTS = (*SCALES, "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx")
# scales of what is not rounded here
OTHERS = re.compile(r"(\.|_proj_|prob_)(input|output|activation|kv|[qkv])_(global_)?"
                    r"(scale|zero_point)$")
# the format of a weight, by the type of its numbers
KINDS = {"F8_E4M3": "FP8", "I8": "INT8", "U8": "FP4", "I32": "INT4 or INT8"}
# the types of scales, by that of the numbers; of others: FLOATS
SCALE_KINDS = {torch.float8_e4m3fn: FLOATS + EXPONENTS, torch.uint8: ("F8_E4M3", *EXPONENTS)}


def open_scaled(index: Index, entries: dict[str, Any], file: Path) -> Opened:
    """Returns the tensors of a file. entries: of the model's quantization_config"""
    opened = Opened()
    blocks = methods.blocks_in(entries)
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
                shape = index.part(f"{weight}_shape", INTEGERS, [(2,)]).tolist()
            opened[weight] = Stored(kind, shape, partial(
                read, index, name, scale, shape, blocks))
        elif not OTHERS.search(name) and not owners.intersection(index.files):
            if tensor.is_quantized or (weight.endswith("weight") and tensor.kind in KINDS):
                raise rejected(name, tensor.kind, f"beside its scale, {weight}{SCALES[1]}")
            opened[name] = tensor
    return opened


def read(index: Index, name: str, scale: str, shape: list[int],
         blocks: list[tuple[int, int]]) -> Tensor | Grouped:
    weight = name.removesuffix("_packed")
    *experts, outputs, inputs = shape
    numbers = index.read(name)
    order = index.find(f"{weight}_g_idx", INTEGERS, [(inputs,)])
    layouts = layouts_of(shape, blocks, order)
    # of the matrices of many experts, all can have one
    one = [(*experts, 1, 1), (1,) * len(shape)]
    shapes = [(*experts, *each) for each in layouts] + one * ((1, 1) in layouts)
    scales = index.part(scale, SCALE_KINDS.get(numbers.dtype, FLOATS), shapes)
    rows, groups = layouts[scales.shape[-2], scales.shape[-1]]
    own = f"{weight}_zero_point"
    are_words = own in index.files and index.slice_of(own).get_dtype() in WORDS
    if numbers.dtype == torch.int32:
        numbers = index.part(name, WORDS, [(outputs, -(-inputs // each)) for each in (8, 4)])
        bits = formulas.bits_in(numbers, inputs)
        packed = -(-outputs * bits // 32), scales.shape[1]
        zeros = index.find(own, (*WORDS, "I8"), [packed if are_words else scales.shape])
        return formulas.compressed(numbers, scales, shape, zeros)._replace(groups=groups)
    zeros = index.find(own, ("I8", "F8_E4M3"), [scales.shape])
    above, below = (index.find(weight + end, FLOATS, one) for end in ("_scale_2", "_global_scale"))
    # of NVFP4
    if scales.dtype == torch.float8_e4m3fn and above is None and below is None:
        raise ValueError(f"it lacks {weight}_scale_2 or {weight}_global_scale")
    scales = scales if above is None else scales.float() * above
    scales = scales if below is None else scales.float() / below
    if not scales.float().isfinite().all():
        raise rejected(f"{weight}_global_scale", below, "such that all scales are finite")
    return scaled(numbers, scales, rows, groups, zeros)


def scaled(numbers: Tensor, scales: Tensor, rows: int, groups: Tensor,
           zeros: Tensor | None = None) -> Tensor | Grouped:
    """Returns a matrix; a tensor with the matrices of many experts is dequantized.

    rows: how many outputs have one scale; groups: the group of each input
    """
    is_int8 = numbers.ndim == 2 and numbers.dtype == torch.int8
    if not is_int8 and zeros is not None and zeros.float().any():
        raise rejected("a weight with zeros", (numbers.dtype, [*numbers.shape]),
                       "a matrix in torch.int8 or torch.int32")
    if numbers.ndim > 2:
        parts = zip(numbers, scales.expand(len(numbers), -1, -1))
        found: Any = [scaled(*each, rows, groups) for each in parts]
        return torch.stack([each.dequantized() for each in found])
    scales = scales.repeat_interleave(rows, 0)[:len(numbers)]
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
            zeros = (zeros.to(torch.int16) + 128).repeat_interleave(rows, 0)[:len(numbers)]
            found = Grouped(numbers.view(torch.uint8) ^ 128, scales, zeros)
    elif numbers.dtype == torch.float8_e4m3fn:
        is_exponent = scales.dtype == torch.uint8
        scales = (scales.view(torch.float8_e8m0fnu) if is_exponent else scales).float()
        found = Grouped(numbers.view(torch.uint8), scales, values=E4M3)
    else:
        raise rejected("the dtype of a weight with scales", numbers.dtype,
                       "torch.float8_e4m3fn, torch.int8, torch.uint8 or torch.int32")
    return found._replace(groups=groups)
