"""Log-probabilities of generated tokens (`logprobs`) and of prompts (`prompt_logprobs`).

An observer: `drawn` finds them for the rows of a step, and `output` reads them. For a prompt,
`scheduled` adds rows to a batch, as if tokens were to be sampled. The rows belong to a sequence
that has already ended, so their tokens are dropped.

Each log-probability is read once, for the first output that has it. Later outputs copy the list.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import Condition, rejected
from nanoengine.features import part
from nanoengine.observers import Feature
from nanoengine.requests import CompletionOutput, InputProcessor, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine_extras.sampling import max_rows, send

# without texts.py, tokens have no text
texts_of_tokens = part("texts_of_tokens", None, lambda token_ids, *others: [None] * len(token_ids))

CONDITIONS: list[Condition] = [
    ("prompt_logprobs_start", lambda p: p.prompt_logprobs_start >= 0, "at least 0")]


@dataclass
class Logprob:
    """A token's log-probability at a position, its rank there (1: the likeliest), and its text.

    The k likeliest tokens, if k were asked for, have the ranks 1 to k; among equally likely tokens,
    the sampled one comes first. If it is not among these k, it ranks last among equally likely
    ones.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(eq=False)
class RowLogprobs:
    """The log-probabilities of a row: of its drawn or scored token, then of the likeliest ones.

    entries: (1 + count, 3) float64: token id, log-probability, rank; on their way to the host.
    token_ids: the tokens of its sequence.
    position, start: the position of this token, and that of the first one in its prompt or output.
    """

    entries: Tensor
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    start: int = 0

    def read(self, tokenizer: Any = None) -> dict[int, Logprob]:
        """Returns them by token id; call this once their step is done (`Launched.wait`).

        tokenizer: from the library `tokenizers`; without one, tokens have no text.
        """
        entries = [(int(token_id), *others) for token_id, *others in self.entries.tolist()]
        before = self.token_ids[max(self.start, self.position - 12):self.position]
        texts = texts_of_tokens([token_id for token_id, *_ in entries], before, tokenizer)
        return {token_id: Logprob(logprob, int(rank), text)
                for (token_id, logprob, rank), text in zip(entries, texts)}


class Logprobs(Feature):
    """The log-probabilities of all requests that ask for any. For each sequence it keeps:

    logprobs: the log-probabilities found so far, by position; readable once their step is over.
    output_logprobs, prompt_logprobs: those that have been in an output.
    cumulative_logprob: the sum of output_logprobs.
    temperature: divides the logits of a beam. Only beams have it, since only they are chosen by
        log-probability.
    allowed: for a beam, the tokens that can be among its likeliest; None for all.
    scorer: a sequence that stands for the prompt in the rows that score its tokens.
    tokens: for a scorer, or a copy with guesses: the tokens of the sequence that it stands for.
    is_scorer: whether it is a scorer.
    """

    def __init__(self) -> None:
        # whether any request has asked for those of its prompt
        self.has_scorers = False
        self.tokenizer: Any = None

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        self.tokenizer = inputs.tokenizer and inputs.tokenizer.backend_tokenizer
        seq, count = seqs[0], seqs[0].params.prompt_logprobs
        if count is not None:
            start = first_scored(seq)
            if start > seq.num_prompt_tokens:
                raise rejected("prompt_logprobs_start", start,
                               f"at most {seq.num_prompt_tokens}, the length of the prompt")
            # later tokens are computed, since their logits are needed
            seq.max_cached_tokens = start - 1
            params = SamplingParams(temperature=0, logprobs=count)
            scorer = Sequence(seq.request_id, [0], seq.num_prompt_tokens, 1, params)
            scorer.finish_reason = "length"
            found: dict[int, RowLogprobs] = {}
            scorer.kept.update(is_scorer=True, tokens=seq.token_ids, logprobs=found)
            seq.kept.update(scorer=scorer, logprobs=found)
            self.has_scorers = True

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        copy.kept.update(tokens=seq.token_ids, logprobs=seq.kept.setdefault("logprobs", {}))

    def scheduled(self, batch: Batch) -> None:
        """Has each token of a prompt scored when its chunk is computed."""
        parts = zip(batch.sequences, batch.starts, batch.num_tokens) if self.has_scorers else ()
        for index, (seq, start, count) in enumerate(parts):
            if scorer := seq.kept.get("scorer"):
                first = max(start + 1, first_scored(seq))
                stop = min(start + count + 1, seq.num_prompt_tokens)
                batch.sampled += [Row(index, scorer, place) for place in range(first, stop)]

    def drawn(self, rows: list[Row], logits: Tensor, tokens: Tensor) -> None:
        asked = {number: (row.seq.params.logprobs, row.seq.kept.get("temperature", 0.0),
                          row.seq.kept.get("allowed"))
                 for number, row in enumerate(rows) if row.seq.params.logprobs is not None}
        known = {number: rows[number].seq.kept["tokens"][rows[number].position]
                 for number in asked if "is_scorer" in rows[number].seq.kept}
        if known:
            places, token_ids = (send([*each], logits.device) for each in (known, known.values()))
            tokens = tokens.index_copy(0, places, token_ids)
        for number, entries in find_logprobs(logits, tokens, asked).items():
            _, seq, position = rows[number]
            start = 0 if number in known else seq.num_prompt_tokens
            token_ids = seq.kept.get("tokens", seq.token_ids)
            found = seq.kept.setdefault("logprobs", {})
            found[position] = RowLogprobs(entries, token_ids, position, start)

    def output(self, seqs: list[Sequence], output: RequestOutput) -> None:
        params = seqs[0].params
        for seq, each in zip(seqs, output.outputs):
            if params.logprobs is not None and each.token_ids:
                self.fill_in(seq, each)
        # there are none after an error: with NaN, the results would depend on the prompt's chunks
        if params.prompt_logprobs is not None and seqs[0].finish_reason != "error":
            output.prompt_logprobs = self.of_prompt(seqs[0])

    def fill_in(self, seq: Sequence, completion: CompletionOutput) -> None:
        """Adds the log-probabilities of all tokens of a completion to it."""
        before = seq.kept.get("output_logprobs", [])
        new = self.read_on(seq, seq.num_prompt_tokens + len(before),
                           seq.num_prompt_tokens + len(completion.token_ids))
        total = seq.kept.get("cumulative_logprob", 0.0)
        for at, token_id in zip(new, completion.token_ids[len(before):]):
            total += at[token_id].logprob
        seq.kept.update(output_logprobs=before + new, cumulative_logprob=total)
        completion.logprobs = before + new
        completion.cumulative_logprob = total

    def of_prompt(self, seq: Sequence) -> list[dict[int, Logprob] | None]:
        """Returns the log-probabilities of a prompt's tokens, as far as they are known."""
        before = seq.kept.get("prompt_logprobs", [None] * first_scored(seq))
        is_complete = seq.num_known_tokens > seq.num_prompt_tokens
        # a step in flight can have found others, which are not on the host yet
        stop = seq.num_prompt_tokens if is_complete else seq.num_computed_tokens + 1
        known = before + self.read_on(seq, len(before), min(stop, seq.num_prompt_tokens))
        seq.kept["prompt_logprobs"] = known
        return known + [None] * (seq.num_prompt_tokens - len(known))

    def read_on(self, seq: Sequence, start: int, stop: int) -> list[dict[int, Logprob]]:
        """Reads the log-probabilities from one position to another, or to the first unknown one."""
        tokenizer = self.tokenizer if seq.params.detokenize else None
        at = map(seq.kept["logprobs"].get, range(start, stop))
        return [each.read(tokenizer) for each in takewhile(bool, at)]


def first_scored(seq: Sequence) -> int:
    """Returns the position of the first token of a prompt that is to be scored; position 0 has no
    log-probability."""
    return max(1, seq.params.prompt_logprobs_start)


def find_logprobs(logits: Tensor, targets: Tensor,
                  asked: dict[int, tuple[int, float, Any]]) -> dict[int, Tensor]:
    """Returns the entries of `RowLogprobs`, by the number of the row.

    logits: (rows, vocab_size); targets: (rows,), a token of each row.
    asked: for each row, how many of its likeliest tokens, the temperature of its logits, and the
        tokens that can be among these; None for all.
    """
    found: dict[int, Tensor] = {}
    alike = defaultdict(list)
    for number, kind in asked.items():
        alike[kind].append(number)
    size = max_rows(logits)
    parts = [(kind, numbers[start:start + size]) for kind, numbers in alike.items()
             for start in range(0, len(numbers), size)]
    for (count, temperature, allowed), numbers in parts:
        index = send(numbers, logits.device)
        values = logits.index_select(0, index).double().div(temperature or 1).log_softmax(dim=-1)
        most = values.shape[1]
        chosen = targets[index, None].clamp(min=0)
        own = values.gather(1, chosen)
        # raised for `topk`, so that the sampled token comes before others that are equally likely
        values.scatter_(1, chosen, own.nextafter(own.new_full((), torch.inf)))
        if allowed:
            tokens = send([*allowed], logits.device)
            likeliest = tokens[values[:, tokens].topk(min(count, len(tokens))).indices]
        else:
            likeliest = values.topk(most if count == -1 else min(count, most)).indices
        values.scatter_(1, chosen, own)
        token_ids = torch.cat([chosen, likeliest], dim=1)
        picked = values.gather(1, token_ids)
        ranks = torch.arange(token_ids.shape[1], device=values.device).repeat(len(values), 1)
        # the last of equal ones
        ranks[:, 0] = (values >= picked[:, :1]).sum(dim=-1)
        entries = torch.stack([token_ids, picked, ranks], dim=-1).to("cpu", non_blocking=True)
        found |= zip(numbers, entries)
    return found
