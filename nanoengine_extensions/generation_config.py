"""generation_config.json: what `sampling_params=None` stands for, and which tokens end a sequence.

`requests.InputProcessor` calls `load_defaults` when an engine is made.
"""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nanoengine.sampling_params import SamplingParams, naming, rejected

# The entries of generation_config.json that are used, as in vLLM, with our names. Other entries are
# ignored, with a warning unless they are False, 0 or as in HARMLESS (None: any value).
DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
HARMLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "use_cache": None,
            "transformers_version": None, "_from_model_config": None, "do_sample": True,
            "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "length_penalty": 1}


def load_defaults(folder: Path, config: PretrainedConfig,
                  tokenizer: Any) -> tuple[SamplingParams, dict[int, int | None]]:
    """Returns the parameters of generation_config.json, and every EOS with its `stop_reason`.

    As in vLLM, the tokenizer's own EOS gives None, and others give their ids. Warns of entries that
    have no effect here.
    """
    with naming(file := folder / "generation_config.json"):
        content = json.loads(file.read_text()) if file.is_file() else {}
        given = {name: value for name, value in content.items() if value is not None}
        params = SamplingParams(**{DEFAULTS[name]: given[name] for name in DEFAULTS.keys() & given})
        eos = given.get("eos_token_id", config.eos_token_id)
        eos_ids = eos if isinstance(eos, list) else {eos} - {None}
        if not all(type(token_id) is int for token_id in eos_ids):
            raise rejected("eos_token_id", eos, "a token id, or a list of them")
    ignored = [name for name in given.keys() - DEFAULTS.keys()
               if HARMLESS.get(name, False) not in (given[name], None)]
    if ignored:
        logging.getLogger("nanoengine").warning(f"{file}: {sorted(ignored)} have no effect here")
    own = tokenizer and tokenizer.eos_token_id
    # some files say -1 for none, and some tokenizers know more tokens than the model
    known = [i for i in {*eos_ids, own} - {None} if i in range(config.vocab_size)]
    return params, {i: None if i == own else i for i in known}
