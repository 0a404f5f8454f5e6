"""nanoengine: a minimal, fast engine for offline LLM generation."""

import logging
from typing import Any

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

# What the engine has to say is shown on stderr, or by the handlers that the user has made, if there
# are any. logging.getLogger("nanoengine").setLevel("ERROR") silences it.
logger = logging.getLogger(__name__)
handler = logging.StreamHandler()
handler.addFilter(lambda record: not (logging.getLogger().handlers or logger.handlers[1:]))
logger.addHandler(handler)
logger.setLevel(logger.level or "INFO")
# what the library says is shown, or not, as what the engine says
logging.getLogger("nanoengine_cpu").parent = logger


def __getattr__(name: str) -> Any:
    """`nanoengine.BeamSearchParams` and the like, without an import before they are asked for."""
    if name.startswith("BeamSearch"):
        from nanoengine_extensions import beam_search
        return getattr(beam_search, name)
    raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
