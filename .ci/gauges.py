"""Counts source lines, and how dense they are; fails where there is too much.

    python .ci/gauges.py

A source line holds code: no blank line, no comment, no docstring. The width of a line is without
its indentation. A line is wide from 90 columns on. A pair assigns unrelated values side by side:
`a, b = x, y`; a swap, with the same names on both sides, is none.
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
# the most of each; a feature is a file or a folder of the extensions
DENSITY = {"width": 43.5, "wide": 0.06, "pairs": 2}
LIMITS: dict[str, dict[str, float]] = {
    "nanoengine": {"lines": 1600} | DENSITY, "nanoengine_extras/cpu": {"lines": 1307},
    "nanoengine_extras/gpu": {"lines": 465}, "nanoengine_extras/tools/lab": {"lines": 700},
    "bench.py": {"lines": 200}}
# the streets of features
STREETS = ("models", "running", "sampling", "tools")
FEATURE: dict[str, float] = {"lines": 200}
# several files, none above 200 lines: the formats of quantized files, and products with packed
# weights; what each family of GGUF files leaves out; a model of transformers, its check and its
# fast modules; grammars of all kinds; layers and their trial
LARGE: dict[str, dict[str, float]] = {
    "quantized": {"lines": 2699}, "gguf_families": {"lines": 465},
    "transformers_models": {"lines": 748}, "structured_outputs": {"lines": 290},
    "own_layers": {"lines": 236}}


def source_lines(text: str) -> list[str]:
    """Returns the lines that hold code."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    documented: Any = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring: Any = node.body[0]
            numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = text.splitlines()
    return [lines[number - 1] for number in sorted(numbers)]


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


def gauge(path: Path) -> dict[str, float]:
    """Returns the figures of a file, or of all files in a folder together."""
    texts = [file.read_text() for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    lines = [line for text in texts for line in source_lines(text)]
    return {"lines": len(lines),
            "width": sum(len(line.strip()) for line in lines) / max(1, len(lines)),
            "wide": sum(len(line) >= WIDE for line in lines) / max(1, len(lines)),
            "pairs": sum(map(num_pairs, texts))}


def main(root: Path = ROOT) -> int:
    """Prints a row for each limit; returns 1 if one is exceeded."""
    limits = dict(LIMITS)
    for street in STREETS:
        for path in sorted((root / "nanoengine_extras" / street).iterdir()):
            name = str(path.relative_to(root))
            if (path.suffix == ".py" or any(path.glob("*.py"))) and name not in limits:
                limits[name] = LARGE.get(path.name, FEATURE)
    too_much = []
    print(" lines  width   wide  pairs")
    for name, most in limits.items():
        found = gauge(root / name)
        print("{lines:6} {width:6.1f} {wide:6.1%} {pairs:6}".format(**found), name, sep="  ")
        too_much += [f"{name}: {key} {found[key]:.4g}, at most {most[key]:g}"
                     for key in most if found[key] > most[key]]
    print(*too_much, sep="\n")
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main())
