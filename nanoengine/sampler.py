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


@dataclass
class Logprob:
    """The log-probability of a token at a position, its rank there (1: the likeliest), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # by token id

# -------------------------------------------------------------------------------- processors


def build_processors(p: SamplingParams, prompt_length: int, end_tokens: list[int],
                     tokenizer: Any, device: str = "cpu") -> list[Callable]:
    """Everything in a request that edits logits, as one list, in vLLM's order."""
    allowed = p.allowed_token_ids or []
    texts = [space + (word.lstrip() or word) for word in p.bad_words for space in ("", " ")]
    banned = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    bias: Any = {(token_id,): value for token_id, value in (p.logit_bias or {}).items()}
    wanted: list[Any] = [
        allowed and hf.PrefixConstrainedLogitsProcessor(lambda row, input_ids: allowed, 1),
        banned and hf.NoBadWordsLogitsProcessor(banned),
        p.min_tokens and end_tokens
        and hf.MinNewTokensLengthLogitsProcessor(prompt_length, p.min_tokens, end_tokens, device),
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
    return seq.params.temperature and (mix(seq.seed, len(seq.token_ids)) >> 11) * 2.0**-53


def is_edited(seq: Sequence) -> bool:
    """Whether its logits are edited by more than a temperature."""
    p = seq.params
    return bool(seq.processors or p.temperature and (p.top_k > 0 or p.top_p < 1 or p.min_p))


def sample(logits: Tensor, temperatures: Tensor, numbers: Tensor, seqs: Any = ()) -> Tensor:
    """One token for each row of logits, (rows, vocab_size): (rows,) int64.

    temperatures: (rows,) float32, where 0 takes the likeliest token; numbers: (rows,) float64.
    seqs: the sequences whose processors and truncations edit the rows first; behind theirs may be
    rows of nobody. Without them nothing is read on the host: a CUDA graph can end in this. Raises
    ValueError where processors leave no token.
    """
    if seqs and not any(seq.processors or seq.params.temperature for seq in seqs):
        return logits.max(dim=-1).indices  # several times faster than argmax in bfloat16
    scores = logits.to(torch.float32, copy=True)
    for row in [row for row, seq in enumerate(seqs) if seq.processors]:
        scores[row] = apply_processors(scores[row, None], seqs[row])[0]
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    # for greedy rows 1e-30: it leaves weight to the maximum alone, and float32 can divide by it
    scores.div_(temperatures.clamp(min=1e-30)[:, None])
    for row in [row for row, seq in enumerate(seqs) if is_edited(seq)]:
        truncate(scores[row], seqs[row].params)
    return draw(scores, numbers)


def apply_processors(scores: Tensor, seq: Sequence) -> Tensor:
    """A row's scores, (1, vocab_size), after its request's processors."""
    input_ids = torch.tensor([seq.token_ids], device=scores.device)
    for processor in seq.processors:
        scores = processor(input_ids, scores)
    scores = scores.clamp(max=torch.finfo(scores.dtype).max)  # +inf is how some force a token
    if not scores.isfinite().any():
        raise ValueError(f"request {seq.request_id}: its processors (allowed_token_ids, bad_words, "
                         f"min_tokens, …) leave no token possible")
    return scores


def truncate(logits: Tensor, p: SamplingParams) -> None:
    """In place on a row of (vocab_size,) float32 with maximum 0: truncated tokens get -inf.

    The order is vLLM's: temperature, min-p, top-k, top-p (of what is left, renormalised): nucleus
    sampling (Holtzman et al., 2019, arXiv:1904.09751) keeps the fewest likeliest tokens that reach
    top_p together, the one that crosses it included.
    """
    if p.min_p > 0:
        logits.masked_fill_(logits < math.log(p.min_p), -math.inf)
    if 0 < p.top_k < len(logits):
        logits.masked_fill_(logits < logits.topk(p.top_k).values[-1], -math.inf)
    if p.top_p < 1:
        probabilities = logits.double().softmax(dim=-1)
        likely = (probabilities > (1 - p.top_p) / len(logits)).nonzero()[:, 0]  # the rest is less
        ordered, order = probabilities[likely].sort(descending=True, stable=True)
        kept = likely[order[ordered.cumsum(dim=-1) - ordered < p.top_p]]
        logits.copy_(torch.full_like(logits, -math.inf).index_copy_(0, kept, logits[kept]))


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """Inverse-CDF sampling: for each row the first token whose cumulated weight exceeds u * total.

    logits: (rows, vocab_size) float32 with maximum 0, overwritten.
    numbers: (rows,) float64 in [0, 1).
    All sums are float64: 152k tokens lose nothing. u is at most 1 - 2**-52, as total times that is
    rounded to less than total: some token exceeds it. A row's draw depends on no other row.
    """
    cumulated = logits.exp_().cumsum(dim=-1, dtype=torch.float64)
    wanted = numbers[:, None].clamp(max=1 - 2.0**-52) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0]


def logprobs_of(logits: Tensor, tokens: Tensor, index: int, seq: Sequence) -> Logprobs | None:
    """From row `index` of raw logits: those of the sampled token, then as many of the likeliest as
    asked for.

    For beams, which are chosen by them, the temperature counts.
    """
    if (count := seq.params.logprobs) is None:
        return None
    row, token = logits[index].double(), int(tokens[index])
    row = (row / (seq.group and seq.params.temperature or 1)).log_softmax(dim=-1)
    values, indices = row.topk(len(row) if count == -1 else min(count, len(row)))
    found = {token: Logprob(row[token].item(), int((row > row[token]).sum()) + 1)}
    for rank, (likely, value) in enumerate(zip(indices.tolist(), values.tolist()), 1):
        found.setdefault(likely, Logprob(value, rank))
    return found
