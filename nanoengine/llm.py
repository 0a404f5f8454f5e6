"""`LLM`: the facade, what a user calls.

Prompts become requests (`requests.py`), the engine runs their sequences (`engine.py`), and what
comes out becomes text (`outputs.py`).
"""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoengine.beam_search import BeamSearch, BeamSearchOutput
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.loader import find_model, load_config, load_defaults, load_tokenizer
from nanoengine.model_runner import ModelRunner, choose_device
from nanoengine.outputs import Request, RequestOutput
from nanoengine.requests import InputProcessor, Params, Prompts
from nanoengine.sampling_params import BeamSearchParams, SamplingParams, rejected


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use. One call generates at a time. An error or Ctrl-C in the middle of
    a call leaves an engine that can be used again, with all its blocks free.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        device = choose_device(options.pop("device", "auto"))
        self.config = config = EngineConfig(model=model, device=device, **options)
        folder = find_model(config.model)
        self.model_config = load_config(folder)
        tokenizer = load_tokenizer(find_model(config.tokenizer or folder))
        if config.tokenizer and tokenizer is None:
            raise rejected("tokenizer", str(config.tokenizer), "a folder or id with a tokenizer")
        default_params, eos_token_ids = load_defaults(folder, self.model_config, tokenizer)
        try:
            runner = ModelRunner(config, self.model_config, folder)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{error} Lower max_num_batched_tokens or max_num_seqs") from error
        self.engine = Engine(config, runner)
        self.inputs = InputProcessor(config, tokenizer, self.model_config.vocab_size,
                                     runner.max_model_len, default_params, eos_token_ids)
        # the requests of the call that is running, by request_id
        self.active: dict[str, Any] = {}

    # ------------------------------------------------------------------------ generating

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
                bar.update(sum(request.is_finished for request in updated))
        return [request.output() for request in requests]

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
        # The template has written the special tokens.
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        prompts: list[Any] = [{"prompt": text, "prompt_token_ids": token_ids}
                              for text, token_ids in zip(texts, ids)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        steps = self._run(self._make_requests(prompts, sampling_params, priority))
        # from here on the stream is open, until it is exhausted or dropped
        next(steps)
        return (request.output() for updated in steps for request in updated)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `params.beam_width` best completions of each prompt that beam search finds.

        Raises ValueError for bad input, and where the beams might not fit the engine.
        """
        if not isinstance(params, BeamSearchParams):
            raise rejected("params", params, "a BeamSearchParams")
        num_candidates = params.beam_width * max(2, 1 + len(self.inputs.eos_token_ids))
        requests = self._make_requests(prompts, SamplingParams(
            temperature=params.temperature, max_tokens=params.max_tokens, detokenize=False,
            ignore_eos=params.ignore_eos, logprobs=num_candidates))
        searches = [BeamSearch(request.seq, params, self.engine.scheduler) for request in requests]
        for _ in self._run(searches):
            pass
        tokenizer = self.inputs.tokenizer
        for beam in [beam for search in searches for beam in search.finished]:
            beam.text = tokenizer and tokenizer.decode(beam.tokens, True)
        return [BeamSearchOutput(search.finished) for search in searches]

    def _make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        """Checks a whole call, and that it can begin."""
        if self.engine.runner is None or self.active:
            raise RuntimeError("the LLM is closed, or a stream is open: exhaust or drop it first")
        return self.inputs.make_requests(prompts, params, priority)

    def _run(self, requests: list[Any]) -> Generator[list[Any], None, None]:
        """Queues the requests, then steps until all are finished; yields those with new tokens.

        The first yield comes before the first step: a generator that was begun cleans up behind
        itself when it is dropped.
        """
        try:
            self.active = {request.seq.request_id: request for request in requests}
            for request in requests:
                self.engine.add(request.seq)
            yield []
            while self.engine.has_unfinished():
                updated = {}
                for seq in self.engine.step():
                    request = updated[seq.request_id] = self.active[seq.request_id]
                    if stop := request.update(seq):
                        self.engine.finish(seq, "stop", stop)
                yield list(updated.values())
        # dropped between two steps
        except GeneratorExit:
            self.engine.abort()
        # in the middle of a step
        except BaseException:
            self.engine.reset()
            raise
        finally:
            self.active = {}

    # -------------------------------------------------------------------------- the rest

    # with trace=True: a record of each step, see `Launched` in model_runner.py
    trace = property(lambda self: self.engine.trace)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError where the model has none."""
        return self.inputs.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forgets what the prefix cache knows; blocks in use stay in use. True, as in vLLM."""
        self.engine.scheduler.block_manager.reset_prefix_cache()
        return True

    def metrics(self) -> dict[str, Any]:
        """Gauges of now and counters since the start, flat. What has never happened counts 0.

        num_requests_waiting, num_requests_running, num_requests_swapped: completions, where a
            prompt has several; swapped ones are among the waiting.
        num_blocks_used, num_blocks_free, num_blocks_cached: of the free blocks, those with a hash
            are cached. max_blocks_used: the high-water mark. num_host_blocks_used: swapped out.
        reserved_waste, internal_waste: tokens that there is room for, but only for one sequence: in
            blocks that it holds for later, and behind its newest token in its last block.
        num_steps, batched_sequences: steps, and sequences in them; mean_batch: their ratio.
        prompt_tokens, computed_tokens, generation_tokens: admitted, computed, sampled.
        prefix_cache_queries, prefix_cache_hits: tokens looked for on admission, and found.
        num_preemptions: recompute_preemptions + swap_preemptions. recomputed_tokens: for them.
        swap_out_blocks, swap_in_blocks, swapped_bytes: to the host and back. swap_seconds: for all
            block copies; on a GPU only to launch them.
        shared_blocks, copy_on_write_blocks: taken over by forks, and copied for them.
        attention_backend: the name of the backend that was chosen.
        """
        return self.engine.metrics()

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        # what a stream that is open has left
        self.engine.abort()
        self.engine.runner = None
        # does nothing where there is no GPU
        torch.cuda.empty_cache()

    def __exit__(self, *exception: object) -> None:
        self.close()
