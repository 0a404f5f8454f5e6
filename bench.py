"""Throughput of nanoengine, of other engines on the same prompts, and of its policies side by side.

    python bench.py                                     # the bundled model
    python bench.py --config qwen3-0.6b --num-seqs 16   # a real shape, random weights
    python bench.py --engine nanoengine,hf --repeat 3   # A B A B A B, medians and their ratio
    python bench.py --limit --json result.json          # also the matrix products alone
    python bench.py --engine nanoengine,vllm --python vllm=/other/venv/bin/python
    python bench.py --config qwen3-0.6b --decode-grid --plot out.png    # steps by batch, context

    python bench.py --compare batching --plot out.png   # variants of a policy on one workload
    python bench.py --compare memory --true-lengths 0.5 --timeline out.png --trace out.json
    python bench.py --simulate --compare memory --workload prefill-heavy --n-k 4    # on an A100
    python bench.py --simulate --rate 12 --reject       # arrivals, and what is turned away

The default workload is nano-vllm's: 256 prompts of 100 to 1024 random tokens, 100 to 1024 new ones
for each, EOS ignored, temperature 0.6; with --compare, --timeline or --trace 64 prompts of 16 to
256, and blocks for a third of them. What is timed is one call, from token ids to finished outputs,
with their text where the model has a tokenizer; loading and a warm-up come before it. The limit is
what the same steps would take if weights and keys were read once at the bandwidth of a copy, or the
products were computed at the rate of a large one, whichever takes longer; both are measured first.
--decode-grid times single steps; its limits are at the bandwidth of a sum, which only reads.

An engine that wants an environment of its own is measured by this script in a process that --python
says how to start, each run in a new one; `--python "vllm=env NAME=VALUE … python"` sets variables.

--simulate runs the same scheduler, but a step only costs time on a clock: a constant, and so much
for each token and each byte of K and V that is read.
"""

import argparse
import dataclasses
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
import transformers
from torch import nn
from tqdm import tqdm

from nanoengine import LLM, SamplingParams
from nanoengine.attention import BACKENDS
from nanoengine.block_manager import BlockManager, num_held_tokens
from nanoengine.config import EngineConfig
from nanoengine.loader import find_model, load_config, load_tokenizer
from nanoengine.model_runner import choose_device, choose_dtype
from nanoengine.scheduler import BATCHING, VICTIMS, Batch, Scheduler
from nanoengine.sequence import RequestMetrics, Sequence

HERE = Path(__file__).resolve().parent
MIB = 2**20
Figures = dict[str, float]
SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")
POLICIES = {
    "scheduling": str, "scheduling_policy": str, "kv_allocation": str, "preemption_mode": str,
    "preemption_victim": str, "max_waiting": int, "swap_space": float}
NANOENGINE_OPTIONS = ("load_format", "dtype", "device", "attention_backend", "run_ahead",
                      "enforce_eager", "gpu_memory_utilization", *SIZES, *POLICIES,
                      "enable_prefix_caching")
VLLM_OPTIONS = ("load_format", *SIZES[:4], "enable_prefix_caching")
COMPARISONS: dict[str, dict[str, dict[str, Any]]] = {  # the options or sampling of each variant
    "batching": {name: {"scheduling": name} for name in ("static", *list(BATCHING)[:2])},
    "memory": {name: {"kv_allocation": name} for name in ("max-length", "reserve", "on-demand")},
    "preemption": {"recompute": {}, "swap": {"preemption_mode": "swap"},
                   "reserve": {"kv_allocation": "reserve"}},
    "victims": {name: {"preemption_victim": name} for name in VICTIMS},
    "prefix": {"no cache": {"enable_prefix_caching": False}, "prefix cache": {}},
    "sampling": {"greedy": {"temperature": 0.0}, "temperature": {"temperature": 0.8},
                 "top-k 20": {"top_k": 20}, "top-p 0.9": {"top_p": 0.9},
                 "penalties": {"repetition_penalty": 1.1}, "n = 4": {"n": 4, "temperature": 0.8}},
}
ROWS = {  # figure: label, digits behind the point
    "output_tokens_per_second": ("output tokens/s", 1),
    "prefill_tokens_per_second": ("prefill tokens/s", 1),
    "decode_tokens_per_second": ("decode tokens/s", 1),
    "seconds": ("seconds", 2),
    "limit_percent": ("of the limit of this device, %", 1),
    "idle_percent": ("device idle, %", 1),
    "num_steps": ("steps", 0),
    "mean_batch": ("mean batch", 1),
    "first_token_ms": ("time to first token, median, ms", 1),
    "first_token_ms_p99": ("  99th percentile, ms", 1),
    "per_token_ms": ("time per output token, median, ms", 2),
    "per_token_ms_p99": ("  99th percentile, ms", 2),
    "num_preemptions": ("preemptions", 0),
    "recomputed_tokens": ("recomputed tokens", 0),
    "swapped_mib": ("swapped, MiB", 1),
    "kv_used_percent": ("KV blocks in use, %", 1),
    "kv_waste_percent": ("of the slots in them wasted, %", 1),
    "rejected_percent": ("turned away, %", 1),
    "prefix_cache_hits": ("prefix hits, tokens", 0),
    "prefix_cache_queries": ("prefix queries, tokens", 0),
    "shared_blocks": ("blocks shared by forks", 0),
    "host_ms_per_step": ("host work per step, ms", 3),
    "scheduler_us_per_step": ("of the scheduler, really, µs a step", 0),
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
    """Prompts as token ids; how many tokens each really generates, and how many it might."""

    prompts: list[list[int]]
    lengths: list[int]
    max_tokens: list[int]
    temperature: float

    def check(self, generated: list[int]) -> None:
        """Stops the benchmark where an engine has generated fewer tokens than asked for."""
        if generated != self.lengths:
            raise SystemExit(f"{sum(generated)} of {sum(self.lengths)} tokens were generated: do "
                             f"prompts and outputs fit the model and --max-model-len?")


def draw_workload(args: argparse.Namespace, vocab_size: int) -> tuple[Workload, Workload]:
    """The prompts and lengths of --workload, and a warm-up that shares no prefix with them.

    "uniform" is nano-vllm's, drawn in its order; all but the "heavy" ones differ from it only
    in numbers and lengths, and in a prefix that comes first.
    """
    rng = random.Random(args.seed)
    n = min(args.num_seqs, 1024) if args.simulate else args.num_seqs  # these repeat them
    means = {"prefill-heavy": (round(args.n_k * args.kilo), args.kilo),
             "decode-heavy": (args.kilo, round(args.n_k * args.kilo))}.get(args.workload)
    if means:
        sizes = [[draw_length(rng, mean, args.lengths) for mean in means] for _ in range(n)]
        prompts = [[rng.randint(0, 10000) % vocab_size for _ in range(size)] for size, _ in sizes]
        max_tokens = [size for _, size in sizes]
    else:
        prefix = [rng.randint(0, 10000) % vocab_size for _ in range(args.prefix_length)]
        prompts = [prefix + [rng.randint(0, 10000) % vocab_size
                             for _ in range(rng.randint(args.min_input, args.max_input))]
                   for _ in range(n)]
        max_tokens = [rng.randint(args.min_output, args.max_output) for _ in range(n)]
    low, high = max(0.0, 2 * args.true_lengths - 1), min(1.0, 2 * args.true_lengths)
    lengths = [max(1, round(most * rng.uniform(low, high))) for most in max_tokens]
    first_ids = {prompt[0] for prompt in prompts}
    unused = next((token_id for token_id in range(vocab_size) if token_id not in first_ids), 0)
    warm_up = Workload([[unused, *range(7)], [unused, *range(1, 8)]], [4, 5], [4, 5],
                       args.temperature)
    return Workload(prompts, lengths, max_tokens, args.temperature), warm_up


def draw_length(rng: random.Random, mean: int, kind: str) -> int:
    """fixed: the mean; uniform: half to one and a half of it; normal: with a tenth of it."""
    if kind == "fixed":
        return mean
    return max(1, round(rng.uniform(0.5, 1.5) * mean if kind == "uniform"
                        else rng.gauss(mean, mean / 10)))


# ------------------------------------------------------------------------------- the engines


def run_nanoengine(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    with LLM(args.folder, **given(args, NANOENGINE_OPTIONS), trace=True) as llm:
        generate(llm, SamplingParams, warm_up)
        run = run_policy(llm, workload, {}, sys.stderr.isatty())
        figures = figures_of(run)
        model = llm.runner.model
        figures["limit_percent"] = 100 * limit_seconds(llm, run.work) / run.seconds
        figures["weights_mib"] = sum(parameter.nbytes for parameter in model.parameters()) / MIB
        figures["kv_pool_mib"] = llm.runner.caches.nbytes / MIB
        if args.limit and "decode_batch" in figures:
            figures["linear_ms"] = 1000 * time_linears(model, round(figures["decode_batch"]))
            figures["decode_step_over_linear"] = figures["decode_step_ms"] / figures["linear_ms"]
    return figures


def run_vllm(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    """vLLM as it comes: compiled, with prefix caching. On a CPU with 4 GiB for K and V."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    vllm = importlib.import_module("vllm")
    longest = max(len(p) + n for p, n in zip(workload.prompts, workload.max_tokens))
    options = {"max_model_len": max(2048, longest), "load_format": "auto",
               "enable_prefix_caching": True} | given(args, VLLM_OPTIONS)
    # Else its workers would import this script, and vLLM 0.32 can't start beside our numba.
    vars(sys.modules["__main__"]).pop("__file__", None)
    llm = vllm.LLM(str(args.folder), dtype=dtype_name(args), **options,
                   skip_tokenizer_init=load_tokenizer(args.folder) is None)
    generate(llm, vllm.SamplingParams, warm_up)
    seconds = generate(llm, vllm.SamplingParams, workload)
    workers = psutil.Process().children(recursive=True)
    peaks = [peak_bytes(process.pid) for process in (psutil.Process(), *workers)]
    return {"seconds": seconds, "peak_memory_mib": sum(peaks) / MIB}


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
    auto_model, dtype = transformers.AutoModelForCausalLM, choose_dtype(args.dtype, args.device)
    if args.load_format == "dummy":
        model = auto_model.from_config(load_config(args.folder), dtype=dtype).eval()
        model.to(args.device)
    else:
        model = auto_model.from_pretrained(args.folder, dtype=dtype).to(args.device)
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
        input_ids, mask = input_ids.to(model.device), mask.to(model.device)
        rows = model.generate(input_ids, attention_mask=mask)[:, width:].tolist()
        outputs = [row[:length] for row, length in zip(rows, lengths)]
        if tokenizer is not None:
            tokenizer.batch_decode(outputs)
        generated += map(len, outputs)
    seconds = time.perf_counter() - started
    workload.check(generated)
    return seconds


class LlamaCpp:
    """llama.cpp through its C interface: greedy, all prompts of a workload at once."""

    def __init__(self, file: Path, workload: Workload, is_float: bool) -> None:
        self.api = api = importlib.import_module("llama_cpp.llama_cpp")
        self.log = api.llama_log_callback(lambda *_: None)  # kept, as C has a pointer to it
        api.llama_log_set(self.log, None)
        self.model = api.llama_model_load_from_file(
            str(file).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        longest = max(len(p) + n for p, n in zip(workload.prompts, workload.lengths))
        params.n_seq_max = max(2, len(workload.prompts))  # the warm-up has two
        params.n_ctx = params.n_seq_max * -(-longest // 256) * 256
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        # One buffer for all is slower, but they can share a prefix there without copying it.
        params.kv_unified = bool(os.path.commonprefix(workload.prompts))
        if is_float:
            params.type_k = params.type_v = api.GGML_TYPE_F32
        self.chunk = params.n_batch
        self.context = api.llama_init_from_model(self.model, params)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(self.chunk, 0, 1)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes rows of (token, position, sequence, is sampled); returns the sampled tokens."""
        sampled: list[int] = []
        batch = self.batch
        for start in range(0, len(rows), self.chunk):
            chunk = rows[start:start + self.chunk]
            batch.n_tokens = len(chunk)
            for i, (token, position, seq, is_sampled) in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_sampled
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            if self.api.llama_decode(self.context, batch):
                raise SystemExit("llama_decode has failed")
            if num_sampled := sum(row[3] for row in chunk):
                logits = np.ctypeslib.as_array(self.api.llama_get_logits(self.context),
                                               (num_sampled, self.vocab_size))
                sampled += logits.argmax(axis=1).tolist()
        return sampled

    def generate(self, workload: Workload) -> float:
        """Seconds. What all prompts begin with is computed once, and given to all sequences.

        The longest outputs come first: llama.cpp reads the weights once for every run of adjacent
        sequences, so that this is the order which it is fastest in.
        """
        started = time.perf_counter()
        order = sorted(zip(workload.lengths, workload.prompts), key=lambda pair: -pair[0])
        prompts, memory = [prompt for _, prompt in order], self.api.llama_get_memory(self.context)
        self.api.llama_memory_clear(memory, False)
        shared = min(len(os.path.commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
        if shared:
            self.step([(token, i, 0, False) for i, token in enumerate(prompts[0][:shared])])
            for seq in range(1, len(prompts)):
                self.api.llama_memory_seq_cp(memory, 0, seq, -1, -1)
        tokens = self.step([(prompt[i], i, seq, i == len(prompt) - 1)
                            for seq, prompt in enumerate(prompts)
                            for i in range(shared, len(prompt))])
        lengths = [*map(len, prompts)]
        for num_outputs in range(1, order[0][0]):
            num_running = sum(length > num_outputs for length, _ in order)
            tokens = self.step([(tokens[seq], lengths[seq] + num_outputs - 1, seq, True)
                                for seq in range(num_running)])
        return time.perf_counter() - started

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def run_llama_cpp(args: argparse.Namespace, workload: Workload, warm_up: Workload) -> Figures:
    """llama.cpp with random weights of the model's shape."""
    if workload.temperature:
        raise SystemExit("--engine llama.cpp is greedy: --temperature 0")
    is_float = choose_dtype(args.dtype, args.device) == torch.float32
    with closing(LlamaCpp(write_gguf(args), workload, is_float)) as engine:
        engine.generate(warm_up)
        return {"seconds": engine.generate(workload)}


def write_gguf(args: argparse.Namespace) -> Path:
    """A file with random weights for llama.cpp, kept in the temporary folder for the next run."""
    gguf = importlib.import_module("gguf")
    config, dtype = load_config(args.folder), choose_dtype(args.dtype, args.device)
    digest = hashlib.sha256((args.folder / "config.json").read_bytes()).hexdigest()[:8]
    file = Path(tempfile.gettempdir(), f"bench-{args.folder.name}-{digest}-{dtype_name(args)}.gguf")
    if file.exists():
        return file
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = (head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = {"token_embd": (config.vocab_size, hidden), "output_norm": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["output"] = config.vocab_size, hidden
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden),
        "attn_v": (keys, hidden), "attn_output": (hidden, queries), "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    if config.model_type == "qwen3":
        layer |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    writer = gguf.GGUFWriter(file.with_suffix(".part"), config.model_type)
    writer.add_tokenizer_model("no_vocab")
    for name, value in (
            ("vocab_size", config.vocab_size), ("context_length", config.max_position_embeddings),
            ("embedding_length", hidden), ("feed_forward_length", inner),
            ("block_count", config.num_hidden_layers), ("head_count", config.num_attention_heads),
            ("head_count_kv", config.num_key_value_heads), ("key_length", head_dim),
            ("value_length", head_dim), ("rope_dimension_count", head_dim),
            ("rope_freq_base", config.rope_parameters["rope_theta"]),
            ("layer_norm_rms_eps", config.rms_norm_eps)):
        getattr(writer, f"add_{name}")(value)
    for name, shape in shapes.items():
        weight = torch.empty(shape).uniform_(-0.03, 0.03)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", (weight + 1).numpy())
        else:
            kind = gguf.GGMLQuantizationType["F32" if dtype == torch.float32 else "BF16"]
            writer.add_tensor(f"{name}.weight", weight.to(dtype).view(torch.uint8).numpy(),
                              raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_suffix(".part").rename(file)


ENGINES = {"nanoengine": run_nanoengine, "hf": run_hf, "vllm": run_vllm,
           "llama.cpp": run_llama_cpp}
MODULES = {"vllm": "vllm", "llama.cpp": "llama_cpp"}  # that an engine needs beside our own


# ------------------------------------------------------------------------------- the figures


@dataclass
class Work:
    """What a step had to do."""

    num_tokens: int
    num_sampled: int
    num_keys: int  # that its sequences read, each once
    num_scores: int  # of a query with a key, in one head of one layer


@dataclass
class Run:
    """One run: its seconds, its steps, and how each request fared."""

    seconds: float
    trace: list[tuple[float, float, Batch, dict[str, Any]]]  # as LLM.trace
    requests: list[RequestMetrics]
    counters: Counter
    output_tokens: int
    num_slots: int  # tokens that the KV pool has room for
    block_size: int
    device_seconds: float | None = None
    idle_share: float | None = None  # of the time, of a GPU
    work: list[Work] = field(default_factory=list)
    host_seconds: float | None = None
    num_rejected: int | None = None
    sampled_usage: list[tuple[float, int, int]] = field(default_factory=list)  # without a trace

    def usage(self) -> list[tuple[float, int, int]]:
        """Seconds, blocks used, wasted tokens: of each step."""
        return self.sampled_usage or [
            (end - start, now["num_blocks_used"], now["reserved_waste"] + now["internal_waste"])
            for start, end, _, now in self.trace]


def figures_of(run: Run) -> Figures:
    spent = run.counters
    figures: Figures = {name: spent[name] for name in ROWS if name in spent}
    figures["seconds"] = run.seconds
    figures["output_tokens_per_second"] = run.output_tokens / run.seconds
    figures["mean_batch"] = spent["batched_sequences"] / spent["num_steps"]
    figures["num_preemptions"] = spent["num_preemptions"]
    figures["swapped_mib"] = spent["swapped_bytes"] / MIB
    for name, times in (("first_token_ms", [m.time_to_first_token for m in run.requests]),
                        ("per_token_ms", [m.time_per_output_token for m in run.requests])):
        figures[name], figures[f"{name}_p99"] = 1000 * np.percentile(times, [50, 99])
    seconds, used, wasted = np.array(run.usage(), float).T
    used_slots = (seconds * used).sum() * run.block_size
    figures["kv_used_percent"] = 100 * used_slots / (seconds.sum() * run.num_slots)
    figures["kv_waste_percent"] = 100 * (seconds * wasted).sum() / max(used_slots, 1e-9)
    for phase in ("prefill", "decode"):
        steps = [(sum(batch.num_tokens), end - start) for start, end, batch, _ in run.trace
                 if (max(batch.num_tokens) == 1) == (phase == "decode")]
        if steps:
            num_tokens, seconds = map(sum, zip(*steps))
            figures[f"{phase}_tokens_per_second"] = num_tokens / seconds
            if phase == "decode":
                figures["decode_batch"] = num_tokens / len(steps)
                figures["decode_step_ms"] = 1000 * seconds / len(steps)
    if run.device_seconds is not None:
        idle = sum(end - start for start, end, *_ in run.trace) - run.device_seconds
        figures["host_ms_per_step"] = 1000 * idle / len(run.trace)
    if run.idle_share is not None:
        figures["idle_percent"] = 100 * run.idle_share
    if run.host_seconds is not None:
        figures["scheduler_us_per_step"] = 1e6 * run.host_seconds / spent["num_steps"]
    if run.num_rejected is not None:
        figures["rejected_percent"] = 100 * run.num_rejected / (
            run.num_rejected + len(run.requests))
    return figures


# ------------------------------------------------------------------------------ the policies


def run_policy(llm: LLM, workload: Workload, sampling: dict[str, Any],
               use_tqdm: bool = False) -> Run:
    """One call of an engine with trace=True. A request stops at its true length, unannounced."""
    params = [SamplingParams(**{"temperature": workload.temperature, "ignore_eos": True,
                                "seed": number, "max_tokens": most, **sampling})
              for number, most in enumerate(workload.max_tokens)]
    requests = llm._make_requests(workload.prompts, params)
    for request, length in zip(requests, workload.lengths):
        for completion in request:
            completion.seq.max_num_tokens = completion.seq.num_prompt_tokens + length
    before, first_step = counts(llm), len(llm.trace)
    with watched(llm) as watch, \
            tqdm(total=sum(workload.lengths), disable=not use_tqdm, unit="tok") as bar:
        started = time.perf_counter()
        for updated in llm._run(requests):
            bar.update(len(updated))
        seconds = time.perf_counter() - started
    generated = [c.seq.num_tokens - c.seq.num_prompt_tokens for r in requests for c in r]
    workload.check(generated[::len(requests[0])])
    after, manager = counts(llm), llm.scheduler.block_manager
    after.subtract(before)
    trace, done = [], 0.0
    for start, end, *rest in llm.trace[first_step:]:  # a step that ran ahead begins when it can
        trace.append((max(start, done), end, *rest))
        done = end
    return Run(seconds, trace, [r[0].seq.metrics for r in requests], after,
               sum(generated), manager.num_blocks * manager.block_size, manager.block_size,
               device_seconds=watch.device_seconds, idle_share=watch.idle_share(), work=watch.work)


def counts(llm: LLM) -> Counter:
    return Counter({name: n for name, n in llm.metrics().items() if not isinstance(n, str)})


@dataclass
class Watch:
    """What a runner did: the work of each step, and when its device was busy with it."""

    work: list[Work] = field(default_factory=list)
    device_seconds: float | None = 0.0  # in the model and the sampler; None on a GPU
    events: list[tuple[Any, Any]] = field(default_factory=list)  # of a GPU: a step begins, and ends

    def idle_share(self) -> float | None:
        """The share of the time from the first step's begin to the last one's end in between two
        steps: after all work of one was done, and before any of the next had come."""
        if not self.events:
            return None
        torch.cuda.synchronize()
        gaps = sum(end.elapsed_time(begin)
                   for (_, end), (begin, _) in zip(self.events, self.events[1:]))
        return gaps / self.events[0][0].elapsed_time(self.events[-1][1])


@contextmanager
def watched(llm: LLM) -> Iterator[Watch]:
    """Watches a runner's steps. On a GPU an event is put behind the inputs' making on the host and
    before their copy, another behind the step's last work."""
    watch, runner = Watch(), llm.runner
    prepare, launch, compute = runner.prepare, runner.launch, runner.compute
    is_gpu, begins = runner.is_gpu, []

    def prepare_watched(batch: Batch) -> Any:
        inputs = prepare(batch)
        if is_gpu:
            begins.append(torch.cuda.current_stream().record_event(
                torch.cuda.Event(enable_timing=True)))
        return inputs

    def launch_watched(batch: Batch) -> Any:
        computed = [seq.num_computed_tokens for seq in batch.sequences]
        watch.work.append(Work(
            sum(batch.num_tokens), len(batch.sampled), sum(computed) + sum(batch.num_tokens),
            sum(n * c + n * (n + 1) // 2 for c, n in zip(computed, batch.num_tokens))))
        launched = launch(batch)
        if is_gpu:
            end = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
            watch.events.append((begins[-1], end))
        return launched

    def compute_watched(*inputs: Any) -> Any:
        started = time.perf_counter()
        outputs = compute(*inputs)
        watch.device_seconds += time.perf_counter() - started
        return outputs

    watch.device_seconds = None if is_gpu else 0.0
    with mock.patch.object(runner, "prepare", prepare_watched), \
            mock.patch.object(runner, "launch", launch_watched), \
            mock.patch.object(runner, "compute", compute if is_gpu else compute_watched):
        yield watch


def reconfigure(llm: LLM, num_kv_blocks: int | None, options: dict[str, Any]) -> None:
    """Other policies, and nothing cached, for an engine whose model stays loaded."""
    llm.config = config = dataclasses.replace(llm.config, **options)
    llm.scheduler = Scheduler(BlockManager(
        num_kv_blocks or llm.runner.num_kv_blocks, config.block_size, config.enable_prefix_caching,
        llm.runner.num_host_blocks * (config.preemption_mode == "swap")), config)


def run_variants(args: argparse.Namespace, workload: Workload,
                 warm_up: Workload) -> dict[str, list[Run]]:
    """Each variant --repeat times, in turn, in one process with the model loaded once."""
    variants = COMPARISONS[args.compare] if args.compare else {"nanoengine": {}}
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    options = given(args, NANOENGINE_OPTIONS) | {"preemption_mode": "swap", "trace": True}
    with LLM(args.folder, **options) as llm:
        plain = dataclasses.replace(llm.config, preemption_mode=args.preemption_mode or "recompute")
        run_policy(llm, warm_up, {})
        for _ in range(args.repeat):
            for name, changes in variants.items():
                sampling = {key: value for key, value in changes.items()
                            if key in SamplingParams.__dataclass_fields__}
                llm.config = plain
                reconfigure(llm, args.num_kv_blocks, {
                    key: value for key, value in changes.items() if key not in sampling})
                runs[name].append(run_policy(llm, workload, sampling))
    return runs


# ---------------------------------------------------------------------------- the simulation


@dataclass
class Cost:
    """What a step takes in place of a model: seconds, and the memory that there is."""

    per_step: float
    per_token: float
    per_kv_byte: float  # of K and V that are read
    per_swapped_byte: float
    kv_bytes: float  # of a token
    num_slots: int  # tokens that the KV pool has room for

    def seconds(self, batch: Batch, block_size: int) -> float:
        read = sum(seq.num_computed_tokens for seq in batch.sequences) + sum(batch.num_tokens)
        num_swapped = len(batch.copies.swap_out) + len(batch.copies.swap_in)
        return (self.per_step + self.per_token * sum(batch.num_tokens)
                + self.per_kv_byte * self.kv_bytes * read
                + self.per_swapped_byte * self.kv_bytes * block_size * num_swapped)


# Llama-3-8B in bf16 on an A100-80GB: weights of 16.1 GB read at 85 % of 2.04 TB/s, 16 GFLOP a token
# at 65 % of 312 TFLOP/s, 128 KiB of K and V a token; 90 % of the memory less weights and 2 GB; PCIe
# at 25 GB/s. Added up, where a GPU partly does them at once: a little too slow.
A100 = Cost(16.1e9 / (0.85 * 2.04e12), 16.1e9 / (0.65 * 312e12), 1 / (0.85 * 2.04e12), 1 / 25e9,
            2**17, int((0.9 * 80e9 - 16.1e9 - 2e9) / 2**17))


def measured_cost(args: argparse.Namespace) -> Cost:
    """Constants of this machine and this model, by least squares over the steps of a short run."""
    drawn, lengths = draw_workload(args, 800)[0].prompts[:64], [10, 20, 30, 40] * 16
    prompts = [prompt[:10 + 3 * number] for number, prompt in enumerate(drawn)]
    workload = Workload(prompts, lengths[:len(drawn)], lengths[:len(drawn)], 0.6)
    options = given(args, ("load_format", "dtype", "device", *SIZES)) | {
        "enable_prefix_caching": False, "run_ahead": False}
    with LLM(args.folder, **options, trace=True) as llm:
        run_policy(llm, workload, {})  # a warm-up
        run = run_policy(llm, workload, {})
        block_size, num_blocks = llm.config.block_size, llm.runner.num_kv_blocks
        kv_bytes = llm.runner.block_bytes / block_size
    computed: Counter[Sequence] = Counter()
    rows, times = [], []
    for start, end, batch, _ in run.trace:
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens):
            computed[seq] += num_tokens
        rows.append([1, sum(batch.num_tokens), sum(computed[seq] for seq in batch.sequences)])
        times.append(end - start)
    fitted = np.linalg.lstsq(np.array(rows, float), np.array(times), rcond=None)[0].clip(0)
    return Cost(fitted[0], fitted[1], fitted[2] / kv_bytes, 1 / 5e9, kv_bytes,
                num_blocks * block_size)


def simulate(args: argparse.Namespace, workload: Workload, cost: Cost, options: dict[str, Any],
             keep_trace: bool) -> Run:
    """The workload, repeated until there are --num-seqs requests, through the real scheduler on a
    clock of its own. Requests arrive at --rate a second (Poisson), or all at once."""
    config = EngineConfig(model="simulated", seed=args.seed, **options)
    manager = BlockManager(
        args.num_kv_blocks or cost.num_slots // config.block_size, config.block_size,
        config.enable_prefix_caching,
        int(config.swap_space * 2**30 / (cost.kv_bytes * config.block_size))
        * (config.preemption_mode == "swap"))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    rng, num_waiting_at_most = random.Random(args.seed), 4 * (config.max_num_seqs or 256)
    run = Run(0.0, [], [], Counter(), 0, manager.num_blocks * manager.block_size,
              manager.block_size, host_seconds=0.0, num_rejected=0 if args.reject else None)

    def arrivals() -> Iterator[Sequence]:
        now, params = 0.0, SamplingParams()
        longest = args.max_model_len or max(
            len(p) + n for p, n in zip(workload.prompts, workload.max_tokens))
        for number in range(args.num_seqs):
            now += rng.expovariate(args.rate) if args.rate else 0.0
            kind = number % len(workload.prompts)
            prompt, most = workload.prompts[kind][:], workload.max_tokens[kind]
            prompt[args.prefix_length] = number
            held = num_held_tokens(config.kv_allocation, len(prompt) + most, longest)
            yield Sequence(
                str(number), prompt, len(prompt), len(prompt) + workload.lengths[kind], params,
                number, num_held_tokens=held,
                metrics=RequestMetrics(arrival_time=now))

    gc.disable()  # nothing here is cyclic
    with closing(SimpleNamespace(close=gc.enable)), mock.patch("nanoengine.scheduler.time", clock):
        scheduler, coming = Scheduler(manager, config), arrivals()
        following = next(coming, None)
        while following or scheduler.has_unfinished():
            if following and not scheduler.has_unfinished():
                clock.now = max(clock.now, following.metrics.arrival_time)
            while (following and following.metrics.arrival_time <= clock.now
                   and (args.rate or len(scheduler.waiting) < num_waiting_at_most)):
                if args.reject and is_full(scheduler, following):
                    run.num_rejected = (run.num_rejected or 0) + 1
                else:
                    scheduler.add(following)
                    run.requests.append(following.metrics)
                    run.output_tokens += following.max_num_tokens - following.num_prompt_tokens
                following = next(coming, None)
            if not scheduler.has_unfinished():
                continue
            began, start = time.perf_counter(), clock.now
            batch = scheduler.schedule()
            scheduled = time.perf_counter()
            clock.now += cost.seconds(batch, config.block_size)
            resumed = time.perf_counter()
            scheduler.postprocess(batch, [1] * len(batch.sampled))
            run.host_seconds += scheduled - began + time.perf_counter() - resumed
            swapped = len(batch.copies.swap_out) + len(batch.copies.swap_in)
            scheduler.counters["swapped_bytes"] += int(
                swapped * config.block_size * cost.kv_bytes)
            if keep_trace:
                run.trace.append((start, clock.now, batch, scheduler.metrics()))
            elif scheduler.counters["num_steps"] % 16 == 1:
                now = scheduler.metrics()
                run.sampled_usage.append((clock.now - start, now["num_blocks_used"],
                                          now["reserved_waste"] + now["internal_waste"]))
    run.seconds, run.counters = clock.now, Counter(scheduler.metrics())
    return run


def is_full(scheduler: Scheduler, seq: Sequence) -> bool:
    """Whether a request can't start at once: no place, or no blocks beside those who wait."""
    manager = scheduler.block_manager
    wanted = sum(map(manager.num_blocks_to_hold, [*scheduler.waiting, seq]))
    places = len(scheduler.running) + len(scheduler.waiting)
    return places >= scheduler.max_num_seqs or wanted > manager.num_free_blocks


def simulate_variants(args: argparse.Namespace, workload: Workload) -> dict[str, list[Run]]:
    variants = COMPARISONS[args.compare] if args.compare else {"simulated": {}}
    options = {"max_num_batched_tokens": 16384} | given(
        args, (*SIZES[1:4], *POLICIES, "enable_prefix_caching"))
    cost = A100 if args.cost == "a100" else measured_cost(args)
    keep_trace = bool(args.timeline or args.trace)
    return {name: [simulate(args, workload, cost, options | changes, keep_trace)]
            for name, changes in variants.items()}


# ------------------------------------------------------------------------------ the pictures

STATES = {"waiting": "#d9d9d9", "prefill": "#3b6fb6", "decode": "#74b66b", "paused": "#d5ecd0",
          "preempted": "#e8853a", "swapped": "#8e63a8"}


def lanes(run: Run) -> dict[str, list[tuple[float, float, str]]]:
    """For each completion what it did, as (start, end, state) with states of `STATES`.

    Paused: it holds its blocks, but the step is for others.
    """
    found: dict[str, list[tuple[float, float, str]]] = {}
    since: dict[str, tuple[float, str]] = {}
    begin = before = run.trace[0][0]
    for start, end, batch, _ in run.trace:
        for seq, mode in batch.preempted:
            name = f"{seq.request_id}.{seq.index}"
            since[name] = before, "swapped" if mode == "swap" else "preempted"
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens):
            name = f"{seq.request_id}.{seq.index}"
            if name not in found:
                arrived = max(begin, seq.metrics.arrival_time) if seq.index == 0 else start
                found[name], since[name] = [], (min(arrived, before), "waiting")
            left, state = since[name]
            if left < before:
                found[name].append((left, before, state))
            is_decode = num_tokens == 1 and state == "paused"
            found[name].append((before, end, "decode" if is_decode else "prefill"))
            since[name] = end, "paused"
        before = end
    return found


def draw_timeline(run: Run, title: str, path: Path) -> None:
    """A lane for each completion over time, the blocks, and the batch, with matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    begin, rows = run.trace[0][0], lanes(run)
    height = min(9.0, 1.2 + 0.16 * len(rows))
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, sharex=True, figsize=(13, height + 3.6), constrained_layout=True,
        height_ratios=[height, 2.0, 1.3])
    for row, segments in enumerate(rows.values()):
        for state, colour in STATES.items():
            spans = [(start - begin, end - start) for start, end, s in segments if s == state]
            top.broken_barh(spans, (row - 0.42, 0.84), facecolors=colour, linewidth=0)
    top.set(ylim=(len(rows) - 0.3, -0.7), ylabel="requests, as they were admitted", title=title)
    top.legend(handles=[Patch(color=colour, label=state) for state, colour in STATES.items()],
               ncols=len(STATES), loc="upper center", bbox_to_anchor=(0.5, -0.005), frameon=False)
    steps = [run.trace[0], *run.trace]  # each as it was left, from the end of the one before
    times = [0.0, *(end - begin for _, end, *_ in run.trace)]
    used, cached, free = ([record[3][f"num_blocks_{name}"] for record in steps]
                          for name in ("used", "cached", "free"))
    wasted = [(now["reserved_waste"] + now["internal_waste"]) / run.block_size
              for *_, now in steps]
    filled = [u - w for u, w in zip(used, wasted)]
    blank = [f - c for f, c in zip(free, cached)]
    middle.stackplot(times, filled, wasted, cached, blank, step="pre", labels=[
        "used", "held, but empty", "free, cached", "free, blank"],
        colors=["#3b6fb6", "#b6453b", "#a8c6ea", "#f2f2f2"])
    middle.set(ylabel="KV blocks", ylim=(0, used[0] + free[0]))
    middle.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4, frameon=False)
    bottom.step(times, [len(batch) for _, _, batch, _ in steps], where="pre", color="#74b66b",
                label="in the step")
    bottom.step(times, [now["num_requests_running"] for *_, now in steps], where="pre",
                color="#444", linewidth=0.8, label="running")
    bottom.set(xlabel="seconds", ylabel="sequences", ylim=(0, None), xlim=(0, times[-1]))
    bottom.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_trace(run: Run, path: Path) -> None:
    """The Chrome trace format (open it in https://ui.perfetto.dev), times in microseconds."""
    begin = run.trace[0][0]
    events: list[dict[str, Any]] = []
    for number, (name, segments) in enumerate(lanes(run).items()):
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name",
                       "args": {"name": f"request {name}"}})
        events += [{"ph": "X", "pid": 1, "tid": number, "name": state, "ts": 1e6 * (start - begin),
                    "dur": 1e6 * (end - start)} for start, end, state in segments]
    for start, end, batch, now in run.trace:
        kind = "decode" if max(batch.num_tokens) == 1 else "prefill"
        events.append({"ph": "X", "pid": 2, "tid": 0, "name": kind, "ts": 1e6 * (start - begin),
                       "dur": 1e6 * (end - start), "args": {
                           "sequences": len(batch), "tokens": sum(batch.num_tokens),
                           **{name: len(blocks) for name, blocks in vars(batch.copies).items()}}})
        blocks = {name: now[f"num_blocks_{name}"] for name in ("used", "cached", "free")}
        events.append({"ph": "C", "pid": 2, "name": "KV blocks", "ts": 1e6 * (end - begin),
                       "args": blocks})
    for pid, name in ((1, "requests"), (2, "engine")):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def plot_comparison(summary: dict[str, Figures], title: str, path: Path) -> None:
    """Six small bar charts, one bar for each variant."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = ["output_tokens_per_second", "mean_batch", "first_token_ms", "per_token_ms",
             "num_preemptions", "kv_waste_percent"]
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 5.6), constrained_layout=True)
    for axis, name in zip(axes.flat, names):
        values = [figures[name] for figures in summary.values()]
        bars = axis.bar(list(summary), values, color="#3b6fb6", width=0.6)
        label, digits = ROWS[name]
        axis.bar_label(bars, [f"{value:,.{digits}f}" for value in values], padding=2)
        label = "KV slots wasted, %" if name == "kv_waste_percent" else label.strip()
        axis.set(title=label, ylim=(0, 1.15 * max(values) or 1))
        axis.tick_params(axis="x", rotation=20 if len(summary) > 3 else 0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---------------------------------------------------------------------- memory and matrices


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], repeats: int = 9) -> float:
    """The median of several calls behind a warm-up."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@functools.cache
@torch.inference_mode()
def device_rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes a second that a copy reads and writes, operations a second of a matrix product)."""
    size, side = (2**30, 8192) if device == "cuda" else (2**27, 2048)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    bandwidth = 2 * size / seconds_of(lambda: target.copy_(source))
    return bandwidth, 2 * side**3 / seconds_of(lambda: left @ right)


def weight_counts(config: Any) -> tuple[int, int]:
    """How many weights the matrix products have: of all layers together, and of the head."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer, config.vocab_size * config.hidden_size


def limit_seconds(llm: LLM, work: list[Work], bandwidth: float | None = None) -> float:
    """What the steps would take on a device that is never idle and wastes nothing: each the longer
    of reading weights and keys once at the bandwidth, or at that of a copy, and computing at the
    rate of `device_rates`.
    """
    runner, config = llm.runner, llm.model_config
    dtype = runner.caches.dtype
    copying, rate = device_rates(llm.config.device, dtype)
    in_layers, in_head = weight_counts(config)
    queries = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    key_bytes = runner.block_bytes / llm.config.block_size
    return sum(max(
        ((in_layers + in_head) * dtype.itemsize + key_bytes * step.num_keys)
        / (bandwidth or copying),
        2 * (in_layers * step.num_tokens + in_head * step.num_sampled
             + 2 * queries * step.num_scores) / rate) for step in work)


@torch.inference_mode()
def time_linears(model: nn.Module, batch_size: int, repeats: int = 15) -> float:
    """Seconds of a decode step's matrix products and nothing else; the median of several."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(batch_size, linear.in_features, device=model.embed_tokens.weight.device)
              .to(linear.weight.dtype) for linear in linears]
    return seconds_of(lambda: [linear(x) for linear, x in zip(linears, inputs)], repeats)


def reset_peak_memory() -> bool:
    """Makes Linux forget this process's peak so far; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(pid: int) -> int:
    """The most that has been resident of a process, on Linux."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


def peak_memory(was_reset: bool, after_imports: int) -> Figures:
    """The peak since the reset, or since the start where there was none; and less `after_imports`,
    the bytes that were resident before any engine was made."""
    if was_reset:
        name, peak = "peak_memory_mib", peak_bytes(os.getpid())
    else:
        import resource  # not on Windows
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        name = "peak_memory_since_start_mib"
    return {name: peak / MIB, "peak_memory_less_imports_mib": (peak - after_imports) / MIB}


def measure(engine: str, args: argparse.Namespace, workload: Workload, warm_up: Workload,
            after_imports: int) -> Figures:
    """One run of one engine, from loading to freeing."""
    if engine in args.python:
        return measure_elsewhere(engine, args)
    gc.collect()  # what the engine before has left
    was_reset = reset_peak_memory()
    figures = ENGINES[engine](args, workload, warm_up)
    figures["output_tokens_per_second"] = sum(workload.lengths) / figures["seconds"]
    if engine != "vllm":  # it works in processes of its own
        figures |= peak_memory(was_reset, after_imports)
    return figures


def measure_elsewhere(engine: str, args: argparse.Namespace) -> Figures:
    """The same in a process of its own, by this script with the same arguments and a few more."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [*shlex.split(args.python[engine]), __file__, *sys.argv[1:], "--engine", engine,
                   "--repeat", "1", "--json", str(result), "--python"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{shlex.join(command)} failed")
        found = json.loads(result.read_text())
    args.elsewhere[engine] = {name: found[name] for name in ("versions", "threads", "dtype")}
    return found["runs"][engine][0]


# ------------------------------------------------------------------------------ decode steps

BATCHES, CONTEXTS = [2**n for n in range(9)], [128, 512, 2048, 8192]


def read_bandwidth(device: str) -> float:
    """Bytes a second that a sum over 1 GiB of int64 reads, with all threads."""
    numbers = torch.ones(2**27, dtype=torch.int64, device=device)
    return numbers.nbytes / seconds_of(numbers.sum)


def time_decode_steps(args: argparse.Namespace, bandwidth: float) -> list[dict[str, float]]:
    """The median time of a decode step by batch and context, those of which K and V fit, beside
    what it would take to read weights, K and V once, or to compute."""
    block_size, options = args.block_size or 128, given(args, NANOENGINE_OPTIONS)
    if args.device == "cpu" and args.num_kv_blocks is None:
        config, dtype = load_config(args.folder), choose_dtype(args.dtype, args.device)
        weights = dtype.itemsize * sum(weight_counts(config))
        block_bytes = 2 * block_size * dtype.itemsize * (
            config.num_hidden_layers * config.num_key_value_heads * config.head_dim)
        free = 0.75 * psutil.virtual_memory().available - 2 * weights
        most = max(BATCHES) * -(-max(CONTEXTS) // block_size)
        options["num_kv_blocks"] = min(int(free // block_bytes), most)
    found = []
    with LLM(args.folder, **options | {"max_num_seqs": max(BATCHES)}) as llm:
        runner = llm.runner
        runner.caches.zero_()  # makes all of it real memory
        for context in CONTEXTS:
            for batch_size in BATCHES:
                width = -(-context // llm.config.block_size)
                if batch_size * width > runner.num_kv_blocks or context > runner.max_model_len:
                    continue
                batch = decode_batch(batch_size, context, width)
                seconds = seconds_of(lambda: runner.launch(batch)[2](), 5)  # noqa: B023
                num_keys = batch_size * context
                limit = limit_seconds(
                    llm, [Work(batch_size, batch_size, num_keys, num_keys)], bandwidth)
                found.append({"batch": batch_size, "context": context, "ms": 1000 * seconds,
                              "limit_ms": 1000 * limit})
    return found


def decode_batch(batch_size: int, context: int, width: int) -> Batch:
    """Sequences of `context` tokens, the last of which is to be computed, in blocks of their own.

    What is in the blocks makes no difference to the time.
    """
    seqs = []
    for number in range(batch_size):
        seq = Sequence(str(number), [number] * context, context, context + 1,
                       SamplingParams(temperature=0))
        seq.num_computed_tokens = context - 1
        seq.block_table.extend(range(1 + number * width, 1 + (number + 1) * width))
        seqs.append(seq)
    return Batch(0, seqs, [1] * batch_size, list(enumerate(seqs)))


def decode_table(found: list[dict[str, float]]) -> str:
    lines = ["ms of a decode step (and its limit), by batch and context",
             "batch" + "".join(f"{context:>22,}" for context in CONTEXTS)]
    cells = {(row["batch"], row["context"]): f"{row['ms']:,.1f} ({row['limit_ms']:,.1f})"
             for row in found}
    lines += [f"{batch:>5}" + "".join(f"{cells.get((batch, context), '-'):>22}"
                                      for context in CONTEXTS) for batch in BATCHES]
    return "\n".join(lines)


def plot_decode_steps(found: list[dict[str, float]], title: str, path: Path) -> None:
    """Time over batch, a line for each context, and dashed what the device would allow."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axis = pyplot.subplots(figsize=(8, 5.5), constrained_layout=True)
    for context in dict.fromkeys(row["context"] for row in found):
        rows = [row for row in found if row["context"] == context]
        batches = [row["batch"] for row in rows]
        line, = axis.plot(batches, [row["ms"] for row in rows], "o-", label=f"{context:,} tokens")
        axis.plot(batches, [row["limit_ms"] for row in rows], "--", color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="sequences", ylabel="ms of a decode step; dashed: its limit", title=title)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(which="both", alpha=0.3)
    axis.legend(title="context")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------------------- the command


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def dtype_name(args: argparse.Namespace) -> str:
    return str(choose_dtype(args.dtype, args.device)).removeprefix("torch.")


def describe(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """What is run, with what and on what: enough to run it again."""
    versions = {"nanoengine": "not installed, from its sources"}
    for package in ("torch", "transformers", "nanoengine", "vllm-cpu", "vllm", "llama-cpp-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    num_seqs, rates = args.num_seqs if args.simulate else len(workload.prompts), {}
    if not args.simulate:
        bandwidth, rate = device_rates(args.device, choose_dtype(args.dtype, args.device))
        rates = {"copy_gb_per_second": bandwidth / 1e9, "matrix_tflop_per_second": rate / 1e12,
                 "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    scale = num_seqs / len(workload.prompts)
    return {
        "command": shlex.join(sys.argv), "date": datetime.now(timezone.utc).isoformat(),
        "versions": versions, "threads": torch.get_num_threads(),
        "load_average": psutil.getloadavg(), "model": str(args.folder), "dtype": dtype_name(args),
        "num_seqs": num_seqs, "prompt_tokens": round(scale * sum(map(len, workload.prompts))),
        "output_tokens": round(scale * sum(workload.lengths)), "temperature": workload.temperature,
        **rates}


def table(summary: dict[str, Figures], ratios: Figures) -> str:
    """One line for each figure, one column for each engine or variant."""
    width = max(14, *(len(name) + 2 for name in summary))
    lines = [f"{'':34}" + "".join(f"{name:>{width}}" for name in summary)]
    for name, (label, digits) in ROWS.items():
        cells = [f"{figures[name]:,.{digits}f}" if name in figures else "-"
                 for figures in summary.values()]
        if set(cells) != {"-"}:
            lines.append(f"{label:34}" + "".join(f"{cell:>{width}}" for cell in cells))
    lines += [f"output tokens/s, {pair}: {ratio:.2f}" for pair, ratio in ratios.items()]
    return "\n".join(lines)


DEFAULTS = {"num_seqs": 256, "min_input": 100, "max_input": 1024, "min_output": 100,
            "max_output": 1024, "prefix_length": 0, "temperature": 0.6}
SMALL = {"num_seqs": 64, "min_input": 16, "max_input": 256, "min_output": 16,
         "max_output": 256}  # with --compare
WORKLOADS: dict[str, dict[str, float]] = {  # what differs from DEFAULTS or SMALL
    "uniform": {}, "prefill-heavy": {}, "decode-heavy": {}, "shared-prefix": {},
    "cpu-mixed": {"num_seqs": 32, "min_input": 100, "max_input": 256, "min_output": 32,
                  "max_output": 128, "temperature": 0.0},
    "cpu-decode": {"num_seqs": 16, "min_input": 64, "max_input": 64, "min_output": 256,
                   "max_output": 256, "temperature": 0.0},
    "cpu-prefix": {"num_seqs": 32, "min_input": 32, "max_input": 32, "min_output": 32,
                   "max_output": 32, "prefix_length": 512, "temperature": 0.0}}


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
                        help=f"of {', '.join(ENGINES)}; or several: nanoengine,hf")
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=COMMAND",
                        help="measure an engine in a process started by this command")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each engine, in turn")
    for name, small in SMALL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int,
                            help=f"default: {DEFAULTS[name]}, or {small}, or the workload's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", default="uniform", choices=WORKLOADS,
                        help="cpu-*: with numbers and lengths of their own, greedy")
    parser.add_argument("--prefix-length", type=int, help="ids that all prompts begin with; "
                        "default: 0, or the workload's, of shared-prefix --max-input")
    parser.add_argument("--n-k", type=float, default=1, metavar="N",
                        help="prefill-heavy: N thousand tokens in, one out; decode-heavy: reversed")
    parser.add_argument("--kilo", type=int, default=1000, help="how many tokens a thousand are")
    parser.add_argument("--lengths", choices=("fixed", "uniform", "normal"), default="fixed",
                        help="of prefill- and decode-heavy workloads")
    parser.add_argument("--true-lengths", type=float, default=1.0, metavar="SHARE",
                        help="of max_tokens, generated on average; default: 1, all of them")
    parser.add_argument("--temperature", type=float, help="default: 0.6, or the workload's")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"),
                        default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--attention-backend", choices=["numba", *BACKENDS])
    parser.add_argument("--run-ahead", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enforce-eager", action="store_const", const=True)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name, kind in POLICIES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="see config.py")
    parser.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_const",
                        const=False)
    parser.add_argument("--hf-batch", type=int, help="prompts in a static batch; default: all")
    parser.add_argument("--limit", action="store_true",
                        help="also time the matrix products of a decode step alone")
    parser.add_argument("--json", metavar="FILE", help="- is stdout; the table is on stderr then")
    parser.add_argument("--compare", choices=COMPARISONS, help="variants of a policy")
    parser.add_argument("--decode-grid", action="store_true",
                        help="times single decode steps by batch and context, beside their limits")
    parser.add_argument("--plot", type=Path, metavar="PNG",
                        help="a chart of --compare or --decode-grid")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="a picture of each step")
    parser.add_argument("--trace", type=Path, metavar="JSON", help="the same for Perfetto")
    parser.add_argument("--simulate", action="store_true", help="with a cost model for a model")
    parser.add_argument("--cost", choices=("a100", "measured"), default="a100",
                        help="of a simulated step: Llama-3-8B on an A100, or of --model here")
    parser.add_argument("--rate", type=float, help="simulated requests a second; default: at once")
    parser.add_argument("--reject", action="store_true",
                        help="turn simulated requests away that can't start at once")
    args = parser.parse_args()
    args.studies = bool(args.compare or args.timeline or args.trace or args.simulate)
    try:
        args.device = choose_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if args.studies and args.block_size is None and (args.simulate or args.device == "cpu"):
        args.block_size = 16  # small prompts, and policies that differ in blocks
    small = SMALL if args.studies and not args.simulate else {}
    for name, default in (DEFAULTS | small | WORKLOADS[args.workload]).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if not 0 < args.true_lengths <= 1:
        parser.error("--true-lengths must be above 0 and at most 1")
    if (args.plot or args.timeline) and importlib.util.find_spec("matplotlib") is None:
        parser.error('pictures need matplotlib: pip install ".[bench]"')
    if args.plot and not (args.compare or args.decode_grid):
        parser.error("--plot is a chart of --compare or --decode-grid")
    if args.simulate and args.compare == "sampling":
        parser.error("--simulate has no tokens: --compare sampling needs a model")
    args.engines = args.engine.split(",")
    if not set(args.engines) <= ENGINES.keys() or len(set(args.engines)) < len(args.engines):
        parser.error(f"--engine {args.engine}: different ones of {', '.join(ENGINES)}")
    args.python, args.elsewhere = dict(item.split("=", 1) for item in args.python), {}
    for engine, module in MODULES.items():
        is_here = engine not in args.engines or engine in args.python
        if not is_here and importlib.util.find_spec(module) is None:
            parser.error(f"--engine {engine}: {module} is not installed here; see --python")
    for kind in ("input", "output"):
        if not 1 <= getattr(args, f"min_{kind}") <= getattr(args, f"max_{kind}"):
            parser.error(f"--min-{kind} must be from 1 to --max-{kind}")
    if args.workload == "shared-prefix":
        args.prefix_length = args.prefix_length or args.max_input
    if args.config:
        args.model, args.load_format = HERE / "configs" / args.config, "dummy"
    args.folder = find_model(args.model)
    return args


def study(args: argparse.Namespace, workload: Workload,
          warm_up: Workload) -> dict[str, list[Figures]]:
    """The variants of a policy, really or simulated, and pictures of their first runs."""
    if not args.simulate and args.compare and args.num_kv_blocks is None:  # scarce: about a third
        block_size, most = args.block_size or 256, args.max_num_seqs or 256
        needs = [-(-(len(p) + n) // block_size)
                 for p, n in zip(workload.prompts, workload.max_tokens)]
        args.num_kv_blocks = max(*needs, sum(sorted(needs)[-most:]) // 3)
    found = (simulate_variants(args, workload) if args.simulate
             else run_variants(args, workload, warm_up))
    for draw, path in ((draw_timeline, args.timeline), (write_trace, args.trace)):
        for name, runs in found.items() if path else ():
            file = path.with_stem(f"{path.stem}-{name}") if len(found) > 1 else path
            draw(runs[0], *([name] if draw is draw_timeline else []), file)
    return {name: [figures_of(run) for run in runs] for name, runs in found.items()}


def main() -> None:
    after_imports = psutil.Process().memory_info().rss
    args = parse_arguments()
    workload, warm_up = draw_workload(args, load_config(args.folder).vocab_size)
    about = describe(args, workload)
    report = sys.stderr if args.json == "-" else sys.stdout
    where = "simulated" if args.simulate else (
        "{model}, {dtype} on {device}, {threads} threads, load average {load_average[0]:.1f}\n"
        "copy bandwidth {copy_gb_per_second:,.0f} GB/s, matrix products "
        "{matrix_tflop_per_second:,.2f} TFLOP/s")
    title = "{num_seqs} prompts of {prompt_tokens:,} tokens, {output_tokens:,} to generate"
    title = "single decode steps" if args.decode_grid else title.format(**about)
    print(title, where.format(**about), sep="\n", file=report, flush=True)

    if args.decode_grid:
        bandwidth = read_bandwidth(args.device)
        found = time_decode_steps(args, bandwidth)
        print(f"read bandwidth {bandwidth / 1e9:,.0f} GB/s", decode_table(found), sep="\n",
              file=report)
        if args.plot:
            plot_decode_steps(found, f"{args.folder.name}, {about['dtype']}", args.plot)
        write_json(args, {**about, "read_gb_per_second": bandwidth / 1e9,
                          "decode_steps": found})
        return
    if args.studies:
        runs = study(args, workload, warm_up)
    else:
        runs = {engine: [] for engine in args.engines}
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
    ratios = {f"{list(summary)[0]} / {name}": first / rate
              for name, rate in zip(list(summary)[1:], rates)}
    print(table(summary, ratios), file=report)
    if args.plot:
        plot_comparison(summary, f"{args.compare}: {title}", args.plot)
    write_json(args, {**about, "elsewhere": args.elsewhere, "medians": summary, "ratios": ratios,
                      "runs": runs})


def write_json(args: argparse.Namespace, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
