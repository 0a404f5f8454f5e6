"""`SamplingParams`: how to sample a request.

Nothing here needs a model: `requests.py` makes the checks that need a vocabulary or a tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nanoengine.errors import Condition, Options
from nanoengine.features import of

CONDITIONS: list[Condition] = [
    ("n", lambda p: 1 <= p.n <= 16384, "from 1 to 16384"),
    ("temperature", lambda p: 0 <= p.temperature, "at least 0"),
    ("top_p", lambda p: 0 < p.top_p <= 1, "above 0, and at most 1"),
    ("min_p", lambda p: 0 <= p.min_p <= 1, "from 0 to 1"),
    ("max_tokens", lambda p: p.max_tokens is None or p.max_tokens >= 1, "at least 1, or None")]


@dataclass(kw_only=True)
class SamplingParams(Options):
    """How one request is sampled and when it ends; names and defaults are vLLM's.

    n: the number of completions of a prompt, at most 16384; the prompt is computed once. strict.py
        refuses more than 1 with temperature 0.
    temperature: divides the logits; 0 is greedy.
    top_k: sample among the k likeliest tokens, and those as likely as the k-th; 1 is greedy, 0 or
        -1 means all.
    top_p: sample among the likeliest tokens: the fewest whose probabilities add up to top_p or
        more.
    min_p: drop tokens whose probability is below min_p times that of the likeliest token.
    seed: a draw depends only on the seed and on the position; None or -1: a seed derived from the
        engine's seed and the number of the request.
    max_tokens: the most tokens to generate; None: up to the engine's `max_model_len`.
    min_tokens: until this many tokens are generated, EOS and stop tokens are masked, and stop
        strings do not count.
    stop: strings that end the completion; they are cut from the text unless
        include_stop_str_in_output.
    stop_token_ids: tokens that end the completion, besides EOS.
    include_stop_str_in_output: keep the stop string, or the text of the stop token or EOS, in the
        text.
    ignore_eos: continue after EOS.
    truncate_prompt_tokens: keep only this many tokens, from the end of the prompt; -1: as many as
        leave room for max_tokens.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: turn tokens into text; stop strings need it.
    logprobs: return the log-probabilities (log-softmax of the raw logits) of this many of the
        likeliest tokens at each position, and of the sampled token. 0: only of the sampled token;
        -1: of all tokens.
    prompt_logprobs: the same for each token of the prompt except the first, in
        `RequestOutput.prompt_logprobs`. The prompt is then computed again, even if it is cached.
    prompt_logprobs_start: the position of the first token that needs prompt_logprobs. Earlier
        tokens have None, and can come from the prefix cache.
    presence_penalty: subtracted from the logits of tokens that were generated before.
    frequency_penalty: the same, once for each time that the token was generated.
    repetition_penalty: divides positive and multiplies negative logits of all tokens so far, prompt
        included (Keskar et al., 2019, arXiv:1909.05858).
    bad_words: strings that never appear in the generated text; the prompt does not count.
    allowed_token_ids: the only tokens that may be generated.
    logit_bias: numbers to add to logits, by token id.
    structured_outputs: the required form of the text, one of {"json": schema}, {"json_object":
        True}, {"regex": text}, {"choice": list of texts}, {"grammar": text in Lark or EBNF} or
        {"structural_tag": tags with a separator}: see structured_outputs/.
    logits_processors: a list of functions `(input_ids, scores) -> scores` on tensors of shape (1,
        tokens so far) and (1, vocab_size), as in transformers; they run after all of the above.
    options: values for a user's own features, by name: see `Feature.OPTIONS`.

    strict.py clamps nonzero temperature, repetition_penalty and biases to magnitudes 1e-18 … 1e18.
    Fields that are declared with `of` belong to an optional feature: see features.py. Raises
    ValueError for a value out of range, with its name and what is accepted.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = of("sampling.constraints", 0)
    stop: list[str] = of("sampling.texts")
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = of("sampling.texts", False)
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = of("sampling.texts", None)
    skip_special_tokens: bool = of("sampling.texts", True)
    detokenize: bool = of("sampling.texts", True)
    logprobs: int | None = of("sampling.logprobs", None)
    prompt_logprobs: int | None = of("sampling.logprobs", None)
    prompt_logprobs_start: int = of("sampling.logprobs", 0)
    presence_penalty: float = of("sampling.constraints", 0.0)
    frequency_penalty: float = of("sampling.constraints", 0.0)
    repetition_penalty: float = of("sampling.constraints", 1.0)
    bad_words: list[str] = of("sampling.constraints")
    allowed_token_ids: list[int] | None = of("sampling.constraints", None)
    logit_bias: dict[int, float] | None = of("sampling.constraints", None)
    structured_outputs: dict[str, object] | None = of("sampling.structured_outputs", None)
    logits_processors: list[Callable] = of("sampling.logits_processors")
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(CONDITIONS)

    # whether the first of the likeliest tokens is always taken
    is_greedy = cached_property(lambda self: self.temperature == 0 or self.top_k == 1)

    @cached_property
    def truncations(self) -> tuple[str, ...]:
        """The truncations of this request. Greedy rows need none: the likeliest token is always
        kept."""
        asked = {"min_p": self.min_p > 0, "top_k": self.top_k > 0, "top_p": self.top_p < 1}
        return tuple(name for name in asked if asked[name] and not self.is_greedy)

    def clone(self) -> "SamplingParams":
        """Returns a copy with new lists; the elements of the lists are the same."""
        copies = {key: value.copy() for key, value in vars(self).items() if hasattr(value, "copy")}
        return replace(self, **copies)
