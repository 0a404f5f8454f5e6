"""A package that is missing takes away the feature that needs it, with one line in the log."""

import json
import re
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest
from conftest import ROOT, packages_imported_by, random_prompts
from forks import run_in_fork

from nanoengine import LLM, SamplingParams

# of each package: the module that is not used, what asks for it, and the error; without a module,
# the feature says what it needs when it is asked for
PACKAGES = {
    "pydantic": ("nanoengine_extras.running.strict", "SamplingParams(temperatur=1)", "temperatur"),
    "psutil": ("nanoengine_extras.running.swapping",
               "LLM(model, preemption_mode='swap', **options)",
               "preemption_mode='swap' needs nanoengine_extras/running/swapping.py"),
    "numba": ("nanoengine_extras.cpu", "LLM(model, attention_backend='numba', **options)",
              "attention_backend='numba' is not accepted"),
    "jinja2": ("nanoengine_extras.tools.chat", "llm.chat([])",
               "needs nanoengine_extras/tools/chat.py"),
    "uvicorn": (None, "extension('tools.serve', 'tools.serve')", 'pip install "nanoengine[serve]"'),
    "llguidance": ("nanoengine_extras.sampling.structured_outputs",
                   "llm.generate([[5]], SamplingParams(structured_outputs={'regex': 'a'}))",
                   "needs nanoengine_extras/sampling/structured_outputs.py")}

SCRIPT = """
import json, sys
missing, cases, model, prompts, options = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(missing))
from nanoengine import LLM, SamplingParams
from nanoengine.features import extension
llm = LLM(model, **options)
params = SamplingParams(temperature=0, max_tokens=9)
found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
messages = {}
for name in missing:
    try:
        eval(cases[name][1])
    except (TypeError, ValueError) as error:
        messages[name] = str(error)
print(json.dumps([found, llm.engine.runner.backend, messages]))
"""


@pytest.mark.needs("running.strict", "running.swapping", "tools.chat",
                   "sampling.structured_outputs", "tools.serve")
@pytest.mark.parametrize("missing", [
    [*PACKAGES], *[pytest.param([name], marks=pytest.mark.slow) for name in PACKAGES]], ids=str)
def test_a_missing_package(tiny, missing):
    options = dict(dtype="float32", block_size=16, num_kv_blocks=20)
    prompts = random_prompts([5, 30])
    with LLM(tiny, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    inputs = json.dumps([missing, PACKAGES, tiny, prompts, options])
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=inputs, text=True, cwd=ROOT,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    found, backend, messages = json.loads(done.stdout)
    assert found == [output.outputs[0].token_ids for output in outputs]
    assert backend == ("gather" if "numba" in missing else "numba")
    lines = re.findall(r"^(\S+) is not used: .*", done.stderr, re.MULTILINE)
    assert len(lines) == len({*lines}), "one line each"
    for name in missing:
        module, _, message = PACKAGES[name]
        assert message in messages[name], name
        assert module is None or module in lines, done.stderr
    named = {PACKAGES[name][0] for name in missing}
    assert {*lines} - {"nanoengine_extras.running.strict"} <= named


def test_a_module_that_is_not_there_is_no_news(tiny):
    """Without the other folders, nothing is logged."""
    script = ("import sys\n"
              "sys.modules.update(dict.fromkeys(['nanoengine_extras', 'nanoengine_extras.cpu']))\n"
              "import nanoengine\n"
              f"nanoengine.LLM({tiny!r}, num_kv_blocks=4)\n")
    done = run_in_fork(script)
    assert done.returncode == 0 and "is not used" not in done.stderr, done.stderr


def test_no_folder_of_the_tests_looks_like_a_package():
    """pytest puts the folders of tests on Python's path, where a folder is an empty package."""
    patterns = ("bench.py", "nanoengine/*.py", "nanoengine_extras/*/*.py", "docs/examples/*.py")
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    packages = set().union(*map(packages_imported_by, files)) | {"triton", "flash_attn", "vllm"}
    assert {"torch", "triton", "numba", "transformers"} <= packages
    on_path = [ROOT / "tests", *(path for path in (ROOT / "tests").iterdir() if path.is_dir())]
    found = {name for name in packages if PathFinder.find_spec(name, [*map(str, on_path)])}
    assert not found
