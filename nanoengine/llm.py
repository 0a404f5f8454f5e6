"""`LLM`: the facade, what a user calls.

Prompts become requests (`requests.py`), the engine runs their sequences (`engine.py`), and what
comes out becomes text (`outputs.py`).

    requests = llm.add(prompts)             # `generate` is these lines, with a progress bar,
    while not all finished:                 # and `stream` yields what they bring
        requests_with_new_tokens = llm.step()

Calls of several threads share steps. A thread holds the engine for one step and no longer: this is
its turn.

    thread A   add  step 1    look          step 3   look
    thread B            add        step 2   look      …
                                   └─ computes the requests of both
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.loader import find_model, load_config
from nanoengine.model_runner import choose_device, make_runner
from nanoengine.outputs import Request, RequestOutput
from nanoengine.requests import InputProcessor, Params
from nanoengine.sampling_params import SamplingParams
from nanoengine_cpu import check_process, end_threads


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    Any thread may call at any time, and the requests of all calls run in the same steps. What goes
    wrong with one request ends its own call. What breaks a step, such as Ctrl-C or a lack of
    memory, ends all requests, and leaves an engine with all blocks free: it is raised in the thread
    that ran the step, and a RuntimeError that names it in all others that wait for their requests.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        check_process()
        device = choose_device(options.pop("device", "auto"))
        self.config = config = EngineConfig(model=model, device=device, **options)
        folder = find_model(config.model, config.revision, config.download_dir)
        self.model_config = load_config(folder)
        self.inputs = InputProcessor(config, self.model_config, folder)
        try:
            runner = make_runner(config, self.model_config, folder)
        # what PyTorch raises for sizes that the memory does not have, or no memory has
        except (MemoryError, RuntimeError) as error:
            raise ValueError(f"{model} cannot be run with these options: {error} Lower "
                             "max_num_batched_tokens or max_num_seqs if memory lacks") from error
        finally:
            end_threads()
        self.engine = Engine(config, runner)
        self.engine.metrics.log_room()
        self.inputs.max_model_len = runner.max_model_len
        # those in the engine
        self.active: dict[str, Any] = {}
        # those of them that the next turn ends
        self.dropped: list[Any] = []
        # of the thread that has its turn
        self.lock: Any = threading.RLock()
        # says what has broken off the last turn
        self.error: RuntimeError | None = None

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
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.run(requests, lambda request: request.is_finished)
        self.engine.metrics.show_progress(steps, len(requests), use_tqdm)
        return [request.output() for request in requests]

    def chat(self, messages: list[Any], sampling_params: Params = None, use_tqdm: bool = True, *,
             priority: int | list[int] | None = None, **options: Any) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role": …, "content": …}, or a list of them.

        content: a text, or a list of texts and {"type": "text", "text": …}, joined by newlines.
        options: chat_template: instead of the tokenizer's own.
            add_generation_prompt (True): let the assistant begin its answer.
            continue_final_message (False): leave the last message open, so that the model goes on
                with it; needs add_generation_prompt=False.
            tools: functions or JSON schemas, for templates that know tools.
            chat_template_kwargs: what else the template asks for: {"enable_thinking": False} of
                Qwen3.

        The other arguments are those of `generate`. Raises ValueError where there is no template.
        """
        from nanoengine_extensions.chat import render
        prompts = render(self.get_tokenizer(), messages, **options)
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def stream(self, prompts: Any, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks a request's last. Abandoning the iterator frees its requests.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.run(requests, Request.output)
        # from here on its end is noticed, even if it is never read
        next(steps)
        return (output for outputs in steps for output in outputs)

    def beam_search(self, prompts: Any, params: Any) -> list[Any]:
        """The `params.beam_width` best completions of each prompt: see beam_search.py."""
        from nanoengine_extensions.beam_search import beam_search
        return beam_search(self, prompts, params)

    # ------------------------------------------------------------------------------ steps

    def add(self, prompts: Any, sampling_params: Params = None,
            priority: int | list[int] | None = None) -> list[Request]:
        """Queues requests, for `step` to run; the arguments are those of `generate`."""
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        self.queue(requests)
        return requests

    def step(self) -> list[Request]:
        """Runs one step, in which all requests may have a part; returns those with new tokens.

        A request that cannot go on has the `finish_reason` "error". An error that breaks the step
        is raised, and ends all requests ("abort"). Where other threads run steps as well, a request
        is to be read `with llm.turn():`.
        """
        with self.turn():
            return self._step()

    def abort(self, requests: list[Any]) -> None:
        """Ends requests, wherever they are, and frees their blocks."""
        self.dropped.extend(requests)
        # In the middle of a turn, in which the garbage collector may end a stream, it is too early.
        if requests and not self.lock._is_owned():
            with self.turn():
                pass

    def run(self, requests: list[Any],
            look: Callable[[Any], Any]) -> Generator[list[Any], None, None]:
        """Queues requests of one call, and runs steps until they have finished.

        First it yields [], then, after each step of this call or another one, what `look` sees of
        its requests that have new tokens. Raises the error of a request that has one.
        """
        num_left = len(requests)
        try:
            inbox = self.queue(requests)
            yield []
            while num_left:
                with self.turn():
                    if not inbox:
                        self._step()
                    updated = [inbox.pop(request_id) for request_id in [*inbox]]
                    num_left -= sum(request.is_finished for request in updated)
                    seen = [look(request) for request in updated]
                for seq in [seq for request in updated for seq in request.seqs if seq.error]:
                    raise seq.error
                yield seen
        finally:
            self.abort([each for each in requests if each.request_id in self.active])
            end_threads()

    def queue(self, requests: list[Any]) -> dict[str, Any]:
        """Queues requests of one call, or what else looks like them.

        Returns their inbox, where each step puts those that have new tokens.
        """
        inbox: dict[str, Any] = {}
        with self.turn():
            for request in requests:
                request.inbox = inbox
                self.active[request.request_id] = request
                self.engine.add(request.seq)
        return inbox

    def _step(self) -> list[Any]:
        """Runs one step, in a turn; returns the requests with new tokens."""
        updated = {}
        for seq in self.engine.step():
            request = updated[seq.request_id] = self.active[seq.request_id]
            if stop := request.update(seq):
                self.engine.finish(seq, "stop", stop)
        for request_id, request in updated.items():
            request.inbox[request_id] = request
            if request.is_finished:
                del self.active[request_id]
        if not self.active and self.engine.in_flight:
            # of requests that have all ended
            self.engine.step()
        return list(updated.values())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine between two steps, or for one, for this thread alone.

        A turn that an error or Ctrl-C breaks off may leave any state: the next one begins
        with the end of all requests, any other with the end of those that were dropped since the
        last one. Raises RuntimeError within another turn of this thread.
        """
        check_process()
        if self.lock._is_owned():
            raise RuntimeError("a call of this thread is running")
        with self.lock:
            try:
                if self.error:
                    self.engine.reset()
                    self.dropped.extend(self.active.values())
                # other threads may drop more meanwhile
                dropped = [self.dropped.pop() for _ in range(len(self.dropped))]
                if dropped:
                    self.engine.abort({request.request_id for request in dropped})
                for request in dropped:
                    self.active.pop(request.request_id, None)
                    request.end(self.error)
                self.error = None
                yield
            except BaseException as error:
                self.error = RuntimeError(f"a step that all calls share was broken off: {error!r}")
                raise

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
        with self.turn():
            manager = self.engine.scheduler.block_manager
            manager.forget(list(manager.blocks_by_hash))

    def metrics(self) -> dict[str, Any]:
        """Gauges of now and counters since the start: see metrics.py."""
        return self.engine.metrics.gauges()

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        with self.turn():
            self.engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


# the same for help() and notebooks
LLM.__signature__ = EngineConfig.__signature__  # type: ignore
