"""The wheel: what is in it, and that it generates text far from this repository."""

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT

from nanoengine import LLM, SamplingParams

pytestmark = pytest.mark.slow

PACKAGES = ("nanoengine", "nanoengine_extras")

SCRIPT = """if True:
    import nanoengine, sys
    from nanoengine import LLM, SamplingParams
    assert nanoengine.__file__.startswith(sys.argv[1]), nanoengine.__file__
    with LLM(sys.argv[2], dtype="float32", attention_backend="gather", num_kv_blocks=24) as llm:
        params = SamplingParams(temperature=0)
        print(llm.generate("47 + 85 =", params, use_tqdm=False)[0].outputs[0].text)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # what pyproject.toml asks for, as pip looks for none here
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    # building leaves files in the folder
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package,
                        ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "bench.py"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
                    "-w", "dist", "."], check=True, cwd=folder)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_it_has_all_files_of_the_packages_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*")]
    ours = {str(file) for file in files
            if file.suffix in (".py", ".html", ".txt") or file.name == "py.typed"}
    assert names == ours


def run_installed(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs Python in a folder of a user."""
    return subprocess.run([sys.executable, *arguments], text=True, cwd=folder,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(site)})


def test_it_generates_text_in_an_empty_folder(wheel, bundled, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    done = run_installed(site, empty, "-c", SCRIPT, str(site), bundled)
    assert done.stdout == " 132\n", done.stderr
    assert not [*empty.iterdir()], "nothing is written where it runs"


@pytest.mark.needs("tools.batch", "tools.openai_format", "tools.scores", "tools.serve",
                   "tools.terminal")
def test_its_tools_run_in_a_folder_of_a_user(wheel, bundled, tmp_path):
    """Where other files have the names of ours."""
    site, folder = tmp_path / "site", tmp_path / "mine"
    zipfile.ZipFile(wheel).extractall(site)
    folder.mkdir()
    for name in ("bench.py", "batch.py", "serve.py", "lab.py", "openai.py", "scores.py"):
        (folder / name).write_text("raise SystemExit('the wrong file')\n")
    (folder / "a.jsonl").write_text('{"prompt": "47 + 85 =", "temperature": 0}\n')
    tool = partial(run_installed, site, folder, "-m", "nanoengine")
    done = tool("batch", "--model", bundled, "-i", "a.jsonl", "-o", "b.jsonl")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "b.jsonl").read_text())["response"]["body"]["choices"][0][
        "text"] == " 132"
    done = tool("score", "47 + 85 =", " 131", " 132", "--model", bundled)
    assert done.stdout.splitlines()[0].endswith("= 132"), done.stderr
    done = tool("bench", "--model", bundled)
    assert done.returncode == 2 and "error: bench.py is in the repository: " in done.stderr
    done = tool("serve", "--model", "/no/such", "--port", "0")
    assert done.returncode == 2 and "model='/no/such' is not accepted" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_streams_a_text_to_the_terminal(bundled, monkeypatch, capsys):
    def run(*flags: str, prompt: tuple[str, ...] = ("47 + 85 =",), lines: str = "") -> str:
        command = ["nanoengine", *prompt, "--model", bundled, "--temperature", "0"]
        monkeypatch.setattr(sys, "argv", [*command, *flags])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        runpy.run_module("nanoengine", run_name="__main__")
        return capsys.readouterr().out

    assert run("--max-tokens", "20") == " 132\n"
    assert run(prompt=(), lines="count 17 to 23 =") == " 17 18 19 20 21 22 23\n"
    assert run("--chat", prompt=("12 + 34",), lines="not read") == "46\n"
    with LLM(bundled) as llm:
        first = [{"role": "user", "content": "12 + 34"}]
        second = [*first, {"role": "assistant", "content": "46"},
                  {"role": "user", "content": "and 5 + 6?"}]
        params = SamplingParams(temperature=0, max_tokens=30)
        answers = [each.outputs[0].text for each in llm.chat([first, second], params)]
    chat = run("--chat", "--max-tokens", "30", prompt=(), lines="12 + 34\nand 5 + 6?\n")
    assert chat == "".join(f"{answer}\n" for answer in answers)
    hot = ("--temperature", "2", "--max-tokens", "20", "--seed")
    assert run(*hot, "1") == run(*hot, "1") != run(*hot, "2")
    assert run(*hot, "1", "--top-p", "0.0001") == " 132\n"
    for flag, value, message in (("--max-tokens", "-1", "max_tokens=-1 is not accepted"),
                                 ("--model", "/no/such", "model='/no/such' is not accepted")):
        with pytest.raises(SystemExit, match="2"):
            run(flag, value)
        printed = capsys.readouterr()
        assert not printed.out and f"python -m nanoengine: error: {message}" in printed.err
