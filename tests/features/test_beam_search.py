"""Beam search against transformers' own, and under memory pressure."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import (
    check_blocks, check_idle, check_refused, complete, generate, random_prompts, token_ids,
    use_policies)

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence
from nanoengine_extras.sampling.beam_search import make_way
from nanoengine_extras.running.policies import overtaking

PROMPTS = random_prompts([3, 17, 40, 16, 33], seed=3)
OPTIONS = dict(dtype="float32", device="cpu", block_size=16)
FEW_BLOCKS = dict(num_kv_blocks=12, max_model_len=60, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def model(make_model):
    """A tiny Qwen3 that often ends by itself: one token in twelve is an EOS."""
    return make_model("Qwen3", eos_token_id=list(range(3, 320, 12)))


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model[0], **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def small_llm(model):
    """An engine with few blocks, some on the host."""
    with LLM(model[0], **OPTIONS, **FEW_BLOCKS, preemption_mode="swap", swap_space=0.01) as llm:
        yield llm


def hf_beams(model, prompt: list[int], width: int, max_tokens: int, **options):
    """(tokens, scores) of transformers' beams. In fp32, one prompt at a time: padding would count
    in its length penalty; its heuristic (early_stopping=False), not "never" or True."""
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width,
        num_return_sequences=width, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
        early_stopping=False, return_dict_in_generate=True, output_scores=True, **options)
    eos = options.get("eos_token_id", model.generation_config.eos_token_id) or []
    rows = []
    for row in found.sequences.tolist():
        end = next((i for i in range(len(prompt), len(row)) if row[i] in eos), len(row) - 1)
        rows.append(row[:end + 1])
    return rows, found.sequences_scores.tolist()


def tokens_of(outputs) -> list:
    return [[beam.tokens for beam in output.sequences] for output in outputs]


@pytest.mark.parametrize("width, max_tokens, length_penalty, ignore_eos", [
    (2, 20, 1.0, False), (4, 16, 1.0, False), (4, 16, 0.0, False),
    (3, 16, 2.0, False), (5, 12, -1.0, False), (4, 10, 1.0, True), (8, 1, 1.0, False)])
def test_tokens_and_scores_equal_transformers(llm, model, width, max_tokens, length_penalty,
                                              ignore_eos):
    reference = model[1]
    options = dict(length_penalty=length_penalty) | (dict(eos_token_id=None) if ignore_eos else {})
    params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty,
                              ignore_eos=ignore_eos)
    wanted = [hf_beams(reference, prompt, width, max_tokens, **options) for prompt in PROMPTS]
    reasons, eos = set(), set() if ignore_eos else set(reference.generation_config.eos_token_id)
    for policies in (dict(), dict(max_num_batched_tokens=9, max_num_seqs=9, scheduling="mixed")):
        use_policies(llm, **policies)
        outputs = llm.beam_search(PROMPTS, params)
        assert llm.metrics()["num_blocks_used"] == llm.metrics()["num_requests_waiting"] == 0
        for prompt, output, (tokens, scores) in zip(PROMPTS, outputs, wanted):
            assert [beam.tokens for beam in output.sequences] == tokens
            assert [beam.score for beam in output.sequences] == pytest.approx(scores, rel=1e-5)
            for beam in output.sequences:
                generated = beam.tokens[len(prompt):]
                assert beam.score * len(generated) ** length_penalty == pytest.approx(
                    beam.cum_logprob)
                # also of beams with a common beginning, which were forks of one another
                found = [at[token_id].logprob for at, token_id
                         in zip(beam.logprobs, generated, strict=True)]
                assert sum(found) == pytest.approx(beam.cum_logprob)
                assert all(len(at) >= 2 * width and 1 in {each.rank for each in at.values()}
                           for at in beam.logprobs)
                reasons.add("stop" if beam.tokens[-1] in eos else "length")
    assert reasons == {"length"} if ignore_eos else "stop" in reasons or max_tokens == 1


@pytest.mark.parametrize("width, allowed", [(3, [*range(0, 90, 5), 5]), (4, range(6, 12))])
def test_allowed_tokens_keep_their_log_probabilities(llm, model, width, allowed):
    """As with `prefix_allowed_tokens_fn` in transformers. The first has EOS tokens, and one token
    twice; the second has fewer tokens than a step has candidates."""
    params = BeamSearchParams(width, 8, allowed_token_ids=[*allowed])
    use_policies(llm)
    free = llm.beam_search(PROMPTS, BeamSearchParams(width, 8))
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params)):
        tokens, scores = hf_beams(model[1], prompt, width, 8,
                                  prefix_allowed_tokens_fn=lambda *_: [*allowed])
        assert [beam.tokens for beam in output.sequences] == tokens
        assert [beam.score for beam in output.sequences] == pytest.approx(scores, rel=1e-5)
        for beam in output.sequences:
            assert {*beam.tokens[len(prompt):]} <= {*allowed}
            assert all({*found} <= {*allowed} for found in beam.logprobs)
            assert {each.rank for found in beam.logprobs for each in found.values()} == {None}
    assert llm.beam_search(PROMPTS, BeamSearchParams(width, 8)) == free


@pytest.fixture(scope="module")
def undisturbed(llm):
    """Prompts, and their beams where there are blocks enough."""
    prompts = random_prompts([14, 13, 30, 12, 44], seed=4)
    use_policies(llm)
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 14))
    assert llm.metrics()["num_preemptions"] == 0
    return prompts, tokens_of(outputs)


@pytest.mark.parametrize("policies, happened", [
    (dict(), "recompute_preemptions"),
    (dict(run_ahead=True), "recompute_preemptions"),
    (dict(enable_prefix_caching=True), "recompute_preemptions"),
    (dict(preemption_mode="swap"), "swap_preemptions"),
    (dict(preemption_mode="swap", enable_prefix_caching=True, scheduling="mixed"),
     "swap_preemptions"),
    (dict(max_num_batched_tokens=9, max_num_seqs=9, scheduling="mixed"), "recompute_preemptions"),
    (dict(preemption_victim="random", scheduling=overtaking()), "recompute_preemptions"),
])
def test_preempted_beams_end_up_the_same(small_llm, undisturbed, policies, happened):
    prompts, expected = undisturbed
    use_policies(small_llm, **dict(preemption_mode="recompute") | policies)
    found = small_llm.beam_search(prompts, BeamSearchParams(3, 14))
    assert small_llm.metrics()[happened] > 0
    check_blocks(small_llm.engine.scheduler)
    assert tokens_of(found) == expected


def test_a_search_with_more_beams_than_places_shares_them(small_llm, undisturbed):
    """Its paused beams give up their places while another request runs."""
    prompts, expected = undisturbed
    use_policies(small_llm, max_num_seqs=2, preemption_mode="recompute")
    other, = small_llm.add([1, 2], SamplingParams(max_tokens=90, ignore_eos=True))
    small_llm.step()
    found = small_llm.beam_search(prompts[:1], BeamSearchParams(3, 14))
    assert tokens_of(found) == expected[:1] and not other.is_finished
    small_llm.abort([other])


@pytest.mark.parametrize("policies", [
    dict(), dict(run_ahead=True), dict(scheduling="static"), dict(scheduling_policy="priority"),
    dict(max_num_seqs=3, scheduling="mixed"), dict(kv_allocation="max-length"),
    # fewer than a prompt has beams
    dict(max_num_seqs=1), dict(max_num_seqs=2, preemption_mode="swap", run_ahead=True),
    dict(preemption_mode="swap", run_ahead=True, scheduling="mixed"),
    dict(scheduling=overtaking("mixed"), kv_allocation="reserve", run_ahead=True),
    dict(scheduling=overtaking("static"), scheduling_policy="priority", run_ahead=True)],
    ids=lambda policies: ", ".join(str(getattr(p, "__name__", p)) for p in policies.values()))
def test_searches_run_beside_other_calls(small_llm, undisturbed, policies):
    """All get what they get alone, with too few blocks for all of them."""
    prompts, expected = undisturbed
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    others = random_prompts([30, 5, 17], seed=8)
    use_policies(small_llm, **dict(preemption_mode="recompute"))
    alone = token_ids(generate(small_llm, others, params))
    use_policies(small_llm, **dict(preemption_mode="recompute") | policies)

    def search(numbers):
        chosen = [prompts[number] for number in numbers]
        return tokens_of(small_llm.beam_search(chosen, BeamSearchParams(3, 14)))

    def complete(priority):
        return token_ids(small_llm.generate(others, params, False, priority))

    with ThreadPoolExecutor(6) as pool:
        searches = [pool.submit(search, numbers) for numbers in ([0, 1], [2, 3], [4, 0])]
        has_priority = policies.get("scheduling_policy") == "priority"
        calls = [pool.submit(complete, number * has_priority) for number in (1, -1)]
        # it may already have finished: other threads run its steps, too
        dropped = pool.submit(lambda: next(small_llm.stream(others, params)))
        found = [beams for call in searches for beams in call.result(timeout=100)]
        assert found == [expected[i] for i in (0, 1, 2, 3, 4, 0)]
        assert [call.result(timeout=100) for call in calls] == [alone] * 2
        assert dropped.result(timeout=100).outputs[0].token_ids


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_search_that_is_broken_off_is_an_error(small_llm, undisturbed, monkeypatch, run_ahead):
    """A part of its beams is never taken for all of them."""
    prompts, expected = undisturbed
    use_policies(small_llm, preemption_mode="recompute", run_ahead=run_ahead)
    launch, steps = small_llm.engine.runner.launch, itertools.count(1)

    def launch_or_break(batch):
        if len(small_llm.active) == 3 and next(steps) == 5:
            raise KeyboardInterrupt
        return launch(batch)

    def search(prompt):
        while True:
            small_llm.beam_search([prompt], BeamSearchParams(3, 14))

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(small_llm.engine.runner, "launch", launch_or_break)
        calls = [pool.submit(search, prompt) for prompt in prompts[:3]]
        errors = sorted(type(call.exception(timeout=100)).__name__ for call in calls)
    assert errors == ["KeyboardInterrupt", "RuntimeError", "RuntimeError"]
    found = small_llm.beam_search(prompts[:1], BeamSearchParams(3, 14))
    assert tokens_of(found) == expected[:1]


def test_temperature_divides_the_logits(llm, model):
    use_policies(llm)
    sharp, plain, also_plain = (
        llm.beam_search(PROMPTS[0], BeamSearchParams(2, 1, temperature=temperature))[0].sequences
        for temperature in (0.5, 0.0, 1.0))
    logits = model[1](torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    for beams, scale in ((sharp, 0.5), (plain, 1.0), (also_plain, 1.0)):
        best = (logits / scale).log_softmax(dim=-1).topk(2)
        assert [beam.tokens[-1] for beam in beams] == best.indices.tolist()
        found = [beam.logprobs[0][beam.tokens[-1]].logprob for beam in beams]
        assert found == pytest.approx(best.values.tolist(), abs=1e-4)
        assert found == pytest.approx([beam.score for beam in beams])


def test_beams_have_text_and_leave_nothing_behind(bundled):
    with LLM(bundled, dtype="float32", device="cpu") as llm:
        output = llm.beam_search(["47 + 85 =", "Once upon a time"], BeamSearchParams(3, 8))[0]
        assert output.sequences[0].text == "47 + 85 = 132"
        assert len(output.sequences) == 3
        params = BeamSearchParams(3, 8, include_stop_str_in_output=True)
        whole = llm.beam_search("47 + 85 =", params)[0]
        for beam, other in zip(whole.sequences, output.sequences, strict=True):
            is_ended = beam.finish_reason == "stop"
            eos = llm.get_tokenizer().decode(beam.tokens[-1]) if is_ended else ""
            assert beam.text == other.text + eos and beam.tokens == other.tokens
        assert whole.sequences[0].finish_reason == "stop"
        special = llm.get_tokenizer().all_special_tokens[0]
        params = BeamSearchParams(3, 8, skip_special_tokens=False)
        kept = llm.beam_search(special + "47 + 85 =", params)[0]
        assert kept.sequences[0].text == special + "47 + 85 = 132"
        assert complete(llm, "47 + 85 =", temperature=0).text == " 132"


def test_beams_without_finite_log_probabilities_end_with_an_error(bundled):
    """They are returned as they are, and the other prompts lose nothing."""
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        good = llm.beam_search(["47 + 85 =", "Once"], params)
        assert {beam.finish_reason for beam in good[0].sequences} <= {"stop", "length"}
        runner, batches = llm.engine.runner, []
        launch, compute = runner.launch, runner.hidden_states

        def compute_poisoned(step):
            hidden = compute(step)
            if len(batches) > 3:
                hidden[[seq.request_id == "3" for _, seq, _ in batches[-1].sampled]] = math.nan
            return hidden

        runner.launch = lambda batch: batches.append(batch) or launch(batch)
        runner.hidden_states = compute_poisoned
        both = llm.beam_search(["47 + 85 =", "Once"], params)
        check_idle(llm)
        runner.launch, runner.hidden_states = launch, compute
        assert llm.beam_search(["47 + 85 =", "Once"], params) == good, "nothing of it is cached"
    assert both[0] == good[0]
    assert [beam.finish_reason for beam in both[1].sequences] == ["error"] * 2
    prompt = llm.get_tokenizer().encode("Once")
    for beam in both[1].sequences:
        assert beam.tokens[:len(prompt)] == prompt and len(beam.tokens) == len(prompt) + 3
        assert math.isfinite(beam.score) and beam.text.startswith("Once")
        assert len(beam.logprobs) == 3


def test_beams_that_make_way_leave_the_order_of_waiting():
    scheduler = Scheduler(BlockManager(8, 4), EngineConfig(model="m"))
    seqs = {name: Sequence(name, [1, 2], 2, 9) for name in "abcde"}
    for name in "cab":
        scheduler.running.append(seqs[name])
        scheduler.block_manager.allocate(seqs[name])
    for name in "de":
        scheduler.enqueue(seqs[name])
    make_way(scheduler)
    assert len(scheduler.running) == 3, "they have tokens to compute"
    for seq in scheduler.running:
        seq.num_computed_tokens = 2
    make_way(scheduler)
    assert not scheduler.running and scheduler.block_manager.num_free_blocks == 8
    assert "".join(seq.request_id for seq in scheduler.waiting) == "de"


def test_what_is_refused(small_llm):
    use_policies(small_llm, max_num_seqs=4)
    for params, message in (
            (BeamSearchParams(4, 48), "beam_width=4 .* at most 3 with num_kv_blocks=12"),
            (BeamSearchParams(2, 8, allowed_token_ids=[9999]), "allowed_token_ids.*0 to 319"),
            (None, "params=.*must be a Beam"), (SamplingParams(), "params=.*must be a Beam")):
        check_refused(message, small_llm.beam_search, [[1], [2]], params)
    assert len(small_llm.beam_search([[1], [2]], BeamSearchParams(4, 47))) == 2
