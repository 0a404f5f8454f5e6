"""The engine: exact under every schedule, running ahead or not, and hard to break. Its loop has
tests without a model in test_scheduler.py."""

import dataclasses
import gc
import weakref

import pytest
from conftest import (
    check_idle, complete, generate, random_prompts, slow, token_ids, use_policies)

from nanoengine import BeamSearchParams, SamplingParams
from nanoengine.block_manager import BlockManager
from nanoengine.model_runner import ModelRunner
from nanoengine.step_inputs import Launched

STEM = random_prompts([40], seed=5)[0]
PROMPTS = [*random_prompts([1, 2, 15, 16, 17, 33, 70]), STEM, STEM + [1, 2, 3], STEM[:32], STEM,
           *random_prompts([17, 5, 33, 32], seed=7)]
# several completions of the last ones
PARAMS = [
    SamplingParams(temperature=t, seed=number, max_tokens=14 + number % 11, ignore_eos=True, **more)
    for number, (t, more) in enumerate([
        (0, {}), (1.0, {}), (0, {}), (0.8, dict(top_p=0.9)), (1.0, dict(top_k=8)), (0, {}),
        (1.0, dict(repetition_penalty=1.3)), (0, {}), (1.3, dict(min_p=0.05)),
        (0, dict(presence_penalty=1.0)), (1.0, {}), (1.0, dict(n=4)),
        (1.0, dict(n=3, top_k=20)), (1.0, dict(n=2, repetition_penalty=1.2)), (1.0, dict(n=5))])
]


def completions(outputs) -> list[list[list[int]]]:
    """The tokens of all completions, by their index."""
    assert all(output.finished for output in outputs)
    assert all(each.index == index for output in outputs
               for index, each in enumerate(output.outputs))
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(make_llm):
    """Every request by itself, in an engine that remembers nothing and has room for all."""
    with make_llm(enable_prefix_caching=False, max_num_seqs=64) as llm:
        found = [completions(generate(llm, [prompt], params))[0]
                 for prompt, params in zip(PROMPTS, PARAMS)]
        first = [dataclasses.replace(params, n=1) for params in PARAMS]
        assert token_ids(generate(llm, PROMPTS, first)) == [ids[0] for ids in found]
    assert all(len({tuple(ids) for ids in each}) == len(each) for each in found)
    return found


# what the runner sees of schedules: policies are compared in test_scheduler.py and
# test_random_requests.py. The fast tests have one of the first two pairs for each
SCHEDULES = [
    (dict(), lambda m: m["prefix_cache_hits"] > 0 == m["num_preemptions"]),
    (dict(max_num_seqs=4, max_num_batched_tokens=7),
     lambda m: m["computed_tokens"] <= 7 * m["num_steps"]),
    (dict(num_kv_blocks=40, block_size=3, max_num_batched_tokens=16),
     lambda m: m["num_preemptions"] > 0 and m["prefix_cache_hits"] > 0),
    (dict(num_kv_blocks=9, enable_prefix_caching=False),
     lambda m: m["num_preemptions"] > 0 == m["prefix_cache_hits"]),
    (dict(num_kv_blocks=18, kv_allocation="max-length", max_model_len=110),
     lambda m: m["num_preemptions"] == 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", enable_prefix_caching=False),
     lambda m: m["swap_preemptions"] > 0 == m["recompute_preemptions"] == m["recomputed_tokens"]
     and m["swap_in_blocks"] == m["swap_out_blocks"] > 0 < m["swapped_bytes"]),
    (dict(num_kv_blocks=40, block_size=3, preemption_mode="swap", preemption_victim="random"),
     lambda m: m["swap_preemptions"] > 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", swap_space=0, preemption_victim="longest"),
     lambda m: m["recompute_preemptions"] > 0 == m["swap_preemptions"])]
PAIRS = [("prefill-first", False), ("mixed", True), ("static", True)]


@pytest.mark.parametrize("options, happened, scheduling, run_ahead", [
    (case if pair == place % 2 else slow(*case))
    for place, each in enumerate(SCHEDULES) for pair in range(3)
    for case in [(*each, *PAIRS[pair])]])
def test_tokens_do_not_depend_on_the_schedule(make_llm, alone, options, happened, scheduling,
                                              run_ahead):
    with make_llm(run_ahead=run_ahead, scheduling=scheduling, **options) as llm:
        assert completions(generate(llm, PROMPTS, PARAMS)) == alone
        assert happened(llm.metrics())
        assert completions(generate(llm, PROMPTS, PARAMS)) == alone, "with a warm cache"
        if options.get("enable_prefix_caching", True):
            assert llm.metrics()["prefix_cache_hits"] > 0
        llm.reset_prefix_cache()
        assert completions(generate(llm, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]


def watch(llm, monkeypatch) -> list[str]:
    """What happens in which order: a step is launched, or its tokens are waited for."""
    events, launch, wait = [], ModelRunner.launch, Launched.wait
    monkeypatch.setattr(ModelRunner, "launch",
                        lambda *arguments: events.append("launch") or launch(*arguments))
    monkeypatch.setattr(Launched, "wait", lambda launched: events.append("wait") or wait(launched))
    return events


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known(make_llm, monkeypatch):
    prompts, params = random_prompts([5, 9]), SamplingParams(max_tokens=6, ignore_eos=True)
    with make_llm(run_ahead=True) as llm:
        events = watch(llm, monkeypatch)
        generate(llm, prompts, params)
        assert events == ["launch", *["launch", "wait"] * 5, "wait"]
        assert llm.metrics()["computed_tokens"] == 14 + 2 * 5, "no row is wasted on length stops"
        own = [lambda input_ids, scores: scores]
        for needs, num_waits in ((dict(logits_processors=own), 3), (dict(n=2), 0),
                                 (dict(presence_penalty=0.1, min_tokens=2, top_p=0.5), 0)):
            events.clear()
            mixed = [params, SamplingParams(max_tokens=3, ignore_eos=True, **needs)]
            generate(llm, prompts, mixed)
            assert events[:2 * num_waits] == ["launch", "wait"] * num_waits
            assert events[2 * num_waits:2 * num_waits + 3] == ["launch", "launch", "wait"]
        events.clear()
        llm.beam_search(prompts, BeamSearchParams(3, 6, ignore_eos=True))
        check_idle(llm)
        assert events == ["launch", "wait"] * 6
        events.clear()
        use_policies(llm, run_ahead=False)
        generate(llm, prompts, params)
        assert events == ["launch", "wait"] * 6


def test_an_early_end_wastes_one_row_at_most(make_llm):
    (prompt,) = random_prompts([5])
    with make_llm(run_ahead=True) as llm:
        (tokens,) = token_ids(generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=9)))
        end = next(token for token in tokens[3:] if token not in tokens[:3])
        before = llm.metrics()
        output = complete(llm, prompt, temperature=0, max_tokens=9, stop_token_ids=[end])
        after, length = llm.metrics(), tokens.index(end) + 1
        assert output.token_ids == tokens[:length] and output.stop_reason == end
        assert after["generation_tokens"] - before["generation_tokens"] == length
        assert after["computed_tokens"] - before["computed_tokens"] == 5 + length


@pytest.mark.parametrize("run_ahead", [False, True])
def test_generated_blocks_are_found_again(make_llm, run_ahead):
    """A block is findable once its last token is known, also where that was pending for a step."""
    (prompt,) = random_prompts([6])
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    with make_llm(block_size=3, run_ahead=run_ahead) as llm:
        (tokens,) = token_ids(generate(llm, [prompt], params))
        longer = generate(llm, [prompt + tokens], params)[0]
        assert longer.num_cached_tokens == 24, "of 26 that were computed"
        assert len(llm.engine.scheduler.block_manager.hash_of_block) == (27 + 20) // 3


def test_samples_of_one_prompt_share_its_blocks(make_llm):
    (prompt,) = random_prompts([460])
    params = SamplingParams(n=16, max_tokens=20, ignore_eos=True)
    with make_llm(enable_prefix_caching=False) as llm:
        outputs = generate(llm, [prompt], params)
        metrics = llm.metrics()
    assert metrics["prompt_tokens"] == 460 and metrics["computed_tokens"] == 460 + 16 * 19
    assert metrics["generation_tokens"] == 16 * 20
    assert metrics["shared_blocks"] == 15 * 28 and metrics["copy_on_write_blocks"] == 15
    assert metrics["max_blocks_used"] == 28 + 16 * 2, "of the 480 that sixteen prompts would need"
    assert len(outputs[0].outputs) == 16 and outputs[0].metrics.num_decoded_tokens == 19


# -------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", [
    (ModelRunner, "prepare"), (ModelRunner, "launch"), (Launched, "wait"),
    (BlockManager, "register")])
@pytest.mark.parametrize("at_step", [1, 3])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_error_in_the_middle_leaves_a_usable_engine(tiny_llm, monkeypatch, error, where, at_step,
                                                       run_ahead):
    use_policies(tiny_llm, run_ahead=run_ahead)
    prompts = random_prompts([10, 3, 40] * 4)
    expected = token_ids(generate(tiny_llm, prompts))
    tiny_llm.reset_prefix_cache()
    original, calls = getattr(*where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == at_step:
            raise error("in the middle")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(error):
            generate(tiny_llm, prompts)
        check_idle(tiny_llm)
    assert token_ids(generate(tiny_llm, prompts)) == expected


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, AssertionError(), RuntimeError("reused")])
def test_a_processor_that_raises_is_named_with_its_request(tiny_llm, error, run_ahead):
    def bad(input_ids, scores):
        if input_ids.shape[1] > 5:
            raise error
        return scores

    use_policies(tiny_llm, run_ahead=run_ahead)
    prompts = random_prompts([3, 4])
    expected = token_ids(generate(tiny_llm, prompts))
    params = [SamplingParams(), SamplingParams(logits_processors=[bad])]
    for call in (tiny_llm.generate, lambda *arguments: [*tiny_llm.stream(*arguments)]):
        number = int(generate(tiny_llm, prompts)[-1].request_id) + 2
        with pytest.raises(ValueError, match=f"request {number}: its .* <function .*bad.*(Z|A|re)"
                           ) as found:
            call(prompts, params)
        assert isinstance(found.value.__cause__, (ZeroDivisionError, AssertionError, RuntimeError))
        check_idle(tiny_llm)
    assert token_ids(generate(tiny_llm, prompts)) == expected


def test_an_engine_that_is_dropped_is_freed_without_a_search_for_garbage(make_llm):
    llm = make_llm(num_kv_blocks=16)
    generate(llm, [[1, 2]])
    stream = llm.stream([[3, 4]])
    next(stream)
    stream.close()
    runner = llm.engine.runner
    parts = [weakref.ref(each) for each in (
        llm, llm.engine, llm.engine.scheduler, runner, runner.model, runner.blocks)]
    gc.collect()
    gc.disable()
    try:
        del llm, runner, stream
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()
