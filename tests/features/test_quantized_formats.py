"""Quantized models in safetensors: for each format of formats.py, weights to the bit, tokens as
transformers generates them with these weights, what stays packed, and what is refused."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import changed, check_refused, slow, token_ids
from formats import (
    AUTO_ROUND, AWQ, BFLOAT16, EXPERTS, FORMATS, FP8, GPTQ, GREEDY, INT8, OPTIONS, PROMPTS, ROUNDED,
    SCHEDULES, Parts, change, change_config, check_damages, check_packed, check_weights, compressed,
    expected, experts_of, generated, in_fp4, in_fp8, in_gptq, in_int8, in_words, num_packed, opened,
    rounding)
from formats import make_quantized as make_quantized
from safetensors.torch import save_file
from torch import Tensor

from nanoengine import LLM
from nanoengine_extras.cpu import compiling
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.quantized import choose_opener, methods
from nanoengine_extras.models.quantized.loading import pack


# They differ little from others: the fast tests read single weights, and load no model.
SLOW = ["awq symmetric", "awq uneven", "awq one group", "gptq uneven", "gptq v2 by format",
        "gptq 2", "gptq 3", "gptq 3 v2", "gptq 3 act-order", "fp4", "MLX 3", "FP8 uneven",
        "W8A8 zeros", "AutoRound v2", "AutoRound 3", "w8a16", "w8a16 channel", "w4a16 uneven",
        "MLX 2", "MLX 5", "MLX 6", "FP8 one scale", "FP8 static", "FP8 groups", "nf4 not nested",
        "ModelOpt", "ModelOpt FP8"]
DOWN = "model.layers.1.mlp.down_proj."
# what a line says of formats that have no packed form
NOT_PACKED = (
    "quantized weights of some matrices are dequantized when they are loaded, since kernels "
    "support no act-order and no scales of more than 15 bits, and need AVX-512 for NF4, groups "
    "of 16, 32, 64 or 128 inputs, or of multiples of these, and rows of at most 64 KiB in the "
    "model's dtype")


# ------------------------------------------------------------------------------- every format


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in FORMATS])
def test_weights_and_tokens(make_quantized, caplog, name):
    """Dequantized, packed, and in transformers' code; in a batch, and in chunks."""
    form = FORMATS[name]
    folder, model = make_quantized(name)
    wanted = expected(model)
    for dtype in ("bfloat16", "float32"):
        with LLM(folder, kernels=False, **OPTIONS | dict(dtype=dtype)) as llm:
            check_weights(llm, model)
            found = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert found == wanted
    assert generated(folder, model_impl="transformers") == wanted
    compiling.warn_once.cache_clear()
    caplog.clear()
    with LLM(folder, **OPTIONS | dict(max_num_batched_tokens=24, max_num_seqs=2)) as llm:
        assert num_packed(llm) == num_matrices(name) + form.are_all * form.is_packed
        check_packed(llm.engine.runner.model.layers, model.model.layers)
        assert llm.engine.runner.is_invariant
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
    said = "are left out: activations and the KV cache stay in float32"
    assert (said in caplog.text) == bool(form.left_out)
    assert f"{form.left_out} of the model's quantization_config" in caplog.text or not form.left_out
    assert caplog.messages.count(NOT_PACKED) == (not form.is_packed)
    # one product cannot combine FP8 and others
    assert ("dequantized" in caplog.text) == (name == "mixed" or not form.is_packed)


def num_matrices(name: str, count: int = 14) -> int:
    """How many of the matrices of a model are packed."""
    mixed = 9 if HAS_TABLES else 3
    return mixed if name == "mixed" else count * FORMATS[name].is_packed


@pytest.mark.parametrize("name, architecture", [
    ("awq", "Mistral"), ("awq", "Qwen2"), ("awq", "Qwen3"), ("FP8", "Qwen3"), ("NVFP4", "Olmo2"),
    slow("FP8 dynamic", "Olmo2"), slow("W8A8", "Olmo2"), ("nf4", "Olmo2"), ("LLM.int8", "Olmo2")])
def test_other_families(make_quantized, name, architecture):
    """Olmo2 is one that transformers computes."""
    folder, model = make_quantized(name, architecture)
    with LLM(folder, **OPTIONS) as llm:
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)
        assert num_packed(llm) == num_matrices(name)


def in_switches(tensors: Parts) -> Parts:
    """As MLX: one tensor for all experts of a layer, with the same names in all families."""
    usual = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts: dict[str, list[Tensor]] = defaultdict(list)
    for name in sorted(tensors):
        if found := re.fullmatch(r"(.*)\.experts\.\d\.(\w+)\.(\w+)", name):
            own = usual.get(found[2], found[2])
            experts[f"{found[1]}.switch_mlp.{own}.{found[3]}"].append(tensors.pop(name))
    return tensors | {name: torch.stack(each) for name, each in experts.items()}


@pytest.mark.parametrize("name, architecture, options", [
    ("FP8", "Qwen3Moe", {}), ("NVFP4", "Qwen3Moe", {}),
    *(slow(name, "Qwen3Moe", {}) for name in ("FP8 dynamic", "W8A8 zeros", "MXFP4")),
    # routers are quantized, too
    ("MLX 4", "Qwen3Moe", dict(renamed=in_switches)),
    ("MLX 4", "Mixtral", dict(renamed=in_switches, intermediate_size=64))])
def test_experts(make_quantized, name, architecture, options):
    folder, model = make_quantized(name, architecture, **EXPERTS | options)
    with LLM(folder, **OPTIONS) as llm:
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)
        linears, calls = experts_of(llm)
        assert [getattr(each, "is_quantized", False) for each in linears] == (
            [FORMATS[name].is_packed] * 16)
        assert None not in calls


@pytest.mark.parametrize("name, options", [
    ("FP8", {}), ("nf4", {}), ("MLX 8", {}), ("MLX 4", dict(kernels=False)),
    *(slow(name, {}) for name in ("FP8 dynamic", "W8A8", "NVFP4", "mixed"))])
def test_in_bfloat16(make_quantized, caplog, name, options):
    """The bits of a row do not depend on the schedule, and what can stay packed does."""
    folder, model = make_quantized(name)
    compiling.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [generated(folder, **BFLOAT16 | options | each) for each in SCHEDULES]
    assert all(each == found[0] for each in found)
    is_whole = FORMATS[name].is_packed and name != "mixed" and not options
    assert any("dequantized" in line for line in caplog.messages) != is_whole
    with LLM(folder, **BFLOAT16 | options) as llm:
        check_packed(llm.engine.runner.model.layers, model.model.layers)


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_parts(tmp_path, name):
    form = FORMATS[name]
    parts, wanted = form.make(torch.randn(224, 256))
    assert torch.equal(opened(tmp_path, form.entries, parts).read(), wanted)
    numbers = re.compile("weight|weight_packed|qweight|input_scale|k_scale|.*quant_state.*")
    check_damages(tmp_path, form.entries, parts,
                  [each for each in parts if not numbers.fullmatch(each)])
    for end in {"g_idx", "weight_g_idx"}.intersection(parts):
        # the tool has filled only some; no input has a group; there is no such group
        first = parts[end] == 0
        for place, group in ((5, -1), (first, 1), (first, -1), (first, 2**30)):
            order = parts[end].clone()
            order[place] = group
            with pytest.raises(ValueError, match="g_idx=.* with no group left out"):
                opened(tmp_path, form.entries, parts | {end: order}).read()


def one_less(part: Tensor) -> Tensor:
    return part[:-1]


FITTING = "down_proj"


# `test_damaged_parts` has all other parts of a size that does not fit
@pytest.mark.parametrize("options", [
    {}, dict(model_impl="transformers"), slow(dict(kernels=False))], ids=str)
@pytest.mark.parametrize("name, end, value, message", [
    ("awq", "qweight", one_less, FITTING), ("awq", "scales", one_less, FITTING),
    ("gptq 4", "qweight", one_less, FITTING), ("w4a16", "weight_packed", one_less, FITTING),
    ("awq", "qzeros", None, "down_proj.qzeros"),
    ("nf4", "weight.nested_absmax", None, "1.mlp.down_proj"),
    ("LLM.int8", "SCB", None, "down_proj.weight in .*SCB"),
    ("LLM.int8", "weight_format", torch.tensor(2), "down_proj.weight_format=2 .* must be 0"),
    ("MLX 4", "biases", None, r"lacks .*down_proj\.biases"),
    ("FP8 dynamic", "weight_scale", None, "weight='F8_E4M3' .* must be beside its scale, .*_scale"),
    ("W8A8", "weight_scale", None, "weight='I8' .* must be beside its scale"),
    ("W8A8", "weight_scale", torch.ones(5),
     r"_proj.weight in .*weight_scale in .*='F32 .5.' .* or F32 of shape .256, 1."),
    ("NVFP4", "weight_global_scale", None, r"_proj.weight in .*: it lacks .*_global_scale"),
    ("ModelOpt", "weight_scale_2", None, r"_proj.weight in .*: it lacks .*weight_scale_2"),
    ("NVFP4", "weight_global_scale", torch.zeros(1), "global_scale=.* all scales are finite")])
def test_files_that_are_refused(make_quantized, name, end, value, message, options):
    """A part of a weight is missing, or does not fit the others."""
    folder, _ = make_quantized(name)

    def spoil(tensors: dict[str, Any]) -> None:
        part = tensors.pop(DOWN + end, None)
        if part is not None and value is not None:
            tensors[DOWN + end] = value(part) if value is one_less else value

    change(folder, spoil)
    # transformers tells the shape of a whole weight
    is_named = value is one_less and "model_impl" not in options
    check_refused(r"\.safetensors: .*" * is_named + message, LLM, folder, **OPTIONS | options)


@pytest.mark.parametrize("name, size, message", [
    ("awq", dict(group_size=48), "of shape .6, 256."),
    ("gptq 4", dict(group_size=128), "of shape .2, 256."),
    ("w4a16", dict(group_size=64), "of shape .256, 4."),
    ("FP8", dict(weight_block_size=[7, 7]), "='F32 .[48], 8.' .* of shape .(19|37), 37.")])
def test_groups_of_another_size(make_quantized, name, size, message):
    """A size that contradicts the files is refused, even if all groups could be equal."""
    folder, _ = make_quantized(name)
    entries = FORMATS[name].entries | size
    if name == "w4a16":
        entries = compressed(**size)
    change_config(folder, quantization_config=entries)
    for model_impl in ("native", "transformers"):
        check_refused(f"scale.* in {folder}.*{message}",
                      LLM, folder, model_impl=model_impl, **OPTIONS)


# ------------------------------------------------------------------------------- whole models


# GPTQModel's `dynamic` changes some modules: their bits and groups show in the files
OF_8_BITS = dict(entries=GPTQ | dict(dynamic={"+:.*down.*": dict(bits=8, group_size=80)}),
                 forms={f"{DOWN}weight": "gptq dynamic"})
# modules_to_not_convert, dynamic: the names of tensors say which are quantized
LEFT_OUT = dict(modules_to_not_convert=["1.mlp.down_proj"], dynamic={r"-:.*\.1\..*down_proj": {}})


def is_not_left_out(name: str, weight: Tensor) -> bool:
    return name.endswith("_proj.weight") and not name.startswith(DOWN)


# MLX names modules that differ; False: not quantized. This config has it in both places
DIFFERENT = dict(bits=4, group_size=32) | {
    "model.layers.1.mlp.down_proj": dict(bits=8, group_size=64),
    "lm_head": dict(bits=6, group_size=32), "model.embed_tokens": False}


@pytest.mark.parametrize("name, options, more", [
    ("gptq 4", OF_8_BITS, {}),
    *((name, dict(entries=FORMATS[name].entries | LEFT_OUT, is_chosen=is_not_left_out), {})
      for name in ("awq", "gptq 4")),
    ("MLX 4", dict(
        entries=DIFFERENT, forms={f"{DOWN}weight": "MLX 8", "lm_head.weight": "MLX 6"},
        is_chosen=lambda name, weight: weight.ndim == 2 and "embed" not in name),
     dict(quantization=DIFFERENT)),
    # compressed-tensors begins with -1 for all inputs: their groups are neighbours
    ("w4a16", dict(renamed=lambda tensors: tensors | {
        name.replace("packed", "g_idx"): torch.full((256,), -1)
        for name in tensors if name.endswith("weight_packed")}), {}),
    # MLX has the channels of a convolution last
    ("MLX 4", dict(
        source="gemma3 images", is_chosen=lambda name, weight: (
            weight.ndim == 2 and "language" in name),
        renamed=lambda tensors: {name: each.movedim(1, -1) if each.ndim == 4 else each
                                 for name, each in tensors.items()}), {}),
    # AutoGPTQ writes biases of zeros for all linears
    *((name, dict(renamed=lambda tensors: tensors | {
        f"model.layers.1.{module}.bias": torch.zeros(256).half()
        for module in ("self_attn.q_proj", "mlp.down_proj")}), {})
      for name in ("gptq 4", "w4a16"))])
def test_models_that_differ(make_quantized, folder_of, name, options, more):
    """With any default device: it is neither that of shapes in files, nor of biases."""
    if "source" in options:
        options = options | dict(source=folder_of(options["source"]))
    folder, model = make_quantized(name, **options)
    change_config(folder, **more)
    right = expected(model)
    with torch.device("meta"):
        assert generated(folder) == right
    assert generated(folder, kernels=False) == right


def test_biases_of_a_model_without_biases(make_quantized):
    """Other numbers than zeros would change what is computed."""
    folder, _ = make_quantized("gptq 4", renamed=lambda tensors: (
        tensors | {DOWN + "bias": torch.ones(256).half()}))
    check_refused("layers.1.mlp.down_proj.bias", LLM, folder, **OPTIONS)


def test_blocks_that_go_on_in_the_next_row(make_quantized, caplog):
    """Such weights have no packed form, and the log says so."""
    folder, model = make_quantized("nf4", intermediate_size=160)
    compiling.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert generated(folder) == expected(model)
    assert "some matrices are dequantized" in caplog.text


def test_one_matrix_is_head_and_embedding(make_quantized):
    folder, model = make_quantized("MLX 4", tie_word_embeddings=True)
    with LLM(folder, **BFLOAT16) as llm:
        assert llm.engine.runner.model.lm_head.is_quantized and num_packed(llm) == 15
    assert generated(folder) == expected(model)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("architecture, module", [("Olmo2", "mlp"), ("Qwen3Moe", "mlp.experts.3")])
def test_what_changes_a_weight_is_never_dropped(make_quantized, architecture, module, kernels):
    """Such as the scales of inputs that SmoothQuant and AWQ of ModelOpt have."""
    name = f"model.layers.0.{module}.up_proj.pre_quant_scale"
    changes = EXPERTS if "experts" in module else {}
    folder, _ = make_quantized("W8A8", architecture, **changes, renamed=lambda tensors: (
        tensors | {name: torch.ones(128)}))
    check_refused(f"{name} is not known", LLM, folder, kernels=kernels, **OPTIONS)


def test_modules_that_the_model_does_not_have(make_quantized, caplog):
    """Such as layers that guess further tokens, and those for images: a line names them."""
    parts, _ = in_int8(torch.randn(128, 128))
    parts["pre_quant_scale"] = torch.ones(128)
    folder, model = make_quantized("W8A8", "Olmo2", renamed=lambda tensors: tensors | {
        f"model.layers.9.up_proj.{end}": each for end, each in parts.items()})
    assert generated(folder) == expected(model)
    assert "transformers does not use ['model.layers.9.up_proj.pre_quant_scale'" in caplog.text


def test_only_the_cache_is_quantized(tiny, tmp_path):
    entries = dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=ROUNDED)
    assert generated(changed(tiny, tmp_path, quantization_config=entries)) == generated(tiny)


def test_a_truncated_file_is_named(make_quantized):
    folder, _ = make_quantized("W8A8")
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    check_refused("model-1.safetensors: .*incomplete", LLM, folder, **OPTIONS)


# -------------------------------------------------------------------------------- one weight

Odd = tuple[str, dict[str, Any], Parts, Tensor]


def odd_weights() -> Iterator[Odd]:
    """A name, entries, the tensors of a weight, and what they stand for."""
    torch.manual_seed(0)
    fp8 = torch.float8_e4m3fn
    one = dict(quant_method="fp8")
    # of the matrices of many experts: a scale for each output, for each matrix or for all
    numbers = torch.randint(-128, 128, (2, 32, 48))
    for shape in [(2, 32, 1), (2, 32), (2, 1, 1), (2,), (1,), ()]:
        scales = torch.rand(shape)
        each = scales.reshape(*shape, *[1] * (3 - len(shape)))
        for dtype in (torch.int8, fp8):
            stored = numbers.to(dtype)
            parts = dict(weight=stored, weight_scale=scales)
            yield f"experts {dtype} {shape}", one, parts, stored.float() * each
    # (experts, inputs, outputs), as transformers writes Llama 4
    scales = torch.rand(2, 1, 48)
    parts = dict(weight=numbers.to(fp8), weight_scale=scales)
    yield "transposed experts", one, parts, numbers.to(fp8).float() * scales
    # ModelOpt's blocks have 128 rows and columns, even if blocks of the same size would fit
    sizes = dict(quant_algo="fp8_pb_wo")
    scales = torch.rand(2, 1, 3, 1)
    for entries, size, shape in [
            (sizes, 128, (192, 320)), (dict(quantized_layers=dict(own=sizes)), 128, (192, 320)),
            (dict(weight_block_size=[32, 32]), 32, (64, 96))]:
        each = scales[:, 0, :, 0].repeat_interleave(size, 0).repeat_interleave(size, 1)
        parts = dict(weight=torch.ones(shape).to(fp8), weight_scale=scales)
        yield f"blocks {entries}", entries | dict(quant_method="modelopt"), parts, (
            each[:shape[0], :shape[1]])
    # as AutoRound writes it, also beside the same block
    for entries in (dict(weight_block_size=[32, 64]), {}):
        entries = one | entries | dict(group_size=[32, 64])
        yield f"groups {entries}", entries, *in_fp8(torch.randn(80, 160), 32, 64)
    for exponents in (torch.tensor([[127, 128]], dtype=torch.uint8),
                      torch.tensor([[1.0, 2.0]]).to(torch.float8_e8m0fnu)):
        parts = dict(weight=torch.ones(64, 64).to(fp8), weight_scale_inv=exponents)
        yield f"exponents {exponents.dtype}", one | dict(weight_block_size=[64, 32]), parts, (
            torch.tensor([1.0, 2.0]).repeat_interleave(32).expand(64, 64))
    # GPTQModel fills the last word of zeros with unused bits
    for bits, outputs in [(4, 12), (4, 1), (2, 8), (3, 16), (3, 48), (8, 6)]:
        yield f"{outputs} outputs of {bits} bits", GPTQ | dict(bits=bits), *in_gptq(
            torch.empty(outputs, 96), bits)
    # zeros of compressed-tensors that are not packed, of symmetric weights, too; and one scale
    for bits in (4, 8):
        numbers = torch.randint(2**bits, (8, 64))
        parts = dict(weight_packed=in_words(numbers, bits), weight_shape=torch.tensor([8, 64]))
        numbers -= 2 ** (bits - 1)
        for most in (2 ** (bits - 1), 1):
            zeros = torch.randint(1 - most, most, (8, 2)).to(torch.int8)
            yield f"zeros of {bits} bits to {most}", compressed(bits, group_size=32), parts | dict(
                weight_zero_point=zeros, weight_scale=torch.ones(8, 2)), (
                    numbers - zeros.repeat_interleave(32, 1)).float()
        yield f"one scale for {bits} bits", compressed(bits, strategy="tensor"), parts | dict(
            weight_scale=torch.tensor([0.5])), numbers * 0.5


@pytest.mark.parametrize("name, entries, parts, wanted", [
    pytest.param(*each, id=each[0]) for each in odd_weights()])
def test_odd_weights(tmp_path, name, entries, parts, wanted):
    assert torch.equal(opened(tmp_path, entries, parts).read(), wanted)
    if "exponents" in name:
        check_damages(tmp_path, entries, parts, ["weight_scale_inv"])


@pytest.mark.parametrize("make", [
    partial(in_int8, columns=16), partial(in_fp8, columns=16), partial(in_fp4, size=16)])
def test_act_order(tmp_path, make):
    """The files say to which group an input belongs."""
    parts, _ = make(torch.randn(32, 64))
    groups = torch.arange(4).repeat_interleave(16)[torch.randperm(64)]
    entries = dict(quant_method="compressed-tensors", group_size=16)
    plain: Any = opened(tmp_path, entries, parts).load()
    found: Any = opened(tmp_path, entries, parts | dict(weight_g_idx=groups.int())).load()
    wanted = plain._replace(scales=torch.ones_like(plain.scales)).dequantized()
    assert torch.equal(found.dequantized(), wanted * plain.scales.float()[:, groups])
    assert pack(found, torch.float32) is None


def test_outputs_that_fill_no_block(tmp_path):
    """Powers of two are padded with zeros, which are no such powers."""
    parts, wanted = in_fp4(torch.randn(96, 128), 32)
    found: Any = opened(tmp_path, FORMATS["MXFP4"].entries, parts).load()
    part: Any = pack(found, torch.float32)
    assert torch.equal(part.rows(torch.arange(96)), wanted)


ONE_SCALE = dict(quant_method="fp8")
MLX = dict(quant_method="mlx", bits=4, group_size=32)
OF_MLX = dict(weight=torch.ones(64, 16).int(), scales=torch.ones(64, 4), biases=torch.ones(64, 4))


@pytest.mark.parametrize("entries, parts, message", [
    (AWQ, dict(qweight=torch.ones(256, 8).long()),
     "qweight in .*='I64' is not accepted: it must be of type"),
    (MLX, OF_MLX, "own.weight in .*I32 .* is not accepted: it must be U32"),
    (MLX, dict(weight=OF_MLX["weight"].view(torch.uint32)),
     r"own.weight in .*'U32' is not accepted.*own\.scales"),
    # 128 inputs have two groups of 80, or of 96
    (GPTQ | dict(group_size=96, dynamic={"+:other": dict(group_size=80)}),
     in_gptq(torch.empty(8, 128), group=80)[0], "whose groups of 128 inputs differ in their numb"),
    *((ONE_SCALE, dict(weight=torch.ones(8, 16).to(dtype), weight_scale=torch.ones(1)),
       f"dtype of a weight with scales={dtype} .* must be one of .torch.float8_e4m3fn")
      for dtype in (torch.bfloat16, torch.float8_e5m2)),
    (FP8, dict(weight=torch.ones(32, 64).to(torch.float8_e4m3fn), weight_scale_inv=torch.tensor(
        [[127, 255]], dtype=torch.uint8)), "inf or nan"),
    # zeros of experts in one tensor, and of numbers in floating point
    *((ONE_SCALE, dict(weight=weight, weight_scale=scale, weight_zero_point=torch.ones(
        scale.shape).to(torch.int8)), "zeros=.* it must be a matrix in torch.int8 or")
      for weight, scale in [
          (torch.ones(2, 8, 16).to(torch.int8), torch.ones(2, 8, 1)),
          (torch.ones(8, 16).to(torch.float8_e4m3fn), torch.ones(8, 1)),
          (torch.ones(8, 16).to(torch.uint8), torch.full((8, 1), 127, dtype=torch.uint8))])])
def test_weights_that_are_refused(tmp_path, entries, parts, message):
    check_refused(message, lambda: opened(tmp_path, entries, parts).read())


@pytest.mark.parametrize("entries, accepted", [
    (ONE_SCALE, [(), (1,), (1, 1), (64, 1), (64,)]),
    (dict(quant_method="fp8", weight_block_size=[32, 48]), [(2, 3)]),
    (dict(quant_method="modelopt", quant_algo="FP8"), [(), (1,)]),
    (dict(quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), [(64,), (64, 1)]),
    (dict(quant_method="modelopt", quantized_layers=dict(
        a=dict(quant_algo="FP8"), b=dict(quant_algo="MXFP8"))), [(), (64, 4)]),
    (rounding("float-quantized", strategy="tensor"), [(), (1,)]),
    (rounding("float-quantized", strategy="channel"), [(64, 1)]),
    (rounding("float-quantized", strategy="block", block_structure="48x64"), [(2, 2)]),
    (FORMATS["mixed"].entries, [(64, 1), (64, 2), (64, 8)])], ids=str)
def test_shapes_of_scales(tmp_path, entries, accepted):
    """Those that the config names, and no others."""
    numbers = torch.ones(64, 128).to(torch.float8_e4m3fn)
    shapes = {(), (1,), (64,), (64, 1), (64, 2), (64, 4), (64, 8), (2, 3), (2, 2), (1, 128), (2, 1)}
    for shape in shapes.union(accepted):
        stored = opened(tmp_path, entries, dict(weight=numbers, weight_scale=torch.rand(shape)))
        if [*filter((1).__ne__, shape)] in [[*filter((1).__ne__, each)] for each in accepted]:
            assert stored.read().shape == (64, 128)
        else:
            check_refused("weight_scale in .* is not accepted", stored.read)


@pytest.mark.parametrize("name, is_dropped", [
    ("self_attn.k_proj.input_scale", True), ("self_attn.k_scale", True), ("attn.kv_scale", True),
    ("experts.gate_up_proj_input_scale", True), ("self_attn.prob_output_scale", True),
    ("q_proj.input_global_scale", True),
    ("altup.correct_output_scale", False), ("moe.block_scale", False), ("conv_scale", False)])
def test_scales_that_do_not_belong_to_a_weight(tmp_path, name, is_dropped):
    save_file({name: torch.ones(2)}, file := tmp_path / "model.safetensors")
    assert (name not in choose_opener("fp8", {}, tmp_path)(file)) == is_dropped


def test_names_of_other_tensors(make_quantized):
    """Parts of weights are left out."""
    folder, model = make_quantized("nf4")
    opener = choose_opener("bitsandbytes", {}, folder)
    found = [name for file in folder.glob("*.safetensors") for name in opener(file)]
    assert sorted(found) == sorted(model.state_dict())


@pytest.mark.parametrize("stored, weights, inputs", [
    *(("pack-quantized", dict(num_bits=bits, strategy="group", group_size=inputs // 4,
                              symmetric=symmetric), inputs)
      for bits in (4, 8) for symmetric in (True, False) for inputs in (256, 96, 100)),
    ("float-quantized", dict(num_bits=8, type="float", strategy="channel"), 256),
    ("float-quantized", dict(num_bits=8, type="float", strategy="block",
                             block_structure=[40, 96]), 256),
    ("int-quantized", dict(num_bits=8, strategy="channel"), 256),
    ("int-quantized", dict(num_bits=8, strategy="group", group_size=64, symmetric=False), 256),
    ("nvfp4-pack-quantized", dict(num_bits=4, type="float", strategy="tensor_group",
                                  group_size=16), 256),
    ("mxfp4-pack-quantized", dict(num_bits=4, type="float", strategy="group",
                                  group_size=32), 256)], ids=str)
def test_compressed_tensors_by_its_package(tmp_path, stored, weights, inputs):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"], format=stored, weights=QuantizationArgs(**weights))
    rows, columns = weights.get("block_structure") or (1, weights.get("group_size") or inputs)
    counts = -(-96 // rows), -(-inputs // columns)
    given = {"weight": torch.randn(96, inputs) * 0.05, "weight_scale": torch.rand(counts) / 900}
    if not weights.get("symmetric", True):
        most = 2 ** (weights["num_bits"] - 1) // 2
        given["weight_zero_point"] = torch.randint(-most, most, counts, dtype=torch.int8)
    if weights.get("type") and weights["num_bits"] == 4:
        given["weight_scale"] = torch.rand(counts) + 1
    if columns == 16:
        given["weight_global_scale"] = torch.rand(1) + 50
    kind = BaseCompressor.get_value_from_registry(stored)
    tensors = kind.compress(given, scheme)
    entries = dict(quant_method="compressed-tensors", config_groups=dict(g=dict(weights=weights)))
    found = opened(tmp_path, entries, tensors).read()
    wanted = kind.decompress(tensors, scheme)["weight"]
    assert torch.equal(found.to(wanted.dtype), wanted)


# -------------------------------------------------------------------------------- the config


GROUP = compressed(group_size=32)["config_groups"]["group_0"]
IN_AWQ = AUTO_ROUND | dict(packing_format="auto_round:auto_awq")
OF_2024 = dict(quant_method="modelopt", quantization=dict(quant_algo="FP8"))


@pytest.mark.parametrize("entries, message", [
    (dict(quant_method="hqq"), "quant_method='hqq' .*'awq', 'gptq', 'compressed-tensors'"),
    # GPTQ's without its name
    (dict(bits=4, sym=True), "quant_method=None .* one of .*'gptq'"),
    (AWQ | dict(version="gemv"), "version='gemv' .* one of .'gemm'."),
    (AWQ | dict(backend="llm-awq"), "backend='llm-awq'"),
    (AWQ | dict(bits=3), "bits=3"),
    (GPTQ | dict(bits=5), "bits=5 .* one of .2, 3, 4, 8."), (GPTQ | dict(bits=None), "bits=None"),
    (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    (GPTQ | dict(format="bitblas"), "checkpoint_format='bitblas'"),
    (GPTQ | dict(is_marlin_format=True), "is_marlin_format=True"),
    (GPTQ | dict(dynamic={"-:a": {}, "b": dict(bits=6)}), r"dynamic\['b'\].bits=6"),
    (compressed(stored="marlin-24"), "format='marlin-24'"),
    (compressed() | dict(sparsity_config=dict(format="sparse-24")), "sparsity_config="),
    (compressed() | dict(transform_config=dict(config_groups=dict(u=1))), "transform_conf"),
    (compressed() | dict(config_groups=dict(g=GROUP | dict(format="mxfp6-pack-quantized"))),
     "g.format='mxfp6-pack-quantized'"),
    (compressed(6, kind="float"), "weights.type.*='float 6'"),
    (compressed(2), "weights.type.*='int 2'"),
    (dict(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "quant_algo='NVFP4_AWQ'"),
    (dict(quant_method="modelopt", quantized_layers=dict(
        a=dict(quant_algo="FP8"), b=dict(quant_algo="W4A8_AWQ"))), r"\['b'\].*='W4A8_AWQ'"),
    (OF_2024, "quantization={'quant_a"),
    (dict(quant_method="fbgemm_fp8"), "quant_method='fbgemm_fp8' .* its version in GGUF, AWQ"),
    (AUTO_ROUND | dict(packing_format="auto_round:llm_compressor"), "packing_format='auto_round:l"),
    (AUTO_ROUND | dict(data_type="mx_fp"), "data_type='mx_'"),
    (AUTO_ROUND | dict(act_bits=8), "act_bits=8"), (IN_AWQ | dict(act_bits=8), "act_bits=8"),
    (IN_AWQ | dict(bits=3), "bits=3"),
    (IN_AWQ | dict(rotation_config=dict(a=1)), "rotation_config="),
    (IN_AWQ | dict(spinquant_config=dict(a=1)), "spinquant_config="),
    (IN_AWQ | dict(extra_config=dict(a=dict(bits=2))), r"\['a'\].bits=2"),
    (AUTO_ROUND | dict(extra_config={"lm_head": dict(act_bits=8)}), r"\['lm_head'\].act_bits=8"),
    (GPTQ | dict(rotation="hadamard"), "rotation='hadamard'"),
    (AWQ | dict(rotation="random"), "rotation='random'"),
    (FP8 | dict(weight_scale_semantics="inverse"), "semantics='inverse'"),
    (FP8 | dict(fmt="e5m2"), "quantization_config.fmt='e5m2' .* one of .'e4m3'"),
    (dict(bits=7, group_size=64), r"bits=7 is not accepted: it must be one of \[2, 3"),
    (dict(bits=4, group_size=48), "group_size=48 is not accepted"),
    (MLX | dict(mode="mxfp4"), "mode='mxfp4' is not accepted: .*'affine'"),
    (MLX | dict(quant_method="metal"), "quant_method='metal' is not accepted: .* one of .*GGUF"),
    (MLX | {"model.norm": dict(bits=1, group_size=64)}, r"model\.norm\.bits=1 is not accepted")])
def test_a_format_that_is_refused(tiny, tmp_path, entries, message):
    """explain.py says it first, if it is there, in the words of the config."""
    folder = changed(tiny, tmp_path, quantization_config=entries)
    instead = "must be .* model that was quantized.*quantization='int8'"
    for options in ({}, dict(load_format="dummy")):
        check_refused(instead, LLM, folder, **OPTIONS | options)
    for each in (message, instead):
        check_refused(each, methods.check, methods.with_method(entries))


@pytest.mark.parametrize("entries", [
    compressed() | dict(config_groups=["W4A16"]), GPTQ | dict(dynamic=["a"]),
    compressed() | dict(config_groups=dict(group_0="W4A16")),
    compressed() | dict(sparsity_config="dense")])
def test_entries_that_are_no_objects(tiny, tmp_path, entries):
    folder = changed(tiny, tmp_path, quantization_config=entries)
    check_refused("quantization_config={.*'quant_method'", LLM, folder, **OPTIONS)


@pytest.mark.parametrize("entries, left_out", [
    # as GPTQModel 7 writes it
    (GPTQ | dict(rotation=None, activation=dict(mode="w4afp8")), {"activation"}),
    (rounding("float-quantized") | dict(config_groups=dict(
        group_0=rounding("float-quantized")["config_groups"]["group_0"],
        group_1=dict(targets=["LlamaAttention"], weights=None, input_activations=ROUNDED))),
     {"input_activations"}),
    (dict(quant_method="modelopt", quant_algo="fp8_pb_wo"), set()),
    (dict(quant_method="fp8", fmt="float8_e4m3fn"), set()),
    (dict(quant_method="modelopt", quant_algo="NVFP4"), {"quant_algo"}),
    ({name: value for name, value in AUTO_ROUND.items() if name != "packing_format"}, set())],
    ids=str)
def test_entries_that_are_accepted(entries, left_out):
    methods.check(entries)
    assert methods.left_out(entries) == left_out


@pytest.mark.parametrize("entries, options, message", [
    (AWQ, {}, "quantization_config=.* none of its weights is quantized"),
    (GPTQ, {}, "quantization_config=.* none of its weights is quantized"),
    (GPTQ, dict(quantization="awq"), "quantization='awq' .* None or 'gptq'"),
    (GPTQ, dict(load_format="dummy"), "must be None with load_format='dummy'.* not quantized"),
    (FP8, {}, "'fp8'.* None, since none of its weights is quantized"),
    (FP8, dict(quantization="int8"), "quantization='int8' .* None or 'fp8', since the model"),
    (INT8, {}, "None, since none of its weights is quantized"),
    *((dict(quant_method="mxfp4"), dict(quantization=value),
       f"quantization='{value}' .* None or 'mxfp4', since") for value in ("int4", "int8", "gptq")),
    (dict(quant_method="mxfp4"), {}, "'mxfp4'.* None, since none of its weights is quantized"),
    *((None, dict(quantization=value), f"quantization='{value}' .* since the model is not quanti")
      for value in ("awq", "gptq", "gguf")),
    (None, dict(quantization="int8", load_format="dummy"),
     "load_format='dummy' .* with quantization='int8'"),
    (None, dict(quantization="int3"), "='int3' is not accepted: it must be 'int8', 'int4' or None"),
    (None, dict(quantization="INT8"), "'INT8'"), (None, dict(quantization=""), "quantization=''")])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_model_of_which_nothing_is_quantized(tiny, tmp_path, entries, options, message,
                                               model_impl):
    folder = changed(tiny, tmp_path, quantization_config=entries)
    check_refused(message, LLM, folder, model_impl=model_impl, **OPTIONS, **options)
