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


def test_a_folder_is_the_sum_of_its_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("a = 1\n" + "    # a comment\n" + "if a:\n    bb = 2\n")
    (tmp_path / "inner" / "two.py").write_text(f"c, d = 1, {'1' * 90}\n")
    (tmp_path / "empty.py").write_text("")
    found = gauges.gauge(tmp_path)
    assert found | {"nodes": 0, "nodes a line": 0} == {
        "lines": 4, "nodes": 0, "nodes a line": 0, "width": (5 + 5 + 6 + 100) / 4, "wide": 1 / 4,
        "pairs": 1}
    assert found["nodes"] == 18 and found["nodes a line"] == 4.5


def make_project(root, **num_lines: int) -> None:
    """A project with one line of code in each place, or as many as asked for."""
    for name in ("nanoengine", "nanoengine_extras/sampling", "nanoengine_extras/tools"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "file.py").write_text("x = 1\n")
    (root / "bench.py").write_text("x = 1\n")
    for name, count in num_lines.items():
        # in files that are not too long, if the sum is what counts
        size = 200 if "extras" in name else count
        path = root / name if name.endswith(".py") else root / name / "file.py"
        for number, start in enumerate(range(0, count, size)):
            path.with_stem(f"{path.stem}{number or ''}").write_text(
                "x = 1\n" * min(size, count - start))


@pytest.mark.parametrize("name, folder", [
    ("nanoengine", "nanoengine"), ("features", "nanoengine_extras/sampling"),
    ("nanoengine_extras/tools", "nanoengine_extras/tools"), ("bench.py", "bench.py")])
def test_one_line_too_many(tmp_path, capsys, name, folder):
    most = int(gauges.LIMITS[name]["lines"])
    make_project(tmp_path, **{folder: most})
    assert gauges.main(tmp_path) == 0
    make_project(tmp_path, **{folder: most + 1})
    assert gauges.main(tmp_path) == 1
    assert capsys.readouterr().out.endswith(f"{name}: lines {most + 1}, at most {most}\n")


def test_a_long_file_of_the_extras(tmp_path, capsys):
    make_project(tmp_path)
    (tmp_path / "nanoengine_extras" / "sampling" / "a.py").write_text("x = 1\n" * 201)
    assert gauges.main(tmp_path) == 1
    assert capsys.readouterr().out.endswith("sampling/a.py: lines 201, at most 200\n")


@pytest.mark.parametrize("line, key", [
    ("x = " + "1" * 60, "width"), ("if 1:\n" + "  " * 40 + "x = 1234567", "wide"),
    ("x, y = 1, 2", "pairs"), ("x = [1, 2, 3, 4, 5]", "nodes a line")])
def test_dense_lines(tmp_path, capsys, line, key):
    make_project(tmp_path)
    (tmp_path / "nanoengine" / "file.py").write_text(f"{line}\n" * 3)
    assert gauges.main(tmp_path) == 1
    assert f"nanoengine: {key} " in capsys.readouterr().out
