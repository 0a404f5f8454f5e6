"""gpt-oss, whose experts are stored in MXFP4: as openai/gpt-oss-20b, as llama.cpp's converter
writes it, and with linears of each expert, as llm-compressor does. transformers' own
function dequantizes the weights of the model to compare with."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import greedy_reference
from formats import GREEDY, OPTIONS, PROMPTS, change, change_config, compressed, generated, save
from quantizing import add_sizes, gguf_name
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine import LLM
from nanoengine_extras.models.experts import Experts
from nanoengine_extras.models.gguf import files as gguf_files
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES = dict(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2,
             num_hidden_layers=2, vocab_size=320, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, sliding_window=16, max_position_embeddings=512, pad_token_id=0,
             eos_token_id=2, rope_parameters=dict(
                 rope_type="yarn", factor=4.0, rope_theta=150000.0, beta_fast=32.0, beta_slow=1.0,
                 truncate=False, original_max_position_embeddings=128))
# llama.cpp's names of tensors, other than those of most models
NAMES = {"post_attention_layernorm.weight": "post_attention_norm.weight",
         "self_attn.sinks": "attn_sinks.weight", "mlp.router.weight": "ffn_gate_inp.weight",
         "mlp.router.bias": "ffn_gate_inp.bias"}
# the numbers of experts' matrices, and their exponents, by the names of tensors
Numbers = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def draw() -> tuple[Any, Numbers]:
    """A model, and the numbers of its experts: (experts, outputs, groups, 32)."""
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).eval()
    found: Numbers = {}
    for name, weight in model.named_parameters():
        weight.copy_(torch.randn_like(weight) * 0.15 + ("norm" in name))
        if weight.ndim == 3:
            count, inputs, outputs = weight.shape
            numbers = torch.randint(16, (count, outputs, inputs // 32, 32), dtype=torch.uint8)
            exponents = torch.randint(121, 125, numbers.shape[:3], dtype=torch.uint8)
            found[name] = numbers, exponents
            blocks = numbers[..., ::2] | numbers[..., 1::2] << 4
            weight.copy_(convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32))
    return model, found


def tensors_of(model: Any, numbers: Numbers) -> dict[str, Tensor]:
    tensors = {name: each for name, each in model.state_dict().items() if name not in numbers}
    for name, (found, exponents) in numbers.items():
        tensors[f"{name}_blocks"] = found[..., ::2] | found[..., 1::2] << 4
        tensors[f"{name}_scales"] = exponents
    return tensors


def write_safetensors(folder: Path, model: Any, numbers: Numbers) -> Path:
    model.config.save_pretrained(folder)
    change_config(folder, architectures=["GptOssForCausalLM"], quantization_config=dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"]))
    return save(folder, tensors_of(model, numbers))


def write_linears(folder: Path, model: Any, numbers: Numbers) -> Path:
    """Each expert has its own matrices and biases, with gates and ups apart."""
    tensors = {}
    ends = {"_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
    for name, each in tensors_of(model, numbers).items():
        if "mlp.experts." not in name:
            tensors[name] = each
            continue
        module, own = name.split("experts.")
        end = next(end for end in ends if own.endswith(end))
        parts = {"down_proj": slice(None)}
        if "gate_up" in own:
            parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for part, rows in parts.items():
            for number, matrix in enumerate(each[:, rows]):
                tensors[f"{module}experts.{number}.{part}.{ends[end]}"] = (
                    matrix.flatten(1) if end == "_blocks" else matrix)
    model.config.save_pretrained(folder)
    change_config(folder, architectures=["GptOssForCausalLM"], quantization_config=compressed(
        4, "mxfp4-pack-quantized", "float", group_size=32))
    return save(folder, tensors)


def write_gguf(folder: Path, model: Any, numbers: Numbers, kind: str = "MXFP4") -> Path:
    """kind: the type of experts' matrices; it must be exact"""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "gpt-oss")
    config = model.config
    add_sizes(writer, config)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_sliding_window(16)
    writer.add_expert_feed_forward_length(96)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    for name, weight in model.state_dict().items():
        _, _, number, own = [*name.split(".", 3), "", ""][:4]
        if own.startswith("mlp.experts"):
            add_experts(writer, f"blk.{number}", name, weight, numbers, kind)
        else:
            to = f"blk.{number}.{NAMES[own]}" if own in NAMES else gguf_name(name)
            writer.add_tensor(to, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_experts(writer: Any, layer: str, name: str, weight: Tensor, numbers: Numbers,
                kind: str) -> None:
    """Gates and ups apart; the lower bits of a block's bytes are its first 16 numbers."""
    parts = [("down", slice(None))]
    if "gate_up" in name:
        parts = [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
    for which, rows in parts:
        to = f"{layer}.ffn_{which}_exps"
        if name.endswith("_bias"):
            writer.add_tensor(f"{to}.bias", weight[:, rows].contiguous().numpy())
        elif kind == "MXFP4":
            found, exponents = (each[:, rows] for each in numbers[name])
            blocks = torch.cat((exponents[..., None], found[..., :16] | found[..., 16:] << 4), -1)
            writer.add_tensor(f"{to}.weight", blocks.flatten(2).numpy(),
                              raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            stored = gguf.GGMLQuantizationType[kind]
            matrices = weight.mT[:, rows].contiguous().numpy()
            writer.add_tensor(f"{to}.weight", np.stack([
                gguf.quantize(each, stored) for each in matrices]), raw_dtype=stored)


WRITERS = {"safetensors": write_safetensors, "gguf": write_gguf, "linears": write_linears}


@pytest.fixture(scope="module")
def drawn():
    return draw()


@pytest.fixture
def expected(drawn):
    return [greedy_reference(drawn[0], prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("form", WRITERS)
def test_tokens_are_those_of_the_model(tmp_path, drawn, expected, form):
    """In a batch, without kernels, and in chunks; the numbers stay packed."""
    path = WRITERS[form](tmp_path, *drawn)
    assert generated(path, max_num_batched_tokens=24, max_num_seqs=2) == expected
    assert generated(path, kernels=False) == expected
    with LLM(path, **OPTIONS) as llm:
        layers = [each for each in llm.engine.runner.model.layers.modules()
                  if isinstance(each, Experts)]
        assert len(layers) == 2
        for layer, own in zip(layers, drawn[0].model.layers):
            for number, expert in enumerate(layer.experts):
                for linear, name in ((expert.gate_up_proj, "gate_up_proj"),
                                     (expert.down_proj, "down_proj")):
                    assert isinstance(linear, QuantizedLinear) and linear.is_quantized
                    wanted = getattr(own.mlp.experts, name)[number].T
                    assert torch.equal(linear.weight, wanted)
        outputs = [llm.generate([each], GREEDY, use_tqdm=False)[0] for each in PROMPTS]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(layer.calls is not None for layer in layers)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_other_types_of_experts(tmp_path, drawn, expected, kind):
    """Files in which experts are not MXFP4."""
    path = write_gguf(tmp_path, *drawn, kind)
    with LLM(path, **OPTIONS) as llm:
        linears = [each.gate_up_proj for layer in llm.engine.runner.model.layers.modules()
                   if isinstance(layer, Experts) for each in layer.experts]
        assert len(linears) == 8 and all(each.is_packed for each in linears)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_the_config_of_a_gguf_is_that_of_the_model(tmp_path, drawn):
    path = write_gguf(tmp_path, *drawn)
    gguf_files.write_folder([path], None, path.parent, has_tokenizer=False)
    found = transformers.AutoConfig.from_pretrained(path.parent)
    wanted = drawn[0].config
    assert type(found) is type(wanted)
    for name in ("num_experts_per_tok", "num_local_experts", "hidden_size", "intermediate_size",
                 "rope_parameters", "sliding_window", "layer_types", "swiglu_limit",
                 "attention_bias", "tie_word_embeddings", "head_dim"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)


def test_the_ends_of_a_turn(tmp_path, drawn):
    """<|end|> ends only a message."""
    path = write_gguf(tmp_path, *drawn)
    header = gguf_header.Header([path])
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    for given, ends in ((tokens, [4, 2, 3]), (tokens[:2], [1])):
        header.find = {"tokenizer.ggml.tokens": given}.get
        assert header.eos() == ends


def test_a_matrix_of_an_expert_is_missing(tmp_path, drawn):
    folder = write_safetensors(tmp_path, *drawn)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    change(folder, lambda tensors: tensors.update(
        {name: tensors[name][:3]} if name in tensors else {}))
    with pytest.raises(ValueError, match=r"1.mlp.experts.3.down_proj.weight"):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize("end, spoiled, shape", [
    ("scales", lambda each: each[..., ::2], ".4, 64, 3."),
    ("scales", lambda each: each[:, ::2], ".4, 64, 3."),
    ("scales", lambda each: each.float(), ".4, 64, 3."),
    ("scales", lambda each: torch.full_like(each, 255), None),
    ("blocks", lambda each: each[..., ::2], ".4, 64, 3, 16.")])
def test_damaged_parts(tmp_path, drawn, end, spoiled, shape):
    folder = write_safetensors(tmp_path, *drawn)
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    change(folder, lambda tensors: tensors.update(
        {name: spoiled(tensors[name])} if name in tensors else {}))
    found = f"U8.* of shape {shape}" if shape else "finite numbers"
    with pytest.raises(ValueError, match=f"{name} in .*is not accepted: it must be {found}"):
        LLM(folder, **OPTIONS)
