"""Quantized models that transformers computes: tokens as transformers generates them with the
dequantized weights, which modules have packed weights, and what is dequantized or refused."""

import functools
import logging
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import formats
import pytest
import schedules
import torch
import transformers
from conftest import check_refused, in_thread, slow
from formats import (
    FORMATS, REAL, change, check_packed, compare, modules_of, num_packed, packed_of, with_weights)
from safetensors.torch import load_file
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu import compiling
from nanoengine_extras.cpu.packed import PackedWeight, QuantizedEmbedding, QuantizedLinear
from nanoengine_extras.models.quantized import formulas, transformers_linears
from nanoengine_extras.models.quantized.origins import Origin
from nanoengine_extras.models.transformers_models import check

make_quantized = formats.make_quantized
# scales of embeddings and soft caps; a window; fused projections; norms after attention; experts in
# one tensor each, and in several; Conv1D, positions, a head that is the embedding; biases
NAMES = ["gemma2", "phi3", "olmo2", "mixtral", "gpt2"]
MORE = ["gpt_oss", "qwen3_moe", "gemma3 images", "gpt_neox", "opt", "deepseek_v3", "granite"]
PROMPTS = compare.random_prompts()


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **compare.OPTIONS | options)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, compare.GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@functools.lru_cache(maxsize=1)
def expected(reference: Any) -> list[list[int]]:
    """What transformers generates; a test asks for it once or twice."""
    return [compare.expected_tokens(reference, prompt) for prompt in PROMPTS]


@torch.inference_mode()
def check_all(llm: LLM, reference: Any) -> None:
    """The same weights to the bit, the same tokens, and logits of prompts as transformers has."""
    model = llm.engine.runner.model
    inner = next(child for child in reference.children()
                 if isinstance(child, transformers.PreTrainedModel))
    for own, right in ((model.head, reference), (model.layers, getattr(inner, "decoder", inner))):
        check_packed(own, right)
    assert tokens(llm) == expected(reference)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert schedules.worst_score(outputs, reference) < 5e-4


# -------------------------------------------------------------------------- rounded when loaded


def rounded(folder: Path, bits: int) -> dict[str, Tensor]:
    """The weights of a model, the matrices rounded; experts can have one tensor with three sizes.
    Biases are no matrices, though those of experts are in one tensor."""
    found = load_file(folder / "model.safetensors")
    for name, weight in found.items():
        if weight.ndim > 1 and weight.is_floating_point() and not name.endswith("bias"):
            rows = weight.reshape(-1, weight.shape[-1])
            found[name] = formulas.rounded(rows, bits).dequantized().view(weight.shape)
    return found


@pytest.mark.parametrize("name, bits", [
    ("mixtral", 4), ("phi3", 4), ("gpt2", 8),
    *(slow(name, 4) for name in ("gemma2", "olmo2", "gpt2")),
    *(slow(name, 8) for name in NAMES if name != "gpt2"),
    *(slow(name, bits) for name in ["gemma3_text", *MORE] for bits in (8, 4))])
def test_weights_are_rounded(folder_of, tmp_path, name, bits):
    """Also those that are not packed; the same on every path."""
    folder = folder_of(name)
    reference = compare.load_reference(with_weights(folder, tmp_path, rounded(folder, bits)))
    with make_llm(folder, quantization=f"int{bits}") as llm:
        assert packed_of(llm) and packed_of(llm, QuantizedEmbedding)
        check_all(llm, reference)
    with make_llm(folder, quantization=f"int{bits}", kernels=False) as llm:
        assert not packed_of(llm) and not packed_of(llm, QuantizedEmbedding)
        check_all(llm, reference)


SIZES: dict[str, Any] = dict(
    vocab_size=compare.VOCAB_SIZE, hidden_size=128, intermediate_size=192, num_experts=4,
    moe_intermediate_size=64, num_experts_per_tok=2, mlp_only_layers=[1])


@pytest.mark.parametrize("kind, quantization, num_programs, num_fused", [
    ("Qwen2", "int4", 2, 3), ("Qwen3Moe", "int8", 3, 9), ("Gemma", "int4", 4, 0),
    slow("Qwen3Moe", "int4", 3, 9)])
def test_one_product_computes_several_packed_linears(
        make_model, tmp_path, kind, quantization, num_programs, num_fused):
    """Queries, keys and values, with biases in Qwen2; gates and ups, also in experts. All layers
    are the engine's own. In Gemma, MLPs have another activation."""
    folder = Path(make_model(kind, **SIZES)[0])
    reference = compare.load_reference(
        with_weights(folder, tmp_path, rounded(folder, int(quantization[3]))))
    with make_llm(folder, quantization=quantization, model_impl="transformers") as llm:
        check_all(llm, reference)
        model = llm.engine.runner.model
        assert [len(call.qkv_proj.weights) for call in model.calls] == [3] * 3
        assert len(model.stack.programs) == num_programs
        assert sum(each.halves == 2 for each in packed_of(llm)) == num_fused


@pytest.mark.slow
@pytest.mark.parametrize("name", ["youtu", "sarvam_moe", "hrm_text"])
def test_what_transformers_splits_or_writes(folder_of, tmp_path, name):
    """A part of a matrix of the file, or a row of zeros for padding: it is dequantized."""
    folder = folder_of(name)
    reference = compare.load_reference(with_weights(folder, tmp_path, rounded(folder, 4)))
    for options in ({}, dict(kernels=False)):
        with make_llm(folder, quantization="int4", **options) as llm:
            assert bool(packed_of(llm)) == (options == {})
            assert tokens(llm) == expected(reference)


@pytest.mark.parametrize("plain", [
    r"down_proj", r"experts\.1\.", *map(slow, (
        r"gate_proj|up_proj", r"experts\.2\.down_proj", r"experts\.0\.gate_proj"))])
def test_experts_of_which_some_matrices_are_not_quantized(make_quantized, folder_of, plain):
    """Their kernels have other arguments."""
    folder, reference = make_quantized(
        "gptq 4", source=folder_of("qwen3_moe"), is_chosen=lambda name, weight: (
            ".experts." in name and not re.search(plain, name)))
    with make_llm(folder) as llm:
        assert packed_of(llm)
        check_all(llm, reference)


def test_what_an_origin_forgets():
    """Of which matrix it is, if it is written, or a part."""
    matrix: Any = object()
    origin = Origin([4, 6], torch.float32, [matrix])
    assert origin.data.parts == [matrix]
    parts = origin.split(2)
    assert [(part.shape, part.parts) for part in parts] == [((2, 6), None)] * 2
    assert origin.parts == [matrix]
    torch.nn.init.zeros_(origin.data[1])
    assert origin.parts is None
    origin = Origin([4, 6], torch.float32, [matrix])
    origin.split(2)[1].zero_()
    assert origin.parts is None


# how many matrices of linears, and how many embeddings, of three or four layers are packed, and how
# many matrices are not
PACKED = {"gemma2": (29, 1, 0), "phi3": (13, 1, 0), "olmo2": (22, 1, 0), "mixtral": (49, 1, 3),
          "gpt2": (1, 2, 12), "gemma3_text": (29, 1, 0)}


@pytest.mark.parametrize("name", PACKED)
def test_what_is_packed(folder_of, caplog, name):
    """All linears, heads and embeddings, tied ones once; a line says what is not."""
    linears, embeddings, others = PACKED[name]
    with caplog.at_level(logging.WARNING), make_llm(
            folder_of(name), quantization="int4", dtype="bfloat16",
            attention_backend="gather") as llm:
        assert num_packed(llm) == linears
        assert len(packed_of(llm, QuantizedEmbedding)) == embeddings
        assert not [each for each in modules_of(llm) if type(each) is torch.nn.Linear]
        # once, though the head is the embedding, too
        parts = [part for each in packed_of(llm) for part in each.weights]
        parts += [each.packed for each in packed_of(llm, QuantizedEmbedding)]
        assert {part.form.bits for part in parts} == {4}
        is_tied = name in ("gemma2", "gemma3_text", "gpt2")
        assert len({id(part.data) for part in parts}) == linears + embeddings - is_tied
        for each in [*packed_of(llm), *packed_of(llm, QuantizedEmbedding)]:
            assert not each._parameters["weight"].numel()
    lines = [line for line in caplog.messages if "dequantized" in line]
    assert len(lines) == bool(others)
    assert all(line.startswith(f"quantized weights of {others} matrices are dequantized when they "
                               "are loaded, since no linear and no embedding has ")
               for line in lines)


# ------------------------------------------------------------------------------ other formats


def is_layer(name: str, weight: Tensor) -> bool:
    """Whether tools round it: no embedding, no head, no router."""
    others = "embed", "wte", "wpe", "lm_head", "gate.weight"
    return weight.ndim == 2 and not any(part in name for part in others)


@pytest.mark.parametrize("name, form", [
    ("mixtral", "w4a16 zeros"), ("phi3", "gptq 8"), ("gemma2", "awq"), ("gpt2", "gptq 4"),
    ("phi3", "gptq act-order"), ("phi3", "w4a16 act-order"),
    *(slow(name, form) for name in [*NAMES, "gemma3_text"]
      for form in ("gptq 4", "awq", "w4a16", "w8a16", "gptq v2"))])
def test_every_format(make_quantized, folder_of, caplog, name, form):
    """Linears are packed. Embeddings and routers are not quantized, and Conv1D cannot be packed: a
    line says so."""
    folder, reference = make_quantized(
        form, source=folder_of(name), is_chosen=is_layer, is_transposed=name == "gpt2")
    compiling.warn_once.cache_clear()
    has_linears = name != "gpt2"
    is_packed = has_linears and FORMATS[form].is_packed
    with caplog.at_level(logging.WARNING), make_llm(folder) as llm:
        # a head and routers are not quantized
        assert num_packed(llm) >= is_packed * (PACKED[name][0] - 4 - 3 * (name == "mixtral"))
        assert is_packed or not packed_of(llm)
        assert not packed_of(llm, QuantizedEmbedding)
        check_all(llm, reference)
    assert ("no linear and no embedding has them" in caplog.text) != has_linears
    assert ("no act-order" in caplog.text) == (has_linears and not is_packed)
    with make_llm(folder, kernels=False) as llm:
        check_all(llm, reference)


def test_a_native_family_computed_by_transformers(tiny):
    """It has the same tokens as the engine's own decoder; so has a GGUF file."""
    for path, options in ((tiny, dict(quantization="int4")), (REAL, {})):
        found = []
        for model_impl in ("native", "transformers"):
            with LLM(path, dtype="float32", block_size=16, num_kv_blocks=32, max_num_seqs=4,
                     model_impl=model_impl, **options) as llm:
                found.append([output.outputs[0].token_ids for output in llm.generate(
                    [[5, 6, 7], [9] * 30], compare.GREEDY, use_tqdm=False)])
                if model_impl == "transformers":
                    assert packed_of(llm) and packed_of(llm, QuantizedEmbedding)
        assert found[0] == found[1]


# -------------------------------------------------------------------- while a model is loaded


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_only_one_matrix_is_there_at_a_time(folder_of, monkeypatch, name):
    """Until the last one is packed, no module has memory for one that will be packed."""
    kinds = []
    fill = transformers_linears.fill

    def spy(places, *others):
        kinds.extend(type(module._parameters[name]) for module, name in places)
        return fill(places, *others)

    monkeypatch.setattr(transformers_linears, "fill", spy)
    with make_llm(folder_of(name), quantization="int8"):
        assert {*kinds} == {Origin}


def test_a_weight_that_its_model_reads_by_itself_is_not_packed(folder_of, monkeypatch, tmp_path):
    """As where a model multiplies by it: to dequantize it in each step would be slow."""
    module = import_module("transformers.models.olmo2.modeling_olmo2")
    forward = module.Olmo2MLP.forward

    def reading(self, x):
        return forward(self, x) + torch.nn.functional.linear(x, self.down_proj.weight.T[:64, :64])

    monkeypatch.setattr(module.Olmo2MLP, "forward", reading)
    folder = folder_of("olmo2")
    reference = compare.load_reference(with_weights(folder, tmp_path, rounded(folder, 4)))
    with make_llm(folder, quantization="int4") as llm:
        assert num_packed(llm) == PACKED["olmo2"][0] - 3
        check_all(llm, reference)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_file_with_both_of_two_tied_matrices(folder_of, tmp_path, is_same):
    """They are one if they are equal; otherwise each is what the file has, as in transformers."""
    weights = load_file(folder_of("gemma2") / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head if is_same else head.flip(0)
    folder = with_weights(folder_of("gemma2"), tmp_path / "both", weights)
    reference = compare.load_reference(
        with_weights(folder, tmp_path / "rounded", rounded(folder, 4)))
    with make_llm(folder, quantization="int4") as llm:
        head = llm.engine.runner.model.head.lm_head
        embedding, = packed_of(llm, QuantizedEmbedding)
        assert isinstance(head, QuantizedLinear)
        assert torch.equal(head.weight, embedding.weight) == is_same
        check_all(llm, reference)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "opt"])
def test_bfloat16_is_checked_in_float32(folder_of, monkeypatch, name):
    """By products with the packed weights, and never by dequantized ones."""
    errors = []
    compare_steps = check.compare

    def spy(runner, model, ids, wanted, backend, dtype, most, *has_experts):
        assert wanted.dtype == torch.float32
        errors.append(most)
        # a tenth of what is allowed
        most = most if most > 0.1 else 1e-4
        return compare_steps(runner, model, ids, wanted, backend, dtype, most, *has_experts)

    monkeypatch.setattr(check, "compare", spy)
    # each shape of heads is a kernel to compile
    backend = "auto" if name == "gemma2" else "gather"
    with make_llm(folder_of(name), quantization="int4", dtype="bfloat16",
                  attention_backend=backend) as llm:
        assert errors == [1e-3, 0.5] and packed_of(llm)
        assert not any(each.was_read for each in packed_of(llm))
        # each row has the same bits, whatever rows are beside it
        for linear in packed_of(llm):
            x = torch.randn(7, linear.in_features).bfloat16()
            whole = linear(x)
            assert torch.equal(whole, torch.cat([linear(row[None]) for row in x]))
            exact = x.double() @ linear.weight.double().T
            exact += 0 if linear.bias is None else linear.bias.double()
            torch.testing.assert_close(linear(x.float()).double(), exact, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------- what is refused


def test_a_tensor_that_is_missing(make_quantized, folder_of):
    folder, _ = make_quantized("awq", source=folder_of("phi3"), is_chosen=is_layer)
    gone = "model.layers.0.mlp.down_proj"
    change(folder, lambda tensors: [
        tensors.pop(name) for name in [*tensors] if name.startswith(gone)])
    for kernels in (True, False):
        check_refused(rf"its files lack \['{gone}.weight", make_llm, folder, kernels=kernels)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts_with_another_activation_stay_packed(make_model, monkeypatch, activation):
    """Gates and ups are two matrices, and become one product without SwiGLU."""
    folder, _ = make_model("Qwen3Moe", hidden_size=64, moe_intermediate_size=64, num_experts=4,
                           num_experts_per_tok=2, num_hidden_layers=2, head_dim=32,
                           decoder_sparse_step=1, hidden_act=activation,
                           vocab_size=compare.VOCAB_SIZE)
    with make_llm(folder, quantization="int8", kernels=False) as llm:
        expected = tokens(llm)
    dequantized = []
    with make_llm(folder, quantization="int8") as llm:
        monkeypatch.setattr(PackedWeight, "dequantized", dequantized.append)
        assert tokens(llm) == expected and not dequantized
        experts = [each for each in modules_of(llm) if type(each).__name__ == "Experts"]
        assert len(experts) == 2 and all(each.calls is not None for each in experts)


def test_a_load_that_fails_leaves_the_number_of_threads():
    """Threads that begin later would otherwise compute alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_refused("damaged", transformers_linears.in_threads, int, ["damaged"])
        assert in_thread(torch.get_num_threads) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
