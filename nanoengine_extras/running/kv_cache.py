"""`kv_cache_dtype="fp8"` or `"int8"`: the KV cache holds K and V in 8 bits.

It takes about half the memory of bfloat16, and a quarter of that of float32, so more sequences fit,
and attention reads fewer bytes. K and V are rounded, so generated tokens differ from those of an
exact cache: docs/quantization.md says by how much.

Each head of K and of V of each token has a scale of its own, a float32 number:

    scale = its largest absolute number / 448 (fp8, e4m3: Micikevicius et al., 2022,
            arXiv:2209.05433) or / 127 (int8)
    number = round(x / scale), in 8 bits; it is read as number * scale

So what is stored depends on this token alone. A scale for a whole block would depend on which of
its tokens came first, and a scale that is measured for a layer on the text that it is measured on:
tokens would depend on the schedule. Here they do not, and a block is copied, swapped, shared and
found again as it is, scales included.

The engine asks this file for its backend and its cache. Of the backends, "numba", "triton" and
"gather" can read 8 bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.attention import Backend, backends
from nanoengine.config import EngineConfig
from nanoengine.errors import Condition, logger, rejected
from nanoengine.features import kernels

# how numbers are stored; "fp8_e4m3" is vLLM's other name
STORED = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
CONDITIONS: list[Condition] = [
    ("kv_cache_dtype", lambda c: c.kv_cache_dtype in STORED, f"one of {['auto', *STORED]}")]
# they read bfloat16 and float16
OTHERS = {"flash-attn", "varlen"}
# of a scale, in bytes
SCALE = 4


class EightBits:
    """K and V of one layer, or of all layers, in place of the tensor of `make_caches`. To plain
    PyTorch it looks like this tensor: what is assigned to it is rounded, and what is read from it
    has the model's dtype. All else, such as `shape`, is that of `memory`.

    memory: int8, ([layers,] 2, num_blocks, block_size, kv_heads, head_dim + 4). In a block lie
        first all numbers, and then all scales, so copy whole blocks only. The CPU's kernel has its
        own layout within a block.
    stored: the dtype of the numbers, int8 or float8_e4m3fn.
    dtype: of K and V as they are read.
    """

    def __init__(self, memory: Tensor, stored: torch.dtype, dtype: torch.dtype) -> None:
        self.memory = memory
        self.stored = stored
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def __deepcopy__(self, copies: dict) -> "EightBits":
        return EightBits(self.memory.clone(), self.stored, self.dtype)

    def __iter__(self) -> Iterator["EightBits"]:
        return (EightBits(layer, self.stored, self.dtype) for layer in self.memory)

    def flatten(self, *dims: int) -> "EightBits":
        """The same cache: it is assigned to by slot, and read by block."""
        return self

    def parts(self) -> tuple[Tensor, Tensor]:
        """Views of one layer: numbers, (2, num_blocks, block_size, kv_heads, head_dim), and scales,
        (2, num_blocks, block_size, kv_heads)."""
        *_, block_size, heads, head_bytes = self.memory.shape
        numbers, scales = self.memory.flatten(2).split(
            [block_size * heads * size for size in (head_bytes - SCALE, SCALE)], dim=-1)
        return (numbers.unflatten(-1, (block_size, heads, -1)),
                scales.view(torch.float32).unflatten(-1, (block_size, heads)))

    def __setitem__(self, index: tuple[slice, Tensor], heads: Tensor) -> None:
        """cache[:, slots] = heads, (2, T, kv_heads, head_dim)"""
        numbers, scales = self.parts()
        _, slots = index
        block_size = numbers.shape[2]
        places = slice(None), slots // block_size, slots % block_size
        is_float = self.stored.is_floating_point
        largest = torch.finfo(self.stored).max if is_float else 127
        # a head of zeros needs a scale, too
        scale = heads.abs().amax(-1).float().clamp(min=1e-30) / largest
        divided = heads / scale[..., None]
        rounded = (divided if is_float else divided.round()).to(self.stored)
        numbers[places] = rounded.view(torch.int8)
        scales[places] = scale

    def __getitem__(self, index: tuple[slice, Tensor]) -> Tensor:
        """cache[:, blocks]: (2, blocks, block_size, kv_heads, head_dim)"""
        numbers, scales = (part[index] for part in self.parts())
        return (numbers.view(self.stored).float() * scales[..., None]).to(self.dtype)


def make_caches(config: EngineConfig, model: PretrainedConfig, num_blocks: int, dtype: torch.dtype,
                backend: Backend) -> EightBits:
    """In place of the function of this name in attention.py."""
    head_dim = model.head_dim
    shape = model.num_hidden_layers, 2, num_blocks, config.block_size, model.num_key_value_heads
    if backend.is_in_model:
        memory = kernels(config.device).empty_cache(shape[0], *shape[2:], head_dim, torch.int8)
    elif head_dim % SCALE:
        raise rejected("kv_cache_dtype", config.kv_cache_dtype,
                       f"'auto' for heads of {head_dim} numbers, not a multiple of {SCALE}")
    else:
        memory = torch.zeros(*shape, head_dim + SCALE, dtype=torch.int8, device=config.device)
    return EightBits(memory, STORED[config.kv_cache_dtype], dtype)


def choose_backend(config: EngineConfig, dtype: torch.dtype) -> str:
    """In place of the function of this name in attention.py."""
    stored, asked = STORED[config.kv_cache_dtype], f"kv_cache_dtype={config.kv_cache_dtype!r}"
    table = backends(config.kernels)
    usable = [each for each in table.keys() - OTHERS if table[each].works(config.device, dtype)]
    name = config.attention_backend
    if name not in ("auto", *usable):
        raise rejected("attention_backend", name, f"one of {sorted(usable)} with {asked}")
    if name == "auto":
        name = max(usable, key=lambda each: table[each].rank)
    is_new = config.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
    if name == "triton" and stored.is_floating_point and not is_new:
        raise rejected("kv_cache_dtype", config.kv_cache_dtype,
                       "'int8': Triton has no e4m3 on this GPU")
    logger.info(f"{asked}: K and V are rounded to 8 bits, and {name!r} reads them")
    return name


PARTS = {"make_caches": make_caches, "choose_backend": choose_backend}
