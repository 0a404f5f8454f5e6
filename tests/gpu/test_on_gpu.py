"""What only a GPU can show: kernels, graphs and memory. `day.py` runs these, several at a time."""

import gc
import math
import os
import sys
import threading

import pytest
import torch
import transformers
from conftest import ROOT, random_prompts
from feature_helpers import FEATURES, constrain

import nanoengine_extras.running.backends  # noqa: F401  adds its backend
from nanoengine import LLM, BeamSearchParams, SamplingParams, sampler
from nanoengine.attention import backends, choose_backend
from nanoengine.config import EngineConfig
from nanoengine.model_runner import ModelRunner
from nanoengine.sequence import Row, Sequence
from nanoengine.step_inputs import Draws, draws_of
from nanoengine_extras.running.policies import overtaking
from nanoengine_extras.sampling import fast_sampling

sys.path.insert(0, str(ROOT / "tests" / "models"))

import compare  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = dict(gpu_memory_utilization=0.3, max_model_len=1024, max_num_seqs=20)
PROMPTS = random_prompts([1, 3, 40, 255, 256, 257, 300, 513, 700, 20, 20, 90])
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=5, ignore_eos=True)
# tokens of the shortest of some long outputs
LONG = 100


def fast_backends() -> list[str]:
    found = []
    for name in backends():
        try:
            found.append(choose_backend(
                EngineConfig("m", device="cuda", attention_backend=name), torch.bfloat16))
        except ValueError:
            continue
    return found


@pytest.fixture(scope="module")
def small(make_model):
    """A model whose heads the trimmed build of flash-attn has kernels for."""
    return make_model(head_dim=64, max_position_embeddings=2048, initializer_range=0.05)


def run(llm: LLM, prompts=PROMPTS, params=GREEDY) -> list:
    return [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]


def tokens(*arguments, **options) -> list[list[int]]:
    return [output.token_ids for output in run(*arguments, **options)]


@pytest.fixture(autouse=True)
def part_of_the_gpu(monkeypatch):
    """With SHARED_GPU=1, other processes use the GPU, too: an engine measures as always, and then
    takes 1 GiB for its cache, whatever the others have left of its share."""
    measure = ModelRunner.measure_free_bytes

    def measured(runner: ModelRunner, max_model_len: int) -> int:
        num_bytes = measure(runner, max_model_len)
        note(f"measured {num_bytes / 2**30:.2f} GiB for the cache")
        return 2**30

    if os.environ.get("SHARED_GPU"):
        monkeypatch.setattr(ModelRunner, "measure_free_bytes", measured)


def note(text: str) -> None:
    """Adds a line to a file, for whoever reads what a day has brought."""
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].rpartition("::")[2]
    if "NOTES" in os.environ:
        with open(os.environ["NOTES"], "a") as file:
            file.write(f"{test}: {text}\n")


def assert_alike(ours: list, theirs: list) -> None:
    """The rule for bfloat16: at the first difference, each token is in the other's top 5."""
    first, wrong = [], []
    for number, (left, right) in enumerate(zip(ours, theirs)):
        assert len(left.token_ids) == len(right.token_ids), (number, left, right)
        pairs = enumerate(zip(left.token_ids, right.token_ids))
        if (place := next((place for place, (a, b) in pairs if a != b), None)) is None:
            continue
        first.append((number, place))
        a, b = left.token_ids[place], right.token_ids[place]
        at = [{token: round(found.logprob, 3) for token, found in each.logprobs[place].items()}
              for each in (left, right)]
        if a not in at[1] or b not in at[0]:
            wrong.append(f"prompt {number} of {len(ours)}, token {place}: {a}, and {b} expected\n"
                         f"    ours   {at[0]}\n    theirs {at[1]}\n"
                         f"    behind {left.token_ids[:place]}")
    note(f"{len(first)} of {len(ours)} prompts differ, first at {first[:6]}")
    assert not wrong, "\n".join(["", *wrong[:4], f"and {len(wrong[4:])} more"])


@pytest.fixture(scope="module")
def plain(small) -> list:
    """The slow backend, one request at a time, nothing ahead."""
    with LLM(small[0], dtype="bfloat16", attention_backend="gather", run_ahead=False,
             **SMALL | dict(max_num_seqs=1)) as llm:
        return run(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("backend", ["flash-attn", "triton", "varlen", "gather"])
def test_backends_graphs_and_running_ahead(small, plain, backend, enforce_eager, run_ahead):
    if backend not in fast_backends():
        pytest.skip(f"{backend} is not installed")
    with LLM(small[0], dtype="bfloat16", attention_backend=backend, enforce_eager=enforce_eager,
             run_ahead=run_ahead, **SMALL) as llm:
        has_graphs = not enforce_eager and backend != "gather"
        assert len(llm.engine.runner.graphs.captured) == 6 * has_graphs
        assert llm.metrics()["attention_backend"] == backend
        assert_alike(run(llm), plain)


@pytest.mark.parametrize("batch_size", range(1, 21))
def test_every_batch_size(with_graphs, plain, batch_size):
    """One engine with graphs, as many requests at once as it takes."""
    numbers = [number % len(PROMPTS) for number in range(batch_size)]
    found = run(with_graphs, [PROMPTS[n] for n in numbers])
    assert_alike(found, [plain[n] for n in numbers])


@pytest.fixture(scope="module")
def with_graphs(small):
    with LLM(small[0], dtype="bfloat16", enable_prefix_caching=False, num_kv_blocks=200,
             **SMALL) as llm:  # few blocks, as it is there until the last test
        yield llm


@pytest.mark.parametrize("options", [
    dict(num_kv_blocks=6), dict(num_kv_blocks=6, preemption_mode="swap", swap_space=0.5),
    dict(max_num_batched_tokens=64), dict(scheduling="prefill-first"),
    dict(max_num_batched_tokens=48, num_kv_blocks=7, scheduling=overtaking("mixed", 1))])
def test_preemption_chunks_and_prefix_hits_under_graphs(small, plain, options):
    options = SMALL | dict(max_num_seqs=8) | options
    with LLM(small[0], dtype="bfloat16", **options) as llm:
        assert_alike(run(llm), plain)
        assert_alike(run(llm), plain)  # with a warm cache
        metrics = llm.metrics()
    assert metrics["prefix_cache_hits"] > 0 or callable(options.get("scheduling"))
    if "num_kv_blocks" in options:
        assert metrics["num_preemptions"] > 0
    if "preemption_mode" in options:
        assert metrics["swap_in_blocks"] > 0


@pytest.mark.parametrize("architecture, changes", [
    ("Llama", {}), ("Mistral", dict(sliding_window=50)), ("Qwen2", dict(head_dim=None)),
    ("Qwen3", {})])
def test_logits_are_those_of_transformers(make_model, architecture, changes):
    changes = dict(head_dim=64, hidden_size=256, max_position_embeddings=2048,
                   initializer_range=0.05) | changes  # a spread at which bfloat16 is good to 0.05
    check_logits(make_model(architecture, **changes)[0], 0.1)


def test_logits_of_the_06b_shape(tmp_path):
    config = transformers.AutoConfig.from_pretrained(ROOT / "models/qwen3-0.6b")
    torch.manual_seed(0)
    # on a CPU, to draw them takes longer than all else
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    check_logits(str(tmp_path), 0.15)


def check_logits(folder: str, tolerance: float) -> None:
    """bfloat16 against transformers on the GPU: log-probabilities behind prompts and decodes."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    reference = reference.to("cuda").eval()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True)
    prompts = PROMPTS[:8]
    with LLM(folder, dtype="bfloat16", **SMALL) as llm:
        outputs = run(llm, prompts, params)
    for prompt, completion in zip(prompts, outputs):
        with torch.inference_mode():
            ids = torch.tensor([prompt + completion.token_ids[:-1]], device="cuda")
            expected = reference(ids).logits[0, -4:].double().log_softmax(-1).cpu()
        for row, at in zip(expected, completion.logprobs):
            found = torch.tensor([at[i].logprob for i in range(len(row))], dtype=torch.float64)
            assert (found - row).abs().max() < tolerance


def test_float32_is_exact(small):
    folder, reference = small
    reference = reference.to("cuda", torch.float32)
    params = [GREEDY, SamplingParams(seed=1, max_tokens=40, ignore_eos=True)]
    with LLM(folder, dtype="float32", **SMALL) as llm:
        expected = "triton" if "triton" in fast_backends() else "gather"
        assert llm.metrics()["attention_backend"] == expected
        together = [ids for each in params for ids in tokens(llm, params=each)]
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=64, max_num_batched_tokens=100,
             run_ahead=False, **SMALL | dict(max_model_len=800)) as llm:
        assert [ids for each in params for ids in tokens(llm, params=each)] == together
        assert llm.metrics()["num_preemptions"] > 0
    for prompt, found in zip(PROMPTS, together):
        ids = torch.tensor([prompt], device="cuda")
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40,
                                      do_sample=False, eos_token_id=None)[0, len(prompt):]
        assert found == expected.tolist()


@pytest.mark.parametrize("sample, options", [(sampler.sample, {}), *(
    (fast_sampling.sample, options) for options in (
        {}, dict(top_k=20, top_p=0.95), dict(top_p=0.9), dict(min_p=0.02),
        dict(top_k=5, min_p=0.01),
        dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        dict(logit_bias={5: 2.0, 7: -9.0}, allowed_token_ids=list(range(3000)))))])
def test_draws_on_the_gpu_are_those_on_the_cpu(sample, options):
    """As large as real ones: 256 rows of 152k, with many ties, as bfloat16 has them."""
    torch.manual_seed(0)
    logits = (torch.randn(256, 151_936) * 3).bfloat16()
    seqs = [Sequence("0", [1, 2, 3, 700 + n, 700 + n, 9], 3, 99, seed=n, params=SamplingParams(
        temperature=1 if options else n / 128, **options)) for n in range(256)]
    draws = torch.tensor([draws_of(Row(0, seq, 6)) for seq in seqs], dtype=torch.float64)
    for seq in seqs:
        constrain(seq, [], None, 151_936)
    inputs = logits, draws, torch.zeros(1, dtype=torch.int32)
    tokens = []
    for device in ("cpu", "cuda"):
        rows, of_rows, last_sampled = (each.to(device) for each in inputs)
        draws_of_rows = Draws(*of_rows.T.contiguous())
        tokens.append(sample(rows, draws_of_rows, seqs, last_sampled, FEATURES).cpu())
    assert (tokens[0] != tokens[1]).sum() <= 1, "float32 exponentials differ in their last bit"


def test_edited_steps_wait_for_nothing(small):
    """PyTorch itself says so: an operator that waits for the GPU is an error here."""
    params = [SamplingParams(seed=n, max_tokens=20, temperature=0.8 * (n % 4 > 0),
                             top_k=5 * (n % 2), top_p=1 - n / 30, min_p=0.01 * (n % 3),
                             logprobs=n % 3 or None,
                             presence_penalty=0.1 * (n % 2), repetition_penalty=1 + n / 50,
                             logit_bias={n: 1.0}, min_tokens=n % 4, ignore_eos=True)
              for n in range(len(PROMPTS))]
    with LLM(small[0], dtype="bfloat16", run_ahead=True, **SMALL) as llm:
        expected = tokens(llm, params=params)
        llm.reset_prefix_cache()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = tokens(llm, params=params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found == expected


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_weights_on_the_host(make_model, enforce_eager):
    """The same kernels on the same weights: every bit is the same. Random weights are, too."""
    folder = make_model(head_dim=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
                        max_position_embeddings=2048, initializer_range=0.05)[0]
    for load_format in ("auto", "dummy"):
        results = []
        for gibibytes in (0.0, 2e-2, 1.0):
            with LLM(folder, dtype="bfloat16", cpu_offload_gb=gibibytes, load_format=load_format,
                     enforce_eager=enforce_eager, **SMALL) as llm:
                results.append(tokens(llm))
        assert results[0] == results[1] == results[2]


def test_drawn_tokens_do_not_depend_on_graphs(small):
    params = [SamplingParams(seed=n, max_tokens=30, temperature=0.05, ignore_eos=True, logprobs=50,
                             top_p=0.9 if n % 3 == 0 else 1.0, top_k=20 if n % 4 == 0 else 0)
              for n in range(len(PROMPTS))]
    results = []
    for enforce_eager in (False, True):
        with LLM(small[0], dtype="bfloat16", enforce_eager=enforce_eager, **SMALL) as llm:
            results.append(run(llm, params=params))
    assert_alike(*results)


@pytest.mark.parametrize("backend", ["flash-attn", "triton", "varlen"])
def test_nothing_is_lost_with_steps_really_in_flight(small, backend):
    """Without logprobs nothing waits: the same engine, ahead or not, gives the same tokens."""
    if backend not in fast_backends():
        pytest.skip(f"{backend} is not installed")
    params = [SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=LONG + 9 * n,
                             ignore_eos=True) for n in range(len(PROMPTS))]
    results = []
    for run_ahead in (False, True):
        with LLM(small[0], dtype="bfloat16", attention_backend=backend, run_ahead=run_ahead,
                 **SMALL) as llm:
            results.append(tokens(llm, params=params))
            stream = llm.stream(PROMPTS, params)
            for _ in range(5):
                next(stream)
            del stream
            gc.collect()
            llm.reset_prefix_cache()
            assert tokens(llm, params=params) == results[-1]
    assert results[0] == results[1]


SHORT = dict(temperature=0, max_tokens=12, ignore_eos=True)
FEATURES_IN_USE = {
    "int8": (dict(quantization="int8"), SHORT),
    "several": ({}, dict(n=3, seed=1, max_tokens=12, ignore_eos=True, logprobs=2)),
    "prompt": (dict(max_num_batched_tokens=64), SHORT | dict(prompt_logprobs=1)),
    "edited": ({}, dict(
        temperature=0.5, seed=1, max_tokens=12, min_tokens=6, stop_token_ids=[3],
        presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, min_p=0.01, top_k=50,
        top_p=0.9, logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 300)),
        logits_processors=[lambda input_ids, scores: scores - input_ids.sum() * 0])),
    "grammar": ({}, dict(temperature=0, max_tokens=20, structured_outputs=dict(
        regex="(cat|dog) [0-9]{2,4}")))}


@pytest.mark.parametrize("name", FEATURES_IN_USE)
def test_features_give_what_they_give_on_a_cpu(bundled, name):
    options, params = FEATURES_IN_USE[name]
    if "structured_outputs" in params:
        pytest.importorskip("llguidance")
    prompts = ["47 + 85 =", "Once upon a time", "sort d b e a ="]
    results = []
    for device in ("cuda", "cpu"):
        # plain PyTorch on the CPU: numba may be too old there
        with LLM(bundled, dtype="float32", device=device, kernels=device == "cuda",
                 block_size=256, num_kv_blocks=30, max_num_seqs=16, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
            beams = llm.beam_search([dict(prompt=prompt) for prompt in prompts],
                                    BeamSearchParams(beam_width=3, max_tokens=5))
        results.append((
            [[each.token_ids for each in output.outputs] for output in outputs],
            [output.prompt_token_ids for output in outputs],
            [[beam.tokens for beam in each.sequences] for each in beams]))
    assert results[0] == results[1]


# whether the host never waits for the GPU in a decode step. In float32, PyTorch reads on the host
# how many tokens each expert has
HAVE_GRAPHS = {"gemma2": True, "gpt_oss": False, "olmo2": True, "mixtral": False, "phi3": True,
               "gpt2": True, "deepseek_v3": False}


@pytest.mark.parametrize("name", HAVE_GRAPHS)
def test_models_that_transformers_computes(folder_of, name):
    """Soft caps, sinks, own layers, experts, plain modules, latent attention."""
    prompts = compare.random_prompts()[:5]
    params = SamplingParams(**SHORT)
    options = compare.OPTIONS | dict(device="cuda", block_size=256, num_kv_blocks=12)
    with LLM(folder_of(name), **options) as llm:
        assert bool(llm.engine.runner.graphs.captured) == HAVE_GRAPHS[name]
        found = [output.outputs[0].token_ids
                 for output in llm.generate(prompts, params, use_tqdm=False)]
        runner = llm.engine.runner
        note(f"{len(runner.graphs.captured)} graphs, waits at {runner.model.waits}")
    reference = compare.load_reference(folder_of(name))
    assert found == [compare.expected_tokens(reference, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_in_bfloat16(folder_of, name):
    """PyTorch's grouped product reads on the GPU how many tokens each expert has, so that decode
    steps have graphs."""
    prompts, params = compare.random_prompts()[:5], SamplingParams(**SHORT, logprobs=5)
    options = dict(device="cuda", dtype="bfloat16", block_size=256, num_kv_blocks=12)
    results = []
    for eager in (True, False):
        with LLM(folder_of(name), **compare.OPTIONS | options, enforce_eager=eager) as llm:
            runner = llm.engine.runner
            note(f"{len(runner.graphs.captured)} graphs, waits at {runner.model.waits}")
            assert bool(runner.graphs.captured) != eager
            results.append(run(llm, prompts, params))
    assert_alike(*results)


def test_an_autocast_of_the_caller_changes_nothing(small):
    results = []
    for enabled in (False, True):
        with torch.autocast("cuda", torch.float16, enabled=enabled):
            with LLM(small[0], dtype="bfloat16", num_kv_blocks=60, **SMALL) as llm:
                results.append(tokens(llm))
    assert results[0] == results[1]


def test_a_thread_with_another_current_device(small):
    """With one GPU, a thread that has never used it."""
    def call() -> None:
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        results.append(tokens(llm))

    results: list = []
    with LLM(small[0], dtype="bfloat16", num_kv_blocks=60, **SMALL) as llm:
        call()
        llm.reset_prefix_cache()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert results[0] == results[1]


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_cache_gets_what_the_utilization_leaves(small):
    total, before = torch.cuda.mem_get_info()[1], free_bytes()
    options = dict(max_model_len=1024, max_num_seqs=64)
    with LLM(small[0], dtype="bfloat16", gpu_memory_utilization=0.5, **options) as llm:
        num_blocks = llm.engine.runner.num_kv_blocks
        run(llm, random_prompts([500] * 64), SamplingParams(top_p=0.9, max_tokens=20))
        used = total - torch.cuda.mem_get_info()[0]
        assert 0.45 * total < used < 0.52 * total
    taken = torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
    with LLM(small[0], dtype="bfloat16", gpu_memory_utilization=0.5, **options) as llm:
        num_missing = num_blocks - llm.engine.runner.num_kv_blocks
        missing = num_missing * llm.engine.runner.block_bytes
        assert math.isclose(missing, taken.nbytes, rel_tol=0.1), "others' memory counts"
    del taken
    assert before - free_bytes() < 300 * 2**20
    with pytest.raises(ValueError, match=r"2 to 0 \(0 blocks"):
        LLM(small[0], dtype="bfloat16", gpu_memory_utilization=0.001)


def test_out_of_memory_says_what_helps(small):
    with pytest.raises(ValueError, match="out of memory.*[0-9] GiB.*max_num_batched_tokens"):
        LLM(small[0], dtype="bfloat16", num_kv_blocks=10**8)
    with LLM(small[0], dtype="bfloat16", **SMALL) as llm:
        assert len(run(llm)) == len(PROMPTS)


@pytest.mark.parametrize("count, enforce_eager", [(12, True), (3, False)])
def test_engines_leave_nothing_behind(small, count, enforce_eager):
    left = []
    for number in range(count):
        llm = LLM(small[0], dtype="bfloat16", num_kv_blocks=40, enforce_eager=enforce_eager,
                  max_num_seqs=16, max_model_len=1024)
        run(llm, PROMPTS[:3])
        if number % 2:
            llm.close()
        del llm
        left.append(free_bytes())
    assert left[0] - left[-1] < 64 * 2**20


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_trace_has_the_time_of_the_device(small, run_ahead):
    with LLM(small[0], dtype="bfloat16", trace=True, run_ahead=run_ahead, **SMALL) as llm:
        run(llm, params=SamplingParams(temperature=0, max_tokens=5))
        steps = list(llm.trace)
    torch.cuda.synchronize()
    assert len(steps) >= 5
    assert all(step.began.elapsed_time(step.done) > 0 for step in steps), "milliseconds"
    assert all(a.done.elapsed_time(b.done) > 0 for a, b in zip(steps, steps[1:])), "in order"
