"""`Sequence`: the tokens of one completion, the blocks with their K and V, and its progress.

Plain Python: nothing here knows a tensor, a model or a policy.

    token_ids    Once upon a | time there was | a fox        num_tokens = 8
    computed     ─────────────────────────────▶              num_computed_tokens = 6
    block_table  [   4      ] [      9       ] [  2     ]    blocks of 3 tokens

A step computes the next tokens of those that are left: here "a", or "a fox". A decode is the case
of one token left, a prefill the case of several.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.sampling_params import SamplingParams


# what the sampler gives for a row of which no token can be sampled
NO_TOKEN = -1


@dataclass
class RequestMetrics:
    """How a request fared, with all its completions together.

    Times are seconds of `time.monotonic()`, and 0 until the event. `queue_time`,
    `time_to_first_token`, `time_per_output_token` and `end_to_end_time` are seconds between two.

    finished_time: of the last token of the longest completion.
    num_decoded_tokens: tokens of the longest completion, without its first.
    num_cached_tokens: tokens of the prompt that the prefix cache had at the first admission.
    """

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_decoded_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    queue_time = property(lambda m: m.first_scheduled_time - m.arrival_time)
    time_to_first_token = property(lambda m: m.first_token_time - m.arrival_time)
    end_to_end_time = property(lambda m: m.finished_time - m.arrival_time)
    time_per_output_token = property(
        lambda m: (m.finished_time - m.first_token_time) / max(1, m.num_decoded_tokens))


@dataclass(eq=False, slots=True)
class PendingToken:
    """Stands for a token that the device samples, and whose value the host does not know yet.

    Its whole life, when the engine runs ahead (`engine.py`):

    1. Step N is launched. `Scheduler.advance` appends a PendingToken to each sequence that the
       step samples, so that step N+1 can be scheduled as if the token were known.
    2. Step N+1 is launched. Its input for this token is -1 - row, and the device looks up what it
       has sampled in that row of step N.
    3. The tokens of step N reach the host. `Scheduler.postprocess` puts the number in its place.

    row: the row of the token among those that its step samples.

    A pending token is no number: hashing, comparing or packing it raises a TypeError.
    """

    row: int

    def __eq__(self, other: object) -> bool:
        raise TypeError("a pending token has no value yet")


def state(make: Callable) -> Any:
    """A field of the engine's, which a fork does not take over: `make` gives its first value."""
    return field(default_factory=make, init=False)


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what is generated behind it: one completion.

    A sequence is waiting while it has no blocks, running while it has some, and finished once it
    has a `finish_reason`. While a step runs on the device, its last token may be a `PendingToken`.

    token_ids: the prompt, then every generated token.
    max_num_tokens: with so many tokens the sequence is finished ("length").
    end_tokens: the token ids that end it, each with the `stop_reason` that it gives.
    late_tokens: the token ids that may not come before `min_tokens`.
    bad_words: the token ids of each word that may not come.
    priority: smaller ones come first.
    num_held_tokens: once admitted, it holds blocks for at least so many tokens.
    index: the number of this completion in its request.
    needs_tokens: whether its next step needs all its tokens on the host.
    """

    request_id: str
    token_ids: list[Any]
    num_prompt_tokens: int
    max_num_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    end_tokens: dict[int, int | None] = field(default_factory=dict)
    late_tokens: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    priority: int = 0
    num_held_tokens: int = 0
    index: int = 0
    needs_tokens: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    num_computed_tokens: int = state(int)
    block_table: array = state(lambda: array("i"))
    # (hash, tokens) of each full block, as far as they were needed: see block_manager.py
    block_hashes: list[tuple[bytes, bytes]] = state(list)
    # how many tokens were computed when it was last preempted
    num_preempted_tokens: int = state(int)
    # the other completions of the prompt (n > 1), which begin with its first generated token
    forks: list["Sequence"] = state(list)
    # all beams of the prompt: they are admitted and preempted together
    group: list["Sequence"] = state(list)
    # the number of the last step with this sequence
    last_step: int = state(int)
    # whether it has given its place to the head of a long queue
    gave_way: bool = state(bool)
    logprobs: list[Any] = state(list)
    # whether log-probabilities of its prompt are to come, and those that it has, by position
    is_scored: bool = state(bool)
    prompt_logprobs: dict[int, Any] = state(dict)
    finish_reason: str | None = state(lambda: None)
    stop_reason: int | str | None = state(lambda: None)

    num_tokens = property(lambda self: len(self.token_ids))
    num_uncomputed_tokens = property(lambda self: len(self.token_ids) - self.num_computed_tokens)
    is_running = property(lambda self: len(self.block_table) > 0)
    group_or_self = property(lambda self: self.group or [self])

    # whether its last token is not yet known on the host
    is_pending = property(lambda self: isinstance(self.token_ids[-1], PendingToken))
    num_known_tokens = property(lambda self: len(self.token_ids) - self.is_pending)
    # whether the next step has to wait for its last token
    is_awaited = property(lambda self: self.needs_tokens and self.is_pending)

    def device_ids(self, start: int, stop: int | None = None) -> list[int]:
        """Token ids as the device gets them: -1 - row for a pending token."""
        token_ids = self.token_ids[start:stop]
        if token_ids and isinstance(token_ids[-1], PendingToken):
            token_ids[-1] = -1 - token_ids[-1].row
        return token_ids

    def fork(self, **changes: Any) -> "Sequence":
        """A sequence with the same tokens and parameters, which has yet to begin."""
        return replace(self, **{"token_ids": self.token_ids[:], **changes})

    def __repr__(self) -> str:
        status = self.finish_reason or ("running" if self.is_running else "waiting")
        return (f"<{self.request_id}.{self.index} {status}: {self.num_computed_tokens} of "
                f"{self.num_tokens} tokens computed, blocks {list(self.block_table)}>")
