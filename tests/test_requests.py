"""What a user may ask for: every form of prompt and parameters, and what is refused."""

import pytest
from conftest import GREEDY, generate, token_ids

from nanoengine import LLM, SamplingParams


def test_every_form_of_prompt(llm):
    text, ids = "sort d b e a =", llm.get_tokenizer().encode("sort d b e a =")
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids},
             {"prompt": text, "prompt_token_ids": ids}]
    outputs = generate(llm, forms)
    assert len({tuple(ids) for ids in token_ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None, text]
    assert all(output.prompt_token_ids == ids for output in outputs)
    for form in forms:
        assert token_ids(generate(llm, form)) == token_ids(outputs[:1])
    assert generate(llm, []) == []


def test_defaults_come_from_the_generation_config(llm, monkeypatch):
    seen = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda seq: seen.append(seq) or add(seq))
    llm.generate("a", use_tqdm=False)
    params = seen[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.95, 50)
    assert params.max_tokens == 16


def test_the_sequences_of_a_request(llm):
    """The first, with what its parameters say, and its forks, each with a seed of its own."""
    inputs = llm.inputs
    number = inputs.num_requests
    params = SamplingParams(n=3, seed=5, max_tokens=7, stop_token_ids=[9], presence_penalty=1)
    first, second = inputs.make_requests(["Once upon", [4, 5]], [params, SamplingParams()])
    assert (first.prompt, second.prompt) == ("Once upon", None)
    assert inputs.num_requests == number + 2
    first_seqs = [completion.seq for completion in first.completions]
    seq, *forks = first_seqs
    assert first.seq is seq
    ids = llm.get_tokenizer().encode("Once upon")
    assert seq.forks == forks and len(forks) == 2
    assert len({each.seed for each in first_seqs}) == 3 and seq.seed == 5
    for index, each in enumerate(first_seqs):
        assert (each.request_id, each.index, each.params) == (str(number), index, params)
        assert each.token_ids == ids and each.num_prompt_tokens == len(ids)
        assert each.max_num_tokens == len(ids) + 7 and len(each.processors) == 1
        assert each.end_tokens == {9: 9, 0: None, 2: None} and each.metrics is seq.metrics
        assert (each.num_computed_tokens, each.finish_reason, each.is_running) == (0, None, False)
    assert len({id(each.token_ids) for each in first_seqs}) == 3, "each its own list"
    other = second.seq
    assert len(second.completions) == 1
    assert other.token_ids == [4, 5] and not other.forks and not other.processors
    assert other.request_id == str(number + 1) and other.metrics is not seq.metrics
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[9], max_tokens=None)
    endless = inputs.make_requests("Once upon", ignoring)[0].seq
    assert endless.end_tokens == {9: 9} and endless.max_num_tokens == inputs.max_model_len


def test_nothing_is_counted_of_a_call_that_is_refused(llm):
    number = llm.inputs.num_requests
    for prompts, priority in ((["a", []], None), (["a", "b"], [0, 1])):
        with pytest.raises(ValueError):
            llm.inputs.make_requests(prompts, GREEDY, priority)
    assert llm.inputs.num_requests == number


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(make_llm):
    runs = []
    for seed in (0, 0, 1):
        with make_llm(seed=seed) as llm:
            params = SamplingParams()
            runs.append([token_ids(generate(llm, [[1, 2]] * 3, params)) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for half in runs[0] for ids in half}) == 6


@pytest.mark.parametrize("prompts, params, message", [
    ("", GREEDY, r"prompts\[0\].*decoder prompt cannot be empty"),
    (["a", []], GREEDY, r"prompts\[1\].*decoder prompt cannot be empty"),
    (["a", [5, 867]], GREEDY, r"prompts\[1\].*token id 867 is out of vocabulary.*0 to 866"),
    ([[-1]], GREEDY, "token id -1 is out of vocabulary"),
    ([[1.5]], GREEDY, "token id 1.5 is out of vocabulary"),
    ([[1] * 2048], GREEDY, "prompts.0. has 2048 tokens.*max_model_len=2048"),
    ([[1] * 9999], GREEDY, "prompts.0. has 9999 tokens.*max_model_len=2048"),
    (["a", 3], GREEDY, r"prompts\[1\]=.*must be a text, a list of token ids"),
    (None, GREEDY, "prompts=None.*must be a text"),
    ({"text": "a"}, GREEDY, r"prompts\[0\]=.*must be a text"),
    ({"prompt": "a", "extra": 1}, GREEDY, r"prompts\[0\]=.*must be a text"),
    (["a", "b"], [GREEDY], "sampling_params=.*must be one SamplingParams, or 2 of them"),
    ("a", {"temperature": 0}, "sampling_params=.*must be"),
    ("a", 3, "sampling_params=.*must be"),
    (["a"], ["greedy"], "sampling_params=.'greedy'.*must be"),
    ("a", SamplingParams(stop_token_ids=[867]), "stop_token_ids: token id 867 is out of"),
    ("a", SamplingParams(allowed_token_ids=[9999]), "allowed_token_ids: token id 9999"),
    ("a", SamplingParams(logit_bias={867: 1.0}), "logit_bias: token id 867"),
])
def test_bad_input_is_refused_before_anything_is_queued(llm, prompts, params, message):
    before = llm.metrics()
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=message):
            call(prompts, params)
    assert llm.metrics() == before
    assert generate(llm, "47 + 85 =")[0].outputs[0].text == " 132"


def test_without_a_tokenizer_prompts_are_token_ids(make_llm, tiny, bundled):
    with make_llm() as llm:
        assert generate(llm, [[1, 2]])[0].outputs[0].text == ""
        for prompt, params in [("a", GREEDY), ([1], SamplingParams(stop="a")),
                               ([1], SamplingParams(bad_words=["a"]))]:
            with pytest.raises(ValueError, match="tokenizer=None.*must be given"):
                llm.generate(prompt, params)
    with pytest.raises(ValueError, match="tokenizer=.* must be a folder or id with a tokenizer"):
        LLM(tiny, tokenizer=tiny)
    with make_llm(tokenizer=bundled) as llm:
        assert llm.get_tokenizer().eos_token_id in llm.inputs.eos_token_ids
