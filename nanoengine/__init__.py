"""nanoengine: a minimal, fast engine for offline LLM generation."""

from nanoengine.beam_search import BeamSearchOutput, BeamSearchSequence
from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import BeamSearchParams, SamplingParams

__all__ = ["LLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "CompletionOutput",
           "RequestOutput", "SamplingParams"]
