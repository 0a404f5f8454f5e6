"""The times of decode steps and prompts, compared with the limit of the device.

    python -m nanoengine_extras.tools.lab.limits --config qwen3-0.6b
    python -m nanoengine_extras.tools.lab.limits --batches 1 32 --contexts 256

limit: reading weights, K and V once at the bandwidth of a sum, which only reads, or computing at
    the rate of a large matrix product, whichever takes longer. The times and limits of the
    several steps of a long prompt are added up. Cases that do not fit the KV cache are left out;
    --num-kv-blocks makes it larger.
"""

import functools
import time
from collections.abc import Callable

import torch

from nanoengine import LLM, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.sequence import Batch, Row, Sequence
from .figures import in_short, write_json
from .options import Parser, command


def seconds_of(function: Callable[[], object], repeats: int = 9) -> float:
    """Returns the median time of several calls after a warm-up."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else int
    times = []
    for _ in range(repeats + 1):
        finish()
        started = time.perf_counter()
        function()
        finish()
        times.append(time.perf_counter() - started)
    return float(torch.tensor(times[1:], dtype=torch.float64).median())


def read_bandwidth(device: str) -> float:
    """Returns the bytes a second that a sum over 1 GiB reads, with all threads."""
    numbers = torch.ones(2**27, dtype=torch.int64, device=device)
    return numbers.nbytes / seconds_of(numbers.sum)


@functools.cache
@torch.inference_mode()
def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Returns the operations a second of a large matrix product."""
    side = 8192 if device == "cuda" else 2048
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_of(lambda: left @ right)


def step_limit(llm: LLM, batch: Batch, bandwidth: float) -> float:
    """Returns the seconds of an ideal step: it reads weights, K and V once, or it computes,
    whichever takes longer."""
    runner = llm.engine.runner
    config = llm.model_config
    linears = [each for each in runner.model.modules() if isinstance(each, torch.nn.Linear)]
    num_weights = sum(each.in_features * each.out_features for each in linears)
    in_head = config.vocab_size * config.hidden_size
    num_tokens = sum(batch.num_tokens)
    num_scores = sum(count * start + count * (count + 1) // 2
                     for start, count in zip(batch.starts, batch.num_tokens))
    queries = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    products = (num_weights - in_head) * num_tokens + in_head * len(batch.sampled)
    products += 2 * queries * num_scores
    num_bytes = (sum(batch.starts) + num_tokens) / llm.config.block_size * runner.block_bytes
    # quantized weights are buffers
    num_bytes += sum(each.nbytes for linear in linears
                     for each in [*linear.parameters(), *linear.buffers()])
    return max(num_bytes / bandwidth, 2 * products / matrix_rate(llm.config.device, runner.dtype))


def steps_between(num_seqs: int, computed: int, length: int, config: EngineConfig) -> list[Batch]:
    """Returns the steps that take sequences from `computed` to `length` tokens, in separate blocks.

    The content of the blocks does not affect the time.
    """
    greedy = SamplingParams(temperature=0)
    seqs = [Sequence(str(number), [0] * length, length, length + 1, greedy)
            for number in range(num_seqs)]
    width = -(-length // config.block_size)
    for number, seq in enumerate(seqs):
        seq.block_table.extend(range(1 + number * width, 1 + (number + 1) * width))
    steps = []
    for start in range(computed, length, config.max_num_batched_tokens):
        end = min(start + config.max_num_batched_tokens, length)
        rows = [Row(index, seq, length) for index, seq in enumerate(seqs) if end == length]
        steps.append(Batch(sequences=seqs, starts=[start] * num_seqs,
                           num_tokens=[end - start] * num_seqs, sampled=rows))
    return steps


def time_steps(llm: LLM, kinds: list[tuple[int, int, int]]) -> list[dict[str, float]]:
    """Returns times and limits of the steps that fit the cache.

    kinds: (number of sequences, tokens before, tokens after)
    """
    runner = llm.engine.runner
    runner.blocks.zero_()  # makes the system provide all of its memory
    bandwidth = read_bandwidth(llm.config.device)
    found = []
    for num_seqs, computed, length in kinds:
        num_blocks = num_seqs * -(-length // llm.config.block_size)
        if num_blocks <= runner.num_kv_blocks and length <= runner.max_model_len:
            row = {"batch": num_seqs, "context": length, "ms": 0.0, "limit_ms": 0.0}
            for batch in steps_between(num_seqs, computed, length, llm.config):
                row["ms"] += 1000 * seconds_of(lambda: runner.launch(batch).wait(), 5)  # noqa: B023
                row["limit_ms"] += 1000 * step_limit(llm, batch, bandwidth)
            found.append(row)
            print(", ".join(f"{k} {in_short([v])}" for k, v in row.items()), flush=True)
    return found


@command
def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[2**n for n in range(9)])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2**n for n in range(7, 14)])
    args = parser.parse(argv)
    if min(*args.batches, *args.contexts, *args.prompts) < 1:
        raise ValueError("--batches, --contexts and --prompts must be at least 1")
    decodes = [(size, length - 1, length) for length in args.contexts for size in args.batches]
    with LLM(**vars(args.engine_config) | {"max_num_seqs": max(args.batches)}) as llm:
        steps = time_steps(llm, decodes)
        whole = time_steps(llm, [(1, 0, length) for length in args.prompts])
    write_json(args, decode_steps=steps, prompts=whole)


if __name__ == "__main__":
    main()
