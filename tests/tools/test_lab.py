"""The lab: comparisons, the simulation against the engine, pictures, and commands of the docs."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, check_refused, for_feature

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

import bench  # noqa: E402
from nanoengine_extras.tools.lab import compare, drawing, figures, limits, options, simulate  # noqa: E402
from nanoengine import BeamSearchParams, LLM, SamplingParams  # noqa: E402
from nanoengine.model_runner import ModelRunner  # noqa: E402

LAB = "-m nanoengine_extras.tools.lab."
COMMANDS = {"bench.py": bench, f"{LAB}compare": compare, f"{LAB}simulate": simulate}
SMALL = ("--num-seqs", 8, "--min-input", 8, "--max-input", 40, "--min-output", 8,
         "--max-output", 40, "--repeat", 1)


def run(module, tmp_path, *flags) -> dict:
    file = tmp_path / "result.json"
    module.main([*map(str, flags), "--json", str(file)])
    return json.loads(file.read_text())


def draw(*flags):
    parser = compare.comparison_parser(None, "small", 1)
    return parser.draw(parser.parse([*map(str, flags)]))


# ----------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize("comparison", ["batching", "memory", "preemption", "victims", "prefix",
                                        "sampling", "overtaking"])
def test_comparisons(tmp_path, comparison):
    found = run(compare, tmp_path, comparison, *SMALL, "--num-kv-blocks", 12,
                "--true-lengths", 0.5)["medians"]
    assert list(found) == list(compare.COMPARISONS[comparison])
    for row in found.values():
        assert row["output_tokens_per_second"] > 0 < row["mean_batch"]
        assert 0 < row["first_token_ms"] <= row["first_token_ms_p99"]
        assert 0 <= row["kv_waste_percent"] < 100 >= row["kv_used_percent"] > 0
    if comparison == "memory":
        assert found["max-length"]["mean_batch"] < found["reserve"]["mean_batch"]
        assert found["reserve"]["mean_batch"] < found["on-demand"]["mean_batch"]
        assert found["reserve"]["num_preemptions"] == 0
    if comparison == "preemption":
        assert found["swap"]["swapped_mib"] > 0 == found["recompute"]["swapped_mib"]
        assert found["recompute"]["recomputed_tokens"] > 0


def test_runs_in_turn_with_their_spread(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n47 + 85 =\n")
    found = run(compare, tmp_path, "prefix", "--prompts", prompts, "--min-output", 4,
                "--max-output", 4, "--num-kv-blocks", 20)
    assert [len(runs) for runs in found["runs"].values()] == [3, 3]
    rates = sorted(run["output_tokens_per_second"] for run in found["runs"]["no cache"])
    assert found["medians"]["no cache"]["output_tokens_per_second"] == rates[1]
    assert found["medians"]["no cache"]["prefix_cache_queries"] > 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "output tokens" in line)
    assert re.search(r"[\d,.]+ \([\d,.]+-[\d,.]+\)", line)


@pytest.fixture
def steps_as_seconds(monkeypatch):
    """A clock of the engine on which every step takes a second, and nothing else any time."""
    now = [0.0]
    launch, make = ModelRunner.launch, options.Features

    def launch_for_a_second(runner, batch):
        now[0] += 1
        return dataclasses.replace(launch(runner, batch), done=now[0])

    def make_features(files=()):
        features = make(files)
        features["Metrics"].clock = lambda: now[0]
        return features

    monkeypatch.setattr(ModelRunner, "launch", launch_for_a_second)
    monkeypatch.setattr(options, "Features", make_features)


@pytest.mark.parametrize("comparison", ["none", "sampling"])
def test_what_the_figures_of_a_run_are(tmp_path, steps_as_seconds, comparison):
    """Eight prompts of 40 tokens, in two steps of prompts, each with 10 outputs: eleven steps."""
    found = run(compare, tmp_path, comparison, "--num-seqs", 8, "--min-input", 40,
                "--max-input", 40, "--min-output", 10, "--max-output", 10, "--repeat", 1,
                "--num-kv-blocks", 200, "--max-num-batched-tokens", 160)["medians"]
    for name, row in found.items():
        count = 4 if name == "n = 4" else 1
        expected = {
            "num_steps": 11, "mean_batch": (8 + 9 * 8 * count) / 11, "num_preemptions": 0,
            # of those in the first step the second token comes two steps later
            "first_token_ms": 1500, "first_token_ms_p99": 2000,
            "per_token_ms": 1000 * (10 / 9 + 1) / 2, "per_token_ms_p99": 1000 * 10 / 9,
            "prefill_batch": 4, "prefill_step_ms": 1000, "prefill_tokens_per_second": 160,
            "decode_batch": 8 * count, "decode_step_ms": 1000,
            "decode_tokens_per_second": 8 * count, "swapped_mib": 0, "recomputed_tokens": 0,
            "idle_percent": 0, "idle_ms_per_step": 0, "prefix_cache_queries": 320}
        figures = {figure: row[figure] for figure in expected}
        assert figures == pytest.approx(expected), name
        tokens = row["output_tokens_per_second"] * row["seconds"]
        assert tokens == pytest.approx(80 * count)


def test_right_guesses_are_tokens_of_decodes(tmp_path, steps_as_seconds, monkeypatch):
    """All guesses are right: each step of a decode then brings several tokens."""
    from nanoengine_extras.sampling.speculation import SpeculatingEngine
    monkeypatch.setattr(SpeculatingEngine, "_worthwhile", lambda self, asked, batch: {
        seq: found[0] for seq, found in asked.items()})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("count 17 to 23 = 17 18 19 20 21 22 23 count 17 to 23 =\n")
    plain, found = run(compare, tmp_path, "speculation", "--prompts", prompts, "--min-output", 20,
                       "--max-output", 20, "--repeat", 1, "--temperature", 0)["medians"].values()
    num_decodes = found["num_steps"] - 1
    assert plain["num_steps"] == 20 > found["num_steps"] > 2
    assert plain["decode_tokens_per_second"] == pytest.approx(1)
    assert found["decode_tokens_per_second"] == pytest.approx(19 / num_decodes)
    # the tokens of a step have one time
    assert found["per_token_ms"] == pytest.approx(1000 * num_decodes / 19)


def test_figures_are_plain_numbers():
    numbers = {0: "0", 0.5134: "0.513", 99.96: "100", 101.2: "101", 12345.6: "12,346",
               -12345.6: "-12,346", -5.5: "-5.5", 1.02e9: "1,020,000,000"}
    assert {number: figures.in_short([number]) for number in numbers} == numbers
    assert figures.in_short([1, 20, 3000]) == "20 (1-3,000)"


def test_blocks_for_a_third_of_the_need(tmp_path):
    workload = draw(*SMALL)
    needs = [-(-(len(prompt) + most) // 16)
             for prompt, most in zip(workload.prompts, workload.max_tokens)]
    for flags in ((), ("batching",)):  # with and without a comparison
        found = run(compare, tmp_path, *flags, *SMALL)
        assert found["num_kv_blocks"] == max(*needs, sum(needs) // 3)


def test_a_model_is_found_as_its_options_say(
        bundled, wide_tokenizer, tmp_path, monkeypatch):
    asked = []

    def download(name, *, revision, cache_dir, allow_patterns):
        asked.append((name, revision, cache_dir))
        return bundled

    monkeypatch.setattr("nanoengine_extras.models.hub.snapshot_download", download)
    parser = options.Parser(None, "small")
    # a commit can begin with a digit
    parser.parse(["--model", "some/model", "--revision", "4f2a", "--download-dir", "2024"])
    assert asked == [("some/model", "4f2a", "2024")]
    (tmp_path / "prompts").write_text("<extra7>\n")
    flags = ["--prompts", str(tmp_path / "prompts"), "--tokenizer", wide_tokenizer]
    # which the bundled tokenizer does not have, nor the model
    check_refused("line 1: prompts.0.: token id 874 is out of vocabulary", parser.parse, flags)


@pytest.mark.parametrize("name, flags", [("gpt2", []), ("llama", ["--model-impl", "transformers"])])
def test_models_of_transformers_have_no_limit(folder_of, tmp_path, name, flags):
    found = run(bench, tmp_path, "--model", folder_of(name), *flags, *SMALL, "--num-kv-blocks", 80,
                "--block-size", 16, "--dtype", "float32")["medians"]["nanoengine"]
    assert found["output_tokens_per_second"] > 0 < found["kv_pool_mib"]
    assert not {"limit_percent", "weights_mib"} & found.keys()


def test_workloads():
    heavy = draw("--workload", "prefill-heavy", "--n-k", 0.3, "--num-seqs", 5)
    assert {*map(len, heavy.prompts)} == {300} and {*heavy.lengths} == {1000}
    shorter = draw("--workload", "decode-heavy", "--n-k", 0.3, "--true-lengths", 0.5)
    assert {*shorter.max_tokens} == {300} and len({*shorter.lengths}) > 50
    assert 0.4 < sum(shorter.lengths) / sum(shorter.max_tokens) < 0.6
    assert max(shorter.lengths) <= 300
    shared = draw("--workload", "shared-prefix", "--num-seqs", 4, "--max-input", 200)
    assert os.path.commonprefix(shared.prompts) == shared.prompts[0][:256]


# ------------------------------------------------------------------------------ simulation


def test_a_simulated_schedule_is_the_real_one(tmp_path):
    flags = ("memory", *SMALL, "--num-kv-blocks", 12, "--true-lengths", 0.5,
             "--max-num-batched-tokens", 64, "--max-num-seqs", 6, "--max-model-len", 80)
    real, simulated = (run(module, tmp_path, *flags)["medians"] for module in (compare, simulate))
    for name in real:
        for figure in ("num_steps", "mean_batch", "num_preemptions", "recomputed_tokens"):
            assert real[name][figure] == simulated[name][figure], (name, figure)


def test_arrivals(tmp_path):
    """With many requests a second, they wait longer, and the batches are larger."""
    flags = ("--workload", "decode-heavy", "--n-k", 0.2, "--rate")
    calm, busy = (run(simulate, tmp_path, *flags, *more)["medians"]["nanoengine"]
                  for more in ((2.5, "--num-seqs", 30), (250, "--num-seqs", 300)))
    assert calm["first_token_ms"] < busy["first_token_ms"]
    assert calm["output_tokens_per_second"] < busy["output_tokens_per_second"]


def test_a_simulation_says_of_what(tmp_path, capsys):
    found = run(simulate, tmp_path, *SMALL)
    assert "Llama-3-8B in bf16 on an A100" in capsys.readouterr().out
    assert found["cost"]["step_seconds"] == pytest.approx(0.00928, rel=0.01)
    assert found["cost"]["token_seconds"] == pytest.approx(79e-6, rel=0.01)


# -------------------------------------------------------------------------------- pictures


def test_lanes(bundled):
    """What a completion does has no gaps, and each step is in the lanes of its sequences."""
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in range(8, 48, 5)]
    with LLM(bundled, trace=True, num_kv_blocks=10, block_size=16, preemption_mode="swap") as llm:
        llm.generate([[each.max_tokens] * (48 - each.max_tokens) for each in params], params,
                     use_tqdm=False)
    lanes = drawing.lanes(llm.trace)
    states = [state for lane in lanes.values() for *_, state in lane]
    assert len(lanes) == 8 and {*states} >= {"waiting", "prefill", "decode", "swapped"}
    assert states.count("prefill") + states.count("decode") == sum(
        len(record.batch) for record in llm.trace)
    for lane in lanes.values():
        assert [end for _, end, _ in lane[:-1]] == [start for start, *_ in lane[1:]]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    run(compare, tmp_path, "preemption", *SMALL, "--timeline", tmp_path / "timeline.png")
    assert (tmp_path / "timeline-swap.png").stat().st_size > 10_000


def test_pictures_of_a_run_of_ones_own(tmp_path, bundled):
    pytest.importorskip("matplotlib")
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
    with LLM(bundled, trace=True, num_kv_blocks=8) as llm:
        llm.generate(["Once upon a time", "47 + 85 ="], params, use_tqdm=False)
        llm.generate("Once more", params, use_tqdm=False)
    drawing.draw_timeline(llm.trace, tmp_path / "steps.png", llm.config.block_size)
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    assert list(drawing.lanes(llm.trace)) == ["0.0", "1.0", "0.1", "1.1", "2.0", "2.1"]
    with LLM(bundled, trace=True, num_kv_blocks=20) as llm:
        llm.beam_search(["Once upon a time"], BeamSearchParams(beam_width=3, max_tokens=8))
    drawing.draw_timeline(llm.trace, tmp_path / "beams.png", llm.config.block_size)


def test_times_of_a_gpu_are_events():
    event = SimpleNamespace(elapsed_time=lambda end: end - 1000)
    assert figures.elapsed(event, 1500) == 0.5 == figures.elapsed(1.0, 1.5)


# ----------------------------------------------------------------------- flags and commands


NO_FILE = "is not accepted: it must be a file, in a folder that exists"


@pytest.mark.parametrize("module, flags, message", [
    *((simulate, flags, "no tokens to sample or to guess") for flags in (
        ("sampling",), ("speculation",), ("memory", "--speculation", "prompt-lookup"))),
    (compare, ("nothing",), "comparison"), (compare, ("--true-lengths", 0), "--true-lengths"),
    (compare, ("--min-input", 9, "--max-input", 8), "--min-input"),
    (compare, ("--repeat", 0), "--repeat"), (simulate, ("--num-seqs", 0), "--num-seqs"),
    (compare, ("--workload", "decode-heavy", "--n-k", "inf"), "infinity"),
    (compare, ("--temperature", -1), "temperature=-1"), (simulate, ("--rate", -1), ""),
    (compare, ("--block-size", "1x"), "--block-size"),
    (compare, ("--attention-backend", "word"), "attention_backend='word'"),
    # files that cannot be written
    *((bench, ("--json", name), NO_FILE) for name in ("missing/a.json", ".", "")),
    (simulate, ("memory", "--json", "missing/a.json"), NO_FILE),
    (compare, ("--timeline", "missing/a.png"), NO_FILE),
    (compare, ("--timeline", "out.xyz"), "Format 'xyz' is not supported"),
    (compare, ("--timeline", "out.png"), r"out.png needs matplotlib \(pip install"),
    *for_feature("running.guards", *(
        (simulate, (*flags, *SMALL), r"request \d+: \d+ tokens do not fit: num_kv_blocks=")
        for flags in (("--num-kv-blocks", 2), ("memory", "--max-model-len", 10**9))))])
def test_bad_flags(tmp_path, monkeypatch, capsys, module, flags, message):
    """Those that name a file fail before the run."""
    monkeypatch.chdir(tmp_path)
    if "out.xyz" in flags:
        pytest.importorskip("matplotlib")
    if "out.png" in flags:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        module.main([*map(str, flags)])
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and re.search(message, error)
    assert not output or not {"--json", "--timeline"} & {*flags}


def test_nothing_is_computed_so_any_kernel_will_do():
    for flags in (("--no-kernels",), ("--attention-backend", "numba"), ("--batch-invariant",),
                  ("--seed", "-1")):
        simulate.main(["memory", *flags, "--num-seqs", "3"])


def commands() -> list[str]:
    """Every command of bench.py and the lab in the README and the docs."""
    found = []
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = file.read_text().replace("\\\n", " ")
        found += re.findall(
            r"python3? ((?:bench\.py|-m nanoengine_extras\.tools\.lab\.\w+)[^`#\n]*)", text)
    return sorted({" ".join(command.split()) for command in found})


def test_commands_of_the_docs(tmp_path, monkeypatch, capsys):
    """Each runs, on the bundled model's shape and with small sizes; those that need another
    environment are parsed."""
    pytest.importorskip("matplotlib")
    shapes = tmp_path / "shapes"
    assert {*options.SHAPES} == {"llama-small", "qwen3-0.6b"}
    for name in options.SHAPES:
        (shapes / name).mkdir(parents=True)
        shutil.copy(ROOT / "models" / "tiny-qwen3" / "config.json", shapes / name)
    monkeypatch.setattr(options, "SHAPES", {folder.name: folder for folder in shapes.iterdir()})
    for module, name in ((limits, "matrix_rate"), (bench, "matrix_rate"),
                         (bench, "copy_bandwidth")):
        monkeypatch.setattr(module, name, lambda *arguments: 100e9)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    small = ["--num-seqs", "3", "--min-input", "4", "--max-input", "8", "--min-output", "2",
             "--max-output", "3", "--prefix-length", "2", "--repeat", "1", "--num-kv-blocks", "140"]
    assert commands()
    for command in commands():
        print(command)  # shown where the next one fails
        name, module = next((name, COMMANDS[name]) for name in COMMANDS if command.startswith(name))
        words = shlex.split(command.removeprefix(name))
        # N and $seed stand for numbers
        flags = ["2" if re.fullmatch(r"[A-Z]|\$\w+", word) else word
                 for word in words if word != "…"]
        if "vllm" in command:
            bench.parse(flags)
        else:
            module.main([*flags, *small])
