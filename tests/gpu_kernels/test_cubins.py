"""What the compiler makes of the kernels: nothing spills, and no step compiles a kernel again.

It compiles kernels for GPUs that are not here, in a process of its own, as it replaces Triton's
driver.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.slow


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(script: str) -> list:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{script}"
    printed = subprocess.check_output([sys.executable, "-c", script], text=True, env=ENVIRONMENT)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize("model, dtype, kernel, arch", [
    ("Qwen3-0.6B", "bfloat16", "heads", 90), ("gpt-oss-20b", "bfloat16", "attention, prompt", 120),
    ("Gemma-2-2B", "bfloat16", "attention, split", 90), ("head_dim 512", "float32", "join", 80),
    ("Llama-3-8B", "bfloat16", "attention, decode", 80),
    ("Mistral-7B", "bfloat16", "attention, prompt", 120), ("Qwen2.5-7B", "float32", "norm", 90),
    ("head_dim 256", "float32", "attention, split", 90), (None, "float32", "radix", 120),
    (None, "bfloat16", "draw, sums", 80), (None, "bfloat16", "draw, pick", 90)])
def test_a_kernel_compiles_and_spills_nothing(model, dtype, kernel, arch):
    (figures,) = run(f"""if True:
        import cubins, json, torch
        model = (cubins.MODELS | cubins.OTHERS).get({model!r})
        launches = (cubins.kernels_of(model, torch.{dtype}) if model
                    else cubins.kernels_of_sampling(torch.{dtype}))
        print(json.dumps(cubins.compiled(launches[{kernel!r}], {arch})))""")
    assert figures["spilled"] == 0 and figures["programs"] >= 1 and 16 <= figures["registers"]


def test_the_table_has_all_kernels_and_none_spills():
    """As its command prints it."""
    command = [sys.executable, str(Path(__file__).parent / "cubins.py")]
    table = subprocess.check_output(command, text=True, env=ENVIRONMENT)
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in table.splitlines() if line.startswith("| ")]
    rows = [dict(zip(lines[0], line)) for line in lines[2:]]
    kernels = {"norm", "swiglu", "heads", "join", "attention, prompt", "attention, mixed",
               "attention, decode", "attention, split"}
    of_rows = {(row["model"], row["dtype"], row["GPU"], row["kernel"]) for row in rows}
    assert of_rows >= {("any", "float32", gpu, kernel) for gpu in ("sm_80", "sm_90", "sm_120")
                       for kernel in ("radix, first", "radix", "keep")}
    assert of_rows >= {("any", dtype, gpu, f"draw, {name}") for name in ("sums", "pick")
                       for dtype in ("bfloat16", "float32") for gpu in ("sm_80", "sm_90", "sm_120")}
    # what is said of it holds for this release of the compiler
    assert f"Triton {version('triton')} has compiled" in table
    assert of_rows >= {
        (model, dtype, gpu, kernel) for kernel in kernels for dtype in ("bfloat16", "float32")
        for model in ("Qwen3-0.6B", "Llama-3-8B", "Qwen2.5-7B", "Mistral-7B")
        for gpu in ("sm_80", "sm_90", "sm_120")}
    assert {row["spilled"] for row in rows
            if (row["model"], row["dtype"]) != ("Gemma-2-2B", "float32")} == {"0"}
    assert max(int(row["spilled"]) for row in rows) <= 16
    # which releases the README speaks of
    release = ".".join(version("triton").split(".")[:2])
    readme = (Path(__file__).parents[2] / "nanoengine_extras" / "gpu" / "README.md").read_text()
    said = f"With Triton {release} no kernel spills registers, except that"
    assert said in " ".join(readme.split())
    # a program of the newest consumer GPUs has the least shared memory
    assert max(int(row["shared"].replace(",", "")) for row in rows) <= 99 * 1024


def test_no_step_compiles_a_kernel_again():
    """Numbers of tokens, sequences and blocks differ from step to step, and where inputs lie."""
    counts = run("""if True:
        import cubins, json, torch, triton
        from types import SimpleNamespace
        from nanoengine_extras.gpu import attention, norms, sampling
        triton.runtime.driver.set_active(cubins.NoGPU(90))
        compiled = set()
        def note(**found):
            compiled.add((found["fn"].name, found["key"]))
            return True
        triton.knobs.runtime.jit_cache_hook = note
        class Warm:
            def __init__(self, kernel): self.kernel = kernel
            def __getitem__(self, grid):
                return lambda *a, **o: self.kernel.warmup(*a, grid=(1,), **o)
        for module in (attention, norms, sampling):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                setattr(module, name, Warm(getattr(module, name)))
        attention.num_splits = lambda *_: 4
        def run(tokens, seqs, width, offset, longest):
            buffer = torch.zeros(100_000, dtype=torch.int32)
            def part(*shape):
                nonlocal offset
                offset += (size := torch.Size(shape).numel())
                return buffer[offset - size:offset].view(shape)
            step = SimpleNamespace(
                query_starts=part(seqs + 1), lengths=part(seqs), block_tables=part(seqs, width),
                longest_query=longest, longest_keys=16 * width)
            cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16)
            query = torch.zeros(tokens, 4, 64, dtype=torch.bfloat16)
            attention.paged_attention(query, cache, None, step)
            norms.rms_norm(torch.zeros(tokens, 64), torch.ones(64), 1e-6, torch.zeros(tokens, 64))
            norms.swiglu(torch.zeros(tokens, 128))
            slots = torch.zeros(2 * tokens + 2, dtype=torch.int64)[offset % 2:][:tokens]
            norms.store_heads(torch.zeros(tokens, 8, 64, dtype=torch.bfloat16), None, None, 0.0,
                              torch.zeros(2, tokens, 1, 32), cache, slots)
            numbers = torch.zeros(2 * seqs + 2, dtype=torch.float64)[offset % 2:][:2 * seqs]
            draws = SimpleNamespace(
                **{name: numbers[:seqs] for name in ("min_p", "top_k", "top_p")})
            sampling.truncate(torch.zeros(seqs, 64), draws, {"top_p"}, [0])
            for temperature in (None, numbers[seqs:]):
                sampling.draw(torch.zeros(seqs, 64), numbers[:seqs], temperature)
        for seqs, width, offset in ((1, 1, 0), (2, 7, 1), (16, 16, 2), (17, 32, 3), (48, 3, 4)):
            run(seqs, seqs, width, offset, 1)
        print(json.dumps(sorted(name for name, _ in compiled)))
        for seqs, width, offset in ((1, 1, 0), (2, 16, 1), (16, 3, 2)):
            run(40 + seqs, seqs, width, offset, 41)
        print(json.dumps(sorted(name for name, _ in compiled)))""")
    decodes, all_steps = ([name.rpartition(".")[2] for name in names] for names in counts)
    # draws have two launches each, by weights and by logits
    once = ["attention_kernel", *["draw_kernel"] * 4, "heads_kernel", "join_kernel", "keep_kernel",
            "norm_kernel", "radix_kernel", "radix_kernel", "swiglu_kernel"]
    assert decodes == once
    assert all_steps == ["attention_kernel", *once]
