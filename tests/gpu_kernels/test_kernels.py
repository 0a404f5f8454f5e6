"""The kernels in Triton's interpreter, beside plain PyTorch: all tests of interpreted.py.

Triton interprets kernels if TRITON_INTERPRET=1 was set before it was imported, for all of a
process. So these tests run in processes of their own, and other tests do not notice.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.slow
TESTS = Path(__file__).with_name("interpreted.py")


def test_on_a_gpu_all_are_tests_for_a_gpu():
    """From any other test, conftest.py hides the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
               "--collect-only", "-m", "gpu", TESTS]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.check_output(command, env=environment, text=True)
    (line,) = [line for line in printed.splitlines() if "collected" in line]
    assert int(line.split()[0]) > 100 and "deselected" not in line


@pytest.mark.parametrize("names", ["attention", "not attention"])
def test_in_the_interpreter(names):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k",
               names, TESTS]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
