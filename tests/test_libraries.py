"""The libraries of kernels as a whole: each stands alone, and its README's example runs."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, packages_imported_by
from forks import run_in_fork

LIBRARIES = ROOT / "nanoengine_extras"
PACKAGES = {"cpu": {"torch", "numpy", "numba", "llvmlite"}, "gpu": {"torch", "triton"}}


@pytest.fixture(params=PACKAGES)
def name(request) -> str:
    if request.param == "gpu":
        pytest.importorskip("triton", minversion="3.6")
    return request.param


@pytest.fixture
def print_alone(name, tmp_path):
    """Runs a script in a process that does not find the engine, nor runs the __init__.py of the
    extras. The library lies where it is, so that its kernels are found on disk.

    anew: in one that has not imported PyTorch and transformers, and that interprets kernels
    """
    def run(script: str, anew: bool) -> str:
        script = f"""import sys, types
extras = sys.modules["nanoengine_extras"] = types.ModuleType("nanoengine_extras")
extras.__path__ = [{str(LIBRARIES)!r}]
{script}"""
        if not anew:
            return run_in_fork(script, folder=tmp_path).stdout
        return subprocess.check_output([sys.executable, "-c", script], text=True, cwd=tmp_path,
                                       env=os.environ | {"TRITON_INTERPRET": "1"})

    return run


def test_no_file_imports_an_engine(name):
    for file in (LIBRARIES / name).glob("*.py"):
        imported = packages_imported_by(file)
        allowed = PACKAGES[name] | {"nanoengine_extras"}
        assert imported and imported - allowed <= sys.stdlib_module_names, file
        assert name == "cpu" or "torch.compile" not in file.read_text()


def test_importing_it_imports_no_engine(name, print_alone):
    """And without the compiler of its kernels, it cannot be imported."""
    compiler = {"cpu": "numba", "gpu": "triton"}[name]
    *imported, missing = print_alone(f"""
import importlib
importlib.import_module("nanoengine_extras.{name}")
print(*sys.modules)
for module in [each for each in sys.modules if each.startswith("nanoengine_extras.{name}")]:
    del sys.modules[module]
sys.modules["{compiler}"] = None
try:
    importlib.import_module("nanoengine_extras.{name}")
except ImportError as error:
    print(error.name)
""", anew=name == "cpu").split()
    assert missing == compiler and f"nanoengine_extras.{name}" in imported
    allowed = {"nanoengine_extras", "nanoengine_extras.known", f"nanoengine_extras.{name}"}
    parts = {".".join(each.split(".")[:2]) for each in imported if each.startswith("nanoengine")}
    assert parts <= allowed and (name == "gpu" or "transformers" not in imported)


def test_its_readme(name, print_alone):
    """The example runs, and the table has all functions and no other."""
    text = (LIBRARIES / name / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    expected = [comment.strip() for comment in re.findall(r"print\(.*\) +# (.*)", example)]
    printed = print_alone(example.replace('"cuda"', '"cpu"'), anew=name == "gpu").splitlines()
    assert len(printed) == len(expected) == {"cpu": 2, "gpu": 1}[name]
    assert all(comment.startswith(line) for line, comment in zip(printed, expected))
    named = {function for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
             for function in re.findall(r"`(\w+)\(", cell)}
    assert named == {*importlib.import_module(f"nanoengine_extras.{name}").__all__}
