"""Quantized tensors, in the form in which `safe_open` returns plain ones.

`loader.load_model` opens each file of weights, and asks for its names and for one tensor at a time.
These classes answer the same calls, and dequantize a tensor when it is read. `Stored.load` gives
numbers and scales as they are.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanoengine.features import rejected
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
            for name in safe_open(file, framework="pt").keys():
                self.files[name] = file

    def slice_of(self, name: str) -> Any:
        return safe_open(self.files[name], framework="pt").get_slice(name)

    def read(self, name: str) -> Tensor:
        """Returns a tensor that can lie in the mapped file: it needs a copy to outlive the file."""
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


def sizes_in(entries: dict[str, Any]) -> list[int]:
    """Returns all sizes of groups that `quantization_config` has, also within its entries."""
    found = [entries.get("group_size", entries.get("q_group_size")) or 0]
    return sum((sizes_in(each) for each in entries.values() if isinstance(each, dict)), found)


def with_groups(weight: Grouped, entries: dict[str, Any]) -> Grouped:
    """Returns a weight with the group of each input. If the files do not say it, groups have a size
    that `quantization_config` names, and the last one can be smaller; if no such size gives the
    number of groups, all are equal. Raises ValueError if they cannot be."""
    # -1: the tool has not filled it
    if weight.groups is not None and -1 not in weight.groups:
        return weight
    inputs, count = weight.numbers.shape[1], weight.scales.shape[1]
    equal = 0 if inputs % count else inputs // count
    sizes = [size for size in sizes_in(entries) if size > 0]
    fitting = [size for size in [*sizes, equal] if size and -(-inputs // size) == count]
    if not fitting:
        raise rejected("the model's group_size", sizes,
                       f"one that makes {count} groups of {inputs} inputs, as the files have them")
    return weight._replace(groups=torch.arange(inputs) // fitting[0])


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


def compressed(entries: dict[str, Any]) -> Method:
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def shape(index: Index, module: str) -> list[int]:
        return index.read(f"{module}.weight_shape").tolist()

    def read(index: Index, module: str) -> Grouped:
        needed: Any = (index.read(f"{module}.{part}") for part in parts[:3])
        others = (index.find(f"{module}.{part}") for part in parts[3:])
        return with_groups(formulas.compressed(*needed, *others), entries)

    return Method(parts, shape, read)


METHODS = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed}


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
