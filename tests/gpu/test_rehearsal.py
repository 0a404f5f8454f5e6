"""The two calls of a day with a GPU, from end to end, on a GPU that is not there."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
NANO = FOLDER.parents[1] / ".nano"
# on a machine without any of it
NEEDED = {"flash": ".fa", "nano-vllm": ".nano", "nano-batch-1": ".nano"}
NOT_HERE = {name for name, needed in NEEDED.items()
            if not (FOLDER.parents[1] / needed).exists()}


def run(out: Path, *arguments: str, **variables: str) -> tuple[int, str, dict[str, str]]:
    """The exit status, all that is printed, and of each step what the table says."""
    environment = os.environ | {"REHEARSAL": "1", "REHEARSAL_TIME": "12", "OUT": str(out),
                                "TORCHDYNAMO_DISABLE": "1"} | variables
    done = subprocess.run([sys.executable, FOLDER / "day.py", *arguments], env=environment,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    table = done.stdout[done.stdout.rindex("\n-- call"):]
    rows = re.findall(r"^(\S+) +(ok|not here|no time|rc \S+) +\d+ s ", table, re.MULTILINE)
    return done.returncode, done.stdout, dict(rows)


def test_the_first_call(tmp_path):
    status, printed, table = run(tmp_path, "call1", "--seconds", "2000")
    names = ["flash", "kernels", "engine-flash", "engine-triton", "batches", "sampler", "features",
             "transformers", "extensions", "nccl", "memory", "bench", "roofline"]
    assert {*table} == {*names}, printed
    assert {name for name in names if table[name] != "ok"} == NOT_HERE & {*names}, printed
    assert "failed" not in printed and re.search(r"^sampler .* \d+ passed", printed, re.MULTILINE)
    assert json.loads((tmp_path / "bench.json").read_text())["runs"]["nanoengine"]
    assert " prompts differ" in (tmp_path / "notes.txt").read_text()
    with tarfile.open(tmp_path / "logs.tgz") as file:
        assert "logs/engine-flash.log" in file.getnames()


def test_the_second_call(tmp_path):
    status, printed, table = run(tmp_path, "call2", "--only", "nccl", "--seconds", "2000")
    names = ["nccl", "make-weights", "kernels-of-steps", "ours", "nano-vllm", "ours-again",
             "batch-1", "batch-1-wide", "nano-batch-1", "no-run-ahead", "triton", "eager", "top-p",
             "of-transformers", "shape-06b"]
    assert [*table] == names, printed
    assert {name for name in names if table[name] != "ok"} == NOT_HERE & {*names}, printed
    assert ("ours / nano-vllm:" in printed) == NANO.exists()
    assert "output tokens/s" in (tmp_path / "summary.txt").read_text()


def test_what_fails_hangs_or_has_no_time_hides_nothing(tmp_path):
    """A step that crashes, one that never ends, and a clock that has nearly run out."""
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        import day
        code = "import os, time; print('E   broken', flush=True); "
        day.CALL1 = [[day.Step("crash", 20, day.python("-c", code + "os.abort()")),
                      day.Step("hang", 2, day.python("-c", code + "time.sleep(99)")),
                      day.Step("right", 20, day.python("-c", "print('== a figure')"))],
                     [day.Step("late", 90, day.python("-c", "print('== never')"))]]
        sys.exit(day.main(["call1", "--seconds", "30"]))"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"OUT": str(tmp_path)},
                          text=True, stdout=subprocess.PIPE)
    assert done.returncode == 1, done.stdout
    rows = done.stdout[done.stdout.rindex("\n-- call1"):].splitlines()[2:]
    found = {row[:14].strip(): row[15:24].strip() for row in rows}
    assert found == {"crash": "rc -6", "hang": "rc limit", "right": "ok", "late": "no time"}
    assert "E   broken" in done.stdout and "a figure" in done.stdout


def test_the_calls_fit_their_time():
    """Limits are what a hang would take; a start of the machine takes up to two minutes more."""
    sys.path.insert(0, str(FOLDER))
    import day
    sys.path.remove(str(FOLDER))
    assert day.SECONDS == {"call1": 235, "call2": 300}
    # the last step of a call may be left out
    needed = sum(max(step.limit for step in phase) for phase in day.CALL1[:-1])
    assert needed + 6 <= day.SECONDS["call1"]
    assert 2 * 120 + 245 + 310 < 900
