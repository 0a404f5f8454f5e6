"""Reads the header of a GGUF file: the config.json of its model, and the places of tensors.

The package `gguf` parses it. A file leaves out what llama.cpp has in its code, which families.py
knows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from nanoengine.errors import naming, rejected
from nanoengine_extras.models.gguf import numbers
from nanoengine_extras.models.gguf.experts import experts
from nanoengine_extras.models.gguf.families import FAMILIES, WITH_EXPERTS, Family
from nanoengine_extras.models.gguf.layers import rope, windows
from nanoengine_extras.models.gguf.names import NAMES, layer_of, plain_name
from nanoengine_extras.models.gguf.reader import Reader, ends_of
from nanoengine_extras.models.quantized import methods

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# these are dequantized when they are loaded
GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
TYPES = (*FLOATS, *GRIDS, *numbers.SIZES)
QKV = "attn_qkv"
# The values with which an entry changes nothing: other ones are accepted only if the family reads
# the entry. The first value is that of a missing entry.
NEUTRAL: dict[str, list] = {
    **dict.fromkeys(("rope.freq_base_swa", "rope.dimension_sections"), [None]),
    **dict.fromkeys([f"rope.scaling.{name}" for name in (
        "attn_factor", "yarn_attn_factor", "yarn_ext_factor")], [1]),
    **dict.fromkeys((
        "expert_count", "expert_shared_count", "nextn_predict_layers", "attention.sliding_window",
        "attention.scale", "attention.temperature_scale", "attention.clamp_kqv", "logit_scale",
        "attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.yarn_log_multiplier",
        "attention.shared_kv_layers", "embedding_length_per_layer_input"), [0]),
    "attention.causal": [True], "expert_weights_scale": [1, 0], "expert_gating_func": [1, 0],
    "expert_group_count": [0, 1]}
# likewise, if they are the size of a head
SIZES = ("rope.dimension_count", "rope.dimension_count_swa", "attention.value_length",
         "attention.value_length_swa", "attention.key_length_swa")
# the names of one number in the config.json of different models
EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
HAS_BIAS = ("attention_bias", "qkv_bias", "use_bias", "use_qkv_bias")
# the kinds of entries, by that of their defaults; a list can have a number for each layer
KINDS: dict[type, Any] = {str: (str, "a text"), list: (list, "a list")}
NUMBER = (int, float, list), "a number"


class Header:
    """The header of a model's GGUF files, without the weights."""

    def __init__(self, files: list[Path]) -> None:
        with naming(ValueError("the file is incomplete, or not a GGUF file: download it again")):
            readers = {str(file): Reader(file) for file in files}
        for reader in readers.values():
            self.accept("byte order", reader.endianess.name.lower(), ["little"])
        self.fields = readers[str(files[0])].fields
        self.architecture = self.find("general.architecture", "")
        # the entries that are read, so that no others need be neutral
        self.used: set[str] = set()
        is_mixtral = self.architecture == "llama" and self.find("llama.expert_count")
        kind = "mixtral" if is_mixtral else self.architecture
        self.family: Family = FAMILIES.get(kind, Family())
        self.has_experts = kind in WITH_EXPERTS
        # the last layers can be those for multi-token prediction
        guessing = self.find(f"{self.architecture}.nextn_predict_layers", 0)
        count = self.find(f"{self.architecture}.block_count", 0)
        self.tensors = {each.name: each for reader in readers.values() for each in reader.tensors}
        if count not in range(len(self.tensors) + 1):
            raise rejected("the file's block_count", count, f"a number, at most {len(self.tensors)}"
                           ", the tensors in the file")
        self.num_layers = count - guessing
        names = NAMES | self.family.names
        # for each file: the type, the shape and the place of each tensor
        self.table: dict[str, dict[str, list]] = {}
        for file, reader in readers.items():
            parts = [part for tensor in reader.tensors for part in self.parts(tensor)]
            self.tensors |= {part.name: part for part in parts}
            self.table[file] = {
                plain_name(part.name, names): [
                    part.tensor_type.name, part.shape.tolist()[::-1], int(part.data_offset),
                    int(part.n_bytes)]
                # the config has factors of frequencies
                for part in parts if layer_of(part.name) < self.num_layers and not (
                    part.name.startswith(("rope_freqs.", "rope_factors_")))}
        for name, place in self.family.changes(self).items():
            for table in self.table.values():
                table.pop(name, None)
            # the first file has the header, and so these numbers
            if place:
                self.table[str(files[0])][name] = place

    def parts(self, tensor: Any) -> list[Any]:
        """Returns a tensor as it is; or three of one that has the rows of q, k and v, as the option
        --fuse-qkv of llama.cpp's converter makes it."""
        if f".{QKV}." not in tensor.name or QKV in self.family.names:
            return [tensor]
        output = self.tensor(f"blk.{layer_of(tensor.name)}.attn_output.weight")
        queries = int(output.shape[0])
        *inputs, rows = tensor.shape.tolist()
        size = int(tensor.n_bytes) // rows
        # the first row of each part, and of what follows it
        firsts = 0, queries, (rows + queries) // 2, rows
        return [tensor._replace(
            name=tensor.name.replace(QKV, f"attn_{part}"), n_bytes=size * (end - first),
            shape=np.array([*inputs, end - first]), data_offset=tensor.data_offset + size * first)
            for part, first, end in zip("qkv", firsts, firsts[1:])]

    # ------------------------------------------------------------------------- its entries

    def find(self, name: str, default: Any = None) -> Any:
        """Returns an entry, or the default. Raises ValueError for one of another kind."""
        found = self.fields[name].contents() if name in self.fields else default
        kind, accepted = KINDS.get(type(default), NUMBER)
        if default is not None and not isinstance(found, kind):
            raise rejected(f"the file's {name}", found, accepted)
        return found

    def entry(self, name: str, default: Any = None) -> Any:
        """Returns an entry of the architecture, which then need not be neutral."""
        self.used.add(name)
        return self.find(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: Any = None) -> Any:
        """Returns a number that the file has for its architecture. Raises ValueError if it is
        needed and missing, and for layers that differ."""
        found = self.entry(name, default)
        if found is None:
            raise ValueError(f"{self.architecture}.{name} is missing: the file must be complete")
        # a list has a number for each layer
        numbers = found if isinstance(found, list) else [found]
        if name in self.family.lists:
            numbers = numbers[:1]
        if len({*numbers}) != 1 or not isinstance(numbers[0], (int, float)) or numbers[0] <= 0:
            raise rejected(f"the file's {name}", found, "a number above 0, the same for all layers")
        return numbers[0]

    def accept(self, name: str, value: Any, accepted: list) -> None:
        if value not in accepted:
            raise rejected(f"the file's {name}", value, f"one of {accepted}")

    def expect(self, name: str, *accepted: Any) -> None:
        """Raises ValueError for other values of an entry. The first is that of a missing one."""
        self.accept(name, self.entry(name, accepted[0]), [*accepted])

    def tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise ValueError(f"it has no {name}: the file must be complete")
        return self.tensors[name]

    def head_dim(self) -> int:
        size = self.number("embedding_length") // self.number("attention.head_count")
        return self.number("attention.key_length", size)

    # ------------------------------------------------------------------------- what they say

    def config(self) -> dict[str, Any]:
        """Returns the config.json of the model. Raises ValueError for a model that the engine
        cannot compute, or not exactly.

        In its quantization_config: llama.cpp's "llama" rotates neighbours in a head, so its
        converter reorders the rows of q and k, by heads. And it adds a number to norms.
        """
        for name, usual in {"split.no": 0, "general.type": "model"}.items():
            self.accept(name, self.find(name, usual), [usual])
        if self.architecture not in FAMILIES:
            raise rejected("the file's general.architecture", self.architecture, "one of "
                           f"{[*FAMILIES]}; otherwise it must be the original model, "
                           f"{methods.ROUNDED}")
        heads = self.number("attention.head_count")
        kv_heads = self.number("attention.head_count_kv", heads)
        epsilon = self.number("attention.layer_norm_rms_epsilon",
                              self.entry("attention.layer_norm_epsilon"))
        config = {
            "model_type": self.family.model_type or self.architecture,
            "vocab_size": int(self.tensor("token_embd.weight").shape[1]),
            "hidden_size": self.number("embedding_length"),
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count") and self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.head_dim(),
            "max_position_embeddings": self.number("context_length"),
            **dict.fromkeys(EPSILON, epsilon),
            **dict.fromkeys(HAS_BIAS, "blk.0.attn_q.bias" in self.tensors),
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self.find("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.find("tokenizer.ggml.eos_token_id"),
            # training needs it
            "pad_token_id": None}
        config |= {name: self.number(given) for name, given in self.family.reads.items()}
        if self.family.period:
            config |= windows(self, self.family.period)
        if self.has_experts:
            config |= experts(self)
        config |= self.family.own(self)
        if "rope_parameters" not in config:
            config["rope_parameters"] = rope(self)
        self.check()
        permuted = {"q_proj": heads, "k_proj": kv_heads} if self.family.is_permuted else {}
        return config | {
            "architectures": [CLASSES[config["model_type"]]],
            "quantization_config": {
                "quant_method": "gguf", "heads": permuted, "norms": self.family.norms}}

    def check(self) -> None:
        """Raises ValueError for entries that are not read, if they change something, and for types
        of matrices that are not known."""
        neutral = NEUTRAL | dict.fromkeys(SIZES, [self.head_dim()])
        unread = {name: neutral[name] for name in neutral if name not in self.used}
        for name, values in {**unread, **self.family.accepts}.items():
            if values is not None:
                self.expect(name, *values)
        types = {tensor.tensor_type.name for tensor in self.tensors.values()}
        if others := sorted(types - {*TYPES}):
            raise ValueError(
                f"its weights of type {', '.join(others)} are not read: it must be a file of "
                "another type, such as Q4_K_M or Q8_0 (llama.cpp's llama-quantize makes them)")

    def eos(self) -> list[int]:
        """Returns the tokens that end a text, a turn or a message."""
        tokens = self.find("tokenizer.ggml.tokens", [])
        kinds = "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"
        found = [self.find(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        found += self.find("tokenizer.ggml.eos_token_ids", [])
        found += [tokens.index(end) for end in ends_of(tokens)]
        # some files have a number that is no token, as if there were none
        count = len(tokens) or int(self.tensor("token_embd.weight").shape[1])
        return [token for token in dict.fromkeys(found) if token in range(count)]
