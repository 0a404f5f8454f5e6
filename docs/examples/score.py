"""`python -m nanoengine score`, with the bundled model if --model names no other one."""

import sys
from pathlib import Path

from nanoengine_extras.tools import scores

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    scores.main(["--model", str(BUNDLED), *given])


if __name__ == "__main__":
    main()
