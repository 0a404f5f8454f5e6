"""Imports point one way: bench and lab to features, features to the engine, and the libraries of
kernels to none of these. There are no circles, also not within functions, for types, or through an
`__init__`. The engine asks for a feature by its name, by `extension`, and only when a user asks."""

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("nanoengine", "nanoengine_extras")
# what is imported by a text, and where
BY_TEXT = {"nanoengine.features": ["module"], "nanoengine_extras": ['"nanoengine.features"'],
           "nanoengine_extras.cpu.memory": ['"scipy.linalg.cython_blas"']}


def all_modules() -> dict[str, Path]:
    """The file of each module of this repository."""
    found = {"bench": ROOT / "bench.py"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, text: str, modules: Iterable[str], is_package: bool = False) -> set[str]:
    """Those of these modules that the text of a module imports, anywhere in it."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[:len(package) + 1 - node.level] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                # what is no module comes from an `__init__`
                full_name = f"{source}.{alias.name}"
                found.add(full_name if full_name in modules else source)
    return found & {*modules} - {name}


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    modules = all_modules()
    return {name: imports(name, path.read_text(), modules, path.stem == "__init__")
            for name, path in modules.items()}


def test_no_circles(needs):
    """Which would raise a CycleError."""
    assert [*TopologicalSorter(needs).static_order()]


@pytest.mark.parametrize("text", [
    "import a.other", "from a.other import x", "from a import other", "from . import other",
    "from .other import x", "def f():\n    from a.other import x",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.other import Kind"])
def test_each_form_of_an_import_is_seen(text):
    assert imports("a.one", text, ["a", "a.one", "a.other"]) == {"a.other"}
    assert imports("a", text, ["a", "a.other"], is_package=True) == {"a.other"}


# features that have kernels of their own, of the pieces of a library's; imported only with it
WITH_KERNELS = {f"nanoengine_extras.models.{name}" for name in (
    "quantized.loading", "quantized.transformers_linears",
    "transformers_models.row_norms", "experts")}
STREETS = ("models", "running", "sampling")


def kind_of(name: str) -> str:
    """The folder of a module: "engine", "cpu", "gpu", "features", or "tools"; "known" is what both
    libraries of kernels import."""
    first, *rest = name.split(".")
    if first == "nanoengine":
        return "engine"
    return "tools" if first == "bench" else "features" if rest[:1] and rest[0] in STREETS else (
        rest[0] if rest else "extras")


def test_they_point_one_way(needs):
    """The engine asks for a feature by its name, and for a library of kernels in one place."""
    allowed = {"engine": {"engine"}, "known": set(), "cpu": {"cpu", "known"},
               "gpu": {"gpu", "known"}, "extras": set(),
               "features": {"engine", "features"},
               "tools": {"engine", "cpu", "gpu", "features", "tools"}}
    modules = all_modules()
    for name, others in needs.items():
        kind = kind_of(name)
        more = {"cpu"} if name in WITH_KERNELS else set()
        assert {kind_of(other) for other in others} - {"extras"} <= allowed[kind] | more, name
        text = modules[name].read_text()
        if kind == "engine":
            # that is, by no statement
            assert not re.search(r"^\s*(import|from) nanoengine_", text, re.MULTILINE), name
        if kind not in ("tools", "features"):
            by_text = [*re.findall(r"import_module\((.*?)\)|__import__", text)]
            assert by_text == BY_TEXT.get(name, []), name
