"""Runs the snippets of a chapter, and shows what each of them prints.

    python docs/tutorial/run.py 3           # chapter 3
    python -i docs/tutorial/run.py 3        # and stay, with all its names, for the exercises

The fences of a chapter are of these kinds. `tests/test_docs.py` checks them all.

    <!-- from nanoengine/engine.py -->  a quote: the next fence is in that file, except for lines
                                        that are left out, where it has `...` or a comment `# …`
    ```python                           a snippet: it runs after those before it
    ```output                           what the snippet right before it prints
    ```sh                               commands
    ```text                             a drawing
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^(?:<!-- from (?P<source>\S+) -->\n+)?"
                   r"```(?P<language>\w*)\n(?P<text>.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Fence(NamedTuple):
    """line: where its text begins in the file, from 1; source: of a quote, else None."""

    language: str
    text: str
    line: int
    source: str | None


class Snippet(NamedTuple):
    """code: begins with empty lines, so that tracebacks name the right line of the file."""

    code: str
    output: str


def fences_of(text: str) -> list[Fence]:
    return [Fence(found["language"], found["text"], text.count("\n", 0, found.start("text")) + 1,
                  found["source"]) for found in FENCE.finditer(text)]


def snippets_of(text: str) -> list[Snippet]:
    """The snippets of a chapter, each with what it prints: nothing, if no output follows."""
    found: list[Snippet] = []
    before = None
    for fence in fences_of(text):
        is_python = fence.language == "python" and not fence.source
        if is_python:
            found.append(Snippet("\n" * (fence.line - 1) + fence.text, ""))
        if fence.language == "output":
            assert before, f"line {fence.line}: an output without a snippet right before it"
            found[-1] = found[-1]._replace(output=fence.text)
        before = is_python
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pages = sorted(Path(__file__).parent.glob("*.md"))
    chapters = {page.stem.split("-")[0].lstrip("0"): page for page in pages}
    parser.add_argument("chapter", choices=chapters)
    chapter = chapters[parser.parse_args().chapter]
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for snippet in snippets_of(chapter.read_text()):
        print(f"\n{snippet.code.strip()}\n", flush=True)
        exec(compile(snippet.code, str(chapter), "exec"), globals())


if __name__ == "__main__":
    main()
