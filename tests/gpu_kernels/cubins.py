"""Compiles the kernels for GPUs that are not here, and prints what the compiler says of them.

    python tests/gpu_kernels/cubins.py             # several minutes

A line of JSON for each kernel, with the shapes that a model gives it, and each GPU: registers of a
thread, the bytes that it spills, and the shared memory of a program.
"""

import inspect
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
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanoengine_extras.gpu import attention, norms, sampling  # noqa: E402

# A100, H100, RTX 5090
GPUS = 80, 90, 120
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}


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


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands in for a kernel: it notes how it is launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            names = inspect.signature(self.kernel.fn).parameters
            options = dict(options)
            own = {name: options.pop(name) for name in [*options] if name in names}
            self.launches.append(
                Launch(self.kernel, dict(zip(names, arguments)) | own, options))
        return launch


def launches_of(run: Callable[[], Any]) -> list[Launch]:
    """Returns all launches of some of the library's functions, on an H100."""
    launches: list[Launch] = []
    kernels = {(module, name): getattr(module, name) for module in (norms, attention, sampling)
               for name in vars(module) if name.endswith("_kernel")}
    for (module, name), kernel in kernels.items():
        setattr(module, name, Recorder(kernel, launches))
    cores = attention.num_cores
    attention.num_cores = lambda device: 132  # type: ignore
    try:
        with torch.device("meta"):
            run()
    finally:
        attention.num_cores = cores
        for (module, name), kernel in kernels.items():
            setattr(module, name, kernel)
    return launches


def run_layer(model: Model, dtype: torch.dtype, kind: str) -> None:
    """kind: "prompt", "mixed", "decode", or "split": a decode of one sequence"""
    tokens, seqs, longest_query = {
        "prompt": (8192, 4, 2048), "mixed": (8447, 256, 8192), "decode": (256, 256, 1),
        "split": (1, 1, 1)}[kind]
    x = torch.empty(tokens, model.hidden_size, dtype=dtype)
    weight = torch.empty(model.hidden_size, dtype=dtype)
    qkv = torch.empty(tokens, model.heads + 2 * model.kv_heads, model.head_dim, dtype=dtype)
    head_norm = torch.empty(model.head_dim, dtype=dtype) if model.has_norms else None
    cache = torch.empty(2, 1000, 256, model.kv_heads, model.head_dim, dtype=dtype)
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


def source_of(launch: Launch) -> ASTSource:
    """What a launch compiles: types, constants, and which arguments are multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_tensor = isinstance(value, torch.Tensor)
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[number,] = value
        elif is_tensor:
            signature[parameter.name] = TYPES[value.dtype]
        else:
            is_int = isinstance(value, int)
            signature[parameter.name] = ("i64" if value >= 2**31 else "i32") if is_int else "fp32"
        is_fixed = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if signature[parameter.name] != "constexpr" and is_fixed:
            if is_tensor or (isinstance(value, int) and value % 16 == 0):
                attributes[number,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch, arch: int) -> dict[str, int]:
    """Returns the compiler's figures: registers, spilled and shared bytes."""
    triton.runtime.driver.set_active(NoGPU(arch))
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(io.StringIO()) as printed:
        kernel = triton.compile(source_of(launch), GPUTarget("cuda", arch, 32), launch.options)
    log = printed.getvalue()
    return {"registers": int(re.findall(r"Used (\d+) registers", log)[0]),
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
            "shared": kernel.metadata.shared}


class NoGPU:
    """The driver of a machine without a GPU: all that compiling asks of it."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels_of(model: Model, dtype: torch.dtype) -> dict[str, Launch]:
    """Returns the launches of a layer by name: attention has one for each kind of step."""
    found = {}
    for kind in ("prompt", "mixed", "decode", "split"):
        for launch in launches_of(lambda: run_layer(model, dtype, kind)):  # noqa: B023
            name = launch.kernel.fn.__name__.removesuffix("_kernel")
            found[f"{name}, {kind}" if name == "attention" else name] = launch
    return found


def kernels_of_sampling(dtype: torch.dtype) -> dict[str, Launch]:
    """Returns the launches that all models share; draws are from logits of a dtype."""
    def run() -> None:
        numbers = torch.empty(2, 256, dtype=torch.float64)
        sampling.draw(torch.empty(256, 151_936, dtype=dtype), *numbers)
        if dtype == torch.float32:
            draws = SimpleNamespace(min_p=numbers[0], top_k=numbers[0], top_p=numbers[0])
            sampling.truncate(torch.empty(256, 151_936), draws, {"top_p"}, [0])

    names = ("draw, sums", "draw, pick", "radix, first", "radix", "radix", "keep")
    return dict(zip(names, launches_of(run)))


def main() -> None:
    # models share some kernels
    known: dict[str, dict[str, int]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        launches = {(name, kernel): launch for name, model in MODELS.items()
                    for kernel, launch in kernels_of(model, dtype).items()}
        launches |= {("any", kernel): launch
                     for kernel, launch in kernels_of_sampling(dtype).items()}
        for (model_name, kernel), launch in launches.items():
            source = source_of(launch)
            for arch in GPUS:
                key = str((source.signature, source.constants, launch.options, kernel, arch))
                if key not in known:
                    known[key] = compiled(launch, arch)
                names = {"model": model_name, "dtype": str(dtype)[6:], "kernel": kernel}
                print(json.dumps(names | {"arch": arch} | known[key]), flush=True)


if __name__ == "__main__":
    main()
