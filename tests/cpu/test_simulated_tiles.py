"""Tiles of AMX on a CPU that has none: see simulated_tiles.py."""

import os
import platform
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

QUANTIZED = pytest.param("features/test_quantized.py", "dequantized_weights or several_parts",
                         marks=pytest.mark.needs("quantized"))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which(os.environ.get("CC", "cc")),
                    reason="tiles are simulated in C, on x86")
@pytest.mark.parametrize("file, tests", [
    ("cpu/test_products.py", "same_bits or test_products or swiglu"), QUANTIZED])
def test_products_in_tiles(file, tests, tmp_path):
    """The tests of products pass with them."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path),
                   "PYTHONPATH": str(ROOT / "tests" / "cpu")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "simulated_tiles"]
    done = subprocess.run([*command, ROOT / "tests" / file, "-k", tests], cwd=ROOT,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
