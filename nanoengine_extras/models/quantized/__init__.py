"""Quantized models: GGUF, AWQ, GPTQ, MLX, compressed-tensors, FP8, INT8, MXFP4, NVFP4, NF4; and
`quantization`, which rounds the weights of any model when they are loaded.

A weight *is* its dequantized value in the dtype of the model: the generated tokens are those that
transformers generates with these values, on every device. On a CPU with its kernels, the numbers
stay packed, and are expanded within products (loading.py, cpu/packed). Elsewhere the
weights are dequantized when they are loaded, so they take as much memory as the dtype needs; a line
in the log says how much.

sources.py calls it where a model is found, and where its memory is allocated and its files are
read.

    methods.py                          which entries of quantization_config are accepted
    word_files.py, scaled_files.py      formats: functions from a tensor of a file to weights
    stored.py                           the loop over a file's tensors, and the checks of all
    formulas.py                         from numbers, scales, zeros and tables to values
    loading.py                          packs the weights of the engine's decoder
    transformers_files.py               weights of models that transformers computes, dequantized
    transformers_linears.py, origins.py                     the same, packed

GGUF files are read in models/gguf, which needs a package: `pip install ".[gguf]"`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from nanoengine.config import EngineConfig
from nanoengine.errors import Condition, also_check, logger, naming, rejected
from nanoengine.features import is_installed
from nanoengine.loader import checkpoint_tensors
from nanoengine.model import FAMILIES, Decoder
from nanoengine.model_runner import ModelRunner
from nanoengine_extras.models import weight_files
from nanoengine_extras.models.quantized import methods, transformers_files
from nanoengine_extras.models.quantized.scaled_files import scaled
from nanoengine_extras.models.quantized.stored import Index, Opened, open_file, rounded
from nanoengine_extras.models.quantized.word_files import bitsandbytes, columns, mlx, mxfp4

BITS = {"int8": 8, "int4": 4}
# what finds the weights of a file, by the method; `scaled` for others
FORMS: dict[str, Any] = {
    "awq": columns, "gptq": columns, "auto-round": columns, "mlx": mlx, "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    **{method: partial(rounded, bits) for method, bits in BITS.items()}}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# vLLM's names of methods, most with the name of a kernel
MARLIN = {"awq_marlin": "awq", "gptq_marlin": "gptq", "inc": "auto-round",
          **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt")}
CONDITIONS: list[Condition] = [
    ("quantization", lambda c: c.quantization in (*BITS, *methods.ROWS, *MARLIN),
     f"'int8', 'int4' or None, or what the model has: {', '.join(methods.ROWS)}"),
    ("quantization", lambda c: is_installed("models.sources"),
     "None without nanoengine_extras/models/sources.py"),
    ("load_format", lambda c: c.load_format != "dummy",
     "another one with quantization={quantization!r}, since random weights are not quantized")]


def slots(runner: ModelRunner, folder: Path) -> dict[str, Any]:
    """Returns arguments for `loader.load_model`: one that takes the place of `safe_open` for a
    model's files, and if weights stay packed, two that leave these out, and "finish", which packs
    them. For a model that transformers computes, arguments of `transformers_models.load`.

    Raises ValueError for a model that cannot be read, or is not quantized as `quantization` says.
    """
    model_config = runner.model_config
    is_own = model_config.model_type in FAMILIES
    entries = methods.with_method(getattr(model_config, "quantization_config", None) or {})
    method = method_of(runner.config, entries)
    files = weight_files(folder)
    with naming(f"{folder}: its weight files are damaged, or lack a tensor"):
        open_file = choose_opener(method, entries, folder)
        opened = {file: open_file(file) for file in files}
    for file, each in opened.items():
        for name, tensor in each.items():
            tensor.load = naming(f"{name} in {file}")(tensor.load)
    if is_own:
        drop_empty_biases(opened.values(), model_config)
    tensors = transformers_files.tensors_of(opened)
    is_quantized = any(tensor.is_quantized for tensor in tensors.values())
    # a GGUF can be in floating point, and some models are quantized only as to their cache
    if not is_quantized and method != "gguf" and not entries.get("kv_cache_scheme"):
        raise rejected("the model's quantization_config", entries,
                       "None, since none of its weights is quantized")
    if left_out := methods.left_out(entries):
        logger.warning(
            f"{', '.join(sorted(left_out))} of the model's quantization_config are left out: "
            f"activations and the KV cache stay in {str(runner.dtype)[6:]}")
    found: dict[str, Any] = {"opened": lambda file, framework: opened[file]}
    if not is_own:
        found = {"read": partial(transformers_files.load, tensors)}
    stored = sum(file.stat().st_size for file in files)
    count = sum(prod(tensor.shape) for tensor in tensors.values())
    if not stays_packed(runner):
        logger.warning(
            f"quantized weights are dequantized when they are loaded: {stored / 2**20:,.1f} MiB of "
            f"files become {count * runner.dtype.itemsize / 2**20:,.1f} MiB of "
            f"{str(runner.dtype)[6:]}")
        return found
    # packed weights have to fit, which take at least this many bytes
    size = count * BITS[method] // 8 if method in BITS else stored
    also_check("memory", [torch.empty(size, dtype=torch.uint8, device="meta")], "cpu")
    if not is_own:
        from nanoengine_extras.models.quantized.transformers_linears import load_packed
        return {"read": partial(load_packed, tensors), "is_packed": True}
    from nanoengine_extras.models.quantized import loading
    if model_config.tie_word_embeddings:
        share(opened)
        # so the loader finds both
        model_config.tie_word_embeddings = False
    finish = partial(loading.pack_weights, transformers_files.tensors_of(opened), runner.dtype)
    return found | {"place": loading.place, "read": loading.read, "finish": finish}


def method_of(config: EngineConfig, entries: dict[str, Any]) -> str:
    """Returns by which method a model is, or will be quantized. Raises ValueError for one that is
    not read, and if `quantization` says another."""
    if entries:
        methods.check(entries)
    given = MARLIN.get(config.quantization or "", config.quantization)
    method: Any = entries.get("quant_method", given)
    if given and given != method:
        raise rejected("quantization", config.quantization,
                       f"None or {method!r}, since the model is quantized already")
    if not entries and method not in BITS:
        raise rejected("quantization", config.quantization, "'int8', 'int4' or None, since the "
                       "model is not quantized")
    if config.load_format == "dummy":
        raise rejected("the model's quantization_config", entries, "None with "
                       "load_format='dummy', since random weights are not quantized")
    return method


def stays_packed(runner: ModelRunner) -> bool:
    """Whether there are kernels for packed weights: those for a CPU, in one process."""
    return (runner.device == "cpu" and runner.kernels is not None
            and runner.config.tensor_parallel_size == 1
            and runner.dtype in (torch.bfloat16, torch.float32))


def drop_empty_biases(opened: Iterable[Opened], config: Any) -> None:
    """Leaves out biases of zeros, for linears without a bias: AutoGPTQ gives all linears one."""
    with torch.device("meta"):
        known = checkpoint_tensors(Decoder(config))
    for tensors in opened:
        for name in [*tensors]:
            is_extra = name.endswith(".bias") and name.removeprefix("model.") not in known
            if is_extra and not tensors[name].read().any():
                del tensors[name]


def share(opened: dict[Path, Opened]) -> None:
    """Gives one matrix the names of both the head and the embedding, if the files have no other."""
    found = [(tensors, name) for tensors in opened.values() for name in tensors
             if name.removeprefix("model.") in (HEAD, EMBEDDING)]
    for tensors, name in found if len(found) == 1 else ():
        tensors[HEAD] = tensors[EMBEDDING] = tensors.pop(name)


def choose_opener(method: str, entries: dict[str, Any],
                  folder: Path) -> Callable[[Path], Opened]:
    if method == "gguf":
        from nanoengine_extras.models.gguf.files import open_gguf
        return partial(open_gguf, folder, entries)
    return partial(open_file, FORMS.get(method, scaled), Index(weight_files(folder), entries))
