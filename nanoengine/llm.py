"""`LLM`: what a user calls.

`requests.py` turns prompts into requests, `engine.py` runs their sequences, and `outputs.py` turns
the new tokens into text. `generate` shows how: queue requests, and step until all have finished.

Calls of several threads share steps. A thread holds the engine for one step at a time, which is its
turn; the step moves the requests of all threads.

    thread A   queue  [step 1, look]                  [step 3, look]
    thread B                        [queue]  [step 2, look]     …
                                              └─ computes the requests of both

To look is to take the new tokens of the call's own requests. Brackets are turns.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.loader import find_model, load_config
from nanoengine.model_runner import ModelRunner, choose_device
from nanoengine.outputs import Request, RequestOutput
from nanoengine.requests import InputProcessor, Params
from nanoengine.seams import kernels, naming, rejected


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use. nanoengine_extensions/llm.py adds methods such as `chat`.

    Any thread can call at any time, and the requests of all calls run in the same steps. An error
    of one request ends its own call only. An error that breaks a step, such as Ctrl-C or a lack of
    memory, ends all requests in the engine and leaves it with all blocks free. The thread that ran
    the step gets this error; the threads of the other requests get a RuntimeError that names it.
    """

    # the extensions replace these classes
    make_config: Any = EngineConfig
    make_inputs: Any = InputProcessor
    make_runner: Any = ModelRunner
    make_engine: Any = Engine

    def __init__(self, model: str | Path, **options: Any) -> None:
        options["device"] = choose_device(options.get("device", "auto"))
        self.config = config = self.make_config(**{"model": model, **options})
        self.kernels = kernels(config.device)
        self.kernels.check_process()
        folder = find_model(config.model, config.revision, config.download_dir)
        self.model_config = load_config(folder)
        self.inputs = self.make_inputs(config, self.model_config, folder)
        runner = self.make_runner(config, self.model_config, folder)
        self.kernels.end_threads()
        self.engine = self.make_engine(config, runner)
        self.inputs.max_model_len = runner.max_model_len
        # requests that the next turn of any thread adds to the engine
        self.arrived: deque[Any] = deque()
        # requests that it ends
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
        use_tqdm: show a progress bar, with the tokens a second of all calls together.
        priority: one for all or one for each, smaller numbers first; as in vLLM, it has an effect
            only with scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated, and RuntimeError if the engine
        is closed or if an error in another thread breaks a shared step.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        num_before = self.engine.num_generated_tokens
        with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            with self.queued(requests) as unfinished:
                while unfinished:
                    self.step_for(unfinished)
                    num_tokens = self.engine.num_generated_tokens - num_before
                    rate = num_tokens / (bar.format_dict["elapsed"] or 1)
                    bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
                    bar.update(len(requests) - len(unfinished) - bar.n)
        return [request.output() for request in requests]

    def stream(self, prompts: Any, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks the last output of a request. Dropping the iterator frees its requests.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)

        def outputs() -> Iterator[Any]:
            with self.queued(requests) as unfinished:
                yield
                while unfinished:
                    yield from self.step_for(unfinished, lambda request: request.output())

        stream = outputs()
        # Python closes only a started generator; closing it frees its requests, read or not
        next(stream)
        return stream

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
        step is raised; the next turn then ends all requests ("abort"). If other threads run steps
        as well, read a request `with llm.turn():`.
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
        # not within a turn: the garbage collector can close a stream while this thread has a turn
        if unfinished and not self.lock._is_owned():
            with self.turn():
                pass

    @contextmanager
    def queued(self, requests: list[Any]) -> Iterator[set[Any]]:
        """Queues the requests of one call, and frees them however the call ends.

        Yields the unfinished ones, for `step_for`.
        """
        try:
            self.queue(requests)
            yield {*requests}
        finally:
            self.abort(requests)
            self.kernels.end_threads()

    def queue(self, requests: list[Any]) -> None:
        """Queues requests of one call, or other objects with the same interface, in the engine.

        Their inbox is one dict: each step adds the requests that have new tokens.
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
                pass
        # such as Ctrl-C while it waits: the caller then has no request to abort
        except BaseException:
            self.dropped += requests
            raise

    def step_for(self, unfinished: set[Any],
                 look: Callable[[Any], Any] = lambda request: request) -> list[Any]:
        """Runs a step, unless a step of another thread has brought tokens for these requests.

        Returns the result of `look` for each of them that has new tokens; those that have finished
        leave the set. Raises the error of a request.
        """
        inbox = next(iter(unfinished)).inbox
        with self.turn():
            if not inbox:
                self._step()
            updated = [inbox.pop(request_id) for request_id in [*inbox]]
            unfinished.difference_update([each for each in updated if each.is_finished])
            # Another thread can run the next step. The OpenMP threads of this one would slow it
            # down.
            if len(self.entered) > len(unfinished):
                self.kernels.end_threads()
            seen = [look(request) for request in updated]
        # the first error, if there is one
        for seq in [seq for request in updated for seq in request.seqs if seq.error]:
            raise seq.error
        return seen

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
        """Raises RuntimeError if this thread already has a turn, or if this process is a fork."""
        self.kernels.check_process()
        if self.lock._is_owned():
            raise RuntimeError("a call of this thread is running")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the engine for this thread alone, between two steps or for one step.

        A turn first queues the requests that have arrived since the last turn, and ends those that
        were dropped. If the last turn ended with an error or Ctrl-C, the engine may be
        inconsistent, so all its requests are ended. Raises RuntimeError if this thread already has
        a turn.
        """
        self._check_caller()
        with self.lock:
            try:
                self._begin_turn()
                yield
            except BaseException as error:
                self.error = RuntimeError(f"a step that all calls share was broken off: {error!r}")
                raise

    def _begin_turn(self) -> None:
        if self.error:
            self.engine.reset()
            self.dropped += self.entered.values()
        while self.arrived:
            # a request is always in one of the two: Ctrl-C in between would lose it otherwise
            self.entered[self.arrived[0].request_id] = self.arrived[0]
            self.engine.add(self.arrived.popleft().seq)
        # other threads can drop more meanwhile; requests of another engine are ignored
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        dropped = [each for each in dropped if self.entered.get(each.request_id) is each]
        if dropped:
            self.engine.abort({request.request_id for request in dropped})
        for request in dropped:
            self.entered.pop(request.request_id, None)
            request.end(self.error)
        self.error = None

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        with self.turn():
            self.engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
