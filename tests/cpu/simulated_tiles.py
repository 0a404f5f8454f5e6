r"""AMX, simulated: the tiles of nanoengine_extras/cpu/tiles.py on a CPU that has none.

    NUMBA_CACHE_DIR=/tmp/simulated PYTHONPATH=tests/cpu python -m pytest -n 0 -p simulated_tiles \
        tests/cpu/test_products.py

Each instruction becomes a call of a function in C that does what Intel's manual says, bit for bit:
"Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, TDPBF16PS and others. It
stops the process if a tile is not configured, or has another size than its product needs. A line
after the tests says how many products it has computed. It says nothing about speed.

Processes that the tests start simulate tiles as well. Kernels have other code with them, so numba
needs a cache folder of their own. A C compiler is needed.
"""

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from llvmlite import binding, ir

INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tileloadd64", "tileloaddt164", "tilestored64",
                "tdpbf16ps")
SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

struct tile { int lines, bytes; union { uint8_t data[16][64]; float numbers[16][16]; }; };
static __thread struct tile tiles[8];
static __thread int is_configured;
static long num_products;

long products(void) { return num_products; }

static void check(int holds, const char *what) {
    if (!holds) { fprintf(stderr, "simulated tiles: %s\n", what); abort(); }
}

void ldtilecfg(const uint8_t *sizes) {
    check(sizes[0] == 1, "palette");
    for (int i = 0; i < 8; i++) {
        tiles[i].bytes = sizes[16 + 2 * i] + 256 * sizes[17 + 2 * i];
        tiles[i].lines = sizes[48 + i];
        check(tiles[i].bytes && tiles[i].bytes <= 64, "bytes");
        check(tiles[i].lines && tiles[i].lines <= 16, "lines");
        memset(tiles[i].data, 0, sizeof tiles[i].data);
    }
    is_configured = 1;
}

void tilerelease(void) { is_configured = 0; }

void tileloadd64(int8_t number, const uint8_t *at, int64_t stride) {
    check(is_configured, "load without tiles");
    struct tile *tile = &tiles[number];
    memset(tile->data, 0, sizeof tile->data);
    for (int i = 0; i < tile->lines; i++) memcpy(tile->data[i], at + i * stride, tile->bytes);
}

void tilestored64(int8_t number, uint8_t *at, int64_t stride) {
    check(is_configured, "store without tiles");
    struct tile *tile = &tiles[number];
    for (int i = 0; i < tile->lines; i++) memcpy(at + i * stride, tile->data[i], tile->bytes);
}

static float half(const uint8_t *word, int which) {
    union { uint8_t bytes[4]; float number; } both = {{0, 0, word[2 * which], word[2 * which + 1]}};
    return both.number;
}

void tdpbf16ps(int8_t sums_number, int8_t left_number, int8_t right_number) {
    check(is_configured, "product without tiles");
    __atomic_add_fetch(&num_products, 1, __ATOMIC_RELAXED);
    struct tile *sums = &tiles[sums_number];
    struct tile *left = &tiles[left_number], *right = &tiles[right_number];
    check(left->lines == sums->lines && right->bytes == sums->bytes
          && right->lines == left->bytes / 4, "sizes of a product");
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  /* subnormal numbers count as 0 */
    for (int m = 0; m < sums->lines; m++) {
        float first[16] = {0}, second[16] = {0};
        for (int k = 0; k < right->lines; k++)
            for (int n = 0; n < sums->bytes / 4; n++) {
                const uint8_t *a = left->data[m] + 4 * k, *b = right->data[k] + 4 * n;
                first[n] = fmaf(half(a, 0), half(b, 0), first[n]);
                second[n] = fmaf(half(a, 1), half(b, 1), second[n]);
            }
        for (int n = 0; n < sums->bytes / 4; n++) sums->numbers[m][n] += first[n] + second[n];
    }
    _mm_setcsr(before);
}
"""


def make_library(folder: Path) -> None:
    """Compiles the functions. Python's processes that start after it simulate tiles, too."""
    (folder / "tiles.c").write_text(SOURCE)
    subprocess.run([os.environ.get("CC", "cc"), "-O3", "-march=native", "-ffp-contract=off",
                    "-shared", "-fPIC", "-o", folder / "tiles.so", folder / "tiles.c"], check=True)
    (folder / "sitecustomize.py").write_text("import simulated_tiles")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"SIMULATED_TILES": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def emit(builder: Any, name: str, *operands: Any) -> None:
    """In place of `tiles.emit`: writes a call of the function in C, by its name."""
    numbers = [ir.IntType(8)(each) if isinstance(each, int) else each for each in operands]
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in numbers])
    name = f"simulated_{name}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, numbers)


execute = SourceFileLoader.exec_module


def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
    """Lets `tiles` emit these calls."""
    execute(self, module)
    if module.__name__ == "nanoengine_extras.cpu.tiles":
        vars(module).update(HAS_TILES=True, emit=emit)


if "nanoengine_extras.cpu" in sys.modules:
    raise RuntimeError("simulated_tiles must be imported before nanoengine_extras.cpu")
if not os.environ.get("NUMBA_CACHE_DIR"):
    raise RuntimeError("set NUMBA_CACHE_DIR to a folder of its own: the kernels have other code")
if "SIMULATED_TILES" not in os.environ:
    own_folder = Path(tempfile.mkdtemp(prefix="tiles"))
    atexit.register(shutil.rmtree, own_folder)
    make_library(own_folder)
library = ctypes.CDLL(f"{os.environ['SIMULATED_TILES']}/tiles.so")
for name in INSTRUCTIONS:
    # one of the loads also says that memory is read once
    function = getattr(library, name.replace("loaddt1", "loadd"))
    address = ctypes.cast(function, ctypes.c_void_p).value
    binding.add_symbol(f"simulated_{name}", address)
SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"simulated products of tiles: {library.products()}")
