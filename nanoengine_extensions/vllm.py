"""vLLM's interface: to run a script that was written for vLLM, change only its import.

    from nanoengine_extensions.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, names of types, and subclasses with the rest of `SamplingParams` and
`LLM`. The engine does not know these subclasses. Outputs are nanoengine's own.
"""

from enum import Enum
from functools import partialmethod
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nanoengine
from nanoengine import CompletionOutput, RequestOutput
from nanoengine.features import extension, naming, rejected

# vLLM's keywords that change no token here, whatever their value, …
WITHOUT_EFFECT = {*"""aggregate_engine_logging all2all_backend allowed_local_media_path
    allowed_media_domains async_scheduling attention_config backend chat_template_content_format
    collect_detailed_traces compilation_config concurrency_limit cudagraph_capture_sizes
    cudagraph_metrics custom_histogram_buckets data_parallel_backend disable_any_whitespace
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_fallback disable_hybrid_kv_cache_manager disable_log_requests
    disable_log_stats disable_mm_preprocessor_cache distributed_timeout_seconds
    enable_chunked_prefill enable_ep_weight_filter enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details
    enable_mfu_metrics enable_sleep_mode eplb_config expert_placement_strategy extra_args
    fail_on_environ_validation flat_logprobs fully_sharded_loras guided_decoding_backend
    guided_decoding_disable_any_whitespace guided_decoding_disable_fallback hf_token ignore_patterns
    interleave_mm_strings jit_monitor_mode kernel_config kv_cache_metrics kv_cache_metrics_sample
    kv_offloading_backend language_model_only limit_mm_per_prompt linear_backend log_level
    logging_config long_prefill_token_threshold lora_dtype master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_long_partial_prefills max_lora_rank max_loras
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture mm_encoder_tp_mode
    mm_processor_cache_gb mm_processor_cache_type model_loader_extra_config moe_backend monokernel
    num_scheduler_steps numa_bind offload_num_in_group offload_prefetch_step optimization_level
    output_kind performance_mode prefill_schedule_interval prefix_caching_hash_algo
    pt_load_map_location ray_workers_use_nsight renderer_num_workers routed_experts_prompt_start
    safetensors_load_strategy scheduler_delay_factor scheduler_reserve_full_isl served_model_name
    show_hidden_metrics_for_version shutdown_timeout skip_clone skip_mm_profiling
    skip_reading_prefix_cache sleep_mode_backend spaces_between_special_tokens stream_interval
    trust_remote_code use_tqdm_on_load use_v2_block_manager watchdog_config watermark""".split()}
# … and those that must not turn anything on, since this engine has nothing like them. Some are keys
# of prompts.
OFF = {*"""additional_config cache_salt calculate_kv_scales code_revision config_format convert
    cpu_offload_params data_parallel_rank data_parallel_size decode_context_parallel_size
    diffusion_config disable_additional_properties disable_sliding_window
    distributed_executor_backend ec_transfer_config enable_dbo enable_elastic_ep enable_eplb
    enable_expert_parallel enable_in_reasoning enable_lora enable_mm_embeds enable_prompt_embeds
    enable_reasoning enable_return_routed_experts enable_trace_replay generation_config
    guided_decoding_disable_additional_properties hf_config_path hf_overrides io_processor_plugin
    kv_cache_dtype kv_cache_memory_bytes kv_events_config kv_offloading_size kv_sharing_fast_prefill
    kv_transfer_config logprob_token_ids logprobs_mode lora_request mamba_cache_dtype
    mamba_ssm_cache_dtype media_io_kwargs mm_processor_kwargs model_class_overrides multi_modal_data
    multi_modal_uuids nnodes node_rank offload_group_size offload_params pipeline_parallel_size
    pooler_config prefill_context_parallel_size profiler_config prompt_embeds prompt_logprob_start
    prompt_logprob_token_ids prompt_token_offsets quantization_config reasoning_config
    reasoning_parser reasoning_parser_plugin repetition_detection return_sampling_mask rope_scaling
    rope_theta runner scheduler_cls spec_method spec_model spec_tokens speculative_config task
    thinking_token_budget token_type_ids tokenization_kwargs tokenizer_mode tokenizer_revision
    trace_decode_token_ids watermark_config watermarking weight_transfer_config whitespace_pattern
    worker_cls worker_extension_cls""".split()}
# nanoengine's names, each with those of vLLM, transformers, llama.cpp and OpenAI
NAMES = {"structured_outputs": """guided_choice guided_decoding guided_grammar guided_json
             guided_regex response_format""",
         "num_kv_blocks": "kv_cache_memory_bytes num_gpu_blocks_override",
         "speculation": "spec_method speculative_config", "stop": "stop_sequences stop_strings",
         "logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids",
         "swap_space": "kv_offloading_size", "quantization": "load_in_8bit",
         "max_num_seqs": "max_batch_size", "max_tokens": "max_completion_tokens",
         "LLM.beam_search": "length_penalty use_beam_search", "LLM(tokenizer=…)": "set_tokenizer",
         "max_model_len": "n_ctx", "n": "num_return_sequences", "revision": "tokenizer_revision",
         "tensor_parallel_size": "tp_size", "truncate_prompt_tokens": "tokenization_kwargs",
         "prompt_logprobs_start": "prompt_logprob_start"}
INSTEAD = {other: name for name, others in NAMES.items() for other in others.split()}
# values that turn nothing on, as strings; nor does 1 rank
NEUTRAL = {*"False 0 0.0 -1 {} [] set() auto generate hf mp none raw_logprobs uni vllm".split(), ""}
# methods of vLLM's LLM that this engine does without
METHODS = """apply_model classify collective_rpc embed encode finish_weight_update
    get_weight_version init_weight_transfer_engine release_kv_cache_memory reset_mm_cache reward
    score set_tokenizer shutdown_weight_transfer_engine sleep start_draft_weight_update
    start_profile start_weight_update stop_profile update_weight_version update_weights
    wake_up""".split()

# vLLM's types of prompts and grammars: dicts with the same keys
TextPrompt = TokensPrompt = PromptType = StructuredOutputsParams = GuidedDecodingParams = dict
# for `SamplingParams(output_kind=)`
RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
VLLMValidationError = ValueError


def advice(name: str) -> str:
    """Returns advice for a keyword of vLLM, of another engine or of another class here; "" for any
    other one."""
    for kind in (nanoengine.SamplingParams, nanoengine.LLM):
        if name in signature(kind).parameters:
            return f"it is an option of {kind.__name__}"
    if name in INSTEAD or name in OFF:
        return instead(name)
    is_taken = name in WITHOUT_EFFECT or name in signature(LLM.__init__).parameters
    return "leave it out, or import from nanoengine_extensions.vllm, which takes it" * is_taken


def instead(name: str) -> str:
    """Returns what this engine has in place of something that it refuses."""
    return f"use {INSTEAD[name]}" if name in INSTEAD else "this engine has nothing like it"


def plain(prompts: Any) -> Any:
    """Returns the prompts, or a grammar; dicts lose the keys that have no effect: see `without`."""
    if isinstance(prompts, (list, tuple)):
        return [without(each) if isinstance(each, dict) else each for each in prompts]
    return without(prompts) if isinstance(prompts, dict) else prompts


def without(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without those that have no effect, and without those that are None, which
    means the default.

    Raises ValueError for an option in OFF that would turn something on.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in OFF & given.keys():
        is_one = name.endswith(("nnodes", "parallel_size")) and given[name] == 1
        if str(given[name]) not in NEUTRAL and not is_one:
            raise rejected(name, given[name], f"left out: {instead(name)}")
    return {name: given[name] for name in given.keys() - WITHOUT_EFFECT - OFF}


class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters. None stands for the default, except for `max_tokens`.

    `output_kind` has no effect, as in vLLM's own `LLM`. `extra_args` has no effect either, but is
    kept as an attribute. All arguments of the constructor can also be assigned later.
    """

    def __init__(self, *, max_tokens: int | None = 16, **options: Any) -> None:
        form = options.pop("structured_outputs", None)
        # if both are given, this one is an unknown keyword
        form = options.pop("guided_decoding", None) if form is None else form
        super().__init__(max_tokens=max_tokens, structured_outputs=plain(form), **without(options))
        self.extra_args = options.get("extra_args")

    def __setattr__(self, name: str, value: Any) -> None:
        name = "structured_outputs" if name == "guided_decoding" else name
        if name in WITHOUT_EFFECT or name in OFF:
            # raises an error if it would turn something on
            without({name: value})
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    from_optional = classmethod(lambda cls, **values: cls(**values))


class Parts(SimpleNamespace):
    """The parts of vLLM's engine that scripts and tests read."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"llm_engine.{name} is not supported: use LLM.add, .step and .abort")


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, *, max_logprobs: int | None = None,
                 num_gpu_blocks_override: int | None = None, structured_outputs_config: Any = None,
                 override_generation_config: Any = None, logits_processors: Any = None,
                 chat_template: Any = None, **options: Any) -> None:
        # vLLM's own default is 20; without a number, nothing limits it here
        self.max_logprobs = -1 if max_logprobs is None else max_logprobs
        options.setdefault("num_kv_blocks", num_gpu_blocks_override)
        if logits_processors:
            raise rejected("logits_processors", logits_processors, "functions in SamplingParams")
        self.chat_template = chat_template
        # a file or, with a brace or a line break, the template itself
        if chat_template is not None and not {*"{}\n"} & {*str(chat_template)}:
            with naming("chat_template"):
                self.chat_template = Path(chat_template).read_text(encoding="utf-8")
        # the requests of `enqueue`, whose outputs `wait_for_completion` returns
        self.enqueued: list[Any] = []
        drafts = options.get("speculative_config")
        # the method is in `method`, or `model` in older versions; the numbers of guesses are unused
        if isinstance(drafts, dict) and "ngram" in f"{drafts.get('method') or drafts.get('model')}":
            options |= {"speculation": "prompt-lookup", "speculative_config": None}
        with naming("structured_outputs_config"):
            if unknown := without(dict(structured_outputs_config or {})):
                raise rejected(*unknown.popitem(), "left out: it is not known")
        super().__init__(model, **without(options))
        old = {} if options.get("generation_config") == "vllm" else vars(self.inputs.default_params)
        # the names in the file; one of them differs
        changes = {"max_tokens" if name == "max_new_tokens" else name: value
                   for name, value in (override_generation_config or {}).items()}
        self.inputs.default_params = SamplingParams(**old | changes)

    from_engine_args = classmethod(lambda cls, arguments: cls(**vars(arguments)))

    @property
    def llm_engine(self) -> Any:
        """The parts of vLLM's engine that scripts and tests read."""
        inputs = self.inputs
        model = SimpleNamespace(max_model_len=inputs.max_model_len, hf_config=self.model_config,
                                get_vocab_size=lambda: inputs.vocab_size)
        configs = dict(cache_config=self.config, model_config=model)
        # this is how scripts free the memory
        core = SimpleNamespace(shutdown=lambda timeout=None: self.close())
        return Parts(**configs, vllm_config=SimpleNamespace(**configs), engine_core=core,
                     get_num_unfinished_requests=lambda: len(self.active),
                     has_unfinished_requests=lambda: bool(self.active))

    def get_metrics(self) -> list[Any]:
        """Returns `metrics()` as objects with a `name` like vLLM's, and a `value`."""
        return [SimpleNamespace(name=f"vllm:{name}", value=n) for name, n in self.metrics().items()]

    def get_world_size(self, include_dp: bool = True) -> int:
        """Returns the number of ranks."""
        return self.config.tensor_parallel_size

    def reset_prefix_cache(self, reset_running_requests: bool = False,
                           reset_connector: bool = False) -> bool:
        """Empties the prefix cache. Blocks in use are no longer in it, whatever the arguments."""
        return super().reset_prefix_cache()

    def check_logprobs(self, params: Any) -> None:
        """Raises ValueError for more log-probabilities than `max_logprobs`."""
        params = params if isinstance(params, (list, tuple)) else [params]
        for name in ("logprobs", "prompt_logprobs"):
            for count in (getattr(each, name, None) or 0 for each in params):
                if self.max_logprobs != -1 and not 0 <= count <= self.max_logprobs:
                    raise rejected(name, count, f"at most max_logprobs={self.max_logprobs}")

    def generate(self, prompts: Any = None, sampling_params: Any = None, use_tqdm: Any = True,
                 priority: Any = None, *, prompt_token_ids: Any = None,
                 **options: Any) -> list[Any]:
        """Generates as nanoengine does."""
        if prompts is not None and prompt_token_ids is not None:
            raise rejected("prompt_token_ids", prompt_token_ids, "left out beside prompts")
        self.check_logprobs(sampling_params)
        prompts = plain(prompt_token_ids if prompts is None else prompts)
        return super().generate(prompts, sampling_params, use_tqdm, priority, **without(options))

    def enqueue(self, prompts: Any, sampling_params: Any = None, lora_request: Any = None,
                priority: Any = None, use_tqdm: Any = True, **options: Any) -> list[str]:
        """Queues requests for `wait_for_completion`; returns their numbers."""
        self.check_logprobs(sampling_params)
        options = without(options | {"lora_request": lora_request})
        requests = self.add(plain(prompts), sampling_params, priority, **options)
        self.enqueued += requests
        return [request.request_id for request in requests]

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, use_tqdm: Any = True,
                     lora_request: Any = None, priority: Any = None, **options: Any) -> list[str]:
        """Queues conversations for `wait_for_completion`; returns the numbers of the requests."""
        prompts = extension("chat").render(self.inputs, messages, **self.for_chat(options))
        return self.enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Any = True) -> list[Any]:
        """Runs steps until all requests of `enqueue` have finished; returns their outputs.

        It shows no progress bar. As with `step`, a request that cannot continue gets the
        `finish_reason` "error".
        """
        requests, self.enqueued = self.enqueued, []
        for request in requests:
            while not request.is_finished:
                self.step()
        return [request.output() for request in requests]

    def for_chat(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of a chat, without those that have no effect. In a chat, the format
        of contents does have an effect."""
        form = options.get("chat_template_content_format", "auto")
        template = dict(chat_template=self.chat_template, chat_template_content_format=form)
        return template | without(options)

    def chat(self, *arguments: Any, **options: Any) -> list[Any]:
        """Answers as nanoengine does; by default, with the engine's `chat_template`."""
        return super().chat(*arguments, **self.for_chat(options))

    def beam_search(self, prompts: Any, params: Any,  # type: ignore[override]
                    lora_request: Any = None, use_tqdm: Any = False, **options: Any) -> list[Any]:
        """Searches without a progress bar, and all prompts together."""
        options = without(options | {"lora_request": lora_request})
        return super().beam_search(plain(prompts), params, **options)


def refuse(llm: LLM, name: str, /, *_: Any, **__: Any) -> None:
    """Raises ValueError: a method of vLLM that this engine does not have."""
    raise ValueError(f"LLM.{name} is not supported: {instead(name)}")


# vLLM's `score`, too, is for models of another kind, and takes the place of nanoengine's
for method in METHODS:
    setattr(LLM, method, partialmethod(refuse, method))
# BeamSearchParams and others
__getattr__ = nanoengine.__getattr__
