"""Quantized weights of models that transformers computes (transformers_models), packed for a CPU.

transformers fills a model by its own rules: it renames tensors, ties them, and merges those of
experts. So it first gets a stand-in for each matrix, which takes almost no memory and shows where
in the model the matrix belongs. Then one matrix after the other is read and packed.

    linears, embeddings       their numbers stay packed
    others                    dequantized: such as Conv1D of GPT-2, and linears whose weight the
                              model reads directly
    no stand-in is left       transformers has merged or cast it, as those of experts: it loads
                              once more, with the dequantized numbers of these
"""

import copy
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nanoengine.features import logger
from nanoengine_cpu.modules import PackedLinear, kind_of
from nanoengine_cpu.products import MOST_WORDS
from nanoengine_extensions.quantized.modules import (
    QuantizedEmbedding, QuantizedLinear, in_packed_form, storage_of, without_weight)
from nanoengine_extensions.quantized.stored import Opened, Stored
from nanoengine_extensions.quantized.transformers_files import from_tensors, in_order

# a matrix that was transposed, cut or copied has different strides
STRIDES = (1, 2)
# parameters: a module, and a name in it
Places = list[tuple[Any, str]]
# the check of a model (check.py) lets functions take each number for one in float32
as_stored = torch._C.DisableTorchFunction


class Linear(QuantizedLinear):
    """was_read: whether its model has read the weight directly."""

    was_read = False

    @property
    def weight(self) -> Any:  # type: ignore[override]
        self.was_read = True
        with as_stored():
            return super().weight

    def forward(self: Any, x: Tensor) -> Tensor:
        with as_stored():
            if self.is_quantized and x.dtype != self._parameters["weight"].dtype:
                return self.in_float32(x)
        return super().forward(x)

    def in_float32(self, x: Tensor) -> Tensor:
        """Multiplies rows in float32 by the kernel for bfloat16, with errors of up to 2^-16.
        Dequantizing the weight for each product would take minutes."""
        rows = x.reshape(-1, self.in_features)
        upper = rows.bfloat16()
        out = self.multiply(upper).float()
        bias = self.packed_bias
        # what is left of each row, if its result is subtracted before it is rounded
        for row, result in zip(upper.split(1), out):
            self.packed_bias = bias - F.pad(result, (0, len(bias) - len(result)))
            result += self.multiply(row)[0]
        self.packed_bias = torch.zeros_like(bias)
        out += self.multiply((rows - upper.float()).bfloat16())
        self.packed_bias = bias
        return out.view(*x.shape[:-1], self.out_features)


class Embedding(QuantizedEmbedding):
    """The forward of its own class, which may scale rows, gets a weight of the rows it looks up.

    was_read: see `Linear`. rows: this weight, during a forward.
    """

    was_read = False
    rows: Tensor | None = None

    @property
    def weight(self) -> Any:  # type: ignore[override]
        if self.rows is not None:
            return self.rows
        self.was_read = True
        return self.look_up(torch.arange(self.num_embeddings, device="cpu"))

    def look_up(self, ids: Tensor) -> Tensor:
        with as_stored():
            return super().forward(ids)

    def forward(self, ids: Tensor) -> Tensor:
        vars(self)["rows"] = self.look_up(ids.flatten())
        with as_stored():
            places = torch.arange(ids.numel(), device="cpu").view(ids.shape)
        try:
            return super(QuantizedEmbedding, self).forward(places)
        finally:
            del vars(self)["rows"]


# ------------------------------------------------------------------------------- loading


def load_packed(tensors: Opened, by_sums: bool, kind: Any, folder: object, config: Any,
                dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """As `transformers_files.load`. dtype: of the model; by_sums: see kernel.py"""
    tensors = in_order(tensors, kind, config)
    given: dict[str, Any] = dict(tensors)
    stand_ins = {name: stand_in(each.shape, dtype) for name, each in tensors.items()
                 if len(each.shape) == 2}
    while True:
        causal, found = from_tensors(given | stand_ins, kind, config, dtype=dtype, **options)
        places = places_of(causal)
        gone = [name for name, each in stand_ins.items() if not is_left(each, places)]
        if not gone:
            break
        # its memory
        del causal
        for name in gone:
            shape = stand_ins.pop(name).shape
            # transformers ties equal matrices, as all stand-ins are
            ties = [other for other, each in stand_ins.items()
                    if each.shape == shape and len(places[storage_of(each)]) > 1]
            if any(torch.equal(tensors[other].read(), tensors[name].read()) for other in ties):
                del given[name]
        places.clear()
    with torch.device("cpu"):
        parts = {name: places[storage_of(each)] for name, each in stand_ins.items()}
        known = {name for name, own in parts.items()
                 if fill(own, tensors[name], dtype, by_sums)}
        causal(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
        for name, own in parts.items():
            if any(getattr(module, "was_read", False) for module, _ in own):
                put(own, tensors[name].read().to(dtype))
                known.remove(name)
    log_others([name for name, each in given.items() if each.is_quantized and name not in known])
    return causal, found


def stand_in(shape: list[int], dtype: torch.dtype) -> Tensor:
    rows, columns = shape
    memory = torch.zeros(rows + 2 * columns, dtype=dtype, device="cpu")
    return memory.as_strided((rows, columns), STRIDES)


def places_of(model: nn.Module) -> dict[int, Places]:
    """Returns where each parameter is, by its storage; a tied one is in several places."""
    found: dict[int, Places] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[storage_of(parameter)].append((module, name))
    return found


def is_left(tensor: Tensor, places: dict[int, Places]) -> bool:
    """Whether a stand-in is still a parameter of the model, unchanged."""
    found = [module._parameters[name] for module, name in places[storage_of(tensor)]]
    return bool(found) and all(
        (each.shape, each.stride(), each.storage_offset()) == (tensor.shape, STRIDES, 0)
        for each in found)


def fill(places: Places, tensor: Stored, dtype: torch.dtype, by_sums: bool) -> bool:
    """Gives modules their weight; returns whether all can have it packed. If it has no such form,
    a line in the log says so."""
    if not all(can_be_packed(module, name, dtype) for module, name in places):
        put(places, tensor.read().to(dtype))
        return False
    weight = in_packed_form(tensor, dtype, by_sums)
    if weight.ndim == 2:
        put(places, weight)
        return True
    for module, _ in places:
        own = type(module)
        is_linear = isinstance(module, nn.Linear)
        kind: Any = Linear if is_linear else Embedding
        module.__class__ = type(own.__name__, (kind, own), {})
        if is_linear:
            module.keep([weight], tensor.shape[:1], dtype)
            continue
        module.register_buffer("part_0", weight, persistent=False)
        module._parameters["weight"] = without_weight(dtype)
        # of gradients; it need not be one of the rows
        module.padding_idx = None
    return True


def put(places: Places, weight: Tensor) -> None:
    """Gives modules a weight that is not packed."""
    parameter = nn.Parameter(weight, requires_grad=False)
    for module, name in places:
        if isinstance(module, (Linear, Embedding)):
            module.__class__ = type(module).__bases__[1]
            del module._buffers["part_0"]
        module._parameters[name] = parameter


def can_be_packed(module: Any, name: str, dtype: torch.dtype) -> bool:
    if isinstance(module, nn.Linear):
        words = module.in_features * dtype.itemsize // 4
        return kind_of(module) is PackedLinear and words <= MOST_WORDS
    is_embedding = isinstance(module, nn.Embedding) and name == "weight"
    return is_embedding and module.max_norm is None and looks_up(module)


def looks_up(embedding: nn.Embedding) -> bool:
    """Tests whether it computes each row from this row alone."""
    trial = copy.copy(embedding)
    trial.padding_idx = None
    weight = torch.randn(5, embedding.embedding_dim)
    ids = torch.tensor([[3, 0, 3, 2]])
    try:
        whole = functional_call(trial, {"weight": weight}, (ids,))
        part = functional_call(trial, {"weight": weight[ids[0]]}, (torch.arange(4)[None],))
    except Exception:
        # it takes other arguments, or ids that this weight does not have
        return False
    return torch.equal(whole, part)


def log_others(names: list[str]) -> None:
    if names:
        logger.warning(
            f"quantized weights of {len(names)} matrices are dequantized when they are loaded, "
            f"since no linear and no embedding has them as they are stored: {names[:3]}")
