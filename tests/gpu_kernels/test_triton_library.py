"""The library as a whole: it stands alone, and its README's example runs."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, packages_imported_by

pytest.importorskip("triton", minversion="3.6")
FOLDER = ROOT / "nanoengine_gpu"
README = (FOLDER / "README.md").read_text()


def run(script: str, folder) -> str:
    """In a process of its own, where the library alone can be imported, by the interpreter."""
    (folder / "nanoengine_gpu").symlink_to(FOLDER)
    script = f"import sys; sys.path[:0] = [{str(folder)!r}]\n{script}"
    return subprocess.check_output([sys.executable, "-c", script], text=True, cwd=folder,
                                   env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_no_file_imports_an_engine(file):
    imported = packages_imported_by(file)
    assert imported and imported - {"torch", "triton", "nanoengine_gpu"} <= sys.stdlib_module_names
    assert "torch.compile" not in file.read_text()


def test_importing_it_imports_no_engine(tmp_path):
    printed = run("import nanoengine_gpu\n"
                  "print(*{name.partition('.')[0] for name in sys.modules})", tmp_path).split()
    assert "nanoengine_gpu" in printed
    assert not {"nanoengine", "nanoengine_cpu", "nanoengine_extensions"} & {*printed}


def test_without_triton_it_cannot_be_imported(tmp_path):
    printed = run("sys.modules['triton'] = None\n"
                  "try:\n    import nanoengine_gpu\n"
                  "except ImportError as error:\n    print(error.name)", tmp_path)
    assert printed == "triton\n"


def test_the_example_of_the_readme(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (expected,) = re.findall(r"print\(.*\) +# (.*)", example)
    assert run(example.replace('"cuda"', '"cpu"'), tmp_path) == expected + "\n"


def test_the_readme_has_all_functions_and_no_other():
    import nanoengine_gpu
    named = {name for cell in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
             for name in re.findall(r"`(\w+)\(", cell)}
    assert named == set(nanoengine_gpu.__all__)
