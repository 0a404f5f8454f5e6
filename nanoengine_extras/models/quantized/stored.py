"""Quantized tensors, in the form in which `safe_open` returns plain ones.

`loader.load_model` opens each file of weights, and asks for its names and for one tensor at a time.
These classes answer the same calls, and dequantize a tensor when it is read. `Stored.load` gives
numbers and scales as they are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanoengine.errors import naming, rejected
from nanoengine_extras.models.quantized import formulas, methods
from nanoengine_extras.models.quantized.formulas import Grouped

# types of tensors that are not quantized
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
# types of packed numbers and of places, of scales, and of scales that are powers of two
WORDS, INTEGERS, FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32")
EXPONENTS = ("U8", "F8_E8M0")
# of weights of AWQ and GPTQ
PARTS = ("qweight", "qzeros", "scales", "g_idx")
Kinds = tuple[str, ...]
Shapes = Sequence[Sequence[int]]
# the prefix of the type of tensors that are quantized when they are read
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

    def find(self, name: str, kinds: Kinds, shapes: Shapes) -> Tensor | None:
        """Returns a tensor as `part` does, or None if it is not there."""
        return self.part(name, kinds, shapes) if name in self.files else None

    def part(self, name: str, kinds: Kinds, shapes: Shapes, number: int | None = None) -> Tensor:
        """Returns a tensor that belongs to a weight, in one of these shapes; dimensions of size 1
        can differ in the file. number: of a matrix, to read only this one

        Raises ValueError for another type or shape, and for numbers that are not finite.
        """
        stored = self.slice_of(name)
        kind, shape = stored.get_dtype(), stored.get_shape()
        where = f"{name} in {self.files[name]}"
        fitting = [each for each in shapes if without_ones(each) == without_ones(shape)]
        if kind not in kinds or not fitting:
            known = " or ".join(dict.fromkeys(str([*each]) for each in shapes))
            raise rejected(where, f"{kind} {shape}", f"{' or '.join(kinds)} of shape {known}")
        # as in `read`
        with torch.device("cpu"):
            found = stored[...] if number is None else stored[number]
        is_exponent = kind == "U8" and kinds[-2:] == EXPONENTS
        values = found.view(torch.float8_e8m0fnu) if is_exponent else found
        if values.is_floating_point() and not values.float().isfinite().all():
            raise rejected(where, "inf or nan", "finite numbers")
        # the shape in the file comes first
        first = min(fitting, key=lambda each: [*each] != shape)
        return found.reshape(first if number is None else first[1:])


def without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


# ------------------------------------------------------------- by the method of quantization


def layouts_of(shape: Sequence[int], blocks: list[tuple[int, int]],
               order: Tensor | None = None) -> dict[tuple[int, int], tuple[int, Tensor]]:
    """Returns all shapes that the scales of a matrix can have, and for each, how many outputs have
    one scale, and the group of each input. The last ones can be fewer.

    blocks: see `methods.blocks_in`
    order: the group of each input, if the files say it; -1: the tool has not filled it
    """
    *experts, outputs, inputs = shape
    if order is not None and order.max() < 0:
        order = None
    if order is not None and {*range(len(order.unique()))} != {*order.tolist()}:
        raise rejected("g_idx", order.tolist(), "from 0 on, with no group left out")
    found: dict[tuple[int, int], tuple[int, Tensor]] = {}
    # if nothing is said: one for all, for each output, or for each input of transposed experts
    for rows, columns in blocks or [(0, 0), (1, 0), *[(0, 1)] * len(experts)]:
        rows = rows or outputs
        groups = torch.arange(inputs) // (columns or inputs) if order is None else order
        found.setdefault((-(-outputs // rows), int(groups.max()) + 1), (rows, groups))
    return found


def open_quantized(index: Index, entries: dict[str, Any], file: Path) -> Opened:
    """Returns the tensors of a file of AWQ or GPTQ, with one weight instead of its parts."""
    opened = Opened()
    kind, bits = methods.gptq_format(entries), methods.bits_of(entries)
    blocks = methods.blocks_in(entries)
    for name, tensor in plain(file).items():
        module, _, part = name.rpartition(".")
        if part == "qweight":
            if tensor.kind not in WORDS:
                raise rejected(f"{name} in {file}", tensor.kind, f"of type {WORDS[0]}")
            shape = shape_of(index, module, tensor.shape, kind, bits)
            opened[f"{module}.weight"] = Stored(part, shape, partial(
                read_columns, index, module, shape, kind, blocks))
        elif part not in PARTS:
            opened[name] = tensor
    return opened


def shape_of(index: Index, module: str, words: list[int], kind: str, bits: set[int]) -> list[int]:
    """Returns the shape of a weight of AWQ or GPTQ. words: the shape of its packed numbers"""
    rows, columns = words
    if kind == "awq":
        return [8 * columns, rows]
    name = f"{module}.qzeros"
    zeros = index.slice_of(name).get_shape()
    # modules can differ in their bits, which only zeros show
    widths = {-(-columns * each // 32): each for each in bits}
    if zeros[-1] not in widths:
        known = " or ".join(f"[groups, {width}]" for width in widths)
        raise rejected(f"{name} in {index.files[name]}", zeros, f"{WORDS[0]} of shape {known}")
    return [columns, 32 * rows // widths[zeros[-1]]]


def read_columns(index: Index, module: str, shape: list[int], kind: str,
                 blocks: list[tuple[int, int]]) -> Grouped:
    """Reads a weight of AWQ or GPTQ: its zeros and scales are (groups, outputs)."""
    outputs, inputs = shape
    words = index.read(f"{module}.qweight")
    layouts = layouts_of(shape, blocks, index.find(f"{module}.g_idx", INTEGERS, [(inputs,)]))
    scales = index.part(f"{module}.scales", FLOATS, [
        (groups, outputs) for rows, groups in layouts if rows == outputs])
    zeros = index.part(f"{module}.qzeros", WORDS, [(len(scales), -(-words.numel() // inputs))])
    bits, version = 32 * len(words) // inputs, 2 if kind == "gptq_v2" else 1
    found = (formulas.awq(words, zeros, scales) if kind == "awq"
             else formulas.gptq(words, zeros, scales, bits, version))
    return found._replace(groups=layouts[outputs, len(scales)][1])


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
