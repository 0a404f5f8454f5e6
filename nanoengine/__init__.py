"""nanoengine: a minimal, fast engine for offline LLM generation."""

from typing import Any

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports `nanoengine.BeamSearchParams` and similar names on first use."""
    if name.startswith("BeamSearch"):
        from nanoengine_extensions import beam_search
        return getattr(beam_search, name)
    raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
