"""Logits to tokens: processors, temperature, the three truncations, and one draw a row.

Rows that need nothing pay nothing: greedy ones take an argmax of the raw logits, only rows with
top-p are sorted, only rows with processors are edited. There is no generator state: what a row
draws depends on its seed and its position alone.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers.generation import logits_process as hf

from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence

CDF_BLOCK = 64  # tokens of a first, coarse step through the cumulated weights


@dataclass
class Logprob:
    """The log-probability of a token at a position, its rank there (1: the likeliest), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # by token id

# -------------------------------------------------------------------------------- processors


def build_processors(p: SamplingParams, prompt_length: int, end_tokens: list[int],
                     tokenizer: Any) -> list[Callable]:
    """Everything in a request that edits logits, as one list, in vLLM's order."""
    allowed = p.allowed_token_ids or []
    texts = [space + (word.lstrip() or word) for word in p.bad_words for space in ("", " ")]
    banned = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    bias: Any = {(token_id,): value for token_id, value in (p.logit_bias or {}).items()}
    wanted: list[Any] = [
        allowed and hf.PrefixConstrainedLogitsProcessor(lambda row, input_ids: allowed, 1),
        banned and hf.NoBadWordsLogitsProcessor(banned),
        p.min_tokens and end_tokens
        and hf.MinNewTokensLengthLogitsProcessor(prompt_length, p.min_tokens, end_tokens),
        bias and hf.SequenceBiasLogitsProcessor(bias),
        p.repetition_penalty != 1 and hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
        (p.presence_penalty or p.frequency_penalty) and partial(penalize_output, p, prompt_length),
    ]
    return [processor for processor in wanted if processor] + p.logits_processors


def penalize_output(p: SamplingParams, start: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """OpenAI's penalties: generated tokens lose once (presence) and for each time (frequency)."""
    counts = torch.bincount(input_ids[0, start:], minlength=scores.shape[1])
    return scores - p.presence_penalty * (counts > 0) - p.frequency_penalty * counts


# ----------------------------------------------------------------------------------- sampling


def mix(seed: int, number: int) -> int:
    """A 64-bit hash of both: a request's seed from the engine's, a draw from a request's."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, number))


def uniform(seq: Sequence) -> float:
    """The number in [0, 1) that decides a sequence's next token; 0 for greedy ones."""
    return (mix(seq.seed, seq.num_tokens) >> 11) * 2.0**-53 * (seq.params.temperature > 0)


def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[Logprobs | None]]:
    """One token for each row of logits (rows, vocab_size), and its logprobs where asked for.

    Row i belongs to sequences[i]. Raises ValueError where processors leave no token possible.
    """
    token_ids = logits.max(dim=-1).indices  # several times faster than argmax in bfloat16
    rows = [row for row, seq in enumerate(sequences) if seq.processors or seq.params.temperature]
    if rows:
        drawn = [sequences[row] for row in rows]
        scores = logits[rows].float()
        for row, seq in zip(scores, drawn):
            if seq.processors:
                row.copy_(apply_processors(row[None], seq)[0])
        scale_and_truncate(scores, [seq.params for seq in drawn])
        token_ids[rows] = draw(scores, torch.tensor(list(map(uniform, drawn)), dtype=torch.float64))
    chosen = token_ids.tolist()
    return chosen, [logprobs_of(*row) for row in zip(logits, chosen, sequences)]


def apply_processors(scores: Tensor, seq: Sequence) -> Tensor:
    """A row's scores, (1, vocab_size), after its request's processors."""
    input_ids = torch.tensor([seq.token_ids])
    for processor in seq.processors:
        scores = processor(input_ids, scores)
    scores = scores.clamp(max=torch.finfo(scores.dtype).max)  # +inf is how some force a token
    if not scores.isfinite().any():
        raise ValueError(f"request {seq.request_id}: its processors (allowed_token_ids, bad_words, "
                         f"min_tokens, …) leave no token possible")
    return scores


def scale_and_truncate(logits: Tensor, params: list[SamplingParams]) -> None:
    """In place on (rows, vocab_size) float32: less each row's maximum, over its temperature, and
    truncated tokens at -inf.

    The order is vLLM's: temperature, min-p, top-k, top-p (of what is left, renormalised).
    """
    # for greedy rows 1e-30: it leaves weight to the maximum alone, and float32 can divide by it
    temperatures = torch.tensor([p.temperature for p in params]).clamp(min=1e-30)
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    for row, p in enumerate(params):
        if p.min_p > 0:
            logits[row].masked_fill_(logits[row] < math.log(p.min_p), -math.inf)
        if 0 < p.top_k < logits.shape[1]:
            least = logits[row].topk(p.top_k).values[-1]
            logits[row].masked_fill_(logits[row] < least, -math.inf)
        if p.top_p < 1:
            mask_top_p(logits[row], p.top_p)


def mask_top_p(logits: Tensor, top_p: float) -> None:
    """Nucleus sampling (Holtzman et al., 2019, arXiv:1904.09751), in place on one row.

    Keeps the fewest likeliest tokens that reach top_p together, the one that crosses it included.
    """
    probabilities = logits.double().softmax(dim=-1)
    likely = (probabilities > (1 - top_p) / len(logits)).nonzero()[:, 0]  # the rest can't reach it
    ordered, order = probabilities[likely].sort(descending=True, stable=True)
    kept = likely[order[ordered.cumsum(dim=-1) - ordered < top_p]]
    logits.copy_(torch.full_like(logits, -math.inf).index_copy_(0, kept, logits[kept]))


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """Inverse-CDF sampling: for each row the first token whose cumulated weight exceeds u * total.

    logits: (rows, vocab_size) float32 with maximum 0, overwritten.
    numbers: (rows,) float64 in [0, 1).
    All sums are float64: 152k tokens lose nothing. They are cumulated by blocks first, then inside
    the one block that is hit. A row's draw does not depend on the other rows.
    """
    rows, vocab_size = logits.shape
    if vocab_size % CDF_BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocab_size % CDF_BLOCK), value=-math.inf)
    weights = logits.exp_().view(rows, -1, CDF_BLOCK)
    blocks = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = numbers[:, None] * blocks[:, -1:]
    block = first_above(blocks, targets)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights[torch.arange(rows), block[:, 0]].double().cumsum(dim=-1)
    return (block * CDF_BLOCK + first_above(inside, targets - before))[:, 0]


def first_above(cumulated: Tensor, targets: Tensor) -> Tensor:
    """The first index where a row's cumulated weights exceed its target, (rows, 1).

    Clamped to the last index that adds weight: rounding may put a target at the very end.
    """
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulated, targets, right=True), last)


def logprobs_of(logits: Tensor, token_id: int, seq: Sequence) -> Logprobs | None:
    """From a row of raw logits: the sampled token's, then as many of the likeliest as asked for.

    For beams, which are chosen by them, the temperature counts.
    """
    if (count := seq.params.logprobs) is None:
        return None
    row = (logits.double() / (seq.group and seq.params.temperature or 1)).log_softmax(dim=-1)
    values, indices = row.topk(len(row) if count == -1 else min(count, len(row)))
    found = {token_id: Logprob(row[token_id].item(), int((row > row[token_id]).sum()) + 1)}
    for rank, (likely, value) in enumerate(zip(indices.tolist(), values.tolist()), 1):
        found.setdefault(likely, Logprob(value, rank))
    return found
