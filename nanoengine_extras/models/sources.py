"""What can be loaded besides a folder with safetensors of the engine's own families.

It fills three slots: where a model is found, how its config.json is read, and what loads it.

    a GGUF file            becomes a folder: see gguf/
    a Hugging Face id      is downloaded: see hub.py
    quantized weights      are read by quantized/
    other families         are computed by transformers: see transformers_models/

explain.py says first, if it is installed, why a folder cannot be run. For the engine's own
families, `check_own` finds odd entries of config.json that the engine by itself would not notice,
and `context_length` knows how scaled rotary positions lengthen the context.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from nanoengine import loader
from nanoengine.config import EngineConfig
from nanoengine.errors import naming, rejected
from nanoengine.features import extension, part, shown
from nanoengine.model import FAMILIES, entry_of, window_of
from nanoengine.model_runner import ModelRunner
from nanoengine_extras.models import SUPPORTED, weight_files

# The kinds of rotary positions that lengthen the context by a factor, and the entry that is
# multiplied: vLLM's rule (`_get_and_verify_max_len`). For llama3, max_position_embeddings is the
# length after the scaling. For yarn it can be the length before or after, and counts only if the
# other entry is absent: transformers then sets that to the same number.
LENGTHENED = {"linear": "max_position_embeddings", "yarn": "original_max_position_embeddings"}


def find_model(model: str | Path, config: EngineConfig, name: str) -> Path:
    """Returns the folder of a model, or of a tokenizer: the given one, the download of a Hugging
    Face id, or one made from a GGUF file. name: the argument's name, for messages."""
    asked = f"{name}={shown(model)}"
    with naming(asked):
        folder = Path(model).expanduser().absolute()
        is_folder = folder.is_dir()
        # explain.py refuses names of files that lead out of the folder
        part("check_names", None, lambda folder: None)(folder)
        files = [folder, *(weight_files(folder) or folder.glob("*"))]
    if any(file.suffix.lower() == ".gguf" for file in files):
        with naming(f"{asked} needs nanoengine_extras/models/gguf and the package gguf"):
            from nanoengine_extras.models.gguf import files as gguf_files
        return gguf_files.as_folder(folder, config, name)
    if is_folder:
        return folder
    hub = extension("models.hub", f"{asked}, which is not a folder,")
    return hub.download(str(model), folder, config, name)


def load_config(folder: Path, config: EngineConfig) -> PretrainedConfig:
    """Returns the config.json of a model, as `loader.load_config` does, or for a model that
    transformers computes, what the engine must know about it.

    `EngineConfig.model_impl` decides: "auto" is "native" for an architecture of model.py.
    """
    part("check_folder", None, lambda *_: None)(folder, config.load_format, config.model_impl)
    with naming(folder / "config.json"):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # not the architecture: EXAONE's config.json may name Llama's
        is_own = found.model_type in FAMILIES
        if config.model_impl == "transformers" or config.model_impl == "auto" and not is_own:
            asked = f"architectures={found.architectures}"
            return extension("models.transformers_models", asked).describe(found)
    own = loader.load_config(folder)
    with naming(folder / "config.json"):
        check_own(own)
        own.max_position_embeddings = context_length(own)
    return own


def check_own(config: PretrainedConfig) -> None:
    """Raises ValueError for entries that the engine cannot compute, or does not understand as
    transformers does."""
    loader.check_supported(config, SUPPORTED)
    if config.num_attention_heads % max(1, config.num_key_value_heads):
        raise rejected("the model's num_attention_heads", config.num_attention_heads,
                       f"a multiple of num_key_value_heads={config.num_key_value_heads}")
    # transformers has windows in some layers of these families, too
    kinds = vars(config).get("layer_types") or []
    if "sliding_attention" in kinds and not entry_of(config, "layer_types"):
        raise rejected("the model's layer_types", kinds, "only 'full_attention'")
    # with a window of 1, transformers contradicts itself: its cache keeps all keys
    windows = [window_of(config, index) for index in range(config.num_hidden_layers)]
    if any(window is not None and window < 2 for window in windows):
        raise rejected("the model's sliding_window", config.sliding_window, "at least 2")


def context_length(config: PretrainedConfig) -> int:
    """Returns how many tokens the model can see: see `LENGTHENED`."""
    rope = config.rope_parameters
    length = config.max_position_embeddings
    scaled = LENGTHENED.get(rope["rope_type"])
    # without a factor, it is the length after the scaling
    if not scaled or rope["factor"] is None:
        return length
    return int(rope.get(scaled, length) * rope["factor"])


def any_loader(runner: ModelRunner, load: Callable) -> Callable:
    """Returns a function with the arguments of `loader.load_model`. load: what loads a model of
    model.py."""
    def load_any(config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 dtype: torch.dtype, **options: Any) -> Any:
        if config.quantization or vars(model_config).get("quantization_config"):
            options |= extension("models.quantized", "its quantization").slots(runner, folder)
        finish = options.pop("finish", lambda model: model)
        if model_config.model_type not in FAMILIES:
            return extension("models.transformers_models").load(runner, folder, **options)
        model = load(config, model_config, folder, dtype, files=weight_files, **options)
        # the caller can have another default device
        with torch.device("cpu"):
            return finish(model)

    return load_any


PARTS = {"find_model": find_model, "load_config": load_config, "any_loader": any_loader}
