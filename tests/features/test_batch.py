"""A batch job: every request ends up in the results exactly once, whatever happens."""

import fcntl
import functools
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
from conftest import ROOT

from nanoengine import LLM, SamplingParams
from nanoengine_extras.tools import batch as module

pytestmark = pytest.mark.needs(
    "tools.chat", "sampling.constraints", "models.generation_config", "sampling.logits_processors",
    "sampling.logprobs", "running.metrics", "running.strict", "sampling.structured_outputs",
    "sampling.texts")

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def batch():
    return module


@pytest.fixture
def job(batch, bundled, llm, tmp_path, monkeypatch):
    """Runs a job on lines, with a model that is loaded already; returns its results by line."""
    monkeypatch.setattr(batch, "LLM", lambda model, **options: Kept(llm))
    source = tmp_path / "requests.jsonl"
    target = tmp_path / "results.jsonl"

    def run(lines: list | None = None, *flags: str) -> dict[int, dict]:
        if lines is not None:
            source.write_bytes(b"".join(map(as_line, lines)))
        batch.main(["--model", bundled, "-i", str(source), "-o", str(target), *flags])
        return results(target)

    run.source, run.target = source, target
    return run


class Kept:
    """A model that stays open behind a `with`."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __enter__(self) -> LLM:
        return self.llm

    def __exit__(self, *exception: object) -> None:
        pass


def as_line(row: object) -> bytes:
    return (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n"


def results(target: Path) -> dict[int, dict]:
    records = [json.loads(line) for line in target.read_text().splitlines()]
    found = {int(record["id"].removeprefix("line-")): record for record in records}
    assert len(found) == len(records), "no request twice"
    return found


def of_api(body: dict, url: str = COMPLETION, **changes) -> dict:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body} | changes


def chat(content: object = "12 + 34", **body) -> dict:
    return of_api({"messages": [{"role": "user", "content": content}]} | body, CHAT)


def body_of(record: dict) -> dict:
    assert record["error"] is None and record["response"]["status_code"] == 200, record
    return record["response"]["body"]


def texts(found: dict[int, dict]) -> dict[int, list[str]]:
    return {number: [choice.get("text") or choice["message"]["content"]
                     for choice in body_of(record)["choices"]]
            for number, record in found.items()}


def without_times(found: dict[int, dict]) -> dict[int, dict]:
    for record in found.values():
        if record["response"]["body"]:
            del record["response"]["body"]["created"]
    return found


# ----------------------------------------------------------------------------------- the format


def test_chats_and_completions(job, llm, bundled):
    found = job([
        chat(temperature=0, model="gpt-4o-mini", user="me", stream=False, seed=None),
        b"", b"  ",
        of_api({"prompt": "47 + 85 =", "temperature": 0}, custom_id=None),
        {"prompt": llm.get_tokenizer().encode("47 + 85 ="), "temperature": 0, "custom_id": "a"},
        of_api({"prompt": ["47 + 85 ="], "temperature": 0, "stop": "3", "echo": False}),
        chat([{"type": "text", "text": "12 + 34"}], temperature=0, max_completion_tokens=1,
             max_tokens=5)])
    assert found.keys() == {1, 4, 5, 6, 7}
    assert texts(found) == {1: ["46"], 4: [" 132"], 5: [" 132"], 6: [" 1"], 7: ["4"]}
    assert [found[i]["custom_id"] for i in found if i in (4, 5)] == [None, "a"]
    body = body_of(found[1])
    assert body["object"] == "chat.completion" and body["model"] == bundled
    assert body["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": "46", "refusal": None},
        "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    num_prompt_tokens = body["usage"]["prompt_tokens"]
    assert body["usage"] == {"prompt_tokens": num_prompt_tokens, "completion_tokens": 3,
                             "total_tokens": num_prompt_tokens + 3}
    assert abs(body["created"] - time.time()) < 60
    assert found[1]["response"]["request_id"] == "batch-line-1"
    body = body_of(found[6])
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "3"
    assert body_of(found[7])["choices"][0]["finish_reason"] == "length"


def test_parameters(job, batch, llm, monkeypatch):
    """What reaches the engine, by line."""
    seen = []
    add = llm.add
    monkeypatch.setattr(llm, "add", lambda prompts, params: (
        seen.append((prompts, params)) or add(prompts, params)))
    everything = dict(
        n=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=4, max_tokens=3, min_tokens=1,
        stop=["x"], stop_token_ids=[9], include_stop_str_in_output=True, ignore_eos=True,
        logprobs=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
        bad_words=["y"], allowed_token_ids=[5, 6, 7], skip_special_tokens=False)
    job([of_api({"prompt": "Once", "logit_bias": {"5": 1.5}} | everything),
         {"prompt": "Once", "seed": -1, "max_tokens": None}, {"prompt": "Once", "seed": 0},
         chat(temperature=0), chat(max_tokens=2, logprobs=True, top_logprobs=3),
         chat(chat_template="{{ x }}{{ messages[0].content }}{{ tools[0].type }}"
              "{{ reasoning_effort }}", chat_template_kwargs={"x": "<"}, reasoning_effort="low",
              max_tokens=1, tools=[{"type": "function"}], tool_choice="none"),
         of_api({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":
                "b c"}], "add_generation_prompt": False, "continue_final_message": True}, CHAT)])
    params = [params for _, params in seen]
    defaults = llm.get_default_sampling_params()
    assert params[0] == SamplingParams(**everything, logit_bias={5: 1.5})
    assert (params[1].seed, params[1].max_tokens) == (2, 16)
    assert params[1].top_k == defaults.top_k == 50, "of generation_config.json"
    assert params[2].seed == 0
    assert (params[3].seed, params[3].max_tokens, params[3].logprobs) == (4, None, None)
    assert (params[4].max_tokens, params[4].logprobs) == (2, 3)
    prompts = [prompt["prompt"] for [prompt], _ in seen[5:]]
    assert prompts[0] == "<12 + 34functionlow" and prompts[1].endswith("b c")


def test_structured_outputs(job):
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
              "required": ["age"], "additionalProperties": False}
    of_schema = {"type": "json_schema", "json_schema": {"name": "age", "schema": schema}}
    found = job([chat(response_format=of_schema, n=2, max_tokens=40, seed=1),
                 {"prompt": "Once", "structured_outputs": {"choice": ["cat", "dog"]}},
                 {"prompt": "12 + 34 =", "response_format": {"type": "text", "json_schema": None},
                  "temperature": 0},
                 {"prompt": "Once", "response_format": {"type": "json_object"}},
                 {"prompt": "Once", "response_format": {"type": "text"},
                  "structured_outputs": {"choice": ["cat", "dog"]}}])
    assert texts({5: found[5]})[5][0] in ("cat", "dog")
    for choice in body_of(found[1])["choices"]:
        assert json.loads(choice["message"]["content"])["age"] <= 99
    assert texts({2: found[2]})[2][0] in ("cat", "dog") and texts({3: found[3]}) == {3: [" 46"]}
    assert texts({4: found[4]})[4][0].startswith("{")


def test_a_chat_without_a_url(job):
    """Messages with parameters are short for a chat, as a prompt is for a completion."""
    short = {"messages": [{"role": "user", "content": "12 + 34"}], "temperature": 0}
    found = job([short, of_api(short, CHAT), short | {"custom_id": "mine", "max_tokens": 1}])
    assert body_of(found[1])["choices"] == body_of(found[2])["choices"]
    assert body_of(found[1])["choices"][0]["message"]["content"] == "46"
    assert found[3]["custom_id"] == "mine"
    assert body_of(found[3])["usage"]["completion_tokens"] == 1


def test_several_completions_and_logprobs(job, llm):
    found = job([{"prompt": "Once upon", "n": 2, "max_tokens": 6, "temperature": 5},
                 {"prompt": "Once upon", "logprobs": 2, "max_tokens": 5, "ignore_eos": True},
                 chat(logprobs=True, top_logprobs=2, max_tokens=3),
                 chat(logprobs=True, max_tokens=3)])
    first, second = body_of(found[1])["choices"]
    assert (first["index"], second["index"]) == (0, 1) and first["text"] != second["text"]
    assert body_of(found[1])["usage"]["completion_tokens"] <= 12

    params = llm.get_default_sampling_params()
    params.seed, params.max_tokens, params.logprobs, params.ignore_eos = 2, 5, 2, True
    expected = llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0]
    choice = body_of(found[2])["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == expected.text == "".join(logprobs["tokens"])
    assert sum(logprobs["token_logprobs"]) == pytest.approx(expected.cumulative_logprob)
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])

    content = body_of(found[3])["choices"][0]["logprobs"]["content"]
    text = body_of(found[3])["choices"][0]["message"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode().startswith(text)
    for token in content:
        likeliest, next_one = token["top_logprobs"]
        assert likeliest["logprob"] >= next_one["logprob"] and likeliest.keys() == {
            "token", "logprob", "bytes"}
    content = body_of(found[4])["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[]] * len(content)


def schema_of(kind: str) -> dict:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": kind}}}


def test_bad_rows(job):
    good = {"prompt": "12 + 34 =", "temperature": 0}
    bad = [
        (b"{", "Expecting"), (b"\xff\xff", "decode"), (b"[" * 99999, "recursion"), ([], "object"),
        ("text", "object"), (None, "object"), ({}, "url"), ({"custom_id": "a"}, "url"),
        (of_api({}, "/v1/embeddings"), "url"), (of_api({}, ["x"]), "url"), (of_api({}), "prompt"),
        (of_api(None), "body"), (of_api([]), "body"), (of_api(good, method="GET"), "POST"),
        (of_api(good, temperature=1), "nothing else"),
        (good | {"temperatur": 1}, "completions: the nearest is temperature"),
        ({"text": "x"}, '{"messages": …}'), (good | {"max_token": 1}, "nearest is max_tokens"),
        (chat(max_completion_token=1), "nearest is max_completion_tokens"),
        (good | {"temperature": -1}, "temperature"), (good | {"temperature": "1"}, "temperature"),
        (good | {"max_tokens": 0}, "max_tokens"), (good | {"n": 2}, "temperature=0"),
        (good | {"logit_bias": {"x": 1}}, "'x'"), (good | {"logit_bias": [1]}, "list"),
        (good | {"logit_bias": {"99999": 1}}, "vocabulary"), (good | {"stop": 5}, "stop"),
        (good | {"stream": True}, "stream"), (good | {"echo": "x"}, "echo"),
        (good | {"logprobs": True, "echo": 2}, "echo"), (chat(echo=True), "echo"),
        (good | {"suffix": "x"}, "suffix"), (good | {"best_of": 2}, "best_of"),
        (good | {"response_format": {"type": "lark"}}, "response_format"),
        (good | {"response_format": {"type": "json_schema", "json_schema": 5}}, "json_schema"),
        (good | {"response_format": schema_of("foo")}, "response_format: line 1: failed to"),
        (chat(response_format=schema_of("foo")), "response_format: line 1: failed to"),
        (good | {"response_format": schema_of("object"), "structured_outputs": {"regex": "a"}},
         "response_format must be left out"),
        (chat(logprobs=True, top_logprobs=-2), "top_logprobs: logprobs=-2"),
        (chat(max_completion_tokens=0), "max_completion_tokens: max_tokens=0"),
        (good | {"structured_outputs": {"regex": "(("}}, "unclosed group"),
        (good | {"messages": []}, "messages"), (good | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (good | {"max_completion_tokens": 1}, "max_completion_tokens"),
        ({"prompt": ""}, "has 0 tokens"), ({"prompt": []}, "empty"), ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"), ({"prompt": ["a", "b"]}, "one string"),
        ({"prompt": [99999]}, "vocabulary"), ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [5] * 5000}, "max_model_len"), (of_api({}, CHAT), "messages"),
        (of_api({"messages": []}, CHAT), "messages"), (of_api({"messages": "x"}, CHAT), "messages"),
        (of_api({"messages": ["x"]}, CHAT), "messages"), (chat(5), "content"),
        (of_api({"messages": [[], []]}, CHAT), "line"), (chat([{"type": "image_url"}]), "content"),
        (chat(prompt="x"), "prompt"), (chat(logprobs=5), "logprobs"),
        (chat(top_logprobs=2), "top_logprobs"), (chat(logprobs=True, top_logprobs="x"), "logprobs"),
        (chat(chat_template_kwargs=5, reasoning_effort="low"), "chat_template_kwargs=5"),
        (chat(chat_template_kwargs=5), "dict"), (chat(chat_template="{% x %}"), "chat_template"),
        (chat(tool_choice="auto"), "tool_choice"), (chat(continue_final_message=True), "message"),
        (good | {"bad_words": ["\ud800"]}, "line")]
    found = job([row for row, _ in bad] + [good])
    assert found.keys() == set(range(1, len(bad) + 2))
    assert texts({0: found.pop(len(bad) + 1)}) == {0: [" 46"]}
    for number, (row, word) in enumerate(bad, 1):
        record = found[number]
        assert record["error"], (row, record)
        message = record["error"]["message"]
        assert message.startswith(f"line {number}: ") and word in message, (row, message)
        assert record["response"] == {
            "status_code": 400, "request_id": f"batch-line-{number}", "body": None}
        assert record["custom_id"] == (row.get("custom_id") if isinstance(row, dict) else None)
    before = job.target.read_bytes()
    job()
    assert job.target.read_bytes() == before, "an error counts as done"


def test_a_completion_that_fails(job, llm, monkeypatch):
    """As where logits are not finite."""
    step = llm.step

    def change():
        updated = step()
        for request in updated:
            if request.is_finished and request.prompt == "two":
                seq = request.seqs[1]
                seq.finish_reason = "error"
                seq.stop_reason = "request 7: no token"
        return updated

    monkeypatch.setattr(llm, "step", change)
    found = job([{"prompt": "one"}, {"prompt": "two", "n": 2, "custom_id": "b"}])
    assert body_of(found[1])
    assert found[2]["error"] == {"message": "line 2: request 7: no token"}
    assert found[2]["response"]["status_code"] == 500 and found[2]["custom_id"] == "b"


def test_the_exit_status(job, capsys):
    """With --strict, it tells of failed lines, also of those of an earlier start."""
    rows = [{"prompt": "one"}, {"prompt": ""}, b"", {"prompt": "two"}, b"{"]
    job(rows)
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("2 of 4 lines failed: ")
    for _ in range(2):
        with pytest.raises(SystemExit) as found:
            job(None, "--strict")
        *_, again = capsys.readouterr().err.splitlines()
        assert found.value.code == 1 and again == last
    job.target.unlink()
    job([rows[0]], "--strict")
    assert "failed" not in capsys.readouterr().err


# ------------------------------------------------------------------------------- it goes on


def many(count: int = 40) -> list[dict]:
    """Requests of all kinds, without a seed; some lines are blank or bad."""
    draw = random.Random(5)
    rows = []
    for i in range(count):
        kinds = [{"prompt": f"Once {i}", "max_tokens": draw.randrange(1, 40)}, b"",
                 {"prompt": "The fox", "n": 2, "max_tokens": 9}, {"prompt": ""},
                 chat("Tell me a story about a cat.", max_tokens=draw.randrange(1, 40))]
        rows.append(draw.choice(kinds))
    return rows


def numbers(rows: list) -> set[int]:
    return {number for number, row in enumerate(rows, 1) if row != b""}


def test_a_job_that_is_stopped_goes_on(job, batch, monkeypatch, capsys):
    rows = many()
    expected = without_times(job(rows))
    assert expected.keys() == numbers(rows)
    bytes_before = job.target.read_bytes()
    job()
    assert job.target.read_bytes() == bytes_before
    capsys.readouterr()

    # the first line, a torn one in any place, and lines of the middle
    lines = bytes_before.splitlines(keepends=True)
    draw = random.Random(3)
    for length in (0, 1, 5, len(batch.BEGIN_OF_RESULT), 20, len(lines[-1]) - 1):
        kept = draw.sample(lines[:-1], draw.randrange(len(lines)))
        job.target.write_bytes(b"".join(kept) + lines[-1][:length])
        assert without_times(job()) == expected
        assert job.target.read_bytes().startswith(b"".join(kept)), "nothing is written anew"
        assert f"{len(kept)}/{len(expected)}" in capsys.readouterr().err, "the bar begins there"


ROWS = [of_api({"prompt": f"Once {number}", "max_tokens": 9}, custom_id=f"r{number}")
        for number in range(12)]
OTHER = of_api({"prompt": "The fox", "max_tokens": 9}, custom_id="other")
LINES = b"".join(map(as_line, ROWS))


def edited(place: int, **body) -> list[dict]:
    """The rows with another body under the same custom_id."""
    rows = ROWS.copy()
    rows[place] = rows[place] | {"body": rows[place]["body"] | body}
    return rows


@pytest.fixture
def half_done(job, batch, bundled, monkeypatch):
    """Most of the lines have a result, and the last one is torn. No model can be loaded."""
    job(ROWS)
    lines = job.target.read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if b'"line-3"' not in line and b'"line-9"' not in line]
    job.target.write_bytes(b"".join(lines)[:-30])
    loads = batch.LLM
    monkeypatch.setattr(batch, "LLM", None)
    job.allow = lambda: monkeypatch.setattr(batch, "LLM", loads)
    return job


@pytest.mark.parametrize("rows", [
    [OTHER, *ROWS], [*ROWS[:5], OTHER, *ROWS[5:]], ROWS[1:], [*ROWS[:7], *ROWS[8:]], ROWS[:4], [],
    [*ROWS[:2], ROWS[4], ROWS[3], ROWS[2], *ROWS[5:]], ROWS[::-1], [OTHER] * 12, [b"", *ROWS],
    [*ROWS[:6], ROWS[5], *ROWS[6:]], [*ROWS[:6], b"bad", *ROWS[7:]],
    edited(1, prompt="Once 1!"), edited(1, max_tokens=8), edited(1, temperature=0),
    edited(1, seed=2)])
def test_an_edited_input_is_refused(half_done, rows):
    """Before anything is written, and before the model is loaded."""
    before = half_done.target.read_bytes()
    with pytest.raises(SystemExit, match=r"results.jsonl, line \d+ is not the result of line \d+"):
        half_done(rows)
    assert half_done.target.read_bytes() == before


@pytest.mark.parametrize("data, rows", [
    (LINES, ROWS), (LINES + as_line(OTHER) * 2, [*ROWS, OTHER, OTHER]), (LINES[:-1], ROWS),
    (LINES.replace(b"\n", b"\r\n"), ROWS), (b"\xef\xbb\xbf" + LINES, ROWS),
    (LINES + b"\n  \n", ROWS),
    # edited where there is no result yet
    (LINES.replace(b"Once 2", b"The fox"), edited(2, prompt="The fox"))])
def test_an_input_with_more_lines_goes_on(half_done, data, rows):
    half_done.allow()
    half_done.source.write_bytes(data)
    found = without_times(half_done())
    half_done.target.unlink()
    assert found == without_times(half_done(rows))
    assert found.keys() == {*range(1, len(rows) + 1)}


def test_another_model_is_refused(half_done):
    with pytest.raises(SystemExit, match="the model has changed"):
        half_done(None, "--model", "other")


def test_equal_lines_are_different_requests(job):
    """Also with the same custom_id."""
    rows = [{"prompt": "Once", "max_tokens": 20, "custom_id": "a"}] * 5
    expected = without_times(job(rows))
    assert expected.keys() == {1, 2, 3, 4, 5} and len({*map(str, texts(expected).values())}) > 1
    for kept in ([1, 3], [4]):
        lines = job.target.read_bytes().splitlines(keepends=True)
        job.target.write_bytes(b"".join(lines[number - 1] for number in kept))
        assert without_times(job()) == expected


@pytest.mark.parametrize("change, message", [
    (lambda data: data + as_line(OTHER), "grew during the job"),
    (lambda data: data[:-1] + b"\n\n" + as_line(OTHER)[:9], "grew during the job"),
    (lambda data: data.replace(b"Once 11", b"Once 12"), "line 45 changed during"),
    (lambda data: data[:len(data) // 2], r"line \d+ changed during")])
def test_an_input_that_changes_while_the_job_runs(job, llm, monkeypatch, change, message):
    """The model runs eight of the twelve lines at once, and four wait for the window."""
    step = llm.step
    rows = [row for row in ROWS for _ in range(4)]
    job.source.write_bytes(b"".join(map(as_line, rows)))

    def changing():
        monkeypatch.setattr(llm, "step", step)
        # in place: the job keeps the file open
        job.source.write_bytes(change(job.source.read_bytes()))
        return step()

    monkeypatch.setattr(llm, "step", changing)
    with pytest.raises(SystemExit, match=f"requests.jsonl.* {message}.*The same command"):
        job()
    assert not llm.active
    if "grew" in message:
        assert results(job.target).keys() == {*range(1, 49)}
        job()
    else:
        assert 0 < len(results(job.target)) < 48
        job(rows)
    again = without_times(results(job.target))
    job.target.unlink()
    assert again == without_times(job())


def test_interrupted(job, llm, monkeypatch):
    rows = many(120)
    add = llm.add
    for limit in (18, 25, 17):
        calls = []

        def interrupt(*arguments, calls=calls, limit=limit):
            calls.append(arguments)
            if len(calls) > limit:
                raise KeyboardInterrupt
            return add(*arguments)

        monkeypatch.setattr(llm, "add", interrupt)
        with pytest.raises(SystemExit, match="run the same command"):
            job(rows)
    monkeypatch.setattr(llm, "add", add)
    stopped = without_times(job(rows))
    job.target.unlink()
    assert stopped == without_times(job(rows))


def test_a_full_disk(job, batch, monkeypatch):
    """The limit on the size of files: a write takes what is left, the next one none."""
    # the limit holds for captured output, too
    monkeypatch.setattr(batch, "tqdm", functools.partial(batch.tqdm, file=io.StringIO()))
    rows = many()
    expected = without_times(job(rows))
    size = job.target.stat().st_size
    job.target.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, size // 3, size // 2 + 7, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(SystemExit, match="File too large.*results.jsonl"):
                job()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert job.target.stat().st_size == limit, "it is torn"
    assert without_times(job()) == expected


def test_files_that_cannot_be_used(job, batch, bundled, tmp_path, capsys):
    job.source.write_bytes(as_line({"prompt": "one"})[:-1])
    with pytest.raises(SystemExit, match="not a result of this job"):
        batch.main(["--model", bundled, "-i", str(job.source), "-o", str(job.source)])
    assert job.source.read_bytes() == as_line({"prompt": "one"})[:-1], "it is as it was"
    for source in (tmp_path / "none", tmp_path):
        with pytest.raises(SystemExit):
            batch.main(["--model", bundled, "-i", str(source), "-o", str(job.target)])
        assert "is not accepted: it must be a file that exists" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        batch.main(["--model", bundled, "-i", str(job.source), "-o", "/dev/full"])
    assert "/dev/full is not a file" in capsys.readouterr().err
    # as for the files of the benchmark
    with pytest.raises(SystemExit):
        batch.main(["--model", bundled, "-i", str(job.source), "-o", str(tmp_path / "none" / "a")])
    assert "none/a' is not accepted: it must be a file, in a folder" in capsys.readouterr().err
    with job.target.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another job is writing"):
            job()
    assert texts(job()).keys() == {1}, "a last line without its end is a line"


# starts a job for each line that it reads, as a process with all its imports
STARTER = """
import os, sys
from nanoengine_extras.tools import batch
import transformers.models.auto
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        batch.main(sys.argv[1:])
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_killed(tmp_path, bundled):
    """kill -9, three times, at random moments after the first new result."""
    rows = many(200)
    source = tmp_path / "requests.jsonl"
    target = tmp_path / "results.jsonl"
    source.write_bytes(b"".join(map(as_line, rows)))
    target.touch()
    sizes = [0]
    with subprocess.Popen(
            [sys.executable, "-c", STARTER, "--model", bundled, "-i", source, "-o", target,
             "--options", '{"max_num_seqs": 8}'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as starter:
        for kill in (True, True, True, False):
            starter.stdin.write("\n")
            pid = int(starter.stdout.readline())
            if kill:
                deadline = time.monotonic() + 60
                while target.stat().st_size <= sizes[-1] and time.monotonic() < deadline:
                    time.sleep(0.002)
                time.sleep(random.uniform(0, 0.05))
                os.kill(pid, signal.SIGKILL)
            assert int(starter.stdout.readline()) == -signal.SIGKILL * kill
            sizes.append(target.stat().st_size)
        starter.stdin.close()
    assert sizes == sorted(set(sizes)), "each time it has gone on"
    assert results(target).keys() == numbers(rows)


# ---------------------------------------------------------------------------------- its size


def test_the_window_is_constant(job, batch, llm, monkeypatch):
    rows = [{"prompt": [5 + i % 50], "max_tokens": 1} for i in range(2000)]
    rows[0] = {"prompt": [5], "max_tokens": 200, "ignore_eos": True}
    rows[1::10] = [b""] * 200
    rows[2::10] = [b"bad"] * 200
    most = []
    add = llm.add
    monkeypatch.setattr(llm, "add", lambda *arguments: (
        most.append(len(llm.active)) or add(*arguments)))
    found = job(rows)
    assert found.keys() == numbers(rows)
    assert max(most) < 2 * llm.config.max_num_seqs == 16
    assert sorted(most)[len(most) // 2] >= 8, "the engine is full"


HASHES = [11, 22, 33, 44, 55]


def result(number: object, line_hash: object = None, **changes: object) -> str:
    if line_hash is None:
        line_hash = f"{HASHES[int(number) - 1]:x}"
    record = {"id": f"line-{number}", "response": {"body": {"x": 1}}, "error": None,
              "line_hash": line_hash}
    return json.dumps(record | changes) + "\n"


@pytest.mark.parametrize("line", [
    result(2)[:20] + result(3), result(2)[:-1] + result(3), result("x", "b"), result("", "b"),
    result(2, 22), result(2, "x"), result(2, []), '{"id": "line-2"}\n',
    '{"id": "line-\n', '{"id": "line-2", "error": null}\n', '{"id": "line-2"\n'])
def test_a_result_that_is_damaged_is_named(batch, tmp_path, line):
    """It does not count as done: a part of it, or of the one behind it, is missing."""
    check_refused(batch, tmp_path, result(1) + line + result(4),
                  "results, line 2 is damaged .*computes what was")
    assert drop_finished(batch, tmp_path, result(1) + result(4)) == (2, 0, [0, 22, 33, 0, 55])


@pytest.mark.parametrize("line", [
    result(2, "21"), result(2)[:20] + result(3)[20:], result(0, "b"), result(-4, "16"),
    result(6, "b"), result(10**20, "0"), result(1), result(3, "0")])
def test_a_result_of_something_else_is_named(batch, tmp_path, line):
    check_refused(batch, tmp_path, result(1) + line + result(4),
                  "line 2 is not the result of line .*requests: one")


def test_all_results_of_edited_lines_are_named(batch, tmp_path):
    """So that they can be deleted at once, and the others be kept."""
    content = result(1) + result(2, "b") + result(3) + result(4, "16") + result(5)
    check_refused(batch, tmp_path, content, "line 2 is not .*delete all 2 such lines .*: 2, 4$")


def drop_finished(batch, folder: Path, content: str) -> tuple[int, int, list[int]]:
    target = folder / "results"
    target.write_text(content)
    hashes = array("Q", HASHES)
    return *batch.drop_finished(hashes, folder / "requests", target), [*hashes]


def check_refused(batch, folder: Path, content: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        drop_finished(batch, folder, content)
    assert (folder / "results").read_text() == content, "it is as it was"


def test_eight_bytes_for_a_line(batch, job):
    """Whatever lines are blank, and though requests finish out of order."""
    lines = [b"x\n" if number % 3 else b"\n" for number in range(20000)]
    job.source.write_bytes(b"".join(lines))
    kept = [number for number, line in enumerate(lines, 1) if line.strip()]
    draw = random.Random(0)
    finished = sorted(kept[:-50], key=lambda number: number + draw.uniform(0, 100))
    missing = [finished.pop(), finished.pop(-20)]
    with job.source.open("rb") as file:
        hashes = array("Q", (batch.hash_of(*each, "m") for each in enumerate(file, 1)))
        assert [bool(each) for each in hashes] == [line != b"\n" for line in lines]
        assert len({*hashes} - {0}) == len(kept), "equal lines differ by their numbers"
        job.target.write_text(
            "".join(result(number, f"{hashes[number - 1]:x}") for number in finished))
        assert batch.drop_finished(hashes, job.source, job.target) == (len(finished), 0)
        rest = [*batch.unfinished(file, hashes, "m")]
    assert [number for number, _, _ in rest] == sorted(missing + kept[-50:])
    assert hashes.itemsize == 8


# ------------------------------------------------------------------------------- odd characters


def test_lines_end_at_newlines_alone(job):
    """A byte order mark, Windows' newlines, blank lines, and what only Python calls a newline."""
    texts_of_prompts = ["one\u2028two", "three\x0cfour", "five\x85six", "sev\x1cen", "nine\rten"]
    lines = [json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
             for text in texts_of_prompts[:-1]]
    lines += [json.dumps({"prompt": texts_of_prompts[-1], "max_tokens": 1}).encode()]
    job.source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", *lines[1:]]))
    assert job().keys() == {1, 3, 4, 5, 6}
    job.target.unlink()
    job.source.write_bytes(b"\xef\xbb\xbf\r\n" + lines[0])
    assert job().keys() == {2}, "a blank first line with a byte order mark"


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity"])
def test_results_are_json_whatever_comes_in(job, number):
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    lines = [b'{"custom_id": %s, "prompt": "a"}', b'{"custom_id": {"x": [%s]}, "prompt": "a"}',
             b'{"custom_id": "a", "prompt": "a", "metadata": {"x": %s}}']
    found = job([line % number for line in lines] + [{"custom_id": 1.5, "prompt": "a"}])
    assert [found[i]["custom_id"] for i in found] == [None, None, None, 1.5]
    assert all(number.decode() in found[i]["error"]["message"] for i in (1, 2, 3))
    for line in job.target.read_text().split("\n")[:-1]:
        json.loads(line, parse_constant=refuse)


def test_tokens_with_the_same_text_are_different_entries(job, llm):
    """The likeliest one has the text as its name; the others have their number."""
    found = job([{"prompt": "日", "logprobs": -1, "max_tokens": 2, "ignore_eos": True},
                 {"prompt": "Once", "logprobs": 20, "max_tokens": 2, "temperature": 0},
                 chat(logprobs=True, top_logprobs=20, max_tokens=2)])
    vocab_size = llm.model_config.vocab_size
    for number, count in ((1, vocab_size), (2, 20)):
        logprobs = body_of(found[number])["choices"][0]["logprobs"]
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"]):
            assert len(top) == count and value in top.values()
            assert [*top.values()] == sorted(top.values(), reverse=True)
    top, *_ = body_of(found[1])["choices"][0]["logprobs"]["top_logprobs"]
    named = [name for name in top if name.startswith("token_id:")]
    assert 100 < len(named) < vocab_size - 100, "halves have no text"
    for entry in body_of(found[3])["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        for each in entry["top_logprobs"]:
            assert each.keys() == {"token", "logprob", "bytes"}
            assert bytes(each["bytes"]).decode() == each["token"]


def test_an_echo(job):
    found = job([{"prompt": "12 + 34 =", "echo": True, "max_tokens": 0, "logprobs": 0},
                 {"prompt": "12 + 34 =", "echo": True, "temperature": 0}])
    assert texts(found) == {1: ["12 + 34 ="], 2: ["12 + 34 = 46"]}
    assert body_of(found[1])["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert body_of(found[1])["usage"]["completion_tokens"] == 0


def test_faults_of_a_user_are_one_sentence(batch, bundled, tmp_path, capsys):
    source = tmp_path / "requests.jsonl"
    source.write_bytes(as_line({"prompt": "one"}))
    files = ["-i", str(source), "-o", str(tmp_path / "results.jsonl")]
    for flags, message in [
            ([*files], "--model"), (["--model", bundled], "-i"),
            ([*files, "--model", bundled, "--options", "[5]"], "--options: JSON"),
            ([*files, "--model", bundled, "--options", '{"dtyp": 1}'], "nearest is dtype"),
            ([*files, "--model", str(tmp_path)], "config.json")]:
        with pytest.raises(SystemExit, match="2"):
            batch.main(flags)
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("python -m nanoengine batch: error: ") and message in last
        assert not (tmp_path / "results.jsonl").exists() or not results(tmp_path / "results.jsonl")


def test_tool_calls_in_openais_format(job, llm, batch, monkeypatch):
    seen = []
    add = llm.add
    monkeypatch.setattr(llm, "add", lambda prompts, params: (
        seen.append(prompts[0]["prompt"]) or add(prompts, params)))
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    for arguments in ('{"city": "Oslo"}', "", '{"city"'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"},
                    {"role": "assistant", "content": None, "tool_calls": [call]}]
        record = job([of_api({"messages": messages, "chat_template": template}, CHAT)])[1]
        job.target.unlink()
    assert seen == ['{"city": "Oslo"}', "{}"] and "tool_calls=" in record["error"]["message"]


@pytest.mark.needs("tools.tool_calls")
def test_calls_of_tools_in_answers(job):
    """With the flag, and only where tools can be called."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = {"structured_outputs": {"choice": [call]}}
    rows = [chat(**asked, tools=tools), chat(**asked, tools=tools, tool_choice="none"),
            chat(**asked)]
    first, *others = (body_of(record)["choices"][0]
                      for _, record in sorted(job(rows, "--tool-call-parser", "hermes").items()))
    found, = first["message"]["tool_calls"]
    assert found["id"] == "call_line-1_0_0" and first["finish_reason"] == "tool_calls"
    assert json.loads(found["function"]["arguments"]) == {"city": "Rome"}
    assert [each["message"]["content"] for each in others] == [call, call]
    job.target.unlink()
    plain = body_of(job(rows)[1])["choices"][0]
    assert plain["message"]["content"] == call and plain["finish_reason"] == "stop"
