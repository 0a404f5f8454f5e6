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

# What the engine has to say is shown, unless the user says otherwise: by a handler or a level of
# their own, logging.getLogger("nanoengine").setLevel("ERROR").
logger = logging.getLogger(__name__)
if not (logger.handlers or logger.level):
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel("INFO")
