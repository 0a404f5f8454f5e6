"""Compares the variants of a policy on one workload, in turn, with the model loaded once.

    python -m nanoengine_extras.tools.lab.compare batching
    python -m nanoengine_extras.tools.lab.compare memory --true-lengths 0.5 --timeline steps.png
    # no comparison: the engine as its options say
    python -m nanoengine_extras.tools.lab.compare --timeline steps.png

Comparisons: batching, memory, preemption, victims, prefix, sampling, overtaking, speculation. By
default, 64 prompts of 16 to 256 tokens generate 16 to 256 each, with blocks for a third of them. A
single run misleads: the table has the medians of three runs, and the lowest and highest.

In the table, "idle" is the time between steps, when the device waits for Python; "kv used" is the
share of blocks that sequences hold, and "kv waste" the share of their slots that is empty. A
prefill step computes a prompt or a part of one, a decode step none.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanoengine import LLM, SamplingParams
from nanoengine.engine import Engine
from nanoengine.policies import VICTIMS
from nanoengine_extras.running.metrics import metrics_of
from nanoengine_extras.running.policies import MORE_VICTIMS, overtaking
from .drawing import draw_timeline
from .figures import Figures, Runs, figures_of, report
from .options import Parser, Workload, command, new_engine, picture

Options = dict[str, Any]  # options of the engine, or of the sampling
COMPARISONS: dict[str, dict[str, Options]] = {  # the variants of each, by name
    "batching": {name: {"scheduling": name} for name in ("static", "prefill-first", "mixed")},
    "memory": {name: {"kv_allocation": name} for name in ("max-length", "reserve", "on-demand")},
    "preemption": {"recompute": {}, "swap": {"preemption_mode": "swap"},
                   "reserve": {"kv_allocation": "reserve"}},
    "victims": {name: {"preemption_victim": name} for name in (*VICTIMS, *MORE_VICTIMS)},
    "prefix": {"no cache": {"enable_prefix_caching": False}, "prefix cache": {}},
    "sampling": {"greedy": {"temperature": 0.0}, "temperature": {"temperature": 0.8},
                 "top-k 20": {"top_k": 20}, "top-p 0.9": {"top_p": 0.9},
                 "penalties": {"repetition_penalty": 1.1}, "n = 4": {"n": 4, "temperature": 0.8}},
    "overtaking": {"never": {}, "more than 8 wait": {"scheduling": overtaking(max_waiting=8)}},
    "speculation": {name: {"speculation": name} for name in ("none", "prompt-lookup")},
    "none": {"nanoengine": {}},
}


def comparison_parser(description: str | None, workload: str, repeat: int) -> Parser:
    """Returns a parser with the flags that real and simulated comparisons share."""
    parser = Parser(description, workload)
    parser.add_argument("comparison", nargs="?", choices=COMPARISONS, default="none")
    parser.add_argument("--repeat", type=int, default=repeat, help="runs of each variant")
    parser.add_argument("--timeline", type=picture, help="the steps of each: NAME-swap.png")
    return parser


def compare(args: Any, run: Callable[[Options], tuple[Engine, Figures]]) -> Runs:
    """Runs each variant --repeat times, in turn; draws the first run of each."""
    variants = COMPARISONS[args.comparison]
    runs: Runs = {name: [] for name in variants}
    for number in range(args.repeat):
        for name, changes in variants.items():
            engine, figures = run(changes)
            runs[name].append(figures)
            if args.timeline and number == 0:
                ending = f"-{name}" if len(variants) > 1 else ""
                path = args.timeline.with_stem(args.timeline.stem + ending)
                draw_timeline(metrics_of(engine).trace, path, engine.config.block_size)
    return runs


def run_until(engine: Engine, lengths: dict[str, int], stop: float = float("inf")) -> None:
    """Runs steps. A request ends at its true length, which the engine cannot foresee."""
    while engine.has_unfinished() and metrics_of(engine).clock() < stop:
        for seq in engine.step():
            num_outputs = seq.num_tokens - seq.num_prompt_tokens
            if num_outputs == lengths[seq.request_id] and not seq.finish_reason:
                engine.finish(seq, "stop")


def run_variant(llm: LLM, workload: Workload, changes: Options) -> tuple[Engine, Figures]:
    """Runs a variant once, on a new engine with an empty cache."""
    sampling = {name: changes[name] for name in changes if hasattr(SamplingParams(), name)}
    options = {name: changes[name] for name in changes.keys() - sampling.keys()}
    params = [SamplingParams(**{"temperature": workload.temperature, "max_tokens": most,
                                "ignore_eos": True, "seed": number, **sampling})
              for number, most in enumerate(workload.max_tokens)]
    requests = llm.inputs.make_requests(workload.prompts, params)
    lengths = {each.request_id: length for each, length in zip(requests, workload.lengths)}
    engine = new_engine(llm, **options)
    started = time.perf_counter()
    for request in requests:
        engine.add(request.seq)
    run_until(engine, lengths)
    seconds = time.perf_counter() - started
    outputs = [request.output() for request in requests]
    workload.check([len(output.outputs[0].token_ids) for output in outputs])
    return engine, figures_of(engine, seconds, [output.metrics for output in outputs])


def scarce_blocks(workload: Workload, config: Any) -> int:
    """Returns a third of the blocks for as many requests as can run at once."""
    totals = map(sum, zip(map(len, workload.prompts), workload.max_tokens))
    needs = sorted(-(-num_tokens // config.block_size) for num_tokens in totals)
    return max(needs[-1], sum(needs[-config.max_num_seqs:]) // 3)


@command
def main(argv: list[str]) -> None:
    parser = comparison_parser(__doc__, workload="small", repeat=3)
    # on a CPU, small requests fill several blocks
    args = parser.parse(argv, trace=True, block_size=None if torch.cuda.is_available() else 16)
    workload = parser.draw(args)
    num_blocks = args.num_kv_blocks or scarce_blocks(workload, args.engine_config)
    config = replace(args.engine_config, num_kv_blocks=num_blocks)
    print(f"{workload}; {num_blocks} blocks of {config.block_size} tokens", flush=True)
    with LLM(**vars(config) | {"preemption_mode": "swap"}) as llm:  # so there is a host pool
        llm.config = config
        run_variant(llm, workload, {})  # a warm-up
        runs = compare(args, lambda changes: run_variant(llm, workload, changes))
    report(args, runs, workload=str(workload), num_kv_blocks=num_blocks)


if __name__ == "__main__":
    main()
