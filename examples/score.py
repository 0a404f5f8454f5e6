"""Multiple choice: which continuation of a prompt is the likeliest?

    python examples/score.py                             # sums, with the bundled model
    python examples/score.py "47 + 85 =" " 132" " 131" " 122"

The score of a choice is the log-probability of its tokens after the prompt; next to it is the
probability of the choice among these choices. One generated token is ignored. Each token lowers the
score, so long choices lose; --mean divides by the number of tokens.
"""

import argparse
from pathlib import Path

import torch

from nanoengine import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3"


def scores(llm: LLM, prompt: str, choices: list[str], mean: bool = False) -> list[float]:
    """Returns the log-probability of each choice after the prompt."""
    # A choice begins after as many tokens as the prompt has alone. This is slightly off if the end
    # of the prompt and the beginning of a choice form other tokens together.
    start = len(llm.get_tokenizer().encode(prompt))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate([prompt + choice for choice in choices], params, use_tqdm=False):
        pairs = [*zip(output.prompt_token_ids, output.prompt_logprobs)][start:]
        score = sum(logprobs[token_id].logprob for token_id, logprobs in pairs)
        found.append(score / len(pairs) if mean else score)
    return found


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
