"""nanoengine: a minimal, fast engine for offline LLM generation."""

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
