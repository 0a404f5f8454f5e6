"""`Sequence`: the tokens of one completion, where their K and V are, and how far it has come.

Plain Python: nothing here knows a tensor, a model or a policy.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanoengine.sampling_params import SamplingParams


@dataclass
class RequestMetrics:
    """When a request reached each stage, in seconds of `time.monotonic()`; 0 for not yet."""

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what is generated behind it.

    Of its `num_tokens` known tokens the KV cache holds `num_computed_tokens`; a step computes some
    of the rest. Prefill and decode are no states: a decode is the case of one token left. It is
    waiting while it has no blocks, running while it has some, finished once it has a reason.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then every generated token
    num_prompt_tokens: int
    max_num_tokens: int  # finished ("length") when it has so many
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    processors: list[Callable] = field(default_factory=list)  # edit its logits (sampler.py)
    end_tokens: dict[int, int | None] = field(default_factory=dict)  # that end it: stop_reason
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted
    block_table: array = field(default_factory=lambda: array("i"))
    block_hashes: list[int] = field(default_factory=list)  # of its full blocks, once asked for
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
