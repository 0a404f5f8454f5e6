"""Models in NF4 or FP4 of bitsandbytes, whose 4-bit numbers are indices into a table; or in INT8.

    q_proj.weight               (outputs * inputs / 2, 1) uint8, the first number in the higher bits
    q_proj.weight.quant_map     (16,), the table
    q_proj.weight.absmax        (blocks,), the scale of 64 neighbours; or its index in a table
    q_proj.weight.nested_…      with double quantization: the table of scales, and their own scales
    q_proj.weight.quant_state.bitsandbytes__nf4
                                JSON, with the shape of the weight

    k_proj.weight               (outputs, inputs) int8
    k_proj.SCB                  (outputs,), 127 times the scale of each output
    k_proj.weight_format        0: rows; old releases have other orders

Source: QLoRA (Dettmers et al., 2023, arXiv:2305.14314), LLM.int8() (2022, arXiv:2208.07339)
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import FLOATS, INTEGERS, Index, Opened, Stored, plain

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
PARTS = (".quant_map", ".absmax", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format",
         *STATES)


def open_bitsandbytes(index: Index, file: Path) -> Opened:
    """Returns the tensors of a file, with one weight instead of its parts."""
    opened = Opened()
    for name, tensor in plain(file).items():
        state = next((name + end for end in STATES if name + end in index.files), None)
        if state:
            entries = json.loads(bytes(index.read(state).tolist()))
            opened[name] = Stored("4 bits", entries["shape"], partial(read, index, name, entries))
        elif tensor.kind == "I8":
            opened[name] = Stored("8 bits", tensor.shape, partial(read_8_bits, index, name))
        elif not name.endswith(PARTS):
            opened[name] = tensor
    return opened


def read_8_bits(index: Index, name: str) -> Tensor:
    stored = index.find(f"{name}_format", (*INTEGERS, "U8", "I8"), [()])
    if stored is not None and stored.any():
        raise rejected(f"{name}_format", stored.tolist(), "0")
    # in the same order as bitsandbytes; the first product is exact, as SCB has the bits of float16
    numbers = index.read(name)
    scales = index.part(name.removesuffix("weight") + "SCB", FLOATS, [(len(numbers), 1)])
    return numbers * scales * (1 / 127)


def read(index: Index, name: str, entries: dict[str, Any]) -> Tensor | Grouped:
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
