"""What a user may ask for: every form of prompt and parameters, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import (
    GREEDY, Raises, check_refused, for_feature, generate, next_number, token_ids)

from nanoengine import LLM, SamplingParams


RAISES = Raises()


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
    for integer in (np.int64, np.uint16):
        found = generate(llm, [integer(token_id) for token_id in ids])
        assert token_ids(found) == token_ids(outputs[:1])
        assert found[0].prompt_token_ids == ids
        assert all(type(token_id) is int for token_id in found[0].prompt_token_ids)
    assert generate(llm, []) == []


def test_a_text_that_is_too_long_is_refused_without_a_warning(llm, capfd, caplog):
    check_refused("^prompts.0. has 6001 tokens: .* max_model_len=", llm.generate, "a b " * 3000)
    assert "indexing errors" not in capfd.readouterr().err + caplog.text


def test_the_sequences_of_a_request(llm):
    """The first, with what its parameters say, and its forks, each with a seed of its own."""
    inputs = llm.inputs
    number = next_number(llm)
    params = SamplingParams(n=3, seed=5, max_tokens=7, stop_token_ids=[9], presence_penalty=1)
    first, second = inputs.make_requests(["Once upon", [4, 5]], [params, SamplingParams()])
    assert (first.prompt, second.prompt) == ("Once upon", None)
    assert next_number(llm) == number + 2
    first_seqs = first.seqs
    seq, *forks = first_seqs
    assert first.seq is seq
    ids = llm.get_tokenizer().encode("Once upon")
    assert seq.forks == forks and len(forks) == 2
    assert len({each.seed for each in first_seqs}) == 3 and seq.seed == 5
    for index, each in enumerate(first_seqs):
        assert (each.request_id, each.index, each.params) == (str(number), index, params)
        assert each.token_ids == ids and each.num_prompt_tokens == len(ids)
        assert each.max_num_tokens == len(ids) + 7
        constraint = each.kept["constraints"]
        assert (sorted(constraint.ends.tolist()), constraint.until) == ([0, 2, 9], len(ids))
        assert each.end_tokens == {9: 9, 0: 0, 2: None}
        assert each.kept["metrics"] is seq.kept["metrics"]
        assert (each.num_computed_tokens, each.finish_reason, each.is_running) == (0, None, False)
    assert len({id(each.token_ids) for each in first_seqs}) == 3, "each its own list"
    seq.num_computed_tokens = 5
    another = seq.fork()
    assert (another.forks, another.num_computed_tokens) == ([], 0), "it has yet to begin"
    other = second.seq
    assert len(second.seqs) == 1
    assert other.token_ids == [4, 5] and not other.forks and not other.needs_tokens
    assert other.request_id == str(number + 1) and other.kept["metrics"] is not seq.kept["metrics"]
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[9], max_tokens=None)
    endless = inputs.make_requests("Once upon", ignoring)[0].seq
    assert endless.end_tokens == {9: 9} and endless.max_num_tokens == inputs.max_model_len


def test_nothing_is_counted_of_a_call_that_is_refused(llm):
    number = next_number(llm)
    for prompts, priority in ((["a", []], None), (["a", "b"], [0, 1, 2])):
        with pytest.raises(ValueError):
            llm.inputs.make_requests(prompts, GREEDY, priority)
    assert next_number(llm) == number


def test_requests_made_in_several_threads_have_a_number_each(llm):
    def numbers(_):
        return [request.request_id for request in llm.inputs.make_requests(["a"] * 50, GREEDY)]

    with ThreadPoolExecutor(8) as pool:
        found = [number for each in pool.map(numbers, range(24)) for number in each]
    assert len(set(found)) == 24 * 50


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(make_llm):
    runs = []
    for seed in (0, 0, 1):
        with make_llm(seed=seed) as llm:
            params = SamplingParams()
            runs.append([token_ids(generate(llm, [[1, 2]] * 3, params)) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for half in runs[0] for ids in half}) == 6


@pytest.mark.parametrize("prompts, params, message", [
    ("", GREEDY, r"prompts\[0\].*has 0 tokens: it must have 1 to"),
    (["a", []], GREEDY, r"prompts\[1\].*has 0 tokens: it must have 1 to"),
    (["a", [5, 867]], GREEDY, r"prompts\[1\].*token id 867 is out of vocabulary.*0 to 866"),
    ([[-1]], GREEDY, "token id -1 is out of vocabulary"),
    ([[1] * 2048], GREEDY, "prompts.0. has 2048 tokens.*max_model_len=2048"),
    ([[1] * 9999], GREEDY, "prompts.0. has 9999 tokens: it must have 1 to 2047"),
    ("a\ud800b", GREEDY, r"prompts\[0\]: "),
    ("a", SamplingParams(stop_token_ids=[867]), "stop_token_ids: token id 867 is out of"),
    ("a", SamplingParams(allowed_token_ids=[9999]), "allowed_token_ids: token id 9999"),
    ("a", SamplingParams(logit_bias={867: 1.0}), "logit_bias: token id 867"),
    *for_feature(
        "running.strict",
        ([[True]], GREEDY, "token id True is out of vocabulary"),
        ([True], GREEDY, "token id True is out of vocabulary"),
        ({"prompt_token_ids": [5, False]}, GREEDY, "token id False is out of vocabulary"),
        ({"prompt_token_ids": [5], "prompt": 5}, GREEDY, "prompts.0.=.* is not accepted"),
        ([[1.5]], GREEDY, "token id 1.5 is out of vocabulary"),
        ([[np.float64(5)]], GREEDY, "token id .*5.0.* is out of vocabulary"),
        ([[1, "5"]], GREEDY, "token id '5' is out of vocabulary"),
        ([1, "5"], GREEDY, "token id '5' is out of vocabulary"),
        ([[1, None]], GREEDY, "token id None is out of vocabulary"),
        ([[1, [2]]], GREEDY, "token id .2. is out of vocabulary"),
        (["a", 3], GREEDY, r"prompts\[1\]=.*must be a string, a list of token ids"),
        (None, GREEDY, "prompts=None.*must be a string"),
        *[(prompts, GREEDY, "prompts.*whose repr raises")
          for prompts in (RAISES, [RAISES], [[1, RAISES]], {"prompt": RAISES}, {RAISES: "a"})],
        ({"text": "a"}, GREEDY, r"prompts\[0\]=.*must be a string"),
        ({"prompt": "a", "extra": 1}, GREEDY, r"prompts\[0\]=.*must be a string"),
        (["a", "b"], [GREEDY], "sampling_params=.*must be one SamplingParams, or 2 of them"),
        ("a", {"temperature": 0}, "sampling_params=.*must be"),
        ("a", 3, "sampling_params=.*must be"),
        (["a"], ["greedy"], "sampling_params=.'greedy'.*must be"))])
def test_bad_input_is_refused_before_anything_is_queued(llm, prompts, params, message):
    before = llm.metrics()
    for call in (llm.generate, llm.stream, llm.add):
        check_refused(message, call, prompts, params)
    assert llm.metrics() == before
    assert generate(llm, "47 + 85 =")[0].outputs[0].text == " 132"


@pytest.mark.needs("running.strict", "sampling.logprobs")
@pytest.mark.parametrize("options", [dict(), dict(skip_tokenizer_init=True)])
def test_without_a_tokenizer_prompts_are_token_ids(make_llm, tiny, bundled, options):
    """As in a test of vLLM's own."""
    with LLM(bundled if options else tiny, num_kv_blocks=8, **options) as llm:
        (output,) = generate(llm, {"prompt_token_ids": [1, 2, 3]}, SamplingParams(
            prompt_logprobs=True, detokenize=True))
        assert output.outputs[0].text == "" and output.outputs[0].token_ids
        assert not output.prompt_logprobs[0]
        assert output.prompt_logprobs[1][2].decoded_token is None
        for prompt, params in [("a", GREEDY), ([1], SamplingParams(stop="a")),
                               ([1], SamplingParams(bad_words=["a"]))]:
            check_refused("there is no tokenizer", llm.generate, prompt, params)
    with make_llm(tokenizer=bundled) as llm:
        assert llm.inputs.eos_tokens == {llm.get_tokenizer().eos_token_id: None}


def test_parameters_can_be_changed_while_they_are_in_use(llm):
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=1, stop=["zebra"])
    expected = generate(llm, ["Once upon a time"] * 2, params)
    stream = llm.stream(["Once upon a time"] * 2, params)
    seen = [next(stream)]
    params.max_tokens, params.temperature, params.logprobs = 3, 2.0, None
    params.stop.append("e")
    params.stop_token_ids.extend(range(800))
    params.include_stop_str_in_output = True
    last = {output.request_id: output for output in [*seen, *stream]}
    assert [output.outputs for output in last.values()] == [o.outputs for o in expected]


def test_a_user_cannot_change_the_tokenizer_of_the_engine(llm):
    text = "sort d b e a ="
    ids = llm.get_tokenizer().encode(text)
    assert llm.get_tokenizer() is llm.get_tokenizer()
    llm.get_tokenizer()([text] * 2, truncation=True, max_length=2, padding=True)
    llm.get_tokenizer().backend_tokenizer.enable_truncation(2)
    llm.get_tokenizer().backend_tokenizer.enable_padding(length=99)
    assert generate(llm, text)[0].prompt_token_ids == ids
    llm.get_tokenizer().add_tokens(["sort"])
    assert generate(llm, text)[0].prompt_token_ids == ids


def test_a_closed_engine_takes_no_requests(make_llm):
    llm = make_llm()
    llm.close()
    for call in (llm.add, llm.generate, lambda *some: next(llm.stream(*some))):
        with pytest.raises(RuntimeError, match="the LLM is closed"):
            call([[1, 2]], GREEDY)
    assert not llm.active
