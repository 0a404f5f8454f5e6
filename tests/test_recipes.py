"""The README's Use, docs/recipes.md, docs/scaling.md and the scripts in docs/examples/: all of it
runs, and does what it says.

Each heading has a namespace, in which its blocks run in order.
"""

import ast
import contextlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import ROOT, is_deleted
from test_deletable import ALL_CASES

import nanoengine_extras.running.policies  # noqa: F401  adds its names before a table is copied
from nanoengine import LLM, SamplingParams
from nanoengine.attention import BACKENDS
from nanoengine_extras.tools.terminal import COMMANDS

if any(map(is_deleted, ALL_CASES)):
    pytest.skip("recipes and examples use all features", allow_module_level=True)

README = (ROOT / "README.md").read_text()
FIRST_SCREEN = README[:README.index("\n## ")]
RECIPES, SCALING, REFERENCE = (
    (ROOT / "docs" / name).read_text() for name in ("recipes.md", "scaling.md", "reference.md"))


def section(heading: str, text: str = README) -> str:
    """The text from a heading to the next one that is not below it."""
    level = heading.split()[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, heading
    return re.split(rf"\n#{{1,{len(level)}}} (?=\w)", without_code(rest))[0]


def without_code(text: str) -> str:
    """The text with the hashes of comments in code moved away from the beginning of a line."""
    return re.sub(r"```.*?```", lambda code: code[0].replace("\n#", "\n #"), text, flags=re.DOTALL)


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def recipe(name: str) -> list[str]:
    """The python blocks of a recipe."""
    found = blocks(section(f"## {name}", RECIPES))
    assert found, name
    return found


@pytest.fixture
def execute(monkeypatch):
    """Runs blocks in one namespace, from the repository root; returns it, and what was printed."""
    monkeypatch.chdir(ROOT)
    made = []

    def run(codes: list[str]) -> tuple[dict, str]:
        names: dict = {"__name__": "recipe"}
        made.append(names)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for code in codes:
                exec(compile(code, "a document", "exec"), names)
        return names, printed.getvalue()

    # what a recipe adds to a table is removed after it
    with patch.dict(BACKENDS):
        yield run
    for names in made:
        if "llm" in names:
            names["llm"].close()


def example(name: str):
    """A script of docs/examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(name: str) -> list[str]:
    """The arguments that the documents call an example or a tool with."""
    found = [shlex.split(line) for code in blocks(RECIPES + SCALING, "sh")
             for line in code.splitlines()]
    ways = ([f"docs/examples/{name}.py"], ["-m", "nanoengine", name])
    arguments, = [rest[len(way):] for _, *rest in found for way in ways if rest[:len(way)] == way]
    return arguments


# -------------------------------------------------------------------------------- the README


def test_the_first_screen_has_a_picture():
    picture, = re.findall(r"!\[\w[^]]+\]\((\S+\.png)\)", FIRST_SCREEN)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_figures_of_the_readme_are_those_of_the_docs():
    results = (ROOT / "docs" / "benchmarks.md").read_text()
    fast, = re.findall(r"^- \*\*Fast\.\*\*(.*?)\n\n", FIRST_SCREEN, flags=re.DOTALL | re.MULTILINE)
    figures = re.findall(r"(\d+(?:\.\d+)?) times", fast)
    engines = re.findall(r"vLLM|Hugging(?=\s+Face)", fast)
    beside_nano, *figures = figures
    assert f"| **{beside_nano}** |" in section("## On a GPU", results)
    assert len(figures) == len(engines) == 2, "one figure for each"
    table = section("## Against other engines", results)
    assert "with AMX" in fast and "\n| | AMX |" in table, "the first column"
    for figure, engine in zip(figures, engines):
        rows = re.findall(rf"^\| \*\*{engine}.*`cpu-mixed` \| ([^ |]*) \|", table,
                          flags=re.MULTILINE)
        assert rows == [figure], engine


# examples that start a tool with the bundled model, each with its feature
TOOLS_OF_EXAMPLES = {"serve": "serve", "batch": "batch", "score": "scores"}


@pytest.mark.parametrize("name, feature", TOOLS_OF_EXAMPLES.items())
def test_examples_that_start_a_tool(monkeypatch, name, feature):
    found = []
    monkeypatch.setattr(f"nanoengine_extras.tools.{feature}.main", found.append)
    example(name).main(["--model", "another"])
    monkeypatch.setattr("sys.argv", [name, "--help"])
    example(name).main()
    bundled = str(ROOT / "models" / "tiny-qwen3")
    assert found == [["--model", bundled, "--model", "another"], ["--model", bundled, "--help"]]


def test_every_recipe_is_tested():
    recipes = re.findall(r"^## (.*)$", without_code(RECIPES), flags=re.MULTILINE)
    assert len(recipes) >= 12
    tests = Path(__file__).read_text()
    in_code = [name for name in recipes if blocks(section(f"## {name}", RECIPES))]
    commands = "".join(blocks(RECIPES + SCALING, "sh"))
    in_commands = re.findall(r"docs/examples/(\w+)\.py", commands)
    tools = re.findall(r"-m nanoengine (\w+)", commands)
    assert all(f'recipe("{name}")' in tests for name in in_code)
    examples = {file.stem for file in (ROOT / "docs" / "examples").glob("*.py")}
    assert examples - {*TOOLS_OF_EXAMPLES} == {*in_commands}
    assert {*tools} == COMMANDS.keys() - {"bench"}
    assert all(f'command("{name}")' in tests for name in in_commands + tools)


def test_use(execute):
    _, printed = execute(blocks(section("## Use")))
    assert "assistant" not in printed and printed.splitlines()[-1].endswith(" True")


def test_more_calls(execute):
    names, printed = execute(
        blocks(section("## More than one completion, and step by step", REFERENCE)))
    assert "132" in names["best"].text
    by_hand, ended = (names[name].output() for name in ("first", "second"))
    assert f"0 {by_hand.outputs[0].text}\n" in printed and by_hand.outputs[0].token_ids
    assert ended.outputs[0].finish_reason and not names["llm"].active


def test_grammar(execute):
    codes = recipe("JSON, or anything else that a grammar describes")
    lines = [ast.literal_eval(line) for line in execute(codes[:1])[1].splitlines()]
    assert [len(texts) for texts in lines] == [2] * 8
    months, arrays, animals, laughs = (lines[i] + lines[i + 1] for i in (0, 2, 4, 6))
    assert all(re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", text) for text in months)
    assert all({*json.loads(text)} <= {1, 2, 3} for text in arrays)
    assert {*animals} <= {"cat", "dog"} and all(re.fullmatch("(ha){1,3}!", text) for text in laughs)


def test_a_class_whose_floats_end(execute):
    _, code = recipe("JSON, or anything else that a grammar describes")
    names, printed = execute([code])
    assert re.fullmatch(r"place='.*' sky='\w+' humidity=\d+\.\d\n", printed)
    params = SamplingParams(structured_outputs={"json": names["Weather"]}, n=16, seed=1,
                            max_tokens=200)
    output, = names["llm"].generate("Once upon a time", params, use_tqdm=False)
    assert {each.finish_reason for each in output.outputs} == {"stop"}


def test_perplexity(execute):
    codes = recipe("Scores: multiple choice and perplexity")
    names, printed = execute(codes)
    best, *_ = printed.splitlines()
    assert best == " 46"
    perplexity = float(printed.split()[-1])
    mean = sum(names["logprobs"]) / len(names["logprobs"])
    assert perplexity == pytest.approx(math.exp(-mean))
    wrong = [code.replace("34 = 46", "34 = 92") for code in codes]
    assert 1 < perplexity < float(execute(wrong)[1].split()[-1])
    # a text can be as long as any
    longest = [code.replace('tiny-qwen3")', 'tiny-qwen3", max_model_len=10)') for code in codes]
    names, printed = execute(longest)
    assert names["llm"].inputs.max_model_len == len(names["token_ids"]) == 10
    assert float(printed.split()[-1]) == pytest.approx(perplexity, rel=1e-6)


def test_a_chat_is_streamed(execute):
    names, printed = execute(recipe("Stream a chat"))
    params = SamplingParams(temperature=0)
    answer, = names["llm"].chat(names["messages"], params, use_tqdm=False)
    assert printed == answer.outputs[0].text == "46"
    *_, last = names["llm"].stream_chat(names["messages"], params, add_generation_prompt=False)
    assert last.prompt_token_ids == answer.prompt_token_ids[:-3]
    with pytest.raises(TypeError, match="^tool is not known: the nearest is tools$"):
        names["llm"].stream_chat(names["messages"], params, tool=[])


def test_a_gguf(execute):
    names, printed = execute(recipe("A GGUF from your disk"))
    assert len(ast.literal_eval(printed)) == 8
    assert names["llm"].model_config.quantization_config["quant_method"] == "gguf"


def test_from_asyncio(execute):
    """test_async_llm.py has the rest."""
    names, printed = execute(recipe("From asyncio"))
    assert printed == " 46\n{}\n"
    assert names["llm"].metrics()["num_blocks_used"] == 0


def test_a_service(monkeypatch, capsys):
    """Its command, under load: of 64 clients at once some leave in the middle, and some send what
    is refused."""
    module = example("service")
    serve_forever = module.Server.serve_forever

    def check(server) -> None:
        thread = threading.Thread(target=serve_forever, args=(server,))
        thread.start()
        check_service(server)
        server.shutdown()
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Server, "serve_forever", check)
    *arguments, port = command("service")
    assert port == "8000"
    module.main([*arguments, "0"])
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and errors.count(" 400 ") == 32 + 3


REFUSED = [
    (b"", "Expecting value"), (b"{", "property name"), (b"[1]", "must be a JSON object"),
    (b"5", "must be a JSON object"), (b"[" * 100_000, "recursion"), (b"\xff", "decode"),
    (b"{}", "prompts=None is not accepted"), (b'{"prompt": 5}', "prompts=5 is not accepted"),
    (b'{"prompt": [99999]}', "vocabulary"), (b'{"prompt": ""}', "cannot be empty"),
    (json.dumps({"prompt": "word " * 5000}).encode(), "it must have 1 to"),
    (b'{"prompt": "a", "sampling_params": 5}', "mapping"),
    (b'{"prompt": "a", "sampling_params": {"temprature": 1}}', "nearest is temperature"),
    (b'{"prompt": "a", "sampling_params": {"n": 0}}', "n=0 is not accepted")]


def check_service(server) -> None:
    llm, url = server.llm, f"http://127.0.0.1:{server.server_port}"
    greedy = {"prompt": "12 + 34 =", "sampling_params": {"temperature": 0}}
    with urllib.request.urlopen(url, json.dumps(greedy).encode(), timeout=60) as answer:
        assert "".join(json.loads(line)["text"] for line in answer) == " 46"
    params = {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True, "n": 2}
    barrier = threading.Barrier(64)

    def ask(number: int) -> tuple:
        """What is asked, and the answer, of which some clients read only the beginning."""
        body = {"prompt": [f"Once upon a time {number}", "The fox"],
                "sampling_params": params | {"seed": number}}
        data = REFUSED[number // 2 % 14][0] if number % 2 else json.dumps(body).encode()
        barrier.wait(60)
        try:
            with urllib.request.urlopen(url, data, timeout=60) as answer:
                return body, [answer.readline()] if number % 8 == 2 else [*answer]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    with ThreadPoolExecutor(64) as pool:
        answers = [*pool.map(ask, range(64))]
    for number, (code, error) in enumerate(answers[1::2]):
        assert code == 400 and REFUSED[number % 14][1] in error
    for body, lines in answers[::2]:
        if len(lines) > 1:
            texts = [""] * 4
            for line in map(json.loads, lines):
                texts[line["index"]] += line["text"]
            found = llm.generate(body["prompt"], SamplingParams(**body["sampling_params"]),
                                 use_tqdm=False)
            assert texts == [each.text for output in found for each in output.outputs]
    # a body that is not read
    for length in (b"1048577", b"-1", b"x"):
        with socket.create_connection(server.server_address, timeout=60) as client:
            client.send(b"POST / HTTP/1.0\r\nContent-Length: %b\r\n\r\n" % length)
            assert b" 400 " in client.recv(100)
    # one that leaves before it has asked for anything
    with socket.create_connection(server.server_address) as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end = time.monotonic() + 60
    while llm.active and time.monotonic() < end:
        time.sleep(0.01)
    assert not llm.active and llm.metrics()["num_blocks_used"] == 0


@pytest.mark.slow
def test_serve(monkeypatch, capsys):
    """The command of the recipes, with their client; test_serve.py has the rest."""
    pytest.importorskip("openai")
    monkeypatch.chdir(ROOT)
    client, = recipe("A service")
    calls, = recipe("Required tool calls")
    *arguments, port = command("serve")
    assert f":{port}/v1" in client
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = str(free.getsockname()[1])
    with subprocess.Popen([sys.executable, "-m", "nanoengine", "serve", *arguments, number],
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                          stderr=subprocess.PIPE) as server:
        try:
            assert any("running on" in line for line in server.stderr)
            names: dict = {}
            exec(client.replace(port, number), names)
            exec(calls, names)
        finally:
            server.terminate()
            server.stderr.read()
    text, bracket, found = capsys.readouterr().out.partition("[")
    cities = [json.loads(call)["city"] for call in ast.literal_eval(bracket + found)]
    assert text == "46" and cities and {*cities} <= {"Rome", "Oslo"}


def test_a_model_is_compared(execute):
    names, _ = execute(recipe("Add a model"))
    assert len(names["ours"]) == 20 and len(set(names["ours"])) > 5


def test_a_backend(execute):
    names, printed = execute(recipe("Add a backend"))
    assert printed == "mine  46\n"
    calls = []
    gather = names["gather_attention"]
    names["gather_attention"] = lambda *given: calls.append(given) or gather(*given)
    names["llm"].generate("Once upon a time", use_tqdm=False)
    assert calls, "it is this function that attends"


# -------------------------------------------------------------------------------- the examples


def test_json_grammar(monkeypatch, bundled, capsys):
    module = example("json_grammar")
    module.main(command("json_grammar"))
    assert re.fullmatch(r"Tell me .* -> Animal\(kind='\w+', age=\d+, friends=\[.*\]\)\n",
                        capsys.readouterr().out)
    with LLM(bundled) as llm:
        again = [module.ask(llm, ["12 + 34"], seed) for seed in (5, 5, 6)]
        assert again[0] == again[1] != again[2], "the seed counts"
        texts = []
        parse = module.Animal.model_validate_json
        monkeypatch.setattr(module.Animal, "model_validate_json",
                            lambda text: texts.append(text) or parse(text))
        module.ask(llm, module.QUESTIONS * 40, seed=0)
    # each is valid, as the class has read it
    assert len(texts) == 80 and len(set(texts)) > 40
    assert max(map(len, texts)) <= len(module.LONGEST)
    assert json.loads(parse(module.LONGEST).model_dump_json()) == json.loads(module.LONGEST)


def run_tool(monkeypatch, name: str, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nanoengine", name, *arguments])
    runpy.run_module("nanoengine", run_name="__main__")


def test_batch(monkeypatch, tmp_path):
    """The command of the recipes; test_batch.py has the rest."""
    arguments = command("batch")
    for name in ("docs", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    run_tool(monkeypatch, "batch", arguments)
    source, target = (Path(arguments[arguments.index(flag) + 1]) for flag in ("-i", "-o"))
    results = [json.loads(line) for line in target.read_text().splitlines()]
    requests = source.read_text().splitlines()
    assert len(results) == len(requests) == 6
    assert [result["response"]["status_code"] for result in results].count(200) == 5


def test_score(monkeypatch, capsys):
    """The command of the recipes; test_scores.py has the rest."""
    monkeypatch.chdir(ROOT)
    run_tool(monkeypatch, "score", command("score"))
    assert capsys.readouterr().out.splitlines()[0].endswith("12 + 34 = 46")


def test_eval(monkeypatch, capsys):
    """The command of the recipes, up to the package, which it may lack; test_lm_eval.py has the
    rest."""
    arguments = command("eval")
    assert arguments[0] == "--model_args" and arguments[2] == "--tasks"
    monkeypatch.chdir(ROOT)
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(SystemExit, match="2"):
            run_tool(monkeypatch, "eval", arguments)
        assert capsys.readouterr().err.endswith("pip install lm-eval\n")


@pytest.mark.slow
def test_ray_data(tmp_path, ray_job):
    """The command of the README; test_ray_data.py has the rest."""
    pytest.importorskip("ray")
    import pyarrow.parquet
    arguments = command("ray_data")
    prompts = {"id": [1, 2, 3], "prompt": ["12 + 34 =", None, "47 + 85 ="]}
    source, target = (tmp_path / arguments[place] for place in (1, 3))
    pyarrow.parquet.write_table(pyarrow.table(prompts), source)
    # with kernels that other tests have compiled
    job = ray_job("-i", source, "-o", target, *arguments[4:], "--options", '{"dtype": "float32"}',
                  "--sampling-params", '{"temperature": 0}')
    assert job.wait() == 0, job.log.read_text()
    rows = sorted(pyarrow.parquet.read_table(target).to_pylist(), key=lambda row: row["id"])
    assert [row["generated_text"] for row in rows] == [" 46", None, " 132"]
    assert [row["prompt"] for row in rows] == prompts["prompt"]
    assert "prompt or messages" in rows[1]["error"]


PROMPTS = [f"Once {number}" for number in range(8)]


@pytest.fixture(scope="module")
def resume(tmp_path_factory):
    """Runs the example with prompts and answers, which may be unfinished; returns the answers."""
    source = tmp_path_factory.mktemp("resumable") / "prompts.txt"
    target = source.with_name("answers.jsonl")
    module = example("resumable")

    def run(prompts: bytes | str, answers: bytes = b"", *flags: str) -> list[bytes]:
        source.write_bytes(prompts if isinstance(prompts, bytes) else prompts.encode())
        target.write_bytes(answers)
        try:
            module.main([str(source), str(target), *(flags or ("--max-tokens", "3"))])
        except SystemExit:
            assert target.read_bytes() == answers, "nothing is written if all are refused"
            raise
        return target.read_bytes().splitlines(keepends=True)

    run.module = module
    return run


@pytest.fixture(scope="module")
def answered(resume) -> tuple:
    """The answers to some prompts; and some of them, out of order, with a torn one."""
    lines = sorted(resume("\n".join(PROMPTS)))
    return lines, b"".join([lines[5], lines[0], lines[3], lines[1], lines[4][:-9]])


def test_lines_of_a_resumable_job(resume):
    """Blank lines have a number, but no prompt; other separators than newlines are text."""
    prompts = "\ufeffone\u2028two\r\n\n \nthree\x0cfour\nfive\x85six\rø"
    expected = {0: "one\u2028two", 3: "three\x0cfour", 4: "five\x85six\rø"}
    answers: list[bytes] = []
    for _ in range(2):
        answers = resume(prompts, b"".join(answers))
        records = [*map(json.loads, answers)]
        assert {record["id"]: record["prompt"] for record in records} == expected
        assert len(records) == 3


# prompts that were edited, and flags that are others
EDITED = [
    (["new", *PROMPTS],), (PROMPTS[1:],), ([*PROMPTS[:3], *PROMPTS[4:]],), (PROMPTS[:5],),
    ([PROMPTS[1], PROMPTS[0], *PROMPTS[2:]],), (["new"] * 8,), (["", *PROMPTS],),
    (["Once 0 ", *PROMPTS[1:]],), (PROMPTS, "--max-tokens", "4"), (PROMPTS, "--model", "other")]
DAMAGED = [b"{}\n", b"[1]\n", b'{"id": []}\n', b"damaged\n", b"another file", b"two\nlines"]


def test_what_a_resumable_job_refuses(resume, answered, monkeypatch, tmp_path, capsys):
    """Before anything is written, and before the model is loaded."""
    monkeypatch.setattr(resume.module, "LLM", None)
    cases = [(prompts, content, *flags) for prompts, *flags in EDITED
             for content in (answered[1], b"".join(answered[0]))]
    # the last one is a second answer
    cases += [(PROMPTS, content) for content in (*DAMAGED, answered[0][0] * 2)]
    for prompts, *others in cases:
        with pytest.raises(SystemExit, match="line . answers none of these .* or it is a second "
                                             "answer.* a new file"):
            resume("\n".join(prompts), *others)
    with pytest.raises(SystemExit, match="cannot be read"):
        resume(b"caf\xe9\n")
    with pytest.raises(SystemExit, match="No such file"):
        resume.module.main([str(tmp_path / "none"), str(tmp_path / "answers.jsonl")])
    for target in (".", "no/such.jsonl"):
        with pytest.raises(SystemExit):
            resume.module.main([str(tmp_path / "none"), str(tmp_path / target)])
        assert f"error: {tmp_path / target} cannot be written: [Errno " in capsys.readouterr().err


@pytest.mark.parametrize("data", [
    "\n".join(PROMPTS), "\ufeff" + "\r\n".join([*PROMPTS, "more"]), "\n".join(PROMPTS) + "\n\n \n"])
def test_appended_prompts_are_answered(resume, answered, data):
    found = resume(data, answered[1])
    assert found[:4] == answered[1].splitlines(keepends=True)[:4]
    assert sorted(found)[:8] == answered[0] and len(found) == 8 + ("more" in data)


def test_resumable(monkeypatch, tmp_path):
    module = example("resumable")
    prompts = ["Once upon a time", "12 + 34 =", "sort d b e a =", "count 17 to 23 =",
               "copy ball fox red =", "Once", "47 + 85 =", "The fox"]
    monkeypatch.chdir(tmp_path)
    source, target = command("resumable")
    Path(source).write_text("\n".join(prompts) + "\n")
    asked = []
    stream = LLM.stream
    limit = len(prompts)

    def records(file: str) -> dict[int, dict]:
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
        found = [json.loads(line) for line in lines]
        assert len({record["id"] for record in found}) == len(found), "no request twice"
        return {record["id"]: record for record in found}

    def interrupted(llm, given, params):
        asked.append(given)
        finished = 0
        for output in stream(llm, given, params):
            finished += output.finished
            if finished > limit:
                raise KeyboardInterrupt
            before = len(records(target))
            yield output
            assert len(records(target)) == before + output.finished, "it is in the file at once"

    monkeypatch.setattr(LLM, "stream", interrupted)

    module.main([source, target])
    expected = records(target)
    Path(target).unlink()
    assert [expected[i]["prompt"] for i in range(len(prompts))] == prompts
    assert expected[1]["text"] == " 46" and expected[6]["text"] == " 132"

    # interrupted in the middle, and once more, in the middle of a line
    limit = 3
    with pytest.raises(KeyboardInterrupt):
        module.main([source, target])
    limit = 2
    with pytest.raises(KeyboardInterrupt):
        module.main([source, target])
    done = records(target)
    assert len(done) == 5
    with Path(target).open("a") as file:
        file.write('{"id": 7, "prom')
    limit = len(prompts)
    module.main([source, target])
    assert records(target) == expected
    assert sorted(asked[-1]) == sorted(prompts[i] for i in range(len(prompts)) if i not in done)
    assert [len(each) for each in asked] == [8, 8, 5, 3]
    module.main([source, target])
    assert asked[-1] == [] and records(target) == expected


def test_example_shows_questions_beside_answers(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("example", ROOT / "example.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert "12 + 34 -> 46" in lines and "copy ball fox red -> ball fox red" in lines
