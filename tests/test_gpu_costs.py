"""What the GPU path costs, counted on a GPU that is not there (`fake_gpu.py`), at real shapes.

Kernels and bytes of a step, memory of graphs, pinned memory: each has a limit.
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

from nanoengine import LLM, SamplingParams, sampler
from nanoengine.cuda_graphs import padded
from nanoengine.kernels import kernels
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import Draws, draws_of
from nanoengine_extras.models import dummy
from nanoengine_extras.running.tensor_parallel import RankRunner

CONFIG = Path(__file__).parent.parent / "models" / "qwen3-0.6b" / "config.json"
PLAIN = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
             max_num_seqs=16, num_kv_blocks=40, run_ahead=False, device="cuda")
NUM_SEQS, LENGTH, VOCABULARY = 16, 50, 8192
# in bytes, for a layer of Qwen3-0.6B: its weights, and K and V of a token
WEIGHTS = 2 * (1024 * 4096 + 2048 * 1024 + 1024 * 6144 + 3072 * 1024 + 2 * 1024 + 2 * 128)
OF_TOKEN = 2 * 2 * 8 * 128


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


def decode_step(folder: str, params: dict[str, Any], **options: Any) -> list[tuple[str, int]]:
    """The kernels of one decode step."""
    library = options.pop("library", HAS_TRITON)
    with FakeGpu(num_bytes=2**33, library=library) as gpu:
        with LLM(folder, **PLAIN | dict(enforce_eager=True) | options) as llm:
            llm.add(random_prompts([LENGTH - 2] * NUM_SEQS),
                    SamplingParams(max_tokens=8, ignore_eos=True, **params))
            for _ in range(3):
                gpu.reset_counters()
                llm.step()
            return gpu.kernels


@pytest.mark.parametrize("library, backend, most", [
    (True, "flash-attn", 9), pytest.param(True, "triton", 9, marks=pytest.mark.slow),
    (False, "flash-attn", 61)])
def test_kernels_and_bytes_of_a_layer(folder, library, backend, most):
    if library and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    one, two = (decode_step(folder(num_layers), dict(temperature=0), library=library,
                            attention_backend=backend) for num_layers in (1, 2))
    of_layer = Counter(name for name, _ in two) - Counter(name for name, _ in one)
    assert 9 <= sum(of_layer.values()) <= most, of_layer
    num_bytes = sum(count for _, count in two) - sum(count for _, count in one)
    least = WEIGHTS + NUM_SEQS * LENGTH * OF_TOKEN
    assert least < num_bytes < (1.05 if library else 2.5) * least


@pytest.mark.parametrize("params, most", [
    ({}, 1.5), (dict(top_k=20, top_p=0.95), 24), (dict(top_p=0.95), 24), (dict(min_p=0.1), 15)],
    ids=str)
def test_bytes_of_sampling(folder, params, most):
    """In float32 matrices of logits, each read or written; nothing sorts all logits.

    Without the library it would be 15, 41, 42 and 18 of them.
    """
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    launched = decode_step(folder(1), dict(temperature=0.6, **params))
    (start,) = [place for place, (name, _) in enumerate(launched) if name == "aten::mm"][-1:]
    # without the weights of lm_head
    moved = sum(count for _, count in launched[start + 1:])
    matrix = NUM_SEQS * VOCABULARY * 4
    assert matrix < moved < most * matrix, (moved / matrix, launched[start + 1:])
    assert not {"aten::sort"} & {name for name, _ in launched[start:]}


def test_plain_sampling_of_a_vocabulary_of_152k():
    """At most 0.2 GB for 256 rows, where a float32 matrix would be 0.16 GB; few launches."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    rows, size = 16, 151_936
    logits = torch.randn(rows, size).bfloat16()
    params = SamplingParams(temperature=0.6)
    seqs = [Sequence("", [1], 1, 9, params, seed=n) for n in range(rows)]
    draws = torch.tensor([draws_of(Row(0, seq, 1)) for seq in seqs], dtype=torch.float64).T
    pending = torch.zeros(1, dtype=torch.int32)
    expected = sampler.sample(logits, Draws(*draws), seqs, pending, {})
    with FakeGpu() as gpu:
        inputs = logits.to("cuda"), Draws(*draws.contiguous().to("cuda")), seqs, pending.to("cuda")
        gpu.reset_counters()
        found = sampler.sample(*inputs, {}, kernels("cuda"))
        moved = sum(count for _, count in gpu.kernels)
        assert not gpu.host_reads and len(gpu.kernels) <= 10, gpu.kernels
        assert torch.equal(found.cpu(), expected)
    assert 2 * logits.nbytes < moved < 0.2e9 * rows / 256


def test_graphs_keep_no_logits_and_their_warm_up_reads_one_key(folder):
    with FakeGpu(num_bytes=2**33) as gpu, LLM(folder(1), **PLAIN) as llm:
        runner = llm.engine.runner
        kept = [hidden for _, _, hidden in runner.graphs.captured.values()]
        assert [len(hidden) for hidden in kept] == [16, 8, 4, 2, 1]
        assert {hidden.shape[1:] for hidden in kept} == {(1024,)}
        inputs = [step.buffer.nbytes for _, step, _ in runner.graphs.captured.values()]
        assert sum(inputs) < 10_000 and gpu.num_graphs == len(kept)
        read = [count for name, count in gpu.kernels if name == "decode_kernel"]
        # queries and results, and for each sequence K and V of one key
        assert len(read) == len(kept) and max(read) < 16 * (2 * 2 * 2048 + 2 * OF_TOKEN)


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
