"""vLLM's interface: a script written for it runs when only its import is changed.

    from nanoengine_extensions.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, prompts as typed dicts, `output_kind`, `from_optional` and `enqueue`, in
subclasses, which the engine does not know. Outputs are nanoengine's own.
"""

from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from typing import Any, TypedDict

from pydantic.dataclasses import dataclass

import nanoengine
from nanoengine import CompletionOutput, RequestOutput
from nanoengine.outputs import Request
from nanoengine.sampling_params import STRICT, explained, rejected
from nanoengine_extensions.beam_search import (
    BeamSearchOutput, BeamSearchParams, BeamSearchSequence)

# Keywords of vLLM that have no effect here: the accepted values (None in place of a list: any
# value), and what this engine does instead of other values.
Keywords = dict[str, tuple[Any, str]]
VLLM_KEYWORDS: Keywords = {
    "async_scheduling": (None, "see `run_ahead`"),
    "compilation_config": ([None, 0, {}], "see `enforce_eager`"),
    "disable_custom_all_reduce": (None, "PyTorch reduces"),
    "disable_log_stats": (None, "`metrics()` has them"),
    "distributed_executor_backend": ([None, "mp", "uni"], "ranks are processes of one machine"),
    "enable_chunked_prefill": ([None, True], "a prompt longer than a step always comes in chunks"),
    "enable_lora": ([False], "there are no adapters"),
    "generation_config": (["auto"], "the file counts for `sampling_params=None`"),
    "hf_overrides": ([None, {}], "config.json counts"),
    "kv_cache_dtype": (["auto"], "the cache has the `dtype` of the weights"),
    "logits_processors": ([None], "`SamplingParams(logits_processors=)` has them"),
    "max_logprobs": (None, "there is no limit"),
    "pipeline_parallel_size": ([1], "one process runs one model on one device"),
    "quantization": ([None], "weights have the precision that `dtype` says"),
    "runner": (["auto", "generate"], "it generates"),
    "speculative_config": ([None], "each token is computed by the model itself"),
    "task": (["auto", "generate"], "it generates"),
    "tokenizer_mode": (["auto"], "the tokenizer is the fast one of transformers"),
    "tokenizer_revision": ([None], "`revision` counts for model and tokenizer"),
    "trust_remote_code": ([False], "code that comes with a model never runs")}
CALL_KEYWORDS: Keywords = {
    "chat_template_content_format": (["auto", "string"], "text parts are joined"),
    "lora_request": ([None], "there are no adapters")}


def without(keywords: Keywords, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without those that have no effect. Raises ValueError for other values."""
    for name, (accepted, instead) in keywords.items():
        if accepted and options.get(name, accepted[0]) not in accepted:
            raise rejected(name, options[name], f"one of {accepted}: {instead}")
    return {name: value for name, value in options.items() if name not in keywords}


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text, if given, is only returned."""

    prompt_token_ids: list[int]
    prompt: str


class RequestOutputKind(Enum):
    """What `LLM.stream` yields for a request: all outputs so far, or only the last."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


@explained
@dataclass(config=STRICT, kw_only=True)
class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters, and what `LLM.stream` yields for the request."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Returns parameters in which None means the default, except for `max_tokens`."""
        return cls(**{name: value for name, value in values.items()
                      if value is not None or name == "max_tokens"})


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **without(VLLM_KEYWORDS, options))
        # those of `enqueue`, until `wait_for_completion`
        self.enqueued: list[Any] = []

    def generate(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().generate(*arguments, **without(CALL_KEYWORDS, options))

    def chat(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().chat(*arguments, **without(CALL_KEYWORDS, options))

    def stream(self, prompts: Any, sampling_params: Any = None,
               priority: Any = None) -> Iterator[Any]:
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.run(requests, shown)
        next(steps)
        return (output for outputs in steps for output in outputs if output)

    def enqueue(self, *arguments: Any, use_tqdm: bool = True, **options: Any) -> list[str]:
        """Queues requests; `wait_for_completion` returns their outputs. There is no bar."""
        requests = self.add(*arguments, **without(CALL_KEYWORDS, options))
        self.enqueued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Returns the outputs of all enqueued requests once they have finished. There is no bar."""
        requests, self.enqueued = self.enqueued, []
        while not all(request.is_finished for request in requests):
            self.step()
        return [request.output() for request in requests]

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**asdict(super().get_default_sampling_params()))


def shown(request: Request) -> RequestOutput | None:
    """Returns what a stream yields for a request that has new tokens."""
    is_quiet = getattr(request.seq.params, "output_kind", None) == RequestOutputKind.FINAL_ONLY
    return None if is_quiet and not request.is_finished else request.output()
