"""Reads the header of a GGUF file: the config.json of its model, and the places of tensors.

The package `gguf` parses it. A file leaves out what llama.cpp has in its code: for models other
than the engine's own, the extension gguf_families knows it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.errors import naming, rejected
from nanoengine_extras.models.gguf import families, numbers
from nanoengine_extras.models.quantized import methods
from nanoengine_extras.models.gguf.reader import Reader, ends_of

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# these are dequantized when they are loaded
GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
TYPES = (*FLOATS, *GRIDS, *numbers.SIZES)
# by `general.architecture`
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}
# the names of tensors, of the whole model and of a layer
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj"}
QKV = "attn_qkv"


def plain_name(name: str, names: dict[str, str]) -> str:
    """Returns the name that transformers gives a tensor; an unknown one stays as it is.

    names: by llama.cpp's, with or without an ending such as ".weight"
    """
    # a name has none to two of these dots
    layer, own, end = f"..{name}".rsplit(".", 2)
    found = names.get(f"{own}.{end}") or f"{names.get(own, own)}.{end}"
    return f"{layer}.{found}"[2:].replace("blk.", f"{names.get('blk', 'layers')}.", 1)


def layer_of(name: str) -> int:
    kind, number = f"{name}.".split(".")[:2]
    return int(number) if kind == "blk" else -1


class Header:
    """The header of a model's GGUF files, without the weights."""

    def __init__(self, files: list[Path]) -> None:
        with naming(ValueError("the file is incomplete, or not a GGUF file: download it again")):
            readers = {str(file): Reader(file) for file in files}
            for reader in readers.values():
                reader.check_places()
        for reader in readers.values():
            self.accept("byte order", {"I": "little", "S": "big"}[reader.byte_order], ["little"])
        self.fields = readers[str(files[0])].fields
        self.architecture = self.find("general.architecture")
        self.others: dict[str, Any] = {}
        has_experts = self.architecture == "llama" and bool(self.find("llama.expert_count"))
        if self.architecture not in ARCHITECTURES or has_experts:
            self.others = families.FAMILIES
        self.family = self.others.get("mixtral" if has_experts else self.architecture)
        # the last layers can be those for multi-token prediction
        guessing = self.find(f"{self.architecture}.nextn_predict_layers", 0)
        count = self.find(f"{self.architecture}.block_count", 0)
        num_tensors = sum(len(reader.tensors) for reader in readers.values())
        if count not in range(num_tensors + 1):
            raise rejected("the file's block_count", count, f"a number, at most {num_tensors}, the "
                           "tensors in the file")
        self.num_layers = count - guessing
        self.names = NAMES | (self.family.names if self.family else {})
        # `parts` looks for other tensors
        self.tensors = {tensor.name: tensor for reader in readers.values()
                        for tensor in reader.tensors}
        of_files = {name: [part for tensor in reader.tensors for part in self.parts(tensor)]
                    for name, reader in readers.items()}
        self.tensors = {tensor.name: tensor for parts in of_files.values() for tensor in parts}
        # for each file: the type, the shape and the place of each tensor
        self.table = {name: {
            plain_name(tensor.name, self.names): [
                tensor.tensor_type.name, tensor.shape.tolist()[::-1], int(tensor.data_offset),
                int(tensor.n_bytes)]
            for tensor in parts if layer_of(tensor.name) < self.num_layers}
            for name, parts in of_files.items()}
        changes = self.family.changes(self) if self.family else {}
        for table in self.table.values():
            for name in changes.keys() & table.keys():
                del table[name]
        # the first file has the header, and so these numbers
        self.table[str(files[0])] |= {name: each for name, each in changes.items() if each}

    def parts(self, tensor: Any) -> list[Any]:
        """Returns a tensor as it is; or three of one that has the rows of q, k and v, as the option
        --fuse-qkv of llama.cpp's converter makes it."""
        if f".{QKV}." not in tensor.name or QKV in self.names:
            return [tensor]
        output = self.tensor(f"blk.{layer_of(tensor.name)}.attn_output.weight")
        *inputs, rows = tensor.shape.tolist()
        size = int(tensor.n_bytes) // rows
        queries = int(output.shape[0])
        # the first row of each part, and of what follows it
        firsts = 0, queries, (rows + queries) // 2, rows
        return [tensor._replace(
            name=tensor.name.replace(QKV, f"attn_{part}"), n_bytes=size * (end - first),
            shape=np.array([*inputs, end - first]), data_offset=tensor.data_offset + size * first)
            for part, first, end in zip("qkv", firsts, firsts[1:])]

    def find(self, name: str, default: Any = None) -> Any:
        return self.fields[name].contents() if name in self.fields else default

    @property
    def num_tokens(self) -> int:
        return int(self.tensor("token_embd.weight").shape[1])

    def tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise ValueError(f"it has no {name}: the file must be complete")
        return self.tensors[name]

    def of_model(self, name: str, default: Any = None) -> Any:
        """Returns a number that the file has for its architecture. Raises ValueError if it is
        needed and missing, and for layers that differ."""
        found = self.find(f"{self.architecture}.{name}", default)
        if found is None:
            raise ValueError(f"{self.architecture}.{name} is missing: the file must be complete")
        if self.family and name in self.family.lists:
            found = [*found][:1] if isinstance(found, list) else found
        # a list has a number for each layer
        numbers = {*(found if isinstance(found, list) else [found])}
        if len(numbers) != 1 or not all(isinstance(x, (int, float)) and x > 0 for x in numbers):
            raise rejected(f"the file's {name}", found, "a number above 0, the same for all layers")
        return numbers.pop()

    def check(self) -> None:
        """Raises ValueError for what the engine cannot compute, or not exactly."""
        self.accept("split.no", self.find("split.no", 0), [0])
        self.accept("general.type", self.find("general.type", "model"), ["model"])
        if self.architecture not in (known := [*ARCHITECTURES, *self.others]):
            raise rejected("the file's general.architecture", self.architecture, f"one of {known}; "
                           f"otherwise it must be the original model, {methods.ROUNDED}")
        head_dim = self.head_dim()
        neutral = {"expert_count": 0, "attention.sliding_window": 0, "attention.causal": True,
                   "attention.scale": 0.0, "logit_scale": 0.0, "attention.value_length": head_dim,
                   "rope.dimension_count": head_dim, "rope.scaling.attn_factor": 1.0,
                   "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
                   "rope.scaling.yarn_log_multiplier": 0.0, "attn_logit_softcapping": 0.0,
                   "final_logit_softcapping": 0.0, "rope.freq_base_swa": None,
                   "rope.dimension_sections": None, "nextn_predict_layers": 0,
                   "attention.key_length_swa": head_dim, "attention.value_length_swa": head_dim,
                   "rope.dimension_count_swa": head_dim, "attention.shared_kv_layers": 0,
                   "embedding_length_per_layer_input": 0}
        for name in self.family.reads if self.family else ():
            neutral.pop(name, None)
        for name, value in neutral.items():
            self.accept(name, self.find(f"{self.architecture}.{name}", value), [value])
        types = {tensor.tensor_type.name for tensor in self.tensors.values()}
        if others := sorted(types - {*TYPES}):
            raise ValueError(
                f"its weights of type {', '.join(others)} are not read: it must be a file of "
                "another type, such as Q4_K_M or Q8_0 (llama.cpp's llama-quantize makes them)")

    def accept(self, name: str, value: Any, accepted: list) -> None:
        if value not in accepted:
            raise rejected(f"the file's {name}", value, f"one of {accepted}")

    def head_dim(self) -> int:
        size = self.of_model("embedding_length") // self.of_model("attention.head_count")
        return self.of_model("attention.key_length", size)

    def config(self) -> dict[str, Any]:
        """Returns the config.json of the model."""
        self.check()
        heads = self.of_model("attention.head_count")
        more = self.family.config(self) if self.family else {"rope_parameters": self.rope()}
        return {
            "architectures": [ARCHITECTURES.get(self.architecture)],
            "model_type": self.architecture,
            "vocab_size": self.num_tokens,
            "hidden_size": self.of_model("embedding_length"),
            "intermediate_size": self.of_model("feed_forward_length"),
            "num_hidden_layers": self.of_model("block_count") and self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.of_model("attention.head_count_kv", heads),
            "head_dim": self.head_dim(),
            "rms_norm_eps": self.of_model(
                "attention.layer_norm_rms_epsilon",
                self.find(f"{self.architecture}.attention.layer_norm_epsilon")),
            "max_position_embeddings": self.of_model("context_length"),
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self.find("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.find("tokenizer.ggml.eos_token_id")} | more

    def quantization(self) -> dict[str, Any]:
        """Returns the `quantization_config` of the model.

        heads: llama.cpp's "llama" rotates neighbours in a head, so its converter reorders the rows
            of q and k, by heads. norms: the number that it has added to the weights of norms.
        """
        heads = self.of_model("attention.head_count")
        permuted = {"q_proj": heads, "k_proj": self.of_model("attention.head_count_kv", heads)}
        is_permuted = self.family.is_permuted if self.family else self.architecture == "llama"
        return {"quant_method": "gguf", "heads": permuted if is_permuted else {},
                "norms": self.family.norms if self.family else 0.0}

    def eos(self) -> list[int]:
        """Returns the tokens that end a text, a turn or a message."""
        tokens = self.find("tokenizer.ggml.tokens", [])
        kinds = "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"
        found = [self.find(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        found += self.find("tokenizer.ggml.eos_token_ids", [])
        found += [tokens.index(end) for end in ends_of(tokens)]
        # some files have a number that is no token, as if there were none
        count = len(tokens) or self.num_tokens
        return [token for token in dict.fromkeys(found) if token in range(count)]

    def rope(self) -> dict[str, Any]:
        """Returns the `rope_parameters`. As in llama.cpp, a factor without a type is "linear"."""
        theta = self.of_model("rope.freq_base", 10000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        kind = self.find(f"{self.architecture}.rope.scaling.type", "linear")
        self.accept("rope.scaling.type", kind, ["none", "linear", "yarn"])
        # the second name is that of old files
        factor = self.of_model("rope.scaling.factor", self.of_model("rope.scale_linear", 1.0))
        if kind != "none" and factor != 1:
            rope |= {"rope_type": kind, "factor": factor}
        if rope["rope_type"] == "yarn":
            rope |= {
                "original_max_position_embeddings": self.of_model(
                    "rope.scaling.original_context_length", self.of_model("context_length")),
                "beta_fast": self.of_model("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": self.of_model("rope.scaling.yarn_beta_slow", 1.0)}
        if "rope_freqs.weight" in self.tensors:
            rope |= self.llama3(theta)
        return rope

    def llama3(self, theta: float) -> dict[str, Any]:
        """Returns the parameters from which the factors of the frequencies were made.

        llama.cpp's converter stores only the factors, one for each pair of numbers of a head.
        The models of Llama 3 differ only in the largest factor.
        """
        given = torch.from_numpy(self.tensors["rope_freqs.weight"].data.astype(np.float32))
        factor = float(given.max())
        size = self.head_dim()
        firsts = torch.arange(0, size, 2, dtype=torch.float64, device="cpu")
        waves = 2 * torch.pi * theta ** (firsts / size)
        smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
        factors = 1 / ((1 - smooth) / factor + smooth)
        if given.shape != factors.shape or not torch.allclose(given.double(), factors, rtol=1e-4):
            raise rejected("the file's rope_freqs.weight", given.tolist(), "those of Llama 3")
        return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
