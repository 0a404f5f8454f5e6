"""The library as a whole: it stands alone, and its README's example runs."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, packages_imported_by
from forks import run_in_fork

pytest.importorskip("triton", minversion="3.6")
FOLDER = ROOT / "nanoengine_extras" / "gpu"
README = (FOLDER / "README.md").read_text()


def alone(script: str, folder) -> str:
    """The script of a process in which the library alone can be imported."""
    (folder / "nanoengine_extras").mkdir()
    for path in (FOLDER, FOLDER.parent / "known.py"):
        (folder / "nanoengine_extras" / path.name).symlink_to(path)
    return f"import sys; sys.path[:0] = [{str(folder)!r}]\n{script}"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_no_file_imports_an_engine(file):
    imported = packages_imported_by(file)
    known = {"torch", "triton", "nanoengine_extras"}
    assert imported and imported - known <= sys.stdlib_module_names
    assert "torch.compile" not in file.read_text()


def test_importing_it_imports_no_engine(tmp_path):
    script = alone("import nanoengine_extras.gpu\n"
                   "print(*sys.modules)", tmp_path)
    printed = run_in_fork(script, folder=tmp_path).stdout.split()
    assert "nanoengine_extras.gpu" in printed
    assert not {"nanoengine", "nanoengine_extras.cpu"} & {*printed}


def test_without_triton_it_cannot_be_imported(tmp_path):
    script = alone("sys.modules['triton'] = None\n"
                   "try:\n    import nanoengine_extras.gpu\n"
                   "except ImportError as error:\n    print(error.name)", tmp_path)
    assert run_in_fork(script, folder=tmp_path).stdout == "triton\n"


def test_the_example_of_the_readme(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (expected,) = re.findall(r"print\(.*\) +# (.*)", example)
    script = alone(example.replace('"cuda"', '"cpu"'), tmp_path)
    printed = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=tmp_path,
                                      env=os.environ | {"TRITON_INTERPRET": "1"})
    assert printed == expected + "\n"


def test_the_readme_has_all_functions_and_no_other():
    import nanoengine_extras.gpu
    named = {name for cell in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
             for name in re.findall(r"`(\w+)\(", cell)}
    assert named == set(nanoengine_extras.gpu.__all__)
