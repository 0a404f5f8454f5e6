"""Models of compressed-tensors in FP8, INT8, NVFP4 and MXFP4, and of ModelOpt, AutoRound.

Their tokens are those that transformers generates with the dequantized weights. These have the bits
that the packages compute: compressed-tensors 0.20 in the dtype of its scales (NVFP4, MXFP4: in
bfloat16), ModelOpt 0.47 in float32 and bfloat16, and AutoRound 0.16 in float16, as its scales.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy_reference
from quantizing import (
    BFLOAT16, OPTIONS, PROMPTS, change_config, check_damages, compressed_config, expected,
    generated, in_gptq, linears_of, linears_of_experts, opened, put)
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import LLM
from nanoengine_extras.cpu import compiling
from nanoengine_extras.models.quantized import methods
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.quantized.loading import pack
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.models.quantized.scaled_files import open_scaled, scaled
from nanoengine_extras.models.quantized.stored import Index

# of a weight: its tensors, by the ends of their names, and what they stand for
Parts = tuple[dict[str, Tensor], Tensor]
ROUNDED = dict(num_bits=8, type="float", strategy="token", dynamic=True)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat((FP4, -FP4))


def grouped(weight: Tensor, count: int) -> Tensor:
    """(outputs, groups, inputs of a group); 0: one group for all outputs."""
    return weight.unflatten(1, (count, -1)) if count else weight[None].flatten(1)[None]


def in_fp8(weight: Tensor, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> Parts:
    """count: groups of a row; 0: one scale for all."""
    x = grouped(weight, count)
    scales = (x.abs().amax(-1, keepdim=True) / 448).to(dtype)
    numbers = (x / scales.float()).to(torch.float8_e4m3fn)
    found = numbers.float() * scales.float()
    return {"weight": numbers.view(weight.shape), "weight_scale": scales[..., 0] if count else (
        scales.view(1)), "input_scale": torch.ones(1)}, found.view(weight.shape)


def in_int8(weight: Tensor, count: int = 1, has_zeros: bool = False) -> Parts:
    x = grouped(weight, count)
    scales = (x.abs().amax(-1, keepdim=True) / 100).bfloat16()
    zeros = torch.randint(-20, 20, scales.shape) if has_zeros else torch.zeros(scales.shape)
    numbers = (x / scales.float() + zeros).round().clamp(-128, 127)
    found = {"weight": numbers.to(torch.int8).view(weight.shape), "weight_scale": scales[..., 0]}
    if has_zeros:
        found["weight_zero_point"] = zeros[..., 0].to(torch.int8)
    return found, ((numbers - zeros) * scales.float()).view(weight.shape)


def in_fp4(weight: Tensor, size: int, name: str = "weight_packed") -> Parts:
    """In groups of 16 inputs: NVFP4; of 32: MXFP4. ModelOpt multiplies by the second scale."""
    x = weight.unflatten(1, (-1, size))
    scales = x.abs().amax(-1, keepdim=True) / 6
    if size == 32:
        stored = scales.log2().round().to(torch.int32) + 127
        own, more = torch.exp2(stored - 127.0), {}
        stored = stored.to(torch.uint8)
    else:
        whole = 448 / scales.amax().view(1)
        stored = (scales * whole).to(torch.float8_e4m3fn)
        own, more = stored.float() / whole, {"weight_global_scale": whole}
        if name == "weight":
            own, more = stored.float() * (1 / whole), {"weight_scale_2": (1 / whole)[0]}
    numbers = ((x / own)[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    words = numbers.view(weight.shape)
    return {name: words[:, ::2] | words[:, 1::2] << 4, "weight_scale": stored[..., 0]} | more, (
        FP4[numbers.int()] * own).view(weight.shape)


def in_auto_round(weight: Tensor, version: int = 1) -> Parts:
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / 7).half()
    zeros = torch.randint(6, 10, scales.shape)
    numbers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).long()
    found = (numbers - zeros[..., None]) * scales.float()[..., None]
    stored = in_gptq(numbers.view(weight.shape), zeros, scales, bits=4, version=version)
    return {name: each.contiguous() for name, each in stored.items()}, found.view(weight.shape)


def compressed(stored: str, kind: str = "float", bits: int = 8, **weights: Any) -> dict[str, Any]:
    entries: dict[str, Any] = compressed_config(bits, type=kind, group_size=None) | dict(
        format=stored)
    entries["config_groups"]["group_0"]["weights"] |= weights
    entries["config_groups"]["group_0"]["input_activations"] = ROUNDED
    return entries


STATIC = compressed("float-quantized", strategy="tensor") | dict(kv_cache_scheme=ROUNDED)
NVFP4 = compressed("nvfp4-pack-quantized", bits=4, strategy="tensor_group", group_size=16)
AUTO_ROUND = dict(quant_method="auto-round", packing_format="auto_round:auto_gptq", bits=4,
                  group_size=32, sym=False, extra_config={"lm_head": dict(bits=16)})
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", config_groups=dict(
    group_0=dict(input_activations=dict(num_bits=4, group_size=16))))
MODELOPT_FP8 = dict(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme=ROUNDED)
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FP8 dynamic": (in_fp8, compressed("float-quantized", strategy="channel")),
    "FP8 static": (lambda weight: in_fp8(weight, 0, torch.float32), STATIC),
    "FP8 groups": (lambda weight: in_fp8(weight, weight.shape[1] // 64), compressed(
        "naive-quantized", strategy="group", group_size=64)),
    "W8A8": (in_int8, compressed("int-quantized", "int", strategy="channel")),
    "W8A8 zeros": (lambda weight: in_int8(weight, weight.shape[1] // 64, True), compressed(
        "int-quantized", "int", strategy="group", group_size=64, symmetric=False)),
    "NVFP4": (lambda weight: in_fp4(weight, 16), NVFP4),
    "MXFP4": (lambda weight: in_fp4(weight, 32), compressed(
        "mxfp4-pack-quantized", bits=4, strategy="group", group_size=32)),
    "ModelOpt": (lambda weight: in_fp4(weight, 16, "weight"), MODELOPT),
    "ModelOpt FP8": (lambda weight: in_fp8(weight, 0, torch.float32), MODELOPT_FP8),
    "AutoRound": (in_auto_round, AUTO_ROUND),
    "AutoRound zeros": (lambda weight: in_auto_round(weight, 2), AUTO_ROUND | dict(
        packing_format="auto_round"))}
# each weight in the next one of three forms
MIXED = ["W8A8", "FP8 groups", "NVFP4"]
MIXED_CONFIG = compressed("mixed-precision") | dict(config_groups={
    name: FORMS[name][1]["config_groups"]["group_0"] | dict(format=FORMS[name][1]["format"])
    for name in MIXED})

EXPERTS = dict(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
               decoder_sparse_step=1)
# on CPUs without AVX-512, their numbers have no packed form
WITH_TABLES = ["NVFP4", "ModelOpt"]
# they differ little from others
SLOW = ["FP8 groups", "ModelOpt FP8", "AutoRound zeros"]


def stays_packed(name: str) -> bool:
    return HAS_TABLES or name not in WITH_TABLES


@pytest.fixture
def make_scaled(make_model, tmp_path):
    """Rounds the linears of a model and its copy; the parts of a weight are in two files."""
    def made(name: str, architecture: str = "Qwen3", **changes: Any) -> tuple[Path, Any]:
        source, model = make_model(architecture, **dict(
            hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64) | changes)
        folder = shutil.copytree(source, tmp_path / "scaled")
        tensors = load_file(folder / "model.safetensors")
        state = model.state_dict()
        names = MIXED if name == "mixed" else [name]
        entries = MIXED_CONFIG if name == "mixed" else FORMS[name][1]
        for i, key in enumerate([key for key in tensors if "_proj.weight" in key]):
            parts, found = FORMS[names[i % len(names)]][0](tensors.pop(key))
            tensors |= {key.removesuffix("weight") + end: part.contiguous()
                        for end, part in parts.items()}
            if "qweight" not in parts:
                # of a KV cache, which is not rounded
                tensors[key.replace("weight", "k_scale")] = torch.ones(())
            put(state, key, found)
        (folder / "model.safetensors").unlink()
        index = {key: f"model-{1 + i % 2}.safetensors" for i, key in enumerate(sorted(tensors))}
        for file in {*index.values()}:
            save_file({key: tensors[key] for key in tensors if index[key] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        change_config(folder, quantization_config=entries)
        return folder, model
    return made


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
                                  for name in (*FORMS, "mixed")])
def test_tokens_are_those_of_the_model(make_scaled, name, caplog):
    folder, model = make_scaled(name)
    wanted = expected(model)
    assert generated(folder, kernels=False) == wanted
    assert generated(folder, model_impl="transformers") == wanted
    with LLM(folder, **OPTIONS) as llm:
        # of those that are fused, one for all; one product cannot combine FP8 and others
        count = {"mixed": 6 if HAS_TABLES else 3}.get(name, 8 if stays_packed(name) else 0)
        assert len(linears_of(llm)) == count
        layer, own = llm.engine.runner.model.layers[1], model.model.layers[1]
        assert torch.equal(layer.mlp.down_proj.weight, own.mlp.down_proj.weight)
    assert generated(folder) == wanted
    is_said = "quantization_config are left out: activations and the KV cache stay in float32" in (
        caplog.text)
    assert is_said != name.startswith("AutoRound")


@pytest.mark.parametrize("name", [
    "NVFP4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FP8 dynamic", "W8A8"))])
def test_another_family(make_scaled, name):
    """One that transformers computes."""
    folder, model = make_scaled(name, "Olmo2")
    assert generated(folder) == expected(model)
    with LLM(folder, **OPTIONS) as llm:
        linears: Any = [each for each in llm.engine.runner.model.layers.modules()
                        if isinstance(each, torch.nn.Linear)]
        parts = [each.weights for each in linears if getattr(each, "is_quantized", False)]
        assert sum(map(len, parts)) == (14 if stays_packed(name) else 0)


@pytest.mark.parametrize("name", ["NVFP4", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("FP8 dynamic", "W8A8 zeros", "MXFP4"))])
def test_experts(make_scaled, name):
    folder, model = make_scaled(name, "Qwen3Moe", **EXPERTS)
    wanted = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    assert generated(folder) == wanted
    with LLM(folder, **OPTIONS) as llm:
        linears = linears_of_experts(llm)
        assert len(linears) == 16
        are_packed = [isinstance(each, QuantizedLinear) and each.is_quantized for each in linears]
        assert are_packed == [stays_packed(name)] * 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FP8 dynamic", "W8A8", "NVFP4", "mixed"])
def test_in_bfloat16(make_scaled, name, caplog):
    """The bits of a row do not depend on the schedule, and what can stay packed does."""
    folder, model = make_scaled(name)
    compiling.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [generated(folder, **BFLOAT16 | options) for options in (
            {}, dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1))]
    assert all(each == found[0] for each in found)
    is_said = any("dequantized" in line for line in caplog.messages)
    assert is_said == (name == "mixed" or not stays_packed(name))
    with LLM(folder, **BFLOAT16) as llm:
        wanted = model.model.layers[1].mlp.down_proj.weight.bfloat16()
        assert torch.equal(llm.engine.runner.model.layers[1].mlp.down_proj.weight, wanted)


def test_only_the_cache_is_quantized(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    entries = dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=ROUNDED)
    change_config(folder, quantization_config=entries)
    assert generated(folder) == generated(tiny)


def test_outputs_that_fill_no_block():
    """Powers of two are padded with zeros, which are no such powers."""
    numbers = torch.randint(256, (96, 64), dtype=torch.uint8)
    exponents = torch.randint(110, 125, (96, 4), dtype=torch.uint8)
    found: Any = scaled(numbers, exponents, 1, torch.arange(128) // 32)
    part: Any = pack(found, torch.float32)
    rows = part.rows(torch.arange(96))
    assert torch.equal(rows, found.dequantized())


@pytest.mark.parametrize("shape", [(2, 32, 1), (2, 32), (2, 1, 1), (2,), (1,), ()], ids=str)
def test_the_matrices_of_many_experts(tmp_path, shape):
    """One scale for each output, for each matrix or for all."""
    numbers = torch.randint(-128, 128, (2, 32, 48), dtype=torch.int8)
    scales = torch.rand(shape)
    wanted = scales.reshape(*shape, *[1] * (3 - len(shape)))
    parts = dict(weight=numbers, weight_scale=scales)
    assert torch.equal(opened(tmp_path, dict(quant_method="fp8"), parts).read(), numbers * wanted)


def test_transposed_experts(tmp_path):
    """(experts, inputs, outputs), as transformers writes Llama 4."""
    numbers, scales = torch.randn(2, 32, 48).to(torch.float8_e4m3fn), torch.rand(2, 1, 48)
    parts = dict(weight=numbers, weight_scale=scales)
    found = opened(tmp_path, dict(quant_method="fp8"), parts).read()
    assert torch.equal(found, numbers.float() * scales)


def test_blocks_in_four_dimensions(tmp_path):
    numbers, scales = torch.ones(64, 96).to(torch.float8_e4m3fn), torch.rand(2, 1, 3, 1)
    found = opened(tmp_path, dict(quant_method="modelopt", weight_block_size=[32, 32]),
                   dict(weight=numbers, weight_scale=scales)).read()
    wanted = scales[:, 0, :, 0].repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp4"])
def test_act_order(tmp_path, kind):
    """The files say to which group an input belongs."""
    weight = torch.randn(32, 64)
    parts, _ = {"int8": lambda: in_int8(weight, 4), "fp8": lambda: in_fp8(weight, 4),
                "fp4": lambda: in_fp4(weight, 16)}[kind]()
    order = torch.randperm(64)
    groups = torch.arange(4).repeat_interleave(16)[order]
    entries = dict(quant_method="compressed-tensors", group_size=16)
    plain: Any = opened(tmp_path, entries, parts).load()
    found: Any = opened(tmp_path, entries, parts | dict(weight_g_idx=groups.int())).load()
    wanted = plain._replace(scales=torch.ones_like(plain.scales)).dequantized()
    assert torch.equal(found.dequantized(), wanted * plain.scales.float()[:, groups])
    assert pack(found, torch.float32) is None


@pytest.mark.parametrize("where", [[], ["quantized_layers", "own"]], ids=str)
def test_blocks_of_modelopt_at_the_edge(tmp_path, where):
    """They have 128 rows and columns, even if blocks of the same size would fit."""
    entries = dict(quant_algo="fp8_pb_wo")
    for name in reversed(where):
        entries = {name: entries}
    numbers, scales = torch.ones(192, 320).to(torch.float8_e4m3fn), torch.rand(2, 1, 3, 1)
    found = opened(tmp_path, entries | dict(quant_method="modelopt"),
                   dict(weight=numbers, weight_scale=scales)).read()
    wanted = scales[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(found, wanted[:192, :320])


def test_a_type_without_scales_is_refused():
    with pytest.raises(ValueError, match="dtype of a weight with scales=torch.bfloat16 .* must be"):
        scaled(torch.ones(32, 64).bfloat16(), torch.ones(1, 1), 32, torch.zeros(64))


def test_a_weight_without_its_scale_is_refused(make_scaled):
    folder, _ = make_scaled("FP8 dynamic")
    for file in folder.glob("*.safetensors"):
        tensors = {name.replace("v_proj.weight_scale", "v_proj.scale_of_weight"): each
                   for name, each in load_file(file).items()}
        save_file(tensors, file)
    for model_impl in ("native", "transformers"):
        with pytest.raises(ValueError, match=r"v_proj.weight='F8_E4M3' .* its scale, .*_scale"):
            LLM(folder, model_impl=model_impl, **OPTIONS)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("name, end, value, message", [
    ("W8A8", "weight_scale", None, "v_proj.weight='I8' .* must be beside its scale"),
    ("NVFP4", "weight_global_scale", None, "v_proj.weight in .*: it lacks .*_global_scale"),
    ("ModelOpt", "weight_scale_2", None, "v_proj.weight in .*: it lacks .*weight_scale_2"),
    ("NVFP4", "weight_global_scale", torch.zeros(1), "global_scale=.* all scales are finite"),
    ("W8A8", "weight_scale", torch.ones(5),
     r"v_proj.weight in .*weight_scale in .*='F32 .5.' .* or F32 of shape .128, 1.")])
def test_damaged_scales(make_scaled, model_impl, name, end, value, message):
    folder, _ = make_scaled(name)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        key = f"model.layers.1.self_attn.v_proj.{end}"
        if tensors.pop(key, None) is not None and value is not None:
            tensors[key] = value
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        LLM(folder, model_impl=model_impl, **OPTIONS)


def test_a_truncated_file_is_named(make_scaled):
    folder, _ = make_scaled("W8A8")
    file = folder / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model-2.safetensors: .*incomplete"):
        LLM(folder, **OPTIONS)


def test_a_folder_of_modelopt_of_2024_is_refused(make_scaled):
    """What it says about its weights is in a file beside config.json."""
    folder, _ = make_scaled("ModelOpt FP8")
    change_config(folder, quantization_config=None)
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match="hf_quant_config.json: .* are not read: .*GGUF, AWQ or"):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("architecture, module", [("Olmo2", "mlp"), ("Qwen3Moe", "mlp.experts.3")])
def test_what_changes_a_weight_is_never_dropped(make_scaled, architecture, module, kernels):
    """Such as the scales of inputs that SmoothQuant and AWQ of ModelOpt have."""
    folder, _ = make_scaled("W8A8", architecture, **EXPERTS if "experts" in module else {})
    file = folder / "model-1.safetensors"
    name = f"model.layers.0.{module}.up_proj.pre_quant_scale"
    save_file(load_file(file) | {name: torch.ones(128)}, file)
    with pytest.raises(ValueError, match=f"{name} is not known"):
        LLM(folder, kernels=kernels, **OPTIONS)


def test_modules_that_the_model_does_not_have(make_scaled, caplog):
    """Such as layers that guess further tokens, and those for images: a line names them."""
    folder, model = make_scaled("W8A8", "Olmo2")
    file = folder / "model-1.safetensors"
    parts, _ = in_int8(torch.randn(128, 128))
    tensors = {f"model.layers.9.up_proj.{end}": each.contiguous() for end, each in parts.items()}
    tensors["model.layers.9.up_proj.pre_quant_scale"] = torch.ones(128)
    save_file(load_file(file) | tensors, file)
    assert generated(folder) == expected(model)
    assert "transformers does not use ['model.layers.9.up_proj.pre_quant_scale'" in caplog.text


@pytest.mark.parametrize("name, is_dropped", [
    ("self_attn.k_proj.input_scale", True), ("self_attn.k_scale", True), ("attn.kv_scale", True),
    ("experts.gate_up_proj_input_scale", True), ("self_attn.prob_output_scale", True),
    ("q_proj.input_global_scale", True),
    ("altup.correct_output_scale", False), ("moe.block_scale", False), ("conv_scale", False)])
def test_scales_that_do_not_belong_to_a_weight(tmp_path, name, is_dropped):
    save_file({name: torch.ones(2)}, file := tmp_path / "model.safetensors")
    assert (name not in open_scaled(Index([file]), {}, file)) == is_dropped


@pytest.mark.parametrize("numbers", [
    torch.ones(2, 8, 16).to(torch.int8), torch.ones(8, 16).to(torch.float8_e4m3fn),
    torch.ones(8, 16).to(torch.uint8)], ids=str)
def test_zeros_that_are_refused(numbers):
    """Those of experts in one tensor, and of numbers in floating point."""
    ones = torch.ones(*numbers.shape[:-1], 1)
    with pytest.raises(ValueError, match="zeros=.* it must be a matrix in torch.int8 or"):
        scaled(numbers, ones, 1, torch.zeros(16), ones.to(torch.int8))


@pytest.mark.parametrize("name", FORMS)
def test_damaged_parts(tmp_path, name):
    make, entries = FORMS[name]
    parts, wanted = make(torch.randn(160, 128))
    assert torch.equal(opened(tmp_path, entries, parts).read(), wanted)
    kept = ("weight", "weight_packed", "qweight", "input_scale")
    check_damages(tmp_path, entries, parts, [each for each in parts if each not in kept])


@pytest.mark.parametrize("entries, accepted", [
    (dict(quant_method="fp8"), [(), (1,), (1, 1), (64, 1), (64,)]),
    (dict(quant_method="fp8", weight_block_size=[32, 48]), [(2, 3)]),
    (dict(quant_method="modelopt", quant_algo="FP8"), [(), (1,)]),
    (dict(quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), [(64,), (64, 1)]),
    (dict(quant_method="modelopt", quantized_layers=dict(
        a=dict(quant_algo="FP8"), b=dict(quant_algo="MXFP8"))), [(), (64, 4)]),
    (compressed("float-quantized", strategy="tensor"), [(), (1,)]),
    (compressed("float-quantized", strategy="channel"), [(64, 1)]),
    (compressed("float-quantized", strategy="block", block_structure="48x64"), [(2, 2)]),
    (MIXED_CONFIG, [(64, 1), (64, 2), (64, 8)])], ids=str)
def test_shapes_of_scales(tmp_path, entries, accepted):
    """Those that the config names, and no others."""
    numbers = torch.ones(64, 128).to(torch.float8_e4m3fn)
    shapes = {(), (1,), (64,), (64, 1), (64, 2), (64, 4), (64, 8), (2, 3), (2, 2), (1, 128), (2, 1)}
    for shape in shapes.union(accepted):
        stored = opened(tmp_path, entries, dict(weight=numbers, weight_scale=torch.rand(shape)))
        if [*filter((1).__ne__, shape)] in [[*filter((1).__ne__, each)] for each in accepted]:
            assert stored.read().shape == (64, 128)
        else:
            with pytest.raises(ValueError, match="weight_scale in .* is not accepted"):
                stored.read()


@pytest.mark.parametrize("entries, left_out", [
    # as GPTQModel 7 writes it
    (dict(quant_method="gptq", bits=4, rotation=None, activation=dict(mode="w4afp8")),
     {"activation"}),
    (compressed("float-quantized") | dict(config_groups={
        "group_0": compressed("float-quantized")["config_groups"]["group_0"],
        "group_1": dict(targets=["LlamaAttention"], weights=None, input_activations=ROUNDED)}),
     {"input_activations"}),
    (dict(quant_method="modelopt", quant_algo="fp8_pb_wo"), set()),
    (dict(quant_method="fp8", fmt="float8_e4m3fn"), set()),
    (dict(quant_method="modelopt", quant_algo="NVFP4"), {"quant_algo"}),
    ({name: value for name, value in AUTO_ROUND.items() if name != "packing_format"}, set())],
    ids=str)
def test_entries_that_are_accepted(entries, left_out):
    methods.check(entries)
    assert methods.left_out(entries) == left_out


@pytest.mark.parametrize("changes, message", [
    (dict(data_type="mx_fp"), "data_type"), (dict(act_bits=8), "act_bits"),
    (dict(extra_config={"lm_head": dict(bits=4, act_bits=8)}), "lm_head.*act_bits")])
def test_entries_of_auto_round_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        methods.check(AUTO_ROUND | changes)


@pytest.mark.parametrize("stored, weights, symmetric", [
    ("float-quantized", dict(num_bits=8, type="float", strategy="channel"), True),
    ("float-quantized", dict(num_bits=8, type="float", strategy="block",
                             block_structure=[40, 96]), True),
    ("int-quantized", dict(num_bits=8, strategy="channel"), True),
    ("int-quantized", dict(num_bits=8, strategy="group", group_size=64), False),
    ("nvfp4-pack-quantized", dict(num_bits=4, type="float", strategy="tensor_group",
                                  group_size=16), True),
    ("mxfp4-pack-quantized", dict(num_bits=4, type="float", strategy="group",
                                  group_size=32), True)], ids=str)
def test_compressed_tensors_by_its_package(tmp_path, stored, weights, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], format=stored, weights=QuantizationArgs(
        symmetric=symmetric, **weights))
    rows, columns = weights.get("block_structure") or (
        1, weights.get("group_size") or 256)
    counts = -(-96 // rows), -(-256 // columns)
    given = {"weight": torch.randn(96, 256) * 0.05, "weight_scale": torch.rand(counts) / 900}
    if not symmetric:
        given["weight_zero_point"] = torch.randint(-50, 50, counts, dtype=torch.int8)
    if weights["num_bits"] == 4:
        given["weight_scale"] = torch.rand(counts) + 1
    if columns == 16:
        given["weight_global_scale"] = torch.rand(1) + 50
    kind = BaseCompressor.get_value_from_registry(stored)
    tensors = kind.compress(given, scheme)
    file = tmp_path / "model.safetensors"
    save_file({f"own.{name}": each.contiguous() for name, each in tensors.items()}, file)
    entries = dict(config_groups=dict(group_0=dict(weights=weights)))
    found = open_scaled(Index([file]), entries, file)["own.weight"].read()
    wanted = kind.decompress(tensors, scheme)["weight"]
    assert torch.equal(found.to(wanted.dtype), wanted)
