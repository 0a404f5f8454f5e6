"""Writes the tables of docs/reference.md, from the source code.

    python docs/write_reference.py                  # writes the tables of the file
    python docs/write_reference.py RequestOutput    # prints a table that is not in the file

In the file, each table follows a comment `<!-- table: NAME -->`. All other text is written by hand.
A test in `tests/test_docs.py` fails if the file is not up to date.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanoengine import LLM, SamplingParams  # noqa: E402
from nanoengine.config import EngineConfig  # noqa: E402
from nanoengine.features import extension  # noqa: E402
from nanoengine.policies import TABLES as POLICIES  # noqa: E402
from nanoengine.requests import CompletionOutput, RequestOutput  # noqa: E402
from nanoengine_extras import Calls  # noqa: E402
from nanoengine_extras.sampling.beam_search import BeamSearchParams, BeamSearchSequence  # noqa: E402
from nanoengine_extras.tools.chat import render  # noqa: E402
from nanoengine_extras.running.metrics import Metrics, RequestMetrics  # noqa: E402
from nanoengine_extras.tools.scores import Score, score  # noqa: E402

FILE = ROOT / "docs" / "reference.md"
# the engine's own options of which a feature adds values
MORE_VALUES = {"load_format": "models.dummy", "attention_backend": "running.backends",
               "model_impl": "models.transformers_models"} | dict.fromkeys(
    [*POLICIES, "kv_allocation"], "running.policies")


# ------------------------------------------------------------------------------ docstrings


def entries_of(docstring: str) -> dict[str, str]:
    """The entries of a docstring, `name: text`, each text in one line."""
    lines = re.sub(r"\n {4,}(?=\S)", " ", inspect.cleandoc(docstring))
    return dict(re.findall(r"^(\w+): (.*)$", lines, flags=re.MULTILINE))


def prose_of(docstring: str) -> str:
    """The paragraphs of a docstring, without entries and code, in one line."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return " ".join(" ".join(each.split()) for each in paragraphs
                    if not entries_of(each) and not each.startswith("    "))


def meanings_of(kind: Any) -> dict[str, str]:
    """The entries of a dataclass, which must be its fields and properties, and all of its fields.

    Raises ValueError for an entry too many, or for one that is missing.
    """
    entries = entries_of(kind.__doc__)
    names = {field.name for field in dataclasses.fields(kind)}
    if wrong := names - entries.keys() | entries.keys() - names - vars(kind).keys():
        raise ValueError(f"the docstring of {kind.__name__} and its fields differ: {wrong}")
    return entries


# ---------------------------------------------------------------------------------- tables


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0]


def without_comparisons(text: str) -> str:
    """A meaning without the values that exist only for comparison."""
    return re.sub(r"; for comparison,? .*?(?=\. [A-Z]|\.$)", "", text)


def table(*rows: tuple[str, ...]) -> str:
    """A table in Markdown; the first row is its head. A last column that is empty is left out."""
    if not any(row[-1] for row in rows[1:]):
        rows = tuple(row[:-1] for row in rows)
    head, *rest = rows
    lines = [" | ".join(cell.replace("|", r"\|") for cell in row)
             for row in (head, ["---"] * len(head), *rest)]
    # an empty cell has one space
    return "".join(f"| {line} |\n".replace("  |", " |") for line in lines)


def link_to(feature: str) -> str:
    """A link to the file, or to the folder, of a feature; nothing for the engine."""
    if not feature:
        return ""
    path = feature.replace(".", "/")
    path += "" if (ROOT / "nanoengine_extras" / path).is_dir() else ".py"
    return f"[{Path(path).name}](../nanoengine_extras/{path})"


def shown(value: Any) -> str:
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def defaults_of(kind: Any) -> dict[str, str]:
    """The default of each field. Those of `EngineConfig` can depend on the device."""
    required = {field.name: "none" for field in dataclasses.fields(kind)
                if field.default is field.default_factory is dataclasses.MISSING}
    if kind is not EngineConfig:
        made = kind(**dict.fromkeys(required, 1))
        found = {name: shown(value) for name, value in vars(made).items()}
    else:
        on_cpu, on_gpu = (vars(EngineConfig(model="none", device=device))
                          for device in ("cpu", "cuda"))
        found = {name: shown(value) if value == on_gpu[name]
                 else f"{shown(value)}; {shown(on_gpu[name])} on a GPU"
                 for name, value in on_cpu.items()} | {"device": '`"auto"`'}
    return found | dict.fromkeys(required, "required")


def options(kind: Any) -> str:
    """A table of options: name, default, the first sentence of the meaning, and whose they are."""
    features = {field.name: field.metadata.get("feature", "")
                for field in dataclasses.fields(kind)}
    defaults = defaults_of(kind)
    more = MORE_VALUES if kind is EngineConfig else {}
    rows = []
    for name, text in meanings_of(kind).items():
        feature = link_to(features[name])
        if name in more:
            feature = f"more in {link_to(more[name])}"
        meaning = first_sentence(without_comparisons(text))
        rows.append((f"`{name}`", defaults[name], meaning, feature))
    return table(("option", "default", "meaning", "feature"), *rows)


def meanings(entries: dict[str, str]) -> str:
    """A table of names and meanings."""
    return table(("name", "meaning"), *((f"`{name}`", text) for name, text in entries.items()))


def fields(kind: Any) -> str:
    """A table of the fields and properties of a result."""
    return meanings(meanings_of(kind))


def calls() -> str:
    """The methods of `LLM`; some only call a feature's function, which has the arguments."""
    rows = []
    for name, method in (vars(LLM) | vars(Calls)).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        # made by `call_of`
        found = re.search(r'help\("nanoengine_extras\.([\w.]+)\.\w+"\)', str(method.__doc__))
        feature = found[1] if found else ""
        function = getattr(extension(feature), name, method) if feature else method
        names = [f"`{each}`" for each in [*inspect.signature(function).parameters][1:]]
        rows.append((f"`{name}`", ", ".join(names) or "–",
                     first_sentence(prose_of(str(function.__doc__))), link_to(feature)))
    return table(("call", "arguments", "what it does", "feature"), *rows)


def arguments() -> str:
    """The arguments of `score` and `generate`, then those of `chat`."""
    return meanings(entries_of(str(score.__doc__)) | entries_of(str(LLM.generate.__doc__))
                    | entries_of(str(render.__doc__)))


TABLES: dict[str, Callable[[], str]] = {
    "calls": calls, "arguments": arguments,
    "metrics": lambda: meanings(entries_of(str(Metrics.gauges.__doc__)))}
TABLES |= {kind.__name__: partial(options, kind)
           for kind in (EngineConfig, SamplingParams, BeamSearchParams)}
TABLES |= {kind.__name__: partial(fields, kind)
           for kind in (RequestOutput, CompletionOutput, RequestMetrics, BeamSearchSequence, Score)}
# the other tables are printed
IN_FILE = ["EngineConfig", "SamplingParams", "calls"]


def written(text: str) -> str:
    """Returns the text of the reference with new tables.

    Raises ValueError if a table is unknown or missing.
    """
    found = re.findall(r"^<!-- table: (\w+) -->$", text, flags=re.MULTILINE)
    if sorted(found) != IN_FILE:
        raise ValueError(f"the tables of the reference must be {IN_FILE}, not {found}")
    return re.sub(r"^(<!-- table: (\w+) -->\n)(?:\|.*\n)*",
                  lambda match: match[1] + TABLES[match[2]](), text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", choices=[*TABLES], metavar="NAME",
                        help=f"print one table: {', '.join(TABLES)}")
    name = parser.parse_args().table
    if name:
        print(TABLES[name](), end="")
    else:
        FILE.write_text(written(FILE.read_text()))


if __name__ == "__main__":
    main()
