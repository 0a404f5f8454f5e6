"""Says in one sentence why a model cannot be run, and what to do instead.

`loader.py` calls this before it reads a model. Without this file, the engine refuses these models
later, with the error of the library that fails. To support one of these kinds, remove its row.
"""

import json
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as USUAL

from nanoengine.errors import logger, naming, rejected
from nanoengine.model import FAMILIES
from nanoengine_extras.models import ARCHITECTURES, SUPPORTED, read_json, weight_files

# the models that are accepted instead
ORIGINAL = "the original model, with config.json and safetensors"
FOR_TRANSFORMERS = "its version for transformers, with config.json and safetensors"
CONVERTED = ("converted by `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)` "
             "of transformers")
MERGED = "merged into its model by PEFT's `merge_and_unload()`, and saved"
WRITER = "a model that writes text"
# the names of such classes end with one of these
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")

# a file's name, its meaning, and what the model must be; the first row that fits counts
Row = tuple[str, str, str]
# contents of a folder without config.json
NO_CONFIG: tuple[Row, ...] = (
    ("adapter_config.json", "is an adapter (LoRA), not a whole model", MERGED),
    ("model_index.json", "is a diffusers pipeline, which makes images", WRITER),
    ("modules.json", "is a sentence-transformers model, which makes embeddings", WRITER),
    ("consolidated*", "is a model in its maker's own format", FOR_TRANSFORMERS),
    ("*/config.json", "has models in subfolders", "one of these, such as {folder}"),
    ("*", "has no config.json", "a folder that transformers' save_pretrained has made"))
# contents of a folder without safetensors
NO_WEIGHTS: tuple[Row, ...] = (
    ("adapter_model*", "has only an adapter (LoRA) of the weights", MERGED),
    ("pytorch_model*", "has its weights in {name}, which can hold arbitrary code and is not read",
     CONVERTED),
    ("consolidated*", "has its weights in its maker's own format", FOR_TRANSFORMERS),
    ("*.safetensors", "has its weights in {name}, which is not read",
     "a folder with model.safetensors, or with a model.safetensors.index.json"),
    ("*.onnx", "has its weights in ONNX format", ORIGINAL),
    ("*.h5", "has its weights in TensorFlow's format", ORIGINAL),
    ("*.msgpack", "has its weights in Flax's format", ORIGINAL),
    ("*", "lacks its weights", "downloaded again (or load_format='dummy', for random weights)"))

# -------------------------------------------------------------------------------- config.json

# the ends of names that only tensors of quantized weights have
SCALES = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", ".absmax", ".SCB")
# where some tools store how a model is quantized: files, and an entry of config.json
OLD = {"quantize_config.json", "quant_config.json", "hf_quant_config.json", "compression_config",
       "quantization"}

Config = dict[str, Any]
# a test of the config, the problem if it holds, and what the model must be
Kind = tuple[Callable[[Config], Any], str, str]


def has_small_window(config: Config) -> bool:
    """Whether a token would see no token before it. With a window of 1, transformers contradicts
    itself: its cache keeps all tokens."""
    is_used = config.get("model_type") == "mistral" or config.get("use_sliding_window")
    window = config.get("sliding_window")
    return bool(is_used) and isinstance(window, int) and window < 2


def has_several_ropes(config: Config) -> bool:
    rope = config.get("rope_parameters")
    return isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())


def uncomputed(config: Config) -> str:
    """Returns an entry, such as "hidden_act='gelu'", that the engine's own families can have, but
    only in transformers; "" if there is none."""
    is_ministral = config.get("model_type") == "mistral" and "layer_types" in config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if config.get("model_type") not in [*FAMILIES] or is_ministral or not isinstance(rope, dict):
        return ""
    given = {**config, "rope_type": rope.get("type"), **rope}
    entries = {name: given.get(name) for name in ("hidden_act", "rope_type",
                                                  "partial_rotary_factor")}
    return next((f"{name}={value!r}" for name, value in entries.items()
                 if value is not None and value not in SUPPORTED[name]), "")


SMALL_WINDOW = "has a sliding_window of {sliding_window} tokens", "a model with at least 2"
ELSEWHERE: Kind = (
    lambda c: OLD & {*c["names"], *filter(c.get, c)} and not c.get("quantization_config"),
    "says how it is quantized in a place that is not read (quantize_config.json, "
    "quant_config.json, hf_quant_config.json, quantization or compression_config)",
    'completed: config.json must have these under "quantization_config", with a "quant_method": '
    '"gptq", "awq" or "mlx"')
# families other than the engine's own
OTHERS: tuple[Kind, ...] = (
    (lambda c: not c["architecture"], "names no architectures in its config.json",
     'completed there, for example with "architectures": ["{usual}"]'),
    (lambda c: c.get("is_encoder_decoder"), "has an encoder",
     "a model that has only a decoder"),
    (lambda c: "modules.json" in c["names"],
     "is a sentence-transformers model, which makes embeddings", WRITER),
    (lambda c: c.get("auto_map") and c.get("model_type") not in CONFIG_MAPPING_NAMES,
     "comes with its own code, which is not run", "a model that transformers computes without it"),
    (lambda c: not c["architecture"].endswith(WRITERS), "does not write text", WRITER),
    (lambda c: c.get("sliding_window") == 1 and c.get("use_sliding_window", True), *SMALL_WINDOW),
    ELSEWHERE,
    (lambda c: c["model_impl"] == "native", "is not computed by the engine itself",
     "one of {families}, or loaded with model_impl='transformers'"))
# for the engine's own families
OWN: tuple[Kind, ...] = (
    ELSEWHERE, (has_small_window, *SMALL_WINDOW),
    (lambda c: c["model_impl"] != "transformers" and c["uncomputed"],
     "has {uncomputed}, which the engine itself does not compute",
     "run with model_impl='transformers'"),
    (has_several_ropes, "has different rope_parameters in its layers",
     "a model with the same ones in all layers"))

# ----------------------------------------------------------------------------------- checks


def check_file(name: str, path: Path) -> None:
    """Raises ValueError if a path leads to a file. name: the argument's name."""
    if path.is_file():
        with path.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
        if is_gguf:
            raise ValueError(f"{name}={str(path)!r} is a GGUF file under another name: it must be "
                             "renamed, or linked, so that its name ends in .gguf")
        raise ValueError(f"{name}={str(path)!r} is a file: it must be the folder {path.parent}")


def check_names(folder: Path) -> None:
    """Raises ValueError if one of a model's files names a file outside its folder, also by a link.

    Only Hugging Face's cache has such links: from a folder in "snapshots" to files in "blobs",
    beside it. A temporary folder that was made for a GGUF file names this file.
    """
    home = folder.resolve()
    if home.parent == Path(gettempdir()).resolve() and home.name.startswith("nanoengine-"):
        return
    homes = {home}
    if home.parent.name == "snapshots":
        homes.add(home.parent.parent / "blobs")
    named: dict[str, Callable] = {
        "tokenizer_config.json": lambda entries: entries.get("fast_tokenizer_files", [])}
    if not (folder / "model.safetensors").is_file():
        named["model.safetensors.index.json"] = lambda entries: entries["weight_map"].values()
    for file in [folder / name for name in named if (folder / name).is_file()]:
        with naming(file):
            for name in named[file.name](read_json(file)):
                # the system takes no longer name
                is_name = isinstance(name, str) and len(name.encode()) < 256
                if not is_name or not homes & {*(folder / name).resolve().parents}:
                    raise rejected("a file's name", name, f"that of a file in {folder}")


def check_folder(folder: Path, load_format: str, model_impl: str) -> None:
    """Raises ValueError for a folder without a model that can be run.

    load_format: "dummy": the folder need not have weights. model_impl: "native": only a model that
        the engine itself can compute.
    """
    with naming(folder):
        names = sorted(path.name for path in folder.iterdir())
    if "config.json" not in names:
        below = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
        names += sorted(str(path.relative_to(folder)) for path in below)
        raise refusal(folder, names, NO_CONFIG)
    with naming(file := folder / "config.json"):
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise rejected("its content", config, "a JSON object")
        for name in ("num_hidden_layers", "num_labels"):
            # transformers makes lists of these lengths
            if config.get(name, 1) not in range(1, 10_001):
                raise rejected(f"the model's {name}", config[name], "from 1 to 10000")
    architectures = config.get("architectures")
    first = str([*architectures, ""][0] or "") if isinstance(architectures, list) else ""
    known = config | {"architecture": first, "names": names, "families": [*FAMILIES],
                      "model_impl": model_impl, "uncomputed": uncomputed(config),
                      "architectures": architectures,
                      "usual": USUAL.get(str(config.get("model_type")), "LlamaForCausalLM")}
    kinds = OWN if first in ARCHITECTURES else OTHERS
    for _, what, instead in [kind for kind in kinds if kind[0](known)]:
        about = "" if kinds is OWN else " (architectures={architectures})"
        text = f"{what}{about}: it must be {instead}".format(**known)
        # the folder of a GGUF file is not the user's
        path = next((file for file in weight_files(folder) if file.parent != folder), folder)
        raise ValueError(f"model={str(path)!r} {text}")
    if "adapter_config.json" in names:
        logger.warning(f"{folder} has an adapter (LoRA) next to the model: the adapter is not used")
    if load_format != "dummy":
        # a multimodal model can have the entry in its text_config
        check_weights(folder, names, "quantization_config" in str(config))


def check_weights(folder: Path, names: list[str], is_named: bool) -> None:
    """Raises ValueError for a folder without safetensors, or with Git LFS pointers instead, and for
    quantized weights in a folder that does not say how they are quantized (`is_named`)."""
    files = weight_files(folder)
    if not files:
        raise refusal(folder, names, NO_WEIGHTS)
    with files[0].open("rb") as opened:
        is_note = opened.read(24) == b"version https://git-lfs."
    if is_note:
        raise ValueError(f"model={str(folder)!r} has a Git LFS pointer in place of {files[0].name}:"
                         " it must be completed by `git lfs pull`")
    for file in () if is_named else files:
        with naming(file):
            parts = [name for name in safe_open(file, framework="pt").keys()
                     if name.endswith(SCALES)]
        if parts:
            raise ValueError(f"model={str(folder)!r} has quantized weights, such as that of "
                             f"{parts[0]}: its config.json must have a quantization_config")


def refusal(folder: Path, names: list[str], rows: Iterable[Row]) -> ValueError:
    """Returns the error for the first row that fits one of the names."""
    fitting = ((name, what, instead) for pattern, what, instead in rows
               for name in names if fnmatch(name, pattern))
    name, what, instead = next(fitting, ("", "is an empty folder", "one with a model"))
    text = f"{what}: it must be {instead}".format(name=name, folder=(folder / name).parent)
    return ValueError(f"model={str(folder)!r} {text}")


PARTS = {"check_folder": check_folder, "check_names": check_names}
