"""Log-probabilities: those of generated tokens (`logprobs`) and of a prompt's (`prompt_logprobs`).

The seam has two ends. `ModelRunner.sample` calls `find_logprobs` for the rows of a step that ask
for some, and the engine keeps what it gives, by position, in `Sequence.logprobs`; `outputs.py`
calls `RowLogprobs.read` once the step is done. Everything else of them is here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.batch import Row
from nanoengine.sampler import matrices


@dataclass
class Logprob:
    """The log-probability of a token at a position, its rank there (1: the likeliest), its text.

    Of several that are equally likely, the sampled token ranks last, unless it is among the
    likeliest that were asked for: these rank from 1 to k.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# by token id
Logprobs = dict[int, Logprob]


@dataclass(eq=False)
class RowLogprobs:
    """Those of a row: of its token, which was drawn or scored, then of the likeliest.

    entries: (1 + count, 3) float64: token id, log-probability, rank; on their way to the host.
    """

    entries: Tensor

    def read(self, tokenizer: Any = None) -> Logprobs:
        """They are to be read once their step is done (`Launched.wait`)."""
        return {int(token_id): Logprob(
                    logprob, int(rank), tokenizer and tokenizer.decode([int(token_id)], False))
                for token_id, logprob, rank in self.entries.tolist()}


def num_logprobs(row: Row) -> int | None:
    """Of how many likeliest tokens a row has log-probabilities: -1 for all, None for no token."""
    is_scored = row.position < row.seq.num_prompt_tokens
    return row.seq.params.prompt_logprobs if is_scored else row.seq.params.logprobs


def find_logprobs(logits: Tensor, targets: Tensor, rows: list[Row]) -> dict[Row, RowLogprobs]:
    """Log-probabilities of raw logits, for rows that ask for some.

    logits: (rows, vocab_size); targets: (rows,), the token of each row, which was drawn or scored.
    """
    # only beams have a temperature here: they are chosen by their log-probabilities
    asked = {number: (count, row.seq.logprobs_temperature) for number, row in enumerate(rows)
             if (count := num_logprobs(row)) is not None}
    found: dict[Row, RowLogprobs] = {}
    for (count, temperature), numbers, index in matrices(asked, logits):
        values = logits.index_select(0, index).double()
        if temperature:
            values /= temperature
        values = values.log_softmax(dim=-1)
        target = targets[index, None].clamp(min=0)
        value = values.gather(1, target)
        # the last of its equals
        rank = (values >= value).sum(dim=-1, keepdim=True)
        top = values.topk(values.shape[1] if count == -1 else min(count, values.shape[1]))
        ranks = torch.arange(1, 1 + top.values.shape[1], device=rank.device).expand_as(top.indices)
        pairs = (target, top.indices), (value, top.values), (rank, ranks)
        entries = torch.stack([torch.cat(pair, dim=1).double() for pair in pairs], dim=-1)
        of_rows = map(RowLogprobs, entries.to("cpu", non_blocking=True))
        found |= zip([rows[number] for number in numbers], of_rows)
    return found
