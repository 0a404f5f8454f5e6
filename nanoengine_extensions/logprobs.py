"""Log-probabilities of generated tokens (`logprobs`) and of prompts (`prompt_logprobs`).

The engine uses it in two places. `ModelRunner.sample` calls `find_logprobs` for the rows of a step
that need any, and the engine keeps the result, by position, in `Sequence.logprobs`; `outputs.py`
calls `RowLogprobs.read` once the step is done.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.batch import Row
from nanoengine.sampler import matrices
from nanoengine.sequence import Sequence


@dataclass
class Logprob:
    """The log-probability of a token at a position, its rank there (1: the likeliest), its text.

    The k likeliest tokens that were asked for rank from 1 to k. Otherwise, the sampled token ranks
    last among equally likely ones.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(eq=False)
class RowLogprobs:
    """The log-probabilities of a row: of its drawn or scored token, then of the likeliest ones.

    entries: (1 + count, 3) float64: token id, log-probability, rank; on their way to the host.
    """

    entries: Tensor

    def read(self, tokenizer: Any = None) -> dict[int, Logprob]:
        """Returns them by token id; call this once their step is done (`Launched.wait`)."""
        return {int(token_id): Logprob(
                    logprob, int(rank), tokenizer and tokenizer.decode([int(token_id)], False))
                for token_id, logprob, rank in self.entries.tolist()}


def num_logprobs(row: Row) -> int | None:
    """Returns how many likeliest tokens of a row get log-probabilities: -1: all, None: none."""
    is_scored = row.position < row.seq.num_prompt_tokens
    return row.seq.params.prompt_logprobs if is_scored else row.seq.params.logprobs


def find_logprobs(logits: Tensor, targets: Tensor, rows: list[Row]) -> dict[Row, RowLogprobs]:
    """Returns log-probabilities of raw logits, for rows that need any.

    logits: (rows, vocab_size); targets: (rows,), the drawn or scored token of each row.
    """
    # only beams have a temperature here, as their log-probabilities decide
    asked = {number: (count, row.seq.logprobs_temperature) for number, row in enumerate(rows)
             if (count := num_logprobs(row)) is not None}
    found: dict[Row, RowLogprobs] = {}
    for (count, temperature), numbers, index in matrices(asked, logits):
        values = logits.index_select(0, index).double().div(temperature or 1).log_softmax(dim=-1)
        most = values.shape[1]
        likeliest = values.topk(most if count == -1 else min(count, most)).indices
        token_ids = torch.cat([targets[index, None].clamp(min=0), likeliest], dim=1)
        picked = values.gather(1, token_ids)
        ranks = torch.arange(token_ids.shape[1], device=values.device).repeat(len(values), 1)
        # the last of equal ones
        ranks[:, 0] = (values >= picked[:, :1]).sum(dim=-1)
        entries = torch.stack([token_ids, picked, ranks], dim=-1).to("cpu", non_blocking=True)
        found |= zip([rows[number] for number in numbers], map(RowLogprobs, entries))
    return found


def of_prompt(seq: Sequence, tokenizer: Any) -> list[dict[int, Logprob] | None] | None:
    """Returns the log-probabilities of a prompt's tokens, as far as they are known."""
    # after an error there are none: what was found next to NaN depends on the prompt's chunks
    if seq.finish_reason == "error":
        return None
    found = [seq.logprobs.get(position) for position in range(seq.num_prompt_tokens)]
    return [each and each.read(tokenizer) for each in found]
