"""`AsyncLLM`: an `LLM` for asyncio.

    engine = AsyncLLM(LLM(model))
    async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

One thread runs the steps of all tasks. After a step, a task gets the newest output of each of its
requests. A slow task skips outputs: its next one has all new tokens. All tasks skip outputs if they
would get more than MOST_OUTPUTS a second in total.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from nanoengine.errors import rejected
from nanoengine.features import extension
from nanoengine.llm import LLM
from nanoengine.requests import Params, Request, RequestOutput

# an output takes a server about 60 microseconds, during which no step runs
MOST_OUTPUTS = 2000


class AsyncLLM:
    """Streams of an engine, for the tasks of an event loop, or of several. Raises ValueError for
    anything but an `LLM`.

    calls: those with requests in the engine. running: for each loop, the task that runs steps.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise rejected("llm", llm, "an LLM, as in AsyncLLM(LLM(model))")
        extension("running.shared_steps", "an AsyncLLM")
        self.llm = llm
        # only one, since a second thread would have its own OpenMP threads
        self.thread = ThreadPoolExecutor(1)
        self.calls: set[Call] = set()
        self.running: dict[asyncio.AbstractEventLoop, asyncio.Future] = {}
        self.is_closed = False

    def stream(self, prompts: Any, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> AsyncIterator[RequestOutput]:
        """Like `LLM.stream`. A task that is cancelled, or that leaves its `async for`, frees its
        requests after the current step, even while they wait."""
        return self._outputs(partial(self.llm.add, prompts, sampling_params, priority))

    def stream_chat(self, messages: list[Any], sampling_params: Params = None, *,
                    priority: Any = None, **options: Any) -> AsyncIterator[RequestOutput]:
        """Like `LLM.stream_chat`; for tasks, see `stream`."""
        def add() -> list[Request]:
            prompts = extension("tools.chat").render(self.llm.inputs, messages, **options)
            return self.llm.add(prompts, sampling_params, priority)
        return self._outputs(add)

    async def _outputs(self, add: Callable[[], list[Request]]) -> AsyncIterator[RequestOutput]:
        call = Call(self, add)
        try:
            await call.queue()
            async for output in call.outputs():
                yield output
        finally:
            call.end()

    def close(self) -> None:
        """Ends the thread, once the requests of all tasks are freed. The LLM stays open.

        Call it in the event loop, or after the loop has ended. A task that still waits for an
        output, and each later call, get a RuntimeError.
        """
        for call in [*self.calls]:
            call.end(closed())
        self.is_closed = True
        self.thread.shutdown()

    def run(self) -> None:
        """Starts running steps for the tasks of this loop, unless steps are already running."""
        if self.is_closed:
            raise closed()
        loop = asyncio.get_running_loop()
        if loop not in self.running or self.running[loop].done():
            for each in [*self.running]:
                if each.is_closed():
                    self.running.pop(each, None)
            self.running[loop] = asyncio.ensure_future(self._run(loop))

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs steps while there are requests, or outputs that a task of this loop can take."""
        while not self.is_closed and (
                self.llm.active or any(call.can_look for call in self._calls_of(loop))):
            step = self.thread.submit(self._step, loop)
            for call, output in await asyncio.wrap_future(step):
                call.news.put_nowait(output)
            # let the tasks use them first: if both threads ran Python, they would only compete for
            # the GIL
            await asyncio.sleep(0)

    def _calls_of(self, loop: asyncio.AbstractEventLoop) -> list["Call"]:
        return [call for call in [*self.calls] if call.loop is loop]

    def _step(self, loop: asyncio.AbstractEventLoop) -> list[tuple["Call", Any]]:
        """Runs a step, and returns the new outputs of the calls of a loop that can take them."""
        # after a broken step, the next step ends all requests, and each of them has the error
        with suppress(Exception):
            self.llm.step()
        pause = len(self.calls) / MOST_OUTPUTS
        with self.llm.turn():
            return [(call, output) for call in self._calls_of(loop) if call.can_look
                    for output in call.look(pause)]


class Call:
    """The requests of one task.

    add: queues and returns them, in the engine's thread. only_whole: leave out outputs of
    unfinished requests. news: what the task takes next, at most an output of each request and an
    error. looked: when it took the last outputs. loop: that of the task.
    """

    def __init__(self, engine: AsyncLLM, add: Callable[[], list[Request]],
                 only_whole: bool = False) -> None:
        self.engine = engine
        self.only_whole = only_whole
        self.requests: list[Request] = []
        self.news: asyncio.Queue = asyncio.Queue()
        self.looked = 0.0
        self.loop = asyncio.get_running_loop()
        if engine.is_closed:
            raise closed()
        # the tasks of a closed loop cannot go on
        for call in [*engine.calls]:
            if call.loop.is_closed():
                call.end()
        self.adding = engine.thread.submit(add)
        engine.calls.add(self)

    # the requests with new tokens that the task has not seen yet
    inbox = property(lambda self: self.engine.llm.driver.inboxes[self.requests[0]])
    can_look = property(lambda self: self.requests and self.news.empty() and self.inbox)

    async def queue(self) -> None:
        """Returns when the requests are queued. Raises ValueError for bad input."""
        self.requests = await asyncio.wrap_future(self.adding)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yields outputs until all requests have finished. Raises the error of a request, or the
        one that `end` was given."""
        num_unfinished = len(self.requests)
        while num_unfinished:
            self.engine.run()
            output = await self.news.get()
            if isinstance(output, BaseException):
                raise output
            num_unfinished -= output.finished
            if not num_unfinished:
                self.engine.calls.discard(self)
            yield output

    def look(self, pause: float) -> list[Any]:
        """Returns the newest output of each request that has new tokens, or its error.

        Call it within a turn. pause: the seconds between two outputs of an unfinished request.
        """
        inbox = self.inbox
        now = time.monotonic()
        is_due = not self.only_whole and now >= self.looked + pause
        ready = [each for each in [*inbox.values()] if is_due or each.is_finished]
        for each in ready:
            del inbox[each.request_id]
        self.looked = now if ready else self.looked
        return [output_of(each) for each in ready]

    def end(self, error: Exception | None = None) -> None:
        """Frees the requests, at any time; a task that waits for an output gets this error."""
        if error:
            # the loop of the task can be another one, or closed
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.news.put_nowait, error)
        self.engine.calls.discard(self)
        if self.engine.is_closed:
            # the thread has ended, so `add` has, too
            self._free()
        else:
            self.engine.thread.submit(self._free)

    def _free(self) -> None:
        # nothing was queued: the input was bad, or the task was cancelled first
        with suppress(Exception):
            self.engine.llm.abort(self.adding.result())


def closed() -> RuntimeError:
    return RuntimeError("the AsyncLLM is closed: make a new one")


def output_of(request: Request) -> Any:
    """Returns the output of a request so far, or its error, for this call alone."""
    try:
        return request.error or request.output()
    except Exception as error:
        return error
