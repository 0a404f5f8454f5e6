"""The documents: what they quote stands in the source, what they run prints what they say, their
tables name what exists, and their commands and links lead somewhere.

`docs/tutorial/run.py` says which kinds of fences there are.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import logging
import pydoc
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlparse

import pytest
from conftest import ROOT, check_refused, is_deleted, policies_of
from test_deletable import ALL_CASES

import nanoengine_extras.running.policies  # noqa: F401  adds its names before a table is copied
from nanoengine import LLM, SamplingParams
from nanoengine.features import is_installed
from nanoengine.policies import TABLES
from nanoengine_extras import OBSERVERS, Calls
from nanoengine_extras.running.metrics import Metrics

if any(map(is_deleted, ALL_CASES)):
    pytest.skip("the documents describe all features", allow_module_level=True)

sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs" / "tutorial")]

import write_reference  # noqa: E402
from run import fences_of, snippets_of  # noqa: E402

CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
FOLDERS = ("docs", "models", "nanoengine", "nanoengine_extras")
DOCUMENTS = [*ROOT.glob("*.md"), ROOT / "tests" / "README.md",
             *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.md")))]
# these have tests of their own, which look closer at what their snippets do
RUN_ELSEWHERE = {"docs/recipes.md": "test_recipes.py",
                 "docs/policies.md": "features/test_policies.py",
                 "nanoengine_extras/cpu/README.md": "test_libraries.py",
                 "nanoengine_extras/gpu/README.md": "test_libraries.py"}
OTHERS = [file for file in DOCUMENTS
          if file not in CHAPTERS and str(file.relative_to(ROOT)) not in RUN_ELSEWHERE]
# a module of the lab may have been imported before it is started
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
by_name = {"ids": lambda file: str(file.relative_to(ROOT))}
# its ranks are processes, as are those of chapter 11
SLOW = ROOT / "docs" / "scaling.md"


# ---------------------------------------------------------------------------------- quotes


def is_quoted(quote: str, source: str) -> bool:
    """Whether the lines of a quote stand in a file: in this order, indented by the same, and side
    by side, but for the lines left out where the quote has `...` or `# …`."""
    parts = re.split(r"^[ ]*(?:\.\.\.|# ….*)\n", textwrap.dedent(quote), flags=re.MULTILINE)
    for indent in range(0, 24, 4):
        patterns = (re.escape(textwrap.indent(part.strip("\n"), " " * indent)) for part in parts)
        if re.search("^" + "\n(?:.*\n)*?".join(patterns) + "$", source, flags=re.MULTILINE):
            return True
    return False


@pytest.mark.parametrize("file", CHAPTERS, **by_name)
def test_quotes(file):
    for fence in fences_of(file.read_text()):
        assert fence.language in ("python", "output", "sh", "text"), f"line {fence.line}"
        if fence.source:
            source = (ROOT / fence.source).read_text()
            assert is_quoted(fence.text, source), f"line {fence.line}: not in {fence.source}"


# -------------------------------------------------------------------------------- snippets


def run_snippets(text: str, name: str, silent: bool = True) -> None:
    """Runs the snippets of a chapter in one namespace, and compares what each of them prints.

    silent: one without an output prints nothing.
    """
    names: dict = {"__name__": "chapter"}
    try:
        for code, output in snippets_of(text):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, name, "exec"), names)
            lines = [[line.rstrip() for line in each.splitlines()]
                     for each in (printed.getvalue(), output)]
            if silent or output:
                assert lines[0] == lines[1], f"printed and expected, for:\n{code.strip()}"
    finally:
        for value in names.values():
            if isinstance(value, LLM):
                value.close()


@pytest.mark.parametrize("file", CHAPTERS, **by_name)
def test_snippets(file, monkeypatch):
    if "@triton.jit" in file.read_text():
        # before, its interpreter does not work with NumPy 2.4
        pytest.importorskip("triton", minversion="3.6")
    monkeypatch.chdir(ROOT)
    with contextlib.ExitStack() as stack:
        # what a chapter adds is removed after it
        for table in TABLES.values():
            stack.enter_context(patch.dict(table))
        # some chapters turn the engine's log off
        stack.callback(logging.disable, logging.NOTSET)
        run_snippets(file.read_text(), file.name)


@pytest.mark.parametrize("file", [
    pytest.param(file, marks=pytest.mark.slow if file == SLOW else ()) for file in OTHERS],
    **by_name)
def test_snippets_of_other_documents(file, monkeypatch):
    """Each part of a document, from one heading to the next, has a namespace. What a snippet prints
    is compared where an output follows. One that begins with `# needs …` is only compiled."""
    monkeypatch.chdir(ROOT)
    code = r"```.*?^```$"
    text = re.sub(code, lambda found: found[0].replace("\n#", "\n\0#"), file.read_text(),
                  flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        kept = ""
        for fence in re.findall(code, part.replace("\0", ""), flags=re.DOTALL | re.MULTILINE):
            if fence.startswith("```python\n# needs "):
                compile(fence[10:-3], file.name, "exec")
            else:
                kept += fence + "\n\n"
        run_snippets(kept, file.name, silent=False)


def test_every_document_with_snippets_is_run():
    for name, test in RUN_ELSEWHERE.items():
        assert (ROOT / name).is_file() and Path(name).name in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize("name, most", [("README.md", 120), ("docs/benchmarks.md", 170)])
def test_short_documents_stay_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_every_chapter_is_in_the_contents():
    contents = (ROOT / "docs" / "tutorial" / "README.md").read_text()
    for file in CHAPTERS:
        assert file.name == "README.md" or f"]({file.name})" in contents, file.name


@pytest.mark.parametrize("name, package", [("README.md", "nanoengine"),
                                           ("nanoengine_extras/README.md",
                                            "nanoengine_extras")])
def test_the_map_has_every_file(name, package):
    text = (ROOT / name).read_text()
    rows = "\n".join(re.findall(r"^\| \[.*\|$", text, flags=re.MULTILINE))
    linked = [(ROOT / name).parent / target for target in re.findall(r"\]\((\S+\.py)\)", rows)]
    # and folders, but neither __init__.py nor __main__.py
    files = {*(ROOT / package).glob("[a-z]*.py")}
    if package == "nanoengine_extras":
        # each street, but not the libraries of kernels
        files = {file for pattern in ("*/[a-z]*.py", "*/*/__init__.py")
                 for file in (ROOT / package).glob(pattern)
                 if file.relative_to(ROOT / package).parts[0] not in ("cpu", "gpu")}
    assert sorted(file for file in linked if package in file.parts) == sorted(files)


def test_the_order_of_observers():
    text = " ".join((ROOT / "nanoengine_extras" / "README.md").read_text().split())
    names = [name.partition(".")[2] for name in OBSERVERS]
    assert f": {', '.join(names)}, and then your own." in text


# -------------------------------------------------------------------------------- reference

REFERENCE = write_reference.FILE.read_text()


def test_the_reference_is_up_to_date():
    assert write_reference.written(REFERENCE) == REFERENCE, "run python docs/write_reference.py"
    # all rows but those of the last table, which is written by hand
    tables, heading, by_hand = REFERENCE.rpartition("\n## ")
    rows = [line for line in tables.splitlines(keepends=True) if not line.startswith("| `")]
    assert write_reference.written("".join(rows) + heading + by_hand) == REFERENCE
    check_refused("tables of the reference must be", write_reference.written,
                  REFERENCE.replace("<!-- table: calls -->\n", ""))


def test_what_help_is_asked_for_exists():
    """Docstrings of the calls, and documents, name it as `help` takes it."""
    files = [ROOT / "nanoengine" / "llm.py", *DOCUMENTS]
    texts = [file.read_text() for file in files]
    texts += [str(method.__doc__) for method in vars(Calls).values()]
    names = {name for text in texts for name in re.findall(r'help\("(nano[^"]+)"\)', text)}
    names = {name for name in names if "{" not in name}
    assert len(names) >= 3
    for name in names:
        assert pydoc.locate(name).__doc__, name


def test_the_reference_says_whose_an_option_is():
    row = r"^\| `(\w+)` \|.*\| (?:\[([\w.]+)\]\(\S+\) )?\|$"
    # a result can have the name of a call
    whose = dict(reversed(re.findall(row, REFERENCE, flags=re.MULTILINE)))
    expected = {"trace": "metrics.py", "stop": "texts.py", "chat": "chat",
                "stream_chat": "chat", "metrics": "metrics.py", "swap_space": "swapping.py",
                "structured_outputs": "structured_outputs", "generate": "", "top_k": ""}
    assert {name: whose[name] for name in expected} == expected
    for option, feature in write_reference.MORE_VALUES.items():
        assert is_installed(feature)
        row = rf"^\| `{option}` .* more in \[{feature.partition('.')[2]}(\.py)?\]"
        assert re.search(row, REFERENCE, re.MULTILINE)


def test_the_other_tables_are_printed(monkeypatch, capsys):
    printed = write_reference.TABLES.keys() - {*write_reference.IN_FILE}
    assert "CompletionOutput" in printed
    introduction, _, _ = REFERENCE.partition("\n## ")
    for name in printed:
        assert f"`{name}`" in introduction
        monkeypatch.setattr(sys, "argv", ["write_reference.py", name])
        write_reference.main()
        assert "\n| `" in capsys.readouterr().out, name
    assert write_reference.FILE.read_text() == REFERENCE


def test_values_for_comparison_are_named_once():
    row, = re.findall(r"^\| `scheduling` .*", REFERENCE, flags=re.MULTILINE)
    assert "static" not in row and "`overtaking" not in row
    assert "For `scheduling` and the next three options" in " ".join(REFERENCE.split())
    tables = "\n".join(re.findall(r"^\|.*", REFERENCE, flags=re.MULTILINE))
    for name in [name for option in (*TABLES, "kv_allocation") for name in policies_of(option)]:
        is_main = name not in ("static", "random", "least-recently-run", "max-length")
        assert f'"{name}"' in REFERENCE and (f'"{name}"' in tables) == is_main, name


def test_each_option_has_to_be_explained():
    @dataclasses.dataclass
    class Options:
        """right: a field.
        both: a property.
        """

        right: int = 0
        both = property(lambda self: 1)

    assert [*write_reference.meanings_of(Options)] == ["right", "both"]
    for wrong in ("right: a.\nboth: b.\nlater: c.", "both: a property."):
        Options.__doc__ = wrong
        check_refused("docstring of Options", write_reference.meanings_of, Options)


def test_the_reference_has_all_metrics(monkeypatch):
    monkeypatch.chdir(ROOT)
    prompts = [[5 + number] * 40 for number in range(8)]
    with LLM("models/tiny-qwen3", dtype="float32", num_kv_blocks=8, block_size=16,
             preemption_mode="swap", speculation="prompt-lookup") as llm:
        llm.generate(prompts, SamplingParams(max_tokens=30, n=2), use_tqdm=False)
        found = llm.metrics()
    assert found["num_preemptions"] and found["copy_on_write_blocks"]
    with LLM("models/tiny-qwen3", num_kv_blocks=8) as llm:
        assert llm.metrics().keys() == found.keys(), "whatever is in use"
    assert found.keys() == write_reference.entries_of(Metrics.gauges.__doc__).keys()


# ------------------------------------------------------------------------------------ names

SOURCES = [*sorted((ROOT / "nanoengine").glob("*.py")),
           *sorted((ROOT / "nanoengine_extras").rglob("*.py"))]


def test_names_in_tables():
    """All names in the code in these tables stand in some source."""
    allowed = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "transparent_hugepage"}
    text = (ROOT / "docs" / "tutorial" / "tuning.md").read_text()
    rows = re.findall(r"^\|.*\|$", text, flags=re.MULTILINE)
    code = " ".join(re.findall(r"`([^`]*)`", "\n".join(rows)))
    known = " ".join(file.name + " " + file.read_text() for file in SOURCES)
    found = set(re.findall(r"\b[a-zA-Z_]*_[a-zA-Z_]+\b|\b\w+\.py\b", code))
    assert found - set(re.findall(r"\w+\.py|\w+", known)) <= allowed


# -------------------------------------------------------------------------------- commands


class Parsed(Exception):
    """A program has understood its arguments."""


def commands_in(text: str) -> list[list[str]]:
    """The arguments of every python that a document's sh fences start."""
    found = []
    for fence in fences_of(text):
        if fence.language == "sh":
            for line in fence.text.replace("\\\n", " ").splitlines():
                # a variable of the shell is a number
                line = re.sub(r"\$\w+", "1", line)
                for command in re.split(r"&&|\|\||;|\|", line):
                    words = shlex.split(command, comments=True)
                    while words and re.match(r"\w+=", words[0]):
                        del words[0]
                    if words and re.fullmatch(r"(\.venv/bin/)?python3?", words[0]):
                        found.append(words[1:])
    return found


def check_command(words: list[str]) -> None:
    """Starts a program of ours and stops it when it has parsed its arguments.

    For any other there must be a module. Raises SystemExit for arguments that are refused.
    """
    words = words[1:] if words[:1] == ["-i"] else words
    is_module = words[:1] == ["-m"]
    name, *arguments = words[is_module:] or ["-"]
    if is_module:
        assert importlib.util.find_spec(name), name
    elif name != "-":
        assert (ROOT / name).is_file(), name
    # lm-evaluation-harness, which may not be there, parses what follows `eval`
    is_ours = not is_module or name == "nanoengine" or name.startswith("nanoengine_extras.tools.")
    if arguments and is_ours and arguments[0] != "eval":
        run = runpy.run_module if is_module else runpy.run_path
        with pytest.raises(Parsed), pytest.MonkeyPatch.context() as patch:
            parse = argparse.ArgumentParser.parse_args

            def parse_only(*given):
                parse(*given)
                raise Parsed

            patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            patch.setattr(sys, "argv", [name, *arguments])
            run(name, run_name="__main__")


@pytest.mark.parametrize("file", [
    pytest.param(file, marks=pytest.mark.slow if file == SLOW else ()) for file in DOCUMENTS],
    **by_name)
def test_commands(file, monkeypatch):
    if file == SLOW:
        pytest.importorskip("ray")
    monkeypatch.chdir(ROOT)
    # Python adds the folder of a script
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.syspath_prepend(ROOT)
    for words in commands_in(file.read_text()):
        check_command(words)


# ----------------------------------------------------------------------------------- links


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?)[ #]*$", without_fences(text), flags=re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        same = [slug, *(f"{slug}-{number}" for number in range(1, len(found) + 1))]
        found.add(next(each for each in same if each not in found))
    return found


def check_link(target: str, folder: Path, text: str) -> None:
    """target: in a document with this text in this folder."""
    if re.match(r"\w+:", target):
        url = urlparse(target)
        assert url.scheme in ("http", "https") and "." in url.netloc, target
        return
    name, _, anchor = target.partition("#")
    file = folder / name
    assert name == "" or file.exists(), target
    if anchor:
        assert not name or file.suffix == ".md", f"{target}: only headings are checked"
        assert anchor in anchors_of(file.read_text() if name else text), target


@pytest.mark.parametrize("file", DOCUMENTS, **by_name)
def test_links(file):
    text = file.read_text()
    # code between backticks may look like a link
    prose = re.sub(r"`[^`\n]+`", "", without_fences(text))
    for target in re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", prose):
        check_link("".join(target), file.parent, text)
