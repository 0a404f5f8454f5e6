"""Files of MLX, against transformers with the dequantized weights.

mlx_lm's own converter wrote such files for 18 families, and the engine generated the same
tokens as mlx_lm. Here, they are written as it does.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantizing import (
    BFLOAT16, OPTIONS, SIZES, change_config, check_damages, expected, generated, in_words,
    linears_of, linears_of_experts, opened)
from safetensors.torch import save_file
from torch import Tensor

# `folder_of` makes models there
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from nanoengine import LLM  # noqa: E402

Parts = dict[str, Tensor]


def draw(shape: tuple[int, ...], bits: int = 4, group_size: int = 32,
         dtype: torch.dtype = torch.bfloat16) -> tuple[Parts, Tensor]:
    """The parts of a random weight, and what they stand for."""
    numbers = torch.randint(2**bits, shape)
    size = *shape[:-1], shape[-1] // group_size
    groups = torch.arange(shape[-1]) // group_size
    scales = (torch.randn(size) * 0.3 / 2**bits).to(dtype)
    # one number of each group stands for nearly 0
    lows = (-scales * torch.randint(1, 2**bits, size)).to(dtype)
    parts = {"scales": scales, "biases": lows}
    # in float64: each product is exact, and then rounded once
    whole = numbers * scales.double()[..., groups] + lows.double()[..., groups]
    words = in_words(numbers.flatten(0, -2), bits).view(torch.uint32)
    return parts | {"weight": words.unflatten(0, shape[:-1])}, whole.float()


def write(source: Path, folder: Path, tensors: Parts, entries: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    save_file({name: each.contiguous() for name, each in tensors.items()},
              folder / "model.safetensors", metadata={"format": "mlx"})
    change_config(folder, quantization=entries, quantization_config=entries)
    return folder


@pytest.fixture
def make_mlx(make_model, tmp_path):
    """Writes a small random model. Returns its folder, and transformers' model.

    entries: of the model's quantization_config, with modules that differ
    names: parts of names, and MLX's names of them
    """
    def make(entries: dict[str, Any], architecture: str = "Qwen3",
             names: dict[str, str] | None = None, **changes: Any) -> tuple[Path, Any]:
        source, model = make_model(architecture, **SIZES | changes)
        tensors: Parts = {}
        state = model.state_dict()
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        for name, weight in state.items():
            module = name.removesuffix(".weight")
            own = entries.get(module, entries)
            if weight.ndim == 1 or not own:
                tensors[name] = weight
                continue
            own = {key: own[key] for key in ("bits", "group_size")}
            for old, new in (names or {}).items():
                module = module.replace(old, new)
            matrices = {module: weight}
            if module.endswith("gate_up_proj"):
                matrices = {module.replace("gate_up", part): half
                            for part, half in zip(("gate", "up"), weight.chunk(2, 1))}
            for each, matrix in matrices.items():
                parts, whole = draw(tuple(matrix.shape), **own)
                matrix.copy_(whole)
                for end, tensor in parts.items():
                    tensors[f"{each}.{end}"] = tensor
        return write(source, tmp_path / "mlx", tensors, entries), model

    return make


@pytest.mark.parametrize("bits, group", [(2, 128), (3, 64), (4, 32), (5, 64), (6, 32), (8, 64)])
@pytest.mark.parametrize("kernels", [True, False])
def test_numbers_of_all_sizes(make_mlx, caplog, bits, group, kernels):
    folder, model = make_mlx(dict(bits=bits, group_size=group))
    assert generated(folder, kernels=kernels) == expected(model)
    # with kernels, all stay packed
    assert ("are dequantized" in caplog.text) != kernels


def test_one_matrix_is_head_and_embedding(make_mlx):
    folder, model = make_mlx(dict(bits=4, group_size=64), tie_word_embeddings=True)
    with LLM(folder, **BFLOAT16) as llm:
        own = llm.engine.runner.model
        assert own.lm_head.is_quantized and len(linears_of(llm)) == 9
    assert generated(folder) == expected(model)


@pytest.mark.parametrize("architecture, names", [
    ("Qwen3Moe", {".experts.": ".switch_mlp."}),
    ("Mixtral", {".mlp.experts.": ".block_sparse_moe.switch_mlp.",
                 ".mlp.gate": ".block_sparse_moe.gate"})])
def test_experts_stay_packed(make_mlx, architecture, names):
    """Routers are quantized, too."""
    sizes = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2,
                 moe_intermediate_size=64, intermediate_size=64)
    folder, model = make_mlx(dict(bits=4, group_size=64), architecture, names=names, **sizes)
    assert generated(folder) == expected(model)
    with LLM(folder, **OPTIONS) as llm:
        linears = linears_of_experts(llm)
        assert len(linears) == 16 and all(each.is_quantized for each in linears)


def test_a_model_for_images(folder_of, tmp_path):
    """MLX has the channels of a convolution last. The weights for texts have their old names."""
    source = folder_of("gemma3 images")
    model = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    tensors: Parts = {}
    for name, weight in model.state_dict().items():
        own = name.removeprefix("model.")
        if own.startswith("language_model."):
            own = own.replace("language_model.", "language_model.model.")
        if own.startswith("lm_head"):
            continue
        if weight.ndim == 2 and "language" in own:
            parts, whole = draw(tuple(weight.shape))
            weight.copy_(whole)
            tensors |= {f"{own.removesuffix('.weight')}.{end}": each
                        for end, each in parts.items()}
        else:
            tensors[own] = weight.movedim(1, -1) if weight.ndim == 4 else weight
    folder = write(source, tmp_path / "mlx", tensors, dict(bits=4, group_size=32))
    assert generated(folder) == expected(model)


@pytest.mark.parametrize("bits, options", [
    (8, {}), (4, dict(kernels=False))])
def test_schedules_in_bfloat16(make_mlx, bits, options):
    """A decode of one row has the bits of a prompt."""
    folder, _ = make_mlx(dict(bits=bits, group_size=64), "Llama")
    found = [generated(folder, **BFLOAT16 | options | schedule) for schedule in (
        {}, dict(max_num_batched_tokens=8, scheduling="mixed"), dict(max_num_seqs=1))]
    assert found[0] == found[1] == found[2]


# ------------------------------------------------------------------------------- refused


def test_modules_that_differ(make_mlx):
    """False: not quantized."""
    layer = "model.layers.0.mlp"
    entries = dict(bits=4, group_size=64) | {
        f"{layer}.down_proj": dict(bits=8, group_size=32), "lm_head": dict(bits=6, group_size=64),
        "model.embed_tokens": False}
    folder, model = make_mlx(entries, "Llama")
    assert generated(folder) == expected(model)


def test_damaged_parts(tmp_path):
    parts, whole = draw((96, 128), dtype=torch.float16)
    entries = dict(quant_method="mlx", bits=4, group_size=32)
    assert torch.equal(opened(tmp_path, entries, parts).read(), whole)
    check_damages(tmp_path, entries, parts, ["scales", "biases"])


def test_missing_parts(tmp_path):
    parts, _ = draw((64, 128))
    entries = dict(quant_method="mlx", bits=4, group_size=32)
    with pytest.raises(ValueError, match=r"lacks own\.biases"):
        opened(tmp_path, entries, {name: parts[name] for name in ("weight", "scales")}).read()
    with pytest.raises(ValueError, match=r"own.weight in .*'U32' is not accepted.*own\.scales"):
        opened(tmp_path, entries, {"weight": parts["weight"]})
    with pytest.raises(ValueError, match=r"own.weight in .*I32 .* is not accepted: it must be U32"):
        opened(tmp_path, entries, parts | {"weight": parts["weight"].view(torch.int32)}).read()


@pytest.mark.parametrize("changes, message", [
    (dict(bits=7), r"quantization_config\.bits=7 is not accepted: it must be one of \[2, 3"),
    (dict(group_size=48), r"quantization_config\.group_size=48 is not accepted"),
    (dict(mode="mxfp4"), r"quantization_config\.mode='mxfp4' is not accepted: .*'affine'"),
    (dict(quant_method="metal"), r"quant_method='metal' is not accepted: it must be one of .*GGUF"),
    ({"model.norm": dict(bits=1, group_size=64)}, r"config\.model\.norm\.bits=1 is not accepted"),
    # such as GPTQ's without its name
    (dict(sym=True), r"quant_method=None is not accepted: it must be one of .*'gptq'")])
def test_other_configs(make_mlx, changes, message):
    entries = dict(bits=4, group_size=64)
    folder, _ = make_mlx(entries)
    change_config(folder, quantization_config=entries | changes)
    with pytest.raises(ValueError, match=message):
        generated(folder)


def test_a_config_of_an_old_release(make_mlx):
    """It has only one of the two entries."""
    folder, _ = make_mlx(dict(bits=4, group_size=64))
    change_config(folder, quantization_config=None)
    message = 'in a place that is not read .*it must be completed: .*"gptq", "awq" or "mlx"'
    with pytest.raises(ValueError, match=message):
        generated(folder)
