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
sys.path.insert(0, str(FOLDER))

import day  # noqa: E402


def names_of(phases: list) -> list[str]:
    return [step.name for phase in phases for step in phase if step.needed != ".nano"]


@pytest.mark.parametrize("call, only, names", [
    ("call1", [], names_of(day.CALL1)),
    ("call2", ["--only", "nccl"], ["nccl", *names_of(day.CALL2)])])
def test_a_call(tmp_path, call, only, names):
    """A step fails only where something was not brought along: flash-attn."""
    environment = os.environ | {"REHEARSAL": "1", "REHEARSAL_TIME": "12", "OUT": str(tmp_path)}
    command = [sys.executable, FOLDER / "day.py", call, "--seconds", "2000", *only]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    printed = done.stdout
    table = printed[printed.rindex("\n-- call"):]
    rows = dict(re.findall(r"^(\S+) +(ok|not here|no time|rc \S+) +\d+ s ", table, re.MULTILINE))
    assert {*rows} == {*names}, printed
    expected = dict.fromkeys(names, "ok")
    if "flash" in names and not (day.ROOT / ".fa").exists():
        expected["flash"] = "not here"
    assert rows == expected and "failed" not in printed, printed
    assert (tmp_path / "summary.txt").read_text() in printed
    with tarfile.open(tmp_path / "logs.tgz") as file:
        assert f"logs/{names[-1]}.log" in file.getnames()
    if call == "call1":
        assert re.search(r"^sampler .* \d+ passed", printed, re.MULTILINE)
        assert json.loads((tmp_path / "bench.json").read_text())["runs"]["nanoengine"]
        assert " prompts differ" in (tmp_path / "notes.txt").read_text()
    else:
        assert "output tokens/s" in table


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
    assert day.SECONDS == {"call1": 235, "call2": 560}
    needed = sum(max(step.limit for step in phase) for phase in day.CALL1)
    assert needed + 6 <= day.SECONDS["call1"]
    # all but nano-vllm's steps, if none hangs, in about half of their limits
    assert 2 * 120 + 245 + 570 < 1800
