"""Random weights, with nothing to download."""

from conftest import random_prompts

from nanoengine import LLM

PROMPTS = random_prompts([5, 30])


def test_dummy_weights_need_only_a_config_and_are_always_the_same(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    outputs = []
    for _ in range(2):
        with LLM(str(copy), load_format="dummy", block_size=16, num_kv_blocks=8) as llm:
            outputs.append(llm.generate(PROMPTS, use_tqdm=False)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 16
