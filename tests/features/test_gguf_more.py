"""GGUF files whose tensors llama.cpp's converter splits, merges or scales: Gemma 3n and 4, those of
DeepSeek, and more with experts."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from quantizing import (
    GREEDY, OPTIONS, PROMPTS, add_entries, check_config, expected, generated)

from nanoengine import LLM
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=320, max_position_embeddings=512, pad_token_id=None)
NAMES = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
         "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
         "attention.head_count": "num_attention_heads",
         "attention.head_count_kv": "num_key_value_heads",
         "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYERS = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = dict(
    num_hidden_layers=4, layer_types=LAYERS, head_dim=32, global_head_dim=64, sliding_window=8,
    final_logit_softcapping=3.0, hidden_size_per_layer_input=0,
    # with the same matrix as the head, the model would only repeat a token
    tie_word_embeddings=False)
OF_GEMMA = {
    "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2,
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
    "attention.value_length_swa": 32, "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 3.0,
    "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
# values are keys in layers that see all, which have fewer of them
EQUAL: dict[str, Any] = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32,
    v_head_dim=64, first_k_dense_replace=1)
OF_LATENT = {
    "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 32,
    "attention.key_length_mla": 64, "attention.value_length_mla": 64, "rope.dimension_count": 32,
    "attention.kv_lora_rank": 32, "leading_dense_block_count": 1}
ROUTED: dict[str, Any] = dict(
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
    n_group=1, topk_group=1, routed_scaling_factor=1.5)
OF_ROUTED = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 64,
             "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1,
             "expert_weights_scale": 1.5}
BY_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True}
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=0.707)
OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
           "rope.scaling.original_context_length": 32,
           "rope.scaling.yarn_log_multiplier": 0.1 * 0.707}
HEADS = dict(head_dim=32)
OF_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
EXPERTS = {"expert_count": 5, "expert_used_count": 2}
SCALES = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
          "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
# of each model: `general.architecture`, the class, its config, and what the file says besides:
# numbers, and names of the config
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma 4 small": ("gemma4", "Gemma4Text", GEMMA | dict(
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=320, num_kv_shared_layers=2,
        use_double_wide_mlp=True), OF_GEMMA | {
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32,
        "feed_forward_length": [128, 128, 256, 256]}),
    "gemma 4": ("gemma4", "Gemma4Text", GEMMA | EQUAL, OF_GEMMA | {
        "attention.head_count_kv": [2, 1] * 2}),
    "gemma 4 experts": ("gemma4", "Gemma4Text", GEMMA | EQUAL | dict(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=64),
        OF_GEMMA | EXPERTS | {
            "attention.head_count_kv": [2, 1] * 2, "expert_feed_forward_length": 64}),
    "gemma 3n": ("gemma3n", "Gemma3nText", dict(
        num_hidden_layers=4, layer_types=LAYERS, head_dim=32, sliding_window=8, laurel_rank=32,
        hidden_size_per_layer_input=32, num_kv_shared_layers=2, vocab_size_per_layer_input=320,
        activation_sparsity_pattern=[0.95, 0.9, 0.0, 0.0], tie_word_embeddings=False), OF_HEADS | {
        # files of 2025 do not say how logits are capped
        "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32,
        "altup.active_idx": 0, "altup.num_inputs": 4, "feed_forward_length": [128] * 4,
        # of 0.95 and 0.9
        "activation_sparsity_scale": [1.6448536, 1.2815516, -math.inf, -math.inf]}),
    "deepseek 2": ("deepseek2", "DeepseekV2", LATENT | ROUTED | dict(
        q_lora_rank=None, topk_method="greedy", rope_parameters=YARN), OF_LATENT | OF_ROUTED
        | OF_YARN),
    "deepseek 2 groups": ("deepseek2", "DeepseekV2", LATENT | ROUTED | dict(
        q_lora_rank=64, topk_method="group_limited_greedy", n_group=3, topk_group=2),
        OF_LATENT | OF_ROUTED | {"attention.q_lora_rank": 64, "expert_group_count": 3,
                                 "expert_group_used_count": 2}),
    "deepseek 3": ("deepseek2", "DeepseekV3", LATENT | ROUTED | dict(
        q_lora_rank=64, n_group=3, topk_group=2, rope_parameters=YARN),
        OF_LATENT | OF_ROUTED | OF_YARN | BY_SIGMOID | {
            "attention.q_lora_rank": 64, "expert_group_count": 3, "expert_group_used_count": 2}),
    # its last layer guesses a further token
    "glm 4.5": ("glm4moe", "Glm4Moe", ROUTED | HEADS | dict(
        attention_bias=True, use_qk_norm=True, first_k_dense_replace=1), OF_ROUTED | OF_HEADS
        | BY_SIGMOID | {"rope.dimension_count": 16, "leading_dense_block_count": 1,
                        "block_count": 3, "nextn_predict_layers": 1}),
    "dots": ("dots1", "Dots1", ROUTED | HEADS | dict(
        norm_topk_prob=True, first_k_dense_replace=1, sliding_window=None,
        layer_types=["full_attention"] * 2),
        OF_ROUTED | OF_HEADS | BY_SIGMOID | {"leading_dense_block_count": 1}),
    "k-exaone": ("exaone-moe", "ExaoneMoe", HEADS | dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, num_shared_experts=1,
        routed_scaling_factor=1.5, first_k_dense_replace=1, sliding_window=8,
        num_hidden_layers=4,
        layer_types=LAYERS), OF_ROUTED | OF_HEADS | BY_SIGMOID | {
        "expert_shared_feed_forward_length": 64, "leading_dense_block_count": 1,
        "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2,
        "rope.scaling.type": "none"}),
    "minimax 2": ("minimax-m2", "MiniMaxM2", HEADS | dict(
        num_local_experts=5, num_experts_per_tok=2, intermediate_size=64, rope_parameters=dict(
            rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5)), OF_HEADS | EXPERTS | {
        "expert_gating_func": 2, "expert_feed_forward_length": 64, "rope.dimension_count": 16}),
    "granite experts": ("granitemoe", "GraniteMoe", dict(
        num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
        attention_multiplier=0.0625, residual_multiplier=0.5, logits_scaling=2.0,
        tie_word_embeddings=True), SCALES | EXPERTS),
    "granite shared": ("granitemoe", "GraniteMoeShared", dict(
        num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=64,
        embedding_multiplier=3.0, attention_multiplier=0.0625, residual_multiplier=0.5,
        logits_scaling=2.0, tie_word_embeddings=False), SCALES | EXPERTS | {
        "expert_shared_feed_forward_length": 64}),
    "ernie experts": ("ernie4_5-moe", "Ernie4_5_Moe", dict(
        moe_num_experts=5, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=2,
        tie_word_embeddings=False), EXPERTS | {
        "expert_feed_forward_length": 64, "expert_shared_count": 2, "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1}),
    "hunyuan experts": ("hunyuan-moe", "HunYuanMoEV1", HEADS | dict(num_experts=5, moe_topk=2),
                        OF_HEADS | EXPERTS | {
        "expert_feed_forward_length": 128, "expert_shared_feed_forward_length": 128,
        "expert_shared_count": 1}),
    "qwen 3 vl": ("qwen3vl", "Qwen3", HEADS, OF_HEADS | {"rope.dimension_sections": [6, 5, 5, 0]}),
    "qwen 2 vl": ("qwen2vl", "Qwen2", {}, {"rope.dimension_sections": [4, 6, 6, 0]})}
# the names that checkpoints have where transformers has another, and those that have none
OTHERS = {"block_sparse_moe.router.": "block_sparse_moe.router.layer.", "router.scale": None,
          "router.per_expert_scale": None, "layer_scalar": "layer_scalar.weight",
          "correct_output_scale": "correct_output_scale.weight",
          "mlp.e_score_correction_bias": "mlp.e_score_correction.bias",
          "gate.e_score_correction_bias": "e_score_correction.bias",
          "gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction.bias"}
SUFFIXES = {"router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale"}


def make(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    _, kind, changes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for place, tensor in model.state_dict().items():
        is_one = "norm" in place and place.endswith(".weight") or place.endswith("scalar")
        size = 0.3 if tensor.ndim == 1 else 0.15
        tensor.copy_(torch.randn_like(tensor) * size + is_one)
    return model


class Writer(gguf.GGUFWriter):
    """Writes tensors as llama.cpp's converter; they get the dequantized numbers of the file."""

    def __init__(self, path: Path, arch: str, count: int, kind: str) -> None:
        super().__init__(path, arch)
        known = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[arch]
        self.names = gguf.get_tensor_name_map(known, count)
        self.type = gguf.GGMLQuantizationType[kind]
        self.matrices: dict[str, list[torch.Tensor]] = {}

    def own_name(self, place: str) -> str:
        layer = ".".join(place.split(".")[2:3])
        for given, other in OTHERS.items():
            if place.endswith(given) or given.endswith(".") and given in place:
                if other is None:
                    return f"blk.{layer}.{SUFFIXES[given]}"
                place = place.replace(given, other)
        found = self.names.get_name(place, try_suffixes=(".weight", ".bias"))
        assert found, place
        return found

    def put(self, place: str, weight: torch.Tensor) -> None:
        is_matrix = weight.ndim >= 2 and not any(each in place for each in (
            "norm", "router", "mlp.gate.", "bias", "_coefs"))
        kind = self.type if is_matrix else gguf.GGMLQuantizationType.F32
        rows = weight.reshape(-1, weight.shape[-1]).numpy()
        stored = gguf.quantize(rows, kind)
        numbers = torch.from_numpy(gguf.dequantize(stored, kind)).view(weight.shape)
        weight.copy_(numbers)
        self.add_tensor(self.own_name(place), stored.reshape(*weight.shape[:-1], -1),
                        raw_dtype=kind)

    def put_all(self, place: str, weight: torch.Tensor, arch: str, config: Any) -> None:
        module, _, own = place.rpartition(".")
        if place.endswith("kv_b_proj.weight"):
            keys, values = weight.view(config.num_attention_heads, -1, weight.shape[1]).split(
                [config.qk_nope_head_dim, config.v_head_dim], dim=1)
            self.put(place.replace("kv_b", "k_b"), turned := keys.mT.contiguous())
            keys.copy_(turned.mT)
            self.put(place.replace("kv_b", "v_b"), values)
        elif ".altup_" in place:
            # three matrices, in one tensor
            name, number, _ = place.rsplit(".", 2)
            self.matrices[name] = [*self.matrices.get(name, []), weight]
            if number == "2":
                self.put(f"{name}.weight", together := torch.stack(self.matrices[name]))
                for each, stored in zip(self.matrices[name], together):
                    each.copy_(stored)
        elif own == "gate_up_proj" and arch != "gemma4":
            for part, each in zip(("gate", "up"), weight.chunk(2, dim=1)):
                self.put(f"{module}.{part}_proj.weight".replace("block_sparse_moe", "mlp"), each)
        elif "shared_mlp.input_linear" in place:
            for part, each in zip(("gate", "up"), weight.chunk(2)):
                layer, _, _ = place.partition("shared_mlp")
                self.put(f"{layer}mlp.shared_expert.{part}_proj.weight", each)
        elif own in ("gate_up_proj", "down_proj"):
            self.put(f"{place}.weight".replace("block_sparse_moe", "mlp"), weight)
        elif arch == "granitemoe" and module.endswith(("q_proj", "k_proj")):
            head_dim = config.hidden_size // config.num_attention_heads
            rows = torch.arange(len(weight)).view(-1, 2, head_dim // 2).transpose(1, 2).flatten()
            self.put(place, ordered := weight[rows])
            weight[rows] = ordered
        else:
            self.put(place, weight)


def write(model: Any, name: str, path: Path, kind: str, changes: dict[str, Any]) -> None:
    arch, _, _, entries = MODELS[name]
    config = model.config
    writer = Writer(path, arch, config.num_hidden_layers + 1, kind)
    theta = (config.rope_parameters or {}).get("rope_theta")
    entries = NAMES | ({"rope.freq_base": theta} if theta else {}) | entries | changes
    add_entries(writer, config, entries)
    if arch == "gemma4":
        # a quarter of each head is rotated
        factors = np.array([1.0] * 8 + [1e30] * 24, np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for place, weight in model.state_dict().items():
        if not (config.tie_word_embeddings and place == "lm_head.weight"):
            writer.put_all(place, weight, arch, config)
    if "nextn_predict_layers" in entries:
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((128, 256), np.float32))
        writer.add_tensor("blk.2.attn_norm.weight", np.zeros(128, np.float32))
    if entries.get("attention.shared_kv_layers"):
        # as released checkpoints have it
        writer.add_tensor("blk.3.attn_k.weight", np.zeros((64, 128), np.float32))
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
FAST = ("gemma 4 small", "deepseek 3")


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_tokens_are_those_of_the_model(make_file, name):
    """Weights stay packed, also those of experts that transformers has in one tensor; but not those
    of a linear that the file has in two."""
    path, model = make_file(name, "Q8_0")
    # the first chunk, and what follows it, are longer than a window
    with LLM(path, **OPTIONS | dict(max_num_batched_tokens=24, max_num_seqs=2)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        linears = {place: each for place, each in llm.engine.runner.model.layers.named_modules()
                   if isinstance(each, torch.nn.Linear) and not any(part in place for part in (
                       "kv_b_proj", "router", "_coefs", "mlp.gate.wg", "shared_mlp.gate_up"))}
        assert len(linears) >= 8
        assert all(isinstance(each, QuantizedLinear) for each in linears.values())
    found = [each.outputs[0].token_ids for each in outputs]
    assert found == expected(model)
    # otherwise the layers would hardly matter
    assert min(len({*each}) for each in found) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_file_in_float32(make_file, name):
    path, model = make_file(name, "F32")
    assert generated(path, kernels=False) == expected(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_config_is_that_of_the_model(make_file, name):
    """What llama.cpp's converter leaves out is known."""
    path, model = make_file(name, "F32")
    others = {"per_layer_config", "vocab_size_per_layer_input"}
    check_config(path, model, others, whole_rope="gemma" in name)


@pytest.mark.parametrize("name, found", [
    ("blk.3.a.weight", "layers.3.b.c.weight"), ("a.weight", "b.c.weight"), ("a", "a"),
    ("blk.3.a.scale", "layers.3.d"), ("blk.0.other.bias", "layers.0.other.bias")])
def test_names_of_tensors(name, found):
    assert gguf_header.plain_name(name, {"a": "b.c", "a.scale": "d"}) == found


def test_layers_that_guess_are_left_out(make_file):
    path, _ = make_file("glm 4.5", "F32")
    table = gguf_header.Header([path]).table[str(path)]
    assert not any("layers.2." in name for name in table)


@pytest.mark.parametrize("name", ["gemma 3n", "gemma 4 small"])
def test_keys_that_their_layer_does_not_use_are_left_out(make_file, name):
    path, _ = make_file(name, "F32")
    table = gguf_header.Header([path]).table[str(path)]
    assert "layers.3.self_attn.k_proj.weight" not in table
    assert "layers.1.self_attn.k_proj.weight" in table


@pytest.mark.parametrize("name, changes, message", [
    ("gemma 4", {"attention.sliding_window_pattern": [True] * 4}, ".*pattern.-1.=True .* .False."),
    ("gemma 4", {"feed_forward_length": [128, 256, 128, 128]}, "feed_forward_length=.128, 256, "),
    ("gemma 4", {"rope.scaling.type": "linear"}, "rope.scaling.type='linear' .* .'none'."),
    ("gemma 4", {"rope.scaling.factor": 8.0}, "rope.scaling.factor=8.0 .* .1.0."),
    ("gemma 3n", {"altup.active_idx": 1}, "altup.active_idx=1 .* .0."),
    ("gemma 4 experts", {"expert_weights_scale": 2.0}, "expert_weights_scale=2.0 .* .1.0."),
    ("deepseek 3", {"expert_count": 0}, "expert_count=0 .* a model with experts"),
    ("deepseek 2", {"expert_weights_norm": True}, "expert_weights_norm=True .* .False."),
    ("deepseek 3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale=0.1.* .0.0."),
    ("dots", {"expert_gating_func": 3}, "expert_gating_func=3 .* .2."),
    ("minimax 2", {"expert_gating_func": 1}, "expert_gating_func=1 .* .2."),
    ("dots", {"attention.key_length_swa": 16}, "attention.key_length_swa=16 .* .32."),
    ("granite experts", {"expert_shared_count": 1}, "expert_shared_count=1 .* .0."),
    ("hunyuan experts", {"expert_feed_forward_length": 64}, ".*_length=64 .* .128."),
    ("qwen 3 vl", {"rope.dimension_count": 16}, "rope.dimension_count=16 .* .32.")])
def test_what_a_family_does_not_have(make_file, name, changes, message):
    path, _ = make_file(name, "F32", changes)
    with pytest.raises(ValueError, match=f"^model='{path}': the file's {message}"):
        LLM(path)


@pytest.mark.parametrize("count, groups", [(64, (1, 1)), (160, (8, 3)), (256, (8, 4)),
                                           (384, (1, 1))])
def test_groups_of_experts_that_an_old_file_does_not_name(make_file, count, groups):
    path, _ = make_file("deepseek 3", "F32")
    header = gguf_header.Header([path])
    for part in ("", "used_"):
        del header.fields[f"deepseek2.expert_group_{part}count"]
    find = header.find
    header.find = lambda name, default=None: (
        count if name == "deepseek2.expert_count" else find(name, default))
    found = header.family.own(header)
    assert (found["n_group"], found["topk_group"]) == groups
