"""Models in FP8, as Qwen3-8B-FP8 and DeepSeek-V3 store them. Their tokens are those that
transformers generates with the dequantized weights."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy_reference
from fake_gpu import FakeGpu
from quantizing import (
    BFLOAT16, GREEDY, OPTIONS, PROMPTS, change_config, check_damages, expected, generated,
    linears_of, linears_of_experts, opened, put)
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import LLM
from nanoengine_extras.models.experts import Experts
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.loading import pack
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.models.quantized.scaled_files import scaled

BLOCK = [32, 32]
ENTRIES = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3",
               weight_block_size=BLOCK)


def rounded(weight: Tensor, block: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and what they stand for, block by block."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block))
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales, found = torch.empty(rows, columns), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block[0], (i + 1) * block[0]),
                    slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            found[part] = numbers[part].float() * scales[i, j]
    return numbers, scales, found


def write(source: Path, folder: Path, model: Any, entries: dict[str, Any] = ENTRIES,
          end: str = "_scale_inv") -> Path:
    """Rounds the linears of a model, and its copy. Scales are in a file of their own."""
    tensors, scales = {}, {}
    for name, weight in model.state_dict().items():
        tensors[name] = weight
        if "_proj.weight" in name:
            block = entries.get("weight_block_size") or [*weight.shape]
            numbers, own, found = rounded(weight, block)
            tensors[name] = numbers
            scales[name + end] = own if "weight_block_size" in entries else own[0, 0]
            # scales of activations and of a KV cache, which are not rounded here
            scales[name.replace("weight", "input_scale")] = torch.ones(())
            scales[name.replace("weight", "k_scale")] = torch.ones(())
            weight.copy_(found)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file(scales, folder / "model-2.safetensors", metadata={"format": "pt"})
    index = dict.fromkeys(tensors, "model-1.safetensors") | dict.fromkeys(
        scales, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    change_config(folder, quantization_config=entries)
    return folder


@pytest.fixture
def make_fp8(make_model, tmp_path):
    def made(entries: dict[str, Any] = ENTRIES, end: str = "_scale_inv",
             architecture: str = "Qwen3", **changes: Any) -> tuple[Path, Any]:
        source, model = make_model(architecture, **dict(
            hidden_size=128, intermediate_size=160, num_hidden_layers=2, head_dim=64) | changes)
        return write(Path(source), tmp_path / "fp8", model, entries, end), model
    return made


@pytest.mark.parametrize("entries, end", [
    (ENTRIES, "_scale_inv"), (ENTRIES | dict(weight_block_size=[48, 64]), "_scale_inv"),
    (dict(quant_method="fp8", activation_scheme="static"), "_scale")], ids=str)
def test_tokens_are_those_of_the_model(make_fp8, entries, end):
    """By blocks, of which the last ones can be smaller, or with one scale for a matrix."""
    folder, model = make_fp8(entries, end)
    assert generated(folder, max_num_batched_tokens=24, max_num_seqs=2) == expected(model)
    assert generated(folder, kernels=False) == expected(model)
    assert generated(folder, model_impl="transformers") == expected(model)
    with LLM(folder, **OPTIONS) as llm:
        assert len(linears_of(llm)) == 8 and llm.engine.runner.is_invariant
        layer, own = llm.engine.runner.model.layers[1], model.model.layers[1]
        assert torch.equal(layer.mlp.down_proj.weight, own.mlp.down_proj.weight)


def test_the_size_of_groups_is_a_block(tmp_path):
    """As AutoRound writes it, beside the same block."""
    block = [32, 64]
    numbers, scales, wanted = rounded(torch.randn(80, 160), block)
    entries = ENTRIES | dict(weight_block_size=block, group_size=block)
    parts = {"weight": numbers, "weight_scale_inv": scales}
    assert torch.equal(opened(tmp_path, entries, parts).read(), wanted)
    del entries["weight_block_size"]
    assert torch.equal(opened(tmp_path, entries, parts).read(), wanted)


def test_in_bfloat16(make_fp8, caplog):
    """The bits of a row do not depend on the schedule, and nothing is dequantized."""
    folder, model = make_fp8()
    with caplog.at_level(logging.WARNING):
        found = [generated(folder, **BFLOAT16 | options) for options in (
            {}, dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1))]
    assert all(each == found[0] for each in found)
    assert not [line for line in caplog.messages if "dequantized" in line]
    with LLM(folder, **BFLOAT16) as llm:
        for name, module in llm.engine.runner.model.layers[0].named_modules():
            if name == "mlp.down_proj":
                wanted = model.model.layers[0].mlp.down_proj.weight.bfloat16()
                assert torch.equal(module.weight, wanted)


def test_on_a_gpu(make_fp8):
    folder, model = make_fp8()
    with FakeGpu():
        assert generated(folder, device="cuda", attention_backend="gather") == expected(model)


def test_experts(make_model, tmp_path):
    """Each is a matrix of its own in the files."""
    sizes = dict(hidden_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
                 num_hidden_layers=2, head_dim=32, decoder_sparse_step=1)
    source, model = make_model("Qwen3Moe", **sizes)
    file = Path(source) / "model.safetensors"
    tensors, scales = load_file(file), {}
    state = model.state_dict()
    for name, weight in [*tensors.items()]:
        if "_proj.weight" in name:
            tensors[name], scales[f"{name}_scale_inv"], found = rounded(weight, BLOCK)
            put(state, name, found)
    folder = shutil.copytree(source, tmp_path / "experts")
    save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=ENTRIES)
    wanted = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    assert generated(folder) == wanted
    with LLM(folder, **OPTIONS) as llm:
        linears = linears_of_experts(llm)
        assert len(linears) == 16
        assert all(isinstance(each, QuantizedLinear) and each.is_quantized for each in linears)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert all(layer.calls is not None for layer in llm.engine.runner.model.layers.modules()
                   if isinstance(layer, Experts))


def test_every_number():
    """Also those that are no normal float16."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    numbers[numbers % 128 == 127] = 126
    weight = formulas.Grouped(numbers, torch.full((64, 1), 0.5), groups=torch.zeros(256).long(),
                              values=formulas.E4M3)
    assert torch.equal(weight.dequantized(), numbers.view(torch.float8_e4m3fn).float() / 2)
    for dtype in (torch.bfloat16, torch.float32):
        part = pack(weight, dtype)
        found = part.rows(torch.arange(64))
        assert torch.equal(found, weight.dequantized())
        linear = QuantizedLinear([part])
        unit = torch.eye(256).to(dtype)
        for rows in (1, 2, 4, 40):
            assert torch.equal(linear.multiply(unit[-rows:]).float(), found.T[-rows:])


def test_what_is_no_number_has_no_packed_form():
    numbers = torch.full((64, 128), 127, dtype=torch.uint8)
    weight = formulas.Grouped(numbers, torch.ones(64, 1), groups=torch.zeros(128).long(),
                              values=formulas.E4M3)
    assert pack(weight, torch.bfloat16) is None and weight.dequantized().isnan().all()


@pytest.mark.parametrize("scales", [torch.tensor([[127, 128]], dtype=torch.uint8),
                                    torch.tensor([[1.0, 2.0]]).to(torch.float8_e8m0fnu)])
def test_exponents_as_scales(tmp_path, scales):
    numbers = torch.ones(64, 64).to(torch.float8_e4m3fn)
    entries = ENTRIES | dict(weight_block_size=[64, 32])
    parts = dict(weight=numbers, weight_scale_inv=scales)
    found = opened(tmp_path, entries, parts).read()
    assert found[:, :32].eq(1).all() and found[:, 32:].eq(2).all()
    check_damages(tmp_path, entries, parts, ["weight_scale_inv"])
    # no number
    parts["weight_scale_inv"] = torch.tensor([[127, 255]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="inf or nan"):
        opened(tmp_path, entries, parts).read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damaged_scales(tmp_path, dtype):
    numbers, scales, _ = rounded(torch.randn(128, 160), [32, 32])
    parts = dict(weight=numbers, weight_scale_inv=scales.to(dtype))
    check_damages(tmp_path, ENTRIES, parts, ["weight_scale_inv"])


def test_the_matrices_of_many_experts_in_one_tensor(tmp_path):
    """With one scale for each of them, or one for all, or blocks."""
    numbers = torch.ones(3, 32, 64).to(torch.float8_e4m3fn)
    each = torch.tensor([1.0, 2.0, 3.0])
    for scales, wanted in ((each, each[:, None, None]), (torch.tensor(2.0), torch.tensor(2.0)),
                           (each.view(3, 1, 1), each[:, None, None])):
        found = opened(tmp_path, dict(quant_method="fp8"), dict(
            weight=numbers, weight_scale=scales)).read()
        assert torch.equal(found, wanted.expand(3, 32, 64))


def test_another_type_of_8_bits_is_refused():
    numbers = torch.ones(32, 64).to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="float8_e5m2 is not accepted: it must be torch.float8_e4"):
        scaled(numbers, torch.ones(1, 1), 32, torch.zeros(64))


@pytest.mark.parametrize("entries, options, message", [
    (ENTRIES | dict(fmt="e5m2"), {}, "quantization_config.fmt='e5m2' .* one of .'e4m3'"),
    (ENTRIES, dict(quantization="int8"), "quantization='int8' .* None or 'fp8', since the model"),
    (ENTRIES | dict(weight_block_size=[7, 7]), {},
     r"_scale_inv in .*='F32 .1, 3.' .* of shape .19, 23.")])
def test_what_is_refused(make_fp8, entries, options, message):
    folder, _ = make_fp8()
    if entries["weight_block_size"] == [7, 7]:
        tensors = load_file(folder / "model-2.safetensors")
        tensors = {name: each[:1, :3].contiguous() if each.ndim else each
                   for name, each in tensors.items()}
        save_file(tensors, folder / "model-2.safetensors")
    change_config(folder, quantization_config=entries)
    with pytest.raises(ValueError, match=message):
        LLM(folder, **OPTIONS | options)


def test_a_model_of_which_nothing_is_quantized(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    change_config(folder, quantization_config=ENTRIES)
    with pytest.raises(ValueError, match="'fp8'.* None, since none of its weights is quantized"):
        LLM(folder, **OPTIONS)
