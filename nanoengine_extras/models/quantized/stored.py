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
Kinds = tuple[str, ...]
Shapes = Sequence[Sequence[int]]
Layouts = dict[tuple[int, int], tuple[int, Tensor]]
# the prefix of the type of tensors that are quantized when they are read
ROUNDED = "rounded"


class Stored:
    """A tensor of a file, in the form of `safe_open(…).get_slice(name)`.

    kind: the type in which it is stored, for messages.
    load: returns it whole, in floating point or as numbers and scales.
    parts: if it has three dimensions, the matrices of files whose rows each of its own consists of.
    """

    def __init__(self, kind: str, shape: list[int], load: Callable[[], Tensor | Grouped],
                 parts: "list[list[Stored]] | None" = None) -> None:
        self.kind = kind
        self.shape = shape
        self.load = load
        self.parts = parts
        self.matrices: list[Stored] = sum(parts, []) if parts else [self]

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


# what the files' tensor of a name becomes: itself, a weight of which it is a part, or nothing
Found = dict[str, Stored]


class Index:
    """Where the tensors of safetensors are: parts of one weight can be in several files.

    entries: of the model's quantization_config; blocks: see `methods.blocks_in`
    """

    def __init__(self, files: list[Path], entries: dict[str, Any] | None = None) -> None:
        self.entries = entries or {}
        self.blocks = methods.blocks_in(self.entries)
        self.files: dict[str, Path] = {}
        for file in files:
            with naming(file):
                names = safe_open(file, framework="pt").keys()
            self.files |= dict.fromkeys(names, file)

    def slice_of(self, name: str) -> Any:
        return safe_open(self.files[name], framework="pt").get_slice(name)

    def read(self, name: str, is_copied: bool = False) -> Tensor:
        """Returns a tensor that can lie in the mapped file: it needs a copy to outlive the file."""
        # the caller can have another default device
        with torch.device("cpu"):
            found = self.slice_of(name)[...]
        return found.clone() if is_copied else found

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
        if kind == "U8" and kinds[-2:] == EXPONENTS:
            found = found.view(torch.float8_e8m0fnu)
        if found.is_floating_point() and not found.float().isfinite().all():
            raise rejected(where, "inf or nan", "finite numbers")
        # the shape in the file comes first
        first = min(fitting, key=lambda each: [*each] != shape)
        return found.reshape(first if number is None else first[1:])

    def layouts(self, shape: Sequence[int], order_name: str) -> Layouts:
        """Returns all shapes that the scales of a matrix can have, and for each, how many outputs
        have one scale, and the group of each input. The last ones can be fewer.

        order_name: of a tensor with the group of each input; -1: the tool has not filled it
        """
        *experts, outputs, inputs = shape
        order = self.find(order_name, INTEGERS, [(inputs,)])
        if order is not None and order.max() < 0:
            order = None
        if order is not None and {*range(len(order.unique()))} != {*order.tolist()}:
            raise rejected("g_idx", order.tolist(), "from 0 on, with no group left out")
        found: Layouts = {}
        # if nothing is said: one for all, for each output, or for each input of transposed experts
        for rows, columns in self.blocks or [(0, 0), (1, 0), *[(0, 1)] * len(experts)]:
            rows = min(rows or outputs, outputs)
            groups = torch.arange(inputs) // (columns or inputs) if order is None else order
            size = -(-outputs // rows), int(groups.max()) + 1
            known = found.setdefault(size, (rows, groups))
            # modules can differ in their groups, which only the number of scales shows
            if known[0] != rows or not torch.equal(known[1], groups):
                raise rejected("the model's quantization_config", self.entries,
                               f"one whose groups of {inputs} inputs differ in their number")
        return found


def without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def open_file(form: Callable[[Index, str, Stored], Found], index: Index, file: Path) -> Opened:
    """Returns the tensors of a file, with weights in place of their parts."""
    opened = Opened()
    # opened once: a header has thousands of entries
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():
            each = tensors.get_slice(name)
            load = partial(index.read, name, is_copied=True)
            opened |= form(index, name, Stored(each.get_dtype(), each.get_shape(), load))
    return opened


def rounded(bits: int, index: Index, name: str, tensor: Stored) -> Found:
    """Matrices are rounded to numbers of some bits when they are read; those of experts, too."""
    # vectors, of norms and biases, are few numbers
    is_float = tensor.kind.startswith(("F", "BF"))
    if len(tensor.shape) < 2 or name.endswith("bias") or not is_float:
        return {name: tensor}

    def read() -> Tensor | Grouped:
        weight = tensor.read()
        found = formulas.rounded(weight.flatten(0, -2), bits)
        return found if weight.ndim == 2 else found.dequantized().view(weight.shape)

    return {name: Stored(f"{ROUNDED} {tensor.kind}", tensor.shape, read)}
