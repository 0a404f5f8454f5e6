"""Copies of logits: as few as possible. All tests of test_sampler.py check that its tokens are
those of the engine's own sampler."""

import random

import pytest
import torch
from feature_helpers import FEATURES
from test_sampler import NONE_PENDING, make, sample

from nanoengine.step_inputs import Draws
from nanoengine_extras.sampling import MATRIX_SIZE, fast_sampling, max_rows


def test_rows_that_need_nothing_pay_nothing(monkeypatch):
    logits = torch.randn(4, 100)
    refuse = pytest.fail
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: refuse("sorted without top-p"))
    draws = Draws(*torch.zeros(5, 4).double())
    seqs = [make(), make(top_k=3), make(min_p=0.1), make(temperature=0)]
    fast_sampling.sample(logits, draws, seqs, NONE_PENDING, FEATURES)
    for name in ("exp_", "softmax", "log_softmax", "float", "to"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, **__: refuse("computed for greedy rows"))
    seqs = [make(temperature=0)] * 4
    tokens = fast_sampling.sample(logits, draws, seqs, NONE_PENDING, FEATURES)
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("size", [10, 1000, 5000, 100_000])
def test_rows_that_need_different_edits_are_sampled_as_alone(monkeypatch, size):
    """They are sampled as one matrix, or in several that fit the caches."""
    monkeypatch.setitem(MATRIX_SIZE, "cpu", size)
    rng = random.Random(size)
    logits = (torch.randn(60, 1000, generator=torch.Generator().manual_seed(size)) * 3).bfloat16()
    seqs = [make(seed=n, temperature=rng.choice([0, 0.7, 1]), top_k=rng.choice([0, -1, 1, 5, 2000]),
                 top_p=rng.choice([1, 1, 0.5, 0.95]), min_p=rng.choice([0, 0, 0.1]),
                 repetition_penalty=rng.choice([1, 1, 1.5])) for n in range(60)]
    alone = [sample(logits[row:row + 1], [seq])[0][0] for row, seq in enumerate(seqs)]
    assert sample(logits, seqs)[0] == alone
    assert max_rows(logits) == max(1, size // 1000)
