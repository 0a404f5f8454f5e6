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

import torch
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.formulas import E4M3, MXFP4, Grouped
from nanoengine_extras.models.quantized.stored import (
    EXPONENTS, FLOATS, INTEGERS, WORDS, Found, Index, Stored)

# the ends of the names of scales, after that of a weight, and of its other parts
SCALES = ("_scale_inv", "_scale")
PARTS = (*SCALES, "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx")
# scales of what is not rounded here
OTHERS = re.compile(r"(\.|_proj_|prob_)(input|output|activation|kv|[qkv])_(global_)?"
                    r"(scale|zero_point)$")
# the format of a weight, by the type of its numbers
KINDS = {"F8_E4M3": "FP8", "I8": "INT8", "U8": "FP4", "I32": "INT4 or INT8"}
# the types of scales, by that of the numbers
SCALE_KINDS = {torch.float8_e4m3fn: FLOATS + EXPONENTS, torch.uint8: ("F8_E4M3", *EXPONENTS),
               torch.int8: FLOATS, torch.int32: FLOATS}


def scaled(index: Index, name: str, tensor: Stored) -> Found:
    weight = name.removesuffix("_packed")
    scale = next((weight + end for end in SCALES if weight + end in index.files), None)
    if scale is None:
        ends = [end for end in PARTS if name.endswith(end)]
        owners = {name.removesuffix(end) + more for end in ends for more in ("", "_packed")}
        if OTHERS.search(name) or owners.intersection(index.files):
            return {}
        if tensor.is_quantized or (weight.endswith("weight") and tensor.kind in KINDS):
            raise rejected(name, tensor.kind, f"beside its scale, {weight}{SCALES[1]}")
        return {name: tensor}
    shape = [*tensor.shape]
    if tensor.kind == "U8":
        shape[-1] *= 2
    if tensor.kind == "I32":
        shape = index.part(f"{weight}_shape", INTEGERS, [(2,)]).tolist()
    kind = KINDS.get(tensor.kind, tensor.kind)
    return {weight: Stored(kind, shape, partial(read, index, name, scale, shape))}


def read(index: Index, name: str, scale: str, shape: list[int]) -> Tensor | Grouped:
    weight = name.removesuffix("_packed")
    *experts, outputs, inputs = shape
    numbers = index.read(name)
    if numbers.dtype not in SCALE_KINDS:
        raise rejected("the dtype of a weight with scales", numbers.dtype,
                       f"one of {[*SCALE_KINDS]}")
    layouts = index.layouts(shape, f"{weight}_g_idx")
    # of the matrices of many experts, all can have one
    one = [(*experts, 1, 1), (1,) * len(shape)]
    shapes = [(*experts, *each) for each in layouts] + one * ((1, 1) in layouts)
    scales = index.part(scale, SCALE_KINDS[numbers.dtype], shapes)
    rows, groups = layouts[scales.shape[-2], scales.shape[-1]]
    own = f"{weight}_zero_point"
    if numbers.dtype == torch.int32:
        numbers = index.part(name, WORDS, [(outputs, -(-inputs // each)) for each in (8, 4)])
        bits = formulas.bits_in(numbers, inputs)
        are_words = own in index.files and index.slice_of(own).get_dtype() in WORDS
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
    has_zeros = numbers.dtype == torch.int8 and not experts
    if zeros is not None and not has_zeros and zeros.float().any():
        raise rejected("a weight with zeros", (numbers.dtype, [*numbers.shape]),
                       "a matrix in torch.int8 or torch.int32")
    if not experts:
        return grouped(numbers, scales, zeros, rows)._replace(groups=groups)
    return torch.stack([
        grouped(*each, None, rows)._replace(groups=groups).dequantized()
        for each in zip(numbers, scales.expand(len(numbers), -1, -1))])


def grouped(numbers: Tensor, scales: Tensor, zeros: Tensor | None, rows: int) -> Grouped:
    """Returns a matrix. rows: how many outputs have one scale, and one zero"""
    scales = scales.repeat_interleave(rows, 0)[:len(numbers)]
    if numbers.dtype == torch.float8_e4m3fn:
        return Grouped(numbers.view(torch.uint8), scales.float(), values=E4M3)
    if numbers.dtype == torch.uint8:
        numbers = formulas.nibbles(numbers)
        if scales.dtype == torch.float8_e8m0fnu:
            return formulas.mxfp4(numbers, scales)
        # the table has doubled values
        return Grouped(numbers, scales.float() / 2, bits=4, values=MXFP4)
    if zeros is None:
        return Grouped(numbers, scales)
    # without signs, like their zeros
    zeros = (zeros.to(torch.int16) + 128).repeat_interleave(rows, 0)[:len(numbers)]
    return Grouped(numbers.view(torch.uint8) ^ 128, scales, zeros)
