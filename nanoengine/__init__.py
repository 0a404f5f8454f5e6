"""nanoengine: a minimal, fast engine for offline LLM generation."""

import logging

from nanoengine.beam_search import BeamSearchOutput, BeamSearchSequence
from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.requests import TextPrompt, TokensPrompt
from nanoengine.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "CompletionOutput",
           "RequestOutput", "SamplingParams", "TextPrompt", "TokensPrompt"]

# What the engine has to say is shown on stderr, or by the handlers that the user has made, if there
# are any. logging.getLogger("nanoengine").setLevel("ERROR") silences it.
logger = logging.getLogger(__name__)
handler = logging.StreamHandler()
handler.addFilter(lambda record: not (logging.getLogger().handlers or logger.handlers[1:]))
logger.addHandler(handler)
logger.setLevel(logger.level or "INFO")
