"""GGUF files with experts, as llama.cpp's converter writes them; their weights stay packed."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import greedy_reference
from quantizing import (
    GREEDY, HEADS, OPTIONS, PROMPTS, add_sizes, generated, gguf_name, in_gguf, order_of)

from nanoengine import LLM
from nanoengine_extras.models.gguf import experts as gguf_experts
from nanoengine_extras.models.gguf import files as gguf_files
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=256, head_dim=64,
             num_hidden_layers=2, num_attention_heads=HEADS["q_proj"], num_experts=5,
             num_key_value_heads=HEADS["k_proj"], num_experts_per_tok=2, num_local_experts=5,
             shared_expert_intermediate_size=512, vocab_size=320, max_position_embeddings=512)
KINDS = {"qwen3moe": "Qwen3Moe", "qwen2moe": "Qwen2Moe", "olmoe": "Olmoe", "mixtral": "Mixtral"}
# what each has in all of its models
OWN: dict[str, dict[str, Any]] = {
    "qwen3moe": dict(norm_topk_prob=True), "olmoe": dict(num_key_value_heads=HEADS["q_proj"])}
MATRICES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def make(arch: str, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    kind = KINDS[arch]
    config = getattr(transformers, f"{kind}Config")(**SIZES | OWN.get(arch, {}) | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + ("norm" in name)
    return model


def name_in(arch: str, name: str) -> str:
    """llama.cpp's name of a tensor."""
    names = gguf_experts.OF_EXPERTS | {"ffn_gate_inp": "mlp.gate"}
    for own, other in names.items():
        if name.endswith(f".{other}.weight"):
            return name.replace("model.layers.", "blk.").replace(other, own)
    return gguf_name(name)


def add(writer: Any, name: str, weight: torch.Tensor, kind: str, seed: int, arch: str) -> None:
    """Stores a tensor, which gets the dequantized numbers. Experts have a matrix each."""
    stored_as = gguf.GGMLQuantizationType[kind]
    own = name_in(arch, name)
    rows = order_of(name, len(weight)) if arch == "mixtral" else None
    if rows is None:
        rows = torch.arange(len(weight))
    numbers = weight[rows].numpy()
    # as some releases of the converter store it
    if own == "blk.0.ffn_gate_inp_shexp.weight":
        numbers = numbers[0]
    parts = [in_gguf(part, kind, seed + i) for i, part in enumerate(
        numbers if numbers.ndim == 3 else [numbers])]
    stored = np.stack(parts) if numbers.ndim == 3 else parts[0]
    writer.add_tensor(own, stored, raw_dtype=stored_as)
    weight[rows] = torch.from_numpy(
        gguf.dequantize(stored, stored_as).copy()).view(weight.shape)


@torch.no_grad()
def write(model: Any, arch: str, path: Path, kinds: list[str], entries: dict[str, Any]) -> None:
    """As llama.cpp's converter."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if arch == "mixtral" else arch)
    add_sizes(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_expert_count(5)
    writer.add_expert_used_count(2)
    if arch.startswith("qwen"):
        writer.add_expert_feed_forward_length(256)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(512)
    for name, value in entries.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(
            name.format(arch="llama" if arch == "mixtral" else arch), value)
    for number, (name, weight) in enumerate(model.state_dict().items()):
        kind = kinds[number % len(kinds)]
        before, _, own = name.rpartition(".experts.")
        if own == "gate_up_proj":
            for matrix, part in zip(("gate", "up"), weight.chunk(2, dim=1)):
                at = before.replace("model.layers.", "blk.").removesuffix(".mlp")
                add_experts(writer, f"{at}.{MATRICES[matrix]}.weight", part, kind, number)
        elif own == "down_proj":
            at = before.replace("model.layers.", "blk.").removesuffix(".mlp")
            add_experts(writer, f"{at}.{MATRICES[own]}.weight", weight, kind, number)
        elif not (config.tie_word_embeddings and name == "lm_head.weight"):
            is_float = weight.ndim == 1 or "mlp.gate." in name or len(weight) == 1
            add(writer, name, weight, "F32" if is_float else kind, number, arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_experts(writer: Any, name: str, weights: torch.Tensor, kind: str, seed: int) -> None:
    stored_as = gguf.GGMLQuantizationType[kind]
    stored = np.stack([in_gguf(each.numpy(), kind, 100 * seed + i)
                       for i, each in enumerate(weights)])
    writer.add_tensor(name, stored, raw_dtype=stored_as)
    weights.copy_(torch.from_numpy(np.stack([gguf.dequantize(each, stored_as) for each in stored])))


@pytest.fixture
def make_file(tmp_path):
    def made(arch: str, kinds: list[str], entries: Any = (), **changes: Any) -> tuple[Path, Any]:
        model = make(arch, **changes)
        write(model, arch, path := tmp_path / "model.gguf", kinds, dict(entries))
        return path, model
    return made


SLOW: Any = dict(marks=pytest.mark.slow)


@pytest.mark.parametrize("arch, kinds, changes", [
    ("qwen3moe", ["Q4_K", "Q6_K", "Q8_0"], {}),
    pytest.param("qwen3moe", ["Q4_0"], dict(tie_word_embeddings=True), **SLOW),
    pytest.param("qwen2moe", ["Q5_0", "Q4_1"], {}, **SLOW),
    pytest.param("olmoe", ["Q5_K"], {}, **SLOW),
    pytest.param("mixtral", ["BF16"], {}, **SLOW),
    ("mixtral", ["Q4_0", "Q8_0"], {})])
def test_tokens_are_those_of_the_model(make_file, arch, kinds, changes):
    """In a batch, without kernels and alone; experts stay packed."""
    path, model = make_file(arch, kinds, **changes)
    expected = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    assert generated(path, max_num_batched_tokens=24, max_num_seqs=2) == expected
    assert generated(path, kernels=False) == expected
    with LLM(path, **OPTIONS) as llm:
        layers = llm.engine.runner.model.layers
        experts = [module for name, module in layers.named_modules()
                   if name.endswith("_proj") and ".experts." in name]
        assert len(experts) == 2 * 5 * 2
        assert kinds == ["BF16"] or all(isinstance(each, QuantizedLinear) for each in experts)
        alone = [llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS]
        assert alone == expected


def test_a_gate_of_one_row(make_file):
    """A vector in the first layer, a matrix in the second."""
    path, _ = make_file("qwen2moe", ["F32"])
    gguf_files.write_folder([path], None, path.parent, has_tokenizer=False)
    opened = gguf_files.open_gguf(path.parent, {"heads": {}, "norms": 0.0}, path)
    for layer in range(2):
        gate = opened[f"layers.{layer}.mlp.shared_expert_gate.weight"]
        assert gate.read().shape == (1, 256) and gate.shape == [1, 256]


@pytest.mark.parametrize("arch", KINDS)
def test_the_config_is_that_of_the_model(make_file, arch):
    """What llama.cpp's converter leaves out is known."""
    path, model = make_file(arch, ["F32"])
    gguf_files.write_folder([path], None, path.parent, has_tokenizer=False)
    found = transformers.AutoConfig.from_pretrained(path.parent)
    assert type(found) is type(model.config)
    for name in ("num_experts_per_tok", "norm_topk_prob", "num_experts", "num_local_experts",
                 "hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
                 "num_key_value_heads", "tie_word_embeddings", "rope_parameters", "qkv_bias",
                 "decoder_sparse_step", "mlp_only_layers", "vocab_size"):
        if name in type(model.config)().to_dict():
            assert getattr(found, name) == getattr(model.config, name), name


@pytest.mark.parametrize("arch, name, value", [
    ("qwen3moe", "expert_weights_scale", 2.5), ("mixtral", "expert_gating_func", 2),
    ("olmoe", "attention.clamp_kqv", 8.0), ("qwen2moe", "expert_group_count", 4)])
def test_what_a_family_does_not_have(make_file, arch, name, value):
    path, _ = make_file(arch, ["F32"], {f"{{arch}}.{name}": value})
    with pytest.raises(ValueError, match=f"^model='{path}': the file's {name}={value} .* one of"):
        LLM(path)
