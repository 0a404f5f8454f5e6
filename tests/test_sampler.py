"""Frequencies and supports of the sampler, on logits made by hand."""

import itertools
import math

import pytest
import torch
from feature_helpers import FEATURES, constrain

from nanoengine import SamplingParams, sampler
from nanoengine.features import kernels, part
from nanoengine.observers import Features
from nanoengine.sequence import NO_TOKEN, Row, Sequence, hash64
from nanoengine.step_inputs import Draws, draws_of

NONE_PENDING = torch.zeros(1, dtype=torch.int32)


def make(prompt=(1, 2, 3), output=(), seed=0, end_tokens=(), **params) -> Sequence:
    sampling = SamplingParams(**params)
    seq = Sequence("7", [*prompt, *output], len(prompt), 100, sampling, seed)
    constrain(seq, list(end_tokens), None, 10**6)
    return seq


def sample(logits: torch.Tensor, seqs: list[Sequence]) -> tuple[list, list]:
    """Tokens, and logprobs where asked for, as the runner gets them. What fills the slot "sample"
    finds the same tokens."""
    rows = torch.tensor([draws_of(Row(0, seq, seq.num_tokens)) for seq in seqs],
                        dtype=torch.float64).reshape(-1, 5)
    tokens, others = (each(logits, Draws(*rows.T), seqs, NONE_PENDING, FEATURES)
                      for each in (sampler.sample, part("sample", None, sampler.sample)))
    assert torch.equal(tokens, others)
    return tokens.tolist(), logprobs(logits, tokens, seqs)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, seqs: list[Sequence]) -> list:
    rows = [Row(index, seq, seq.num_tokens) for index, seq in enumerate(seqs)]
    Features(["sampling.logprobs"])["Logprobs"].drawn(rows, logits, tokens)
    return [seq.kept["logprobs"][seq.num_tokens].read() if "logprobs" in seq.kept else None
            for seq in seqs]


def truncate(scores: torch.Tensor, given: Draws, truncations: set, top_ks: list) -> torch.Tensor:
    """All scores, -inf for the tokens that are truncated. The CPU's library truncates the same."""
    weights = sampler.truncate(scores.clone(), given)
    assert weights.shape == scores.shape
    library = kernels("cpu")
    if library and truncations:
        tokens, few = library.truncate(scores.clone(), given, truncations, top_ks)
        assert few.shape == (len(scores), len(tokens))
        assert torch.equal(weights, torch.zeros_like(scores).index_copy(1, tokens, few))
    return scores.masked_fill(weights == 0, -math.inf)


def draw(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return sampler.draw(scores.exp(), uniforms)


def draws(logits: torch.Tensor, count: int, **params) -> torch.Tensor:
    """How often each token comes in so many seeded draws."""
    seq = make(**params)
    rows = [seq.fork(seed=hash64(0, number)) for number in range(count)]
    tokens, _ = sample(logits.expand(count, -1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


@pytest.mark.parametrize("vocab_size", [11, 64, 200])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(vocab_size, temperature):
    torch.manual_seed(0)
    logits = torch.randn(vocab_size) * 2
    counts = draws(logits, 20_000, temperature=temperature)
    expected = (logits.double() / temperature).softmax(-1) * 20_000
    spread = (expected * (1 - expected / 20_000)).sqrt()
    assert ((counts - expected).abs() < 5 * spread + 1).all()


def test_supports_of_the_truncations():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    supports = {
        (2, 1.0, 0.0): [0, 1],
        (-1, 0.65, 0.0): [0, 1],  # 0.3 crosses 0.65 and stays
        (0, 0.01, 0.0): [0],
        (0, 1.0, 0.6): [0, 1],
        (3, 0.7, 0.0): [0, 1],  # of the three left 0.44 + 0.33 reach 0.7
        (0, 0.7, 0.3): [0, 1],
        (9, 1.0, 0.0): [0, 1, 2, 3],
    }
    for (top_k, top_p, min_p), support in supports.items():
        counts = draws(logits, 2000, top_k=top_k, top_p=top_p, min_p=min_p)
        assert counts.nonzero().flatten().tolist() == support


def test_truncated_frequencies_are_renormalised():
    counts = draws(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), 20_000, top_k=2)
    assert abs(counts[0] / 20_000 - 4 / 7) < 0.02


def test_a_vocabulary_of_152k_loses_no_mass():
    vocab_size = 151_936
    logits = torch.zeros(vocab_size)
    tokens = draw(logits.expand(100, -1).clone(), torch.arange(100, dtype=torch.float64) / 100)
    expected = torch.arange(100) * vocab_size // 100
    assert (tokens - expected).abs().max() <= 1
    tail = torch.full((vocab_size,), -12.0)  # half the mass in one token, the rest spread thin
    tail[100_000] = math.log((vocab_size - 1) * math.exp(-12))
    tail -= tail.max()
    begin = 0.5 * 100_000 / (vocab_size - 1)
    uniforms = torch.tensor([begin - 1e-5, begin + 1e-5, begin + 0.5 - 1e-5, begin + 0.5 + 1e-5])
    tokens = draw(tail.expand(4, -1).clone(), uniforms.double())
    assert (tokens == 100_000).tolist() == [False, True, True, False]
    assert (tokens - 100_000).abs().max() < 6
    thin = torch.full((vocab_size,), -20.0)  # so thin behind the first that float32 would lose it
    thin[0] = 0
    weight = thin[1].exp().double()
    wanted = torch.tensor([1, 2, 3, 777, 100_000, vocab_size - 1])
    uniforms = (1 + (wanted.double() - 0.5) * weight) / (1 + (vocab_size - 1) * weight)
    assert draw(thin.expand(6, -1).clone(), uniforms).tolist() == wanted.tolist()


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2.0**-53])
@pytest.mark.parametrize("token", [0, 63, 64, 150])
def test_all_mass_on_one_token(u, token):
    logits = torch.full((1, 151), -math.inf)
    logits[0, token] = 0
    assert draw(logits, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_the_end_of_the_interval_is_the_last_token_with_mass():
    logits = torch.full((1, 200), -math.inf)
    logits[0, :70] = torch.rand(70).log()
    logits -= logits.max()
    assert draw(logits, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [69]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert draws(logits, 100, temperature=1e-40).tolist() == [0, 100, 0]
    assert draws(logits, 3000, temperature=1e30).min() > 850


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 307, 1280, 4100])
def test_the_likeliest_is_the_first_of_the_largest(vocab_size, dtype):
    """With many ties, with padding behind the vocabulary, and without rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    padded = torch.randint(-9, 10, (50, vocab_size + 60), generator=generator).to(dtype)
    padded[:, vocab_size:] = 100.0
    padded[3:6, :vocab_size] = torch.tensor([math.nan, math.inf, -math.inf])[:, None]
    padded[6, vocab_size // 2] = math.nan
    logits = padded[:, :vocab_size]
    expected = [row.index(max(row)) for row in logits.tolist()]
    expected[3:7] = [NO_TOKEN] * 4
    assert sample(logits, [make(temperature=0)] * 50)[0] == expected
    # one that is edited, too
    rows = [make(temperature=t, top_k=1, top_p=p, logit_bias=bias, seed=seed) for seed, (t, p, bias)
            in enumerate(itertools.product([0.7, 2.0], [0.5, 1.0], [None, {0: 0.0}]))]
    for row, number in itertools.product(rows, (0, 3, 20)):
        assert sample(logits[number:number + 1], [row])[0] == expected[number:number + 1]
    assert sample(logits[:0], []) == ([], [])


def test_rows_do_not_depend_on_each_other():
    torch.manual_seed(0)
    logits = torch.randn(40, 1000) * 3
    kinds = [dict(temperature=0), dict(), dict(top_p=0.9), dict(top_k=5, min_p=0.1),
             dict(logit_bias={3: 5.0}), dict(repetition_penalty=1.5, temperature=0),
             dict(logit_bias={3: 5.0}, top_k=2, temperature=0)]
    rows = [make(seed=row, logprobs=2, **kinds[row % len(kinds)]) for row in range(40)]
    together = sample(logits, rows)
    for row in range(40):
        alone = sample(logits[row:row + 1], rows[row:row + 1])
        assert alone == ([together[0][row]], [together[1][row]])


def test_draws_depend_on_seed_and_position():
    logits = torch.zeros(500)
    same = [sample(logits[None], [make(seed=5, output=[9] * 4)])[0] for _ in range(2)]
    assert same[0] == same[1]
    assert len({sample(logits[None], [make(seed=s)])[0][0] for s in range(50)}) > 40
    assert len({sample(logits[None], [make(output=[9] * n)])[0][0] for n in range(50)}) > 40


# ------------------------------------------------------------------- rows that differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have_theirs(bad, dtype):
    """For every way to sample, without the host too; no token outside the vocabulary comes out."""
    torch.manual_seed(0)
    force = [lambda input_ids, scores: scores.index_fill(1, torch.tensor([3]), math.inf)]
    kinds = [dict(temperature=0), dict(), dict(top_p=0.5), dict(top_k=2), dict(min_p=0.5),
             dict(logit_bias={1: 1.0}), dict(logits_processors=force)]
    logits = torch.randn(2, 50).to(dtype)
    for kind in kinds:
        for positions in ([0], [49], [7, 30], range(50)):
            broken = logits.clone()
            broken[1, list(positions)] = bad
            rows = [make(**kind), make(**kind)]
            expected = sample(logits, rows)[0]
            assert sample(broken, rows)[0] == [expected[0], NO_TOKEN], (kind, positions)


def truncated_one_by_one(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """What is left of a row by the definitions: sorted, and token by token."""
    row = row - row.max()
    left = [i for i, x in enumerate(row.tolist()) if not min_p or x >= torch.tensor(min_p).log()]
    ordered = sorted(left, key=lambda i: (-row[i].item(), i))
    if top_k > 0:
        least = row[ordered[min(top_k, len(ordered)) - 1]]
        ordered = [i for i in ordered if row[i] >= least]
    weights = row[ordered].double().softmax(-1).tolist()
    total, kept = 0.0, []
    for token, weight in zip(ordered, weights):
        if total < top_p:
            kept.append(token)
        total += weight
    return sorted(kept)


@pytest.mark.parametrize("levels", [3, 40, 10_000])  # few: many tokens are equally likely
@pytest.mark.parametrize("vocab_size", [64, 151, 5056])  # one group, no groups, 79
def test_truncations_are_those_of_the_definitions(vocab_size, levels):
    """For matrices of several rows too."""
    generator = torch.Generator().manual_seed(levels)
    for top_ks, top_ps, min_ps in itertools.product(
            ([0] * 4, [1, 5, 30, 99], [1, 5, 2, 9]), ([1.0] * 4, [0.0513, 0.3719, 0.9021, 0.9993]),
            ([0.0] * 4, [0.003, 0.11, 0.2, 0.9])):
        logits = torch.randint(levels, (4, vocab_size), generator=generator) * (6.0 / levels)
        scores = logits - logits.amax(dim=-1, keepdim=True)
        rows = torch.tensor([(1.0, m, k, p, 0.0) for k, p, m in zip(top_ks, top_ps, min_ps)],
                            dtype=torch.float64)
        kind = SamplingParams(top_k=top_ks[1], top_p=top_ps[0], min_p=min_ps[0]).truncations
        scores = truncate(scores, Draws(*rows.T), {*kind}, top_ks)
        for row, found, *params in zip(logits, scores, top_ks, top_ps, min_ps):
            kept = found.isfinite().nonzero().flatten().tolist()
            assert kept == truncated_one_by_one(row, *params), params
            assert torch.equal(found[kept], (row - row.max())[kept])
