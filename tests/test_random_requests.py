"""Random requests, in several threads at once under random options: each as if it were alone."""

import random
import threading

import pytest
from conftest import overtaking, slow

from nanoengine import LLM, SamplingParams

TEXTS = ["47 + 85 =", "sort d b e a =", "count 17 to 23 =", "Once upon a time", "The little dog"]
# each is added to some of the requests
MORE = [
    dict(top_k=1), dict(top_k=50), dict(top_p=0.3), dict(top_p=0.9), dict(min_p=0.05),
    dict(stop=[" the"]), dict(stop=["a", "e"], include_stop_str_in_output=True),
    dict(stop_token_ids=[5]), dict(ignore_eos=True), dict(logprobs=0), dict(logprobs=3),
    dict(prompt_logprobs=2), dict(presence_penalty=0.5, frequency_penalty=0.3), dict(min_tokens=3),
    dict(repetition_penalty=1.3), dict(bad_words=[" the", "a"]), dict(logit_bias={300: 5.0}),
    dict(allowed_token_ids=[*range(200, 260), 866]), dict(stop_token_ids=[20, 866]),
    dict(logit_bias={866: 5.0}), dict(bad_words=["<extra7>", "a <extra5>", "the"]),
    dict(logits_processors=[lambda input_ids, scores: scores * 1.5])]


def make_prompt(rng: random.Random, vocab_size: int) -> str | list[int]:
    """Some begin alike, with one or two blocks."""
    if rng.random() < 0.5:
        return " ".join(rng.choices(TEXTS, k=rng.randint(1, 5)))
    beginning = [*range(40, 74)] if rng.random() < 0.5 else []
    return beginning + rng.choices(range(vocab_size), k=rng.randint(1, 60))


def make_params(rng: random.Random) -> SamplingParams:
    found = dict(seed=rng.randrange(1000), temperature=rng.choice([0, 0, 0.7, 1.5]),
                 max_tokens=rng.choice([3, 8, 20, 40]))
    for more in MORE:
        found |= more if rng.random() < 0.12 else {}
    if found["temperature"] and rng.random() < 0.3:
        found["n"] = rng.randint(2, 4)
    return SamplingParams(**found)


def make_options(rng: random.Random) -> dict:
    return dict(
        num_kv_blocks=rng.choice([13, 19, 40]), max_num_seqs=rng.choice([4, 8, 40]),
        max_num_batched_tokens=rng.choice([40, 64, 2048]), run_ahead=rng.random() < 0.5,
        scheduling=rng.choice(["prefill-first", "mixed", "static", overtaking("mixed", 1)]),
        scheduling_policy=rng.choice(["fcfs", "priority"]), swap_space=rng.choice([0.001, 0.01]),
        kv_allocation=rng.choice(["on-demand", "on-demand", "reserve"]),
        preemption_mode=rng.choice(["recompute", "swap"]), seed=rng.randrange(1000),
        preemption_victim=rng.choice(["youngest", "longest", "lowest-priority", "random"]),
        enable_prefix_caching=rng.random() < 0.7)


def parts_of(output) -> list:
    """What does not depend on time or on the number of the request."""
    return [vars(completion) for completion in output.outputs] + [output.prompt_logprobs]


@pytest.fixture(scope="module", params=["its own", "wide"])
def tokenizer(request, bundled, wide_tokenizer) -> str:
    """The model's own, or one that knows more tokens than the model."""
    return bundled if request.param == "its own" else wide_tokenizer


@pytest.fixture(scope="module")
def alone(bundled, tokenizer):
    with LLM(bundled, tokenizer=tokenizer, dtype="float32", num_kv_blocks=40) as llm:
        yield lambda prompt, params: llm.generate(prompt, params, use_tqdm=False)[0]


SEEDS = [*range(3), *(slow(seed) for seed in range(3, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_is_as_if_alone(bundled, tokenizer, alone, seed):
    rng = random.Random(seed)
    with LLM(bundled, tokenizer=tokenizer, dtype="float32", **make_options(rng)) as llm:
        work = [(make_prompt(rng, llm.model_config.vocab_size), make_params(rng), rng.randrange(3))
                for _ in range(20)]
        shares = [work[part::3] for part in range(3)]
        found = {}

        def call(part: int) -> None:
            prompts, params, priorities = map(list, zip(*shares[part]))
            for output in llm.stream(prompts, params, priorities):
                found[part, output.index] = output

        threads = [threading.Thread(target=call, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = llm.metrics()
    assert metrics["num_blocks_used"] == metrics["num_host_blocks_used"] == 0
    assert len(found) == len(work)
    for (part, index), output in found.items():
        prompt, params, _ = shares[part][index]
        assert parts_of(output) == parts_of(alone(prompt, params)), (prompt, params)
