"""`python -m nanoengine "a prompt"`: streams a text to the terminal."""

from argparse import ArgumentParser

from nanoengine import LLM, SamplingParams


def main() -> None:
    """Completes the prompt of the command line."""
    parser = ArgumentParser("python -m nanoengine", description="streams a text to the terminal")
    parser.add_argument("prompt", help="the beginning of the text")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a Hugging Face id")
    parser.add_argument("--max-tokens", default=256, type=int, help="the most tokens to generate")
    parser.add_argument("--temperature", default=0.7, type=float, help="0 is greedy; default: 0.7")
    args = parser.parse_args()
    num_shown = 0
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        for output in LLM(args.model).stream(args.prompt, params):
            print(output.outputs[0].text[num_shown:], end="", flush=True)
            num_shown = len(output.outputs[0].text)
    except ValueError as error:
        parser.error(str(error))
    print()
