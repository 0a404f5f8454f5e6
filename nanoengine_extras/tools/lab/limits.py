"""The limit of a device for a step: the time to read weights, K and V once, or to compute all
products at the rate of a large one, whichever is longer. `bench.py` compares its runs with it."""

import functools
import time
from collections.abc import Callable

import torch

from nanoengine import LLM
from nanoengine.sequence import Batch


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
