"""`python -m nanoengine --chat`: in a pseudo terminal, and with pipes."""

import fcntl
import io
import os
import re
import select
import subprocess
import sys
import termios
import time
from dataclasses import fields

import pytest
from conftest import ROOT, check_idle

from nanoengine import LLM, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.features import extension
from nanoengine_extras.tools import ENGINE, Parser, options_of, terminal

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
COMMAND = [sys.executable, "-m", "nanoengine", "--chat", "--temperature", "0", "--model"]
# answers that only Ctrl-C ends before 1,900 tokens
ENDLESS = """
import sys
from nanoengine import LLM, SamplingParams
from nanoengine_extras.tools import terminal
params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
terminal.converse(LLM(sys.argv[1]), params)
"""


class Terminal:
    """A program in a pseudo terminal. As a context, it is killed at the end."""

    def __init__(self, *command: str) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, cwd=ROOT,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str, again: str = "") -> str:
        """Reads until a regex is found; returns the text up to its end.

        again: is typed once more where nothing comes for ten seconds. Python can miss a signal that
            comes right before it waits for a line.
        """
        end = time.monotonic() + 120
        while not (found := re.search(pattern, self.seen)):
            left = max(0, end - time.monotonic())
            ready = select.select([self.master], [], [], min(left, 10) if again else left)[0]
            assert ready or (again and left), f"no {pattern!r} in {self.seen!r}"
            if not ready:
                self.write(again)
                continue
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it has ended: {self.seen!r}") from None
        text, self.seen = self.seen[:found.end()], self.seen[found.end():]
        return text

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.slow
def test_a_chat_in_a_terminal(bundled):
    """A mark, lines that can be edited, a history, and ways to end it."""
    with Terminal(*COMMAND, bundled) as shell:
        assert "/exit or Ctrl-D ends the chat" in shell.until("> ")
        shell.write("12 + 35\x7f4\n")
        assert re.search(r"\n46\r\n", shell.until("46\r\n> "))
        # the arrow key
        shell.write("\x1b[A\n")
        assert "12 + 34" in shell.until(r"46\r\n(\x1b\S*)?> ")
        # no line
        for typed in ("\n", "   \n"):
            shell.write(typed)
            shell.until("> ")
        shell.write("abc")
        shell.until("abc")
        shell.write("\x03")
        shell.until("> ", again="\x03")
        shell.write("12 + 34\n")
        shell.until("46\r\n.*> ")
        shell.write("/exit\n")
        assert shell.process.wait(60) == 0


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_in_a_terminal(bundled):
    with Terminal(sys.executable, "-c", ENDLESS, bundled) as shell:
        shell.until("> ")
        for _ in range(3):
            shell.write("12 + 34\n")
            # the echo, then the answer
            shell.until(r"12 \+ 34\r\n")
            shell.until(r"\w+ ")
            shell.write("\x03")
            shell.until(r"\r\n.*> ")
            assert shell.process.poll() is None
        # Ctrl-D
        shell.write("\x04")
        assert shell.process.wait(60) == 0


def test_a_single_answer_that_is_interrupted(bundled, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(LLM, "stream", interrupted)
    for flags in ([], ["--chat"]):
        monkeypatch.setattr(sys, "argv", ["nanoengine", "12", *flags, "--model", bundled])
        with pytest.raises(SystemExit, match="130"):
            terminal.main()


# ------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.needs(feature))
    for name, feature in terminal.COMMANDS.items()])
def test_a_tool_has_help(name, monkeypatch, capsys):
    """The first word alone names a tool."""
    monkeypatch.setattr(sys, "argv", ["nanoengine", name, "--help"])
    with pytest.raises(SystemExit) as found:
        terminal.main()
    printed = capsys.readouterr()
    # that of a package that is not installed
    assert found.value.code == 0 or printed.err.splitlines()[-1].endswith("pip install lm-eval")
    assert "streams a text" not in printed.out


@pytest.mark.parametrize("arguments", [
    ["--", "serve"], ["--temperature", "0", "serve"], ["--max-tokens", "3", "--", "bench"],
    ["served"], ["serve the tea"]])
def test_other_prompts_are_texts(arguments, monkeypatch, bundled):
    """Also a single word that names a tool, after two dashes."""
    prompts = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: prompts.append(prompt) or [])
    monkeypatch.setattr(sys, "argv", ["nanoengine", *arguments])
    monkeypatch.setattr(terminal, "DEFAULT_MODEL", bundled)
    terminal.main()
    assert prompts == arguments[-1:]


@pytest.mark.needs("tools.batch", "tools.openai_format")
def test_a_fault_of_a_tool_is_one_sentence(monkeypatch, capsys):
    for error, code in ((ValueError("a\nb"), 2), (KeyboardInterrupt(), 130)):
        def broken(arguments, error=error):
            raise error

        monkeypatch.setattr(extension("tools.batch"), "main", broken)
        monkeypatch.setattr(sys, "argv", ["nanoengine", "batch", "-i", "x"])
        with pytest.raises(SystemExit) as found:
            terminal.main()
        assert found.value.code == code
    assert capsys.readouterr().err.endswith("python -m nanoengine: error: a b\n")


@pytest.mark.parametrize("arguments, expected", [
    (["--options", '{"seed": 1}'], {"seed": 1}),
    (["--max-model-len", "512", "--dtype=float32", "--enforce-eager"],
     {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}),
    (["--options", '{"seed": 1, "dtype": "auto"}', "--dtype", "float32",
      "--no-enable-prefix-caching"],
     {"seed": 1, "dtype": "float32", "enable_prefix_caching": False}),
    (["--opt", '{"seed": 1}', "--gpu-memory-utilization", ".9", "--revision", "1234567"],
     {"seed": 1, "gpu_memory_utilization": 0.9, "revision": "1234567"}),
    (["--seed", "-1"], {"seed": -1}),
    *((["--options", text], "error: --options: JSON: ") for text in ("", "[]", "5", "{", "null")),
    (["--seed"], "error: argument --seed: expected one argument\n"),
    (["--max-model-lens", "3"], "error: unrecognized arguments: --max-model-lens 3\n"),
    (["--max-model-len", "1k"], "error: argument --max-model-len: invalid int value: '1k'\n")])
def test_options_of_the_engine_are_flags(arguments, expected, capsys):
    """In --options they are JSON, which the flags override."""
    parser = Parser("a tool")
    parser.add_llm()
    assert ENGINE.keys() == {each.name for each in fields(EngineConfig)} - {"model", "features"}
    if isinstance(expected, dict):
        assert options_of(parser.parse_args(["--model", "a", *arguments])) == expected
        return
    with pytest.raises(SystemExit, match="2"), parser.faults():
        options_of(parser.parse_args(["--model", "a", *arguments]))
    message, = capsys.readouterr().err.splitlines(keepends=True)
    assert message.startswith("a tool: ") and expected in message


@pytest.mark.slow
def test_the_default_model_is_told():
    """Here it cannot be downloaded."""
    done = subprocess.run([sys.executable, "-m", "nanoengine", "12 + 34 ="], text=True, cwd=ROOT,
                          capture_output=True, env=ENVIRONMENT | {"HF_HOME": "/nonexistent"})
    first, *_, last = done.stderr.splitlines()
    assert first == "the model is Qwen/Qwen3-0.6B, since --model was not given"
    assert (done.returncode, done.stdout) == (2, "")
    assert last.startswith("python -m nanoengine: error: model=")


# ------------------------------------------------------------------------- without a terminal


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", num_kv_blocks=64, max_model_len=96) as llm:
        yield llm
        check_idle(llm)


@pytest.fixture
def converse(llm, monkeypatch, capsys):
    """Answers lines; returns the printed lines, the notes, and the prompts of the model."""
    def converse(lines: str, stream=None, **params):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 16} | params)
        prompts = []
        make = stream or LLM.stream

        def noting(self, given, params):
            prompts.append(given[0]["prompt"])
            return make(self, given, params)

        monkeypatch.setattr(LLM, "stream", noting)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        terminal.converse(llm, params)
        monkeypatch.undo()
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err.splitlines(), prompts
    return converse


def test_old_turns_are_dropped(converse, llm):
    questions = [f"{number} + 12" for number in range(20, 40)]
    answers, notes, prompts = converse("".join(f"{each}\n" for each in questions))
    assert len(answers) == len(prompts) == 20
    assert [*{*notes}] == ["dropped the oldest turns (1): the context of 96 tokens is full"]
    num_first = 20 - len(notes)
    assert 1 < num_first < 19
    count = llm.get_tokenizer().encode
    for number, prompt in enumerate(prompts):
        assert len(count(prompt, add_special_tokens=False)) + 16 <= 96, "an answer fits"
        kept = [each for each in questions[:number + 1] if f"\n{each}<" in prompt]
        assert kept == questions[number + 1 - len(kept):number + 1], "the newest, in order"
        assert len(kept) == min(number + 1, num_first)
        assert all(f"\n{answer}<" in prompt for answer in answers[number + 1 - len(kept):number])


def test_an_answer_may_take_up_to_half_of_the_context(converse):
    """Also if more tokens are asked for than there are."""
    _, notes, prompts = converse("12 + 34\n15 + 31\n", max_tokens=1000)
    assert not notes and "12 + 34" in prompts[1]


def test_a_message_that_is_too_long_ends_nothing(converse):
    answers, notes, prompts = converse("12 + 34\n" + "word " * 200 + "\n15 + 31\n")
    assert answers == ["46", "46"] and len(prompts) == 2
    assert notes[0].startswith("dropped the oldest turns (1)")
    assert re.fullmatch(r"this message has \d+ tokens, and must have fewer than 96", notes[1])
    assert "word" not in prompts[1]


def test_blank_lines_and_exit(converse):
    answers, notes, prompts = converse("\n  \n12 + 34\n\n /exit \n15 + 31\n")
    assert answers == ["46"] and not notes and len(prompts) == 1
    assert converse("") == ([], [], [])


def test_what_was_said_before_ctrl_c_is_kept(converse, llm):
    stream = LLM.stream
    asked = []

    def interrupted(self, prompts, params):
        asked.append(prompts)
        for number, output in enumerate(stream(self, prompts, params)):
            yield output
            if number == 4 and len(asked) == 1:
                raise KeyboardInterrupt

    answers, notes, prompts = converse("Once upon a time\n12 + 34\n", interrupted, ignore_eos=True)
    assert len(answers[0].split()) >= 1 and not notes
    assert f"<|im_start|>assistant\n{answers[0]}<|im_end|>" in prompts[1]


def test_without_a_chat_template(llm, monkeypatch):
    monkeypatch.setattr(llm.inputs.tokenizer, "chat_template", None)
    monkeypatch.setitem(vars(llm.inputs), "tokenizer_of_user", llm.inputs.tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    with pytest.raises(ValueError, match="chat_template=None is not accepted: it must be given"):
        terminal.converse(llm, SamplingParams())
