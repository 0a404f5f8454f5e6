"""lm-evaluation-harness finds the same with our engine, with transformers, and over HTTP.

It is in no extra: `pip install lm-eval accelerate`, else these tests are skipped.
"""

import functools
import importlib.util
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest
from conftest import ROOT, check_idle, slow

pytestmark = [
    pytest.mark.needs("sampling.constraints", "sampling.logprobs", "running.metrics",
                      "tools.scores", "tools.serve", "sampling.texts"),
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None,
                       reason="lm-eval is not installed")]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

SUMS = [(12, 34, [45, 46, 56]), (47, 85, [132, 131, 122]), (20, 30, [60, 50, 40]),
        (15, 31, [47, 36, 46]), (61, 7, [67, 68, 78]), (5, 6, [11, 12, 10])]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Multiple choice, perplexity and free answers, from a file."""
    folder = tmp_path_factory.mktemp("task")
    rows = [{"question": f"{a} + {b} =", "choices": [str(each) for each in choices],
             "answer": choices.index(a + b), "text": f"{a} + {b} = {a + b}"}
            for a, b, choices in SUMS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {
            "test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test", "num_fewshot": 0}
    choices = common | {
        "task": "sums", "output_type": "multiple_choice", "doc_to_text": "question",
        "doc_to_choice": "choices", "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    rolling = common | {
        "task": "texts", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "text", "metric_list": [
            {"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}
    answers = common | {
        "task": "answers", "output_type": "generate_until", "doc_to_text": "question",
        "doc_to_target": "{{choices[answer]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [{"name": "none", "filter": [{"function": "regex", "regex_pattern":
                                                     "(\\d+)"}, {"function": "take_first"}]}]}
    return [choices, rolling, answers]


@pytest.fixture(scope="module")
def evaluate(tasks):
    """Returns the figures of a model, and what it said to each question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    def run(model, only=None, **options):
        asked = [dict(task) for task in tasks if only is None or task["task"] in only]
        found = lm_eval.simple_evaluate(
            model=model, tasks=asked, log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False), **options)
        figures = {(task, name): value for task, values in found["results"].items()
                   for name, value in values.items() if isinstance(value, float)}
        answers = {task: [sample["resps"] for sample in
                          sorted(samples, key=lambda each: each["doc_id"])]
                   for task, samples in found["samples"].items()}
        return figures, answers

    return run


@pytest.fixture(scope="module")
def model(bundled):
    from nanoengine_extras.tools.lm_eval import NanoengineLM
    found = NanoengineLM(bundled, dtype="float32", num_kv_blocks=256)
    yield found
    check_idle(found.llm)
    found.llm.close()


@pytest.fixture(scope="module")
def theirs(bundled):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    return HFLM(bundled, dtype="float32", device="cpu", batch_size=4)


def logprobs_of(answers: dict) -> list[float]:
    return [float(response[0][0] if isinstance(response[0], (tuple, list)) else response[0])
            for task in ("sums", "texts") for each in answers[task] for response in each]


def test_the_figures_are_those_of_transformers(evaluate, model, theirs):
    figures, answers = evaluate(model)
    their_figures, their_answers = evaluate(theirs)
    assert figures["sums", "acc,none"] > 0.6 and figures["answers", "exact_match,none"] > 0.6
    assert figures == pytest.approx(their_figures, rel=1e-5)
    assert logprobs_of(answers) == pytest.approx(logprobs_of(their_answers), abs=1e-3)
    assert answers["answers"] == their_answers["answers"]
    greedy = [response[0][1] for each in answers["sums"] for response in each]
    assert greedy == [response[0][1] for each in their_answers["sums"] for response in each]
    assert {*greedy} == {True, False}


def test_requests_by_hand(model, theirs):
    """Empty contexts, spaces at the end of one, long ones, and texts longer than a window."""
    from lm_eval.api.instance import Instance

    def ask(model, method: str, *arguments: tuple) -> list:
        return getattr(model, method)(
            [Instance(method, {}, each, 0) for each in arguments], disable_tqdm=True)

    long = "Once upon a time " * 700
    pairs = [("", "12 + 34 = 46"), ("12 + 34 = ", "46"), ("12 + 34 =", " 46 and more"),
             ("12 + 34 =", " 45"), (long, " fox")]
    for (ours, is_greedy), (other, other_greedy) in zip(
            ask(model, "loglikelihood", *pairs), ask(theirs, "loglikelihood", *pairs)):
        assert ours == pytest.approx(other, abs=2e-3) and is_greedy == other_greedy
    before = model.llm.metrics()["prefix_cache_hits"]
    ask(model, "loglikelihood", *[(long[:2000], f" {each}") for each in "abcdefgh"])
    assert model.llm.metrics()["prefix_cache_hits"] > before + 1000
    texts = [("a b c",), ("47 + 85 = 132",), ("",)]
    assert ask(model, "loglikelihood_rolling", *texts) == pytest.approx(
        ask(theirs, "loglikelihood_rolling", *texts), abs=1e-3)
    whole, half = ask(model, "loglikelihood_rolling", (long,), (long[:5000],))
    assert whole < half < -10
    given = [("12 + 34 =", {"until": ["6"], "max_gen_toks": 9}),
             ("Once upon a time", {"until": ["\n"], "max_gen_toks": 30}),
             ("Once", {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.7}),
             (long, {"until": ["."], "max_gen_toks": 12})]
    assert ask(model, "generate_until", *given) == ask(theirs, "generate_until", *given)


@pytest.mark.slow
def test_over_http(evaluate, model, bundled):
    """`local-completions` finds the same in the server's answers."""
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanoengine", "serve", "--model", bundled, "--port",
               str(port), "--options", '{"dtype": "float32", "num_kv_blocks": 256}']
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert any("running on" in line for line in server.stderr)
            figures, answers = evaluate(
                "local-completions", only=("sums", "answers"), model_args=dict(
                    model="any", base_url=f"http://127.0.0.1:{port}/v1/completions",
                    tokenizer=bundled, tokenizer_backend="huggingface", num_concurrent=4,
                    max_gen_toks=8))
        finally:
            server.terminate()
            server.stderr.read()
    expected, our_answers = evaluate(model, only=("sums", "answers"))
    assert figures == pytest.approx(expected)
    assert logprobs_of(answers | {"texts": []}) == pytest.approx(
        logprobs_of(our_answers | {"texts": []}), abs=1e-3)


# flags after those of the recipe; and what is printed, or the end of what is wrong
@pytest.mark.parametrize("more, part", [
    (["--tasks", "answers"], "exact_match"),
    (["--tasks", "no_such_task"], "no_such_task; `lm-eval ls tasks` lists those for --tasks"),
    slow(["--tasks", "answers", "--model_args", "pretrained="], "--model_args pretrained=MODEL"),
    slow(["--tasks", "answers", "--device", "gpu"], "device='gpu' is not accepted: it must be"),
    slow(["--tasks", "far"], "check the network, since the data of a task is downloaded when")])
def test_the_command_of_the_recipe(tasks, tmp_path, monkeypatch, capsys, more, part):
    """As printed, but for its task, which is on this disk. The harness's own device is a GPU."""
    from lm_eval.tasks import TaskManager

    from nanoengine_extras.tools import terminal
    # its own tasks are thousands of files, which takes seconds
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(
        TaskManager.__init__, include_defaults=False))
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    line, = [line for line in recipes.splitlines() if " -m nanoengine eval " in line]
    _, module, name, *printed, option, _ = shlex.split(line)
    assert (module, name, option) == ("-m", "nanoengine", "--tasks")
    far = {"task": "far", "dataset_path": "no-one/has-this", "output_type": "generate_until",
           "test_split": "test", "doc_to_text": "a", "doc_to_target": "b"}
    for task in (tasks[2], far):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))
    # it logs to what is captured here
    monkeypatch.setattr(logging.getLogger("lm_eval"), "handlers", [])
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [
        "nanoengine", *printed, "--include_path", str(tmp_path), *more])
    is_right = part == "exact_match"
    with nullcontext() if is_right else pytest.raises(SystemExit, match="2"):
        terminal.main()
    output, error = capsys.readouterr()
    assert part in (output if is_right else error.splitlines()[-1]), error
