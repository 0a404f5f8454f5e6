"""Simulates a comparison: the real engine over a runner that computes nothing.

    python -m nanoengine_extras.tools.lab.simulate memory --workload decode-heavy --n-k 4
    python -m nanoengine_extras.tools.lab.simulate memory --rate 6 --num-seqs 2000

A step only advances a clock: by a constant, plus a time for each token and for each byte of K and V
that is read. The constants are those of Llama-3-8B on an A100.
"""

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.observers import Features
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched
from nanoengine_extras.running.metrics import Metrics, RequestMetrics, StepRecord, metrics_of
from .compare import Options, compare, comparison_parser, run_until
from .figures import Figures, figures_of, report
from .options import Workload, command


@dataclass
class Cost:
    """The cost of a step, and the memory for K and V: by default for Llama-3-8B on an A100-80GB.

    Its weights of 16.1 GB (bf16) are read at 85 % of 2.04 TB/s; a token takes 16 GFLOP at 65 % of
    312 TFLOP/s; PCIe moves 25 GB/s; K and V get 90 % of the memory, less the weights and 2 GB. The
    times are added up, although a GPU does some of this at once, so they are a little too long.
    """

    name: str = "Llama-3-8B in bf16 on an A100-80GB"
    step_seconds: float = 16.1e9 / (0.85 * 2.04e12)
    token_seconds: float = 16.1e9 / (0.65 * 312e12)
    read_byte_seconds: float = 1 / (0.85 * 2.04e12)  # of K and V
    swapped_byte_seconds: float = 1 / 25e9
    kv_bytes: int = 2**17  # of a token
    num_slots: int = int((0.9 * 80e9 - 16.1e9 - 2e9) / 2**17)  # tokens that fit


class SimulatedRunner:
    """Replaces a ModelRunner: `launch` only advances a clock, and every token is 1.

    engine: the engine that runs on it. workload: the requests that `run` will queue.
    """

    is_invariant = True

    def __init__(self, cost: Cost, config: EngineConfig, workload: Workload) -> None:
        self.cost = cost
        self.now = 0.0
        # any that is asked for
        self.backend = config.attention_backend
        longest = max(map(len, workload.prompts)) + max(workload.max_tokens)
        self.max_model_len = config.max_model_len or longest
        self.block_bytes = cost.kv_bytes * config.block_size
        self.num_kv_blocks = config.num_kv_blocks or cost.num_slots // config.block_size
        num_host_blocks = int(config.swap_space * 2**30 / self.block_bytes)
        self.copier = SimpleNamespace(host_blocks=range(num_host_blocks))
        features = Features(["running.guards"])
        features.update({"Metrics": Metrics(lambda: self.now)})
        self.engine = Engine(config, cast(Any, self), features)

    def launch(self, batch: Batch) -> Launched:
        began = self.now
        num_tokens = sum(batch.num_tokens)
        num_read = sum(batch.starts) + num_tokens
        num_swapped = len(batch.copies.swap_out) + len(batch.copies.swap_in)
        self.now += self.cost.step_seconds + self.cost.token_seconds * num_tokens
        self.now += self.cost.read_byte_seconds * self.cost.kv_bytes * num_read
        self.now += self.cost.swapped_byte_seconds * self.block_bytes * num_swapped
        metrics = metrics_of(self.engine)
        if metrics.counters["num_steps"] % 16 == 1 and not self.engine.config.trace:
            metrics.trace.append(StepRecord(
                batch, began, began, self.now, self.now, metrics=metrics.gauges()))
        return Launched(batch, torch.ones(len(batch.sampled), dtype=torch.int32), self.now)

    def run(self, workload: Workload, times: list[float]) -> list[Sequence]:
        """Queues each request at its time, and runs until all have ended. Returns the requests.

        Raises ValueError for one that could never run.
        """
        seqs = []
        lengths = {str(number): length for number, length in enumerate(workload.lengths)}
        for number, (prompt, due) in enumerate(zip(workload.prompts, times)):
            run_until(self.engine, lengths, due)
            self.now = max(self.now, due)
            longest = len(prompt) + workload.max_tokens[number]
            seq = Sequence(str(number), [*prompt], len(prompt), longest)
            seq.kept["metrics"] = RequestMetrics(due)
            self.engine.features["Guards"].enter([seq], None)
            self.engine.add(seq)
            seqs.append(seq)
        run_until(self.engine, lengths)
        return seqs


def simulate(args: Any, workload: Workload, changes: Options) -> tuple[Engine, Figures]:
    """Runs a variant once. --rate requests arrive each second (Poisson), or all at once."""
    started = time.perf_counter()
    runner = SimulatedRunner(Cost(), replace(args.engine_config, **changes), workload)
    engine = runner.engine
    gap = 1 / args.rate if args.rate else 0.0
    times = np.random.default_rng(abs(engine.config.seed)).exponential(gap, len(workload.prompts))
    seqs = runner.run(workload, times.cumsum().tolist())
    metrics = [replace(seq.kept["metrics"],
                       num_decoded_tokens=seq.num_tokens - seq.num_prompt_tokens - 1)
               for seq in seqs]
    figures = figures_of(engine, runner.now, metrics)
    figures["real_us_per_step"] = 1e6 * (time.perf_counter() - started) / figures["num_steps"]
    return engine, figures


@command
def main(argv: list[str]) -> None:
    parser = comparison_parser(__doc__, workload="uniform", repeat=1)
    parser.add_argument("--rate", type=float, help="requests a second; default: all at once")
    args = parser.parse(argv, device="cpu", block_size=16, max_num_batched_tokens=16384)
    if args.comparison in ("sampling", "speculation") or args.engine_config.speculation != "none":
        parser.error("a simulation has no tokens to sample or to guess")
    workload = parser.draw(args)
    # without a picture, a sample of the steps is enough
    args.engine_config = replace(args.engine_config, run_ahead=False, trace=bool(args.timeline))
    print(f"simulated: {Cost()}", workload, sep="\n", flush=True)
    runs = compare(args, lambda changes: simulate(args, workload, changes))
    report(args, runs, workload=str(workload), cost=vars(Cost()))


if __name__ == "__main__":
    main()
