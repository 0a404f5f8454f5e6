"""Attention over the paged KV cache: its memory, the backends, and how one is chosen.

A token attends to all tokens before it. Their keys and values do not change, so the KV cache keeps
them, in blocks that lie anywhere in memory (block_manager.py). A backend is one function that finds
the keys of each sequence through its block table; which one is fastest depends on the device.

`Attention.forward` in model.py calls the backend. This file does not know the model. A step can mix
decodes and prompts: `gather_attention` treats them alike; `flash_attention` gives the decodes,
which come first, to a second kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoengine.config import EngineConfig
from nanoengine.errors import rejected
from nanoengine.features import extension, kernels, optional, part, shown
from nanoengine.step_inputs import StepInputs


def make_caches(config: EngineConfig, model: PretrainedConfig, num_blocks: int, dtype: torch.dtype,
                backend: "Backend") -> Tensor:
    """K and V, (layers, 2, num_blocks, block_size, kv_heads, head_dim).

    The memory is zeroed, because padded rows of a CUDA graph read block 0. The CPU's kernel has
    its own layout, in which only whole blocks can be copied.
    """
    shape = (num_blocks, config.block_size, model.num_key_value_heads, model.head_dim)
    if backend.is_in_model:
        return kernels(config.device).empty_cache(model.num_hidden_layers, *shape, dtype)
    return torch.zeros(model.num_hidden_layers, 2, *shape, dtype=dtype, device=config.device)


# -------------------------------------------------------------------------------- backends


def gather_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """Plain PyTorch: slow, but works everywhere and in any precision. Gathers each sequence's keys.

    query: (T, heads, head_dim), rotated; cache: K and V of one layer, including those of this step
    window: a query sees its last `window` keys, None for all

    Returns (T, heads, head_dim). It reads lengths on the host, so CUDA graphs cannot capture it.
    """
    out = torch.empty_like(query)
    starts = step.query_starts.tolist()
    for seq, length in enumerate(step.lengths.tolist()):
        # (2, blocks, block_size, kv_heads, head_dim)
        blocks = cache[:, step.block_tables[seq]]
        # cut after the last key
        keys, values = blocks.flatten(1, 2)[:, :length].transpose(1, 2)
        # in pieces of 256 queries, since the attention weights of all queries at once would be a
        # huge float32 tensor
        end = starts[seq + 1]
        for first in range(starts[seq], end, 256):
            rows = slice(first, min(first + 256, end))
            ages = step.positions[rows, None] - torch.arange(length, device=query.device)
            mask = (ages >= 0) & (ages < (window or length))
            attended = nn.functional.scaled_dot_product_attention(
                query[rows].transpose(0, 1), keys, values, mask, enable_gqa=True)
            out[rows] = attended.transpose(0, 1)
    return out


def flash_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """flash-attn 2 (Dao, 2023, arXiv:2307.08691), whose kernels read the paged cache directly.

    It has the signature of `gather_attention`, and reads no tensor values on the host. Decodes,
    which come first, use a second kernel. That kernel splits the keys of a sequence over
    the cores of a GPU, and without a window it reads them only once for all heads of a group.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    options = {"causal": True, "window_size": (window - 1, 0) if window else (-1, -1)}
    count = step.num_decodes
    if count:
        decoded = flash_attn_with_kvcache(
            query[:count, None], *cache, cache_seqlens=step.lengths[:count],
            block_table=step.block_tables[:count], **options)[:, 0]
        if count == len(step.lengths):
            return decoded
    out = flash_attn_varlen_func(
        query, *cache, step.query_starts[count:], step.key_starts[count:], step.longest_query,
        step.longest_keys, block_table=step.block_tables[count:], **options)
    if count:
        # the kernel above leaves the rows of decodes empty
        out[:count] = decoded
    return out


def has_flash_attn(device: str, dtype: torch.dtype) -> bool:
    """Whether `flash_attention` works. It does not if the package is absent, was built for another
    version of PyTorch, or is flash-attn 4, whose functions differ."""
    fits = device == "cuda" and dtype != torch.float32
    return fits and hasattr(optional("flash_attn"), "flash_attn_with_kvcache")


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, and its requirements.

    attend: the function that the model calls: see `gather_attention`. It is None if a library of
        kernels replaces the attention in the model (`is_in_model`): its kernel also computes norms
        and rotation, and writes the cache.
    works: whether it works on a device ("cpu" or "cuda") with a dtype.
    rank: "auto" takes the working backend with the highest rank; 0: it is chosen only by name.
    block_multiple: the block size must be a multiple of this.
    has_graphs: whether CUDA graphs can capture it: it must read no tensor values on the host.
    """

    attend: Callable | None
    works: Callable[[str, torch.dtype], bool]
    rank: int = 0
    block_multiple: int = 1
    has_graphs: bool = False

    is_in_model = property(lambda self: self.attend is None)


# You can add backends: `LLM(attention_backend=…)` accepts any name in BACKENDS.
BACKENDS = {
    "flash-attn": Backend(
        flash_attention, has_flash_attn, rank=4, block_multiple=256, has_graphs=True),
    "gather": Backend(gather_attention, lambda device, dtype: True, rank=1)}


def backends(has_kernels: bool = True) -> dict[str, Backend]:
    """Returns the backends by name: BACKENDS and, with kernels, those of backends.py, a feature."""
    return (part("backends", None, {}) if has_kernels else {}) | BACKENDS


def choose_backend(config: EngineConfig, dtype: torch.dtype) -> str:
    """Returns the name of the backend that the config asks for; for "auto", that of the fastest one
    for its device and this dtype.

    Raises ValueError for a backend that cannot work here.
    """
    name = config.attention_backend
    if name not in ["auto", *BACKENDS]:
        extension("running.backends", f"attention_backend={shown(name)}")
    table = backends(config.kernels)

    def works(each: str) -> bool:
        return each in table and table[each].works(config.device, dtype)

    # If the user names a backend, only this one is tested: the libraries of others stay unimported.
    if name == "auto":
        # "gather" works everywhere
        name = max(filter(works, table), key=lambda each: table[each].rank)
    if not works(name):
        accepted = f"one of {[*filter(works, table)]} for {dtype} on {config.device}"
        raise rejected("attention_backend", name, accepted)
    multiple = table[name].block_multiple
    if config.block_size % multiple:
        raise rejected("block_size", config.block_size, f"a multiple of {multiple} for {name}")
    return name
