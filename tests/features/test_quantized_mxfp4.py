"""gpt-oss, whose experts are stored in MXFP4: as openai/gpt-oss-20b, and with linears of each
expert, as llm-compressor does. transformers' own function dequantizes the weights of the model to
compare with. test_gguf.py has the files of llama.cpp's converter."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import check_refused, token_ids
from formats import (
    GREEDY, OPTIONS, PROMPTS, change, change_config, compressed, expected, experts_of, generated,
    save)
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine import LLM
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES = dict(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2,
             num_hidden_layers=2, vocab_size=320, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, sliding_window=16, max_position_embeddings=512, pad_token_id=0,
             eos_token_id=2, rope_parameters=dict(
                 rope_type="yarn", factor=4.0, rope_theta=150000.0, beta_fast=32.0, beta_slow=1.0,
                 truncate=False, original_max_position_embeddings=128))
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
    ends = {"bias": "bias", "blocks": "weight_packed", "scales": "weight_scale"}
    for name, each in tensors_of(model, numbers).items():
        found = re.fullmatch(r"(.*experts)\.(\w+)_proj_(\w+)", name)
        if not found:
            tensors[name] = each
            continue
        module, kinds, end = found[1], found[2].split("_"), found[3]
        for place, kind in enumerate(kinds):
            for number, matrix in enumerate(each[:, place::len(kinds)]):
                tensors[f"{module}.{number}.{kind}_proj.{ends[end]}"] = (
                    matrix.flatten(1) if end == "blocks" else matrix)
    model.config.save_pretrained(folder)
    change_config(folder, architectures=["GptOssForCausalLM"], quantization_config=compressed(
        4, "mxfp4-pack-quantized", "float", group_size=32))
    return save(folder, tensors)


WRITERS = {"safetensors": write_safetensors, "linears": write_linears}


@pytest.fixture(scope="module")
def drawn():
    return draw()


@pytest.mark.parametrize("form", WRITERS)
def test_tokens_are_those_of_the_model(tmp_path, drawn, form):
    """In a batch, without kernels, and in chunks; the numbers stay packed."""
    path = WRITERS[form](tmp_path, *drawn)
    right = expected(drawn[0])
    assert generated(path, max_num_batched_tokens=24, max_num_seqs=2) == right
    assert generated(path, kernels=False) == right
    experts = [layer.mlp.experts for layer in drawn[0].model.layers]
    with LLM(path, **OPTIONS) as llm:
        linears, calls = experts_of(llm)
        wanted = [matrix[number].T for each in experts for number in range(4)
                  for matrix in (each.gate_up_proj, each.down_proj)]
        for linear, weight in zip(linears, wanted, strict=True):
            assert isinstance(linear, QuantizedLinear) and linear.is_quantized
            assert torch.equal(linear.weight, weight)
        assert [token_ids(llm.generate([each], GREEDY, use_tqdm=False))[0]
                for each in PROMPTS] == right
        assert len(calls) == 2 and None not in calls


OTHER_PART = "down_proj_{} in .*is not accepted: it must be "


@pytest.mark.parametrize("end, spoiled, message", [
    # a matrix of an expert is missing
    ("blocks", lambda each: each[:3], "1.mlp.experts.3.down_proj.weight"),
    ("scales", lambda each: each[..., ::2], OTHER_PART + "U8.* of shape .4, 64, 3."),
    ("scales", lambda each: each[:, ::2], OTHER_PART + "U8.* of shape .4, 64, 3."),
    ("scales", lambda each: each.float(), OTHER_PART + "U8.* of shape .4, 64, 3."),
    ("scales", lambda each: torch.full_like(each, 255), OTHER_PART + "finite numbers"),
    ("blocks", lambda each: each[..., ::2], OTHER_PART + "U8.* of shape .4, 64, 3, 16.")])
def test_damaged_parts(tmp_path, drawn, end, spoiled, message):
    folder = write_safetensors(tmp_path, *drawn)
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    change(folder, lambda tensors: tensors.update(
        {name: spoiled(tensors[name])} if name in tensors else {}))
    check_refused(message.format(end), LLM, folder, **OPTIONS)
