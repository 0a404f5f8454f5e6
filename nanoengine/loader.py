"""From a folder or a Hugging Face id to a model: its config, its tokenizer, its weights.

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
from nanoengine.errors import checks, logger, naming, rejected
from nanoengine.features import extension, is_installed
from nanoengine.model import FAMILIES, Decoder, entry_of, rope_table

# the transformers classes that `Decoder` can replace
ARCHITECTURES = [family.architecture for family in FAMILIES.values()]
# values that all families share in config.json; transformers assumes them for missing entries
USUAL = {"hidden_act": "silu", "is_causal": True, "transformers_weights": None}


def find_model(model: str | Path, config: EngineConfig, name: str = "model") -> Path:
    """Returns the folder of a model, or of a tokenizer: the given one, the download of a Hugging
    Face id, or one made from a GGUF file. name: the argument's name, for messages."""
    folder = Path(model).expanduser().absolute()
    files = [folder, *(weight_files(folder) or folder.glob("*"))]
    if any(file.suffix.lower() == ".gguf" for file in files):
        quantized = extension("models.quantized", f"{name}={str(model)!r}")
        return quantized.as_folder(folder, config, name)
    if folder.is_dir():
        return folder
    hub = extension("models.hub", f"{name}={str(model)!r}, which is not a folder,")
    return hub.download(str(model), folder, config, name)


def load_config(folder: Path, load_format: str = "dummy",
                model_impl: str = "native") -> PretrainedConfig:
    """Returns the model's config.json, checked, with head_dim filled in if it is absent.

    load_format: where the weights come from; "dummy": the folder need not have any.
    model_impl: "native": a family of model.py; "transformers": any model, in transformers' code;
        "auto": "native" if model.py has the architecture, else "transformers".
    """
    if is_installed("models.explain"):
        extension("models.explain").check_folder(folder, load_format, model_impl)
    with naming(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # not the architecture: EXAONE's config.json may name Llama's
        known = config.model_type in FAMILIES
        if model_impl == "transformers" or model_impl == "auto" and not known:
            return extension(
                "models.transformers_models", str(config.architectures)).describe(config)
        if vars(config).get("head_dim") is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        check_supported(config)
    return config


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model that `Decoder` cannot compute exactly."""
    def check(name: str, value: object, supported: list | range) -> None:
        if value not in supported:
            raise rejected(f"the model's {name}", value, f"one of {supported}")

    check("architectures", config.architectures, [[name] for name in ARCHITECTURES])
    check("model_type", config.model_type, [*FAMILIES])
    rest = config.num_attention_heads % max(1, config.num_key_value_heads)
    check("num_attention_heads % num_key_value_heads", rest, [0])
    for name, usual in USUAL.items():
        check(name, getattr(config, name, usual), [usual])
    # positions are int32
    check("max_position_embeddings", int(config.max_position_embeddings), range(1, 2**31))
    rope = config.rope_parameters
    check("rope_type", rope["rope_type"], ["default", "linear", "llama3", "yarn"])
    check("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0])
    windowed = ["sliding_attention"] if entry_of(config, "layer_types") else []
    for kind in vars(config).get("layer_types") or ():
        check("layer_types", kind, ["full_attention", *windowed])
    # transformers knows which parameters a rope_type has
    rope_table(config, max_model_len=1)


def context_length(config: PretrainedConfig) -> int:
    """Returns how many tokens the model can see, by vLLM's rule (`_get_and_verify_max_len`):

        default, llama3   max_position_embeddings
        linear            factor * max_position_embeddings
        yarn              factor * original_max_position_embeddings

    For llama3, max_position_embeddings is the length after the scaling. For yarn it can be the
    length before or after the scaling, and counts only if original_max_position_embeddings is
    absent. Without a factor, it is the length after the scaling.
    """
    rope = config.rope_parameters
    length = config.max_position_embeddings
    if rope["rope_type"] in ("default", "llama3") or rope["factor"] is None:
        return length
    if rope["rope_type"] == "yarn":
        # transformers sets a missing one to max_position_embeddings
        length = rope["original_max_position_embeddings"]
    return int(length * rope["factor"])


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder, or None if it has none: then prompts are token ids.

    Raises ValueError for one that transformers implements only in Python.
    """
    if not [*folder.glob("tokenizer*"), *folder.glob("vocab.*")]:
        return None
    with naming(f"{folder} needs a tokenizer.json (not a Python tokenizer), or tokenizer=…"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # some mistakes in its files show only when it encodes text
        tokenizer.backend_tokenizer.decode(tokenizer.encode("a"))
    return tokenizer


def load_eos(folder: Path, config: PretrainedConfig,
             tokenizer: Tokenizer | None) -> dict[int, int | None]:
    """Returns every EOS token with its `stop_reason`: as in vLLM, None for the tokenizer's own, and
    the id for those from generation_config.json, or else from config.json."""
    with naming(file := folder / "generation_config.json"):
        given = json.loads(file.read_text()) if file.is_file() else {}
        eos = given.get("eos_token_id")
    eos = config.eos_token_id if eos is None else eos
    own = tokenizer and tokenizer.eos_token_id
    # some files say -1 for none, and some tokenizers know more tokens than the model
    ids = eos if isinstance(eos, list) else [eos]
    known = [i for i in {*ids, own} - {None} if i in range(config.vocab_size)]
    return {i: None if i == own else i for i in known}


# --------------------------------------------------------------------------------- weights


def place_on(model: nn.Module, device: str) -> None:
    """Allocates memory for the weights of a model, or of a part of one."""
    checks().memory(model.parameters(), device)
    model.to_empty(device=device)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Maps the name of each tensor in a checkpoint to its place: a parameter, or a view of some of
    a parameter's rows.

    The rows of "….qkv_proj.weight" are those of "….q_proj.weight", then of k and v.
    """
    targets = {}
    for name, parameter in model.named_parameters():
        # ".layers.0.self_attn", "qkv_proj", "weight"; the leading dot gives "norm.weight" 3 parts
        path, own, kind = f".{name}".rsplit(".", 2)
        module = model.get_submodule(f"{path}.{own}"[1:])
        parts = getattr(module, "parts", {own: len(parameter)})
        for part, rows in zip(parts, parameter.split([*parts.values()])):
            targets[f"{path}.{part}.{kind}"[1:]] = rows
    return targets


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that transformers would read: model.safetensors, or else those that the
    index names. Files that are absent are left out."""
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / names[0]).is_file():
        with naming(index):
            names = sorted({*json.loads(index.read_text())["weight_map"].values()})
    return [folder / name for name in names if (folder / name).is_file()]


def load_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: str,
               load_format: str = "auto", place: Callable = place_on,
               read: Callable = lambda tensor, target: tensor[:],
               opened: Callable = safe_open) -> Decoder:
    """Returns the model with its weights in `dtype`; load_format="dummy" makes random ones.

    place: allocates memory for the weights.
    read: reads the part of a checkpoint's tensor that belongs in its target.
    opened: opens a file of weights. Offloading, tensor parallelism and quantization replace
        these three.

    Raises ValueError for a file that is truncated, and for a tensor that is missing, unknown, given
    twice, of the wrong shape, or not floating-point.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype).requires_grad_(False)
    place(model, device)
    if load_format == "dummy":
        extension("models.dummy").fill(model, config, device)
        return model
    # each tensor of the checkpoint goes to its part of a parameter, until all are filled
    missing = checkpoint_tensors(model)
    for file in weight_files(folder):
        with naming(f"{file} is truncated, or does not fit the model"), torch.device("cpu"):
            names = opened(file, framework="pt").keys()
            # rope_table computes inv_freq
            for name in [each for each in names if not each.endswith("inv_freq")]:
                # opened per tensor: a mapped file's pages count as used memory until it is closed
                tensor = opened(file, framework="pt").get_slice(name)
                target = missing.pop(name.removeprefix("model."))
                loaded = read(tensor, target)
                if loaded.shape != target.shape or not loaded.is_floating_point():
                    shown = f"{tensor.get_dtype()} of shape {tuple(tensor.get_shape())}"
                    raise rejected(name, shown, f"floats of shape {tuple(target.shape)}")
                target.copy_(loaded)
    if config.tie_word_embeddings:
        tie(model.embed_tokens, model.lm_head, missing)
    if missing:
        raise ValueError(f"{folder}: its files lack {len(missing)} tensors: {[*missing][:3]}")
    return model


def tie(embedding: nn.Embedding, head: nn.Linear, missing: dict[str, Tensor]) -> None:
    """Makes both modules share a matrix, under whichever name the checkpoint has.

    As in transformers, a checkpoint with two different matrices keeps both, with a warning.
    """
    if missing.pop("embed_tokens.weight", None) is not None:
        embedding.weight = head.weight
    elif (missing.pop("lm_head.weight", None) is not None
          or torch.equal(head.weight, embedding.weight)):
        head.weight = embedding.weight
    else:
        logger.warning("tie_word_embeddings: lm_head.weight and embed_tokens.weight differ")
