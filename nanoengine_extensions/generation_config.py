"""Warnings about generation_config.json, from `loader.load_defaults`: entries without effect."""

import logging
from pathlib import Path
from typing import Any

from nanoengine.loader import GENERATION_ENTRIES

# Entries that change nothing here, if they are False, 0 or as in this table (None: any value).
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def warn_of_unused(file: Path, given: dict[str, Any]) -> None:
    """Logs the entries that would change something, but have no effect here."""
    ignored = [name for name in given.keys() - GENERATION_ENTRIES.keys()
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        logging.getLogger("nanoengine").warning(f"{file}: {sorted(ignored)} have no effect here")
