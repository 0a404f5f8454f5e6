"""Compiles the kernels for GPUs that are not here, and prints what the compiler says of them.

    python tests/gpu_kernels/cubins.py             # several minutes

A line of JSON for each kernel, with the shapes that a model gives it, and each GPU: registers of a
thread, the bytes that it spills, and the shared memory of a program.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanoengine_extras.gpu import attention, few_rows, norms, sampling  # noqa: E402

# A100, H100, RTX 5090
GPUS = 80, 90, 120
MODULES = norms, few_rows, attention, sampling
KERNELS = {(module, name): getattr(module, name) for module in MODULES
           for name in vars(module) if name.endswith("_kernel")}


class Model(NamedTuple):
    hidden_size: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    has_norms: bool
    window: int | None
    soft_cap: float | None = None
    has_sinks: bool = False
    stored: torch.dtype | None = None


MODELS = {
    "Qwen3-0.6B": Model(1024, 3072, 16, 8, 128, True, None),
    "Llama-3-8B": Model(4096, 14336, 32, 8, 128, False, None),
    "Qwen2.5-7B": Model(3584, 18944, 28, 4, 128, False, None),
    "Mistral-7B": Model(4096, 14336, 32, 8, 128, False, 4096),
    # head dims, soft caps and sinks that these models do not have
    "head_dim 64": Model(2048, 8192, 32, 8, 64, False, None),
    "head_dim 80": Model(2560, 6912, 32, 32, 80, False, None),
    "head_dim 256": Model(2048, 8192, 16, 1, 256, False, None),
    "head_dim 512": Model(2816, 2112, 16, 2, 512, False, None),
    "Gemma-2-2B": Model(2304, 9216, 8, 4, 256, False, 4096, soft_cap=50.0),
    "gpt-oss-20b": Model(2880, 2880, 64, 8, 64, False, 128, has_sinks=True)}
for stored in (torch.int8, torch.float8_e4m3fn):
    for name in ("Qwen3-0.6B", "head_dim 80", "Gemma-2-2B"):
        MODELS[f"{name}, K and V in {stored}"] = MODELS[name]._replace(stored=stored)


class NoGPU:
    """The driver of a machine without a GPU: all that compiling asks of it."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # for each, Triton keeps what it has compiled
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands in for a kernel: a launch only compiles it, and is told of the result.

    note: is called with the kernel's name, what the compiler has made, and what it has printed.
    """

    def __init__(self, kernel: Any, note: Callable[[str, Any, str], None]) -> None:
        self.kernel = kernel
        self.note = note

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            with redirect_stdout(io.StringIO()) as printed:
                made = self.kernel.warmup(*arguments, grid=(1,), **options)
            self.note(self.kernel.fn.__name__, made, printed.getvalue())
        return launch


def compile_only(arch: int, note: Callable[[str, Any, str], None] = lambda *_: None) -> None:
    """From now on, kernels are compiled for this GPU, and not launched."""
    triton.runtime.driver.set_active(NoGPU(arch))
    attention.num_cores = lambda device: 132  # type: ignore
    for (module, name), kernel in KERNELS.items():
        setattr(module, name, Compiled(kernel, note))


def run_layer(model: Model, dtype: torch.dtype, kind: str) -> None:
    """kind: "prompt", "mixed", "decode", or "split": a decode of one sequence"""
    tokens, seqs, longest_query = {
        "prompt": (8192, 4, 2048), "mixed": (8447, 256, 8192), "decode": (256, 256, 1),
        "split": (1, 1, 1)}[kind]
    x = torch.empty(tokens, model.hidden_size, dtype=dtype)
    weight = torch.empty(model.hidden_size, dtype=dtype)
    qkv = torch.empty(tokens, model.heads + 2 * model.kv_heads, model.head_dim, dtype=dtype)
    head_norm = torch.empty(model.head_dim, dtype=dtype) if model.has_norms else None
    shape = 2, 1000, 256, model.kv_heads
    cache: Any = torch.empty(*shape, model.head_dim, dtype=dtype)
    if model.stored:
        memory = torch.empty(*shape, model.head_dim + 4, dtype=torch.int8)
        cache = SimpleNamespace(memory=memory, stored=model.stored, is_contiguous=lambda: True)
    angles = torch.empty(2, tokens, 1, model.head_dim // 2)
    numbers = torch.empty(seqs + 1, dtype=torch.int32)
    step = SimpleNamespace(
        query_starts=numbers, lengths=numbers[1:], longest_query=longest_query,
        longest_keys=40_960, block_tables=torch.empty(seqs, 160, dtype=torch.int32))
    slots = torch.empty(tokens, dtype=torch.int64)
    norms.rms_norm(x, weight, 1e-6, x)
    query = norms.store_heads(qkv, head_norm, head_norm, 1e-6, angles, cache, slots)
    sinks = torch.empty(model.heads) if model.has_sinks else None
    attention.paged_attention(query, cache, model.window, step, model.soft_cap, sinks)
    norms.swiglu(torch.empty(tokens, 2 * model.inner, dtype=dtype))


def run_products(model: Model, dtype: torch.dtype, rows: int) -> None:
    """Those of a layer, in a decode of few sequences."""
    x = torch.empty(rows, model.hidden_size, dtype=dtype)
    norm = torch.empty(model.hidden_size, dtype=dtype)
    weight = torch.empty(2 * model.inner, model.hidden_size, dtype=dtype)
    bias = torch.empty(len(weight), dtype=dtype)
    few_rows.few_rows_linear(x, weight)
    few_rows.few_rows_linear(x, weight, None, norm, 1e-6, x)
    few_rows.few_rows_linear(x, weight, None, norm, 1e-6, x, is_gated=True)
    few_rows.few_rows_linear(x, weight, bias, norm, 1e-6, x, is_gated=True)


def run_sampling(dtype: torch.dtype) -> None:
    """All models share it; draws are from logits of a dtype."""
    numbers = torch.empty(2, 256, dtype=torch.float64)
    sampling.draw(torch.empty(256, 151_936, dtype=dtype), *numbers)
    draws = SimpleNamespace(min_p=numbers[0], top_k=numbers[0], top_p=numbers[0])
    sampling.truncate(torch.empty(256, 151_936), draws, {"top_p"}, [0])


def main(models: dict[str, Model] = MODELS) -> None:
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    for arch in GPUS:
        for dtype in (torch.bfloat16, torch.float32):
            for name, model in models.items():
                # Triton has no e4m3 there; and 8 bits are for decoders in bfloat16
                is_e4m3 = model.stored == torch.float8_e4m3fn
                if (arch == 80 and is_e4m3) or (model.stored and dtype == torch.float32):
                    continue

                def note(kernel: str, made: Any, log: str) -> None:
                    # it is empty for a kernel that another model has, too
                    if log:
                        print(json.dumps({
                            "model": name, "dtype": str(dtype)[6:],  # noqa: B023
                            "kernel": kernel.removesuffix("_kernel"), "arch": arch,  # noqa: B023
                            "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
                            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
                            "shared": made.metadata.shared}), flush=True)

                compile_only(arch, note)
                with torch.device("meta"):
                    for kind in ("prompt", "mixed", "decode", "split"):
                        run_layer(model, dtype, kind)
                    for rows in (1, 2, 4, 8) if dtype == torch.bfloat16 else ():
                        run_products(model, dtype, rows)
                    run_sampling(dtype)


if __name__ == "__main__":
    main()
