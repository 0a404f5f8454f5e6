"""What a user may ask for: every form of prompt and parameters, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import GREEDY, check_idle, generate, next_number, token_ids

from nanoengine import SamplingParams
from nanoengine_extensions.chat import render


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


def test_a_prompt_is_truncated_to_its_last_tokens(llm):
    """In every form, and however long it was."""
    text = "Once upon a time there was a fox. " * 400
    ids = llm.get_tokenizer().encode(text)
    most = llm.inputs.max_model_len
    assert len(ids) > most
    for given, options, count in ((5, {}, 5), (most - 1, {}, most - 1), (-1, {}, most - 3),
                                  (-1, dict(max_tokens=None), most - 1),
                                  (-1, dict(max_tokens=most - 1), 1)):
        params = SamplingParams(**dict(max_tokens=3) | options, temperature=0,
                                truncate_prompt_tokens=given, logit_bias={0: 1e9})
        outputs = generate(llm, [text, ids, {"prompt": text, "prompt_token_ids": ids}], params)
        assert [output.prompt_token_ids for output in outputs] == [ids[-count:]] * 3
        assert [output.prompt for output in outputs] == [text, None, text]
    # a shorter prompt is left as it is
    for given in (7, 99, most, 9999, -1):
        params = SamplingParams(max_tokens=3, truncate_prompt_tokens=given)
        assert generate(llm, ids[:7], params)[0].prompt_token_ids == ids[:7]
    # each prompt has its own
    params = [SamplingParams(truncate_prompt_tokens=given) for given in (None, 2, 3)]
    outputs = generate(llm, [ids[:9]] * 3, params)
    assert [len(output.prompt_token_ids) for output in outputs] == [9, 2, 3]


def test_a_chat_is_truncated(llm, caplog):
    chat = [{"role": "user", "content": "47 + 85 =" * 900}]
    params = SamplingParams(temperature=0, max_tokens=3, truncate_prompt_tokens=-1)
    ids = render(llm.inputs, chat)[0]["prompt_token_ids"]
    with pytest.raises(ValueError, match="max_model_len"):
        llm.chat(chat, SamplingParams(max_tokens=3), use_tqdm=False)
    (output,) = llm.chat(chat, params, use_tqdm=False)
    assert output.prompt_token_ids == ids[3 - llm.inputs.max_model_len:]
    *_, last = llm.stream_chat(chat, params)
    assert last.prompt_token_ids == output.prompt_token_ids and last.outputs == output.outputs
    assert "indexing errors" not in caplog.text


def test_truncation_that_leaves_nothing(llm):
    most = llm.inputs.max_model_len
    for options in (dict(truncate_prompt_tokens=0),
                    dict(truncate_prompt_tokens=-1, max_tokens=most)):
        with pytest.raises(ValueError, match=(
                f"truncate_prompt_tokens={options['truncate_prompt_tokens']} is not accepted: it "
                f"must be at least 1, or -1 with max_tokens below max_model_len={most}$")):
            llm.generate("a", SamplingParams(**options))
    with pytest.raises(ValueError, match="prompts.0. has 2048 tokens"):
        llm.generate([1] * 9999, SamplingParams(truncate_prompt_tokens=most))
    for wrong in (-2, 1.5, "1"):
        with pytest.raises(ValueError, match="^truncate_prompt_tokens="):
            SamplingParams(truncate_prompt_tokens=wrong)


def test_a_text_that_is_too_long_is_refused_without_a_warning(llm, capfd, caplog):
    with pytest.raises(ValueError, match="^prompts.0. has 6001 tokens: .* max_model_len="):
        llm.generate("a b " * 3000)
    assert "indexing errors" not in capfd.readouterr().err + caplog.text


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
    ("", GREEDY, r"prompts\[0\].*decoder prompt cannot be empty"),
    (["a", []], GREEDY, r"prompts\[1\].*decoder prompt cannot be empty"),
    (["a", [5, 867]], GREEDY, r"prompts\[1\].*token id 867 is out of vocabulary.*0 to 866"),
    ([[-1]], GREEDY, "token id -1 is out of vocabulary"),
    ([[True]], GREEDY, "token id True is out of vocabulary"),
    ([True], GREEDY, "token id True is out of vocabulary"),
    ({"prompt_token_ids": [5, False]}, GREEDY, "token id False is out of vocabulary"),
    ([[1.5]], GREEDY, "token id 1.5 is out of vocabulary"),
    ([[np.float64(5)]], GREEDY, "token id .*5.0.* is out of vocabulary"),
    ([[1, "5"]], GREEDY, "token id '5' is out of vocabulary"),
    ([1, "5"], GREEDY, "token id '5' is out of vocabulary"),
    ([[1, None]], GREEDY, "token id None is out of vocabulary"),
    ([[1, [2]]], GREEDY, "token id .2. is out of vocabulary"),
    ([[1] * 2048], GREEDY, "prompts.0. has 2048 tokens.*max_model_len=2048"),
    ([[1] * 9999], GREEDY, "prompts.0. has 9999 tokens.*maximum context length is only 2048"),
    (["a", 3], GREEDY, r"prompts\[1\]=.*must be a text, a list of token ids"),
    (None, GREEDY, "prompts=None.*must be a text"),
    ({"text": "a"}, GREEDY, r"prompts\[0\]=.*must be a text"),
    ({"prompt": "a", "extra": 1}, GREEDY, r"prompts\[0\]=.*must be a text"),
    ("a\ud800b", GREEDY, r"prompts\[0\]: "),
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
    with make_llm(tokenizer=bundled) as llm:
        assert llm.inputs.eos_tokens == {llm.get_tokenizer().eos_token_id: None}


def test_priorities_are_one_for_each(make_llm):
    with make_llm(scheduling_policy="priority") as llm:
        for bad in ([], [1], "", 0.0, {}):
            with pytest.raises(ValueError, match="priority=.* must be one int, or 2 of them"):
                llm.generate([[1], [2]], GREEDY, priority=bad)
        assert llm.generate([], GREEDY, priority=[]) == []


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


# --------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("content, text", [
    ("12 + 34", "12 + 34"),
    ([{"type": "text", "text": "12 + 34"}], "12 + 34"),
    ([{"type": "text", "text": "12"}, {"type": "input_text", "text": "34"}, "5"], "12\n34\n5"),
    ([], ""), (None, "")])
def test_text_parts_are_joined(llm, content, text):
    message = {"role": "user", "content": content}
    (prompt,) = render(llm.inputs, [message])
    assert prompt["prompt"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert message == {"role": "user", "content": content}, "the user's message is left alone"
    assert render(llm.inputs, [{"role": "user"}]) == render(
        llm.inputs, [{"role": "user", "content": ""}])


@pytest.mark.parametrize("messages, message", [
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "…"}]}], "image_url"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "content="),
    ([{"role": "user", "content": [{"type": "text"}]}], "content="),
    ([{"role": "user", "content": 5}], "content=5"), ([5], "messages="), ([[5]], "messages="),
    ([{"role": "user", "content": {"type": "text", "text": "a"}}, "b"], "messages="),
    ([{"content": "hello"}], "messages=.*role"), ([[]], "messages="),
    ([[{"role": "user", "content": "a"}], []], "messages="),
    ([], "messages="), ("hello", "messages="), (None, "messages=")])
def test_other_conversations_are_refused_by_name(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)
    check_idle(llm)


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


def test_priorities_are_numbers(llm):
    for priority in (True, [False]):
        with pytest.raises(ValueError, match="priority=.* is not accepted: it must be one int"):
            llm.generate(["a"], GREEDY, priority=priority)


def test_a_closed_engine_takes_no_requests(make_llm):
    llm = make_llm()
    llm.close()
    for call in (llm.add, llm.generate, lambda *some: next(llm.stream(*some))):
        with pytest.raises(RuntimeError, match="the LLM is closed"):
            call([[1, 2]], GREEDY)
    assert not llm.active
