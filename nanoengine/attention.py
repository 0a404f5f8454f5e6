"""Attention over the paged KV cache: one small function for each backend.

Here is the memory of the cache, how queries and keys come by their positions, how the K and V of a
step get into the cache, and how its queries attend. What a step consists of comes as `StepInputs`;
which model asks is not known here.
"""

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.sampling_params import rejected


class StepInputs(SimpleNamespace):
    """What the device needs for one step: T tokens of S sequences, R rows to sample.

    numbers: (R,) float64 in [0, 1), what decides a draw; temperatures: (R,) float32
    blocks, offsets: (T,) int64, where a token's K and V go: which block, and where in that
    token_ids: (T,); -1 - i stands for what row i of the step before has sampled
    positions: (T,); owners: (T,) which sequence a token belongs to
    query_starts: (S + 1,) where a sequence's tokens begin among T, and T
    key_starts: (S + 1,) the same for its keys, if all stood in a row
    lengths: (S,) how many keys it has, those of this step included
    block_tables: (S, width), padded with 0
    sampled_rows: (R,) which of the T rows are to be sampled
    longest_query, longest_keys: the most tokens of a sequence, and the most keys, as numbers
    bounds: query_starts, key_starts, longest_query, longest_keys

    The other tensors are int32. All are views of one `buffer`, which comes to the device in one
    copy; `layout` has the two numbers, then name, dtype, shape and words of each tensor.
    """

    def __init__(self, buffer: Tensor, layout: tuple) -> None:
        self.buffer = buffer
        self.longest_query, self.longest_keys, kinds = layout
        for (name, dtype, shape, _), part in zip(kinds, buffer.split([size for *_, size in kinds])):
            setattr(self, name, part.view(getattr(torch, dtype)).view(shape))
        self.bounds = self.query_starts, self.key_starts, self.longest_query, self.longest_keys


def make_caches(config: PretrainedConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
                device: str) -> Tensor:
    """K and V, (layers, 2, num_blocks, block_size, kv_heads, head_dim).

    In memory block_size is behind kv_heads: a head's keys are adjacent. Zeros on a GPU, where
    padded rows read block 0; on a CPU memory only once it is written to.
    """
    shape = config.num_hidden_layers, 2, num_blocks, config.num_key_value_heads, block_size
    make = torch.zeros if device == "cuda" else torch.empty
    return make(*shape, config.head_dim, dtype=dtype, device=device).transpose(3, 4)


@functools.cache
def fused(function: Callable, is_gpu: bool) -> Callable:
    """On a GPU the function as torch.compile fuses it into one kernel; on a CPU as it stands."""
    return torch.compile(function, dynamic=True) if is_gpu else function


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) of (tokens, heads, head_dim) by its angle.

    RoPE (Su et al., 2021, arXiv:2104.09864); angles: their cos and sin, (2, tokens, head_dim / 2).
    """
    cos, sin = angles[:, :, None]
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def attend(backend: str, qkv: Tensor, norms: tuple[Callable, Callable], angles: Tensor,
           window: int | None, cache: Tensor, step: StepInputs) -> Tensor:
    """Norms and rotates queries and keys, writes K and V to a layer's cache, and attends.

    qkv: (T, heads + 2 * kv_heads, head_dim), queries, then keys, then values, may be overwritten
    norms: of the heads of queries and of those of keys: RMSNorm, or nn.Identity
    angles: (2, T, head_dim / 2), see `rotate`
    window: a query sees its last `window` keys, None for all

    Returns (T, heads, head_dim).
    """
    if backend == "numba":  # whose kernel does all of that
        return numba_attention(qkv, norms, angles, window, cache, step)
    query, key, value = qkv.tensor_split((-2 * cache.shape[3], -cache.shape[3]), dim=1)
    query = fused(rotate, qkv.is_cuda)(norms[0](query), angles)
    key = fused(rotate, qkv.is_cuda)(norms[1](key), angles)
    cache[:, step.blocks, step.offsets] = torch.stack((key, value))
    return BACKENDS[backend](query, cache, window, step)


def numba_attention(qkv: Tensor, norms: tuple[Callable, Callable], angles: Tensor,
                    window: int | None, cache: Tensor, step: StepInputs) -> Tensor:
    """On a CPU: every token, be it of a prompt or the newest, goes through one paged kernel.

    All that it gets is contiguous, as a product is: for strided tensors numba would compile another
    one, whose sums LLVM might order in another way.
    """
    from nanoengine.kernels import paged_attention  # a GPU does without numba
    _, _, block_size, kv_heads, head_dim = cache.shape
    weights = torch.stack([getattr(norm, "weight", torch.ones(head_dim)) for norm in norms]).float()
    out = torch.empty_like(qkv[:, 2 * kv_heads:])
    bits = torch.uint16 if cache.itemsize == 2 else torch.uint32  # NumPy knows no bfloat16
    kernel = paged_attention(head_dim, out.shape[1] // kv_heads, block_size, 32 - 8 * bits.itemsize)
    indices = step.blocks, step.offsets, step.block_tables, step.owners, step.positions
    kernel(*(x.view(bits).numpy() for x in (qkv, cache.transpose(2, 3), out)),
           *(x.numpy() for x in (weights, angles, *indices)),
           getattr(norms[0], "eps", -1.0), window or 2**31 - 1)
    return out


def flash_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """flash-attn 2 (Dao, 2023, arXiv:2307.08691).

    In how many parts its decode kernel sums over the keys depends on the width of the block tables,
    which a CUDA graph fixes at `max_model_len`. It reads the keys once for all heads of a group
    only where no window is given.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    options = dict(block_table=step.block_tables, causal=True,
                   window_size=(window - 1, 0) if window else (-1, -1))
    if step.longest_query == 1:
        return flash_attn_with_kvcache(
            query[:, None], *cache, cache_seqlens=step.lengths, **options)[:, 0]
    return flash_attn_varlen_func(query, *cache, *step.bounds, **options)


def varlen_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """PyTorch's own build of these kernels, which takes block tables from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn(  # type: ignore
        query, *cache, *step.bounds, enable_gqa=True, seqused_k=step.lengths,
        window_size=((window or 0) - 1, 0 if window or step.longest_query > 1 else -1),
        block_table=step.block_tables)


def gather_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """In plain PyTorch, slow, but anywhere and in any precision: gathers each sequence's keys.

    It reads lengths on the host, so that CUDA graphs cannot hold it.
    """
    out, starts = torch.empty_like(query), step.query_starts.tolist()
    for seq, length in enumerate(step.lengths.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        keys, values = cache[:, step.block_tables[seq]].flatten(1, 2)[:, :length].transpose(1, 2)
        ages = step.positions[rows, None] - torch.arange(length, device=query.device)
        mask = (ages >= 0) & (ages < (window or length))
        out[rows] = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1), keys, values, mask, enable_gqa=True).transpose(0, 1)
    return out


# besides "numba", which does more than these
BACKENDS = {"flash-attn": flash_attention, "varlen": varlen_attention, "gather": gather_attention}


def choose_backend(name: str, device: str, dtype: torch.dtype, block_size: int) -> str:
    """The backend of that name, or for "auto" the fastest for this device and precision.

    Raises ValueError for one that cannot work here; warns where only the slow one can.
    """
    is_fast = device == "cuda" and dtype != torch.float32
    works = {"numba": device == "cpu" and dtype != torch.float16,
             "flash-attn": is_fast and find_spec("flash_attn") is not None,
             "varlen": is_fast and torch.__version__ >= "2.12", "gather": True}  # a TorchVersion
    names = [known for known, is_usable in works.items() if is_usable]  # the fastest first
    chosen = names[0] if name == "auto" else name
    if chosen not in names:
        raise rejected("attention_backend", name, f"one of {names} for {dtype} on {device}")
    if name == "auto" and chosen == "gather":
        warnings.warn("slow attention: bfloat16 and nanoengine[flash] are fast", stacklevel=2)
    if chosen in ("flash-attn", "varlen") and block_size % 256:
        raise rejected("block_size", block_size, f"a multiple of 256 with {chosen} attention")
    return chosen
