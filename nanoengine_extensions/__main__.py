"""`python -m nanoengine_extensions "a prompt"` streams a text, or a chat, to the terminal."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable

from nanoengine import LLM, RequestOutput, SamplingParams


def main() -> None:
    """Completes the prompt of the command line, or of standard input; or answers it in a chat."""
    parser = ArgumentParser("python -m nanoengine_extensions",
                            description="streams a text to the terminal")
    parser.add_argument("prompt", nargs="?", help="the beginning of a text, or with --chat a "
                        "message; without it, standard input is read")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, or each line")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a Hugging Face id")
    parser.add_argument("--max-tokens", default=256, type=int, help="the most tokens to generate")
    parser.add_argument("--temperature", default=0.7, type=float, help="0 is greedy; default: 0.7")
    parser.add_argument("--top-p", default=1.0, type=float, help="as in SamplingParams")
    parser.add_argument("--seed", type=int, help="without it, each run draws the same")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed,
                                max_tokens=args.max_tokens)
        llm = LLM(args.model)
        if not args.chat:
            show(llm.stream(sys.stdin.read() if args.prompt is None else args.prompt, params))
            return
        messages: list[dict[str, str]] = []
        lines = [args.prompt] if args.prompt is not None else sys.stdin
        for line in filter(str.strip, lines):
            messages.append({"role": "user", "content": line.rstrip("\n")})
            answer = show(llm.stream_chat(messages, params))
            messages.append({"role": "assistant", "content": answer})
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def show(outputs: Iterable[RequestOutput]) -> str:
    """Prints a text as it grows, and returns it."""
    text = ""
    for output in outputs:
        print(output.outputs[0].text[len(text):], end="", flush=True)
        text = output.outputs[0].text
    print()
    return text


if __name__ == "__main__":
    main()
