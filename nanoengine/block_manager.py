"""`BlockManager`: who holds which block of the KV cache, and what can be found there again.

Plain Python over block numbers; the memory itself belongs to `model_runner.py`. Paging and copy on
write are from PagedAttention (Kwon et al., 2023, arXiv:2309.06180), the prefix cache by chained
hashes from vLLM.
"""

from array import array
from collections import OrderedDict
from itertools import takewhile
from types import SimpleNamespace

import xxhash

from nanoengine.sequence import Sequence


class Copies(SimpleNamespace):
    """Blocks to copy before a step computes, {to: from}, in this order, each all at once:
    `swap_out` to the host, `copy_on_write` on the device, `swap_in` from the host."""

    def __init__(self) -> None:
        super().__init__(swap_out={}, copy_on_write={}, swap_in={})


def num_held_tokens(kv_allocation: str, max_num_tokens: int, max_model_len: int) -> int:
    """How many tokens' blocks a sequence holds at least, from its admission on.

    "on-demand": only those of the tokens it has; "reserve": of all that it may come to have, so
    that it is never preempted; "max-length": of the most that any may have, as before paging.
    """
    return {"on-demand": 0, "reserve": max_num_tokens, "max-length": max_model_len}[kv_allocation]


class BlockManager:
    """Hands out blocks 1 to `num_blocks` of `block_size` tokens each.

    A block is used (referenced by a table) or free. A free block without a hash is blank; one with
    a hash is cached: it waits in least-recently-used order, is revived by a hit, and is taken for
    something else only when there are no blank ones. Every operation is O(1) per block.

    The host pool of `num_host_blocks` takes copies of the blocks of sequences that are swapped out.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        self.reset()

    def reset(self) -> None:
        """All blocks are free and blank."""
        self.ref_counts = [0] * (self.num_blocks + 1)  # in how many tables a block stands
        # Who is taken next comes first: blank ones, then the cached ones, oldest first; never 0.
        self.free = OrderedDict.fromkeys(range(1, self.num_blocks + 1))
        self.keys: dict[int, tuple[int, bytes]] = {}  # of each findable block: hash and tokens
        self.twins: dict[tuple[int, bytes], dict[int, None]] = {}  # the blocks with the same key
        self.free_host_blocks = list(range(self.num_host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}  # of those who are swapped out
        self.copies = Copies()  # for the step that is being built

    num_free_blocks = property(lambda self: len(self.free))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_to_hold(self, seq: Sequence) -> int:
        return self.num_blocks_for(max(seq.num_tokens, seq.num_held_tokens))

    # ------------------------------------------------------------------ taking and giving back

    def num_blocks_to_allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        """How many free blocks `allocate` would take."""
        num_used = sum(block_id not in self.free for block_id in self.find_prefix(seq, parent))
        return self.num_blocks_to_hold(seq) - num_used

    def allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        """Gives a sequence its blocks, for all tokens it knows or more.

        First those that others have too: the longest prefix in the cache, or, for a fork, all full
        blocks of its parent. Into the next ones goes what is left of the parent's last block
        (it is the only one that both would write to), or of the copies on the host.
        `seq.num_computed_tokens` is what came so; returns how much of it the prefix cache had.
        """
        prefix = self.find_prefix(seq, parent)
        for block_id in prefix:  # before any fresh one is taken, which could evict it
            self.free.pop(block_id, None)
            self.ref_counts[block_id] += 1
        fresh = [self.take_fresh() for _ in range(self.num_blocks_to_hold(seq) - len(prefix))]
        seq.block_table = array("i", prefix + fresh)
        num_hits = seq.num_computed_tokens = len(prefix) * self.block_size
        if parent:
            if parent.num_computed_tokens > num_hits:
                self.copies.copy_on_write[fresh[0]] = parent.block_table[len(prefix)]
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.block_keys = parent.block_keys[:]
        elif host_blocks := self.host_tables.pop(seq, []):
            self.copies.swap_in.update(zip(fresh, host_blocks[len(prefix):]))
            self.free_host_blocks += host_blocks[:len(prefix)]
            num_swapped = min(seq.num_preempted_tokens, seq.num_tokens - 1)  # the last for logits
            self.register(seq, num_swapped)
            seq.num_computed_tokens = max(num_hits, num_swapped)
        return num_hits

    def deallocate(self, seq: Sequence) -> None:
        """Takes all blocks of a sequence back, tail first, so that prefixes stay cached longest."""
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free[block_id] = None
                self.free.move_to_end(block_id, last=block_id in self.keys)
        seq.block_table = array("i")
        seq.num_computed_tokens = 0
        self.free_host_blocks += self.host_tables.pop(seq, [])

    def swap_out(self, seq: Sequence) -> bool:
        """Takes all blocks of a sequence back, with copies of the computed ones on the host.

        False, and nothing is copied, where nothing is computed, or there is no room for all of it.
        """
        computed = seq.block_table[:self.num_blocks_for(seq.num_computed_tokens)]
        self.deallocate(seq)
        if not 0 < len(computed) <= len(self.free_host_blocks):
            return False
        host_blocks = self.host_tables[seq] = [self.free_host_blocks.pop() for _ in computed]
        # A fork may not have run yet: what it is to hold is still in its parent's block.
        origins = [self.copies.copy_on_write.get(block_id, block_id) for block_id in computed]
        self.copies.swap_out.update(zip(host_blocks, origins))
        return True

    def take_fresh(self) -> int:
        """A free block: a blank one, else the cached one that was not used for longest."""
        block_id, _ = self.free.popitem(last=False)
        if key := self.keys.pop(block_id, None):
            del self.twins[key][block_id]
            if not self.twins[key]:
                del self.twins[key]
        self.ref_counts[block_id] = 1
        return block_id

    # -------------------------------------------------------------------------- prefix cache

    def find_prefix(self, seq: Sequence, parent: Sequence | None = None) -> list[int]:
        """The blocks that hold the beginning of a sequence: for a fork, the full ones of `parent`,
        else as many as the cache has in a row.

        Never all of its tokens: the last is always computed, for its logits.
        """
        if parent:
            return parent.block_table[:parent.num_computed_tokens // self.block_size].tolist()
        last = (seq.num_tokens - 1) // self.block_size
        found = (self.twins.get(self._key(seq, index), {}) for index in range(last))
        return [next(iter(twins)) for twins in takewhile(bool, found)]

    def register(self, seq: Sequence, stop: int) -> None:
        """Makes the blocks findable that a sequence's tokens from the computed ones to `stop` fill.

        To be called when their K and V are in the cache, or will be before anyone can read them who
        is admitted later: the scheduler does so for the tokens of the step it is building, since
        each layer writes the K and V of the whole batch before it reads any. A pending
        token has no value yet: `stop` may not be behind it.
        """
        last = stop // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_computed_tokens // self.block_size, last):
            key = self.keys[seq.block_table[index]] = self._key(seq, index)
            self.twins.setdefault(key, {})[seq.block_table[index]] = None

    def reset_prefix_cache(self) -> None:
        """Forgets every hash. Blocks in use stay in use."""
        self.keys.clear()
        self.twins.clear()

    def _key(self, seq: Sequence, index: int) -> tuple[int, bytes]:
        """What a full block is found by: xxh64 over the hash of the block before it and its own
        tokens; and, as hashes may collide, the tokens. Kept in the sequence."""
        for missing in range(len(seq.block_keys), index + 1):
            before = seq.block_keys[-1][0] if missing else 0
            token_ids = seq.token_ids[missing * self.block_size:(missing + 1) * self.block_size]
            data = array("i", token_ids).tobytes()
            key = xxhash.xxh64_intdigest(before.to_bytes(8, "little") + data), data
            seq.block_keys.append(key)
        return seq.block_keys[index]
