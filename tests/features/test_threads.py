"""Computing threads that wait for nothing are ended."""

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import generate, in_thread

from nanoengine_extras.running import threads


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_call_leaves_no_threads_of_its_own_behind(make_llm):
    with make_llm(num_kv_blocks=64, max_num_seqs=8) as llm:
        generate(llm, [[1, 2, 3]])
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            in_thread(generate, llm, [[1, 2, 3]])
            generate(llm, [[1, 2, 3]])
        assert len(os.listdir("/proc/self/task")) == before
        torch.ones(10**6).exp()
        assert len(os.listdir("/proc/self/task")) > before, "a team is made when it is needed again"


def test_steps_end_them_if_there_are_other_callers_and_when_the_last_request_ends(monkeypatch):
    ended: list[int] = []
    library = SimpleNamespace(end_threads=lambda: ended.append(threading.get_ident()))
    monkeypatch.setattr(threads, "kernels", lambda device, enabled: library)
    feature = threads.Threads()
    config = SimpleNamespace(device="cpu", kernels=True)
    engine: Any = type("Engine", (), dict(config=config, has_unfinished=lambda _: is_left))()
    is_left = True

    def steps_after(call) -> int:
        """How often two steps end them, after a request."""
        call(feature.enter, [], None)
        ended.clear()
        for _ in range(2):
            feature.done(None, [])
        return len(ended)

    def here(function, *arguments):
        function(*arguments)

    feature.begin(engine)
    assert ended == [threading.get_ident()], "those that loaded the model"
    assert steps_after(here) == 0
    assert steps_after(here) == 0, "the same caller"
    assert steps_after(in_thread) == 2
    is_left = False
    assert steps_after(here) == 2
    is_left = True
    assert steps_after(here) == 0, "the other one has gone"
