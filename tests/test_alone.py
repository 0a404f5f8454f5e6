"""`nanoengine/` is the engine, whole: it runs without any other package of this repository."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import random_prompts
from forks import run_in_fork

from nanoengine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
SIBLINGS = ["nanoengine_extras"]

# what the siblings need besides, is not imported either
SCRIPT = f"""
import json, sys
sys.modules.update(dict.fromkeys({SIBLINGS + ["numba", "pydantic"]}))
from nanoengine import LLM, SamplingParams
model, prompts, params, options = json.load(sys.stdin)
llm = LLM(model, **options)
params = [SamplingParams(**each) for each in params]
outputs = llm.generate(prompts, params, use_tqdm=False)
streamed = [output for output in llm.stream(prompts[:2], params[:2]) if output.finished]
print(json.dumps([[[completion.token_ids, completion.text, completion.finish_reason]
                   for completion in output.outputs] for output in [*outputs, *streamed]]))
"""


def run_alone(script: str, *inputs: Any) -> subprocess.CompletedProcess:
    return run_in_fork(script, json.dumps(inputs))


def expected_of(model: str, prompts: list, params: list, options: dict) -> list:
    with LLM(model, **options) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**each) for each in params],
                               use_tqdm=False)
    streamed = sorted(outputs[:2], key=lambda output: len(output.outputs[0].token_ids))
    return [[[each.token_ids, each.text, each.finish_reason] for each in output.outputs]
            for output in [*outputs, *streamed]]


@pytest.mark.parametrize("options", [
    {}, dict(scheduling="mixed", max_num_batched_tokens=40, num_kv_blocks=14, run_ahead=True)])
def test_the_same_tokens_alone(tiny, options):
    """Chunks, preemption, forks, truncations and shared prefixes, in float32."""
    options = dict(dtype="float32", block_size=16, max_num_seqs=6, max_model_len=200) | options
    prompts = random_prompts([3, 40, 90, 33, 1, 70])
    prompts.append(prompts[2][:50])
    params: list[dict] = [
        dict(temperature=0, max_tokens=9), dict(seed=1, max_tokens=20, top_p=0.9),
        dict(seed=2, max_tokens=30, top_k=7), dict(seed=3, max_tokens=8, n=3),
        dict(seed=4, max_tokens=25, min_p=0.05), dict(seed=5, max_tokens=40),
        dict(temperature=0, max_tokens=50)]
    result = run_alone(SCRIPT, tiny, prompts, params, options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == expected_of(tiny, prompts, params, options)


def test_texts_alone():
    model = str(ROOT / "models/tiny-qwen3")
    prompts = ["47 + 85 =", "Once upon a time", "count 17 to 23 ="]
    params: list[dict] = [dict(temperature=0, max_tokens=24),
                          dict(seed=1, max_tokens=60), dict(temperature=0)]
    options = dict(dtype="float32")
    result = run_alone(SCRIPT, model, prompts, params, options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found[0][0][1].strip() == "132"
    assert found == expected_of(model, prompts, params, options)


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
    ("SamplingParams(n=2, temperature=0)", "n=2"),
    ("SamplingParams(logit_bias={1: 2})",
     "={1: 2} needs nanoengine_extras/sampling/constraints.py"),
    ("SamplingParams(min_tokens=2)", "=2 needs nanoengine_extras/sampling/constraints.py"),
    ("llm.generate([[]])", "prompts\\[0\\] has 0 tokens"),
    ("llm.generate([[5, -1]])", "prompts\\[0\\]: token id -1 is out of vocabulary"),
    ("llm.generate([[5], [10**6]])", "prompts\\[1\\]: token id 1000000 is out of vocabulary"),
    ("llm.generate([[5] * 300])", "prompts\\[0\\] has 300 tokens"),
    ("llm.generate(['a text'])", "there is no tokenizer"),
    ("llm.generate([[5]], [SamplingParams()] * 2)", "longer")]


def test_what_would_hang_or_corrupt_is_refused_alone(tiny):
    """And the engine stays usable."""
    script = f"""
import json, re, sys
sys.modules.update(dict.fromkeys({SIBLINGS}))
from nanoengine import LLM, SamplingParams
model, cases = json.load(sys.stdin)
llm = LLM(model, dtype="float32", max_model_len=200)
for code, message in cases:
    try:
        eval(code)
    except (ValueError, TypeError) as error:
        assert re.search(message, str(error)), (code, str(error))
    else:
        raise AssertionError(f"{{code}} is accepted")
assert len(llm.generate([[5]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
# a function as policy, and seeds that are not given
llm = LLM(model, dtype="float32", max_model_len=200, seed=None,
          scheduling=lambda scheduler: scheduler.build([*scheduler.running], admit=True))
params = SamplingParams(seed=-1, max_tokens=20, ignore_eos=True)
first, second = llm.generate([[5], [5]], params, use_tqdm=False)
assert first.outputs[0].token_ids != second.outputs[0].token_ids
"""
    result = run_alone(script, tiny, REFUSED)
    assert result.returncode == 0, result.stderr


def test_one_call_at_a_time_alone(tiny):
    """An error, Ctrl-C or a dropped stream frees all blocks, and so does `abort`."""
    script = f"""
import json, sys
sys.modules.update(dict.fromkeys({SIBLINGS}))
from nanoengine import LLM, SamplingParams
from nanoengine.observers import Feature

class Interrupt(Feature):
    OPTIONS = ("once",)
    error = None
    def scheduled(self, batch):
        if self.error and any("once" in seq.params.options for seq in batch.sequences):
            raise self.error

model, = json.load(sys.stdin)
prompts, params = [[5] * 20, [6] * 40], SamplingParams(temperature=0, max_tokens=6)
marked = SamplingParams(temperature=0, max_tokens=6, options=dict(once=True))

def check_empty(llm):
    manager = llm.engine.scheduler.block_manager
    assert not llm.active and not llm.engine.has_unfinished()
    assert manager.num_free_blocks == manager.num_blocks

for run_ahead in (False, True):
    interrupt = Interrupt()
    llm = LLM(model, dtype="float32", max_model_len=200, run_ahead=run_ahead, features=[interrupt])
    def tokens():
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, marked, False)]
        check_empty(llm)
        return found
    expected = tokens()
    for interrupt.error in (KeyboardInterrupt(), MemoryError()):
        try:
            tokens()
        except type(interrupt.error):
            check_empty(llm)
        else:
            raise AssertionError
    interrupt.error = None
    stream = llm.stream(prompts, params)
    for refused in (lambda: llm.generate(prompts, params), lambda: next(llm.stream(prompts))):
        try:
            refused()
        except RuntimeError as error:
            assert "shared_steps.py" in str(error)
        else:
            raise AssertionError
    next(stream)
    stream.close()
    del stream
    import gc; gc.collect()
    check_empty(llm)
    first, second = llm.add(prompts, params)
    llm.step()
    llm.abort([second])
    while llm.active:
        llm.step()
    assert first.output().outputs[0].token_ids == expected[0]
    assert second.output().outputs[0].finish_reason == "abort"
    assert tokens() == expected
    try:
        llm.generate(prompts, SamplingParams(options=dict(onse=1)))
    except ValueError as error:
        assert "['once']" in str(error)
    llm.close()
    for closed in (llm.generate, llm.stream, llm.add):
        try:
            closed(prompts, params)
        except RuntimeError as error:
            assert "is closed" in str(error)
        else:
            raise AssertionError
"""
    result = run_alone(script, tiny)
    assert result.returncode == 0, result.stderr
