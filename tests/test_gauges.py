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


def test_a_folder_is_the_sum_of_its_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("a = 1\n" + "    # a comment\n" + "if a:\n    bb = 2\n")
    (tmp_path / "inner" / "two.py").write_text(f"c, d = 1, {'1' * 90}\n")
    (tmp_path / "empty.py").write_text("")
    assert gauges.gauge(tmp_path) == dict(
        lines=4, width=(5 + 5 + 6 + 100) / 4, wide=1 / 4, pairs=1)


def make_project(root, num_lines: dict[str, int]) -> None:
    for name in [*gauges.LIMITS, "nanoengine_extras/a", "nanoengine_extras/b.py"]:
        path = root / name if name.endswith(".py") else root / name / "file.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * num_lines.get(name, 1))


@pytest.mark.parametrize("name, most", [
    *((name, int(limits["lines"])) for name, limits in gauges.LIMITS.items()),
    ("nanoengine_extras/a", 200), ("nanoengine_extras/b.py", 200)])
def test_one_line_too_many(tmp_path, capsys, name, most):
    make_project(tmp_path, {name: most})
    assert gauges.main(tmp_path) == 0
    make_project(tmp_path, {name: most + 1})
    assert gauges.main(tmp_path) == 1
    assert capsys.readouterr().out.endswith(f"{name}: lines {most + 1}, at most {most}\n")


@pytest.mark.parametrize("line, key", [
    ("x = " + "1" * 60, "width"), ("if 1:\n" + "  " * 40 + "x = 1234567", "wide"),
    ("x, y = 1, 2", "pairs")])
def test_dense_lines(tmp_path, capsys, line, key):
    make_project(tmp_path, {})
    (tmp_path / "nanoengine" / "file.py").write_text(f"{line}\n" * 3)
    assert gauges.main(tmp_path) == 1
    assert f"nanoengine: {key} " in capsys.readouterr().out
