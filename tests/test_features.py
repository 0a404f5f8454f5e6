"""A feature of a user's own, as in observers.py: its methods are called, it can edit logits, and
its errors end what they concern. The features of this repository have tests in features/."""

import re
import threading
from collections import Counter

import pytest
import torch
from conftest import check_idle, check_refused, for_feature, generate, random_prompts, token_ids

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.observers import Feature

HOOKS = [name for name, value in vars(Feature).items() if callable(value)]
# of a step, in their order
STEP = {"scheduled": "s", "drawn": "r", "done": "d"}
PROMPTS = random_prompts([40, 7, 33, 18, 25, 12], seed=5)
PARAMS = [SamplingParams(temperature=0, max_tokens=9), SamplingParams(seed=1, max_tokens=14),
          SamplingParams(seed=2, max_tokens=11, n=3), SamplingParams(temperature=0, max_tokens=12),
          SamplingParams(seed=3, max_tokens=1), SamplingParams(seed=4, top_p=0.8, max_tokens=13)]
SCHEDULES = [
    dict(), dict(run_ahead=True), dict(scheduling="mixed", max_num_batched_tokens=16),
    dict(num_kv_blocks=6, run_ahead=True),
    dict(num_kv_blocks=6, preemption_mode="swap", swap_space=0.01),
    dict(speculation="prompt-lookup"), dict(kernels=False)]


def completions(outputs) -> list:
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(make_llm) -> list:
    with make_llm(max_num_seqs=8) as llm:
        return completions(generate(llm, PROMPTS, PARAMS))


class Recorder(Feature):
    """Notes each call of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []


def noting(name: str):
    return lambda recorder, *arguments: recorder.calls.append((name, *arguments))


for hook in HOOKS:
    setattr(Recorder, hook, noting(hook))


# ------------------------------------------------------------------------- its methods


@pytest.mark.parametrize("options", SCHEDULES)
def test_every_method_is_called_and_the_tokens_stay(make_llm, expected, options):
    recorder = Recorder()
    with make_llm(features=[recorder], max_num_seqs=8, **options) as llm:
        assert recorder.calls == [("begin", llm.engine)]
        assert completions(generate(llm, PROMPTS, PARAMS)) == expected
        assert llm.engine.features["Recorder"] is recorder, "beside those of every engine"
        metrics = llm.metrics()
    calls = recorder.calls[1:]
    entered = [seqs for name, seqs, inputs in calls[:len(PROMPTS)]]
    assert all(call[0] == "enter" and call[2] is llm.inputs for call in calls[:len(PROMPTS)])
    assert [[seq.index for seq in seqs] for seqs in entered] == [[0], [0], [0, 1, 2], [0], [0], [0]]
    outputs = calls[-len(PROMPTS):]
    assert [call[:2] for call in outputs] == [("output", seqs) for seqs in entered]
    steps = calls[len(PROMPTS):-len(PROMPTS)]
    letters = "".join(STEP[name] for name, *_ in steps)
    # the step before is done after the next one is launched; a batch can be empty; after right
    # guesses, a step is only done
    one_step = "s(r*)?d?" if options.get("run_ahead") else "s(r*d)?"
    one_step += "|d" if "speculation" in options else ""
    assert re.fullmatch(f"({one_step})+d?", letters), letters

    num_tokens: Counter = Counter()
    batches = []
    for name, *arguments in steps:
        if name == "scheduled" and arguments[0]:
            batches.append(arguments[0])
        elif name == "drawn":
            rows, logits, tokens = arguments
            assert logits.shape == (len(rows), 320) and tokens.shape == (len(rows),)
        elif name == "done":
            step, seqs = arguments
            assert {*seqs} <= {row.seq for row in step.batch.sampled}
            num_tokens.update(seqs)
    everyone = [seq for seqs in entered for seq in seqs]
    assert num_tokens == {seq: seq.num_tokens - seq.num_prompt_tokens for seq in everyone}
    assert metrics["num_steps"] == len(batches)
    if options.get("num_kv_blocks"):
        assert metrics["num_preemptions"] > 0


def test_a_request_enters_in_the_thread_of_its_call(make_llm):
    threads = []

    class Who(Feature):
        def enter(self, seqs, inputs):
            threads.append(threading.current_thread())

    with make_llm(features=[Who()]) as llm:
        for _ in range(2):
            thread = threading.Thread(target=generate, args=(llm, PROMPTS[:2]))
            thread.start()
            thread.join()
            assert threads == [thread] * 2
            threads.clear()


def test_a_stream_asks_for_its_outputs_as_it_goes(make_llm):
    class Count(Feature):
        def output(self, seqs, output):
            output.outputs[0].text = f"{len(output.outputs[0].token_ids)} tokens"

    with make_llm(features=[Count()]) as llm:
        texts = [output.outputs[0].text for output in llm.stream(PROMPTS[0], PARAMS[0])]
    assert texts == [f"{count} tokens" for count in range(1, 10)]


# ------------------------------------------------------------------------------- edits


class NoRepeat(Feature):
    """No token twice in a row, for prompts that begin with an even token."""

    def __init__(self) -> None:
        self.most_rows = 0

    def enter(self, seqs, inputs):
        for seq in seqs:
            if seq.token_ids[0] % 2 == 0:
                seq.edits += ("NoRepeat",)
                seq.kept["NoRepeat"] = -torch.inf

    def fork(self, seq, copy):
        copy.kept.update({name: seq.kept[name] for name in seq.kept if name == "NoRepeat"})

    def edit(self, scores, seqs, last_sampled):
        assert scores.dtype == torch.float32 and scores.shape == (len(seqs), 320)
        assert any("NoRepeat" in seq.edits for seq in seqs)
        self.most_rows = max(self.most_rows, len(seqs))
        for row, seq in enumerate(seqs):
            if "NoRepeat" in seq.edits:
                last = seq.token_ids[-1]
                if last < 0:
                    last = int(last_sampled[-1 - last])
                scores[row, last] = seq.kept["NoRepeat"]


def no_repeat(input_ids, scores):
    return scores.index_fill(1, input_ids[0, -1:], -torch.inf)


REPEATING = [[4, 7, 7, 7], [5, 7, 7, 7], [6, 9, 9], [8, 1, 2], [3, 3, 3], [2, 2]]


@pytest.fixture(scope="module")
def edited(make_llm) -> list:
    """With the same as a logits processor."""
    params = [SamplingParams(**vars(each) | dict(
        logits_processors=[no_repeat] if prompt[0] % 2 == 0 else []))
        for prompt, each in zip(REPEATING, REPEATING_PARAMS)]
    with make_llm(max_num_seqs=8) as llm:
        found = completions(generate(llm, REPEATING, params))
        assert found != completions(generate(llm, REPEATING, REPEATING_PARAMS)), "it matters"
    return found


# without a bias, an untrained model seldom repeats itself
FEW = dict(allowed_token_ids=[7, 9, 11], max_tokens=15, ignore_eos=True)
REPEATING_PARAMS = [SamplingParams(temperature=0, **FEW), SamplingParams(seed=1, **FEW),
                    SamplingParams(seed=2, n=3, **FEW), SamplingParams(seed=3, logprobs=2, **FEW),
                    SamplingParams(temperature=0, **FEW), SamplingParams(seed=4, top_k=9, **FEW)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_feature_edits_the_rows_that_ask_for_it(make_llm, edited, options):
    feature = NoRepeat()
    with make_llm(features=[feature], max_num_seqs=8, **options) as llm:
        assert completions(generate(llm, REPEATING, REPEATING_PARAMS)) == edited
        num_guesses = llm.metrics()["guessed_tokens"]
    assert feature.most_rows > 2, "several rows are one matrix"
    # how many there are depends on the time
    assert num_guesses == 0 or "speculation" in options


def test_a_guess_has_a_copy_that_each_feature_is_told_of(make_llm, edited):
    """The rows after guesses are those of copies, which have the guesses."""
    recorder, feature = Recorder(), NoRepeat()
    known = {seq: tokens for seq, (tokens, *_) in zip(map(tuple, REPEATING), edited)}

    def guess(seq):
        prompt = tuple(seq.token_ids[:seq.num_prompt_tokens])
        return known[prompt][seq.num_tokens - len(prompt):]

    with make_llm(features=[recorder, feature], max_num_seqs=8, speculation=guess) as llm:
        assert completions(generate(llm, REPEATING, REPEATING_PARAMS)) == edited
        assert llm.metrics()["right_guesses"] > 10
    forks = [arguments for name, *arguments in recorder.calls if name == "fork"]
    assert forks and all(copy is not seq and copy.edits == seq.edits != () for seq, copy in forks)
    assert all(copy.token_ids[:3] == seq.token_ids[:3] for seq, copy in forks)
    assert {name for name, *_ in recorder.calls} == {*HOOKS} - {"edit"}


def test_a_feature_that_edits_nothing_now_is_not_asked(make_llm):
    feature = NoRepeat()
    with make_llm(features=[feature]) as llm:
        generate(llm, [[5, 7, 7], [3]])
    assert feature.most_rows == 0


def test_beams_beside_a_feature(make_llm):
    """They go by raw log-probabilities, which no edit changes."""
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    feature, recorder = NoRepeat(), Recorder()
    with make_llm() as llm:
        expected = llm.beam_search(REPEATING, params)
    for options in (dict(), dict(run_ahead=True)):
        with make_llm(features=[feature, recorder], **options) as llm:
            assert llm.beam_search(REPEATING, params) == expected
            check_idle(llm)
    assert feature.most_rows == 0
    assert {"enter", "scheduled", "drawn", "done"} <= {name for name, *_ in recorder.calls}


# ------------------------------------------------------------------------------ errors


class Failing(Feature):
    """Raises an error in one of its methods, once it is told to."""

    is_on = True

    def enter(self, seqs, inputs):
        for seq in seqs:
            seq.edits += ("Failing",)


def failing(name: str) -> Feature:
    def fail(feature, *arguments):
        if name == "enter":
            Failing.enter(feature, *arguments)
        if feature.is_on:
            raise ZeroDivisionError(name)

    return type("Failing", (Failing,), {name: fail})()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in ("begin", "fork")])
def test_an_error_of_a_feature_ends_the_call_and_leaves_an_engine(
        make_llm, expected, name, run_ahead):
    feature = failing(name)
    with make_llm(features=[feature], max_num_seqs=8, run_ahead=run_ahead) as llm:
        with pytest.raises(ZeroDivisionError, match=name):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        check_idle(llm)
        with pytest.raises(ZeroDivisionError, match=name):
            list(llm.stream(PROMPTS, PARAMS))
        check_idle(llm)
        feature.is_on = False
        assert completions(generate(llm, PROMPTS, PARAMS)) == expected


def test_a_feature_that_an_engine_cannot_serve_says_so(make_llm):
    class Needs(Feature):
        def begin(self, engine):
            raise ValueError("Needs needs run_ahead=True")

    check_refused("Needs needs run_ahead=True", make_llm, features=[Needs()])


def test_a_request_that_a_feature_refuses_is_not_queued(make_llm):
    """Nor are the others of its call."""
    class Refuse(Feature):
        def enter(self, seqs, inputs):
            if seqs[0].num_prompt_tokens == 7:
                raise ValueError("prompts of 7 tokens bring bad luck")

    with make_llm(features=[Refuse()]) as llm:
        for call in (llm.generate, llm.add, llm.stream):
            check_refused("bad luck", call, PROMPTS)
            check_idle(llm)
        assert len(token_ids(generate(llm, PROMPTS[2:]))) == 4


@pytest.mark.needs("running.policies")
def test_a_feature_and_a_policy_share_no_name(make_llm):
    """A policy that is an observer takes the place of no feature."""
    for name in ("Victim", "LeastRecentlyRun"):
        feature = type(name, (Recorder,), {})()
        with make_llm(features=[feature], preemption_victim="least-recently-run") as llm:
            llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert {"begin", "done"} <= {hook for hook, *_ in feature.calls}


class Twice(Feature):
    pass


@pytest.mark.parametrize("features", [
    [Twice(), Twice()], [Twice], [3], [type("Metrics", (Feature,), {})()],
    [Twice(), type("Twice", (Feature,), {})()], "metrics", *for_feature("running.strict",
    (Twice(),))], ids=[*"1234567"])
def test_what_is_no_list_of_features_with_names_of_their_own(features):
    check_refused("^features=.* is not accepted: it must be a", LLM, "none", features=features)
