"""Where a model comes from. Quantized files, ids of Hugging Face and models of transformers have
tests of their own."""

from pathlib import Path

import pytest
from conftest import check_refused
from transformers import LlamaConfig, Qwen3Config

from nanoengine.config import EngineConfig
from nanoengine.loader import find_folder
from nanoengine_extras.models.sources import context_length, find_model


@pytest.mark.parametrize("model", ["/no/such/folder", "not a model!", "./missing/../folder"])
def test_a_path_that_is_no_model(model):
    """The message says which absolute path was looked for."""
    accepted = "must be a folder with safetensors, or a Hugging Face id; there is no folder /"
    check_refused(f"model=.* {accepted}", find_model, model, EngineConfig(model), "model")
    accepted = accepted.replace("safetensors", "a tokenizer")
    check_refused(f"tokenizer=.* {accepted}", find_model, model, EngineConfig(model), "tokenizer")


def test_a_path_in_the_home_folder(monkeypatch, bundled):
    monkeypatch.setenv("HOME", str(Path(bundled).parent))
    assert find_model("~/tiny-qwen3", EngineConfig("m"), "model") == Path(bundled)


@pytest.mark.parametrize("model", ["/no/such/folder", "some/model"])
def test_without_it_only_a_folder_is_a_model(model):
    with pytest.raises(ValueError, match="model=.* must be a folder; .*models/sources.py"):
        find_folder(model, EngineConfig(str(model)), "model")


@pytest.mark.parametrize("rope, length", [
    ({"rope_type": "default"}, 64),
    ({"rope_type": "linear", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, 160),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 16}, 64)])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_scaled_rope_lengthens_the_context_as_in_vllm(kind, rope, length):
    config = kind(max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **rope})
    assert context_length(config) == length
