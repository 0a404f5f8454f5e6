"""Quantized models: weights to the bit as the formats define them, tokens as transformers generates
them with these weights, and what is refused, each for its reason."""

import copy
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, check_refused, greedy_reference, slow, token_ids
from fake_gpu import FakeGpu
from formats import (
    BFLOAT16, GREEDY, OPTIONS, PROMPTS, check_weights, expected, generated, in_words,
    make_quantized, packed_of)
from quantizing import (
    PACKED, REAL, SCALES, SCHEDULES, close, compare_products, draw, logprobs_of, make_gguf,
    num_bytes)
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import LLM
from nanoengine.config import EngineConfig
from nanoengine_extras.models import quantized
from nanoengine_extras.models.sources import find_model
from nanoengine_extras.running import strict as memory
from nanoengine_extras.models.quantized.loading import pack
from nanoengine_extras.cpu.packed import PackedWeight, QuantizedLinear
from nanoengine_extras.cpu.packed.layout import padding
from nanoengine_extras.cpu.packed.order import HAS_TABLES
from nanoengine_extras.cpu.vectors import has
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.models.gguf import numbers as gguf_numbers
from nanoengine_extras.models.quantized import formulas, loading

fixtures = make_gguf, make_quantized


# ------------------------------------------------------------------------------------ GGUF

def fuse_qkv(writer: gguf.GGUFWriter) -> None:
    """As the option of llama.cpp's converter with this name: q, k and v are one tensor."""
    (tensors,) = writer.tensors
    for name in [each for each in tensors if "attn_q." in each]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        writer.add_tensor(name.replace("attn_q", "attn_qkv"),
                          np.concatenate([each.tensor for each in parts]), raw_dtype=parts[0].dtype)


MANY = ["Q8_0", "Q6_K", "Q4_1", "F16", "Q5_0"]


# of these types, the fast tests read single weights: see `test_a_packed_weight_of_gguf`
SLOW = {*gguf_numbers.SIZES} - {"Q4_0", "Q4_K", "Q6_K"}


@pytest.mark.parametrize("kinds, architecture, changes", [
    *((slow if kind in SLOW else pytest.param)([kind], "Qwen3", {}) for kind in gguf_header.TYPES),
    (MANY, "Llama", {}), (MANY, "Llama", dict(attention_bias=True, mlp_bias=True)),
    (MANY, "Llama", dict(head_dim=32)), (MANY, "Mistral", dict(sliding_window=None)),
    (MANY, "Qwen2", {}), (MANY, "Qwen3", dict(tie_word_embeddings=True)),
    # llama.cpp takes a list in place of a number
    (["Q8_0"], "Llama", dict(entries={
        "attention.head_count": [4, 4], "attention.head_count_kv": [2, 2],
        "feed_forward_length": [512, 512]})),
    (["Q8_0"], "Llama", dict(attention_bias=True, edit=fuse_qkv)),
    (["Q8_0"], "Qwen2", dict(edit=fuse_qkv)), (["Q8_0"], "Qwen3", dict(edit=fuse_qkv))])
def test_every_type_and_family_of_gguf(make_gguf, kinds, architecture, changes):
    """Types are mixed, also within projections that are fused; rows of q and k are reordered. A
    weight is its dequantized value in the model's dtype."""
    path, model = make_gguf(kinds, architecture, **changes)
    for dtype in ("bfloat16", "float32"):
        with LLM(path, kernels=False, **OPTIONS | dict(dtype=dtype)) as llm:
            check_weights(llm, model)
    assert generated(path) == expected(model)


def test_a_gguf_in_several_files(make_gguf):
    """The first one is given, or a folder with nothing else; their names can be in capitals."""
    path, model = make_gguf(["Q8_0"], most=8)
    right = expected(model)
    for end in (".gguf", ".GGUF"):
        for each in path.parent.glob("*.gguf"):
            each.rename(each.with_suffix(end))
        for given in (path.with_suffix(end), path.parent):
            assert generated(given) == right
    path.with_name("model-00002-of-00004.GGUF").unlink()
    check_refused("there is no file .*00002-of-00004.GGUF: it must be", LLM, given)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_messages_about_a_file_beside_a_gguf(tmp_path, name):
    """They name the folder that was given, or one whose name says which it was."""
    (folder := tmp_path / "my-model").mkdir()
    shutil.copy(REAL, folder)
    (folder / name).write_text("{")
    check_refused("my-model", LLM, folder, **OPTIONS)


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As in `LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    found = []
    for i in range(0, head_dim, 2):
        wave = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / wave - 1) / (4 - 1)
        found.append(1 if wave < 8192 / 4 else factor if wave > 8192 else 1 / (
            (1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("rope, entries", [
    (dict(rope_type="linear", factor=4.0),
     {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
     {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
      "rope.scaling.original_context_length": 128}),
    # as llama.cpp takes them: "linear" if there is no type, the name of old files, no factor, the
    # context of the model
    (dict(rope_type="linear", factor=4.0), {"rope.scaling.factor": 4.0}),
    (dict(rope_type="linear", factor=4.0), {"rope.scale_linear": 4.0}),
    (dict(rope_type="linear", factor=1.0), {"rope.scaling.type": "linear"}),
    (dict(rope_type="linear", factor=1.0),
     {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    (dict(rope_type="linear", factor=1.0), {"rope.scaling.type": "yarn"}),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=16.0,
          beta_slow=2.0),
     {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
      "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0})])
def test_the_positions_of_a_gguf(make_gguf, rope, entries):
    path, model = make_gguf(["F32"], "Qwen2", entries=entries,
                            rope_parameters=rope | dict(rope_theta=10000.0))
    assert generated(path) == expected(model)
    for name, value in rope.items():
        assert config_of(path).rope_parameters[name] == value


def config_of(path) -> transformers.PretrainedConfig:
    with LLM(path, **OPTIONS) as llm:
        return llm.model_config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_positions_of_llama_3(make_gguf, factor):
    """Their parameters come back from the factors, the only ones that the file has."""
    rope = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192, rope_theta=500000.0)
    factors = llama3_factors(64, 500000.0, factor)
    path, model = make_gguf(["F32"], "Llama", rope_parameters=rope,
                            tensors={"rope_freqs.weight": factors})
    # whatever the caller's default device is
    with torch.device("meta"):
        assert config_of(path).rope_parameters == rope
    assert generated(path) == expected(model)
    path, _ = make_gguf(["F32"], "Llama", rope_parameters=rope,
                        tensors={"rope_freqs.weight": factors * np.float32(1.1)})
    check_refused(r"rope_freqs.weight=.* must be those of Llama 3", LLM, path)


@pytest.mark.parametrize("entry, value, message", [
    ("expert_count", 8, "expert_count=8 is not accepted: it must be one of .0."),
    ("attention.sliding_window", 128, "attention.sliding_window=128"),
    ("rope.dimension_count", 32, "rope.dimension_count=32 .* must be one of .64."),
    ("rope.scaling.attn_factor", 0.5, "rope.scaling.attn_factor=0.5"),
    ("rope.scaling.type", "longrope", "rope.scaling.type='longrope'"),
    ("rope.scaling.yarn_attn_factor", 0.5, "rope.scaling.yarn_attn_factor=0.5"),
    ("rope.scaling.yarn_ext_factor", 0.5, "rope.scaling.yarn_ext_factor=0.5"),
    ("rope.scaling.yarn_log_multiplier", 0.5, "rope.scaling.yarn_log_multiplier=0.5"),
    ("attention.head_count", 0, "attention.head_count=0 .* a number above 0"),
    ("attention.head_count", "4", "attention.head_count='4' .* a number above 0"),
    ("attention.head_count_kv", [2, 4],
     r"attention.head_count_kv=.2, 4. .* the same for all layers"),
    ("nextn_predict_layers", "1",
     "qwen3.nextn_predict_layers='1' is not accepted: it must be a number"),
    ("rope.scaling.type", 2, "qwen3.rope.scaling.type=2 .* must be a text"),
    ("tokenizer.ggml.eos_token_ids", 2, "tokenizer.ggml.eos_token_ids=2 .* must be a list"),
    ("split.no", 1, "split.no=1 is not accepted: it must be one of .0."),
    ("general.type", "adapter", "general.type='adapter'")])
def test_a_gguf_of_another_model(make_gguf, entry, value, message):
    path, _ = make_gguf(["Q8_0"], entries={entry: value})
    check_refused(f"^model='{path}': the file's {message}", LLM, path)


@pytest.mark.parametrize("architecture, options, message", [
    ("llama", dict(endianess=gguf.GGUFEndian.BIG), "byte order='big' .* one of .'little'."),
    ("mamba", {}, "general.architecture='mamba' .*'llama', 'qwen2', 'qw.*; otherwise it must be "
                  "the original model, which quantization='int8'")])
def test_another_kind_of_file(tmp_path, architecture, options, message):
    close(gguf.GGUFWriter(path := tmp_path / "a.gguf", architecture, **options))
    check_refused(message, LLM, path)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_a_type_that_is_refused(make_gguf, kind):
    path, _ = make_gguf(["Q8_0"])
    header = gguf_header.Header([path])
    header.tensors["blk.0.ffn_up.weight"] = header.tensors["blk.0.ffn_up.weight"]._replace(
        tensor_type=gguf.GGMLQuantizationType[kind])
    check_refused(f"type {kind} are not read: .* such as Q4_K_M", header.check)


def test_a_file_that_is_no_gguf(tmp_path, bundled):
    whole = REAL.read_bytes()
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for broken in (whole[:-5000], whole[:200], b"", b"GGUF" + b"\xff" * 99, b"not a model"):
        path.write_bytes(broken)
        check_refused(f"^model='{path}': .* not a GGUF file: download", LLM, path)
    check_refused(f"^model='{other}'", LLM, other)
    check_refused(f"^tokenizer='{other}'", LLM, bundled, tokenizer=str(other))
    other.write_text("another")
    check_refused("several models: .* must be the path of one of a.gguf, b", LLM, tmp_path)


def test_a_header_is_read_from_an_array():
    found, right = gguf_header.Reader(REAL), gguf.GGUFReader(REAL)
    assert {type(each) for field in found.fields.values() for each in field.parts} == {np.ndarray}
    for name, field in right.fields.items():
        assert found.fields[name].contents() == field.contents()
    for tensor, own in zip(right.tensors, found.tensors, strict=True):
        assert tensor.name == own.name and tensor.data_offset == own.data_offset
        assert np.array_equal(tensor.data, own.data)


def test_the_folder_of_a_gguf_is_a_model():
    """As `bench.py` gives it to several engines."""
    folder = find_model(REAL, EngineConfig(REAL), "model")
    assert find_model(folder, EngineConfig(folder), "model") == folder
    assert generated(folder) == generated(REAL)


def test_the_images_of_a_model_are_no_model(make_gguf):
    """A folder with an mmproj file beside the model has one model; alone, the file is named."""
    path, model = make_gguf(["Q8_0"])
    writer = gguf.GGUFWriter(other := path.with_name("model-mmproj-f16.gguf"), "clip")
    writer.add_string("general.type", "mmproj")
    close(writer)
    assert generated(path.parent) == expected(model)
    path.unlink()
    for given in (path.parent, other):
        check_refused("general.type='mmproj' is not accepted", LLM, given)


def test_a_tensor_of_gguf_that_is_missing(make_gguf, monkeypatch):
    path, _ = make_gguf(["Q8_0"])
    monkeypatch.setitem(gguf_header.NAMES, "ffn_up", "mlp.other")
    check_refused("layers.0.mlp.other.weight", LLM, path)


TEXTS = ["12 + 34 =", "hello wörld <|im_end|> foo\n\n  x", "Once upon a time, there was 1"]


def test_a_real_file(bundled):
    # whose rows are in order
    plain = {tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
             for tensor in gguf.GGUFReader(REAL).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    config = transformers.Qwen3Config(
        vocab_size=867, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.load_state_dict({name: plain[names.get_name(name, (".weight",))]
                           for name in model.state_dict()})
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    with LLM(REAL, **OPTIONS) as llm:
        for prompt in TEXTS:
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            assert output.prompt_token_ids == tokenizer(prompt).input_ids
            assert output.outputs[0].token_ids == greedy_reference(
                model, output.prompt_token_ids, 12)
            # half a character at the end is left out
            text = tokenizer.decode(output.outputs[0].token_ids)
            assert output.outputs[0].text == text.rstrip("\ufffd")
        assert llm.inputs.eos_tokens == {0: 0, 2: None}
        chat = llm.chat([{"role": "user", "content": "12"}], GREEDY, use_tqdm=False)[0]
        assert chat.prompt == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"


def test_tokenizers(bundled, make_gguf, tmp_path):
    """The file's own, that of a folder, that of another file, or none."""
    path, _ = make_gguf(["Q8_0"], vocab_size=867)
    template = "{{ messages[0].content }} of the folder"
    shutil.copytree(bundled, folder := tmp_path / "beside",
                    ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(template)
    shutil.copy(path, folder)
    ids = transformers.AutoTokenizer.from_pretrained(bundled)(TEXTS[1]).input_ids
    for tokenizer in (folder, REAL, bundled):
        with LLM(path, tokenizer=str(tokenizer), **OPTIONS) as llm:
            assert llm.get_tokenizer()(TEXTS[1]).input_ids == ids
    with LLM(REAL, tokenizer=str(folder), **OPTIONS) as llm:
        chat = llm.chat([{"role": "user", "content": "12"}], GREEDY, use_tqdm=False)[0]
        assert chat.prompt == "12 of the folder"
    # there is none in this file
    for options in ({}, dict(skip_tokenizer_init=True)):
        with LLM(path, **OPTIONS, **options) as llm, pytest.raises(ValueError, match="tokenizer"):
            llm.generate("a text", use_tqdm=False)


def test_a_folder_with_a_gguf_and_a_config(make_gguf, bundled, tmp_path):
    """Its config.json, tokenizer and generation_config.json count, its safetensors first."""
    path, model = make_gguf(["Q8_0"], vocab_size=867)
    folder = tmp_path / "folder"
    model.config.max_position_embeddings = 123
    model.config.save_pretrained(folder)
    path.rename(folder / path.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(bundled) / name, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 9}')
    with LLM(folder, **OPTIONS) as llm:
        assert llm.model_config.max_position_embeddings == 123
        assert llm.get_default_sampling_params().temperature == 0.25
        assert llm.inputs.eos_tokens == {2: None, 9: 9}
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)
    model.save_pretrained(folder)
    assert not hasattr(config_of(folder), "quantization_config")


def test_a_folder_whose_config_says_only_the_family(tmp_path):
    """As many folders of GGUF files: the rest is that of the file. The folder's template comes
    before that of the file, whose tokenizer is written elsewhere: the folder stays as it is."""
    shutil.copy(REAL, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    (tmp_path / "tensors.json").write_text("[]")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.get_tokenizer().chat_template == "of the folder"
        assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found, right = (each.to_dict() for each in (llm.model_config, config_of(REAL)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # where each was written
    assert found.pop("_name_or_path") != right.pop("_name_or_path") and found == right


def test_a_tokenizer_that_is_not_read(make_gguf, bundled):
    """transformers does not know its kind."""
    path, model = make_gguf(["Q8_0"], vocab_size=867, entries={
        "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a", "b"]})
    with pytest.raises(ValueError, match=f"^model='{path}': its tokenizer is not read: it must be "
                       r"replaced by tokenizer=….*'rwkv'"):
        LLM(path)
    assert generated(path, tokenizer=bundled) == expected(model)


# -------------------------------------------------------------------------- rounded when loaded


def rounded_plainly(weight: Tensor, bits: int) -> Tensor:
    """One group after the other, as llama.cpp's `quantize_row_q8_0_ref` and `…_q4_0_ref`."""
    found = torch.empty_like(weight)
    for row, out in zip(weight, found):
        for start in range(0, len(row), 32):
            group = row[start:start + 32]
            largest = max(group.tolist(), key=abs)
            scale = np.float32(abs(largest)) / np.float32(127)
            if bits == 4:
                scale = np.float32(largest) / np.float32(-8)
            scale = np.float32(np.float16(scale))
            most = 2 ** (bits - 1)
            numbers = torch.zeros(len(group))
            if scale:
                numbers = (group * float(np.float32(1) / scale)).round().clamp(-most, most - 1)
            out[start:start + 32] = numbers * float(scale)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inner", [96, 100])
def test_weights_are_rounded(make_model, bits, inner):
    """Of matrices, tied ones once; in groups of 32 inputs, of which the last can be smaller."""
    folder, model = make_model(intermediate_size=inner, tie_word_embeddings=True)
    for name, weight in model.state_dict().items():
        if weight.ndim == 2 and name != "lm_head.weight":
            weight.copy_(rounded_plainly(weight, bits))
    with LLM(folder, kernels=False, quantization=f"int{bits}", **OPTIONS) as llm:
        check_weights(llm, model)
    for options in ({}, dict(kernels=False)):
        assert generated(folder, quantization=f"int{bits}", **options) == expected(model)


def test_a_tensor_without_dimensions(tmp_path):
    """As Apertus has them."""
    save_file({"act_fn.beta": torch.tensor(3.5)}, file := tmp_path / "model.safetensors")
    assert quantized.choose_opener("int8", {}, tmp_path)(file)["act_fn.beta"].read() == 3.5


def test_words_of_3_bits():
    """As GPTQModel packs them: 32 numbers in three words."""
    # of the numbers 0 to 7, four times
    words = torch.tensor([-1996831096, -964101434, -87652102], dtype=torch.int32)
    found = formulas.unpack(words[:, None], 3, 0)
    assert found[:, 0].tolist() == [*range(8)] * 4
    assert torch.equal(in_words(found.T, 3)[0], words)


def test_rounded_zeros_and_the_largest_numbers():
    weight = torch.zeros(3, 64)
    weight[1, 5] = 1e-30
    weight[2] = torch.linspace(-100, 100, 64)
    for bits in (8, 4):
        found = formulas.rounded(weight, bits).dequantized()
        assert torch.equal(found, rounded_plainly(weight, bits)) and not found[:2].any()


def test_a_quantization_that_the_model_has_not(make_quantized):
    folder, model = make_quantized("awq")
    for name in ("awq", "awq_marlin"):
        assert generated(folder, quantization=name) == expected(model)
    assert generated(REAL, quantization="gguf") == generated(REAL)
    for path, value, method in ((folder, "gptq_marlin", "awq"), (REAL, "int4", "gguf")):
        check_refused(f"quantization='{value}' .* None or '{method}', since",
                      LLM, path, quantization=value, **OPTIONS)
    check_refused("quantization_config=.* must be None with load_fo", LLM, REAL,
                  load_format="dummy")


def test_without_its_package_a_gguf_is_refused(monkeypatch):
    for name in ("files", "header"):
        monkeypatch.delitem(sys.modules, f"nanoengine_extras.models.gguf.{name}")
        monkeypatch.delattr(f"nanoengine_extras.models.gguf.{name}")
    monkeypatch.setitem(sys.modules, "gguf", None)
    check_refused(f"^model='{REAL}' needs .* the package gguf", LLM, REAL)


def test_the_log_says_what_it_costs(tiny, caplog):
    size = (Path(tiny) / "model.safetensors").stat().st_size
    count = sum(tensor.numel() for tensor in load_file(Path(tiny) / "model.safetensors").values())
    options = OPTIONS | dict(dtype="bfloat16", quantization="int8")
    cases = (dict(kernels=False), True), (dict(dtype="float16"), True), ({}, False)
    for others, is_said in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nanoengine"):
            LLM(tiny, **options | others).close()
        dtype = others.get("dtype", "bfloat16")
        lines = [line for line in caplog.messages if "dequantized" in line]
        assert lines == is_said * [
            f"quantized weights are dequantized when they are loaded: {size / 2**20:.1f} MiB of "
            f"files become {2 * count / 2**20:.1f} MiB of {dtype}"]


@pytest.fixture
def given(make_quantized, make_gguf, bundled):
    """The path of a model, and the option with which its weights are quantized."""
    def find(name: str) -> tuple[Any, dict[str, str]]:
        if name in ("int8", "int4"):
            return bundled, dict(quantization=name)
        if name == "Q8_0":
            return make_gguf([name], "Llama")[0], {}
        return REAL if name == "Q4_K_M" else make_quantized(name)[0], {}

    return find


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["awq", "gptq act-order", "Q8_0", "int4"])
def test_several_ranks(given, name):
    """Each takes its part of the dequantized weights."""
    path, options = given(name)
    assert generated(path, tensor_parallel_size=2, **options) == generated(path, **options)


@pytest.mark.parametrize("name", ["awq", "Q4_K_M", "int8", "FP8"])
def test_on_a_gpu(given, name):
    """The same weights, whether they stay on the GPU or on the host."""
    path, options = given(name)
    plain = generated(path, **options)
    for more in ({}, dict(cpu_offload_gb=1.0)):
        with FakeGpu():
            assert generated(
                path, device="cuda", attention_backend="gather", **options, **more) == plain


# ------------------------------------------------------------- weights that stay packed, on a CPU


def rows_to_compare() -> list:
    return [(1, 2, 3, 5, 7, 24, 40), slow((*range(1, 41), 64, 100, 512))]


@pytest.mark.parametrize("num_rows", rows_to_compare(), ids=["few", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PACKED)
def test_products_have_the_bits_of_dequantized_weights(name, dtype, num_rows):
    weight = draw(192, 512, *PACKED[name])
    compare_products([weight], dtype, num_rows, bias=torch.randn(192))


@pytest.mark.parametrize("num_rows", rows_to_compare(), ids=["few", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [512, 1280])
def test_products_of_several_parts(dtype, num_rows, inputs):
    """Of one format each: queries, keys and values; gates and ups, which need no whole blocks."""
    names = ["Q4_K", "Q6_K", "Q4_0"]
    weights = [draw(rows, inputs, *PACKED[name]) for rows, name in zip((128, 64, 70), names)]
    compare_products(weights, dtype, num_rows)
    weights = [draw(100, inputs, *PACKED[name]) for name in names[:2]]
    compare_products(weights, dtype, num_rows, halves=2, bias=torch.randn(200))


def test_parts_that_do_not_fit_each_other(make_gguf, monkeypatch):
    """Their outputs fill no blocks, or their groups pad the inputs differently: dequantized, with a
    line in the log."""
    lines: list[str] = []
    monkeypatch.setattr("nanoengine_extras.models.quantized.loading.warn_once", lines.append)
    options = dict(num_attention_heads=2, num_key_value_heads=1, hidden_size=256, head_dim=32)
    path, model = make_gguf(["Q8_0"], "Qwen3", **options)
    with LLM(path, **OPTIONS) as llm:
        names = {name for name, module in llm.engine.runner.model.named_modules()
                 if module in packed_of(llm)}
        assert "layers.0.self_attn.qkv_proj" not in names
        assert "layers.0.self_attn.o_proj" in names
        assert any("some fused projections are dequantized" in line for line in lines)
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)
    assert padding(320, 128, torch.bfloat16) == 64
    assert padding(320, 32, torch.bfloat16) == 0


@pytest.mark.parametrize("inputs", [96, 100, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_inputs_that_fill_no_vector(inputs, bits):
    weight = formulas.rounded(torch.randn(70, inputs), bits)
    for dtype in (torch.bfloat16, torch.float32):
        compare_products([weight], dtype, (1, 3, 9))


def products_of_another_cpu() -> None:
    """Called in processes of their own."""
    for dtype in (torch.bfloat16, torch.float32):
        for name in PACKED:
            compare_products([draw(192, 512, *PACKED[name])], dtype, (1, 4, 6, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name, features", [
    ("haswell", "+avx,+avx2,+fma"), pytest.param(
        "skylake-avx512", "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd",
        marks=pytest.mark.skipif(not has("avx512f"), reason="this CPU has no AVX-512"))])
def test_products_on_other_cpus(name, features, tmp_path):
    """With kernels that are compiled for another CPU, in a process of its own."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "features")))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": name,
                   "PYTHONPATH": folders, "NUMBA_CPU_FEATURES": features}
    script = "import test_quantized; test_quantized.products_of_another_cpu()"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("kind", gguf_numbers.SIZES)
def test_a_packed_weight_of_gguf(kind):
    """To the bit as its own package dequantizes it, whatever the bytes are."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (70, 512 // block, size), dtype=np.uint8)
    for place in SCALES.get(kind, ((0, 2) if kind[-1] == "1" else (0,), 0))[0]:
        scales = rng.standard_normal(raw.shape[:2] + (1,)) * 1e-3
        raw[:, :, place:place + 2] = scales.astype(np.float16).view(np.uint8)
    rows = raw.reshape(70, -1)
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).copy())
    found = gguf_numbers.grouped(torch.from_numpy(rows), kind)
    assert torch.equal(found.dequantized(), wanted)
    for dtype in (torch.bfloat16, torch.float32):
        part = pack(found, dtype)
        assert torch.equal(part.rows(torch.arange(70)), wanted)


def test_scales_of_many_bits_have_no_packed_form():
    weight = draw(64, 64, *PACKED["Q8_0"])
    third = weight._replace(scales=weight.scales.float() / 3)
    for dtype in (torch.bfloat16, torch.float32):
        assert pack(third, dtype) is None
        assert pack(weight._replace(scales=weight.scales.float()), dtype) is not None
    assert pack(draw(64, 96, 8, 24, "half", False, False, True), torch.bfloat16) is None


@pytest.mark.parametrize("most, bits", [(1, 22), (3, 22), (31, 19), (127, 17), (128, 16)])
def test_scales_of_more_bits_with_smaller_numbers(most, bits):
    """As many as leave all products exact, those with 384 in the kernel, too."""
    weight = draw(64, 64, *PACKED["Q8_0"])
    numbers = torch.randint(-most, min(most, 127) + 1, (64, 64))
    numbers[0, 0] = -most
    for count, is_packed in ((bits, True), (bits + 1, False)):
        scales = torch.randint(2**(count - 1), 2**count, weight.scales.shape) | 1
        found = weight._replace(numbers=numbers.to(torch.int8), scales=scales * 2.0**(-count - 6))
        for dtype in (torch.float32, torch.bfloat16):
            assert (pack(found, dtype) is not None) == is_packed
            if is_packed:
                compare_products([found], dtype, (1, 4, 20))


def test_numbers_of_more_than_6_bits_with_lows():
    """With AVX-512 they have no packed form, if 256 times a scale cannot be subtracted exactly from
    a low."""
    weight = draw(64, 64, *PACKED["Q5_1"])
    weight.scales[0, 0], weight.lows[0, 0] = 1, 2**-20
    for most, is_packed in ((63, True), (64, not HAS_TABLES)):
        numbers = weight.numbers.clone()
        numbers[5, 7] = most
        assert (pack(weight._replace(numbers=numbers), torch.float32) is None) != is_packed


def test_the_smallest_exponents_are_kept():
    """2^-127 and 2^-128 are no normal float32 numbers."""
    numbers = torch.randint(16, (64, 128), dtype=torch.uint8)
    weight = formulas.mxfp4(numbers, torch.randint(129, (64, 4), dtype=torch.uint8))
    weight = weight._replace(groups=torch.arange(128) // 32)
    assert weight.scales.dtype == torch.float32 and weight.scales.min() < 2.0**-126
    part = pack(weight, torch.bfloat16)
    assert torch.equal(part.rows(torch.arange(64)), weight.dequantized())


def test_small_scales_of_4_bits():
    """A 4096th of them, which AVX2 needs, is not always a float32 number."""
    weight = formulas.Grouped(torch.randint(4, (64, 128), dtype=torch.uint8),
                              torch.full((64, 4), 2.0**-147), None, torch.arange(128) // 32, bits=4)
    assert (pack(weight, torch.float32) is not None) == HAS_TABLES


@pytest.mark.parametrize("least, most, group, zero, width", [
    (-16, 15, 32, None, 5), (-32, 31, 16, None, 6), (40, 71, 32, None, 5), (-33, 31, 32, None, 8),
    (0, 31, 32, 16, 5), (0, 63, 16, 40, 6), (0, 64, 32, 40, 8)])
def test_weights_of_5_or_6_bits(least, most, group, zero, width):
    kind = torch.int8 if zero is None else torch.uint8
    numbers = torch.randint(least, most + 1, (70, 256), dtype=kind)
    numbers[5, 7], numbers[60, 9] = least, most
    scales = torch.rand(70, 256 // group).half()
    zeros = None if zero is None else torch.full(scales.shape, zero, dtype=torch.uint8)
    weight = formulas.Grouped(numbers, scales, zeros, torch.arange(256) // group)
    for dtype in (torch.bfloat16, torch.float32):
        form = pack(weight, dtype).form
        assert form.width == width if HAS_TABLES else form.width in (6, 8)
        compare_products([weight], dtype, (1, 2, 4, 9))


@pytest.mark.parametrize("least, width", [(-32, 6), (-64, 6), (-65, 8), (-127, 8)])
def test_a_zero_that_is_moved_stays_small(least, width):
    """With scales of 18 bits, products with a larger zero would be rounded."""
    weight = draw(70, 256, *PACKED["Q6_K"])
    numbers = torch.randint(least, least + 32, (70, 256), dtype=torch.int8)
    numbers[3, 5] = least
    weight = weight._replace(numbers=numbers)
    form = pack(weight, torch.float32).form
    assert form.width == width if HAS_TABLES else form.width in (6, 8)
    compare_products([weight], torch.float32, (1, 4, 9))


def fp8(numbers: torch.Tensor, scale: float) -> formulas.Grouped:
    """With one scale for each output."""
    scales = torch.full((len(numbers), 1), scale)
    return formulas.Grouped(numbers, scales, groups=torch.zeros(numbers.shape[1]).long(),
                            values=formulas.E4M3)


def test_every_number_of_fp8():
    """Also those that are no normal float16."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    numbers[numbers % 128 == 127] = 126
    weight = fp8(numbers, 0.5)
    assert torch.equal(weight.dequantized(), numbers.view(torch.float8_e4m3fn).float() / 2)
    for dtype in (torch.bfloat16, torch.float32):
        part = pack(weight, dtype)
        found = part.rows(torch.arange(64))
        assert torch.equal(found, weight.dequantized())
        linear = QuantizedLinear([part])
        unit = torch.eye(256).to(dtype)
        for rows in (1, 2, 4, 40):
            assert torch.equal(linear.multiply(unit[-rows:]).float(), found.T[-rows:])


def test_what_is_no_number_has_no_packed_form():
    weight = fp8(torch.full((64, 128), 127, dtype=torch.uint8), 1.0)
    assert pack(weight, torch.bfloat16) is None and weight.dequantized().isnan().all()


@pytest.mark.parametrize("kinds", [["Q4_K", "Q6_K"], ["Q8_0", "F16", "Q4_1"]])
def test_mixed_parts_of_gguf(make_gguf, kinds):
    """Each part keeps its format; one with a part in floating point is dequantized."""
    path, model = make_gguf(kinds, "Llama")
    with LLM(path, **OPTIONS) as llm:
        count = len(packed_of(llm))
        assert count == 9 if "F16" not in kinds else 0 < count < 9
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(model)


@pytest.mark.parametrize("name", ["int4", slow("int8"), "Q4_K_M", "awq"])
def test_a_whole_model_has_the_bits_of_the_dequantized_one(given, monkeypatch, name):
    """However its requests are run."""
    model, options = given(name)
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "stays_packed", lambda runner: False)
        wanted = logprobs_of(model, **options)
    assert wanted[:5] == wanted[5:]
    for schedule in [*SCHEDULES, dict(num_kv_blocks=5, max_model_len=96),
                     dict(enable_prefix_caching=False)]:
        assert logprobs_of(model, **options, **schedule) == wanted, schedule


@pytest.mark.parametrize("quantization, bits", [("int8", 8.5), ("int4", 4.5)])
def test_the_memory_of_a_model(bundled, quantization, bits):
    """Packed numbers and scales, once for a head that is the embedding, too."""
    weights = load_file(Path(bundled) / "model.safetensors").values()
    count = sum(each.numel() for each in weights if each.ndim == 2)
    with LLM(bundled, quantization=quantization, **BFLOAT16) as llm:
        model = llm.engine.runner.model
        assert model.embed_tokens.part_0 is model.lm_head.part_0
        assert num_bytes(model) < 1.05 * count * bits / 8
        assert all(weight.ndim < 2 or not weight.numel() for weight in model.parameters())


def test_the_memory_of_a_gguf():
    with LLM(REAL, **BFLOAT16) as llm:
        stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(REAL).tensors)
        # without AVX-512, numbers of 6 bits take 8
        most = 1.1 if HAS_TABLES else 1.25
        assert num_bytes(llm.engine.runner.model) < most * stored


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_no_weight_lies_in_a_file(make_quantized, model_impl):
    """The file can be changed or removed while the engine runs."""
    folder, _ = make_quantized("awq", tie_word_embeddings=True)
    with LLM(folder, model_impl=model_impl, **OPTIONS):
        assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("quantization", ["int8", None])
def test_packed_weights_have_to_fit_the_memory(bundled, monkeypatch, quantization):
    """Nothing is read if they do not: int8, half of what bfloat16 takes; a GGUF file."""
    path, size = REAL, REAL.stat().st_size
    if quantization:
        path, size = bundled, (Path(bundled) / "model.safetensors").stat().st_size // 2
    options = BFLOAT16 | dict(quantization=quantization)
    monkeypatch.setattr(memory, "free_memory", lambda most: size * 11 // 10)
    LLM(path, **options).close()
    monkeypatch.setattr(memory, "free_memory", lambda most: size * 9 // 10)
    check_refused("GiB of weights' is not accepted: it must be smaller", LLM, path, **options)


def test_only_one_matrix_is_there_at_a_time(bundled, monkeypatch):
    """While it is loaded."""
    sizes: list[int] = []
    pack, pack_weights = loading.pack, loading.pack_weights

    def watched(tensors, dtype, model):
        def measured(*arguments):
            sizes.append(sum(each.numel() for each in model.parameters() if not each.is_meta))
            return pack(*arguments)

        monkeypatch.setattr(loading, "pack", measured)
        return pack_weights(tensors, dtype, model)

    monkeypatch.setattr(loading, "pack_weights", watched)
    with LLM(bundled, quantization="int8", **OPTIONS) as llm:
        vectors = sum(each.numel() for each in llm.engine.runner.model.parameters()
                      if each.ndim == 1)
    assert len(sizes) > 20 and {*sizes} == {vectors}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_both", [True, False])
def test_the_embedding_of_a_packed_model(make_model, is_tied, has_both, caplog, monkeypatch):
    """The head's, or its own; files can have it under one name, or twice. To tie them, nothing is
    dequantized."""
    calls: list[tuple] = []
    dequantized = PackedWeight.dequantized
    monkeypatch.setattr(PackedWeight, "dequantized", lambda *given: (
        calls.append(given) or dequantized(*given)))
    folder, model = make_model(tie_word_embeddings=is_tied, seed=int(is_tied))
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    if is_tied and has_both:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif is_tied:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    wanted = formulas.rounded(model.model.embed_tokens.weight.detach(), 8).dequantized()
    with LLM(folder, quantization="int8", **OPTIONS) as llm:
        assert not calls
        embedding = llm.engine.runner.model.embed_tokens
        assert torch.equal(llm.engine.runner.model.lm_head.weight, embedding.weight) == is_tied
        ids = torch.tensor([[3, 300], [3, 0]])
        assert torch.equal(embedding(ids), wanted[ids])
        assert torch.equal(embedding.weight, wanted)
        found = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert "differ" not in caplog.text
    assert found == generated(folder, quantization="int8", kernels=False)


def test_a_packed_linear_is_a_linear(bundled):
    """Its weight can be read, saved, copied and set."""
    with LLM(bundled, quantization="int4", **OPTIONS) as llm:
        model = llm.engine.runner.model
        linear = model.layers[0].mlp.down_proj
        weight, state = linear.weight, model.state_dict()
        assert torch.equal(state["layers.0.mlp.down_proj.weight"], weight) and linear.is_quantized
        x = torch.randn(3, linear.in_features)
        torch.testing.assert_close(linear(x), x @ weight.T)
        again = copy.deepcopy(linear)
        assert torch.equal(again(x), linear(x))
        # with gradients, PyTorch computes it
        x.requires_grad_(True)
        linear(x).sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
        before = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        linear.weight = torch.nn.Parameter(torch.zeros_like(weight), False)
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) != before
        linear.weight = torch.nn.Parameter(weight, False)
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before
        # rows of another dtype, while the weight is packed
        again.bias = torch.nn.Parameter(torch.randn(len(weight)), False)
        wide = x.detach().double()
        torch.testing.assert_close(again(wide), wide @ weight.double().T + again.bias.double())
