"""llama.cpp's GGUF files: makes a folder like that of any model, and reads their tensors.

    blk.0.attn_q.weight   Q4_K, (outputs, bytes of a row)   ->   layers.0.self_attn.q_proj.weight

header.py knows what a file says about its model, numbers.py the types of matrices, and
tokenizers.py the tokenizer.
"""

import atexit
import json
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.errors import naming
from nanoengine_extras.models.gguf import numbers, tokenizers
from nanoengine_extras.models.gguf.header import FLOATS, GRIDS, Header
from nanoengine_extras.models.quantized.formulas import Grouped
from nanoengine_extras.models.quantized.stored import Opened, Stored

# the file with the places of all tensors, in the folder that `write_folder` fills
TABLE = "tensors.json"


def as_folder(path: Path, config: EngineConfig, name: str) -> Path:
    """Returns a folder like that of any model, with an index of GGUF files. It is deleted when
    Python ends.

    path: a GGUF file, or a folder with one, which can also have config.json and a tokenizer.
    name: "model" or "tokenizer", the argument.

    Raises ValueError for a path without a model, and for a model that cannot be run.
    """
    with naming(f"{name}={str(path)!r}"):
        beside = path if path.is_dir() else None
        # made by this function before
        if beside and not [*path.glob("*.[gG][gG][uU][fF]")]:
            return path
        # made by this function, or completed by the user
        has_config = beside and (beside / "config.json").is_file()
        if name == "tokenizer" and (has_config or [*path.glob("tokenizer*")]):
            return path
        files = parts_of(only_file(path))
        if lacking := [str(file) for file in files if not file.is_file()]:
            raise ValueError(f"there is no file {lacking[0]}: it must be a GGUF file")
        # messages about its files name the model, too
        folder = Path(tempfile.mkdtemp(prefix="nanoengine-", suffix=f"-{path.name}"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        is_needed = not config.skip_tokenizer_init and config.tokenizer is None
        write_folder(files, beside, folder, is_needed or name == "tokenizer")
    return folder


def only_file(path: Path) -> Path:
    """Returns the GGUF file that a path stands for. Raises ValueError if there are several."""
    if not path.is_dir():
        return path
    # the first file stands for a model in several files, the text part for a model with images
    files = [file for file in sorted(path.glob("*.[gG][gG][uU][fF]"))
             if not re.search(r"-of-\d{5}$", file.stem) or "-00001-of-" in file.stem]
    files = [file for file in files if "mmproj" not in file.name.lower()] or files
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"it has several models: it must be the path of one of {names}")
    return files[0]


def parts_of(file: Path) -> list[Path]:
    """Returns all files of a model, from its first or only one."""
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})", file.stem)
    if split is None:
        return [file]
    return [file.with_name(f"{split[1]}-{number + 1:05}-of-{split[2]}{file.suffix}")
            for number in range(int(split[2]))]


# ------------------------------------------------------------------------------------ a folder


def write_folder(files: list[Path], beside: Path | None, folder: Path, has_tokenizer: bool) -> None:
    """Fills a folder with what a model has: config.json, a tokenizer, an index of the files.

    beside: a folder whose config.json, tokenizer and others are used; None: the file has all.
    has_tokenizer: whether the file's own tokenizer is written, if there is no other.
    """
    header = Header(files)
    config = header.config()
    write(folder / "generation_config.json", {
        "eos_token_id": header.eos(),
        "suppress_tokens": header.find("tokenizer.ggml.suppress_tokens") or None})
    others = {} if beside is None else {path.name: path for path in beside.iterdir()}
    has_other = any(name.startswith(("tokenizer", "vocab.")) for name in others)
    if has_tokenizer and not has_other and "tokenizer.ggml.tokens" in header.fields:
        tokenizers.read(header.find, files[0]).save_pretrained(folder)
    for path in others.values():
        if path.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copy(path, folder)
    given = json.loads(others["config.json"].read_text()) if "config.json" in others else {}
    # other files name only the kind of model
    if "architectures" in given:
        config = given | {"quantization_config": config["quantization_config"]}
    write(folder / "config.json", config)
    # `weight_files` finds the files by this index
    index = {name: str(file) for name, file in enumerate(files)}
    write(folder / "model.safetensors.index.json", {"weight_map": index})
    write(folder / TABLE, header.table)


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------ tensors


def open_gguf(folder: Path, entries: dict[str, Any], file: Path) -> Opened:
    """Returns the tensors of a file.

    folder: the one that `write_folder` has filled; entries: see `Header.config`.
    """
    opened = Opened()
    # reading a header again takes seconds
    tables = json.loads((folder / TABLE).read_text())
    for name, (kind, shape, offset, num_bytes) in tables[str(file)].items():
        heads = entries["heads"].items()
        own = next((count for part, count in heads if f".{part}." in name), 0)
        added = entries["norms"] if name.endswith("norm.weight") else 0.0
        # a matrix of one row, which some releases of the converter store as a vector
        if name.endswith("shared_expert_gate.weight"):
            shape = [1, shape[-1]]
        names = names_of_experts(name, shape[0]) if len(shape) == 3 else [name]
        size = num_bytes // len(names)
        for number, each in enumerate(names):
            opened[each] = Stored(kind, shape[-2:], partial(
                read_tensor, file, kind, shape[-2:], offset + number * size, size, own, added))
    return opened


def names_of_experts(name: str, count: int) -> list[str]:
    """Returns transformers' names for the experts of a layer, which lie one after the other.

    name: "module.own.weight", or "module..weight" of matrices without names of their own
    """
    module, own, kind = name.rsplit(".", 2)
    return [f"{module}.{number}.{own}.{kind}".replace("..", ".") for number in range(count)]


def read_tensor(file: Path, kind: str, shape: list[int], offset: int, num_bytes: int,
                heads: int, added: float) -> Tensor | Grouped:
    """Reads a tensor. The file is not mapped, since its pages would count as memory.

    heads: if not 0, rows are put in transformers' order: in each head, all first numbers of a pair,
        then all second ones.
    added: is subtracted from numbers in floating point.
    """
    raw = torch.from_numpy(np.fromfile(file, np.uint8, num_bytes, offset=offset))
    rows = raw.view(*shape[:1] or [1], -1)
    if heads:
        rows = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if kind in numbers.SIZES:
        return numbers.grouped(rows, kind)
    if kind in GRIDS:
        return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
    found = rows.view(FLOATS[kind]).float().view(shape)
    # a large matrix is not copied
    return found - added if added else found
