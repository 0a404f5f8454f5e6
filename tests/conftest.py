"""What several tests need: the bundled model, and tiny models with random weights on disk."""

import ast
import asyncio
import dataclasses
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import psutil
import pytest

# Nothing that imports make is garbage, and looking for it would take a third of their time.
gc.disable()
# Two test processes share the cores, each with two threads: one that waits must not spin. This has
# to be said before torch loads its OpenMP.
os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}

import forks  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from nanoengine import LLM, SamplingParams  # noqa: E402
from nanoengine.engine import Engine  # noqa: E402
from nanoengine.features import is_installed, optional, part  # noqa: E402
from nanoengine.observers import Features  # noqa: E402
from nanoengine.policies import TABLES  # noqa: E402
from nanoengine_extras import ALWAYS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
# scripts, which import each other
sys.path.insert(0, str(ROOT / "tests" / "models"))


# What takes longest comes first, so that both processes have work to the end: as a rule, a large
# file. Kernels that several files need are compiled in the first two: they share no shape.
FIRST = ["test_paged_attention", "test_gpu_path", "test_docs", "test_kv_cache", "test_own_layers"]


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: (item.path.stem not in FIRST, -item.path.stat().st_size))


# What other files test is the same with any number of threads, and two of them, which wait for each
# other in every step, take a quarter more time.
TWO_THREADS = {"test_batch_invariant", "test_llm", "test_model", "test_quantized",
               "test_random_requests", "test_sampler", "test_shared_steps",
               "test_shared_steps_threads", "test_threads", "test_torch_settings",
               "test_transformers_models", "test_without"}


@pytest.fixture(autouse=True, scope="module")
def threads_of_a_file(request) -> None:
    has_two = request.path.stem in TWO_THREADS or request.path.parent.name == "cpu"
    torch.set_num_threads(2 if has_two else 1)


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_no_garbage() -> None:
    """A search for garbage need not look at all that has been imported: it takes 0.2 seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_sessionfinish() -> None:
    # or libraries would say that they have leaked
    gc.unfreeze()


# ------------------------------------------------------------------- features that are deleted


def is_deleted(feature: str) -> bool:
    """Whether its file is gone. One that cannot be imported is not deleted: it is broken."""
    folder = ROOT / "nanoengine_extras"
    path = feature.replace(".", "/")
    return not any((folder / file).exists() for file in (f"{path}.py", f"{path}/__init__.py"))


def deleted_feature(error: object) -> str:
    """The name of the deleted feature that an error names; empty for every other error."""
    found = re.search(r"(?:needs nanoengine_extras/|No module named 'nanoengine_extras\.)"
                      r"(\w+[./]\w+)", str(error))
    if not found:
        found = re.search(r"cannot import name '(\w+)' from 'nanoengine_extras\.(\w+)'", str(error))
        name = f"{found[2]}.{found[1]}" if found else ""
    else:
        name = found[1].replace("/", ".")
    return name if name and is_deleted(name) else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A file that imports a deleted feature is skipped."""
    report = yield
    if report.failed and (name := deleted_feature(report.longrepr)):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"Skipped: {name} is deleted"
    return report


def for_feature(name: str, *parameters: tuple) -> list:
    """Parameters of a test that are only there with a feature."""
    return [pytest.param(*each, marks=pytest.mark.needs(name)) for each in parameters]


def slow(*values: object):
    """Parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def skip_for_a_deleted_feature():
    try:
        return (yield)
    except (ValueError, ImportError, AssertionError) as error:
        if name := deleted_feature(error):
            pytest.skip(f"{name} is deleted")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Fixtures can ask for a deleted feature, as tests can. A test of what a feature does unasked
    is marked with its name."""
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if is_deleted(name):
                pytest.skip(f"{name} is deleted")
    return (yield from skip_for_a_deleted_feature())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that asks for a deleted feature is skipped: the error names it."""
    return (yield from skip_for_a_deleted_feature())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """After a test and its own fixtures, the engines that it was given are idle."""
    yield
    for value in item.funcargs.values():
        if isinstance(value, LLM):
            check_idle(value)


@pytest.fixture(autouse=True)
def on_a_cpu(request, monkeypatch) -> None:
    """A test that is not marked `gpu` is for a CPU, on any machine."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a tiny model, by its name in tests/models/architectures.py."""
    import architectures
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            # transformers before 5.24 lacks some
            if name not in [*architectures.ARCHITECTURES, *architectures.VARIANTS]:
                pytest.skip(f"no {name} in transformers {transformers.__version__}")
            made[name] = tmp_path_factory.mktemp("model")
            architectures.make(name, made[name])
        return made[name]

    return find


@pytest.fixture(scope="session")
def bundled() -> str:
    return str(ROOT / "models" / "tiny-qwen3")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Saves a small random model of an architecture; returns its folder and transformers' model.

    Both are copies, which a test may change: to make the same model again takes longer.
    """

    made: dict[str, tuple] = {}

    def make_first(architecture: str, seed: int, changes: dict) -> tuple:
        options = dict(
            vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
            initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0) | changes
        if options["head_dim"] is None:
            del options["head_dim"]
        config = getattr(transformers, f"{architecture}Config")(**options)
        torch.manual_seed(seed)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # or they would be 0 and 1: no test of them
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder)
        return folder, model

    def make(architecture: str = "Qwen3", seed: int = 0, **changes):
        if (key := repr((architecture, seed, changes))) not in made:
            made[key] = make_first(architecture, seed, changes)
        source, model = made[key]
        folder = tmp_path_factory.mktemp(architecture)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return str(folder), deepcopy(model)

    return make


@pytest.fixture(scope="session")
def tiny(make_model) -> str:
    """The folder of a tiny Qwen3 without a tokenizer."""
    return make_model(num_hidden_layers=2)[0]


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def text_copy(bundled, tmp_path) -> Path:
    """A copy of the bundled model, which has a tokenizer and a generation_config.json."""
    return Path(shutil.copytree(bundled, tmp_path / "text"))


@pytest.fixture(scope="session")
def wide_tokenizer(bundled, tmp_path_factory) -> str:
    """The folder of a tokenizer that knows 860 tokens more than the bundled model, its EOS among
    them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    names = [f"<extra{number}>" for number in range(860)]
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.eos_token = names[-1]
    assert tokenizer.eos_token_id == 867 + 859
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


def changed(folder: str | Path, target: Path, **entries) -> Path:
    """A copy of a model, with other entries in its config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | entries))
    return target


def check_blocks(scheduler) -> None:
    """What must hold between two steps.

    Each block is free or referenced, never both; its count is that of the tables it stands in; a
    hash stands for the tokens that are in the block; no two sequences may write to one block; a
    host block is free, or belongs to one swapped sequence.
    """
    manager = scheduler.block_manager
    sequences = [*scheduler.running, *scheduler.waiting]
    tables = [(seq, index, block) for seq in sequences
              for index, block in enumerate(seq.block_table)]
    references = Counter(block for _, _, block in tables)
    free = {block for block, count in enumerate(manager.ref_counts) if count == 0}
    assert manager.ref_counts == [references[block] for block in range(manager.num_blocks + 1)]
    assert sorted([0, *manager.free]) == sorted(free)
    are_cached = [block in manager.hash_of_block for block in manager.free]
    assert are_cached == sorted(are_cached), "blank blocks go first"
    found = {block: block_hash for block_hash, twins in manager.blocks_by_hash.items()
             for block in twins}
    assert found == manager.hash_of_block and all(manager.blocks_by_hash.values())
    size = manager.block_size
    for seq, index, block in tables:
        if block in manager.hash_of_block:
            tokens = seq.token_ids[index * size:(index + 1) * size]
            assert manager.hash_of_block[block] == manager._hash(seq, index)
            assert manager.hash_of_block[block][1] == array("i", tokens).tobytes()
        elif (index + 1) * size > seq.num_computed_tokens:
            assert references[block] == 1, "no two sequences may write to one block"
    if hasattr(manager, "host_tables"):
        host_blocks = sum(manager.host_tables.values(), manager.free_host_blocks)
        assert manager.host_tables.keys() <= set(sequences)
        assert sorted(host_blocks) == list(range(manager.num_host_blocks))


def greedy_reference(model, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates for a prompt alone, greedily."""
    output = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                            max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    return output[0, len(prompt):].tolist()


def random_prompts(lengths, vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def ray_job() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts docs/examples/ray_data.py, as a user would, with a Ray of its own.

    Ray's files are in a folder of their own. Its name is short: sockets lie in it.
    """
    folder = tempfile.mkdtemp(prefix="ray")
    environment = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"} | {
        "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = Path(folder) / "log"
    jobs = []

    def run(*arguments: object) -> subprocess.Popen:
        job = subprocess.Popen(
            [sys.executable, ROOT / "docs" / "examples" / "ray_data.py", *map(str, arguments)],
            env=environment, cwd=folder, stdout=log.open("w"), stderr=subprocess.STDOUT)
        job.log = log
        jobs.append(job)
        return job

    yield run
    for job in jobs:
        if job.poll() is None:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
        job.wait()
    shutil.rmtree(folder, ignore_errors=True)


# -------------------------------------------------------------------------- LLMs under test

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="session")
def llm(bundled):
    """The bundled model in float32."""
    with LLM(bundled, dtype="float32", max_num_seqs=8, num_kv_blocks=128) as llm:
        yield llm


@pytest.fixture(scope="session")
def wide_llm(bundled, wide_tokenizer):
    """The same with the tokenizer that knows more tokens."""
    with LLM(bundled, tokenizer=wide_tokenizer, dtype="float32", max_num_seqs=8,
             num_kv_blocks=128) as llm:
        yield llm


@pytest.fixture(scope="session")
def make_llm(tiny):
    """An LLM of the tiny model, by default in float32 with blocks of 16 tokens."""
    return lambda **options: LLM(tiny, **dict(dtype="float32", block_size=16) | options)


@pytest.fixture(scope="module")
def tiny_llm(make_llm):
    with make_llm(num_kv_blocks=128, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def forked_ranks():
    """Ranks are forks of a process that has imported PyTorch. It has to come before engines."""
    tensor_parallel = optional("nanoengine_extras.running.tensor_parallel")
    with pytest.MonkeyPatch.context() as patch:
        if tensor_parallel:
            patch.setattr(tensor_parallel, "start_process", forks.start_rank)
        yield


def generate(llm, prompts, params=GREEDY) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_idle(llm)
    return outputs


def complete(llm, prompt, **params):
    """The one completion of a prompt."""
    (output,) = generate(llm, [prompt], SamplingParams(**params))
    return output.outputs[0]


def overtaking(base: str = "prefill-first", max_waiting: int = 0) -> object:
    """The policy of this name, for tests of all policies; if it is deleted, its base alone."""
    policies = optional("nanoengine_extras.running.policies")
    return policies.overtaking(base, max_waiting) if policies else base


def policies_of(option: str) -> dict:
    """The engine's policies for an option and, if they are installed, those of the feature."""
    policies = optional("nanoengine_extras.running.policies")
    if option == "kv_allocation":
        return policies.KV_ALLOCATION if policies else {}
    return TABLES[option] | (policies.PARTS[option] if policies else {})


def use_policies(llm: LLM, **changes) -> None:
    """Gives a loaded model an engine with other policies."""
    runner = llm.engine.runner
    runner.features = llm.inputs.features = Features(ALWAYS)
    config = dataclasses.replace(llm.config, **changes)
    llm.engine = part("engine", config, Engine)(config, runner, runner.features)
    llm.driver = type(llm.driver)(llm.engine)


def check_fault(capsys, main: Callable, tool: str, arguments: list[str], message: str) -> None:
    """A tool ends with one sentence about a user's mistake."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"python -m nanoengine {tool}: error: ") and message in last


def check_refused(message: str, call: Callable, *arguments, **options) -> None:
    """A call raises a ValueError, in whose message the pattern is found."""
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)


class Raises:
    """What an argument can be at its worst."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __fspath__ = __len__ = __iter__ = __index__ = __repr__


def in_thread(function, *arguments):
    """The result, or the error, of a call in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result(timeout=60)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    """The same in a task, beside others."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not happened")


def next_number(llm) -> int:
    """The number of the next request."""
    number = next(llm.inputs.numbers)
    llm.inputs.numbers = itertools.count(number)
    return number


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_idle(llm) -> None:
    """Nothing is queued, no step is in flight, and all blocks are free."""
    assert not llm.active and not llm.engine.has_unfinished() and llm.engine.in_flight is None
    scheduler = llm.engine.scheduler
    manager = scheduler.block_manager
    assert not scheduler.waiting and not scheduler.running
    assert manager.num_free_blocks == manager.num_blocks
    assert not getattr(manager, "host_tables", None)
    check_blocks(scheduler)
    if is_installed("running.metrics"):
        metrics = llm.metrics()
        assert metrics["num_requests_waiting"] == metrics["num_requests_running"] == 0
        assert metrics["num_blocks_used"] == 0
        assert metrics["num_blocks_free"] == manager.num_blocks
        assert metrics["num_host_blocks_used"] == metrics["num_requests_swapped"] == 0


def packages_imported_by(file: Path) -> set[str]:
    """The packages that a file imports anywhere, none of them by a relative import."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module))
    return {name.partition(".")[0] for name in imported}
