"""`Sequence`: the tokens of one completion, the blocks with their K and V, and its progress.

`Batch`: one step of several sequences, which scheduler.py plans and model_runner.py computes.

A model gives the next token after all tokens so far. It does not compute those again each time: the
keys and values of their attention (K and V) stay in memory, in the KV cache. So a sequence is a
list of tokens, and a note of how many of them are in the cache, and where.

Both classes are plain data, without tensors.

    token_ids    Once upon a | time there was | a fox        num_tokens = 8
    computed     ─────────────────────────────▶              num_computed_tokens = 6
    block_table  [   4      ] [      9       ] [  2     ]    blocks of 3 tokens

A step computes tokens that have no K and V yet. In the example these are "a" and "fox"; a step
computes both, or only the first. If only the newest token is left, this is called a decode. If
several are left, as at the start, it is a prefill; a long one is cut into chunks, one for each
step. To the kernels, a chunk of one token is a decode, too.
"""

from array import array
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any, NamedTuple

import xxhash

from nanoengine.sampling_params import SamplingParams

# The sampler's result for a row whose logits allow no token. Negative numbers near 0 are pending
# tokens: see `Sequence.token_ids`.
NO_TOKEN = -(2**30)


def hash64(seed: int, number: int) -> int:
    """Returns a 64-bit hash of two numbers. A draw is the hash of a sequence's seed and a position.
    If the user gives no seed, it is the hash of the engine's seed and the request's number."""
    return xxhash.xxh64_intdigest(pack("<QQ", seed % 2**64, number))


def fresh(make: Any = lambda: None) -> Any:
    """A field that is not an argument of the constructor. Each new object, also a fork, starts with
    `make()`."""
    return field(default_factory=make, init=False)


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it: one completion.

    A sequence in one of the scheduler's queues is waiting while it has no blocks, and running while
    it has some. It is finished once it has a `finish_reason`.

    token_ids: the prompt, then every generated token. On a GPU, a step is launched before the
        tokens of the previous one have arrived (engine.py). Until then such a token is pending,
        and stored as -1 - row, where `row` is its place in `Batch.sampled`; the device looks it
        up (`step_inputs.known_ids`).
    max_num_tokens: the sequence is finished ("length") once it has this many tokens.
    end_tokens: the token ids that end it, each with its `stop_reason`.
    priority: smaller numbers come first.
    index: the number of this completion in its request.
    edits: the features that edit its rows of logits, by the names of their classes.
    needs_tokens: whether its next step needs all its tokens on the host; features set it.
    max_cached_tokens: the most tokens that may come from the prefix cache; features lower it.

    kept: the data that features keep about it, by the feature's name: see observers.py.
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
    edits: tuple[str, ...] = ()
    needs_tokens: bool = False
    max_cached_tokens: int = 2**31

    num_computed_tokens: int = fresh(int)
    block_table: array = fresh(lambda: array("i"))
    # (hash, tokens) of the full blocks that have been hashed so far: see block_manager.py
    block_hashes: list[tuple[bytes, bytes]] = fresh(list)
    # the other completions of the prompt (n > 1), which begin once the prompt is computed
    forks: list["Sequence"] = fresh(list)
    kept: dict[str, Any] = fresh(dict)
    finish_reason: str | None = fresh()
    stop_reason: int | str | None = fresh()
    # the error that its call must raise
    error: Exception | None = fresh()

    num_tokens = property(lambda self: len(self.token_ids))
    num_uncomputed_tokens = property(lambda self: len(self.token_ids) - self.num_computed_tokens)
    num_known_tokens = property(lambda self: len(self.token_ids) - (self.token_ids[-1] < 0))
    is_running = property(lambda self: len(self.block_table) > 0)

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that decides its token at a position; 0 if it is greedy."""
        if self.params.is_greedy:
            return 0.0
        return (hash64(self.seed, position) >> 11) * 2.0**-53

    def fork(self, **changes: Any) -> "Sequence":
        """Returns a new sequence with the same tokens and parameters."""
        return replace(self, **{"token_ids": self.token_ids[:], **changes})


# ----------------------------------------------------------------------------------- one step


@dataclass
class Copies:
    """The blocks to copy at the start of a step. Each dict maps a target to its source.

    The runner performs the copies in the order of these fields. swap_out copies blocks to a pool on
    the host, and swap_in copies them back, if there is such a pool.

    The order matters, since a block that is freed in a step can be handed out again in the same
    step. For example, block 5 of a preempted sequence is first copied to the host. Only then is it
    overwritten for its new owner: a fork, or a sequence that comes back.
    """

    swap_out: dict[int, int] = fresh(dict)
    copy_on_write: dict[int, int] = fresh(dict)
    swap_in: dict[int, int] = fresh(dict)


class Row(NamedTuple):
    """A row of logits, for the token of `seq` at `position`.

    source: the index in `Batch.sequences` of the sequence whose hidden state gives the logits:
        `seq` itself, or its parent, if `seq` is a fork that begins. Features can add more rows.
    """

    source: int
    seq: Sequence
    position: int


@dataclass(repr=False)
class Batch:
    """One step, as the scheduler planned it. At launch, the runner also reads tokens, block tables
    and parameters from the sequences themselves.

    For sequence i, the step computes `num_tokens[i]` tokens from `starts[i]` on. Both are copies:
    a batch can still be read after its sequences change.

    budget: how many more tokens the step may compute (set by `Scheduler.build`).
    sampled: a row for each token to draw; when forks begin (n > 1), several rows have the same
        source (set by `Scheduler._add_tokens`).
    copies: the block copies to do first (set by `Scheduler.schedule`).
    admitted: the sequences that were waiting, each with the number of tokens that the prefix cache
        had (set by `Scheduler.build`).
    preempted: the sequences that were preempted since the previous step, each with "swap" or
        "recompute", and with how many of its tokens were computed (set by `Scheduler.schedule`).
    is_advanced: whether its tokens count as computed (set by `Scheduler.advance`).
    """

    budget: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[Row] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[tuple[Sequence, str, int]] = field(default_factory=list)
    is_advanced: bool = False

    def __len__(self) -> int:
        return len(self.sequences)
