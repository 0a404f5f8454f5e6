"""The server: OpenAI's client gets what the engine gives, whatever other clients do."""

import asyncio
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
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from conftest import ROOT, check_idle

from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from nanoengine_extras.tools import serve as module  # noqa: E402

pytestmark = pytest.mark.needs(
    "tools.chat", "sampling.constraints", "models.generation_config", "sampling.logprobs",
    "running.metrics", "tools.prometheus", "running.strict", "sampling.texts")

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24}
CHAT = [{"role": "user", "content": "12 + 34"}]
NAME = "models/tiny-qwen3"


def connect(port: int) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def start_server(tmp_path_factory):
    """Starts servers in processes of their own; returns each with its port and its log."""
    servers = []

    def start(*flags: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path_factory.mktemp("serve") / "log"
        server = subprocess.Popen(
            [sys.executable, "-m", "nanoengine", "serve", "--model", NAME, "--port", str(port),
             "--options", '{"dtype": "float32", "num_kv_blocks": 512}', *flags],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log.open("w"),
            stderr=subprocess.STDOUT)
        servers.append(server)
        while server.poll() is None and "running on" not in log.read_text():
            time.sleep(0.1)
        assert server.poll() is None, log.read_text()
        return server, port, log

    yield start
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def port(start_server):
    """That of a server in a process of its own, which prints no traceback."""
    server, port, log = start_server()
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
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError, match="the model 'a/b' does not exist: use 'models/"):
        client.models.retrieve("a/b")


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
    # vLLM's: each chunk has the usage so far
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = client.chat.completions.create(
        model=NAME, messages=CHAT, n=n, stream=True, **SAMPLED, **usage)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1]
    assert last.usage == chunks[-1].usage and joined(chunks, n)[0] == texts(expected)
    usage["stream_options"]["include_usage"] = False
    chunks = [*client.chat.completions.create(
        model=NAME, messages=CHAT, n=n, stream=True, **SAMPLED, **usage)]
    assert joined(chunks, n)[0] == texts(expected) and not any(chunk.usage for chunk in chunks)


def test_a_stream_is_server_sent_events(port):
    """As they are on the wire."""
    body = {"prompt": "12 + 34 =", "temperature": 0, "stream": True}
    with post(port, body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " 46"


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
    before = {}
    for _ in range(2):
        status, text = get(port, "/metrics")
        assert status == 200 and text.endswith("\n")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        counts = {name.partition("{")[0]: float(value) for name, value in values.items()
                  if "_bucket{" not in name}
        if before:
            for name, count in {
                    "vllm:generation_tokens_total": 5,
                    "vllm:time_to_first_token_seconds_count": 1,
                    "vllm:inter_token_latency_seconds_count": 4,
                    "vllm:e2e_request_latency_seconds_count": 1}.items():
                assert counts[name] == before[name] + count
        before = counts
        client.completions.create(model=NAME, prompt="Once", max_tokens=5,
                                  extra_body={"ignore_eos": True})


# ------------------------------------------------------------------------ log-probabilities


def test_an_echo_scores_the_prompt(client, llm):
    """As the engine scores it, with and without tokens of an answer."""
    ids = llm.get_tokenizer().encode("12 + 34 = 46")
    expected, = llm.score(ids[:1], [ids[1:]], use_tqdm=False)
    for prompt in ("12 + 34 = 46", ids, [ids]):
        for most in (0, 1):
            found = client.completions.create(
                model=NAME, prompt=prompt, max_tokens=most, echo=True, logprobs=1, temperature=0)
            choice, = found.choices
            logprobs = choice.logprobs
            assert choice.text.startswith("12 + 34 = 46") and choice.finish_reason
            assert len(logprobs.tokens) == len(ids) + most == len(logprobs.top_logprobs)
            assert "".join(logprobs.tokens[:len(ids)]) == "12 + 34 = 46"
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1:len(ids)] == pytest.approx(expected.logprobs, abs=1e-5)
            assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
            for value, top in [*zip(logprobs.token_logprobs, logprobs.top_logprobs)][1:]:
                assert value in top.values() and 1 <= len(top) <= 2
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), most)
    assert client.completions.create(
        model=NAME, prompt="12 + 34 =", echo=True, max_tokens=0).choices[0].text == "12 + 34 ="
    # all choices have it
    both = client.completions.create(model=NAME, prompt=["Once", "The fox"], echo=True, n=2,
                                     max_tokens=3, logprobs=0, seed=1)
    assert [each.text.startswith(("Once", "The fox")) for each in both.choices] == [True] * 4
    assert all(len(each.logprobs.tokens) == len(each.logprobs.token_logprobs) > 3
               for each in both.choices)


@pytest.mark.parametrize("extra", [{}, {"echo": True}])
def test_streams_with_logprobs(client, extra):
    """The parts are those of a whole answer."""
    asked = SAMPLED | {"prompt": ["Once upon a time", "日"], "logprobs": 2, "n": 2} | extra
    whole = client.completions.create(model=NAME, **asked)
    parts: list[dict] = [dict(text="", tokens=[], text_offset=[], token_logprobs=[],
                              top_logprobs=[]) for _ in whole.choices]
    chunks = [*client.completions.create(model=NAME, stream=True, **asked)]
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        part = parts[choice.index]
        part["text"] += choice.text
        for name, value in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            part[name] += value
    expected = [{"text": each.text} | each.logprobs.model_dump() for each in whole.choices]
    assert parts == expected and len(chunks) > 24


@pytest.mark.parametrize("echoes", [False, True])
def test_an_event_with_logprobs_costs_what_is_new_in_it(echoes):
    """Each token's text is read a few times, however long the stream is."""
    num_reads = 0

    class Found(SimpleNamespace):
        @property
        def decoded_token(self) -> str:
            nonlocal num_reads
            num_reads += 1
            return "日"

    body = module.openai.Body("/v1/completions", echoes=echoes, streams=True)
    news = module.News(body)
    prompt = [{5: Found(logprob=-1.0, rank=1)}] * 3
    offsets = []
    for count in range(1, 201):
        logprobs = [{7: Found(logprob=-1.0, rank=1)}] * count
        completion = CompletionOutput(0, "日" * count, [7] * count, 0.0, logprobs)
        output = RequestOutput("0", "日" * 3, [5] * 3, [completion], False, prompt_logprobs=prompt)
        for choice in news.choices(output):
            offsets += choice["logprobs"]["text_offset"]
    assert offsets == [*range(203 if echoes else 200)]
    assert num_reads < 5 * 200


def test_streams_of_chats_with_logprobs(client):
    asked = SAMPLED | {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model=NAME, **asked)
    found = []
    for chunk in client.chat.completions.create(model=NAME, stream=True, **asked):
        found += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert found == whole.choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in found] == [2] * len(found) != []
    most = client.chat.completions.create(
        model=NAME, messages=CHAT, logprobs=True, top_logprobs=20, seed=-2**63, max_tokens=1)
    assert len(most.choices[0].logprobs.content[0].top_logprobs) == 20


def test_tools_reach_the_template(client, llm, monkeypatch, make_app):
    """The bundled model's own template knows none."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        found = client.chat.completions.create(
            model=NAME, messages=CHAT, tools=[tool], temperature=0, **choice)
        assert found.choices[0].message.content == "46"
    given = []
    render = module.extension("tools.chat").render
    monkeypatch.setattr(
        module.extension("tools.chat"), "render", lambda inputs, messages, **options: (
            given.append(options) or render(inputs, messages, **options)))
    app, _ = make_app()

    async def main() -> None:
        slow = Slow(app, {"messages": CHAT, "tools": [tool], "max_tokens": 1},
                    "/v1/chat/completions")
        slow.reads.set()
        await slow.task
        assert slow.status == 200

    asyncio.run(main())
    assert given == [{"tools": [tool]}]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
         for city in ("Rome", "Oslo")]


@pytest.mark.needs("sampling.structured_outputs", "tools.tool_calls")
def test_calls_of_tools(serve, llm):
    """A grammar makes the model write them. The client's own messages go back to the template."""
    port = serve("--tool-call-parser", "hermes")
    text = "I look.\n" + "\n".join(CALLS)
    asked = {"model": NAME, "messages": CHAT, "tools": [TOOL],
             "extra_body": {"structured_outputs": {"choice": [text]}, "ignore_eos": False}}
    with connect(port) as client:
        choice, = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
            {"city": "Rome"}, {"city": "Oslo"}]
        assert {call.function.name for call in choice.message.tool_calls} == {"weather"}
        # the client's own reader of streams
        with client.chat.completions.stream(**asked, n=2) as stream:
            events = [*stream]
            streamed = stream.get_final_completion().choices
        assert "tool_calls.function.arguments.done" in {event.type for event in events}
        for each in streamed:
            assert each.finish_reason == "tool_calls" and each.message.content == "I look."
            assert [call.function for call in each.message.tool_calls] != []
            assert [call.function.arguments for call in each.message.tool_calls] == [
                call.function.arguments for call in choice.message.tool_calls]
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
    check_idle(llm)


@pytest.mark.needs("sampling.structured_outputs", "tools.tool_calls")
@pytest.mark.parametrize("flags", [(), ("--enable-auto-tool-choice",)])
@pytest.mark.parametrize("choice, reason", [
    ("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")])
def test_required_calls_of_tools(serve, llm, flags, choice, reason):
    """Whole and as a stream."""
    port = serve(*flags)
    cities = {"city": {"enum": ["Rome", "Oslo"]}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": cities, "required": ["city"]}}}
    asked = {"model": NAME, "messages": CHAT, "tools": [tool], "tool_choice": choice, "seed": 1,
             "parallel_tool_calls": False, "max_tokens": 99, "n": 3}
    with connect(port) as client:
        whole = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices
    for choices in (whole, streamed):
        for each in choices:
            call, = each.message.tool_calls
            assert call.function.name == "weather" and each.finish_reason == reason
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
            assert not each.message.content
    assert [each.message.tool_calls[0].function.arguments for each in whole] == [
        each.message.tool_calls[0].function.arguments for each in streamed]
    check_idle(llm)


@pytest.mark.needs("tools.tool_calls")
@pytest.mark.parametrize("flags", [
    ("--enable-auto-tool-choice",), ("--tool-call-parser", "hermes"),
    ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")])
def test_calls_are_found_with_the_flags_of_vllm(serve, flags):
    port = serve(*flags)
    asked = {"model": NAME, "messages": CHAT, "tools": [TOOL],
             "extra_body": {"structured_outputs": {"choice": CALLS[:1]}}}
    with connect(port) as client:
        choice, = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1


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
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"), ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": "no"}}, "include_usage"),
    ({"stream_options": {"continuous_usage_stats": 5}}, "continuous_usage_stats"),
    ({"stream_options": {"other": True}}, "stream_options"),
    # without a stream
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"echo": 5}, "echo"), ({"echo": True, "logprobs": -2}, "logprobs"),
    # limits of the server, and of vLLM's
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"seed": 2**63}, "seed"),
    ({"seed": -2**63 - 1}, "seed"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"temprature": 1}, "temprature"),
    ({"self": 1}, "self"), ({"messages": CHAT}, "messages"), ({"\ud800": 1}, None),
    # more than max_num_seqs and --max-waiting together
    ({"n": 513}, "n"), ({"n": 16384, "stream": True}, "n"), ({"prompt": ["a"] * 513}, "n"),
    ({"prompt": [[5]] * 200, "n": 3}, "n"), ({"prompt": ["a"] * 200_000}, "n")]
BAD_CHATS = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"), ({"messages": [CHAT]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"), ({"tools": [{}]}, "tools"),
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools"), ({"echo": True}, "echo"),
    ({"tool_choice": "auto"}, "tool_choice"), ({"chat_template": "x"}, "chat_template"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"seed": 2**64}, "seed"),
    # a client's program
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template": 5}, "chat_template"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice")]


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
    for name in ("guided_json", "guided_choice", "guided_regex", "guided_grammar"):
        with pytest.raises(openai.BadRequestError, match=f"{name}=5 .*nearest is structured_out"):
            client.completions.create(model=NAME, prompt="a", extra_body={name: 5})


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
    for path in ("completions", "chat/completions"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(port, b"x" * 2**19, path)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-secret") as client:
        assert client.completions.create(model=NAME, prompt="12 + 34 =", temperature=0
                                         ).choices[0].text == " 46"
    with connect(port) as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.completions.create(model=NAME, prompt="a")


def test_faults_of_a_user_are_one_sentence(capsys, monkeypatch, tmp_path):
    """Before a model is loaded."""
    monkeypatch.setattr(module, "LLM", lambda *_, **options: LLM(tmp_path, **options))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, message in [
                ((), "--model"), (("--model", NAME, "--port", port), "choose another"),
                (("--model", NAME, "--port", "70000"), "choose another"),
                (("--model", NAME, "--host", "not a host", "--port", "0"), "choose another"),
                *(((*given, "--model", NAME, "--port", "0"), f"{given[0]}=") for given in (
                    ("--max-waiting", "-1"), ("--max-body", "0"), ("--timeout", "-1"),
                    ("--timeout", "nan"), ("--graceful-timeout", "-1"), ("--api-key", ""))),
                (("--model", NAME, "--port", "0", "--options", "[]"), "--options: JSON"),
                (("--model", NAME, "--port", "0", "--options", "{"), "--options: JSON"),
                (("--model", NAME, "--port", "0", "--options", '{"dtyp": 1}'), "dtype"),
                (("--model", NAME, "--port", "0"), "is an empty folder")]:
            with pytest.raises(SystemExit, match="2"):
                module.main([*flags])
            *_, last = capsys.readouterr().err.splitlines()
            assert last.startswith("python -m nanoengine serve: error: ") and message in last


@pytest.mark.needs("running.memory")
def test_a_model_without_a_tokenizer_takes_token_ids(tiny):
    with LLM(tiny, dtype="float32", block_size=16, num_kv_blocks=16) as llm:
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


def test_it_begins_with_all_memory_of_its_cache(tiny, monkeypatch):
    begun = []
    monkeypatch.setattr(module.uvicorn, "run", lambda app, **options: begun.extend(
        type(each).__name__ for each in app.routes[1].endpoint.__self__.llm.config.features))
    module.main(["--model", tiny, "--options", '{"num_kv_blocks": 4, "block_size": 16}',
                 "--port", "0"])
    assert "AllWritten" in begun


def test_what_is_no_json_object(port):
    for body in (b"", b"{", b"[1]", b"5", b"\xff", b"[" * 100_000, b'{"prompt": "a", "seed": NaN}'):
        with pytest.raises(urllib.error.HTTPError) as found:
            post(port, body)
        assert found.value.code == 400 and "JSON" in json.load(found.value)["error"]["message"]
    for path, code, text in (
            ("nothing", 404, "/v1/nothing is not served: use /v1/chat/completions or /v1/compl"),
            # a client whose base_url has no /v1, or has it twice
            ("../chat/completions", 404, "use /v1/chat/completions"),
            ("v1/completions", 404, "use /v1/chat/completions"), ("models", 405, "Method")):
        with pytest.raises(urllib.error.HTTPError) as found:
            post(port, b"{}", path)
        error = json.load(found.value)["error"]
        assert found.value.code == code and text in error["message"] and error["param"] is None


def test_a_large_body_is_refused(port):
    """Whether its length is known or not, and before all of it has come."""
    large = json.dumps({"prompt": "word " * 4_000_000}).encode()

    def parts():
        yield from (large[place:place + 65536] for place in range(0, len(large), 65536))

    for path in ("completions", "chat/completions"):
        for body in (large, parts()):
            with pytest.raises(urllib.error.HTTPError) as found:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/{path}", body, timeout=60)
            error = json.load(found.value)["error"]
            assert (found.value.code, error["type"]) == (413, "invalid_request_error")
            assert error["message"] == "a body can have at most 1048576 bytes"
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
    body = json.dumps({"prompt": "12 + 34 =", "temperature": 0}).encode()
    port = serve("--max-body", str(len(body)))
    with post(port, body) as answer:
        assert json.load(answer)["choices"][0]["text"] == " 46"
    for more in (b" ", b"\n" * 99999):
        with pytest.raises(urllib.error.HTTPError, match="413"):
            post(port, body + more)


def test_clients_that_send_slowly(port):
    """Others are answered, and they can leave at any time."""
    calls = [b"", b"Content-Length: 99\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"]
    clients = [raw(port, call) for call in calls for _ in range(40)]
    with post(port, {"prompt": "12 + 34 =", "temperature": 0}) as answer:
        assert json.load(answer)["choices"][0]["text"] == " 46"
    for client in clients:
        client.close()


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
def make_app(llm):
    """Makes a server around a model that is loaded already; returns its app and its options."""
    def make(*flags: str):
        apps = []
        with patch.object(module, "LLM", lambda model, **options: Kept(llm)), \
                patch.object(module.uvicorn, "run", lambda *given, **options: apps.append(
                    (*given, options))):
            module.main(["--model", NAME, "--port", "0", *flags])
        return apps[0]

    return make


@pytest.fixture
def serve(make_app):
    """Starts a server; returns its port."""
    running = []

    def start(*flags: str) -> int:
        app, options = make_app(*flags)
        assert (options.pop("host"), options.pop("port")) == ("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **options))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        for server, _ in running:
            server.should_exit = True

    start.stop, start.running = stop, running
    yield start
    stop()
    for _, thread in running:
        thread.join(60)
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


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not happened")


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
            other = Slow(app, {"prompt": "12 + 34 =", "temperature": 0, "stream": True})
            assert "".join(each["choices"][0]["text"] for each in (await other.events())[:-1]) == (
                " 46")
            most = max(most, call.news.qsize())
        await until(lambda: not llm.active)
        assert max(most, call.news.qsize()) <= num_prompts and not slow.data
        *events, done = await slow.events()
        choices = [choice for event in events for choice in event["choices"]]
        texts_of = [""] * 3 * num_prompts
        for choice in choices:
            texts_of[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content", "")
        assert texts_of == [each.text for output in outputs for each in output.outputs]
        assert done == "[DONE]" and len(events) <= 3 * 3 * num_prompts
        assert not server.engine.calls

    asyncio.run(main())
    check_idle(llm)


def test_the_time_limit_holds_for_a_client_that_does_not_read(make_app, llm):
    app, _ = make_app("--timeout", "0.4")

    async def main() -> None:
        slow = Slow(app, LONG | {"n": 8, "stream": True})
        await until(lambda: llm.active)
        await until(lambda: not llm.active)
        assert not slow.data
        assert (await slow.events())[-1]["error"]["message"] == "the call exceeded the time limit"

    before = num_generated(llm)
    asyncio.run(main())
    assert num_generated(llm) - before < 8 * 1900
    check_idle(llm)


def test_a_client_that_leaves_without_reading(make_app, llm):
    """Its requests are freed, though the server still waits for it to take what was sent."""
    app, _ = make_app()

    async def main() -> None:
        slow = Slow(app, LONG | {"n": 8, "stream": True})
        await until(lambda: llm.active)
        slow.left.set()
        await until(lambda: not llm.active)
        await slow.events()

    before = num_generated(llm)
    asyncio.run(main())
    assert num_generated(llm) - before < 8 * 1900
    check_idle(llm)


def test_a_client_that_does_not_read_when_the_server_ends(make_app, llm):
    app, _ = make_app()

    async def main() -> None:
        slow = Slow(app, LONG | {"n": 8, "stream": True})
        await until(lambda: slow.is_blocked)
        slow.task.cancel()
        await asyncio.wait_for(slow.task, 30)
        await until(lambda: not llm.active)

    asyncio.run(main())
    check_idle(llm)


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
    check_idle(llm)


# ------------------------------------------------------------------------------ the server ends


def events_of(client: socket.socket) -> list[bytes]:
    data = b""
    while part := client.recv(65536):
        data += part
    return [line for line in data.split(b"\r\n") if line.startswith(b"data: ")]


STOPPED = {"message": "the server is shutting down", "type": "server_error", "param": None,
           "code": None}


def check_told(streams: list[socket.socket], others: list[socket.socket]) -> None:
    """All are told that they were cut off."""
    for client in streams:
        *events, last = events_of(client)
        assert events and json.loads(last.removeprefix(b"data: ")) == {"error": STOPPED}
    for client in others:
        data = b""
        while part := client.recv(65536):
            data += part
        assert data.startswith(b"HTTP/1.1 503 ") and json.loads(data.split(b"\r\n\r\n")[1]) == {
            "error": STOPPED}


def call_of(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def test_the_server_ends(serve, llm, capfd):
    """After the graceful timeout, calls are cut off: running or waiting ones, and half a body."""
    port = serve("--graceful-timeout", "1")
    streams = [raw(port, call_of(LONG | {"stream": True, "n": 3})) for _ in range(2)]
    others = [raw(port, call_of(LONG | {"n": 8})), raw(port, b"Content-Length: 9\r\n\r\n{")]
    silent = raw(port, b"Content-")
    # the first step can take long, because it loads kernels
    wait_until(lambda: [each.seq.num_tokens > each.seq.num_prompt_tokens
                        for each in llm.active.values()] == [True] * 3)
    (server, thread), = serve.running
    serve.stop()
    check_told(streams, others)
    assert not silent.recv(1), "it is closed"
    thread.join(30)
    assert not thread.is_alive()
    wait_until(lambda: not llm.active)
    check_idle(llm)
    assert "Traceback" not in capfd.readouterr().err


def test_calls_that_end_in_time(serve):
    port = serve()
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "Once", "ignore_eos": True, "max_tokens": 400}
        answers = [pool.submit(lambda: json.load(post(port, body))),
                   pool.submit(lambda: post(port, body | {"stream": True}).read())]
        (server, thread), = serve.running
        wait_until(lambda: len(server.server_state.tasks) == 2)
        serve.stop()
        whole, stream = (answer.result(60) for answer in answers)
    assert whole["usage"]["completion_tokens"] == 400 and stream.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("signals", [
    [signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGINT]])
def test_signals(start_server, signals):
    """The second SIGINT does not wait for the graceful timeout."""
    seconds = "100" if len(signals) > 1 else "1"
    server, port, log = start_server("--graceful-timeout", seconds)
    streams = [raw(port, call_of(LONG | {"stream": True}))]
    others = [raw(port, call_of(LONG)), raw(port, b"Content-Length: 9\r\n\r\n{")]
    # the requests are in the engine
    assert b"data: " in streams[0].recv(65536) + streams[0].recv(65536)
    for number in signals:
        server.send_signal(number)
        wait_until(lambda: "Shutting down" in log.read_text())
        time.sleep(0.3)
    check_told(streams, others)
    assert server.wait(60) == (-signal.SIGTERM if signals == [signal.SIGTERM] else 0)
