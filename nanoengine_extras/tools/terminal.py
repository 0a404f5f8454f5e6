"""`python -m nanoengine "a prompt"` streams text to the terminal; --chat begins a conversation.

Answers go to standard output, the program's own messages to standard error.

`python -m nanoengine serve` and the other COMMANDS start a tool. Each also starts without this
file, as `python -m nanoengine_extras.tools.serve`.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.features import extension
from nanoengine_extras.tools import Parser

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
# the feature that each starts; its `main` takes the rest of the command line
COMMANDS = {"serve": "tools.serve", "batch": "tools.batch", "score": "tools.scores",
            "eval": "tools.lm_eval"}


def main() -> None:
    """Starts a tool; or completes the prompt of the command line, or of standard input; or answers
    it in a chat."""
    parser = Parser(
        "python -m nanoengine", description="streams a text to the terminal",
        epilog=f"The first word can also be a tool, {', '.join(COMMANDS)}, which has options of "
        "its own (serve --help). A prompt that is one of these words comes after two dashes "
        "(-- serve).")
    first = sys.argv[1] if sys.argv[1:] else ""
    if first == "bench":
        parser.error("bench.py is in the repository: python bench.py --help")
    with parser.faults():
        if first in COMMANDS:
            extension(COMMANDS[first], f"python -m nanoengine {first}").main(sys.argv[2:])
        else:
            answer(parser)


def answer(parser: Parser) -> None:
    """Completes or answers what the flags and standard input say."""
    parser.add_argument("prompt", nargs="?", help="the beginning of a text, or with --chat a "
                        "message; without it, standard input is read")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, or each line; "
                        "Ctrl-C stops an answer, and /exit or Ctrl-D ends the chat")
    parser.add_argument("--model", help="a folder or a Hugging Face id; "
                        f"default: {DEFAULT_MODEL}")
    parser.add_argument("--max-tokens", default=256, type=int, help="the most tokens to generate")
    parser.add_argument("--temperature", default=0.7, type=float, help="0 is greedy; default: 0.7")
    parser.add_argument("--top-p", default=1.0, type=float, help="as in SamplingParams")
    parser.add_argument("--seed", type=int, help="without it, every run draws the same tokens")
    args = parser.parse_args()
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed,
                            max_tokens=args.max_tokens)
    if args.model is None:
        note(f"the model is {DEFAULT_MODEL}, since --model was not given")
    llm = LLM(DEFAULT_MODEL if args.model is None else args.model)
    if args.chat and not getattr(llm.inputs.tokenizer, "chat_template", True):
        raise ValueError(f"{llm.config.model} has no chat template: leave out --chat")
    if args.chat and args.prompt is None:
        converse(llm, params)
    elif args.chat:
        show(llm.stream_chat([{"role": "user", "content": args.prompt}], params))
    else:
        show(llm.stream(sys.stdin.read() if args.prompt is None else args.prompt, params))


def converse(llm: LLM, params: SamplingParams) -> None:
    """Answers each line of standard input, in one conversation. Ctrl-C ends only the answer.

    Raises ValueError if the model has no chat template.
    """
    longest = llm.inputs.max_model_len
    messages: list[dict[str, str]] = []
    for line in lines():
        messages.append({"role": "user", "content": line})
        prompt = shortened(llm, messages, kept=min(params.max_tokens or longest, longest // 2))
        num_tokens = len(prompt["prompt_token_ids"])
        if num_tokens >= longest:
            note(f"this message has {num_tokens} tokens, and must have fewer than {longest}")
            messages.pop()
            continue
        answer = show(llm.stream([prompt], params), KeyboardInterrupt)
        messages.append({"role": "assistant", "content": answer})


def lines() -> Iterator[str]:
    """Yields the lines of standard input that are not blank, until its end or /exit.

    In a terminal, they can be edited, and the arrow keys bring back earlier ones.
    """
    source = sys.stdin
    if sys.stdin.isatty():
        # if readline is installed, `input` uses it
        with suppress(ImportError):
            import_module("readline")
        note("Ctrl-C stops an answer, and /exit or Ctrl-D ends the chat")
        source = typed()
    for line in source:
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")


def typed() -> Iterator[str]:
    """Yields the lines that a user types after a prompt, until Ctrl-D. Ctrl-C drops a line."""
    while True:
        try:
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def shortened(llm: LLM, messages: list[dict[str, str]], kept: int) -> dict[str, Any]:
    """Returns the prompt of a conversation, after removing its oldest turns until an answer fits.

    kept: how many tokens are kept free for the answer.
    """
    longest = llm.inputs.max_model_len
    num_dropped = 0
    while True:
        prompt, = extension("tools.chat").render(llm.inputs, messages)
        if len(messages) == 1 or len(prompt["prompt_token_ids"]) + kept <= longest:
            break
        # a message and its answer
        del messages[:2]
        num_dropped += 1
    if num_dropped:
        note(f"dropped the oldest turns ({num_dropped}): the context of {longest} tokens is full")
    return prompt


def show(outputs: Iterable[RequestOutput], *ends: type[BaseException]) -> str:
    """Prints a text as it grows, and returns it. An exception of these types only ends the text."""
    text = ""
    with suppress(*ends):
        for output in outputs:
            shown = len(text)
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
    print(flush=True)
    return text


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
