"""What a folder or a file is that is no model, and what to do."""

import json
import re

import pytest
import torch
from conftest import check_refused
from safetensors.torch import load_file, save_file

from nanoengine import LLM


def check(folder, message: str, **options) -> None:
    """Checks the refusal of a folder, which begins with its name."""
    check_refused(f"(?s)^{re.escape(f'model={str(folder)!r}')} .*{message}",
                  LLM, str(folder), **options)


@pytest.mark.parametrize("name, message", [
    ("pytorch_model.bin", r"its weights in pytorch_model.bin, .*: it must be converted by `Auto"),
    ("pytorch_model-00001-of-00002.bin", "its weights in pytorch_model-00001-of-00002.bin, "),
    ("weights.safetensors", "in weights.safetensors, .*: it must be a folder with model.safet"),
    ("adapter_model.safetensors", "only an adapter .*: it must be merged into its model"),
    ("adapter_model.bin", "only an adapter .*: it must be merged into its model"),
    ("consolidated.safetensors", "in its maker's own format: it must be its version for"),
    ("consolidated.00.pth", "in its maker's own format: it must be its version for"),
    ("tf_model.h5", "TensorFlow's format: it must be the original"),
    ("flax_model.msgpack", "Flax's format: it must be the original"),
    ("model.onnx", "ONNX format: it must be the original"),
    ("training_args.bin", "lacks its weights: it must be downloaded again")])
def test_weights_that_are_not_read(copy, name, message):
    (copy / "model.safetensors").rename(copy / name)
    check(copy, message)


def test_a_note_of_git_lfs(copy):
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid 5")
    check(copy, "Git LFS pointer .*: it must be completed by `git lfs")


@pytest.mark.parametrize("names, message", [
    ([], "is an empty folder: it must be one with a model"),
    (["a.txt"], "has no config.json: it must be a folder that transformers' save"),
    (["adapter_config.json", "adapter_model.safetensors"], "an adapter .*: it must be merged"),
    (["model_index.json", "unet/config.json"], "diffusers pipeline, .* a model that writes"),
    (["modules.json", "0_Transformer/config.json"], "sentence-transformers model, .* writes text"),
    (["consolidated.00.pth", "params.json"], "its maker's own format: it must be its version for"),
    (["checkpoint-5/config.json"], "it must be one of these, such as .*/checkpoint-5"),
    (["snapshots/ab/config.json", "blobs/1"], "it must be one of these, such as .*/snapshots/ab")])
def test_a_folder_without_a_config(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    check(tmp_path, message)


@pytest.mark.parametrize("name, content, message", [
    ("model.safetensors", b"{}", "is a file: it must be the folder /"),
    ("config.json", b"{}", "is a file: it must be the folder /"),
    # as Ollama stores them
    ("sha256-5d", b"GGUF" + b"\0" * 20, "is a GGUF file under another name: .* ends in .gguf$")])
def test_a_file_in_place_of_a_folder(tmp_path, bundled, name, content, message):
    (tmp_path / name).write_bytes(content)
    check(tmp_path / name, message)
    check_refused(f"^tokenizer='{tmp_path / name}' {message}",
                  LLM, bundled, tokenizer=str(tmp_path / name))


def test_an_adapter_beside_a_model_is_told(copy, caplog):
    (copy / "adapter_config.json").write_text("{}")
    LLM(str(copy), num_kv_blocks=8, block_size=16).close()
    assert "has an adapter (LoRA) next to the model: the adapter is not used" in caplog.text


@pytest.mark.parametrize("entries, message", [
    (dict(architectures=["BertModel"], model_type="bert"), "does not write text .* writes text$"),
    (dict(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), "has an encoder"),
    (dict(architectures=["ChatGLMModel"], auto_map=dict(AutoConfig="a.B")), "its own code"),
    (dict(model_type="qwen2"), "names no architectures .* must be completed there, for example "
     r'with "architectures": \["Qwen2ForCausalLM"\]$'),
    (dict(architectures=["LlamaForCausalLM"], quantization=dict(group_size=64, bits=4)),
     'in a place that is not read .*"gptq", "awq" or "mlx"'),
    (dict(architectures=["Olmo2ForCausalLM"], quantization=dict(group_size=64, bits=4)),
     'in a place that is not read .*"gptq", "awq" or "mlx"'),
    (dict(architectures=["LlamaForCausalLM"], compression_config=dict(quant_method="fp8")),
     'or compression_config.: it must be completed: .* "quantization_config"'),
    (dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=0),
     "sliding_window of 0 tokens: it must be a model with at least 2$"),
    (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=1),
     "sliding_window of 1 tokens: it must be a model with at least 2$"),
    (dict(architectures=["Gemma2ForCausalLM"], sliding_window=1), "sliding_window of 1 tokens"),
    (dict(architectures=["LlamaForCausalLM"], rope_parameters=dict(full=dict(rope_theta=5))),
     "different rope_parameters .* same ones in all layers$")])
def test_a_model_of_another_kind(tmp_path, entries, message):
    """transformers is not even asked, whose errors would be about some attribute."""
    folder = tmp_path / "{braces} in a name"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    for model_impl in ("auto", "transformers"):
        check(folder, message, load_format="dummy", model_impl=model_impl)


@pytest.mark.parametrize("end", ["weight_scale", "qweight"])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_quantized_weights_that_the_config_does_not_name(copy, model_impl, end):
    """transformers would leave the scales out."""
    file = copy / "model.safetensors"
    name = f"model.layers.0.mlp.up_proj.{end}"
    save_file(load_file(file) | {name: torch.ones(1)}, file)
    check(copy, f"{name}: its config.json must have a quantization_conf", model_impl=model_impl)


@pytest.mark.parametrize("name", [
    "quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_quantization_in_a_file_of_its_own(copy, name):
    """As AutoGPTQ and AutoAWQ wrote it in 2023, ModelOpt in 2024. Newer ones write it in both
    places."""
    (copy / name).write_text('{"bits": 4}')
    check(copy, f"in a place that .*{name}.* must be completed: con")
    config = json.loads((copy / "config.json").read_text()) | {
        "quantization_config": {"bits": 4, "quant_method": "gptq"}}
    (copy / "config.json").write_text(json.dumps(config))
    check_refused("none of its weights is quantized", LLM, str(copy))


def test_a_model_of_sentence_transformers(tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    check(tmp_path, "sentence-transformers model, .* that writes")


def test_entries_that_would_need_terabytes(copy):
    """Without this file, transformers makes a list of all labels."""
    (copy / "config.json").write_text('{"model_type": "qwen3", "num_labels": 1099511627776}')
    check_refused("num_labels", LLM, str(copy))
