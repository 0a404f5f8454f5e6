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
    """How a request fared, all its completions together.

    Times are seconds of `time.monotonic()`, 0 for not yet; the properties are seconds between two
    of them, negative before the later one has come.
    """

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0  # of the completion that took longest
    num_output_tokens: int = 0  # of the longest completion
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when first admitted
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float:
        return self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float:
        """From one token to the next, on average; 0 for a single one."""
        decoding = self.finished_time - self.first_token_time
        return decoding / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0

    @property
    def end_to_end_time(self) -> float:
        return self.finished_time - self.arrival_time


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what is generated behind it.

    Of its `num_tokens` known tokens the KV cache holds `num_computed_tokens`; a step computes some
    of the rest. Prefill and decode are no states: a decode is the case of one token left. It is
    waiting while it has no blocks, running while it has some, finished once it has a reason. Among
    the waiting, it is swapped out while it has blocks on the host.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then every generated token
    num_prompt_tokens: int
    max_num_tokens: int  # finished ("length") when it has so many
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    processors: list[Callable] = field(default_factory=list)  # edit its logits (sampler.py)
    end_tokens: dict[int, int | None] = field(default_factory=dict)  # that end it: stop_reason
    priority: int = 0  # smaller ones first
    index: int = 0  # which completion of its request
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    forks: list["Sequence"] = field(default_factory=list)  # begin when its prompt is computed
    group: list["Sequence"] = field(default_factory=list)  # beams that come and go with it
    num_computed_tokens: int = 0
    num_preempted_tokens: int = 0  # computed ones that the last preemption has cost
    block_table: array = field(default_factory=lambda: array("i"))
    block_hashes: list[int] = field(default_factory=list)  # of its full blocks, once asked for
    host_blocks: list[int] = field(default_factory=list)  # while it is swapped out
    num_reserved_blocks: int = 0  # promised beyond those in the table
    last_step: int = 0  # in which it ran
    gave_way: bool = False  # once, to the head of a long queue
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def members(self) -> list["Sequence"]:
        """Those who are admitted and preempted together."""
        return self.group or [self]
