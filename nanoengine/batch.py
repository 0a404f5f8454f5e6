"""`Batch`: one step, as the scheduler decides it and the runner computes it.

Nothing here decides or computes anything: it is the message between the two.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.sequence import Sequence


@dataclass
class Copies:
    """The blocks to copy before a step computes. Each dict maps a target to its source.

    The runner does the copies in the order of these fields; an extension does those to and from
    the host.

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
        itself, or its parent, if `seq` is a new fork. With speculation, `seq` can be a copy that
        has guesses.
    """

    source: int
    seq: Sequence
    position: int


@dataclass
class Batch:
    """One step: the whole message from scheduler to runner.

    For sequence i, the step computes `num_tokens[i]` tokens from `starts[i]` on. A batch does not
    change when its sequences do, so that it can be read later.

    budget: how many more tokens the step may compute (set by `Scheduler.build`).
    sampled: a row for each token to draw; when forks begin (n > 1), several rows have the same
        source (set by `Scheduler._place`).
    copies: the block copies to do first (set by `Scheduler.schedule`).
    admitted: the sequences that were waiting, each with the number of tokens that the prefix cache
        had (set by `Scheduler.build`).
    preempted: the sequences that were preempted since the step before, each with "swap" or
        "recompute" (set by `Scheduler.schedule`).
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
    is_advanced: bool = False

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        parts = zip(self.sequences, self.starts, self.num_tokens)
        shown = [f"{seq.request_id}.{seq.index}[{i}:{i + count}]" for seq, i, count in parts]
        return f"<Batch of {sum(self.num_tokens)} tokens: {' '.join(shown)}>"
