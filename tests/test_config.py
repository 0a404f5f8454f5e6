"""The options of the engine and of sampling: what is refused, and what the message says."""

import math

import numpy as np
import pytest
import torch

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.config import EngineConfig


@pytest.mark.parametrize("name, value, accepted", [
    ("n", 0, "greater than or equal to 1"),
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", "hot", "number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 2, "less than or equal to 1"),
    ("top_k", -2, "greater than or equal to -1"),
    ("top_k", 1.5, "integer"),
    ("min_p", 1.1, "less than or equal to 1"),
    ("seed", 0.5, "integer"),
    ("max_tokens", 0, "greater than or equal to 1"),
    ("max_tokens", 2.5, "integer"),
    ("max_tokens", True, "integer"),
    ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens"),
    ("min_tokens", -1, "min_tokens must be greater than or equal to 0"),
    ("stop", "", "at least 1 character"),
    ("stop", ["a", ""], "at least 1 character"),
    ("stop", [3], "string"),
    ("stop_token_ids", [-1], "greater than or equal to 0"),
    ("logprobs", -2, "greater than or equal to -1"),
    ("presence_penalty", 3, "less than or equal to 2"),
    ("repetition_penalty", 0, "greater than 0"),
    ("allowed_token_ids", [], "at least 1 item"),
    ("allowed_token_ids", [-1], "greater than or equal to 0"),
    ("logit_bias", {1: math.nan}, "finite"),
    ("logits_processors", [3], "callable"),
    ("ignore_eos", 2, "boolean"),
    ("temprature", 0.5, "Unexpected keyword"),
])
def test_bad_sampling_params(name, value, accepted):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value) and accepted in str(error.value)


def test_sampling_params_are_checked_when_changed_too():
    params = SamplingParams()
    with pytest.raises(ValueError, match="top_p"):
        params.top_p = 2
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_several_greedy_completions_would_be_the_same():
    with pytest.raises(ValueError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2).n == 2


@pytest.mark.parametrize("name, value, accepted", [
    ("beam_width", 0, "greater than or equal to 1"),
    ("max_tokens", 0, "greater than or equal to 1"),
    ("max_tokens", None, "integer"),
    ("temperature", -1, "greater than or equal to 0"),
    ("length_penalty", math.nan, "finite"),
    ("early_stopping", True, "Unexpected keyword"),
])
def test_bad_beam_search_params(name, value, accepted):
    with pytest.raises(ValueError) as error:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | {name: value})
    assert name in str(error.value) and accepted in str(error.value)


def test_shorthands_and_numpy_numbers():
    params = SamplingParams(stop="a", stop_token_ids=None, max_tokens=np.int64(3),
                            temperature=np.float32(0.5))
    assert params.stop == ["a"] and params.stop_token_ids == []
    assert type(params.max_tokens) is int and params.temperature == 0.5
    assert SamplingParams().stop is not SamplingParams().stop
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=-2).seed == -2


@pytest.mark.parametrize("name, value, accepted", [
    ("scheduling", "mixd", "'prefill-first', 'mixed' or 'static'"),
    ("scheduling_policy", "lifo", "'fcfs' or 'priority'"),
    ("kv_allocation", "all", "'on-demand', 'reserve' or 'max-length'"),
    ("preemption_mode", "drop", "'recompute' or 'swap'"),
    ("preemption_victim", "oldest", "'youngest', 'longest', 'lowest-priority', 'least-rec"),
    ("max_waiting", -1, "greater than or equal to 0"),
    ("swap_space", -0.5, "greater than or equal to 0"),
    ("swap_space", math.inf, "finite"),
    ("trace", 1, "boolean"),
    ("dtype", "int8", "'float32' or 'float'"),
    ("dtype", torch.float64, "'float32' or 'float'"),
    ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
    ("attention_backend", "flash", "'numba', 'flash-attn', 'varlen' or 'gather'"),
    ("run_ahead", 1, "boolean"),
    ("load_format", "pickle", "'dummy'"),
    ("block_size", 0, "greater than or equal to 1"),
    ("num_kv_blocks", 1.5, "integer"),
    ("max_model_len", 1, "greater than or equal to 2"),
    ("gpu_memory_utilization", 1.5, "less than or equal to 1"),
    ("enable_prefix_caching", "yes", "boolean"),
    *[(name, 1, "Unexpected keyword") for name in (
        "trust_remote_code", "tensor_parallel_size")],
])
def test_bad_engine_options(bundled, name, value, accepted):
    with pytest.raises(ValueError) as error:
        LLM(bundled, **{name: value})
    assert name in str(error.value) and accepted in str(error.value)


def test_the_token_budget_and_the_number_of_sequences_follow_each_other():
    assert EngineConfig(model="m").limits() == (256, 2048)
    assert EngineConfig(model="m", max_num_batched_tokens=7).limits() == (7, 7)
    assert EngineConfig(model="m", max_num_seqs=5000).limits() == (5000, 5000)
    assert EngineConfig(model="m", max_num_seqs=3, max_num_batched_tokens=9).limits() == (3, 9)
    with pytest.raises(ValueError, match="max_num_batched_tokens=8 .* at least max_num_seqs=9"):
        LLM("not looked for", max_num_seqs=9, max_num_batched_tokens=8)


def test_dtypes_by_name_or_object():
    for dtype in ("bfloat16", torch.bfloat16):
        assert EngineConfig(model="m", dtype=dtype).dtype == "bfloat16"
