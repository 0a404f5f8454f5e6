"""`SamplingParams`: how to sample a request, checked on creation.

Each field has its default and its rule in one line. A broken rule is a `ValueError` that names the
field, the value and what is accepted; an unknown keyword raises one that names the nearest known
keyword. Nothing here knows a model: `requests.py` makes the checks that need a vocabulary or a
tokenizer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from nanoengine_extensions.checks import (
    AS_LIST, DISTINCT, EMPTY_LIST, STRICT, Count, Float, Int, Moderate, NumLogprobs, Texts, TokenId,
    explained, is_from_signal)


def rejected(name: str, value: Any, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={value!r:.1000} is not accepted: it must be {accepted}")


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Turns an error that a library or a user's function raises for some input into a ValueError
    that names the input. The first error is its cause. What the handler of a signal raises, such as
    a time limit, is not about the input."""
    try:
        yield
    except Exception as error:
        if is_from_signal(error):
            raise
        raise ValueError(f"{what}: {str(error) or repr(error)}") from error


@explained
@dataclass(config=STRICT, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends; names and defaults are vLLM's.

    n: the number of completions of a prompt, at most 16384; the prompt is computed once. More than
        1 needs a temperature above 0.
    temperature: divides the logits; 0 is greedy.
    top_k: sample among the k likeliest tokens; 0 or -1 for all.
    top_p: sample among the fewest likeliest tokens whose probabilities add up to at least p.
    min_p: drop tokens that are less likely than min_p times the likeliest.
    seed: a draw depends on it and on the position; None or -1: derived from the engine's seed and
        the number of the request.
    max_tokens: the most tokens to generate; None: up to the engine's `max_model_len`.
    min_tokens: until this many tokens are generated, EOS and stop tokens are masked, and stop
        strings do not count.
    stop: strings that end the completion; they are cut from the text unless
        include_stop_str_in_output.
    stop_token_ids: tokens that end the completion, besides EOS.
    include_stop_str_in_output: keep the stop string, or the text of the stop token or EOS, in the
        text.
    ignore_eos: go on after EOS.
    logprobs: return the log-probabilities (log-softmax of the raw logits) of this many of the
        likeliest tokens at each position, and of the sampled token. 0: only of that; -1: of all.
    prompt_logprobs: the same for each token of the prompt except the first, in
        `RequestOutput.prompt_logprobs`. The prompt is then computed anew, whatever is cached.
    presence_penalty: subtracted from the logits of tokens that were generated before.
    frequency_penalty: the same, once for each time that the token was generated.
    repetition_penalty: divides positive and multiplies negative logits of all tokens in prompt or
        output (Keskar et al., 2019, arXiv:1909.05858).
    bad_words: texts that are never generated; the prompt does not count.
    allowed_token_ids: the only tokens that may be generated.
    logit_bias: numbers to add to logits, by token id.
    logits_processors: a list of functions `(input_ids, scores) -> scores` on tensors of shape (1,
        tokens so far) and (1, vocab_size), as in transformers; they run after all of the above.
    structured_outputs: what the text must be, one of {"json": schema}, {"json_object": True},
        {"regex": text}, {"choice": list of texts} and {"grammar": text in Lark}: see
        structured_outputs.py.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: turn tokens into text at all; stop strings need it.

    Temperature, repetition_penalty and biases are clamped in magnitude to 1e-18 … 1e18; 0 stays 0.

    Raises ValueError for a value out of range, with its name and what is accepted.
    """

    n: Annotated[Count, Field(le=16384)] = 1
    temperature: Annotated[Moderate, Field(ge=0)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] = 0
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[Float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Int | None, AfterValidator(lambda v: None if v == -1 else v)] = None
    max_tokens: Count | None = 16
    min_tokens: Int = 0
    stop: Texts = EMPTY_LIST
    stop_token_ids: Annotated[list[TokenId], AS_LIST, DISTINCT] = EMPTY_LIST
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Moderate, Field(gt=0)] = 1.0
    bad_words: Texts = EMPTY_LIST
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    logit_bias: dict[TokenId, Moderate] | None = None
    logits_processors: Annotated[list[Callable], AS_LIST] = EMPTY_LIST
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    @model_validator(mode="after")
    def check_together(self) -> "SamplingParams":
        if not 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens):
            raise rejected("min_tokens", self.min_tokens, f"0 to max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise rejected("detokenize", False, f"True for stop={self.stop!r}")
        # vLLM's message
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}")
        return self

    @cached_property
    def edits(self) -> tuple[str, ...]:
        """The edits that its rows of logits need besides a temperature.

        Greedy rows need no truncation: the likeliest token is always kept.
        """
        asked: dict[str, Any] = {"constraints": (
            self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
            or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
            or self.logits_processors or self.structured_outputs is not None)}
        if self.temperature:
            asked |= {"min_p": self.min_p > 0, "top_k": self.top_k > 0, "top_p": self.top_p < 1}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def clone(self) -> "SamplingParams":
        """Returns a copy with new lists; the logits processors are the same."""
        return replace(self)
