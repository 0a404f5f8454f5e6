"""`python -m nanoengine "a prompt"`: streams a text to the terminal."""

from argparse import ArgumentParser

from nanoengine import LLM, SamplingParams


def main() -> None:
    """Completes the prompt of the command line."""
    parser = ArgumentParser("python -m nanoengine", description="streams a text to the terminal")
    parser.add_argument("prompt", help="the beginning of the text")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a Hugging Face id")
    parser.add_argument("--max-tokens", default=256, type=int)
    parser.add_argument("--temperature", default=0.7, type=float, help="0 is greedy")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        outputs = LLM(args.model).stream(args.prompt, params)
    except ValueError as error:
        parser.error(str(error))
    num_shown = 0
    for output in outputs:
        text = output.outputs[0].text
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)
    print()
