"""Memory, threads and processes, as the kernels need them."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forks import run_in_fork

from nanoengine_extras.cpu import memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does")
def test_the_cache_of_a_cpu_comes_in_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no huge pages")
    done = run_in_fork("""
from resource import RUSAGE_SELF, getrusage
from nanoengine_extras.cpu.memory import in_huge_pages
memory = in_huge_pages(2**26)
before = getrusage(RUSAGE_SELF).ru_minflt
memory.fill_(7)
print(getrusage(RUSAGE_SELF).ru_minflt - before)
""")
    # pages of 4 KiB would be 16,384
    assert int(done.stdout) < 6000


def test_small_tensors_share_huge_pages():
    """None overlaps another one, whichever thread asks for it."""
    space = memory.SharedPages()
    sizes = [1, 63, 64, 65, 2**20, 3 * 2**25, 7] * 20
    with ThreadPoolExecutor(4) as pool:
        taken = [*pool.map(space, sizes)]
    assert [len(each) for each in taken] == sizes
    places = sorted((each.data_ptr(), len(each)) for each in taken)
    assert all(at % 64 == 0 for at, _ in places)
    assert all(at + size <= after for (at, size), (after, _) in zip(places, places[1:]))
    shared = {each.untyped_storage()._cdata for each in taken if len(each) <= 2**20}
    assert len(shared) < 30 < len(sizes)


@pytest.mark.parametrize("line, expected", [
    ("flags\t\t: avx512vl avx512_bf16 avx512_fp16", True),
    ("flags\t\t: avx_vnni amx_bf16 amx_tile", True),
    ("flags\t\t: avx2 avx512f avx512_fp16", False),
    ("Features\t: fp asimd sve svebf16 i8mm bf16 rng", True),
    # a part of a name is another one
    ("Features\t: fp asimd sve svebf16 i8mm rng", False),
    ("Features\t: fp asimd evtstrm aes", False),
    # of a system without /proc
    ("", False)])
def test_linux_says_whether_the_cpu_has_bfloat16(monkeypatch, line, expected):
    text = f"processor\t: 0\n{line}\nbugs\t\t:\n"
    monkeypatch.setattr(memory, "read_system", {"cpuinfo": text}.get)
    assert memory.has_bfloat16() is expected


needs_libgomp = pytest.mark.skipif(not memory.LIBGOMPS, reason="needs a torch with libgomp")


@pytest.fixture
def another_libgomp(tmp_path):
    """A copy of torch's, by another name; the name within, too, by which it would be found."""
    file = Path(memory.LIBGOMPS[0]._name)
    library = file.read_bytes()
    copy = tmp_path / "libgomp-1d5a.so.1.0.0"
    # on ARM, the name within is that of the file
    for name in (b"libgomp.so.1", file.name.encode()):
        library = library.replace(name + b"\0", b"another".ljust(len(name), b"-") + b"\0")
    copy.write_bytes(library)
    return str(copy)


COUNT = """
import time, psutil
def count():
    time.sleep(0.3)  # the system takes a moment to forget a thread that has ended
    return psutil.Process().num_threads()
"""


def run(script, **environment):
    """What a process of its own prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"} | environment
    return subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)


@pytest.mark.slow
@needs_libgomp
@pytest.mark.parametrize("is_another", [False, True])
def test_threads_end_in_the_libgomp_that_torch_computes_with(another_libgomp, is_another):
    """Whatever it is called. Another one stands in for torch's own, which then does nothing."""
    counts = run(COUNT + """
import torch
from nanoengine_extras.cpu import end_threads
for _ in range(2):
    alone = count()
    torch.ones(2**20).exp()
    print(count() - alone)
    end_threads()
    print(count() - alone)
""", LD_PRELOAD=another_libgomp if is_another else "")
    assert counts.split() == ["1", "0"] * 2


# as on ARM, where torch loads its libgomp for itself alone
LOAD_LOCALLY = """
import ctypes
load = ctypes.CDLL
ctypes.CDLL = lambda file, **options: load(file)
import torch
ctypes.CDLL = load
"""


@needs_libgomp
@pytest.mark.parametrize("is_another, is_linked", [
    pytest.param(False, False, marks=pytest.mark.slow),
    pytest.param(True, False, marks=pytest.mark.slow), (True, True)])
def test_libraries_find_the_libgomp_of_torch_before_any_other(
        another_libgomp, is_another, is_linked, tmp_path):
    """Even one that was loaded before; also where PyTorch's files are links to another place."""
    (tmp_path / "__init__.py").symlink_to(torch.__file__)
    found = run(f"import ctypes\nif {is_another}: ctypes.CDLL({another_libgomp!r})" + LOAD_LOCALLY
                + f"if {is_linked}: torch.__file__ = {str(tmp_path / '__init__.py')!r}" + """
def address(library):
    return ctypes.cast(library.omp_get_max_threads, ctypes.c_void_p).value
print(hasattr(load(None), "omp_get_max_threads"))
import nanoengine_extras.cpu
print(address(load(None)) == address(load(torch._C.__file__)))
""")
    assert found.split() == ["False", "True"]


@needs_libgomp
def test_numba_computes_in_the_threads_of_torch():
    found = run(LOAD_LOCALLY + COUNT + """
import numba
from nanoengine_extras.cpu import end_threads, optimize
linear = torch.nn.Linear(64, 64).requires_grad_(False)
optimize(linear)
alone = count()
torch.ones(2**20).exp()
linear(torch.ones(64, 64))
print(numba.threading_layer(), count() - alone)
end_threads()
print(count() - alone)
""", NUMBA_NUM_THREADS="2").split()
    if found[0] != "omp":
        pytest.skip("numba finds no OpenMP")
    assert found[1:] == ["1", "0"]


@pytest.mark.slow
@needs_libgomp
def test_a_process_may_have_loaded_any_file(another_libgomp, tmp_path):
    """A library that has gone since, and one whose name is no text."""
    found = run(f"""
import ctypes, mmap, os
library = ctypes.CDLL({another_libgomp!r})
os.unlink({another_libgomp!r})
with open(os.fsencode({str(tmp_path)!r}) + b"/\\xff", "wb+") as file:
    file.write(b"something")
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0)
from nanoengine_extras.cpu.memory import LIBGOMPS
print([library._name for library in LIBGOMPS])
""")
    assert found.strip() == str([memory.LIBGOMPS[0]._name])


# ---------------------------------------------------------------------------------- forks

FORK = """
import os, sys, threading, torch
def one():
    torch.set_num_threads(1)
def two():
    torch.set_num_threads(2)
def compute():
    torch.ones(2**20).exp()
def multiply():
    from nanoengine_extras.cpu import end_threads, optimize
    linear = torch.nn.Linear(64, 64).requires_grad_(False)
    optimize(linear)
    assert torch.allclose(linear(torch.eye(64)), linear.weight.T + linear.bias, atol=1e-6)
    end_threads()
def multiply_in_a_thread():
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
parent, child = sys.argv[1:]
exec(parent)
if (process := os.fork()) == 0:
    try:
        exec(child)
    except RuntimeError as error:
        os._exit(3 if "'spawn'" in str(error) else 4)
    except BaseException:
        os._exit(5)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
# the kernels, and what comes later
BOTH = "multiply(); compute()"


@pytest.mark.slow
@needs_libgomp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("parent, child, expected", [
    ("", BOTH, 0), ("", f"one(); {BOTH}", 0), ("", f"compute(); {BOTH}", 0),
    ("", f"one(); multiply(); two(); {BOTH}", 0),
    ("multiply()", f"one(); multiply(); two(); {BOTH}", 3),
    ("compute()", BOTH, 3), ("compute()", f"one(); {BOTH}", 0), ("one(); compute()", BOTH, 0),
    ("compute()", "multiply_in_a_thread()", 0),
    ("multiply()", BOTH, 3), ("multiply()", f"one(); {BOTH}", 0), ("one(); multiply()", BOTH, 0)])
def test_a_fork_computes_where_pytorch_would(parent, child, expected):
    """PyTorch hangs in several threads, if the thread that forked has computed in some; others can
    compute. numba ends a fork in which it computes in several threads, if it has done so before."""
    found = subprocess.run([sys.executable, "-c", FORK, parent, child], text=True,
                           capture_output=True, timeout=300,
                           env=os.environ | {"OMP_NUM_THREADS": "2"})
    assert found.stdout.split() == [str(expected)], found.stderr


def test_only_its_own_process_may_use_what_it_has_made(monkeypatch):
    check = memory.check_process()
    check()
    process = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(RuntimeError, match="forked .* 'spawn'"):
            check()
    memory.check_process(process)
    with pytest.raises(RuntimeError, match="forked .* 'spawn'"):
        memory.check_process(process + 1)


# -------------------------------------------------------------------------- stacks of threads


@pytest.mark.parametrize("variables, expected", [
    ({}, None), ({"OMP_STACKSIZE": "64K"}, 2**16), ({"OMP_STACKSIZE": " 3 m "}, 3 * 2**20),
    ({"OMP_STACKSIZE": "512"}, 2**19), ({"GOMP_STACKSIZE": "100B"}, 100),
    ({"OMP_STACKSIZE": "junk"}, None), ({"OMP_STACKSIZE": "1M", "GOMP_STACKSIZE": "2G"}, 2**20)])
def test_how_large_the_stack_of_a_thread_is(monkeypatch, variables, expected):
    for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (2**24, -1))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert memory.stack_size() == (expected or 2**24)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (-1, -1))
    assert memory.stack_size() == (expected or 2**23)
