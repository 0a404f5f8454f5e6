"""generation_config.json: the parameters that `sampling_params=None` stands for, as in vLLM:
fills the slot "default_params". Without this feature, None stands for `SamplingParams()`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nanoengine.errors import logger, naming, rejected
from nanoengine.features import is_installed
from nanoengine.sampling_params import SamplingParams
from nanoengine_extras.models import read_json

# the entries of generation_config.json that are used, as in vLLM, with our names
GENERATION_ENTRIES = {"max_new_tokens": "max_tokens", **{name: name for name in (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "skip_special_tokens")}}
# Entries that change nothing here, if they are False, 0 or as in this table (None: any value).
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def of_chats(config: PretrainedConfig) -> dict[str, Any]:
    """Returns `max_tokens`, if the file limits it. As in vLLM's server, it is the default of chats;
    without it, an answer can be as long as fits, and not 16 tokens as in `generate`.

    config: the model's."""
    file = Path(str(config.name_or_path)) / "generation_config.json"
    most = read_json(file).get("max_new_tokens")
    return {} if most is None else {"max_tokens": most}


def load_defaults(folder: Path) -> SamplingParams:
    """Returns the parameters in the file, and warns about entries that would change the output
    elsewhere, but have no effect here. Raises ValueError for a damaged file."""
    with naming(file := folder / "generation_config.json"):
        given = {name: value for name, value in read_json(file).items() if value is not None}
        ignored = [name for name in given.keys() - GENERATION_ENTRIES.keys()
                   if HARMLESS.get(name, False) not in (given[name], None)]
        if ignored:
            logger.warning(f"{file}: {sorted(ignored)} have no effect here")
        eos = given.get("eos_token_id", [])
        if not all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else [eos])):
            raise rejected("eos_token_id", eos, "a token id, or a list of them")
        feature_of = {each.name: each.metadata.get("feature", "models.generation_config")
                      for each in fields(SamplingParams)}
        return SamplingParams(**{ours: given[name] for name, ours in GENERATION_ENTRIES.items()
                                 if name in given and is_installed(feature_of[ours])})


PARTS = {"default_params": load_defaults}
