"""Log-probabilities of generated tokens (`logprobs`) and of prompts (`prompt_logprobs`).

runner.py calls `find_logprobs` for the rows of a step, and engine.py keeps the result, by position,
in `Sequence.logprobs`. `ScoredRequest` reads it for an output. For a prompt, `ScoringScheduler`
adds rows to a batch, as if they were sampled: what is drawn for them is not used.
"""

from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from nanoengine.batch import Batch, Row
from nanoengine.outputs import Request, RequestOutput
from nanoengine.sampler import max_rows
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import send
from nanoengine_extensions.options import SamplingParams
from nanoengine_extensions.policies import PolicyScheduler, num_of_prompt


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
    token_ids: those of its sequence.
    position, start: the place of this token, and of the first one of its prompt or output.
    found: the result of `read`, once it was called.
    """

    entries: Tensor
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    start: int = 0
    found: dict[int, Logprob] = field(default_factory=dict)

    def read(self, tokenizer: Any = None) -> dict[int, Logprob]:
        """Returns them by token id; call this once their step is done (`Launched.wait`).

        tokenizer: that of the library `tokenizers`; without one, tokens have no text.
        """
        before = self.token_ids[max(self.start, self.position - 4):self.position]
        self.found = self.found or {
            int(token_id): Logprob(
                logprob, int(rank), tokenizer and text_of(tokenizer, int(token_id), before))
            for token_id, logprob, rank in self.entries.tolist()}
        return self.found


def text_of(tokenizer: Any, token_id: int, before: list[int]) -> str:
    """Returns the text of a single token, as vLLM does: with the space that it begins with.

    The token that completes a character has all of it, and the tokens that began it have none.

    before: the tokens before it; a character has at most four bytes.
    """
    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    # what it adds after itself: some decoders strip spaces where a text begins
    text = decode([token_id] * 2)[len(decode([token_id])):]
    if not text.endswith("\ufffd"):
        return text
    for start in range(len(before) - 1, -1, -1):
        whole = decode(before[start:] + [token_id])
        if not whole.endswith("\ufffd"):
            clean = before[start:]
            while clean and decode(clean[-1:]).endswith("\ufffd"):
                clean.pop()
            return whole[len(commonprefix([whole, decode(clean)])):]
    return ""


class Scorer(Sequence):
    """Stands for a prompt in the rows that score its tokens; it has ended before it begins.

    prompt: the sequence of this prompt.
    """

    prompt: Sequence

    @classmethod
    def of(cls, seq: Any) -> "Scorer":
        params = SamplingParams(temperature=0, logprobs=seq.params.prompt_logprobs)
        scorer = cls(seq.request_id, [0], seq.num_prompt_tokens, 1, params)
        scorer.finish_reason = "length"
        scorer.prompt = seq
        return scorer


class ScoringScheduler(PolicyScheduler):
    """A scheduler that has each token of a prompt scored when its chunk is computed."""

    # whether any request has asked for it
    has_scores = False

    def add(self, seq: Any) -> None:
        super().add(seq)
        self.has_scores |= num_of_prompt(seq) is not None

    def schedule(self) -> Batch:
        batch: Any = super().schedule()
        parts = zip(batch.sequences, batch.starts, batch.num_tokens) if self.has_scores else ()
        for index, (seq, start, count) in enumerate(parts):
            stop = min(start + count + 1, seq.num_prompt_tokens)
            if num_of_prompt(seq) is not None and start + 1 < stop:
                scorer = Scorer.of(seq)
                batch.sampled += [Row(index, scorer, place) for place in range(start + 1, stop)]
        return batch


def find_logprobs(logits: Tensor, targets: Tensor, rows: list[Any]) -> dict[Row, RowLogprobs]:
    """Returns log-probabilities of raw logits, for rows that need any.

    logits: (rows, vocab_size); targets: (rows,), the drawn token of each row, which does not count
        where a prompt is scored.
    """
    # only beams have a temperature here, as their log-probabilities decide
    asked = {number: (count, row.seq.logprobs_temperature) for number, row in enumerate(rows)
             if (count := getattr(row.seq.params, "logprobs", None)) is not None}
    known = {number: row.seq.prompt.token_ids[row.position] for number, row in enumerate(rows)
             if isinstance(row.seq, Scorer)}
    if known:
        places, token_ids = (send([*each], logits.device) for each in (known, known.values()))
        targets = targets.index_copy(0, places, token_ids)
    found: dict[Row, RowLogprobs] = {}
    alike = [(kind, [number for number in asked if asked[number] == kind])
             for kind in dict.fromkeys(asked.values())]
    size = max_rows(logits)
    parts = [(kind, numbers[start:start + size]) for kind, numbers in alike
             for start in range(0, len(numbers), size)]
    for (count, temperature), numbers in parts:
        index = send(numbers, logits.device)
        values = logits.index_select(0, index).double().div(temperature or 1).log_softmax(dim=-1)
        most = values.shape[1]
        likeliest = values.topk(most if count == -1 else min(count, most)).indices
        token_ids = torch.cat([targets[index, None].clamp(min=0), likeliest], dim=1)
        picked = values.gather(1, token_ids)
        ranks = torch.arange(token_ids.shape[1], device=values.device).repeat(len(values), 1)
        # the last of equal ones
        ranks[:, 0] = (values >= picked[:, :1]).sum(dim=-1)
        entries = torch.stack([token_ids, picked, ranks], dim=-1).to("cpu", non_blocking=True)
        for number, row_entries in zip(numbers, entries):
            row = rows[number]
            seq = getattr(row.seq, "prompt", row.seq)
            start = 0 if seq is not row.seq else seq.num_prompt_tokens
            found[row] = RowLogprobs(row_entries, seq.token_ids, row.position, start)
    return found


def of_prompt(seq: Sequence, tokenizer: Any) -> list[dict[int, Logprob] | None] | None:
    """Returns the log-probabilities of a prompt's tokens, as far as they are known."""
    # after an error there are none: what was found next to NaN depends on the prompt's chunks
    if seq.finish_reason == "error":
        return None
    found = [seq.logprobs.get(position) for position in range(seq.num_prompt_tokens)]
    return [each and each.read(tokenizer) for each in found]


class ScoredRequest(Request):
    """A request whose output has log-probabilities, and timings."""

    def output(self) -> RequestOutput:
        output = super().output()
        for completion, each in zip(self.completions, output.outputs):
            seq: Any = completion.seq
            start = seq.num_prompt_tokens
            found = [seq.logprobs[position].read(completion.tokenizer)
                     for position in range(start, start + len(each.token_ids))
                     if seq.params.logprobs is not None]
            if found:
                each.logprobs = found
                each.cumulative_logprob = sum(
                    at[token_id].logprob for at, token_id in zip(found, each.token_ids))
        output.metrics = self.seq.metrics.so_far(output.outputs)
        if self.seq.params.prompt_logprobs is not None:
            output.prompt_logprobs = of_prompt(self.seq, self.completions[0].tokenizer)
        return output
