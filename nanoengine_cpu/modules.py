"""`optimize`: makes the modules of a finished decoder fast on a CPU, in place."""

import ctypes
import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine_cpu import attention, products
from nanoengine_cpu.compiling import warn_once
from nanoengine_cpu.functions import paged_attention, rms_norm, swiglu
from nanoengine_cpu.memory import keep_memory, limit_threads
from nanoengine_cpu.tiles import HAS_TILES


def optimize(model: nn.Module, block_size: int = 0, has_attention: bool = True) -> bool:
    """Gives modules that it knows a class of its own, with their parameters, hooks and names.

        nn.Linear, and nn.RMSNorm with a weight and an eps
        an MLP: a module with `gate_up_proj` and `down_proj`
        attention: a module with `qkv_proj`, `o_proj`, `q_norm` and `k_norm`, see `PagedAttention`

    A module keeps its own attributes, and loses those of the class that it had. What is set later
    by its name counts: `module.weight = …`, `module.down_proj = …`.

    block_size: of the cache; then the kernel of attention is compiled now, as all others are, and
        not when it is first needed
    has_attention: False for a cache that `empty_cache` has not made

    Returns whether a row has the same bits whatever rows are beside it, which is so where all
    weights could be packed.
    """
    limit_threads()
    modules: Any = [*model.modules()]
    for module in modules:
        if isinstance(module, nn.Linear):
            module.__class__ = PackedLinear
            PackedLinear.pack(module)
        elif isinstance(module, nn.RMSNorm) and module.elementwise_affine and module.eps:
            module.__class__ = RMSNorm
        elif hasattr(module, "gate_up_proj"):
            module.__class__ = GatedMLP
        elif hasattr(module, "qkv_proj") and has_attention:
            module.__class__ = PagedAttention
        # found at once, not by nn.Module.__getattr__
        module.__dict__ |= module._parameters | module._modules
    for module in modules:
        if isinstance(module, (RMSNorm, GatedMLP, PagedAttention)):
            module.compile_for(block_size)
    # hooks run in the thread that computes
    model.register_forward_pre_hook(lambda *_: limit_threads())
    keep_memory()
    return has_attention and all(getattr(module, "is_invariant", True) for module in modules)


class RMSNorm(nn.RMSNorm):
    def compile_for(self: Any, block_size: int) -> None:
        rms_norm(self.weight[None], self.weight, self.eps)

    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class PackedLinear(nn.Linear):
    """Its weight is packed, in an order of oneDNN's own: there is nothing left to reorder in each
    product, and a row has the same bits whatever rows are beside it. Fewer than four are padded:
    one alone would be summed up in another order, and two take longer than four.

    With AMX and bfloat16 oneDNN is slower, and its order depends on the number of rows. So up to
    MOST_INPUTS inputs are multiplied by `products.py`, with the same packed weight.
    """

    uses_own = False
    # whether a row has the same bits beside any others
    is_invariant = False

    def pack(self: Any) -> None:
        """Packs the weight, as inductor's freezing does with operators that are private: where this
        torch or this CPU lacks them, it warns, and products stay as they are in PyTorch."""
        plain = self.weight
        # a part of a model can have another weight than it was made with
        self.out_features = len(plain)
        try:
            self.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(plain), False)
            # some weights can be packed, but not multiplied
            PackedLinear.forward(self, self.zeros(2))
            is_narrow = self.in_features <= products.MOST_INPUTS
            if products.HAS_PRODUCTS and is_narrow and is_in_blocks(plain, self.weight):
                self.uses_own = True
                bias = plain.new_zeros(self.out_features) if self.bias is None else self.bias
                self.padded_bias = F.pad(bias.float(), (0, -self.out_features % products.BLOCK))
            self.is_invariant = self.uses_own or not HAS_TILES or plain.dtype != torch.bfloat16
        except (AttributeError, RuntimeError) as error:
            self.weight = plain
            warn_once(f"slower products, as weights can't be packed: {error}")

    def zeros(self, rows: int) -> Tensor:
        """An input to try it with."""
        return torch.zeros(rows, self.in_features, dtype=self.weight.dtype, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not weight.is_mkldnn:
            return super().forward(x)
        num_rows = x.shape[0]
        if self.uses_own and num_rows:
            return self.multiply(x)
        if num_rows < 4:
            x = torch.constant_pad_nd(x, (0, 0, 0, 4 - num_rows))
        product = torch.ops.mkldnn._linear_pointwise.default(x, weight, self.bias, "none", [], "")
        return product if num_rows >= 4 else product[:num_rows]

    def gated(self, x: Tensor) -> Tensor:
        """SwiGLU of the product, of which the first half are gates: in one pass, if gates and ups
        are in whole blocks of our own product."""
        if self.uses_own and x.shape[0] and self.out_features % (2 * products.BLOCK) == 0:
            return self.multiply(x, 2)
        return swiglu(self(x))

    def multiply(self, x: Tensor, halves: int = 1) -> Tensor:
        """The product by our own kernel; with two halves, SwiGLU of them."""
        padding = -self.in_features % products.DEPTH
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        (rows, inputs), outputs = x.shape, self.out_features // halves
        out = x.new_empty(rows, outputs)
        weight = torch.ops.mkldnn.data_ptr(self.weight)
        products.product()(x.data_ptr(), weight, self.padded_bias.data_ptr(), out.data_ptr(),
                           rows, inputs // 2, outputs, halves)
        return out


def is_in_blocks(plain: Tensor, packed: Tensor) -> bool:
    """Whether oneDNN has packed a weight as `products.py` reads it.

    That is no documented order. So the first and the last block are compared with the weight.
    """
    size, depth = products.BLOCK, products.DEPTH
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    shape = [-(-len(plain) // size), -(-plain.shape[1] // depth) * depth // 2, size, 2]
    if plain.dtype != torch.bfloat16 or num_bytes != 2 * math.prod(shape):
        return False
    memory = (ctypes.c_byte * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks = torch.frombuffer(memory, dtype=plain.dtype).view(shape)
    for index in (0, len(blocks) - 1):
        rows = plain[index * size:][:size]
        rows = F.pad(rows, (0, -rows.shape[1] % depth, 0, -len(rows) % size))
        if not torch.equal(blocks[index], rows.unflatten(1, (-1, 2)).transpose(0, 1)):
            return False
    return True


class GatedMLP(nn.Module):
    def compile_for(self: Any, block_size: int) -> None:
        self.gate_up_proj.gated(self.gate_up_proj.zeros(1))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.gated(x))


class PagedAttention(nn.Module):
    """Attention whose keys and values lie in blocks.

    It has `head_dim`, `window` (how many keys a query sees; None: all) and its part of the `cache`.
    """

    @cached_property
    def head_norms(self: Any) -> tuple[Tensor, float]:
        ones = torch.ones(self.head_dim, device="cpu")
        weights = [getattr(norm, "weight", ones).float() for norm in (self.q_norm, self.k_norm)]
        return torch.stack(weights), getattr(self.q_norm, "eps", -1.0)

    def compile_for(self: Any, block_size: int) -> None:
        if block_size:
            queries = self.o_proj.in_features // self.head_dim
            keys = (self.qkv_proj.out_features // self.head_dim - queries) // 2
            attention.paged_attention(
                self.head_dim, queries // keys, block_size, self.qkv_proj.weight.dtype)

    def forward(self: Any, x: Tensor, angles: Tensor, step: Any,
                rows: Any = slice(None)) -> Tensor:
        """x: (T, hidden_size); angles: of the T positions, see `paged_attention`

        step: has tensors by the names of the last four arguments of `paged_attention`
        rows: those of which an output is wanted
        """
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        norms, eps = self.head_norms
        attended = paged_attention(
            qkv, norms, eps, angles, self.cache, self.window, step.slot_mapping,
            step.block_tables, step.sequence_of_token, step.positions)
        return self.o_proj(attended.flatten(1)[rows])
