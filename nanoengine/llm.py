"""`LLM`: the facade. It turns prompts into requests, runs the step loop, and hands out the results.

    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        tokens = runner.run(batch)
        scheduler.postprocess(batch, tokens)
"""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoengine.beam_search import BeamSearch, BeamSearchOutput
from nanoengine.block_manager import BlockManager, num_held_tokens
from nanoengine.config import GPU_DEFAULTS, EngineConfig
from nanoengine.loader import find_model, load_config, load_defaults, load_tokenizer
from nanoengine.model_runner import ModelRunner, choose_device
from nanoengine.outputs import Completion, RequestOutput, request_output
from nanoengine.sampler import build_processors, mix
from nanoengine.sampling_params import BeamSearchParams, SamplingParams, rejected
from nanoengine.scheduler import Batch, Scheduler
from nanoengine.sequence import Sequence

Prompts = str | dict[str, Any] | list[Any]
Params = SamplingParams | list[SamplingParams] | None
Request = list[Completion]  # one of each of its completions
PROMPTS = "a text, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these"


def for_each(count: int, name: str, value: Any, kind: type) -> list[Any]:
    """One value for all prompts, or a list of one for each, as a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count or not all(isinstance(item, kind) for item in values):
        raise rejected(name, value, f"one {kind.__name__}, or {count} of them")
    return values


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use. One call generates at a time; an error or Ctrl-C in the middle of
    one leaves an engine that can be used again, with all its blocks free.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        device = choose_device(options.pop("device", "auto"))
        defaults: dict[str, Any] = GPU_DEFAULTS if device == "cuda" else {}
        self.config = config = EngineConfig(model=model, device=device, **(defaults | options))
        config.limits()  # raises before anything is loaded
        folder = find_model(config.model)
        self.model_config = load_config(folder)
        self.tokenizer = load_tokenizer(find_model(config.tokenizer or folder))
        if config.tokenizer and self.tokenizer is None:
            raise rejected("tokenizer", str(config.tokenizer), "a folder or id with a tokenizer")
        self.defaults, self.eos_token_ids = load_defaults(folder, self.model_config, self.tokenizer)
        try:
            self.runner: Any = ModelRunner(config, self.model_config, folder)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{error} Lower max_num_batched_tokens or max_num_seqs") from error
        self.max_model_len = self.runner.max_model_len
        manager = BlockManager(self.runner.num_kv_blocks, config.block_size,
                               config.enable_prefix_caching, self.runner.num_host_blocks)
        self.scheduler = Scheduler(manager, config)
        self.num_requests = 0
        self.requests: dict[str, list[Any]] = {}  # of the call that is running
        self.in_flight: list[tuple] = []  # batches, and what launching them gave
        self.trace: list[tuple[float, float, Batch, dict[str, Any]]] = []  # see EngineConfig

    # ------------------------------------------------------------------------- generating

    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: temperature, top_p and top_k of the
            model's generation_config.json.
        priority: one for all or one for each, smaller ones first; needs
            scheduling_policy="priority".
        Raises ValueError for bad input before anything is generated, RuntimeError while a stream
        is open.
        """
        requests = self._make_requests(prompts, sampling_params, priority)
        with closing(self._run(requests)) as steps, \
                tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            for updated in steps:
                bar.update(sum(all(c.seq.finish_reason for c in request) for request in updated))
        return list(map(request_output, requests))

    def chat(self, messages: list[Any], sampling_params: Params = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        The prompt is made by the tokenizer's chat template. Raises ValueError where there is none.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, list) or not messages:
            raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
        chats = messages if isinstance(messages[0], list) else [messages]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(texts, add_special_tokens=False).input_ids  # the template has them
        prompts: list[Any] = [dict(prompt=t, prompt_token_ids=i) for t, i in zip(texts, ids)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        steps = self._run(self._make_requests(prompts, sampling_params, priority))
        next(steps)  # queues them: from here on the stream is open until it is exhausted or dropped
        return (request_output(request) for updated in steps for request in updated)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `params.beam_width` best completions of each prompt that beam search finds.

        Raises ValueError for bad input, and where the beams might not fit the engine.
        """
        if not isinstance(params, BeamSearchParams):
            raise rejected("params", params, "a BeamSearchParams")
        num_candidates = params.beam_width * max(2, 1 + len(self.eos_token_ids))
        requests = self._make_requests(prompts, SamplingParams(
            temperature=params.temperature, max_tokens=params.max_tokens, detokenize=False,
            ignore_eos=params.ignore_eos, logprobs=num_candidates))
        searches = [BeamSearch(request[0].seq, params, self.scheduler) for request in requests]
        list(self._run([[search] for search in searches]))  # runs them all
        for beam in [beam for search in searches for beam in search.finished]:
            beam.text = self.tokenizer and self.tokenizer.decode(beam.tokens, True)
        return [BeamSearchOutput(search.finished) for search in searches]

    def _run(self, requests: list[Any]) -> Generator[list[Request], None, None]:
        """Queues the requests, then steps until all are finished; yields those with new tokens."""
        try:
            self.requests = {request[0].seq.request_id: request for request in requests}
            for request in requests:
                self.scheduler.add(request[0].seq)
            yield []
            while self.scheduler.has_unfinished() or self.in_flight:
                yield self._step()
        except GeneratorExit:  # dropped between two steps
            self.scheduler.abort()
        except BaseException:  # in the middle of a step
            self.scheduler.reset()
            raise
        finally:
            self.requests, self.in_flight = {}, []

    def _step(self) -> list[Request]:
        """One step of the engine; returns the requests that have new tokens.

        Running ahead, it launches a step, and only then reads the tokens of the step before, which
        the device has ready by then; where a step's tokens must be known for the next, they are
        read at once.
        """
        if self.in_flight:
            self.scheduler.advance(self.in_flight[0][0])
        num_ahead = 0  # steps that stay in flight
        if self.scheduler.has_unfinished():
            batch = self.scheduler.schedule()
            num_swapped = len(batch.copies.swap_out) + len(batch.copies.swap_in)
            self.scheduler.counters["swapped_bytes"] += num_swapped * self.runner.block_bytes
            self.scheduler.counters["swap_seconds"] += self.runner.copy_blocks(batch.copies)
            self.in_flight.append((batch, *self.runner.launch(batch)))
            num_ahead = int(self.config.run_ahead and not batch.is_awaited)
        updated = {}
        while len(self.in_flight) > num_ahead:
            batch, token_ids, logprobs, wait = self.in_flight.pop(0)
            wait()
            for row, seq in self.scheduler.postprocess(batch, token_ids.tolist()):
                updated[seq.request_id] = self.requests[seq.request_id]
                if stop := self.requests[seq.request_id][seq.index].update(seq, logprobs[row]):
                    self.scheduler.finish(seq, "stop", stop)
            if self.config.trace:
                self.trace.append((batch.started, time.monotonic(), batch, self.metrics()))
        return list(updated.values())

    # --------------------------------------------------------------------------- requests

    def _make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        """Checks a whole call, then makes its requests: nothing is queued if one of them is bad."""
        if self.runner is None or self.requests:
            raise RuntimeError("the LLM is closed, or a stream is open: exhaust or drop it first")
        if not isinstance(prompts, (str, dict, list, tuple)):
            raise rejected("prompts", prompts, PROMPTS)
        are_ids = prompts and all(isinstance(item, Integral) for item in prompts)
        prompts = [prompts] if are_ids or isinstance(prompts, (str, dict)) else prompts
        params = self.defaults if params is None else params
        params = for_each(len(prompts), "sampling_params", params, SamplingParams)
        priorities = for_each(len(prompts), "priority", priority or 0, int)
        if any(priorities) and self.config.scheduling_policy == "fcfs":
            raise rejected("priority", priority, "0 unless scheduling_policy is 'priority'")
        requests = list(map(self._make_request, range(len(prompts)), prompts, params, priorities))
        self.num_requests += len(requests)
        return requests

    def _make_request(self, index: int, prompt: Any, params: Any, priority: int) -> Request:
        """Checks one prompt and its parameters against model, tokenizer and cache."""
        tokenizer = self.get_tokenizer() if params.stop or params.bad_words else self.tokenizer
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            self._check_vocabulary(name, getattr(params, name) or ())
        text, token_ids = self._parse_prompt(f"prompts[{index}]", prompt)
        number, length = self.num_requests + index, len(token_ids)
        longest = min(length + (params.max_tokens or self.max_model_len), self.max_model_len)
        stops: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids}
        ends = stops | dict.fromkeys(self.eos_token_ids)
        processors = build_processors(params, length, [*ends], tokenizer, self.config.device)
        seed = mix(self.config.seed, number) if params.seed is None else params.seed
        held = num_held_tokens(self.config.kv_allocation, longest, self.max_model_len)
        seq = Sequence(str(number), token_ids, length, longest, params, seed, processors,
                       stops if params.ignore_eos else ends, priority, held)
        seq.forks = [replace(seq, token_ids=token_ids[:], seed=mix(~seed, index), index=index)
                     for index in range(1, params.n)]
        return [Completion(text, completion, tokenizer) for completion in (seq, *seq.forks)]

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
        """Gauges of now and counters since the start, flat. What has never happened counts 0.

        num_requests_waiting, num_requests_running, num_requests_swapped: completions, where a
            prompt has several; the swapped ones are among the waiting.
        num_blocks_used, num_blocks_free, num_blocks_cached: of the free, those with a hash are
            cached. max_blocks_used: the high-water mark. num_host_blocks_used: swapped out.
        reserved_waste, internal_waste: tokens that there are slots for and nobody else can have:
            in blocks held for later, and behind the newest token in its block.
        num_steps, batched_sequences: steps, and sequences in them; mean_batch: their ratio.
        prompt_tokens, computed_tokens, generation_tokens: admitted, computed, sampled.
        prefix_cache_queries, prefix_cache_hits: tokens looked for on admission, and found.
        num_preemptions: recompute_preemptions + swap_preemptions. recomputed_tokens: for them.
        swap_out_blocks, swap_in_blocks, swapped_bytes: to the host and back. swap_seconds: for all
            block copies; on a GPU only to launch them.
        shared_blocks, copy_on_write_blocks: taken over by forks, and copied for them.
        attention_backend: which one was chosen, by name.
        """
        return self.scheduler.metrics()

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        self.scheduler.abort()  # what a stream that is open has left
        self.runner, self.in_flight = None, []
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def __exit__(self, *exception: object) -> None:
        self.close()
