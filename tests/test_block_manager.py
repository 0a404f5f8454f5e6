"""The prefix cache's behaviours one by one; the random workloads are in test_scheduler.py."""

from array import array
from types import SimpleNamespace

import pytest
import xxhash
from conftest import check_blocks

from nanoengine import block_manager
from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Sequence


def make(token_ids: list[int]) -> Sequence:
    return Sequence("", list(token_ids), len(token_ids), len(token_ids) + 100)


def check(manager: BlockManager, running: list[Sequence]) -> None:
    check_blocks(SimpleNamespace(block_manager=manager, running=running, waiting=[]))


def allocate(manager: BlockManager, seq: Sequence, parent: Sequence | None = None) -> bool:
    """What the scheduler does on admission, and where completions of one prompt part."""
    if not manager.can_allocate(seq, parent):
        return False
    manager.allocate(seq, parent)
    return True


def compute(manager: BlockManager, seq: Sequence) -> Sequence:
    """What a step does to a sequence that is computed whole."""
    assert allocate(manager, seq)
    manager.register(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def run_once(manager: BlockManager, token_ids: list[int]) -> Sequence:
    seq = compute(manager, make(token_ids))
    blocks = seq.block_table
    manager.deallocate(seq)
    seq.block_table = blocks  # kept to look at
    return seq


@pytest.mark.parametrize("length, cached", [
    (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48)])
def test_at_least_one_token_is_computed(length, cached):
    manager = BlockManager(20, 16)
    run_once(manager, range(length))
    again = make(range(length))
    assert allocate(manager, again) and again.num_computed_tokens == cached
    assert again.num_uncomputed_tokens == length - cached


def test_hashes_are_chained():
    manager = BlockManager(20, 4)
    run_once(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = make([9, 9, 9, 9, 5, 6, 7, 8, 9])  # same second block behind another first one
    assert manager.find_shared(other) == []
    assert len(manager.find_shared(make([1, 2, 3, 4, 9, 6, 7, 8, 9]))) == 1
    assert len(manager.find_shared(make([1, 2, 3, 4, 5, 6, 7, 8, 7, 7]))) == 2
    # for 64 bits, prefixes with the same hash are known
    assert all(len(found) == 16 for found, _ in manager.blocks_by_hash)


def test_a_hit_compares_the_tokens_too(monkeypatch):
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(16))
    assert block_manager.xxhash is xxhash
    manager = BlockManager(20, 4)
    run_once(manager, [1, 2, 3, 4, 5])
    run_once(manager, [6, 7, 8, 9, 5])
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


def test_a_failed_allocation_changes_nothing():
    manager = BlockManager(4, 4)
    run_once(manager, range(8))
    holder = compute(manager, make([70, 71, 72, 73]))
    state = repr((manager.free, manager.ref_counts, manager.hash_of_block))
    too_long = make([*range(8), *range(50, 58)])  # two found, two fresh, one free beside those
    assert not allocate(manager, too_long)
    assert repr((manager.free, manager.ref_counts, manager.hash_of_block)) == state
    assert not too_long.block_table and too_long.num_computed_tokens == 0
    check(manager, [holder])


def test_forks_share_whole_blocks_and_copy_the_last():
    """The example of `BlockManager.fork`: 300 tokens in blocks of 128, n = 4."""
    manager = BlockManager(6, 128)
    parent = compute(manager, make(range(300)))
    children = [parent.fork(index=index) for index in (1, 2, 3)]
    for child in children:
        assert allocate(manager, child, parent)
    family = [parent, *children]
    check(manager, family)
    assert manager.num_free_blocks == 0 and not allocate(manager, parent.fork(), parent)
    assert len({tuple(seq.block_table[:2]) for seq in family}) == 1
    assert len({seq.block_table[2] for seq in family}) == 4
    assert manager.take_copies().copy_on_write == {
        child.block_table[2]: parent.block_table[2] for child in children}
    for child in children:
        assert child.num_computed_tokens == 300 and child.block_hashes == parent.block_hashes
        assert child.block_hashes is not parent.block_hashes


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    run_once(manager, range(9))
    again = compute(manager, make(range(9)))
    assert not manager.hash_of_block and again.num_computed_tokens == 9
    check(manager, [again])
