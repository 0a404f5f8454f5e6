"""vLLM's interface: a script written for it runs when only its import is changed.

    from nanoengine_extensions.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, names of types, `output_kind`, `from_optional` and `enqueue`, in
subclasses, which the engine does not know. Outputs are nanoengine's own.
"""

from enum import Enum
from typing import Any

import nanoengine
from nanoengine import CompletionOutput, RequestOutput
from nanoengine.sampling_params import rejected
from nanoengine_extensions.beam_search import (
    BeamSearchOutput, BeamSearchParams, BeamSearchSequence)

# vLLM's keywords that change no token here, whatever their value, …
WITHOUT_EFFECT = {
    "async_scheduling", "chat_template_content_format", "disable_custom_all_reduce",
    "disable_log_stats", "enable_chunked_prefill", "hf_token", "max_logprobs",
    "max_seq_len_to_capture", "trust_remote_code"}
# … and those that must not turn on anything, since this engine has nothing like it.
OFF = {
    "compilation_config", "data_parallel_size", "distributed_executor_backend", "enable_lora",
    "generation_config", "hf_overrides", "kv_cache_dtype", "kv_cache_memory_bytes",
    "limit_mm_per_prompt", "logits_processors", "lora_request", "pipeline_parallel_size",
    "quantization", "runner", "speculative_config", "task", "tokenizer_mode", "tokenizer_revision"}
# values that turn on nothing, as texts, since 1 == True
NEUTRAL = {"None", "False", "0", "1", "{}", "auto", "generate", "mp", "uni", "vllm"}

# vLLM's types of prompts and grammars: dicts with the same keys
TextPrompt = TokensPrompt = StructuredOutputsParams = GuidedDecodingParams = dict
# for `SamplingParams(output_kind=)`
RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)


def without(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without those that have no effect.

    Raises ValueError for an option in OFF that would turn something on.
    """
    for name in OFF & options.keys():
        if str(options[name]) not in NEUTRAL:
            raise rejected(name, options[name], "left out: this engine has nothing like it")
    return {name: options[name] for name in options.keys() - WITHOUT_EFFECT - OFF}


class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters. `output_kind` has no effect, as in vLLM's own `LLM`, and neither has
    `flat_logprobs`."""

    def __init__(self, output_kind: Any = None, guided_decoding: Any = None,
                 flat_logprobs: bool = False, **options: Any) -> None:
        options["structured_outputs"] = options.get("structured_outputs") or guided_decoding
        super().__init__(**options)

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Returns parameters in which None means the default, except for `max_tokens`."""
        return cls(**{name: value for name, value in values.items()
                      if value is not None or name == "max_tokens"})


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **without(options))
        if options.get("generation_config") == "vllm":
            self.inputs.default_params = nanoengine.SamplingParams()
        # those of `enqueue`, until `wait_for_completion`
        self.enqueued: list[Any] = []

    def generate(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().generate(*arguments, **without(options))

    def chat(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().chat(*arguments, **without(options))

    def beam_search(self, prompts: Any, params: Any, lora_request: None = None,
                    use_tqdm: bool = False, concurrency_limit: int | None = None) -> list[Any]:
        """Searches without a progress bar, and all prompts together."""
        without({"lora_request": lora_request})
        return super().beam_search(prompts, params)

    def enqueue(self, *arguments: Any, use_tqdm: bool = True, **options: Any) -> list[str]:
        """Queues requests; `wait_for_completion` returns their outputs. There is no bar."""
        requests = self.add(*arguments, **without(options))
        self.enqueued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Returns the outputs of all enqueued requests once they have finished. There is no bar."""
        requests, self.enqueued = self.enqueued, []
        while not all(request.is_finished for request in requests):
            self.step()
        return [request.output() for request in requests]
