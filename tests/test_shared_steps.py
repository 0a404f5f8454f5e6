"""Calls of several threads share steps."""

from concurrent.futures import ThreadPoolExecutor

from nanoengine import LLM, SamplingParams


def test_calls_of_several_threads_share_steps() -> None:
    prompts = [[5 + i] * 12 for i in range(3)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=200, ignore_eos=True)
    options = dict(dtype="float32", device="cpu", max_model_len=512)
    with LLM("models/tiny-qwen3", **options) as llm:
        def call(prompt: list[int]) -> list[int]:
            return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

        alone = [call(prompt) for prompt in prompts]
        before = llm.metrics()["num_steps"]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(call, prompts))
        num_steps = llm.metrics()["num_steps"] - before
        assert together == alone
        # one after the other they took three times 200
        assert before == 600 and num_steps < 400
        assert llm.metrics()["num_blocks_used"] == 0
