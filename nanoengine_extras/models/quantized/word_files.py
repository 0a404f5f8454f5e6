"""Weights whose numbers share words or bytes.

    AWQ     q_proj.qweight  (inputs, outputs / 8) int32
    GPTQ    q_proj.qweight  (inputs * bits / 32, outputs) int32
            q_proj.qzeros   (groups, outputs * bits / 32) int32
            q_proj.scales   (groups, outputs), in floating point
            q_proj.g_idx    (inputs,), the group of each, if inputs of a group are not neighbours
    MLX     q_proj.weight   (outputs, inputs * bits / 32) uint32, the lowest bits first
            q_proj.scales   (outputs, groups), in floating point
            q_proj.biases   the same: what is added to number * scale

    gpt-oss in MXFP4    experts.gate_up_proj_blocks     (experts, outputs, groups, 16) uint8
                        experts.gate_up_proj_scales     (experts, outputs, groups), exponents
    bitsandbytes in NF4 or FP4, whose 4-bit numbers are indices into a table; or in INT8
            q_proj.weight               (outputs * inputs / 2, 1) uint8, the first number in the
                                        higher bits
            q_proj.weight.quant_map     (16,), the table
            q_proj.weight.absmax        (blocks,), the scale of 64 neighbours; or its index in a
                                        table
            q_proj.weight.nested_…      with double quantization: the table of scales, and their own
                                        scales
            q_proj.weight.quant_state.bitsandbytes__nf4     JSON, with the shape of the weight
            k_proj.weight               (outputs, inputs) int8
            k_proj.SCB                  (outputs,), 127 times the scale of each output
            k_proj.weight_format        0: rows; old releases have other orders

MLX is Apple's library. Its experts have tensors of three dimensions, such as
switch_mlp.gate_proj.weight. The config names modules with other bits and groups.

Source: QLoRA (Dettmers et al., 2023, arXiv:2305.14314), LLM.int8() (2022, arXiv:2208.07339)
"""

import json
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized import formulas, methods
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import (
    EXPONENTS, FLOATS, INTEGERS, WORDS, Found, Index, Stored)

EXPERTS = re.compile(r"(\.experts)?\.switch_(mlp|glu)\.")
# the matrices of experts in a block_sparse_moe
OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# inputs that have one exponent in MXFP4
GROUP = 32
# the ends of the names of bitsandbytes' parts
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
OTHERS = (".quant_map", ".absmax", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")


def columns(index: Index, name: str, tensor: Stored) -> Found:
    """AWQ and GPTQ."""
    module, _, part = name.rpartition(".")
    if part in ("qzeros", "scales", "g_idx"):
        return {}
    if part != "qweight":
        return {name: tensor}
    if tensor.kind not in WORDS:
        raise rejected(f"{name} in {index.files[name]}", tensor.kind, f"of type {WORDS[0]}")
    kind = methods.gptq_format(index.entries)
    rows, outputs = tensor.shape
    shape = [8 * outputs, rows]
    if kind != "awq":
        zeros = f"{module}.qzeros"
        stored = index.slice_of(zeros).get_shape()
        # modules can differ in their bits, which only zeros show
        widths = {-(-outputs * bits // 32): bits for bits in methods.bits_of(index.entries)}
        if stored[-1] not in widths:
            known = " or ".join(f"[groups, {width}]" for width in widths)
            raise rejected(f"{zeros} in {index.files[zeros]}", stored,
                           f"{WORDS[0]} of shape {known}")
        shape = [outputs, 32 * rows // widths[stored[-1]]]
    return {f"{module}.weight": Stored(part, shape, partial(
        read_columns, index, module, shape, kind))}


def read_columns(index: Index, module: str, shape: list[int], kind: str) -> Grouped:
    outputs, inputs = shape
    words = index.read(f"{module}.qweight")
    layouts = index.layouts(shape, f"{module}.g_idx")
    scales = index.part(f"{module}.scales", FLOATS, [
        (groups, outputs) for rows, groups in layouts if rows == outputs])
    zeros = index.part(f"{module}.qzeros", WORDS, [(len(scales), -(-words.numel() // inputs))])
    bits = 32 * len(words) // inputs
    found = (formulas.awq(words, zeros, scales) if kind == "awq"
             else formulas.gptq(words, zeros, scales, bits, 2 if kind == "gptq_v2" else 1))
    return found._replace(groups=layouts[outputs, len(scales)][1])


def mlx(index: Index, name: str, tensor: Stored) -> Found:
    module, _, part = name.rpartition(".")
    usual = EXPERTS.sub(".experts.", name)
    is_packed = f"{module}.scales" in index.files
    if is_packed and part in ("scales", "biases"):
        return {}
    if is_packed and part == "weight":
        own = index.entries.get(module)
        own = own if isinstance(own, dict) else index.entries
        shape = [*tensor.shape[:-1], tensor.shape[-1] * 32 // own["bits"]]
        names = [usual]
        if len(shape) > 2:
            parent, matrix, _ = usual.rsplit(".", 2)
            matrix = OF_MIXTRAL[matrix] if "block_sparse_moe" in parent else matrix
            names = [f"{parent}.{number}.{matrix}.weight" for number in range(shape[0])]
        return {each: Stored("MLX", shape[-2:], partial(
            read_mlx, index, module, own, shape, number if shape[2:] else None))
            for number, each in enumerate(names)}
    if tensor.kind == "U32" and not is_packed:
        raise rejected(f"{name} in {index.files[name]}", "U32", f"beside {module}.scales")
    return {usual: tensor if len(tensor.shape) < 4 else channels_first(tensor)}


def read_mlx(index: Index, module: str, own: dict[str, Any], shape: list[int],
             number: int | None) -> Grouped:
    """Reads a matrix. own: the entries of its config; number: of an expert"""
    bits = own["bits"]
    *rows, inputs = shape
    groups = torch.arange(inputs) // own["group_size"]
    words = index.part(f"{module}.weight", ("U32",), [(*rows, inputs * bits // 32)], number)
    size = [(*rows, int(groups[-1]) + 1)]
    scales = index.part(f"{module}.scales", FLOATS, size, number)
    if f"{module}.biases" not in index.files:
        raise ValueError(f"it lacks {module}.biases")
    kind = index.slice_of(f"{module}.scales").get_dtype()
    lows = index.part(f"{module}.biases", (kind,), size, number)
    numbers = formulas.unpack(words.view(torch.int32), bits, 1)
    return Grouped(numbers, scales, None, groups, 4 if bits <= 4 else 8, lows)


def channels_first(tensor: Stored) -> Stored:
    """Returns the weight of a convolution in PyTorch's order. MLX has channels last."""
    outputs, *sizes, channels = tensor.shape
    return Stored(tensor.kind, [outputs, channels, *sizes],
                  lambda: tensor.read().movedim(-1, 1).contiguous())


def mxfp4(index: Index, name: str, tensor: Stored) -> Found:
    """A matrix for each expert."""
    if name.endswith("_scales"):
        return {}
    if not name.endswith("_blocks"):
        return {name: tensor}
    module, _, own = name.removesuffix("_blocks").rpartition(".")
    count, outputs, groups = tensor.shape[:3]
    return {f"{module}.{number}.{own}.weight": Stored("MXFP4", [outputs, groups * GROUP], partial(
        read_mxfp4, index, f"{module}.{own}", tensor.shape[:3], number))
        for number in range(count)}


def read_mxfp4(index: Index, name: str, shape: list[int], number: int) -> Grouped:
    """Reads the matrix of an expert."""
    # opened for each expert: pages of a mapped file count as memory until it is closed
    words = index.part(f"{name}_blocks", EXPONENTS[:1], [(*shape, GROUP // 2)], number)
    exponents = index.part(f"{name}_scales", EXPONENTS, [shape], number)
    numbers = formulas.nibbles(words.flatten(1))
    groups = torch.arange(numbers.shape[1]) // GROUP
    return formulas.mxfp4(numbers, exponents)._replace(groups=groups)


def bitsandbytes(index: Index, name: str, tensor: Stored) -> Found:
    state = next((name + end for end in STATES if name + end in index.files), None)
    if state:
        entries = json.loads(bytes(index.read(state).tolist()))
        load = partial(read_4_bits, index, name, entries)
        return {name: Stored("4 bits", entries["shape"], load)}
    if tensor.kind == "I8":
        return {name: Stored("8 bits", tensor.shape, partial(read_8_bits, index, name))}
    return {} if name.endswith(STATES + OTHERS) else {name: tensor}


def read_8_bits(index: Index, name: str) -> Tensor:
    stored = index.find(f"{name}_format", (*INTEGERS, "U8", "I8"), [()])
    if stored is not None and stored.any():
        raise rejected(f"{name}_format", stored.tolist(), "0")
    # in the same order as bitsandbytes; the first product is exact, as SCB has the bits of float16
    numbers = index.read(name)
    scales = index.part(name.removesuffix("weight") + "SCB", FLOATS, [(len(numbers), 1)])
    return numbers * scales * (1 / 127)


def read_4_bits(index: Index, name: str, entries: dict[str, Any]) -> Tensor | Grouped:
    words = index.read(name).flatten().view(torch.uint8)
    numbers = torch.stack((words >> 4, words & 15), 1).view(entries["shape"])
    size, inputs = entries["blocksize"], numbers.shape[-1]
    count = -(-numbers.numel() // size)
    values = index.part(f"{name}.quant_map", FLOATS, [(16,)]).float()
    scales = index.part(f"{name}.absmax", (*FLOATS, "U8"), [(count,)])
    if scales.dtype == torch.uint8:
        own = entries["nested_blocksize"]
        above = index.part(f"{name}.nested_absmax", FLOATS, [(-(-count // own),)])
        table = index.part(f"{name}.nested_quant_map", FLOATS, [(256,)])
        scales = table[scales.int()] * above.repeat_interleave(own)[:count]
        scales = scales + entries["nested_offset"]
    if numbers.ndim != 2 or inputs % size:
        # a block goes on in the next row
        parts = values[numbers.int()].flatten().split(size)
        return torch.cat([*map(torch.mul, parts, scales)]).view(numbers.shape)
    groups = torch.arange(inputs) // size
    return Grouped(numbers, scales.view(len(numbers), -1), groups=groups, bits=4, values=values)
