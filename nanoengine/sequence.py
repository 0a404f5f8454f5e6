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

    Times are seconds of `time.monotonic()`, 0 for not yet. `queue_time`, `time_to_first_token`,
    `time_per_output_token` and `end_to_end_time` are seconds between two of them.
    """

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0  # of the last token, of the completion that took longest
    num_decoded_tokens: int = 0  # after the first ones, of the completion that took longest
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when first admitted
    num_preemptions: int = 0

    queue_time = property(lambda self: self.first_scheduled_time - self.arrival_time)
    time_to_first_token = property(lambda self: self.first_token_time - self.arrival_time)
    time_per_output_token = property(lambda self: (
        (self.finished_time - self.first_token_time) / max(1, self.num_decoded_tokens)))
    end_to_end_time = property(lambda self: self.finished_time - self.arrival_time)


@dataclass(slots=True)
class PendingToken:
    """Stands for a token that is sampled on the device and not yet known here.

    It is no number: hashing it, comparing it or making text of it too early raises a TypeError.
    """

    row: int  # of those that its step samples


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what is generated behind it.

    Of its `num_tokens` known tokens the KV cache holds `num_computed_tokens`; a step computes some
    of the rest. Prefill and decode are no states: a decode is the case of one token left. It is
    waiting while it has no blocks, running while it has some, finished once it has a reason.
    While a step runs on the device, the last of its tokens may be a `PendingToken`.
    """

    request_id: str
    token_ids: list[Any]  # the prompt, then every generated token
    num_prompt_tokens: int
    max_num_tokens: int  # finished ("length") when it has so many
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    processors: list[Callable] = field(default_factory=list)  # edit its logits (sampler.py)
    end_tokens: dict[int, int | None] = field(default_factory=dict)  # that end it: stop_reason
    priority: int = 0  # smaller ones first
    num_held_tokens: int = 0  # it holds blocks for so many at least, from its admission on
    index: int = 0  # which completion of its request
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    # Its state in the engine; `dataclasses.replace` makes another one that has yet to begin.
    forks: list["Sequence"] = field(default_factory=list, init=False)  # begin when it has a token
    group: list["Sequence"] = field(default_factory=list, init=False)  # beams that go with it
    num_computed_tokens: int = field(default=0, init=False)
    num_preempted_tokens: int = field(default=0, init=False)  # computed when last preempted
    block_table: array = field(default_factory=lambda: array("i"), init=False)
    block_keys: list[tuple[int, bytes]] = field(default_factory=list, init=False)  # of full blocks
    last_step: int = field(default=0, init=False)  # in which it ran
    gave_way: bool = field(default=False, init=False)  # to the head of a long queue, once
    logprobs: list[Any] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)

    num_tokens = property(lambda self: len(self.token_ids))
    num_uncomputed_tokens = property(lambda self: len(self.token_ids) - self.num_computed_tokens)
    members = property(lambda self: self.group or [self])  # are admitted and preempted together
