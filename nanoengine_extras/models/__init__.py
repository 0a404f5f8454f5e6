"""What several features of this folder share: the files of a checkpoint, and what the engine's own
families compute."""

import json
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoengine import loader
from nanoengine.errors import naming
from nanoengine.model import FAMILIES

# the classes of transformers that the engine's own model replaces
ARCHITECTURES = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) for name in FAMILIES]
# the table of loader.py, and entries that are rarely wrong
SUPPORTED: dict[str, list | range] = {
    "architectures": ARCHITECTURES,
    **loader.SUPPORTED,
    "is_causal": [True],
    "transformers_weights": [None],
    # positions are int32
    "max_position_embeddings": range(1, 2**31),
    "partial_rotary_factor": [1.0]}


def read_json(file: Path) -> dict:
    """Returns the entries of a JSON file; none if it is absent."""
    return json.loads(file.read_bytes()) if file.is_file() else {}


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that transformers would read: model.safetensors, or else those that the
    index names. Files that are absent are left out."""
    files = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not files[0].is_file():
        with naming(index):
            files = [folder / name for name in sorted({*read_json(index)["weight_map"].values()})]
    return [file for file in files if file.is_file()]
