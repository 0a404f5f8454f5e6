"""Models in FP8: numbers of 8 bits in floating point, and one scale for each block of them.

    q_proj.weight               (outputs, inputs) float8_e4m3fn
    q_proj.weight_scale_inv     (blocks of outputs, blocks of inputs), or one for all

Activations and the KV cache are not rounded to 8 bits. transformers computes the same when it
dequantizes such a model.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.features import rejected
from nanoengine_extensions.quantized.formulas import E4M3, Grouped
from nanoengine_extensions.quantized.stored import Index, Opened, Stored, plain

# the ends of the names of scales, after that of a weight; and of those for what is not rounded here
SCALES = ("_scale_inv", "_scale")
OTHERS = ("input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale")


def open_fp8(index: Index, file: Path, block: list[int] | None) -> Opened:
    """Returns the tensors of a file. block: outputs and inputs of a block, if the model says it"""
    opened = Opened()
    for name, tensor in plain(file).items():
        scales = [name + end for end in SCALES if name + end in index.files]
        is_scale = any(name.endswith(end) and name.removesuffix(end) in index.files
                       for end in SCALES)
        if scales:
            read_scales = partial(index.read, scales[0])
            opened[name] = Stored("FP8", tensor.shape, partial(read, tensor, read_scales, block))
        elif not is_scale and not name.endswith(OTHERS):
            opened[name] = tensor
    return opened


def read(tensor: Stored, read_scales: Any, block: list[int] | None) -> Tensor | Grouped:
    """Reads a matrix; a tensor with the matrices of many experts is dequantized."""
    numbers: Any = tensor.load()
    scales = read_scales()
    # exponents of powers of two
    scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    if numbers.dtype != torch.float8_e4m3fn:
        raise rejected("the dtype of an FP8 weight", numbers.dtype, "torch.float8_e4m3fn")
    if numbers.ndim > 2:
        # one for each matrix, or one for all
        scales = scales.reshape(-1, 1, 1) if scales.ndim < 2 else scales
        parts = zip(numbers, scales.expand(len(numbers), *scales.shape[-2:]))
        return torch.stack([grouped(*each, block).dequantized() for each in parts])
    return grouped(numbers, scales, block)


def grouped(numbers: Tensor, scales: Tensor, block: list[int] | None) -> Grouped:
    """Raises ValueError for scales that do not fit the numbers."""
    # one for all, or one for each output
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    sizes = [size_of(*each) for each in zip(numbers.shape, scales.shape, block or (0, 0))]
    scales = scales.repeat_interleave(sizes[0], 0)[:len(numbers)]
    groups = torch.arange(numbers.shape[1]) // sizes[1]
    return Grouped(numbers.view(torch.uint8), scales, groups=groups, values=E4M3)


def size_of(length: int, count: int, size: int) -> int:
    """Returns how long each of `count` parts is; the last one can be shorter. size: of most parts,
    if it is known"""
    if size and -(-length // size) == count:
        return size
    if length % count:
        raise rejected("the model's weight_block_size", size,
                       f"one that makes {count} blocks of {length} numbers, as the files have them")
    return length // count
