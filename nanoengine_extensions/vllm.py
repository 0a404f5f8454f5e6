"""vLLM's interface: a script written for it runs when only its import is changed.

    from nanoengine_extensions.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, names of types, and subclasses with the rest of `SamplingParams` and
`LLM`. The engine does not know these subclasses. Outputs are nanoengine's own.
"""

from dataclasses import replace
from enum import Enum
from functools import partialmethod
from inspect import signature
from types import SimpleNamespace
from typing import Any

import nanoengine
from nanoengine import CompletionOutput, RequestOutput
from nanoengine.features import naming, rejected

# vLLM's keywords that change no token here, whatever their value, …
WITHOUT_EFFECT = {*"""async_scheduling attention_config backend chat_template_content_format
    compilation_config concurrency_limit disable_any_whitespace disable_async_output_proc
    disable_cascade_attn disable_custom_all_reduce disable_fallback disable_log_requests
    disable_log_stats enable_chunked_prefill enable_log_requests enable_sleep_mode extra_args
    flat_logprobs guided_decoding_backend hf_token kernel_config limit_mm_per_prompt
    long_prefill_token_threshold max_seq_len_to_capture num_scheduler_steps
    optimization_level output_kind performance_mode prefix_caching_hash_algo served_model_name
    skip_clone spaces_between_special_tokens trust_remote_code use_tqdm_on_load
    use_v2_block_manager""".split()}
# … and those that must not turn on anything, since this engine has nothing like it.
OFF = {*"""additional_config config_format convert data_parallel_size disable_additional_properties
    distributed_executor_backend enable_expert_parallel enable_in_reasoning enable_lora
    enable_prompt_embeds generation_config hf_overrides kv_cache_dtype kv_cache_memory_bytes
    logprobs_mode lora_request pipeline_parallel_size reasoning_parser runner
    speculative_config task tokenization_kwargs tokenizer_mode whitespace_pattern""".split()}
# nanoengine's names for keywords of vLLM, transformers, llama.cpp and OpenAI
INSTEAD = {"guided_choice": "structured_outputs", "guided_decoding": "structured_outputs",
           "guided_grammar": "structured_outputs", "guided_json": "structured_outputs",
           "guided_regex": "structured_outputs", "num_gpu_blocks_override": "num_kv_blocks",
           "speculative_config": "speculation", "load_in_8bit": "quantization",
           "max_batch_size": "max_num_seqs", "max_completion_tokens": "max_tokens",
           "n_ctx": "max_model_len", "num_return_sequences": "n", "stop_sequences": "stop",
           "response_format": "structured_outputs", "stop_strings": "stop",
           "tp_size": "tensor_parallel_size"}
# values that turn on nothing, as texts; so do 0 as a flag and 1 as a size
NEUTRAL = {*"False {} [] auto generate hf mp none raw_logprobs uni vllm".split(), ""}
# methods of vLLM's LLM that this engine does without
METHODS = """apply_model classify collective_rpc embed encode enqueue reset_mm_cache reward score
    sleep start_profile stop_profile wait_for_completion wake_up""".split()

# vLLM's types of prompts and grammars: dicts with the same keys
TextPrompt = TokensPrompt = StructuredOutputsParams = GuidedDecodingParams = dict
# for `SamplingParams(output_kind=)`
RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
VLLMValidationError = ValueError


def advice(name: str) -> str:
    """Returns what to do with a keyword of vLLM, or of others; "" for any other one."""
    if name in INSTEAD:
        return f"use {INSTEAD[name]}"
    if name in OFF:
        return "leave it out, since this engine has nothing like it"
    is_taken = name in WITHOUT_EFFECT or name in signature(LLM.__init__).parameters
    return "leave it out, or import from nanoengine_extensions.vllm, which takes it" * is_taken


def without(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without those that have no effect, and without None, the default of all.

    Raises ValueError for an option in OFF that would turn something on.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in OFF & given.keys():
        least = 1 if name.endswith("_size") else 0
        if str(given[name]) not in NEUTRAL and given[name] != least:
            raise rejected(name, given[name], "left out: this engine has nothing like it")
    return {name: given[name] for name in given.keys() - WITHOUT_EFFECT - OFF}


class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters. None stands for the default, except as `max_tokens`.

    `output_kind` has no effect, as in vLLM's own `LLM`. Nor has `extra_args`, which is kept as an
    attribute.
    """

    def __init__(self, *, max_tokens: int | None = 16, **options: Any) -> None:
        wanted = options.pop("structured_outputs", None)
        # an unknown keyword where both are given
        wanted = options.pop("guided_decoding", None) if wanted is None else wanted
        wanted = without(wanted) if isinstance(wanted, dict) else wanted
        if wanted == {}:
            raise rejected("structured_outputs", wanted, "a grammar, such as {'regex': …}")
        super().__init__(max_tokens=max_tokens, structured_outputs=wanted, **without(options))
        vars(self)["extra_args"] = options.get("extra_args")

    from_optional = classmethod(lambda cls, **values: cls(**values))


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, *, max_logprobs: int | None = None,
                 num_gpu_blocks_override: int | None = None, structured_outputs_config: Any = None,
                 override_generation_config: Any = None, logits_processors: Any = None,
                 **options: Any) -> None:
        # vLLM's own default is 20; without a number, nothing limits it here
        self.max_logprobs = -1 if max_logprobs is None else max_logprobs
        if num_gpu_blocks_override is not None:
            options["num_kv_blocks"] = num_gpu_blocks_override
        if logits_processors:
            raise rejected("logits_processors", logits_processors,
                           "left out: give functions to SamplingParams")
        with naming("structured_outputs_config"):
            if unknown := without(dict(structured_outputs_config or {})):
                raise rejected(*unknown.popitem(), "left out: it is not known")
        super().__init__(model, **without(options))
        if options.get("generation_config") == "vllm":
            self.inputs.default_params = nanoengine.SamplingParams()
        # the file's names; one of them differs
        changes = {"max_tokens" if name == "max_new_tokens" else name: value
                   for name, value in (override_generation_config or {}).items()}
        self.inputs.default_params = replace(self.inputs.default_params, **changes)

    @property
    def llm_engine(self) -> Any:
        """The parts of vLLM's engine that scripts and tests read."""
        configs = dict(cache_config=self.config, model_config=self.inputs)
        return SimpleNamespace(**configs, vllm_config=SimpleNamespace(**configs),
                               get_num_unfinished_requests=lambda: len(self.active))

    def get_metrics(self) -> list[Any]:
        """Returns `metrics()` as objects with a `name` like vLLM's, and a `value`."""
        return [SimpleNamespace(name=f"vllm:{name}", value=n) for name, n in self.metrics().items()]

    def generate(self, prompts: Any = None, sampling_params: Any = None, *arguments: Any,
                 prompt_token_ids: Any = None, **options: Any) -> list[Any]:
        """Generates as nanoengine does."""
        if prompts is not None and prompt_token_ids is not None:
            raise rejected("prompt_token_ids", prompt_token_ids, "left out beside prompts")
        is_one = not isinstance(sampling_params, (list, tuple))
        params = [sampling_params] if is_one else sampling_params
        for name in ("logprobs", "prompt_logprobs"):
            for count in (getattr(each, name, None) or 0 for each in params):
                if self.max_logprobs != -1 and not 0 <= count <= self.max_logprobs:
                    raise rejected(name, count, f"at most max_logprobs={self.max_logprobs}")
        return super().generate(prompt_token_ids if prompts is None else prompts,
                                sampling_params, *arguments, **without(options))

    def chat(self, *arguments: Any, **options: Any) -> list[Any]:
        """Answers as nanoengine does. The form of contents has its effect here."""
        form = options.get("chat_template_content_format", "auto")
        return super().chat(*arguments, **without(options), chat_template_content_format=form)

    def beam_search(self, *arguments: Any, use_tqdm: bool = False, **options: Any) -> list[Any]:
        """Searches without a progress bar, and all prompts together."""
        return super().beam_search(*arguments, **without(options))


def refuse(llm: LLM, name: str, /, *_: Any, **__: Any) -> None:
    """Raises ValueError: a method of vLLM that this engine does not have."""
    raise ValueError(f"LLM.{name} is not supported: this engine has nothing like it")


# vLLM's `score`, too, is for models of another kind, and takes the place of nanoengine's
for method in METHODS:
    setattr(LLM, method, partialmethod(refuse, method))
# BeamSearchParams and others
__getattr__ = nanoengine.__getattr__
