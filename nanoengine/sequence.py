"""`Sequence`: the tokens of one completion, the blocks with their K and V, and its progress.

Plain Python: nothing here knows a tensor, a model or a policy.

    token_ids    Once upon a | time there was | a fox        num_tokens = 8
    computed     ─────────────────────────────▶              num_computed_tokens = 6
    block_table  [   4      ] [      9       ] [  2     ]    blocks of 3 tokens

A step computes the next tokens of those that are left: here "a", or "a fox". A decode is the case
of one token left, a prefill the case of several.
"""

import struct
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from nanoengine.sampling_params import SamplingParams

# what the sampler gives for a row of which no token can be sampled
NO_TOKEN = -1
NONE_LEFT = -2
FAILURES = {
    NO_TOKEN: "its logits are NaN or infinite, of the model or by its processors",
    NONE_LEFT: "its constraints (bad_words, min_tokens, …) leave no token"}


# two unsigned numbers of 64 bits
two_words = struct.Struct("<QQ").pack


def hash64(seed: int, number: int) -> int:
    """A 64-bit hash of both: a request's seed from the engine's, a draw from a request's."""
    return xxhash.xxh64_intdigest(two_words(seed % 2**64, number))


def state(make: Any) -> Any:
    """A field of the engine's, which a fork does not take over: `make` gives its first value."""
    return field(default_factory=make, init=False)


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what is generated behind it: one completion.

    A sequence is waiting while it has no blocks, running while it has some, and finished once it
    has a `finish_reason`.

    token_ids: the prompt, then every generated token. While a step is in flight that samples the
        last one, its value is not known on the host yet: the token is pending, and -1 - row stands
        for it, its row among those that the step samples. So the next step can be scheduled and
        launched already; the device looks the token up (`step_inputs.known_ids`).
    max_num_tokens: with so many tokens the sequence is finished ("length").
    end_tokens: the token ids that end it, each with the `stop_reason` that it gives.
    priority: smaller ones come first.
    index: the number of this completion in its request.
    needs_tokens: whether its next step needs all its tokens on the host.
    constraints: what constraints.py keeps for it, if its parameters ask for that.
    metrics: what happened to its request, see metrics.py; an engine needs it.
    logprobs_temperature: divides the logits of which its `logprobs` are, if it is not 0.
    num_held_tokens: once admitted, it holds blocks for at least so many tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    end_tokens: dict[int, int | None] = field(default_factory=dict)
    priority: int = 0
    index: int = 0
    needs_tokens: bool = False
    constraints: Any = None
    logprobs_temperature: float = 0.0
    metrics: Any = None
    num_held_tokens: int = 0

    num_computed_tokens: int = state(int)
    block_table: array = state(lambda: array("i"))
    # (hash, tokens) of each full block, as far as they were needed: see block_manager.py
    block_hashes: list[tuple[bytes, bytes]] = state(list)
    # how many tokens were computed when it was last preempted
    num_preempted_tokens: int = state(int)
    # the other completions of the prompt (n > 1), which begin with its first generated token
    forks: list["Sequence"] = state(list)
    # of tokens of the prompt and generated ones that have some, by position: `find_logprobs`
    logprobs: dict[int, Any] = state(dict)
    finish_reason: str | None = state(lambda: None)
    stop_reason: int | str | None = state(lambda: None)
    # what its call has to raise
    error: Exception | None = state(lambda: None)

    num_tokens = property(lambda self: len(self.token_ids))
    num_uncomputed_tokens = property(lambda self: len(self.token_ids) - self.num_computed_tokens)
    num_known_tokens = property(lambda self: len(self.token_ids) - (self.token_ids[-1] < 0))
    is_running = property(lambda self: len(self.block_table) > 0)
    # whether the next step has to wait for its last token
    is_awaited = property(lambda self: self.needs_tokens and self.token_ids[-1] < 0)
    # then each step that computes a part of its prompt scores that part
    is_scored = property(lambda self: self.params.prompt_logprobs is not None)

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that decides its token at a position; 0 for greedy ones."""
        return self.params.temperature and (hash64(self.seed, position) >> 11) * 2.0**-53

    def fork(self, **changes: Any) -> "Sequence":
        """A sequence with the same tokens and parameters, which has yet to begin."""
        return replace(self, **{"token_ids": self.token_ids[:], **changes})

    def __repr__(self) -> str:
        status = self.finish_reason or ("running" if self.is_running else "waiting")
        return (f"<{self.request_id}.{self.index} {status}: {self.num_computed_tokens} of "
                f"{self.num_tokens} tokens computed, blocks {list(self.block_table)}>")
