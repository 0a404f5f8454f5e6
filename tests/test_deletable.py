"""Each file of nanoengine_extensions can be deleted alone: all else works, and to ask for what it
did is a ValueError that names it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FEATURES = sorted(path.stem for path in (ROOT / "nanoengine_extensions").iterdir()
                  if not path.stem.startswith("__") and path.suffix in (".py", ""))

# what asks for each feature, and checks that it works
CASES = {
    "beam_search": "from nanoengine import BeamSearchParams as B; assert len("
                   "llm.beam_search([[5, 6]], B(beam_width=2, max_tokens=3))[0].sequences) == 2",
    "chat": "assert texts.chat([{'role': 'user', 'content': '12 + 34'}], greedy, False)",
    "constraints": "assert run(llm, logit_bias={7: 1e9}).token_ids == [7] * 4",
    "dummy": "LLM(model, load_format='dummy', **options).close()",
    "explain": "import tempfile; LLM(tempfile.mkdtemp(), **options)",
    "generation_config": "if texts.get_default_sampling_params() == SamplingParams(): "
                         "raise ValueError('generation_config')",
    "guards": "LLM(model, batch_invariant=True, attention_backend='gather', **options)",
    "logits_processors": "assert run(llm, logits_processors=[lambda i, s: s]).token_ids == tokens",
    "logprobs": "assert len(run(llm, logprobs=2, prompt_logprobs=0).logprobs) == 4",
    "metrics": "assert llm.metrics()['num_steps'] > 0",
    "offload": "LLM(model, cpu_offload_gb=1, **options)",
    "policies": "LLM(model, kv_allocation='reserve', scheduling='static', **options).close()",
    "scores": "assert llm.score([5, 6], [[7], [8, 9]], False)[1].token_ids == [8, 9]",
    "speculation": "with_option = LLM(model, speculation='prompt-lookup', **options); "
                   "assert run(with_option).token_ids == tokens; with_option.close()",
    "strict": "SamplingParams(temperatur=1)",
    "structured_outputs": "assert run(texts, 'a', structured_outputs={'regex': '[0-9]+'}).text"
                          ".isdigit()",
    "swapping": "with_option = LLM(model, preemption_mode='swap', swap_space=0.01, **options); "
                "assert run(with_option).token_ids == tokens; with_option.close()",
    "terminal": "sys.argv = ['nanoengine', '1 + 1 =', '--model', bundled, '--max-tokens', '2']\n"
                "with contextlib.redirect_stdout(io.StringIO()):\n"
                "    runpy.run_module('nanoengine', run_name='__main__')",
    "tensor_parallel": "with_option = LLM(model, tensor_parallel_size=2, **options); "
                       "assert run(with_option).token_ids == tokens; with_option.close()",
    "texts": "assert run(texts, 'a b c', stop=['zebra']).token_ids",
    "varlen": "LLM(model, attention_backend='varlen', **options)",
    "vllm": "import nanoengine_extensions.vllm"}
# what says no where everything is there, and in which words
REFUSED = {"explain": "is an empty folder: it must be one with a model",
           "guards": "batch_invariant=True is not accepted",
           "offload": "is not accepted: it must be 0 on a CPU",
           "strict": "temperatur is not known: the nearest is temperature",
           "varlen": "attention_backend='varlen' is not accepted"}
# what needs another feature, as that is what it is made of
NEEDS = {"beam_search": ["logprobs"], "scores": ["constraints", "logprobs"]}

SCRIPT = """
import contextlib, io, json, runpy, sys
# an editable installation would find what is deleted
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
from nanoengine import LLM, SamplingParams
cases, refused, needs, deleted, model, bundled = json.load(sys.stdin)
options = dict(dtype="float32", block_size=16, num_kv_blocks=32, max_num_seqs=4)
greedy = SamplingParams(temperature=0, max_tokens=4)
llm, texts = LLM(model, **options), LLM(bundled, **options)

def run(llm, prompt=(5, 6, 7), **params):
    params = SamplingParams(temperature=0, max_tokens=4, **params)
    prompt = prompt if isinstance(prompt, str) else [*prompt]
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

# without them, others refuse what they refuse
UNNAMED = ("explain", "policies", "strict", "varlen")
tokens = run(llm).token_ids
for feature, code in cases.items():
    is_gone = deleted in (feature, *needs.get(feature, ()))
    try:
        exec(code)
    except (ValueError, ImportError, TypeError) as error:
        found = str(error)
        if is_gone:
            assert deleted in found or feature in UNNAMED, (feature, found)
            assert isinstance(error, ValueError) or feature in ("strict", "vllm"), repr(error)
        else:
            assert feature in refused and refused[feature] in found, (feature, found)
    else:
        assert not is_gone and feature not in refused, feature
assert run(llm).token_ids == tokens
print("done")
"""


def test_each_has_a_case():
    assert FEATURES == sorted(CASES)


@pytest.mark.parametrize("deleted", ["nothing", *FEATURES])
def test_one_is_deleted(tiny, bundled, tmp_path, deleted):
    for name in ("nanoengine", "nanoengine_cpu"):
        (tmp_path / name).symlink_to(ROOT / name)
    ignored = shutil.ignore_patterns(deleted, f"{deleted}.py", "__pycache__")
    shutil.copytree(ROOT / "nanoengine_extensions", tmp_path / "nanoengine_extensions",
                    ignore=ignored)
    inputs = json.dumps([CASES, REFUSED, NEEDS, deleted, tiny, bundled])
    result = subprocess.run([sys.executable, "-c", SCRIPT], input=inputs, text=True,
                            capture_output=True, cwd=tmp_path, timeout=300,
                            env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert result.stdout == "done\n", result.stderr[-3000:]
