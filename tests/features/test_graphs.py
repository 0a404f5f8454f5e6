"""CUDA graphs with narrow tables, and with the longest sequences first."""

from typing import Any

import pytest
import torch
from conftest import random_prompts, slow
from fake_gpu import splits_of_keys
from test_gpu_path import BOTH, PROMPTS, Engines, Patch, check_no_host_reads, check_same

from nanoengine import SamplingParams
from nanoengine.sequence import Batch
from nanoengine.step_inputs import StepInputs
from nanoengine_extras.running.graphs import widths


@pytest.fixture(scope="module")
def engines():
    return Engines()


def test_graphs_compute_long_sequences_first(engines, tiny, monkeypatch):
    """And nothing else is in another order: batches, draws and tokens."""
    engine = engines.get(tiny, run_ahead=True)
    graphs = engine.llm.engine.runner.graphs
    given, lengths = [], []
    fit, replay = graphs.fit, graphs.replay

    def note_batch(batch: Batch, *others: int) -> Any:
        given.append([start + 1 for start in batch.starts])
        assert batch.sequences == [row.seq for row in batch.sampled]
        return fit(batch, *others)

    def note_inputs(buffer: torch.Tensor, shape: Any) -> Any:
        lengths.append(StepInputs.from_buffer(buffer, shape).lengths.tolist())
        return replay(buffer, shape)

    monkeypatch.setattr(graphs, "fit", note_batch)
    monkeypatch.setattr(graphs, "replay", note_inputs)
    outputs = engine.generate(PROMPTS, BOTH)
    check_same(outputs, engines.reference(tiny, "both", PROMPTS, BOTH))
    assert len(given) == len(lengths) >= 5 and given[0] != sorted(given[0], reverse=True)
    for of_batch, of_graph in zip(given, lengths):
        padding = [1] * (len(of_graph) - len(of_batch))
        assert of_graph == sorted(of_batch + padding, reverse=True)


@pytest.mark.parametrize("num_seqs, num_keys, wide, now", [
    (1, 1000, 8, 1), (1, 4000, 11, 2), (4, 1000, 8, 2), (4, 4000, 32, 10), (24, 4000, 32, 16),
    (32, 1000, 8, 8)])
def test_short_sequences_have_narrow_tables(num_seqs, num_keys, wide, now):
    """How many blocks of 128 keys a core of an H100 reads in turn, with 8 heads of keys and the
    40,960 tokens of Qwen3: flash-attn splits the keys by the width of the table."""
    def in_turn(width: int) -> int:
        num_splits = splits_of_keys(8 * num_seqs, 1, width, 128)
        return min(-(-width // (128 * num_splits)), -(-num_keys // 128))

    chosen = min(width for width in widths(num_seqs, 40_960) if width >= num_keys)
    assert in_turn(40_960) == wide and in_turn(chosen) == now


@pytest.mark.parametrize("run_ahead", [slow(False), True])
def test_graphs_of_all_widths_give_the_same_tokens(engines, make_model, run_ahead):
    """A sequence grows from one width to the next, beside short ones."""
    patient, _ = make_model(num_hidden_layers=1, max_position_embeddings=9000,
                            num_attention_heads=1, num_key_value_heads=1)
    options = dict(max_model_len=9000, max_num_batched_tokens=4096, num_kv_blocks=120)
    prompts = random_prompts([2044, 3, 30, 8190])
    params = [SamplingParams(seed=n, temperature=0.7 * (n % 2), max_tokens=9) for n in range(4)]
    engine = engines.get(patient, run_ahead=run_ahead, max_num_seqs=3, **options)
    graphs = engine.llm.engine.runner.graphs
    assert len(graphs.captured) == 3 * len(graphs.sizes)
    used = []

    def replay(buffer: torch.Tensor, shape: Any) -> Any:
        used.append(shape.longest_keys)
        return type(graphs).replay(graphs, buffer, shape)

    with Patch.context() as patch:
        patch.setattr(graphs, "replay", replay)
        outputs = engine.generate(prompts, params)
    check_same(outputs, engines.reference(patient, "widths", prompts, params, **options))
    check_no_host_reads(engine.gpu)
    assert {*used} == {2048, 8192, 9000}
