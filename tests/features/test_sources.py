"""Where a model comes from. Quantized files, ids of Hugging Face and models of transformers have
tests of their own."""

from pathlib import Path

import pytest
from conftest import check_refused

from nanoengine.config import EngineConfig
from nanoengine.loader import find_folder, find_model


@pytest.mark.parametrize("model", ["/no/such/folder", "not a model!", "./missing/../folder"])
def test_a_path_that_is_no_model(model):
    """The message says which absolute path was looked for."""
    accepted = "must be a folder with safetensors, or a Hugging Face id; there is no folder /"
    check_refused(f"model=.* {accepted}", find_model, model, EngineConfig(model))
    accepted = accepted.replace("safetensors", "a tokenizer")
    check_refused(f"tokenizer=.* {accepted}", find_model, model, EngineConfig(model), "tokenizer")


def test_a_path_in_the_home_folder(monkeypatch, bundled):
    monkeypatch.setenv("HOME", str(Path(bundled).parent))
    assert find_model("~/tiny-qwen3", EngineConfig("m")) == Path(bundled)


@pytest.mark.parametrize("model", ["/no/such/folder", "some/model", 5])
def test_without_it_only_a_folder_is_a_model(model):
    with pytest.raises(ValueError, match="model=.* must be a folder; .*models/sources.py"):
        find_folder(model, EngineConfig(str(model)), "model")
