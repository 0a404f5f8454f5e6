"""Multiple choice: which continuation of a prompt is the likeliest?

    python examples/score.py                             # sums, with the bundled model
    python examples/score.py "47 + 85 =" " 132" " 131" " 122"

The score of a choice is the log-probability of its tokens after the tokens of the prompt; next to
it is the probability of the choice among these choices. Each token lowers the score, so long
choices lose; --mean divides by the number of tokens.
"""

import argparse
from pathlib import Path

import torch

from nanoengine import LLM

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3"


def scores(llm: LLM, prompt: str, choices: list[str], mean: bool = False) -> list[float]:
    """Returns the log-probability of each choice after the prompt, or its mean for a token.

    All tokens of a choice come after the prompt's own tokens. Raises ValueError for a choice
    without any.
    """
    found = llm.score(prompt, choices, use_tqdm=False)
    return [each.mean if mean else each.cumulative_logprob for each in found]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="12 + 34 =")
    parser.add_argument("choices", nargs="*", default=[" 45", " 46", " 56"])
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--mean", action="store_true")
    flags = parser.parse_args(arguments)
    with LLM(flags.model) as llm:
        found = scores(llm, flags.prompt, flags.choices, flags.mean)
    shares = torch.tensor(found).softmax(dim=0).tolist()
    for score, share, choice in sorted(zip(found, shares, flags.choices), reverse=True):
        print(f"{score:9.3f} {share:7.1%}  {flags.prompt}{choice}")


if __name__ == "__main__":
    main()
