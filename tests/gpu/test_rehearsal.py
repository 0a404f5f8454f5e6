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


def test_the_calls_fit_their_time():
    """Limits are what a hang would take; a start of the machine takes up to two minutes more."""
    needed = sum(max(step.limit for step in phase) for phase in day.CALL1)
    assert needed + 6 <= day.SECONDS["call1"] <= 235 and day.SECONDS["call2"] <= 560
