"""From a folder or a Hugging Face id to a model: its config, its tokenizer, its weights.

Every parameter of the model is filled exactly once. Projections that `model.py` fuses go straight
to their rows. Nothing is missing, and nothing is left over.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

import nanoengine_cpu
from nanoengine.model import Decoder, check_supported
from nanoengine.sampling_params import SamplingParams, naming, rejected

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
# The entries of generation_config.json that are used, as in vLLM, with our names. Other entries are
# ignored, with a warning unless they are False, 0 or as in HARMLESS (None: any value).
DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def find_model(model: str | Path, revision: str | None = None,
               download_dir: str | Path | None = None, name: str = "model") -> Path:
    """Returns the folder of a model: the given one, or the download of a Hugging Face id."""
    folder = Path(model).expanduser().absolute()
    accepted = f"a folder with safetensors, or a Hugging Face id; there is no folder {folder}"
    # an invalid or unknown id, no network, no space, …
    with naming(rejected(name, str(model), accepted)):
        return folder if folder.is_dir() else Path(snapshot_download(
            str(model), revision=revision, cache_dir=download_dir, allow_patterns=FILES))


def load_config(folder: Path) -> PretrainedConfig:
    """Returns the model's config.json, checked, with the head_dim that can be implicit there."""
    with naming(file := folder / "config.json"):
        content = json.loads(file.read_text())
        # first, since transformers makes lists of this length
        for name in ("num_hidden_layers", "num_labels"):
            if content.get(name, 1) not in range(1, 10_001):
                raise rejected(f"the model's {name}", content[name], "from 1 to 10000")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "head_dim", None) is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        check_supported(config)
    return config


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder, or None without one: then prompts are token ids."""
    if not [*folder.glob("tokenizer.*"), *folder.glob("vocab.json")]:
        return None
    with naming(f"{folder}, tokenizer.json or another file of the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # some mistakes in its files only show with a text
        tokenizer.encode("a")
    return tokenizer


def load_defaults(folder: Path, config: PretrainedConfig,
                  tokenizer: Any) -> tuple[SamplingParams, dict[int, int | None]]:
    """Returns the parameters of generation_config.json, and every EOS with its `stop_reason`.

    As in vLLM, the tokenizer's own EOS gives None, and others give their ids. Warns of entries that
    have no effect here.
    """
    with naming(file := folder / "generation_config.json"):
        content = json.loads(file.read_text()) if file.is_file() else {}
        given = {name: value for name, value in content.items() if value is not None}
        params = SamplingParams(**{DEFAULTS[name]: given[name] for name in DEFAULTS.keys() & given})
        eos = given.get("eos_token_id", config.eos_token_id)
        eos_ids = eos if isinstance(eos, list) else {eos} - {None}
        if not all(type(token_id) is int for token_id in eos_ids):
            raise rejected("eos_token_id", eos, "a token id, or a list of them")
    ignored = [name for name in given.keys() - DEFAULTS.keys()
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        logging.getLogger("nanoengine").warning(f"{file}: {sorted(ignored)} have no effect here")
    own = tokenizer and tokenizer.eos_token_id
    # some files say -1 for none, and some tokenizers know more tokens than the model
    known = [i for i in {*eos_ids, own} - {None} if i in range(config.vocab_size)]
    return params, {i: None if i == own else i for i in known}


# --------------------------------------------------------------------------------- weights


def place_on(device: str, model: nn.Module) -> None:
    """Allocates memory for the weights of a model, or of a part of one.

    Raises ValueError, before it allocates anything, if the device does not have enough memory.
    """
    num_bytes = sum(weights.nbytes for weights in model.parameters())
    _, total = (torch.cuda if device == "cuda" else nanoengine_cpu).mem_get_info()
    if num_bytes > total:
        raise rejected("model", f"{num_bytes / 2**30:.3g} GiB of weights",
                       f"smaller: device {device!r} has {total / 2**30:.1f} GiB of memory")
    model.to_empty(device=device)


def load_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: str,
               load_format: str = "auto", place: Callable[..., None] = place_on,
               read: Callable[..., Tensor] = lambda tensor, target: tensor[:]) -> Decoder:
    """Returns the model with its weights in `dtype`; "dummy": random ones, always the same.

    place, read: for extensions: allocates memory for the weights (see `place_on`), and reads the
        part of a checkpoint's tensor that belongs in its target.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype).requires_grad_(False)
    place(device, model)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    if load_format == "dummy":
        generator = torch.Generator(device).manual_seed(0)
        for weights in model.parameters():
            drawn = torch.empty_like(weights, device=device)
            # about the spread of trained weights; norms are around 1
            drawn.uniform_(-0.03, 0.03, generator=generator).add_(weights.ndim == 1)
            weights.copy_(drawn)
    else:
        load_weights(folder, checkpoint_tensors(model), read)
    return model


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the target of each tensor of a checkpoint: a view of (a part of) a parameter, by
    name.

    The rows of "….qkv_proj.weight" are those of "….q_proj.weight", then of k and v.
    """
    targets = {}
    # a tied parameter once, under its first name
    for name, parameter in model.named_parameters():
        # ".layers.0.self_attn", "qkv_proj", "weight"; the first dot gives "norm.weight" three parts
        path, own, kind = f".{name}".rsplit(".", 2)
        module = model.get_submodule(f"{path}.{own}"[1:])
        parts = getattr(module, "parts", {own: len(parameter)})
        for part, rows in zip(parts, parameter.split(list(parts.values()))):
            targets[f"{path}.{part}.{kind}"[1:]] = rows
    return targets


def load_weights(folder: Path, missing: dict[str, Tensor], read: Callable[..., Tensor]) -> None:
    """Copies the tensors of a checkpoint, sharded or not, to their targets, and fills all of them.

    missing: the targets by name; each is removed when it is filled.

    Raises ValueError for a file that is truncated, and for a tensor that is missing, unknown, given
    twice, of another shape, or not of floating point.
    """
    for file in sorted(folder.glob("model*.safetensors")):
        with naming(f"{file} is truncated, or does not fit the model"), torch.device("cpu"):
            for full_name in list(safe_open(file, framework="pt").keys()):
                name = full_name.removeprefix("model.")
                if name.endswith("inv_freq") or (name == "lm_head.weight" and name not in missing):
                    # computed here; tied to the embedding
                    continue
                # opened for each tensor: pages of a mapped file count as memory until it is closed
                tensor = safe_open(file, framework="pt").get_slice(full_name)
                target = missing.pop(name)
                loaded = read(tensor, target)
                if loaded.shape != target.shape or not loaded.is_floating_point():
                    shown = f"{tensor.get_dtype()} of shape {tuple(tensor.get_shape())}"
                    raise rejected(full_name, shown, f"floats of shape {tuple(target.shape)}")
                target.copy_(loaded)
    if missing:
        raise ValueError(f"{folder}: its safetensors lack {len(missing)} tensors: {[*missing][:3]}"
                         ". Only model*.safetensors are read; .bin and .gguf files are not")
