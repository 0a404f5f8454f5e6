"""What the GPU path costs, counted on a GPU that is not there (`fake_gpu.py`), at real shapes.

Kernels of a step, memory of graphs, pinned memory: each has a limit.
"""

import json
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_prompts
from fake_gpu import HAS_TRITON, FakeGpu

from nanoengine import LLM, SamplingParams
from nanoengine.cuda_graphs import padded
from nanoengine.sequence import Batch
from nanoengine_extras.models import dummy
from nanoengine_extras.running.tensor_parallel import RankRunner

CONFIG = Path(__file__).parent.parent / "models" / "qwen3-0.6b" / "config.json"
PLAIN = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
             max_num_seqs=16, num_kv_blocks=40, run_ahead=False, device="cuda")
NUM_SEQS, LENGTH, VOCABULARY = 16, 50, 8192
# in bytes, of a layer of Qwen3-0.6B
WEIGHTS = 2 * (1024 * 4096 + 2048 * 1024 + 1024 * 6144 + 3072 * 1024 + 2 * 1024 + 2 * 128)


@pytest.fixture(autouse=True)
def random_weights(monkeypatch):
    """Without a generator on the GPU."""
    def fill(model: Any, *others: Any) -> None:
        for parameter in model.parameters():
            parameter.normal_(std=0.02)

    monkeypatch.setattr(dummy, "fill", fill)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Qwen3-0.6B with few layers and a small vocabulary."""
    def make(num_layers: int) -> str:
        folder = tmp_path_factory.mktemp("model")
        config = json.loads(CONFIG.read_text()) | {
            "num_hidden_layers": num_layers, "vocab_size": VOCABULARY,
            "layer_types": ["full_attention"] * num_layers}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
    return make


def decode_step(folder: str, params: dict[str, Any], library: bool = HAS_TRITON) -> list[str]:
    """The kernels of one decode step."""
    with FakeGpu(num_bytes=2**33, library=library) as gpu:
        with LLM(folder, **PLAIN | dict(enforce_eager=True)) as llm:
            llm.add(random_prompts([LENGTH - 2] * NUM_SEQS),
                    SamplingParams(max_tokens=8, ignore_eos=True, **params))
            for _ in range(3):
                gpu.reset_counters()
                llm.step()
            return gpu.kernels


@pytest.mark.parametrize("library, most", [(HAS_TRITON, 9), (False, 61)])
def test_kernels_of_a_layer(folder, library, most):
    one, two = (Counter(decode_step(folder(num_layers), dict(temperature=0), library=library))
                for num_layers in (1, 2))
    assert 9 <= (two - one).total() <= most, two - one


@pytest.mark.parametrize("params, most", [
    ({}, 10), (dict(top_k=20, top_p=0.95), 20), (dict(top_p=0.95), 20), (dict(min_p=0.1), 20)],
    ids=str)
def test_kernels_of_sampling(folder, params, most):
    """Few of them; nothing sorts all logits."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    launched = decode_step(folder(1), dict(temperature=0.6, **params))
    behind = launched[len(launched) - launched[::-1].index("aten::mm"):]
    assert len(behind) <= most and "aten::sort" not in behind, behind


def test_graphs_keep_no_logits_and_their_warm_up_reads_one_key(folder):
    with FakeGpu(num_bytes=2**33) as gpu, LLM(folder(1), **PLAIN) as llm:
        runner = llm.engine.runner
        kept = [hidden for _, _, hidden in runner.graphs.captured.values()]
        assert [len(hidden) for hidden in kept] == [16, 8, 4, 2, 1]
        assert {hidden.shape[1:] for hidden in kept} == {(1024,)}
        inputs = [step.buffer.nbytes for _, step, _ in runner.graphs.captured.values()]
        assert sum(inputs) < 10_000 and gpu.num_graphs == len(kept)
        # the first runs, of sequences with one key
        assert gpu.kernels.count("decode_kernel") == len(kept)
        for _, step, _ in runner.graphs.captured.values():
            assert {*step.lengths.tolist()} == {1}


def test_pinned_memory_is_as_large_as_asked_for(folder):
    """PyTorch's own allocator would take the next power of two."""
    options = PLAIN | dict(enforce_eager=True)
    for asked in (dict(preemption_mode="swap", swap_space=5 / 1024),
                  dict(cpu_offload_gb=0.001)):
        with FakeGpu(num_bytes=2**33) as gpu, LLM(folder(1), **options | asked):
            most = 5 * 2**20 if "swap_space" in asked else WEIGHTS
            assert 0.7 * most < gpu.pinned_bytes.total() <= most + 1000
        assert gpu.pinned_bytes.total() == 0


def test_a_trace_holds_no_pinned_memory(folder):
    with FakeGpu(num_bytes=2**33), LLM(folder(1), **PLAIN | dict(trace=True)) as llm:
        llm.generate(random_prompts([20, 30]), SamplingParams(max_tokens=5), use_tqdm=False)
        assert len(llm.trace) >= 5
        for step in llm.trace:
            assert not any(isinstance(value, torch.Tensor) for value in vars(step).values())
            assert len(step.tokens) == len(step.batch.sampled)
            assert all(type(token) is int for token in step.tokens)


def test_another_rank_does_not_wait_for_its_inputs(folder):
    """A message is in memory that is not pinned."""
    done = SimpleNamespace(wait=lambda: None)
    with FakeGpu(num_bytes=2**33) as gpu, LLM(folder(1), **PLAIN) as llm:
        runner = llm.engine.runner
        runner.group = SimpleNamespace(
            backend=SimpleNamespace(broadcast=lambda tensors: done),
            finish=lambda work: work.wait())
        batch = padded(Batch(), 4)
        buffer, shape = runner.prepare(batch)
        gpu.reset_counters()
        RankRunner.follow(runner, batch.copies, buffer.clone().numpy(), shape)
        assert gpu.num_replays == 1 and not gpu.host_reads


@pytest.mark.slow
def test_graphs_are_destroyed_before_the_ranks_end(tiny):
    """NCCL waits for graphs that use its communicator; also without a call of `close`."""
    order = []

    class Graph:
        def __del__(self) -> None:
            order.append("graph")

    for is_closed in (True, False):
        llm = LLM(tiny, tensor_parallel_size=2, dtype="float32", block_size=16, num_kv_blocks=100)
        runner = llm.engine.runner
        runner.graphs.captured["shape"] = Graph()
        close = runner.ranks.close
        runner.ranks.close = lambda close=close: (order.append("ranks"), close())
        assert isinstance(runner.end, weakref.finalize) and runner.end.atexit
        del runner
        if is_closed:
            llm.close()
        del llm
        assert order == ["graph", "ranks"]
        order.clear()


def test_ranks_need_the_first_gpu_as_the_current_one(tiny, monkeypatch):
    """Rank 1 takes GPU 1: two ranks would share it."""
    for name, value in dict(is_available=True, device_count=2, current_device=1).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(ValueError, match=r"torch.cuda.current_device\(\)=1 .* 0 with several"):
        LLM(tiny, tensor_parallel_size=2, device="cuda", dtype="float32")
