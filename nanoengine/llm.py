"""`LLM`: the calls of a user.

`requests.py` turns prompts into requests, and new tokens into results; `engine.py` runs the
sequences. `generate` and `stream` are loops over `steps_for`.

Threads take turns. A turn is one step, which serves the requests of all threads, or one look at the
results.

    thread A   queue  [step 1] [look]                   [step 3] [look]
    thread B                          queue  [step 2] [look]     …
                                                └─ computes the requests of both

"look" collects the new tokens of the call's own requests. Brackets mark a turn; other
threads can take turns between a step and its look.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from inspect import signature
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import naming, rejected
from nanoengine.features import asked_by, declared, extension, is_installed, part
from nanoengine.kernels import kernels
from nanoengine.loader import Tokenizer, find_model, load_config
from nanoengine.model_runner import ModelRunner, choose_device
from nanoengine.observers import Features
from nanoengine.requests import InputProcessor, Params, Prompts, Request, RequestOutput
from nanoengine.sampling_params import SamplingParams


class LLM(AbstractContextManager):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    Any thread can call its methods at any time, and the requests of all calls run in the same
    steps. An error in one request ends only the call of that request. An error that breaks a step,
    such as Ctrl-C or running out of memory, ends all requests in the engine and leaves it with all
    blocks free. The thread that ran the step gets this error; the threads of the other requests get
    a RuntimeError that names it.
    """

    # for help() and notebooks
    __signature__ = signature(EngineConfig)

    def __init__(self, model: str | Path, **options: Any) -> None:
        options["device"] = choose_device(options.get("device", "auto"))
        self.config = config = EngineConfig(**{"model": model, **options})
        self.check_process = kernels(config.device, config.kernels).check_process()
        features = Features([*declared("ALWAYS"), *asked_by(config)], config.features)
        folder = find_model(config.model, config)
        self.model_config = load_config(folder, config.load_format, config.model_impl)
        self.inputs = InputProcessor(config, self.model_config, folder, features)
        make_runner = part("runner", config, ModelRunner)
        # errors such as a size of 0 in config.json, or a model too large for the memory
        with naming(f"{config.model} cannot be run with these options"):
            runner = make_runner(config, self.model_config, folder, features)
        self.engine = Engine(config, runner, features)
        self.inputs.max_model_len = runner.max_model_len
        # requests that the next step of any thread adds to the engine
        self.arrived: deque[Request] = deque()
        # requests that the next step ends
        self.dropped: deque[Request] = deque()
        # the requests in the engine; changes only within `change`
        self.entered: dict[str, Request] = {}
        # held by the thread whose turn it is
        self.lock: Any = threading.RLock()
        # the error that broke the last step
        self.error: Exception | None = None

    # ------------------------------------------------------------------------ generating

    def generate(self, prompts: Prompts, sampling_params: Params = None,
                 use_tqdm: bool | Callable = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: `get_default_sampling_params()`.
        use_tqdm: show a progress bar; as in vLLM, it can be a function that makes one.
        priority: one for all or one for each, smaller numbers first; as in vLLM, it has an effect
            only with scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated, and RuntimeError if the engine
        is closed or if an error in another thread breaks a shared step.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        kind: Callable = tqdm
        if is_installed("running.metrics"):
            # this bar shows the tokens per second over all calls
            kind = extension("running.metrics").bar(self.engine, use_tqdm)
        bar = kind(total=len(requests), desc="Generating", disable=not use_tqdm)
        with bar, closing(self.steps_for(requests)) as steps:
            for updated in steps:
                bar.update(sum(each.is_finished for each in updated))
        return [request.output() for request in requests]

    def stream(self, prompts: Prompts, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks the last output of a request. Dropping the iterator frees its requests.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.steps_for(requests, Request.output)
        # queues them now
        next(steps)
        return (output for outputs in steps for output in outputs)

    def chat(self, *args: object, **kwargs: object) -> list[RequestOutput]:
        """Answers conversations: chat(messages, sampling_params=None, use_tqdm=True, *,
        priority=None, …). `help("nanoengine_extras.tools.chat.render")` has the other options."""
        return extension("tools.chat").chat(self, *args, **kwargs)

    def stream_chat(self, *args: object, **kwargs: object) -> Iterator[RequestOutput]:
        """Like `chat`, but yields the answer so far whenever it has new tokens, like `stream`."""
        return extension("tools.chat").stream_chat(self, *args, **kwargs)

    def beam_search(self, *args: object, **kwargs: object) -> list:
        """Returns the best completions of each prompt: beam_search(prompts, params, priority=None).
        `help("nanoengine_extras.sampling.beam_search.BeamSearchParams")` has the details."""
        return extension("sampling.beam_search").beam_search(self, *args, **kwargs)

    def score(self, *args: object, **kwargs: object) -> list:
        """Returns how likely texts are as continuations: score(prompts, continuations,
        use_tqdm=True). `help("nanoengine_extras.tools.scores.score")` has the details."""
        return extension("tools.scores").score(self, *args, **kwargs)

    # ------------------------------------------------------------------------------ steps

    def add(self, prompts: Prompts, sampling_params: Params = None,
            priority: int | list[int] | None = None) -> list[Request]:
        """Queues requests for `step` to run; returns them. The arguments are those of `generate`.

        A request has `.is_finished` and `.output()`, its `RequestOutput` so far.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        self._queue(requests)
        try:
            self.change()
        except BaseException:
            # after Ctrl-C, for example, the caller has no requests to abort
            self.dropped += requests
            raise
        return requests

    def step(self) -> list[Request]:
        """Runs one step for all requests, and returns the requests that have new tokens.

        A request that cannot continue gets the `finish_reason` "error". An error that breaks the
        step is raised; the next step then ends all requests ("abort"). If other threads run steps
        as well, read a request inside `with llm.turn():`.
        """
        return self.change(self._step)

    def abort(self, requests: list[Request]) -> None:
        """Ends requests, waiting or running, and frees their blocks.

        requests: those that `add` returned; finished ones stay as they are.
        """
        with naming(rejected("requests", requests, "a list of what `add` returned")):
            self.dropped += [each for each in requests if not each.is_finished]
        # not within a turn: the garbage collector can close a stream while this thread has a turn
        if self.dropped and not self.lock._is_owned():
            self.change()

    def steps_for(self, requests: list,
                  look: Callable = lambda each: each) -> Generator[list]:
        """Runs steps until all requests of one call have finished.

        It first queues them, and yields an empty list. After each step, it yields `look(request)`,
        by default the request itself, for each request with new tokens, or raises the error of a
        request. The requests are freed however this ends. If a step of another thread has already
        computed new tokens, this call takes them and runs no step.
        """
        num_left = len(requests)
        inbox = requests[0].inbox if requests else {}
        try:
            self._queue(requests)
            yield []
            while num_left:
                self.change(lambda: inbox or self._step())
                with self.turn():
                    updated = [inbox.pop(each) for each in [*inbox]]
                    num_left -= sum(each.is_finished for each in updated)
                    seen = [look(each) for each in updated]
                for request in updated:
                    if request.error:
                        raise request.error
                yield seen
        finally:
            if num_left:
                # at once, because Ctrl-C could interrupt `abort` before it does this
                self.dropped += requests
                self.abort(requests)

    def _step(self) -> list[Request]:
        """Runs one step; returns the requests with new tokens."""
        updated = {seq.request_id: self.entered[seq.request_id] for seq in self.engine.step()}
        for request_id, request in updated.items():
            request.inbox[request_id] = request
            if request.is_finished:
                del self.entered[request_id]
        if not self.entered and self.engine.in_flight:
            # all requests have ended, but a step with their sequences is still in flight
            self.engine.step()
        return [*updated.values()]

    def _queue(self, requests: list[Request]) -> None:
        """Queues these requests: the next step of any thread adds them."""
        # only for its checks: this does not take the lock
        self.turn()
        if not self.engine.runner:
            raise RuntimeError("the LLM is closed: make a new one")
        self.arrived += requests

    def turn(self) -> threading.RLock:
        """Returns the lock: `with llm.turn():` holds the engine for this thread alone, between two
        steps.

        Raises RuntimeError if this thread already has a turn, or if this process is a fork.
        """
        self.check_process()
        if self.lock._is_owned():
            raise RuntimeError("this thread is already in a call")
        return self.lock

    def change(self, work: Callable = lambda: None) -> Any:
        """Changes the engine, in a turn of its own: moves the requests that have arrived into the
        engine, ends those that were dropped, then does some work, such as a step. Returns what
        `work` returns.

        An error or Ctrl-C can leave the engine inconsistent. Then the next change first ends all
        requests.
        """
        with self.turn():
            try:
                if self.error:
                    self.engine.reset()
                    self.dropped += self.entered.values()
                while self.arrived:
                    first = self.arrived[0]
                    # in this order: Ctrl-C in between must leave it in `arrived` or `entered`
                    self.entered[first.request_id] = first
                    self.engine.add(self.arrived.popleft().seq)
                # other threads can drop more meanwhile; requests of another engine are ignored
                dropped = [self.dropped.popleft() for _ in self.dropped.copy()]
                dropped = [each for each in dropped if self.entered.get(each.request_id) is each]
                if dropped:
                    self.engine.abort({each.request_id for each in dropped})
                for each in dropped:
                    # in this order: Ctrl-C in between must leave it in `entered`
                    each.end(self.error)
                    self.entered.pop(each.request_id, None)
                self.error = None
                return work()
            except BaseException as error:
                self.error = RuntimeError(f"a shared step failed: {error!r}")
                raise

    # ------------------------------------------------------------------------------ the rest

    # the requests that have not ended, by id
    active = property(lambda self: self.entered | {r.request_id: r for r in [*self.arrived]})

    def metrics(self) -> dict[str, Any]:
        """Returns current gauges, and counters since the start:
        `help("nanoengine_extras.running.metrics.Metrics.gauges")` names them."""
        return extension("running.metrics").metrics_of(self.engine).gauges()

    # with trace=True: a record of each step
    trace = property(lambda self: extension("running.metrics").metrics_of(self.engine).trace)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `sampling_params=None` stands for: see
        generation_config.py."""
        return self.inputs.default_params.clone()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the transformers tokenizer, a copy of the engine's own. Raises ValueError if the
        model has none."""
        return self.inputs.tokenizer_of_user

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; blocks in use stay in use. Returns True, as in vLLM."""
        manager = self.engine.scheduler.block_manager
        self.change(lambda: manager.forget([*manager.blocks_by_hash]))
        return True

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        self.change(self.engine.close)

    def __exit__(self, *exception: object) -> None:
        self.close()
