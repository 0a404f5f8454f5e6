"""A server with OpenAI's API: completions and chats, whole or as streams.

    python examples/serve.py --model models/tiny-qwen3 --port 8000

It uses Starlette and uvicorn, which are small, well kept and common. FastAPI would add checks of
the parameters, which `SamplingParams` makes already. batch.py knows OpenAI's format: parameters are
OpenAI's and vLLM's, such as `top_k` and `ignore_eos`; null stands for the default. The name of the
model is not looked at. Errors have OpenAI's error object, and a status:

    400  for bad input or an unsupported parameter, which `param` names
    413  for a body of more than --max-body bytes
    429  for more completions at once than `max_num_seqs` and --max-waiting together
    500  if the engine cannot go on, for example for lack of memory
    503  if the server ends and the call is not done after --graceful-timeout
    504  if a call takes longer than --timeout; a header asks clients not to repeat it

In a stream that has begun, an error is the last event, in place of [DONE]. A client that leaves
frees its requests at once. For a client that does not read, only the newest texts are kept.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import batch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoengine import LLM


@dataclass(eq=False)
class Call(batch.Request):
    """What a client asks for.

    queued: its requests in the engine. news: what the client has to be told next, at most an output
    of each request and two errors.
    """

    queued: list[Any] = field(default_factory=list)
    news: asyncio.Queue = field(default_factory=asyncio.Queue)

    def look(self) -> None:
        """Takes the newest outputs, once those before have been sent. No step may run meanwhile."""
        inbox = self.queued[0].inbox
        if self.news.empty():
            for each in [*inbox.values()]:
                if each.is_finished or self.streams:
                    del inbox[each.request_id]
                    self.news.put_nowait(each.error or each.output())


class Server:
    """Answers calls with one engine.

    engine: the thread for all calls of the engine: a second one would have its own OpenMP threads.
    running: the task that runs steps; calls: those with requests in the engine.
    """

    def __init__(self, llm: LLM, flags: argparse.Namespace) -> None:
        self.llm = llm
        self.flags = flags
        self.engine = ThreadPoolExecutor(1)
        self.running: asyncio.Future | None = None
        self.calls: set[Call] = set()
        self.num_most = llm.config.max_num_seqs + flags.max_waiting

    async def run(self) -> None:
        """Runs steps while there are requests, and lets their calls look between two steps."""
        while True:
            for call in self.calls:
                call.look()
            if not self.llm.active:
                break
            # an error reaches all requests with the next step
            with suppress(Exception):
                await asyncio.wrap_future(self.engine.submit(self.llm.step))

    def add(self, call: Call) -> list[Any]:
        num_open = sum(len(each.seqs) for each in self.llm.active.values())
        if num_open + call.num_completions > self.num_most:
            raise HTTPException(429, f"at most {self.num_most} completions", {"retry-after": "1"})
        return self.llm.add(call.prompts, call.params)

    async def outputs(self, http: Request, call: Call) -> AsyncIterator:
        """Yields None once the requests are queued, and then their outputs.

        At the end, however it comes, the requests are freed. Raises the error of the call.
        """
        def end(_: Any) -> None:
            call.news.put_nowait(late)
            self.engine.submit(lambda: self.llm.abort(adding.result()))

        late = HTTPException(504, "the time limit is over", {"x-should-retry": "false"})
        adding = self.engine.submit(self.add, call)
        # the body was read: the next message is that the client has left; the error goes nowhere
        left = asyncio.ensure_future(http.receive())
        ended = asyncio.ensure_future(asyncio.wait([left], timeout=self.flags.timeout))
        ended.add_done_callback(end)
        try:
            call.queued = await asyncio.wrap_future(adding)
            self.calls.add(call)
            yield None
            num_unfinished = len(call.prompts)
            while num_unfinished:
                if not self.running or self.running.done():
                    self.running = asyncio.ensure_future(self.run())
                if isinstance(output := await call.news.get(), Exception):
                    raise output
                num_unfinished -= output.finished
                yield output
        finally:
            self.calls.discard(call)
            # calls `end`
            left.cancel()

    async def answer(self, http: Request) -> Response:
        """Answers a call for a completion or a chat."""
        call = Call(time.time_ns(), url=http.url.path)
        try:
            body = bytearray()
            async for part in http.stream():
                body += part
                if len(body) > self.flags.max_body:
                    error = HTTPException(413, f"a body has at most {self.flags.max_body} bytes")
                    return refused(http, await failed(http, error))
            await asyncio.to_thread(call.read_call, body, self.llm, self.num_most)
            outputs = self.outputs(http, call)
            await anext(outputs)
            if call.streams:
                return Stream(self.events(call, outputs), media_type="text/event-stream")
            return JSONResponse(
                call.response([each async for each in outputs], self.flags.model))
        except asyncio.CancelledError as error:
            return await failed(http, error)

    async def events(self, call: Call, outputs: AsyncIterator) -> AsyncIterator[bytes]:
        """Yields what is new in the outputs, as server-sent events."""
        try:
            async for chunk in call.chunks(outputs, self.flags.model):
                yield b"data: %b\n\n" % json.dumps(chunk).encode()
            yield b"data: [DONE]\n\n"
        except (Exception, asyncio.CancelledError) as error:
            yield b"data: %b\n\n" % (await failed(None, error)).body


class Stream(StreamingResponse):
    """Sends in the task of the call, so that a cancelled one can say so in its last event."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # cancelled while the client does not read
        with suppress(asyncio.CancelledError):
            await self.stream_response(send)


def refused(http: Request, answer: Response) -> Response:
    """Answers before the body has come, but ends after it: many clients read nothing before."""
    async def parts() -> AsyncIterator[bytes]:
        yield answer.body
        while (await http.receive()).get("more_body"):
            pass

    return Stream(parts(), answer.status_code, answer.headers)


async def failed(http: Request | None, error: BaseException) -> Response:
    """Answers with an error. The message of a ValueError begins with the parameter."""
    if isinstance(error, asyncio.CancelledError):
        error = HTTPException(503, "the server ends")
    text = getattr(error, "detail", str(error)).encode(errors="replace").decode()
    status = getattr(error, "status_code", 400 if isinstance(error, ValueError) else 500)
    prompts = "messages" if http and http.url.path == batch.CHAT else "prompt"
    name = re.match("[a-z_]*", text)[0].replace("prompts", prompts) if status == 400 else ""
    content = {"message": text, "type": "invalid_request_error" if status < 500 else "server_error",
               "param": name or None, "code": None}
    return JSONResponse({"error": content}, status, getattr(error, "headers", None))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(batch.BUNDLED))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-waiting", type=int, default=256, help="beyond max_num_seqs")
    parser.add_argument("--max-body", type=int, default=2**20, help="bytes of a call")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a call")
    parser.add_argument("--graceful-timeout", type=float, default=25,
                        help="seconds for open calls when the server ends")
    parser.add_argument("--options", type=json.loads, default={}, help="keywords of LLM, as JSON")
    flags = parser.parse_args(arguments)
    with LLM(flags.model, **flags.options) as llm:
        # a page that is written has its memory: so the server does not grow later
        llm.engine.runner.blocks.add_(0)
        model = {"id": flags.model, "object": "model", "created": 0, "owned_by": "nanoengine"}
        routes = [Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]}))]
        answer = Server(llm, flags).answer
        routes += [Route(url, answer, methods=["POST"]) for url in batch.KNOWN]
        handlers = dict.fromkeys((HTTPException, ValueError, ClientDisconnect, Exception), failed)
        app = Starlette(routes=routes, exception_handlers=handlers)
        uvicorn.run(app, host=flags.host, port=flags.port,
                    timeout_graceful_shutdown=flags.graceful_timeout)


if __name__ == "__main__":
    main()
