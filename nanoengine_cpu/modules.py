"""`optimize`: makes a finished decoder fast on a CPU, in place."""

from collections import Counter
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from nanoengine_cpu import attention, products
from nanoengine_cpu.compiling import Program, bits_of_number, warn_once
from nanoengine_cpu.memory import limit_threads

# Counts what was set in any module: parameters, modules, caches.
changes = Counter[str]()
torch_modules.register_module_parameter_registration_hook(lambda *_: changes.update(all=1))
torch_modules.register_module_module_registration_hook(lambda *_: changes.update(all=1))


def optimize(model: nn.Module, has_attention: bool = True) -> bool:
    """Gives modules that it knows a class of its own, with their parameters, hooks and names.

        nn.Linear
        an MLP: a module with `gate_up_proj` and `down_proj`
        attention: a module with `qkv_proj`, `o_proj`, `q_norm` and `k_norm`, see `PagedAttention`
        a decoder: a module with `embed_tokens`, `layers`, `norm` and `rope`, see `Layers`

    A module keeps its own attributes, and loses those of the class that it had. Attributes that are
    set later take effect: `module.weight = …`, `module.down_proj = …`.

    has_attention: False for a cache that `empty_cache` has not made

    Returns whether a row has the same bits whatever rows are beside it: if all weights are packed.
    """
    limit_threads()
    modules: Any = [*model.modules()]
    for module in modules:
        if isinstance(module, nn.Linear):
            module.__class__ = PackedLinear
            PackedLinear.pack(module)
        elif hasattr(module, "gate_up_proj"):
            module.__class__ = GatedMLP
            # its own turn comes later
            module.gate_up_proj.halves = 2
        elif hasattr(module, "qkv_proj") and has_attention:
            module.__class__ = PagedAttention
        elif hasattr(module, "embed_tokens") and has_attention:
            module.__class__ = type("Decoder", (Layers, type(module)), {})
    # hooks run in the thread that computes
    model.register_forward_pre_hook(lambda *_: limit_threads())
    return has_attention and all(getattr(module, "is_packed", True) for module in modules)


class PackedLinear(nn.Linear):
    """Its weight is packed in the order in which `products.py` reads it. So a row has the same bits
    whatever rows are beside it. A weight that is not packed is multiplied by PyTorch.

    halves: 2 in an MLP, where the first half of the outputs are gates, the second one ups; a packed
        weight then gives SwiGLU of them.
    padding: how many extra inputs the packed weight has; these inputs are 0.
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
            return warn_once(f"products are slower: {error}")
        self.weight = nn.Parameter(weight, False)
        self.kernel = products.product(weight.dtype)
        self.padding = weight.shape[1] * 4 // weight.itemsize - self.in_features

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_packed:
            return super().forward(x)
        x = F.pad(x, (0, self.padding)) if self.padding else x.contiguous()
        out = x.new_empty(len(x), self.out_features // self.halves)
        Program(self.call(x.data_ptr(), 0, out.data_ptr(), len(x))).run()
        return out

    def call(self: Any, x: int, residual: int, out: int, rows: int, norm: Any = None) -> list[int]:
        """The call of the kernel, see `products.product`. x, residual, out: addresses

        norm: an nn.RMSNorm of the inputs, or None
        """
        norm_at, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        return self.kernel(
            norm_at, self.weight.data_ptr(), self.packed_bias.data_ptr(), self.weight.shape[1],
            self.out_features // self.halves, self.halves, bits_of_number(eps), x, residual, out,
            rows)


class GatedMLP(nn.Module):
    def forward(self: Any, x: Tensor) -> Tensor:
        activated = self.gate_up_proj(x)
        if not self.gate_up_proj.is_packed:
            gate, up = activated.chunk(2, dim=-1)
            activated = F.silu(gate) * up
        return self.down_proj(activated)


class PagedAttention(nn.Module):
    """Attention whose keys and values lie in blocks.

    It has `head_dim`, `window` (how many keys a query sees; None: all) and its part of the `cache`.
    """

    @cached_property
    def head_norms(self: Any) -> tuple[Tensor, float]:
        """Weights and eps. They are kept, since calls have the address."""
        ones = torch.ones(self.head_dim, dtype=torch.float32, device="cpu")
        weights = [getattr(norm, "weight", ones).float() for norm in (self.q_norm, self.k_norm)]
        return torch.stack(weights), getattr(self.q_norm, "eps", -1.0)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        changes.update(all=1)
        # its kernel is compiled now, and not when it is first needed
        if name == "cache":
            self.call()

    def forward(self: Any, x: Tensor, angles: Tensor, step: Any,
                rows: Any = slice(None)) -> Tensor:
        """x: (T, hidden_size); angles: of the T positions, see `paged_attention`

        step: has tensors with the names of the last four arguments of `step_numbers`
        rows: those of which an output is wanted
        """
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        attended = attention.paged_attention(
            qkv, *self.head_norms, angles, self.cache, self.window, *tensors_of(step))
        return self.o_proj(attended.flatten(1)[rows])

    def call(self: Any, *step: int) -> list[int]:
        """The call of the kernel. step: see `step_numbers`"""
        num_queries = self.o_proj.in_features // self.head_dim
        return attention.call_attention(
            self.cache, num_queries, *self.head_norms, self.window, *step)


def tensors_of(step: Any) -> tuple[Tensor, ...]:
    return step.slot_mapping, step.block_tables, step.sequence_of_token, step.positions


# ------------------------------------------------------------------------- all layers in two calls

# What a program gets in each run: how many rows; where the hidden states lie, and what is computed
# from them; and what attention needs of the step.
ROWS, X, MIDDLE, ACTIVATED, QKV, ATTENDED, *OF_STEP = range(-1, -15, -1)


class Layers(nn.Module):
    """Runs all layers of a decoder as two programs: up to the last attention, and what follows it,
    for the rows that need an output.

    Python would take up to a fifth of the time of a decode to call kernel after kernel. A program
    has the addresses of weights and caches, and is made anew when they change. If a module has
    hooks, or is of an unknown kind, the layers are called one by one, as before.
    """

    def forward(self: Any, token_ids: Tensor, step: Any) -> Tensor:
        """From (T,) token ids to (rows, hidden_size), of the rows `step.logits_indices`."""
        if getattr(self, "version", None) != changes["all"]:
            self.make_programs()
        if not self.programs or any(self.hooks):
            return super().forward(token_ids, step)
        x = self.embed_tokens(token_ids)
        # rows can repeat
        most = max(len(x), len(step.logits_indices))
        middle, activated, qkv, attended = [x.new_empty(most, size) for size in self.sizes]
        angles = self.rope[:, step.positions]
        self.programs[0].run(len(x), *map(Tensor.data_ptr, (x, middle, activated)),
                             *attention.step_numbers(qkv, attended, angles, *tensors_of(step)))
        x, attended = x[step.logits_indices], attended[step.logits_indices]
        self.programs[1].run(len(x), *map(Tensor.data_ptr, (x, middle, activated, qkv, attended)))
        return self.norm(x)

    def make_programs(self: Any) -> None:
        self.hooks = [hooks for module in [*self.modules()][1:]
                      for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.programs = None
        if len({p.dtype for p in self.parameters()}) == 1 and all(map(is_known, self.layers)):
            calls = [call for layer in self.layers for call in calls_of(layer)]
            self.programs = Program(*calls[:-3]), Program(*calls[-3:])
            attention, mlp = self.layers[0].self_attn, self.layers[0].mlp
            self.sizes = (mlp.gate_up_proj.in_features, mlp.down_proj.in_features,
                          attention.qkv_proj.out_features, attention.o_proj.in_features)
        self.version = changes["all"]


def is_known(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, PagedAttention) or not isinstance(mlp, GatedMLP):
        return False
    norms = layer.input_layernorm, layer.post_attention_layernorm
    linears: Any = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    return (all(isinstance(norm, nn.RMSNorm) and norm.eps for norm in norms) and all(
        getattr(linear, "is_packed", False) and not linear.padding for linear in linears))


def calls_of(layer: Any) -> list[list[int]]:
    """The calls of a layer: two that end with attention, and three after it."""
    attention, mlp = layer.self_attn, layer.mlp
    # the norms may have been replaced
    attention.__dict__.pop("head_norms", None)
    return [attention.qkv_proj.call(X, 0, QKV, ROWS, layer.input_layernorm),
            attention.call(QKV, ATTENDED, *OF_STEP),
            attention.o_proj.call(ATTENDED, X, MIDDLE, ROWS),
            mlp.gate_up_proj.call(MIDDLE, 0, ACTIVATED, ROWS, layer.post_attention_layernorm),
            mlp.down_proj.call(ACTIVATED, MIDDLE, X, ROWS)]
