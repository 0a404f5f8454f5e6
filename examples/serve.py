"""A server with OpenAI's API: completions and chats, whole or as streams.

    python examples/serve.py --model models/tiny-qwen3 --port 8000

It uses Starlette and uvicorn, which are small, well kept and common. FastAPI would add checks of
the parameters, which `SamplingParams` makes already. batch.py knows OpenAI's format: parameters are
OpenAI's and vLLM's, such as `top_k` and `ignore_eos`; null stands for the default. The name of the
model is not looked at. Errors have OpenAI's error object, and a status:

    400  for bad input or an unsupported parameter, which `param` names
    429  for more completions at once than `max_num_seqs` and --max-waiting together
    500  if the engine cannot go on, for example for lack of memory
    504  if a call takes longer than --timeout; a header asks clients not to repeat it

In a stream that has begun, an error is the last event, in place of [DONE]. A client that leaves
frees its requests at once.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import batch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoengine import LLM


class Server:
    """Answers calls with one engine.

    engine: the thread for all calls of the engine: a second one would have its own OpenMP threads.
    running: the task that runs steps; num_open: the completions in the engine.
    """

    def __init__(self, llm: LLM, flags: argparse.Namespace) -> None:
        self.llm = llm
        self.flags = flags
        self.engine = ThreadPoolExecutor(1)
        self.running: asyncio.Future | None = None
        self.num_open = 0

    async def run(self) -> None:
        """Runs steps while there are requests, and tells their calls what is new."""
        while self.llm.active:
            try:
                for each in await asyncio.wrap_future(self.engine.submit(self.llm.step)):
                    # no other step runs meanwhile
                    if each.is_finished or each.call.streams:
                        each.call.news.put_nowait(each.output())
            except Exception as error:
                for each in self.llm.active.values():
                    each.call.news.put_nowait(error)

    async def outputs(self, http: Request, call: batch.Request) -> AsyncIterator:
        """Yields None once the requests are queued, and then their outputs.

        At the end, however it comes, the requests are freed. Raises the error of the call.
        """
        num_most = self.llm.config.max_num_seqs + self.flags.max_waiting
        if self.num_open + call.num_completions > num_most:
            raise HTTPException(429, f"at most {num_most} completions", {"retry-after": "1"})
        news = call.news = asyncio.Queue()
        late = HTTPException(504, "the time limit is over", {"x-should-retry": "false"})
        # the body was read: the next message is that the client has left; the error goes nowhere
        left = asyncio.ensure_future(http.receive())
        ended = asyncio.ensure_future(asyncio.wait([left], timeout=self.flags.timeout))
        ended.add_done_callback(lambda _: news.put_nowait(late))
        adding = self.engine.submit(self.llm.add, call.prompts, call.params)
        self.num_open += call.num_completions
        try:
            # this comes before the outputs of the next step: the engine has one thread
            for each in await asyncio.wrap_future(adding):
                each.call = call
            if not self.running or self.running.done():
                self.running = asyncio.ensure_future(self.run())
            yield None
            num_unfinished = len(call.prompts)
            while num_unfinished:
                if isinstance(output := await news.get(), Exception):
                    raise output
                num_unfinished -= output.finished
                yield output
        finally:
            self.num_open -= call.num_completions
            left.cancel()
            self.engine.submit(lambda: self.llm.abort(adding.result()))

    async def answer(self, http: Request) -> Response:
        """Answers a call for a completion or a chat."""
        call = batch.Request(time.time_ns(), url=http.url.path)
        await asyncio.to_thread(call.read_call, await http.body(), self.llm)
        outputs = self.outputs(http, call)
        await anext(outputs)
        if call.streams:
            return StreamingResponse(self.events(call, outputs), media_type="text/event-stream")
        return JSONResponse(call.response([each async for each in outputs], self.flags.model))

    async def events(self, call: batch.Request, outputs: AsyncIterator) -> AsyncIterator[bytes]:
        """Yields what is new in the outputs, as server-sent events."""
        try:
            async for chunk in call.chunks(outputs, self.flags.model):
                yield b"data: %b\n\n" % json.dumps(chunk).encode()
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: %b\n\n" % (await failed(None, error)).body


async def failed(http: Request | None, error: Exception) -> Response:
    """Answers with an error. The message of a ValueError begins with the parameter."""
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
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a call")
    parser.add_argument("--options", type=json.loads, default={}, help="keywords of LLM, as JSON")
    flags = parser.parse_args(arguments)
    with LLM(flags.model, **flags.options) as llm:
        model = {"id": flags.model, "object": "model", "created": 0, "owned_by": "nanoengine"}
        routes = [Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]}))]
        answer = Server(llm, flags).answer
        routes += [Route(url, answer, methods=["POST"]) for url in batch.KNOWN]
        handlers = dict.fromkeys((HTTPException, ValueError, Exception), failed)
        app = Starlette(routes=routes, exception_handlers=handlers)
        uvicorn.run(app, host=flags.host, port=flags.port)


if __name__ == "__main__":
    main()
