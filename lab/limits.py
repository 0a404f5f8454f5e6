"""What the device could do at best, and what a decode step takes beside that.

    python -m lab.limits --config qwen3-0.6b --batches 1 32 --contexts 256

limit: reading weights, K and V once at the bandwidth of a sum, which only reads, or computing at
the rate of a large matrix product, whichever takes longer. products: the matrix products of the
step alone. Steps whose K and V do not fit the cache are left out; --num-kv-blocks makes it larger.
"""

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

from lab.drawing import draw_grid
from lab.figures import write_json
from lab.options import Parser, picture
from nanoengine import LLM, SamplingParams
from nanoengine.batch import Batch
from nanoengine.sequence import Sequence


def seconds_of(function: Callable[[], object], repeats: int = 9) -> float:
    """The median time of several calls behind a warm-up."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else int
    times = []
    for _ in range(repeats + 1):
        finish()
        started = time.perf_counter()
        function()
        finish()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def read_bandwidth(device: str) -> float:
    """Bytes a second that a sum over 1 GiB reads, with all threads."""
    numbers = torch.ones(2**27, dtype=torch.int64, device=device)
    return numbers.nbytes / seconds_of(numbers.sum)


@functools.cache
@torch.inference_mode()
def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product."""
    side = 8192 if device == "cuda" else 2048
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_of(lambda: left @ right)


def linears_of(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def step_limit(llm: LLM, batch: Batch, bandwidth: float) -> float:
    """Seconds of a step that wastes nothing: it reads weights, K and V once, or it computes,
    whichever takes longer."""
    runner = llm.engine.runner
    config = llm.model_config
    dtype = runner.caches.dtype
    num_weights = sum(each.in_features * each.out_features for each in linears_of(runner.model))
    in_head = config.vocab_size * config.hidden_size
    num_tokens = sum(batch.num_tokens)
    num_scores = sum(count * start + count * (count + 1) // 2
                     for start, count in zip(batch.starts, batch.num_tokens))
    queries = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    products = (num_weights - in_head) * num_tokens + in_head * len(batch.sampled)
    products += 2 * queries * num_scores
    num_blocks = (sum(batch.starts) + num_tokens) / llm.config.block_size
    num_bytes = num_weights * dtype.itemsize + num_blocks * runner.block_bytes
    return max(num_bytes / bandwidth, 2 * products / matrix_rate(llm.config.device, dtype))


@torch.inference_mode()
def time_products(model: torch.nn.Module, batch_size: int) -> float:
    """Seconds of a decode step's matrix products and nothing else."""
    linears = linears_of(model)
    like = next(model.parameters())
    inputs = [torch.randn(batch_size, each.in_features).to(like) for each in linears]
    return seconds_of(lambda: [linear(rows) for linear, rows in zip(linears, inputs)], 15)


def decode_batch(batch_size: int, context: int, block_size: int) -> Batch:
    """A decode step of sequences of `context` tokens, in blocks of their own.

    The content of the blocks makes no difference to the time.
    """
    greedy = SamplingParams(temperature=0)
    seqs = [Sequence(str(number), [0] * context, context, context + 1, greedy)
            for number in range(batch_size)]
    width = -(-context // block_size)
    for number, seq in enumerate(seqs):
        seq.num_computed_tokens = context - 1
        seq.block_table.extend(range(1 + number * width, 1 + (number + 1) * width))
    return Batch(0, sequences=seqs, starts=[context - 1] * batch_size,
                 num_tokens=[1] * batch_size, sampled=list(enumerate(seqs)))


def time_steps(llm: LLM, batches: list[int], contexts: list[int]) -> list[dict[str, float]]:
    """The times of the decode steps that fit the cache, of their products, and their limits."""
    runner = llm.engine.runner
    runner.caches.zero_()  # makes all of it real memory
    bandwidth = read_bandwidth(llm.config.device)
    steps = []
    for context, size in itertools.product(contexts, batches):
        batch = decode_batch(size, context, llm.config.block_size)
        num_blocks = sum(len(seq.block_table) for seq in batch.sequences)
        if num_blocks <= runner.num_kv_blocks and context <= runner.max_model_len:
            seconds = seconds_of(lambda: runner.launch(batch).wait(), 5)  # noqa: B023
            step = {"context": context, "batch": size, "ms": 1000 * seconds}
            step["products_ms"] = 1000 * time_products(runner.model, size)
            step["limit_ms"] = 1000 * step_limit(llm, batch, bandwidth)
            steps.append(step)
            print(", ".join(f"{name} {value:,.5g}" for name, value in step.items()), flush=True)
    return steps


def main(argv: list[str], batches: tuple = (32,), contexts: tuple = (256,)) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    parser.add_argument("--plot", type=picture, help="a picture: a line for each context")
    args = parser.parse(argv)
    with LLM(**vars(args.engine_config) | {"max_num_seqs": max(args.batches)}) as llm:
        steps = time_steps(llm, args.batches, args.contexts)
    if args.plot:
        draw_grid(steps, args.plot)
    write_json(args, decode_steps=steps)


if __name__ == "__main__":
    main(sys.argv[1:])
