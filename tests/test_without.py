"""The engine without what it can do without: its own extras, packages, all that only Linux has, and
kernels. The tokens are the same. Each runs in a process of its own."""

import ast
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT, random_prompts, slow
from forks import run_in_fork

from nanoengine import LLM, SamplingParams

# also what the extras alone need
EXTRAS = ["nanoengine_extras", "numba", "pydantic"]
FLOAT32 = dict(dtype="float32", block_size=16, num_kv_blocks=40, max_model_len=200)

# hidden: modules that cannot be imported; before, after: more code
SCRIPT = """
import json, sys
hidden, before, after, model, prompts, params, options = json.load(sys.stdin)
found = {}
exec(before)
sys.modules.update(dict.fromkeys(hidden))
from nanoengine import LLM, SamplingParams
llm = LLM(model, **options)
params = [SamplingParams(**each) for each in params]
outputs = llm.generate(prompts, params, use_tqdm=False)
outputs += [output for output in llm.stream(prompts[:2], params[:2]) if output.finished]
found["outputs"] = [[[each.token_ids, each.text, each.finish_reason] for each in output.outputs]
                    for output in outputs]
found["backend"] = llm.engine.runner.backend
exec(after)
print(json.dumps(found))
"""


def check(model: str, prompts: list, params: list[dict], options: dict, hidden: list[str] = (),
          before: str = "", after: str = "", run: Any = run_in_fork, **others: Any) -> tuple:
    """Compares outputs with those of an engine that lacks nothing; returns what else the script has
    found, and its log. others: options of that engine alone"""
    inputs = json.dumps([hidden, before, after, model, prompts, params, options])
    done = run(SCRIPT, inputs)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    with LLM(model, **options | others) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**each) for each in params],
                               use_tqdm=False)
    outputs += sorted(outputs[:2], key=lambda output: len(output.outputs[0].token_ids))
    assert found.pop("outputs") == [
        [[each.token_ids, each.text, each.finish_reason] for each in output.outputs]
        for output in outputs]
    return found, done.stderr


def run_anew(script: str, text: str) -> subprocess.CompletedProcess:
    """In a process that has imported nothing yet."""
    return subprocess.run([sys.executable, "-c", script], input=text, text=True, cwd=ROOT,
                          capture_output=True)


# ---------------------------------------------------------------------- without the extras


@pytest.mark.parametrize("options", [
    {}, dict(scheduling="mixed", max_num_batched_tokens=40, num_kv_blocks=14, run_ahead=True)])
def test_the_engine_alone(tiny, options):
    """Chunks, preemption, forks, truncations and shared prefixes, in float32."""
    prompts = random_prompts([3, 40, 90, 33, 1, 70])
    prompts.append(prompts[2][:50])
    params: list[dict] = [
        dict(temperature=0, max_tokens=9), dict(seed=1, max_tokens=20, top_p=0.9),
        dict(seed=2, max_tokens=30, top_k=7), dict(seed=3, max_tokens=8, n=3),
        dict(seed=4, max_tokens=25, min_p=0.05), dict(seed=5, max_tokens=40),
        dict(temperature=0, max_tokens=50)]
    found, log = check(tiny, prompts, params, FLOAT32 | dict(max_num_seqs=6) | options, EXTRAS)
    assert found["backend"] == "gather" and "is not used" not in log


def test_texts_of_the_engine_alone(bundled):
    prompts = ["47 + 85 =", "Once upon a time", "count 17 to 23 ="]
    params: list[dict] = [dict(temperature=0, max_tokens=24), dict(seed=1, max_tokens=60),
                          dict(temperature=0)]
    check(bundled, prompts, params, dict(dtype="float32"), EXTRAS)


REFUSED = [
    ("LLM(model, max_num_batched_tokens=4, max_num_seqs=5)", "max_num_batched_tokens=4"),
    ("LLM(model, max_num_seqs=0)", "at least 1"),
    ("LLM(model, max_model_len=-1)", "max_model_len=-1 .* must be 2 to"),
    ("LLM(model, scheduling='static')", "scheduling='static'"),
    # options of optional features
    ("LLM(model, preemption_mode='swap')", "='swap' needs nanoengine_extras/running/swapping.py"),
    ("LLM(model, cpu_offload_gb=1)", "cpu_offload_gb=1 needs nanoengine_extras/running/offload.py"),
    ("LLM(model, load_format='dummy')", "needs nanoengine_extras/models/dummy.py"),
    ("SamplingParams(temperature=-1)", "temperature=-1"),
    ("SamplingParams(max_tokens=0)", "max_tokens=0"),
    ("SamplingParams(min_tokens=9, max_tokens=5)", "min_tokens=9"),
    ("SamplingParams(stop='abc')", "stop='abc'"),
    ("SamplingParams(stop=['abc'], detokenize=False)", "detokenize=False"),
    ("SamplingParams(logit_bias={1: 2})",
     "={1: 2} needs nanoengine_extras/sampling/constraints.py"),
    ("SamplingParams(min_tokens=2)", "=2 needs nanoengine_extras/sampling/constraints.py"),
    ("llm.generate([[]])", "prompts\\[0\\] has 0 tokens"),
    ("llm.generate([[5, -1]])", "prompts\\[0\\]: token id -1 is out of vocabulary"),
    ("llm.generate([[5], [10**6]])", "prompts\\[1\\]: token id 1000000 is out of vocabulary"),
    ("llm.generate([[5] * 300])", "prompts\\[0\\] has 300 tokens"),
    ("llm.generate(['a text'])", "there is no tokenizer"),
    ("llm.generate([[5]], [SamplingParams()] * 2)", "longer")]

# a block of lines, so that each script below reads as one program
ALONE = f"""
import gc, json, re, sys
sys.modules.update(dict.fromkeys({EXTRAS}))
from nanoengine import LLM, SamplingParams
from nanoengine.observers import Feature
model, cases = json.load(sys.stdin)
prompts, params = [[5] * 20, [6] * 40], SamplingParams(temperature=0, max_tokens=6)

def check_refused(work, message, kind=(ValueError, TypeError)):
    try:
        work()
    except kind as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError(message)

def check_empty(llm):
    manager = llm.engine.scheduler.block_manager
    assert not llm.engine.has_unfinished()
    assert manager.num_free_blocks == manager.num_blocks
"""


def test_what_would_hang_or_corrupt_is_refused_alone(tiny):
    """And the engine stays usable."""
    done = run_in_fork(ALONE + """
llm = LLM(model, dtype="float32", max_model_len=200)
for code, message in cases:
    check_refused(lambda: eval(code), message)
assert len(llm.generate([[5]], params)[0].outputs[0].token_ids) == 6
# a function as policy, and seeds that are not given
llm = LLM(model, dtype="float32", max_model_len=200, seed=None,
          scheduling=lambda scheduler: scheduler.build([*scheduler.running], admit=True))
params = SamplingParams(seed=-1, max_tokens=20, ignore_eos=True)
first, second = llm.generate([[5], [5]], params, use_tqdm=False)
assert first.outputs[0].token_ids != second.outputs[0].token_ids
""", json.dumps([tiny, REFUSED]))
    assert done.returncode == 0, done.stderr


def test_one_call_at_a_time_alone(tiny):
    """An error, Ctrl-C or a dropped stream frees all blocks."""
    done = run_in_fork(ALONE + """
class Interrupt(Feature):
    OPTIONS = ("once",)
    error = None
    def scheduled(self, batch):
        if self.error and any("once" in seq.params.options for seq in batch.sequences):
            raise self.error

marked = SamplingParams(temperature=0, max_tokens=6, options=dict(once=True))
for run_ahead in (False, True):
    interrupt = Interrupt()
    llm = LLM(model, dtype="float32", max_model_len=200, run_ahead=run_ahead, features=[interrupt])
    def tokens():
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, marked, False)]
        check_empty(llm)
        return found
    expected = tokens()
    for interrupt.error in (KeyboardInterrupt(), MemoryError()):
        check_refused(tokens, "", type(interrupt.error))
        check_empty(llm)
    interrupt.error = None
    stream = llm.stream(prompts, params)
    for refused in (lambda: llm.generate(prompts, params), lambda: next(llm.stream(prompts))):
        check_refused(refused, "shared_steps.py", RuntimeError)
    next(stream)
    stream.close()
    del stream
    gc.collect()
    check_empty(llm)
    # one that has yielded all its outputs has no part in later calls
    for others in (lambda stream: next(stream, None), lambda stream: stream.close()):
        stream = llm.stream(prompts, params)
        for _ in range(2):
            next(output for output in stream if output.finished)
        later = llm.stream(prompts, params)
        next(later)
        others(stream)
        assert sum(output.finished for output in later) == 2
    assert tokens() == expected
    llm.close()
    for closed in (llm.generate, llm.stream):
        check_refused(lambda: closed(prompts, params), "is closed", RuntimeError)
""", json.dumps([tiny, []]))
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------ without packages

# of each package: the module that is not used, what asks for it, and the error; without a module,
# the feature says what it needs when it is asked for
PACKAGES = {
    "pydantic": ("nanoengine_extras.running.strict", "SamplingParams(temperatur=1)", "temperatur"),
    "psutil": ("nanoengine_extras.running.swapping",
               "LLM(model, preemption_mode='swap', **options)",
               "preemption_mode='swap' needs nanoengine_extras/running/swapping.py"),
    "numba": ("nanoengine_extras.cpu", "LLM(model, attention_backend='numba', **options)",
              "attention_backend='numba' is not accepted"),
    "uvicorn": (None, "extension('tools.serve', 'tools.serve')", 'pip install "nanoengine[serve]"'),
    "llguidance": ("nanoengine_extras.sampling.structured_outputs",
                   "llm.generate([[5]], SamplingParams(structured_outputs={'regex': 'a'}))",
                   "needs nanoengine_extras/sampling/structured_outputs.py")}
ASK = """
from nanoengine.features import extension
found["errors"] = {{}}
for name, code in {}:
    try:
        eval(code)
    except (TypeError, ValueError) as error:
        found["errors"][name] = str(error)
"""
PARAMS = [dict(temperature=0, max_tokens=9), dict(seed=1, top_p=0.8, top_k=9, max_tokens=6),
          dict(seed=2, top_p=0.8, min_p=0.1, max_tokens=6), dict(seed=3, max_tokens=12)]
PROMPTS = random_prompts([5, 40, 90, 1])


@pytest.mark.needs("running.strict", "running.swapping",
                   "sampling.structured_outputs", "tools.serve")
@pytest.mark.parametrize("missing", [
    [*PACKAGES], *[slow([name]) for name in PACKAGES]], ids=str)
def test_a_missing_package(tiny, missing):
    """It takes away the feature that needs it, with one line in the log."""
    cases = [(name, PACKAGES[name][1]) for name in missing]
    found, log = check(tiny, PROMPTS, PARAMS, FLOAT32, missing, after=ASK.format(cases),
                       run=run_anew)
    assert found["backend"] == ("gather" if "numba" in missing else "numba")
    lines = re.findall(r"^(\S+) is not used: .*", log, re.MULTILINE)
    assert len(lines) == len({*lines}), "one line each"
    for name in missing:
        module, _, message = PACKAGES[name]
        assert message in found["errors"][name], name
        assert module is None or module in lines, log
    named = {PACKAGES[name][0] for name in missing}
    assert {*lines} - {"nanoengine_extras.running.strict"} <= named


# ----------------------------------------------------------------- without what Linux has

# It was never tried on another system. But what only Linux has can be taken away.
TAKE_AWAY = {
    "proc": """
import pathlib, psutil
psutil.LINUX = False
read = pathlib.Path.read_bytes
def read_bytes(path):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return read(path)
pathlib.Path.read_bytes = read_bytes
""",
    "madvise": "import mmap; del mmap.MADV_HUGEPAGE\n",
    "affinity": "import os; del os.sched_getaffinity\n",
    "libgomp": """
import ctypes
load = ctypes.CDLL
def load_other(name, *arguments, **more):
    if name is not None and "gomp" in str(name):
        raise OSError(f"{name} is not there")
    return load(name, *arguments, **more)
ctypes.CDLL = load_other
""",
    # other packages must not believe that they are on another system
    "platform": """
platform, sys.platform = sys.platform, "darwin"
import nanoengine_extras.cpu
sys.platform = platform
"""}


@pytest.mark.slow
@pytest.mark.parametrize("missing, hidden", [
    ([*TAKE_AWAY], []), ([*TAKE_AWAY][:-1], ["nanoengine_extras.cpu"]), (["proc", "libgomp"], []),
    (["madvise"], [])], ids=str)
def test_another_system(tiny, missing, hidden):
    before = "import numba, psutil, torch, transformers\n" + "".join(map(TAKE_AWAY.get, missing))
    before += "sys.modules.update(dict.fromkeys(hidden))\nimport nanoengine\n"
    found, _ = check(tiny, PROMPTS, PARAMS, FLOAT32, hidden, before, run=run_anew)
    assert found["backend"] == ("gather" if hidden else "numba")


# ------------------------------------------------------------------------ without kernels

FILES = ("model.py", "attention.py", "sampler.py")
# what only a GPU, or another backend, runs
NOT_HERE = {"flash_attention", "triton_attention", "has_flash_attn", "has_triton", "has_numba"}
# A breakpoint is in each function: the numbers of the lines where one fires, by file.
TRACE = """
import os, transformers
reached = {}
def trace(frame, event, argument):
    folder, name = os.path.split(frame.f_code.co_filename)
    if os.path.basename(folder) == "nanoengine":
        reached.setdefault(name, set()).add(frame.f_code.co_firstlineno)
sys.settrace(trace)
"""
REACHED = """
sys.settrace(None)
found["kinds"] = sorted({type(module).__module__ for module in llm.engine.runner.model.modules()})
found["modules"] = [name for name in sys.modules if name.split(".")[0] == "numba"
                    or name in ("nanoengine_extras.cpu", "nanoengine_extras.gpu")]
found["reached"] = {name: sorted(lines) for name, lines in reached.items()}
"""


@pytest.mark.parametrize("architecture, run_ahead", [
    ("Qwen3", False), slow("Llama", True)])
def test_without_kernels_a_breakpoint_in_each_function_fires(make_model, architecture, run_ahead):
    """What one reads in these files is what runs. No kernel is imported, and nothing that is only
    there for kernels."""
    model, _ = make_model(architecture, num_hidden_layers=2)
    options = FLOAT32 | dict(dtype="auto", kernels=False, run_ahead=run_ahead)
    found, _ = check(model, PROMPTS, PARAMS, options, [], TRACE, REACHED, kernels=True,
                     dtype="float32")
    assert found["backend"] == "gather" and not found["modules"]
    assert not any("nanoengine_" in kind for kind in found["kinds"])
    for name in FILES:
        tree = ast.parse((ROOT / "nanoengine" / name).read_text())
        functions = {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node.name
                     for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missed = {functions[line] for line in functions.keys() - {*found["reached"][name]}}
        assert missed == NOT_HERE & {*functions.values()}, name


@pytest.mark.needs("running.guards")
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_a_kernel_that_is_asked_for_by_name_as_well(tiny, backend):
    with pytest.raises(ValueError, match=f"attention_backend='{backend}'"):
        LLM(tiny, kernels=False, attention_backend=backend, num_kv_blocks=4)
