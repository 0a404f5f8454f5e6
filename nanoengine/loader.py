"""From a folder or a Hugging Face id to a model: its config, its tokenizer, its weights.

Every parameter of the model is filled exactly once. Projections that `model.py` fuses go straight
to their rows. Nothing is missing, and nothing is left over.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from nanoengine.distributed import ALONE, Group
from nanoengine.model import Decoder, Linear, check_supported
from nanoengine.offload import Offload, choose_layers
from nanoengine.sampling_params import SamplingParams, naming, rejected

EMPTY = torch.empty(0, 0, 0)
FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]

# What counts of generation_config.json is what counts in vLLM, here by our names, and EOS. Other
# entries do no harm if they are False or 0, or as they stand here (None: any value).
DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
            "transformers_version": None, "use_cache": None, "_from_model_config": None,
            "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "typical_p": 1,
            "length_penalty": 1}


def find_model(model: str | Path, revision: str | None = None,
               download_dir: str | Path | None = None, name: str = "model") -> Path:
    """The folder of a model: itself, or the download of a Hugging Face id."""
    # no valid id, an unknown one, no network, no space, …
    with naming(rejected(name, str(model), "a folder, or a Hugging Face id")):
        return Path(model if Path(model).is_dir() else snapshot_download(
            str(model), revision=revision, cache_dir=download_dir, allow_patterns=FILES))


def load_config(folder: Path) -> PretrainedConfig:
    """The model's config.json, checked, with the head_dim that may be left implicit there."""
    if not (folder / "config.json").is_file():
        raise rejected("model", str(folder), "a folder with a config.json")
    with naming(folder / "config.json"):
        content = json.loads((folder / "config.json").read_text())
        # before transformers makes lists that are as long
        for name in ("num_hidden_layers", "num_labels"):
            if content.get(name, 1) not in range(1, 10_001):
                raise rejected(f"the model's {name}", content[name], "from 1 to 10000")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "head_dim", None) is None:
            config.head_dim = config.hidden_size // max(1, config.num_attention_heads)
        check_supported(config)
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None where there is none: then prompts are token ids."""
    if not [*folder.glob("tokenizer.*"), *folder.glob("vocab.json")]:
        return None
    with naming(f"{folder}, tokenizer.json or another file of the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # some mistakes in its files show with the first text
        tokenizer.encode("a")
    return tokenizer


def load_defaults(folder: Path, config: Any,
                  tokenizer: Any) -> tuple[SamplingParams, dict[int, int | None]]:
    """The sampling parameters of generation_config.json, and every EOS with its `stop_reason`.

    As in vLLM, the tokenizer's own EOS gives None, and others give their ids. Warns of what is
    there and does not count here.
    """
    file = folder / "generation_config.json"
    with naming(file):
        content = json.loads(file.read_text()) if file.is_file() else {}
        given = {name: value for name, value in content.items() if value is not None}
        counting = DEFAULTS.keys() & given
        params = SamplingParams(**{DEFAULTS[name]: given[name] for name in counting})
        eos = given.get("eos_token_id", config.eos_token_id)
        eos_ids = eos if isinstance(eos, list) else {eos} - {None}
        if not all(type(token_id) is int for token_id in eos_ids):
            raise rejected("eos_token_id", eos, "a token id, or a list of them")
    ignored = [name for name in given.keys() - counting
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        warnings.warn(f"{file}: {sorted(ignored)} do not count here", stacklevel=2)
    # some files say -1 for none
    eos_tokens: dict[int, int | None] = {
        token_id: token_id for token_id in eos_ids if 0 <= token_id < config.vocab_size}
    # it may know more tokens than the model
    if tokenizer and tokenizer.eos_token_id in range(config.vocab_size):
        eos_tokens[tokenizer.eos_token_id] = None
    return params, eos_tokens


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: str, load_format: str,
               group: Group = ALONE, offload_bytes: float = 0) -> Decoder:
    """The model with its weights in `dtype`; "dummy": random ones, always the same.

    offload_bytes: the weights of so many layers stay in the host's memory.
    """
    with torch.device("meta"):
        model = Decoder(config, group).to(dtype).requires_grad_(False)
    on_host = choose_layers(model.layers, offload_bytes)
    for module in (model.embed_tokens, *model.layers, model.norm, model.lm_head):
        module.to_empty(device="cpu" if module in on_host else device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    targets = checkpoint_tensors(model)
    if load_format == "dummy":
        generator = torch.Generator(device).manual_seed(0)
        # about the spread of trained weights; norms around 1
        for target in targets.values():
            drawn = torch.empty_like(target, device=device)
            drawn.uniform_(-0.03, 0.03, generator=generator).add_(target.ndim == 1)
            target.copy_(drawn)
    else:
        load_weights(folder, targets, group)
    for module in model.modules():
        if isinstance(module, Linear) and device == "cpu":
            module.pack()
    if on_host:
        Offload(model, on_host, device)
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


def load_weights(folder: Path, missing: dict[str, Tensor], group: Group) -> None:
    """Copies the tensors of a checkpoint, sharded or not, to where they go; none stays missing.

    Raises ValueError for a file that is truncated, and for a tensor that is missing, left over,
    given twice, of another shape, or not of floating point.
    """
    for file in sorted(folder.glob("model*.safetensors")):
        with naming(f"{file} is truncated, or does not fit the model"), torch.device("cpu"):
            for full_name in list(safe_open(file, framework="pt").keys()):
                name = re.sub(r"^model\.|self_attn\.|mlp\.", "", full_name)
                if name.endswith("inv_freq") or name == "lm_head.weight" and name not in missing:
                    # computed here; tied to the embedding
                    continue
                # opened anew for each: pages of a mapped file count as memory until it is closed
                tensor = safe_open(file, framework="pt").get_slice(full_name)
                target = missing.pop(name, EMPTY)
                part = part_of(tensor.get_shape(), target, group)
                if part is None or "F" not in tensor.get_dtype():
                    shown = f"{tensor.get_dtype()} of shape {tuple(tensor.get_shape())}"
                    raise rejected(full_name, shown, "floats of the model's shape, and come once")
                rows = tensor[part]
                target[:len(rows)].copy_(rows)
                # the last part of a vocabulary may be shorter
                target[len(rows):].zero_()
                # what all ranks add up has the bias of one
                if group.rank and name.endswith(("o_proj.bias", "down_proj.bias")):
                    target.zero_()
    if missing:
        raise ValueError(f"{folder}: its files lack {len(missing)} tensors: {[*missing][:3]}")


def part_of(shape: list[int], target: Tensor, group: Group) -> tuple[slice, ...] | None:
    """The part of a checkpoint's tensor that a rank has: its share where the tensor is larger than
    its target. None where it does not fit."""
    shares = [-(-size // group.size) for size in shape]
    fits = len(shape) == target.ndim and all(
        own in (size, share) for size, share, own in zip(shape, shares, target.shape))
    return tuple(slice(None) if own == size else slice(group.rank * own, (group.rank + 1) * own)
                 for size, own in zip(shape, target.shape)) if fits else None

