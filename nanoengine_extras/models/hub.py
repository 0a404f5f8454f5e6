"""A model by its Hugging Face id: it is downloaded once, and then found in the cache.

sources.py calls this for a model, or a tokenizer, that is not a folder.
"""

from pathlib import Path

from huggingface_hub import snapshot_download

from nanoengine.config import EngineConfig
from nanoengine.errors import naming, rejected
from nanoengine.features import extension, is_installed

# the files to download from the repository of a tokenizer, and of a model: no others are read
OF_TOKENIZER = ["*.json", "*.model", "*.jinja", "*.txt"]
FILES = [*OF_TOKENIZER, "model.safetensors", "model-*-of-*.safetensors"]


def download(model: str, folder: Path, config: EngineConfig, name: str) -> Path:
    """Returns the folder of a downloaded model.

    folder: the one with this name, which does not exist; name: the argument's, for messages.

    Raises ValueError for an id that is invalid or unknown, and if it cannot be downloaded.
    """
    if is_installed("models.explain"):
        extension("models.explain").check_file(name, folder)
    content = "safetensors" if name == "model" else "a tokenizer"
    accepted = f"a folder with {content}, or a Hugging Face id; there is no folder {folder}"
    # no id looks like this
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise rejected(name, model, accepted)
    with naming(rejected(name, model, accepted)):
        return Path(snapshot_download(
            model, revision=config.revision, cache_dir=config.download_dir,
            allow_patterns=FILES if name == "model" else OF_TOKENIZER))
