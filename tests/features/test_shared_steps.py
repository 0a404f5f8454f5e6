"""Calls of several threads share steps: each gets what it would get alone."""

import copy
import gc
import itertools
import linecache
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import (
    GREEDY, check_idle, check_refused, generate, random_prompts, slow, token_ids, wait_until)

from nanoengine import SamplingParams
from nanoengine.engine import Engine


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "running ahead"])
def shared_llm(request, make_llm):
    options = dict(num_kv_blocks=256, max_num_seqs=32, run_ahead=request.param)
    with make_llm(**options) as llm:
        yield llm
        check_idle(llm)


@pytest.fixture
def eager_threads():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def long_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens, ignore_eos=True)


def test_64_threads_some_of_which_drop_their_streams(shared_llm, eager_threads):
    """A stream sees each token once, none that is still to be sampled, and its end once. Within it
    there can be calls, and metrics can be read at any time. Prompts that are too long harm no other
    call."""
    rng = random.Random(0)
    prompts = random_prompts([rng.randint(1, 40) for _ in range(64)])
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randint(1, 30), logprobs=0,
                             n=1 + i % 2, stop_token_ids=[*range(i % 3)]) for i in range(64)]
    expected = [output.outputs for output in generate(shared_llm, prompts, params)]
    barrier = threading.Barrier(64)

    def call(number: int) -> bool:
        barrier.wait(timeout=60)
        if number % 10 == 9:
            with pytest.raises(ValueError, match="context length is max_model_len=512"):
                shared_llm.generate([prompts[number], [1] * 10_000], params[number])
        if number % 3 == 0:
            outputs = shared_llm.generate([prompts[number]], params[number], use_tqdm=False)
            return outputs[0].outputs == expected[number]
        seen = [[] for _ in range(params[number].n)]
        num_finished = 0
        stream = shared_llm.stream([prompts[number]] * 2, [params[number]] * 2)
        for count, output in enumerate(stream):
            if output.index:
                continue
            if number % 3 == 1 and count == 3:
                return True
            assert shared_llm.metrics()["num_requests_running"] <= 32
            if number % 9 == 2 and len(output.outputs[0].token_ids) == 1:
                within = shared_llm.generate([prompts[0]], params[0], use_tqdm=False)
                assert within[0].outputs == expected[0]
            for before, now in zip(seen, output.outputs):
                assert now.token_ids[:len(before)] == before
                assert all(token_id >= 0 for token_id in now.token_ids)
                assert len(now.logprobs or []) == len(now.token_ids)
                before[:] = now.token_ids
            num_finished += output.finished
        return num_finished == 1 and seen == [each.token_ids for each in expected[number]]

    for _ in range(3):
        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(call, range(64)))
        check_idle(shared_llm)


def test_an_error_in_one_call_harms_no_other(shared_llm, monkeypatch):
    prompts = random_prompts([5, 6, 7])
    params = long_params(40)
    expected = token_ids(generate(shared_llm, prompts, params))
    bad = random_prompts([9])[0]
    step = shared_llm.engine.step

    def step_with_an_error():
        seqs = step()
        for seq in seqs:
            if seq.num_prompt_tokens == 9 and seq.num_tokens == 12:
                seq.error = ValueError(f"request {seq.request_id} is bad")
                shared_llm.engine.finish(seq, "error", str(seq.error))
        return seqs

    monkeypatch.setattr(shared_llm.engine, "step", step_with_an_error)
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(shared_llm.generate, [prompt], params, False) for prompt in prompts]
        call = pool.submit(shared_llm.generate, [*prompts, bad], params, False)
        check_refused("request .* is bad", call.result, timeout=60)
        assert [token_ids(each.result(timeout=60))[0] for each in good] == expected
    check_idle(shared_llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory")])
def test_what_breaks_a_step_is_told_to_all_calls(shared_llm, monkeypatch, error):
    """None gets a part of its text as if it were all, and none waits for ever."""
    prompts = random_prompts([5, 6, 7])
    by_hand = shared_llm.add([prompts[0]], long_params(400))
    begun = threading.Semaphore(0)
    breaking = threading.Event()
    step = Engine.step

    def step_or_break(engine):
        begun.release()
        if breaking.is_set():
            breaking.clear()
            # in the middle, with tokens that are pending
            engine.scheduler.advance(engine.scheduler.schedule())
            raise error
        return step(engine)

    def read(prompt):
        return list(shared_llm.stream([prompt], long_params(400)))

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(Engine, "step", step_or_break)
        calls = [pool.submit(shared_llm.generate, [prompt], long_params(400), False)
                 for prompt in prompts[:2]]
        calls.append(pool.submit(read, prompts[2]))
        wait_until(lambda: len(shared_llm.active) == 4)
        for _ in range(5):
            begun.acquire()
        breaking.set()
        found = [call.exception(timeout=60) for call in calls]
    assert sum(each is error for each in found) == 1, "in the thread that ran the step"
    others = [each for each in found if each is not error]
    assert all(type(each) is RuntimeError and repr(error) in str(each) for each in others)
    (output,) = by_hand[0].output().outputs
    assert output.finish_reason == "abort" and min(output.token_ids) >= 0
    check_idle(shared_llm)
    assert token_ids(generate(shared_llm, prompts, long_params(9)))


def test_requests_that_are_ended_by_hand(shared_llm):
    (expected,) = token_ids(generate(shared_llm, [[1, 2]], GREEDY))
    first, second, third = shared_llm.add([[1, 2], [3, 4], [5]], GREEDY)
    for _ in range(4):
        shared_llm.step()
    for wrong in ("0", ["0"], [None], None, 5, second):
        check_refused("requests=.* is not accepted: it must be a list of what", shared_llm.abort,
                      wrong)
    # each engine counts its own requests, so that one of another engine can have this number
    shared_llm.abort([copy.copy(second)])
    shared_llm.step()
    assert not second.is_finished
    shared_llm.abort([second, third, second])
    shared_llm.abort([])
    assert second.is_finished and second.output().outputs[0].finish_reason == "abort"
    assert not first.is_finished and [*shared_llm.active] == [first.request_id]
    while not first.is_finished:
        assert shared_llm.step() in ([first], [])
    shared_llm.abort([first, second])
    assert token_ids([first.output()]) == [expected]
    assert first.output().outputs[0].finish_reason == "length"
    assert shared_llm.step() == []


@pytest.mark.parametrize("num_threads", [1, 6])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_short_request_does_not_wait_for_long_ones(shared_llm, by_hand, num_threads):
    """Its first token comes within a few steps, however eager other threads are: about as many as
    there are threads that run steps by hand, and fewer if they wait for their own tokens."""
    is_over = threading.Event()

    def long_call(_):
        while not is_over.is_set():
            if by_hand:
                requests = shared_llm.add([[5] * 12], long_params(200))
                while not (requests[0].is_finished or is_over.is_set()):
                    shared_llm.step()
                shared_llm.abort(requests)
            else:
                for _ in shared_llm.stream([[5] * 12], long_params(200)):
                    if is_over.is_set():
                        break

    num_steps = []
    with ThreadPoolExecutor(num_threads) as pool:
        calls = [pool.submit(long_call, number) for number in range(num_threads)]
        try:
            wait_until(lambda: len(shared_llm.active) == num_threads)
            for number in range(20):
                before = shared_llm.metrics()["num_steps"]
                stream = shared_llm.stream([[7, 8, number]], long_params(2))
                next(stream)
                num_steps.append(shared_llm.metrics()["num_steps"] - before)
                stream.close()
        finally:
            is_over.set()
        for call in calls:
            call.result(timeout=60)
    # on a busy machine some wait longer
    assert sorted(num_steps)[5] <= 5 + 5 * num_threads, num_steps


@pytest.mark.parametrize("call", ["generate", "stream", "add"])
def test_calls_that_arrive_during_a_turn_share_the_next_step(shared_llm, call):
    """They need not have a turn each: that could take as many steps as there are threads."""
    prompts = random_prompts([6] * 12)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = token_ids(generate(shared_llm, prompts, params))
    shared_llm.reset_prefix_cache()
    before = shared_llm.metrics()

    def work(prompt):
        if call == "stream":
            return [*shared_llm.stream([prompt], params)][-1]
        if call == "generate":
            return shared_llm.generate([prompt], params, use_tqdm=False)[0]
        (request,) = shared_llm.add([prompt], params)
        while not request.is_finished:
            shared_llm.step()
        return request.output()

    with ThreadPoolExecutor(len(prompts)) as pool:
        with shared_llm.turn():
            calls = [pool.submit(work, prompt) for prompt in prompts]
            wait_until(lambda: len(shared_llm.active) == len(prompts))
        assert token_ids(call.result(timeout=60) for call in calls) == expected
    after = shared_llm.metrics()
    assert after["batched_sequences"] - before["batched_sequences"] == 8 * len(prompts)
    assert after["num_steps"] - before["num_steps"] == 8


def test_a_broken_step_ends_no_request_that_has_only_arrived(shared_llm, monkeypatch):
    """Nor does it lose one: the call that broke has gone, and the next turn queues the others."""
    prompts = random_prompts([6, 7])
    expected = token_ids(generate(shared_llm, prompts[1:], GREEDY))

    def broken_step(engine):
        monkeypatch.undo()
        future = pool.submit(generate, shared_llm, prompts[1:], GREEDY)
        wait_until(lambda: len(shared_llm.active) == 2)
        futures.append(future)
        raise KeyboardInterrupt

    futures = []
    monkeypatch.setattr(Engine, "step", broken_step)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            shared_llm.generate(prompts[:1], GREEDY, use_tqdm=False)
        assert token_ids(futures[0].result(timeout=60)) == expected


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_the_garbage_collector_finds_in_the_middle_of_a_step(shared_llm, monkeypatch):
    expected = token_ids(generate(shared_llm, random_prompts([5, 6]), GREEDY))
    calls = itertools.count()
    step = Engine.step

    def leave_one():
        cycle = {"stream": shared_llm.stream(random_prompts([30] * 3), long_params(200))}
        cycle["itself"] = cycle
        next(cycle["stream"])

    def collect_and_step(engine):
        if next(calls) == 3:
            gc.collect()
        return step(engine)

    gc.disable()
    try:
        leave_one()
        assert len(shared_llm.active) == 3
        monkeypatch.setattr(Engine, "step", collect_and_step)
        outputs = shared_llm.generate(random_prompts([5, 6]), GREEDY, use_tqdm=False)
        assert token_ids(outputs) == expected
    finally:
        gc.enable()


FILES = ("nanoengine/llm.py", "running/shared_steps.py", "/contextlib.py")


def interrupted(call, at: int, check) -> bool:
    """Runs a call with Ctrl-C at a line of these files, counted from 1; whether it was reached.
    Then it also runs a check, while the error refers to the frames of the call."""
    count = itertools.count(1)

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        # Python checks for signals after a call, not between taking a lock and what follows
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with ", "try:")) and next(count) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        return next(count) > at
    except KeyboardInterrupt:
        sys.settrace(before)
        check()
        return True
    finally:
        sys.settrace(before)


CALLS = ["generate", "stream", "by hand", "abort", "a dropped stream"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [3, slow(1)])
@pytest.mark.parametrize("shared_llm, name", [
    *((False, name) for name in CALLS), (True, "generate"),
    *(slow(True, name) for name in CALLS[1:])],
    indirect=["shared_llm"])
def test_ctrl_c_at_any_line(shared_llm, name, every):
    """The next call begins with a clean engine, and gets the right tokens; none is left behind.
    The fast tests interrupt every third line."""
    prompts = random_prompts([5, 6])
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = token_ids(generate(shared_llm, prompts, params))
    handles = []

    def by_hand():
        handles.extend(shared_llm.add(prompts, params))
        while not all(each.is_finished for each in handles):
            shared_llm.step()

    def drop_a_stream():
        stream = shared_llm.stream(prompts, params)
        next(stream)
        stream.close()

    calls = {
        "generate": lambda: shared_llm.generate(prompts, params, use_tqdm=False),
        "stream": lambda: list(shared_llm.stream(prompts, params)),
        "by hand": by_hand,
        "abort": lambda: shared_llm.abort(shared_llm.add(prompts, params)),
        "a dropped stream": drop_a_stream}
    for at in itertools.count(1, every):
        handles.clear()
        # what `stream` and `add` return has its own end
        check = (lambda: check_idle(shared_llm)) if name == "generate" else lambda: None
        if not interrupted(calls[name], at, check):
            break
        # Ctrl-C right after `add` leaves requests, which the next steps finish.
        while shared_llm.active and name in ("by hand", "abort"):
            try:
                shared_llm.step()
            except RuntimeError:
                pass
        assert token_ids(generate(shared_llm, prompts, params)) == expected, at
        check_idle(shared_llm)
    assert at > 15


def test_requests_that_arrive_while_a_broken_step_is_cleaned_up(
        shared_llm, monkeypatch, eager_threads):
    """Whenever they arrive, each gets its tokens, or its call an error: none waits for ever."""
    prompts = random_prompts([5, 6, 7, 8])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = token_ids(generate(shared_llm, prompts, params))
    step = Engine.step
    count = itertools.count(1)

    def sometimes_broken(engine):
        if next(count) % 5 == 0:
            raise MemoryError("no memory")
        return step(engine)

    def call(number):
        try:
            found = shared_llm.generate([prompts[number % 4]], params, use_tqdm=False)
        except (MemoryError, RuntimeError):
            return True
        return token_ids(found) == [expected[number % 4]]

    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(Engine, "step", sometimes_broken)
        assert all(pool.map(call, range(120), timeout=120))
    assert token_ids(generate(shared_llm, prompts, params)) == expected
