"""`preemption_mode="swap"`: the blocks of a preempted sequence are copied to a pool on the host.

When the sequence comes back, it takes full blocks that the prefix cache still has; only the others
are copied back (PagedAttention: Kwon et al., 2023, arXiv:2309.06180).

`Scheduler.preempt` calls `BlockManager.preempt`, which this subclass overrides; it notes the copies
in `Batch.copies`. `ModelRunner` calls `add_host_pool`, which replaces its `copy_blocks`.
"""

from typing import Any

import psutil
import torch

from nanoengine.batch import Copies
from nanoengine.seams import rejected
from nanoengine.sequence import Sequence
from nanoengine_extensions.policies import HoldingBlockManager
from nanoengine_extensions.runner import pin


def add_host_pool(runner: Any) -> None:
    """Gives a runner a pool of `swap_space` GiB on the host, and copies to and from it.

    Raises ValueError for a pool that is larger than the memory.
    """
    gibibytes = runner.config.swap_space
    total = psutil.virtual_memory().total
    if gibibytes * 2**30 > total:
        raise rejected("swap_space", gibibytes, f"at most {total / 2**30:.1f} GiB of memory")
    runner.num_host_blocks = int(gibibytes * 2**30 // runner.block_bytes)
    shape = runner.num_host_blocks, *runner.blocks.shape[1:]
    pool = torch.empty(shape, dtype=runner.dtype, device="cpu")
    if runner.device == "cuda" and pool.numel():
        pin(pool)

    # a function that holds the runner would keep it alive
    def copy_blocks(copies: Copies, blocks: Any = runner.blocks) -> None:
        # asynchronous
        for pairs, source, target in ((copies.swap_out, blocks, pool),
                                      (copies.copy_on_write, blocks, blocks),
                                      (copies.swap_in, pool, blocks)):
            for to, origin in pairs.items():
                target[to].copy_(source[origin], non_blocking=True)

    runner.copy_blocks = copy_blocks


class SwappingBlockManager(HoldingBlockManager):
    """A block manager with a pool of `num_host_blocks` on the host. When that is full, the blocks
    of preempted sequences are dropped. The rest is as for `HoldingBlockManager`."""

    def __init__(self, *sizes: Any, num_host_blocks: int, **options: Any) -> None:
        self.num_host_blocks = num_host_blocks
        super().__init__(*sizes, **options)

    def reset(self) -> None:
        super().reset()
        self.free_host_blocks = list(range(self.num_host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}

    def preempt(self, seq: Sequence) -> str:
        num_computed = self.num_blocks_for(seq.num_computed_tokens)
        if not 0 < num_computed <= len(self.free_host_blocks):
            return super().preempt(seq)
        computed = seq.block_table[:num_computed]
        self.deallocate(seq)
        host_blocks = self.host_tables[seq] = [self.free_host_blocks.pop() for _ in computed]
        # The copy for a fork of this step is not done yet, so its parent's block is read.
        origins = [self.copies.copy_on_write.get(block, block) for block in computed]
        self.copies.swap_out.update(zip(host_blocks, origins))
        return "swap"

    def allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        num_shared_tokens = super().allocate(seq, parent)
        if seq in self.host_tables:
            num_shared = num_shared_tokens // self.block_size
            host_blocks = self.host_tables.pop(seq)
            self.copies.swap_in.update(zip(seq.block_table[num_shared:], host_blocks[num_shared:]))
            self.free_host_blocks += host_blocks[:num_shared]
            # The last token is computed again: its logits are not on the host.
            num_swapped = min(seq.num_preempted_tokens, seq.num_tokens - 1)
            self.register(seq, num_swapped)
            seq.num_computed_tokens = max(num_shared_tokens, num_swapped)
        return num_shared_tokens

    def deallocate(self, seq: Sequence) -> None:
        super().deallocate(seq)
        self.free_host_blocks += self.host_tables.pop(seq, [])

    def take_copies(self) -> Copies:
        """The host blocks that a step reads are free from the next step on."""
        copies = super().take_copies()
        self.free_host_blocks += copies.swap_in.values()
        return copies
