"""generation_config.json, strictly, and with parameters that only the extensions have.

`StrictInputProcessor` (llm.py) calls it; the engine's own `load_defaults` reads the same file.
"""

import json
import logging
from pathlib import Path
from typing import Any

from nanoengine.loader import GENERATION_ENTRIES
from nanoengine.seams import naming
from nanoengine_extensions.options import SamplingParams

ENTRIES = GENERATION_ENTRIES | {"repetition_penalty": "repetition_penalty"}
# Other entries change nothing here, if they are False, 0 or as in this table (None: any value).
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def defaults_of(file: Path) -> SamplingParams:
    """Returns the parameters that `sampling_params=None` stands for. Warns of entries that would
    change something, but have no effect here."""
    with naming(file):
        content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        given = {name: value for name, value in content.items() if value is not None}
        params = SamplingParams(**{ENTRIES[name]: given[name] for name in ENTRIES.keys() & given})
    ignored = [name for name in given.keys() - ENTRIES.keys()
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        logging.getLogger("nanoengine").warning(f"{file}: {sorted(ignored)} have no effect here")
    return params
