"""bench.py: its workloads, what it measures, and engines in processes of their own."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

import bench  # noqa: E402
from nanoengine_extras.tools.lab.options import read_prompts  # noqa: E402
from nanoengine.config import EngineConfig  # noqa: E402
from nanoengine.loader import load_config  # noqa: E402
from nanoengine.observers import Features  # noqa: E402
from nanoengine.requests import InputProcessor  # noqa: E402

SMALL = ("--num-seqs", 4, "--min-input", 8, "--max-input", 24, "--min-output", 8,
         "--max-output", 16)


def run(tmp_path, *flags) -> dict:
    file = tmp_path / "result.json"
    bench.main([*map(str, flags), "--json", str(file)])
    return json.loads(file.read_text())


def draw(*flags):
    return bench.parse([*map(str, flags)])[1]


def check_fault(capsys, flags, message: str) -> None:
    """One line about a user's mistake."""
    # of a model that a fixture has saved
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench.main([*map(str, flags)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_workloads_for_a_cpu(make_model):
    # the vocabulary must be larger than the ids that are drawn
    model = make_model(vocab_size=20_000)[0]
    random.seed(0)  # nano-vllm's order: all prompts, then all lengths
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 256))]
               for _ in range(32)]
    mixed = draw("--model", model, "--workload", "cpu-mixed")
    assert mixed.prompts == prompts and mixed.temperature == 0
    assert mixed.lengths == [random.randint(32, 128) for _ in range(32)] == mixed.max_tokens
    decode = draw("--workload", "cpu-decode")
    assert [*map(len, decode.prompts)] == [64] * 16 and decode.lengths == [256] * 16
    prefix = draw("--workload", "cpu-prefix")
    assert [*map(len, prefix.prompts)] == [544] * 32 and prefix.lengths == [32] * 32
    assert os.path.commonprefix(prefix.prompts) == prefix.prompts[0][:512]
    assert bench.warm_up_for(prefix).prompts[0][0] != prefix.prompts[0][0]
    changed = draw("--workload", "cpu-decode", "--num-seqs", 2, "--temperature", 1)
    assert changed.temperature == 1 and len(changed.prompts) == 2


def test_the_default_is_nano_vllms_workload():
    workload = draw()
    random.seed(0)
    prompts = [[random.randint(0, 10000) % 2048 for _ in range(random.randint(100, 1024))]
               for _ in range(256)]
    assert [*map(len, workload.prompts)] == [*map(len, prompts)]
    assert workload.lengths == [random.randint(100, 1024) for _ in range(256)]
    assert workload.temperature == 0.6


def test_two_engines_in_turn(tmp_path, capsys):
    found = run(tmp_path, *SMALL, "--engine", "nanoengine,hf", "--repeat", 2, "--num-kv-blocks", 32,
                "--block-size", 32)
    assert [len(runs) for runs in found["runs"].values()] == [2, 2]
    ours, theirs = found["medians"].values()
    assert ours["output_tokens_per_second"] > 0 < theirs["output_tokens_per_second"]
    for name in ("decode_batch", "decode_step_ms", "first_token_ms", "per_token_ms", "weights_mib",
                 "kv_pool_mib", "limit_percent", "idle_percent", "peak_memory_mib"):
        assert ours[name] > 0, name
    assert ours["limit_percent"] < 100 > ours["idle_percent"]
    # a fresh engine behind the warm-up: only the steps of the workload count
    assert ours["prefix_cache_queries"] == sum(map(len, draw(*SMALL).prompts))
    assert "output tokens/s, nanoengine / hf:" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own(tmp_path):
    found = run(tmp_path, *SMALL, "--workload", "cpu-prefix", "--repeat", 2,
                "--python", f"nanoengine=env OMP_NUM_THREADS=1 {sys.executable}")
    assert len(found["runs"]["nanoengine"]) == 2
    assert found["medians"]["nanoengine"]["prefix_cache_hits"] == 3 * 512
    assert found["elsewhere"]["nanoengine"]["threads"] == 1


def test_own_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('Once upon a time\n\n{"prompt": "47 + 85 ="}\n{"prompt_token_ids": [5, 6]}\n')
    workload = draw("--prompts", file, "--min-output", 3, "--max-output", 3)
    assert len(workload.prompts) == 3 and workload.prompts[2] == [5, 6]
    assert workload.lengths == [3, 3, 3]
    found = run(tmp_path, "--prompts", file, "--min-output", 2, "--max-output", 4)
    assert found["medians"]["nanoengine"]["prefix_cache_queries"] == sum(
        map(len, workload.prompts))


def test_lines_of_prompts_end_at_newlines_alone(tmp_path, bundled):
    prompts = ["one\u2028two", "three\x0cfour", "five\x85six", "sev\x1cen", "nine\rten", "ø"]
    inputs = InputProcessor(EngineConfig(bundled, device="cpu"), load_config(Path(bundled)),
                            Path(bundled), Features())
    inputs.max_model_len = 99
    file = tmp_path / "prompts.txt"
    as_json = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    for lines in (prompts, as_json):
        for newline in ("\n", "\r\n"):
            for mark in ("", "\ufeff"):
                text = mark + newline.join([*lines[:2], "", *lines[2:]]) + newline
                file.write_bytes(text.encode())
                found = [inputs.tokenizer.decode(ids) for ids in read_prompts(file, inputs)]
                assert found == prompts


@pytest.mark.needs("running.strict")
@pytest.mark.parametrize("model, content, message", [
    ("tiny", b"Once upon a time\n", ", line 1: prompts[0]: there is no tokenizer"),
    ("bundled", None, "prompts.txt: [Errno 2] No such file"),
    ("bundled", b"\xff\xfe\x00", "prompts.txt: 'utf-8' codec can't decode"),
    ("bundled", b"\n \n", "prompts.txt has no prompts"),
    ("bundled", b'a\n\n{"prompt": "b"', ", line 3: Expecting ',' delimiter"),
    ("bundled", b'a\n{"text": "b"}', ", line 2: prompts[0]={'text': 'b'} is not accepted"),
    ("bundled", b'{"prompt": 5}', ", line 1: prompts[0]={'prompt': 5} is not accepted"),
    ("bundled", b'{"prompt_token_ids": []}', ", line 1: prompts[0] has 0 tokens"),
    ("bundled", b'{"prompt_token_ids": [1, 2048]}', ", line 1: prompts[0]: token id 2048 is out"),
    ("bundled", b'{"prompt_token_ids": "ab"}', ", line 1: prompts[0]={")])
def test_bad_prompts_are_one_line(request, tmp_path, capsys, model, content, message):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    flags = "--model", request.getfixturevalue(model), "--prompts", file
    check_fault(capsys, flags, f"{file}{message.removeprefix('prompts.txt')}")


@pytest.mark.parametrize("flags, inputs, outputs", [
    ((), (100, 1024), (100, 1024)),
    (("--max-output", 64), (100, 1024), (64, 64)),
    (("--min-output", 2000), (100, 1024), (2000, 2000)),
    (("--max-output", 300), (100, 1024), (100, 300)), (("--min-output", 5), (100, 1024), (5, 1024)),
    (("--max-input", 8), (8, 8), (100, 1024)), (("--min-input", 1500), (1500,) * 2, (100, 1024)),
    (("--max-input", 8, "--max-output", 9), (8, 8), (9, 9)),
    (("--min-input", 2, "--max-input", 3), (2, 3), (100, 1024)),
    (("--workload", "cpu-decode", "--max-output", 3), (64, 64), (3, 3)),
    (("--workload", "decode-heavy", "--n-k", 0.01, "--min-output", 20), (1000,) * 2, (20, 20)),
    (("--workload", "prefill-heavy", "--n-k", 0.01, "--max-output", 20), (10, 10), (20, 20))])
def test_a_bound_that_is_given_alone_moves_the_other_one(flags, inputs, outputs):
    workload = draw(*flags, "--num-seqs", 400)
    for bounds, sizes in ((inputs, [*map(len, workload.prompts)]), (outputs, workload.lengths)):
        low, high = bounds
        assert low <= min(sizes) <= low + (high - low) // 10
        assert high - (high - low) // 10 <= max(sizes) <= high


@pytest.mark.parametrize("flags, part", [
    (("--min-input", 9, "--max-input", 8), "--min-input"),
    (("--max-output", 0), "--min-output"), (("--min-output", -1), "--min-output"),
    (("--max-output", "many"), "--max-output"), (("--num-seqs", 0), "--num-seqs"),
    (("--num-seqs", 2.5), "--num-seqs"), (("--repeat", 0), "--repeat"),
    (("--quantization", "int3"), "quantization='int3'"),
    (("--engine", "llama.cpp"), "--engine llama.cpp"),
    (("--engine", "vllm"), "--python"), (("--python", "vllm"), "--python ENGINE=COMMAND"),
    (("--python", "other=python"), "--python ENGINE=COMMAND"),
    (("--scheduling", "fair"), "scheduling"),
    (("--block-size", 0), "block_size"),
    (("--model", "no such folder"), "no such folder"),
    (("--model", ROOT / "docs"), "has no config.json"),
    (("--model", ROOT / "LICENSE"), "is a file"),
    (("--no-such-flag",), "--no-such-flag"),
    (("--tokenizer", "no such folder", *SMALL), "tokenizer='no such folder'"),
    (("--temperature", -1, *SMALL), "temperature=-1.0 is not accepted"),
])
def test_bad_flags_are_one_line(capsys, monkeypatch, flags, part):
    if part == "--python":
        monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    check_fault(capsys, flags, part)
