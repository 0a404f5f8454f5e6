"""The server: OpenAI's client gets what the engine gives, whatever other clients do."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, patch

import pytest
from conftest import ROOT, check_fault, check_idle, until, wait_until
from streams import joined

from nanoengine import LLM, CompletionOutput, RequestOutput

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from nanoengine_extras.tools import serve as module  # noqa: E402

pytestmark = pytest.mark.needs(
    "tools.chat", "sampling.constraints", "models.generation_config", "sampling.logprobs",
    "running.metrics", "tools.prometheus", "running.strict", "sampling.texts")

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24}
CHATS = "chat/completions"
CHAT = [{"role": "user", "content": "12 + 34"}]
NAME = "models/tiny-qwen3"


def connect(port: int, key: str = "none") -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def make_app(llm):
    """Makes a server around a model that is loaded already; returns its app and its options."""
    def make(*flags: str):
        apps = []
        with patch.object(module, "LLM", lambda model, **options: nullcontext(llm)), \
                patch.object(module.uvicorn, "run", lambda *given, **options: apps.append(
                    (*given, options))):
            module.main(["--model", NAME, "--port", "0", *flags])
        return apps[0]

    return make


# what servers report with a traceback
ERRORS = BufferingHandler(10**6)
ERRORS.addFilter(lambda record: bool(record.exc_info))


@contextmanager
def servers(make_app):
    """Starts servers in threads of this process; returns the port of each. None may report a
    traceback."""
    running = []

    def start(*flags: str) -> int:
        app, options = make_app(*flags)
        assert (options.pop("host"), options.pop("port")) == ("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, **options))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        wait_until(lambda: server.started)
        return server.servers[0].sockets[0].getsockname()[1]

    start.running = running
    with patch.object(logging.getLogger("uvicorn.error"), "handlers", [ERRORS]):
        try:
            yield start
        finally:
            for server, thread in running:
                server.should_exit = True
                thread.join(60)
    assert not ERRORS.buffer and not any(thread.is_alive() for _, thread in running)


@pytest.fixture
def serve(make_app):
    with servers(make_app) as start:
        yield start


@pytest.fixture(scope="module")
def port(make_app):
    """That of one server for all calls that need no flags of their own."""
    with servers(make_app) as start:
        yield start("--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def client(port):
    with connect(port) as client:
        yield client


@pytest.fixture
def params(llm):
    """Makes parameters as the server does, with the defaults of the model."""
    return lambda **given: replace(llm.get_default_sampling_params(), **SAMPLED | given)


def choices_of(chunks: list[dict]) -> list[dict]:
    """Each choice of a stream as a whole."""
    return joined(choice for chunk in chunks for choice in chunk["choices"])


# --------------------------------------------------------------------------------- answers


def test_the_model_has_a_name(client):
    model, = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "nanoengine")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError, match="the model 'a/b' does not exist: use 'models/"):
        client.models.retrieve("a/b")


SUM = {"prompt": "12 + 34 =", "temperature": 0}


def test_the_client(client):
    """OpenAI's reads both kinds of answers, and their streams."""
    found = client.completions.create(model="any", **SUM)
    assert found.object == "text_completion" and found.choices[0].text == " 46"
    assert found.usage.completion_tokens == 4
    chunks = [*client.completions.create(model="any", **SUM, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 46"
    asked = {"model": "any", "messages": CHAT, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == "46"
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "46"
    # without a seed, equal prompts have different ones
    several = client.completions.create(model=NAME, prompt=["Once"] * 4, max_tokens=20)
    assert len({choice.text for choice in several.choices}) > 1


PROMPTS = {"prompt": ["Once upon a time", "日"]}


@pytest.mark.parametrize("asked", [
    PROMPTS, PROMPTS | {"n": 2}, {"prompt": [[20, 21, 22]]}, PROMPTS | {"n": 2, "logprobs": 2},
    PROMPTS | {"n": 2, "logprobs": 2, "echo": True}, {"messages": CHAT, "max_completion_tokens": 1},
    {"messages": CHAT, "n": 2}, {"messages": CHAT, "logprobs": True, "top_logprobs": 20},
    PROMPTS | {"top_k": 9, "stop": [" a"], "logit_bias": {"20": 1.5}}])
def test_answers_and_streams(port, llm, asked):
    """Both are what openai_format makes of the engine's outputs; a stream is server-sent events."""
    asked = SAMPLED | {"model": "any"} | asked
    path = CHATS if "messages" in asked else "completions"
    body = module.openai.Body(f"/v1/{path}")
    body.read(asked, llm)
    expected = body.response(llm.generate(body.prompts, body.params, use_tqdm=False), NAME)
    with post(port, asked, path) as answer:
        assert json.load(answer) | {"id": 0, "created": 0} == expected | {"id": 0, "created": 0}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with post(port, asked | more, path) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, nothing = answer.read().decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert last["usage"] == expected["usage"] and not last["choices"]
    assert not any(chunk["usage"] for chunk in chunks)
    assert choices_of(chunks) == joined(expected["choices"])


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_stream_with_the_usage_so_far(client, at_the_end):
    """vLLM's: in each chunk, but only together with that at the end."""
    options = {"include_usage": at_the_end, "continuous_usage_stats": True}
    chunks = [*client.chat.completions.create(
        model=NAME, messages=CHAT, n=2, stream=True, stream_options=options, **SAMPLED)]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == at_the_end * len(chunks) and counts == sorted(counts)
    assert not counts or 0 < counts[0] < counts[-1]


def get(port: int, path: str, key: str = "") -> tuple[int, str]:
    """The status and the body of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if key:
        request.add_header("Authorization", key)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics(port, client):
    assert get(port, "/health") == (200, "")
    counts = []
    for _ in range(2):
        status, text = get(port, "/metrics")
        assert status == 200 and text.endswith("\n")
        count, = re.findall(r"^vllm:generation_tokens_total{.*} (\S+)$", text, re.MULTILINE)
        counts.append(float(count))
        client.completions.create(model=NAME, prompt="Once", max_tokens=5,
                                  extra_body={"ignore_eos": True})
    assert counts[1] == counts[0] + 5


# ------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("echoes", [False, True])
def test_an_event_with_logprobs_costs_what_is_new_in_it(monkeypatch, echoes):
    """Those of a token are made once, however long the stream is."""
    num_made = []
    make = module.openai.of_completion
    monkeypatch.setattr(module.openai, "of_completion", lambda tokens, *rest: (
        num_made.append(len(tokens)) or make(tokens, *rest)))
    body = module.openai.Body("/v1/completions", echoes=echoes, streams=True)
    found = SimpleNamespace(decoded_token="日", logprob=-1.0, rank=1)
    offsets = []
    for count in range(1, 201):
        completion = CompletionOutput(0, "日" * count, [7] * count, 0.0, [{7: found}] * count)
        output = RequestOutput("0", "日" * 3, [5] * 3, [completion], False,
                               prompt_logprobs=[{5: found}] * 3)
        for choice in body.news(output):
            offsets += choice["logprobs"]["text_offset"]
    assert offsets == [*range(203 if echoes else 200)]
    assert sum(num_made) == len(offsets)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
         for city in ("Rome", "Oslo")]


@pytest.mark.needs("sampling.structured_outputs", "tools.tool_calls")
def test_calls_of_tools(client, llm):
    """A grammar makes the model write them. The client's own messages go back to the template."""
    text = "I look.\n" + "\n".join(CALLS)
    asked = {"model": NAME, "messages": CHAT, "tools": [TOOL],
             "extra_body": {"structured_outputs": {"choice": [text]}, "ignore_eos": False}}
    choice, = client.chat.completions.create(**asked).choices
    # the client's own reader of streams
    with client.chat.completions.stream(**asked, n=2) as stream:
        assert "tool_calls.function.arguments.done" in {event.type for event in stream}
        streamed = stream.get_final_completion().choices
    for each in (choice, *streamed):
        assert each.finish_reason == "tool_calls" and each.message.content == "I look."
        assert [(call.function.name, json.loads(call.function.arguments))
                for call in each.message.tool_calls] == [
            ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]
    # the answer goes on
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"}
               for call in choice.message.tool_calls]
    client.chat.completions.create(
        model=NAME, messages=[*CHAT, choice.message, *results], tools=[TOOL], max_tokens=1)
    # without tools, or if none may be called, it is text
    for change in ({"tools": openai.omit}, {"tool_choice": "none"}):
        plain, = client.chat.completions.create(**asked | change).choices
        assert (plain.message.content, plain.finish_reason) == (text, "stop")
        assert not plain.message.tool_calls


@pytest.mark.needs("tools.tool_calls")
@pytest.mark.parametrize("flags, reason", [
    ((), "stop"), (("--enable-auto-tool-choice",), "tool_calls"),
    (("--enable-auto-tool-choice", "--tool-call-parser", "hermes"), "tool_calls")])
def test_calls_are_found_with_the_flags_of_vllm(serve, flags, reason):
    asked = {"model": NAME, "messages": CHAT, "tools": [TOOL],
             "extra_body": {"structured_outputs": {"choice": CALLS[:1]}}}
    with connect(serve(*flags)) as client:
        choice, = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == reason
    assert len(choice.message.tool_calls or ()) == (reason == "tool_calls")


# ---------------------------------------------------------------------------------- errors


def post(port: int, body: object, path: str = "completions"):
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/{path}", data, timeout=60)


def check_answers(port: int, data: object = SUM) -> None:
    """The server goes on."""
    with post(port, data) as answer:
        assert json.load(answer)["choices"][0]["text"] == " 46"


def refused(port: int, *request: object) -> tuple[int, dict]:
    """The status and the error of a call."""
    with pytest.raises(urllib.error.HTTPError) as found:
        post(port, *request)
    error = json.load(found.value)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return found.value.code, error


NOT_SERVED = "is not served: use /v1/chat/completions or /v1/compl"
# the path, the body, the status, the parameter, and what the message says; test_openai_format.py
# has more of what is refused
REFUSED = [
    ("completions", {}, 400, "prompt", ""),
    ("completions", {"prompt": "\ud800"}, 400, "prompt", ""),
    ("completions", {"prompt": "a", "\ud800": 1}, 400, None, ""),
    ("completions", {"prompt": [99999]}, 400, "prompt", "vocabulary"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "-1 is not accepted"),
    (CHATS, {"messages": [CHAT]}, 400, "messages", ""),
    # limits of the server, and of vLLM's; more than max_num_seqs and --max-waiting together
    *(("completions", {"prompt": "a"} | more, 400, [*more][-1], "must be") for more in (
        {"logprobs": 21}, {"logprobs": -1}, {"seed": 2**63}, {"seed": -2**63 - 1}, {"n": 265},
        {"stream": True, "n": 16384})),
    *(("completions", {"prompt": prompt, "n": 1}, 400, "n", "fewer prompts") for prompt in (
        ["a"] * 265, ["a"] * 200_000)),
    ("completions", {"prompt": [[5]] * 100, "n": 3}, 400, "n", "264 in all"),
    (CHATS, {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", ""),
    # a client's program
    *((CHATS, {"messages": CHAT} | more, 400, "chat_template", "a client's program") for more in (
        {"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})),
    ("completions", b"{", 400, None, "JSON"),
    ("nothing", b"{}", 404, None, f"/v1/nothing {NOT_SERVED}"),
    # a client whose base_url has no /v1, or has it twice
    ("../chat/completions", b"{}", 404, None, NOT_SERVED), ("models", b"{}", 405, None, "Method"),
    ("v1/completions", b"{}", 404, None, NOT_SERVED),
    (CHATS, b"x" * 20_000_000, 413, None, "a body can have at most 1048576 bytes")]


def test_what_is_refused(port):
    for path, body, status, name, words in REFUSED:
        code, error = refused(port, body, path)
        assert (code, error["param"], error["type"]) == (status, name, "invalid_request_error"), (
            path, error)
        assert words in error["message"]


def test_a_key(serve):
    """Only health and metrics need none. A body without it is not read."""
    port = serve("--api-key", "a-secret")
    right = "Bearer a-secret"
    assert get(port, "/health")[0] == get(port, "/metrics")[0] == 200
    for wrong in ("", "Bearer", "Bearer ", "Bearer a-secre", "a-secret", right + "x",
                  right + "\xf8", right.replace("Bearer", "Basic")):
        status, text = get(port, "/v1/models", wrong)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["type"]) == (
            401, "invalid_api_key", "invalid_request_error"), wrong
    assert get(port, "/v1/models", right)[0] == 200
    assert get(port, "/v1/models", right.replace("B", "b"))[0] == 200
    for path in ("completions", CHATS):
        assert refused(port, b"x" * 2**19, path)[0] == 401
    with connect(port, "a-secret") as client:
        assert client.completions.create(model=NAME, **SUM).choices[0].text == " 46"
    with connect(port) as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.completions.create(model=NAME, prompt="a")


def test_faults_of_a_user_are_one_sentence(capsys, monkeypatch, tmp_path):
    """Before a model is loaded."""
    monkeypatch.setattr(module, "LLM", lambda *_, **options: LLM(tmp_path, **options))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_fault(capsys, module.main, "serve", [], "--model")
        for flags, message in [
                (("--port", port), "choose another"), (("--port", "70000"), "choose another"),
                (("--host", "not a host"), "choose another"),
                *((given, f"{given[0]}=") for given in (
                    ("--max-waiting", "-1"), ("--max-body", "0"), ("--timeout", "-1"),
                    ("--timeout", "nan"), ("--graceful-timeout", "-1"), ("--api-key", ""))),
                (("--options", "{"), "--options: JSON"), (("--options", '{"dtyp": 1}'), "dtype"),
                ((), "is an empty folder")]:
            check_fault(capsys, module.main, "serve",
                        ["--model", NAME, "--port", "0", *flags], message)


@pytest.mark.needs("running.memory")
def test_a_model_without_a_tokenizer_takes_token_ids(make_llm):
    with make_llm(num_kv_blocks=16) as llm:
        server = module.Server(llm, Namespace(max_waiting=8, tool_call_parser=None))
        body = module.openai.Body("/v1/completions")
        server.read(body, b'{"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true}')
        request, = server.add(body)
        while not request.is_finished:
            llm.step()
        answer = body.response([request.output()], "tiny")
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["text"] == ""
        with pytest.raises(ValueError, match="prompt: there is no tokenizer: give token ids"):
            server.read(body, b'{"prompt": "a text"}')
        server.engine.close()


def test_what_a_server_adds_to_its_engine(tiny, monkeypatch):
    """It begins with all memory of its cache, and measures times."""
    def run(app, **options) -> None:
        server = app.routes[1].endpoint.__self__
        assert "AllWritten" in {type(each).__name__ for each in server.llm.config.features}
        text = asyncio.run(server.metrics(None)).body.decode()
        assert "vllm:time_to_first_token_seconds_count" in text

    monkeypatch.setattr(module.uvicorn, "run", run)
    module.main(["--model", tiny, "--num-kv-blocks", "4", "--options", '{"block_size": 16}',
                 "--port", "0"])


def test_a_large_body_is_refused(port):
    """Whether its length is known or not, and before all of it has come."""
    assert refused(port, (b"word " * 10_000 for _ in range(400)))[0] == 413
    for header in (b"Content-Length: 20000000", b"Transfer-Encoding: chunked"):
        with raw(port, header + b"\r\n\r\n200000\r\n" + b"x" * 2**21) as client:
            assert client.recv(20) == b"HTTP/1.1 413 Request"
    with connect(port) as client, pytest.raises(openai.APIStatusError, match="at most 1048576"):
        client.completions.create(model=NAME, prompt="a" * 2**21)


def raw(port: int, rest: bytes) -> socket.socket:
    """A client that has sent a part of a call."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + rest)
    return client


def test_a_body_of_the_limit(serve):
    body = json.dumps(SUM).encode()
    port = serve("--max-body", str(len(body)))
    check_answers(port, body)
    for more in (b" ", b"\n" * 99999):
        assert refused(port, body + more)[0] == 413


def test_clients_that_send_slowly(port):
    """Others are answered, and they can leave at any time."""
    calls = [b"", b"Content-Length: 99\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"]
    clients = [raw(port, call) for call in calls for _ in range(40)]
    check_answers(port)
    for client in clients:
        client.close()


def test_many_clients_at_once(port, llm, params):
    """Some leave in the middle, and some ask for too much. All others get their texts."""
    prompts = [f"Once upon a time {number}" for number in range(64)]
    wanted = [params(seed=number, ignore_eos=True) for number in range(64)]
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    barrier = threading.Barrier(64)

    def ask(number: int) -> bool:
        body = SAMPLED | {"prompt": prompts[number], "seed": number, "ignore_eos": True,
                          "stream": number % 2 == 1}
        barrier.wait(60)
        if number % 8 == 1:
            with post(port, body | {"max_tokens": 1500}) as answer:
                return answer.readline().startswith(b"data: ")
        if number % 8 == 2:
            return refused(port, body | {"prompt": [1] * 3000})[0] == 400
        with post(port, body) as answer:
            lines = answer.read().decode().split("\n\n")
        if not body["stream"]:
            return json.loads(lines[0])["choices"][0]["text"] == expected[number]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[number]

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))


# ------------------------------------------------------------- limits, in a server of this process


LONG = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


def asking(port: int, body: dict) -> socket.socket:
    """A client that has asked and does not read; as a context, it leaves at the end."""
    data = json.dumps(body).encode()
    return raw(port, b"Content-Length: %d\r\n\r\n" % len(data) + data)


def num_generated(llm) -> int:
    return llm.metrics()["generation_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_requests(serve, llm, streams):
    port = serve()
    before = num_generated(llm)
    body = LONG | {"stream": streams, "n": 2, "prompt": ["Once", "The fox"]}
    with asking(port, body):
        wait_until(lambda: num_generated(llm) > before + 40)
    wait_until(lambda: not llm.active)
    assert num_generated(llm) < before + 4 * 1900
    # more than run at once: all seats are taken, and the last one leaves while it waits
    before = num_generated(llm)
    with asking(port, LONG | {"stream": streams, "n": 8}):
        wait_until(lambda: num_generated(llm) > before)
        with asking(port, LONG | {"stream": streams}):
            wait_until(lambda: llm.metrics()["num_requests_waiting"] == 1)
        wait_until(lambda: len(llm.active) == 1)
    wait_until(lambda: not llm.active)


def test_too_many_requests(serve, llm):
    """Eight run, two wait, and the next one is refused until there is room."""
    port = serve("--max-waiting", "2")
    with asking(port, LONG | {"n": 6, "stream": True}), \
            asking(port, LONG | {"n": 4, "stream": True}):
        wait_until(lambda: len(llm.active) == 2)
        with connect(port) as client, pytest.raises(openai.RateLimitError) as found:
            client.completions.create(model=NAME, prompt="a")
        assert found.value.response.headers["retry-after"] == "1"
        assert found.value.status_code == 429 and "at most 10" in str(found.value)
    wait_until(lambda: not llm.active)
    check_answers(port)


def test_the_time_limit_ends_requests(serve, llm):
    port = serve("--timeout", "0.3")
    body = LONG | {"n": 8, "model": NAME}
    extra = {"extra_body": {"ignore_eos": body.pop("ignore_eos")}}
    # it would be repeated, had the answer not a header against it
    with connect(port).with_options(max_retries=2) as client:
        before = llm.metrics()["prompt_tokens"]
        with pytest.raises(openai.InternalServerError, match="time limit") as found:
            client.completions.create(**body, **extra)
        assert found.value.status_code == 504
        assert llm.metrics()["prompt_tokens"] - before < 2 * 8
        wait_until(lambda: not llm.active)
        chunks = []
        with pytest.raises(openai.APIError, match="time limit"):
            for chunk in client.completions.create(**body, **extra, stream=True):
                chunks.append(chunk)
        assert chunks
    wait_until(lambda: not llm.active)


def test_a_broken_step_is_an_error_of_its_requests(serve, llm, monkeypatch):
    """The server goes on."""
    port = serve()
    effects = cycle([DEFAULT] * 19 + [MemoryError("no memory")])
    monkeypatch.setattr(llm.engine, "step", Mock(wraps=llm.engine.step, side_effect=effects))
    code, error = refused(port, LONG)
    assert code == 500 and error["type"] == "server_error"
    with post(port, LONG | {"stream": True}) as answer:
        *others, last, _ = answer.read().decode().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert len(others) > 10 and "no memory" in error["message"]
    check_answers(port)
    check_idle(llm)
    assert all("no memory" in str(error.exc_info[1]) for error in ERRORS.buffer)
    ERRORS.buffer.clear()


# ------------------------------------------------------------------- clients that do not read


class Slow:
    """A client of an app, without a network: it has sent a body, and reads from `reads` on."""

    def __init__(self, app, body: dict, path: str = "/v1/completions") -> None:
        self.reads = asyncio.Event()
        self.left = asyncio.Event()
        self.messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.status = 0
        self.is_blocked = False
        self.data = b""
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
                 "asgi": {"spec_version": "2.3"}}
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self) -> dict:
        if self.messages:
            return self.messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.body":
            self.is_blocked = not self.reads.is_set()
            await self.reads.wait()
            self.data += message["body"]

    async def events(self) -> list:
        """Reads to the end. Returns the events, parsed."""
        self.reads.set()
        await self.task
        assert self.status == 200
        *events, end = self.data.decode().split("\n\n")
        assert not end
        found = [event.removeprefix("data: ") for event in events]
        return [event if event == "[DONE]" else json.loads(event) for event in found]


@pytest.mark.parametrize("path, body, num_prompts", [
    ("/v1/completions", {"prompt": ["Once upon a time", "12 + 34 ="]}, 2),
    ("/v1/chat/completions", {"messages": CHAT}, 1)])
def test_what_waits_for_a_client_is_bounded(make_app, llm, params, path, body, num_prompts):
    """The newest output of each request. So few events have all tokens; others are answered."""
    wanted = SAMPLED | {"n": 3, "max_tokens": 300, "ignore_eos": True}
    given = params(**wanted)
    outputs = llm.chat(CHAT, given, use_tqdm=False) if "messages" in body else (
        llm.generate(body["prompt"], given, use_tqdm=False))
    app, _ = make_app()
    server = app.routes[-1].endpoint.__self__

    async def main() -> None:
        slow = Slow(app, body | wanted | {"stream": True}, path)
        await until(lambda: server.engine.calls)
        call, = server.engine.calls
        most = 0
        for _ in range(3):
            *events, _ = await Slow(app, SUM | {"stream": True}).events()
            assert choices_of(events)[0]["content"] == " 46"
            most = max(most, call.news.qsize())
        await until(lambda: not llm.active)
        assert max(most, call.news.qsize()) <= num_prompts and not slow.data
        *events, done = await slow.events()
        found = [each["content"] for each in choices_of(events)]
        assert found == [each.text for output in outputs for each in output.outputs]
        assert done == "[DONE]" and len(events) <= 3 * 3 * num_prompts
        assert not server.engine.calls

    asyncio.run(main())


@pytest.mark.parametrize("flags, end, message", [
    (("--timeout", "0.4"), lambda slow: None, b"the call exceeded the time limit"),
    ((), lambda slow: slow.left.set(), b""), ((), lambda slow: slow.task.cancel(), b"")])
def test_a_client_that_does_not_read(make_app, llm, flags, end, message):
    """Its requests are freed at the time limit, when it leaves, and when the server ends, though
    the server still waits for it to take what was sent."""
    app, _ = make_app(*flags)

    async def main() -> None:
        slow = Slow(app, LONG | {"n": 8, "stream": True})
        await until(lambda: slow.is_blocked)
        end(slow)
        await until(lambda: not llm.active)
        assert not slow.data
        slow.reads.set()
        await asyncio.wait_for(slow.task, 30)
        assert message in slow.data

    before = num_generated(llm)
    asyncio.run(main())
    assert num_generated(llm) - before < 8 * 1900


def test_a_whole_answer_frees_its_requests_before_it_is_read(make_app, llm):
    app, _ = make_app("--max-waiting", "0")

    async def main() -> None:
        full = {"prompt": "Once", "n": 8, "max_tokens": 5}
        clients = []
        # each takes all the places
        for _ in range(3):
            clients.append(Slow(app, full))
            await until(lambda: clients[-1].status)
        for client in clients:
            client.reads.set()
            await client.task
            assert client.status == 200 and len(json.loads(client.data)["choices"]) == 8

    asyncio.run(main())


# ------------------------------------------------------------------------------ the server ends


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


STOPPED = {"message": "the server is shutting down", "type": "server_error", "param": None,
           "code": None}


def check_told(streams: list[socket.socket], others: list[socket.socket]) -> None:
    """All are told that they were cut off."""
    for client in streams:
        events = [line for line in read_all(client).split(b"\r\n") if line.startswith(b"data: ")]
        assert events[1:] and json.loads(events[-1][len(b"data: "):]) == {"error": STOPPED}
    for client in others:
        data = read_all(client)
        assert data.startswith(b"HTTP/1.1 503 ") and json.loads(data.split(b"\r\n\r\n")[1]) == {
            "error": STOPPED}


def test_the_server_ends(serve, llm):
    """After the graceful timeout, calls are cut off: running or waiting ones, and half a body."""
    port = serve("--graceful-timeout", "1")
    streams = [asking(port, LONG | {"stream": True, "n": 3}) for _ in range(2)]
    others = [asking(port, LONG | {"n": 8}), raw(port, b"Content-Length: 9\r\n\r\n{")]
    silent = raw(port, b"Content-")
    # the first step can take long, because it loads kernels
    wait_until(lambda: [each.seq.num_tokens > each.seq.num_prompt_tokens
                        for each in llm.active.values()] == [True] * 3)
    (server, thread), = serve.running
    server.should_exit = True
    check_told(streams, others)
    assert not silent.recv(1), "it is closed"
    thread.join(30)
    assert not thread.is_alive()
    wait_until(lambda: not llm.active)


def test_calls_that_end_in_time(serve):
    port = serve()
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "Once", "ignore_eos": True, "max_tokens": 400}
        answers = [pool.submit(lambda: json.load(post(port, body))),
                   pool.submit(lambda: post(port, body | {"stream": True}).read())]
        (server, thread), = serve.running
        wait_until(lambda: len(server.server_state.tasks) == 2)
        server.should_exit = True
        whole, stream = (answer.result(60) for answer in answers)
    assert whole["usage"]["completion_tokens"] == 400 and stream.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("signals", [
    [signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGINT]])
def test_signals(tmp_path, signals):
    """To a process of its own. The second SIGINT does not wait for the graceful timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "nanoengine", "serve", "--model", NAME, "--port", str(port),
               "--num-kv-blocks", "512", "--graceful-timeout", "100" if signals[1:] else "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}) as server:
        wait_until(lambda: server.poll() is not None or "running on" in log.read_text(), 120)
        streams = [asking(port, LONG | {"stream": True})]
        others = [asking(port, LONG), raw(port, b"Content-Length: 9\r\n\r\n{")]
        # the requests are in the engine
        assert b"data: " in streams[0].recv(65536) + streams[0].recv(65536)
        for number in signals:
            server.send_signal(number)
            wait_until(lambda: "Shutting down" in log.read_text())
            time.sleep(0.3)
        check_told(streams, others)
        assert server.wait(60) == (-signal.SIGTERM if signals == [signal.SIGTERM] else 0)
    # a second signal cancels uvicorn's own task, of which uvicorn prints a traceback
    assert signals[1:] or "Traceback" not in log.read_text()
