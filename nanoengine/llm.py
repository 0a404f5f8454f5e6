"""`LLM`: the facade, what a user calls.

Prompts become requests (`requests.py`), the engine runs their sequences (`engine.py`), and what
comes out becomes text (`outputs.py`).
"""

import functools
import gc
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from tqdm import tqdm

from nanoengine.beam_search import BeamSearch, BeamSearchOutput
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.loader import find_model, load_config, load_defaults, load_tokenizer
from nanoengine.model_runner import ModelRunner, choose_device, end_threads
from nanoengine.outputs import RequestOutput
from nanoengine.requests import InputProcessor, Params, Prompts
from nanoengine.sampling_params import BeamSearchParams, SamplingParams, rejected


logger = logging.getLogger(__name__)

# the process in which the first engine was made: a fork of it inherits this number
first_process = functools.cache(os.getpid)


def is_forked() -> bool:
    """Whether this process was forked from one that has made an engine: its threads are missing."""
    return os.getpid() != first_process()


def check_process() -> None:
    """Raises RuntimeError in a forked process."""
    if is_forked():
        raise RuntimeError("this process was forked from one that has an engine, and would hang: "
                           "start it by multiprocessing's 'spawn'")


Options = ParamSpec("Options")


def with_options_of(config: Callable[Options, Any]) -> Callable[
        [Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Shows editors which keywords a method takes that passes them on to a config."""
    return lambda method: method


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    One call generates at a time: those of other threads wait for their turn. An error or Ctrl-C in
    the middle of a call leaves an engine that can be used again: the next call finds all its blocks
    free. `metrics` can be called at any time, from any thread.
    """

    @with_options_of(EngineConfig)
    def __init__(self, model: str | Path, **options: Any) -> None:
        check_process()
        device = choose_device(options.pop("device", "auto"))
        self.config = config = EngineConfig.from_keywords(model=model, device=device, **options)
        folder = find_model(config.model, config.revision, config.download_dir)
        self.model_config = load_config(folder)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(find_model(
            config.tokenizer or folder, config.revision, config.download_dir, "tokenizer"))
        if config.tokenizer and tokenizer is None and not config.skip_tokenizer_init:
            raise rejected("tokenizer", str(config.tokenizer), "a folder or id with a tokenizer")
        default_params, eos_tokens = load_defaults(folder, self.model_config, tokenizer)
        try:
            runner = ModelRunner(config, self.model_config, folder)
        # what PyTorch raises for sizes that the memory does not have, or no memory has
        except (MemoryError, RuntimeError) as error:
            raise ValueError(f"{model} cannot be run with these options: {error} Lower "
                             "max_num_batched_tokens or max_num_seqs if memory lacks") from error
        finally:
            end_threads()
        self.engine = Engine(config, runner)
        num_tokens = runner.num_kv_blocks * config.block_size
        logger.info(f"{model}: {runner.num_kv_blocks} KV blocks of {config.block_size} tokens are "
                    f"{num_tokens} tokens, {num_tokens / runner.max_model_len:.1f} requests of "
                    f"{runner.max_model_len} at once")
        self.inputs = InputProcessor(config, tokenizer, self.model_config.vocab_size,
                                     runner.max_model_len, default_params, eos_tokens)
        # The requests of the call that is running, by request_id. Some are left of the call before
        # if an interrupt has stopped its clean-up.
        self.active: dict[str, Any] = {}
        # held by the call that is running
        self.lock = threading.Lock()
        # in which that call was last seen
        self.thread: threading.Thread | None = None
        self.is_in_step = False

    # ------------------------------------------------------------------------ generating

    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: `get_default_sampling_params()`.
        priority: one for all or one for each, smaller ones first; needs
            scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated, RuntimeError while a stream
        of this thread is open.
        """
        steps = self._run(lambda: self.inputs.make_requests(prompts, sampling_params, priority))
        with closing(steps):
            requests = next(steps)
            before = self.engine.scheduler.counters.copy()
            with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
                for updated in steps:
                    bar.update(sum(request.is_finished for request in updated))
                    if use_tqdm:
                        new = self.engine.scheduler.counters - before
                        seconds = bar.format_dict["elapsed"]
                        bar.set_postfix_str(
                            f"{new['prompt_tokens'] / seconds:.0f} prompt tokens/s, "
                            f"{new['generation_tokens'] / seconds:.0f} output tokens/s", False)
        return [request.output() for request in requests]

    def chat(self, messages: list[Any], sampling_params: Params = None, use_tqdm: bool = True, *,
             chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: list[Any] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None,
             priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        content: a text, or a list of texts and {"type": "text", "text": …}, joined by newlines.
        chat_template: instead of the tokenizer's own.
        add_generation_prompt: let the assistant begin its answer.
        continue_final_message: leave the last message open, so that the model goes on with it;
            needs add_generation_prompt=False.
        tools: functions or JSON schemas, for templates that know tools.
        chat_template_kwargs: what else the template asks for: {"enable_thinking": False} of Qwen3.

        The other arguments are those of `generate`. Raises ValueError where there is no template.
        """
        options = dict(chat_template_kwargs or {}, chat_template=chat_template, tools=tools,
                       add_generation_prompt=add_generation_prompt,
                       continue_final_message=continue_final_message)
        prompts = self.inputs.render(messages, options)
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def stream(self, prompts: Prompts, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        steps = self._run(lambda: self.inputs.make_requests(prompts, sampling_params, priority))
        # from here on the stream is open, until it is exhausted or dropped
        next(steps)
        return (request.output() for updated in steps for request in updated
                if request.is_shown_early or request.is_finished)

    def enqueue(self, prompts: Prompts, sampling_params: Params = None,
                priority: int | list[int] | None = None) -> list[str]:
        """Adds requests to the open stream of this thread, which yields their outputs, too.

        So a job of any length keeps the engine full: whenever a request has finished, the next one
        is added. Takes the arguments of `generate`; returns the request ids. Raises ValueError for
        bad input, after which the stream goes on, and RuntimeError where no stream is open.
        """
        if self.thread is not threading.current_thread() or self.is_in_step:
            raise RuntimeError("no stream is open in this thread: `stream` opens one")
        return self._add(self.inputs.make_requests(prompts, sampling_params, priority))

    def _add(self, requests: list[Any]) -> list[str]:
        """Queues all requests, or none where one could never run."""
        for request in requests:
            self.engine.scheduler.check_fits(request.seq)
        for request in requests:
            self.active[request.seq.request_id] = request
            self.engine.add(request.seq)
        return [request.seq.request_id for request in requests]

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `params.beam_width` best completions of each prompt that beam search finds.

        Raises ValueError for bad input, and where the beams might not fit the engine.
        """
        if not isinstance(params, BeamSearchParams):
            raise rejected("params", params, "a BeamSearchParams")
        sampling_params = SamplingParams(
            temperature=params.temperature, max_tokens=params.max_tokens, detokenize=False,
            ignore_eos=params.ignore_eos,
            logprobs=params.beam_width * max(2, 1 + len(self.inputs.eos_tokens)))

        searches, *_ = self._run(lambda: [
            BeamSearch(request.seq, params, self.engine.scheduler)
            for request in self.inputs.make_requests(prompts, sampling_params)])
        tokenizer = self.inputs.tokenizer
        for beam in [beam for search in searches for beam in search.finished]:
            beam.text = tokenizer and tokenizer.decode(beam.tokens, True)
        return [BeamSearchOutput(search.finished) for search in searches]

    def _run(self, make_requests: Callable[[], list[Any]]) -> Generator[list[Any], None, None]:
        """One call, from its turn to its end. It yields its requests, then after each step those
        with new tokens.

        make_requests: checks the whole call, once it has its turn. The turn ends when the generator
            is exhausted or dropped, or fails.
        """
        with self._turn() as is_free:
            if not is_free:
                raise RuntimeError("a stream is open in this thread: exhaust or drop it first")
            try:
                self._enter()
                if self.active:
                    self.engine.reset()
                requests = make_requests()
                self._add(requests)
                yield requests
                while self.engine.has_unfinished():
                    yield self._step()
            finally:
                # a step that was broken off may have left any state
                clean_up = self.engine.reset if self.is_in_step else self.engine.abort
                self.is_in_step = False
                self.thread = None
                clean_up()
                self.active = {}
                if not is_forked():
                    end_threads()

    def _enter(self) -> None:
        """Checks that a call can go on, and notes its thread, which may be another than before."""
        check_process()
        if self.engine.runner is None:
            raise RuntimeError("the LLM is closed")
        self.thread = threading.current_thread()

    def _step(self) -> list[Any]:
        """Runs one step; returns the requests with new tokens."""
        self._enter()
        self.is_in_step = True
        updated = {}
        for seq in self.engine.step():
            request = updated[seq.request_id] = self.active[seq.request_id]
            if stop := request.update(seq):
                self.engine.finish(seq, "stop", stop)
        for request in updated.values():
            if request.is_finished:
                del self.active[request.seq.request_id]
        self.is_in_step = False
        return list(updated.values())

    def _turn(self) -> AbstractContextManager:
        """The lock, which gives True; or False where a stream of this thread is open and holds it.

        A forked process may go on without the lock, which a lost thread may hold, to clean up.
        """
        if self.thread and not self.is_in_step:
            # a stream that was dropped, but in a cycle of references, is still open
            gc.collect()
        is_mine = self.thread is threading.current_thread()
        if is_mine and self.is_in_step:
            raise RuntimeError("a call of this thread is running")
        return nullcontext(is_forked()) if is_mine or is_forked() else self.lock

    # -------------------------------------------------------------------------- the rest

    # with trace=True: a record of each step, see `Launched` in model_runner.py
    trace = property(lambda self: self.engine.trace)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: see `loader.load_defaults`."""
        return self.inputs.default_params.clone()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError where the model has none."""
        return self.inputs.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forgets what the prefix cache knows; blocks in use stay in use. True, as in vLLM."""
        with self._turn():
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
        """Frees the weights and the KV cache. The engine cannot generate afterwards: a stream that
        is open in this thread ends with an error."""
        with self._turn():
            if self.engine.runner:
                self.engine.runner.ranks.close()
            self.engine.runner = None
        # does nothing where there is no GPU
        torch.cuda.empty_cache()

    def __exit__(self, *exception: object) -> None:
        self.close()


# the same for help() and notebooks
LLM.__signature__ = EngineConfig.__signature__  # type: ignore
