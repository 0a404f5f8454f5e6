"""bench.py: workloads, the simulation against the engine, and what the pictures are drawn from."""

import importlib.util
import json
import os
import random
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "bench.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module
    spec.loader.exec_module(module)
    return module


def arguments(bench, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, flags)])
    return bench.parse_arguments()


def run(bench, monkeypatch, tmp_path, *flags) -> dict:
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, flags), "--json", str(file)])
    bench.main()
    return json.loads(file.read_text())


SMALL = ("--num-seqs", 8, "--min-input", 8, "--max-input", 40, "--min-output", 8,
         "--max-output", 40)


@pytest.mark.parametrize("comparison", ["batching", "memory", "preemption", "victims", "prefix",
                                        "sampling"])
def test_comparisons(bench, monkeypatch, tmp_path, comparison):
    found = run(bench, monkeypatch, tmp_path, "--compare", comparison, *SMALL,
                "--num-kv-blocks", 12, "--true-lengths", 0.5)["medians"]
    assert list(found) == list(bench.COMPARISONS[comparison])
    for figures in found.values():
        assert figures["output_tokens_per_second"] > 0 < figures["mean_batch"]
        assert 0 < figures["first_token_ms"] <= figures["first_token_ms_p99"]
        assert 0 <= figures["kv_waste_percent"] < 100 >= figures["kv_used_percent"] > 0
    if comparison == "memory":
        assert found["max-length"]["mean_batch"] < found["reserve"]["mean_batch"]
        assert found["reserve"]["mean_batch"] < found["on-demand"]["mean_batch"]
        assert found["reserve"]["num_preemptions"] == 0
    if comparison == "preemption":
        assert found["swap"]["swapped_mib"] > 0 == found["recompute"]["swapped_mib"]
        assert found["recompute"]["recomputed_tokens"] > 0


def test_a_simulated_schedule_is_the_real_one(bench, monkeypatch, tmp_path):
    flags = ("--compare", "memory", *SMALL, "--num-kv-blocks", 12, "--true-lengths", 0.5,
             "--max-num-batched-tokens", 64, "--max-num-seqs", 6, "--max-model-len", 80)
    real, simulated = (run(bench, monkeypatch, tmp_path, *flags, *more)["medians"]
                       for more in ((), ("--simulate",)))
    for name in real:
        for figure in ("num_steps", "mean_batch", "num_preemptions", "recomputed_tokens"):
            assert real[name][figure] == simulated[name][figure], (name, figure)


def test_arrivals_and_rejections(bench, monkeypatch, tmp_path):
    flags = ("--simulate", "--num-seqs", 300, "--workload", "decode-heavy", "--rate")
    calm, busy, refused = (
        run(bench, monkeypatch, tmp_path, *flags, *more)["medians"]["simulated"]
        for more in ((0.5, "--reject"), (50,), (50, "--reject")))
    assert calm["rejected_percent"] == 0 < refused["rejected_percent"] < 100
    assert calm["first_token_ms"] < busy["first_token_ms"] > refused["first_token_ms"]
    assert calm["output_tokens_per_second"] < busy["output_tokens_per_second"]


def test_workloads(bench, monkeypatch):
    def draw(*flags):
        return bench.draw_workload(arguments(bench, monkeypatch, *flags), 800)[0]

    heavy = draw("--workload", "prefill-heavy", "--n-k", 3, "--kilo", 100, "--num-seqs", 5)
    assert {len(prompt) for prompt in heavy.prompts} == {300}
    assert set(heavy.lengths) == {100} == set(heavy.max_tokens)
    normal = draw("--workload", "decode-heavy", "--n-k", 3, "--kilo", 100, "--lengths", "normal",
                  "--true-lengths", 0.5)
    assert len(set(normal.max_tokens)) > 50 and 280 < sum(normal.max_tokens) / 256 < 320
    assert 0.4 < sum(normal.lengths) / sum(normal.max_tokens) < 0.6
    assert all(length <= most for length, most in zip(normal.lengths, normal.max_tokens))
    shared = draw("--workload", "shared-prefix", "--num-seqs", 4, "--max-input", 200)
    assert len({tuple(prompt[:200]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt) for prompt in shared.prompts}) == 4


def test_workloads_for_a_cpu(bench, monkeypatch):
    def draw(*flags):
        return bench.draw_workload(arguments(bench, monkeypatch, "--workload", *flags), 20_000)

    random.seed(0)  # nano-vllm's order: all prompts, then all lengths
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 256))]
               for _ in range(32)]
    mixed, _ = draw("cpu-mixed")
    assert mixed.prompts == prompts and mixed.temperature == 0
    assert mixed.lengths == [random.randint(32, 128) for _ in range(32)] == mixed.max_tokens
    decode, _ = draw("cpu-decode")
    assert [*map(len, decode.prompts)] == [64] * 16 and decode.lengths == [256] * 16
    prefix, warm_up = draw("cpu-prefix")
    assert [*map(len, prefix.prompts)] == [544] * 32 and prefix.lengths == [32] * 32
    assert os.path.commonprefix(prefix.prompts) == prefix.prompts[0][:512]
    assert warm_up.prompts[0][0] != prefix.prompts[0][0]
    assert draw("cpu-decode", "--num-seqs", 2, "--temperature", 1)[0].temperature == 1


def test_lanes_and_the_chrome_trace(bench, monkeypatch, tmp_path):
    trace = tmp_path / "trace.json"
    found = run(bench, monkeypatch, tmp_path, *SMALL, "--num-kv-blocks", 10, "--preemption-mode",
                "swap", "--trace", trace)["medians"]["nanoengine"]
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert {event["name"] for event in spans} >= {"waiting", "prefill", "decode", "swapped"}
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert len(steps) == found["num_steps"]
    assert sum(len([s for s in spans if s["name"] == name]) for name in ("prefill", "decode")) == (
        sum(step["args"]["sequences"] for step in steps))
    for number in range(8):
        lane = [event for event in spans if event["tid"] == number]
        for left, right in zip(lane, lane[1:]):
            assert left["ts"] + left["dur"] == pytest.approx(right["ts"], abs=1)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"KV blocks"}


def test_pictures(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    timeline, plot = tmp_path / "timeline.png", tmp_path / "plot.png"
    run(bench, monkeypatch, tmp_path, "--compare", "preemption", *SMALL, "--timeline", timeline,
        "--plot", plot)
    assert plot.stat().st_size > 10_000
    assert (tmp_path / "timeline-swap.png").stat().st_size > 10_000


def test_decode_steps(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BATCHES", [1, 4])
    monkeypatch.setattr(bench, "CONTEXTS", [64, 300])
    found = run(bench, monkeypatch, tmp_path, "--decode-grid", "--num-kv-blocks", 9)
    steps = found["decode_steps"]
    assert [(row["batch"], row["context"]) for row in steps] == [(1, 64), (4, 64), (1, 300)]
    assert all(row["ms"] > row["limit_ms"] > 0 for row in steps)


def test_an_engine_in_a_process_of_its_own(bench, monkeypatch, tmp_path):
    found = run(bench, monkeypatch, tmp_path, *SMALL, "--workload", "cpu-prefix", "--repeat", 2,
                "--python", f"nanoengine=env OMP_NUM_THREADS=1 {sys.executable}")
    assert len(found["runs"]["nanoengine"]) == 2
    assert found["medians"]["nanoengine"]["prefix_cache_hits"] == 7 * 512
    assert found["elsewhere"]["nanoengine"]["threads"] == 1


@pytest.mark.parametrize("flags", [
    ("--simulate", "--compare", "sampling"), ("--true-lengths", 0), ("--compare", "nothing"),
    ("--min-input", 9, "--max-input", 8)])
def test_bad_flags(bench, monkeypatch, flags):
    with pytest.raises(SystemExit):
        arguments(bench, monkeypatch, *flags)
