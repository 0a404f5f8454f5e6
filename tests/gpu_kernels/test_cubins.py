"""What the compiler makes of the kernels: nothing spills, and no step compiles a kernel again.

It compiles kernels for GPUs that are not here, in a process of its own, as it replaces Triton's
driver.
"""

import itertools
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


def test_all_kernels_compile_and_none_spills():
    figures = run("import cubins; cubins.main()")
    found = {(each["dtype"], each["arch"], each["kernel"]) for each in figures}
    kernels = ("attention", "draw", "few_rows", "heads", "join", "keep", "norm", "radix", "swiglu")
    in_one = "few_rows", "keep", "radix"
    assert found >= {*itertools.product(("bfloat16", "float32"), (80, 90, 120), kernels)} - {
        ("float32", arch, kernel) for arch in (80, 90, 120) for kernel in in_one}
    assert len(figures) > 250
    in_8_bits = [each for each in figures if "K and V in" in each["model"]]
    assert in_8_bits and max(each["spilled"] for each in in_8_bits) <= 64
    others = [each for each in figures if each not in in_8_bits]
    spilled = {(each["model"], each["dtype"]) for each in others if each["spilled"]}
    assert spilled <= {("Gemma-2-2B", "float32")}
    assert max(each["spilled"] for each in others) <= 16
    assert min(each["registers"] for each in figures) >= 16
    # a program of the newest consumer GPUs has the least shared memory
    assert max(each["shared"] for each in figures) <= 99 * 1024
    # which releases the README speaks of
    release = ".".join(version("triton").split(".")[:2])
    readme = (Path(__file__).parents[2] / "nanoengine_extras" / "gpu" / "README.md").read_text()
    said = f"With Triton {release} no kernel spills registers, except that"
    assert said in " ".join(readme.split())


def test_each_of_few_rows_has_the_same_order_of_sums():
    """Which threads add up which numbers of a row does not depend on the number of rows."""
    (found,) = run("""if True:
        import cubins, json, re, torch
        layouts = {}
        def note(kernel, made, log):
            code = made.asm["ttgir"]
            of_sums = re.findall(r"[(]tensor<(\\d+)x\\d+x\\d+xf32, (#\\w+)>[)] ->", code)
            assert len(of_sums) >= 1
            layouts.setdefault(rows, set()).update(
                re.search(rf"{name} = (.*)", code)[1] for _, name in of_sums)
        cubins.compile_only(90, note)
        with torch.device("meta"):
            for rows in (1, 2, 4, 8):
                cubins.run_products(cubins.MODELS["Qwen3-0.6B"], torch.bfloat16, rows)
        print(json.dumps([sorted(each) for each in layouts.values()]))""")
    assert len(found) == 4 and all(each == found[0] and len(each) == 1 for each in found), found
    assert "sizePerThread = [1, 1, 8]" in found[0][0]


def test_no_step_compiles_a_kernel_again():
    """Numbers of tokens, sequences and blocks differ from step to step, and where inputs lie."""
    counts = run("""if True:
        import cubins, json, torch, triton
        from types import SimpleNamespace
        from nanoengine_extras.gpu import attention, few_rows, norms, sampling
        cubins.compile_only(90)
        compiled = set()
        def note(**found):
            compiled.add((found["fn"].name, found["key"]))
            return True
        triton.knobs.runtime.jit_cache_hook = note
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
            few_rows.few_rows_linear(*torch.zeros(2, 5 + seqs % 4, 64, dtype=torch.bfloat16))
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
    once = ["attention_kernel", *["draw_kernel"] * 4, "few_rows_kernel", "heads_kernel",
            "join_kernel", "keep_kernel", "norm_kernel", "radix_kernel", "radix_kernel",
            "swiglu_kernel"]
    assert decodes == once
    assert all_steps == ["attention_kernel", *once]
