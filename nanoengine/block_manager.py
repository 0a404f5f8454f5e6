"""`BlockManager`: which sequence holds which block of the KV cache, and what can be found again.

Plain Python over block numbers; the memory itself belongs to `model_runner.py`. Paging and copy on
write are from PagedAttention (Kwon et al., 2023, arXiv:2309.06180), the prefix cache with chained
hashes is from vLLM.

The life of a block:

    blank ── _take_fresh ──▶ used ── deallocate, without a hash ──▶ blank
                             │ ▲
      deallocate, with a hash│ ├── a hit revives it (allocate)
                             ▼ │   or it loses its hash (_take_fresh, once no block is blank)
                            cached

Blank blocks are reused first, then cached ones, the least recently used first. Two blocks with the
same tokens ("twins") arise when two sequences compute the same prompt side by side, or when a whole
prompt is cached and its last block is computed again (`find_shared`); both stay findable, so that
evicting one never loses the other.
"""

from array import array
from collections import OrderedDict
from itertools import takewhile

import xxhash

from nanoengine.batch import Copies
from nanoengine.sequence import Sequence

BlockHash = tuple[bytes, bytes]


class BlockManager:
    """Hands out blocks 1 to `num_blocks` of `block_size` tokens each.

    A block is used (a block table refers to it) or free. A free block with a hash is cached, one
    without is blank. Block 0 is never handed out: padded rows of a CUDA graph write there. Every
    operation is O(1) per block.

    The host pool has `num_host_blocks`, for copies of the blocks of swapped sequences.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        self.reset()

    def reset(self) -> None:
        """Makes all blocks free and blank."""
        # in how many block tables a block stands
        self.ref_counts = [0] * (self.num_blocks + 1)
        # in the order of reuse: blank blocks, then cached ones, the least recently used first
        self.free = OrderedDict.fromkeys(range(1, self.num_blocks + 1))
        self.hash_of_block: dict[int, BlockHash] = {}
        self.blocks_by_hash: dict[BlockHash, dict[int, None]] = {}
        self.free_host_blocks = list(range(self.num_host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}
        # for the step that is being scheduled
        self.copies = Copies()

    num_free_blocks = property(lambda self: len(self.free))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_to_hold(self, seq: Sequence) -> int:
        """How many blocks a running sequence has: for its tokens, or for those it reserves."""
        return self.num_blocks_for(max(seq.num_tokens, seq.num_held_tokens))

    # --------------------------------------------------------------------- taking blocks

    def can_allocate(self, group: list[Sequence], parent: Sequence | None = None) -> bool:
        """Whether there are enough free blocks to `allocate` for all sequences of a group."""
        shared = [block for seq in group for block in self.find_shared(seq, parent)]
        num_used = sum(block not in self.free for block in shared)
        return sum(map(self.num_blocks_to_hold, group)) - num_used <= len(self.free)

    def allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        """Gives a sequence blocks for all the tokens that it has, or more.

        It takes a share in blocks that others have, too (`find_shared`), then fresh blocks. What
        goes into the first of the fresh blocks depends on where the sequence comes from:

        1. From a parent (n > 1, beams): a copy of the parent's last block, if that is partial. It
           is the only block that both sequences would otherwise write to, both in the next step.
        2. From the host: the copies that were made when it was swapped out.
        3. From neither: nothing. These tokens have to be computed.

        With 300 prompt tokens, blocks of 128 and n = 4, the first case is:

            parent 0   [ 4 ] [ 9 ] [ 2 ]       children 1 to 3 share blocks 4 and 9
            child 1    [ 4 ] [ 9 ] [ 7 ]       (4 references each) and get copies
            child 2    [ 4 ] [ 9 ] [ 5 ]       of block 2:
            child 3    [ 4 ] [ 9 ] [ 8 ]       copy_on_write = {7: 2, 5: 2, 8: 2}

        `seq.num_computed_tokens` then counts the tokens in the cache. Returns the number of tokens
        in shared blocks.
        """
        shared = self.find_shared(seq, parent)
        # before any fresh one is taken, which could evict them
        for block in shared:
            self.free.pop(block, None)
            self.ref_counts[block] += 1
        fresh = [self._take_fresh() for _ in range(self.num_blocks_to_hold(seq) - len(shared))]
        seq.block_table = array("i", shared + fresh)
        num_shared_tokens = seq.num_computed_tokens = len(shared) * self.block_size
        # 1. from a parent
        if parent:
            if parent.num_computed_tokens > num_shared_tokens:
                self.copies.copy_on_write[fresh[0]] = parent.block_table[len(shared)]
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.block_hashes = parent.block_hashes[:]
        # 2. from the host
        elif seq in self.host_tables:
            host_blocks = self.host_tables.pop(seq)
            self.copies.swap_in.update(zip(fresh, host_blocks[len(shared):]))
            self.free_host_blocks += host_blocks[:len(shared)]
            # The last token is computed again: its logits are not on the host.
            num_swapped = min(seq.num_preempted_tokens, seq.num_tokens - 1)
            self.register(seq, num_swapped)
            seq.num_computed_tokens = max(num_shared_tokens, num_swapped)
        return num_shared_tokens

    def can_append(self, num_seqs: int) -> bool:
        """Whether so many running sequences can have one block more each."""
        return num_seqs <= len(self.free)

    def may_append(self, seq: Sequence) -> None:
        """Gives a running sequence the block that its newest token needs."""
        seq.block_table.append(self._take_fresh())

    def _take_fresh(self) -> int:
        """The free block that is first in the order of reuse. It loses its hash."""
        block, _ = self.free.popitem(last=False)
        if block_hash := self.hash_of_block.pop(block, None):
            twins = self.blocks_by_hash[block_hash]
            del twins[block]
            if not twins:
                del self.blocks_by_hash[block_hash]
        self.ref_counts[block] = 1
        return block

    # --------------------------------------------------------------------- giving them back

    def deallocate(self, seq: Sequence) -> None:
        """Takes back all blocks of a sequence, the last one first: prefixes stay cached longest."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.hash_of_block)
        seq.block_table = array("i")
        seq.num_computed_tokens = 0
        self.free_host_blocks += self.host_tables.pop(seq, [])

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether a sequence has computed blocks, and the host pool has room for all of them."""
        num_computed = self.num_blocks_for(seq.num_computed_tokens)
        return 0 < num_computed <= len(self.free_host_blocks)

    def swap_out(self, seq: Sequence) -> None:
        """Takes back all blocks of a sequence, and has the computed ones copied to the host."""
        computed = seq.block_table[:self.num_blocks_for(seq.num_computed_tokens)]
        self.deallocate(seq)
        host_blocks = self.host_tables[seq] = [self.free_host_blocks.pop() for _ in computed]
        # The copy for a fork made in this step is not done yet: its parent's block is read instead.
        origins = [self.copies.copy_on_write.get(block, block) for block in computed]
        self.copies.swap_out.update(zip(host_blocks, origins))

    def take_copies(self) -> Copies:
        """The copies for the step that has been scheduled. The host blocks that it reads are free
        from the next step on."""
        copies, self.copies = self.copies, Copies()
        self.free_host_blocks += copies.swap_in.values()
        return copies

    # --------------------------------------------------------------------- prefix cache

    def find_shared(self, seq: Sequence, parent: Sequence | None = None) -> list[int]:
        """The blocks that a sequence can share: all full ones of its parent, or the cached blocks
        with which it begins, as many as there are in a row.

        A hit never covers the last token, since its logits are needed. So when a prompt of whole
        blocks is cached, its whole last block is computed again, into a twin: no sequence ever
        writes to a shared block. A sequence whose prompt is scored shares no cached block: it needs
        the logits of all its tokens.
        """
        if parent:
            return parent.block_table[:parent.num_computed_tokens // self.block_size].tolist()
        if seq.is_scored:
            return []
        num_full = (seq.num_tokens - 1) // self.block_size
        found = (self.blocks_by_hash.get(self._hash(seq, i), {}) for i in range(num_full))
        return [next(iter(twins)) for twins in takewhile(bool, found)]

    def register(self, seq: Sequence, stop: int) -> None:
        """Makes the blocks findable that the tokens from the computed ones up to `stop` fill.

        Call this once K and V are written, or are sure to be written before any sequence admitted
        later reads them. That holds for the tokens of the step that is being scheduled: each layer
        writes the K and V of the whole batch before it reads any.
        """
        num_full = stop // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_computed_tokens // self.block_size, num_full):
            block = seq.block_table[index]
            block_hash = self.hash_of_block[block] = self._hash(seq, index)
            self.blocks_by_hash.setdefault(block_hash, {})[block] = None

    def forget(self, seq: Sequence) -> None:
        """Forgets the hashes of a sequence's blocks and of their twins, used or free."""
        self._forget(seq.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Forgets every hash. Blocks in use stay in use."""
        self._forget(list(self.blocks_by_hash))

    def _forget(self, hashes: list[BlockHash]) -> None:
        """Cached blocks become blank: they are the first to be used again."""
        for block_hash in hashes:
            for block in self.blocks_by_hash.pop(block_hash, ()):
                del self.hash_of_block[block]
                if block in self.free:
                    self.free.move_to_end(block, last=False)

    def _hash(self, seq: Sequence, index: int) -> BlockHash:
        """What a full block is found by: a hash, and its tokens.

        The hash is xxh3 in 128 bits over the hash of the block before and the block's own token
        ids, so that it stands for the whole prefix. Of the blocks before, only the hash is
        compared: no two prefixes have the same one by accident. But xxh3 is no cryptographic hash,
        which would resist a search for two that have. The sequence keeps the hashes of its blocks.
        """
        for missing in range(len(seq.block_hashes), index + 1):
            before = seq.block_hashes[-1][0] if missing else bytes(16)
            start = missing * self.block_size
            tokens = array("i", seq.token_ids[start:start + self.block_size]).tobytes()
            digest = xxhash.xxh3_128_digest(before + tokens)
            seq.block_hashes.append((digest, tokens))
        return seq.block_hashes[index]
