"""Models by their Hugging Face ids; nothing is downloaded here."""

import pytest
from conftest import check_refused
from huggingface_hub.utils import filter_repo_objects

from nanoengine import LLM
from nanoengine_extras.models.hub import FILES


def test_downloads_fetch_what_is_read():
    wanted = ["model.safetensors", "model-00001-of-00002.safetensors", "config.json",
              "model.safetensors.index.json", "tokenizer.model", "merges.txt",
              "chat_template.jinja"]
    unwanted = ["consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors",
                "model.fp16-00001-of-00002.safetensors", "pytorch_model.bin", "onnx/model.onnx"]
    assert [*filter_repo_objects(wanted + unwanted, allow_patterns=FILES)] == wanted


@pytest.mark.parametrize("path", ["./here", "/no/where", "~/models/none", "some/where/else"])
def test_a_path_is_no_id(path, monkeypatch):
    monkeypatch.setattr("nanoengine_extras.models.hub.snapshot_download", None)
    check_refused(f"model='{path}' .*there is no folder [^:]*$", LLM, path)


def test_downloads_are_of_a_revision_and_go_to_a_folder(tiny, bundled, monkeypatch):
    asked = []

    def download(name, *, revision, cache_dir, allow_patterns):
        asked.append((name, revision, cache_dir))
        # the weights of a model, perhaps a huge one, of which only the tokenizer is used
        assert ("model.safetensors" in allow_patterns) == (name == "some/model")
        return {"some/model": tiny, "some/tokenizer": bundled}[name]

    monkeypatch.setattr("nanoengine_extras.models.hub.snapshot_download", download)
    options = dict(num_kv_blocks=4, kernels=False)
    LLM("some/model", **options)
    LLM("some/model", tokenizer="some/tokenizer", revision="v2", download_dir="there", **options)
    assert asked == [("some/model", None, None), ("some/model", "v2", "there"),
                     ("some/tokenizer", "v2", "there")]
