""".ci/gauges.py: what counts as a line of code, how dense lines are, and what is too much."""

import importlib.util

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("gauges", ROOT / ".ci" / "gauges.py")
gauges = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gauges)

TEXT = '''"""A docstring
of two lines."""

# a comment
class Kind:
    """One of a class."""

    text = """a text that is no docstring,

    three lines long"""

    async def run(self):
        "A docstring in plain quotes."
        # only a comment
        return (1,
                # within
                2)  # at the end


def short(): "a docstring alone"
'''


def test_lines_of_code():
    found = gauges.source_lines(TEXT)
    assert [line.strip() for line in found] == [
        "class Kind:", 'text = """a text that is no docstring,', "", 'three lines long"""',
        "async def run(self):", "return (1,", "2)  # at the end"]


@pytest.mark.parametrize("text, count", [
    ("a, b = 1, 2", 1), ("a, b = b, a", 0), ("a = b = 1, 2", 0), ("a, b = pair", 0),
    ("self.a, self.b = c, d", 1), ("a[0], a[1] = a[1], a[0]", 0), ("for a, b in c: pass", 0),
    ("a, b = 1, 2\nc, d = 3, 4", 2)])
def test_pairs(text, count):
    assert gauges.num_pairs(text) == count


def test_nodes():
    """Names count, docstrings do not; folded into one line, an expression says as much."""
    assert gauges.num_nodes("a = b") == 4
    assert gauges.num_nodes("a = b") == gauges.num_nodes('"""A docstring."""\na = (\n    b)')
    assert gauges.num_nodes('def f():\n    "A docstring."') == gauges.num_nodes(
        "def f():\n    pass")


def make_project(root) -> None:
    """A project with one line of code in each place."""
    for name in ("nanoengine", "nanoengine_extras/sampling", "nanoengine_extras/tools"):
        (root / name).mkdir(parents=True)
        (root / name / "file.py").write_text("x = 1\n")
    (root / "bench.py").write_text("x = 1\n")


@pytest.mark.parametrize("name, folder", [
    ("nanoengine", "nanoengine"), ("features", "nanoengine_extras/sampling"),
    ("nanoengine_extras/tools", "nanoengine_extras/tools"), ("bench.py", "")])
def test_one_line_too_many(tmp_path, capsys, name, folder):
    """In several files: their sum counts."""
    make_project(tmp_path)
    most = int(gauges.LIMITS[name]["lines"])
    (tmp_path / "bench.py").write_text("")
    for start in range(bool(folder), most, 200):
        file = tmp_path / folder / f"bench{start or ''}.py"
        file.write_text("x = 1\n" * min(200, most - start))
    assert gauges.main(tmp_path) == 0
    with file.open("a") as more:
        more.write("# a comment\n\nx = 2\n")
    assert gauges.main(tmp_path) == 1
    assert f"{name}: lines {most + 1}, at most {most}\n" in capsys.readouterr().out


@pytest.mark.parametrize("folder, text, found", [
    ("nanoengine", ("x = " + "1" * 60 + "\n") * 3, "nanoengine: width "),
    ("nanoengine", ("if 1:\n" + "  " * 40 + "x = 1234567\n") * 3, "nanoengine: wide "),
    ("nanoengine", "x, y = 1, 2\n" * 3, "nanoengine: pairs 3, at most 2\n"),
    ("nanoengine", "x = [1, 2, 3, 4, 5]\n" * 3, "nanoengine: nodes a line "),
    ("nanoengine_extras/sampling", "x = 1\n" * 201, "sampling/file.py: lines 201, at most 200\n")])
def test_what_is_too_much(tmp_path, capsys, folder, text, found):
    make_project(tmp_path)
    (tmp_path / folder / "file.py").write_text(text)
    assert gauges.main(tmp_path) == 1
    assert found in capsys.readouterr().out
