"""Which kernels a decode step launches, for how long, and how long the GPU has nothing to do.

    python3 tests/gpu/kernels_of_steps.py [--num-seqs 256] [--steps 20] [--most 30]

Random weights of Qwen3-0.6B's shape; plain sampling, then with top_k and top_p, then a sequence
alone. REHEARSAL=1: a tiny model on a CPU, where only the host's time is shown.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from nanoengine import LLM, SamplingParams

DRY = bool(os.environ.get("REHEARSAL"))
ROOT = Path(__file__).resolve().parents[2]
PLAIN = dict(temperature=0.6)
TRUNCATED = dict(temperature=0.6, top_k=20, top_p=0.95)
# kernels and copies of a step of plain draws with flash-attn, whose decodes copy their result once
# more: 10 in a layer; 8 with few sequences, whose keys are split and joined; before, 11
PREDICTED = {256: "300", 1: "245 (330 without few_rows.py)"}


def decode(llm: LLM, num_seqs: int, length: int, num_steps: int, **params: float) -> None:
    """Prints where the time of some decode steps goes, after all prompts were computed."""
    prompts = [{"prompt_token_ids": [(31 * number + 7 * place) % 300 for place in range(length)]}
               for number in range(num_seqs)]
    requests = llm.add(prompts, SamplingParams(
        max_tokens=3 * num_steps + 40, ignore_eos=True, seed=1, **params))
    while not all(request.output().outputs[0].token_ids for request in requests):
        llm.step()
    for _ in range(5):
        llm.step()
    # without the profiler, which has a cost of its own
    began, busy = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        llm.step()
    milliseconds = (time.perf_counter() - began) / num_steps * 1000
    of_host = (time.thread_time() - busy) / num_steps * 1000
    print(f"\n{num_seqs} sequences of {length} tokens, {params}: {milliseconds:.3f} ms a step, "
          f"the host's thread is busy for {of_host:.3f} ms, also while it waits for the GPU")
    if not DRY:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(num_steps):
                llm.step()
            torch.cuda.synchronize()
        show(found, num_steps, PREDICTED.get(num_seqs, "nothing"))
    llm.abort(requests)


def show(found: profile, num_steps: int, predicted: str) -> None:
    """Prints the kernels, and the gaps between them. predicted: the number of kernels"""
    spans = sorted((event.time_range.start, event.time_range.end, event.name)
                   for event in found.events() if event.device_type == DeviceType.CUDA)
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    end, idle, gaps = spans[0][0], 0.0, []
    for start, stop, name in spans:
        total[name] += stop - start
        count[name] += 1
        if start > end:
            idle += start - end
            gaps.append((start - end, name))
        end = max(end, stop)
    window = end - spans[0][0]
    print(f"  {len(spans) / num_steps:.0f} kernels and copies a step; for plain draws, predicted "
          f"{predicted}")
    print(f"  the GPU: {window / num_steps:.0f} µs a step, of which it has nothing to do for "
          f"{idle / num_steps:.0f} µs, in gaps above 10 µs: "
          f"{sum(gap for gap, _ in gaps if gap > 10) / num_steps:.0f} µs")
    for name, spent in sorted(total.items(), key=lambda item: -item[1])[:MOST]:
        print(f"  {spent / num_steps:8.1f} µs  {count[name] / num_steps:6.1f} x  {name[:110]}")
    print("  the largest gaps: " + "; ".join(
        f"{gap:.0f} µs before {name[:40]}" for gap, name in sorted(gaps)[-8:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-seqs", type=int, default=4 if DRY else 256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--most", type=int, default=30)
    args = parser.parse_args()
    MOST = args.most
    sys.stdout.reconfigure(line_buffering=True)
    model = ROOT / ("models/tiny-qwen3" if DRY else "models/qwen3-0.6b")
    with LLM(model, max_model_len=300 if DRY else 4096, skip_tokenizer_init=True,
             load_format="auto" if DRY else "dummy") as llm:
        length = 40 if DRY else 800
        decode(llm, args.num_seqs, length, args.steps, **PLAIN)
        decode(llm, args.num_seqs, length, args.steps, **TRUNCATED)
        decode(llm, 1, length, args.steps, **PLAIN)
        print(f"== {llm.metrics()['attention_backend']}")
