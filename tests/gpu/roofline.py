"""Where a decode step of 256 sequences of Qwen3-0.6B spends its time: each part alone.

Every line: what, milliseconds (median, CUDA events around a graph's replays), GB/s or TFLOP/s.
REHEARSAL=1: small sizes on a CPU.
"""

import os
import statistics
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from nanoengine import SamplingParams, sampler
from nanoengine.kernels import PLAIN, kernels
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Draws

DRY = bool(os.environ.get("REHEARSAL"))
DEVICE = "cpu" if DRY else "cuda"
LAYERS, ROWS, CONTEXT, VOCABULARY = (2, 8, 300, 2048) if DRY else (28, 256, 843, 151_936)
torch.manual_seed(0)


@torch.inference_mode()
def milliseconds(function, repeats=15, graph=True):
    """The median time of a call."""
    if DRY:
        began = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - began)
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    call = function
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            function()
        call = captured.replay
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def show(name, ms, num_bytes=0, flops=0):
    rates = [f"{num_bytes / ms / 1e6:8,.0f} GB/s"] if num_bytes else []
    rates += [f"{flops / ms / 1e9:6,.0f} TFLOP/s"] if flops else []
    print(f"{name:46} {ms:9.3f} ms  {' '.join(rates)}", flush=True)
    return ms


def attempt(name, function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return float("nan")


def ceilings():
    size = 2**22 if DRY else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    show("copy of 1 GiB", milliseconds(lambda: target.copy_(source)), 2 * size)
    numbers = torch.ones(size // 4, dtype=torch.float32, device=DEVICE)
    show("sum of 1 GiB", milliseconds(numbers.sum), size)
    side = 256 if DRY else 8192
    left, right = torch.randn(2, side, side, device=DEVICE).bfloat16()
    show("bf16 product, 8192", milliseconds(lambda: left @ right, 5), 0, 2 * side**3)


def products(rows):
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    weights = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes * LAYERS]
    inputs = {shape[1]: torch.randn(rows, shape[1], device=DEVICE).bfloat16() for shape in shapes}
    total = sum(each.nbytes for each in weights)
    ms = milliseconds(lambda: [F.linear(inputs[each.shape[1]], each) for each in weights])
    show(f"products of all layers, {rows} rows", ms, total, 2 * rows * total // 2)
    head = torch.randn(VOCABULARY, 1024, device=DEVICE).bfloat16()
    last = milliseconds(lambda: F.linear(inputs[1024], head))
    show(f"lm_head, {rows} rows", last, head.nbytes + 2 * rows * VOCABULARY)
    return ms + last


def attention(kind):
    """One layer's attention, over four caches in turn, so that L2 does not help; times LAYERS."""
    blocks = -(-CONTEXT // 256)
    shape = 2, 1 + ROWS * blocks, 256, 8, 128
    caches = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
              for _ in range(2 if DRY else 4)]
    query = torch.randn(ROWS, 16, 128, device=DEVICE).bfloat16()
    lengths = torch.full((ROWS,), CONTEXT, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(ROWS * blocks, device=DEVICE).int() + 1
    table = F.pad(order.view(ROWS, blocks), (0, 16 - blocks)).contiguous()
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE)
    step = SimpleNamespace(query_starts=starts, lengths=lengths, block_tables=table,
                           longest_query=1, longest_keys=4096, num_decodes=ROWS)
    if kind == "flash-attn":
        from nanoengine.attention import flash_attention as attend
    else:
        from nanoengine_extras.gpu import paged_attention as attend
    if DRY:
        return None
    ms = milliseconds(lambda: [attend(query, cache, None, step) for cache in caches]) / len(caches)
    num_bytes = ROWS * CONTEXT * 2 * 8 * 128 * 2
    show(f"attention of all layers, {kind}", ms * LAYERS, num_bytes * LAYERS)
    return ms * LAYERS


def sampling():
    logits = (torch.randn(ROWS, VOCABULARY, device=DEVICE) * 3).bfloat16()
    last_sampled = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    for name, options in {"greedy": dict(temperature=0.0), "plain": {}, "top_p 0.95": dict(
            top_p=0.95), "top_k 20, top_p 0.95": dict(top_k=20, top_p=0.95)}.items():
        params = SamplingParams(**dict(temperature=0.6) | options)
        seqs = [Sequence("0", [1], 1, 9, params, seed=n) for n in range(ROWS)]
        draws = torch.tensor([(p.temperature, p.min_p, p.top_k, p.top_p, seq.uniform(1))
                              for seq in seqs for p in [seq.params]], dtype=torch.float64)
        of_rows = Draws(*draws.T.contiguous().to(DEVICE))

        def run(library):
            return sampler.sample(logits, of_rows, seqs, last_sampled, {}, library)  # noqa: B023

        same = int((run(kernels(DEVICE)) == run(PLAIN)).sum())
        show(f"sampling of {ROWS} rows, {name}",
             milliseconds(lambda: run(kernels(DEVICE)), graph=False))  # noqa: B023
        show(f"   without kernels; {same} of {ROWS} tokens are the same",
             milliseconds(lambda: run(PLAIN), graph=False))  # noqa: B023
    usual = sampler.MATRIX_SIZE[DEVICE]
    for exponent in (23, 24, 25):
        sampler.MATRIX_SIZE[DEVICE] = 2**exponent
        show(f"   the last with matrices of 2**{exponent} logits",
             milliseconds(lambda: run(kernels(DEVICE)), graph=False))
    sampler.MATRIX_SIZE[DEVICE] = usual

    @torch.compile
    def of_nano_vllm(logits, temperatures):
        logits = logits.float().div_(temperatures.unsqueeze(dim=1))
        probs = torch.softmax(logits, dim=-1)
        return probs.div_(torch.empty_like(probs).exponential_(1).clamp_min_(1e-10)).argmax(dim=-1)
    temperatures = torch.full((ROWS,), 0.6, device=DEVICE)
    show("nano-vllm's sampler, compiled",
         milliseconds(lambda: of_nano_vllm(logits, temperatures), graph=False))


def main():
    if not DRY:
        print(torch.cuda.get_device_name(), torch.__version__)
    attempt("ceilings", ceilings)
    for rows in (ROWS, 1):
        attempt("products", products, rows)
    for kind in ("flash-attn", "triton"):
        attempt(kind, attention, kind)
    attempt("sampling", sampling)
    num_bytes = LAYERS * ROWS * CONTEXT * 4096
    print(f"== limit of a step: {num_bytes / 1e9:.1f} GB of K and V, 1.2 GB of weights")


if __name__ == "__main__":
    main()
