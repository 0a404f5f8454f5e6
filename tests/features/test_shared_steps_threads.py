"""One engine and several threads or processes: turns, interrupts, forks, limits on threads."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import GREEDY, check_idle, generate, in_thread, random_prompts, slow, token_ids
from forks import run_in_fork

from nanoengine import SamplingParams
from nanoengine.engine import Engine
from nanoengine.scheduler import Scheduler
from nanoengine_extras.running import shared_steps

PARAMS = SamplingParams(seed=3, max_tokens=8)


def test_a_stream_may_be_read_in_another_thread(tiny_llm):
    stream = tiny_llm.stream([[1, 2]], GREEDY)
    outputs = in_thread(list, stream)
    assert outputs[-1].finished
    check_idle(tiny_llm)
    stream = tiny_llm.stream([[1, 2]], GREEDY)

    def read_one_and_call():
        next(stream)
        tiny_llm.generate([[1]], GREEDY, use_tqdm=False)
        stream.close()

    in_thread(read_one_and_call)


def test_a_call_from_within_a_call_is_refused(tiny_llm):
    """Nor can it close the engine, or empty its cache."""
    def nested(input_ids, scores):
        for call in (lambda: tiny_llm.generate([[1]]), tiny_llm.close, tiny_llm.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="^this thread is already in a call$"):
                call()
            calls.append(call)
        return scores

    calls: list = []
    params = SamplingParams(max_tokens=1, logits_processors=[nested])
    generate(tiny_llm, [[1], [2]], [params, GREEDY])
    list(tiny_llm.stream([[1], [2]], [params, GREEDY]))
    assert len(calls) == 6


def test_closing_ends_the_calls_of_other_threads(make_llm):
    """After the step that is running; each of them says why. So do later calls, and a stream."""
    llm, begun = make_llm(num_kv_blocks=16), threading.Event()

    def slow(input_ids, scores):
        begun.set()
        time.sleep(0.02)
        return scores

    stream = llm.stream([[1, 2]], GREEDY)
    next(stream)
    params = SamplingParams(max_tokens=100, temperature=0, logits_processors=[slow])
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(llm.generate, [[1, 2]], params, False) for _ in range(2)]
        assert begun.wait(timeout=60)
        llm.close()
    for call in (*(each.result for each in running), lambda: list(stream),
                 lambda: list(llm.stream([[1, 2]], GREEDY)), lambda: llm.generate([[1]])):
        with pytest.raises(RuntimeError, match="the LLM is closed"):
            call()
    llm.close()


# ----------------------------------------------------------------------------- interrupts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("first", [(Engine, "step"), (Scheduler, "postprocess")])
@pytest.mark.parametrize("second", [(Engine, "reset"), (Scheduler, "reset"),
                                    (Scheduler, "finish"), (shared_steps, "abort_sequences")])
def test_a_second_ctrl_c_while_the_first_is_cleaned_up(make_llm, monkeypatch, first, second,
                                                       run_ahead):
    """Whatever it leaves behind, the next call begins with a clean engine."""
    prompts = random_prompts([10, 33] * 3)
    with make_llm(num_kv_blocks=64, run_ahead=run_ahead) as llm:
        expected = token_ids(generate(llm, prompts))

        def interrupt(*arguments):
            raise KeyboardInterrupt

        def interrupted(original, at):
            calls = itertools.count(1)
            return lambda *some: interrupt() if next(calls) == at else original(*some)

        for call in (generate, lambda *some: list(llm.stream(prompts, GREEDY))):
            with monkeypatch.context() as patch:
                patch.setattr(*first, interrupted(getattr(*first), at=3))
                patch.setattr(*second, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    call(llm, prompts)
            assert token_ids(generate(llm, prompts)) == expected
        for is_last in (False, True):
            stream = llm.stream(prompts, GREEDY)
            next(stream)
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(*second, interrupt)
                stream.close()
            assert is_last or token_ids(generate(llm, prompts)) == expected
    assert llm.engine.runner is None, "it can be closed, too"


def test_add_that_is_interrupted_leaves_no_request(tiny_llm, monkeypatch):
    """As by Ctrl-C while it waits for its turn: the caller has no request to abort."""
    class Interrupted(contextlib.nullcontext):
        def __enter__(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny_llm.driver, "turn", Interrupted)
        tiny_llm.add([[5, 6, 7]], PARAMS)
    tiny_llm.step()
    assert not tiny_llm.active


class TooSlow(Exception):
    """What the handler of a time limit raises."""


class Handler:
    def __call__(self, *_):
        raise TooSlow("over the limit")

    def method(self, *_):
        raise TooSlow("over the limit")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
@pytest.mark.parametrize("handler", [
    lambda *_: Handler().method(), Handler(), Handler().method,
    functools.partial(Handler().method, 1)])
@pytest.mark.parametrize("where", ["texts", "a processor", "a template"])
def test_what_a_signal_raises_is_not_about_the_input(llm, handler, where):
    def slow(input_ids, scores):
        time.sleep(0.002)
        return scores

    def call():
        if where == "texts":
            llm.generate(["Once upon a time " * 300] * 20, GREEDY, use_tqdm=False)
        elif where == "a processor":
            params = SamplingParams(max_tokens=300, ignore_eos=True, logits_processors=[slow])
            llm.generate("Once", params, use_tqdm=False)
        else:
            llm.chat([[{"role": "user", "content": "12 + 34"}]] * 500, GREEDY, use_tqdm=False)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for k in range(6):
            signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.005 * k)
            try:
                call()
            except TooSlow:
                # while the error refers to the frames of the call
                check_idle(llm)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------- threads and processes


def run(script: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=120, env=os.environ | environment)


FIRST_IMPORT = """
import signal, sys, threading
from nanoengine import LLM
signal.signal(signal.SIGALRM, signal.default_int_handler)
llm = LLM(MODEL, dtype="float32", block_size=16, num_kv_blocks=8)
for delay in (0.001, 0.05, 0.15):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        llm.generate([[1, 2, 3]], use_tqdm=False)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
print(len(llm.generate([[1, 2, 3]], use_tqdm=False)))
"""


@pytest.mark.slow
def test_ctrl_c_in_the_first_call_of_a_process(tiny):
    result = run(FIRST_IMPORT.replace("MODEL", repr(tiny)))
    assert result.stdout == "1\n", result.stderr


LIMITS = """
import os, sys, torch, numba
from nanoengine import LLM
if sys.argv[0] == "-c" and LIMIT: torch.set_num_threads(LIMIT)
before = torch.get_num_threads()
llm = LLM(MODEL, dtype="float32", block_size=16, num_kv_blocks=8)
for _ in range(2):
    llm.generate([[1, 2, 3]] * 2, use_tqdm=False)
    print(before, torch.get_num_threads(), numba.get_num_threads())
torch.set_num_threads(2)
llm.generate([[1, 2, 3]], use_tqdm=False)
print(torch.get_num_threads(), numba.get_num_threads())
"""


@pytest.mark.parametrize("start, limit, environment", [
    # forks have the environment of conftest.py, with two threads
    (run_in_fork, "1", {}), slow(run, "0", dict(NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="1"))])
def test_a_limit_on_threads_is_kept_and_stays(tiny, start, limit, environment):
    """As it was set by PyTorch's function, or in the environment."""
    script = LIMITS.replace("LIMIT", limit).replace("MODEL", repr(tiny))
    result = start(script, **environment)
    assert result.stdout == "1 1 1\n1 1 1\n2 2\n", result.stderr


def test_more_threads_than_numba_has(tiny_llm):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = token_ids(generate(tiny_llm, [[1, 2, 3]]))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert token_ids(generate(tiny_llm, [[1, 2, 3]])) == expected


FORK = """
import os
from nanoengine import LLM
options = dict(dtype="float32", block_size=16, num_kv_blocks=8)
def in_child(function):
    if (child := os.fork()) == 0:
        try:
            function()
        except RuntimeError as error:
            os._exit(3 if "spawn" in str(error) else 4)
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(in_child(lambda: LLM(MODEL, **options).generate([[1]], use_tqdm=False)))
llm = LLM(MODEL, **options)
llm.generate([[1]], use_tqdm=False)
for function in (lambda: LLM(MODEL, **options), lambda: llm.generate([[1]]),
                 lambda: llm.stream([[1]])):
    print(in_child(function))
stream = llm.stream([[1]])
def drop():
    global stream
    del stream
for function in (lambda: list(stream), drop, llm.close, llm.reset_prefix_cache):
    print(in_child(function))
print(len(list(stream)))
llm.driver.lock.acquire()  # as if a thread of the parent were in a call
print(in_child(llm.close))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_process_with_an_engine_is_told_so(tiny):
    result = run(FORK.replace("MODEL", repr(tiny)))
    assert result.stdout.split() == ["5"] + ["3"] * 4 + ["5", "3", "3", "16", "3"], result.stderr
