"""`kernels=False`: what one reads in model.py, attention.py and sampler.py is what runs."""

import ast
import json

import pytest
from conftest import ROOT, random_prompts, token_ids
from forks import run_in_fork

from nanoengine import LLM, SamplingParams

FILES = ("model.py", "attention.py", "sampler.py")
# what only a GPU, or another backend, runs
NOT_HERE = {"flash_attention", "triton_attention", "has_flash_attn", "has_triton", "has_numba"}
PARAMS = [dict(temperature=0, max_tokens=6), dict(seed=1, top_p=0.8, top_k=9, max_tokens=6),
          dict(seed=2, top_p=0.8, min_p=0.1, max_tokens=6), dict(seed=3, max_tokens=9)]

# A breakpoint is in each function: the numbers of the lines where one fires, by file.
SCRIPT = """
import json, os, sys, transformers

model, prompts, params, options = json.load(sys.stdin)
reached = {}

def trace(frame, event, argument):
    folder, name = os.path.split(frame.f_code.co_filename)
    if os.path.basename(folder) == "nanoengine":
        reached.setdefault(name, set()).add(frame.f_code.co_firstlineno)

sys.settrace(trace)
from nanoengine import LLM, SamplingParams
llm = LLM(model, kernels=False, **options)
params = [SamplingParams(**each) for each in params]
outputs = llm.generate(prompts, params, use_tqdm=False)
sys.settrace(None)
print(json.dumps({
    "tokens": [output.outputs[0].token_ids for output in outputs],
    "kinds": sorted({type(module).__module__ for module in llm.engine.runner.model.modules()}),
    "backend": llm.metrics()["attention_backend"],
    "modules": [name for name in sys.modules if name.split(".")[0] in
                ("nanoengine_extras.cpu", "nanoengine_extras.gpu", "numba")],
    "reached": {name: sorted(lines) for name, lines in reached.items()}}))
"""


def functions_of(name: str) -> dict[int, str]:
    """The functions and methods of a file, by the line where each begins."""
    tree = ast.parse((ROOT / "nanoengine" / name).read_text())
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node.name
            for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("architecture, options", [
    ("Qwen3", dict(dtype="float32")), ("Llama", dict(dtype="auto", run_ahead=True))])
def test_a_breakpoint_in_each_function_fires(make_model, architecture, options):
    """And the tokens are the same in float32. No kernel is imported, and nothing that is only there
    for kernels."""
    model, _ = make_model(architecture, num_hidden_layers=2)
    prompts = random_prompts([5, 40, 9, 12])
    result = run_in_fork(SCRIPT, json.dumps([model, prompts, PARAMS, options]))
    assert not result.returncode, result.stderr
    found = json.loads(result.stdout)
    assert found["backend"] == "gather" and not found["modules"]
    assert not any("nanoengine_" in kind for kind in found["kinds"])
    for name in FILES:
        functions = functions_of(name)
        missed = {functions[line] for line in functions.keys() - {*found["reached"][name]}}
        assert missed == NOT_HERE & {*functions.values()}, name
    with LLM(model, block_size=16, **options | dict(dtype="float32")) as llm:
        params = [SamplingParams(**each) for each in PARAMS]
        assert found["tokens"] == token_ids(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_a_kernel_that_is_asked_for_by_name_as_well(backend):
    with pytest.raises(ValueError, match=f"kernels=False .* attention_backend='{backend}'"):
        LLM("none", kernels=False, attention_backend=backend)
