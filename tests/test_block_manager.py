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


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    """What the scheduler does on admission."""
    if manager.num_blocks_to_allocate(seq) > manager.num_free_blocks:
        return False
    manager.allocate(seq)
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


def test_a_prompt_of_k_full_blocks_hits_k_minus_1():
    manager = BlockManager(20, 16)
    run_once(manager, range(64))
    again = make(range(64))
    assert allocate(manager, again)
    assert again.num_computed_tokens == 48 and again.num_uncomputed_tokens == 16


@pytest.mark.parametrize("length, cached", [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_at_least_one_token_is_computed(length, cached):
    manager = BlockManager(20, 16)
    run_once(manager, range(length))
    again = make(range(length))
    assert allocate(manager, again) and again.num_computed_tokens == cached


def test_hashes_are_chained():
    manager = BlockManager(20, 4)
    run_once(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = make([9, 9, 9, 9, 5, 6, 7, 8, 9])  # same second block behind another first one
    assert manager.find_prefix(other) == []
    assert len(manager.find_prefix(make([1, 2, 3, 4, 9, 6, 7, 8, 9]))) == 1
    assert len(manager.find_prefix(make([1, 2, 3, 4, 5, 6, 7, 8, 7, 7]))) == 2


def test_a_hit_compares_the_tokens_too(monkeypatch):
    monkeypatch.setattr(xxhash, "xxh64_intdigest", lambda data: 7)
    assert block_manager.xxhash is xxhash
    manager = BlockManager(20, 4)
    run_once(manager, [1, 2, 3, 4, 5])
    run_once(manager, [6, 7, 8, 9, 5])
    assert manager.find_prefix(make([1, 2, 3, 3, 5])) == []
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 5]):
        found = manager.find_prefix(make(tokens))
        assert [manager.keys[block_id][1] for block_id in found] == [
            array("i", tokens[:4]).tobytes()]


def test_shared_blocks_are_counted():
    manager = BlockManager(20, 4)
    sequences = [compute(manager, make([1, 2, 3, 4, 5, 6, 7, 8, number])) for number in range(3)]
    check(manager, sequences)
    assert manager.num_free_blocks == 20 - 2 - 3
    shared = sequences[0].block_table[:2]
    assert all(seq.block_table[:2] == shared for seq in sequences)
    assert [manager.ref_counts[block_id] for block_id in shared] == [3, 3]
    for left, seq in enumerate(list(sequences), start=1):
        manager.deallocate(seq)
        check(manager, sequences[left:])
        assert manager.ref_counts[shared[0]] == 3 - left
    assert manager.num_free_blocks == 20


def test_the_tail_is_freed_and_so_evicted_first():
    manager = BlockManager(4, 4)
    run_once(manager, range(16))
    assert allocate(manager, make([90, 91, 92, 93, 94]))
    again = make(range(16))
    assert len(manager.find_prefix(again)) == 2, "the last two went, the beginning is still there"


def test_the_least_recently_used_goes_first_and_blank_blocks_before_any_cached_one():
    manager = BlockManager(6, 4)
    run_once(manager, [1] * 8)
    run_once(manager, [2] * 8)
    run_once(manager, [1] * 8 + [1])  # used again; its third block stays blank
    assert allocate(manager, make([3] * 8)), "two blank ones"
    assert len(manager.find_prefix(make([1] * 9))) == len(manager.find_prefix(make([2] * 9))) == 2
    assert allocate(manager, make([4] * 4)), "the tail of the one not used for longest"
    assert len(manager.find_prefix(make([2] * 9))) == 1
    assert len(manager.find_prefix(make([1] * 9))) == 2


def test_a_freed_block_is_revived():
    manager = BlockManager(10, 4)
    first = run_once(manager, range(9))
    assert manager.num_free_blocks == 10 and len(manager.free.keys() & manager.keys) == 2
    again = compute(manager, make(range(9)))
    assert list(again.block_table[:2]) == list(first.block_table[:2])
    assert manager.num_free_blocks == 7 and not manager.free.keys() & manager.keys
    check(manager, [again])


def test_a_matched_block_is_not_evicted_by_the_same_allocation():
    manager = BlockManager(4, 4)
    run_once(manager, range(8))  # two cached blocks, two blank ones
    seq = compute(manager, make([*range(8), *range(50, 58)]))
    assert seq.num_tokens == 16 and len(set(seq.block_table)) == 4
    check(manager, [seq])


def test_a_failed_allocation_changes_nothing():
    manager = BlockManager(4, 4)
    run_once(manager, range(8))
    holder = compute(manager, make([70, 71, 72, 73]))
    state = repr((manager.free, manager.ref_counts, manager.keys))
    too_long = make([*range(8), *range(50, 58)])  # two found, two fresh, one free beside those
    assert not allocate(manager, too_long)
    assert repr((manager.free, manager.ref_counts, manager.keys)) == state
    assert not too_long.block_table and too_long.num_computed_tokens == 0
    check(manager, [holder])


def test_two_blocks_with_the_same_tokens_one_evicted_the_other_still_found():
    manager = BlockManager(8, 4)
    first, second = make([1, 2, 3, 4, 5]), make([1, 2, 3, 4, 5])
    assert allocate(manager, first) and allocate(manager, second)  # neither is registered yet
    for seq in (first, second):
        manager.register(seq, 5)
        seq.num_computed_tokens = 5
    check(manager, [first, second])
    manager.deallocate(first)
    filler = make(range(50, 50 + 4 * manager.num_free_blocks))
    assert allocate(manager, filler), "takes every free block, the first twin among them"
    assert manager.find_prefix(make([1, 2, 3, 4, 9])) == [second.block_table[0]]
    check(manager, [second, filler])


def test_resetting_forgets_hashes_but_not_blocks_in_use():
    manager = BlockManager(10, 4)
    run_once(manager, range(9))
    user = compute(manager, make(range(50, 59)))
    manager.reset_prefix_cache()
    check(manager, [user])
    assert manager.find_prefix(make(range(9))) == manager.find_prefix(make(range(50, 59))) == []
    manager.deallocate(user)
    check(manager, [])
    assert manager.num_free_blocks == 10


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    run_once(manager, range(9))
    again = compute(manager, make(range(9)))
    assert not manager.keys and again.num_computed_tokens == 9
    check(manager, [again])

