"""Settings of PyTorch that belong to the user's process change no token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from conftest import generate

from nanoengine import LLM, SamplingParams

PROMPTS = ["47 + 85 =", "Once upon a time", "sort d b e a =", "A cat", "Once"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=12, logprobs=2, n=2),
    SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.5,
                   seed=3, max_tokens=12, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=12, min_tokens=3, logit_bias={3: 1.0}, bad_words=["the"],
                   logits_processors=[lambda input_ids, scores: scores / 2]),
    SamplingParams(seed=1, min_tokens=2, structured_outputs={"regex": "[a-z]{3}"})]
# kernels for a CPU and plain PyTorch, in both precisions; the paths that copy blocks
ENGINES: list[dict[str, Any]] = [
    dict(dtype="float32"), dict(dtype="bfloat16", run_ahead=True),
    dict(dtype="bfloat16", quantization="int4"),
    dict(dtype="float32", attention_backend="gather"),
    dict(dtype="float32", speculation="prompt-lookup"),
    dict(dtype="float32", num_kv_blocks=7, block_size=16, max_model_len=64, preemption_mode="swap",
         swap_space=0.01)]


@contextmanager
def changed(change: Any, get: Any, value: Any) -> Iterator[None]:
    """Changes a setting, and changes it back."""
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager:
    return changed(torch.set_default_dtype, torch.get_default_dtype, dtype)


SETTINGS = {
    "nothing": nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
    "gradients": lambda: torch.set_grad_enabled(True),
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference": torch.inference_mode,
    "anomalies": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    # which also fill new memory with NaN
    "deterministic": lambda: changed(torch.use_deterministic_algorithms,
                                     torch.are_deterministic_algorithms_enabled, True),
    "one thread": lambda: changed(torch.set_num_threads, torch.get_num_threads, 1),
    "three threads": lambda: changed(torch.set_num_threads, torch.get_num_threads, 3)}


def results(llm: LLM, has_logprobs: bool = True) -> list:
    """Tokens, texts and log-probabilities."""
    return [(output.outputs, output.prompt_logprobs) if has_logprobs else
            [(each.token_ids, each.text) for each in output.outputs]
            for output in generate(llm, PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def engine(request, bundled) -> tuple:
    """Options, an engine that was made without any settings, and its results."""
    options = dict(num_kv_blocks=64) | request.param
    with LLM(bundled, **options) as llm:
        yield options, llm, results(llm)


def engines_and_settings() -> list:
    """Each setting with one engine; the other pairs are slow, but for those of new memory and
    copied blocks, and of threads and PyTorch's own products."""
    fast = {(-1, "deterministic"), (-3, "one thread"), (-3, "three threads")}
    found = []
    for number, options in enumerate(ENGINES):
        for place, name in enumerate(SETTINGS):
            is_fast = number == place % len(ENGINES) or (number - len(ENGINES), name) in fast
            found.append(pytest.param(options, name, marks=() if is_fast else pytest.mark.slow,
                                      id=f"{options}-{name}"))
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("engine, name", engines_and_settings(), indirect=["engine"])
def test_settings_change_no_token(engine, bundled, name):
    """Neither before an engine is made, nor after."""
    options, llm, expected = engine
    # some builds of PyTorch add products up in another order with another number of threads
    is_plain = options.get("attention_backend") == "gather"
    has_logprobs = not (is_plain and "thread" in name)
    if not has_logprobs:
        expected = results(llm, has_logprobs)
    with SETTINGS[name]():
        llm.reset_prefix_cache()
        assert results(llm, has_logprobs) == expected
        with LLM(bundled, **options) as own:
            assert results(own, has_logprobs) == expected
    assert results(llm, has_logprobs) == expected, "what a setting left behind"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "meta"])
def test_random_weights_are_the_same(tiny, name):
    prompts, params = [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9)
    found = []
    for setting in (nullcontext, SETTINGS[name]):
        with setting(), LLM(
                tiny, load_format="dummy", block_size=16, num_kv_blocks=32) as llm:
            found.append(generate(llm, prompts, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


# prints libgomp's variable when PyTorch is about to be imported, which reads it
FINDER = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Finder())
import nanoengine
"""


@pytest.mark.parametrize("given, expected", [
    ({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")])
def test_waiting_threads_spin_for_a_short_time_unless_the_user_says_otherwise(given, expected):
    names = os.environ.keys() - {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: os.environ[name] for name in names} | given
    run = subprocess.run([sys.executable, "-c", FINDER], env=environment, stdout=subprocess.PIPE,
                         text=True, check=True)
    assert run.stdout.strip() == expected
