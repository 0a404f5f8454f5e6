"""A film of the scheduler: one HTML file, to play, to step through and to drag.

    # recompute, swap and reserve, two at a time
    python -m nanoengine_extras.tools.lab.film preemption -o film.html
    python -m nanoengine_extras.tools.lab.film batching --num-seqs 12 --gap 0

The engine's own scheduler and block manager run a small workload, once for each variant of a
comparison, over a runner that computes nothing. A frame shows the moment at which a step's batch
goes to the runner. The page `film.html` draws the frames, and says in words what changed between
two of them. All generated tokens are equal, also those of two completions of a prompt.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine.engine import Engine
from nanoengine.sequence import Batch
from .compare import COMPARISONS
from .options import Parser, Workload, command, new_file
from .simulate import Cost, SimulatedRunner

OPTIONS = {"scheduling": "mixed", "block_size": 4, "num_kv_blocks": 20, "max_num_seqs": 6,
           "max_num_batched_tokens": 16, "swap_space": 2**-8}  # GiB: 8 blocks of 4 tokens


def frame_of(engine: Engine, batch: Batch) -> dict:
    """The state at the beginning of a step. It does not change later."""
    manager = engine.scheduler.block_manager
    host_tables = getattr(manager, "host_tables", {})  # only if blocks are swapped
    return {
        "batch": (batch.sequences, batch.starts, batch.num_tokens,
                  [(seq, mode) for seq, mode, _ in batch.preempted]),
        "copies": vars(batch.copies),
        "running": [(seq, seq.num_tokens, seq.num_computed_tokens, seq.block_table.tolist())
                    for seq in engine.scheduler.running],
        # for each: how many blocks it would get, which ones it would find, and those on the host
        "waiting": [(seq, seq.num_tokens, manager.num_blocks_to_hold(seq), manager.find_shared(seq),
                     host_tables.get(seq, [])) for seq in engine.scheduler.waiting],
        # in the order of reuse
        "free": list(manager.free),
        "hashes": {block: found[0].hex()[:6] for block, found in manager.hash_of_block.items()}}


class Camera(SimulatedRunner):
    """Records a frame at every launch. Its clock counts steps."""

    frames: list[dict]

    def launch(self, batch: Batch) -> Any:
        self.frames.append(frame_of(self.engine, batch))
        return super().launch(batch)


def record(args: Any, workload: Workload, changes: dict) -> list[dict]:
    """Returns the frames of a run: a request every `gap` steps, the second with `n` completions."""
    config = replace(args.engine_config, run_ahead=False, **changes)
    camera = Camera(Cost("a step", 1.0, 0.0, 0.0, 0.0), config, workload)
    camera.frames = []
    times = [number * args.gap for number, _ in enumerate(workload.prompts)]
    for number, seq in enumerate(camera.arrivals(workload, times)):
        seq.forks = [seq.fork(index=index) for index in range(1, args.n) if number == 1]
    return [*camera.frames, frame_of(camera.engine, Batch())]


@command
def main(argv: list[str]) -> None:
    parser = Parser(__doc__, workload="film")
    # without the last four: two need real tokens, one holds a function, one has a single variant
    parser.add_argument("comparison", choices=[*COMPARISONS][:-4])
    parser.add_argument("--gap", type=float, default=2, help="steps between two requests")
    parser.add_argument("--n", type=int, default=2, help="completions of the second request")
    parser.add_argument("-o", "--output", type=new_file, default="film.html")
    args = parser.parse(argv, device="cpu", **OPTIONS)
    if args.engine_config.speculation != "none" or args.json:
        parser.error("a film has no tokens to guess, and no results for --json")
    film = vars(parser.draw(args)) | {"title": args.comparison, "variants": {}}
    for name, changes in COMPARISONS[args.comparison].items():
        frames = record(args, parser.draw(args), changes)
        film["variants"][name] = OPTIONS | args.given | changes | {"frames": frames}
    doc = json.dumps(film, default=lambda seq: f"{seq.request_id}.{seq.index}")
    args.output.write_text(Path(__file__).with_suffix(".html").read_text().replace("THE_FILM", doc))


if __name__ == "__main__":
    main()
