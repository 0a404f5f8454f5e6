"""`LLM`: what a user calls.

`requests.py` turns prompts into requests, `engine.py` runs their sequences, and `outputs.py` turns
the new tokens into text.

    requests = llm.add(prompts)             # in effect, `generate` does this, with a progress bar,
    while not all finished:                 # and `stream` yields each new output
        requests_with_new_tokens = llm.step()

Calls of several threads share steps. A thread holds the engine for one step at a time, which is its
turn.

    thread A   queue  step 1        look         step 3   look
    thread B              queue          step 2   look      …
                                         └─ computes the requests of both
"""

import threading
from collections import deque
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
from nanoengine.sampling_params import SamplingParams, naming, rejected
from nanoengine_cpu import check_process, end_threads
from nanoengine_extensions.checks import advising


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    Any thread can call at any time, and the requests of all calls run in the same steps. An error
    of one request ends its own call only. An error that breaks a step, such as Ctrl-C or a lack of
    memory, ends all requests in the engine and leaves it with all blocks free. The thread that ran
    the step gets this error; the threads of the other requests get a RuntimeError that names it.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        check_process()
        options["device"] = choose_device(options.get("device", "auto"))
        self.config = config = EngineConfig(**{"model": model, **options})
        folder = find_model(config.model, config.revision, config.download_dir)
        self.model_config = load_config(folder)
        self.inputs = InputProcessor(config, self.model_config, folder)
        # a size of the model is 0, or needs more memory than is free, or than PyTorch can count
        with advising(config.model):
            runner = make_runner(config, self.model_config, folder)
        end_threads()
        self.engine = Engine(config, runner)
        self.engine.metrics.log_room()
        self.inputs.max_model_len = runner.max_model_len
        # what the next turn of any thread gives to the engine, and what it ends
        self.arrived: deque[Any] = deque()
        self.dropped: deque[Any] = deque()
        # the requests that the engine has, changed only in a turn
        self.entered: dict[str, Any] = {}
        # held by the thread that has its turn
        self.lock: Any = threading.RLock()
        # names what interrupted the last turn
        self.error: RuntimeError | None = None

    # ------------------------------------------------------------------------ generating

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: `get_default_sampling_params()`.
        use_tqdm: show a progress bar.
        priority: one for all or one for each, smaller numbers first; as in vLLM, it has an effect
            only with scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated, and RuntimeError if the engine
        is closed or if an error in another thread breaks a shared step.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.run(requests, lambda request: request.is_finished)
        self.engine.metrics.show_progress(steps, len(requests), use_tqdm)
        return [request.output() for request in requests]

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
        from nanoengine_extensions.chat import render
        own = self.inputs.get_tokenizer()
        # the user's copy can have another template, but must not change how texts are encoded
        prompts = render(vars(self.inputs).get("tokenizer_of_user", own), messages, own, **options)
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def stream(self, prompts: Any, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks the last output of a request. Dropping the iterator frees its requests.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.run(requests, Request.output)
        # Python closes only a started generator; closing it frees its requests, read or not
        next(steps)
        return (output for outputs in steps for output in outputs)

    def beam_search(self, prompts: Any, params: Any) -> list[Any]:
        """Returns a `BeamSearchOutput` for each prompt: its `params.beam_width` best completions.

        Raises ValueError if `params` is not a `BeamSearchParams`, or if the beams might not fit.
        """
        from nanoengine_extensions.beam_search import beam_search
        return beam_search(self, prompts, params)

    # ------------------------------------------------------------------------------ steps

    def add(self, prompts: Any, sampling_params: Params = None,
            priority: int | list[int] | None = None) -> list[Request]:
        """Queues requests for `step` to run; returns them. The arguments are those of `generate`.

        A request has `.is_finished` and `.output()`, its `RequestOutput` so far.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        self.queue(requests)
        return requests

    def step(self) -> list[Request]:
        """Runs one step for all requests, and returns the requests that have new tokens.

        A request that cannot continue gets the `finish_reason` "error". An error that breaks the
        step is raised, and ends all requests ("abort"). If other threads run steps as well, read a
        request `with llm.turn():`.
        """
        with self.turn():
            return self._step()

    def abort(self, requests: list[Any]) -> None:
        """Ends requests, waiting or running, and frees their blocks.

        requests: what `add` returned; those that have finished stay as they are.
        """
        with naming(rejected("requests", requests, "a list of what `add` returned")):
            unfinished = [each for each in requests if not each.is_finished]
        self.dropped += unfinished
        # not within a turn: the garbage collector can end a stream in the middle of one
        if unfinished and not self.lock._is_owned():
            with self.turn():
                pass

    def run(self, requests: list[Any],
            look: Callable[[Any], Any]) -> Generator[list[Any], None, None]:
        """Queues requests of one call, and runs steps until they have finished.

        It yields [] first. After each step of this or another call, it then yields the result of
        `look` for each of its requests that have new tokens. Raises the error of a request.
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
                    # The next step can run in the thread of another call. It would be slower beside
                    # the OpenMP threads of this one.
                    if len(self.entered) > num_left:
                        end_threads()
                    seen = [look(request) for request in updated]
                # the first error, if there is one
                for seq in [seq for request in updated for seq in request.seqs if seq.error]:
                    raise seq.error
                yield seen
        finally:
            self.abort(requests)
            end_threads()

    def queue(self, requests: list[Any]) -> dict[str, Any]:
        """Queues requests of one call, or other objects with the same interface, for the next turn
        of any thread.

        Returns their inbox: each step adds the requests that have new tokens.
        """
        self._check_caller()
        if self.engine.runner is None:
            raise RuntimeError("the LLM is closed")
        inbox: dict[str, Any] = {}
        for request in requests:
            request.inbox = inbox
        self.arrived += requests
        try:
            with self.turn():
                return inbox
        # such as Ctrl-C while it waits: nobody would have a handle
        except BaseException:
            self.dropped += requests
            raise

    def _step(self) -> list[Any]:
        """Runs one step, in a turn; returns the requests with new tokens."""
        updated = {}
        for seq in self.engine.step():
            request = updated[seq.request_id] = self.entered[seq.request_id]
            if stop := request.update(seq):
                self.engine.finish(seq, "stop", stop)
        for request_id, request in updated.items():
            request.inbox[request_id] = request
            if request.is_finished:
                del self.entered[request_id]
        if not self.entered and self.engine.in_flight:
            # all requests have ended, but a step with their sequences is still in flight
            self.engine.step()
        return list(updated.values())

    def _check_caller(self) -> None:
        """Raises RuntimeError within a turn of this thread, and in a fork of a process."""
        check_process()
        if self.lock._is_owned():
            raise RuntimeError("a call of this thread is running")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the engine for this thread alone, between two steps or for one step.

        A turn first queues the requests that have arrived since the last turn, and ends those that
        were dropped. If an error or Ctrl-C interrupted the last turn, the engine may be
        inconsistent, so all its requests are ended. Raises RuntimeError within another turn of this
        thread.
        """
        self._check_caller()
        with self.lock:
            try:
                if self.error:
                    self.engine.reset()
                    self.dropped += self.entered.values()
                while self.arrived:
                    # it is always in one of both: a request that was lost would never end
                    self.entered[self.arrived[0].request_id] = self.arrived[0]
                    self.engine.add(self.arrived.popleft().seq)
                # other threads can drop more meanwhile; requests of another engine stay there
                dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
                dropped = [each for each in dropped if self.entered.get(each.request_id) is each]
                if dropped:
                    self.engine.abort({request.request_id for request in dropped})
                for request in dropped:
                    self.entered.pop(request.request_id, None)
                    request.end(self.error)
                self.error = None
                yield
            except BaseException as error:
                self.error = RuntimeError(f"a step that all calls share was broken off: {error!r}")
                raise

    # -------------------------------------------------------------------------- the rest

    # the requests that have not ended, by number
    active = property(lambda self: self.entered | {r.request_id: r for r in [*self.arrived]})

    # with trace=True: a record of each step, see `Launched` in model_runner.py
    trace = property(lambda self: self.engine.metrics.trace)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `sampling_params=None` stands for: see generation_config.py."""
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

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        with self.turn():
            self.engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


# the same for help() and notebooks
LLM.__signature__ = EngineConfig.__signature__  # type: ignore
