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
import subprocess
import sys
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


def example(name: str, folder: str = "docs/examples"):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
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


def test_example_shows_questions_beside_answers(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example.py"])
    example("example", "").main()
    lines = capsys.readouterr().out.splitlines()
    assert "12 + 34 -> 46" in lines and "copy ball fox red -> ball fox red" in lines
