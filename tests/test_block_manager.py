"""The prefix cache's behaviours one by one; the random workloads are in test_scheduler.py."""

from array import array

import pytest
import xxhash

from nanoengine import block_manager
from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Sequence


def make(token_ids: list[int]) -> Sequence:
    return Sequence("", list(token_ids), len(token_ids), len(token_ids) + 100)


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    """What the scheduler does on admission."""
    if not manager.can_allocate(seq):
        return False
    manager.allocate(seq)
    return True


def run_once(manager: BlockManager, token_ids: list[int]) -> None:
    """What steps do to a sequence that is computed whole, and ends."""
    seq = make(token_ids)
    assert allocate(manager, seq)
    manager.register(seq, seq.num_tokens)
    manager.deallocate(seq)


@pytest.mark.parametrize("length, cached", [
    (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48)])
def test_at_least_one_token_is_computed(length, cached):
    manager = BlockManager(20, 16)
    run_once(manager, range(length))
    again = make(range(length))
    assert allocate(manager, again) and again.num_computed_tokens == cached
    assert again.num_uncomputed_tokens == length - cached


def test_a_hit_compares_the_tokens_too(monkeypatch):
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(16))
    assert block_manager.xxhash is xxhash
    manager = BlockManager(20, 4)
    run_once(manager, [1, 2, 3, 4, 5])
    run_once(manager, [6, 7, 8, 9, 5])
    # for 64 bits, prefixes with the same hash are known
    assert all(len(found) == 16 for found, _ in manager.blocks_by_hash)
    assert manager.find_shared(make([1, 2, 3, 3, 5])) == []
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 5]):
        found = manager.find_shared(make(tokens))
        assert [manager.hash_of_block[block][1] for block in found] == [
            array("i", tokens[:4]).tobytes()]


def test_the_tail_is_freed_and_so_evicted_first():
    manager = BlockManager(4, 4)
    run_once(manager, range(16))
    assert allocate(manager, make([90, 91, 92, 93, 94]))
    again = make(range(16))
    assert len(manager.find_shared(again)) == 2, "the last two went, the beginning is still there"


def test_the_least_recently_used_goes_first_and_blank_blocks_before_any_cached_one():
    manager = BlockManager(6, 4)
    run_once(manager, [1] * 8)
    run_once(manager, [2] * 8)
    run_once(manager, [1] * 8 + [1])  # used again; its third block stays blank
    assert allocate(manager, make([3] * 8)), "two blank ones"
    assert len(manager.find_shared(make([1] * 9))) == len(manager.find_shared(make([2] * 9))) == 2
    assert allocate(manager, make([4] * 4)), "the tail of the one not used for longest"
    assert len(manager.find_shared(make([2] * 9))) == 1
    assert len(manager.find_shared(make([1] * 9))) == 2
