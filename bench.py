"""Throughput of nanoengine, and of other engines on the same prompts.

    python bench.py                                     # nano-vllm's workload, the bundled model
    python bench.py --config qwen3-0.6b --workload cpu-mixed    # a real shape, random weights
    python bench.py --engine nanoengine,hf --repeat 3   # A B A B A B, medians and their ratio
    python bench.py --engine nanoengine,vllm --python vllm=/other/venv/bin/python
    python bench.py --prompts prompts.txt --json result.json

The default workload is nano-vllm's: 256 prompts of 100 to 1024 random tokens, 100 to 1024 new ones
for each, EOS ignored, temperature 0.6. It times one call, from token ids to finished outputs, with
their text if the model has a tokenizer; loading and a warm-up come before.

The limit is the time of the same steps if weights, K and V were read once at the bandwidth of a
copy, or the products were computed at the rate of a large one, whichever takes longer; both rates
are measured. For an engine in another environment, --python gives the command that starts this
script there: `--python "vllm=env NAME=VALUE … python"` also sets variables.

Policies, simulations and pictures are in nanoengine_extras/tools/lab/.
"""

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from nanoengine_extras.tools.lab.figures import Figures, Runs, figures_of, report, medians_of
from nanoengine_extras.tools.lab.limits import matrix_rate, seconds_of, step_limit
from nanoengine_extras.tools.lab.options import Parser, Workload, command, new_engine
from nanoengine import LLM, SamplingParams
from nanoengine.loader import load_config, load_tokenizer
from nanoengine.model_runner import choose_dtype

MIB = 2**20
VLLM_OPTIONS = ("load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                "block_size", "enable_prefix_caching")


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Returns the bytes a second that a copy reads and writes."""
    size = 2**30 if device == "cuda" else 2**27
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    return 2 * size / seconds_of(lambda: target.copy_(source))


def run_nanoengine(args: Namespace, workload: Workload, warm_up: Workload) -> Figures:
    with LLM(**vars(args.engine_config)) as llm:
        generate(llm, SamplingParams, warm_up)
        # forgets what was cached and counted
        new_engine(llm)
        seconds, outputs = generate(llm, SamplingParams, workload, use_tqdm=sys.stderr.isatty())
        figures = figures_of(llm.engine, seconds, [output.metrics for output in outputs])
        bandwidth = copy_bandwidth(llm.config.device)
        runner = llm.engine.runner
        if hasattr(llm.model_config, "hidden_size"):  # it is not a model of transformers
            limit = sum(step_limit(llm, record.batch, bandwidth) for record in llm.trace)
            figures["limit_percent"] = 100 * limit / seconds
            weights = [*runner.model.parameters(), *runner.model.buffers()]
            figures["weights_mib"] = sum(each.nbytes for each in weights) / MIB
        figures["kv_pool_mib"] = runner.blocks.nbytes / MIB
    return figures


def run_vllm(args: Namespace, workload: Workload, warm_up: Workload) -> Figures:
    """vLLM with its defaults: compiled, with prefix caching. On a CPU with 4 GiB for K and V."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    vllm = importlib.import_module("vllm")
    longest = max(len(ids) + most for ids, most in zip(workload.prompts, workload.max_tokens))
    options = {"max_model_len": max(2048, longest), "enable_prefix_caching": True}
    options |= {name: value for name, value in args.given.items() if name in VLLM_OPTIONS}
    # Otherwise its workers would import this script, and vLLM 0.32 can't start with our numba.
    vars(sys.modules["__main__"]).pop("__file__", None)
    llm = vllm.LLM(args.engine_config.model, dtype=dtype_of(args), **options,
                   skip_tokenizer_init=load_tokenizer(Path(args.engine_config.model)) is None)
    generate(llm, vllm.SamplingParams, warm_up)
    seconds, _ = generate(llm, vllm.SamplingParams, workload)
    workers = [process.pid for process in psutil.Process().children(recursive=True)]
    peak = sum(map(peak_bytes, [os.getpid(), *workers]))
    return {"seconds": seconds, "peak_memory_mib": peak / MIB}


def generate(llm: Any, params: Callable, workload: Workload,
             use_tqdm: bool = False) -> tuple[float, list[Any]]:
    """Returns seconds and outputs of one call of an engine with vLLM's interface."""
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    sampling = [params(temperature=workload.temperature, ignore_eos=True, max_tokens=length)
                for length in workload.lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - started
    workload.check([len(output.outputs[0].token_ids) for output in outputs])
    return seconds, outputs


def run_hf(args: Namespace, workload: Workload, warm_up: Workload) -> Figures:
    """Hugging Face `generate` over static batches."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = Path(args.engine_config.model)
    make = transformers.AutoModelForCausalLM
    if args.engine_config.load_format == "dummy":
        model = make.from_config(load_config(folder), dtype=dtype_of(args)).eval()
    else:
        model = make.from_pretrained(folder, dtype=dtype_of(args))
    model.to(args.engine_config.device)
    torch.manual_seed(args.engine_config.seed)
    tokenizer = load_tokenizer(folder)
    generate_hf(model, tokenizer, warm_up, batch_size=2)
    batch_size = args.hf_batch or len(workload.prompts)
    print(f"Hugging Face generates in batches of {batch_size} …", file=sys.stderr)
    return {"seconds": generate_hf(model, tokenizer, workload, batch_size)}


def generate_hf(model: Any, tokenizer: Any, workload: Workload, batch_size: int) -> float:
    """Returns the seconds of all batches, padded on the left, each up to its longest output."""
    generated: list[int] = []
    started = time.perf_counter()
    for start in range(0, len(workload.prompts), batch_size):
        prompts = workload.prompts[start:start + batch_size]
        lengths = workload.lengths[start:start + batch_size]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # Set on the model: in a passed config, None would become the model's value, even for EOS.
        model.generation_config = transformers.GenerationConfig(
            max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0, top_k=0, top_p=1.0,
            do_sample=workload.temperature > 0, temperature=workload.temperature or 1.0)
        rows = model.generate(ids.to(model.device), attention_mask=mask.to(model.device))
        outputs = [row[width:][:length] for row, length in zip(rows.tolist(), lengths)]
        if tokenizer is not None:
            tokenizer.batch_decode(outputs)
        generated += map(len, outputs)
    seconds = time.perf_counter() - started
    workload.check(generated)
    return seconds


ENGINES = {"nanoengine": run_nanoengine, "hf": run_hf, "vllm": run_vllm}


def measure(engine: str, args: Namespace, workload: Workload, after_imports: int) -> Figures:
    """One run of one engine, from loading to freeing."""
    gc.collect()  # left over from the engine before
    with suppress(OSError):  # resets the peak that Linux recorded for the previous engine
        Path("/proc/self/clear_refs").write_text("5")
    figures: Figures = {"output_tokens_per_second": 0.0}  # the first line of the table
    figures |= ENGINES[engine](args, workload, warm_up_for(workload))
    figures["output_tokens_per_second"] = sum(workload.lengths) / figures["seconds"]
    if engine != "vllm" and sys.platform == "linux":  # vLLM works in processes of its own
        peak = peak_bytes(os.getpid())
        figures["peak_memory_mib"] = peak / MIB
        figures["peak_memory_less_imports_mib"] = (peak - after_imports) / MIB
    return figures


def warm_up_for(workload: Workload) -> Workload:
    """Returns two small requests that share no prefix with a workload."""
    unused = min({*range(len(workload.prompts) + 1)} - {prompt[0] for prompt in workload.prompts})
    prompts = [[unused, *range(7)], [unused, *range(1, 8)]]
    return Workload(prompts, [4, 5], [4, 5], workload.temperature)


def peak_bytes(pid: int) -> int:
    """Returns the peak memory of a process, on Linux."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


def measure_elsewhere(engine: str, command: str, argv: list[str]) -> dict[str, Any]:
    """Returns the results of this script in another process, with a few more flags."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        full = [*shlex.split(command), __file__, *argv, "--engine", engine, "--repeat", "1",
                "--json", str(file), "--python"]
        done = subprocess.run(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{shlex.join(full)} failed")
        return json.loads(file.read_text())


def dtype_of(args: Namespace) -> torch.dtype:
    return choose_dtype(args.engine_config.dtype, args.engine_config.device)


def about(args: Namespace, workload: Workload) -> dict[str, Any]:
    """Returns workload, options, versions and machine: enough to repeat the run."""
    versions = {"nanoengine": "not installed, from its sources"}
    for package in ("torch", "transformers", "nanoengine", "vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = args.engine_config.device
    return {
        "command": shlex.join(sys.argv),
        "workload": str(workload),
        "model": args.engine_config.model,
        "dtype": str(dtype_of(args)).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "load_average": psutil.getloadavg()[0],
        "copy_gb_per_second": copy_bandwidth(device) / 1e9,
        "matrix_tflop_per_second": matrix_rate(device, dtype_of(args)) / 1e12,
        "versions": versions,
        "elsewhere": {},  # results of engines in other processes
    }


def parse(argv: list[str]) -> tuple[Namespace, Workload]:
    parser = Parser(__doc__, workload="uniform")
    parser.add_argument("--engine", default="nanoengine", metavar="NAMES",
                        help=f"of {', '.join(ENGINES)}; or several: nanoengine,hf")
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=COMMAND",
                        help="measure an engine in a process started by this command")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each engine, in turn")
    parser.add_argument("--hf-batch", type=int, help="prompts in a static batch; default: all")
    args = parser.parse(argv, trace=True)
    args.engines = args.engine.split(",")
    args.python = dict(item.partition("=")[::2] for item in args.python)
    if not {*args.engines, *args.python} <= ENGINES.keys() or not all(args.python.values()):
        parser.error(f"--engine {args.engine}, --python ENGINE=COMMAND: of {', '.join(ENGINES)}")
    here = {*args.engines} - {*args.python}
    if "vllm" in here and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm: it is not installed here, see --python")
    return args, parser.draw(args)


@command
def main(argv: list[str]) -> None:
    after_imports = psutil.Process().memory_info().rss
    args, workload = parse(argv)
    results = about(args, workload)
    print("{workload}\n{model}, {dtype} on {device}, {threads} threads, load average "
          "{load_average:.1f}\ncopy bandwidth {copy_gb_per_second:,.0f} GB/s, matrix products "
          "{matrix_tflop_per_second:,.2f} TFLOP/s".format(**results), flush=True)
    runs: Runs = {engine: [] for engine in args.engines}
    for _ in range(args.repeat):
        for engine in args.engines:
            if engine in args.python:
                found = measure_elsewhere(engine, args.python[engine], argv)
                results["elsewhere"][engine] = found
                figures = found["runs"][engine][0]
            else:
                figures = measure(engine, args, workload, after_imports)
            runs[engine].append(figures)
            print(f"{engine}: {figures['output_tokens_per_second']:,.1f} tokens/s", flush=True)
    report(args, runs, **results)
    rates = [found["output_tokens_per_second"] for found in medians_of(runs).values()]
    for name, rate in zip(args.engines[1:], rates[1:]):
        print(f"output tokens/s, {args.engines[0]} / {name}: {rates[0] / rate:.2f}")


if __name__ == "__main__":
    main()
