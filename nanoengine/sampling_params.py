"""`SamplingParams`: how to sample a request.

Nothing here knows a model: `requests.py` makes the checks that need a vocabulary or a tokenizer.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nanoengine.seams import check

CONDITIONS: Any = (
    ("n", lambda p: 1 <= p.n <= 16384, "from 1 to 16384"),
    ("n", lambda p: p.n == 1 or p.temperature > 0,
     "1 for temperature=0 (n must be 1 when using greedy sampling, got {n})"),
    ("temperature", lambda p: 0 <= p.temperature, "at least 0"),
    ("top_p", lambda p: 0 < p.top_p <= 1, "above 0, and at most 1"),
    ("min_p", lambda p: 0 <= p.min_p <= 1, "from 0 to 1"),
    ("max_tokens", lambda p: p.max_tokens is None or p.max_tokens >= 1, "at least 1, or None"),
    ("min_tokens", lambda p: 0 <= p.min_tokens <= (p.max_tokens or p.min_tokens),
     "0 to max_tokens={max_tokens}"),
    ("stop", lambda p: isinstance(p.stop, list) and all(p.stop), "a list of texts, none empty"),
    ("detokenize", lambda p: p.detokenize or not p.stop, "True for stop={stop!r}"))


@dataclass(kw_only=True)
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
    skip_special_tokens: leave special tokens out of the text.
    detokenize: turn tokens into text at all; stop strings need it.

    nanoengine_extensions/options.py adds those of optional features, such as log-probabilities and
    penalties. Raises ValueError for a value out of range, with its name and what is accepted.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        check(self, CONDITIONS)

    # whether the extensions' constraints.py edits its logits; SamplingParams there has more reasons
    is_constrained = property(lambda self: self.min_tokens > 0)

    @cached_property
    def edits(self) -> tuple[str, ...]:
        """The edits that its rows of logits need besides a temperature.

        Greedy rows need no truncation: the likeliest token is always kept.
        """
        asked = {"constraints": self.is_constrained}
        if self.temperature:
            asked |= {"min_p": self.min_p > 0, "top_k": self.top_k > 0, "top_p": self.top_p < 1}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def clone(self) -> "SamplingParams":
        """Returns a copy with new lists; the elements of the lists are the same."""
        copies: Any = {name: value.copy() for name, value in vars(self).items()
                       if isinstance(value, (list, dict))}
        return replace(self, **copies)
