"""K and V in 8 bits: what is stored, and that tokens do not depend on the schedule.

That logits have the same bits is tested in test_batch_invariant.py, and kernels in Triton in
gpu_kernels/interpreted.py.
"""

import copy

import pytest
import torch
from conftest import check_idle, check_refused, random_prompts, slow

from cpu.reference import (
    BF16, F32, NO_NORMS, Step, attend_by_kernel, make_step, no_turn, plain_attention)
from fake_gpu import FakeGpu
from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu import empty_cache
from nanoengine_extras.running.kv_cache import EightBits
from test_gpu_path import (
    LONG, LONG_PROMPTS, PLAIN, all_of, check_no_host_reads, check_same, make_engine, needs)

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
BOTH = pytest.mark.parametrize("stored", [E4M3, INT8], ids=["fp8", "int8"])


def plain_cache(stored, dtype, num_blocks=4, block_size=8, heads=3, head_dim=20) -> EightBits:
    memory = torch.zeros(2, num_blocks, block_size, heads, head_dim + 4, dtype=torch.int8)
    return EightBits(memory, stored, dtype)


# ------------------------------------------------------------------------ what is stored


@BOTH
@pytest.mark.parametrize("dtype", [F32, BF16, torch.half])
def test_numbers_are_rounded_to_the_nearest(stored, dtype):
    torch.manual_seed(0)
    heads = torch.randn(2, 5, 3, 20) * torch.logspace(-3, 3, 5)[:, None, None]
    heads[0, 1, 2] = 0
    heads, slots = heads.to(dtype), torch.tensor([9, 31, 0, 14, 8])
    cache = plain_cache(stored, dtype)
    cache.flatten(1, 2)[:, slots] = heads
    read = cache[:, torch.arange(4)].flatten(1, 2)
    found, exact = read[:, slots].double(), heads.double()
    assert read.dtype == dtype and torch.equal(read[:, [1, 30]], torch.zeros(2, 2, 3, 20).to(dtype))
    scale = exact.abs().amax(-1, keepdim=True) / (448 if stored == E4M3 else 127)
    # half a step: of int8; of e4m3, whose numbers have 4 bits, and whose smallest are 2^-9 apart
    step = (exact.abs() * 2**-4).maximum(scale * 2**-10) if stored == E4M3 else scale / 2
    # reading rounds once more
    step = step + exact.abs() * torch.finfo(dtype).eps
    assert ((found - exact).abs() <= step).all() and not torch.equal(found, exact)
    largest = exact.abs() == exact.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(found[largest], exact[largest], rtol=1e-2, atol=0)


@BOTH
def test_a_token_s_bytes_depend_on_no_other_token(stored):
    heads = torch.randn(2, 6, 3, 20)
    whole, parts = (plain_cache(stored, F32) for _ in range(2))
    whole[:, torch.arange(6)] = heads
    parts = copy.deepcopy(parts)
    for token in (3, 0, 5, 1, 4, 2):
        parts[:, torch.tensor([token])] = heads[:, token:token + 1] * 100
        parts[:, torch.tensor([token])] = heads[:, token:token + 1]
    assert torch.equal(whole.memory, parts.memory)


@BOTH
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_head(stored, number):
    heads = torch.randn(2, 3, 3, 20)
    heads[0, 1, 2, 7] = number
    cache = plain_cache(stored, F32)
    cache[:, torch.arange(3)] = heads
    finite = cache[:, torch.tensor([0])].flatten(1, 2)[:, :3].isfinite().all(dim=-1)
    expected = torch.ones(2, 3, 3, dtype=torch.bool)
    expected[0, 1, 2] = False
    assert torch.equal(finite, expected)


# ------------------------------------------------------------------- the kernel for a CPU

SHAPES = [(2, 2, 32, 16, None, F32), (1, 2, 64, 32, 7, BF16), (1, 2, 64, 128, 7, BF16),
          (2, 4, 80, 5, None, BF16), (3, 3, 24, 1, 40, F32), (3, 3, 24, 16, 40, BF16),
          (1, 8, 128, 32, 300, BF16), (1, 4, 256, 32, None, F32), (1, 24, 64, 32, None, F32)]


@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window, dtype, stored", [
    (*SHAPES[0], E4M3), (*SHAPES[0], INT8), (*SHAPES[1], E4M3), slow(*SHAPES[1], INT8),
    *(slow(*shape, stored) for shape in SHAPES[2:] for stored in (E4M3, INT8))])
def test_the_kernel_against_plain_torch(kv_heads, group_size, head_dim, block_size, window, dtype,
                                        stored):
    """Prompts, and then a step of both; memory that was not written to holds anything."""
    torch.manual_seed(0)
    tolerance = 3e-6 if dtype == F32 else 2e-2
    lengths, later = [20, 700, 33, 15, 260, 31], [1, 1, 9, 1, 40, 2]
    steps = make_step(lengths, [0] * 6, block_size), make_step(later, lengths, block_size)
    tables = steps[1].block_tables
    num_blocks = int(tables.max()) + 1
    heads = kv_heads * group_size
    shape = num_blocks, block_size, kv_heads, head_dim
    ours = empty_cache(1, *shape, torch.int8)[0].random_(-128, 127)
    ours = EightBits(ours, stored, dtype)
    plain = plain_cache(stored, dtype, *shape)
    for step in steps:
        owners, positions = step.sequence_of_token, step.positions
        slots = tables[owners, positions // block_size] * block_size + positions % block_size
        step = Step(**vars(step) | dict(block_tables=tables, slot_mapping=slots.long()))
        qkv = torch.randn(len(positions), heads + 2 * kv_heads, head_dim).to(dtype)
        out = attend_by_kernel(
            qkv.clone(), NO_NORMS, no_turn(len(qkv), head_dim), ours, window, step)
        query, *pair = qkv.split([heads, kv_heads, kv_heads], dim=1)
        plain[:, step.slot_mapping] = torch.stack(pair)
        expected = plain_attention(query, plain, window, step)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


# ------------------------------------------------------------------------------ in the engine

# the shape of one of the kernels above
OPTIONS = dict(dtype="float32", block_size=16)
KINDS = {"kernel": {}, "plain": dict(kernels=False),
         "transformers": dict(model_impl="transformers")}
PARAMS = [SamplingParams(seed=n, temperature=0.8 * (n % 2), n=1 + 2 * (n % 2), max_tokens=12,
                         ignore_eos=True) for n in range(6)]
PROMPTS = random_prompts([40, 3, 30, 17])
PROMPTS += [PROMPTS[0][:20] + PROMPTS[1], PROMPTS[0]]
SCHEDULES = [
    dict(run_ahead=True, scheduling="mixed", max_num_batched_tokens=16),
    dict(num_kv_blocks=9), dict(num_kv_blocks=9, preemption_mode="swap", swap_space=0.01),
    dict(speculation="prompt-lookup"), dict(tensor_parallel_size=2)]


def tokens_of(llm, prompts, params) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_idle(llm)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name, kind", [
    *(("fp8", kind) for kind in KINDS), ("int8", "kernel"), slow("int8", "plain"),
    slow("int8", "transformers")])
def test_tokens_do_not_depend_on_the_schedule(tiny, name, kind):
    options = OPTIONS | KINDS[kind] | dict(kv_cache_dtype=name, max_num_seqs=8)
    with LLM(tiny, **options, enable_prefix_caching=False) as llm:
        alone = [*map(lambda *each: tokens_of(llm, *each)[0], PROMPTS, PARAMS)]
    for schedule in SCHEDULES if name == "fp8" else SCHEDULES[2:3]:
        if kind == "transformers" and "tensor_parallel_size" in schedule:
            continue
        with LLM(tiny, **options | schedule) as llm:
            assert [tokens_of(llm, PROMPTS, PARAMS) for _ in range(2)] == [alone] * 2, schedule
            assert llm.metrics()["prefix_cache_hits"] > 0
            assert ("num_kv_blocks" in schedule) == (llm.metrics()["num_preemptions"] > 0)


def test_a_block_takes_as_many_bytes_as_it_says(tiny):
    def block_bytes(**options) -> int:
        with LLM(tiny, **OPTIONS | options, num_kv_blocks=9) as llm:
            runner = llm.engine.runner
            assert runner.blocks.nbytes == 10 * runner.block_bytes
            return runner.block_bytes

    for kernels in (True, False):
        exact = block_bytes(kernels=kernels, dtype="bfloat16")
        rounded = block_bytes(kernels=kernels, kv_cache_dtype="fp8_e4m3")
        # heads of 32, and 4 bytes for a scale
        assert rounded == exact * 36 // 64


def test_the_log_says_that_k_and_v_are_rounded(tiny, caplog):
    with caplog.at_level("INFO", logger="nanoengine"):
        LLM(tiny, **OPTIONS, kv_cache_dtype="int8").close()
    assert "kv_cache_dtype='int8': K and V are rounded to 8 bits" in caplog.text


@pytest.mark.parametrize("options, message", [
    (dict(kv_cache_dtype="fp4"), "kv_cache_dtype='fp4' .* one of .*'auto', 'fp8', 'fp8_e4m3', "),
    (dict(attention_backend="varlen"), "attention_backend='varlen' .* one of .*'gather'"),
    (dict(kernels=False, batch_invariant=True), "batch_invariant=True")])
def test_what_is_refused(tiny, options, message):
    check_refused(message, LLM, tiny, **dict(kv_cache_dtype="fp8") | options)


@pytest.fixture
def odd_heads(make_model) -> str:
    """The folder of a model whose heads plain PyTorch cannot store."""
    return make_model(num_hidden_layers=1, head_dim=18)[0]


def test_heads_that_plain_pytorch_cannot_store(odd_heads):
    check_refused("kv_cache_dtype='fp8' .*'auto' for heads of 18 numbers", LLM, odd_heads,
                  kv_cache_dtype="fp8", kernels=False)


@pytest.mark.slow
def test_the_kernel_can_store_odd_heads(odd_heads):
    with LLM(odd_heads, kv_cache_dtype="fp8") as llm:
        assert tokens_of(llm, [[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))


# ---------------------------------------------------------------- on a GPU that is not there


@pytest.mark.parametrize("name, backend", [
    ("fp8", "triton"), slow("int8", "triton"), ("fp8", "gather")])
def test_steps_on_a_gpu(tiny, name, backend):
    """With graphs, in chunks and with swapping: as two at a time, and step by step."""
    needs(backend)
    asked = dict(kv_cache_dtype=name, attention_backend=backend, run_ahead=True)
    plain = make_engine(tiny, **PLAIN | asked | dict(run_ahead=False))
    schedules = (dict(max_num_batched_tokens=48, num_kv_blocks=6, preemption_mode="swap",
                      swap_space=0.01), dict(num_kv_blocks=None))
    expected = plain.generate(LONG_PROMPTS, LONG)
    for options in schedules[:1 if backend == "gather" else 2]:
        engine = make_engine(tiny, **asked | options)
        check_same(engine.generate(LONG_PROMPTS, LONG), expected)
        assert bool(engine.gpu.num_replays) == (backend == "triton")
        if backend == "triton":
            check_no_host_reads(engine.gpu)
    exact = make_engine(tiny, **PLAIN).generate(LONG_PROMPTS, LONG)
    assert all_of(exact) != all_of(expected), "numbers are rounded"


@pytest.mark.parametrize("library, asked, expected", [
    (True, dict(), "triton"), (False, dict(), "gather"), (True, dict(dtype="float32"), "triton"),
    (True, dict(attention_backend="flash-attn"), "one of .*'gather'.* with kv_cache_dtype='fp8'"),
    (True, dict(capability=(8, 0)), "kv_cache_dtype='fp8' .* 'int8': Triton has no e4m3"),
    (True, dict(capability=(8, 0), kv_cache_dtype="int8"), "triton"),
    (True, dict(capability=(8, 0), attention_backend="gather"), "gather")])
def test_the_backend_that_a_gpu_takes(tiny, monkeypatch, library, asked, expected):
    if library:
        needs("triton")
    monkeypatch.setattr(FakeGpu, "capability", asked.pop("capability", (9, 0)))
    options = dict(attention_backend="auto", kv_cache_dtype="fp8", enforce_eager=True) | asked
    if expected in ("triton", "gather"):
        engine = make_engine(tiny, library=library, **options)
        assert engine.llm.engine.runner.backend == expected
    else:
        check_refused(expected, make_engine, tiny, library=library, **options)
