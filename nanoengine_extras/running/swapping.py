"""`preemption_mode="swap"`: the blocks of a preempted sequence are copied to a pool on the host.

When the sequence comes back, it takes full blocks that the prefix cache still has; only the others
are copied back (PagedAttention: Kwon et al., 2023, arXiv:2309.06180).

The engine makes a `SwappingBlockManager` instead of a `BlockManager`. `preempt` and `allocate`
note the copies in `Batch.copies`; the runner has a `SwappingCopier`, which makes them.
"""

from typing import Any

import psutil
import torch

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.errors import rejected
from nanoengine.model_runner import BlockCopier
from nanoengine.sequence import Copies, Sequence
from nanoengine_extras.running import free_memory, pin


def host_pool(blocks: torch.Tensor, config: EngineConfig) -> torch.Tensor:
    """Returns host memory for as many blocks like these as fit into `swap_space`.

    Raises ValueError if the pools of all ranks are larger than the host's whole memory, or than
    what its container has left.
    """
    left = free_memory(psutil.virtual_memory().total) // config.tensor_parallel_size
    num_bytes = config.swap_space * 2**30
    if num_bytes > left:
        raise rejected("swap_space", config.swap_space, f"at most {left / 2**30:.1f} GiB of memory")
    # in a trial before the cache has its size, there is only block 0
    is_used = config.preemption_mode == "swap" and len(blocks) > 1
    count = int(num_bytes // blocks[0].nbytes) if is_used else 0
    pool = torch.empty((count, *blocks.shape[1:]), dtype=blocks.dtype, device="cpu")
    return pin(pool) if blocks.device.type == "cuda" and count else pool


class SwappingCopier(BlockCopier):
    """Also copies blocks to and from a pool on the host. host_blocks: (blocks, layers, 2, …)."""

    def __init__(self, blocks: torch.Tensor, config: EngineConfig) -> None:
        super().__init__(blocks, config)
        self.host_blocks = host_pool(blocks, config)

    def copy(self, copies: Copies) -> None:
        # in this order: see `Copies`
        for target, origin in copies.swap_out.items():
            self.host_blocks[target].copy_(self.blocks[origin], non_blocking=True)
        super().copy(copies)
        for target, origin in copies.swap_in.items():
            self.blocks[target].copy_(self.host_blocks[origin], non_blocking=True)


class SwappingBlockManager(BlockManager):
    """A block manager with a pool of `num_host_blocks` on the host. When that is full, the blocks
    of preempted sequences are dropped."""

    def __init__(self, *options: Any, num_host_blocks: int = 0) -> None:
        self.num_host_blocks = num_host_blocks
        super().__init__(*options)

    @classmethod
    def of(cls, config: EngineConfig, runner: Any) -> Any:
        manager = super().of(config, runner)
        # `swap_space` alone asks for nothing
        if config.preemption_mode == "swap":
            manager.num_host_blocks = len(runner.copier.host_blocks)
            manager.reset()
        return manager

    def reset(self) -> None:
        super().reset()
        self.free_host_blocks = list(range(self.num_host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}
        # how many tokens of each had been computed
        self.num_computed: dict[Sequence, int] = {}

    def preempt(self, seq: Sequence) -> str:
        num_computed = self.num_blocks_for(seq.num_computed_tokens)
        if not 0 < num_computed <= len(self.free_host_blocks):
            return super().preempt(seq)
        computed = seq.block_table[:num_computed]
        num_tokens = seq.num_computed_tokens
        self.deallocate(seq)
        self.num_computed[seq] = num_tokens
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
            num_swapped = min(self.num_computed.pop(seq), seq.num_tokens - 1)
            self.register(seq, num_swapped)
            seq.num_computed_tokens = max(num_shared_tokens, num_swapped)
        return num_shared_tokens

    def deallocate(self, seq: Sequence) -> None:
        super().deallocate(seq)
        self.free_host_blocks += self.host_tables.pop(seq, [])
        self.num_computed.pop(seq, None)

    def take_copies(self) -> Copies:
        """The host blocks that a step reads are free from the next step on."""
        copies = super().take_copies()
        self.free_host_blocks += copies.swap_in.values()
        return copies

    def gauges(self) -> dict[str, int]:
        return {"num_requests_swapped": len(self.host_tables),
                "num_host_blocks_used": sum(map(len, [*self.host_tables.values()]))}


PARTS = {"block_manager": SwappingBlockManager, "copier": SwappingCopier}
