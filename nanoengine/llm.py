"""`LLM`: the facade. It turns prompts into requests, runs the step loop, and hands out the results.

    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        tokens = runner.run(batch)
        scheduler.postprocess(batch, tokens)
"""

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.loader import find_model, load_config, load_defaults, load_tokenizer
from nanoengine.model_runner import ModelRunner
from nanoengine.outputs import Request, RequestOutput
from nanoengine.sampler import build_processors, mix
from nanoengine.sampling_params import SamplingParams, rejected
from nanoengine.scheduler import Batch, Scheduler
from nanoengine.sequence import Sequence

Prompt = str | list[int] | dict[str, Any]
Params = SamplingParams | list[SamplingParams] | None
PROMPTS = "a text, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these"


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use. One call generates at a time; an error or Ctrl-C in the middle of
    one leaves an engine that can be used again, with all its blocks free.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.config = config = EngineConfig(model=model, **options)
        limits = config.limits()
        folder = find_model(config.model)
        self.model_config = load_config(folder)
        self.tokenizer = load_tokenizer(find_model(config.tokenizer or folder))
        if config.tokenizer and self.tokenizer is None:
            raise rejected("tokenizer", str(config.tokenizer), "a folder or id with a tokenizer")
        self.default_params, self.eos_token_ids = load_defaults(
            folder, self.model_config, self.tokenizer)
        self.runner: Any = ModelRunner(config, self.model_config, folder)
        self.max_model_len = self.runner.max_model_len
        manager = BlockManager(
            self.runner.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(manager, *limits, config.scheduling)
        self.num_requests = 0
        self.requests: dict[str, Request] = {}  # of the call that is running

    # ------------------------------------------------------------------------- generating

    def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: temperature, top_p and top_k of the
            model's generation_config.json.
        Raises ValueError for bad input before anything is generated, RuntimeError while a stream
        is open.
        """
        requests = self._make_requests(prompts, sampling_params)
        before = self.scheduler.counters.copy()
        with closing(self._run(requests)) as steps, \
                tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            for updated in steps:
                if use_tqdm:
                    bar.set_postfix(self._rates_since(before), refresh=False)
                bar.update(sum(request.seq.is_finished for request in updated))
        return [request.output() for request in requests]

    def chat(self, messages: list[Any], sampling_params: Params = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        The prompt is made by the tokenizer's chat template. Raises ValueError where there is none.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, list) or not messages:
            raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
        conversations = messages if isinstance(messages[0], list) else [messages]
        texts = tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True)
        prompts: list[Any] = [  # the template has the special tokens
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
            for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompts: Prompt | list[Prompt],
               sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        steps = self._run(self._make_requests(prompts, sampling_params))
        next(steps)  # queues them: from here on the stream is open until it is exhausted or dropped
        return (request.output() for updated in steps for request in updated)

    def _run(self, requests: list[Request]) -> Generator[list[Request], None, None]:
        """Queues the requests, then steps until all are finished; yields those with new tokens."""
        try:
            self.requests = {request.seq.request_id: request for request in requests}
            for request in requests:
                self.scheduler.add(request.seq)
            yield []
            while self.scheduler.has_unfinished():
                yield self._step()
        except GeneratorExit:  # dropped between two steps
            for request in requests:
                self.scheduler.finish(request.seq, "abort")
        except BaseException:  # in the middle of a step
            self.scheduler.reset()
            raise
        finally:
            self.requests = {}

    def _step(self) -> list[Request]:
        """One step of the engine; returns the requests that have new tokens."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        step = self.runner.prepare(batch)
        prepared = time.perf_counter()
        token_ids, logprobs = self.runner.run(batch, step)
        ran = time.perf_counter()
        self.scheduler.postprocess(batch, token_ids)
        updated = [self.requests[batch.sequences[index].request_id] for index in batch.sampled]
        for request, found in zip(updated, logprobs):
            stop = request.update(found)
            if stop is not None:
                self.scheduler.finish(request.seq, "stop", stop)
        now = time.perf_counter()
        self._count(batch, now - started, (prepared - started) + (now - ran))
        return updated

    # --------------------------------------------------------------------------- requests

    def _make_requests(self, prompts: Any, params: Any) -> list[Request]:
        """Checks a whole call, then makes its requests: nothing is queued if one of them is bad."""
        if self.runner is None or self.requests:
            raise RuntimeError("the LLM is closed, or a stream is open: exhaust or drop it first")
        if isinstance(prompts, (str, dict)):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise rejected("prompts", prompts, PROMPTS)
        if prompts and all(isinstance(item, Integral) for item in prompts):
            prompts = [prompts]
        if not isinstance(params, (list, tuple)):
            params = [self.default_params if params is None else params] * len(prompts)
        if len(params) != len(prompts) or not all(isinstance(p, SamplingParams) for p in params):
            raise rejected("sampling_params", params, f"a SamplingParams or {len(prompts)} of them")
        requests = list(map(self._make_request, range(len(prompts)), prompts, params))
        self.num_requests += len(requests)
        return requests

    def _make_request(self, index: int, prompt: Any, params: SamplingParams) -> Request:
        """Checks one prompt and its parameters against model, tokenizer and cache."""
        if params.stop or params.bad_words:
            self.get_tokenizer()
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            self._check_vocabulary(name, getattr(params, name) or ())
        text, token_ids = self._parse_prompt(f"prompts[{index}]", prompt)
        number, length = self.num_requests + index, len(token_ids)
        longest = min(length + (params.max_tokens or self.max_model_len), self.max_model_len)
        stops: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids}
        ends = stops | dict.fromkeys(self.eos_token_ids)
        processors = build_processors(params, length, list(ends), self.tokenizer)
        seed = mix(self.config.seed, number) if params.seed is None else params.seed
        seq = Sequence(str(number), token_ids, length, longest, params, seed, processors,
                       stops if params.ignore_eos else ends)
        return Request(text, seq, self.tokenizer if params.detokenize else None)

    def _parse_prompt(self, name: str, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms, as its text (if there is one) and its token ids."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            token_ids = self.get_tokenizer().encode(text)
        known = prompt.keys() <= {"prompt", "prompt_token_ids"}
        if not known or not isinstance(token_ids, (list, tuple)):
            raise rejected(name, prompt, PROMPTS)
        self._check_vocabulary(name, token_ids)
        if not 0 < len(token_ids) < self.max_model_len:
            raise ValueError(f"{name} has {len(token_ids)} tokens: a decoder prompt cannot be "
                             f"empty, and must be shorter than max_model_len={self.max_model_len}")
        return text, list(map(int, token_ids))

    def _check_vocabulary(self, name: str, token_ids: Iterable[Any]) -> None:
        last = self.model_config.vocab_size - 1
        for token_id in token_ids:
            if not isinstance(token_id, Integral) or not 0 <= int(token_id) <= last:
                raise ValueError(f"{name}: token id {token_id!r} is out of vocabulary, 0 to {last}")

    # ---------------------------------------------------------------------------- the rest

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError where the model has none."""
        if self.tokenizer is None:
            raise rejected("tokenizer", None, "given for texts, stop strings and bad_words")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets what the prefix cache knows; blocks in use stay in use. True, as in vLLM."""
        self.scheduler.block_manager.reset_prefix_cache()
        return True

    def metrics(self) -> dict[str, Any]:
        """Gauges of now and counters since the start, flat.

        A step that computes several tokens of a sequence counts as prefill, with all its tokens;
        every other one as decode. Times are in seconds; `host_seconds` is scheduling, input
        preparation and postprocessing. `prefix_cache_*` are tokens.
        """
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        return dict(scheduler.counters) | {
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_running": len(scheduler.running),
            "num_blocks_used": manager.num_blocks - manager.num_free_blocks,
            "num_blocks_free": manager.num_free_blocks, "num_blocks_cached": len(manager.cached)}

    def _count(self, batch: Batch, seconds: float, host_seconds: float) -> None:
        phase = "decode" if max(batch.num_tokens) == 1 else "prefill"
        self.scheduler.counters.update({
            "num_steps": 1, f"{phase}_steps": 1, "batched_sequences": len(batch),
            f"{phase}_tokens": sum(batch.num_tokens), f"{phase}_seconds": seconds,
            "host_seconds": host_seconds})

    def _rates_since(self, before: Counter) -> dict[str, str]:
        """Prefill and decode speed since `before`, a copy of the counters."""
        spent = self.scheduler.counters - before
        return {phase: f"{spent[f'{phase}_tokens'] / spent[f'{phase}_seconds']:.0f} tok/s"
                for phase in ("prefill", "decode") if spent[f"{phase}_steps"]}

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        for request in self.requests.values():  # of a stream that is open
            self.scheduler.finish(request.seq, "abort")
        self.runner = None

    def __exit__(self, *exception: object) -> None:
        self.close()
