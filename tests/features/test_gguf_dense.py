"""GGUF files of dense models, as llama.cpp's converter writes them: with its names of tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from quantizing import (
    GREEDY, OPTIONS, PROMPTS, add_entries, check_config, expected, generated, in_gguf)

from nanoengine import LLM
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=320, max_position_embeddings=512, pad_token_id=None)
NAMES = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
         "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
         "attention.head_count": "num_attention_heads",
         "attention.head_count_kv": "num_key_value_heads"}
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# which is the default of no family
PART = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75))
SCALES = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
          "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
YARN = dict(rope_type="yarn", rope_theta=1e5, factor=4.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=32)
OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
           "rope.scaling.original_context_length": 32}
LOCAL = dict(rope_type="default", rope_theta=1e5)
FAR = YARN | dict(mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.25)
WINDOWS = {"attention.sliding_window": 8,
           "attention.sliding_window_pattern": [True, True, True, False]}
# of each model: `general.architecture`, the class, its config, and what the file says: numbers, and
# names of the config
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", "Gemma", dict(head_dim=64), {
        "attention.key_length": 64, "attention.value_length": 64, RMS: "rms_norm_eps"}),
    "smollm3": ("smollm3", "SmolLM3", dict(rope_parameters=YARN), OF_YARN | {RMS: "rms_norm_eps"}),
    "arcee": ("arcee", "Arcee", dict(mlp_bias=True), {RMS: "rms_norm_eps"}),
    "apertus": ("apertus", "Apertus", dict(rope_parameters=LOCAL), {RMS: "rms_norm_eps"}),
    "granite": ("granite", "Granite", dict(
        embedding_multiplier=3.0, attention_multiplier=0.0625, residual_multiplier=0.5,
        logits_scaling=2.0, tie_word_embeddings=True), SCALES | {RMS: "rms_norm_eps"}),
    "olmo": ("olmo", "Olmo", dict(clip_qkv=0.5), {MEAN: 1e-5, "attention.clamp_kqv": 0.5}),
    "olmo 2": ("olmo2", "Olmo2", {}, {RMS: "rms_norm_eps"}),
    "olmo 3": ("olmo2", "Olmo3", dict(sliding_window=8, rope_parameters=dict(
        full_attention=YARN, sliding_attention=LOCAL)), OF_YARN | WINDOWS | {
        RMS: "rms_norm_eps", "rope.freq_base_swa": 1e5,
        "rope.scaling.yarn_attn_factor": 1.138629436111989}),
    "exaone 3": ("exaone", "Llama", {}, {RMS: "rms_norm_eps"}),
    "exaone 4": ("exaone4", "Exaone4", dict(head_dim=64, sliding_window=8), WINDOWS | {
        "attention.key_length": 64, RMS: "rms_norm_eps"}),
    "exaone 4 small": ("exaone4", "Exaone4", dict(
        head_dim=64, sliding_window=None, layer_types=["full_attention"] * 4), {
        "attention.key_length": 64, RMS: "rms_norm_eps"}),
    "glm 4": ("glm4", "Glm4", PART | dict(head_dim=64, attention_bias=True), {
        "attention.key_length": 64, "rope.dimension_count": 48, RMS: "rms_norm_eps"}),
    "command r": ("command-r", "Cohere", dict(use_qk_norm=True), {
        MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}),
    "command r7b": ("cohere2", "Cohere2", dict(sliding_window=8, logit_scale=0.25), {
        MEAN: "layer_norm_eps", "logit_scale": "logit_scale", "attention.sliding_window": 8}),
    "starcoder 2": ("starcoder2", "Starcoder2", dict(sliding_window=4096), {MEAN: "norm_epsilon"}),
    "stablelm": ("stablelm", "StableLm", PART | dict(use_qkv_bias=True), {
        MEAN: "layer_norm_eps", "rope.dimension_count": 48, "use_parallel_residual": False}),
    "stablelm parallel": ("stablelm", "StableLm", PART | dict(use_parallel_residual=True), {
        MEAN: "layer_norm_eps", "rope.dimension_count": 48, "use_parallel_residual": True}),
    "phi 2": ("phi2", "Phi", PART, {MEAN: "layer_norm_eps", "rope.dimension_count": 48}),
    "nemotron": ("nemotron", "Nemotron", PART | dict(attention_bias=True, mlp_bias=True), {
        MEAN: "norm_eps", "rope.dimension_count": 48}),
    "ernie": ("ernie4_5", "Ernie4_5", dict(head_dim=64), {
        "attention.key_length": 64, RMS: "rms_norm_eps"}),
    "seed": ("seed_oss", "SeedOss", dict(head_dim=64), {
        "attention.key_length": 64, RMS: "rms_norm_eps"}),
    "hunyuan": ("hunyuan-dense", "HunYuanDenseV1", dict(head_dim=64), {
        "attention.key_length": 64, RMS: "rms_norm_eps"}),
    "ministral 3": ("mistral3", "Ministral3", dict(head_dim=64, rope_parameters=FAR), OF_YARN | {
        "attention.key_length": 64, RMS: "rms_norm_eps", "attention.temperature_scale": 0.25,
        "rope.scaling.yarn_log_multiplier": 0.5}),
    "gpt 2": ("gpt2", "GPT2", dict(
        n_inner=256, num_attention_heads=16, num_key_value_heads=16, rope_parameters=LOCAL), {
        MEAN: "layer_norm_epsilon"}),
    "mistral small 3": ("mistral3", "Mistral", dict(head_dim=64, sliding_window=None), {
        "attention.key_length": 64, RMS: "rms_norm_eps"})}
# GPT-2 has no linears
OTHERS = [name for name in MODELS if name != "gpt 2"]
PERMUTED = ("smollm3", "arcee", "granite", "olmo", "mistral3")


def make(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    arch, kind, changes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    own = "GPT2LMHeadModel" if arch == "gpt2" else f"{kind}ForCausalLM"
    model = getattr(transformers, own)(config).eval()
    for place, parameter in model.named_parameters():
        is_norm = ("norm" in place or "ln_" in place) and place.endswith(".weight")
        is_one = is_norm and arch not in ("gemma", "nemotron")
        size = 0.3 if parameter.ndim == 1 else 0.15
        parameter.data = torch.randn_like(parameter) * size + is_one
    return model


def write(model: Any, name: str, path: Path, kind: str, changes: dict[str, Any]) -> None:
    """As llama.cpp's converter; matrices get the dequantized numbers of the file."""
    arch, _, _, entries = MODELS[name]
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    add_entries(writer, config, NAMES | entries | changes)
    known = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    added = np.float32(arch in ("gemma", "nemotron"))
    # numbers of activations
    numbers: dict[str, list[float]] = {}
    for number, (place, weight) in enumerate(model.state_dict().items()):
        if "act_fn." in place:
            numbers.setdefault(f"xielu.{place.split('.')[-1]}", []).append(weight.item())
            continue
        if config.tie_word_embeddings and place == "lm_head.weight":
            continue
        if ".c_" in place and weight.ndim == 2 and arch == "gpt2":
            weight = weight.T
        rows = torch.arange(len(weight))
        count = heads.get(place.split(".")[-2])
        if count and arch in PERMUTED:
            rows = rows.view(count, 2, -1).transpose(1, 2).flatten()
        extra = added if place.endswith("norm.weight") else np.float32(0)
        is_matrix = weight.ndim == 2 and "norm" not in place and "wpe" not in place
        stored_as = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        stored = in_gguf(weight[rows].numpy() + extra, stored_as.name, number)
        own = names.get_name(place, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, stored, raw_dtype=stored_as)
        weight[rows] = torch.from_numpy(gguf.dequantize(stored, stored_as) - extra)
    for entry, of_layers in numbers.items():
        writer.add_array(entry, of_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make_file(tmp_path):
    def made(name: str, kind: str, changes: Any = ()) -> tuple[Path, Any]:
        model = make(name)
        with torch.no_grad():
            write(model, name, path := tmp_path / "model.gguf", kind, dict(changes))
        return path, model
    return made


# one for each kind of difference
FAST = ("smollm3", "apertus", "granite", "olmo 3", "glm 4", "command r7b", "starcoder 2",
        "ministral 3")


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_tokens_are_those_of_the_model(make_file, name):
    """Weights stay packed."""
    path, model = make_file(name, "Q8_0")
    # the first chunk, and what follows it, are longer than a window
    with LLM(path, **OPTIONS | dict(max_num_batched_tokens=24, max_num_seqs=2)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        modules = llm.engine.runner.model.layers.modules()
        linears = [each for each in modules if isinstance(each, torch.nn.Linear)]
        assert len(linears) >= 8
        assert all(isinstance(each, QuantizedLinear) and each.is_quantized for each in linears)
    assert [each.outputs[0].token_ids for each in outputs] == expected(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_tokens_of_a_file_in_float32(make_file, name):
    path, model = make_file(name, "F32")
    assert generated(path, kernels=False) == expected(model)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_tokens_of_gpt_2(make_file, kind):
    """Its matrices are (inputs, outputs) in transformers."""
    path, model = make_file("gpt 2", kind)
    found = generated(path)
    assert found == expected(model)
    # otherwise the layers would hardly matter
    assert min(len({*each}) for each in found) > 2


@pytest.mark.parametrize("name", OTHERS)
def test_the_config_is_that_of_the_model(make_file, name):
    """What llama.cpp's converter leaves out is known."""
    path, model = make_file(name, "F32")
    check_config(path, model, {"sliding_window_pattern"}, whole_rope=name == "olmo 3")


@pytest.mark.parametrize("name, changes, message", [
    ("granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned=False .* .True."),
    ("olmo 3", {"rope.scaling.yarn_attn_factor": 2.0}, "rope.scaling.yarn_attn_factor=2.0 "),
    ("glm 4", {"rope.dimension_sections": [8, 8, 8, 0]}, "rope.dimension_sections=.8, 8, 8, 0."),
    ("glm 4", {"nextn_predict_layers": 1}, "nextn_predict_layers=1 .* .0."),
    ("command r7b", {"rope.dimension_count": 32}, "rope.dimension_count=32 .* .64."),
    ("exaone 4", {"attention.sliding_window_pattern": 0}, ".*pattern=0 .* a number above 0"),
    ("ernie", {"attention.scale": 0.5}, "attention.scale=0.5 .* .0.0.")])
def test_what_a_family_does_not_have(make_file, name, changes, message):
    path, _ = make_file(name, "F32", changes)
    with pytest.raises(ValueError, match=f"^model='{path}': the file's {message}"):
        LLM(path)


def test_a_number_of_each_layer_that_is_missing(make_file):
    path, _ = make_file("apertus", "F32")
    header = gguf_header.Header([path])
    del header.fields["xielu.eps"]
    with pytest.raises(ValueError, match="the file's xielu.eps='0 numbers' .*'4 numbers'"):
        header.family.changes(header)
