"""GGUF files of each family, as llama.cpp's converter writes them, with its names of tensors: tiny
models with random weights generate transformers' tokens, and have its config.json."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import check_refused, slow
from quantizing import (
    ADDED, FLOATS, GREEDY, OPTIONS, PROMPTS, Entries, check_config, expected, generated, write)

from nanoengine import LLM
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.models.gguf import files, names
from nanoengine_extras.models.gguf.header import Header

SIZES: Entries = dict(
    hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=320, max_position_embeddings=512, pad_token_id=None)
DEEP: Entries = dict(num_hidden_layers=4)
HEADS: Entries = dict(head_dim=32)
# which is the default of no family
PART: Entries = dict(rope_parameters=dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75))
YARN = dict(rope_type="yarn", rope_theta=1e5, factor=4.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=32)
OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
           "rope.scaling.original_context_length": 32}
LOCAL = dict(rope_type="default", rope_theta=1e5)
FAR = YARN | dict(mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.25)
LATENT_YARN = YARN | dict(mscale=0.707, mscale_all_dim=0.707)
OF_LATENT_YARN = OF_YARN | {"rope.scaling.yarn_log_multiplier": 0.1 * 0.707}
LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.25, factor=8.0,
            original_max_position_embeddings=64, short_factor=[1.0 + i / 8 for i in range(4)],
            long_factor=[2.0 + i for i in range(4)])
SCALED = dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
              sliding_attention=dict(rope_type="default", rope_theta=1e4))
WINDOW: Entries = DEEP | dict(sliding_window=8)
OF_WINDOW = {"attention.sliding_window_pattern": [True, True, True, False]}
HALF: Entries = WINDOW | dict(layer_types=["sliding_attention", "full_attention"] * 2)
OF_HALF = {"attention.sliding_window_pattern": [True, False] * 2}
GEMMA = WINDOW | HEADS | dict(query_pre_attn_scalar=32)
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
LOCAL_BASE = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
# with the same matrix as the head, the model would only repeat a token
OWN_HEAD: Entries = dict(tie_word_embeddings=False)
GEMMA_4 = HALF | HEADS | OWN_HEAD | dict(
    global_head_dim=64, final_logit_softcapping=3.0, hidden_size_per_layer_input=0)
OF_GEMMA_4 = OF_HALF | LOCAL_BASE | {
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
    "attention.value_length_swa": 32, "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
    "final_logit_softcapping": 3.0, "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0}
# values are keys in layers that see all, which have fewer of them
EQUAL: Entries = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
OF_EQUAL = {"attention.head_count_kv": [2, 1] * 2}
# embeddings for each layer; the last layers use the keys of others
SMALL: Entries = dict(
    hidden_size_per_layer_input=32, vocab_size_per_layer_input=320, num_kv_shared_layers=2)
OF_SMALL = {"attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32}
LATENT: Entries = dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32,
    v_head_dim=64, first_k_dense_replace=1)
OF_LATENT = {
    "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 32,
    "attention.key_length_mla": 64, "attention.value_length_mla": 64, "rope.dimension_count": 32,
    "attention.kv_lora_rank": 32, "leading_dense_block_count": 1}
GROUPS: Entries = dict(q_lora_rank=64, n_group=3, topk_group=2)
OF_GROUPS = {"attention.q_lora_rank": 64, "expert_group_count": 3, "expert_group_used_count": 2}
ROUTED: Entries = dict(
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
    n_group=1, topk_group=1, routed_scaling_factor=1.5)
OF_ROUTED = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 64,
             "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1,
             "expert_weights_scale": 1.5}
BY_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "leading_dense_block_count": 1}
EXPERTS: Entries = dict(num_experts=5, num_local_experts=5, num_experts_per_tok=2)
OF_EXPERTS = {"expert_count": 5, "expert_used_count": 2}
# K-quants have groups of 256 inputs
WIDE: Entries = EXPERTS | dict(head_dim=64, hidden_size=256)
OF_WIDE = OF_EXPERTS | {"expert_feed_forward_length": 256}
SCALES: Entries = dict(embedding_multiplier=3.0, attention_multiplier=0.0625,
                       residual_multiplier=0.5, logits_scaling=2.0)
OF_SCALES = {"attention.scale": 0.0625, "embedding_scale": 3.0, "residual_scale": 0.5,
             "logit_scale": 2.0}
# of each model: `general.architecture`, the class, its config, and what the file says besides:
# numbers, and names of the config
MODELS: dict[str, tuple[str, str, Entries, Entries]] = {
    "gemma": ("gemma", "Gemma", HEADS, {}),
    "gemma 2": ("gemma2", "Gemma2", GEMMA | dict(
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0), CAPS),
    "gemma 3": ("gemma3", "Gemma3Text", GEMMA | dict(num_hidden_layers=7), {}),
    "gemma 3 scaled": ("gemma3", "Gemma3Text", GEMMA | dict(
        num_hidden_layers=7, rope_parameters=SCALED, final_logit_softcapping=2.0), {
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        "final_logit_softcapping": 2.0}),
    "gemma 3n": ("gemma3n", "Gemma3nText", HALF | HEADS | OWN_HEAD | SMALL | dict(
        laurel_rank=32, activation_sparsity_pattern=[0.95, 0.9, 0.0, 0.0]),
        # files of 2025 do not say how logits are capped
        OF_HALF | LOCAL_BASE | OF_SMALL | {
        "altup.active_idx": 0, "altup.num_inputs": 4, "feed_forward_length": [128] * 4,
        # of 0.95 and 0.9
        "activation_sparsity_scale": [1.6448536, 1.2815516, -math.inf, -math.inf]}),
    "gemma 4": ("gemma4", "Gemma4Text", GEMMA_4 | EQUAL, OF_GEMMA_4 | OF_EQUAL),
    "gemma 4 small": ("gemma4", "Gemma4Text", GEMMA_4 | SMALL | dict(use_double_wide_mlp=True),
                      OF_GEMMA_4 | OF_SMALL | {"feed_forward_length": [128, 128, 256, 256]}),
    "gemma 4 experts": ("gemma4", "Gemma4Text", GEMMA_4 | EQUAL | dict(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=64),
        OF_GEMMA_4 | OF_EQUAL | OF_EXPERTS | {"expert_feed_forward_length": 64}),
    "phi 2": ("phi2", "Phi", PART, {}),
    "phi 3": ("phi3", "Phi3", dict(sliding_window=9, original_max_position_embeddings=512), {}),
    "phi 3 long": ("phi3", "Phi3", dict(
        tie_word_embeddings=True, rope_parameters=LONG, original_max_position_embeddings=64), {
        "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.5**0.5,
        "attention.sliding_window": 0}),
    "gpt 2": ("gpt2", "GPT2", dict(
        n_inner=128, num_attention_heads=8, num_key_value_heads=8), {}),
    "smollm3": ("smollm3", "SmolLM3", dict(rope_parameters=YARN), OF_YARN),
    "arcee": ("arcee", "Arcee", dict(mlp_bias=True), {}),
    "apertus": ("apertus", "Apertus", dict(rope_parameters=LOCAL), {}),
    "granite": ("granite", "Granite", SCALES | dict(tie_word_embeddings=True), OF_SCALES),
    "olmo": ("olmo", "Olmo", dict(clip_qkv=0.5), {"attention.clamp_kqv": 0.5}),
    "olmo 2": ("olmo2", "Olmo2", {}, {}),
    "olmo 3": ("olmo2", "Olmo3", WINDOW | dict(rope_parameters=dict(
        full_attention=YARN, sliding_attention=LOCAL)), OF_YARN | OF_WINDOW | {
        "rope.freq_base_swa": 1e5, "rope.scaling.yarn_attn_factor": 1.138629436111989}),
    "exaone 3": ("exaone", "Llama", {}, {}),
    "exaone 4": ("exaone4", "Exaone4", WINDOW | HEADS, OF_WINDOW),
    "exaone 4 small": ("exaone4", "Exaone4", HEADS | dict(
        sliding_window=None, layer_types=["full_attention"] * 2), {}),
    "glm 4": ("glm4", "Glm4", PART | HEADS | dict(attention_bias=True), {}),
    "command r": ("command-r", "Cohere", dict(use_qk_norm=True), {"logit_scale": "logit_scale"}),
    "command r7b": ("cohere2", "Cohere2", WINDOW | dict(logit_scale=0.25), {"logit_scale": 0.25}),
    "starcoder 2": ("starcoder2", "Starcoder2", dict(sliding_window=4096), {
        "attention.sliding_window": None}),
    "stablelm": ("stablelm", "StableLm", PART | dict(use_qkv_bias=True), {
        "use_parallel_residual": False}),
    "stablelm parallel": ("stablelm", "StableLm", PART | dict(use_parallel_residual=True), {
        "use_parallel_residual": True}),
    "nemotron": ("nemotron", "Nemotron", PART | dict(attention_bias=True, mlp_bias=True), {}),
    "ernie": ("ernie4_5", "Ernie4_5", HEADS, {}),
    "seed": ("seed_oss", "SeedOss", HEADS, {}),
    "hunyuan": ("hunyuan-dense", "HunYuanDenseV1", HEADS, {}),
    "ministral 3": ("mistral3", "Ministral3", HEADS | dict(rope_parameters=FAR), OF_YARN | {
        "attention.temperature_scale": 0.25, "rope.scaling.yarn_log_multiplier": 0.5}),
    "mistral small 3": ("mistral3", "Mistral", HEADS | dict(sliding_window=None), {}),
    "qwen 2 vl": ("qwen2vl", "Qwen2", {}, {"rope.dimension_sections": [4, 6, 6, 0]}),
    "qwen 3 vl": ("qwen3vl", "Qwen3", HEADS, {"rope.dimension_sections": [6, 5, 5, 0]}),
    # with experts
    "qwen 3 experts": ("qwen3moe", "Qwen3Moe", WIDE | dict(
        moe_intermediate_size=256, norm_topk_prob=True), OF_WIDE),
    "qwen 3 tied": ("qwen3moe", "Qwen3Moe", WIDE | dict(
        moe_intermediate_size=256, norm_topk_prob=True, tie_word_embeddings=True), OF_WIDE),
    "qwen 2 experts": ("qwen2moe", "Qwen2Moe", EXPERTS | dict(
        moe_intermediate_size=64, shared_expert_intermediate_size=96), OF_EXPERTS | {
        "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96}),
    "olmoe": ("olmoe", "Olmoe", WIDE | dict(intermediate_size=256, num_key_value_heads=4),
              OF_EXPERTS),
    "mixtral": ("llama", "Mixtral", EXPERTS | HEADS, OF_EXPERTS),
    "granite experts": ("granitemoe", "GraniteMoe", SCALES | EXPERTS | dict(
        tie_word_embeddings=True), OF_SCALES | OF_EXPERTS),
    "granite shared": ("granitemoe", "GraniteMoeShared", SCALES | EXPERTS | OWN_HEAD | dict(
        shared_intermediate_size=64), OF_SCALES | OF_EXPERTS | {
        "expert_shared_feed_forward_length": 64}),
    "ernie experts": ("ernie4_5-moe", "Ernie4_5_Moe", OWN_HEAD | dict(
        moe_num_experts=5, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=2),
        OF_EXPERTS | {
        "expert_feed_forward_length": 64, "expert_shared_count": 2, "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1}),
    "hunyuan experts": ("hunyuan-moe", "HunYuanMoEV1", HEADS | dict(num_experts=5, moe_topk=2),
                        OF_EXPERTS | {
        "expert_feed_forward_length": 128, "expert_shared_feed_forward_length": 128,
        "expert_shared_count": 1}),
    "deepseek 2": ("deepseek2", "DeepseekV2", LATENT | ROUTED | dict(
        q_lora_rank=None, topk_method="greedy", rope_parameters=LATENT_YARN),
        OF_LATENT | OF_ROUTED | OF_LATENT_YARN),
    "deepseek 2 groups": ("deepseek2", "DeepseekV2", LATENT | ROUTED | GROUPS | dict(
        topk_method="group_limited_greedy"), OF_LATENT | OF_ROUTED | OF_GROUPS),
    "deepseek 3": ("deepseek2", "DeepseekV3", LATENT | ROUTED | GROUPS | dict(
        rope_parameters=LATENT_YARN),
        OF_LATENT | OF_ROUTED | OF_GROUPS | OF_LATENT_YARN | BY_SIGMOID),
    # its last layer guesses a further token
    "glm 4.5": ("glm4moe", "Glm4Moe", ROUTED | HEADS | dict(
        attention_bias=True, use_qk_norm=True, first_k_dense_replace=1), OF_ROUTED | BY_SIGMOID | {
        "block_count": 3, "nextn_predict_layers": 1}),
    "dots": ("dots1", "Dots1", ROUTED | HEADS | dict(
        norm_topk_prob=True, first_k_dense_replace=1, sliding_window=None,
        layer_types=["full_attention"] * 2), OF_ROUTED | BY_SIGMOID),
    "k-exaone": ("exaone-moe", "ExaoneMoe", HALF | HEADS | dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, num_shared_experts=1,
        routed_scaling_factor=1.5, first_k_dense_replace=1),
        OF_HALF | OF_ROUTED | BY_SIGMOID | {
        "expert_shared_feed_forward_length": 64, "rope.scaling.type": "none"}),
    "minimax 2": ("minimax-m2", "MiniMaxM2", EXPERTS | HEADS | dict(
        intermediate_size=64, rope_parameters=dict(
            rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5)), OF_EXPERTS | {
        "expert_gating_func": 2, "expert_feed_forward_length": 64}),
    "gpt oss": ("gpt-oss", "GptOss", EXPERTS | HEADS | dict(
        sliding_window=16, rope_parameters=YARN | dict(truncate=False)), OF_YARN | OF_EXPERTS | {
        "expert_feed_forward_length": 128})}
# the types of matrices, in turn, where they are not Q8_0
KINDS = {"qwen 3 experts": "Q4_K Q6_K Q8_0", "qwen 3 tied": "Q4_0", "qwen 2 experts": "Q5_0 Q4_1",
         "olmoe": "Q5_K", "mixtral": "Q4_0 Q8_0", "gpt oss": "MXFP4"}
# one for each kind of difference
FAST = ("gemma 3 scaled", "gemma 4 small", "phi 3 long", "smollm3", "apertus", "granite", "olmo 3",
        "glm 4", "command r7b", "starcoder 2", "ministral 3", "gpt 2", "qwen 3 experts", "mixtral",
        "deepseek 3", "gpt oss")
def make(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    arch, kind, changes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    own = "GPT2LMHeadModel" if arch == "gpt2" else f"{kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, own)(config).eval()
    for place, tensor in model.state_dict().items():
        is_norm = ("norm" in place or "ln_" in place) and place.endswith(".weight")
        is_one = is_norm and arch not in ADDED or place.endswith("scalar")
        size = 0.3 if tensor.ndim == 1 else 0.15
        # a number of an activation stays as it is
        if tensor.ndim:
            tensor.copy_(torch.randn_like(tensor) * size + is_one)
    return model


@pytest.fixture
def make_file(tmp_path):
    def made(name: str, kinds: str = "F32", changes: Any = ()) -> tuple[Path, Any]:
        model = make(name)
        arch, _, _, own = MODELS[name]
        rope = getattr(model.config, "rope_parameters", None) or {}
        # numbers that are no weights, layers that guess, and the keys of a layer that has none of
        # its own, as released checkpoints have them
        more: Entries = {f"rope_factors_{length}.weight": rope[f"{length}_factor"]
                         for length in ("long", "short") if rope.get("rope_type") == "longrope"}
        if arch == "gemma4":
            more["rope_freqs.weight"] = [1.0] * 8 + [1e30] * 24
        if "nextn_predict_layers" in own:
            more |= {"blk.2.nextn.eh_proj.weight": [[0.0] * 256] * 128,
                     "blk.2.attn_norm.weight": [0.0] * 128}
        if own.get("attention.shared_kv_layers"):
            more["blk.3.attn_k.weight"] = [[0.0] * 128] * 64
        write(model, path := tmp_path / "model.gguf", arch, kinds.split(), own | dict(changes),
              more)
        return path, model
    return made


@pytest.mark.parametrize("name, kinds", [
    *((name, KINDS.get(name, "Q8_0")) for name in FAST),
    *(slow(name, KINDS.get(name, "Q8_0")) for name in MODELS if name not in FAST),
    ("gpt oss", "F32"), ("gpt oss", "BF16"), slow("mixtral", "BF16"),
    slow("gemma 3 scaled", "Q4_0"), slow("phi 3", "Q4_0")])
def test_tokens_are_those_of_the_model(make_file, name, kinds):
    """In a batch and alone. Weights stay packed, also those of experts and of fused projections;
    but not those of a linear that the file has in two."""
    path, model = make_file(name, kinds)
    # the first chunk, and what follows it, are longer than a window
    with LLM(path, **OPTIONS | dict(max_num_batched_tokens=24, max_num_seqs=2)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        outputs += [llm.generate(each, GREEDY, use_tqdm=False)[0] for each in PROMPTS]
        linears = {place: each for place, each in llm.engine.runner.model.layers.named_modules()
                   if isinstance(each, torch.nn.Linear) and not any(part in place for part in (
                       "kv_b_proj", "shared_mlp.gate_up", "mlp.gate.wg", *FLOATS))}
    # GPT-2 has no linears
    assert len(linears) >= 2 * model.config.num_hidden_layers or name == "gpt 2"
    for each in linears.values():
        is_quantized = isinstance(each, QuantizedLinear) and each.is_quantized
        assert each.is_packed if kinds in ("F32", "BF16") else is_quantized
    has_experts = any(".experts." in place for place in linears)
    assert has_experts == ("expert_count" in MODELS[name][3])
    found = [each.outputs[0].token_ids for each in outputs]
    assert found == expected(model) * 2
    # otherwise the layers would hardly matter
    assert model.config.tie_word_embeddings or min(len({*each}) for each in found) > 2


@pytest.mark.parametrize("name, kinds", [
    *((name, KINDS[name]) for name in ("qwen 3 experts", "mixtral")), ("gpt 2", "F32"),
    *(slow(name, "F32") for name in MODELS)])
def test_tokens_without_kernels(make_file, name, kinds):
    path, model = make_file(name, kinds)
    assert generated(path, kernels=False) == expected(model)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt 2"])
def test_the_config_is_that_of_the_model(make_file, name):
    """What llama.cpp's converter leaves out is known."""
    path, model = make_file(name)
    others = {"sliding_window_pattern", "per_layer_config", "vocab_size_per_layer_input"}
    check_config(path, model, others, whole_rope="gemma" in name or name == "olmo 3")


@pytest.mark.parametrize("name, found", [
    ("blk.3.a.weight", "layers.3.b.c.weight"), ("a.weight", "b.c.weight"), ("a", "a"),
    ("blk.3.a.scale", "layers.3.d"), ("blk.0.other.bias", "layers.0.other.bias")])
def test_names_of_tensors(name, found):
    assert names.plain_name(name, {"a": "b.c", "a.scale": "d"}) == found


@pytest.mark.parametrize("name, found, left_out", [
    ("glm 4.5", "layers.1.input_layernorm.weight", "layers.2.input_layernorm.weight"),
    ("gemma 3n", "layers.1.self_attn.k_proj.weight", "layers.3.self_attn.k_proj.weight"),
    ("gemma 4 small", "layers.1.self_attn.k_proj.weight", "layers.3.self_attn.k_proj.weight")])
def test_tensors_that_are_left_out(make_file, name, found, left_out):
    """Layers that guess, and keys that their layer does not use."""
    path, _ = make_file(name)
    table = Header([path]).table[str(path)]
    assert found in table and left_out not in table


def test_a_gate_of_one_row(make_file):
    """A vector in the first layer, a matrix in the second."""
    path, _ = make_file("qwen 2 experts")
    files.write_folder([path], None, path.parent, has_tokenizer=False)
    opened = files.open_gguf(path.parent, {"heads": {}, "norms": 0.0}, path)
    for layer in range(2):
        gate = opened[f"layers.{layer}.mlp.shared_expert_gate.weight"]
        assert gate.read().shape == (1, 128) and gate.shape == [1, 128]


@pytest.mark.parametrize("name, layers, scale", [
    ("gemma 2", 46, 64), ("gemma 2", 45, 32), ("gemma 3", 62, 64), ("gemma 3", 61, 32)])
def test_the_largest_models_scale_scores_in_another_way(make_file, name, layers, scale):
    path, _ = make_file(name, changes={"attention.head_count": 2, "block_count": layers})
    assert Header([path]).config()["query_pre_attn_scalar"] == scale


@pytest.mark.parametrize("count, groups", [(64, (1, 1)), (160, (8, 3)), (256, (8, 4)),
                                           (384, (1, 1))])
def test_groups_of_experts_that_an_old_file_does_not_name(make_file, count, groups):
    path, _ = make_file("deepseek 3", changes={
        "expert_count": count, "expert_group_count": None, "expert_group_used_count": None})
    found = Header([path]).config()
    assert (found["n_group"], found["topk_group"]) == groups


def test_a_number_of_each_layer_that_is_missing(make_file):
    path, _ = make_file("apertus")
    header = Header([path])
    del header.fields["xielu.eps"]
    check_refused("the file's xielu.eps='0 numbers' .*'2 numbers'", header.family.changes, header)


# YaRN's factor of cos and sin for texts that are 4 times as long
FACTOR = float(np.float32(1 + 0.1 * math.log(4)))


@pytest.mark.parametrize("name, entry, value, accepted", [
    ("gemma 3", "attn_logit_softcapping", 3.0, [0]),
    ("gemma 3n", "altup.active_idx", 1, [0]),
    ("gemma 4", "attention.sliding_window_pattern", [True] * 4, [False]),
    ("gemma 4", "feed_forward_length", [128, 256, 128, 128], [[128] * 4]),
    ("gemma 4", "rope.scaling.type", "linear", ["none"]),
    ("gemma 4", "rope.scaling.factor", 8.0, [1.0]),
    ("gemma 4 experts", "expert_weights_scale", 2.0, [1, 0]),
    ("phi 3", "final_logit_softcapping", 3.0, [0]),
    ("phi 3", "rope.scaling.attn_factor", 1.5, [1]),
    ("phi 3", "rope.scaling.factor", 2.0, [1.0]),
    ("phi 3", "expert_count", 4, [0]),
    ("granite", "rope.scaling.finetuned", False, [True]),
    ("olmo 3", "rope.scaling.yarn_attn_factor", 2.0, [1.0, FACTOR]),
    ("glm 4", "rope.dimension_sections", [8, 8, 8, 0], [None]),
    ("glm 4", "nextn_predict_layers", 1, [0]),
    ("command r7b", "rope.dimension_count", 16, [32]),
    ("exaone 4", "attention.sliding_window_pattern", 0, "a number above 0, the same for all layer"),
    ("ernie", "attention.scale", 0.5, [0]),
    ("qwen 3 vl", "rope.dimension_count", 16, [32]),
    ("qwen 3 experts", "expert_weights_scale", 2.5, [1, 0]),
    ("qwen 2 experts", "expert_group_count", 4, [0, 1]),
    ("mixtral", "expert_gating_func", 2, [1, 0]),
    ("olmoe", "attention.clamp_kqv", 8.0, [0]),
    ("deepseek 3", "expert_count", 0, "a number above 0, the same for all layers"),
    ("deepseek 3", "attention.temperature_scale", 0.125, [0]),
    ("deepseek 2", "expert_weights_norm", True, [False]),
    ("dots", "expert_gating_func", 3, [2, 0]),
    ("dots", "attention.key_length_swa", 16, [32]),
    ("dots", "attention.sliding_window", 8, [0]),
    ("minimax 2", "expert_gating_func", 1, [2, 0]),
    ("granite experts", "expert_shared_count", 1, [0]),
    ("hunyuan experts", "expert_feed_forward_length", 64, [128])])
def test_what_a_family_does_not_have(make_file, name, entry, value, accepted):
    path, _ = make_file(name, changes={entry: value})
    shown = "[-1]=True" if value == [True] * 4 else f"={value!r}"
    wanted = accepted if isinstance(accepted, str) else f"one of {accepted}"
    message = f"model={str(path)!r}: the file's {entry}{shown} is not accepted: it must be {wanted}"
    check_refused(f"^{re.escape(message)}", LLM, path)


def test_the_engine_says_that_it_has_no_such_model(make_file):
    """The message has the name of the file, not of the folder that is made of it."""
    path, _ = make_file("phi 3")
    check_refused(f"^model='{path}' .* model_impl='transformers'", LLM, path, model_impl="native")
