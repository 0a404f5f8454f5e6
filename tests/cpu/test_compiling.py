"""Compiled kernels, how they are run, and how they are kept on the disk."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import is_compiled_once

from nanoengine_extras.cpu import compiling
from nanoengine_extras.cpu.memory import limit_threads
from nanoengine_extras.cpu.vectors import array_at, numbers_at


def compile_double(factor: int = 2):
    """Compiles a small kernel; returns what it makes of an array."""
    def multiply(phase, threads, arguments_at):
        at, size = numbers_at(arguments_at, 2)
        numbers = array_at(at, size, np.float32)
        for i in compiling.take_tasks(size, 1, arguments_at):
            numbers[i] *= factor

    compiled = compiling.compile_kernel(multiply)
    numbers = torch.ones(3)
    compiling.Program(compiled(numbers.data_ptr(), 3)).run()
    return numbers.tolist()


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    limit_threads()
    yield request.param
    torch.set_num_threads(before)
    limit_threads()


def test_a_phase_begins_after_all_tasks_of_the_one_before(num_threads):
    def kernel(phase, threads, arguments_at):
        (at,) = numbers_at(arguments_at, 1)
        seen = array_at(at, (3, 50), np.int64)
        for task in compiling.take_tasks(50, 1, arguments_at):
            seen[phase, task] += 1 + seen[:phase].sum()

    seen = torch.zeros(3, 50, dtype=torch.int64)
    call = compiling.compile_kernel(kernel, phases=3)(seen.data_ptr())
    compiling.Program(call, call).run()
    # each task is done once in each phase of each call; a second call sees what the first one left
    assert (seen == seen[:, :1]).all()
    first = 1 + 1
    second = 1 + 50 * 1 + 1 + 50 * 2
    third = 1 + 50 * (1 + 51) + 1 + 50 * (first + second)
    assert seen[:, 0].tolist() == [first, second, third]


def test_threads_take_each_task_of_several_calls_once(num_threads):
    """Calls need not wait for one another, and all are done when the run ends."""
    def kernel(phase, threads, arguments_at):
        at, tasks, size, number = numbers_at(arguments_at, 4)
        seen = array_at(at, tasks, np.int64)
        for task in compiling.take_tasks(tasks, size, arguments_at):
            seen[task] += number

    compiled = compiling.compile_kernel(kernel)
    sizes = [(50, 3), (0, 1), (1, 3), (7, 2), (100, 1), (100, 7), (96, 8), (700, 3)]
    seen = [torch.zeros(tasks, dtype=torch.int64) for tasks, _ in sizes]
    calls = np.array([compiled(each.data_ptr(), *sizes[number], number + 1)
                      for number, each in enumerate(seen)])
    call = compiling.run_together()(calls.ctypes.data, calls.ctypes.data + calls.nbytes)
    compiling.run_call(call)
    assert [each.tolist() for each in seen] == [
        [number] * tasks for number, (tasks, _) in enumerate(sizes, 1)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
def test_a_first_compilation_says_that_it_compiles(cache, caplog):
    with caplog.at_level("INFO", logger="nanoengine_extras.cpu"):
        for expected in (["compiling the kernels, which t"], []):
            compiling.say_once.cache_clear()
            caplog.clear()
            compile_double()
            assert [message[:30] for message in caplog.messages] == expected


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
def test_kernels_that_are_compiled_at_once_do_not_replace_each_other(cache, monkeypatch):
    """As if two processes saved their kernels, while both had found an empty cache."""
    kind = compiling.numba.core.caching.IndexDataCacheFile
    save, saved = kind._save_data, []
    with monkeypatch.context() as patched:
        patched.setattr(kind, "_load_index", lambda self: {})
        patched.setattr(kind, "_save_data", lambda *arguments: saved.append(arguments))
        for factor in (2, 3):
            assert compile_double(factor) == [factor] * 3
    # the first to write the index is the last to write the code
    for arguments in reversed(saved):
        save(*arguments)
    for factor in (2, 3):
        assert compile_double(factor) == [factor] * 3


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


def test_kernels_are_compiled_once_and_none_when_a_model_computes():
    """But when it is made fast, and gets its cache. A second process finds them on disk."""
    tests = str(Path(__file__).parents[1])
    assert is_compiled_once(f"""
import sys
sys.path.append({tests!r})
import torch
from numba.core.event import install_recorder
from cpu.reference import make_step
from cpu.test_modules import HEAD_DIM, HIDDEN, give_caches, make_layer
from nanoengine_extras.cpu import attention, compiling, empty_cache, optimize, products
from nanoengine_extras.cpu.packed import kernel, order

model, step = make_layer(torch.bfloat16), make_step([1, 9], [0, 0], 16)
optimize(model)
give_caches(model, step, torch.bfloat16, empty_cache)
x = torch.randn(10, HIDDEN).bfloat16()
with install_recorder("numba:compile") as compiled:
    model(x, torch.rand(2, 10, HEAD_DIM // 2), step, torch.tensor([0, 9]))
assert not compiled.buffer
products.product(torch.float32)
attention.make_kernel(16, 1, 16, torch.float32)
compiling.run_together()
order.placing()
for has_floats in (False, True):
    kernel.product(torch.float32, has_floats)""")


# ------------------------------------------------------------------- settings of the process

MULTIPLY = """
import torch
from nanoengine_extras.cpu import optimize
linear = torch.nn.Linear(64, 64).requires_grad_(False)
optimize(linear)
print(torch.allclose(linear(torch.eye(64)), linear.weight.T + linear.bias, atol=1e-6))
"""


def multiply(before="", **variables):
    """What a process of its own prints, or the last line of its error."""
    done = subprocess.run(
        ["bash", "-c", f'{before}exec "$0" "$@"', sys.executable, "-c", MULTIPLY], text=True,
        capture_output=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"} | variables)
    return (done.stdout.strip() or done.stderr.strip() or str(done.returncode)).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("variables, printed", [
    *(({name: value}, f"Error: .*{name}") for name, value in (
        ("NUMBA_DISABLE_JIT", "1"), ("NUMBA_BOUNDSCHECK", "1"), ("NUMBA_THREADING_LAYER", "none"),
        ("NUMBA_NUM_THREADS", "0"), ("NUMBA_NUM_THREADS", "-1"), ("OMP_STACKSIZE", "64K"))),
    ({"before": "ulimit -s 512; "}, "Error: .*`ulimit -s`"),
    *(({name: value}, "^True$") for name, value in (
        ("NUMBA_THREADING_LAYER", "workqueue"), ("NUMBA_NUM_THREADS", "1"),
        ("OMP_NUM_THREADS", "1"), ("NUMBA_NUM_THREADS", "50"), ("OMP_NUM_THREADS", "0"),
        ("OMP_NUM_THREADS", "64"), ("OMP_THREAD_LIMIT", "1"), ("OMP_MAX_ACTIVE_LEVELS", "0"),
        ("OMP_DYNAMIC", "true"), ("GOMP_CPU_AFFINITY", "0"), ("OMP_STACKSIZE", "4M"),
        ("NUMBA_CACHE_DIR", "/proc/none")))], ids=str)
def test_a_setting_with_which_kernels_cannot_run_is_named_and_no_other(variables, printed):
    assert re.search(printed, multiply(**variables))


@pytest.mark.slow
@pytest.mark.parametrize("variables", [
    {"NUMBA_DEBUGINFO": "1"}, {"NUMBA_OPT": "0"}, {"NUMBA_CPU_NAME": "generic"}], ids=str)
def test_settings_of_a_compilation(variables, tmp_path):
    """With debug information, where numba also checks bounds unless it is told not to; without
    optimizations; for a CPU of 2003. What was compiled otherwise stays apart."""
    assert multiply(NUMBA_CACHE_DIR=str(tmp_path), **variables) == "True"
    assert multiply(NUMBA_CACHE_DIR=str(tmp_path)) == "True"
    if "NUMBA_OPT" in variables:
        assert {file.name.split("-")[2] for file in tmp_path.rglob("*.nbi")} == {"0", "3"}


def test_one_thread_needs_no_openmp(num_threads, monkeypatch):
    """A fork with one thread computes so."""
    runs = []
    run_calls = compiling.run_calls
    monkeypatch.setattr(compiling, "run_calls", lambda in_threads: runs.append(in_threads)
                        or run_calls(in_threads))
    assert compile_double() == [2, 2, 2]
    assert set(runs) == {num_threads > 1}
