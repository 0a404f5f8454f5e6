"""The inputs of a step, CUDA graphs with a stand-in, and how much memory the KV cache gets."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, random_prompts

from nanoengine import SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.cuda_graphs import CudaGraphs
from nanoengine.loader import load_config
from nanoengine.model_runner import ModelRunner, choose_device, choose_dtype
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import StepInputs, known_ids, step_arrays
from nanoengine_extras.cpu import memory

DTYPES = {"slot_mapping": torch.int64}  # the others are int32
TENSORS = ("slot_mapping", "token_ids", "positions", "sequence_of_token", "query_starts",
           "key_starts", "lengths", "block_tables", "logits_indices")


def make_runner(max_num_seqs: int | None = None) -> ModelRunner:
    """With CUDA graphs for so many sequences, if that is given."""
    runner: Any = object.__new__(ModelRunner)
    runner.config = EngineConfig(model="m", block_size=4, max_num_seqs=max_num_seqs)
    runner.device = "cpu"
    runner.max_model_len = 20
    runner.graphs = CudaGraphs(max_num_seqs or 1)
    if max_num_seqs:
        runner.graphs.captured = {"some": "graphs"}
    return runner


def make_batch(*rows) -> Batch:
    batch = Batch()
    for table, tokens, start, num_tokens in rows:
        params = SamplingParams(temperature=len(batch) / 2)
        seq = Sequence("", list(tokens), len(tokens), 99, params, seed=len(batch))
        seq.block_table.extend(table)
        if start + num_tokens == len(seq.token_ids):
            batch.sampled.append(Row(len(batch), seq, start + num_tokens))
        batch.sequences.append(seq)
        batch.starts.append(start)
        batch.num_tokens.append(num_tokens)
    return batch


def prepared(runner: ModelRunner, batch: Batch) -> StepInputs:
    return StepInputs.from_buffer(*runner.prepare(batch))


def test_the_inputs_of_a_step():
    batch = make_batch(([7, 3, 9], range(10, 20), 9, 1), ([5], [20, 21], 0, 2),
                       ([2, 4], range(30, 38), 3, 4))
    params = SamplingParams(top_k=7, top_p=0.5, min_p=0.25)
    batch.sampled.insert(1, Row(1, Sequence("", [1], 1, 9, params, seed=77), 2))
    buffer, shape = make_runner().prepare(batch)
    step = StepInputs.from_buffer(buffer, shape)
    assert buffer.dtype == torch.int32 and buffer.ndim == 1
    assert step.token_ids.tolist() == [19, 20, 21, 33, 34, 35, 36]
    assert step.logits_indices.tolist() == [0, 2, 2]
    assert (step.longest_query, step.longest_keys) == (4, 10)
    uniforms = [row.seq.uniform(length) for row, length in zip(batch.sampled, (10, 2, 2))]
    columns = [[0.0, 0.0, 0.0, 1.0], [1.0, 0.25, 7.0, 0.5], [0.5, 0.0, 0.0, 1.0]]
    rows = [[*row, u] for row, u in zip(columns, uniforms)]
    assert torch.stack(step.draws, dim=1).tolist() == rows
    assert [draw.tolist() for draw in step.draws.of(slice(1, 2))] == [[x] for x in rows[1]]
    assert 0 == uniforms[0] < uniforms[1] != uniforms[2] > 0
    for name in TENSORS:
        tensor = getattr(step, name)
        assert tensor.dtype == DTYPES.get(name, torch.int32)
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "a view"
    tensors = [*step.draws, *(getattr(step, name) for name in TENSORS)]
    assert all(draw.dtype == torch.float64 for draw in step.draws)
    assert sum(tensor.nbytes for tensor in tensors) == buffer.nbytes


def test_the_example_of_the_docstring():
    """What `StepInputs` says of a decode beside a chunk is what the code makes of such a batch."""
    text = StepInputs.__doc__.partition("An example")[2].partition("\n\n")[2]
    example = {name: [int(number) for number in re.findall(r"-?\d+", numbers)]
               for name, numbers in re.findall(r"([a-z_]+) {2,}([-\d \[\],|]+)", text)}
    assert example.pop("num_decodes") == [1] and example.keys() == set(TENSORS)
    batch = make_batch(([5, 2, 6], range(9, 18), 8, 1),
                       ([3, 8], [47, 48, 49, 50, 51, 52, 53, 54], 4, 3))
    _, (_, num_decodes, *_) = make_runner().prepare(batch)
    assert num_decodes == 1
    arrays = step_arrays(batch, 4, longest_keys=9)
    assert {name: arrays[name].flatten().tolist() for name in example} == example
    assert arrays["block_tables"].shape == (2, 3)


def test_a_batch_is_read_as_it_was_scheduled():
    """Its sequences may have moved on: a step depends on `starts` and `num_tokens` alone."""
    batch = make_batch(([7, 3, 9], range(10, 20), 9, 1), ([5], [20, 21], 0, 2))
    before = make_runner().prepare(batch)
    for seq in batch.sequences:
        seq.token_ids.append(99)
        seq.num_computed_tokens = len(seq.token_ids)
    after = make_runner().prepare(batch)
    assert torch.equal(before[0], after[0]) and before[1] == after[1]


def test_a_pending_token_is_looked_up_on_the_device():
    batch = make_batch(([7, 3], [10, 11, 12, 13, -3], 4, 1),
                       ([5, 6], [20, 21, 22, 23, 24, -1], 0, 6),
                       ([8, 1], [30, 31, 32, 33, 34, -2], 0, 4))
    step = prepared(make_runner(), batch)
    assert step.token_ids.tolist() == [-3, 20, 21, 22, 23, 24, -1, 30, 31, 32, 33]
    last_sampled = torch.tensor([70, 71, 72], dtype=torch.int32)
    found = known_ids(step.token_ids, last_sampled)
    assert found.tolist() == [72, 20, 21, 22, 23, 24, 70, 30, 31, 32, 33]


def test_bucket_sizes():
    assert CudaGraphs(1).sizes == [1] and CudaGraphs(3).sizes == [1, 2, 3]
    assert CudaGraphs(8).sizes == [1, 2, 4, 8]
    assert CudaGraphs(37).sizes == [1, 2, 4, 8, 16, 24, 32, 37]
    assert CudaGraphs(256).sizes[-3:] == [240, 248, 256]


def test_a_decode_step_is_filled_up_to_a_bucket():
    runner = make_runner(max_num_seqs=6)
    rows = [([7, 3, 9], range(10, 20), 9, 1), ([5], [20, 21], 1, 1), ([2], [30], 0, 1)]
    step = prepared(runner, make_batch(*rows))
    assert step.token_ids.tolist() == [19, 21, 30, 0] and step.positions.tolist() == [9, 1, 0, 0]
    assert step.slot_mapping.tolist() == [37, 21, 8, 0]
    assert step.lengths.tolist() == [10, 2, 1, 1] and step.logits_indices.tolist() == [0, 1, 2, 3]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 4] and step.longest_query == 1
    assert step.block_tables.shape == (4, 5) and step.longest_keys == 20, "room for max_model_len"
    assert step.block_tables[3].tolist() == [0] * 5
    layouts = {runner.prepare(make_batch(*rows[:count] * 2))[1] for count in (1, 2)}
    assert len(layouts) == 2 and runner.prepare(make_batch(*rows[:2]))[1] in layouts
    for other in ([([7, 3, 9], range(10, 20), 8, 2)], [([7, 3, 9], range(10, 20), 8, 1)]):
        assert prepared(runner, make_batch(*other)).block_tables.shape == (1, 3)


def test_a_new_cache_drops_the_graphs_of_the_one_before(make_llm):
    """They would write to memory that is free, and would keep their own."""
    with make_llm(num_kv_blocks=8) as llm:
        runner = llm.engine.runner
        captured = runner.graphs.captured
        captured["shape"] = "graph"
        runner.allocate(4, runner.max_model_len)
        assert captured is runner.graphs.captured and not captured
        assert len(runner.blocks) == 5


def test_the_size_of_the_cache(make_llm, tiny, monkeypatch):
    free_blocks = 256
    monkeypatch.setattr(ModelRunner, "measure_free_bytes",
                        lambda runner, longest: int((free_blocks + 0.5) * runner.block_bytes))

    def size(**options):
        with make_llm(**options) as llm:
            return llm.engine.runner.num_kv_blocks, llm.engine.runner.max_model_len

    limit = load_config(Path(tiny)).max_position_embeddings
    assert size() == (256, min(limit, 4096)), "all that is free"
    assert size(num_kv_blocks=5) == (5, 80), "what the cache allows"
    assert size(num_kv_blocks=limit) == (limit, limit), "what the model allows"
    assert size(num_kv_blocks=5, max_model_len=80) == (5, 80)
    with pytest.raises(ValueError, match=f"max_model_len={limit + 1} .* 2 to {limit}"):
        size(num_kv_blocks=limit, max_model_len=limit + 1)
    with pytest.raises(ValueError, match=r"max_model_len=81 .* 2 to 80 \(5 blocks"):
        size(num_kv_blocks=5, max_model_len=81)
    free_blocks = 0
    check_refused(r"2 to 0 \(0 blocks", size)


def test_logits_are_made_for_no_more_rows_than_were_measured(make_llm):
    """However many completions and scored tokens a step has."""
    params = [SamplingParams(n=1 + 5 * (i % 2), seed=i, max_tokens=4, logprobs=i, top_p=1 - i / 9,
                             prompt_logprobs=i or None) for i in range(4)]
    prompts = random_prompts([30, 9, 12, 40])
    found, sizes = [], []
    for max_num_seqs in (64, 3):
        with make_llm(max_num_seqs=max_num_seqs) as llm:
            sizes.clear()
            llm.engine.runner.model.lm_head.register_forward_hook(
                lambda module, inputs, logits: sizes.append(len(logits)))
            found.append([(output.outputs, output.prompt_logprobs)
                          for output in llm.generate(prompts, params, use_tqdm=False)])
            assert max(sizes) == min(72, max_num_seqs + 32)
    assert found[0] == found[1]


@pytest.mark.parametrize("flags, dtype", [
    ("avx2 avx512_bf16", "torch.bfloat16"), ("avx2 avx512f", "torch.float32"),
])
def test_dtype(monkeypatch, flags, dtype):
    monkeypatch.setattr(memory, "read_system", {"cpuinfo": f"flags\t\t: {flags}\n"}.get)
    assert str(choose_dtype("auto", "cpu")) == dtype
    assert str(choose_dtype("auto", "cuda")) == "torch.bfloat16"
    assert str(choose_dtype("float32", "cuda")) == str(choose_dtype("float", "cpu"))


def test_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    check_refused("device='cuda' .* no GPU", choose_device, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == "cuda"
    # asking PyTorch can keep forks of this process from using a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a CPU was asked for"))
    assert choose_device("cpu") == "cpu"
