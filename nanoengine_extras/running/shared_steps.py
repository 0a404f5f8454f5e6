"""Steps that calls share: any thread can call an `LLM` at any time, and the requests of all calls
run in the same steps; or a program runs the steps by hand. It fills the slot "driver".

An error in one request ends only the call of that request. An error that breaks a step, such as
Ctrl-C or running out of memory, ends all requests in the engine and leaves it with all blocks free.
The thread that ran the step gets this error; the threads of the other requests get a RuntimeError
that names it.

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
from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary

from nanoengine.engine import Engine
from nanoengine.errors import naming, rejected
from nanoengine.llm import LLM, Driver
from nanoengine.requests import Params, Prompts, Request
from nanoengine_extras.running import check_process


class SharedDriver(Driver):
    """Runs the steps of all calls.

    arrived: requests that the next step of any thread adds to the engine.
    dropped: requests that the next step ends.
    entered: the requests in the engine, by their ids; changes only within `change`.
    inboxes: for each request, the requests of its call with new tokens that it has not seen yet.
    lock: held by the thread whose turn it is.
    error: the error that broke the last step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # a fork of this process could wait for its lock forever
        self.check_process = check_process(engine.config)
        self.arrived: deque[Request] = deque()
        self.dropped: deque[Request] = deque()
        self.entered: dict[str, Request] = {}
        self.inboxes: Any = WeakKeyDictionary()
        self.lock: Any = threading.RLock()
        self.error: Exception | None = None

    # the requests that have not ended
    active = property(lambda self: self.entered | {r.request_id: r for r in [*self.arrived]})

    def add(self, requests: list[Request]) -> None:
        self._queue(requests)
        try:
            self.change()
        except BaseException:
            # after Ctrl-C, for example, the caller has no requests to abort
            self.dropped += requests
            raise

    def step(self) -> list[Request]:
        """After an error that breaks the step, the next step ends all requests ("abort")."""
        return self.change(self._step)

    def abort(self, requests: list[Request]) -> None:
        self.dropped += requests
        # not within a turn: the garbage collector can close a stream while this thread has a turn
        if self.dropped and not self.lock._is_owned():
            self.change()

    def run(self, requests: list[Request],
            look: Callable = lambda request: request) -> Generator[list]:
        """As in `Driver`. If a step of another thread has already computed new tokens, this call
        takes them and runs no step."""
        num_left = len(requests)
        try:
            inbox = self._queue(requests)
            yield []
            while num_left:
                self.change(lambda: inbox or self._step())
                with self.turn():
                    updated = [inbox.pop(request_id) for request_id in [*inbox]]
                    num_left -= sum(request.is_finished for request in updated)
                    seen = [look(request) for request in updated]
                for request in updated:
                    if request.error:
                        raise request.error
                yield seen
        finally:
            if num_left:
                # at once, because Ctrl-C could interrupt `abort` before it does this
                self.dropped += requests
                self.abort([])

    def _step(self) -> list[Request]:
        """Runs one step; returns the requests with new tokens."""
        updated = {seq.request_id: self.entered[seq.request_id] for seq in self.engine.step()}
        for request_id, request in updated.items():
            self.inboxes[request][request_id] = request
            if request.is_finished:
                del self.entered[request_id]
        if not self.entered and self.engine.in_flight:
            # all requests have ended, but a step with their sequences is still in flight
            self.engine.step()
        return [*updated.values()]

    def _queue(self, requests: list[Request]) -> dict[str, Request]:
        """Queues the requests of a call: the next step of any thread adds them. Returns their
        inbox."""
        # only for its checks: this does not take the lock
        self.turn()
        self.engine.check_open()
        inbox: dict[str, Request] = {}
        for request in requests:
            self.inboxes[request] = inbox
        self.arrived += requests
        return inbox

    def turn(self) -> threading.RLock:
        """Returns the lock: `with driver.turn():` holds the engine for this thread alone, between
        two steps.

        Raises RuntimeError if this thread already has a turn, or if this process is a fork.
        """
        self.check_process()
        if self.lock._is_owned():
            raise RuntimeError("this thread is already in a call")
        return self.lock

    def change(self, work: Callable = lambda: None) -> Any:
        """Runs `work`, such as a step, in a turn of its own, after queued requests have entered the
        engine and dropped ones have left it. Returns what `work` returns.

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
                    abort_sequences(self.engine, {each.request_id for each in dropped})
                for each in dropped:
                    # in this order: Ctrl-C in between must leave it in `entered`
                    end_request(each, self.error)
                    self.inboxes[each][each.request_id] = each
                    self.entered.pop(each.request_id, None)
                self.error = None
                return work()
            except BaseException as error:
                self.error = RuntimeError(f"a shared step failed: {error!r}")
                raise


def abort_sequences(engine: Engine, request_ids: set[str]) -> None:
    """Ends the sequences of these requests, between two steps. Forks that are not queued yet end in
    `end_request`. Full blocks stay in the prefix cache."""
    for seq in [*engine.scheduler.waiting, *engine.scheduler.running]:
        if seq.request_id in request_ids:
            engine.finish(seq, "abort")
    if not engine.scheduler.has_unfinished():
        engine.in_flight = None


def end_request(request: Request, error: Exception | None) -> None:
    """Ends the unfinished completions of a request (all, if there is an error)."""
    for seq in request.seqs:
        if error or not seq.finish_reason:
            seq.finish_reason = "abort"
            seq.error = error


# -------------------------------------------------------------------------- methods of `LLM`


def add(llm: LLM, prompts: Prompts, sampling_params: Params = None,
        priority: int | list[int] | None = None) -> list[Request]:
    """Queues requests for `step` to run; returns them. The arguments are those of `generate`.

    A request has `.is_finished` and `.output()`, its `RequestOutput` so far.
    """
    requests = llm.inputs.make_requests(prompts, sampling_params, priority)
    llm.driver.add(requests)
    return requests


def step(llm: LLM) -> list[Request]:
    """Runs one step for all requests, and returns the requests that have new tokens.

    A request that cannot continue gets the `finish_reason` "error". An error that breaks the step
    is raised. If other threads run steps as well, read a request inside `with llm.turn():`.
    """
    return llm.driver.step()


def abort(llm: LLM, requests: list[Request]) -> None:
    """Ends requests, waiting or running, and frees their blocks.

    requests: those that `add` returned; finished ones stay as they are.
    """
    with naming(rejected("requests", requests, "a list of what `add` returned")):
        left = [request for request in requests if not request.is_finished]
    llm.driver.abort(left)


def active(llm: LLM) -> dict[str, Request]:
    """Returns the requests that have not ended, by their ids."""
    return llm.driver.active


def turn(llm: LLM) -> threading.RLock:
    """Returns the lock: `with llm.turn():` holds the engine for this thread alone, between two
    steps.

    Raises RuntimeError if this thread already has a turn, or if this process is a fork.
    """
    return llm.driver.turn()


PARTS = {"driver": SharedDriver}
