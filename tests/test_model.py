"""Every supported architecture against transformers: tokens, logits, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from conftest import greedy_reference, random_prompts
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams

LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)

MODELS = {
    "llama-mha": ("Llama", dict(num_key_value_heads=4, head_dim=None, tie_word_embeddings=False)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3, num_attention_heads=8,
                                  num_key_value_heads=1, head_dim=8)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LINEAR)),
    "mistral-window": ("Mistral", dict(sliding_window=12, num_key_value_heads=1, head_dim=16)),
    "mistral-full": ("Mistral", dict(sliding_window=None, tie_word_embeddings=True)),
    "qwen2-odd-config": ("Qwen2", dict(attention_bias=True, mlp_bias=True, head_dim=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, hidden_size=48, num_attention_heads=6,
                            num_key_value_heads=3, head_dim=None)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1,
                                   head_dim=None)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True, head_dim=24, hidden_size=72)),
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


def test_greedy_tokens_in_float32(model):
    folder, reference = model
    with LLM(folder, dtype="float32", max_model_len=256, max_num_batched_tokens=50) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        assert output.outputs[0].token_ids == greedy_reference(reference, prompt, 24)


def test_logprobs_in_float32(model):
    folder, reference = model
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True)
    with LLM(folder, dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        completion = output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, -4:]
        expected = logits.double().log_softmax(-1)
        for row, at in zip(expected, completion.logprobs):
            found = torch.tensor([at[token_id].logprob for token_id in range(len(row))]).double()
            torch.testing.assert_close(found, row, atol=2e-4, rtol=1e-4)


def test_bfloat16_parts_only_at_near_ties(model):
    """At the first difference, each side's token is in the other's top 5."""
    folder, reference = model
    reference = type(reference).from_pretrained(folder, dtype=torch.bfloat16).eval()
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", max_model_len=256) as llm:
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


@pytest.mark.parametrize("changes, name", [
    (dict(architectures=["GPT2LMHeadModel"]), "architectures"),
    (dict(architectures=None), "architectures"),
    (dict(hidden_act="gelu"), "hidden_act"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope_type"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
     "partial_rotary_factor"),
    (dict(layer_types=["full_attention"] * 3, architectures=["LlamaForCausalLM"],
          model_type="llama"), "layer_types"),
    (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config"),
])
def test_what_cannot_be_run_faithfully_is_refused(tiny, tmp_path, changes, name):
    with pytest.raises(ValueError, match=f"{name}.* must be "):
        LLM(change_config(tiny, tmp_path, **changes), load_format="dummy")


@pytest.mark.parametrize("changes", [
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, factor=8.0)),
    dict(rope_parameters=None, rope_theta=5e4, rope_scaling=None),
    dict(rope_parameters=None, rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.0)),
])
def test_older_and_odder_ways_to_write_rope(make_model, tiny, tmp_path, changes):
    """What transformers makes of a config is what we make of it."""
    folder = change_config(tiny, tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes((Path(tiny) / "model.safetensors").read_bytes())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == greedy_reference(reference, PROMPTS[-1], 24)
