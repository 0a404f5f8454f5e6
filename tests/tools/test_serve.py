"""examples/serve.py: OpenAI's client gets what the engine gives, whatever other clients do."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from unittest.mock import patch

import pytest
from conftest import ROOT, check_idle
from test_recipes import example

from nanoengine import SamplingParams

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24}
CHAT = [{"role": "user", "content": "12 + 34"}]
NAME = "models/tiny-qwen3"


def connect(port: int) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """That of a server in a process of its own, which prints no traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    server = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "serve.py", "--model", NAME, "--port", str(port),
         "--options", '{"dtype": "float32", "num_kv_blocks": 512}'],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log.open("w"),
        stderr=subprocess.STDOUT)
    while server.poll() is None and "running on" not in log.read_text():
        time.sleep(0.1)
    assert server.poll() is None, log.read_text()
    yield port
    server.send_signal(signal.SIGINT)
    server.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="module")
def client(port):
    with connect(port) as client:
        yield client


@pytest.fixture
def params(llm):
    """Makes parameters as the server does, with the defaults of the model."""
    defaults = llm.get_default_sampling_params()
    known = {name: getattr(defaults, name) for name in ("top_k",)}
    return lambda **given: SamplingParams(**known | SAMPLED | given)


def texts(output) -> list[str]:
    return [completion.text for completion in output.outputs]


def joined(stream, num_choices: int) -> tuple[list[str], list[str]]:
    """The text and the finish_reason of each choice of a stream."""
    found = [""] * num_choices
    reasons: list = [None] * num_choices
    roles = [0] * num_choices
    for chunk in stream:
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes after the end"
            is_chat = chunk.object == "chat.completion.chunk"
            found[choice.index] += choice.delta.content if is_chat else choice.text
            reasons[choice.index] = choice.finish_reason
            roles[choice.index] += is_chat and choice.delta.role == "assistant"
    assert {*roles} <= {0, 1}
    return found, reasons


# --------------------------------------------------------------------------------- answers


def test_the_model_has_a_name(client):
    model, = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "nanoengine")


def test_completions(client, llm, params):
    prompts = ["Once upon a time", "12 + 34 ="]
    expected = llm.generate(prompts, params(n=2), use_tqdm=False)
    found = client.completions.create(model=NAME, prompt=prompts, n=2, **SAMPLED)
    assert found.object == "text_completion" and found.model == NAME
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == [*texts(expected[0]), *texts(expected[1])]
    num_tokens = sum(len(each.token_ids) for output in expected for each in output.outputs)
    num_of_prompts = sum(len(output.prompt_token_ids) for output in expected)
    assert (found.usage.completion_tokens, found.usage.prompt_tokens, found.usage.total_tokens) == (
        num_tokens, num_of_prompts, num_tokens + num_of_prompts)
    # token ids, as a prompt or in a list
    ids = expected[1].prompt_token_ids
    for prompt in (ids, [ids]):
        one = client.completions.create(model="any", prompt=prompt, **SAMPLED)
        assert one.choices[0].text == texts(expected[1])[0]
    # without a seed, equal prompts have different ones
    several = client.completions.create(model=NAME, prompt=["Once"] * 4, max_tokens=20)
    assert len({choice.text for choice in several.choices}) > 1


def test_parameters(client, llm, params):
    """Those of OpenAI and of vLLM reach the engine."""
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": [" a"], "top_p": 0.9}
    extra = {"top_k": 9, "min_p": 0.01, "ignore_eos": True, "min_tokens": 3,
             "repetition_penalty": 1.1}
    found = client.completions.create(
        model=NAME, prompt="Once upon", **SAMPLED | given | {"logit_bias": {"20": 1.5}},
        extra_body=extra | {"temperature": 1.2})
    more = params(**given | extra, temperature=1.2, logit_bias={20: 1.5})
    expected, = llm.generate("Once upon", more, use_tqdm=False)
    assert found.choices[0].text == expected.outputs[0].text
    assert found.choices[0].finish_reason == expected.outputs[0].finish_reason


def test_chats(client, llm, params):
    for messages in (CHAT, [{"role": "user", "content": [{"type": "text", "text": "12 + 34"}]}]):
        found = client.chat.completions.create(
            model=NAME, messages=messages, **SAMPLED | {"temperature": 0})
        expected, = llm.chat(messages, params(temperature=0), use_tqdm=False)
        assert found.object == "chat.completion"
        assert found.choices[0].message.role == "assistant"
        assert found.choices[0].message.content == texts(expected)[0] == "46"
        assert found.choices[0].finish_reason == "stop"
    few = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=1)
    assert few.usage.completion_tokens == 1 and few.choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2])
def test_streams(client, llm, params, n):
    """The deltas of all choices together are the texts of the engine."""
    usage = {"stream_options": {"include_usage": True}}
    prompts = ["Once upon a time", "12 + 34 ="]
    expected = llm.generate(prompts, params(n=n), use_tqdm=False)
    chunks = [*client.completions.create(
        model=NAME, prompt=prompts, n=n, stream=True, **SAMPLED, **usage)]
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 24
    found, reasons = joined(chunks, 2 * n)
    completions = [each for output in expected for each in output.outputs]
    assert found == [each.text for each in completions]
    assert reasons == [each.finish_reason for each in completions]
    assert not chunks[-1].choices and not any(chunk.usage for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == sum(len(each.token_ids) for each in completions)

    expected, = llm.chat(CHAT, params(n=n), use_tqdm=False)
    stream = client.chat.completions.create(model=NAME, messages=CHAT, n=n, stream=True, **SAMPLED)
    assert joined(stream, n)[0] == texts(expected)


def test_a_stream_is_server_sent_events(port):
    """As they are on the wire."""
    body = {"prompt": "12 + 34 =", "temperature": 0, "stream": True}
    with post(port, body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " 46"


# ---------------------------------------------------------------------------------- errors


def post(port: int, body: object, path: str = "completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/{path}", data, timeout=60)


BAD = [
    ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"), ({"prompt": ["a", 5]}, "prompt"), ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "word " * 5000}, "prompt"), ({"prompt": [99999]}, "prompt"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"), ({"n": 2, "temperature": 0}, "n"),
    ({"top_p": 2}, "top_p"), ({"seed": "x"}, "seed"), ({"stop": 5}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"), ({"stream_options": 5}, "stream_options"),
    ({"stream": True, "logprobs": 1}, "logprobs"), ({"echo": True}, "echo"),
    ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"temprature": 1}, "temprature"),
    ({"self": 1}, "self"), ({"messages": CHAT}, "messages"), ({"\ud800": 1}, None)]
BAD_CHATS = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"), ({"messages": [CHAT]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"), ({"tools": [{}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"), ({"chat_template": "x"}, "chat_template")]


@pytest.mark.parametrize("path, good, bad", [
    ("completions", {"prompt": "a"}, BAD), ("chat/completions", {"messages": CHAT}, BAD_CHATS)])
def test_bad_input_is_named(port, path, good, bad):
    for body, name in bad:
        body = good | body if body else body
        with pytest.raises(urllib.error.HTTPError) as found:
            post(port, body, path)
        error = json.load(found.value)["error"]
        assert (found.value.code, error["type"], error["param"]) == (
            400, "invalid_request_error", name), (body, error)
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]


def test_the_client_knows_bad_input(client):
    with pytest.raises(openai.BadRequestError, match="temperature=-1 is not accepted") as found:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert found.value.param == "temperature"


def test_what_is_no_json_object(port):
    for body in (b"", b"{", b"[1]", b"5", b"\xff", b"[" * 100_000, b'{"prompt": "a", "seed": NaN}'):
        with pytest.raises(urllib.error.HTTPError) as found:
            post(port, body)
        assert found.value.code == 400 and "JSON" in json.load(found.value)["error"]["message"]
    for path, code in (("nothing", 404), ("models", 405)):
        with pytest.raises(urllib.error.HTTPError) as found:
            post(port, b"{}", path)
        assert found.value.code == code and json.load(found.value)["error"]["message"]


def test_many_clients_at_once(port, llm, params):
    """Some leave in the middle, and some ask for too much. All others get their texts."""
    prompts = [f"Once upon a time {number}" for number in range(64)]
    wanted = [params(seed=number, ignore_eos=True) for number in range(64)]
    expected = [texts(output)[0] for output in llm.generate(prompts, wanted, use_tqdm=False)]
    barrier = threading.Barrier(64)

    def ask(number: int) -> bool:
        body = SAMPLED | {"prompt": prompts[number], "seed": number, "ignore_eos": True,
                          "stream": number % 2 == 1}
        barrier.wait(60)
        if number % 8 == 1:
            with post(port, body | {"max_tokens": 1500}) as answer:
                return answer.readline().startswith(b"data: ")
        if number % 8 == 2:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(port, body | {"prompt": [1] * 3000})
            return True
        with post(port, body) as answer:
            lines = answer.read().decode().split("\n\n")
        if not body["stream"]:
            return json.loads(lines[0])["choices"][0]["text"] == expected[number]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[number]

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))


# ------------------------------------------------------------- limits, in a server of this process


class Kept:
    """A model that stays open behind a `with`."""

    def __init__(self, llm) -> None:
        self.llm = llm

    def __enter__(self):
        return self.llm

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def serve(llm, monkeypatch):
    """Starts a server around a model that is loaded already; returns its port."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = example("serve")
    running = []

    def start(*flags: str) -> int:
        apps = []
        with patch.object(module, "LLM", lambda model, **options: Kept(llm)), \
                patch.object(module.uvicorn, "run", lambda app, **options: apps.append(app)):
            module.main(["--model", NAME, *flags])
        config = uvicorn.Config(apps[0], port=0, log_level="error", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


LONG = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


def leave(port: int, body: dict, once) -> None:
    """Asks, and leaves once a condition holds."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_until(once)
    connection.sock.close()


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def num_generated(llm) -> int:
    return llm.metrics()["generation_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_requests(serve, llm, streams, capfd):
    port = serve()
    before = num_generated(llm)
    body = LONG | {"stream": streams, "n": 2, "prompt": ["Once", "The fox"]}
    leave(port, body, lambda: num_generated(llm) > before + 40)
    wait_until(lambda: not llm.active)
    assert num_generated(llm) < before + 4 * 1900
    # more than run at once: all seats are taken, and the last one leaves while it waits
    before = num_generated(llm)
    with HTTPConnectionOf(port, LONG | {"stream": streams, "n": 8}):
        wait_until(lambda: num_generated(llm) > before)
        leave(port, LONG | {"stream": streams},
              lambda: llm.metrics()["num_requests_waiting"] == 1)
        wait_until(lambda: len(llm.active) == 1)
    wait_until(lambda: not llm.active)
    check_idle(llm)
    assert "Traceback" not in capfd.readouterr().err


class HTTPConnectionOf:
    """A client that has asked and does not read; leaves at the end."""

    def __init__(self, port: int, body: dict) -> None:
        self.connection = HTTPConnection("127.0.0.1", port)
        self.connection.request("POST", "/v1/completions", json.dumps(body))

    def __enter__(self) -> HTTPConnection:
        return self.connection

    def __exit__(self, *exception: object) -> None:
        self.connection.close()


def test_too_many_requests(serve, llm):
    """Eight run, two wait, and the next one is refused until there is room."""
    port = serve("--max-waiting", "2")
    with HTTPConnectionOf(port, LONG | {"n": 6, "stream": True}), \
            HTTPConnectionOf(port, LONG | {"n": 4, "stream": True}):
        wait_until(lambda: len(llm.active) == 2)
        with connect(port) as client, pytest.raises(openai.RateLimitError) as found:
            client.completions.create(model=NAME, prompt="a")
        assert found.value.response.headers["retry-after"] == "1"
        assert found.value.status_code == 429 and "at most 10" in str(found.value)
    wait_until(lambda: not llm.active)
    with post(port, {"prompt": "12 + 34 =", "temperature": 0}) as answer:
        assert json.load(answer)["choices"][0]["text"] == " 46"
    check_idle(llm)


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
    check_idle(llm)


def test_a_broken_step_is_an_error_of_its_requests(serve, llm, monkeypatch):
    """The server goes on."""
    port = serve()
    step = llm.engine.step
    calls = []

    def broken():
        calls.append(1)
        if len(calls) == 20:
            raise MemoryError("no memory")
        return step()

    monkeypatch.setattr(llm.engine, "step", broken)
    with pytest.raises(urllib.error.HTTPError) as found:
        post(port, LONG)
    error = json.load(found.value)["error"]
    assert found.value.code == 500 and error["type"] == "server_error"
    calls.clear()
    with post(port, LONG | {"stream": True}) as answer:
        *others, last, _ = answer.read().decode().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert len(others) > 10 and "no memory" in error["message"]
    with post(port, {"prompt": "12 + 34 =", "temperature": 0}) as answer:
        assert json.load(answer)["choices"][0]["text"] == " 46"
    check_idle(llm)
