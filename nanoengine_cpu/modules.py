"""`optimize`: makes the modules of a finished decoder fast on a CPU, in place."""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine_cpu import attention, products
from nanoengine_cpu.compiling import warn_once
from nanoengine_cpu.functions import paged_attention, rms_norm, swiglu
from nanoengine_cpu.memory import keep_memory, limit_threads


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
    weights are packed.
    """
    limit_threads()
    modules: Any = [*model.modules()]
    for module in modules:
        if isinstance(module, nn.Linear):
            module.__class__ = PackedLinear
            PackedLinear.pack(module)
        elif isinstance(module, nn.RMSNorm) and module.elementwise_affine and module.eps:
            module.__class__ = RMSNorm
            rms_norm(module.weight[None], module.weight, module.eps)
        elif hasattr(module, "gate_up_proj"):
            module.__class__ = GatedMLP
            # its own turn comes later
            module.gate_up_proj.halves = 2
        elif hasattr(module, "qkv_proj") and has_attention:
            module.__class__ = PagedAttention
            if block_size:
                PagedAttention.compile_for(module, block_size)
        # found at once, not by nn.Module.__getattr__
        module.__dict__ |= module._parameters | module._modules
    # hooks run in the thread that computes
    model.register_forward_pre_hook(lambda *_: limit_threads())
    keep_memory()
    return has_attention and all(getattr(module, "is_packed", True) for module in modules)


class RMSNorm(nn.RMSNorm):
    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class PackedLinear(nn.Linear):
    """Its weight is packed in the order in which `products.py` reads it. So a row has the same bits
    whatever rows are beside it. Another weight is multiplied by PyTorch.

    halves: 2 in an MLP, where the first half of the outputs are gates, the second one ups; a packed
        weight then gives SwiGLU of them.
    """

    halves = 1
    is_packed = property(lambda self: self.weight.ndim == 3)

    def pack(self: Any) -> None:
        """Packs the weight; where there is no kernel for it, it warns."""
        # a part of a model can have another weight than it was made with
        self.out_features = len(self.weight)
        try:
            weight, self.packed_bias = products.pack(self.weight, self.bias, self.halves)
        except ValueError as error:
            warn_once(f"products are slower: {error}")
        else:
            self.weight = nn.Parameter(weight, False)
            self.product = products.product(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_packed:
            return super().forward(x)
        words = self.weight.shape[1]
        padding = words * 4 // x.itemsize - self.in_features
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        out = x.new_empty(len(x), self.out_features // self.halves)
        self.product(
            x.data_ptr(), self.weight.data_ptr(), self.packed_bias.data_ptr(), out.data_ptr(),
            len(x), words, out.shape[1], self.halves)
        return out


class GatedMLP(nn.Module):
    def forward(self: Any, x: Tensor) -> Tensor:
        activated = self.gate_up_proj(x)
        return self.down_proj(activated if self.gate_up_proj.is_packed else swiglu(activated))


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
