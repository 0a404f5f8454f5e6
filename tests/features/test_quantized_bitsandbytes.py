"""Models in NF4, FP4 and INT8, as bitsandbytes stores them. The tables are those of
bitsandbytes 0.50.2, which dequantized such weights to the same bits."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy_reference
from quantizing import (
    BFLOAT16, OPTIONS, PROMPTS, change_config, check_damages, compare_products, expected, generated,
    linears_of)
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import LLM
from nanoengine_extras.cpu import compiling
from nanoengine_extras.models.quantized import bitsandbytes_files, formulas
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.models.quantized.stored import Index

NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0])
FP4 = torch.tensor([0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25])
TABLES = {"nf4": NF4, "fp4": torch.cat((FP4, -FP4))}


def rounded(weight: Tensor, kind: str, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a weight, by the ends of their names, and what they stand for."""
    blocks = weight.flatten().view(-1, 64)
    largest = blocks.abs().amax(1)
    parts: dict[str, Tensor] = {".quant_map": TABLES[kind].clone()}
    entries: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32",
                               "shape": [*weight.shape]}
    scales = parts[".absmax"] = largest
    if is_nested:
        offset = float(largest.mean())
        table = torch.linspace(-1, 1, 256)
        centered = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256))
        above = centered.view(-1, 256).abs().amax(1)
        numbers = (centered / above.repeat_interleave(256) * 127.5 + 127.5).round()
        parts[".absmax"] = numbers[:len(largest)].to(torch.uint8)
        parts |= {".nested_absmax": above, ".nested_quant_map": table}
        scales = table[parts[".absmax"].long()] * above.repeat_interleave(256)[:len(largest)]
        scales = scales + offset
        entries |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    numbers = ((blocks / scales[:, None])[..., None] - TABLES[kind]).abs().argmin(-1)
    flat = numbers.flatten().to(torch.uint8)
    parts[""] = (flat[::2] << 4 | flat[1::2])[:, None]
    parts[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(
        [*json.dumps(entries).encode()], dtype=torch.uint8)
    return parts, (TABLES[kind][numbers] * scales[:, None]).view(weight.shape)


def write(source: Path, folder: Path, model: Any, kind: str, is_nested: bool) -> Path:
    """Rounds the linears of a model, and its copy. Parts of a weight are in two files."""
    files: list[dict[str, Tensor]] = [{}, {}]
    for name, weight in model.state_dict().items():
        if "_proj.weight" not in name:
            files[0][name] = weight
            continue
        parts, found = rounded(weight, kind, is_nested)
        weight.copy_(found)
        for number, (end, part) in enumerate(parts.items()):
            files[number % 2][name + end] = part
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for number, each in enumerate(files):
        save_file({name: part.contiguous() for name, part in each.items()},
                  folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{number}.safetensors" for number, each in enumerate(files)
             for name in each}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    change_config(folder, quantization_config=dict(
        quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False,
        bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_nested))
    return folder


@pytest.fixture
def make_4_bits(make_model, tmp_path):
    def made(kind: str, is_nested: bool = True, architecture: str = "Llama",
             **changes: Any) -> tuple[Path, Any]:
        source, model = make_model(architecture, **dict(
            hidden_size=128, intermediate_size=192, num_hidden_layers=2, head_dim=64) | changes)
        return write(Path(source), tmp_path / "4 bits", model, kind, is_nested), model
    return made


@pytest.mark.parametrize("kind, is_nested", [("nf4", True), ("nf4", False), ("fp4", True)])
def test_tokens_are_those_of_the_model(make_4_bits, kind, is_nested):
    folder, model = make_4_bits(kind, is_nested)
    assert generated(folder, max_num_batched_tokens=24, max_num_seqs=2) == expected(model)
    assert generated(folder, kernels=False) == expected(model)
    with LLM(folder, **OPTIONS) as llm:
        assert len(linears_of(llm)) == (8 if HAS_TABLES else 0)
        layer, own = llm.engine.runner.model.layers[1], model.model.layers[1]
        assert torch.equal(layer.mlp.down_proj.weight, own.mlp.down_proj.weight)


def test_in_bfloat16(make_4_bits):
    folder, _ = make_4_bits("nf4")
    found = [generated(folder, **BFLOAT16 | options) for options in (
        {}, dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1))]
    assert all(each == found[0] for each in found)


def test_a_family_of_transformers(make_4_bits):
    folder, model = make_4_bits("nf4", architecture="Olmo2")
    assert generated(folder) == [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


def test_blocks_that_go_on_in_the_next_row(make_4_bits, caplog):
    """Such weights have no packed form, and the log says so."""
    folder, model = make_4_bits("nf4", intermediate_size=160)
    compiling.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert generated(folder) == expected(model)
    assert "some matrices are dequantized" in caplog.text


@pytest.mark.skipif(not HAS_TABLES, reason="other CPUs have no packed form of it")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_have_the_bits_of_dequantized_weights(kind, dtype):
    """With scales of 24 bits: each product with a number is rounded once."""
    weight = formulas.Grouped(
        torch.randint(16, (192, 512), dtype=torch.uint8), torch.rand(192, 8),
        groups=torch.arange(512) // 64, bits=4, values=TABLES[kind])
    compare_products([weight], dtype, (1, 2, 3, 5, 7, 40), bias=torch.randn(192))


def test_a_part_is_missing(make_4_bits):
    folder, _ = make_4_bits("nf4")
    tensors = load_file(folder / "model-0.safetensors")
    name = "model.layers.1.mlp.down_proj.weight.nested_absmax"
    parts = [key for key in tensors if key.startswith(name.removesuffix(".nested_absmax"))]
    for key in parts:
        del tensors[key]
    save_file(tensors, folder / "model-0.safetensors")
    with pytest.raises(ValueError, match="1.mlp.down_proj"):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize("is_nested", [True, False])
def test_damaged_parts(tmp_path, is_nested):
    parts, _ = rounded(torch.randn(256, 512), "nf4", is_nested)
    parts = {f"weight{name}": each for name, each in parts.items()}
    scales = ["absmax", "quant_map", *["nested_absmax", "nested_quant_map"] * is_nested]
    check_damages(tmp_path, dict(quant_method="bitsandbytes"), parts, [
        f"weight.{name}" for name in scales])


def test_names_of_other_tensors(make_4_bits):
    folder, model = make_4_bits("nf4")
    files = sorted(folder.glob("*.safetensors"))
    opened = bitsandbytes_files.open_bitsandbytes(Index(files), files[0])
    opened |= bitsandbytes_files.open_bitsandbytes(Index(files), files[1])
    assert {name for name in opened} == {*model.state_dict()}


# ---------------------------------------------------------------------------------------- INT8


@pytest.fixture
def make_8_bits(make_model, tmp_path):
    """changes: further tensors of the file; those that are None are removed."""
    def made(architecture: str = "Llama", changes: Any = ()) -> tuple[Path, Any]:
        source, model = make_model(architecture, num_hidden_layers=2)
        folder = shutil.copytree(source, tmp_path / "8 bits")
        tensors: dict[str, Any] = load_file(folder / "model.safetensors")
        for name, weight in model.state_dict().items():
            if "_proj.weight" in name:
                largest = weight.half().abs().amax(1).float()
                numbers = (weight * 127 / largest[:, None]).round().clamp(-127, 127)
                tensors |= {name: numbers.to(torch.int8), f"{name}_format": torch.zeros(
                    (), dtype=torch.uint8), name.replace("weight", "SCB"): largest}
                # in the order of `int8_vectorwise_dequant`
                weight.copy_(numbers * largest[:, None] * 7.874015718698502e-3)
        tensors |= dict(changes)
        save_file({name: each for name, each in tensors.items() if each is not None},
                  folder / "model.safetensors", metadata={"format": "pt"})
        change_config(folder, quantization_config=dict(
            quant_method="bitsandbytes", load_in_8bit=True, load_in_4bit=False,
            llm_int8_threshold=6.0))
        return folder, model
    return made


@pytest.mark.parametrize("architecture", ["Llama", "Olmo2"])
def test_the_tokens_of_int8(make_8_bits, architecture, caplog):
    folder, model = make_8_bits(architecture)
    assert generated(folder) == [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    assert "load_in_8bit of the model's quantization_config are left out" in caplog.text
    file = folder / "model.safetensors"
    opened = bitsandbytes_files.open_bitsandbytes(Index([file]), file)
    for name, weight in model.state_dict().items():
        assert torch.equal(opened[name].read(), weight)


@pytest.mark.parametrize("architecture", ["Llama", "Olmo2"])
@pytest.mark.parametrize("end, value, message", [
    ("SCB", None, "down_proj.weight in .*SCB"),
    ("weight_format", torch.tensor(2), "down_proj.weight_format=2 .* must be 0")])
def test_damaged_int8(make_8_bits, architecture, end, value, message):
    folder, _ = make_8_bits(architecture, {f"model.layers.1.mlp.down_proj.{end}": value})
    with pytest.raises(ValueError, match=message):
        LLM(folder, **OPTIONS)


def test_damaged_scales_of_int8(tmp_path):
    parts = dict(weight=torch.ones(64, 32, dtype=torch.int8), SCB=torch.rand(64))
    check_damages(tmp_path, dict(quant_method="bitsandbytes"), parts, ["SCB"])
