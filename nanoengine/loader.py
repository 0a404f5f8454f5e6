"""From a folder to a model: its config, its tokenizer, its weights.

Every parameter of the model is filled exactly once. Projections that `model.py` fuses are read
straight into their rows of the fused weight. A tensor that is missing or left over is an error.

To add a model of the Llama family, add it to `FAMILIES` in model.py, and add a line there for each
difference that `Family` does not cover yet.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from nanoengine.config import EngineConfig
from nanoengine.errors import also_check, naming, rejected
from nanoengine.features import extension
from nanoengine.model import FAMILIES, Decoder, rope_table

# What `Decoder` computes exactly: the values of entries in config.json, or of lists there. If an
# entry is missing, transformers assumes the first of these values.
SUPPORTED: dict[str, list] = {
    "model_type": [*FAMILIES],
    "layer_types": ["full_attention", "sliding_attention"],
    "hidden_act": ["silu"],
    "rope_type": ["default", "llama3", "linear", "yarn"]}


def find_folder(model: str | Path, config: EngineConfig, name: str) -> Path:
    """Returns the absolute path of a folder with a model or a tokenizer. With sources.py, a
    feature, `model` can also be a Hugging Face id or a GGUF file.

    name: the argument's name, for messages.
    """
    folder = Path(model).expanduser().absolute()
    if folder.is_dir():
        return folder
    raise rejected(name, model, "a folder; others need nanoengine_extras/models/sources.py")


def load_config(folder: Path, options: EngineConfig | None = None) -> PretrainedConfig:
    """Returns the config.json of a model of model.py, checked, with head_dim filled in if it is
    absent. sources.py also makes max_position_embeddings larger, where scaled rotary positions
    lengthen the context.

    options: sources.py reads which implementation of the model they ask for.
    """
    with naming(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if vars(config).get("head_dim") is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        check_supported(config)
    return config


def check_supported(config: PretrainedConfig, supported: dict = SUPPORTED) -> None:
    """Raises ValueError for a model that `Decoder` cannot compute.

    supported: sources.py, a feature, gives more entries.
    """
    for name, values in supported.items():
        found = config.rope_parameters.get(name, getattr(config, name, values[0]))
        for each in found if isinstance(found, list) else [found]:
            if each not in values:
                raise rejected(f"the model's {name}", each, f"one of {values}")
    # transformers knows which parameters a rope_type has
    rope_table(config, max_model_len=1)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder, or None if it has none: then prompts are token ids.

    Raises ValueError for one that transformers implements only in Python.
    """
    if not [*folder.glob("tokenizer*"), *folder.glob("vocab.*")]:
        return None
    with naming(f"{folder}: its tokenizer must have a tokenizer.json that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # some mistakes in its files show only when it encodes text
        tokenizer.backend_tokenizer.decode(tokenizer.encode("a"))
    return tokenizer


def load_eos(folder: Path, config: PretrainedConfig,
             tokenizer: Tokenizer | None) -> dict[int, int | None]:
    """Returns every EOS token with its `stop_reason`: as in vLLM, None for the tokenizer's own, and
    the id for those from generation_config.json, or else from config.json."""
    with naming(file := folder / "generation_config.json"):
        eos = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
        eos = config.eos_token_id if eos is None else eos
        reasons = {each: each for each in (eos if isinstance(eos, list) else [eos])}
    if tokenizer:
        reasons[tokenizer.eos_token_id] = None
    # some files say -1 for none, and some tokenizers know more tokens than the model
    return {token_id: reason for token_id, reason in reasons.items()
            if isinstance(token_id, int) and 0 <= token_id < config.vocab_size}


# --------------------------------------------------------------------------------- weights


def place_on(model: nn.Module, device: str) -> None:
    """Allocates memory for the weights of a model, or of a part of one."""
    also_check("memory", model.parameters(), device)
    model.to_empty(device=device)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Maps the name of each tensor in a checkpoint to its place: a parameter, or a view of some of
    a parameter's rows.

    The rows of "….qkv_proj.weight" are those of "….q_proj.weight", then of k and v.
    """
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        parent, _, own = path.rpartition(".")
        parts = getattr(model.get_submodule(path), "parts", {own: len(parameter)})
        for part, rows in zip(parts, parameter.split([*parts.values()])):
            targets[f"{parent}.{part}.{kind}".lstrip(".")] = rows
    return targets


def weight_files(folder: Path) -> list[Path]:
    """Returns model.safetensors, or else the files model-*.safetensors. sources.py, a feature,
    reads the names in the checkpoint's index instead."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("model-*.safetensors"))


def load_model(options: EngineConfig, config: PretrainedConfig, folder: Path, dtype: torch.dtype,
               place: Callable = place_on, read: Callable = lambda tensor, target: tensor[:],
               opened: Callable = safe_open, files: Callable = weight_files) -> Decoder:
    """Returns the model with its weights in `dtype`; load_format="dummy" makes random ones.

    options: of the engine; config: of the model.
    place: allocates memory for the weights.
    read: reads the part of a checkpoint's tensor that belongs in its target.
    opened: opens a file of weights.
    files: finds these files. Offloading, tensor parallelism, quantization and sources.py replace
        these four.

    Raises ValueError for a file that is truncated, and for a tensor that is missing, unknown, given
    twice, of the wrong shape, or not floating-point.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype).requires_grad_(False)
    place(model, options.device)
    if options.load_format == "dummy":
        extension("models.dummy").fill(model, config, options.device)
        return model
    # each tensor of the checkpoint goes to its part of a parameter, until all are filled
    missing = checkpoint_tensors(model)
    for file in files(folder):
        with naming(file), torch.device("cpu"):
            names = opened(file, framework="pt").keys()
            # rope_table computes inv_freq
            for name in [each for each in names if not each.endswith("inv_freq")]:
                # opened per tensor: a mapped file's pages count as used memory until it is closed
                tensor = opened(file, framework="pt").get_slice(name)
                target = missing.pop(name.removeprefix("model."), None)
                if target is None:
                    raise ValueError(f"the model has no tensor {name!r}, or the file has it twice")
                loaded = read(tensor, target)
                if loaded.shape != target.shape or not loaded.is_floating_point():
                    found = f"{tensor.get_dtype()} of shape {tuple(tensor.get_shape())}"
                    raise rejected(name, found, f"floats of shape {tuple(target.shape)}")
                target.copy_(loaded)
    if config.tie_word_embeddings:
        embedding = model.embed_tokens
        head = model.lm_head
        # A checkpoint can have both matrices. If they differ, the model uses both, as transformers
        # does.
        if missing.pop("embed_tokens.weight", None) is not None:
            embedding.weight = head.weight
        elif (missing.pop("lm_head.weight", None) is not None
              or torch.equal(head.weight, embedding.weight)):
            head.weight = embedding.weight
    if missing:
        raise ValueError(f"{folder}: its files lack {len(missing)} tensors: {[*missing][:3]}")
    return model
