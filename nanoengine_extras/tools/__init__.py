"""What people start. In this file: how all commands read their flags and report faults."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from nanoengine.config import EngineConfig
from nanoengine.errors import naming

# what a command line can say of an engine: the options of `LLM`, with their types
ENGINE = {name: kind for name, kind in get_type_hints(EngineConfig).items()
          if name not in ("model", "features", "_")}
# vLLM's names for metrics that have another name in metrics.py
METRIC_NAMES = {"guessed_tokens": "spec_decode_num_draft_tokens",
                "right_guesses": "spec_decode_num_accepted_tokens"}


class Parser(argparse.ArgumentParser):
    """Parses flags. A fault of its user is one line; argparse would print all flags first."""

    def add_llm(self) -> None:
        """Adds the flags for a model and for the options of `LLM`."""
        self.add_argument("--model", required=True, help="a folder or a Hugging Face id")
        self.add_argument("--options", default="{}", metavar="JSON",
                          help="""options of LLM as JSON, '{"seed": 1}'; or as flags, below""")
        self.add_fields("options of LLM, see docs/reference.md", ENGINE)

    def add_fields(self, title: str, kinds: dict[str, Any]) -> None:
        """Adds a flag for each name: with a value, or --x and --no-x if it is a bool."""
        group = self.add_argument_group(title)
        for name, kind in kinds.items():
            # int for `int | None`, for example
            types = [each for each in (bool, float, int) if each in (kind, *get_args(kind))]
            how: Any = {"type": [*types, str][0]}
            if bool in types:
                how = {"action": argparse.BooleanOptionalAction}
            group.add_argument(f"--{name.replace('_', '-')}", **how)

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Reports a ValueError like a wrong flag, and ends at Ctrl-C."""
        try:
            yield
        except (ValueError, ArithmeticError) as error:
            self.error(str(error))
        except KeyboardInterrupt:
            self.exit(130)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def options_in(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `LLM` that were given as flags."""
    return {name: value for name, value in vars(flags).items()
            if name in ENGINE and value is not None}


def options_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `LLM` in --options and in flags, which override it."""
    with naming("--options: JSON"):
        return {**json.loads(flags.options), **options_in(flags)}


def new_file(text: str) -> Path:
    """Returns the path of a file that can be written: else, a long run would fail at its end."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted: it must be a file, in a folder that exists")
    return path
