"""Logits have the same bits under every schedule, on a CPU: compared bit for bit."""

import json
import random

import numba
import pytest
import torch
from conftest import ROOT, for_feature, next_number, random_prompts, slow

from nanoengine import LLM, SamplingParams
from nanoengine.config import EngineConfig

LENGTHS = [40, 3, 97, 130, 1, 64, 33, 150]
SHARED = random_prompts([70])[0]
PROMPTS = [SHARED[:len(prompt) // 2] + prompt for prompt in random_prompts(LENGTHS)]
SCHEDULES = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8, "scheduling": "mixed"},
    "preempted": {"num_kv_blocks": 24, "enable_prefix_caching": False},
    "swapped": {"num_kv_blocks": 24, "preemption_mode": "swap", "swap_space": 0.01},
    "small steps": {"max_num_batched_tokens": 3},
}


def logits_of(llm: LLM, prompts: list[list[int]], max_tokens: int = 20) -> dict:
    """(prompt, number of tokens before): the logits there, of all tokens that were sampled."""
    found, first = {}, next_number(llm)
    runner, newest = llm.engine.runner, []
    launch = runner.launch

    def launch_watched(batch):
        keys = [(int(seq.request_id) - first, seq.num_tokens) for _, seq, _ in batch.sampled]
        launched = launch(batch)
        for key, row in zip(keys, newest[-1] if keys else []):
            found[key] = row.clone()
        return launched

    runner.launch = launch_watched
    hook = runner.model.lm_head.register_forward_hook(
        lambda module, inputs, logits: newest.append(logits))
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                 use_tqdm=False)
    runner.launch = launch
    hook.remove()
    return found


def check(folder: str, prompts: list[list[int]], schedules: dict, **options) -> None:
    options |= {"batch_invariant": True}
    with LLM(folder, enable_prefix_caching=False, **options) as llm:
        # numba has as many as PyTorch once a model is there
        assert torch.get_num_threads() > 1 < numba.get_num_threads(), "threads take turns at a step"
        alone = [logits_of(llm, [prompt]) for prompt in prompts]
    expected = {(index, length): row for index, rows in enumerate(alone)
                for (_, length), row in rows.items()}
    for name, schedule in schedules.items():
        with LLM(folder, **(options | schedule)) as llm:
            for run in ("first", "with what the prefix cache has"):
                found = logits_of(llm, prompts)
                assert found.keys() == expected.keys()
                for key, row in found.items():
                    assert torch.equal(row, expected[key]), (name, run, key)
            counters = llm.metrics()
            assert (name in ("preempted", "swapped")) == (counters["num_preemptions"] > 0)
            assert (name == "swapped") == (counters["swap_in_blocks"] > 0)
            is_cached = llm.config.enable_prefix_caching
            assert is_cached == (counters["prefix_cache_hits"] > 0)


# heads of 16: a kernel that test_model compiles, too
LLAMA = "Llama", {"num_key_value_heads": 4, "head_dim": None, "intermediate_size": 224}
QWEN2 = "Qwen2", {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("architecture, changes, dtype, stored", [
    ("Qwen3", {}, "float32", "auto"), ("Qwen3", {}, "bfloat16", "auto"),
    (*QWEN2, "float32", "auto"),
    *for_feature("running.kv_cache", ("Qwen3", {}, "float32", "fp8")),
    *(slow(*each) for each in (
        (*LLAMA, "float32", "auto"), (*LLAMA, "bfloat16", "int8"), (*LLAMA, "bfloat16", "auto"),
        (*QWEN2, "bfloat16", "auto"), (*QWEN2, "bfloat16", "fp8")))])
def test_same_bits_under_every_schedule(make_model, architecture, changes, dtype, stored):
    folder, _ = make_model(architecture, **changes)
    check(folder, PROMPTS, SCHEDULES, dtype=dtype, block_size=16, kv_cache_dtype=stored)


@pytest.mark.parametrize("dtype", [
    slow("float32"), "bfloat16"])
def test_same_bits_with_products_as_large_as_real_ones(tmp_path, dtype):
    """Those of Qwen3-0.6B, with smaller heads in their place, two layers and fewer tokens."""
    config = json.loads((ROOT / "models/qwen3-0.6b/config.json").read_text())
    config |= dict(num_attention_heads=32, num_key_value_heads=16, head_dim=64,
                   num_hidden_layers=2, vocab_size=5000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[random.Random(n).randrange(5000) for _ in range(n)] for n in (300, 5, 128, 77)]
    schedules = {"batched": {}, "chunked": {"max_num_batched_tokens": 100, "max_num_seqs": 8},
                 "preempted": {"num_kv_blocks": 18, "enable_prefix_caching": False}}
    check(str(tmp_path), prompts, schedules, dtype=dtype, load_format="dummy", max_model_len=512,
          block_size=32)


def test_block_sizes_that_are_multiples_of_32_give_the_same_bits(bundled):
    found = []
    for block_size in (32, 128):
        with LLM(bundled, dtype="bfloat16", block_size=block_size, num_kv_blocks=64) as llm:
            found.append(logits_of(llm, PROMPTS[-1:]))
    assert all(torch.equal(row, found[1][key]) for key, row in found[0].items())
    for text in (EngineConfig.__doc__, (ROOT / "docs" / "reference.md").read_text()):
        assert "use a block_size divisible by 32" in " ".join(text.lower().split())
