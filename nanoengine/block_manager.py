"""`BlockManager`: tracks which sequence holds which block of the KV cache, and which blocks other
sequences can reuse.

How long a completion gets is not known in advance. If each sequence reserved memory for the longest
one, most of the cache would stay empty, and few sequences could run at once. So the cache is cut
into blocks of some tokens, as an operating system cuts memory into pages. A sequence takes a block
when it needs one; its block table says which blocks it has, in order. Sequences that begin with the
same tokens can then share blocks, too.

This file is plain Python over block numbers; the memory itself belongs to `model_runner.py`. Paging
and copy on write are from PagedAttention (Kwon et al., 2023, arXiv:2309.06180); the prefix cache
with chained hashes is from vLLM.

The life of a block:

    blank ── _take_fresh ──▶ used ── deallocate, without a hash ──▶ blank
                             │ ▲
      deallocate, with a hash│ ├── a hit revives it (allocate)
                             ▼ │   or it loses its hash (_take_fresh, once no block is blank)
                            cached

Blank blocks are reused first, then cached ones, the least recently used first. Two blocks can come
to hold the same tokens ("twins"): two sequences generate the same text, or a whole prompt is cached
and its last block is computed again (`find_shared`). Both stay in the prefix cache, so that one can
be evicted and the other still found.
"""

from array import array
from collections import OrderedDict
from typing import Any

import xxhash

from nanoengine.sequence import Copies, Sequence

BlockHash = tuple[bytes, bytes]


class BlockManager:
    """Hands out blocks 1 to `num_blocks` of `block_size` tokens each.

    A block is used (a block table refers to it) or free. A free block is cached if it
    has a hash; otherwise it is blank. Block 0 is never handed out: padded rows of a CUDA graph
    write there. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int,
                 enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Makes all blocks free and blank."""
        # how many block tables contain a block
        self.ref_counts = [0] * (self.num_blocks + 1)
        # in order of reuse: blank blocks, then cached ones, the least recently used first
        self.free = OrderedDict.fromkeys(range(1, self.num_blocks + 1))
        self.hash_of_block: dict[int, BlockHash] = {}
        self.blocks_by_hash: dict[BlockHash, dict[int, None]] = {}
        # the copies that the next step begins with
        self.copies = Copies()

    @classmethod
    def of(cls, config: Any, runner: Any) -> Any:
        """Returns the manager of a runner's blocks. config: the `EngineConfig`."""
        return cls(runner.num_kv_blocks, config.block_size, config.enable_prefix_caching)

    num_free_blocks = property(lambda self: len(self.free))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_to_hold(self, seq: Sequence) -> int:
        """Returns how many blocks a sequence gets when it is admitted: here, as many as its tokens
        need."""
        return self.num_blocks_for(seq.num_tokens)

    # --------------------------------------------------------------------- taking blocks

    def can_allocate(self, seq: Sequence, parent: Sequence | None = None) -> bool:
        """Whether there are enough free blocks to `allocate`."""
        shared = self.find_shared(seq, parent)
        # sharing a used block saves a free one; a cached block is itself free until it is shared
        num_saved = sum(block not in self.free for block in shared)
        return self.num_blocks_to_hold(seq) - num_saved <= len(self.free)

    def allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        """Gives a sequence its blocks (`num_blocks_to_hold`).

        It first shares existing blocks (`find_shared`), then takes fresh ones. If a parent's last
        block is partial, parent and fork would both write their next tokens to it. So the first
        fresh block of the fork becomes a copy of it, at the start of the next step, before either
        writes ("copy on write").

        With 300 prompt tokens, blocks of 128 and n = 4:

            parent 0   [ 4 ] [ 9 ] [ 2 ]       children 1 to 3 share blocks 4 and 9
            child 1    [ 4 ] [ 9 ] [ 7 ]       (4 references each) and get copies
            child 2    [ 4 ] [ 9 ] [ 5 ]       of block 2:
            child 3    [ 4 ] [ 9 ] [ 8 ]       copy_on_write = {7: 2, 5: 2, 8: 2}

        Afterwards `seq.num_computed_tokens` is the number of its tokens in the cache. Returns the
        number of tokens in shared blocks.
        """
        shared = self.find_shared(seq, parent)
        num_shared_tokens = len(shared) * self.block_size
        # first, because taking a fresh block could evict one of them
        for block in shared:
            self.free.pop(block, None)
            self.ref_counts[block] += 1
        fresh = [self._take_fresh() for _ in range(self.num_blocks_to_hold(seq) - len(shared))]
        seq.block_table = array("i", shared + fresh)
        seq.num_computed_tokens = num_shared_tokens
        if parent:
            if parent.num_computed_tokens > num_shared_tokens:
                self.copies.copy_on_write[fresh[0]] = parent.block_table[len(shared)]
            # the shared blocks and the copy have the K and V of all that the parent has computed
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.block_hashes = parent.block_hashes[:]
        return num_shared_tokens

    def may_append(self, seq: Sequence) -> None:
        """Gives a running sequence one more block; `Scheduler.make_room` has found that its newest
        token needs one."""
        seq.block_table.append(self._take_fresh())

    def _take_fresh(self) -> int:
        """Pops the least valuable free block, and drops its hash."""
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
        """Frees all blocks of a sequence, last one first, so that prefixes stay cached longest."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                # a cached block is reused last, a blank one first
                self.free.move_to_end(block, last=block in self.hash_of_block)
        seq.block_table = array("i")
        seq.num_computed_tokens = 0

    def preempt(self, seq: Sequence) -> str:
        """Frees the blocks of a preempted sequence; returns how it will come back.

        "recompute": its tokens are computed again. The subclass in the extensions' swapping.py
        copies the blocks to the host.
        """
        self.deallocate(seq)
        return "recompute"

    def take_copies(self) -> Copies:
        """Returns the copies for the scheduled step."""
        copies, self.copies = self.copies, Copies()
        return copies

    # --------------------------------------------------------------------- prefix cache

    def find_shared(self, seq: Sequence, parent: Sequence | None = None) -> list[int]:
        """Returns the blocks that a sequence can share: its parent's full ones, or the cached
        blocks of its prefix, up to the first one that is not cached.

        A hit never covers the last token, since its logits are needed. So if a cached prompt ends
        with a full block, this block is computed again, into a twin: no sequence ever writes to a
        shared block.
        """
        if parent:
            return parent.block_table[:parent.num_computed_tokens // self.block_size].tolist()
        num_full = min(seq.num_tokens - 1, seq.max_cached_tokens) // self.block_size
        shared: list[int] = []
        for index in range(num_full):
            twins = self.blocks_by_hash.get(self._hash(seq, index))
            if not twins:
                break
            shared.append(next(iter(twins)))
        return shared

    def register(self, seq: Sequence, stop: int) -> None:
        """Adds to the prefix cache all blocks that are full once the tokens before `stop` are
        computed.

        A block may be registered before its K and V are written. This is safe: in each layer, a
        step first writes the K and V of the whole batch, and only then reads any.
        """
        num_full = stop // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_computed_tokens // self.block_size, num_full):
            block = seq.block_table[index]
            block_hash = self.hash_of_block[block] = self._hash(seq, index)
            self.blocks_by_hash.setdefault(block_hash, {})[block] = None

    def forget(self, hashes: list[BlockHash]) -> None:
        """Forgets these hashes. Blocks in use stay in use; cached ones become blank."""
        for block_hash in hashes:
            for block in self.blocks_by_hash.pop(block_hash, ()):
                del self.hash_of_block[block]
                if block in self.free:
                    self.free.move_to_end(block, last=False)

    def _hash(self, seq: Sequence, index: int) -> BlockHash:
        """Returns the key of a full block: a hash of its whole prefix, and its own token ids.

        The hash is the 128-bit xxh3 of the previous block's hash and the block's token ids. A hit
        compares the block's own token ids exactly, and all tokens before them by the hash. The
        probability that two different prefixes have the same hash is 2**-128. The hash is not
        cryptographic: it does not resist deliberate collisions.

        The sequence keeps the keys of its blocks; those that it lacks are added here.
        """
        keys = seq.block_hashes
        for missing in range(len(keys), index + 1):
            before = keys[-1][0] if keys else b""
            start = missing * self.block_size
            tokens = array("i", seq.token_ids[start:start + self.block_size]).tobytes()
            keys.append((xxhash.xxh3_128_digest(before + tokens), tokens))
        return keys[index]
