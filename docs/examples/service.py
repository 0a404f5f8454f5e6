"""A service of your own, in Python's standard library: all clients share the steps of one engine.

    python docs/examples/service.py --port 8000
    curl http://127.0.0.1:8000 -d '{"prompt": "12 + 34 =", "sampling_params": {"temperature": 0}}'

The answer to a POST is a stream of lines of JSON. Each has the new text of a completion, and its
index among all completions of all prompts. `python -m nanoengine serve` has OpenAI's API.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nanoengine import LLM, RequestOutput, SamplingParams

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"


class Server(ThreadingHTTPServer):
    """Has a thread for each client.

    llm: is called by all threads.
    """

    # clients that connect at once
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], llm: LLM) -> None:
        super().__init__(address, Handler)
        self.llm = llm


class Handler(BaseHTTPRequestHandler):
    server: Server

    def handle(self) -> None:
        """Ends quietly if the client leaves: `write` raises an error, which ends the stream."""
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        try:
            length = int(self.headers["Content-Length"])
            if not 0 <= length <= 2**20:
                raise ValueError("the body must have at most 2**20 bytes")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            prompt: Any = body.get("prompt")
            params = SamplingParams(**body.get("sampling_params", {}))
            outputs = self.server.llm.stream(prompt, params)
            status, lines = 200, news(outputs, params.n)
        # before anything is generated
        except (RecursionError, TypeError, ValueError) as error:
            status, lines = 400, iter([{"error": str(error)}])
        self.send_response(status)
        self.end_headers()
        for line in lines:
            self.wfile.write(json.dumps(line).encode() + b"\n")


def news(outputs: Iterable[RequestOutput], n: int) -> Iterator[dict[str, Any]]:
    """Yields the new text of each completion. n: the number of completions of a prompt."""
    sent: dict[int, str] = {}
    for output in outputs:
        for each in output.outputs:
            index = output.index * n + each.index
            new = each.text[len(sent.get(index, "")):]
            sent[index] = each.text
            if new:
                yield {"index": index, "text": new}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--port", type=int, default=8000)
    flags = parser.parse_args(arguments)
    with LLM(flags.model) as llm, Server(("127.0.0.1", flags.port), llm) as server:
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
