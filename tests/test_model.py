"""Every supported architecture against transformers: tokens, logits, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import changed, check_refused, greedy_reference, random_prompts, slow
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.loader import load_config

LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)

# Heads are of 32 in groups of 2, or of 16 in groups of 1, as GPT-2's: each shape is a kernel to
# compile. Some have entries that count for nothing in their family: biases, or windows.
MODELS = {
    "llama-mha": ("Llama", dict(num_key_value_heads=4, head_dim=None, tie_word_embeddings=False,
                                sliding_window=12)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3, num_attention_heads=2,
                                  num_key_value_heads=1, hidden_size=48, attention_bias=True)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LINEAR,
                                   layer_types=["full_attention"] * 3)),
    "mistral-window": ("Mistral", dict(sliding_window=12, num_attention_heads=2,
                                       num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "mistral-full": ("Mistral", dict(sliding_window=None, tie_word_embeddings=True)),
    "qwen2-odd-config": ("Qwen2", dict(attention_bias=True, mlp_bias=True, head_dim=None,
                                       hidden_size=128, sliding_window=9)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, hidden_size=192, num_attention_heads=6,
                            num_key_value_heads=3, head_dim=None)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1,
                                   hidden_size=128, head_dim=None)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1,
                            hidden_size=72, sliding_window=9, mlp_bias=True)),
    "qwen3-yarn": ("Qwen3", dict(rope_parameters=YARN, attention_bias=True)),
    "qwen3-layers": ("Qwen3", dict(
        use_sliding_window=True, sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
}
PROMPTS = random_prompts([1, 3, 17, 40, 64, 100])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


# the others differ from these in nothing that depends on the dtype
IN_BFLOAT16 = ("llama3-rope", "llama-biases", "mistral-window", "qwen3-yarn")


@pytest.mark.parametrize("name, dtype", [
    *((name, torch.float32) for name in MODELS), *(
        (name, torch.bfloat16) if name in IN_BFLOAT16 else slow(name, torch.bfloat16)
        for name in MODELS)], ids=str)
def test_tokens_and_logprobs(make_model, name, dtype):
    """In bfloat16, the likeliest token of each side is among the other's five."""
    architecture, changes = MODELS[name]
    folder, model = make_model(architecture, **changes)
    reference = type(model).from_pretrained(folder, dtype=dtype).eval()
    with LLM(folder, dtype=dtype, block_size=16, max_model_len=256,
             max_num_batched_tokens=50) as llm:
        outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, logprobs=-1), use_tqdm=False)
        assert llm.metrics()["attention_backend"] == "numba"
        # the configs are left alone
        assert llm.config.attention_backend == "auto"
        assert llm.model_config.rope_parameters == load_config(Path(folder)).rope_parameters
    for prompt, output in zip(PROMPTS, outputs):
        completion = output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, -24:]
        most = 1 if dtype == torch.float32 else 5
        for row, token, at in zip(logits, completion.token_ids, completion.logprobs):
            assert token in row.topk(most).indices and at[int(row.argmax())].rank <= most
            if dtype == torch.float32:
                found = torch.tensor([at[token_id].logprob for token_id in range(len(row))])
                expected = row.double().log_softmax(-1)
                torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


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
    *[(changes, [*changes][0]) for changes in [
        dict(layer_types=["a"] * 2), dict(is_causal=False), dict(is_causal=None),
        dict(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=2),
        dict(max_position_embeddings=2**31), dict(transformers_weights="other.safetensors"),
        dict(num_attention_heads=3),
        dict(sliding_window=1, use_sliding_window=True, max_window_layers=0,
             layer_types=["sliding_attention"] * 2)]],
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
    check_refused(message, LLM, changed(tiny, tmp_path, **changes))


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
    folder = changed(tiny, tmp_path, **changes)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, dtype="float32", block_size=16, max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == greedy_reference(reference, PROMPTS[-1], 24)
