"""Quantized weights of models that transformers computes (transformers_models), dequantized.

transformers fills a model by its own rules: it renames tensors, ties them, and merges those of
experts. It gets them as a dict, in which each is dequantized when it is read.
"""

import copy
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from nanoengine_extras.models.quantized import methods
from nanoengine_extras.models.quantized.expert_files import add_experts
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
    quantized file (outputs, inputs). For experts, see expert_files.py."""
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


def tensors_of(opened: dict[Any, Opened]) -> Opened:
    """Returns the tensors of all files."""
    return Opened({name: each for tensors in opened.values() for name, each in tensors.items()})
