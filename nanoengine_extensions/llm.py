"""`LLM` with more methods: chats, beam search, metrics; and strict checks of what a call is given.

`from nanoengine import LLM` is this class, where the extensions are installed.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import fields
from functools import cached_property
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any

import nanoengine.llm
import nanoengine.sampling_params
from nanoengine.outputs import Request, RequestOutput
from nanoengine.requests import FORMS, InputProcessor, Params
from nanoengine.seams import rejected
from nanoengine_extensions.beam_search import (
    BeamSearchOutput, BeamSearchParams, BeamSearchSequence, beam_search)
from nanoengine_extensions.checks import not_known
from nanoengine_extensions.engine import make_engine
from nanoengine_extensions.generation_config import defaults_of
from nanoengine_extensions.logprobs import ScoredRequest
from nanoengine_extensions.metrics import RequestMetrics
from nanoengine_extensions.options import EngineConfig, SamplingParams
from nanoengine_extensions.runner import Runner


class StrictInputProcessor(InputProcessor):
    """Checks the types of all arguments of a call, and token ids in parameters."""

    config: EngineConfig
    make_request = ScoredRequest

    def __init__(self, config: EngineConfig, model_config: Any, folder: Path) -> None:
        params = defaults_of(folder / "generation_config.json")
        super().__init__(config, model_config, folder)
        self.default_params = params

    @cached_property
    def tokenizer_of_user(self) -> Any:
        """A copy: a call with truncation=True changes a tokenizer, also for other threads."""
        return deepcopy(self.get_tokenizer())

    def make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        if not isinstance(prompts, (str, dict, list, tuple)):
            raise rejected("prompts", prompts, FORMS)
        if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
            prompts = [prompts]
        params = one_for_each(len(prompts), "sampling_params", params, self.default_params)
        # the engine's own class has fewer of them
        params = [each if isinstance(each, SamplingParams) else extended(each) for each in params]
        priorities = one_for_each(len(prompts), "priority", priority, 0)
        if self.config.scheduling_policy != "priority":
            priorities = [0] * len(prompts)
        for each in params:
            if each.bad_words or each.structured_outputs is not None:
                self.get_tokenizer()
            for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
                self._check_vocabulary(name, getattr(each, name) or ())
        requests = super().make_requests(prompts, params, priorities)
        for request in requests:
            metrics = RequestMetrics()
            for seq in request.seqs:
                seq.metrics = metrics
        return requests

    def parse(self, index: int, prompt: Any) -> tuple[str | None, list[int]]:
        given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        if isinstance(given, (list, tuple)):
            self._check_vocabulary(f"prompts[{index}]", given)
        return super().parse(index, prompt)

    def _check_vocabulary(self, name: str, token_ids: Iterable[Any]) -> None:
        """Raises ValueError for a token id out of the vocabulary. An integer of NumPy is one."""
        last = self.vocab_size - 1
        for token_id in token_ids:
            is_id = isinstance(token_id, Integral) and type(token_id) is not bool
            if not is_id or not 0 <= int(token_id) <= last:
                raise ValueError(f"{name}: token id {token_id!r} is out of vocabulary, 0 to {last}")


def extended(params: Any) -> SamplingParams:
    """Returns parameters of the engine's own class as those of the extensions."""
    return SamplingParams(**{each.name: getattr(params, each.name) for each in fields(params)})


def one_for_each(num_prompts: int, name: str, value: Any, default: Any) -> list[Any]:
    """Returns a value for each prompt, from one value, a list, or None (the default)."""
    kind = nanoengine.sampling_params.SamplingParams if name == "sampling_params" else int
    value = default if value is None else value
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_prompts
    is_right = [isinstance(item, kind) and not isinstance(item, bool) for item in values]
    if len(values) != num_prompts or not all(is_right):
        shown = f"a list of {len(values)}" if all(is_right) else value
        raise rejected(name, shown, f"one {kind.__name__}, or {num_prompts} of them")
    return values


class LLM(nanoengine.llm.LLM):
    __doc__ = nanoengine.llm.LLM.__doc__

    # for help() and notebooks
    __signature__ = signature(EngineConfig)
    make_config = EngineConfig
    make_inputs = StrictInputProcessor
    make_engine = staticmethod(make_engine)

    @staticmethod
    def make_runner(config: EngineConfig, model_config: Any, folder: Path) -> Runner:
        """Returns a runner for one device, or for several. Adds advice to an error of memory."""
        kind = Runner
        if config.tensor_parallel_size > 1:
            from nanoengine_extensions.tensor_parallel import TensorParallelRunner as kind
        try:
            return kind(config, model_config, folder)
        # a size of the model is 0, or needs more memory than is free, or than PyTorch can count
        except (MemoryError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"{config.model} cannot be run with these options: {error} Lower "
                             "max_num_batched_tokens or num_kv_blocks to save memory") from error

    def chat(self, messages: list[Any], sampling_params: Params = None, use_tqdm: bool = True, *,
             priority: int | list[int] | None = None, **options: Any) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        messages: the content of each is a text, or a list of texts and
            {"type": "text", "text": …}, which are joined by newlines, unless the template goes
            through the parts itself.
        chat_template: in place of the tokenizer's own.
        add_generation_prompt: let the assistant begin its answer; by default True.
        continue_final_message: leave the last message open, so that the model continues it; by
            default False, and True needs add_generation_prompt=False.
        tools: functions or JSON schemas, for templates that know tools.
        chat_template_kwargs: further template variables: {"enable_thinking": False} for Qwen3; they
            override the arguments above.

        The other arguments are those of `generate`. Raises ValueError if there is no template.
        """
        return self.generate(self._render(messages, options), sampling_params, use_tqdm, priority)

    def stream_chat(self, messages: list[Any], sampling_params: Params = None, *,
                    priority: int | list[int] | None = None,
                    **options: Any) -> Iterator[RequestOutput]:
        """Like `chat`, but yields the answer so far whenever it has new tokens, like `stream`."""
        return self.stream(self._render(messages, options), sampling_params, priority)

    def _render(self, messages: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
        from nanoengine_extensions.chat import OPTIONS, render
        for name in options.keys() - OPTIONS:
            raise TypeError(not_known(name, OPTIONS))
        own = self.inputs.get_tokenizer()
        # the user's copy can have another template, but must not change how texts are encoded
        tokenizer = vars(self.inputs).get("tokenizer_of_user", own)
        return render(tokenizer, messages, own, **options)

    def beam_search(self, prompts: Any, params: Any) -> list[Any]:
        """Returns a `BeamSearchOutput` for each prompt: its `params.beam_width` best completions.

        Raises ValueError if `params` is not a `BeamSearchParams`, or if the beams might not fit.
        """
        return beam_search(self, prompts, params)

    # the requests that have not ended, by number
    active = property(lambda self: self.entered | {r.request_id: r for r in [*self.arrived]})

    # with trace=True: a record of each step, see `Launched` in model_runner.py
    trace = property(lambda self: self.engine.metrics.trace)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `sampling_params=None` stands for: see `loader.load_defaults`."""
        return self.inputs.default_params.clone()

    def get_tokenizer(self) -> Any:
        """Returns the transformers tokenizer, a copy of the engine's own. Raises ValueError if the
        model has none."""
        return self.inputs.tokenizer_of_user

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; blocks in use stay in use. Returns True, as in vLLM."""
        with self.turn():
            manager = self.engine.scheduler.block_manager
            manager.forget(list(manager.blocks_by_hash))
        return True

    def metrics(self) -> dict[str, Any]:
        """Returns current gauges, and counters since the start: see metrics.py."""
        return self.engine.metrics.gauges()


# what `nanoengine` exports besides
EXPORTS = {each.__name__: each for each in (
    LLM, SamplingParams, BeamSearchOutput, BeamSearchParams, BeamSearchSequence)}
