"""Throughput of nanoengine, and of other engines on the same prompts.

    python bench.py                                     # the bundled model
    python bench.py --config qwen3-0.6b --num-seqs 16   # a real shape, random weights
    python bench.py --engine nanoengine,hf --repeat 3   # A B A B A B, medians and their ratio
    python bench.py --limit --json result.json          # how far from the matrix products alone

The default workload is nano-vllm's: 256 prompts of 100 to 1024 random tokens, 100 to 1024 new ones
for each, EOS ignored, temperature 0.6. What is timed is one call, from token ids to finished
outputs, with their text where the model has a tokenizer; loading and a warm-up come before it.
"""

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from nanoengine import LLM, SamplingParams
from nanoengine.loader import find_model, load_config, load_tokenizer
from nanoengine.model_runner import choose_dtype

HERE = Path(__file__).resolve().parent
MIB = 2**20
Figures = dict[str, float]
SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")
NANOENGINE_OPTIONS = ("load_format", "dtype", *SIZES, "scheduling", "enable_prefix_caching")
VLLM_OPTIONS = ("load_format", *SIZES[:4], "enable_prefix_caching")
ROWS = {  # figure: label, digits behind the point
    "output_tokens_per_second": ("output tokens/s", 1),
    "prefill_tokens_per_second": ("prefill tokens/s", 1),
    "decode_tokens_per_second": ("decode tokens/s", 1),
    "seconds": ("seconds", 2),
    "num_steps": ("steps", 0),
    "mean_batch": ("mean batch", 1),
    "num_preemptions": ("preemptions", 0),
    "prefix_cache_hits": ("prefix hits, tokens", 0),
    "prefix_cache_queries": ("prefix queries, tokens", 0),
    "host_ms_per_step": ("host work per step, ms", 3),
    "decode_batch": ("mean decode batch", 1),
    "decode_step_ms": ("mean decode step, ms", 3),
    "linear_ms": ("its matrix products alone, ms", 3),
    "decode_step_over_linear": ("decode step / matrix products", 2),
    "weights_mib": ("weights, MiB", 1),
    "kv_pool_mib": ("KV pool, MiB", 1),
    "peak_memory_mib": ("peak memory, MiB", 1),
    "peak_memory_since_start_mib": ("peak memory since the start, MiB", 1),
    "peak_memory_less_imports_mib": ("the same, less the imports, MiB", 1),
}


@dataclass
class Workload:
    """Prompts as token ids, how many tokens to generate for each, and at what temperature."""

    prompts: list[list[int]]
    lengths: list[int]
    temperature: float

    def check(self, generated: list[int]) -> None:
        """Stops the benchmark where an engine has generated fewer tokens than asked for."""
        if generated != self.lengths:
            raise SystemExit(f"{sum(generated)} of {sum(self.lengths)} tokens were generated: do "
                             f"prompts and outputs fit the model and --max-model-len?")


def draw_workload(args: argparse.Namespace, vocab_size: int) -> tuple[Workload, Workload]:
    """nano-vllm's prompts and lengths, drawn in its order, and a warm-up that shares no prefix."""
    randint = random.Random(args.seed).randint
    prompts = [[randint(0, 10000) % vocab_size
                for _ in range(randint(args.min_input, args.max_input))]
               for _ in range(args.num_seqs)]
    lengths = [randint(args.min_output, args.max_output) for _ in range(args.num_seqs)]
    first_ids = {prompt[0] for prompt in prompts}
    unused = next((token_id for token_id in range(vocab_size) if token_id not in first_ids), 0)
    warm_up = Workload([[unused, *range(7)], [unused, *range(1, 8)]], [4, 4], args.temperature)
    return Workload(prompts, lengths, args.temperature), warm_up


# ------------------------------------------------------------------------------- the engines


def run_nanoengine(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    with LLM(args.folder, **given(args, NANOENGINE_OPTIONS)) as llm:
        generate(llm, SamplingParams, warm_up)
        before = llm.metrics()
        seconds = generate(llm, SamplingParams, workload, use_tqdm=sys.stderr.isatty())
        figures = figures_between(before, llm.metrics())
        assert llm.runner is not None
        model = llm.runner.model
        figures["weights_mib"] = sum(parameter.nbytes for parameter in model.parameters()) / MIB
        figures["kv_pool_mib"] = sum(cache.nbytes for cache in llm.runner.caches) / MIB
        if args.limit and "decode_batch" in figures:
            figures["linear_ms"] = 1000 * time_linears(model, round(figures["decode_batch"]))
            figures["decode_step_over_linear"] = figures["decode_step_ms"] / figures["linear_ms"]
    return {"seconds": seconds, **figures}


def run_vllm(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(str(args.folder), dtype=dtype_name(args), **given(args, VLLM_OPTIONS),
                   skip_tokenizer_init=load_tokenizer(args.folder) is None)
    generate(llm, vllm.SamplingParams, warm_up)
    return {"seconds": generate(llm, vllm.SamplingParams, workload)}


def generate(llm: Any, params: Callable, workload: Workload, use_tqdm: bool = False) -> float:
    """Seconds of one call of an engine with vLLM's interface."""
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    sampling = [params(temperature=workload.temperature, ignore_eos=True, max_tokens=length)
                for length in workload.lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - started
    workload.check([len(output.outputs[0].token_ids) for output in outputs])
    return seconds


def run_hf(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    """Hugging Face `generate` over static batches."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto_model, dtype = transformers.AutoModelForCausalLM, choose_dtype(args.dtype)
    if args.load_format == "dummy":
        model = auto_model.from_config(load_config(args.folder), dtype=dtype).eval()
    else:
        model = auto_model.from_pretrained(args.folder, dtype=dtype)
    tokenizer = load_tokenizer(args.folder)
    torch.manual_seed(args.seed)
    generate_hf(model, tokenizer, warm_up, batch_size=2)
    return {"seconds": generate_hf(model, tokenizer, workload, args.hf_batch or args.num_seqs)}


def generate_hf(model: Any, tokenizer: Any, workload: Workload, batch_size: int) -> float:
    """Seconds of all batches, padded on the left; each goes on until its longest output is done."""
    generated: list[int] = []
    started = time.perf_counter()
    for start in range(0, len(workload.prompts), batch_size):
        prompts = workload.prompts[start:start + batch_size]
        lengths = workload.lengths[start:start + batch_size]
        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        # Set on the model: in one that is passed, None would be filled from the model's, EOS too.
        model.generation_config = transformers.GenerationConfig(
            max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0, top_k=0, top_p=1.0,
            do_sample=workload.temperature > 0, temperature=workload.temperature or 1.0)
        rows = model.generate(input_ids, attention_mask=mask)[:, width:].tolist()
        outputs = [row[:length] for row, length in zip(rows, lengths)]
        if tokenizer is not None:
            tokenizer.batch_decode(outputs)
        generated += map(len, outputs)
    seconds = time.perf_counter() - started
    workload.check(generated)
    return seconds


ENGINES = {"nanoengine": run_nanoengine, "hf": run_hf, "vllm": run_vllm}


# ------------------------------------------------------------------------------- the figures


def figures_between(before: dict[str, Any], after: dict[str, Any]) -> Figures:
    """What two calls of `LLM.metrics()` say of the time between them."""
    spent = {name: after[name] - before[name] for name in before}
    figures = {name: spent[name] for name in ROWS if name in spent}
    figures["mean_batch"] = spent["batched_sequences"] / spent["num_steps"]
    figures["host_ms_per_step"] = 1000 * spent["host_seconds"] / spent["num_steps"]
    for phase in ("prefill", "decode"):
        if spent[f"{phase}_steps"]:
            rate = spent[f"{phase}_tokens"] / spent[f"{phase}_seconds"]
            figures[f"{phase}_tokens_per_second"] = rate
    if spent["decode_steps"]:
        figures["decode_batch"] = spent["decode_tokens"] / spent["decode_steps"]
        figures["decode_step_ms"] = 1000 * spent["decode_seconds"] / spent["decode_steps"]
    return figures


@torch.inference_mode()
def time_linears(model: nn.Module, batch_size: int, repeats: int = 15) -> float:
    """Seconds of a decode step's matrix products and nothing else; the median of several."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(batch_size, linear.in_features).to(linear.weight) for linear in linears]
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for linear, x in zip(linears, inputs):
            F.linear(x, linear.weight, linear.bias)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first is a warm-up


def reset_peak_memory() -> bool:
    """Makes Linux forget this process's peak so far; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory(was_reset: bool, after_imports: int) -> Figures:
    """The peak since the reset, or since the start where there was none; and less `after_imports`,
    the bytes that were resident before any engine was made."""
    if was_reset:
        status = Path("/proc/self/status").read_text()
        name, peak = "peak_memory_mib", 1024 * int(status.split("VmHWM:")[1].split()[0])
    else:
        import resource  # not on Windows
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        name = "peak_memory_since_start_mib"
    return {name: peak / MIB, "peak_memory_less_imports_mib": (peak - after_imports) / MIB}


def measure(engine: str, args: argparse.Namespace, workload: Workload, warm_up: Workload,
            after_imports: int) -> Figures:
    """One run of one engine, from loading to freeing."""
    gc.collect()  # what the engine before has left
    was_reset = reset_peak_memory()
    figures = ENGINES[engine](args, workload, warm_up)
    figures["output_tokens_per_second"] = sum(workload.lengths) / figures["seconds"]
    if engine != "vllm":  # it works in processes of its own
        figures |= peak_memory(was_reset, after_imports)
    return figures


# ------------------------------------------------------------------------------- the command


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def dtype_name(args: argparse.Namespace) -> str:
    return str(choose_dtype(args.dtype)).removeprefix("torch.")


def describe(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """What is run, with what and on what: enough to run it again."""
    versions = {"nanoengine": "not installed, from its sources"}
    for package in ("torch", "transformers", "nanoengine", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": shlex.join(sys.argv), "date": datetime.now(timezone.utc).isoformat(),
        "versions": versions, "threads": torch.get_num_threads(),
        "load_average": psutil.getloadavg(), "model": str(args.folder), "dtype": dtype_name(args),
        "num_seqs": len(workload.prompts), "prompt_tokens": sum(map(len, workload.prompts)),
        "output_tokens": sum(workload.lengths), "temperature": workload.temperature}


def table(summary: dict[str, Figures], ratios: Figures) -> str:
    """One line for each figure, one column for each engine."""
    lines = [f"{'':34}" + "".join(f"{engine:>14}" for engine in summary)]
    for name, (label, digits) in ROWS.items():
        cells = [f"{figures[name]:,.{digits}f}" if name in figures else "-"
                 for figures in summary.values()]
        if set(cells) != {"-"}:
            lines.append(f"{label:34}" + "".join(f"{cell:>14}" for cell in cells))
    lines += [f"output tokens/s, {pair}: {ratio:.2f}" for pair, ratio in ratios.items()]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default=HERE / "models/tiny-qwen3",
                        help="a folder, or a Hugging Face id")
    source.add_argument("--config", choices=[path.name for path in (HERE / "configs").iterdir()],
                        help="configs/NAME with random weights")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "dummy"))
    parser.add_argument("--engine", default="nanoengine", metavar="NAMES",
                        help="nanoengine, hf, vllm, or several: nanoengine,hf")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each engine, in turn")
    for name, default in (("num-seqs", 256), ("min-input", 100), ("max-input", 1024),
                          ("min-output", 100), ("max-output", 1024), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--temperature", type=float, default=0.6, help="default: 0.6")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--scheduling", help="see nanoengine/config.py")
    parser.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_const",
                        const=False)
    parser.add_argument("--hf-batch", type=int, help="prompts in a static batch; default: all")
    parser.add_argument("--limit", action="store_true",
                        help="also time the matrix products of a decode step alone")
    parser.add_argument("--json", metavar="FILE", help="- is stdout; the table is on stderr then")
    args = parser.parse_args()
    args.engines = args.engine.split(",")
    if not set(args.engines) <= ENGINES.keys() or len(set(args.engines)) < len(args.engines):
        parser.error(f"--engine {args.engine}: different ones of {', '.join(ENGINES)}")
    if "vllm" in args.engines and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm: vLLM is not installed here (pip install vllm)")
    for kind in ("input", "output"):
        if not 1 <= getattr(args, f"min_{kind}") <= getattr(args, f"max_{kind}"):
            parser.error(f"--min-{kind} must be from 1 to --max-{kind}")
    if args.config:
        args.model, args.load_format = HERE / "configs" / args.config, "dummy"
    args.folder = find_model(args.model)
    return args


def main() -> None:
    after_imports = psutil.Process().memory_info().rss
    args = parse_arguments()
    workload, warm_up = draw_workload(args, load_config(args.folder).vocab_size)
    about = describe(args, workload)
    report = sys.stderr if args.json == "-" else sys.stdout
    print("{num_seqs} prompts of {prompt_tokens:,} tokens, {output_tokens:,} to generate\n{model}, "
          "{dtype}, {threads} threads, load average {load_average[0]:.1f}".format(**about),
          file=report, flush=True)

    runs: dict[str, list[Figures]] = {engine: [] for engine in args.engines}
    for number in range(args.repeat):
        for engine in args.engines:
            figures = measure(engine, args, workload, warm_up, after_imports)
            runs[engine].append(figures)
            if args.repeat * len(args.engines) > 1:
                rate = figures["output_tokens_per_second"]
                print(f"run {number + 1}, {engine}: {rate:,.1f} output tokens/s",
                      file=report, flush=True)

    summary = {engine: {name: statistics.median(run[name] for run in found) for name in found[0]}
               for engine, found in runs.items()}
    first, *rates = (figures["output_tokens_per_second"] for figures in summary.values())
    ratios = {f"{args.engines[0]} / {engine}": first / rate
              for engine, rate in zip(args.engines[1:], rates)}
    print(table(summary, ratios), file=report)
    if args.json:
        results = {**about, "medians": summary, "ratios": ratios, "runs": runs}
        text = json.dumps(results, indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
