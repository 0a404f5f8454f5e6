"""A sequence, a pending token, and how a sequence and a batch look when they are printed."""

import operator
from array import array

import pytest

from nanoengine.batch import Batch
from nanoengine.sequence import PendingToken, Sequence


def make(name: str = "7", num_tokens: int = 5) -> Sequence:
    return Sequence(name, list(range(num_tokens)), num_tokens, num_tokens + 100)


@pytest.mark.parametrize("compare", [
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("other", [0, -1, PendingToken(0), None, "a"])
def test_a_pending_token_cannot_be_compared(compare, other):
    for pair in ((PendingToken(0), other), (other, PendingToken(0))):
        with pytest.raises(TypeError):
            compare(*pair)


@pytest.mark.parametrize("use", [
    hash, lambda token: {token: 1}, lambda token: token in {1: 2}, lambda token: token in [1, 2],
    lambda token: [token] == [3], lambda token: array("i", [token]), int, operator.index,
    lambda token: token + 1, lambda token: [1, 2][token]])
def test_a_pending_token_is_no_number(use):
    with pytest.raises(TypeError):
        use(PendingToken(0))


def test_a_pending_token_is_the_last_of_a_sequence_and_not_known():
    seq = make()
    assert seq.num_known_tokens == seq.num_tokens == 5
    seq.token_ids.append(PendingToken(3))
    assert (seq.num_known_tokens, seq.num_tokens, seq.num_uncomputed_tokens) == (5, 6, 6)


def test_a_fork_has_the_tokens_and_parameters_but_has_yet_to_begin():
    seq = make()
    seq.num_computed_tokens, seq.num_held_tokens, seq.last_step = 5, 105, 9
    seq.block_table, seq.block_hashes = array("i", [4]), [(1, b"")]
    seq.group, seq.forks, seq.logprobs, seq.gave_way = [seq], [make()], [{}], True
    fork = seq.fork(seed=8, index=2)
    assert (fork.request_id, fork.seed, fork.index, fork.num_held_tokens) == ("7", 8, 2, 105)
    assert fork.token_ids == seq.token_ids and fork.token_ids is not seq.token_ids
    assert fork.params is seq.params and fork.metrics is seq.metrics
    blank = make()
    for name in ("num_computed_tokens", "block_table", "block_hashes", "num_preempted_tokens",
                 "forks", "group", "last_step", "gave_way", "logprobs", "finish_reason",
                 "stop_reason"):
        assert getattr(fork, name) == getattr(blank, name), name
        assert getattr(fork, name) is not getattr(seq, name) or fork.finish_reason is None, name


def test_printed_sequences_and_batches_are_one_short_line():
    seq, other = make("12", 300), make("13")
    seq.block_table, seq.num_computed_tokens = array("i", [4, 9, 2]), 256
    assert "12.0" in repr(seq) and "running" in repr(seq) and "waiting" in repr(other)
    assert all(text in repr(seq) for text in ("256", "300", "[4, 9, 2]"))
    seq.token_ids.append(PendingToken(0))
    batch = Batch(100, 1.5, [seq, other], [256, 0], [45, 5], [(0, seq), (1, other)])
    assert "50" in repr(batch) and "12.0" in repr(batch) and "256:301" in repr(batch)
    other.finish_reason = "length"
    assert "length" in repr(other)
    for shown in (seq, other, batch, Batch(100)):
        assert len(repr(shown)) < 120 and "\n" not in repr(shown)
