"""vLLM's interface: a script written for it runs when only its import is changed.

    from nanoengine_extensions.vllm import LLM, SamplingParams

What this adds to nanoengine's own `LLM`, which has the same names wherever it has the same things:
keywords that change nothing here, prompts as typed dicts, `output_kind`,
`enqueue`, and fields of outputs that are always None.
"""

from dataclasses import fields
from enum import Enum
from typing import Any, TypedDict

from pydantic.dataclasses import dataclass

import nanoengine
from nanoengine.config import EngineConfig
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import STRICT, explained, rejected
from nanoengine_extensions.beam_search import (  # noqa: F401
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
)

RequestOutput.lora_request = None  # type: ignore
CompletionOutput.finished = lambda self: self.finish_reason is not None  # type: ignore

# Keywords of vLLM's that change nothing here: the values that do so, where None in place of a list
# stands for any value, and what this engine does instead of the others.
VLLM_KEYWORDS: dict[str, tuple[list[Any] | None, str]] = {
    "async_scheduling": (None, "`run_ahead` is the option for that"),
    "compilation_config": ([None, 0, {}], "`enforce_eager` is the option for that"),
    "disable_custom_all_reduce": (None, "PyTorch reduces"),
    "disable_log_stats": (None, "`metrics()` has them"),
    "distributed_executor_backend": ([None, "mp", "uni"], "ranks are processes of one machine"),
    "enable_chunked_prefill": ([None, True], "a prompt longer than a step always comes in chunks"),
    "enable_lora": ([False], "there are no adapters"),
    "generation_config": (["auto"], "generation_config.json counts for `sampling_params=None`"),
    "hf_overrides": ([None, {}], "config.json counts"),
    "kv_cache_dtype": (["auto"], "the cache has the `dtype` of the weights"),
    "logits_processors": ([None], "`SamplingParams(logits_processors=)` has them"),
    "pipeline_parallel_size": ([1], "one process runs one model on one device"),
    "quantization": ([None], "weights have the precision that `dtype` says"),
    "runner": (["auto", "generate"], "it generates"),
    "speculative_config": ([None], "each token is computed by the model itself"),
    "task": (["auto", "generate"], "it generates"),
    "tokenizer_mode": (["auto"], "the tokenizer is the fast one of transformers"),
    "tokenizer_revision": ([None], "`revision` counts for model and tokenizer"),
    "trust_remote_code": ([False], "code that comes with a model never runs")}


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text, if given, is only handed back."""

    prompt_token_ids: list[int]
    prompt: str


class RequestOutputKind(Enum):
    """What a stream yields of a request: all outputs so far, or the last alone."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


@explained
@dataclass(config=STRICT, kw_only=True)
class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's, and what `stream` yields of the request."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Parameters in which None stands for the default, but for `max_tokens`."""
        return cls(**{name: value for name, value in values.items()
                      if value is not None or name == "max_tokens"})


class LLM(nanoengine.LLM):
    """nanoengine's, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, *, max_logprobs: int = -1, **options: Any) -> None:
        self.max_logprobs = max_logprobs
        for name, (accepted, instead) in VLLM_KEYWORDS.items():
            value = options.pop(name, accepted and accepted[0])
            if accepted and value not in accepted:
                raise rejected(name, value, f"one of {accepted}: {instead}")
        super().__init__(model, **options)
        # of `enqueue`, until `wait_for_completion`
        self.enqueued: list[Any] = []

    def queue(self, requests: list[Any]) -> dict[str, Any]:
        for request in requests:
            for name in ("logprobs", "prompt_logprobs"):
                count = getattr(request.seq.params, name) or 0
                if self.max_logprobs >= 0 and not 0 <= count <= self.max_logprobs:
                    raise rejected(name, count, f"from 0 to max_logprobs={self.max_logprobs}")
        return super().queue(requests)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        last_alone = RequestOutputKind.FINAL_ONLY
        kinds = {}
        for output in super().stream(*arguments, **options):
            request = self.active.get(output.request_id)
            if request:
                kinds[output.request_id] = getattr(request.seq.params, "output_kind", None)
            if output.finished or kinds.get(output.request_id) != last_alone:
                yield output

    def enqueue(self, *arguments: Any, **options: Any) -> list[str]:
        """Queues requests, whose outputs `wait_for_completion` returns."""
        requests = self.add(*arguments, **options)
        self.enqueued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self) -> list[RequestOutput]:
        """The outputs of all that was enqueued, once they have finished."""
        requests = self.enqueued
        self.enqueued = []
        while not all(request.is_finished for request in requests):
            self.step()
        return [request.output() for request in requests]

    def reset_prefix_cache(self) -> bool:
        super().reset_prefix_cache()
        return True


assert not VLLM_KEYWORDS.keys() & {field.name for field in fields(EngineConfig)}
