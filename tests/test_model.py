"""Every supported architecture against transformers: tokens, logits, and what is refused."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from conftest import check_refused, greedy_reference, random_prompts, slow
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.loader import FAMILIES, check_supported, checkpoint_tensors, load_config
from nanoengine.model import Decoder, rope_table, window_of

# their model_type in config.json
TYPES = [name.removesuffix("ForCausalLM").lower() for name in FAMILIES]
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)

# Heads are of 32 in groups of 2, or of 16 in groups of 1, as GPT-2's: each shape is a kernel to
# compile.
MODELS = {
    "llama-mha": ("Llama", dict(num_key_value_heads=4, head_dim=None, tie_word_embeddings=False)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3, num_attention_heads=2,
                                  num_key_value_heads=1, hidden_size=48)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LINEAR,
                                   layer_types=["full_attention"] * 3)),
    "mistral-window": ("Mistral", dict(sliding_window=12, num_attention_heads=2,
                                       num_key_value_heads=1)),
    "mistral-full": ("Mistral", dict(sliding_window=None, tie_word_embeddings=True)),
    "qwen2-odd-config": ("Qwen2", dict(attention_bias=True, mlp_bias=True, head_dim=None,
                                       hidden_size=128)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, hidden_size=192, num_attention_heads=6,
                            num_key_value_heads=3, head_dim=None)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1,
                                   hidden_size=128, head_dim=None)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1,
                            hidden_size=72)),
    "qwen3-yarn": ("Qwen3", dict(rope_parameters=YARN, attention_bias=True)),
    "qwen3-layers": ("Qwen3", dict(
        use_sliding_window=True, sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
}
PROMPTS = random_prompts([1, 3, 17, 40, 64, 100])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def model(request, make_model):
    architecture, changes = MODELS[request.param]
    return make_model(architecture, **changes)


def test_tokens_and_logprobs_in_float32(model):
    folder, reference = model
    params = dataclasses.replace(GREEDY, logprobs=-1)
    with LLM(folder, dtype="float32", block_size=16, max_model_len=256,
             max_num_batched_tokens=50) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        completion = output.outputs[0]
        assert completion.token_ids == greedy_reference(reference, prompt, 24)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, -24:]
        expected = logits.double().log_softmax(-1)
        for row, at in zip(expected, completion.logprobs):
            found = torch.tensor([at[token_id].logprob for token_id in range(len(row))]).double()
            torch.testing.assert_close(found, row, atol=2e-4, rtol=1e-4)


# the others differ from these in nothing that depends on the dtype
IN_BFLOAT16 = ("llama3-rope", "llama-biases", "mistral-window", "qwen3-yarn")


@pytest.mark.parametrize("model", [
    name if name in IN_BFLOAT16 else slow(name) for name in MODELS], indirect=True)
def test_bfloat16_parts_only_at_near_ties(model):
    """At the first difference, each side's token is in the other's top 5."""
    folder, reference = model
    reference = type(reference).from_pretrained(folder, dtype=torch.bfloat16).eval()
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", block_size=16, max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        ours, theirs = output.outputs[0], greedy_reference(reference, prompt, 24)
        for position, (left, right) in enumerate(zip(ours.token_ids, theirs)):
            if left != right:
                with torch.inference_mode():
                    logits = reference(torch.tensor([prompt + theirs[:position]])).logits[0, -1]
                assert left in logits.topk(5).indices
                assert right in ours.logprobs[position]
                break


def change_config(source: str, target: Path, **changes) -> str:
    config = json.loads((Path(source) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return str(target)


DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
# entries of config.json, and what the message names
REFUSED = [
    # what cannot be run faithfully
    *[(changes, f"{name}.* must be ") for changes, name in [
        (dict(architectures=["GPT2LMHeadModel"]), "architectures"),
        (dict(architectures=None), "architectures"), (dict(hidden_act="gelu"), "hidden_act"),
        (dict(rope_parameters=DYNAMIC), "rope_type"),
        (dict(rope_parameters=PARTIAL), "partial_rotary_factor"),
        (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config"),
        (dict(num_key_value_heads=3), "num_attention_heads"),
        # transformers has windows in these layers
        (dict(layer_types=["sliding_attention"] * 2, architectures=["LlamaForCausalLM"],
              model_type="llama"), "layer_types"),
        (dict(num_key_value_heads=8), "num_attention_heads"),
        *[(dict(num_hidden_layers=count, layer_types=None), "num_hidden_layers")
          for count in (0, -1, 2**40)]]],
    # wrong types, and missing keys
    *[(changes, r"config\.json") for changes in [
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)),
        dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)),
        dict(rope_parameters=LINEAR | dict(factor="a")), dict(rope_parameters=[1]),
        dict(hidden_size="64"), dict(vocab_size=1.5), dict(rms_norm_eps=None),
        dict(architectures=5), dict(num_hidden_layers="2"), dict(head_dim=31),
        dict(layer_types=[1]), dict(eos_token_id="a"), dict(max_position_embeddings=None),
        dict(tie_word_embeddings="no"), dict(model_type=5)]],
    # more than the memory, before it is made
    *[(changes, "model=.* GiB of weights.* GiB of memory") for changes in [
        dict(num_hidden_layers=100, hidden_size=2**20, layer_types=None), dict(hidden_size=2**30),
        dict(vocab_size=2**31 - 1), dict(hidden_size=2**40), dict(intermediate_size=2**40)]],
    # sizes that no model has
    *[(changes, "config.json|cannot be run with these options") for changes in [
        *[{name: -4} for name in (
            "vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings")],
        dict(max_position_embeddings=2**40), dict(head_dim=2**40), dict(head_dim=0)]]]


@pytest.mark.parametrize("changes, message", REFUSED, ids=str)
def test_a_model_that_cannot_be_run_is_refused(tiny, tmp_path, changes, message):
    check_refused(message, LLM, change_config(tiny, tmp_path, **changes), load_format="dummy")


@pytest.mark.parametrize("options, message", [
    (dict(num_kv_blocks=10**9), "cannot be run with these options: [0-9]+ bytes"),
    *[({name: value}, f"(?s){name}.*less than 2147483648") for value in (2**31, 10**400)
      for name in ("num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")],
    (dict(preemption_mode="swap", swap_space=1e300), r"swap_space=1e\+300 .* GiB of memory"),
    (dict(preemption_mode="swap", swap_space=1e6), "swap_space=1000000.0 .* GiB of memory"),
    (dict(block_size=2**31 - 1), "cannot be run with these options|at most"),
    (dict(max_model_len=10**12), "max_model_len=10{12} .* 2 to 512")])
def test_sizes_that_no_memory_holds_are_refused(make_llm, options, message):
    check_refused(message, make_llm, **options)


@pytest.mark.parametrize("changes", [
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, factor=8.0)),
    dict(rope_parameters=None, rope_theta=5e4, rope_scaling=None),
    dict(rope_parameters=None, rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.0)),
])
def test_older_and_odder_ways_to_write_rope(tiny, tmp_path, changes):
    """What transformers makes of a config is what we make of it."""
    folder = change_config(tiny, tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes((Path(tiny) / "model.safetensors").read_bytes())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, dtype="float32", block_size=16, max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == greedy_reference(reference, PROMPTS[-1], 24)


# -------------------------------------------------------------------------------- families


def make_config(family: str, **changes):
    """A small config of a family, with head_dim, as `load_config` gives it."""
    options = dict(hidden_size=64, intermediate_size=48, vocab_size=20, num_hidden_layers=3,
                   num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    name = family.title()
    config = getattr(transformers, f"{name}Config")(**options | changes)
    config.architectures = [f"{name}ForCausalLM"]
    return config


def reference_of(config) -> torch.nn.Module:
    return getattr(transformers, config.architectures[0])._from_config(
        config, attn_implementation="eager").eval()


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("family", TYPES)
def test_a_family_has_the_parameters_of_transformers(family, attention_bias, mlp_bias):
    """Biases and head norms; switches that a family does not know count for nothing."""
    config = make_config(family, attention_bias=attention_bias, mlp_bias=mlp_bias)
    check_supported(config)
    with torch.device("meta"):
        ours, theirs = Decoder(config), reference_of(config)
    expected = {re.sub(r"^model\.", "", name): parameter.shape
                for name, parameter in theirs.named_parameters()}
    assert {name: part.shape for name, part in checkpoint_tensors(ours).items()} == expected


@pytest.mark.parametrize("changes", [
    dict(sliding_window=None), dict(sliding_window=4),
    dict(sliding_window=4, use_sliding_window=True, max_window_layers=1),
    dict(sliding_window=5, use_sliding_window=True, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])])
@pytest.mark.parametrize("family", TYPES)
def test_a_layer_sees_as_far_as_in_transformers(family, changes):
    if family in ("llama", "mistral"):  # for which windows of layers are refused
        changes = {name: value for name, value in changes.items() if name != "layer_types"}
    config = make_config(family, **changes)
    check_supported(config)
    seen, num_tokens = [], 9

    def note(module, arguments, options):
        seen.append(int((options["attention_mask"][0, 0, -1] == 0).sum()))

    model = reference_of(config)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        model(torch.arange(num_tokens)[None])
    assert [window_of(config, index) or num_tokens for index in range(3)] == seen
    assert [layer.self_attn.window for layer in Decoder(config).layers] == [
        window_of(config, index) for index in range(3)]


ROPE_TYPES = {
    "default": dict(rope_type="default", rope_theta=5e4), "linear": LINEAR, "llama3": LLAMA3,
    "yarn": YARN}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", TYPES)
def test_angles_are_those_of_transformers_and_the_config_is_left_alone(family, rope_type):
    config = make_config(family, rope_parameters=dict(ROPE_TYPES[rope_type]))
    check_supported(config)
    before = copy.deepcopy(config.to_dict())
    table = rope_table(config, 100)
    with torch.device("meta"):
        Decoder(config)
    assert config.to_dict() == before
    rotary = reference_of(config).model.rotary_emb
    expected = torch.stack(rotary(torch.zeros(1), torch.arange(100)[None]))[:, 0]
    assert table.shape == (2, 100, 8) and table.dtype == torch.float32
    torch.testing.assert_close(table.repeat(1, 1, 2), expected, atol=2e-5, rtol=0)


def test_an_engine_leaves_the_configs_alone(make_llm, tiny):
    with make_llm(num_kv_blocks=8) as llm:
        before = copy.deepcopy(llm.config)
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        assert llm.model_config.to_dict() == load_config(Path(tiny)).to_dict()
        assert llm.config == before and llm.config.attention_backend == "auto"
        assert llm.metrics()["attention_backend"] == "numba"
