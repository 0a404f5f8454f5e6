"""Counts source lines, and how dense they are; fails where there is too much.

    python .ci/gauges.py

A source line holds code: no blank line, no comment, no docstring. A node is one of the syntax tree,
docstrings not included: how much is said, however it is folded into lines. The width of a line is
without its indentation. A line is wide from 90 columns on. A pair assigns unrelated values side by
side: `a, b = x, y`; a swap, with the same names on both sides, is none.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# no token of these makes a line one of code
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER}
WIDE = 90
DOCUMENTED: Any = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# the most of each; "features" are all extras but the tools
LIMITS: dict[str, dict[str, float]] = {
    "nanoengine": {"lines": 1500, "nodes": 10700, "nodes a line": 7.25, "width": 43, "wide": 0.05,
                   "pairs": 2},
    "features": {"lines": 8850}, "nanoengine_extras/tools": {"lines": 2100},
    "bench.py": {"lines": 200}}
# libraries, whose files can be longer
KERNELS = ("cpu", "gpu")
# a file of a feature or a tool
FILE: dict[str, float] = {"lines": 200}


def documented(tree: ast.Module) -> list[Any]:
    """Returns the parts of a module that have a docstring."""
    return [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None]


def source_lines(text: str) -> list[str]:
    """Returns the lines that hold code."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in documented(ast.parse(text)):
        docstring = node.body[0]
        numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = text.splitlines()
    return [lines[number - 1] for number in sorted(numbers)]


def num_nodes(text: str) -> int:
    """Counts the nodes of a module, without docstrings and marks of reading and writing."""
    tree = ast.parse(text)
    for node in documented(tree):
        node.body = node.body[1:] or [ast.Pass()]
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))


def num_pairs(text: str) -> int:
    """Counts assignments of several values to several names that are no swaps."""
    count = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[-1]
            if isinstance(target, ast.Tuple):
                names = {ast.unparse(name) for name in target.elts}
                count += not names & {ast.unparse(value) for value in node.value.elts}
    return count


def gauge(*paths: Path) -> dict[str, float]:
    """Returns the figures of files, and of all files in folders, together."""
    files = [file for path in paths
             for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    texts = [file.read_text() for file in files]
    lines = [line for text in texts for line in source_lines(text)]
    count = max(1, len(lines))
    nodes = sum(map(num_nodes, texts))
    return {"lines": len(lines), "nodes": nodes, "nodes a line": nodes / count,
            "width": sum(len(line.strip()) for line in lines) / count,
            "wide": sum(len(line) >= WIDE for line in lines) / count,
            "pairs": sum(map(num_pairs, texts))}


def main(root: Path = ROOT) -> int:
    """Prints a row for each limit, and for each folder of the extras; returns 1 if a limit is
    exceeded."""
    extras = root / "nanoengine_extras"
    folders = [path for path in sorted(extras.iterdir())
               if path.name == "known.py" or any(path.rglob("*.py"))]
    rows: list[tuple[str, list[Path], dict[str, float]]] = [
        (str(path.relative_to(root)), [path], {}) for path in folders if path.name != "tools"]
    for name, most in LIMITS.items():
        paths = [path for path in folders if path.name != "tools"]
        rows.append((name, paths if name == "features" else [root / name], most))
    too_much = []
    print(" lines  nodes  a line  width   wide  pairs")
    for name, paths, most in rows:
        found = gauge(*paths)
        print("{lines:6} {nodes:6} {nodes a line:7.1f} {width:6.1f} {wide:6.1%} {pairs:6}".format(
            **found), name, sep="  ")
        too_much += [f"{name}: {key} {found[key]:.5g}, at most {most[key]:g}"
                     for key in most if found[key] > most[key]]
    files = [path for path in extras.rglob("*.py") if path.parts[len(extras.parts)] not in KERNELS]
    for path in sorted(files):
        if (count := gauge(path)["lines"]) > FILE["lines"]:
            too_much.append(f"{path.relative_to(root)}: lines {count}, at most {FILE['lines']:g}")
    print(*too_much, sep="\n")
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main())
