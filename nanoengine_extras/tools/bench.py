"""`python -m nanoengine bench`: starts bench.py, which is next to the packages, like the lab."""

import runpy
import sys
from pathlib import Path

import nanoengine


def main(arguments: list[str] | None = None) -> None:
    """Measures throughput. Raises ValueError if bench.py is not there."""
    script = Path(nanoengine.__file__).resolve().parent.parent / "bench.py"
    if not script.is_file():
        raise ValueError(f"bench needs {script}: install nanoengine again")
    sys.argv = [str(script), *(sys.argv[1:] if arguments is None else arguments)]
    # at the front, since a user's folder can contain another lab
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
