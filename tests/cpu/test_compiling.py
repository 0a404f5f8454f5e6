"""Compiled kernels, how they are run, and how they are kept on the disk."""

import numpy as np
import pytest
import torch

from nanoengine_cpu import compiling
from nanoengine_cpu.memory import limit_threads
from nanoengine_cpu.vectors import array_at, numbers_at, share


def compile_double():
    """Compiles a small kernel; returns what it makes of an array."""
    def double(phase, thread, threads, arguments_at):
        at, size = numbers_at(arguments_at, 2)
        numbers = array_at(at, size, np.float32)
        for i in range(*share(size, thread, threads)):
            numbers[i] *= 2

    compiled = compiling.compile_kernel(double)
    numbers = torch.ones(3)
    compiling.Program(compiled(numbers.data_ptr(), 3)).run()
    return numbers.tolist()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_each_thread_runs_each_phase_after_all_have_ended_the_one_before(num_threads):
    def kernel(phase, thread, threads, arguments_at):
        (at,) = numbers_at(arguments_at, 1)
        seen = array_at(at, (3, 2), np.int64)
        total = 0
        for before in range(phase):
            for other in range(threads):
                total += seen[before, other]
        seen[phase, thread] = 1 + total

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        limit_threads()
        seen = torch.zeros(3, 2, dtype=torch.int64)
        call = compiling.compile_kernel(kernel, phases=3)(seen.data_ptr())
        compiling.Program(call).run()
    finally:
        torch.set_num_threads(before)
        limit_threads()
    assert seen.tolist() == ([[1, 1], [3, 3], [9, 9]] if num_threads == 2 else
                             [[1, 0], [2, 0], [4, 0]])


@pytest.mark.parametrize("tasks, threads", [(0, 1), (1, 3), (7, 2), (100, 7)])
def test_shares_are_about_equal_and_leave_nothing_out(tasks, threads):
    shares = [range(*share.py_func(tasks, thread, threads)) for thread in range(threads)]
    assert [task for each in shares for task in each] == list(range(tasks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
def test_a_first_compilation_says_that_it_compiles(cache, caplog):
    with caplog.at_level("INFO", logger="nanoengine_cpu"):
        for expected in (["compiling the kernels, which t"], []):
            compiling.say_once.cache_clear()
            caplog.clear()
            compile_double()
            assert [message[:30] for message in caplog.messages] == expected


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
@pytest.mark.parametrize("damage", ["", "index", "data", "empty index", "empty data", "full disk",
                                    "no folder"])
def test_a_cache_that_cannot_be_used_is_named_in_a_warning(cache, monkeypatch, caplog, damage):
    compiling.warn_once.cache_clear()
    if damage == "full disk":
        def fail(*arguments):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(compiling.numba.core.caching.IndexDataCacheFile, "save", fail)
    elif damage == "no folder":
        for name in ("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator"):
            locator = getattr(compiling.numba.core.caching, name)
            monkeypatch.setattr(locator, "ensure_cache_path",
                                lambda self: (_ for _ in ()).throw(PermissionError("read-only")))
    else:
        assert compile_double() == [2, 2, 2]
        for file in cache.rglob("*.nbi" if "index" in damage else "*.nbc") if damage else ():
            file.write_bytes(b"" if "empty" in damage else file.read_bytes()[:-200])
    assert compile_double() == [2, 2, 2]
    messages = [message for message in caplog.messages if "numba cannot use" in message]
    assert len(messages) == bool(damage)
    folder = "__pycache__" if damage == "no folder" else str(cache)
    assert all(folder in message and "compiled anew" in message for message in messages)
