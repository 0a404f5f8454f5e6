"""Formats of quantized safetensors: random weights as the tools of each format write them.

`FORMATS` has a row for each. A function rounds a weight, or draws numbers for one of its shape. It
returns the tensors of a file, by the ends of their names, and what they stand for.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import compare
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, greedy_reference, random_prompts, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.errors import naming
from nanoengine.loader import checkpoint_tensors
from nanoengine_extras.cpu.packed import QuantizedEmbedding, QuantizedLinear
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.quantized import choose_opener
from nanoengine_extras.models.quantized.stored import Stored

Parts = dict[str, Tensor]
SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64)
EXPERTS = dict(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_local_experts=4,
               num_experts_per_tok=2, decoder_sparse_step=1)


# a GGUF made by llama.cpp's own tools: Q4_K and Q6_K, the bundled tokenizer, and a chat template
REAL = ROOT / "tests" / "features" / "q3-q4_k_m.gguf"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts([3, 40])
OPTIONS: dict[str, Any] = dict(
    dtype="float32", block_size=16, num_kv_blocks=32, max_num_seqs=4)
# each dtype and size of blocks is a kernel to compile
BFLOAT16 = OPTIONS | dict(dtype="bfloat16", block_size=32)
# ways to run the same requests
SCHEDULES: list[dict[str, Any]] = [
    {}, dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1)]


class Format(NamedTuple):
    """entries: the model's quantization_config; left_out: the first of them that are left out
    is_packed: whether numbers stay packed; are_all: whether embeddings and heads are quantized, too
    """

    make: Callable[[Tensor], tuple[Parts, Tensor]]
    entries: dict[str, Any]
    left_out: str = ""
    is_packed: bool = True
    are_all: bool = False


# ------------------------------------------------------------------------------ whole numbers


def drawn(weight: Tensor, bits: int, group: int, symmetric: bool = False,
          is_mixed: bool = False) -> tuple[Tensor, ...]:
    """Random numbers, zeros and scales, all from 0 on; the group of each input; and what all these
    stand for. is_mixed: whether inputs of a group are not neighbours"""
    outputs, inputs = weight.shape
    groups = torch.arange(inputs) // (group or inputs)
    zeros = torch.randint(2**bits, (outputs, int(groups[-1]) + 1))
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    if is_mixed:
        groups = groups[torch.randperm(inputs)]
    numbers = torch.randint(2**bits, weight.shape)
    scales = (torch.rand(zeros.shape) * 0.4 / 2**bits).half()
    # in float64: each product is exact, and then rounded once
    whole = (numbers - zeros[:, groups]) * scales.double()[:, groups]
    return numbers, zeros, scales, groups.int(), whole.float()


def in_words(numbers: Tensor, bits: int) -> Tensor:
    """(rows, columns) to (rows, columns * bits / 32) int32; the lowest bits first, rest unused.
    Numbers of 3 bits can begin in one word and end in the next."""
    each = (numbers.byte()[..., None] >> torch.arange(bits) & 1).flatten(1)
    each = F.pad(each, (0, -each.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (each.long() << torch.arange(32)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def in_awq(weight: Tensor, group: int = 32, symmetric: bool = False) -> tuple[Parts, Tensor]:
    """As `WQLinear_GEMM.from_linear` of AutoAWQ packs them."""
    numbers, zeros, scales, _, whole = drawn(weight, 4, group, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(x: Tensor) -> Tensor:
        return in_words(x.T.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales.T}, whole


def in_gptq(weight: Tensor, bits: int = 4, group: int = 32, version: int = 1,
            is_mixed: bool = False) -> tuple[Parts, Tensor]:
    """As GPTQModel packs them. Version 1 subtracts 1 from the zeros: from a whole word at once, so
    a zero of 0 borrows from its neighbour; but number by number if they have 3 bits."""
    numbers, zeros, scales, groups, whole = drawn(weight, bits, group, is_mixed=is_mixed)
    if version == 1 and bits == 3:
        zeros = (zeros - 1) % 8
    qzeros = in_words(zeros.T, bits)
    if version == 1 and bits != 3:
        qzeros = qzeros - sum(1 << place for place in range(0, 32, bits))
    parts = {"qweight": in_words(numbers, bits).T, "qzeros": qzeros, "scales": scales.T}
    return parts | ({"g_idx": groups} if is_mixed else {}), whole


def in_compressed(weight: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True,
                  is_mixed: bool = False) -> tuple[Parts, Tensor]:
    numbers, zeros, scales, groups, whole = drawn(weight, bits, group, symmetric, is_mixed)
    parts = {"weight_packed": in_words(numbers, bits), "weight_scale": scales,
             "weight_shape": torch.tensor(numbers.shape)}
    if is_mixed:
        parts["weight_g_idx"] = groups
    if not symmetric:
        parts["weight_zero_point"] = in_words(zeros.T, bits).T
    return parts, whole


def in_mlx(weight: Tensor, bits: int = 4, group: int = 32) -> tuple[Parts, Tensor]:
    """As mlx_lm's converter, by which the engine had mlx_lm's tokens in 18 families."""
    numbers, middles, scales, groups, _ = drawn(weight, bits, group)
    scales = scales.bfloat16()
    # one number of each group stands for nearly 0
    lows = (-scales * middles).bfloat16()
    whole = numbers * scales.double()[:, groups] + lows.double()[:, groups]
    words = in_words(numbers, bits).view(torch.uint32)
    return {"weight": words, "scales": scales, "biases": lows}, whole.float()


# --------------------------------------------------------------------------- numbers and scales

# of activations and of a KV cache, which are not rounded
OTHERS = {"input_scale": torch.ones(1), "k_scale": torch.ones(())}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat((FP4, -FP4))


def in_blocks(weight: Tensor, rows: int, columns: int, most: int,
              dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales of blocks, in which the largest number becomes `most`; and that of each number."""
    outputs, inputs = weight.shape
    columns = columns or inputs
    rows = rows or outputs
    padded = F.pad(weight.abs(), (0, -inputs % columns, 0, -outputs % rows))
    largest = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    scales = (largest / most).to(dtype)
    each = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return scales, each[:outputs, :inputs]


def in_fp8(weight: Tensor, rows: int = 1, columns: int = 0, end: str = "weight_scale",
           shape: Any = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Parts, Tensor]:
    """rows, columns: of a block, 0: all. shape: in which the scales are stored"""
    scales, each = in_blocks(weight, rows, columns, 448, dtype)
    numbers = (weight / each).to(torch.float8_e4m3fn)
    scales = scales if shape is None else scales.view(shape)
    return {"weight": numbers, end: scales} | OTHERS, numbers.float() * each


def in_int8(weight: Tensor, columns: int = 0, has_zeros: bool = False) -> tuple[Parts, Tensor]:
    scales, each = in_blocks(weight, 1, columns, 100, torch.bfloat16)
    zeros = torch.randint(-20, 20, scales.shape) * has_zeros
    own = zeros.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    numbers = (weight / each + own).round().clamp(-128, 127)
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scales} | OTHERS
    if has_zeros:
        parts["weight_zero_point"] = zeros.to(torch.int8)
    return parts, (numbers - own) * each


def in_fp4(weight: Tensor, size: int, name: str = "weight_packed") -> tuple[Parts, Tensor]:
    """In groups of 16 inputs: NVFP4; of 32: MXFP4. ModelOpt multiplies by the second scale."""
    scales = in_blocks(weight, 1, size, 6, torch.float32)[0]
    more: Parts
    if size == 32:
        stored = scales.log2().round().to(torch.int32) + 127
        own, more = torch.exp2(stored - 127.0), {}
        stored = stored.to(torch.uint8)
    else:
        whole = 448 / scales.amax().view(1)
        stored = (scales * whole).to(torch.float8_e4m3fn)
        own, more = stored.float() / whole, {"weight_global_scale": whole}
        if name == "weight":
            own, more = stored.float() * (1 / whole), {"weight_scale_2": (1 / whole)[0]}
    own = own.repeat_interleave(size, 1)
    numbers = ((weight / own)[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    words = numbers[:, ::2] | numbers[:, 1::2] << 4
    return {name: words, "weight_scale": stored} | more | OTHERS, FP4[numbers.int()] * own


# -------------------------------------------------------------------------------- bitsandbytes

# the tables of bitsandbytes 0.50.2, which dequantized such weights to the same bits
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0])
SIXTHS = torch.tensor([0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25])
TABLES = {"nf4": NF4, "fp4": torch.cat((SIXTHS, -SIXTHS))}


def in_4_bits(weight: Tensor, kind: str, is_nested: bool = True) -> tuple[Parts, Tensor]:
    blocks = weight.flatten().view(-1, 64)
    scales = blocks.abs().amax(1)
    parts = {"weight.quant_map": TABLES[kind].clone(), "weight.absmax": scales}
    entries: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32",
                               "shape": [*weight.shape]}
    if is_nested:
        offset = float(scales.mean())
        table = torch.linspace(-1, 1, 256)
        centered = F.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        above = centered.abs().amax(1)
        numbers = (centered / above[:, None] * 127.5 + 127.5).round().to(torch.uint8)
        parts["weight.absmax"] = numbers.flatten()[:len(scales)]
        parts |= {"weight.nested_absmax": above, "weight.nested_quant_map": table}
        scales = (table[numbers.int()] * above[:, None]).flatten()[:len(scales)] + offset
        entries |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    numbers = ((blocks / scales[:, None])[..., None] - TABLES[kind]).abs().argmin(-1)
    flat = numbers.flatten().to(torch.uint8)
    parts["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    state = torch.tensor([*json.dumps(entries).encode()], dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = state
    return parts, (TABLES[kind][numbers] * scales[:, None]).view(weight.shape)


def in_8_bits(weight: Tensor) -> tuple[Parts, Tensor]:
    largest = weight.half().abs().amax(1).float()
    numbers = (weight * 127 / largest[:, None]).round().clamp(-127, 127)
    parts = {"weight": numbers.to(torch.int8), "SCB": largest,
             "weight_format": torch.zeros((), dtype=torch.uint8)}
    # in the order of `int8_vectorwise_dequant`
    return parts, numbers * largest[:, None] * 7.874015718698502e-3


# ------------------------------------------------------------------------------------ the table


ROUNDED = dict(num_bits=8, type="float", strategy="token", dynamic=True)


def compressed(bits: int = 4, stored: str = "pack-quantized", kind: str = "int",
               activations: Any = None, **weights: Any) -> dict[str, Any]:
    weights = dict(num_bits=bits, type=kind, strategy="group", symmetric=True) | weights
    group = dict(weights=weights, input_activations=activations, output_activations=None,
                 targets=["Linear"])
    return dict(quant_method="compressed-tensors", format=stored, ignore=["lm_head"],
                config_groups=dict(group_0=group))


def rounding(stored: str, bits: int = 8, kind: str = "float", **weights: Any) -> dict[str, Any]:
    """Models that round activations, too."""
    return compressed(bits, stored, kind, ROUNDED, **weights)


AWQ = dict(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True)
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=False)
AUTO_ROUND = dict(quant_method="auto-round", packing_format="auto_round:auto_gptq", bits=4,
                  group_size=32, sym=False, extra_config={"lm_head": dict(bits=16)})
FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[32, 32])
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", config_groups=dict(
    group_0=dict(input_activations=dict(num_bits=4, group_size=16))))
MODELOPT_FP8 = dict(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme=ROUNDED)
BNB = dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False)
INT8 = dict(quant_method="bitsandbytes", load_in_4bit=False, load_in_8bit=True)
STATIC = rounding("float-quantized", strategy="tensor") | dict(kv_cache_scheme=ROUNDED)
ONE = dict(shape=(1,), dtype=torch.float32)

FORMATS: dict[str, Format] = {
    "awq": Format(in_awq, AWQ),
    # all zeros are 8: GPTQModel and AutoRound store them, too
    "awq symmetric": Format(partial(in_awq, symmetric=True), AWQ | dict(zero_point=False)),
    "awq one group": Format(partial(in_awq, group=0), AWQ | dict(group_size=-1)),
    # the last of 96, 96 and 64 inputs; 4 parts of 64 inputs would be equal
    "awq uneven": Format(partial(in_awq, group=96), AWQ | dict(group_size=96)),
    "gptq uneven": Format(partial(in_gptq, group=96), GPTQ | dict(group_size=96)),
    "gptq dynamic": Format(partial(in_gptq, bits=8, group=80), GPTQ | dict(
        bits=8, group_size=96, dynamic={"+:.*_proj": dict(group_size=80), "-:lm_head": {}})),
    "gptq 4": Format(in_gptq, GPTQ),
    "gptq 8": Format(partial(in_gptq, bits=8), GPTQ | dict(bits=8)),
    "gptq act-order": Format(
        partial(in_gptq, is_mixed=True), GPTQ | dict(desc_act=True), is_packed=False),
    "gptq v2": Format(partial(in_gptq, group=64, version=2), GPTQ | dict(
        group_size=64, checkpoint_format="gptq_v2")),
    "gptq 2": Format(partial(in_gptq, bits=2), GPTQ | dict(bits=2)),
    "gptq 3": Format(partial(in_gptq, bits=3, group=64), GPTQ | dict(bits=3, group_size=64)),
    "gptq 3 v2": Format(
        partial(in_gptq, bits=3, version=2), GPTQ | dict(bits=3, checkpoint_format="gptq_v2")),
    "gptq 3 act-order": Format(
        partial(in_gptq, bits=3, is_mixed=True), GPTQ | dict(bits=3, desc_act=True),
        is_packed=False),
    "gptq v2 by format": Format(partial(in_gptq, bits=8, group=64, version=2), GPTQ | dict(
        bits=8, group_size=64, format="gptq_v2")),
    "AutoRound": Format(in_gptq, AUTO_ROUND),
    "AutoRound 3": Format(partial(in_gptq, bits=3), AUTO_ROUND | dict(bits=3)),
    "AutoRound v2": Format(
        partial(in_gptq, version=2), AUTO_ROUND | dict(packing_format="auto_round")),
    "w4a16": Format(in_compressed, compressed(group_size=32)),
    "w8a16": Format(partial(in_compressed, bits=8), compressed(8, group_size=32)),
    "w8a16 channel": Format(
        partial(in_compressed, bits=8, group=0), compressed(8, strategy="channel")),
    "w4a16 zeros": Format(
        partial(in_compressed, symmetric=False), compressed(symmetric=False, group_size=32)),
    "w4a16 uneven": Format(partial(in_compressed, group=96), compressed(group_size=96)),
    "w4a16 act-order": Format(
        partial(in_compressed, is_mixed=True), compressed(actorder="group", group_size=32),
        is_packed=False),
    **{f"MLX {bits}": Format(
        partial(in_mlx, bits=bits, group=group), dict(bits=bits, group_size=group), are_all=True)
       for bits, group in ((2, 128), (3, 64), (4, 32), (5, 64), (6, 32), (8, 64))},
    # as Qwen3-8B-FP8 and DeepSeek-V3; the last blocks are smaller
    "FP8": Format(partial(in_fp8, rows=32, columns=32, end="weight_scale_inv", dtype=torch.float32),
                  FP8, "activation_scheme"),
    "FP8 uneven": Format(
        partial(in_fp8, rows=48, columns=96, end="weight_scale_inv", dtype=torch.float32),
        FP8 | dict(weight_block_size=[48, 96]), "activation_scheme"),
    "FP8 one scale": Format(partial(in_fp8, rows=0, shape=(), dtype=torch.float32), dict(
        quant_method="fp8", activation_scheme="static"), "activation_scheme"),
    "FP8 dynamic": Format(
        in_fp8, rounding("float-quantized", strategy="channel"), "input_activations"),
    "FP8 static": Format(
        partial(in_fp8, rows=0, **ONE), STATIC, "input_activations, kv_cache_scheme"),
    "FP8 groups": Format(partial(in_fp8, columns=64), rounding(
        "naive-quantized", strategy="group", group_size=64), "input_activations"),
    "W8A8": Format(in_int8, rounding("int-quantized", kind="int", strategy="channel"),
                   "input_activations"),
    "W8A8 zeros": Format(partial(in_int8, columns=64, has_zeros=True), rounding(
        "int-quantized", kind="int", group_size=64, symmetric=False), "input_activations"),
    # on CPUs without AVX-512, such tables have no packed form
    "NVFP4": Format(partial(in_fp4, size=16), rounding(
        "nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16), "input_activations",
        HAS_TABLES),
    "MXFP4": Format(partial(in_fp4, size=32), rounding(
        "mxfp4-pack-quantized", 4, group_size=32), "input_activations"),
    "ModelOpt": Format(
        partial(in_fp4, size=16, name="weight"), MODELOPT, "input_activations, quant_algo",
        HAS_TABLES),
    "ModelOpt FP8": Format(
        partial(in_fp8, rows=0, **ONE), MODELOPT_FP8, "kv_cache_scheme, quant_algo"),
    "nf4": Format(partial(in_4_bits, kind="nf4"), BNB, is_packed=HAS_TABLES),
    "nf4 not nested": Format(
        partial(in_4_bits, kind="nf4", is_nested=False), BNB, is_packed=HAS_TABLES),
    "fp4": Format(partial(in_4_bits, kind="fp4"), BNB, is_packed=HAS_TABLES),
    "LLM.int8": Format(in_8_bits, INT8, "load_in_8bit", is_packed=False)}

# each weight in the next one of three forms
MIXED = ["W8A8", "FP8 groups", "NVFP4"]
FORMATS["mixed"] = FORMATS["W8A8"]._replace(entries=rounding("mixed-precision") | dict(
    config_groups={name: FORMATS[name].entries["config_groups"]["group_0"] | dict(
        format=FORMATS[name].entries["format"]) for name in MIXED}))


# ------------------------------------------------------------------------------------ files


def change_config(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, function: Callable[[dict[str, Any]], object]) -> None:
    """Calls a function with the tensors of each file, which it can change."""
    for file in folder.glob("*.safetensors"):
        tensors: dict[str, Any] = load_file(file)
        function(tensors)
        save_file({name: each.contiguous() for name, each in tensors.items()}, file,
                  {"format": "pt"})


def save(folder: Path, tensors: Parts) -> Path:
    """Writes the tensors of a model in turn into two files."""
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in {*index.values()}:
        save_file({name: tensors[name].contiguous().clone() for name in index
                   if index[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def with_weights(folder: Path, target: Path, weights: Parts) -> Path:
    """A copy of a model with other weights."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    save_file({name: each.contiguous() for name, each in weights.items()},
              target / "model.safetensors", {"format": "pt"})
    return target


def is_linear(name: str, weight: Tensor) -> bool:
    """Whether it is one that tools round: no head, no router."""
    return name.endswith("_proj.weight")


def is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2


@pytest.fixture
def make_quantized(make_model, tmp_path):
    """Writes a model in a format, the parts of a weight in two files. Returns its folder, and
    transformers' model with the dequantized weights.

    source: the folder of a model; by default, a small one of an architecture with `changes`
    entries: the model's quantization_config, if it is not that of the format
    forms: the formats of weights that differ
    is_chosen: whether a weight is quantized
    renamed: changes the tensors of the files
    is_transposed: whether a module has (inputs, outputs), and files have (outputs, inputs)
    """
    def make(name: str, architecture: str = "Llama", *, source: Any = None, entries: Any = None,
             forms: Any = MappingProxyType({}), is_chosen: Any = None,
             renamed: Callable = lambda tensors: tensors, is_transposed: bool = False,
             **changes: Any) -> tuple[Path, Any]:
        if source is None:
            source, _ = make_model(architecture, **SIZES | changes)
        torch.manual_seed(0)
        is_chosen = is_chosen or (is_matrix if FORMATS[name].are_all else is_linear)
        weights = load_file(Path(source) / "model.safetensors")
        chosen = [key for key, weight in weights.items() if is_chosen(key, weight)]
        stored = {key: weight for key, weight in weights.items() if key not in chosen}
        for key, form in zip(chosen, cycle(MIXED if name == "mixed" else [name])):
            weight = weights[key].T if is_transposed else weights[key]
            parts, found = FORMATS[forms.get(key, form)].make(weight)
            weights[key] = found.T if is_transposed else found
            module = key.removesuffix("weight")
            stored |= {f"{module}{end}": part for end, part in parts.items()}
        folder = save(shutil.copytree(
            source, tmp_path / "quantized", ignore=shutil.ignore_patterns("*.safetensors"),
            dirs_exist_ok=True), renamed(stored))
        change_config(folder, quantization_config=entries or FORMATS[name].entries)
        return folder, compare.load_reference(with_weights(source, tmp_path / "plain", weights))

    return make


# ------------------------------------------------------------------------------------ one weight


def opened(folder: Path, entries: dict[str, Any], parts: Parts) -> Stored:
    """The weight of a file that has nothing else."""
    file = folder / "model.safetensors"
    save_file({f"own.{name}": each.contiguous() for name, each in parts.items()}, file)
    with naming(file):
        method = entries.get("quant_method", "mlx")
        return choose_opener(method, entries, folder)(file)["own.weight"]


def check_damages(folder: Path, entries: dict[str, Any], parts: Parts, names: list[str]) -> None:
    """Each of these parts is refused with half of its numbers, of another type, transposed, and
    with numbers that are not finite. Messages name the tensor, the file, and what it must have."""
    for name in names:
        part = parts[name]
        damaged = [part.to(torch.int16)]
        damaged += [part.T] if part.ndim == 2 and 1 not in part.shape else []
        damaged += [part.unflatten(dim, (-1, 2)).select(dim + 1, 0)
                    for dim, size in enumerate(part.shape) if size % 2 == 0]
        if part.is_floating_point():
            # FP8 has no inf
            last = torch.inf if part.element_size() > 1 else torch.nan
            for place, value in ((0, torch.nan), (-1, last)):
                places = part.float().flatten().clone()
                places[place] = value
                damaged.append(places.view(part.shape).to(part.dtype))
        for each in damaged:
            message = rf"own\.{name} in {folder}.*is not accepted: it must be (finite|[IFBU]\w+ )"
            with pytest.raises(ValueError, match=message):
                opened(folder, entries, parts | {name: each}).read()


# ------------------------------------------------------------------------------ LLMs under test

# linears that one product computes
GATES = "gate_proj", "up_proj"
ATTENTION = "q_proj", "k_proj", "v_proj"
JOINED = {"gate_up_proj": GATES, "gate_proj": GATES, "q_proj": ATTENTION, "k_proj": ATTENTION,
          "qkv_proj": ATTENTION,
          # where blocks are small enough
          "q_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


def generated(model: Any, **options: Any) -> list[list[int]]:
    with LLM(model, **OPTIONS | options) as llm:
        return token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def expected(model: Any) -> list[list[int]]:
    return [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


def check_weights(llm: LLM, model: Any) -> None:
    """The engine's decoder has the weights of transformers' model, in its own dtype."""
    wanted = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
    for name, weight in checkpoint_tensors(llm.engine.runner.model).items():
        assert torch.equal(weight, wanted[name].to(weight.dtype)), name


def modules_of(llm: LLM) -> list[Any]:
    """All modules of the model, and those of the engine's in place of transformers', once each."""
    model: Any = llm.engine.runner.model
    parts = [model.layers, getattr(model, "head", model), model]
    return [*dict.fromkeys(module for part in parts for module in part.modules())]


def packed_of(llm: LLM, kind: type = QuantizedLinear) -> list[Any]:
    return [each for each in modules_of(llm) if isinstance(each, kind)]


def num_packed(llm: LLM) -> int:
    """How many matrices of linears are packed. It depends on the CPU how many of them are one."""
    return sum(len(each.weights) for each in packed_of(llm))


def check_packed(own: Any, right: Any) -> None:
    """Packed weights are those of the same modules of transformers' model, to the bit."""
    for name, module in own.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            assert not module._parameters["weight"].numel()
            wanted = weight_of(right, name)
            assert torch.equal(module.weight, wanted.to(module.weight.dtype)), name


def weight_of(model: Any, name: str) -> Tensor:
    """The weight of a module of transformers' model, or of several side by side; an expert has a
    part of one."""
    whole, _, own = name.partition(".experts.experts.")
    if not own:
        path, _, last = name.removesuffix(".linear").rpartition(".")
        owner = model.get_submodule(path)
        is_one = name.endswith(last) and hasattr(owner, last)
        parts = [last] if is_one else JOINED[last]
        return torch.cat([getattr(owner, part).weight for part in parts])
    number, matrix = own.split(".")
    return getattr(model.get_submodule(f"{whole}.experts"), matrix)[int(number)]


def experts_of(llm: LLM) -> tuple[list[Any], list[Any]]:
    """The linears of all experts, and the calls of each layer's."""
    # only here: other tests need no such feature
    from nanoengine_extras.models.experts import Experts
    layers = [each for each in modules_of(llm) if isinstance(each, Experts)]
    return [linear for layer in layers for each in layer.experts
            for linear in (each.gate_up_proj, each.down_proj)], [each.calls for each in layers]
