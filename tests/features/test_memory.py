"""How much memory is left for the KV cache; for a GPU, the largest step, which is tried."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nanoengine import LLM
from nanoengine.config import EngineConfig
from nanoengine.cuda_graphs import CudaGraphs
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature, Features
from nanoengine_extras import ALWAYS
from nanoengine_extras.running.memory import AllWritten, largest_batch


def test_the_free_memory_of_a_cpu(tiny, monkeypatch):
    memory = SimpleNamespace(available=2**22, total=2**24)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with LLM(tiny, dtype="float32", block_size=16) as llm:
        runner = llm.engine.runner
        assert runner.num_kv_blocks == 2**20 // runner.block_bytes, "a quarter"
    with LLM(tiny, dtype="float32", block_size=16, max_num_seqs=2, max_model_len=33) as llm:
        assert llm.engine.runner.num_kv_blocks == 6, "what two sequences of three blocks can use"


@pytest.mark.parametrize("max_num_seqs, max_num_batched_tokens, max_model_len, expected", [
    (8, 8, 600, [8]), (8, 2048, 600, [512] * 4), (2, 8192, 600, [600] * 2), (1, 1, 5, [1]),
    (256, 8192, 40_960, [8192])])
def test_the_largest_step(max_num_seqs, max_num_batched_tokens, max_model_len, expected):
    config = EngineConfig(model="m", max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens)
    runner: Any = object.__new__(ModelRunner)
    runner.config, runner.max_model_len = config, max_model_len
    runner.features = Features(ALWAYS)
    batch = largest_batch(runner)
    assert batch.num_tokens == expected and len(batch.sampled) == max_num_seqs
    graphs: Any = CudaGraphs(max_num_seqs)
    graphs.captured = {"some": "graphs"}
    assert not graphs.can_replay(batch) or max_num_batched_tokens == 1, "no graph takes it over"
    assert {start + count for start, count in zip(batch.starts, expected)} == {max_model_len}
    (edits,) = {row.seq.edits + row.seq.params.truncations for row in batch.sampled}
    assert edits == ("Logprobs", "Constraints", "min_p", "top_p"), "with a whole sort"
    assert all(type(runner.features[each]) is not Feature for each in ("Logprobs", "Constraints"))
    assert {row.seq.params.logprobs for row in batch.sampled} == {20}


def test_the_largest_step_is_tried_before_the_cache_has_its_size(tiny, monkeypatch):
    """As on a GPU: what is left beside it is measured."""
    def measure_free_bytes(runner):
        runner.allocate(num_blocks=0)
        batch = largest_batch(runner)
        launched = runner.launch(batch)
        assert len(launched.wait()) == 4 and runner.blocks.nbytes == runner.block_bytes
        return 9 * runner.block_bytes + 1

    monkeypatch.setattr(ModelRunner, "measure_free_bytes", measure_free_bytes)
    with LLM(tiny, dtype="float32", block_size=16, max_num_seqs=4) as llm:
        assert llm.engine.runner.num_kv_blocks == 9


def test_all_of_the_cache_is_written_at_the_start(tiny):
    """An operation on its memory raises the number of its version."""
    versions = []
    for own in ([], [AllWritten()]):
        with LLM(tiny, dtype="float32", block_size=16, num_kv_blocks=8, features=own) as llm:
            versions.append(llm.engine.runner.blocks._version)
            assert not llm.engine.runner.blocks.any()
    assert versions[1] == versions[0] + 1
