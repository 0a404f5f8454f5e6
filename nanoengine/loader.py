"""From a folder or a Hugging Face id to a model: its config, its tokenizer, its weights.

Every parameter of the model is filled exactly once. Projections that `model.py` fuses go straight
to their rows. Nothing is missing, and nothing is left over.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from nanoengine.model import Decoder, Linear, check_supported
from nanoengine.sampling_params import SamplingParams, rejected

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(model: str | Path) -> Path:
    """The folder of a model: itself, or the download of a Hugging Face id."""
    try:
        is_folder = Path(model).is_dir()
        return Path(model if is_folder else snapshot_download(str(model), allow_patterns=FILES))
    # no valid id, an unknown one, no network, no space, …
    except Exception as error:
        raise rejected("model", str(model), f"a folder, or a Hugging Face id: {error}") from error


def load_config(folder: Path) -> PretrainedConfig:
    """The model's config.json, checked, with the head_dim that may be left implicit there."""
    if not (folder / "config.json").is_file():
        raise rejected("model", str(folder), "a folder with a config.json")
    config = AutoConfig.from_pretrained(folder)
    check_supported(config)
    if not getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None where there is none: then prompts are token ids."""
    is_there = [*folder.glob("tokenizer.*"), *folder.glob("vocab.json")]
    return AutoTokenizer.from_pretrained(folder) if is_there else None


def load_defaults(folder: Path, config: Any, tokenizer: Any) -> tuple[SamplingParams, set[int]]:
    """From generation_config.json: sampling parameters; from there and the tokenizer: every EOS."""
    file = folder / "generation_config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    names = [name for name in ("temperature", "top_p", "top_k") if found.get(name) is not None]
    eos = found.get("eos_token_id", config.eos_token_id)
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer and tokenizer.eos_token_id}
    return SamplingParams(**{name: found[name] for name in names}), ends - {None}


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: str,
               load_format: str) -> Decoder:
    """The model with its weights in `dtype`; "dummy": random ones, always the same."""
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model.to_empty(device=device).requires_grad_(False)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    targets = checkpoint_tensors(model)
    if load_format == "dummy":
        generator = torch.Generator(device).manual_seed(0)
        # about the spread of trained weights; norms around 1
        for target in targets.values():
            target.uniform_(-0.03, 0.03, generator=generator).add_(target.ndim == 1)
    else:
        load_weights(folder, targets)
    for module in model.modules():
        if isinstance(module, Linear) and device == "cpu":
            module.pack()
    return model


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name, and a view of (a part of) a parameter.

    The rows of "layers.0.qkv_proj.weight" are those of "layers.0.q_proj.weight", then of k and v.
    """
    targets = {}
    # a tied one once, under its first name
    for name, parameter in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        parent, dot, own = path.rpartition(".")
        parts = getattr(model.get_submodule(path), "parts", {own: len(parameter)})
        for part, rows in zip(parts, parameter.split(list(parts.values()))):
            targets[f"{parent}{dot}{part}.{kind}"] = rows
    return targets


def load_weights(folder: Path, missing: dict[str, Tensor]) -> None:
    """Copies the tensors of a checkpoint, sharded or not, to where they go; none stays missing.

    Raises ValueError for a file that is truncated, and for a tensor that is missing, left over,
    given twice or of another shape.
    """
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            for full_name in list(safe_open(file, framework="pt").keys()):
                name = re.sub(r"^model\.|self_attn\.|mlp\.", "", full_name)
                if name.endswith("inv_freq") or name == "lm_head.weight" and name not in missing:
                    # computed here; tied to the embedding
                    continue
                # opened anew for each: pages of a mapped file count as memory until it is closed
                tensor = safe_open(file, framework="pt").get_tensor(full_name)
                target = missing.pop(name, None)
                if target is None or target.shape != tensor.shape:
                    raise ValueError(f"{file}: {full_name} of shape {tuple(tensor.shape)} does "
                                     f"not fit the model, or comes twice")
                target.copy_(tensor)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated, or no safetensors: {error}") from error
    if missing:
        raise ValueError(f"{folder}: its files lack {len(missing)} tensors: {[*missing][:3]}")
