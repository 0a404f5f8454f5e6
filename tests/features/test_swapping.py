"""Preempted blocks on the host, and the order of block copies."""


import itertools

from test_block_manager import allocate, check, compute, make, run_once
from test_scheduler import ORDER_OF_COPIES, ShadowCache, make_sequence

from nanoengine.sequence import Sequence
from nanoengine_extras.running.swapping import SwappingBlockManager


def test_a_swapped_sequence_comes_back_with_the_blocks_that_the_cache_has_and_copies_the_rest():
    manager = SwappingBlockManager(4, 4, num_host_blocks=3)
    seq = compute(manager, make(range(10)))
    seq.token_ids.append(10)
    old_table = list(seq.block_table)
    assert manager.preempt(seq) == "swap"
    host_blocks = manager.host_tables[seq]
    assert manager.take_copies().swap_out == dict(zip(host_blocks, old_table))
    assert not seq.is_running and seq.num_computed_tokens == 0 and not manager.free_host_blocks
    filler = compute(manager, make(range(50, 58)))  # takes both blanks, not the cached two
    assert not allocate(manager, seq)
    manager.deallocate(filler)
    manager.forget(list(manager.blocks_by_hash))
    run_once(manager, range(5))  # the first of the two full blocks is found, the second is not
    assert allocate(manager, seq) and seq.num_computed_tokens == 10
    assert manager.take_copies().swap_in == dict(zip(list(seq.block_table)[1:], host_blocks[1:]))
    assert sorted(manager.free_host_blocks) == [0, 1, 2] and not manager.host_tables
    check(manager, [seq])


def test_the_host_blocks_that_a_step_reads_are_free_from_the_next_step_on():
    manager = SwappingBlockManager(2, 4, num_host_blocks=1)
    def preempt(token_ids: list[int]) -> str:
        return manager.preempt(compute(manager, make(token_ids)))

    seq = compute(manager, make([1, 2]))
    assert manager.preempt(seq) == "swap"
    assert preempt([3, 4]) == "recompute", "the pool is full"
    manager.take_copies()
    assert allocate(manager, seq) and preempt([3, 4]) == "recompute"
    assert manager.take_copies().swap_out == {}
    manager.deallocate(seq)
    new = make([5, 6])
    assert allocate(manager, new) and manager.preempt(new) == "recompute", "nothing is computed"
    assert preempt([3, 4]) == "swap"


def test_what_is_swapped_out_before_its_copy_is_made_is_read_from_where_it_is():
    manager = SwappingBlockManager(2, 4, num_host_blocks=1)
    parent = compute(manager, make([1, 2]))
    child = parent.fork()
    assert allocate(manager, child, parent)
    assert manager.preempt(child) == "swap"
    assert manager.take_copies().swap_out == {0: parent.block_table[0]}


# ------------------------------------------------------------------- the order of the copies


OTHER_ORDERS = [order for order in itertools.permutations(ORDER_OF_COPIES)
                if order != ORDER_OF_COPIES]


def test_a_step_with_copies_that_no_other_order_does_right():
    """Block 1 of a victim goes to the host, then to a fork that copies block 2; its parent ends,
    so block 2 goes to a sequence that comes back."""
    manager = SwappingBlockManager(2, 2, False, num_host_blocks=2)
    back, victim, parent, child = (make_sequence([1], 9) for _ in range(4))

    def compute(seq: Sequence) -> None:
        manager.allocate(seq)
        seq.num_computed_tokens = 1

    compute(back)
    manager.preempt(back)
    before = manager.take_copies()
    compute(victim)
    compute(parent)
    manager.preempt(victim)
    manager.allocate(child, parent)
    manager.deallocate(parent)
    manager.allocate(back)
    copies = manager.take_copies()

    def is_right(order: tuple[str, ...]) -> bool:
        cache = ShadowCache(2, order, slots={2: "back"})
        cache.copy(before)
        cache.slots = {2: "victim", 4: "parent"}
        cache.copy(copies)
        host_slot = manager.host_tables[victim][0] * 2
        return (cache.slots[2] == "parent" and cache.slots[4] == "back"
                and cache.host_slots[host_slot] == "victim")

    assert (list(child.block_table), list(back.block_table)) == ([1], [2])
    assert tuple(vars(copies)) == ORDER_OF_COPIES
    assert is_right(ORDER_OF_COPIES) and not any(is_right(order) for order in OTHER_ORDERS)
