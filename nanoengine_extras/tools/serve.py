"""A server with OpenAI's API: completions and chats, whole or as streams.

    python -m nanoengine serve --model Qwen/Qwen3-0.6B --port 8000

It uses Starlette and uvicorn, which are small, well maintained and widely used. FastAPI would check
the parameters, but `SamplingParams` already does. The format is in openai_format/. The
name of the model is ignored. `/health` and `/metrics` need no key. Errors have OpenAI's error
object, and a status:

    400  for bad input or an unsupported parameter, which `param` names
    401  for a call without the key of --api-key
    413  for a body of more than --max-body bytes
    429  for more completions at once than `max_num_seqs` and --max-waiting together
    500  if the engine cannot continue, for example when it is out of memory
    503  if the server is shutting down and the call takes longer than --graceful-timeout
    504  if a call takes longer than --timeout; a header asks clients not to retry it

Once a stream has begun, an error is its last event, instead of [DONE]. When a client disconnects,
its requests are freed at once. For a client that does not read, only the newest texts are kept.

With --tool-call-parser, tool calls in an answer become `tool_calls`: see tool_calls.py.
"""

import argparse
import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from nanoengine import LLM
from nanoengine.errors import naming, rejected
from nanoengine.features import extension, is_installed
from nanoengine_extras.tools import Parser, options_of

with naming('serve needs: pip install "nanoengine[serve]"'):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

openai = extension("tools.openai_format", "serve")
asynchronous = extension("tools.async_llm", "serve")

# parameters, each with the least and the most that the server accepts, as vLLM's does by default
LIMITS = {"logprobs": (0, 20), "top_logprobs": (0, 20), "seed": (-2**63, 2**63 - 1)}


class Server:
    """Answers calls with one engine. most: the completions that it takes at once."""

    def __init__(self, llm: LLM, flags: argparse.Namespace) -> None:
        self.llm = llm
        self.flags = flags
        self.engine = asynchronous.AsyncLLM(llm)
        self.most = llm.config.max_num_seqs + flags.max_waiting

    def app(self) -> Starlette:
        routes = [Route("/health", lambda _: Response()), Route("/metrics", self.metrics),
                  Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.models)]
        routes += [Route(url, self.answer, methods=["POST"]) for url in openai.KNOWN]
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(
            (HTTPException, ValueError, ClientDisconnect, Exception), failed))

    def check_key(self, http: Request) -> None:
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        # Starlette reads bytes as latin-1
        is_right = hmac.compare_digest(given.encode("latin-1"), (self.flags.api_key or "").encode())
        if self.flags.api_key and not (is_right and scheme.lower() == "bearer"):
            raise HTTPException(401, "Incorrect API key provided: send it as a bearer token",
                                {"www-authenticate": "Bearer"})

    async def models(self, http: Request) -> Response:
        """Answers with the list of models, or with one of them if the URL names it."""
        self.check_key(http)
        name = http.path_params.get("name", self.flags.model)
        if name != self.flags.model:
            raise HTTPException(404, f"the model {name!r} does not exist: use {self.flags.model!r}")
        model = {"id": name, "object": "model", "created": 0, "owned_by": "nanoengine"}
        return JSONResponse(model if http.path_params else {"object": "list", "data": [model]})

    async def metrics(self, http: Request) -> Response:
        text = extension("tools.prometheus", "/metrics").as_text(
            self.llm.metrics(), self.flags.model, self.llm.engine.features.get("Times"))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def read(self, body: Any, data: bytes) -> None:
        """Reads the body of a call, and tokenizes. Raises ValueError."""
        found = openai.object_of(data)
        match found:
            case {"chat_template": str()} | {"chat_template_kwargs": {"chat_template": str()}}:
                raise ValueError("chat_template is not supported: it would run a client's program")
        body.read(found, self.llm, bool(self.flags.tool_call_parser))
        for name, (least, most) in LIMITS.items():
            if not least <= (found.get(name) or 0) <= most:
                raise rejected(name, found[name], f"from {least} to {most}")
        if body.num_completions > self.most:
            raise rejected("n", body.params.n, f"smaller, or use fewer prompts: {self.most} in all")
        # token ids need no tokenizer
        with naming("prompt"):
            body.prompts = [self.llm.get_tokenizer().encode(each, verbose=False)
                            if isinstance(each, str) else each for each in body.prompts]

    def add(self, body: Any) -> list[Any]:
        """Queues the requests of a call in the engine's thread, unless there are too many."""
        num_open = sum(len(each.seqs) for each in self.llm.active.values())
        if num_open + body.num_completions > self.most:
            raise HTTPException(429, f"at most {self.most} completions", {"retry-after": "1"})
        return self.llm.add(body.prompts, body.params)

    async def answer(self, http: Request) -> Response:
        """Answers a call for a completion or a chat."""
        body = openai.Body(http.url.path)
        try:
            try:
                self.check_key(http)
                data = await self.body_of(http)
            except HTTPException as error:
                return refused(http, await failed(http, error))
            await asyncio.to_thread(self.read, body, data)
            outputs = self.outputs(http, body)
            await anext(outputs)
            if body.streams:
                return Stream(self.events(body, outputs), media_type="text/event-stream")
            return JSONResponse(body.response([each async for each in outputs], self.flags.model))
        except asyncio.CancelledError as error:
            return await failed(http, error)

    async def body_of(self, http: Request) -> bytes:
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > self.flags.max_body:
                raise HTTPException(413, f"a body can have at most {self.flags.max_body} bytes")
        return bytes(data)

    async def outputs(self, http: Request, body: Any) -> AsyncIterator[Any]:
        """Yields None once the requests of a call are queued, and then their outputs.

        However this ends, the requests are freed. Raises the error of the call.
        """
        late = HTTPException(504, "the call exceeded the time limit", {"x-should-retry": "false"})
        call = asynchronous.Call(self.engine, lambda: self.add(body), not body.streams)
        # the body was read, so the next message means that the client has left; it gets no answer
        left = asyncio.ensure_future(http.receive())
        ended = asyncio.ensure_future(asyncio.wait([left], timeout=self.flags.timeout))
        ended.add_done_callback(lambda _: call.end(late))
        try:
            await call.queue()
            yield None
            async for output in call.outputs():
                yield output
        finally:
            # ends the call
            left.cancel()

    async def events(self, body: Any, outputs: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """Yields the new parts of the outputs, as server-sent events."""
        # the part that all events share is written once
        begin = f"data: {json.dumps(body.head(self.flags.model))[:-1]}, "

        def event(choices: list[Any], has_usage: bool) -> bytes:
            usage = body.usage() if has_usage else None
            return f"{begin}{json.dumps({'choices': choices, 'usage': usage})[1:]}\n\n".encode()

        try:
            async for output in outputs:
                for choice in body.edit(body.news(output)):
                    yield event([choice], body.stream_options.issuperset(openai.STREAMING[:2]))
            if "include_usage" in body.stream_options:
                yield event([], True)
            yield b"data: [DONE]\n\n"
        except (Exception, asyncio.CancelledError) as error:
            yield b"data: %b\n\n" % bytes((await failed(None, error)).body)


class Stream(StreamingResponse):
    """Sends in the task of the call, so that a cancelled call can report this in its last event."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # cancelled while the client does not read
        with suppress(asyncio.CancelledError):
            await self.stream_response(send)


def refused(http: Request, answer: Response) -> Response:
    """Answers before the whole body is received, but ends after it, since many clients read no
    answer before they have sent it all."""
    async def parts() -> AsyncIterator[bytes]:
        yield bytes(answer.body)
        while (await http.receive()).get("more_body"):
            pass

    return Stream(parts(), answer.status_code, answer.headers)


async def failed(http: Request | None, error: BaseException) -> Response:
    """Answers with an error."""
    if isinstance(error, asyncio.CancelledError):
        error = HTTPException(503, "the server is shutting down")
    text = getattr(error, "detail", str(error)).encode(errors="replace").decode()
    status = getattr(error, "status_code", 400 if isinstance(error, ValueError) else 500)
    content = openai.error_of(text, status, http.url.path if http else "")
    return JSONResponse(content, status, getattr(error, "headers", None))


def check_flags(flags: argparse.Namespace) -> None:
    """Raises ValueError for a limit out of range, an empty key, and an unusable address."""
    limits = {"max_waiting": 0, "max_body": 1, "timeout": 0, "graceful_timeout": 0}
    for name, least in limits.items():
        if not vars(flags)[name] >= least:
            raise rejected(f"--{name.replace('_', '-')}", vars(flags)[name], f"at least {least}")
    if flags.api_key == "":
        raise rejected("--api-key", "", "a key, or left out")
    family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
    with naming(f"--host {flags.host} --port {flags.port} cannot be used; choose another one"):
        socket.create_server((flags.host, flags.port), family=family).close()
    if flags.tool_call_parser:
        extension("tools.tool_calls", "--tool-call-parser")


def main(arguments: list[str] | None = None) -> None:
    """Serves one model until Ctrl-C or SIGTERM."""
    parser = Parser("python -m nanoengine serve", description="serves a model with OpenAI's API",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000, help="TCP port")
    parser.add_argument("--api-key", help="the bearer token that clients must send")
    parser.add_argument("--max-waiting", type=int, default=256, help="completions that may wait")
    parser.add_argument("--max-body", type=int, default=2**20, help="bytes of a request")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a request")
    parser.add_argument("--graceful-timeout", type=float, default=25, help="seconds after SIGTERM")
    parser.add_argument("--tool-call-parser", choices=["hermes"], help="format of tool calls")
    parser.add_argument("--enable-auto-tool-choice", action="store_const", const="hermes",
                        dest="tool_call_parser", help="the same as --tool-call-parser hermes")
    parser.add_llm()
    flags = parser.parse_args(arguments)
    with parser.faults():
        # before the model is loaded
        check_flags(flags)
        observers = ("running.memory", "AllWritten"), ("tools.prometheus", "Times")
        own = [getattr(extension(name), kind)() for name, kind in observers if is_installed(name)]
        with LLM(flags.model, **{"features": own} | options_of(flags)) as llm:
            uvicorn.run(Server(llm, flags).app(), host=flags.host, port=flags.port,
                        timeout_graceful_shutdown=flags.graceful_timeout)


if __name__ == "__main__":
    main()
