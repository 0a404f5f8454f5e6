"""The engine's GPU path on a GPU that is not there: see `fake_gpu.py`.

Tokens must be those of an engine that takes no short cuts: eager, two sequences at a time, each
step waited for. In float32 they must be those of the engine on a CPU. Faults that are put in on
purpose show that the tests can fail.
"""

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import check_idle, overtaking, random_prompts, slow
from fake_gpu import HAS_TRITON, FakeGpu, FakeGraph, GpuError
from safetensors.torch import load_file, save_file

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.cuda_graphs import padded
from nanoengine.model_runner import ModelRunner
from nanoengine.sequence import Batch
from nanoengine.step_inputs import Launched

Patch = pytest.MonkeyPatch

PROMPTS = random_prompts([1, 40, 254, 257, 20, 20, 90])
# with a block that two steps share, and prompts that begin alike
LONG_PROMPTS = random_prompts([1, 40, 250, 251, 257, 300, 20])
SMALL = dict(dtype="bfloat16", max_model_len=400, max_num_seqs=8, num_kv_blocks=60,
             attention_backend="flash-attn")
PLAIN = dict(enforce_eager=True, run_ahead=False, max_num_seqs=2)
EXACT = dict(dtype="float32", attention_backend="gather", block_size=16, num_kv_blocks=600)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
DRAWN = [SamplingParams(seed=n, max_tokens=4 + n, temperature=0.5 + 0.1 * n) for n in range(7)]
BOTH = [SamplingParams(seed=n, max_tokens=3 + n, temperature=0.6 * (n % 3)) for n in range(7)]
KINDS: dict[str, Any] = {"greedy": GREEDY, "drawn": DRAWN, "both": BOTH}
LONG = SamplingParams(seed=5, temperature=0.7, max_tokens=10)


# --------------------------------------------------------------------------- engines under test


@dataclasses.dataclass
class Engine:
    """An LLM, and the fake GPU that it lives on, None for the CPU."""

    llm: LLM
    gpu: FakeGpu | None

    def generate(self, prompts: Any, params: Any, keep_cache: bool = False) -> list:
        """The outputs. Afterwards `gpu` has counted what happened in these steps alone."""
        with self.gpu or nullcontext():
            if not keep_cache:
                self.llm.reset_prefix_cache()
            if self.gpu:
                self.gpu.reset_counters()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            check_idle(self.llm)
        return outputs


def make_engine(folder: str, device: str = "cuda", library: bool = HAS_TRITON,
                **options: Any) -> Engine:
    """library: whether nanoengine_extras.gpu is there."""
    gpu = FakeGpu(library=library) if device == "cuda" else None
    with gpu or nullcontext():
        return Engine(LLM(folder, device=device, **SMALL | options), gpu)


class Engines:
    """Engines by folder and options, and references; each is made when it is first asked for."""

    def __init__(self) -> None:
        self.get = cache(make_engine)
        self.references: dict[Any, list] = {}

    def reference(self, folder: str, name: str, prompts: Any, params: Any, **options: Any) -> list:
        """What an engine without short cuts generates. The name stands for prompts and params."""
        key = folder, name, tuple(sorted(options.items()))
        if key not in self.references:
            engine = self.get(folder, **PLAIN | options)
            self.references[key] = engine.generate(prompts, params)
        return self.references[key]


@pytest.fixture(scope="module")
def engines():
    return Engines()


def tokens_of(outputs: list) -> list:
    return [[(completion.token_ids, completion.finish_reason) for completion in output.outputs]
            for output in outputs]


def all_of(outputs: list) -> list:
    """Tokens and log-probabilities, to the last bit."""
    logprobs = [([completion.logprobs for completion in output.outputs], output.prompt_logprobs)
                for output in outputs]
    return [tokens_of(outputs), logprobs]


def check_same(outputs: list, expected: list) -> None:
    for number, (left, right) in enumerate(zip(tokens_of(outputs), tokens_of(expected))):
        assert left == right, f"the tokens of prompt {number} are {left}, and should be {right}"
    assert all_of(outputs) == all_of(expected), "other log-probabilities"


def check_no_host_reads(gpu: FakeGpu) -> None:
    assert not gpu.host_reads, f"the host has waited: {dict(gpu.host_reads)}"


def needs(backend: str) -> None:
    if backend == "varlen" and torch.__version__ < "2.12":
        pytest.skip("PyTorch's varlen kernel takes block tables from 2.12 on")
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")


# ------------------------------------------------------------------------------ plain steps


def with_kinds(cases: list[tuple], *all_of: tuple) -> list:
    """Each case with "both", and these with all kinds; the rest is slow."""
    return [pytest.param(*case, kind, marks=() if kind == "both" or case in all_of
                         else pytest.mark.slow) for case in cases for kind in KINDS]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("backend, enforce_eager, kind", with_kinds([
    ("flash-attn", False), ("flash-attn", True), ("triton", False), ("triton", True),
    ("varlen", False), ("varlen", True), ("gather", False)],
    ("flash-attn", False)))
def test_backends_graphs_and_running_ahead(engines, tiny, backend, enforce_eager, run_ahead, kind):
    needs(backend)
    engine = engines.get(tiny, attention_backend=backend, enforce_eager=enforce_eager,
                         run_ahead=run_ahead)
    # gather rounds in other places than the two kernels
    like = "gather" if backend == "gather" else "flash-attn"
    expected = engines.reference(tiny, kind, PROMPTS, KINDS[kind], attention_backend=like)
    check_same(engine.generate(PROMPTS, KINDS[kind]), expected)
    has_graphs = backend != "gather" and not enforce_eager
    graphs = engine.llm.engine.runner.graphs.captured
    assert bool(graphs) == bool(engine.gpu.num_replays) == has_graphs
    if backend != "gather":
        check_no_host_reads(engine.gpu)


@pytest.mark.parametrize("backend, library, kind", with_kinds([
    ("gather", False), ("gather", HAS_TRITON), ("triton", True)], ("gather", HAS_TRITON)))
def test_float32_is_as_on_a_cpu(engines, tiny, backend, library, kind):
    needs(backend)
    on_gpu = engines.get(tiny, **EXACT | {"attention_backend": backend}, library=library,
                         run_ahead=True).generate(PROMPTS, KINDS[kind])
    on_cpu = engines.get(tiny, **EXACT, device="cpu").generate(PROMPTS, KINDS[kind])
    assert tokens_of(on_gpu) == tokens_of(on_cpu)


@pytest.mark.parametrize("backend", ["flash-attn", "varlen", "gather"])
def test_without_the_library_of_kernels_the_tokens_are_the_same(engines, tiny, backend):
    needs(backend)
    plain = engines.get(tiny, library=False, run_ahead=True, attention_backend=backend)
    assert not any("nanoengine_extras.gpu" in str(type(module).__mro__)
                   for module in plain.llm.engine.runner.model.modules())
    with_library = engines.get(tiny, run_ahead=True, attention_backend=backend)
    check_same(plain.generate(PROMPTS, BOTH), with_library.generate(PROMPTS, BOTH))


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_every_batch_size(engines, tiny, batch_size):
    """With graphs for 1, 2, 4 and 8 sequences."""
    engine = engines.get(tiny, run_ahead=True)
    prompts = random_prompts([20] * 8)
    expected = engines.reference(tiny, "batch", prompts, GREEDY)
    check_same(engine.generate(prompts[:batch_size], GREEDY), expected[:batch_size])
    check_no_host_reads(engine.gpu)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5])
def test_odd_sizes_of_graphs(engines, tiny, max_num_seqs):
    engine = engines.get(tiny, run_ahead=True, max_num_seqs=max_num_seqs)
    check_same(engine.generate(PROMPTS, BOTH), engines.reference(tiny, "both", PROMPTS, BOTH))
    check_no_host_reads(engine.gpu)


def test_an_autocast_of_the_caller_changes_nothing(engines, tiny):
    """Neither when an engine is made nor when it is used."""
    expected = engines.reference(tiny, "both", PROMPTS, BOTH)
    for num_kv_blocks in (60, None):
        with FakeGpu():
            with torch.autocast("cuda", torch.float16), LLM(
                    tiny, device="cuda", **SMALL | dict(num_kv_blocks=num_kv_blocks)) as llm:
                assert llm.engine.runner.graphs.captured
                check_same(llm.generate(PROMPTS, BOTH, use_tqdm=False), expected)


@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), dict(trace=True)], ids=str)
def test_a_thread_with_another_current_device(engines, tiny, options):
    """It gets what it would get with the engine's own, and keeps its current device."""
    def call() -> list:
        outputs = llm.generate(PROMPTS, BOTH, use_tqdm=False)
        assert torch.cuda.current_device() == 1
        return outputs

    with FakeGpu() as gpu, LLM(tiny, device="cuda", **SMALL | options) as llm:
        check_same(gpu.use_thread(call, device=1), engines.reference(tiny, "both", PROMPTS, BOTH))
        if "trace" in options:
            assert all(step.began.elapsed_time(step.done) > 0 for step in llm.trace)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": dict(head_dim=None, hidden_size=128), "Mistral": dict(sliding_window=50)}


@pytest.fixture(scope="module")
def folders(make_model) -> dict[str, str]:
    """Tiny models by architecture."""
    return {name: make_model(name, num_hidden_layers=2, **changes)[0]
            for name, changes in ARCHITECTURES.items()}


@pytest.mark.parametrize("backend", [
    "flash-attn", slow("varlen")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(engines, folders, architecture, backend):
    needs(backend)
    folder = folders[architecture]
    engine = engines.get(folder, attention_backend=backend, run_ahead=True)
    expected = engines.reference(folder, "both", PROMPTS, BOTH)
    check_same(engine.generate(PROMPTS, BOTH), expected)
    check_no_host_reads(engine.gpu)
    on_gpu = engines.reference(folder, "both", PROMPTS, BOTH, **EXACT)
    on_cpu = engines.reference(folder, "both", PROMPTS, BOTH, **EXACT, device="cpu")
    assert tokens_of(on_gpu) == tokens_of(on_cpu)


# ------------------------------------------------------------------------ sampling parameters


def shift(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A custom processor: each token makes the token after it likelier."""
    return scores.index_add(1, (input_ids[0, -1:] + 1) % 320, torch.ones_like(scores[:, :1]))


def break_sometimes(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * math.nan if input_ids.shape[1] % 5 == 0 else scores


SAMPLED: dict[str, list[dict[str, Any]]] = {
    "edited": [
        dict(top_k=5), dict(top_p=0.7), dict(min_p=0.1), dict(top_k=50, top_p=0.9, min_p=0.01),
        dict(logprobs=3), dict(logprobs=-1), dict(logprobs=2, temperature=0),
        dict(prompt_logprobs=2), dict(presence_penalty=0.5, frequency_penalty=0.5),
        dict(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
        dict(repetition_penalty=1.5, temperature=0),
        dict(min_tokens=4, stop_token_ids=list(range(150))), dict(stop_token_ids=list(range(60))),
        dict(logit_bias={5: 4.0, 7: -100.0}), dict(allowed_token_ids=list(range(2, 30))),
        dict(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=1,
             presence_penalty=0.5, min_tokens=2, stop_token_ids=list(range(40)),
             logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 300)))],
    # for which the host may read what the device has computed
    "processors": [dict(logits_processors=[shift]), dict(logits_processors=[break_sometimes])] * 3}


def edited_and_plain(name: str) -> tuple[list, list]:
    """A request for each of these parameters, and beside each one without."""
    params = []
    for number, options in enumerate(SAMPLED[name]):
        edited = dict(temperature=0.8, max_tokens=7) | options
        params += [SamplingParams(seed=number, **edited), SamplingParams(seed=99, max_tokens=8)]
    return [PROMPTS[number % len(PROMPTS)] for number in range(len(params))], params


def check_everywhere(engines: Engines, folder: str, name: str, prompts: Any, params: Any,
                     may_read: bool = False) -> list:
    """The tokens with graphs, eager, and in float32; returns those outputs."""
    expected = engines.reference(folder, name, prompts, params)
    for enforce_eager in (False, True):
        engine = engines.get(folder, enforce_eager=enforce_eager, run_ahead=True)
        check_same(engine.generate(prompts, params), expected)
        if not may_read:
            check_no_host_reads(engine.gpu)
    outputs = engines.get(folder, **EXACT, run_ahead=True).generate(prompts, params)
    on_cpu = engines.reference(folder, name, prompts, params, **EXACT, device="cpu")
    assert tokens_of(outputs) == tokens_of(on_cpu)
    return [expected, outputs]


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_parameters(engines, tiny, name):
    is_edited = name == "edited"
    for outputs in check_everywhere(
            engines, tiny, name, *edited_and_plain(name), may_read=not is_edited):
        has_failed = any(output.outputs[0].finish_reason == "error" for output in outputs)
        assert has_failed != is_edited, tokens_of(outputs)


def test_bad_words_and_stop_strings(engines, bundled):
    """What needs a tokenizer."""
    prompts = ["Once upon a time", "12 + 34 =", "sort d b e a =", "The cat"]
    params = [SamplingParams(temperature=0, max_tokens=12, bad_words=["the", "a"]),
              SamplingParams(seed=1, max_tokens=12),
              SamplingParams(seed=2, max_tokens=12, stop=["a"]),
              SamplingParams(seed=3, max_tokens=12, bad_words=["was"])]
    check_everywhere(engines, bundled, "words", prompts, params)


def test_forks(engines, tiny):
    """n > 1: in one step more rows are sampled than there are sequences."""
    params = [SamplingParams(n=1 + n % 4, seed=n, max_tokens=7) for n in range(7)]
    check_everywhere(engines, tiny, "forks", PROMPTS, params)


def search(engine: Engine) -> list:
    with engine.gpu or nullcontext():
        found = engine.llm.beam_search(PROMPTS[:4], BeamSearchParams(beam_width=3, max_tokens=6))
    return [[beam.tokens for beam in output.sequences] for output in found]


@pytest.mark.parametrize("options, plain", [
    ({}, PLAIN | dict(max_num_seqs=3)), (dict(enforce_eager=True), PLAIN | dict(max_num_seqs=3)),
    (EXACT, EXACT | dict(device="cpu"))], ids=["graphs", "eager", "float32"])
def test_beam_search(engines, tiny, options, plain):
    engine = engines.get(tiny, run_ahead=True, **options)
    assert search(engine) == search(engines.get(tiny, **plain))


# ------------------------------------------------------------------- policies, memory, traces

POLICIES: dict[str, dict[str, Any]] = {
    "preemption by recomputing": dict(num_kv_blocks=4),
    "preemption by swapping": dict(num_kv_blocks=4, preemption_mode="swap", swap_space=0.01),
    "forks by swapping": dict(num_kv_blocks=6, preemption_mode="swap", swap_space=0.01),
    "chunks": dict(max_num_batched_tokens=48),
    "chunks and few blocks": dict(max_num_batched_tokens=48, num_kv_blocks=6,
                                  scheduling=overtaking("mixed", 1)),
    "one token of a prompt at a time": dict(max_num_batched_tokens=8),
    "prefill-first": dict(scheduling="prefill-first"),
    "static": dict(scheduling="static"),
    "reserve": dict(kv_allocation="reserve", num_kv_blocks=10),
    "max-length": dict(kv_allocation="max-length", num_kv_blocks=10),
    "no prefix cache": dict(enable_prefix_caching=False),
    "pages of 512": dict(block_size=512),
    "measured memory": dict(num_kv_blocks=None)}


@pytest.mark.parametrize("name", [name if name in (
    "preemption by recomputing", "preemption by swapping", "forks by swapping",
    "chunks and few blocks", "no prefix cache", "pages of 512", "measured memory")
    else slow(name) for name in POLICIES])
def test_policies(engines, tiny, name):
    engine = make_engine(tiny, run_ahead=True, **POLICIES[name])
    params = dataclasses.replace(LONG, n=3 if "forks" in name else 1)
    expected = engines.reference(tiny, f"long, n={params.n}", LONG_PROMPTS, params)
    check_same(engine.generate(LONG_PROMPTS, params), expected)
    check_no_host_reads(engine.gpu)
    metrics = engine.llm.metrics()
    assert bool(metrics["num_preemptions"]) == (metrics["num_blocks_free"] <= 6)
    assert bool(metrics["swap_in_blocks"]) == ("swapping" in name)


def test_policies_are_as_on_a_cpu(engines, tiny):
    """Swapping and chunks in float32, with small blocks."""
    options = EXACT | dict(num_kv_blocks=38, preemption_mode="swap", swap_space=0.01,
                           max_num_batched_tokens=300)
    engine = make_engine(tiny, run_ahead=True, **options)
    on_cpu = engines.reference(tiny, "long", LONG_PROMPTS, LONG, **EXACT, device="cpu")
    assert tokens_of(engine.generate(LONG_PROMPTS, LONG)) == tokens_of(on_cpu)
    assert engine.llm.metrics()["swap_in_blocks"] > 0


@pytest.mark.parametrize("backend", ["flash-attn", "gather"])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 500])
def test_memory_is_measured_in_a_step_outside_graphs(
        tiny, monkeypatch, backend, max_num_batched_tokens):
    """Of as many tokens, keys and sampled rows as a step can have."""
    measured, sample = [], ModelRunner.sample

    def watch(runner: ModelRunner, batch: Any, step: Any, hidden: Any) -> Launched:
        is_replayed = any(step is each for _, each, _ in runner.graphs.captured.values())
        measured.append((batch, is_replayed))
        return sample(runner, batch, step, hidden)

    monkeypatch.setattr(ModelRunner, "sample", watch)
    make_engine(tiny, attention_backend=backend, num_kv_blocks=None,
                max_num_batched_tokens=max_num_batched_tokens)
    batch, is_replayed = measured[0]
    assert not is_replayed and len(batch.sampled) == SMALL["max_num_seqs"] + 32
    assert sum(batch.num_tokens) == max_num_batched_tokens
    assert max(map(sum, zip(batch.starts, batch.num_tokens))) == SMALL["max_model_len"]


def test_prefix_hits(engines, tiny):
    engine = make_engine(tiny, run_ahead=True)
    expected = engines.reference(tiny, "long", LONG_PROMPTS, LONG)
    for num_hits in (0, 512):
        check_same(engine.generate(LONG_PROMPTS, LONG, keep_cache=True), expected)
        check_no_host_reads(engine.gpu)
        assert engine.llm.metrics()["prefix_cache_hits"] == num_hits


def test_a_stream_that_is_dropped_with_a_step_in_flight(engines, tiny):
    engine = engines.get(tiny, run_ahead=True)
    with engine.gpu:
        stream = engine.llm.stream(LONG_PROMPTS, LONG)
        for _ in range(4):
            next(stream)
        del stream
    expected = engines.reference(tiny, "long", LONG_PROMPTS, LONG)
    check_same(engine.generate(LONG_PROMPTS, LONG, keep_cache=True), expected)


@pytest.fixture(scope="module")
def broken(make_model) -> str:
    """The folder of a model whose tokens from 250 on have NaN embeddings."""
    folder = make_model(num_hidden_layers=2, tie_word_embeddings=False)[0]
    weights = load_file(f"{folder}/model.safetensors")
    weights["model.embed_tokens.weight"][250:, 5] = math.nan
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nan_ends_the_request_that_drew_it_and_no_other(engines, broken, enforce_eager):
    prompts = random_prompts([1, 40, 254, 257, 20, 20, 90], vocab_size=250)
    params = [SamplingParams(seed=n, temperature=1e9, max_tokens=5) for n in range(7)]
    engine = engines.get(broken, enforce_eager=enforce_eager, run_ahead=True)
    outputs = engine.generate(prompts, params)
    check_same(outputs, engines.reference(broken, "nan", prompts, params))
    check_no_host_reads(engine.gpu)
    completions = [output.outputs[0] for output in outputs]
    assert {completion.finish_reason for completion in completions} == {"error", "length"}
    for completion in completions:
        has_failed = completion.finish_reason == "error"
        assert has_failed == (max(completion.token_ids[:4]) >= 250)


# ------------------------------------------------------------------------------ what it costs

NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def decode_step(folder: str, library: bool = HAS_TRITON, num_seqs: int = 7,
                **params: Any) -> list[str]:
    """The kernels of one decode step."""
    engine = make_engine(folder, enforce_eager=True, run_ahead=False, library=library,
                         max_num_seqs=num_seqs)
    with engine.gpu:
        engine.llm.add(random_prompts([20] * num_seqs),
                       SamplingParams(max_tokens=8, ignore_eos=True, **params))
        for _ in range(3):
            engine.gpu.reset_counters()
            engine.llm.step()
    return engine.gpu.kernels


@pytest.mark.parametrize("library, num_seqs, expected", [
    pytest.param(True, 8, 6, marks=NEEDS_TRITON), pytest.param(True, 9, 9, marks=NEEDS_TRITON),
    (False, 8, 61)])
def test_kernels_of_a_layer(make_model, tiny, library, num_seqs, expected):
    """With few sequences, norms and SwiGLU are part of the products."""
    one = make_model(num_hidden_layers=1)[0]
    more = (Counter(decode_step(tiny, library, num_seqs, temperature=0))
            - Counter(decode_step(one, library, num_seqs, temperature=0)))
    assert more.total() == expected, more


@NEEDS_TRITON
@pytest.mark.parametrize("params, most", [
    ({}, 10), (dict(top_k=20, top_p=0.95), 25), (dict(top_p=0.95), 25), (dict(min_p=0.1), 25)],
    ids=str)
def test_kernels_of_sampling(tiny, params, most):
    """Few of them; nothing sorts all logits."""
    launched = decode_step(tiny, temperature=0.6, **params)
    behind = launched[len(launched) - launched[::-1].index("few_rows_kernel"):]
    assert len(behind) <= most and "aten::sort" not in behind, behind


def test_graphs_keep_no_logits_and_their_warm_up_reads_one_key(tiny):
    engine = make_engine(tiny)
    captured = engine.llm.engine.runner.graphs.captured.values()
    assert [hidden.shape for *_, hidden in captured] == [(size, 64) for size in (8, 4, 2, 1)]
    assert sum(step.buffer.nbytes for _, step, _ in captured) < 10_000
    # in each layer, outside of graphs
    assert engine.gpu.num_graphs == 4 and engine.gpu.kernels.count("decode_kernel") == 2 * 4
    with engine.gpu:
        assert {length for _, step, _ in captured for length in step.lengths.tolist()} == {1}


def test_pinned_memory_is_as_large_as_asked_for(tiny):
    """PyTorch's own allocator would take the next power of two."""
    for asked in (dict(preemption_mode="swap", swap_space=5 / 1024), dict(cpu_offload_gb=1e-9)):
        engine = make_engine(tiny, enforce_eager=True, **asked)
        with engine.gpu:
            layer = engine.llm.engine.runner.model.layers[0]
            num_bytes = sum(each.nbytes for each in layer.parameters())
            most = 5 * 2**20 if "swap_space" in asked else num_bytes
            assert 0.7 * most < engine.gpu.pinned_bytes.total() <= 1.05 * most + 1000
            engine.llm.close()
            assert engine.gpu.pinned_bytes.total() == 0


def test_a_trace_holds_no_pinned_memory(tiny):
    engine = make_engine(tiny, trace=True)
    engine.generate(PROMPTS, GREEDY)
    assert len(engine.llm.trace) >= 5
    for step in engine.llm.trace:
        assert not any(isinstance(value, torch.Tensor) for value in vars(step).values())
        assert len(step.tokens) == len(step.batch.sampled)
        assert all(type(token) is int for token in step.tokens)


def test_another_rank_does_not_wait_for_its_inputs(tiny):
    """A message is in memory that is not pinned."""
    from nanoengine_extras.running.tensor_parallel import RankRunner
    done = SimpleNamespace(wait=lambda: None)
    engine = make_engine(tiny)
    runner = engine.llm.engine.runner
    runner.group = SimpleNamespace(
        backend=SimpleNamespace(broadcast=lambda tensors: done), finish=lambda work: work.wait())
    batch = padded(Batch(), 4)
    with engine.gpu:
        buffer, shape = runner.prepare(batch)
        engine.gpu.reset_counters()
        RankRunner.follow(runner, batch.copies, buffer.clone().numpy(), shape)
    assert engine.gpu.num_replays == 1 and not engine.gpu.host_reads


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


# ---------------------------------------------------------------------- faults, put in on purpose


def in_each_step(fault: Callable[[ModelRunner, Launched], Any]) -> Callable[[Patch], None]:
    """Does something wrong at the end of each step."""
    def put_in(patch: Patch) -> None:
        launch = ModelRunner.launch

        def launch_and_more(runner: ModelRunner, batch: Any) -> Launched:
            launched = launch(runner, batch)
            fault(runner, launched)
            return launched

        patch.setattr(ModelRunner, "launch", launch_and_more)

    return put_in


# as on a CPU, where a step is done when it has been launched
do_not_wait = in_each_step(lambda runner, launched: setattr(launched, "done", 0.0))
# graphs still read them where they were
move_the_tokens = in_each_step(
    lambda runner, launched: setattr(runner, "last_sampled", runner.last_sampled.clone()))
read_a_value_in_each_step = in_each_step(lambda runner, launched: runner.last_sampled.tolist())
leave_a_table_on_the_host = in_each_step(
    lambda runner, launched: setattr(runner.model, "rope", runner.model.rope.cpu()))


def use_memory_that_is_not_pinned(patch: Patch) -> None:
    patch.setattr(FakeGpu, "note_pinned", lambda gpu, tensor: tensor)


def use_one_buffer_for_all_steps(patch: Patch) -> None:
    empty = torch.empty
    buffers: dict[torch.dtype, torch.Tensor] = {}

    def part_of_the_buffer(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*shape, **options)
        dtype, size = options["dtype"], empty(*shape, device="meta").shape
        if dtype not in buffers:
            buffers[dtype] = empty(100_000, dtype=dtype, pin_memory=True)
        return buffers[dtype][:size.numel()].view(size)

    patch.setattr(torch, "empty", part_of_the_buffer)


def read_a_graph_after_another_has_run(patch: Patch) -> None:
    replay = FakeGraph.replay

    def replay_two(graph: FakeGraph) -> None:
        replay(graph)
        replay(next(other for other in graph.gpu.graphs if other is not graph))

    patch.setattr(FakeGraph, "replay", replay_two)


@pytest.mark.parametrize("enforce_eager, fault, found", [
    (False, do_not_wait, "the tokens of prompt"),
    (True, do_not_wait, "the tokens of prompt"),
    (False, move_the_tokens, "the tokens of prompt"),
    (False, read_a_value_in_each_step, "the host has waited: .*: tolist"),
    (True, read_a_value_in_each_step, "the host has waited: .*: tolist"),
    (True, leave_a_table_on_the_host, "on tensors of both devices at modules.py"),
    (False, use_memory_that_is_not_pinned, "the host has waited: .*not pinned"),
    (True, use_memory_that_is_not_pinned, "the host has waited: .*not pinned"),
    (False, use_one_buffer_for_all_steps, "a pinned buffer was rewritten"),
    (True, use_one_buffer_for_all_steps, "a pinned buffer was rewritten"),
    (False, read_a_graph_after_another_has_run, "the tokens of prompt")])
def test_faults_are_found(engines, tiny, monkeypatch, enforce_eager, fault, found):
    # made before there is a fault
    engines.reference(tiny, "both", PROMPTS, BOTH)
    fault(monkeypatch)
    with pytest.raises((AssertionError, GpuError, ValueError), match=found):
        engine = make_engine(tiny, run_ahead=True, enforce_eager=enforce_eager)
        check_same(engine.generate(PROMPTS, BOTH), engines.reference(tiny, "both", PROMPTS, BOTH))
        check_no_host_reads(engine.gpu)
