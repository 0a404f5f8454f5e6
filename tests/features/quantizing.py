"""GGUF files and packed weights for tests: random ones in every format."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import random_prompts
from formats import (  # noqa: F401
    BFLOAT16, GREEDY, OPTIONS, PROMPTS, REAL, SCHEDULES, TABLES, expected, generated)
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu.compiling import Program
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.gguf import files as gguf_files
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.models.gguf import numbers as gguf_numbers
from nanoengine_extras.models.quantized import formulas
from nanoengine_extras.models.quantized.loading import pack

# K-quants have groups of 256 inputs
SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64)
Entries = dict[str, Any]
EMPTY: Any = MappingProxyType({})
# the beginnings of the names of entries without that of the architecture
GENERAL = "general.", "split.", "tokenizer."
# where a block of a type has its scales in float16, and how large they are in a test
SCALES = {"Q2_K": ((80, 82), 1e-3), "Q3_K": ((108,), 1e-4), "Q4_K": ((0, 2), 1e-4),
          "Q5_K": ((0, 2), 1e-4), "Q6_K": ((208,), 1e-4), "IQ4_NL": ((0,), 1e-4),
          "IQ4_XS": ((0,), 1e-5), **dict.fromkeys(gguf_header.GRIDS, ((0,), 1e-4)),
          "IQ1_S": ((0,), 1e-3), "IQ1_M": ((), 0)}


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


# in whose files halves of a head are pairs
PERMUTED = ("smollm3", "arcee", "granite", "olmo", "mistral3", "granitemoe", "llama")
# of these, the converter adds 1 to norms
ADDED = ("gemma", "gemma2", "gemma3", "nemotron")
ENTRIES = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
           "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
           "attention.head_count": "num_attention_heads",
           "attention.head_count_kv": "num_key_value_heads",
           "attention.sliding_window": "sliding_window"}
EPSILONS = ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
# the names that checkpoints have where transformers has another, and those that have none
OTHERS = {"block_sparse_moe.router.": "block_sparse_moe.router.layer.",
          "layer_scalar": "layer_scalar.weight", "self_attn.sinks": "self_attn.sinks.weight",
          "correct_output_scale": "correct_output_scale.weight",
          "mlp.e_score_correction_bias": "mlp.e_score_correction.bias",
          "gate.e_score_correction_bias": "e_score_correction.bias",
          "gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction.bias"}
NAMELESS = {"router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale"}
# what stays in floating point
FLOATS = ("norm", "router", "mlp.gate.", "bias", "_coefs", "wpe", "shared_expert_gate")


def parts(place: str, weight: Tensor, arch: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file that have the numbers of a weight: views, in their order."""
    module, _, own = place.rpartition(".")
    heads = {} if arch not in PERMUTED else {
        "q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(module.rpartition(".")[2])
    if count:
        yield place, weight.view(count, 2, -1, *weight.shape[1:]).transpose(1, 2)
    elif place.endswith("kv_b_proj.weight"):
        keys, values = weight.view(config.num_attention_heads, -1, weight.shape[1]).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield place.replace("kv_b", "k_b"), keys.mT
        yield place.replace("kv_b", "v_b"), values
    elif arch == "gpt-oss" and ".experts." in place:
        # gates and ups take turns
        kinds = own.partition("_proj")[0].split("_")
        matrices, end = (weight, "bias") if own.endswith("_bias") else (weight.mT, "weight")
        for number, kind in enumerate(kinds):
            yield f"{module}.{kind}_proj.{end}", matrices[:, number::len(kinds)]
    elif own == "gate_up_proj" and arch != "gemma4":
        for part, each in zip(("gate", "up"), weight.chunk(2, dim=1)):
            yield f"{module}.{part}_proj.weight".replace("block_sparse_moe", "mlp"), each
    elif own in ("gate_up_proj", "down_proj"):
        yield f"{place}.weight".replace("block_sparse_moe", "mlp"), weight
    elif "shared_mlp.input_linear" in place:
        for part, each in zip(("gate", "up"), weight.chunk(2)):
            yield place.replace("shared_mlp.input_linear", f"mlp.shared_expert.{part}_proj"), each
    elif ".0.mlp.shared_expert_gate" in place:
        # as some releases of the converter store it
        yield place, weight[0]
    else:
        yield place, weight.T if arch == "gpt2" and ".c_" in place and weight.ndim == 2 else weight


class Writer(gguf.GGUFWriter):
    """Writes tensors as llama.cpp's converter; they get the dequantized numbers of the file.
    most: tensors of a file, if there are several"""

    def __init__(self, path: Path, arch: str, count: int, kinds: list[str], most: int) -> None:
        super().__init__(path, arch, split_max_tensors=most)
        known = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[arch]
        self.names = gguf.get_tensor_name_map(known, count)
        self.types = [gguf.GGMLQuantizationType[kind] for kind in kinds]
        self.count = 0
        # what is in one tensor, or in the header: three matrices; numbers of activations
        self.matrices: dict[str, list[Tensor]] = {}
        self.numbers: dict[str, list[float]] = {}

    def own_name(self, place: str) -> str:
        for given, other in NAMELESS.items():
            if place.endswith(given):
                return f"blk.{place.split('.')[2]}.{other}"
        for given, other in OTHERS.items():
            if place.endswith(given) or given.endswith(".") and given in place:
                place = place.replace(given, other)
        found = self.names.get_name(place, try_suffixes=(".weight", ".bias"))
        assert found, place
        return found

    def put(self, place: str, weight: Tensor) -> None:
        is_matrix = weight.ndim >= 2 and not any(each in place for each in FLOATS)
        kind = self.types[self.count % len(self.types)] if is_matrix else (
            gguf.GGMLQuantizationType.F32)
        self.count += 1
        added = np.float32(place.endswith("norm.weight") and self.arch in ADDED)
        rows = weight.reshape(-1, weight.shape[-1]).numpy() + added
        stored = in_gguf(rows, kind.name, self.count)
        weight.copy_(torch.from_numpy(gguf.dequantize(stored, kind) - added).view(weight.shape))
        shape = [*weight.shape[:-1], stored.shape[-1]]
        # the halves of a head were reordered, its rows are one dimension again
        if weight.ndim == 4:
            shape = [-1, shape[-1]]
        elif weight.ndim == 3 and not is_matrix:
            shape = [-1]
        self.add_tensor(self.own_name(place), stored.reshape(shape), raw_dtype=kind)

    def put_all(self, place: str, weight: Tensor, config: Any) -> None:
        if ".altup_" in place:
            name, number, _ = place.rsplit(".", 2)
            self.matrices[name] = [*self.matrices.get(name, []), weight]
            if number == "2":
                self.put(f"{name}.weight", together := torch.stack(self.matrices[name]))
                for each, stored in zip(self.matrices[name], together):
                    each.copy_(stored)
        elif "act_fn." in place:
            self.numbers.setdefault(f"xielu.{place.split('.')[-1]}", []).append(weight.item())
        elif not (config.tie_word_embeddings and place == "lm_head.weight"):
            for name, part in parts(place, weight, self.arch, config):
                self.put(name, part)


def close(writer: gguf.GGUFWriter) -> None:
    """Writes what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def entries_of(config: Any, own: Entries) -> Entries:
    """What the file says, of all families and of its own."""
    found, rope = dict(ENTRIES), getattr(config, "rope_parameters", None) or {}
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        found["rope.freq_base"] = theta
    size = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    found |= {"attention.key_length": size, "attention.value_length": size}
    if "partial_rotary_factor" in rope:
        found["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
    if hasattr(config, "rms_norm_eps"):
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    else:
        known = [getattr(config, each) for each in EPSILONS if hasattr(config, each)]
        found["attention.layer_norm_epsilon"] = [*known, 1e-5][0]
    if not getattr(config, "sliding_window", None):
        del found["attention.sliding_window"]
    return {entry: value for entry, value in (found | own).items() if value is not None}


@torch.no_grad()
def write(model: Any, path: Path, arch: str, kinds: list[str], own: Entries,
          tensors: Entries, most: int = 0, edit: Any = None) -> None:
    """own: entries of the file that not all families have; tensors: further ones; edit: changes
    what is written"""
    config = model.config
    writer = Writer(path, arch, config.num_hidden_layers + 1, kinds, most)
    add_entries(writer, config, entries_of(config, own))
    for place, numbers in tensors.items():
        writer.add_tensor(place, np.array(numbers, np.float32))
    for place, weight in model.state_dict().items():
        writer.put_all(place, weight, config)
    for entry, of_layers in writer.numbers.items():
        writer.add_array(entry, of_layers)
    if edit:
        edit(writer)
    close(writer)


@pytest.fixture
def make_gguf(make_model, tmp_path):
    """Writes a small random model as GGUF files, as llama.cpp's tools do.

    Returns the path of the first, and transformers' model with the dequantized weights.

    kinds: the types of its matrices, in turn; entries, tensors: further ones
    most, edit: see `write`
    """

    def make(kinds: list[str], architecture: str = "Qwen3", entries: Entries = EMPTY,
             tensors: Entries = EMPTY, most: int = 0, edit: Any = None,
             **changes: Any) -> tuple[Path, transformers.PreTrainedModel]:
        _, model = make_model(architecture, **SIZES | changes)
        arch = architecture.lower().replace("mistral", "llama")
        write(model, tmp_path / "model.gguf", arch, kinds, dict(entries), tensors, most, edit)
        return min(tmp_path.glob("*.gguf")), model

    return make


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
    "FP8": (8, 128, "wide", False, False, False, formulas.E4M3),
    # powers of two; scales of 24 bits, with which each product with a number is rounded once
    "MXFP4": (4, 32, "powers", False, False, False, formulas.MXFP4),
    # other CPUs have no packed form of these
    **{name: (4, 64, "float32", False, False, False, table)
       for name, table in TABLES.items() if HAS_TABLES}}


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
        if storage == "powers":
            return torch.exp2(torch.randint(-7, 2, size)).to(torch.float8_e8m0fnu)
        if storage == "float32":
            return torch.rand(size)
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
        name = entry if entry.startswith(GENERAL) else f"{writer.arch}.{entry}"
        value = getattr(config, given, given) if isinstance(given, str) else given
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
                    str: writer.add_string, list: writer.add_array}[type(value)]
        add(name, value)


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
