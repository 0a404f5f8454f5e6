"""Quantized tensors, in the form in which `safe_open` returns plain ones.

`loader.load_model` opens each file of weights, and asks for its names and for one tensor at a time.
These classes answer the same calls, and dequantize a tensor when it is read. `Stored.load` gives
numbers and scales as they are.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanoengine.features import naming, rejected
from nanoengine_extensions.quantized import formulas, methods
from nanoengine_extensions.quantized.formulas import Grouped

# types of tensors that are not quantized
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
# the type of tensors that are quantized when they are read begins with this
ROUNDED = "rounded"


class Stored:
    """A tensor of a file, in the form of `safe_open(…).get_slice(name)`.

    kind: the type in which it is stored, for messages.
    load: returns it whole, in floating point or as numbers and scales.
    matrices: itself, or the matrices of which it consists.
    """

    def __init__(self, kind: str, shape: list[int], load: Callable[[], Tensor | Grouped]) -> None:
        self.kind = kind
        self.shape = shape
        self.load = load
        self.matrices = [self]

    def read(self) -> Tensor:
        """Returns the whole tensor, in floating point."""
        found = self.load()
        return found.dequantized() if isinstance(found, Grouped) else found

    @property
    def is_quantized(self) -> bool:
        return self.kind not in PLAIN

    def get_dtype(self) -> str:
        return self.kind

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, place: Any) -> Tensor:
        return self.read()[place]


class Opened(dict[str, Stored]):
    """A file of weights, in the form of `safe_open(file)`."""

    def get_slice(self, name: str) -> Stored:
        return self[name]


class Index:
    """Where the tensors of safetensors are: parts of one weight can be in several files."""

    def __init__(self, files: list[Path]) -> None:
        self.files: dict[str, Path] = {}
        for file in files:
            with naming(file):
                names = safe_open(file, framework="pt").keys()
            self.files |= dict.fromkeys(names, file)

    def slice_of(self, name: str) -> Any:
        return safe_open(self.files[name], framework="pt").get_slice(name)

    def read(self, name: str) -> Tensor:
        """Returns a tensor that can lie in the mapped file: it needs a copy to outlive the file."""
        # the caller can have another default device
        with torch.device("cpu"):
            return self.slice_of(name)[...]

    def find(self, name: str) -> Tensor | None:
        """Returns a tensor, or None if it is not there."""
        return self.read(name) if name in self.files else None


# ------------------------------------------------------------- by the method of quantization


class Method(NamedTuple):
    """How a method stores the weight of a module in several tensors.

    parts: the ends of their names; every quantized module has the first of them.
    shape, read: from an `Index` and the name of a module to the weight's shape, and to the weight.
    """

    parts: tuple[str, ...]
    shape: Callable[[Index, str], list[int]]
    read: Callable[[Index, str], Grouped]


def sizes_in(entries: dict[str, Any], dim: int) -> list[int]:
    """Returns all sizes of groups that `quantization_config` has, also within its entries, or of
    blocks along a dimension: 0 or 1."""
    names = ("weight_block_size", "block_structure", "group_size", "q_group_size")
    # such as [128, 128] and "128x128"
    given = [re.findall(r"-?\d+", str(entries.get(name))) for name in names]
    found = [int(sizes[dim if len(sizes) > 1 else 0]) for sizes in given if sizes]
    # those of ModelOpt always have one size, which it does not say
    if methods.algorithm_of(entries) == "FP8_PB_WO":
        found.append(128)
    return sum((sizes_in(each, dim) for each in entries.values() if isinstance(each, dict)), found)


def part_size(length: int, count: int, entries: dict[str, Any], dim: int) -> int:
    """Returns how long each of `count` groups or blocks is. It is a size that `quantization_config`
    names, and the last one can be smaller; if no such size gives their number, all are equal.
    Raises ValueError if they cannot be. dim: 0: of outputs; 1: of inputs"""
    equal = 0 if length % count else length // count
    sizes = [size for size in sizes_in(entries, dim) if size > 0]
    fitting = [size for size in [*sizes, equal] if size and -(-length // size) == count]
    if not fitting:
        whose = ("outputs", "inputs")[dim]
        raise rejected("the model's group_size or weight_block_size", sizes,
                       f"one that makes {count} groups of {length} {whose}, as the files have them")
    return fitting[0]


def with_groups(weight: Grouped, entries: dict[str, Any]) -> Grouped:
    """Returns a weight with the group of each input: see `part_size`, if the files do not say it.
    """
    # -1: the tool has not filled it
    if weight.groups is not None and -1 not in weight.groups:
        return weight
    inputs, count = weight.numbers.shape[1], weight.scales.shape[1]
    size = part_size(inputs, count, entries, 1)
    return weight._replace(groups=torch.arange(inputs) // size)


def awq(entries: dict[str, Any]) -> Method:
    parts = ("qweight", "qzeros", "scales")

    def shape(index: Index, module: str) -> list[int]:
        inputs, words = index.slice_of(f"{module}.qweight").get_shape()
        return [8 * words, inputs]

    def read(index: Index, module: str) -> Grouped:
        tensors = (index.read(f"{module}.{part}") for part in parts)
        return with_groups(formulas.awq(*tensors), entries)

    return Method(parts, shape, read)


def gptq(entries: dict[str, Any]) -> Method:
    version = 2 if methods.gptq_format(entries) == "gptq_v2" else 1
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def shape(index: Index, module: str) -> list[int]:
        (words, outputs), (_, zeros) = (
            index.slice_of(f"{module}.{part}").get_shape() for part in parts[:2])
        # inputs to words is what outputs are to words of zeros
        return [outputs, words * outputs // zeros]

    def read(index: Index, module: str) -> Grouped:
        words, zeros, scales = (index.read(f"{module}.{part}") for part in parts[:3])
        found = formulas.gptq(words, zeros, scales, index.find(f"{module}.g_idx"), version)
        return with_groups(found, entries)

    return Method(parts, shape, read)


def auto_round(entries: dict[str, Any]) -> Method:
    return (awq if methods.gptq_format(entries) == "awq" else gptq)(entries)


METHODS = {"awq": awq, "gptq": gptq, "auto-round": auto_round}


def open_quantized(index: Index, method: Method, file: Path) -> Opened:
    """Returns the tensors of a file of safetensors, with one weight instead of its parts."""
    opened = Opened()
    for name, tensor in plain(file).items():
        module, _, part = name.rpartition(".")
        if part == method.parts[0]:
            opened[f"{module}.weight"] = Stored(
                part, method.shape(index, module), partial(method.read, index, module))
        elif part not in method.parts:
            opened[name] = tensor
    return opened


def open_rounded(bits: int, file: Path) -> Opened:
    """Returns the tensors of a safetensors file, with matrices rounded to `bits` bits. Tensors with
    the matrices of many experts are rounded, too."""

    def read(tensor: Stored) -> Tensor | Grouped:
        weight = tensor.read()
        found = formulas.rounded(weight.flatten(0, -2), bits)
        return found if weight.ndim == 2 else found.dequantized().view(weight.shape)

    def opened(name: str, tensor: Stored) -> Stored:
        is_float = tensor.kind.startswith(("F", "BF"))
        # vectors, of norms and biases, are few numbers
        if len(tensor.shape) < 2 or name.endswith("bias") or not is_float:
            return tensor
        return Stored(f"{ROUNDED} {tensor.kind}", tensor.shape, partial(read, tensor))

    return Opened({name: opened(name, tensor) for name, tensor in plain(file).items()})


def plain(file: Path) -> Opened:
    """Returns the tensors of a file of safetensors as they are."""
    index = Index([file])
    # opened once: a header has thousands of entries
    slices = safe_open(file, framework="pt")
    opened = Opened()
    for name in index.files:
        each = slices.get_slice(name)
        opened[name] = Stored(each.get_dtype(), each.get_shape(), partial(copied, index, name))
    return opened


def copied(index: Index, name: str) -> Tensor:
    return index.read(name).clone()
