"""GGUF files and packed weights for tests: random ones in every format."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, random_prompts
from formats import (  # noqa: F401
    BFLOAT16, GREEDY, OPTIONS, PROMPTS, expected, generated)
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu.compiling import Program
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.models.gguf import files as gguf_files
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.models.gguf import numbers as gguf_numbers
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.loading import pack

# K-quants have groups of 256 inputs
SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64)
HEADS = {"q_proj": 4, "k_proj": 2}
# where a block of a type has its scales in float16, and how large they are in a test
SCALES = {"Q2_K": ((80, 82), 1e-3), "Q3_K": ((108,), 1e-4), "Q4_K": ((0, 2), 1e-4),
          "Q5_K": ((0, 2), 1e-4), "Q6_K": ((208,), 1e-4), "IQ4_NL": ((0,), 1e-4),
          "IQ4_XS": ((0,), 1e-5), **dict.fromkeys(gguf_header.GRIDS, ((0,), 1e-4)),
          "IQ1_S": ((0,), 1e-3), "IQ1_M": ((), 0)}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    name = name.removeprefix("model.")
    whole = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    layers = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down"}
    if match := re.fullmatch(r"layers\.(\d+)\.(.*)\.(weight|bias)", name):
        return f"blk.{match[1]}.{layers[match[2]]}.{match[3]}"
    own, kind = name.rsplit(".", 1)
    return f"{whole[own]}.{kind}"


def in_gguf(weight: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """The bytes of a matrix. The package cannot quantize K-quants: they get random numbers."""
    if kind not in SCALES:
        return gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (len(weight), weight.shape[1] // block, size), dtype=np.uint8)
    places, scale = SCALES[kind]
    if kind == "IQ1_M":
        # four words have four bits each of the scale: it is below 2**-11, and positive
        raw[:, :, 55] &= 15
    for place in places:
        drawn = rng.standard_normal(raw.shape[:2] + (1,)) * scale
        raw[:, :, place:place + 2] = drawn.astype(np.float16).view(np.uint8)
    return raw.reshape(len(weight), -1)


def order_of(name: str, rows: int) -> Tensor | None:
    """How llama.cpp's converter orders the rows of q and k: halves of a head become pairs."""
    heads = next((count for part, count in HEADS.items() if f".{part}." in name), 0)
    if not heads:
        return None
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the files of all families say."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


@pytest.fixture
def make_gguf(make_model, tmp_path):
    """Writes a small random model as GGUF files, as llama.cpp's tools do.

    Returns the path of the first, and transformers' model with the dequantized weights.

    kinds: the types of its matrices, in turn; several parts: in several files.
    """

    def make(kinds: list[str], architecture: str = "Qwen3", num_parts: int = 1, entries=(),
             **changes) -> tuple[Path, transformers.PreTrainedModel]:
        _, model = make_model(architecture, **SIZES | changes)
        arch = architecture.lower().replace("mistral", "llama")
        config = model.config
        path = tmp_path / "model.gguf"
        if num_parts > 1:
            path = tmp_path / f"model-00001-of-{num_parts:05}.gguf"
        names = [path.name.replace("00001", f"{i + 1:05}", 1) for i in range(num_parts)]
        writers = [gguf.GGUFWriter(tmp_path / name, arch) for name in names]
        writer = writers[0]
        add_sizes(writer, config)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        for name, value in entries:
            adders = {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            adders.get(type(value), writer.add_uint32)(name.format(arch=arch), value)
        state = model.state_dict()
        if config.tie_word_embeddings:
            del state["lm_head.weight"]
        for number, (name, weight) in enumerate(state.items()):
            order = order_of(name, len(weight)) if arch == "llama" else None
            rows = (weight if order is None else weight[order]).numpy()
            kind = gguf.GGMLQuantizationType[kinds[number % len(kinds)]]
            if weight.ndim == 1:
                kind = gguf.GGMLQuantizationType.F32
            stored = in_gguf(rows, kind.name, number)
            writers[number % num_parts].add_tensor(gguf_name(name), stored, raw_dtype=kind)
            dequantized = torch.from_numpy(gguf.dequantize(stored, kind).copy())
            if order is None:
                weight.copy_(dequantized)
            else:
                weight[order] = dequantized
        for each in writers:
            each.write_header_to_file()
            each.write_kv_data_to_file()
            each.write_tensors_to_file()
            each.close()
        return path, model

    return make


# made by llama.cpp's own tools: Q4_K and Q6_K, the bundled tokenizer, and a chat template
REAL = ROOT / "tests" / "features" / "q3-q4_k_m.gguf"


# of each: bits, inputs of a group, how scales are stored, lows, a zero for each group, a sign; what
# its numbers stand for
PACKED: dict[str, tuple] = {
    "Q8_0": (8, 32, "half", False, False, True), "Q4_0": (4, 32, "half", False, False, True),
    "Q4_1": (4, 32, "half", True, False, False), "Q5_1": (5, 32, "half", True, False, False),
    "Q4_K": (4, 32, "nested", True, False, False), "Q5_K": (5, 32, "nested", True, False, False),
    "MLX 8": (8, 64, "wide", True, False, False), "MLX 6": (6, 64, "wide", True, False, False),
    "Q5_0": (5, 32, "half", False, False, True), "with zeros": (6, 32, "half", False, True, False),
    "Q6_K": (6, 16, "nested", False, False, True), "Q3_K": (4, 16, "nested", False, False, True),
    "AWQ": (4, 128, "half", False, True, False), "in bfloat16": (8, 64, "wide", False, True, False),
    "a row": (4, 512, "wide", False, False, True),
    "IQ4_NL": (4, 32, "half", False, False, False, gguf_numbers.IQ4),
    "IQ4_XS": (4, 32, "nested", False, False, False, gguf_numbers.IQ4),
    "FP8": (8, 128, "wide", False, False, False, formulas.E4M3)}


def draw(outputs: int, inputs: int, bits: int, group: int, storage: str, has_lows: bool,
         has_zeros: bool, has_sign: bool, values: Tensor | None = None) -> formulas.Grouped:
    numbers = torch.randint(2**bits, (outputs, inputs))
    if has_sign:
        numbers -= 2 ** (bits - 1)
    if values is formulas.E4M3:
        # two bytes are no number
        numbers[numbers % 128 == 127] = 126
    size = outputs, inputs // group

    def scales():
        if storage == "nested":
            return torch.randint(-128, 128, size, dtype=torch.int8)
        return (torch.randn(size) * 0.01).to(torch.half if storage == "half" else torch.bfloat16)

    above = [(torch.randn(outputs, inputs // 256) * 1e-4).half() for _ in range(1 + has_lows)]
    zeros = torch.randint(2**bits, size, dtype=torch.uint8) if has_zeros else None
    own = scales()
    lows = scales() if has_lows else None
    if lows is not None and storage == "wide":
        # as MLX: one number of each group stands for nearly 0
        lows = (own * -torch.randint(1, 2**bits, size)).to(own.dtype)
    return formulas.Grouped(
        numbers.to(torch.int8 if has_sign else torch.uint8), own, zeros,
        torch.arange(inputs) // group, 4 if bits == 4 else 8, lows,
        tuple(above) if storage == "nested" else (), values)


def linear_of(weights: list[formulas.Grouped], dtype: torch.dtype, halves: int, bias: Tensor | None,
              kind: type) -> Any:
    """A linear with these weights one below the other: packed, or dequantized."""
    linear: Any
    if kind is QuantizedLinear:
        parts: Any = [pack(weight, dtype) for weight in weights]
        linear = QuantizedLinear(parts, halves)
    else:
        whole = torch.cat([weight.dequantized() for weight in weights]).to(dtype)
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.__class__ = kind
        linear.weight = torch.nn.Parameter(whole, False)
        linear.halves = halves
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.to(dtype), False)
    if kind is PackedLinear:
        linear.pack()
    return linear


def compare_products(weights, dtype, num_rows, halves=1, bias=None) -> None:
    """With a norm, a residual and SwiGLU, each row has the bits of the dequantized weight."""
    linears = [linear_of(weights, dtype, halves, bias, kind)
               for kind in (QuantizedLinear, PackedLinear)]
    assert torch.equal(linears[0].weight, linears[1].weight)
    inputs, outputs = linears[0].in_features, linears[0].out_features // halves
    norm = torch.nn.RMSNorm(inputs, 1e-6, dtype=dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    for count in num_rows:
        x, residual = torch.randn(count, inputs).to(dtype), torch.randn(count, outputs).to(dtype)
        for with_more in (True, False):
            found = []
            for linear in linears:
                out = torch.full((count, outputs), torch.nan, dtype=dtype)
                rows = torch.nn.functional.pad(x, (0, linear.padding))
                Program(linear.call(
                    rows.data_ptr(), residual.data_ptr() if with_more else 0, out.data_ptr(),
                    count, norm if with_more and not linear.padding else None)).run()
                found.append(out)
            assert found[0].isfinite().all() and torch.equal(*found), (count, with_more)


def add_entries(writer: gguf.GGUFWriter, config: Any, entries: dict[str, Any]) -> None:
    """entries: by their names after that of the architecture, numbers or names of the config"""
    for entry, given in entries.items():
        value = getattr(config, given, given) if isinstance(given, str) else given
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
                    str: writer.add_string, list: writer.add_array}[type(value)]
        add(f"{writer.arch}.{entry}", value)


def check_config(path: Path, model: Any, others: set[str], whole_rope: bool) -> None:
    """The config.json made of a GGUF is the model's. others: entries that change nothing

    whole_rope: whether it has no more about positions, either
    """
    gguf_files.write_folder([path], None, path.parent, has_tokenizer=False)
    config = transformers.AutoConfig.from_pretrained(path.parent)
    assert type(config) is type(model.config)
    found = config.to_dict()
    others = others | {"architectures", "dtype", "bos_token_id", "eos_token_id",
                       "transformers_version", "_name_or_path"}
    for entry, value in model.config.to_dict().items():
        if entry == "rope_parameters" and not whole_rope:
            found[entry] = {each: found[entry].get(each) for each in value}
        if entry not in others:
            # a file has numbers in float32
            is_close = isinstance(value, float) and np.float32(value) == np.float32(found[entry])
            assert is_close or found[entry] == value, entry


# ways to run the same requests
SCHEDULES = [dict(), dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1),
             dict(num_kv_blocks=5, max_model_len=96), dict(enable_prefix_caching=False)]


def logprobs_of(model, **options) -> list:
    """Of all tokens of requests, of which two begin alike, in two calls."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=5)
    prompts = random_prompts([3, 60, 40, 21])
    prompts.append(prompts[1][:40] + [5, 6, 7])
    with LLM(model, **BFLOAT16 | options) as llm:
        outputs = [*llm.generate(prompts, params, use_tqdm=False),
                   *llm.generate(prompts[::-1], params, use_tqdm=False)[::-1]]
        assert bool(llm.metrics()["num_preemptions"]) == ("num_kv_blocks" in options)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def num_bytes(model: torch.nn.Module) -> int:
    return sum(each.nbytes for each in [*model.parameters(), *model.buffers()])


# for whose code kernels are compiled, in a process of its own
OTHER_CPUS = [("haswell", "+avx,+avx2,+fma"), (
    "skylake-avx512", "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd")]


def run_on_another_cpu(call: str, name: str, features: str, cache: Path) -> None:
    """Calls a function, such as "test_x.function", with kernels for another CPU."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "features")))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "NUMBA_CPU_NAME": name,
                   "PYTHONPATH": folders, "NUMBA_CPU_FEATURES": features}
    script = f"import {call.partition('.')[0]}; {call}(); print('equal')"
    found = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert found.split() == ["equal"]
