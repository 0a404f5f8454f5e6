"""Quantized weights of models that transformers computes (transformers_models), dequantized.

transformers fills a model by its own rules: it renames tensors, ties them, and merges those of
experts. It gets them as a dict, in which each is dequantized when it is read.

Experts can have a matrix each in a file, where transformers has one tensor for a layer. In gpt-oss,
the outputs of gates and ups are interleaved, and matrices are transposed:

    files     experts.0.gate_proj, experts.0.up_proj, …: (outputs, inputs) each; biases (outputs,)
              of each expert, in a GGUF (experts, outputs)
    here      experts.gate_up_proj, gate_up_proj_bias: outputs of gates and ups interleaved,
              (experts, inputs, outputs), as transformers has them; (experts, outputs)
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from nanoengine_extras.models.quantized import formulas, methods
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import ROUNDED, Opened, Stored


def load(tensors: Opened, kind: Any, folder: object, config: Any,
         **options: Any) -> tuple[Any, dict[str, Any]]:
    """As `kind.from_pretrained(folder, config=config, …)`, but with the given tensors.

    tensors: by the names in the files
    """
    causal, found = from_tensors(in_order(tensors, kind, config), kind, config, **options)
    check_parts(tensors, found)
    return causal, found


def check_parts(tensors: Opened, found: dict[str, Any]) -> None:
    """Raises ValueError for an unused tensor beside a quantized weight of the model: it can change
    the meaning of the weight. tensors: by the names in the files"""
    unused = found["unexpected_keys"]
    modules = {name.rpartition(".")[0] for name, each in tensors.items()
               if each.is_quantized and name not in unused}
    for name in sorted(unused):
        module, _, own = name.rpartition(".")
        # some tools give all linears a bias
        if module in modules and own != "bias":
            raise ValueError(f"{name} is not known: {methods.INSTEAD}")


def from_tensors(tensors: dict[str, Any], kind: Any, config: Any,
                 **options: Any) -> tuple[Any, dict[str, Any]]:
    """tensors: each a `Stored`, in the order of the model, or a tensor"""
    return kind.from_pretrained(
        None, config=without_quantization(config), state_dict=tensors, **options)


def without_quantization(config: Any) -> Any:
    """Returns a copy that does not say how files are quantized: reading dequantizes them."""
    config = copy.deepcopy(config)
    for each in (config, config.get_text_config(decoder=True)):
        vars(each).pop("quantization_config", None)
    return config


def in_order(tensors: Opened, kind: Any, config: Any) -> Opened:
    """Returns the tensors in the form of the model's. GPT-2's Conv1D has (inputs, outputs), and a
    quantized file (outputs, inputs)."""
    found = Opened(tensors)
    # its other matrices are like quantized ones
    entries = vars(config).get("quantization_config") or {}
    is_gguf = entries.get("quant_method") == "gguf"
    with torch.device("meta"):
        model = kind._from_config(without_quantization(config))
    for name, module in model.named_modules():
        # names in files may lack the prefix
        for each in {name, name.removeprefix(f"{model.base_model_prefix}.")}:
            if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
                add_experts(found, module, each)
            if f"{each}.0.k_b_proj.weight" in found:
                add_keys_and_values(found, module.num_heads, each)
            # such as that of Granite's shared experts
            if isinstance(module, torch.nn.Linear) and f"{each}.gate.weight" in found:
                parts = [found.pop(f"{each}.{part}.weight") for part in ("gate", "up")]
                found[f"{each}.weight"] = in_one(parts)
            stored = found.get(f"{each}.weight")
            if isinstance(module, Conv1D) and stored and (is_gguf or stored.is_quantized):
                if not stored.kind.startswith(ROUNDED):
                    found[f"{each}.weight"] = transposed(stored)
    return found


def add_keys_and_values(tensors: Opened, num_heads: int, name: str) -> None:
    """Replaces the matrices that make keys and values by one. llama.cpp has two for each head, and
    transposes those of keys."""
    parts = []
    for head in range(num_heads):
        key, value = (tensors.pop(f"{name}.{head}.{part}_b_proj.weight") for part in "kv")
        parts += [transposed(key), value]
    tensors[f"{name}.kv_b_proj.weight"] = in_one(parts)


def in_one(parts: list[Stored]) -> Stored:
    """Concatenates the rows of several matrices."""
    shape = [sum(each.shape[0] for each in parts), parts[0].shape[1]]
    return Stored("F32", shape, lambda: torch.cat([each.read() for each in parts]))


def transposed(stored: Stored) -> Stored:
    return Stored(stored.kind, stored.shape[::-1], lambda: stored.read().T.contiguous())


def stacked(parts: list[list[Stored]], is_transposed: bool) -> Stored:
    """Returns the matrices of a layer's experts as one tensor, (experts, outputs, inputs).

    parts: for each expert, matrices (outputs, inputs), whose rows are concatenated
    is_transposed: whether the tensor is (experts, inputs, outputs)
    """
    shape = [sum(each.shape[0] for each in parts[0]), parts[0][0].shape[1]]
    shape = [len(parts), *(shape[::-1] if is_transposed else shape)]

    def load() -> Tensor:
        found = torch.empty(shape, dtype=torch.float32)
        for to, own in zip(found.mT if is_transposed else found, parts):
            to.copy_(torch.cat([each.read() for each in own]))
        return found

    return Stored(parts[0][0].kind, shape, load, parts)


def in_turn(first: Stored, second: Stored, dim: int = 0) -> Stored:
    """Interleaves the rows of two tensors, or their columns if `dim` is 1."""
    def load() -> Tensor | Grouped:
        if first.is_quantized and first.kind == second.kind:
            both: Any = first.load(), second.load()
            return formulas.in_turn(*both)
        return torch.stack((first.read(), second.read()), dim + 1).flatten(dim, dim + 1)

    shape = [*first.shape]
    shape[dim] *= 2
    return Stored(first.kind, shape, load)


def add_experts(tensors: Opened, module: Any, name: str) -> None:
    """Replaces the matrices of experts by the tensors that a module has for all of them.

    name: of the module, in the files
    """
    def take(part: str, end: str = "weight") -> list[Stored]:
        return [tensors.pop(f"{name}.{i}.{part}.{end}") for i in range(module.num_experts)]

    def biases(part: str) -> Stored:
        if f"{name}.{part}.bias" in tensors:
            return tensors.pop(f"{name}.{part}.bias")
        parts = take(part, "bias")
        return Stored("F32", [len(parts), *parts[0].shape],
                      lambda: torch.stack([each.read() for each in parts]))

    is_transposed = getattr(module, "is_transposed", False)
    if f"{name}.0.down_proj.weight" not in tensors:
        return
    if f"{name}.0.gate_proj.weight" not in tensors:
        both = [[each] for each in take("gate_up_proj")]
    elif not getattr(module, "is_concatenated", True):
        both = [[in_turn(*each)] for each in zip(take("gate_proj"), take("up_proj"))]
        tensors[f"{name}.gate_up_proj_bias"] = in_turn(biases("gate_proj"), biases("up_proj"), 1)
        tensors[f"{name}.down_proj_bias"] = biases("down_proj")
    else:
        both = [[*each] for each in zip(take("gate_proj"), take("up_proj"))]
    down = [[each] for each in take("down_proj")]
    tensors[f"{name}.gate_up_proj"] = stacked(both, is_transposed)
    tensors[f"{name}.down_proj"] = stacked(down, is_transposed)


def tensors_of(opened: dict[Any, Opened]) -> Opened:
    """Returns the tensors of all files."""
    return Opened({name: each for tensors in opened.values() for name, each in tensors.items()})
