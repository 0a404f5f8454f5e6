"""Tiles of AMX on a CPU that has none: see simulated_tiles.py."""

import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from nanoengine_extras.cpu.vectors import has

PRODUCTS = [f"cpu/test_products.py::test_{name}" for name in (
    "a_row_has_the_same_bits_whatever_rows_are_beside_it", "swiglu_behind_a_product",
    "subnormal_numbers_have_the_same_bits_in_few_and_in_many_rows", "a_norm_before_a_product")]
QUANTIZED = [f"features/test_quantized.py::test_{name}" for name in (
    "products_have_the_bits_of_dequantized_weights", "products_of_several_parts")]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which(os.environ.get("CC", "cc")),
                    reason="tiles are simulated in C, on x86")
@pytest.mark.skipif(not has("avx512f"), reason="a CPU with tiles also has AVX-512")
@pytest.mark.parametrize("tests", [
    PRODUCTS, pytest.param(QUANTIZED, marks=pytest.mark.needs("models.quantized"))], ids=len)
def test_products_in_tiles(tests, tmp_path):
    """The tests of products pass with them."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path),
                   "PYTHONPATH": str(ROOT / "tests" / "cpu")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "simulated_tiles"]
    done = subprocess.run([*command, *tests], cwd=ROOT / "tests", env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.search(r"simulated products of tiles: (\d+)", done.stdout)
    assert found and int(found[1]) > 1000
