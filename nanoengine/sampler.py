"""Logits to tokens: processors, temperature, the three truncations, and one draw a row.

Rows that need nothing pay nothing: greedy rows take an argmax of the raw logits, only rows with
top-p are sorted, only rows with processors are edited. There is no generator state: what a row
draws depends on the seed of its sequence and on its position alone.
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
from nanoengine.sequence import NO_TOKEN, Sequence


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

# ------------------------------------------------------------------------------ processors


def build_processors(params: SamplingParams, prompt_length: int, end_tokens: list[int],
                     tokenizer: Any, device: str = "cpu") -> list[Callable]:
    """Everything in a request that edits logits, as one list, in vLLM's order."""
    allowed = params.allowed_token_ids
    words = [word.lstrip() or word for word in params.bad_words]
    banned = [tokenizer.encode(space + word, add_special_tokens=False)
              for word in words for space in ("", " ")]
    bias: Any = {(token_id,): value for token_id, value in (params.logit_bias or {}).items()}
    has_output_penalty = params.presence_penalty or params.frequency_penalty
    wanted: list[Any] = [
        allowed and hf.PrefixConstrainedLogitsProcessor(lambda row, input_ids: allowed, 1),
        banned and partial(ban_words, banned, prompt_length),
        params.min_tokens and end_tokens and hf.MinNewTokensLengthLogitsProcessor(
            prompt_length, params.min_tokens, end_tokens, device),
        bias and hf.SequenceBiasLogitsProcessor(bias),
        params.repetition_penalty != 1
        and hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        has_output_penalty and partial(penalize_output, params, prompt_length)]
    return [processor for processor in wanted if processor] + params.logits_processors


def ban_words(words: list[list[int]], start: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """The last token of each word is impossible behind its other tokens.

    input_ids: (1, tokens so far), generated ones from `start` on; scores: (1, vocab_size).
    """
    generated = input_ids[0, start:].tolist()
    for *beginning, last in filter(None, words):
        if generated[max(0, len(generated) - len(beginning)):] == beginning:
            scores[0, last] = -math.inf
    return scores


def penalize_output(params: SamplingParams, start: int, input_ids: Tensor,
                    scores: Tensor) -> Tensor:
    """OpenAI's penalties: generated tokens lose once (presence) and for each time (frequency).

    input_ids: (1, tokens so far), generated ones from `start` on; scores: (1, vocab_size).
    """
    counts = torch.bincount(input_ids[0, start:], minlength=scores.shape[1])
    return scores - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts


# -------------------------------------------------------------------------------- sampling


def hash64(seed: int, number: int) -> int:
    """A 64-bit hash of both: a request's seed from the engine's, a draw from a request's."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, number))


def uniform(seq: Sequence, position: int) -> float:
    """The number in [0, 1) that decides a sequence's token at a position; 0 for greedy ones."""
    return seq.params.temperature and (hash64(seq.seed, position) >> 11) * 2.0**-53


def is_edited(seq: Sequence) -> bool:
    """Whether its logits are edited by more than a temperature."""
    p = seq.params
    is_truncated = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    return is_truncated or len(seq.processors) > 0


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor, seqs: Any = ()) -> Tensor:
    """One token for each row of logits, (rows, vocab_size): (rows,) int64.

    temperatures: (rows,) float32, where 0 takes the likeliest token; uniforms: (rows,) float64.
    seqs: the sequences of the first rows, whose processors and truncations edit them; rows behind
        them are padding. Without sequences nothing is read on the host: a CUDA graph can end here.

    A row with NaN, with infinity, or whose processors leave no token gets NO_TOKEN.
    """
    if seqs and not any(seq.processors or seq.params.temperature for seq in seqs):
        # several times faster than argmax in bfloat16
        likeliest = logits.max(dim=-1)
        return torch.where(likeliest.values.isfinite(), likeliest.indices, NO_TOKEN)
    scores = logits.to(torch.float32, copy=True)
    edited = [(row, seq) for row, seq in enumerate(seqs) if is_edited(seq)]
    for row, seq in edited:
        if seq.processors:
            scores[row] = apply_processors(scores[row, None], seq)[0]
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    # 1e-30 for greedy rows: it leaves weight to the maximum alone, and float32 can divide by it.
    scores.div_(temperatures.clamp(min=1e-30)[:, None])
    for row, seq in edited:
        truncate(scores[row], seq.params)
    return draw(scores, uniforms)


def apply_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """A row of float32 logits, (1, vocab_size), after the processors of its request.

    Each processor gets copies, which it may keep or overwrite. NaN or infinity from the model
    cannot be mended by them. Raises ValueError for a result of another shape or kind.
    """
    input_ids = torch.tensor([seq.token_ids], device=logits.device)
    scores = logits
    for processor in seq.processors:
        scores = processor(input_ids.clone(), scores.clone())
        is_row = isinstance(scores, Tensor) and scores.shape == logits.shape
        if not (is_row and scores.is_floating_point() and scores.layout == logits.layout
                and scores.device == logits.device):
            shown = (scores.shape, scores.dtype) if isinstance(scores, Tensor) else scores
            raise ValueError(f"request {seq.request_id}: its logits processor {processor} returned "
                             f"{shown}, and not floats of shape {tuple(logits.shape)}")
    # +inf is how some force a token
    scores = scores.float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(logits.amax().isfinite(), scores, math.nan)


def truncate(logits: Tensor, params: SamplingParams) -> None:
    """In place on a row of (vocab_size,) float32 with maximum 0: truncated tokens get -inf.

    The order is vLLM's: temperature, min-p, top-k, top-p of what is left, renormalised. Nucleus
    sampling (Holtzman et al., 2019, arXiv:1904.09751) keeps the fewest likeliest tokens that reach
    top_p together, the token that crosses it included.
    """
    if params.min_p > 0:
        logits.masked_fill_(logits < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < len(logits):
        logits.masked_fill_(logits < logits.topk(params.top_k).values[-1], -math.inf)
    if params.top_p < 1:
        probabilities = logits.double().softmax(dim=-1)
        # All tokens below this weigh less than 1 - top_p together: they cannot be in the nucleus.
        threshold = probabilities.amax().clamp(max=(1 - params.top_p) / len(logits))
        likely = (probabilities >= threshold).nonzero()[:, 0]
        ordered, order = probabilities[likely].sort(descending=True, stable=True)
        weight_before = ordered.cumsum(dim=-1) - ordered
        kept = likely[order[weight_before < params.top_p]]
        logits.copy_(torch.full_like(logits, -math.inf).index_copy_(0, kept, logits[kept]))


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: for each row the first token whose cumulated weight exceeds u * total,
    or NO_TOKEN where the total is NaN or 0.

    logits: (rows, vocab_size) float32 with maximum 0, overwritten.
    uniforms: (rows,) float64 in [0, 1).

    All sums are float64: with 152k tokens nothing is lost. u is at most 1 - 2**-52, as total times
    that is rounded to less than total, so that some token exceeds it. A row's draw depends on no
    other row.
    """
    cumulated = logits.exp_().cumsum(dim=-1, dtype=torch.float64)
    totals = cumulated[:, -1:]
    thresholds = uniforms[:, None].clamp(max=1 - 2.0**-52) * totals
    tokens = torch.searchsorted(cumulated, thresholds, right=True)
    return torch.where(totals > 0, tokens, NO_TOKEN)[:, 0]


def logprobs_of(logits: Tensor, token_id: int, count: int, temperature: float = 0) -> Logprobs:
    """The log-probabilities of a token and of the `count` likeliest ones, -1 for all.

    logits: (vocab_size,), the raw ones. For beams, which are chosen by their log-probabilities, the
    temperature counts.
    """
    values = (logits.double() / (temperature or 1)).log_softmax(dim=-1)
    # the last of its equals
    rank = int((values >= values[token_id]).sum())
    found = {token_id: Logprob(values[token_id].item(), rank)}
    top = values.topk(len(values) if count == -1 else min(count, len(values)))
    for rank, (likely, value) in enumerate(zip(top.indices.tolist(), top.values.tolist()), 1):
        found[likely] = Logprob(value, rank)
    return found
