"""Speculation: the tokens are those without it, whatever is guessed, and it does not cost much."""

import gc
import itertools
import json
import math
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import prompter
import pytest
import test_scheduler
import torch
from conftest import check_idle, check_refused, random_prompts, slow, use_policies
from llguidance import LLParserLimits
from safetensors.torch import load_file, save_file
from test_random_requests import make_options, make_params, make_prompt, parts_of
from test_scheduler import expected_output, is_beam, make_sequence, run_workload
from tokenizers import Tokenizer

from nanoengine import LLM, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature
from nanoengine.sequence import Sequence
from nanoengine_extras.sampling import speculation
from nanoengine_extras.sampling.speculation import PromptLookup, StepCosts
from nanoengine_extras.sampling.structured_outputs.grammar import Grammar

FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.fixture
def always(monkeypatch):
    """All guesses that fit are computed, as if they cost nothing."""
    monkeypatch.setattr(speculation, "LEAST_ODDS", 0)
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0)
    monkeypatch.setattr(StepCosts, "estimate", lambda costs, count, without: 1.0)


def wrong_to_a_degree(rng: random.Random, following: list[int], share: float,
                      vocab_size: int) -> list[int]:
    """A guess whose tokens are each right with this probability, and that does not end in time."""
    following = following + rng.choices(range(vocab_size), k=rng.randint(0, 9))
    return [token if rng.random() < share else rng.randrange(vocab_size) for token in following]


# ------------------------------------------------------------------ over a shadow cache


@pytest.fixture
def speculating(monkeypatch):
    """The engines of test_scheduler.py speculate."""
    rng = random.Random(0)
    guessers = []

    def make_speculating(config, runner, features):
        share = rng.choice([0, 0.3, 0.7, 0.9, 1])

        def guess(seq):
            assert min(seq.token_ids) >= 0 and not is_beam(seq)
            following = expected_output(seq)[0][seq.num_tokens:]
            return wrong_to_a_degree(rng, following, share, test_scheduler.VOCABULARY)

        policy = "prompt-lookup" if rng.random() < 0.2 else guess
        options = vars(config) | dict(run_ahead=False, speculation=policy)
        runner.last_sampled = torch.zeros(config.max_num_seqs + 32)
        engine = speculation.SpeculatingEngine(EngineConfig(**options), runner, features)
        engine.clock = itertools.count().__next__
        guessers.append(engine)
        return engine

    monkeypatch.setattr(test_scheduler, "engine_of", make_speculating)
    return guessers


def test_random_workloads_over_a_shadow_cache(speculating, always):
    totals: Counter[str] = Counter()
    for seed in range(200):
        totals.update(run_workload(seed))
    for guesser in speculating:
        totals.update(guesser.counts)
    for name in ("recompute_preemptions", "swap_preemptions", "shared_blocks", "swap_in_blocks",
                 "copy_on_write_blocks"):
        assert totals[name] > 200, name
    assert totals["right_guesses"] > 1000 and totals["errors"] > 70 and totals["scored"] > 2000
    assert totals["guessed_tokens"] > totals["right_guesses"] + 1000


# -------------------------------------------------------------------- over the model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain_llm(request, bundled):
    with LLM(bundled, dtype=request.param, num_kv_blocks=40) as llm:
        yield llm


@pytest.mark.parametrize(
    "seed", [*range(2), *(slow(seed) for seed in range(2, 8))])
def test_random_requests(bundled, plain_llm, seed, always):
    """Under random options, in one thread or three, each as if alone in an engine that does not
    guess."""
    rng = random.Random(seed)
    work = [(make_prompt(rng, plain_llm.model_config.vocab_size), make_params(rng),
             rng.randrange(3)) for _ in range(20)]
    alone = [plain_llm.generate(*each[:2], use_tqdm=False)[0] for each in work]
    known = {(*output.prompt_token_ids, params.seed, completion.index): completion.token_ids
             for (_, params, _), output in zip(work, alone) for completion in output.outputs}
    share = rng.choice([0.2, 0.7, 0.95, 1])

    def guess(seq):
        assert min(seq.token_ids) >= 0 and not seq.params.logits_processors
        num_prompt = seq.num_prompt_tokens
        tokens = known[(*seq.token_ids[:num_prompt], seq.params.seed, seq.index)]
        return wrong_to_a_degree(rng, tokens[seq.num_tokens - num_prompt:], share, 800)

    options = make_options(rng) | dict(
        run_ahead=False, speculation="prompt-lookup" if seed % 4 == 0 else guess)
    found = {}
    num_threads = rng.choice([1, 3])

    def call(part: int) -> None:
        prompts, params, priorities = map(list, zip(*work[part::num_threads]))
        for output in llm.stream(prompts, params, priorities):
            before = found.get((part, output.index))
            for completion, now in zip(before.outputs if before else [], output.outputs):
                assert len(now.token_ids) - len(completion.token_ids) in (0, 1) or (
                    num_threads > 1), "one at a time, but for steps of other threads"
            found[part, output.index] = output

    with LLM(bundled, dtype=plain_llm.config.dtype, **options) as llm:
        with ThreadPoolExecutor(num_threads) as pool:
            assert [*pool.map(call, range(num_threads))]
        metrics = llm.metrics()
        check_idle(llm)
    assert metrics["guessed_tokens"] > 0
    for part in range(num_threads):
        for index, expected in enumerate(alone[part::num_threads]):
            assert parts_of(found[part, index]) == parts_of(expected)


@pytest.mark.parametrize("options", [
    dict(), dict(max_model_len=64), dict(max_num_seqs=2, max_num_batched_tokens=5),
    dict(max_num_seqs=4, num_kv_blocks=4), dict(max_num_seqs=1)])
def test_guesses_fit(bundled, monkeypatch, always, options):
    """Into the budget, into blocks that are there anyway, before the end, and into one product."""
    launch = ModelRunner.launch
    prompts = [[7] * 50, [8] * 31, [9] * 3]
    params = SamplingParams(temperature=0, max_tokens=None if "max_model_len" in options else 30,
                            ignore_eos=True)
    batches = []

    def checked_launch(runner, batch):
        assert sum(batch.num_tokens) <= runner.config.max_num_batched_tokens
        stops = [start + count for start, count in zip(batch.starts, batch.num_tokens)]
        assert max(stops) < runner.max_model_len
        num_products.clear()
        launched = launch(runner, batch)
        assert len(num_products) <= 1
        batches.append(stops)
        return launched

    with LLM(bundled, dtype="float32", **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        num_preemptions = llm.metrics()["num_preemptions"]
    monkeypatch.setattr(ModelRunner, "launch", checked_launch)
    known = {seq.prompt_token_ids[0]: seq.outputs[0].token_ids for seq in expected}
    options |= dict(speculation=lambda seq: [
        *known[seq.token_ids[0]][seq.num_tokens - seq.num_prompt_tokens:], *[7] * 50])
    num_products: list = []
    with LLM(bundled, dtype="float32", **options) as llm:
        llm.engine.runner.model.lm_head.register_forward_hook(
            lambda *_: num_products.append(1))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [each.outputs for each in outputs] == [each.outputs for each in expected]
        metrics = llm.metrics()
    assert metrics["num_preemptions"] <= num_preemptions
    assert metrics["right_guesses"] > 20 and metrics["num_steps"] == len(batches)
    assert metrics["computed_tokens"] >= metrics["guessed_tokens"] + metrics["num_steps"]
    assert metrics["num_steps"] < metrics["generation_tokens"] - metrics["right_guesses"] + 30


# ------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("options", [
    dict(dtype="float32"), dict(dtype="bfloat16"), dict(dtype="float32", block_size=3),
    dict(dtype="float32", attention_backend="gather")])
def test_a_guess_whose_k_and_v_are_nan_harms_no_sequence(make_model, always, options):
    folder, _ = make_model(num_hidden_layers=2)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.embed_tokens.weight"][300, 5] = math.nan
    save_file(tensors, Path(folder) / "model.safetensors")
    prompts = random_prompts([20, 7, 33], vocab_size=300)
    forms = [[300], [1, 300], [300] * 16, [5, 6, 7, 8, 9, 300, 2]]
    calls = itertools.count()
    options = dict(block_size=16, num_kv_blocks=64) | options
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, FREE, use_tqdm=False)
    with LLM(folder, speculation=lambda seq: forms[next(calls) % 4], **options) as llm:
        outputs = llm.generate(prompts, FREE, use_tqdm=False)
        assert [each.outputs for each in outputs] == [each.outputs for each in expected]
        # guesses get no blocks of their own: they end with a small one
        assert llm.metrics()["guessed_tokens"] > (50 if options["block_size"] == 3 else 100)
        check_idle(llm)


def speculate(llm: LLM, policy, clock=time.monotonic) -> None:
    """Gives a loaded model an engine that speculates."""
    runner = llm.engine.runner
    runner.last_sampled = runner.last_sampled.new_zeros(llm.config.max_num_seqs + 32)
    use_policies(llm, speculation=policy, run_ahead=False)
    llm.engine.clock = clock


def check_same(llm: LLM, policy, prompts, params, clock=time.monotonic) -> dict:
    """The outputs are those without guesses. Returns the metrics of the engine that guesses."""
    found = []
    for each in ("none", policy):
        speculate(llm, each, clock)
        llm.inputs.numbers = itertools.count()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([parts_of(output) for output in outputs])
        check_idle(llm)
    assert found[0] == found[1]
    return llm.metrics()


@pytest.mark.parametrize("guess, message", [
    (lambda seq: 1 / 0, "division by zero"), (lambda seq: 3, "not iterable"),
    (lambda seq: None, "not iterable"),
    (lambda seq: [1, 320], "320 is not in range"), (lambda seq: [-1], "-1 is not in range"),
    (lambda seq: "ab", "'str' object"), (lambda seq: [1.0], "'float' object"),
    (lambda seq: [next(iter(()))], "StopIteration")])
def test_a_policy_that_fails_ends_its_own_request(tiny_llm, always, guess, message):
    prompts = random_prompts([5, 6, 7])
    speculate(tiny_llm, lambda seq: [])
    expected = tiny_llm.generate(prompts, FREE, use_tqdm=False)

    def policy(seq):
        return guess(seq) if seq.token_ids[:6] == prompts[1] and seq.num_tokens > 8 else [1]

    speculate(tiny_llm, policy)
    requests = tiny_llm.add(prompts, FREE)
    while tiny_llm.active:
        tiny_llm.step()
    found = [request.output().outputs[0] for request in requests]
    assert [found[0], found[2]] == [expected[0].outputs[0], expected[2].outputs[0]]
    assert found[1].finish_reason == "error" and isinstance(requests[1].seq.error, ValueError)
    assert found[1].stop_reason.startswith(f"request {requests[1].request_id}: its speculation")
    assert message in found[1].stop_reason
    assert found[1].token_ids == expected[1].outputs[0].token_ids[:len(found[1].token_ids)]
    check_refused(message, tiny_llm.generate, prompts[1], FREE, use_tqdm=False)


@pytest.mark.parametrize("kind", [["a list"], None, 7, object()])
def test_numbers_of_numpy_and_of_pytorch_are_tokens_and_a_kind_any_object(tiny_llm, always, kind):
    policy = type("Policy", (), {"kind": kind, "__call__": lambda policy, seq: (
        make(1) for make in (np.int64, torch.tensor, int))})()
    assert check_same(tiny_llm, policy, random_prompts([5]), FREE)["guessed_tokens"] > 50


def test_an_interrupted_step_leaves_a_clean_engine(tiny_llm, always):
    prompts = random_prompts([5, 6])
    speculate(tiny_llm, lambda seq: [])
    expected = tiny_llm.generate(prompts, FREE, use_tqdm=False)
    calls = itertools.count()

    def policy(seq):
        if next(calls) == 9:
            raise KeyboardInterrupt
        return expected[len(seq.token_ids) % 2].outputs[0].token_ids

    speculate(tiny_llm, policy)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(prompts, FREE, use_tqdm=False)
    found = tiny_llm.generate(prompts, FREE, use_tqdm=False)
    assert [each.outputs for each in found] == [each.outputs for each in expected]


def test_what_is_refused():
    """Before a model is loaded: there is none."""
    check_refused("run_ahead=True is not accepted: it must be False with", LLM, "none",
                  speculation="prompt-lookup", run_ahead=True)
    for policy in ("prompt-lookup", lambda seq: []):
        assert EngineConfig(model="none", device="cpu", speculation=policy).run_ahead is False
        check_refused("speculation=.* is not accepted: .* 'none' on a GPU", EngineConfig,
                      model="none", device="cuda", speculation=policy)


# ------------------------------------------------------------------------ with constraints

SCHEMA = {"type": "object", "required": ["the name of the animal", "legs", "is it tame"],
          "properties": {"the name of the animal": {"enum": ["fox", "crow", "a fox and a crow"]},
                         "legs": {"type": "integer", "minimum": 0, "maximum": 99},
                         "is it tame": {"type": "boolean"}}}
CONSTRAINED = [
    dict(structured_outputs={"json": SCHEMA}, max_tokens=90),
    dict(structured_outputs={"json": SCHEMA}, max_tokens=90, logprobs=2, temperature=0.9),
    dict(structured_outputs={"regex": "(fox|crow|dog)( and (fox|crow|dog)){3,9}"}, min_tokens=12),
    dict(structured_outputs={"choice": ["a fox in the house", "a fox in the garden"]}),
    dict(bad_words=["fox", "the"], min_tokens=9), dict(repetition_penalty=1.3, temperature=0.7),
    dict(presence_penalty=0.8, frequency_penalty=0.5, logit_bias={70: 3.0}, logprobs=0),
    dict(allowed_token_ids=[*range(60, 120)], stop="e"), dict(ignore_eos=True)]


@pytest.mark.parametrize("options", [
    dict(dtype="float32"), dict(dtype="bfloat16", num_kv_blocks=20, max_num_batched_tokens=24),
    dict(dtype="float32", num_kv_blocks=14, preemption_mode="swap")])
def test_constraints_look_at_the_guesses_before_a_row(bundled, always, options):
    """Also where only some guesses are right."""
    prompts = ["Once upon a time there was a fox."] * len(CONSTRAINED)
    params = [SamplingParams(**dict(max_tokens=40, temperature=0, seed=5) | each)
              for each in CONSTRAINED]
    rng = random.Random(0)
    with LLM(bundled, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        known = {each.request_id: each.outputs[0].token_ids for each in expected}
        seen = set()

        def guess(seq):
            seen.add(seq.request_id)
            tokens = known[seq.request_id][seq.num_tokens - seq.num_prompt_tokens:]
            return wrong_to_a_degree(rng, tokens, 0.9, 800)

        speculate(llm, guess)
        llm.inputs.numbers = itertools.count()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [parts_of(each) for each in outputs] == [parts_of(each) for each in expected]
        assert len(seen) >= len(params) - 1, "all but the text that is forced nearly everywhere"
        assert llm.metrics()["right_guesses"] > 60
        check_idle(llm)


def test_a_grammar_guesses_the_text_that_it_forces(bundled):
    """With a policy that guesses nothing, and a clock on which each step takes as long."""
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=200, temperature=0)
    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        llm.generate("The fox", params, use_tqdm=False)
        num_steps = llm.metrics()["num_steps"]
        metrics = check_same(llm, lambda seq: [], "The fox", params, itertools.count().__next__)
    assert 0 < metrics["right_guesses"] <= metrics["guessed_tokens"]
    assert metrics["num_steps"] < 0.7 * num_steps, (num_steps, metrics)


def test_a_forced_text_that_is_never_right_gives_way_to_the_policy(bundled, monkeypatch):
    """The model may spell it with other tokens; here, it always does."""
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=200, temperature=0)
    forced = Grammar.forced

    def spelled_otherwise(grammar, token_ids, vocabulary):
        usual = forced(grammar, token_ids, vocabulary)
        text = grammar.vocabulary.decode_bytes(usual)
        in_letters = [grammar.vocabulary.tokenize_bytes(bytes([letter]))[0] for letter in text]
        following = answer[len(token_ids) - len(expected.prompt_token_ids):][:1]
        return next((each for each in (usual, in_letters) if each[:1] != following), [])

    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        speculate(llm, "none")
        (expected,) = llm.generate("The fox", params, use_tqdm=False)
        num_steps = llm.metrics()["num_steps"]
        answer = expected.outputs[0].token_ids
        monkeypatch.setattr(Grammar, "forced", spelled_otherwise)
        speculate(llm, lambda seq: answer[seq.num_tokens - seq.num_prompt_tokens:][:3],
                  itertools.count().__next__)
        found, steps = [], [0]
        for _ in range(4):
            found += llm.generate("The fox", params, use_tqdm=False)
            steps.append(llm.metrics()["num_steps"])
        assert llm.engine.all_odds["forced"] < 0.1
    assert steps[4] - steps[3] < num_steps / 3, (num_steps, steps)
    assert all(parts_of(each) == parts_of(expected) for each in found)


@pytest.mark.parametrize("policy", [lambda seq: [], "prompt-lookup"])
@pytest.mark.parametrize("grammar", [
    # a special token within, and a text after which llguidance cannot go on
    'start: "the " <|endoftext|> "fox" " crow"',
    'start: "x and the fox" (' + " | ".join(f'"{i}a" "{i}b"' for i in range(2500)) + ")"])
def test_a_look_at_the_forced_text_changes_nothing(make_llm, bundled, always, monkeypatch, grammar,
                                                   policy):
    limits = LLParserLimits(max_items_in_row=2000, verbose_errors=False)
    monkeypatch.setattr("nanoengine_extras.sampling.structured_outputs.grammar.LIMITS", limits)
    params = SamplingParams(structured_outputs={"grammar": grammar}, max_tokens=40, temperature=0)
    with make_llm(tokenizer=bundled, num_kv_blocks=24) as llm:
        check_same(llm, policy, [[5, 6, 7]], params)
        (found,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert found.outputs[0].text in ("the fox crow", "x and the fox")


def test_a_forced_text_whose_tokens_the_model_does_not_have(make_model, bundled, always):
    """The tokenizer can know more."""
    folder, _ = make_model(vocab_size=367, num_hidden_layers=2)
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=60, temperature=0)
    with LLM(folder, tokenizer=bundled, dtype="float32", block_size=16, num_kv_blocks=24) as llm:
        metrics = check_same(llm, "prompt-lookup", [[5, 6, 7]], params)
    assert metrics["guessed_tokens"] > 0


def test_log_probabilities_keep_one_list_of_tokens(tiny_llm, always):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1,
                            repetition_penalty=1.1)
    (expected,) = tiny_llm.generate([[5, 6, 7]], params, use_tqdm=False)
    tokens = expected.outputs[0].token_ids
    speculate(tiny_llm, lambda seq: tokens[seq.num_tokens - 3:])
    (request,) = tiny_llm.add([[5, 6, 7]], params)
    while not request.is_finished:
        tiny_llm.step()
    assert tiny_llm.metrics()["right_guesses"] > 10
    found = request.seq.kept["logprobs"].values()
    assert all(row.token_ids is request.seq.token_ids for row in found)
    assert parts_of(request.output()) == parts_of(expected)


def test_a_feature_that_shares_nothing_with_a_copy_sees_no_guess(make_llm, always):
    """It edits with what it keeps of a sequence, which a fork begins without."""
    class Favour(Feature):
        def enter(self, seqs, inputs):
            for seq in seqs:
                seq.edits += ("Favour",)
                seq.kept["favour"] = 7

        def edit(self, scores, seqs, last_sampled):
            for row, seq in enumerate(seqs):
                scores[row, seq.kept["favour"] + seq.num_tokens % 3] += 100

    with make_llm(num_kv_blocks=8, features=[Favour()],
                  speculation=lambda seq: [7 + (seq.num_tokens + i) % 3 for i in range(3)]) as llm:
        output, = llm.generate([[5, 6, 7]], FREE, use_tqdm=False)
        assert output.outputs[0].token_ids == [7, 8, 9] * 13 + [7]
        assert not llm.metrics()["guessed_tokens"]


# ------------------------------------------------------------------------ what it costs


def test_costs_are_estimated_and_an_unlucky_one_is_forgotten():
    costs = StepCosts()
    costs.learn(2, 10.0)
    # nine tenths, so that larger steps are tried, of half the share of a token
    assert [costs.estimate(count, 2) for count in (2, 3, 4)] == [10, 12.25, 14.5]
    costs.learn(6, 12.0)
    assert [costs.estimate(count, 2) for count in (4, 6, 8)] == pytest.approx([14.5, 12, 12.9])
    costs.learn(6, 11.0)
    costs.learn(6, 100.0)
    assert costs[6] == pytest.approx(11.55), "what disturbs a step makes it longer"
    costs.learn(2, 20.0)
    assert costs[2] == 10.5
    costs.learn(4, 90.0)
    costs.learn(8, 11.0)
    assert costs == {2: 10.5, 4: 11, 6: 11, 8: 11}, "a smaller step does not take longer"
    costs = StepCosts()
    costs.learn(3, 50.0)
    for _ in range(4000):
        costs.learn(2, 10.0)
    assert 10 < costs[3] < 11


def seconds_of(llm, policy, seconds, prompts) -> float:
    """How long a call takes where a step takes as long as a function of its tokens says."""
    launch = ModelRunner.launch
    times = [0.0]

    def timed_launch(runner, batch):
        times.append(seconds(sum(batch.num_tokens)))
        return launch(runner, batch)

    speculate(llm, policy, lambda: sum(times))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch", timed_launch)
        llm.generate(prompts, LONG, use_tqdm=False)
    return sum(times)


MACHINES = {"waits for memory": lambda count: 1 + 0.02 * count,
            "computes": lambda count: 0.1 + count,
            "both": lambda count: max(1.0, 0.15 * count) + 0.02 * count}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_seqs", [slow(1), 4])
def test_it_guesses_where_it_pays(tiny_llm, machine, num_seqs):
    prompts = random_prompts([5 + number for number in range(num_seqs)])
    plain = seconds_of(tiny_llm, lambda seq: [], MACHINES[machine], prompts)
    known = {tuple(each.prompt_token_ids): each.outputs[0].token_ids
             for each in tiny_llm.generate(prompts, LONG, use_tqdm=False)}
    rng = random.Random(0)

    def ratio(share: float) -> float:
        def policy(seq):
            num_prompt = seq.num_prompt_tokens
            tokens = known[tuple(seq.token_ids[:num_prompt])][seq.num_tokens - num_prompt:]
            return [token if rng.random() < share else 319 - token for token in tokens]

        return plain / seconds_of(tiny_llm, policy, MACHINES[machine], prompts)

    ratios = [ratio(share) for share in (0, 0.5, 0.8, 1)]
    # where a guess costs as much as it brings, an unlucky one costs more
    assert min(ratios) > (0.96 if machine == "computes" else 0.98) and ratios[0] > 0.99, ratios
    if machine == "waits for memory":
        assert ratios[1] > 1.1 and ratios[2] > 1.8 and ratios[3] > 3.5, ratios


def test_odds_are_learnt_for_each_kind(tiny_llm):
    (prompt,) = random_prompts([6])
    speculate(tiny_llm, "none")
    (expected,) = tiny_llm.generate([prompt], LONG, use_tqdm=False)
    tokens = expected.outputs[0].token_ids

    def policy(seq):
        """Guesses the right token after every second one, and a wrong one after the others."""
        place = seq.num_tokens - len(prompt)
        policy.kind = ["right", "wrong"][place % 2]
        return [319 - tokens[place] if place % 2 else tokens[place]]

    check_same(tiny_llm, policy, [prompt], LONG, itertools.count().__next__)
    metrics, odds = tiny_llm.metrics(), tiny_llm.engine.all_odds
    assert odds["right"] > 0.9 > 0.1 > odds["wrong"], odds
    num_wrong = metrics["guessed_tokens"] - metrics["right_guesses"]
    assert metrics["right_guesses"] > 60 and num_wrong < 10, metrics

    # a new sequence begins with the odds of those before it
    tiny_llm.generate([prompt], LONG, use_tqdm=False)
    again = tiny_llm.metrics()
    assert again["right_guesses"] - metrics["right_guesses"] > 60, again
    assert again["guessed_tokens"] - again["right_guesses"] - num_wrong < 3, again


# ------------------------------------------------------------------------ what is guessed


def first_guesses(lookup: PromptLookup, seq: Sequence, count: int = 4) -> list[int]:
    return [*itertools.islice(lookup(seq), count)]


def test_prompt_lookup_finds_the_last_place_of_the_longest_text():
    lookup = PromptLookup()
    seq = make_sequence([1, 2, 3, 4, 5, 9, 3, 4, 7, 8, 3, 4], 9)
    assert first_guesses(lookup, seq) == [7, 8, 3, 4], "the last of two places"
    seq.token_ids[-4:] = [8, 1, 2, 3]
    seq = make_sequence([*seq.token_ids, 4], 9)
    assert first_guesses(PromptLookup(), seq) == [5, 9, 3, 4], "four tokens count more than two"
    seq = make_sequence([1, 2, 1, 2, 1, 2], 9)
    assert first_guesses(PromptLookup(), seq, 5) == [1, 2, 1, 2, 1], "a repetition goes on"
    assert first_guesses(PromptLookup(), make_sequence([1, 2, 3], 9)) == []
    seq = make_sequence([*range(20), 90, *range(10), 91, 6, 7, 92, 7], 9)
    for length, guess, kind in ((31, [10, 11, 12, 13], 8), (34, [8, 9, 91, 6], 2),
                                (36, [92, 7, 92, 7], 1), (35, [], 0)):
        lookup = PromptLookup()
        assert first_guesses(lookup, make_sequence(seq.token_ids[:length], 9)) == guess
        assert lookup.kind == kind, "how many tokens were equal"
    assert first_guesses(PromptLookup(), make_sequence([1], 9)) == []


def test_prompt_lookup_also_looks_in_other_texts_and_forgets_the_oldest():
    lookup = PromptLookup()
    first = make_sequence([5, 6, 7, 8, 9], 9)
    first_guesses(lookup, first)
    assert first_guesses(lookup, make_sequence([6, 7], 9)) == [8, 9, 8, 9]
    # its call was interrupted before the last token was drawn
    first_guesses(lookup, make_sequence([1, 2, 3, 4, -1], 9))
    assert first_guesses(lookup, make_sequence([1, 2], 9)) == [3, 4, 3, 4]
    rng = random.Random(0)
    for _ in range(50):
        first_guesses(lookup, make_sequence(rng.choices(range(10, 10**6), k=1000), 9))
    assert len(lookup.seen) == 2**17 and (6, 7) not in lookup.seen


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"presence_penalty": 0.5}])
def test_nothing_keeps_an_ended_sequence(tiny_llm, more):
    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(each, Sequence) for each in gc.get_objects())

    speculate(tiny_llm, "prompt-lookup", itertools.count().__next__)
    before = num_alive()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **more)
    tiny_llm.generate([[7, 8, 9] * 5] * 9, params, use_tqdm=False)
    assert tiny_llm.metrics()["guessed_tokens"] and num_alive() <= before


def test_real_texts(tmp_path):
    """A model that writes them, at the size of a toy: see prompter.py."""
    config = json.loads((prompter.ROOT / "models/qwen3-0.6b/config.json").read_text())
    config |= {"hidden_size": 320, "num_hidden_layers": 2, "num_attention_heads": 8,
               "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 4096}
    tokenizer = Tokenizer.from_file(str(prompter.ROOT / "models/tiny-qwen3/tokenizer.json"))
    tasks = prompter.make_tasks(lambda text: tokenizer.encode(text).ids, 4096, 400, 128)
    prompter.save_prompter(tmp_path, config, tasks)
    steps = {}
    with LLM(str(tmp_path), num_kv_blocks=24, attention_backend="gather",
             speculation="prompt-lookup") as llm:
        speculate(llm, "prompt-lookup", itertools.count().__next__)
        for name, task in tasks.items():
            assert len(task["prompt"]) == 528 and len(task["text"]) == 128
            steps[name] = prompter.write(llm, task)[1]
    edited = [steps[name] for name in tasks if "continued" not in name and "stories" not in name]
    assert len(edited) == 3 and max(edited) < 50 and max(steps.values()) < 120, steps
