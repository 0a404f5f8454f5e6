"""Each file of nanoengine_extras can be deleted alone: all else works, and to ask for what it
did is a ValueError that names it. What is not asked for is not imported."""

import importlib.util
import json

import pytest
from conftest import ROOT, packages_imported_by, slow
from forks import run_in_fork

FOLDER = ROOT / "nanoengine_extras"
# a file each, or a folder
FILES = {f"{path.parent.name}.{path.stem}": path
         for street in ("models", "running", "sampling", "tools")
         for path in sorted((FOLDER / street).iterdir())
         if path.suffix in (".py", "") and path.stem not in ("__init__", "__pycache__", "lab")}
TESTS = ROOT / "tests" / "features"

# what asks for each feature, and checks that it works
ALL_CASES = {
    "tools.async_llm": "import asyncio\n"
                 "from nanoengine_extras.tools.async_llm import AsyncLLM\n"
                 "async def first():\n"
                 "    async for output in AsyncLLM(llm).stream([[5, 6]], greedy):\n"
                 "        return output\n"
                 "assert asyncio.run(first()).outputs",
    "running.backends": "LLM(model, attention_backend='varlen', **options)",
    "tools.batch": "import pathlib, tempfile\n"
             "folder = pathlib.Path(tempfile.mkdtemp())\n"
             "(folder / 'a').write_text('{\"prompt\": \"1 + 1 =\"}')\n"
             "extension('tools.batch').main(['--model', bundled, '-i', str(folder / 'a'), '-o', "
             "str(folder / 'b')])\n"
             "assert '\"status_code\": 200' in (folder / 'b').read_text()",
    "sampling.beam_search": "from nanoengine import BeamSearchParams as B; assert len("
                   "llm.beam_search([[5, 6]], B(beam_width=2, max_tokens=3))[0].sequences) == 2",
    "tools.chat": "assert texts.chat([{'role': 'user', 'content': '12 + 34'}], greedy, False)",
    "sampling.constraints": "assert run(llm, logit_bias={7: 1e9}).token_ids == [7] * 4",
    "models.dummy": "LLM(model, load_format='dummy', **options).close()",
    "models.explain": "import tempfile; LLM(tempfile.mkdtemp(), **options)",
    "models.experts": "import tempfile, transformers\n"
               "sizes = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, "
               "num_hidden_layers=1, moe_intermediate_size=32, num_experts=4, "
               "num_experts_per_tok=2, "
               "vocab_size=64, head_dim=16)\n"
               "transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))"
               ".save_pretrained(folder := tempfile.mkdtemp())\n"
               "with_option = LLM(folder, skip_tokenizer_init=True, **options)\n"
               "modules = with_option.engine.runner.model.layers.modules()\n"
               "assert any(hasattr(each, 'make_calls') for each in modules)\n"
               "with_option.close()",
    "models.generation_config": "assert texts.get_default_sampling_params() != SamplingParams()",
    "running.graphs": "assert type(llm.engine.runner.graphs).__name__ == 'BusyGraphs'",
    "sampling.fast_sampling": "assert 'fast' in llm.engine.runner.sample_rows.__module__",
    "running.memory": "LLM(model, gpu_memory_utilization=0.5, **options).close()",
    "models.gguf": f"LLM({str(TESTS / 'q3-q4_k_m.gguf')!r}, **options).close()",
    "running.kv_cache": "assert tokens_with(kv_cache_dtype='fp8') and llm.engine",
    "running.guards": "LLM(model, batch_invariant=True, attention_backend='gather', **options)",
    "models.hub": "LLM('some/model', **options)",
    "tools.lm_eval": "extension('tools.lm_eval')",
    "sampling.logits_processors": "found = run(llm, logits_processors=[lambda i, s: s])\n"
                                  "assert found.token_ids == tokens",
    "sampling.logprobs": "assert len(run(llm, logprobs=2, prompt_logprobs=0).logprobs) == 4",
    "running.metrics": "assert llm.metrics()['num_steps'] > 0",
    "running.offload": "LLM(model, cpu_offload_gb=1, **options)",
    "models.own_layers": "with_option = LLM(model, model_impl='transformers', **options); "
                  "assert with_option.engine.runner.model.stack; with_option.close()",
    "tools.openai_format": "from nanoengine_extras.tools.openai_format import Body; "
                     "Body('/v1/completions', '1').read({'prompt': 'a'}, texts)",
    "running.policies": "LLM(model, kv_allocation='reserve', scheduling='static', **options)"
                        ".close()",
    "tools.prometheus": "text = extension('tools.prometheus').as_text(llm.metrics(), 'm')\n"
                        "assert 'nanoengine:' in text",
    "models.quantized": "assert tokens_with(quantization='int8')",
    "tools.reasoning": "from nanoengine_extras.tools.openai_format import Body\n"
                 "body = Body('/v1/chat/completions', '1')\n"
                 "body.read({'messages': [{'role': 'user', 'content': 'a'}]}, texts)\n"
                 "assert body.reasoning",
    "tools.scores": "assert llm.score([5, 6], [[7], [8, 9]], False)[1].token_ids == [8, 9]",
    "tools.serve": "import argparse\n"
             "flags = argparse.Namespace(max_waiting=1, model='m', api_key=None)\n"
             "assert extension('tools.serve').Server(texts, flags).app().routes",
    "running.shared_steps": "with llm.turn(): pass",
    "models.sources": "assert tokens_with(model_impl='native') == tokens",
    "sampling.speculation": "assert tokens_with(speculation='prompt-lookup') == tokens",
    "running.strict": "SamplingParams(temperatur=1)",
    "sampling.structured_outputs": "assert run(texts, 'a', structured_outputs="
                          "{'regex': '[0-9]+'}).text"
                          ".isdigit()",
    "running.swapping": "found = tokens_with(preemption_mode='swap', swap_space=0.01)\n"
                        "assert found == tokens",
    "running.tensor_parallel": "assert tokens_with(tensor_parallel_size=2) == tokens",
    "tools.terminal": "import contextlib, io, runpy, sys\n"
                "sys.argv = ['nanoengine', '1 + 1 =', '--model', bundled, '--max-tokens', '2']\n"
                "with contextlib.redirect_stdout(io.StringIO()):\n"
                "    runpy.run_module('nanoengine', run_name='__main__')",
    "running.threads": "assert type(llm.engine.features['Threads']).__name__ == 'Threads'",
    "tools.tool_calls": "extension('tools.tool_calls').check({'tools': [{'type': 'function'}]})",
    "sampling.texts": "assert run(texts, 'a b c', stop=['zebra']).token_ids",
    "models.transformers_models": "assert tokens_with(model_impl='transformers') == tokens",
    "tools.vllm": "import nanoengine_extras.tools.vllm"}
# what says no where everything is there, and in which words
REFUSED = {"running.backends": "attention_backend='varlen' is not accepted",
           "models.explain": "is an empty folder: it must be one with a model",
           "running.guards": "batch_invariant=True is not accepted",
           "running.offload": "is not accepted: it must be 0 on a CPU",
           "models.hub": "model='some/model' is not accepted",
           "tools.lm_eval": "pip install lm-eval",
           "running.strict": "temperatur is not known: the nearest is temperature"}
if importlib.util.find_spec("lm_eval"):
    del REFUSED["tools.lm_eval"]
# what needs another feature, as that is what it is made of
NEEDS = {"tools.async_llm": ["running.shared_steps"],
         "tools.batch": ["tools.openai_format", "running.shared_steps"],
         "sampling.beam_search": ["sampling.logprobs"],
         "models.gguf": ["models.quantized", "models.sources"],
         "models.explain": ["models.sources"],
         "models.hub": ["models.sources"], "models.quantized": ["models.sources"],
         "models.transformers_models": ["models.sources"],
         "models.experts": ["models.transformers_models", "models.sources"],
         "models.own_layers": ["models.transformers_models", "models.sources"],
         "tools.prometheus": ["running.metrics"],
         "tools.reasoning": ["tools.chat", "tools.openai_format"],
         "tools.scores": ["sampling.constraints", "sampling.logprobs"],
         "tools.tool_calls": ["tools.openai_format"],
         "tools.serve": ["tools.async_llm", "tools.openai_format", "running.shared_steps"]}

# what holds without those that are not asked for by a name; transformers' own layers stay, and
# without models of transformers, there is nothing to ask for
WITHOUT = dict.fromkeys(
    ["tools.async_llm", "tools.openai_format", "models.own_layers", "models.experts",
     "tools.reasoning", "tools.vllm"], "import nanoengine_extras") | {
    "models.explain": "import contextlib, tempfile\n"
               "with contextlib.suppress(ValueError):\n"
               "    LLM(tempfile.mkdtemp(), **options)\n    raise AssertionError",
    "models.generation_config": "assert texts.get_default_sampling_params() == SamplingParams()",
    "running.graphs": "assert type(llm.engine.runner.graphs).__name__ == 'CudaGraphs'",
    "sampling.fast_sampling": "assert 'fast' not in llm.engine.runner.sample_rows.__module__",
    "running.strict": "assert SamplingParams(max_tokens=3.0).max_tokens == 3.0",
    "running.threads": "assert type(llm.engine.features['Threads']).__name__ == 'Feature'"}
# what is deleted for good has no case any more
CASES = {name: case for name, case in ALL_CASES.items()
         if {name, *NEEDS.get(name, ())} <= {*FILES}}
# those that every engine has
ALWAYS = {*FILES} & {
    "models.explain", "models.generation_config", "models.sources", "running.backends",
    "running.graphs", "running.guards", "running.metrics", "running.shared_steps", "running.strict",
    "running.threads", "sampling.fast_sampling", "sampling.texts"}

# those whose case starts a process: they are asked for where they are deleted, and where nothing is
# only in the slow tests, as their own tests show that they work
# (lm_eval's registry takes a model once in a process)
SLOW = ["running.tensor_parallel", "tools.lm_eval"]


def asked_without(deleted: str, are_all: bool) -> list[str]:
    """The features that are asked for without one: those that it concerns, or all."""
    are_all |= deleted == "nothing"
    return [feature for feature in CASES
            if deleted in (feature, *NEEDS.get(feature, ())) or (are_all and feature not in SLOW)]


# The packages are imported anew without each file, in one process; but the kernels stay, so that
# numba finds them on disk.
SCRIPT = r"""
import contextlib, importlib.machinery, json, os, re, sys, traceback
root, deletable, asked, cases, refused, needs, without, model, bundled = json.load(sys.stdin)
sys.path[0] = root
with contextlib.suppress(ImportError):
    import nanoengine_extras.cpu
options = dict(dtype="float32", block_size=16, num_kv_blocks=32, max_num_seqs=4)

class Finder(importlib.machinery.PathFinder):
    deleted = ""

    @classmethod
    def find_spec(cls, name, *others):
        if name != f"nanoengine_extras.{cls.deleted}":
            return super().find_spec(name, *others)

# an editable installation would find what is deleted
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder

def begin(deleted, case="texts"):
    for name in [*sys.modules]:
        if re.match(r"nanoengine(_extras)?(?!\.cpu|\.gpu)\b(?!\.cpu|\.gpu)", name):
            del sys.modules[name]
    Finder.deleted = deleted
    from nanoengine import LLM, SamplingParams
    from nanoengine.features import extension
    greedy = SamplingParams(temperature=0, max_tokens=4)

    def run(llm, prompt=(5, 6, 7), **params):
        params = SamplingParams(temperature=0, max_tokens=4, **params)
        prompt = prompt if isinstance(prompt, str) else [*prompt]
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

    def tokens_with(**more):
        with LLM(model, **options, **more) as other:
            return run(other).token_ids

    llm = LLM(model, **options)
    texts = LLM(bundled, **options) if "texts" in case else None
    tokens = run(llm).token_ids
    return locals() | dict(model=model, bundled=bundled, options=options)

def ask(feature, deleted, names):
    is_gone = deleted in (feature, *needs.get(feature, ()))
    if is_gone and feature in without:
        return exec(without[feature], names)
    try:
        exec(cases[feature], names)
    except ValueError as error:
        # of what needs the deleted one, the error names either
        wanted = ["nanoengine_extras/" + name.replace(".", "/") for name in (deleted, feature)
                  ] if is_gone else [refused[feature]]
        assert any(each in str(error) for each in wanted), str(error)
    else:
        assert not is_gone and feature not in refused, "it is accepted"

def check(deleted):
    code = [each.get(name, "") for name in asked[deleted] for each in (cases, without)]
    names = begin(deleted, "".join(code))
    for feature in asked[deleted]:
        try:
            ask(feature, deleted, names)
        except Exception as error:
            raise AssertionError(f"{feature} without {deleted}") from error
    assert names["run"](names["llm"]).token_ids == names["tokens"]
    for llm in filter(None, (names["llm"], names["texts"])):
        llm.close()

def imported():
    # without the kernels and the streets themselves
    return sorted({".".join(name.split(".")[1:3]) for name in sys.modules
                   if re.match(r"nanoengine_extras\.(models|running|sampling|tools)\.", name)})

def imported_by(feature):
    names = begin("nothing", cases.get(feature, "texts"))
    before = imported()
    if feature in cases:
        ask(feature, "nothing", names)
    return sorted({*imported()} - {*before}) if feature in cases else before

found = {}
for deleted in deletable:
    try:
        check(deleted)
        found[deleted] = ""
    except Exception:
        found[deleted] = traceback.format_exc()
found["imported"] = {feature: imported_by(feature) for feature in asked["imported"]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[False, slow(True)],
                ids=["itself", "all"])
def found(request, tiny, bundled, tmp_path_factory) -> dict:
    """What went wrong without each of them, and what each case imports."""
    deletable = ["nothing", *FILES]
    asked = {deleted: asked_without(deleted, request.param) for deleted in deletable}
    names = [name for name in CASES if name not in SLOW]
    asked["imported"] = ["", *names[::1 if request.param else 4]]
    inputs = json.dumps(
        [str(ROOT), deletable, asked, CASES, REFUSED, NEEDS, WITHOUT, tiny, bundled])
    result = run_in_fork(SCRIPT, inputs, tmp_path_factory.mktemp("empty"))
    assert not result.returncode, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_each_has_a_case():
    assert {*FILES} <= {*ALL_CASES}


def test_each_has_tests_under_its_name():
    """In tests/features, a file or several; they are deleted with it."""
    found = {path.stem for path in TESTS.glob("test_*")}
    named = {f"test_{path.stem}" for path in FILES.values()}
    assert named <= found
    assert all(each in named or each.rpartition("_")[0] in named for each in found)


def test_no_test_imports_those_of_a_feature():
    """Not even those of another feature do: what several need lies in files of its own."""
    of_features = {path.stem for path in TESTS.glob("test_*")} | {TESTS.name}
    for path in (ROOT / "tests").rglob("*.py"):
        assert not packages_imported_by(path) & of_features, path


@pytest.mark.parametrize("deleted", ["nothing", *FILES])
def test_one_is_deleted(found, deleted):
    assert not found[deleted]


# an unknown keyword can be one of vLLM's; tools give no number of blocks
ALSO_IMPORTED = {"tools.terminal": {"running.memory"}, "tools.batch": {"running.memory"},
                 "models.transformers_models": {"models.own_layers", "models.experts"},
                 "models.own_layers": {"models.experts"}, "models.experts": {"models.own_layers"}}


def test_only_what_is_asked_for_is_imported(found):
    imported = found["imported"]
    assert {*imported.pop("")} == ALWAYS
    for feature, others in imported.items():
        # what lacks its package is not imported
        itself = {feature} - ({"tools.lm_eval"} & REFUSED.keys())
        needed = (itself | {*NEEDS.get(feature, ())}) - ALWAYS
        assert {*others} - ALSO_IMPORTED.get(feature, set()) == needed, feature
