"""`Batch`: one step, as the scheduler decides it and the runner computes it.

Nothing here decides or computes anything: it is the message between the two.
"""

from dataclasses import dataclass, field

from nanoengine.sequence import Sequence


@dataclass
class Copies:
    """The blocks to copy before a step computes, {to: from}, in the order of these fields.

    The order matters, since a block that is freed in a step can be handed out again in the same
    step: block 5 of a preempted sequence is first copied to the host, then a fork's copy is written
    to it, or the blocks of a sequence that comes back. Each block is read before it is overwritten.
    """

    swap_out: dict[int, int] = field(default_factory=dict)
    copy_on_write: dict[int, int] = field(default_factory=dict)
    swap_in: dict[int, int] = field(default_factory=dict)


@dataclass
class Batch:
    """One step: the whole message from scheduler to runner.

    For sequence i, the tokens from `starts[i]` on are computed, `num_tokens[i]` of them. Nothing of
    this changes when the sequences move on, so that a batch can be read later.

    budget: how many more tokens the step may compute (set by `Scheduler.build`).
    started: the time at which it was launched (set by metrics.py).
    sampled: (i, sequence) for each token to be drawn: from the last token of sequence i, for this
        sequence. It is sequence i itself, or a fork of it that begins (n > 1), so that an i may
        come several times (set by `Scheduler._place`).
    scored: (i, position) for each token of sequence i behind which the next token of the prompt is
        scored, for `prompt_logprobs` (set by `Scheduler._place`).
    copies: the block copies to be done first (set by `Scheduler.schedule`).
    admitted: the sequences that were waiting, each with the number of tokens that the prefix cache
        had (set by `Scheduler._admit`).
    preempted: the sequences that were preempted since the step before, each with "swap" or
        "recompute" (set by `Scheduler.schedule`).
    is_advanced: whether its tokens count as computed (set by `Scheduler.advance`).
    """

    budget: int = 0
    started: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, Sequence]] = field(default_factory=list)
    scored: list[tuple[int, int]] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[tuple[Sequence, str]] = field(default_factory=list)
    is_advanced: bool = False

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_decode(self) -> bool:
        """Whether each sequence computes one token and draws one: then a CUDA graph can run it."""
        return max(self.num_tokens) == 1 and [i for i, _ in self.sampled] == list(range(len(self)))

    def __repr__(self) -> str:
        parts = zip(self.sequences, self.starts, self.num_tokens)
        shown = [f"{seq.request_id}.{seq.index}[{i}:{i + count}]" for seq, i, count in parts]
        return f"<Batch of {sum(self.num_tokens)} tokens: {' '.join(shown)}>"
