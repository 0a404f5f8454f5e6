"""`Batch`: one step, as the scheduler decides it and the runner computes it.

Nothing here decides or computes anything: it is the message between the two.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.sequence import Sequence


@dataclass
class Copies:
    """The blocks to copy before a step computes. Each dict maps a target to its source.

    The runner performs the copies in the order of these fields. swap_out and swap_in are to and
    from a pool on the host, if there is one.

    The order matters, since a block that is freed in a step can be handed out again in the same
    step. Block 5 of a preempted sequence is first copied to the host. Then the copy for its new
    owner, a fork or a sequence that comes back, is written to it.
    """

    swap_out: dict[int, int] = field(default_factory=dict)
    copy_on_write: dict[int, int] = field(default_factory=dict)
    swap_in: dict[int, int] = field(default_factory=dict)


class Row(NamedTuple):
    """A row of logits, for the token of `seq` at `position`.

    source: the index in the batch of the sequence that computes the token before `position`: `seq`
        itself, or its parent, if `seq` is a new fork. Features can add rows: for a finished
        sequence, whose token is dropped, or for a copy of one (speculation).
    """

    source: int
    seq: Sequence
    position: int


@dataclass(repr=False)
class Batch:
    """One step: the whole message from scheduler to runner.

    For sequence i, the step computes `num_tokens[i]` tokens from `starts[i]` on. A batch does not
    change when its sequences do, so that it can be read later.

    budget: how many more tokens the step may compute (set by `Scheduler.build`).
    sampled: a row for each token to draw; when forks begin (n > 1), several rows have the same
        source (set by `Scheduler._add_tokens`).
    copies: the block copies to do first (set by `Scheduler.schedule`).
    admitted: the sequences that were waiting, each with the number of tokens that the prefix cache
        had (set by `Scheduler.build`).
    preempted: the sequences that were preempted since the step before, each with "swap" or
        "recompute" (set by `Scheduler.schedule`).
    is_known: whether its tokens are known without a step, from guesses that an earlier step has
        computed (set by speculation).
    is_advanced: whether its tokens count as computed (set by `Scheduler.advance`).
    """

    budget: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[Row] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[tuple[Sequence, str]] = field(default_factory=list)
    is_known: bool = False
    is_advanced: bool = False

    def __len__(self) -> int:
        return len(self.sequences)
