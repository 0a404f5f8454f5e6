"""vLLM's interface: to run a script that was written for vLLM, change only its import.

    from nanoengine_extras.tools.vllm import LLM, SamplingParams

nanoengine's own `LLM` uses vLLM's names for the same features. This file adds the rest: keywords
that have no effect here, names of types, and subclasses with the rest of `SamplingParams` and
`LLM`. The engine does not know these subclasses. Outputs are nanoengine's own.

Two lists have keywords of vLLM, those of older versions included, and keys of its prompts:

    without_effect.txt    those that change no token here, whatever their value
    off.txt               those for features that this engine lacks: they must turn nothing on
"""

import os
from enum import Enum
from functools import partialmethod
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import nanoengine
from nanoengine import CompletionOutput, RequestOutput
from nanoengine.errors import naming, rejected
from nanoengine.features import extension
from nanoengine.observers import Feature
from nanoengine.sequence import Sequence

WITHOUT_EFFECT, OFF = ({*Path(__file__).with_name(name).read_text(encoding="utf-8").split()}
                       for name in ("without_effect.txt", "off.txt"))
# nanoengine's names, each with those of vLLM, transformers, llama.cpp and OpenAI
NAMES = {"structured_outputs": """guided_choice guided_decoding guided_grammar guided_json
             guided_regex response_format""", "CUDA_VISIBLE_DEVICES": "device_ids",
         "num_kv_blocks": "kv_cache_memory_bytes num_gpu_blocks_override",
         "speculation": "spec_method speculative_config", "stop": "stop_sequences stop_strings",
         "logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids",
         "swap_space": "kv_offloading_size", "quantization": "load_in_8bit",
         "max_num_seqs": "max_batch_size", "max_tokens": "max_completion_tokens",
         "LLM.beam_search": "length_penalty use_beam_search", "LLM(tokenizer=…)": "set_tokenizer",
         "max_model_len": "n_ctx", "n": "num_return_sequences", "revision": "tokenizer_revision",
         "tensor_parallel_size": "tp_size", "truncate_prompt_tokens": "tokenization_kwargs",
         "prompt_logprobs_start": "prompt_logprob_start", "skip_tokenizer_init": "tokens_only"}
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
    return "leave it out, or import from nanoengine_extras.tools.vllm, which takes it" * is_taken


def instead(name: str) -> str:
    """Returns advice: the replacement, if any, for something that this engine refuses."""
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
    kept as an attribute. `flat_logprobs` asks for `FlatLogprobs`. All arguments of the constructor
    can also be assigned later.
    """

    def __init__(self, *, max_tokens: int | None = 16, **options: Any) -> None:
        form = options.pop("structured_outputs", None)
        # if both are given, this one is an unknown keyword
        form = options.pop("guided_decoding", None) if form is None else form
        super().__init__(max_tokens=max_tokens, structured_outputs=plain(form), **without(options))
        self.extra_args = options.get("extra_args")
        self.flat_logprobs = options.get("flat_logprobs")

    def __setattr__(self, name: str, value: Any) -> None:
        name = "structured_outputs" if name == "guided_decoding" else name
        if name in WITHOUT_EFFECT or name in OFF:
            # raises an error if it would turn something on
            without({name: value})
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def clone(self) -> "SamplingParams":
        copy: Any = super().clone()
        copy.flat_logprobs = self.flat_logprobs
        return copy

    from_optional = classmethod(lambda cls, **values: cls(**values))


class FlatLogprobs(list):
    """vLLM's flat form of log-probabilities: a list of dicts that also has them as columns.

    In the columns, position i has the entries from `start_indices[i]` to `end_indices[i]`: its own
    token, then the likeliest ones, which can include it once more. A position without
    log-probabilities, such as the first of a prompt, has an empty dict and no entries.

    count: how many of the likeliest were asked for; -1: all.
    """

    def __init__(self, positions: list[Any], count: int) -> None:
        super().__init__(found or {} for found in positions)
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        for found in self:
            self.start_indices.append(len(self.token_ids))
            likeliest = sorted(found, key=lambda token_id: found[token_id].rank)
            self.token_ids += [*found][:1] + likeliest[:len(found) if count == -1 else count]
            self.end_indices.append(len(self.token_ids))
        entries = [found[token_id] for found, start, end in zip(
                       self, self.start_indices, self.end_indices)
                   for token_id in self.token_ids[start:end]]
        self.logprobs = [each.logprob for each in entries]
        self.ranks = [each.rank for each in entries]
        self.decoded_tokens = [each.decoded_token for each in entries]


class Flat(Feature):
    """Makes log-probabilities flat, for requests that ask for it."""

    def output(self, seqs: list[Sequence], output: RequestOutput) -> None:
        params: Any = seqs[0].params
        if not vars(params).get("flat_logprobs"):
            return
        if output.prompt_logprobs is not None:
            output.prompt_logprobs = FlatLogprobs(output.prompt_logprobs, params.prompt_logprobs)
        for each in output.outputs:
            if each.logprobs is not None:
                each.logprobs = FlatLogprobs(each.logprobs, params.logprobs)


class Parts(SimpleNamespace):
    """The parts of vLLM's engine that scripts and tests read."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"llm_engine.{name} is not supported: use LLM.add, .step and .abort")


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`, with vLLM's other keywords and methods."""

    def __init__(self, model: Any, *, max_logprobs: int | None = None,
                 num_gpu_blocks_override: int | None = None, structured_outputs_config: Any = None,
                 override_generation_config: Any = None, logits_processors: Any = None,
                 chat_template: Any = None, hf_token: Any = None, **options: Any) -> None:
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
        drafts = options.get("speculative_config") or {"method": options.get("spec_method")}
        # the method is in `method`, or `model` in older versions; the numbers of guesses are unused
        if isinstance(drafts, dict) and "ngram" in f"{drafts.get('method') or drafts.get('model')}":
            options["speculation"] = "prompt-lookup"
            options |= dict.fromkeys(("speculative_config", "spec_method", "spec_tokens"))
        with naming("structured_outputs_config"):
            if unknown := without(dict(structured_outputs_config or {})):
                raise rejected(*unknown.popitem(), "left out: it is not known")
        given = options.get("features") or []
        with naming(rejected("features", given, "a list of features")):
            options["features"] = [*given, Flat()]
        # where huggingface_hub looks for it; True means the token of a login, which it finds itself
        with patch.dict(os.environ, {"HF_TOKEN": hf_token} if isinstance(hf_token, str) else {}):
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
            raise rejected("prompt_token_ids", prompt_token_ids, "left out if prompts are given")
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
        prompts = extension("tools.chat").render(self.inputs, messages, **self.for_chat(options))
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

    def beam_search(self, prompts: Any, params: Any,
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
