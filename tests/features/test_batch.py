"""A batch job: every request ends up in the results exactly once, whatever happens."""

import fcntl
import functools
import io
import json
import os
import random
import resource
import subprocess
import sys
import time
from array import array
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
from conftest import ROOT, check_fault

from nanoengine_extras.tools import batch
from nanoengine_extras.tools.openai_format import CHAT, COMPLETION

pytestmark = pytest.mark.needs(
    "tools.chat", "sampling.constraints", "models.generation_config", "sampling.logits_processors",
    "sampling.logprobs", "running.metrics", "running.strict", "sampling.structured_outputs",
    "sampling.texts")


@pytest.fixture
def job(bundled, llm, tmp_path, monkeypatch):
    """Runs a job on lines, with a model that is loaded already; returns its results by line."""
    monkeypatch.setattr(batch, "LLM", lambda model, **options: nullcontext(llm))
    source = tmp_path / "requests.jsonl"
    target = tmp_path / "results.jsonl"

    def run(lines: list | None = None, *flags: str, anew: bool = False) -> dict[int, dict]:
        if anew:
            target.unlink()
        if lines is not None:
            source.write_bytes(b"".join(map(as_line, lines)))
        batch.main(["--model", bundled, "-i", str(source), "-o", str(target), *flags])
        return results(target)

    run.source, run.target = source, target
    return run


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


def test_the_answers_are_those_of_openais_format(job, llm, bundled):
    """In each form of a request, whose number is its seed. test_openai_format.py has the rest."""
    short = {"messages": [{"role": "user", "content": "12 + 34"}], "max_tokens": 5}
    ids = llm.get_tokenizer().encode("47 + 85 =")
    rows = [chat(max_tokens=5, model="gpt-4o-mini", stream=False, seed=None), b"",
            of_api({"prompt": "Once"}, custom_id=None), {"prompt": ids, "custom_id": "mine"},
            of_api({"prompt": ["Once"], "logprobs": 2}), short, short | {"seed": 99},
            {"prompt": "Once", "seed": -1, "n": 2}]
    found = job(rows)
    assert found.keys() == numbers(rows)
    for number, record in found.items():
        row = rows[number - 1]
        given = row.get("body", row)
        url = CHAT if "messages" in given else COMPLETION
        body = batch.openai.Body(url, f"line-{number}")
        seed = 99 if number == 7 else number
        asked = {name: given[name] for name in given if name != "custom_id"}
        body.read(asked | {"seed": seed}, llm)
        outputs = llm.generate(body.prompts, body.params, use_tqdm=False)
        expected = body.response(outputs, bundled)
        assert abs(body_of(record)["created"] - expected["created"]) < 60
        assert body_of(record) | {"created": 0} == expected | {"created": 0}
        assert record["custom_id"] == row.get("custom_id")
        assert record["response"]["request_id"] == f"batch-line-{number}"


def test_bad_rows(job):
    good = {"prompt": "12 + 34 =", "temperature": 0}
    bad = [
        (b"{", "Expecting"), (b"\xff\xff", "decode"), (b"[" * 99999, "recursion"), ([], "object"),
        ("text", "object"), (None, "object"), ({}, "url"), ({"custom_id": "a"}, "url"),
        (of_api({}, "/v1/embeddings"), "url"), (of_api({}, ["x"]), "url"), (of_api({}), "prompt"),
        (of_api(None), "body"), (of_api([]), "body"), (of_api(good, method="GET"), "POST"),
        (of_api(good, temperature=1), "nothing else"), ({"text": "x"}, '{"messages": …}'),
        (good | {"temperatur": 1}, "nearest is temperature"), (chat(echo=True), "echo"),
        (good | {"stream": True}, "stream"), ({"prompt": ["a", "b"]}, "one string"),
        ({"prompt": "\ud800"}, "prompt"), ({"prompt": [5] * 5000}, "max_model_len")]
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
    job([rows[0]], "--strict", anew=True)
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


def test_a_job_that_is_stopped_goes_on(job, capsys):
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
    row = ROWS[place] | {"body": ROWS[place]["body"] | body}
    return [*ROWS[:place], row, *ROWS[place + 1:]]


@pytest.fixture
def half_done(job):
    """Most of the lines have a result, and the last one is torn."""
    job(ROWS)
    lines = job.target.read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if b'"line-3"' not in line and b'"line-9"' not in line]
    job.target.write_bytes(b"".join(lines)[:-30])
    return job


@pytest.mark.parametrize("rows", [
    [OTHER, *ROWS], [*ROWS[:5], OTHER, *ROWS[5:]], ROWS[1:], [*ROWS[:7], *ROWS[8:]], ROWS[:4], [],
    [*ROWS[:2], ROWS[4], ROWS[3], ROWS[2], *ROWS[5:]], ROWS[::-1], [OTHER] * 12, [b"", *ROWS],
    [*ROWS[:6], ROWS[5], *ROWS[6:]], [*ROWS[:6], b"bad", *ROWS[7:]],
    edited(1, prompt="Once 1!"), edited(1, max_tokens=8), edited(1, temperature=0),
    edited(1, seed=2)])
def test_an_edited_input_is_refused(half_done, monkeypatch, rows):
    """Before anything is written, and before the model is loaded."""
    monkeypatch.setattr(batch, "LLM", None)
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
    half_done.source.write_bytes(data)
    found = without_times(half_done())
    assert found == without_times(half_done(rows, anew=True))
    assert found.keys() == {*range(1, len(rows) + 1)}


def test_another_model_is_refused(half_done, monkeypatch):
    monkeypatch.setattr(batch, "LLM", None)
    with pytest.raises(SystemExit, match="the model has changed"):
        half_done(None, "--model", "other")


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
    has_grown = "grew" in message
    count = len(results(job.target))
    assert count == 48 if has_grown else 0 < count < 48
    again = without_times(job(None if has_grown else rows))
    assert again == without_times(job(anew=True))


def test_interrupted(job, llm, monkeypatch):
    rows = many(120)
    add = llm.add
    for limit in (18, 25, 17):
        effects = [DEFAULT] * limit + [KeyboardInterrupt]
        monkeypatch.setattr(llm, "add", Mock(wraps=add, side_effect=effects))
        with pytest.raises(SystemExit, match="run the same command"):
            job(rows)
    monkeypatch.setattr(llm, "add", add)
    assert without_times(job(rows)) == without_times(job(anew=True))


def test_a_full_disk(job, monkeypatch):
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


def test_files_that_cannot_be_used(job, bundled, capsys):
    job.source.write_bytes(as_line({"prompt": "one"})[:-1])
    folder = job.source.parent
    file = "is not accepted: it must be a file"
    for source, target, message in [
            (job.source, job.source, "not a result of this job"),
            (folder / "none", job.target, f"{file} that exists"),
            (folder, job.target, f"{file} that exists"),
            (job.source, "/dev/full", "/dev/full is not a file"),
            (job.source, folder / "none" / "a", f"{file}, in a folder")]:
        with pytest.raises(SystemExit) as found:
            batch.main(["--model", bundled, "-i", str(source), "-o", str(target)])
        assert message in f"{found.value} {capsys.readouterr().err}"
    assert job.source.read_bytes() == as_line({"prompt": "one"})[:-1], "it is as it was"
    with job.target.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another job is writing"):
            job()
    assert texts(job()).keys() == {1}, "a last line without its end is a line"


@pytest.mark.slow
def test_killed(job, bundled):
    """kill -9, after the first new result."""
    rows = many(200)
    job.source.write_bytes(b"".join(map(as_line, rows)))
    job.target.touch()
    sizes = [0]
    for _ in range(2):
        with subprocess.Popen(
                [sys.executable, "-m", "nanoengine", "batch", "--model", bundled, "-i", job.source,
                 "-o", job.target, "--max-num-seqs", "8"],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as process:
            while job.target.stat().st_size <= sizes[-1] and process.poll() is None:
                time.sleep(0.002)
            time.sleep(random.uniform(0, 0.05))
            process.kill()
        sizes.append(job.target.stat().st_size)
    assert sizes == sorted(set(sizes)), "each time it has gone on"
    assert job().keys() == numbers(rows)


# ---------------------------------------------------------------------------------- its size


def test_the_window_is_constant(job, llm, monkeypatch):
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


DAMAGED = "results, line 2 is damaged .*computes what was"
OTHER_LINE = "line 2 is not the result of line .*requests: one"


@pytest.mark.parametrize("line, message", [
    # it does not count as done: a part of it, or of the one behind it, is missing
    *((line, DAMAGED) for line in (
        result(2)[:20] + result(3), result(2)[:-1] + result(3), result("x", "b"), result("", "b"),
        result(2, 22), result(2, "x"), result(2, []), '{"id": "line-2"}\n',
        '{"id": "line-\n', '{"id": "line-2", "error": null}\n', '{"id": "line-2"\n')),
    # it belongs to something else
    *((line, OTHER_LINE) for line in (
        result(2, "21"), result(2)[:20] + result(3)[20:], result(0, "b"), result(-4, "16"),
        result(6, "b"), result(10**20, "0"), result(1), result(3, "0"))),
    # all are named, so that they can be deleted at once, and the others be kept
    (result(2, "b") + result(3) + result(5, "16"),
     "line 2 is not .*delete all 2 such lines .*: 2, 4$")])
def test_a_wrong_result_is_named(tmp_path, line, message):
    content = result(1) + line + result(4)
    with pytest.raises(SystemExit, match=message):
        drop_finished(tmp_path, content)
    assert (tmp_path / "results").read_text() == content, "it is as it was"
    assert drop_finished(tmp_path, result(1) + result(4)) == (2, 0, [0, 22, 33, 0, 55])


def drop_finished(folder: Path, content: str) -> tuple[int, int, list[int]]:
    target = folder / "results"
    target.write_text(content)
    hashes = array("Q", HASHES)
    return *batch.drop_finished(hashes, folder / "requests", target), [*hashes]


def test_eight_bytes_for_a_line(job):
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
    prompts = ["one\u2028two", "three\x0cfour", "five\x85six", "sev\x1cen", "nine\rten"]
    lines = [json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
             for text in prompts]
    job.source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", *lines[1:]]))
    assert job().keys() == {1, 3, 4, 5, 6}
    job.source.write_bytes(b"\xef\xbb\xbf\r\n" + lines[0])
    assert job(anew=True).keys() == {2}, "a blank first line with a byte order mark"


def test_faults_of_a_user_are_one_sentence(bundled, tmp_path, capsys):
    source = tmp_path / "requests.jsonl"
    source.write_bytes(as_line({"prompt": "one"}))
    files = ["-i", str(source), "-o", str(tmp_path / "results.jsonl")]
    for flags, message in [
            (files, "--model"), (["--model", bundled], "-i"),
            ([*files, "--model", bundled, "--options", '{"dtyp": 1}'], "nearest is dtype"),
            ([*files, "--model", str(tmp_path)], "config.json")]:
        check_fault(capsys, batch.main, "batch", flags, message)
        assert not (tmp_path / "results.jsonl").exists() or not results(tmp_path / "results.jsonl")


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
    plain = body_of(job(anew=True)[1])["choices"][0]
    assert plain["message"]["content"] == call and plain["finish_reason"] == "stop"
