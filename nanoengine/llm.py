"""`LLM`: the facade, what a user calls.

Prompts become requests (`requests.py`), the engine runs their sequences (`engine.py`), and what
comes out becomes text (`outputs.py`).

    requests = llm.add(prompts)             # `generate` is these lines, with a progress bar,
    while not all finished:                 # and `stream` yields what they bring
        requests_with_new_tokens = llm.step()
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.loader import find_model, load_config, load_defaults, load_tokenizer
from nanoengine.model_runner import choose_device, make_runner
from nanoengine.outputs import Request, RequestOutput
from nanoengine.requests import InputProcessor, Params
from nanoengine.sampling_params import SamplingParams
from nanoengine_cpu import check_process, end_threads

logger = logging.getLogger(__name__)


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    Any thread may call at any time, and requests of all calls run in the same steps. An error or Ctrl-C in the middle of a step ends all
    requests ("abort"), and leaves an engine with all blocks free.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        check_process()
        device = choose_device(options.pop("device", "auto"))
        self.config = config = EngineConfig(model=model, device=device, **options)
        folder = find_model(config.model, config.revision, config.download_dir)
        self.model_config = load_config(folder)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(find_model(
            config.tokenizer or folder, config.revision, config.download_dir, "tokenizer"))
        default_params, eos_tokens = load_defaults(folder, self.model_config, tokenizer)
        try:
            runner = make_runner(config, self.model_config, folder)
        # what PyTorch raises for sizes that the memory does not have, or no memory has
        except (MemoryError, RuntimeError) as error:
            raise ValueError(f"{model} cannot be run with these options: {error} Lower "
                             "max_num_batched_tokens or max_num_seqs if memory lacks") from error
        finally:
            end_threads()
        self.engine = Engine(config, runner)
        self.inputs = InputProcessor(config, tokenizer, self.model_config.vocab_size,
                                     runner.max_model_len, default_params, eos_tokens)
        logger.info("%s: %s KV blocks of %s tokens, at most %s for a request", model,
                    runner.num_kv_blocks, config.block_size, runner.max_model_len)
        # those in the engine
        self.active: dict[str, Any] = {}
        # held during a step, not during a call: calls of several threads share steps
        self.lock = threading.RLock()
        self.is_in_step = False

    # ------------------------------------------------------------------------ generating

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: `get_default_sampling_params()`.
        priority: one for all or one for each, smaller ones first; needs
            scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated.
        """
        requests = self.add(prompts, sampling_params, priority)
        bar = tqdm(total=len(requests), desc="Generating", disable=not use_tqdm)
        with bar, closing(self.run(requests)) as steps:
            for updated in steps:
                bar.update(sum(request.is_finished for request in updated))
        return [request.output() for request in requests]

    def chat(self, messages: list[Any], sampling_params: Params = None, use_tqdm: bool = True, *,
             priority: int | list[int] | None = None, **options: Any) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        options: of transformers' `apply_chat_template`: chat_template (instead of the tokenizer's
            own), add_generation_prompt (True: let the assistant begin its answer),
            continue_final_message, tools, and what else the template asks for.

        The other arguments are those of `generate`. Raises ValueError where there is no template.
        """
        from nanoengine_extensions.chat import render
        prompts = render(self.get_tokenizer(), messages, options)
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def stream(self, prompts: Any, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        steps = self.run(self.add(prompts, sampling_params, priority))
        # from here on its end is noticed, even if it is never read
        next(steps)
        return (request.output() for updated in steps for request in updated)

    def beam_search(self, prompts: Any, params: Any) -> list[Any]:
        """The `params.beam_width` best completions of each prompt: see beam_search.py."""
        from nanoengine_extensions.beam_search import beam_search
        return beam_search(self, prompts, params)

    # -------------------------------------------------------------------------- requests

    def add(self, prompts: Any, sampling_params: Params = None,
            priority: int | list[int] | None = None) -> list[Request]:
        """Queues requests, for `step` to run; the arguments are those of `generate`."""
        with self.lock:
            return self.queue(self.inputs.make_requests(prompts, sampling_params, priority))

    def queue(self, requests: list[Any]) -> list[Any]:
        """Queues requests of one call, or what else looks like them to `step`."""
        inbox: dict[str, Any] = {}
        for request in requests:
            request.inbox = inbox
            self.active[request.request_id] = request
            self.engine.add(request.seq)
        return requests

    def step(self) -> list[Request]:
        """Runs one step, in which all requests may have a part; returns those with new tokens.

        An error, or Ctrl-C, ends all requests, as it may have left any state.
        """
        check_process()
        with self.lock:
            if self.is_in_step:
                raise RuntimeError("a call of this thread is running")
            self.is_in_step = True
            try:
                updated = {}
                for seq in self.engine.step():
                    request = updated[seq.request_id] = self.active[seq.request_id]
                    if stop := request.update(seq):
                        self.engine.finish(seq, "stop", stop)
            except BaseException:
                # it may have left any state
                self.engine.reset()
                self.abort(list(self.active.values()))
                raise
            finally:
                self.is_in_step = False
            for request_id, request in updated.items():
                request.inbox[request_id] = request
                if request.is_finished:
                    del self.active[request_id]
        return list(updated.values())

    def abort(self, requests: list[Request]) -> None:
        """Ends requests, wherever they are, and frees their blocks."""
        with self.lock:
            self.engine.abort({request.request_id for request in requests})
            for request in requests:
                self.active.pop(request.request_id, None)
                request.abort()

    def run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Runs steps until these requests have finished; yields those of them with new tokens.

        Steps of other calls may have brought them some, too: these are in their inbox.
        """
        num_left = len(requests)
        try:
            yield []
            while num_left:
                with self.lock:
                    inbox = requests[0].inbox
                    if not inbox:
                        self.step()
                    updated = list(inbox.values())
                    inbox.clear()
                num_left -= sum(request.is_finished for request in updated)
                yield updated
        finally:
            self.abort(requests)
            end_threads()

    # -------------------------------------------------------------------------- the rest

    # with trace=True: a record of each step, see `Launched` in model_runner.py
    trace = property(lambda self: self.engine.metrics.trace)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: see `loader.load_defaults`."""
        return self.inputs.default_params.clone()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError where the model has none."""
        return self.inputs.get_tokenizer()

    def reset_prefix_cache(self) -> None:
        """Forgets what the prefix cache knows; blocks in use stay in use."""
        with self.lock:
            manager = self.engine.scheduler.block_manager
            manager.forget(list(manager.blocks_by_hash))

    def metrics(self) -> dict[str, Any]:
        """Gauges of now and counters since the start: see metrics.py."""
        return self.engine.metrics.gauges()

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        with self.lock:
            self.engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


# the same for help() and notebooks
LLM.__signature__ = EngineConfig.__signature__  # type: ignore
