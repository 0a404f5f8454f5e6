"""nanoengine: a minimal, fast engine for offline LLM generation."""

from typing import Any

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`nanoengine.BeamSearchParams` and the like, without an import before they are asked for."""
    if name.startswith("BeamSearch"):
        from nanoengine_extensions import beam_search
        return getattr(beam_search, name)
    raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
