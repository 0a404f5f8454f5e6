"""The library as a whole: it stands alone, and its README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import packages_imported_by
from forks import run_in_fork

import nanoengine_extras.cpu

FOLDER = Path(nanoengine_extras.cpu.__file__).parent
README = (FOLDER / "README.md").read_text()


def alone(script: str, folder: Path) -> str:
    """The script of a process in which the library alone can be imported."""
    (folder / "nanoengine_extras").mkdir()
    for path in (FOLDER, FOLDER.parent / "known.py"):
        (folder / "nanoengine_extras" / path.name).symlink_to(path)
    return f"import sys; sys.path[:0] = [{str(folder)!r}]\n{script}"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_no_file_imports_an_engine(file):
    imported = packages_imported_by(file)
    allowed = {"torch", "numpy", "numba", "llvmlite", "nanoengine_extras"}
    assert imported and imported - allowed <= sys.stdlib_module_names


def test_importing_it_imports_no_engine(tmp_path):
    script = alone("import nanoengine_extras.cpu\n"
                   "print(*sys.modules)", tmp_path)
    printed = subprocess.check_output(
        [sys.executable, "-c", script], text=True, cwd=tmp_path).split()
    assert "nanoengine_extras.cpu" in printed
    engine = {"nanoengine", "nanoengine_extras.gpu"}
    assert not {*engine, "transformers"} & {*printed}


def test_the_example_of_the_readme(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    expected = [comment.strip() for comment in re.findall(r"print\(.*\) +# (.*)", example)]
    printed = run_in_fork(alone(example, tmp_path), folder=tmp_path).stdout.splitlines()
    assert len(printed) == len(expected) == 2
    assert all(comment.startswith(line) for line, comment in zip(printed, expected))


def test_the_readme_has_all_functions_and_no_other():
    named = {name for cell in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
             for name in re.findall(r"`(\w+)\(", cell)}
    assert named == set(nanoengine_extras.cpu.__all__)
