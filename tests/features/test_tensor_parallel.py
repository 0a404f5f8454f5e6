"""Tensor parallelism on the CPU: two ranks give the tokens of one, and leave nothing behind."""

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    GREEDY, ROOT, check_idle, check_refused, generate, random_prompts, slow, token_ids,
    use_policies, wait_until)
from forks import start_rank

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.step_inputs import Launched
from nanoengine_extras.running import tensor_parallel
from nanoengine_extras.running.tensor_parallel import Group, Ranks

PROMPTS = random_prompts([3, 17, 40, 9, 70, 22])
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10 + i, logprobs=2,
                         n=1 + 2 * (i % 2), top_p=0.9 if i % 3 == 1 else 1.0,
                         presence_penalty=0.3 * (i % 4 == 3)) for i in range(len(PROMPTS))]
SMALL = dict(dtype="float32", block_size=16, num_kv_blocks=100, max_num_seqs=8)
SCARCE = SMALL | dict(num_kv_blocks=9, max_num_seqs=5, max_num_batched_tokens=16,
                      preemption_mode="swap", swap_space=0.01)
# the tests of a start, of test_deletable.py and of the tutorial do not fork
pytestmark = pytest.mark.usefixtures("forked_ranks")
start_process = tensor_parallel.start_process


def everything(llm: LLM) -> list:
    """What a model generates in all ways, and twice, so that the prefix cache has something."""
    outputs = [output for _ in range(2)
               for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    found = [[completion.token_ids for completion in output.outputs] for output in outputs]
    found += [output.outputs[0].token_ids for output in llm.stream(PROMPTS[:2], GREEDY)
              if output.finished]
    beams = llm.beam_search(PROMPTS[:2], BeamSearchParams(2, 6))
    check_idle(llm)
    return found + [[beam.tokens for beam in output.sequences] for output in beams]


@pytest.mark.parametrize("architecture, changes", [
    ("Llama", dict(attention_bias=True, mlp_bias=True)), slow("Mistral", dict(sliding_window=20)),
    slow("Qwen2", dict(head_dim=None, hidden_size=128)),
    ("Qwen3", dict(tie_word_embeddings=True))])
def test_two_ranks_give_the_tokens_of_one(make_model, architecture, changes):
    """Fused, tied, biased weights, and a vocabulary that two ranks cannot share evenly."""
    folder, _ = make_model(architecture, vocab_size=321, num_hidden_layers=2, **changes)
    with LLM(folder, **SMALL) as llm:
        expected = everything(llm)
        logprobs = llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].outputs[0].logprobs
    with LLM(folder, tensor_parallel_size=2, **SMALL) as llm:
        assert everything(llm) == expected
        assert llm.metrics()["prefix_cache_hits"] > 0
        others = llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].outputs[0].logprobs
        (process,) = llm.engine.runner.ranks.processes
    assert process.returncode is not None, "ended by close"
    for left, right in zip(logprobs, others, strict=True):
        assert left.keys() == right.keys()
        for token_id in left:
            assert left[token_id].logprob == pytest.approx(right[token_id].logprob, abs=1e-4)


def test_two_ranks_in_bfloat16(make_model):
    """Where the CPU has products of its own, also of a part of an odd vocabulary."""
    folder, _ = make_model(vocab_size=321, num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    found = []
    for size in (1, 2):
        with LLM(folder, tensor_parallel_size=size, **SMALL | dict(dtype="bfloat16")) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append(torch.tensor([
            [output.outputs[0].logprobs[0][token_id].logprob for token_id in range(321)]
            for output in outputs]))
    torch.testing.assert_close(*found, atol=0.1, rtol=0.05)


@pytest.fixture(scope="module")
def one_rank(tiny):
    with LLM(tiny, **SMALL) as llm:
        yield llm


# policies that cannot be sent to another process
OF_A_SCRIPT = dict(
    scheduling=lambda scheduler: scheduler.build([*scheduler.running], admit=True),
    preemption_victim=lambda running: running[0])


@pytest.fixture(scope="module")
def ranks_with_few_blocks(tiny, forked_ranks):
    with LLM(tiny, tensor_parallel_size=2, **SCARCE, **OF_A_SCRIPT) as llm:
        yield llm


@pytest.mark.parametrize("run_ahead", [False, True])
def test_two_ranks_with_few_blocks_chunks_and_steps_ahead(
        one_rank, ranks_with_few_blocks, run_ahead):
    use_policies(ranks_with_few_blocks, run_ahead=run_ahead, scheduling="prefill-first",
                 preemption_victim="youngest")
    assert everything(ranks_with_few_blocks) == everything(one_rank)
    metrics = ranks_with_few_blocks.metrics()
    assert metrics["swap_in_blocks"] > 0 and metrics["copy_on_write_blocks"] > 0


@pytest.fixture
def two_ranks(tiny):
    with LLM(tiny, tensor_parallel_size=2, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def lasting_ranks(tiny, forked_ranks):
    """For tests after which the ranks are as they were."""
    with LLM(tiny, tensor_parallel_size=2, **SMALL) as llm:
        yield llm


def test_after_an_error_of_a_request_the_ranks_still_agree(lasting_ranks):
    def fail(input_ids, scores):
        raise KeyError("on purpose")

    expected = token_ids(generate(lasting_ranks, PROMPTS))
    params = [*[GREEDY] * 5, SamplingParams(n=2, logits_processors=[fail])]
    check_refused("request .* its logits processor .*on purpose", generate, lasting_ranks, PROMPTS,
                  params)
    assert token_ids(generate(lasting_ranks, PROMPTS)) == expected


def test_ctrl_c_while_tokens_are_waited_for(lasting_ranks, monkeypatch):
    def interrupt(launched):
        signal.raise_signal(signal.SIGINT)
        return wait(launched)

    # also if pytest runs in the background, where a shell has Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = token_ids(generate(lasting_ranks, PROMPTS))
    wait = Launched.wait
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Launched, "wait", interrupt)
        generate(lasting_ranks, PROMPTS)
    assert token_ids(generate(lasting_ranks, PROMPTS)) == expected


@pytest.mark.slow
def test_a_rank_that_dies_is_named_at_once(two_ranks, monkeypatch):
    """And a device that waits for it is freed, without which a GPU would wait for ever."""
    ranks = two_ranks.engine.runner.ranks
    (process,) = ranks.processes
    is_aborted = threading.Event()

    backend = ranks.backend
    # that of a CPU, which can be aborted like a GPU's
    monkeypatch.setattr(ranks, "backend", SimpleNamespace(
        allreduce=backend.allreduce, allgather=backend.allgather, broadcast=backend.broadcast,
        abort=is_aborted.set))
    monkeypatch.setattr(ranks, "device", "cuda")
    two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)
    died = []

    def kill():
        died.append(time.monotonic())
        process.kill()

    threading.Timer(0.1, kill).start()
    with pytest.raises(RuntimeError, match="rank 1 of the engine has died"):
        while True:
            two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert time.monotonic() - died[0] < 10
    assert is_aborted.wait(timeout=10)
    with pytest.raises(RuntimeError, match="rank 1 of the engine has died"):
        two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)


# what rank 1 does, and the places where it does: lines of its program
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
PLACES = {
    "before it reaches rank 0": DIE,
    "before it is counted": f"tp.Group.connect = lambda *_: {DIE}",
    "while rank 0 connects": f"""
        def connect(group, device):
            group.store.add("ranks", 1)
            {DIE}
        tp.Group.connect = connect""",
    "before its weights": f"tp.RankRunner.load_model = lambda *_, **__: {DIE}",
    "while sizes are compared": f"tp.Group.least = lambda *_: {DIE}",
    **{f"in sum {number} of the steps": f"""
        add, count = tp.Group.sum, iter(range(1, 999))
        tp.Group.sum = lambda group, x: {DIE} if next(count) == {number} else add(group, x)"""
       for number in (1, 2, 9)},
    "before it joins logits": f"tp.Group.join = lambda group, x: {DIE} if x.is_floating_point() "
                              "else type(group).gather(group, x)",
    "after a step": f"""
        follow = tp.RankRunner.follow
        tp.RankRunner.follow = lambda *step: (follow(*step), {DIE})"""}


@pytest.fixture
def start_rank_1(monkeypatch):
    """Lets the next rank 1 begin with some more lines."""
    def start(lines: str) -> None:
        code = ("import os, signal\n"
                "from nanoengine_extras.running import tensor_parallel as tp\n"
                "tp.Group.gather = tp.Group.join\n" + textwrap.dedent(lines))
        monkeypatch.setattr(tensor_parallel, "start_process",
                            functools.partial(start_rank, lines=code))
    return start


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_anywhere_is_named(tiny, start_rank_1, place):
    start_rank_1(PLACES[place])
    # the first of these is the error of `LLM`, which names the model, too
    with pytest.raises((ValueError, RuntimeError), match="rank 1 of the engine has died: see std"):
        with LLM(tiny, tensor_parallel_size=2, **SMALL) as llm:
            for _ in range(9):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)


class LostWork:
    """An operation of Gloo that has lost the news of a dead rank: it never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout=None) -> None:
        assert timeout, "it would wait for ever"
        raise RuntimeError("Operation timed out!")


class LosingBackend:
    """It kills rank 1, and loses the news. Its destructor would wait for the operation."""

    destroyed: list[str] = []

    def __init__(self, process):
        self.process = process

    def allreduce(self, tensors):
        self.process.kill()
        return LostWork()

    def __del__(self):
        self.destroyed.append("backend")


def test_news_that_gloo_has_lost(two_ranks):
    """The rank is named, and the operation is not waited for, not even at the end."""
    ranks = two_ranks.engine.runner.ranks
    ranks.backend = LosingBackend(*ranks.processes)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 of the engine has died: see stderr"):
            two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_idle(two_ranks)
    ranks.backend = None
    gc.collect()
    assert not LosingBackend.destroyed


def test_a_connection_that_never_comes(tiny, start_rank_1, monkeypatch):
    """Rank 1 is counted and dies, and the backend of rank 0 waits for it."""
    start_rank_1(PLACES["while rank 0 connects"])
    is_over = threading.Event()
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", lambda *_: is_over.wait())
    try:
        with pytest.raises(ValueError, match="rank 1 of the engine has died: see stderr"):
            LLM(tiny, tensor_parallel_size=2, **SMALL)
    finally:
        is_over.set()


def test_an_error_at_the_start_of_a_rank_is_told(tiny, tmp_path, monkeypatch, capfd):
    send = Ranks.send
    monkeypatch.setattr(Ranks, "send", lambda ranks, options, part, folder: send(
        ranks, options, part, tmp_path))  # where there are no weights
    with pytest.raises(ValueError, match="rank 1 of the engine has died: see stderr"):
        LLM(tiny, tensor_parallel_size=2, **SMALL)
    assert f"ValueError: {tmp_path}: its files lack" in capfd.readouterr().err


def test_a_rank_that_does_not_even_start_is_named(tiny, monkeypatch):
    # a process of its own, as a user's
    monkeypatch.setattr(tensor_parallel, "start_process", start_process)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    began = time.monotonic()
    check_refused("rank 1 of the engine has died", LLM, tiny, tensor_parallel_size=2, **SMALL)
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_ranks_that_are_out_of_step_are_ended(two_ranks, error):
    """An error in the middle of the model on rank 0 alone: the next step's sums would be wrong."""
    def fail(*inputs):
        raise error("on purpose")

    (process,) = two_ranks.engine.runner.ranks.processes
    two_ranks.engine.runner.model.layers[1].register_forward_pre_hook(fail)
    for expected in (error, RuntimeError):
        with pytest.raises(expected, match="on purpose"):
            two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert process.returncode is not None


def test_policies_that_are_functions_of_a_script(one_rank, ranks_with_few_blocks):
    """They stay on rank 0."""
    use_policies(ranks_with_few_blocks)
    params = SamplingParams(temperature=0, max_tokens=40)
    found = token_ids(generate(ranks_with_few_blocks, PROMPTS, params))
    assert ranks_with_few_blocks.metrics()["num_preemptions"] > 0
    assert found == token_ids(generate(one_rank, PROMPTS, params))


SCRIPT = """
from nanoengine import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, dtype="float32", block_size=16, num_kv_blocks=100)
other = LLM({folder!r}, tensor_parallel_size=2, dtype="float32", block_size=16, num_kv_blocks=100)
for process in [*llm.engine.runner.ranks.processes, *other.engine.runner.ranks.processes]:
    print(process.pid, flush=True)
while True:
    for each in (llm, other):
        each.generate([[1, 2, 3]], SamplingParams(max_tokens=20), use_tqdm=False)
    print("alive", flush=True)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_runs_two_engines_and_leaves_nothing_when_it_is_killed(
        tiny, tmp_path):
    """The other ranks do not run the script again, and end with it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=tiny))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                          env=environment) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert process.stdout.readline() == "alive\n"
        process.kill()
    wait_until(lambda: not any(map(is_running, pids)), seconds=10)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("size, options, message", [
    (3, {}, "size=3 .* a divisor of num_attention_heads=4"),
    (4, {}, "size=4 .* a divisor of num_key_value_heads=2"),
    (0, {}, "size[^@]*greater than or equal"), (2, dict(batch_invariant=True), "batch_invariant"),
    (2, dict(device="cuda"), "size=2 .* at most 1, the number of GPUs")])
def test_what_is_refused(tiny, monkeypatch, size, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = dict(device="cpu", tensor_parallel_size=size) | options
    check_refused(message, LLM, tiny, **SMALL, **options)


def test_what_cannot_be_divided_is_refused(make_model):
    odd = make_model(intermediate_size=95, num_hidden_layers=1)[0]
    check_refused("tensor_parallel_size=2 .* of intermediate_size=95", LLM, odd,
                  tensor_parallel_size=2, **SMALL)


@pytest.mark.parametrize("shape, target, rank, expected", [
    ((8, 6), (8, 6), 1, [slice(None), slice(None)]),
    ((8, 6), (4, 6), 1, [slice(4, 8), slice(None)]),
    ((8, 6), (8, 3), 0, [slice(None), slice(0, 3)]),
    ((7,), (4,), 1, [slice(None)]),
    # what does not fit is read whole, and refused by the loader
    ((8, 6), (2, 6), 0, [slice(None)] * 2), ((8,), (8, 1), 0, [slice(None)]),
    ((8, 7), (8, 3), 0, [slice(None)] * 2)])
def test_a_rank_reads_its_part_of_a_tensor(shape, target, rank, expected):
    group = object.__new__(Group)
    group.rank, group.size = rank, 2
    tensor = MagicMock()
    tensor.get_shape.return_value = list(shape)
    group.read_part(tensor, torch.empty(target))
    tensor.__getitem__.assert_called_once_with(tuple(expected))
