"""The engine without what only Linux has: the tokens are the same.

It was never tried on another system. But what only Linux has can be taken away.
"""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, random_prompts

from nanoengine import LLM, SamplingParams

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import ctypes, mmap, os, pathlib
import numba, psutil, torch, transformers

model, missing, library, prompts, options = json.load(sys.stdin)
if "proc" in missing:
    psutil.LINUX = False
    read = pathlib.Path.read_bytes

    def read_bytes(path):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return read(path)

    pathlib.Path.read_bytes = read_bytes
if "madvise" in missing:
    del mmap.MADV_HUGEPAGE
if "affinity" in missing:
    del os.sched_getaffinity
if "libgomp" in missing:
    load = ctypes.CDLL

    def load_other(name, *arguments, **more):
        if name is not None and "gomp" in str(name):
            raise OSError(f"{name} is not there")
        return load(name, *arguments, **more)

    ctypes.CDLL = load_other
if not library:
    sys.modules["nanoengine_extras.cpu"] = None
import nanoengine
if library:
    # other packages must not believe that they are on another system
    platform, sys.platform = sys.platform, "darwin" if "platform" in missing else sys.platform
    import nanoengine_extras.cpu
    sys.platform = platform

llm = nanoengine.LLM(model, **options)
params = [nanoengine.SamplingParams(seed=n, temperature=0.7 * (n % 2), max_tokens=12)
          for n in range(len(prompts))]
outputs = llm.generate(prompts, params, use_tqdm=False)
print(llm.metrics()["attention_backend"])
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""
ALL = ["proc", "madvise", "affinity", "libgomp", "platform"]
OPTIONS = dict(dtype="float32", block_size=16, num_kv_blocks=40, max_model_len=200,
               max_num_seqs=3)
PROMPTS = random_prompts([3, 40, 90, 1])


@pytest.fixture(scope="module")
def expected(tiny):
    params = [SamplingParams(seed=n, temperature=0.7 * (n % 2), max_tokens=12)
              for n in range(len(PROMPTS))]
    with LLM(tiny, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("missing, library", [
    (ALL, True), (ALL, False), (["proc", "libgomp"], True), (["madvise"], True)], ids=str)
def test_the_same_tokens(tiny, expected, missing, library):
    done = subprocess.run([sys.executable, "-c", SCRIPT], text=True, capture_output=True, cwd=ROOT,
                          input=json.dumps([tiny, missing, library, PROMPTS, OPTIONS]))
    assert done.returncode == 0, done.stderr[-3000:]
    backend, tokens = done.stdout.splitlines()
    assert backend == ("numba" if library else "gather")
    assert json.loads(tokens) == expected
