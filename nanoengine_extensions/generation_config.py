"""What generation_config.json says beyond the engine's own parameters: see `load_defaults`."""

import json
import logging
from pathlib import Path
from typing import Any

from nanoengine.loader import GENERATION_ENTRIES

# Entries that change nothing here, if they are False, 0 or as in this table (None: any value).
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def defaults_of(file: Path) -> dict[str, Any]:
    """Returns parameters that only the extensions have. Logs the entries that would change
    something, but have no effect here."""
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    given = {name: value for name, value in content.items() if value is not None}
    used = {name: given.pop(name) for name in ["repetition_penalty"] if name in given}
    ignored = [name for name in given.keys() - GENERATION_ENTRIES.keys()
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        logging.getLogger("nanoengine").warning(f"{file}: {sorted(ignored)} have no effect here")
    return used
