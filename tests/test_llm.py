"""The engine as its users see it: exact under every schedule, strict with input, hard to break."""

import gc

import pytest
import torch
from conftest import check_blocks, random_prompts

from nanoengine import LLM, SamplingParams
from nanoengine.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", max_num_seqs=8, num_kv_blocks=128) as llm:
        yield llm


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_idle(llm)
    return outputs


def check_idle(llm) -> None:
    metrics = llm.metrics()
    assert metrics["num_requests_waiting"] == metrics["num_requests_running"] == 0
    manager = llm.scheduler.block_manager
    assert metrics["num_blocks_used"] == 0 and metrics["num_blocks_free"] == manager.num_blocks
    check_blocks(llm.scheduler)


# ---------------------------------------------------------------------------------- exactness

STEM = random_prompts([40], seed=5)[0]
PROMPTS = [*random_prompts([1, 2, 15, 16, 17, 33, 70]), STEM, STEM + [1, 2, 3], STEM[:32], STEM]
PARAMS = [
    SamplingParams(temperature=t, seed=number, max_tokens=20 + number, ignore_eos=True, **more)
    for number, (t, more) in enumerate([
        (0, {}), (1.0, {}), (0, {}), (0.8, dict(top_p=0.9)), (1.0, dict(top_k=8)), (0, {}),
        (1.0, dict(repetition_penalty=1.3)), (0, {}), (1.3, dict(min_p=0.05)),
        (0, dict(presence_penalty=1.0)), (1.0, {})])
]


@pytest.fixture(scope="module")
def alone(tiny):
    """Every request by itself, in an engine that remembers nothing."""
    with LLM(tiny, dtype="float32", enable_prefix_caching=False, max_num_seqs=1) as llm:
        return [token_ids(generate(llm, [prompt], params))[0]
                for prompt, params in zip(PROMPTS, PARAMS)]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed", "static"])
@pytest.mark.parametrize("options, happened", [
    (dict(), lambda m: m["prefix_cache_hits"] > 0 == m["num_preemptions"]),
    (dict(max_num_seqs=3), lambda m: 2 < m["batched_sequences"] / m["num_steps"] <= 3),
    (dict(max_num_seqs=4, max_num_batched_tokens=7),
     lambda m: m["computed_tokens"] <= 7 * m["num_steps"]),
    (dict(num_kv_blocks=9), lambda m: m["num_preemptions"] > 0),
    (dict(num_kv_blocks=40, block_size=3, max_num_batched_tokens=16),
     lambda m: m["num_preemptions"] > 0 and m["prefix_cache_hits"] > 0),
    (dict(num_kv_blocks=9, enable_prefix_caching=False),
     lambda m: m["num_preemptions"] > 0 == m["prefix_cache_hits"]),
    (dict(enable_prefix_caching=False, block_size=32), lambda m: m["prefix_cache_hits"] == 0),
    (dict(num_kv_blocks=9, kv_allocation="reserve"), lambda m: m["num_preemptions"] == 0),
    (dict(num_kv_blocks=18, kv_allocation="max-length", max_model_len=110),
     lambda m: m["num_preemptions"] == 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", enable_prefix_caching=False),
     lambda m: m["swap_preemptions"] > 0 == m["recompute_preemptions"] == m["recomputed_tokens"]
     and m["swap_in_blocks"] == m["swap_out_blocks"] > 0 < m["swapped_bytes"]),
    (dict(num_kv_blocks=30, block_size=4, preemption_mode="swap", preemption_victim="random"),
     lambda m: m["swap_preemptions"] > 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", swap_space=0, preemption_victim="longest"),
     lambda m: m["recompute_preemptions"] > 0 == m["swap_preemptions"]),
    (dict(num_kv_blocks=12, preemption_victim="least-recently-run", max_num_batched_tokens=6),
     lambda m: m["num_preemptions"] > 0),
    (dict(num_kv_blocks=9, max_waiting=0, preemption_mode="swap"),
     lambda m: m["num_preemptions"] > 0),
    (dict(num_kv_blocks=9, max_waiting=1, max_num_seqs=2), lambda m: m["num_preemptions"] > 0),
])
def test_tokens_do_not_depend_on_the_schedule(tiny, alone, scheduling, run_ahead, options,
                                              happened):
    options = dict(block_size=16) | options
    with LLM(tiny, dtype="float32", scheduling=scheduling, run_ahead=run_ahead, **options) as llm:
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == alone
        assert happened(llm.metrics())
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == alone, "with a warm cache"
        if options.get("enable_prefix_caching", True):
            assert llm.metrics()["prefix_cache_hits"] > 0
        llm.reset_prefix_cache()
        assert token_ids(generate(llm, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]


SEVERAL = [SamplingParams(n=n, seed=number, max_tokens=15, ignore_eos=True, **more)
           for number, (n, more) in enumerate([
               (4, {}), (1, {}), (3, dict(top_k=20)), (2, dict(repetition_penalty=1.2)), (5, {})])]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("options", [
    dict(), dict(enable_prefix_caching=False), dict(max_num_seqs=2), dict(num_kv_blocks=7),
    dict(num_kv_blocks=25, block_size=3, max_num_batched_tokens=16, scheduling="mixed"),
    dict(num_kv_blocks=7, preemption_mode="swap", enable_prefix_caching=False),
    dict(num_kv_blocks=8, kv_allocation="reserve"), dict(num_kv_blocks=14, scheduling="static")])
def test_several_completions_do_not_depend_on_the_schedule(tiny, options, run_ahead):
    options = dict(block_size=16, run_ahead=run_ahead) | options
    prompts = random_prompts([17, 5, 33, 32, 1], seed=7)
    with LLM(tiny, dtype="float32", enable_prefix_caching=False, max_num_seqs=64) as llm:
        expected = [[c.token_ids for c in o.outputs] for o in generate(llm, prompts, SEVERAL)]
        first = [SamplingParams(seed=p.seed, max_tokens=15, ignore_eos=True, top_k=p.top_k,
                                repetition_penalty=p.repetition_penalty) for p in SEVERAL]
        assert token_ids(generate(llm, prompts, first)) == [found[0] for found in expected]
    assert all(len({tuple(ids) for ids in found}) == len(found) for found in expected)
    with LLM(tiny, dtype="float32", **options) as llm:
        outputs = generate(llm, prompts, SEVERAL)
        assert [[c.token_ids for c in output.outputs] for output in outputs] == expected
        assert [[c.index for c in output.outputs] for output in outputs] == [
            list(range(p.n)) for p in SEVERAL]
        assert all(output.finished for output in outputs)
        if options.get("kv_allocation") == "reserve":
            assert llm.metrics()["num_preemptions"] == 0


def watch(llm, monkeypatch) -> list[str]:
    """What happens in which order: a step is launched, or its tokens are waited for."""
    events, launch = [], llm.runner.launch

    def watched(batch):
        events.append("launch")
        tokens, logprobs, wait = launch(batch)
        return tokens, logprobs, lambda: (events.append("wait"), wait())

    monkeypatch.setattr(llm.runner, "launch", watched)
    return events


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known(tiny, monkeypatch):
    prompts, params = random_prompts([5, 9]), SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(tiny, dtype="float32", run_ahead=True) as llm:
        events = watch(llm, monkeypatch)
        generate(llm, prompts, params)
        assert events == ["launch", *["launch", "wait"] * 5, "wait"]
        assert llm.metrics()["computed_tokens"] == 14 + 2 * 5, "no row is wasted on length stops"
        for must_know in (dict(presence_penalty=0.1), dict(n=2)):
            events.clear()
            mixed = [params, SamplingParams(max_tokens=3, ignore_eos=True, **must_know)]
            generate(llm, prompts, mixed)
            num_waits = 3 if "presence_penalty" in must_know else 1
            assert events[:2 * num_waits] == ["launch", "wait"] * num_waits
            assert events[2 * num_waits:2 * num_waits + 3] == ["launch", "launch", "wait"]
    with LLM(tiny, dtype="float32") as llm:
        events = watch(llm, monkeypatch)
        generate(llm, prompts, params)
        assert events == ["launch", "wait"] * 6


def test_an_early_end_wastes_one_row_at_most(tiny):
    (prompt,) = random_prompts([5])
    with LLM(tiny, dtype="float32", run_ahead=True) as llm:
        (tokens,) = token_ids(generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=9)))
        end = next(token for token in tokens[3:] if token not in tokens[:3])
        before = llm.metrics()
        params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[end])
        output = generate(llm, [prompt], params)[0].outputs[0]
        after, length = llm.metrics(), tokens.index(end) + 1
        assert output.token_ids == tokens[:length] and output.stop_reason == end
        assert after["generation_tokens"] - before["generation_tokens"] == length
        assert after["computed_tokens"] - before["computed_tokens"] == 5 + length
        check_idle(llm)


def test_every_way_to_end_is_the_same_running_ahead(bundled):
    params = [SamplingParams(max_tokens=60, seed=number, logprobs=2 * (number % 2), **more)
              for number, more in enumerate([
                  dict(stop=[" and", "the"]), dict(min_tokens=20, stop=["a"]), dict(n=3), dict(),
                  dict(stop=["."], include_stop_str_in_output=True), dict(temperature=0),
                  dict(top_p=0.8), dict(top_k=3, stop_token_ids=[50, 60, 70]), dict(stop=["e"])])]
    prompts = ["Once upon a time", "47 + 85 =", "Long ago"] * 3
    results = []
    for run_ahead in (False, True):
        with LLM(bundled, dtype="float32", run_ahead=run_ahead, max_num_seqs=6) as llm:
            results.append([
                (c.text, c.token_ids, c.finish_reason, c.stop_reason, [*map(list, c.logprobs)])
                for output in generate(llm, prompts, params) for c in output.outputs])
            check_idle(llm)
    assert results[0] == results[1]
    ends = {(reason, stop) for _, _, reason, stop, _ in results[1]}
    assert {("stop", None), ("length", None)} < ends and len(ends) > 4


@pytest.mark.parametrize("run_ahead", [False, True])
def test_generated_blocks_are_found_again(tiny, run_ahead):
    """A block is findable once its last token is known, also where that was pending for a step."""
    (prompt,) = random_prompts([6])
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    with LLM(tiny, dtype="float32", block_size=4, run_ahead=run_ahead) as llm:
        (tokens,) = token_ids(generate(llm, [prompt], params))
        longer = generate(llm, [prompt + tokens], params)[0]
        assert longer.num_cached_tokens == 24, "of 26 that were computed"
        assert len(llm.scheduler.block_manager.keys) == (27 + 20) // 4


def test_streams_run_ahead(bundled):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(bundled, dtype="float32", run_ahead=True) as llm:
        expected = token_ids(generate(llm, ["47 + 85 =", "Once"], params))
        seen = {}
        for output in llm.stream(["47 + 85 =", "Once"], params):
            ids = output.outputs[0].token_ids
            assert all(isinstance(token_id, int) for token_id in ids)
            assert len(ids) == 1 + len(seen.get(output.prompt, [])), "each token once"
            seen[output.prompt] = ids
            assert output.finished == (len(ids) == 12)
        assert list(seen.values()) == expected
        stream = llm.stream("Once", params)
        next(stream)
        del stream  # with a step in flight
        gc.collect()
        check_idle(llm)
        assert token_ids(generate(llm, "Once", params)) == expected[1:]


def test_samples_of_one_prompt_share_its_blocks(tiny):
    (prompt,) = random_prompts([460])
    params = SamplingParams(n=16, max_tokens=20, ignore_eos=True)
    with LLM(tiny, dtype="float32", block_size=16, enable_prefix_caching=False) as llm:
        outputs = generate(llm, [prompt], params)
        metrics = llm.metrics()
    assert metrics["prompt_tokens"] == 460 and metrics["computed_tokens"] == 460 + 16 * 19
    assert metrics["generation_tokens"] == 16 * 20
    assert metrics["shared_blocks"] == 15 * 28 and metrics["copy_on_write_blocks"] == 15
    assert metrics["max_blocks_used"] == 28 + 16 * 2, "of the 480 that sixteen prompts would need"
    assert len(outputs[0].outputs) == 16 and outputs[0].metrics.num_decoded_tokens == 19


def test_several_completions_end_each_by_itself(llm):
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=40, stop=[" and"], logprobs=0)
    seen = {}
    for output in llm.stream(["Once upon a time", "47 + 85 ="], params):
        assert not (output.prompt in seen and seen[output.prompt].finished)
        seen[output.prompt] = output
    check_idle(llm)
    story = seen["Once upon a time"]
    assert all(output.finished and len(output.outputs) == 4 for output in seen.values())
    assert len({len(completion.token_ids) for completion in story.outputs}) > 1
    for completion in story.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert (completion.stop_reason == " and") == (len(
            completion.token_ids) < 40 and completion.token_ids[-1] not in llm.eos_token_ids)


def test_priorities(tiny):
    prompts = random_prompts([5] * 6)
    with LLM(tiny, max_num_seqs=1, scheduling_policy="priority") as llm:
        outputs = generate(llm, prompts, GREEDY)
        assert finishing_order(outputs) == [0, 1, 2, 3, 4, 5]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=[2, 1, 0, 2, -1, 0])
        assert finishing_order(outputs) == [4, 2, 5, 1, 0, 3]
        stream = llm.stream(prompts, GREEDY, priority=[2, 1, 0, 2, -1, 0])
        finished = [prompts.index(o.prompt_token_ids) for o in stream if o.finished]
        assert finished == [4, 2, 5, 1, 0, 3]
        for bad in ([1, 2], ["high"] * 6, 1.5, "high"):
            with pytest.raises(ValueError, match="priority=.*must be one int, or 6 of them"):
                llm.generate(prompts, GREEDY, priority=bad)
    with LLM(tiny) as llm:
        with pytest.raises(ValueError, match="priority=.*unless scheduling_policy is 'priority'"):
            llm.generate(prompts, GREEDY, priority=1)
        assert len(llm.generate(prompts, GREEDY, use_tqdm=False, priority=0)) == 6


def finishing_order(outputs) -> list[int]:
    return sorted(range(len(outputs)), key=lambda i: outputs[i].metrics.finished_time)


def test_a_trace_has_every_step(tiny):
    prompts = random_prompts([40, 20, 30])
    with LLM(tiny, trace=True, num_kv_blocks=14, block_size=8, preemption_mode="swap",
             max_num_batched_tokens=16) as llm:
        outputs = generate(llm, prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        trace, metrics = llm.trace, llm.metrics()
    assert len(trace) == metrics["num_steps"]
    batches = [batch for _, _, batch, _ in trace]
    assert sum(sum(batch.num_tokens) for batch in batches) == metrics["computed_tokens"]
    preempted = [mode for batch in batches for _, mode in batch.preempted]
    assert preempted == ["swap"] * metrics["swap_preemptions"] != []
    assert sum(output.metrics.num_preemptions for output in outputs) == len(preempted)
    for (start, end, _, then), (after, *_) in zip(trace, trace[1:]):
        assert start < end <= after
        assert then["num_blocks_used"] + then["num_blocks_free"] == 14
        assert then["internal_waste"] < 8 * max(1, then["num_requests_running"])
    with LLM(tiny) as llm:
        generate(llm, prompts)
        assert llm.trace == []


def test_bfloat16_does_not_depend_on_chunks_and_preemptions_beyond_near_ties(tiny):
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5)
    results = []
    for options in (dict(), dict(num_kv_blocks=9, block_size=16, max_num_batched_tokens=16)):
        with LLM(tiny, dtype="bfloat16", **options) as llm:
            results.append([o.outputs[0] for o in generate(llm, PROMPTS, params)])
    for left, right in zip(*results):
        for position, (a, b) in enumerate(zip(left.token_ids, right.token_ids)):
            if a != b:
                assert a in right.logprobs[position] and b in left.logprobs[position]
                break


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(tiny):
    runs = []
    for seed in (0, 0, 1):
        with LLM(tiny, dtype="float32", seed=seed) as llm:
            params = SamplingParams()
            runs.append([token_ids(generate(llm, [[1, 2]] * 3, params)) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for half in runs[0] for ids in half}) == 6


def test_cached_tokens_are_reported(tiny):
    prompt = random_prompts([17])[0]
    with LLM(tiny, dtype="float32", block_size=16) as llm:
        assert [generate(llm, [prompt])[0].num_cached_tokens for _ in range(2)] == [0, 16]
        assert generate(llm, [prompt[:16]])[0].num_cached_tokens == 0


# ------------------------------------------------------------------------------ the interface


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


def test_the_bundled_model_is_right(llm):
    questions = ["47 + 85 =", "sort d b e a =", "count 17 to 23 =", "copy ball fox red ="]
    texts = [output.outputs[0].text for output in
             generate(llm, questions, SamplingParams(temperature=0, max_tokens=40))]
    assert texts == [" 132", " a b d e", " 17 18 19 20 21 22 23", " ball fox red"]


def test_chat(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("12 + 34", "sort c b a")]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["46", "a b c"]
    assert outputs[0].prompt == "<|im_start|>user\n12 + 34<|im_end|>\n<|im_start|>assistant\n"
    assert outputs[0].prompt_token_ids.count(1) == 2, "special tokens are taken from the template"
    assert token_ids(llm.chat(conversations[1], GREEDY, use_tqdm=False)) == token_ids(outputs[1:])


def test_defaults_come_from_the_generation_config(llm, monkeypatch):
    seen = []
    original = llm._run
    monkeypatch.setattr(llm, "_run", lambda requests: seen.extend(requests) or original(requests))
    llm.generate("a", use_tqdm=False)
    params = seen[0][0].seq.params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.95, 50)
    assert params.max_tokens == 16


def test_ends(llm):
    story = generate(llm, "Once upon a time", SamplingParams(temperature=0, max_tokens=30))[0]
    full = story.outputs[0].token_ids
    assert (len(full), story.outputs[0].finish_reason) == (30, "length") and story.finished
    stop_id = full[9]
    ended = generate(llm, "Once upon a time", SamplingParams(
        temperature=0, max_tokens=30, stop_token_ids=[stop_id]))[0].outputs[0]
    assert ended.token_ids == full[:full.index(stop_id) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop_id)
    assert story.outputs[0].text.startswith(ended.text)

    answer = generate(llm, "47 + 85 =", SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] in llm.eos_token_ids == {0, 2}
    longer = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert len(token_ids(generate(llm, "47 + 85 =", longer))[0]) == 30
    at_least = SamplingParams(temperature=0, max_tokens=30, min_tokens=10)
    held = generate(llm, "47 + 85 =", at_least)[0].outputs[0]
    assert len(held.token_ids) >= 10 and not llm.eos_token_ids & set(held.token_ids[:10])


def test_stop_strings_end_the_generation(llm):
    def run(**params):
        return generate(llm, "Once upon a time", SamplingParams(
            temperature=0, max_tokens=60, **params))[0].outputs[0]

    full = run().text
    stop = full[20:26]
    cut = run(stop=[stop, "never in there"])
    assert cut.text == full[:full.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert run(stop=stop, include_stop_str_in_output=True).text == cut.text + stop
    assert len(cut.token_ids) < 60


def test_max_model_len(bundled):
    with LLM(bundled, max_model_len=20) as llm:
        output = generate(llm, "Once upon a time", SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output[0].prompt_token_ids) + len(token_ids(output)[0]) == 20
        assert output[0].outputs[0].finish_reason == "length"
        output = generate(llm, [[5] * 19], SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(token_ids(output)[0]) == 1


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    completion = generate(llm, "Once upon a time", params)[0].outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) == 5
    for token_id, at in zip(completion.token_ids, completion.logprobs):
        assert len(at) == 3 and at[token_id].rank == 1
    assert completion.cumulative_logprob == pytest.approx(
        sum(at[i].logprob for i, at in zip(completion.token_ids, completion.logprobs)))
    decoded = [at[i].decoded_token for i, at in zip(completion.token_ids, completion.logprobs)]
    assert "".join(decoded) == completion.text
    assert generate(llm, "Once")[0].outputs[0].cumulative_logprob is None


def test_bad_words(llm):
    def run(**params):
        params = SamplingParams(temperature=0, max_tokens=12, **params)
        return generate(llm, "Once upon a time", params)[0].outputs[0]

    words = " ".join(run().text.split()[2:4])
    banned = llm.get_tokenizer().encode(" " + words)
    newline = llm.get_tokenizer().encode("\n")
    assert run(allowed_token_ids=[*newline, 5], bad_words=["\n"]).token_ids == [5] * 12
    for bad_words, is_there in ([], True), ([words], False), (["x y z"], True):
        ids = run(bad_words=bad_words).token_ids
        assert is_there == any(ids[i:i + len(banned)] == banned for i in range(len(ids)))


def test_streaming(llm):
    prompts = ["Once upon a time", "47 + 85 ="]
    params = SamplingParams(temperature=0, max_tokens=25)
    expected = {o.prompt: o.outputs[0] for o in generate(llm, prompts, params)}
    seen: dict = {}
    for output in llm.stream(prompts, params):
        before = seen.get(output.prompt)
        assert before is None or not before.finished
        new, old = output.outputs[0], before.outputs[0] if before else None
        assert old is None or new.token_ids[:-1] == old.token_ids and new.text.startswith(old.text)
        seen[output.prompt] = output
    assert {prompt: output.outputs[0] for prompt, output in seen.items()} == expected
    assert all(output.finished for output in seen.values())
    check_idle(llm)


@pytest.mark.parametrize("num_read", [0, 1, 4])
def test_abandoning_a_stream_frees_its_requests(llm, num_read):
    stream = llm.stream(["Once upon a time"] * 12, GREEDY)
    for _ in range(num_read):
        next(stream)
    with pytest.raises(RuntimeError, match="stream is open"):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="stream is open"):
        llm.stream("a")
    del stream
    gc.collect()
    check_idle(llm)
    generate(llm, "Once upon a time")


def test_out_of_memory_at_start_says_what_helps(bundled, monkeypatch):
    def exhausted(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. 2.00 GiB is free.")

    monkeypatch.setattr(ModelRunner, "capture", exhausted)
    with pytest.raises(ValueError, match="2.00 GiB is free. Lower max_num_batched_tokens"):
        LLM(bundled)


def test_metrics_and_close(bundled):
    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        before = llm.metrics()
        assert before.pop("attention_backend") == "numba"
        assert all(isinstance(value, (int, float)) for value in before.values())
        params = SamplingParams(max_tokens=7, ignore_eos=True)
        outputs = generate(llm, ["Once upon a time"] * 3, params)
        after = llm.metrics()
        assert set(before) < set(after) and before["num_steps"] == before["swapped_bytes"] == 0
        assert after["generation_tokens"] == 21
        assert after["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
        assert after["num_steps"] == 7 and after["computed_tokens"] == after["prompt_tokens"] + 18
        times = outputs[0].metrics
        assert (times.arrival_time <= times.first_scheduled_time <= times.first_token_time
                <= times.finished_time)
        assert 0 <= times.queue_time <= times.time_to_first_token <= times.end_to_end_time
        assert times.time_per_output_token * 6 == pytest.approx(
            times.end_to_end_time - times.time_to_first_token)
        assert after["mean_batch"] == 3 and after["max_blocks_used"] > 0
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    llm.close()


# ------------------------------------------------------------------------------- bad input


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


def test_a_prompt_larger_than_the_cache(bundled):
    with LLM(bundled, num_kv_blocks=4, block_size=16) as llm:
        with pytest.raises(ValueError, match="has 65 tokens.*max_model_len=64"):
            llm.generate([[1] * 65])
        generate(llm, [[1] * 63], SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="max_model_len=65 .* at most 64"):
        LLM(bundled, num_kv_blocks=4, block_size=16, max_model_len=65)


def test_without_a_tokenizer_prompts_are_token_ids(tiny, bundled):
    with LLM(tiny) as llm:
        assert generate(llm, [[1, 2]])[0].outputs[0].text == ""
        for prompt, params in [("a", GREEDY), ([1], SamplingParams(stop="a")),
                               ([1], SamplingParams(bad_words=["a"]))]:
            with pytest.raises(ValueError, match="tokenizer=None.*must be given"):
                llm.generate(prompt, params)
    with pytest.raises(ValueError, match="tokenizer=.* must be a folder or id with a tokenizer"):
        LLM(tiny, tokenizer=tiny)
    with LLM(tiny, tokenizer=bundled) as llm:
        assert llm.get_tokenizer().eos_token_id in llm.eos_token_ids


# --------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["prepare", "launch"])
@pytest.mark.parametrize("at_step", [1, 3])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_error_in_the_middle_leaves_a_usable_engine(llm, monkeypatch, error, where, at_step,
                                                       run_ahead):
    monkeypatch.setattr(llm.config, "run_ahead", run_ahead)
    prompts = ["Once upon a time", "47 + 85 ="] * 6
    expected = token_ids(generate(llm, prompts))
    llm.reset_prefix_cache()
    original, calls = getattr(ModelRunner, where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == at_step:
            raise error("in the middle")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, where, interrupted)
        with pytest.raises(error):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        check_idle(llm)
    assert token_ids(generate(llm, prompts)) == expected


def test_ctrl_c_inside_the_scheduler(llm, monkeypatch):
    manager = llm.scheduler.block_manager
    original, calls = manager.register, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(manager, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once upon a time"] * 4, GREEDY, use_tqdm=False)
    check_idle(llm)
    assert generate(llm, "47 + 85 =")[0].outputs[0].text == " 132"


def test_a_processor_that_raises(llm):
    def bad(input_ids, scores):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(logits_processors=[bad])], use_tqdm=False)
    check_idle(llm)


def test_own_processors(llm):
    def only_seven(input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    params = SamplingParams(max_tokens=3, logits_processors=[only_seven])
    assert token_ids(generate(llm, "a", params)) == [[7, 7, 7]]
