"""vLLM's interface: a script written for it runs when only its import is changed.

    from nanoengine_extensions.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, names of types, and what `SamplingParams` and `LLM` have besides, in
subclasses, which the engine does not know. Outputs are nanoengine's own.
"""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import nanoengine
from nanoengine import (
    BeamSearchOutput, BeamSearchParams, BeamSearchSequence, CompletionOutput, RequestOutput)
from nanoengine.sampling_params import rejected

# vLLM's keywords that change no token here, whatever their value, …
WITHOUT_EFFECT = {*"""async_scheduling attention_config backend chat_template_content_format
    compilation_config concurrency_limit disable_any_whitespace disable_async_output_proc
    disable_cascade_attn disable_custom_all_reduce disable_log_requests disable_log_stats
    enable_chunked_prefill enable_log_requests enable_sleep_mode extra_args flat_logprobs
    guided_decoding_backend hf_token kernel_config limit_mm_per_prompt long_prefill_token_threshold
    max_logprobs max_seq_len_to_capture model_impl num_scheduler_steps optimization_level
    output_kind prefix_caching_hash_algo served_model_name spaces_between_special_tokens
    structured_outputs_config trust_remote_code use_tqdm_on_load use_v2_block_manager""".split()}
# … and those that must not turn on anything, since this engine has nothing like it.
OFF = {*"""config_format convert data_parallel_size distributed_executor_backend
    enable_expert_parallel enable_lora enable_prompt_embeds generation_config hf_overrides
    kv_cache_dtype kv_cache_memory_bytes logprobs_mode lora_request pipeline_parallel_size
    quantization runner speculative_config task tokenization_kwargs tokenizer_mode""".split()}
# values that turn on nothing, as texts, since 1 == True
NEUTRAL = {*"False 0 1 {} auto generate hf mp raw_logprobs uni vllm".split()}

# vLLM's types of prompts and grammars: dicts with the same keys
TextPrompt = TokensPrompt = StructuredOutputsParams = GuidedDecodingParams = dict
# for `SamplingParams(output_kind=)`
RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
VLLMValidationError = ValueError


def without(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without those that have no effect, and without None, the default of all.

    Raises ValueError for an option in OFF that would turn something on.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in OFF & given.keys():
        if str(given[name]) not in NEUTRAL:
            raise rejected(name, given[name], "left out: this engine has nothing like it")
    return {name: given[name] for name in given.keys() - WITHOUT_EFFECT - OFF}


class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters. None stands for the default, except as `max_tokens`.

    `output_kind` has no effect, as in vLLM's own `LLM`. Nor has `extra_args`, which is kept as an
    attribute.
    """

    def __init__(self, *, max_tokens: int | None = 16, **options: Any) -> None:
        wanted = options.pop("structured_outputs", None) or options.pop("guided_decoding", None)
        wanted = without(wanted) if isinstance(wanted, dict) else wanted
        super().__init__(max_tokens=max_tokens, structured_outputs=wanted, **without(options))
        vars(self)["extra_args"] = options.get("extra_args")

    from_optional = classmethod(lambda cls, **values: cls(**values))


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **without(options))
        if options.get("generation_config") == "vllm":
            self.inputs.default_params = nanoengine.SamplingParams()

    @property
    def llm_engine(self) -> Any:
        """The parts of vLLM's engine that scripts and tests read."""
        configs = SimpleNamespace(cache_config=self.config, model_config=self.inputs)
        return SimpleNamespace(vllm_config=configs, model_config=self.inputs,
                               get_num_unfinished_requests=lambda: len(self.active))

    def get_metrics(self) -> list[Any]:
        """Returns `metrics()` as objects with a `name` like vLLM's, and a `value`."""
        return [SimpleNamespace(name=f"vllm:{name}", value=n) for name, n in self.metrics().items()]

    def generate(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().generate(*arguments, **without(options))

    def chat(self, *arguments: Any, **options: Any) -> list[Any]:
        return super().chat(*arguments, **without(options))

    def beam_search(self, *arguments: Any, use_tqdm: bool = False, **options: Any) -> list[Any]:
        """Searches without a progress bar, and all prompts together."""
        return super().beam_search(*arguments, **without(options))
