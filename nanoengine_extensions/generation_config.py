"""generation_config.json: what `sampling_params=None` stands for, as in vLLM.

`InputProcessor` calls this. Without this feature, None stands for `SamplingParams()`.
"""

import json
from pathlib import Path

from nanoengine.features import is_installed, logger, naming, rejected
from nanoengine.sampling_params import SamplingParams

# the entries of generation_config.json that are used, as in vLLM, with our names
GENERATION_ENTRIES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
                      "min_p": "min_p", "max_new_tokens": "max_tokens",
                      "repetition_penalty": "repetition_penalty"}
# Entries that change nothing here, if they are False, 0 or as in this table (None: any value).
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def load_defaults(folder: Path) -> SamplingParams:
    """Returns the parameters in the file, and warns about entries that would change the output
    elsewhere, but have no effect here. Raises ValueError for a damaged file."""
    with naming(file := folder / "generation_config.json"):
        content = json.loads(file.read_text()) if file.is_file() else {}
        given = {name: value for name, value in content.items() if value is not None}
        ignored = [name for name in given.keys() - GENERATION_ENTRIES.keys()
                   if HARMLESS.get(name, False) not in (given[name], None)]
        if ignored:
            logger.warning(f"{file}: {sorted(ignored)} have no effect here")
        eos = given.get("eos_token_id", [])
        if not all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else [eos])):
            raise rejected("eos_token_id", eos, "a token id, or a list of them")
        if "repetition_penalty" in given and not is_installed("constraints"):
            del given["repetition_penalty"]
        return SamplingParams(**{GENERATION_ENTRIES[name]: given[name]
                                 for name in GENERATION_ENTRIES.keys() & given})
