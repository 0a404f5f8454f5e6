"""How long kernels take that have not been timed yet, each beside what was predicted.

    python3 tests/gpu/figures.py [truncate] [draw] [products] [sizes] [attention]

The shape is Qwen3-0.6B's. Each figure is the best of a few replays of a CUDA graph, over so much
memory that no cache holds it. REHEARSAL=1: small shapes in Triton's interpreter.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DRY = bool(os.environ.get("REHEARSAL"))
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoengine.attention import BACKENDS, has_flash_attn  # noqa: E402
from nanoengine.sampling_params import SamplingParams  # noqa: E402
from nanoengine.sequence import Sequence  # noqa: E402
from nanoengine.step_inputs import Draws  # noqa: E402
from nanoengine_extras.gpu import (  # noqa: E402
    draw, few_rows, few_rows_linear, paged_attention, rms_norm, swiglu, truncate)
from nanoengine_extras.sampling.fast_sampling import sample  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
ROWS, VOCABULARY, LAYERS = (3, 500, 1) if DRY else (256, 151_936, 28)
# columns and numbers of a row of each product
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = (
    (64, 4, 2, 16, 96) if DRY else (1024, 16, 8, 128, 3072))
BLOCK_SIZE = 256


def microseconds(function: Callable[[], Any], replays: int = 5) -> float:
    """The time of one call, without the time that Python takes."""
    if DRY:
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e6
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return min(times)


def show(what: str, found: float, predicted: str, more: str = "") -> None:
    print(f"== {what}: {found:,.0f} µs, predicted {predicted}{more}", flush=True)


# -------------------------------------------------------------------------------- sampling


def draws_of(**params: float) -> Draws:
    columns = {"temperature": 0.6, "min_p": 0.0, "top_k": 0.0, "top_p": 1.0} | params
    numbers = [torch.full((ROWS,), value, dtype=torch.float64) for value in columns.values()]
    return Draws(*numbers, torch.rand(ROWS, dtype=torch.float64))


def time_truncate() -> None:
    """It reads the scores in three rounds for top-k, three for top-p, and once more at the end."""
    scores = torch.randn(ROWS, VOCABULARY) * 3
    scores -= scores.amax(dim=1, keepdim=True)
    kept = scores.clone()
    for params, predicted in [
            (dict(top_k=20, top_p=0.95), "1,000 (the kernel before it: 4,300)"),
            (dict(top_k=20), "500"), (dict(top_p=0.95), "600"), (dict(min_p=0.05), "120")]:
        given = draws_of(**params), {*params}, [int(params.get("top_k", 0))] * ROWS
        copy = microseconds(lambda: scores.copy_(kept))
        found = microseconds(lambda: truncate(scores.copy_(kept), *given))  # noqa: B023
        show(f"truncate, {params}", found - copy, predicted)


def time_draw() -> None:
    """It reads the logits twice: the largest one, and the sums."""
    logits = (torch.randn(ROWS, VOCABULARY) * 3).bfloat16()
    draws = draws_of()
    seqs = [Sequence(str(row), [1], 1, 9, SamplingParams(temperature=0.6)) for row in range(ROWS)]
    found = microseconds(lambda: draw(logits, draws.uniform, draws.temperature))
    show("draw", found, "60 (of which the largest logit: 20)")
    show("  the largest logit", microseconds(lambda: logits.amax(dim=1)), "20")
    last = torch.zeros(ROWS, dtype=torch.int32)
    found = microseconds(lambda: sample(logits, draws, seqs, last, {}))
    show("sample, plain draws", found, "75 in a graph (190 with Python)")


# -------------------------------------------------------------------------------- products


class Layer:
    """The weights of a layer, and its products with the norms and SwiGLU around them."""

    def __init__(self) -> None:
        def weight(columns: int, size: int) -> torch.Tensor:
            return torch.randn(columns, size).mul_(size**-0.5).bfloat16()

        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.o = weight(HIDDEN, HEADS * HEAD_DIM)
        self.gate_up = weight(2 * INNER, HIDDEN)
        self.down = weight(HIDDEN, INNER)

    def with_few_rows(self, x: torch.Tensor, delta: torch.Tensor) -> tuple:
        norm = self.norm, 1e-6
        x, qkv = few_rows_linear(x, self.qkv, None, *norm, delta)
        _, delta = few_rows_linear(qkv[:, :HEADS * HEAD_DIM], self.o)
        x, activated = few_rows_linear(x, self.gate_up, None, *norm, delta, is_gated=True)
        return x, few_rows_linear(activated, self.down)[1]

    def with_cublas(self, x: torch.Tensor, delta: torch.Tensor) -> tuple:
        x, normed = rms_norm(x, self.norm, 1e-6, delta)
        delta = F.linear(F.linear(normed, self.qkv)[:, :HEADS * HEAD_DIM], self.o)
        x, normed = rms_norm(x, self.norm, 1e-6, delta)
        return x, F.linear(swiglu(F.linear(normed, self.gate_up)), self.down)


def time_products() -> None:
    """All layers, since a cache could hold one."""
    layers = [Layer() for _ in range(LAYERS)]
    size = sum(weight.nbytes for layer in layers for weight in vars(layer).values())

    def run(name: str, rows: int) -> tuple:
        x = delta = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
        for layer in layers:
            x, delta = getattr(layer, name)(x, delta)
        return x, delta

    for rows, predicted in (1, 435), (2, 450), (4, 500), (8, 700), (16, 0):
        of_cublas = microseconds(lambda: run("with_cublas", rows))  # noqa: B023
        show(f"cuBLAS, norms and SwiGLU, {rows} rows", of_cublas, "980",
             f"; {size / of_cublas / 1e6:.2f} TB/s")
        if rows > few_rows.MOST_ROWS:
            continue
        found = microseconds(lambda: run("with_few_rows", rows))  # noqa: B023
        winner = "few_rows" if found < of_cublas else "cuBLAS"
        show(f"few_rows, {rows} rows", found, str(predicted),
             f"; {size / found / 1e6:.2f} TB/s; {winner} wins")
    for rows in (64, 256):
        for library in ("cublas",) if DRY else ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            found = microseconds(lambda: run("with_cublas", rows))  # noqa: B023
            show(f"{library}, norms and SwiGLU, {rows} rows", found,
                 "824 for the products of 256 rows alone; 600 are wanted")
    torch.backends.cuda.preferred_blas_library("default")


def time_sizes() -> None:
    """Single products of all sizes: what `MOST_BYTES` of few_rows.py has to be."""
    size = 64 if DRY else 4096
    for megabytes in (1,) if DRY else (8, 32, 64, 128, 256, 512):
        columns = megabytes * 2**20 // (2 * size) if not DRY else 100
        # more than the cache of the GPU holds
        weights = [torch.randn(columns, size, dtype=torch.bfloat16)
                   for _ in range(max(1, 256 // megabytes if not DRY else 1))]
        for rows in (1, 8):
            x = torch.ones(rows, size, dtype=torch.bfloat16)
            found = [microseconds(lambda: [product(x, each) for each in weights])  # noqa: B023
                     / len(weights) for product in (few_rows_linear, F.linear)]
            rates = [weights[0].nbytes / each / 1e6 for each in found]
            predicted = 1.5 + weights[0].nbytes / 3.3e6
            show(f"few_rows, {rows} rows, {megabytes} MiB", found[0], f"{predicted:,.0f}",
                 f"; {rates[0]:.2f} TB/s; cuBLAS {found[1]:,.0f} µs, {rates[1]:.2f} TB/s")


# -------------------------------------------------------------------------------- attention


def decode_of(lengths: list[int]) -> SimpleNamespace:
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = iter(torch.randperm(sum(widths)).tolist())
    tables = torch.zeros(len(lengths), 16, dtype=torch.int32, device="cpu")
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor(
            [next(blocks) for _ in range(width)], device="cpu")
    return SimpleNamespace(
        query_starts=torch.arange(len(lengths) + 1, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32), block_tables=tables.to(DEVICE),
        num_decodes=len(lengths), longest_query=1, longest_keys=16 * BLOCK_SIZE)


def time_attention() -> None:
    """Sequences of other lengths, in any order and longest first. The prediction is that of a model
    of thread blocks that share the memory: for flash-attn, in % of the time in any order."""
    backends = {"Triton": paged_attention}
    if has_flash_attn("cuda", torch.bfloat16) and not DRY:
        backends["flash-attn"] = BACKENDS["flash-attn"].attend
    for rows, predicted in PREDICTED_ORDERS.items():
        rng = random.Random(rows)
        lengths = [rng.randint(100, 100 if DRY else 2000) for _ in range(rows)]
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        query = torch.randn(rows, HEADS, HEAD_DIM).bfloat16()
        cache = torch.zeros(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        for name, attend in backends.items():
            steps = [decode_of(order) for order in (lengths, sorted(lengths, reverse=True))]
            in_any, ordered = (
                microseconds(lambda: attend(query, cache, None, step))  # noqa: B023
                for step in steps)
            size = cache[0, 0, 0].nbytes * 2 * sum(lengths)
            show(f"attention of {rows} rows, {name}, longest first", ordered,
                 f"{predicted} % of any order",
                 f"; any order {in_any:,.0f} µs: {100 * ordered / in_any:.0f} %; "
                 f"{size / ordered / 1e6:.2f} TB/s")


PREDICTED_ORDERS = {2: 100} if DRY else {256: 95, 128: 96, 64: 99, 16: 100}
FIGURES = {"truncate": time_truncate, "draw": time_draw, "products": time_products,
           "sizes": time_sizes, "attention": time_attention}

if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.device(DEVICE), torch.inference_mode():
        for figure in sys.argv[1:] or FIGURES:
            FIGURES[figure]()
