"""Memory, threads and processes, as the kernels need them."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine_cpu import memory


def page_faults(script):
    """How often a process of its own gets a page of memory in the last lines of a script."""
    script = "import resource, torch\n" + script.replace(
        "---", "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt") + (
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)")
    return int(subprocess.check_output([sys.executable, "-c", script], text=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does")
def test_what_a_step_frees_stays_for_the_next_one():
    """In each round six parts of 4,096 pages are freed at once. Three processes in four would get
    all of them anew in each round if glibc were left alone, so several are tried."""
    script = """
from nanoengine_cpu import memory
memory.keep_memory()
for _ in range(4):
    [torch.ones(2**22) for _ in range(6)]
---
for _ in range(10):
    [torch.ones(2**22) for _ in range(6)]
"""
    assert max(page_faults(script) for _ in range(3)) < 30_000


def test_other_libraries_than_glibc_keep_what_they_want(monkeypatch):
    for error in OSError, AttributeError:
        monkeypatch.setattr(memory.ctypes, "CDLL", raising(error))
        memory.keep_memory()


def raising(error):
    def fail(*arguments):
        raise error
    return fail


def test_the_cache_of_a_cpu_comes_in_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no huge pages")
    assert page_faults("""
from nanoengine_cpu.memory import in_huge_pages
memory = in_huge_pages(2**26)
---
memory.fill_(7)
""") < 6000
