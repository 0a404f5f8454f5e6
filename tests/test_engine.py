"""The engine: exact under every schedule, running ahead or not, and hard to break."""

import dataclasses
import gc
import itertools
import random
import weakref
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    check_blocks,
    check_idle,
    generate,
    overtaking,
    random_prompts,
    token_ids,
    use_policies,
)

from nanoengine import BeamSearchParams, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Features
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Launched
from nanoengine_extras.running.metrics import Metrics, metrics_of

# ------------------------------------------------------- the engine over a made-up runner

END = 5  # the token that ends a sequence


def made_up_token(seq: Sequence, position: int) -> int:
    return random.Random(1000 * seq.seed + position).randrange(40)


class MadeUpRunner:
    """Needs no model and no torch: a sequence's token follows from its seed and the position.

    It checks what it is given: one step at most is in flight when another is launched, and not one
    whose tokens that needs; and a pending token stands for the one that the step in flight samples
    for this very sequence.
    """

    backend = "made up"
    num_kv_blocks = 14
    copier = SimpleNamespace(host_blocks=range(8))
    max_model_len = 40
    block_bytes = 100
    max_num_seqs = 256  # of the engine

    def __init__(self):
        self.now = 0.0
        self.in_flight = []
        self.events = []
        self.error_at = {}

    def happens(self, event: str) -> None:
        self.events.append(event)
        if self.error_at.get(event) == self.events.count(event):
            raise KeyboardInterrupt(event)

    def launch(self, batch):
        self.happens("launch")
        assert len(self.in_flight) <= 1
        assert batch.sequences and not any(seq.is_awaited for seq in batch.sequences)
        for seq, start, count in zip(batch.sequences, batch.starts, batch.num_tokens):
            assert start == seq.num_computed_tokens and 0 < count <= seq.num_tokens - start
            *known, last = seq.token_ids
            assert all(token >= 0 for token in known)
            if last < 0:
                assert self.in_flight[0].sampled[-1 - last][1] is seq
                assert -1 - last < self.max_num_seqs, "no more can be looked up"
        rows = [(seq, position) for _, seq, position in batch.sampled]
        assert all(position == batch.starts[i] + batch.num_tokens[i]
                   for i, _, position in batch.sampled)
        self.in_flight.append(batch)
        self.now += 1

        def wait():
            self.happens("wait")
            assert self.in_flight.pop(0) is batch
            return [made_up_token(*row) for row in rows]

        return SimpleNamespace(
            batch=batch, wait=wait, tokens=np.array([made_up_token(*row) for row in rows]),
            done=self.now)


def make_engine(**options) -> Engine:
    runner = MadeUpRunner()
    config = EngineConfig(model="made up", **dict(block_size=4, trace=True) | options)
    runner.max_num_seqs = config.max_num_seqs
    features = Features(["running.guards"])
    features.add({"Metrics": Metrics(lambda: runner.now)})
    return Engine(config, runner, features)


def make_sequence(number: int, length: int = 5, num_new: int = 6, n: int = 1, **fields) -> Sequence:
    prompt = random.Random(length).choices(range(40), k=length)  # same length, same prompt
    seq = Sequence(str(number), prompt, length, length + num_new, seed=10 * number,
                   end_tokens={END: None}, **fields)
    seq.forks = [seq.fork(seed=10 * number + index, index=index) for index in range(1, n)]
    return seq


def expected_tokens(seq: Sequence, stop_after: int | None = None) -> list[int]:
    tokens = []
    for position in range(seq.num_prompt_tokens, seq.max_num_tokens):
        tokens.append(made_up_token(seq, position))
        if tokens[-1] == END or len(tokens) == stop_after:
            break
    return tokens


def check_between_steps(engine: Engine) -> None:
    """No token is pending, and only an engine that runs ahead has a step in flight, one."""
    scheduler = engine.scheduler
    for seq in [*scheduler.running, *scheduler.waiting]:
        assert all(token >= 0 for token in seq.token_ids)
    in_flight = [engine.in_flight.batch] if engine.in_flight else []
    assert engine.runner.in_flight == in_flight
    assert engine.config.run_ahead or not in_flight
    check_blocks(scheduler)


def check_all_free(engine: Engine) -> None:
    assert not engine.has_unfinished() and engine.in_flight is None
    metrics = metrics_of(engine).gauges()
    assert metrics["num_blocks_used"] == metrics["num_host_blocks_used"] == 0
    check_blocks(engine.scheduler)


def snapshot(record) -> list:
    """All of a record, with copies of what might change."""
    fields = dict(vars(record.batch))
    return [{name: deepcopy(value) if name == "copies" else list(value)
             if isinstance(value, list) else value for name, value in fields.items()},
            dict(record.metrics), record.started, record.began, record.done, record.ended]


def run(engine: Engine, seqs: list[Sequence], stop_after: dict | None = None) -> list:
    """Runs sequences to their end; returns what each record of the trace said at first.

    stop_after: {sequence: n} for those that someone ends after n tokens.
    """
    everyone = [each for seq in seqs for each in (seq, *seq.forks)]
    for seq in seqs:
        engine.add(seq)
    seen = []
    first = len(metrics_of(engine).trace)
    num_seen = dict.fromkeys(everyone, 0)
    while engine.has_unfinished():
        for seq in engine.step():
            num_seen[seq] += 1
            assert seq.num_tokens - seq.num_prompt_tokens == num_seen[seq], "each token once"
            if num_seen[seq] == (stop_after or {}).get(seq):
                engine.finish(seq, "stop", "enough")
        check_between_steps(engine)
        seen += map(snapshot, metrics_of(engine).trace[first + len(seen):])
    for seq in everyone:
        expected = expected_tokens(seq, (stop_after or {}).get(seq))
        assert seq.token_ids[seq.num_prompt_tokens:] == expected
        was_stopped = expected[-1] == END or (stop_after or {}).get(seq) == len(expected)
        assert seq.finish_reason == ("stop" if was_stopped else "length")
        assert num_seen[seq] == len(expected)
    check_all_free(engine)
    return seen


@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed", "static"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_sequences_run_to_their_end_over_any_runner(run_ahead, scheduling):
    """Plain or ahead, they get the tokens that the runner makes, each once."""
    happened = dict.fromkeys(
        ("num_preemptions", "swap_in_blocks", "prefix_cache_hits", "shared_blocks"), 0)
    for number in range(40):
        rng = random.Random(number)
        engine = make_engine(
            run_ahead=run_ahead, max_num_seqs=rng.randint(1, 6),
            scheduling=rng.choice([scheduling, overtaking(scheduling, max_waiting=1)]),
            max_num_batched_tokens=rng.choice([6, 9, 50]), enable_prefix_caching=rng.random() < .7,
            preemption_mode=rng.choice(["swap", "recompute"]),
            kv_allocation=rng.choice(["on-demand", "on-demand", "reserve"]))
        seqs = [make_sequence(i, rng.randint(1, 18), rng.randint(1, 20), rng.choice([1, 1, 1, 3]),
                              needs_tokens=rng.random() < 0.1)
                for i in range(rng.randint(1, 8))]
        stop_after = {seq: rng.randint(1, 12) for seq in seqs if rng.random() < 0.2}
        run(engine, seqs, stop_after)
        check_trace(engine)
        for name in happened:
            happened[name] += metrics_of(engine).gauges()[name]
    assert all(happened.values())


def check_trace(engine: Engine) -> None:
    """Later, the records still say which tokens were computed, and each follows on the last."""
    batches = [record.batch for record in metrics_of(engine).trace]
    metrics = metrics_of(engine).gauges()
    assert len(batches) == metrics["num_steps"] == engine.runner.now
    assert sum(sum(batch.num_tokens) for batch in batches) == metrics["computed_tokens"]
    assert sum(len(batch) for batch in batches) == metrics["batched_sequences"]
    stops: dict[Sequence, int] = {}
    for batch in batches:
        for seq, *_ in batch.preempted:
            stops.pop(seq, None)
        for seq, start, count in zip(batch.sequences, batch.starts, batch.num_tokens):
            assert start == stops.get(seq, start) and count > 0
            stops[seq] = start + count
        assert sum(batch.num_tokens) + batch.budget == engine.config.max_num_batched_tokens
    ended = 0.0
    for record in metrics_of(engine).trace:
        assert record.started <= record.began < record.done <= record.ended
        assert ended <= record.ended
        ended = record.ended


@pytest.mark.parametrize("run_ahead", [False, True])
def test_nothing_in_a_record_changes_later(run_ahead):
    engine = make_engine(run_ahead=run_ahead, preemption_mode="swap", max_num_batched_tokens=9)
    seqs = [make_sequence(i, 3 + 5 * i, 18, n=1 + i % 3) for i in range(4)]
    seen = run(engine, seqs)
    assert len(seen) == len(metrics_of(engine).trace)
    assert metrics_of(engine).gauges()["swap_in_blocks"] > 0
    assert any(before["copies"].copy_on_write for before, *_ in seen)
    for before, record in zip(seen, metrics_of(engine).trace):
        assert before == snapshot(record)
        assert record.metrics["num_blocks_used"] + record.metrics["num_blocks_free"] == 14
    engine = make_engine(trace=False)
    run(engine, [make_sequence(0)])
    assert metrics_of(engine).trace == []


@pytest.mark.parametrize("changes, num_waits", [
    ({}, 0), (dict(needs_tokens=True), 3), (dict(n=3), 0)])
def test_a_step_is_taken_in_before_one_that_needs_its_tokens(changes, num_waits):
    """The others are launched while the one before is in flight."""
    engine = make_engine(run_ahead=True)
    run(engine, [make_sequence(4, num_new=8), make_sequence(8, 6, num_new=3, **changes)])
    num_steps = len(metrics_of(engine).trace)
    num_ahead = num_steps - num_waits
    assert num_ahead > 3
    assert engine.runner.events == [
        *["launch", "wait"] * num_waits, "launch", *["launch", "wait"] * (num_ahead - 1), "wait"]
    plain = make_engine(run_ahead=False)
    run(plain, [make_sequence(4, num_new=8), make_sequence(8, 6, num_new=3, **changes)])
    assert plain.runner.events == ["launch", "wait"] * num_steps


@pytest.mark.parametrize("num_awaited, is_ahead", [(1, True), (2, True), (3, False), (9, False)])
def test_a_few_sequences_that_are_awaited_do_not_hold_up_the_others(
        monkeypatch, num_awaited, is_ahead):
    """They run in every second step, while the others run in each."""
    monkeypatch.setattr(MadeUpRunner, "num_kv_blocks", 50)
    engine = make_engine(run_ahead=True)
    endless = (seq for seq in map(make_sequence, itertools.count())
               if END not in expected_tokens(seq))
    seqs = list(itertools.islice(endless, 9))
    for seq in seqs[:num_awaited]:
        seq.needs_tokens = True
    run(engine, seqs)
    events = "".join(event[0] for event in engine.runner.events)
    assert events.startswith("l" + "lw" * 5 if is_ahead else "lw" * 6)
    trace = metrics_of(engine).trace[:6]
    steps = [[seq in record.batch.sequences for record in trace] for seq in seqs]
    assert all(all(step) for step in steps[num_awaited:])
    for step in steps[:num_awaited]:
        assert step == [not is_ahead or number % 2 == 0 for number in range(6)]


def test_when_all_that_is_left_is_awaited_nothing_is_launched():
    """The step in between would be empty: it is no step, and no copies are lost."""
    engine = make_engine(run_ahead=True)
    seqs = [make_sequence(4 + i, 5 + i, num_new=3 if i else 9) for i in range(9)]
    seqs[0].needs_tokens = True
    run(engine, seqs)
    assert all(record.batch.sequences for record in metrics_of(engine).trace)
    metrics = metrics_of(engine)
    assert metrics.gauges()["num_steps"] == len(metrics.trace) == engine.runner.now


def test_no_more_tokens_are_pending_than_can_be_looked_up():
    for max_num_seqs, num_waits in ((4, 1), (5, 0)):
        engine = make_engine(run_ahead=True, max_num_seqs=max_num_seqs)
        run(engine, [make_sequence(4, n=4), make_sequence(9)])
        events = "".join(event[0] for event in engine.runner.events)
        assert events.startswith("lw" * num_waits + "ll"), events


@pytest.mark.parametrize("event, at", [("launch", 1), ("launch", 4), ("wait", 1), ("wait", 3)])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_after_an_error_all_blocks_are_free(run_ahead, event, at):
    engine = make_engine(run_ahead=run_ahead, preemption_mode="swap")
    engine.runner.error_at = {event: at}
    with pytest.raises(KeyboardInterrupt):
        run(engine, [make_sequence(i, 9, 20, n=1 + i % 2) for i in range(5)])
    engine.reset()
    check_all_free(engine)
    engine.runner.in_flight.clear()
    run(engine, [make_sequence(i, 9, 20, n=1 + i % 2) for i in range(5)])


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6, 12])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_after_an_abort_all_blocks_are_free(run_ahead, num_steps):
    engine = make_engine(run_ahead=run_ahead, preemption_mode="swap")
    seqs = [make_sequence(i, 9, 20, n=1 + i % 2) for i in range(5)]
    for seq in seqs:
        engine.add(seq)
    for _ in range(num_steps):
        engine.step()
    if run_ahead and num_steps not in (0, 2):  # the first step, with forks, was taken in alone
        assert engine.in_flight is not None
    engine.abort({seq.request_id for seq in seqs})
    check_all_free(engine)
    assert all(seq.finish_reason for seq in seqs)
    engine.runner.in_flight.clear()
    manager = engine.scheduler.block_manager
    manager.forget([*manager.blocks_by_hash])
    run(engine, [make_sequence(i, 9, 20, n=1 + i % 2) for i in range(5)])


def test_a_token_in_flight_of_a_sequence_that_was_ended_does_not_count():
    engine = make_engine(run_ahead=True)
    ended, other = make_sequence(4, num_new=8), make_sequence(8, num_new=8)
    run(engine, [ended, other], {ended: 3})
    computed = [seq for record in metrics_of(engine).trace for seq in record.batch.sequences]
    assert computed.count(ended) == 4, "one more than its tokens: it was in flight"
    num_tokens = len(expected_tokens(other)) + 3
    assert metrics_of(engine).gauges()["generation_tokens"] == num_tokens


@pytest.mark.needs("running.guards")
def test_an_engine_takes_its_sizes_from_the_runner():
    engine = make_engine()
    assert metrics_of(engine).gauges()["num_blocks_free"] == 14
    assert metrics_of(engine).gauges()["attention_backend"] == "made up"
    with pytest.raises(ValueError, match="60 tokens do not fit: num_kv_blocks=14, block_size=4"):
        engine.features["Guards"].enter([make_sequence(0, 30, 30)], None)
    check_all_free(engine)


# ------------------------------------------------------------------------- over the model

STEM = random_prompts([40], seed=5)[0]
PROMPTS = [*random_prompts([1, 2, 15, 16, 17, 33, 70]), STEM, STEM + [1, 2, 3], STEM[:32], STEM]
PARAMS = [
    SamplingParams(temperature=t, seed=number, max_tokens=14 + number, ignore_eos=True, **more)
    for number, (t, more) in enumerate([
        (0, {}), (1.0, {}), (0, {}), (0.8, dict(top_p=0.9)), (1.0, dict(top_k=8)), (0, {}),
        (1.0, dict(repetition_penalty=1.3)), (0, {}), (1.3, dict(min_p=0.05)),
        (0, dict(presence_penalty=1.0)), (1.0, {})])
]


@pytest.fixture(scope="module")
def tiny_llm(make_llm):
    with make_llm(num_kv_blocks=128, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(make_llm):
    """Every request by itself, in an engine that remembers nothing."""
    with make_llm(enable_prefix_caching=False, max_num_seqs=1) as llm:
        return [token_ids(generate(llm, [prompt], params))[0]
                for prompt, params in zip(PROMPTS, PARAMS)]


# the other pairs are in the random requests below
@pytest.mark.parametrize("scheduling, run_ahead", [
    ("prefill-first", False), ("mixed", True),
    pytest.param("static", True, marks=pytest.mark.slow)])
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
    (dict(enable_prefix_caching=False, block_size=3), lambda m: m["prefix_cache_hits"] == 0),
    (dict(num_kv_blocks=9, kv_allocation="reserve"), lambda m: m["num_preemptions"] == 0),
    (dict(num_kv_blocks=18, kv_allocation="max-length", max_model_len=110),
     lambda m: m["num_preemptions"] == 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", enable_prefix_caching=False),
     lambda m: m["swap_preemptions"] > 0 == m["recompute_preemptions"] == m["recomputed_tokens"]
     and m["swap_in_blocks"] == m["swap_out_blocks"] > 0 < m["swapped_bytes"]),
    (dict(num_kv_blocks=40, block_size=3, preemption_mode="swap", preemption_victim="random"),
     lambda m: m["swap_preemptions"] > 0),
    (dict(num_kv_blocks=9, preemption_mode="swap", swap_space=0, preemption_victim="longest"),
     lambda m: m["recompute_preemptions"] > 0 == m["swap_preemptions"]),
    (dict(num_kv_blocks=12, preemption_victim="least-recently-run", max_num_batched_tokens=6),
     lambda m: m["num_preemptions"] > 0),
    (dict(num_kv_blocks=9, max_waiting=0, preemption_mode="swap"),
     lambda m: m["num_preemptions"] > 0),
    (dict(num_kv_blocks=9, max_waiting=1, max_num_seqs=2), lambda m: m["num_preemptions"] > 0),
])
def test_tokens_do_not_depend_on_the_schedule(make_llm, alone, scheduling, run_ahead, options,
                                              happened):
    options = {"scheduling": scheduling} | options
    if "max_waiting" in options:
        options["scheduling"] = overtaking(scheduling, options.pop("max_waiting"))
    with make_llm(run_ahead=run_ahead, **options) as llm:
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == alone
        assert happened(llm.metrics())
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == alone, "with a warm cache"
        if options.get("enable_prefix_caching", True):
            assert llm.metrics()["prefix_cache_hits"] > 0
        llm.reset_prefix_cache()
        assert token_ids(generate(llm, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]


def random_params(rng: random.Random) -> SamplingParams:
    """Parameters of all kinds; some words are tokens that only a wide tokenizer knows."""
    extra = [f"<extra{rng.randrange(860)}>" for _ in range(4)]
    temperature = rng.choice([0, 0.8, 1.0])
    return SamplingParams(
        temperature=temperature, seed=rng.randrange(99), max_tokens=rng.randint(6, 20),
        n=rng.choice([1, 1, 2]) if temperature else 1, min_tokens=rng.choice([0, 0, 6]),
        bad_words=rng.choice([[], extra, ["the", *extra, f"a {extra[0]}"]]),
        stop_token_ids=rng.choice([[], [20, 866]]), top_p=rng.choice([1.0, 0.9]),
        logit_bias=rng.choice([None, {20: 0.001}, {866: 5.0}]),
        allowed_token_ids=rng.choice([None, None, [*range(300), 866]]),
        presence_penalty=rng.choice([0, 1.0]), repetition_penalty=rng.choice([1.0, 1.2]),
        logits_processors=rng.choice([[], [lambda input_ids, scores: scores * 1.5]]),
        logprobs=rng.choice([None, 2]), prompt_logprobs=rng.choice([None, 0]))


def test_random_requests_do_not_depend_on_each_other(wide_llm):
    """With a tokenizer that knows more tokens than the model."""
    rng = random.Random(0)
    texts = ["a", "b", "Once upon a time", "47 + 85 =", "sort d b e a =", "Long ago the"]
    for _ in range(20):
        params = [random_params(rng) for _ in range(rng.randint(2, 7))]
        prompts = rng.choices(texts, k=len(params))
        use_policies(wide_llm, run_ahead=rng.random() < 0.5, max_num_seqs=rng.randint(3, 8),
                     scheduling=rng.choice(["prefill-first", "mixed", "static"]),
                     max_num_batched_tokens=rng.choice([9, 2048]))
        expected = [wide_llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params)]
        for found, wanted in zip(generate(wide_llm, prompts, params), expected):
            assert found.outputs == wanted.outputs
            assert found.prompt_logprobs == wanted.prompt_logprobs


SEVERAL = [SamplingParams(n=n, seed=number, max_tokens=15, ignore_eos=True, **more)
           for number, (n, more) in enumerate([
               (4, {}), (1, {}), (3, dict(top_k=20)), (2, dict(repetition_penalty=1.2)), (5, {})])]
SEVERAL_PROMPTS = random_prompts([17, 5, 33, 32, 1], seed=7)


@pytest.fixture(scope="module")
def several_alone(make_llm):
    """The completions of requests with several, without a cache and with room for all."""
    with make_llm(enable_prefix_caching=False, max_num_seqs=64) as llm:
        expected = [[completion.token_ids for completion in output.outputs]
                    for output in generate(llm, SEVERAL_PROMPTS, SEVERAL)]
        first = [dataclasses.replace(params, n=1) for params in SEVERAL]
        assert token_ids(generate(llm, SEVERAL_PROMPTS, first)) == [ids[0] for ids in expected]
    assert all(len({tuple(ids) for ids in found}) == len(found) for found in expected)
    return expected


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("options", [
    dict(), dict(enable_prefix_caching=False), dict(max_num_seqs=2), dict(num_kv_blocks=7),
    dict(num_kv_blocks=25, block_size=3, max_num_batched_tokens=16, scheduling="mixed"),
    dict(num_kv_blocks=7, preemption_mode="swap", enable_prefix_caching=False),
    dict(num_kv_blocks=8, kv_allocation="reserve"), dict(num_kv_blocks=14, scheduling="static")])
def test_several_completions_do_not_depend_on_the_schedule(make_llm, several_alone, options,
                                                           run_ahead):
    with make_llm(run_ahead=run_ahead, **options) as llm:
        outputs = generate(llm, SEVERAL_PROMPTS, SEVERAL)
        found = [[completion.token_ids for completion in output.outputs] for output in outputs]
        assert found == several_alone
        assert [[completion.index for completion in output.outputs] for output in outputs] == [
            list(range(params.n)) for params in SEVERAL]
        assert all(output.finished for output in outputs)
        if options.get("kv_allocation") == "reserve":
            assert llm.metrics()["num_preemptions"] == 0


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
        params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[end])
        output = generate(llm, [prompt], params)[0].outputs[0]
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


def test_bfloat16_does_not_depend_on_chunks_and_preemptions_beyond_near_ties(make_llm):
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5)
    results = []
    for options in (dict(), dict(num_kv_blocks=9, max_num_batched_tokens=16)):
        with make_llm(dtype="bfloat16", **options) as llm:
            results.append([output.outputs[0] for output in generate(llm, PROMPTS, params)])
    for left, right in zip(*results):
        for position, (a, b) in enumerate(zip(left.token_ids, right.token_ids)):
            if a != b:
                assert a in right.logprobs[position] and b in left.logprobs[position]
                break


# -------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", [
    (ModelRunner, "prepare"), (ModelRunner, "launch"), (Launched, "wait")])
@pytest.mark.parametrize("at_step", [1, 3])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_error_in_the_middle_leaves_a_usable_engine(tiny_llm, monkeypatch, error, where, at_step,
                                                       run_ahead):
    use_policies(tiny_llm, run_ahead=run_ahead)
    prompts = random_prompts([10, 3] * 6)
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


def test_ctrl_c_inside_the_scheduler(tiny_llm, monkeypatch):
    prompts = random_prompts([20, 33, 5, 20])
    expected = token_ids(generate(tiny_llm, prompts))
    tiny_llm.reset_prefix_cache()
    manager = tiny_llm.engine.scheduler.block_manager
    original, calls = manager.register, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(manager, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
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
