"""`LLM.score`: the log-probabilities of given continuations of a prompt.

A continuation is scored as `generate` would generate it: all its tokens come after the prompt's own
tokens. So the scores of several continuations of one prompt can be compared, even if a continuation
begins in the middle of a word: after "The fo", the text "x" is the token "x", not a part of " fox".
A model has rarely seen such tokens, so a prompt should end where a word ends.

A client of the engine: each continuation is a request.

    text      12 + 34 = 46           prompt and continuation
    prompt    12 + 34 = 4            `prompt_logprobs` from the continuation's first token on;
                                     earlier tokens can come from the prefix cache
    output                 6         the only token that is allowed; it needs no place in the
                                     cache, so a text can have `max_model_len` tokens
"""

import math
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

from nanoengine.errors import also_check, naming, rejected
from nanoengine.features import is_installed
from nanoengine.llm import LLM
from nanoengine.requests import InputProcessor, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine_extras.tools import Parser, options_of


@dataclass
class Score:
    """How likely a continuation is after its prompt.

    token_ids: the tokens of the continuation, at least one.
    logprobs: the log-probability of each token; NaN if the model's logits are not finite.
    ranks: the rank of each token, 1 if none is likelier; 0 if the logits are not finite.
    cumulative_logprob: the sum of the log-probabilities.
    mean: the mean of the log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    cumulative_logprob: float

    mean = property(lambda self: self.cumulative_logprob / len(self.logprobs))


def score(llm: LLM, prompts: Any, continuations: Any, use_tqdm: bool = True) -> list[Any]:
    """Returns a `Score` for each continuation; for a list of prompts, a list of them for each.

    prompts: one prompt or a list of them, in the forms of `LLM.generate`.
    continuations: a list of strings or lists of token ids; for a list of prompts, a list of
        them for each.
    use_tqdm: show a progress bar.

    Raises ValueError for bad input. A continuation has to add a token to its prompt, and a text can
    have max_model_len tokens.
    """
    also_check("call", prompts, None, None, llm.inputs)
    is_one = isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral)
    if is_one:
        prompts, continuations = [prompts], [continuations]
    are_lists = isinstance(continuations, (list, tuple)) and all(
        isinstance(group, (list, tuple)) for group in continuations)
    if not are_lists or len(continuations) != len(prompts):
        raise rejected("continuations", continuations[0] if is_one else continuations,
                       "a list of strings or lists of ids" + ", for each prompt" * (not is_one))
    names = ["continuations" if is_one else f"continuations[{place}]"
             for place in range(len(prompts))]
    groups = [texts_of(llm.inputs, *each) for each in zip(names, prompts, continuations)]
    texts = [text for group in groups for text in group]
    # the texts of single tokens are not needed; without texts.py, the default has to stay
    detokenize = not is_installed("sampling.texts")
    # with the likeliest token, since only then does a token that is as likely have rank 1: in
    # bfloat16, many are
    params = [SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=detokenize, logprobs=1,
        prompt_logprobs=1, prompt_logprobs_start=start, allowed_token_ids=token_ids[-1:])
        for start, token_ids in texts]
    outputs = iter(llm.generate([token_ids[:-1] for _, token_ids in texts], params, use_tqdm))
    scores = [[score_of(start, token_ids, next(outputs)) for start, token_ids in group]
              for group in groups]
    return scores[0] if is_one else scores


def texts_of(inputs: InputProcessor, group: str, prompt: Any,
             continuations: list[Any]) -> list[tuple[int, list[int]]]:
    """Returns, for each text of prompt and continuation, the place where the continuation begins,
    and the tokens. group: names the continuations, for messages."""
    before, prompt_ids = inputs.parse(f"the prompt of {group}", prompt, SamplingParams())
    found = []
    for number, continuation in enumerate(continuations):
        name = f"{group}[{number}]"
        with naming(rejected(name, continuation, "a string or a list of token ids")):
            if isinstance(continuation, str):
                added = tokens_after(inputs.get_tokenizer(), before or "\n", continuation)
            else:
                if not isinstance(continuation, (list, tuple)) or bool in map(type, continuation):
                    raise TypeError("token ids are numbers in a list or a tuple")
                added = [*map(index, continuation)]
        if not added:
            raise rejected(name, continuation, "one that adds a token to its prompt")
        inputs.check_vocabulary(name, added)
        length = len(prompt_ids) + len(added)
        if length > inputs.max_model_len:
            raise ValueError(f"{name} has {length} tokens with its prompt: it must have at most "
                             f"max_model_len={inputs.max_model_len}")
        found.append((len(prompt_ids), prompt_ids + added))
    return found


def tokens_after(tokenizer: Any, before: str, text: str) -> list[int]:
    """Returns the tokens of a text that comes after another one, whose tokens stay as they are.

    If the tokens of both texts together begin with those of the first, these are the rest. If not,
    they are those after a newline: some tokenizers add a space where a text begins.
    """
    for start in (before, "\n"):
        own, whole = (tokenizer.encode(each, add_special_tokens=False, verbose=False)
                      for each in (start, start + text))
        if whole[:len(own)] == own:
            return whole[len(own):]
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def score_of(start: int, token_ids: list[int], output: RequestOutput) -> Score:
    """Returns the score of a text from `start` on, from the output of its request."""
    completion, added = output.outputs[0], token_ids[start:]
    logprobs = [math.nan] * len(added)
    ranks = [0] * len(added)
    if completion.finish_reason != "error":
        assert output.prompt_logprobs and completion.logprobs
        found = output.prompt_logprobs[start:] + completion.logprobs
        at_each = [at[token_id] for at, token_id in zip(found, added, strict=True)]
        logprobs = [at.logprob for at in at_each]
        ranks = [at.rank for at in at_each]
    return Score(added, logprobs, ranks, sum(logprobs))


# ------------------------------------------------------------------------- python -m nanoengine


def main(arguments: list[str] | None = None) -> None:
    """Prints the scores of the choices after a prompt, the likeliest first."""
    parser = Parser(
        "python -m nanoengine score", description="shows which continuation of a prompt is the "
        "likeliest: the log-probability of each, its probability among them, and the text")
    parser.add_argument("prompt", help="a text that ends where a word ends")
    parser.add_argument("choices", nargs="+", help="texts, each with its leading space")
    parser.add_argument("--mean", action="store_true", help="divide by the number of tokens, "
                        "since long choices would lose otherwise")
    parser.add_llm()
    flags = parser.parse_args(arguments)
    with parser.faults(), LLM(flags.model, **options_of(flags)) as llm:
        scores = llm.score(flags.prompt, flags.choices, use_tqdm=False)
    values = [each.mean if flags.mean else each.cumulative_logprob for each in scores]
    total = sum(math.exp(value - max(values)) for value in values)
    for value, choice in sorted(zip(values, flags.choices), reverse=True):
        share = math.exp(value - max(values)) / total
        print(f"{value:9.3f} {share:7.1%}  {flags.prompt}{choice}")
