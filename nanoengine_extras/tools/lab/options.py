"""The flags of `bench.py` and of the commands of the lab, and the workload that they describe.

A workload consists of prompts as token ids, and the number of tokens that each generates.
"""

import argparse
import dataclasses
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import naming
from nanoengine.features import part
from nanoengine.loader import find_folder, load_config
from nanoengine.model_runner import choose_device
from nanoengine.observers import Features
from nanoengine.requests import InputProcessor
from nanoengine_extras import ALWAYS
from nanoengine_extras.tools import ENGINE, Parser as BaseParser, new_file, options_in

ROOT = Path(__file__).resolve().parents[3]
# models without weights
SHAPES = {file.parent.name: file.parent for file in (ROOT / "models").glob("*/config.json")
          if not (file.parent / "model.safetensors").exists()}
SIZES = {"num_seqs": int, "min_input": int, "max_input": int, "min_output": int,
         "max_output": int, "prefix_length": int, "temperature": float}
WORKLOADS = {
    "uniform": (256, 100, 1024, 100, 1024, 0, 0.6),  # nano-vllm's
    "small": (64, 16, 256, 16, 256, 0, 0.6),  # the same for a model of 3 million parameters
    "shared-prefix": (64, 16, 256, 16, 256, 256, 0.6),
    "prefill-heavy": (256, 1000, 1000, 1000, 1000, 0, 0.6),  # times --n-k in
    "decode-heavy": (256, 1000, 1000, 1000, 1000, 0, 0.6),  # times --n-k out
    "cpu-mixed": (32, 100, 256, 32, 128, 0, 0.0),
    "cpu-decode": (16, 64, 64, 256, 256, 0, 0.0),
    "cpu-prefix": (32, 32, 32, 32, 32, 512, 0.0),
}


@dataclasses.dataclass
class Workload:
    """Prompts as token ids; the most tokens that each can generate, and how many it does
    generate.

    An engine is not told `lengths`: a request ends there as if it had sampled EOS.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    lengths: list[int]
    temperature: float

    def __str__(self) -> str:
        num_inputs = sum(map(len, self.prompts))
        return f"{len(self.prompts)} prompts: {num_inputs:,} tokens in, {sum(self.lengths):,} out"

    def check(self, generated: list[int]) -> None:
        """Stops the program if requests have generated fewer tokens than asked for."""
        if generated != self.lengths:
            raise SystemExit(f"only {sum(generated)} tokens were generated: raise --max-model-len?")


class Parser(BaseParser):
    """Parses the flags for a model, the options of its engine, and a workload."""

    def __init__(self, description: str | None, workload: str | None = None) -> None:
        super().__init__(usage="%(prog)s [FLAGS]", description=description,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", type=new_file, help="a file for the results of all runs")
        bundled = ROOT / "models/tiny-qwen3"
        model = self.add_mutually_exclusive_group(required=not bundled.exists())
        model.add_argument("--model", default=bundled, help="a folder or an id")
        model.add_argument("--config", choices=SHAPES, help="a shape with random weights")
        # the figures need the trace
        self.add_fields("options of the engine, see docs/reference.md",
                        {name: kind for name, kind in ENGINE.items() if name != "trace"})
        if workload:
            self.add_argument("--workload", default=workload, choices=WORKLOADS)
            self.add_argument("--prompts", type=Path, help="a file: a text or JSON in each line")
            self.add_argument("--n-k", type=float, default=1, help="factor of heavy workloads")
            self.add_fields("sizes, instead of those of the workload", SIZES)
            self.add_argument("--true-lengths", type=float, default=1.0, help="share of max_tokens")

    def parse(self, argv: list[str], **defaults: Any) -> argparse.Namespace:
        """Returns the flags, `args.engine_config` (the given options, then `defaults`), and
        `args.vocab_size`. Raises ValueError for bad ones."""
        args = self.parse_args(argv)
        args.given = options_in(args)
        if args.config:
            args.model = SHAPES[args.config]
            args.given["load_format"] = "dummy"
        options = {"device": "auto", **defaults, **args.given}
        options["device"] = choose_device(options["device"])
        folder = part("find_model", None, find_folder)(
            args.model, EngineConfig(str(args.model), **options), "model")
        args.engine_config = config = EngineConfig(model=str(folder), **options)
        model_config = part("load_config", config, load_config)(folder, config)
        args.vocab_size = model_config.vocab_size
        if isinstance(vars(args).get("prompts"), Path):
            inputs = InputProcessor(config, model_config, folder, Features())
            inputs.max_model_len = 2**31  # not known before the cache
            args.prompts = read_prompts(args.prompts, inputs)
        return args

    def draw(self, args: argparse.Namespace) -> Workload:
        """Returns the workload that the flags describe; sets the sizes that were not given."""
        longer = {"prefill-heavy": "_input", "decode-heavy": "_output"}.get(args.workload, "none")
        for name, size in zip(SIZES, WORKLOADS[args.workload]):
            if getattr(args, name) is None:
                size = round(size * args.n_k) if name.endswith(longer) else size
                # a bound that is given alone moves the other one
                nearer, other = (min, "max") if name[:3] == "min" else (max, "min")
                setattr(args, name, nearer(size, getattr(args, other + name[3:], None) or size))
        if min(args.num_seqs, vars(args).get("repeat", 1)) < 1 or not 0 < args.true_lengths <= 1:
            self.error("--num-seqs and --repeat must be at least 1, --true-lengths above 0, to 1")

        # in nano-vllm's order: length and ids of each prompt, then all output lengths
        rng = random.Random(args.engine_config.seed)
        prefix = draw_ids(rng, args.prefix_length, args.vocab_size)
        prompts = args.prompts or [
            prefix + draw_ids(rng, draw_length(rng, args, "input"), args.vocab_size)
            for _ in range(args.num_seqs)]
        max_tokens = [draw_length(rng, args, "output") for _ in prompts]
        low = max(0.0, 2 * args.true_lengths - 1)
        high = min(1.0, 2 * args.true_lengths)
        lengths = [max(1, round(most * rng.uniform(low, high))) for most in max_tokens]
        return Workload(prompts, max_tokens, lengths, args.temperature)


def picture(text: str) -> Path:
    """Returns the path of a picture. Raises ArgumentTypeError if matplotlib cannot write it."""
    path = new_file(text)
    try:
        from matplotlib.figure import Figure
        Figure().savefig(io.BytesIO(), format=path.suffix[1:] or None)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f'{path} needs matplotlib (pip install ".[bench]"): {error}') from error
    return path


def command(main: Callable[[list[str]], None]) -> Callable[..., None]:
    """Decorates the `main` of a command: a ValueError ends it in one line, as a wrong flag does."""
    def run(argv: list[str] | None = None) -> None:
        with BaseParser().faults():
            main(sys.argv[1:] if argv is None else argv)
    return run


def draw_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, 10000) % vocab_size for _ in range(count)]


def draw_length(rng: random.Random, args: argparse.Namespace, kind: str) -> int:
    """Draws a length between two others. kind: "input" or "output" """
    low, high = (vars(args)[f"{bound}_{kind}"] for bound in ("min", "max"))
    if not 1 <= low <= high:
        raise ValueError(f"--min-{kind} must be from 1 to --max-{kind}")
    return rng.randint(low, high) if low < high else low


def read_prompts(file: Path, inputs: InputProcessor) -> list[list[int]]:
    """Returns the prompts in a file, one in each line: a text, or JSON with a text or token ids.

    Lines end with a newline, or carriage return and newline; other separators belong to a prompt.
    Raises ValueError for a line that is not a prompt of this model, with its number.
    """
    with naming(file):
        lines = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    requests = []
    for number, line in enumerate(lines, 1):
        with naming(f"{file}, line {number}"):
            if line.strip():
                requests += inputs.make_requests(json.loads(line) if line[0] == "{" else line, None)
    if not requests:
        raise ValueError(f"{file} has no prompts")
    return [each.seq.token_ids for each in requests]


def new_engine(llm: Any, **changes: Any) -> Engine:
    """Gives a loaded model a new engine, with other options."""
    runner = llm.engine.runner
    runner.features = llm.inputs.features = Features(ALWAYS)
    config = dataclasses.replace(llm.config, **changes)
    llm.engine = part("engine", config, Engine)(config, runner, runner.features)
    llm.driver = type(llm.driver)(llm.engine)
    return llm.engine
