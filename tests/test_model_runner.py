"""The inputs of a step, and how much memory the KV cache gets."""

import psutil
import pytest

from nanoengine import model_runner
from nanoengine.config import EngineConfig
from nanoengine.model_runner import ModelRunner, choose_dtype, size_cache
from nanoengine.scheduler import Batch
from nanoengine.sequence import Sequence


def test_the_inputs_of_a_step():
    runner = object.__new__(ModelRunner)
    runner.block_size = 4
    batch = Batch(100)
    for table, tokens, computed, num_tokens in [
        ([7, 3, 9], range(10, 20), 9, 1), ([5], [20, 21], 0, 2), ([2, 4], range(30, 38), 3, 4),
    ]:
        seq = Sequence("", list(tokens), len(tokens), 99)
        seq.block_table.extend(table)
        seq.num_computed_tokens = computed
        batch.sequences.append(seq)
        batch.num_tokens.append(num_tokens)
    batch.sampled = [(row, batch.sequences[row]) for row in (0, 1, 1)]
    step = runner.prepare(batch)
    assert step.token_ids.tolist() == [19, 20, 21, 33, 34, 35, 36]
    assert step.positions.tolist() == [9, 0, 1, 3, 4, 5, 6]
    assert step.owners.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert step.slots.tolist() == [37, 20, 21, 11, 16, 17, 18]
    assert step.block_tables.tolist() == [[7, 3, 9], [5, 0, 0], [2, 4, 0]]
    assert step.sampled_rows.tolist() == [0, 2, 2]
    assert {str(tensor.dtype) for tensor in vars(step).values()} == {"torch.int32"}


def size(model_limit=1000, block_bytes=2**20, **options):
    return size_cache(EngineConfig(model="m", **options), model_limit, block_bytes)


def test_the_size_of_the_cache(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**30}))
    assert size() == (256, 1000), "a quarter of the free memory"
    assert size(max_num_seqs=2, max_model_len=33) == (6, 33), "two sequences of three blocks"
    assert size(num_kv_blocks=5) == (5, 80), "what the cache allows"
    assert size(num_kv_blocks=500, block_size=8) == (500, 1000), "what the model allows"
    with pytest.raises(ValueError, match="max_model_len=1001 .* at most 1000"):
        size(max_model_len=1001)
    with pytest.raises(ValueError, match="max_model_len=81 .* at most 80, .*5 blocks of 16 tokens"):
        size(max_model_len=81, num_kv_blocks=5)
    with pytest.raises(ValueError, match="at most 0"):
        size(block_bytes=2**30)


@pytest.mark.parametrize("features, dtype", [
    ({"avx512bf16": True}, "torch.bfloat16"), ({"avx512bf16": False}, "torch.float32"),
])
def test_dtype(monkeypatch, features, dtype):
    monkeypatch.setattr(model_runner, "get_host_cpu_features", lambda: features)
    assert str(choose_dtype("auto")) == dtype
    assert str(choose_dtype("float32")) == "torch.float32"
