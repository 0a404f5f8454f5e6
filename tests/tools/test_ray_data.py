"""docs/examples/ray_data.py: every row comes out once, with the tokens that it has alone."""

import contextlib
import json
import re
import subprocess
import time

import psutil
import pytest
from test_recipes import example

from nanoengine import SamplingParams

pytest.importorskip("ray")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_data():
    return example("ray_data")


@pytest.fixture
def replica(ray_data, bundled, llm, monkeypatch):
    """Makes a replica in this process, without Ray, with a model that is loaded already."""
    monkeypatch.setattr(ray_data, "LLM", lambda model, **options: llm)
    return lambda output_format="jsonl", **sampling: ray_data.Replica(
        bundled, {}, sampling, output_format)


def table_of(rows: list) -> pyarrow.Table:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return pyarrow.table({"line": pyarrow.array(lines, pyarrow.binary())})


def rows_of(table: pyarrow.Table) -> list[dict]:
    return [json.loads(line) for line in table["line"].to_pylist()]


def chat(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


# ----------------------------------------------------------------------------- a replica alone


def test_prompts_and_conversations(replica, llm):
    ids = llm.get_tokenizer().encode("47 + 85 =")
    rows = [{"id": 1.5, "prompt": "47 + 85 =", "x": {"y": None}}, {"id": "a", "prompt": ids},
            {"messages": chat("12 + 34"), "prompt": None},
            {"messages": chat("12 + 34"), "sampling_params": {"max_tokens": 1, "stop": None}}]
    found = rows_of(replica(temperature=0)(table_of(rows)))
    assert [row["generated_text"] for row in found] == [" 132", " 132", "46", "4"]
    assert [row["finish_reason"] for row in found] == ["stop", "stop", "stop", "length"]
    for row, result in zip(rows, found):
        assert row.items() <= result.items(), "its columns are as they were"
        assert result["error"] is None
        assert result["num_generated_tokens"] == len(result["generated_tokens"])
    assert found[0]["num_input_tokens"] == found[1]["num_input_tokens"] == len(ids)


def test_parameters(replica, llm, monkeypatch):
    """What reaches the engine."""
    seen = []
    stream = llm.stream
    monkeypatch.setattr(llm, "stream", lambda prompts, params: (
        seen.append(params) or stream(prompts, params)))
    everything = dict(
        temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=4, max_tokens=3, min_tokens=1,
        stop=["x"], stop_token_ids=[9], ignore_eos=True, presence_penalty=0.1,
        repetition_penalty=1.1, bad_words=["y"], allowed_token_ids=[5, 6, 7])
    rows = [everything | {"logit_bias": {"5": 1.5}}, {}, {"max_tokens": 2, "seed": None}]
    replica(max_tokens=5, temperature=0.7)(table_of(
        [{"prompt": "Once", "sampling_params": row} for row in rows]))
    assert seen[0] == SamplingParams(**everything, logit_bias={5: 1.5})
    assert [params.max_tokens for params in seen] == [3, 5, 2]
    assert [params.temperature for params in seen] == [0.5, 0.7, 0.7]
    assert seen[1].top_k == 50, "of generation_config.json"
    assert seen[1].seed != seen[2].seed


def test_a_seed_is_made_of_the_row(replica):
    rows = [{"id": i, "prompt": "Once upon"} for i in range(4)]
    first = [row["generated_text"] for row in rows_of(replica(temperature=2)(table_of(rows)))]
    assert len(set(first)) == 4, "the id counts"
    rows = [{"x": None, "prompt": "Once upon", "id": i} for i in (3, 2, 1, 0)]
    again = [row["generated_text"] for row in rows_of(replica(temperature=2)(table_of(rows)))]
    assert again == first[::-1], "the order and nulls do not"


BAD = [(b"{", "prompt"), (b"\xff", "prompt"), (b"[" * 99999, "prompt"), ([], "prompt"),
       ({}, "prompt"), ({"prompt": "a", "messages": chat("a")}, "either"),
       ({"prompt": 5}, "prompt"), ({"prompt": ""}, "empty"), ({"prompt": ["a"]}, "vocabulary"),
       ({"prompt": [99999]}, "vocabulary"), ({"prompt": [5] * 5000}, "max_model_len"),
       ({"prompt": "\ud800"}, "prompt"), ({"messages": "x"}, "messages"),
       ({"messages": []}, "messages"), ({"messages": [5]}, "messages"),
       ({"messages": chat("a"), "chat_template_kwargs": 5}, "row"),
       ({"prompt": "a", "sampling_params": 5}, "row"),
       ({"prompt": "a", "sampling_params": {"temperature": "x"}}, "temperature"),
       ({"prompt": "a", "sampling_params": {"temperatur": 1}}, "temperatur"),
       ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "row"),
       ({"prompt": "a", "sampling_params": {"n": 2}}, "n has no column")]


def test_bad_rows(replica):
    good = {"prompt": "12 + 34 =", "id": 7}
    found = rows_of(replica(temperature=0)(table_of([row for row, _ in BAD] + [good])))
    assert found[-1]["generated_text"] == " 46" and found[-1]["id"] == 7
    for (row, word), result in zip(BAD, found):
        assert word in (result["error"] or ""), (row, result)
        assert result["generated_text"] is result["num_generated_tokens"] is None
    assert found[0]["line"] == "{"


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-Infinity"])
def test_results_are_json_whatever_comes_in(replica, number):
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    table = replica()(table_of([b'{"id": %s, "prompt": "a"}' % number]))
    (row,) = [json.loads(line, parse_constant=refuse) for line in table["line"].to_pylist()]
    assert number.decode() in row["line"] and "prompt or messages" in row["error"]
    # columns of Parquet can hold such numbers
    columns = pyarrow.table({"prompt": ["a"], "x": [float(number)], "y": [[1.5, float(number)]]})
    table = replica(max_tokens=1)(columns)
    (row,) = [json.loads(line, parse_constant=refuse) for line in table["line"].to_pylist()]
    assert (row["x"], row["y"], row["error"]) == (None, [1.5, None], None)


def test_a_completion_that_fails(replica, llm, monkeypatch):
    """As where logits are not finite."""
    stream = llm.stream

    def change(outputs):
        for output in outputs:
            if output.finished and output.prompt == "two":
                output.outputs[0].finish_reason = "error"
                output.outputs[0].stop_reason = "request 7: no token"
            yield output

    monkeypatch.setattr(llm, "stream", lambda *arguments: change(stream(*arguments)))
    found = rows_of(replica()(table_of([{"prompt": "one"}, {"prompt": "two"}])))
    assert [row["error"] for row in found] == [None, "request 7: no token"]


def test_columns_of_parquet(replica, ray_data):
    """All of them, with their types; nulls of other rows' objects are no parameters."""
    batch = pyarrow.table({
        "when": pyarrow.array([5, None, 7], pyarrow.timestamp("us")), "error": [1, 2, 3],
        "prompt": ["12 + 34 =", None, "47 + 85 ="],
        "sampling_params": [{"max_tokens": 1}, None, {"stop": ["3"]}]})
    found = replica("parquet", temperature=0)(batch)
    assert found.select(["when", "prompt", "sampling_params"]) == batch.drop_columns(["error"])
    assert found.schema.names == ["when", "prompt", "sampling_params", *ray_data.RESULT.names]
    assert found.select(ray_data.RESULT.names).schema == ray_data.RESULT
    assert found["generated_text"].to_pylist() == [" ", None, " 1"]
    assert [bool(error) for error in found["error"].to_pylist()] == [False, True, False]
    lines = rows_of(replica(temperature=0)(batch))
    assert lines[0]["when"].startswith("1970") and lines[2]["generated_text"] == " 1"


# ------------------------------------------------------------------------------- with Ray


def replicas(job: subprocess.Popen) -> set[psutil.Process]:
    found = set()
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == ["ray::MapWorker(MapBatches(Replica))"]:
                found.add(process)
    return found


def test_a_replica_is_killed(ray_job, replica, tmp_path):
    """One of two replicas is killed, just after its engine has started."""
    rows = [{"id": i, "prompt": f"Once upon a time {i}",
             "sampling_params": {"max_tokens": 50 + i % 50, "ignore_eos": True}}
            for i in range(80)]
    rows += [{"id": 80, "prompt": 5}, {"id": 81, "messages": chat("12 + 34")}]
    source = tmp_path / "in"
    target = tmp_path / "out"
    source.mkdir()
    for name, part in (("a.jsonl", rows[:45]), ("b.json", rows[45:])):
        (source / name).write_bytes(b"\n".join(table_of(part)["line"].to_pylist()) + b"\n\n")
    (source / "notes.txt").write_text("no rows")
    job = ray_job("-i", source, "-o", target, "--replicas", 2, "--batch-size", 4,
                  "--rows-per-file", 8, "--options", '{"dtype": "float32", "max_num_seqs": 8}')
    seen = set()
    processes: set[psutil.Process] = set()
    killed = None
    while job.poll() is None:
        processes |= {*psutil.Process(job.pid).children(recursive=True)}
        seen |= replicas(job)
        started = re.search(r"pid=(\d+)\).* KV blocks", job.log.read_text())
        if started and not killed:
            time.sleep(0.5)
            killed = psutil.Process(int(started[1]))
            killed.kill()
        time.sleep(0.05)
    assert job.returncode == 0, job.log.read_text()
    # one or two others: on few cores Ray starts the second one only when the first one is gone
    assert killed and seen - {killed}, "another one has done its work"
    assert not psutil.wait_procs(processes, timeout=30)[1], "nothing is left behind"

    found = [json.loads(line) for file in target.iterdir() for line in file.open()]
    assert sorted(row["id"] for row in found) == list(range(82)), "every row comes out once"
    expected = rows_of(replica()(table_of(rows)))
    assert sorted(found, key=lambda row: row["id"]) == expected
    assert [bool(row["error"]) for row in expected] == [False] * 80 + [True, False]
