"""Logits to tokens: edits, temperature, the three truncations, and one draw a row.

    a matrix of logits ── edit ──▶ scale ──▶ truncate ──▶ draw ──▶ a token for each row

Rows of one kind are sampled as one matrix, and rows that need nothing pay nothing. What is done to
a matrix is data: the host sends numbers, and the device works with them, so that nothing here waits
for a GPU. Only a user's own processors are functions, called row by row. There is no generator
state: a draw depends on the seed of its sequence and on its position alone.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from nanoengine.attention import known_ids, send
from nanoengine.sampling_params import PLAIN, SamplingParams, naming
from nanoengine.sequence import NO_TOKEN, Sequence

# The most logits of one matrix. On a CPU it stays in the cores' caches, on a GPU it is small beside
# the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**24}


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

# ---------------------------------------------------------------------------- one sequence


def hash64(seed: int, number: int) -> int:
    """A 64-bit hash of both: a request's seed from the engine's, a draw from a request's."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, number))


def uniform(seq: Sequence, position: int) -> float:
    """The number in [0, 1) that decides a sequence's token at a position; 0 for greedy ones."""
    return seq.params.temperature and (hash64(seq.seed, position) >> 11) * 2.0**-53


def encode_bad_words(params: SamplingParams, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The tokens of each bad word, at the beginning of a text and behind a space.

    A tokenizer may know more tokens than the model: a word with one of these can never come.
    """
    encoded = [tokenizer.encode(space + (word.lstrip() or word), add_special_tokens=False)
               for word in params.bad_words for space in ("", " ")]
    return [token_ids for token_ids in encoded if 0 <= max(token_ids, default=-1) < vocab_size]


def biases(seq: Sequence) -> dict[int, float]:
    """What is added to the logits of which tokens in the next step: -inf makes one impossible.

    Where only some tokens are allowed, these are all here, and all others are impossible. The last
    token of a bad word is impossible behind the word's other tokens.
    """
    p = seq.params
    found = dict(p.logit_bias or {})
    if p.allowed_token_ids:
        found = {token_id: found.get(token_id, 0.0) for token_id in p.allowed_token_ids}
    if seq.num_tokens - seq.num_prompt_tokens < p.min_tokens:
        found |= dict.fromkeys(seq.late_tokens, -math.inf)
    for *beginning, last in seq.bad_words:
        start = max(seq.num_prompt_tokens, seq.num_tokens - len(beginning))
        if seq.token_ids[start:] == beginning:
            found[last] = -math.inf
    return found


# ------------------------------------------------------------------------ rows of one kind


def matrices(rows: Iterable[int], kinds: Any, logits: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """These rows by their kinds, so many at a time as a matrix may have; on host and device."""
    rows_by_kind = defaultdict(list)
    for row in rows:
        rows_by_kind[kinds[row]].append(row)
    most = max_rows(logits)
    for alike in rows_by_kind.values():
        for start in range(0, len(alike), most):
            part = alike[start:start + most]
            index, = send(logits.device, part)
            yield part, index


def max_rows(logits: Tensor) -> int:
    """How many rows a matrix may have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor, seqs: list[Sequence],
           last_sampled: Tensor, drawn: Tensor | None = None) -> Tensor:
    """One token for each sequence from its row of logits: (len(seqs),) int64.

    logits: (rows, vocab_size); rows behind those of the sequences are padding.
    temperatures: (rows,) float32, where 0 takes the likeliest token; uniforms: (rows,) float64.
    last_sampled: the tokens for which pending ones stand.
    drawn: what `sample_plain` gives, if that is known: only rows of other kinds are then sampled.

    A row with NaN, with infinity, or whose edits leave no token gets NO_TOKEN.
    """
    kinds = [seq.params.kind for seq in seqs]
    rows: Iterable[int] = [row for row, kind in enumerate(kinds) if kind != PLAIN]
    if drawn is None:
        if not rows:
            is_greedy = not any(seq.params.temperature for seq in seqs)
            logits = logits[:len(seqs)]
            return likeliest(logits) if is_greedy else sample_plain(logits, temperatures, uniforms)
        rows = range(len(seqs))
        drawn = torch.empty(len(seqs), dtype=torch.int64, device=logits.device)
    for part, index in matrices(rows, kinds, logits):
        members = [seqs[row] for row in part]
        scores = logits.index_select(0, index).float()
        if kinds[part[0]].is_edited:
            add_biases(scores, members)
            penalize(scores, members, last_sampled)
            for row, seq in enumerate(members):
                if seq.params.logits_processors:
                    scores[row] = run_processors(scores[row, None], seq)[0]
        scale(scores, temperatures[index])
        truncate(scores, [seq.params for seq in members])
        drawn[index] = draw(scores, uniforms[index])
    return drawn[:len(seqs)]


def sample_plain(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row by temperature alone. A CUDA graph can end here."""
    parts = zip(*(each.split(max_rows(logits)) for each in (logits, temperatures, uniforms)))
    return torch.cat([
        draw(scale(part.to(torch.float32, copy=True), part_temperatures), part_uniforms)
        for part, part_temperatures, part_uniforms in parts])


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row, of several the first.

    On a CPU PyTorch finds a maximum in vectors, but its place one number at a time. So this first
    takes the maximum of each group of neighbours, and looks for places in one group alone.
    """
    groups = logits.unflatten(1, (-1, math.gcd(logits.shape[1], 128)))
    largest, group = groups.amax(dim=-1).max(dim=-1, keepdim=True)
    place = groups.take_along_dim(group[:, :, None], dim=1).max(dim=-1).indices
    tokens = group * groups.shape[-1] + place
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)[:, 0]


# ----------------------------------------------------------------------------------- edits


def add_biases(scores: Tensor, seqs: list[Sequence]) -> None:
    """In place: what `biases` says, and -inf for tokens that are not among those allowed."""
    edits = [(row, *edit) for row, seq in enumerate(seqs) for edit in biases(seq).items()]
    if edits:
        rest = [-math.inf if seq.params.allowed_token_ids else 0.0 for seq in seqs]
        others, rows, token_ids, added = send(scores.device, rest, *zip(*edits))
        bias = others.float()[:, None].repeat(1, scores.shape[1])
        bias[rows, token_ids] = added.float()
        scores += bias


def penalize(scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
    """In place: the repetition penalty (Keskar et al., 2019, arXiv:1909.05858), for prompts, too.
    Then OpenAI's: generated tokens lose once (presence) and for each time (frequency)."""
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                 for p in (seq.params for seq in seqs)]
    if set(penalties) == {(1, 0, 0)}:
        return
    starts = [0 if repetition != 1 else seq.num_prompt_tokens
              for seq, (repetition, _, _) in zip(seqs, penalties)]
    tokens = [np.array(seq.device_ids(start), np.int64) for seq, start in zip(seqs, starts)]
    is_generated = [np.arange(start, seq.num_tokens) >= seq.num_prompt_tokens
                    for seq, start in zip(seqs, starts)]
    owners = np.arange(len(seqs)).repeat([len(each) for each in tokens])
    rows, token_ids, amounts, of_rows = send(
        scores.device, owners, np.concatenate(tokens), np.concatenate(is_generated, dtype=float),
        penalties)
    places = rows, known_ids(token_ids, last_sampled)
    counts = torch.zeros_like(scores).index_put_(places, amounts.float(), accumulate=True)[places]
    repetition, presence, frequency = of_rows.float()[rows].T
    seen = scores[places]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    scores[places] = seen - presence * (counts > 0) - frequency * counts


def run_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """A row of float32 logits, (1, vocab_size), after the processors of its request.

    Each processor gets copies, which it may keep or overwrite. NaN or infinity from the model
    cannot be mended by them. Raises ValueError for an error in a processor, and for a result of
    another shape or kind.
    """
    input_ids = torch.tensor([seq.token_ids], device=logits.device)
    scores = logits
    for processor in seq.params.logits_processors:
        with naming(what := f"request {seq.request_id}: its logits processor {processor}"):
            scores = processor(input_ids.clone(), scores.clone())
        is_row = isinstance(scores, Tensor) and scores.shape == logits.shape
        if not (is_row and scores.is_floating_point() and scores.layout == logits.layout
                and scores.device == logits.device):
            shown = (scores.shape, scores.dtype) if isinstance(scores, Tensor) else scores
            raise ValueError(f"{what} returned {shown}, not floats of shape {tuple(logits.shape)}")
    # +inf is how some force a token
    scores = scores.float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(logits.amax() < math.inf, scores, math.nan)


def scale(scores: Tensor, temperatures: Tensor) -> Tensor:
    """In place on float32 logits: a maximum of 0, then divided by the temperature of the row.

    1e-30 for greedy rows leaves weight to the maximum alone, and float32 can divide by it.
    """
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    return scores.div_(temperatures.clamp(min=1e-30)[:, None])


def truncate(scores: Tensor, params: list[SamplingParams]) -> None:
    """In place on scaled logits: truncated tokens get -inf.

    The order is vLLM's: temperature, min-p, top-k (with all that are as likely as the last of
    them), top-p of what is left, renormalised. All rows are of one kind.
    """
    kind, vocab_size = params[0].kind, scores.shape[1]
    log_min_ps, top_ks, top_ps = send(
        scores.device, [[math.log(p.min_p or 1)] for p in params],
        [[min(p.top_k, vocab_size)] for p in params], [[p.top_p] for p in params])
    largest_k = max(min(p.top_k, vocab_size) for p in params) if kind.has_top_k else vocab_size
    if kind.has_min_p:
        scores.masked_fill_(scores < log_min_ps.float(), -math.inf)
    if kind.has_top_k:
        least = scores.topk(largest_k).values.gather(1, top_ks - 1)
        scores.masked_fill_(scores < least, -math.inf)
    if kind.has_top_p:
        weights = scores.double().softmax(dim=-1)
        columns: Any = slice(None)
        if weights.is_cpu:
            # A CPU looks only at those that can be in the nucleus of some row: all other tokens of
            # a row weigh less than 1 - top_p together.
            threshold = weights.amax(dim=-1, keepdim=True).minimum((1 - top_ps) / vocab_size)
            columns = (~(weights < threshold)).any(dim=0).nonzero()[:, 0]
            largest_k = len(columns)
        kept = nucleus(weights[:, columns], top_ps, largest_k)
        left = scores[:, columns].masked_fill(~kept, -math.inf)
        scores.fill_(-math.inf)[:, columns] = left


def nucleus(weights: Tensor, top_ps: Tensor, count: int) -> Tensor:
    """Which tokens are in the nucleus: the fewest likeliest ones that reach top_p together, with
    the one that crosses it (Holtzman et al., 2019, arXiv:1904.09751). Of several that are equally
    likely, the first ones.

    weights: (rows, tokens) float64 of sum 1; top_ps: (rows, 1).
    count: how many of a row are to be sorted; all others that have a weight are as likely as the
        last of these.
    """
    ordered = weights.topk(count).values
    cumulated = ordered.cumsum(dim=-1)
    # 0 where weights are NaN
    num_kept = (cumulated - ordered < top_ps).sum(dim=-1, keepdim=True).clamp(min=1)
    least = ordered.gather(1, num_kept - 1)
    num_likelier = (ordered > least).sum(dim=-1, keepdim=True)
    # where all that were sorted do not reach top_p
    num_more = ((top_ps - cumulated[:, -1:]) / least).ceil().clamp(min=0)
    is_least = weights == least
    is_kept = is_least.cumsum(dim=-1) <= num_kept - num_likelier + num_more
    return (weights > least) | is_least & is_kept


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


# ------------------------------------------------------------------------ log-probabilities


def find_logprobs(logits: Tensor, targets: Tensor, asked: list[tuple[int, float] | None],
                  ) -> Iterator[tuple[list[int], Tensor]]:
    """Log-probabilities where they are asked for, of raw logits: some rows, and their entries.

    targets: (rows,), a token of each row.
    asked: for each row (count, temperature) or None: for the target and so many likeliest tokens,
        -1 for all. Only for beams, which are chosen by their log-probabilities, the temperature
        counts; 0 stands for 1.

    The entries of a row are (1 + count, 3) float64: token id, log-probability and rank of the
    target, then of the likeliest.
    """
    wanted = {row: each for row, each in enumerate(asked) if each}
    for part, index in matrices(wanted, asked, logits):
        count, temperature = wanted[part[0]]
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
        yield part, torch.stack([torch.cat(pair, dim=1).double() for pair in pairs], dim=-1)
