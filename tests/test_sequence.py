"""A sequence, and a pending token."""

from array import array

from nanoengine.sequence import Sequence


def make(name: str = "7", num_tokens: int = 5) -> Sequence:
    return Sequence(name, list(range(num_tokens)), num_tokens, num_tokens + 100)


def test_a_pending_token_is_the_last_of_a_sequence_and_not_known():
    seq = make()
    assert seq.num_known_tokens == seq.num_tokens == 5
    seq.token_ids.append(-1 - 3)
    assert (seq.num_known_tokens, seq.num_tokens, seq.num_uncomputed_tokens) == (5, 6, 6)


def test_a_fork_has_the_tokens_and_parameters_but_has_yet_to_begin():
    seq = make()
    seq.num_computed_tokens, seq.needs_tokens = 5, True
    seq.block_table, seq.block_hashes = array("i", [4]), [(1, b"")]
    seq.forks, seq.kept = [make()], {9: []}
    fork = seq.fork(seed=8, index=2)
    assert (fork.request_id, fork.seed, fork.index) == ("7", 8, 2)
    assert fork.token_ids == seq.token_ids and fork.token_ids is not seq.token_ids
    assert fork.params is seq.params
    blank = make()
    for name in ("num_computed_tokens", "block_table", "block_hashes", "forks", "kept",
                 "finish_reason", "stop_reason"):
        assert getattr(fork, name) == getattr(blank, name), name
        assert getattr(fork, name) is not getattr(seq, name) or fork.finish_reason is None, name
