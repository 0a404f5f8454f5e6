"""The options of the engine and of sampling, and their defaults. What strict.py refuses has tests
in features/test_strict.py."""

import dataclasses
import importlib.metadata
import inspect
import itertools
import re
from pathlib import Path

import pytest
from conftest import check_refused, policies_of

import nanoengine
from nanoengine import LLM, SamplingParams
from nanoengine.config import EngineConfig


def test_several_greedy_completions_would_be_the_same():
    check_refused("n=2 .* 1 with temperature=0", SamplingParams, n=2, temperature=0)
    assert SamplingParams(n=2).n == 2


def test_the_signature_of_an_llm_has_all_options():
    parameters = inspect.signature(LLM).parameters
    assert [*parameters] == [field.name for field in dataclasses.fields(EngineConfig)]
    model, *options = parameters.values()
    assert model.kind == model.POSITIONAL_OR_KEYWORD
    assert all(option.kind == option.KEYWORD_ONLY for option in options)


def test_the_version_is_that_of_the_package():
    assert nanoengine.__version__ == importlib.metadata.version("nanoengine")
    assert (Path(nanoengine.__file__).parent / "py.typed").is_file()


def test_the_token_budget_and_the_number_of_sequences_follow_each_other():
    for device, budget in (("cpu", 2048), ("cuda", 8192)):
        for given, limits in (
                (dict(), (256, budget)), (dict(max_num_batched_tokens=7), (7, 7)),
                (dict(max_num_seqs=50_000), (50_000, 50_000)), (dict(max_num_seqs=3), (3, budget)),
                (dict(max_num_seqs=3, max_num_batched_tokens=9), (3, 9)),
                (dict(max_num_seqs=None, max_num_batched_tokens=None), (256, budget))):
            config = EngineConfig(model="m", device=device, **given)
            assert (config.max_num_seqs, config.max_num_batched_tokens) == limits
    with pytest.raises(ValueError, match="max_num_batched_tokens=8 .* at least max_num_seqs=9"):
        LLM("not looked for", max_num_seqs=9, max_num_batched_tokens=8)


def test_what_is_given_is_kept_on_any_device():
    given = dict(block_size=16, max_num_batched_tokens=300, max_num_seqs=7, scheduling="static")
    for device, run_ahead in itertools.product(("cpu", "cuda"), (False, True)):
        config = EngineConfig(model="m", device=device, run_ahead=run_ahead, **given)
        assert config.run_ahead is run_ahead
        assert given.items() <= dataclasses.asdict(config).items()


def test_a_config_is_whole_cannot_be_changed_and_can_be_made_anew_with_changes():
    config = EngineConfig(model="m", device="cpu", max_num_seqs=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 16
    changed = dataclasses.replace(config, kv_allocation="reserve", block_size=16)
    assert (config.kv_allocation, config.block_size) == ("on-demand", 32)
    assert dataclasses.asdict(changed) == dataclasses.asdict(config) | dict(
        kv_allocation="reserve", block_size=16)
    for bad in (dict(block_size=0), dict(max_num_seqs=4000), dict(blocks=3)):
        with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
            dataclasses.replace(config, **bad)


def test_the_policies_of_the_config_are_those_of_the_scheduler():
    for name in ("scheduling", "preemption_victim", "kv_allocation"):
        table = policies_of(name)
        for policy in (*table, *table.values(), lambda *arguments: None):
            assert getattr(EngineConfig(model="m", **{name: policy}), name) == policy
        with pytest.raises(ValueError) as error:
            EngineConfig(model="m", **{name: "none"})
        assert {"none", *table} <= set(re.findall(r"'([a-z-]+)'", str(error.value)))
