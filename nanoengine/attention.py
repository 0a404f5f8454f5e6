"""Attention over the paged KV cache: its memory, the inputs of a step, and the backends.

A backend is one function. The runner chooses it, and the model calls it (`model.py`). Which model
asks is not known here, nor why a step consists of the tokens that it has.
"""

import math
import mmap
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from nanoengine.kernels.compiling import set_num_threads
from nanoengine.kernels.paged_attention import numbers_per_token, paged_attention
from nanoengine.sampling_params import rejected

# (name, dtype, shape, number of 32-bit words) of each array in a buffer
Layout = tuple[tuple[str, str, tuple[int, ...], int], ...]
# the layout of a step's inputs, longest_query and longest_keys
StepShape = tuple[Layout, int, int]


@dataclass
class StepInputs:
    """What the device needs for one step: T tokens of S sequences, R rows to sample.

    buffer: int32, crosses to the device in one copy. All tensors below are views of it.
    longest_query, longest_keys: the most tokens, and the most keys, of a sequence (max_seqlen).
    uniforms: (R,) float64 in [0, 1), each decides a draw.
    temperatures: (R,) float32.
    slot_blocks, slot_offsets: (T,) int64, the block into which a token's K and V go, and the place
        in it (the slot mapping).
    token_ids: (T,); -1 - i stands for the token that was sampled in row i of the step before.
    positions: (T,), of the tokens in their sequences.
    sequence_of_token: (T,), rows of `block_tables`.
    query_starts: (S + 1,), where the tokens of each sequence begin, and T (cu_seqlens_q).
    key_starts: (S + 1,), cumulative key counts (cu_seqlens_k).
    lengths: (S,), how many keys each sequence has, with those of this step (cache_seqlens).
    block_tables: (S, width), padded with 0.
    sampled_rows: which of the T rows have logits: R that are sampled, and Q that are scored.
    next_tokens: (R + Q,), the token behind each of these: -1 if it is to be sampled.

    The other tensors are int32.

    An example, with blocks of 4 tokens: a chunk of sequence 0 (its tokens 4 to 6, not its last)
    beside a decode of sequence 1 (its ninth token).

        token_ids          51 52 53 | 17        query_starts   0  3  4
        positions           4  5  6 |  8        lengths        7  9
        sequence_of_token   0  0  0 |  1        key_starts     0  7 16
        slot_blocks         8  8  8 |  6        block_tables   [3 8 0], [5 2 6]
        slot_offsets        0  1  2 |  0        sampled_rows   3      next_tokens   -1
    """

    buffer: Tensor
    longest_query: int
    longest_keys: int
    uniforms: Tensor
    temperatures: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    token_ids: Tensor
    positions: Tensor
    sequence_of_token: Tensor
    query_starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    sampled_rows: Tensor
    next_tokens: Tensor

    @classmethod
    def unpack(cls, buffer: Tensor, shape: StepShape) -> "StepInputs":
        layout, longest_query, longest_keys = shape
        return cls(buffer, longest_query, longest_keys, **unpack(buffer, layout))

    @property
    def ranges(self) -> tuple[Tensor, Tensor, int, int]:
        """Where queries and keys begin, and the most of each: what varlen kernels want."""
        return self.query_starts, self.key_starts, self.longest_query, self.longest_keys


def pack(arrays: dict[str, np.ndarray], device: str) -> tuple[Tensor, Layout]:
    """Arrays, one behind the other in one int32 buffer on the host, and how to unpack it.

    Arrays of 64-bit numbers come first, so that theirs are aligned. For a GPU the buffer is pinned:
    PyTorch reuses one only when the copy from it is done, so that none is rewritten in flight.
    """
    words = [array.view(np.int32).ravel() for array in arrays.values()]
    buffer = torch.empty(sum(map(len, words)), dtype=torch.int32, device="cpu",
                         pin_memory=device == "cuda")
    np.concatenate(words, out=buffer.numpy())
    return buffer, tuple((name, array.dtype.name, array.shape, array.nbytes // 4)
                         for name, array in arrays.items())


def unpack(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays as views of the buffer, on whatever device that is."""
    parts = buffer.split([num_words for *_, num_words in layout])
    return {name: part.view(getattr(torch, dtype)).view(shape)
            for (name, dtype, shape, _), part in zip(layout, parts)}


def send(device: torch.device, *arrays: Any) -> Iterable[Tensor]:
    """Arrays of 64-bit numbers on the device, in one copy that nobody waits for."""
    named = {str(number): np.asarray(array) for number, array in enumerate(arrays)}
    if device.type == "cpu":
        return map(torch.from_numpy, named.values())
    buffer, layout = pack(named, device.type)
    return unpack(buffer.to(device, non_blocking=True), layout).values()


def known_ids(token_ids: Tensor, last_sampled: Tensor) -> Tensor:
    """Token ids in which -1 - i stands for the token sampled in row i of the step before."""
    rows = (-1 - token_ids).clamp(min=0)
    return torch.where(token_ids < 0, last_sampled[rows], token_ids)


def make_caches(config: PretrainedConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
                device: str, backend: str) -> Tensor:
    """K and V, (layers, 2, num_blocks, block_size, kv_heads, head_dim).

    In memory block_size is behind kv_heads: the keys of a head are adjacent. On a GPU the cache is
    zeros, since padded rows read block 0. On a CPU it becomes memory when it is written to, in huge
    pages. How the numba kernel arranges the numbers of a head within a block, and pads them, is its
    own business: only whole blocks can be copied.
    """
    is_tiled = backend == "numba"
    numbers = numbers_per_token(config.head_dim, block_size) if is_tiled else config.head_dim
    shape = (config.num_hidden_layers, 2, num_blocks, config.num_key_value_heads, block_size,
             numbers)
    if device == "cuda":
        caches = torch.zeros(shape, dtype=dtype, device=device)
    else:
        caches = in_huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return caches.transpose(3, 4)


def in_huge_pages(num_bytes: int) -> Tensor:
    """Memory of the system, in pages of 2 MiB where it has them, as (num_bytes,) uint8.

    Each page is cleared when it is first written to, in a sixth of the time of pages of 4 KiB.

    Raises MemoryError for more than the system gives.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from error
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def limit_threads() -> None:
    """Lets the kernels that this thread starts run on as many threads as PyTorch's operators."""
    num_threads = torch.get_num_threads()
    set_num_threads(num_threads)
    # what numba, when it starts, tells the OpenMP that both share is every core
    torch.set_num_threads(num_threads)


# -------------------------------------------------------------------------------- backends


def cpu_attention(qkv: Tensor, norms: Tensor, eps: float, angles: Tensor, cache: Tensor,
                  window: int | None, step: StepInputs) -> Tensor:
    """On a CPU one kernel of our own does all between the projections: head norms, rotation, cache
    and attention, for tokens of prompts and decodes alike.

    qkv: (T, heads + 2 * kv_heads, head_dim)
    norms: (2, head_dim) float32, weights of the norms of query heads and key heads
    eps: of these norms; -1 for a model without them
    angles: (2, T, head_dim / 2), cos and sin, float32
    cache: of a layer, laid out as `make_caches` does it

    Returns (T, heads, head_dim). All other tensors must be contiguous: the kernel gets addresses,
    and can't check what lies there.
    """
    _, num_blocks, block_size, kv_heads, _ = cache.shape
    num_tokens, num_heads, head_dim = qkv.shape
    num_queries = num_heads - 2 * kv_heads
    out = qkv.new_empty(num_tokens, num_queries, head_dim)
    arrays = (qkv, cache, out, norms, angles, step.slot_blocks, step.slot_offsets,
              step.block_tables, step.sequence_of_token, step.positions)
    kernel = paged_attention(head_dim, num_queries // kv_heads, block_size, 32 - 8 * qkv.itemsize)
    kernel(*[array.data_ptr() for array in arrays], num_tokens, kv_heads, num_blocks,
           *step.block_tables.shape, eps, window or 2**31 - 1)
    return out


def flash_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """flash-attn 2 (Dao, 2023, arXiv:2307.08691).

    query: (T, heads, head_dim), rotated; cache: of a layer, with K and V of this step in it
    window: a query sees its last `window` keys, None for all

    Returns (T, heads, head_dim). The number of parts in which its decode kernel sums over the keys
    depends on the width of the block tables, which a CUDA graph fixes at `max_model_len`. The
    kernel reads the keys once for all heads of a group only where no window is given.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    keys, values = cache
    options = dict(block_table=step.block_tables, causal=True,
                   window_size=(window - 1, 0) if window else (-1, -1))
    if step.longest_query == 1:
        return flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=step.lengths, **options)[:, 0]
    return flash_attn_varlen_func(query, keys, values, *step.ranges, **options)


def varlen_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """PyTorch's own build of these kernels, which takes block tables from torch 2.12 on.

    Arguments and result are those of `flash_attention`.
    """
    from torch.nn.attention.varlen import varlen_attn
    keys, values = cache
    # (keys to the left, keys to the right); a decode sees all keys anyway
    window_size = (window - 1, 0) if window else (-1, 0 if step.longest_query > 1 else -1)
    return varlen_attn(  # type: ignore
        query, keys, values, *step.ranges, enable_gqa=True, seqused_k=step.lengths,
        window_size=window_size, block_table=step.block_tables)


def gather_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """Plain PyTorch, slow, but anywhere and in any precision: it gathers each sequence's keys.

    Arguments and result are those of `flash_attention`. It reads lengths on the host, so that CUDA
    graphs cannot hold it.
    """
    out = torch.empty_like(query)
    starts = step.query_starts.tolist()
    for seq, length in enumerate(step.lengths.tolist()):
        gathered = cache[:, step.block_tables[seq]].flatten(1, 2)[:, :length].transpose(1, 2)
        # NaN reaches the queries that see it, and no others: a weight of 0 would not keep it out
        is_finite = gathered.isfinite()
        is_nan = ~is_finite.all(dim=-1).all(dim=0).all(dim=0)
        keys, values = gathered.where(is_finite, 0)
        # not all queries at once: in float32 their weights for all keys are one tensor
        for first in range(starts[seq], starts[seq + 1], 256):
            rows = slice(first, min(first + 256, starts[seq + 1]))
            ages = step.positions[rows, None] - torch.arange(length, device=query.device)
            mask = (ages >= 0) & (ages < (window or length))
            out[rows] = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1), keys, values, mask, enable_gqa=True).transpose(0, 1)
            out[rows].masked_fill_((mask & is_nan).any(dim=-1)[:, None, None], torch.nan)
    return out


# the fastest first
BACKENDS: dict[str, Callable[..., Tensor]] = {
    "numba": cpu_attention, "flash-attn": flash_attention, "varlen": varlen_attention,
    "gather": gather_attention}


def can_import(name: str) -> bool:
    """Whether a package works here. Warns about one that is there and cannot be imported."""
    try:
        import_module(name)
        return True
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(f"{name} is there, but cannot be imported: {error}", stacklevel=2)
        return False


def choose_backend(name: str, device: str, dtype: torch.dtype, block_size: int) -> str:
    """The backend of that name, or for "auto" the fastest for this device and precision.

    Raises ValueError for a backend that cannot work here; warns where only the slow one can.
    """
    is_fast = device == "cuda" and dtype != torch.float32
    works = {"numba": device == "cpu" and dtype != torch.float16,
             "flash-attn": is_fast and can_import("flash_attn"),
             # compared as versions
             "varlen": is_fast and torch.__version__ >= "2.12",
             "gather": True}
    usable = [backend for backend in BACKENDS if works[backend]]
    chosen = usable[0] if name == "auto" else name
    if chosen not in usable:
        raise rejected("attention_backend", name, f"one of {usable} for {dtype} on {device}")
    if name == "auto" and chosen == "gather":
        warnings.warn("slow attention: bfloat16 and nanoengine[flash] are fast", stacklevel=2)
    if chosen in ("flash-attn", "varlen") and block_size % 256:
        raise rejected("block_size", block_size, f"a multiple of 256 with {chosen} attention")
    return chosen
