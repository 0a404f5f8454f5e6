"""Quantized weights of models that transformers computes (transformers_models), dequantized.

transformers fills a model by rules of its own: it renames tensors, ties them, and merges those of
experts. It gets them as a dict, in which each is dequantized when it is read.
"""

import copy
from typing import Any

from nanoengine_extensions.quantized.stored import Opened


def load(tensors: dict[str, Any], kind: Any, folder: object, config: Any,
         **options: Any) -> tuple[Any, dict[str, Any]]:
    """As `kind.from_pretrained(folder, config=config, …)`, with other tensors than the folder has.

    tensors: a `Stored` or a tensor each, by the names in the files
    """
    config = copy.deepcopy(config)
    # how its files are quantized, which these tensors are not
    for each in (config, config.get_text_config(decoder=True)):
        vars(each).pop("quantization_config", None)
    return kind.from_pretrained(None, config=config, state_dict=tensors, **options)


def tensors_of(opened: dict[Any, Opened]) -> Opened:
    """Returns the tensors of all files."""
    return Opened({name: each for tensors in opened.values() for name, each in tensors.items()})
