"""Imports point one way: bench and lab to features, features to the engine, and the libraries of
kernels to none of these. There are no circles, also not within functions, for types, or through an
`__init__`. The engine asks for a feature by its name, by `extension`, and only when a user asks."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"nanoengine": "nanoengine", "nanoengine_cpu": "nanoengine_cpu",
           "nanoengine_gpu": "nanoengine_gpu", "nanoengine_extensions": "nanoengine_extensions",
           "lab": "lab"}
# what is imported by a text, and where
BY_TEXT = {"nanoengine.features": ["module"]}


def all_modules() -> dict[str, Path]:
    """The file of each module of this repository."""
    found = {"bench": ROOT / "bench.py"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts])
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


def in_circles(needs: dict[str, set[str]]) -> set[str]:
    """The modules that import each other, and those that need them."""
    left = dict(needs)
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    return {*left}


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    modules = all_modules()
    return {name: imports(name, path.read_text(), modules, path.stem == "__init__")
            for name, path in modules.items()}


def test_no_circles(needs):
    assert not in_circles(needs)


@pytest.mark.parametrize("text", [
    "import a.other", "from a.other import x", "from a import other", "from . import other",
    "from .other import x", "def f():\n    from a.other import x",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.other import Kind"])
def test_each_form_of_an_import_closes_a_circle(text):
    assert imports("a.one", text, ["a", "a.one", "a.other"]) == {"a.other"}
    assert imports("a", text, ["a", "a.other"], is_package=True) == {"a.other"}
    circle = {"a.one": {"a.other"}, "a.other": {"a.third"}, "a.third": {"a.one"}, "b": {"a.one"},
              "c": set()}
    assert in_circles(circle) == {"a.one", "a.other", "a.third", "b"}
    assert not in_circles(circle | {"a.third": {"c"}})


def test_an_init_counts():
    """`from a import x` imports the package itself, where x is no module of it."""
    assert imports("a.one", "from a import Thing", ["a", "a.one"]) == {"a"}


# features that have kernels of their own, of the pieces of a library's; imported only with it
WITH_KERNELS = {f"nanoengine_extensions.{name}" for name in (
    "quantized.modules", "quantized.packed", "quantized.order", "quantized.kernel",
    "quantized.expanding", "quantized.sums", "quantized.weights", "quantized.whole_numbers",
    "quantized.transformers_linears", "quantized.transformers_modules",
    "transformers_models.row_norms", "experts")}


def test_they_point_one_way(needs):
    """The engine asks for a feature by its name, and for a library of kernels in one place."""
    engine, kernels = {"nanoengine"}, {"nanoengine_cpu", "nanoengine_gpu"}
    features, tools = {"nanoengine_extensions"}, {"lab", "bench"}
    allowed = {"nanoengine": engine, "nanoengine_cpu": {"nanoengine_cpu"},
               "nanoengine_gpu": {"nanoengine_gpu"}, "nanoengine_extensions": engine | features,
               "lab": engine | kernels | features | tools,
               "bench": engine | kernels | features | tools}
    modules = all_modules()
    for name, others in needs.items():
        package = name.split(".")[0]
        more = {"nanoengine_cpu"} if name in WITH_KERNELS else set()
        assert {other.split(".")[0] for other in others} <= allowed[package] | more, name
        text = modules[name].read_text()
        if package == "nanoengine":
            # that is, by no statement
            assert not re.search(r"^\s*(import|from) nanoengine_", text, re.MULTILINE), name
        if package not in tools | features:
            by_text = [*re.findall(r"import_module\((.*?)\)|__import__", text)]
            assert by_text == BY_TEXT.get(name, []), name
