"""`optimize`: makes a finished decoder fast on a GPU, in place."""

from typing import Any

import torch
from torch import Tensor, nn

from nanoengine_extras.gpu.few_rows import few_rows_linear, is_for_few_rows
from nanoengine_extras.gpu.norms import rms_norm, store_heads, swiglu
from nanoengine_extras.known import has_code_of


def optimize(model: nn.Module, has_attention: bool = False) -> bool:
    """Gives each module that it knows a forward of few kernels; everything else in it stays.

        nn.Linear, see `Linear`
        nn.RMSNorm, with a weight and an eps, see `RMSNorm`
        an MLP, see `GatedMLP`
        attention, see `Attention`
        a decoder, see `Decoder` and `Layer`

    They are known by the code of their forward, which the docstrings show (known.py); a module with
    other code keeps its own forward. Modules are still called as modules, so their hooks run,
    except those of the head norms, which are fused with the rotation. A layer of few rows calls
    fewer modules, but only if those that it does not call have no hooks.

    has_attention: has no effect, since attention calls the `backend` of its module; libraries whose
        attention has its own cache need it

    Returns whether a row has the same bits whatever other rows there are: False.
    """
    # a decoder comes after its norms
    for module in reversed(list[Any](model.modules())):
        if is_rms_norm(module):
            replace_forward(module, RMSNorm)
        elif type(module).forward is nn.Linear.forward and "forward" not in vars(module):
            replace_forward(module, Linear)
        elif has_code_of(GatedMLP, module):
            replace_forward(module, GatedMLP)
        elif has_code_of(Attention, module) and has_known_norms(module):
            replace_forward(module, Attention)
        elif has_code_of(Decoder, module) and isinstance(module.norm, RMSNorm):
            if all(map(is_known, module.layers)):
                replace_forward(module, Decoder)
                for layer in module.layers:
                    replace_forward(layer, Layer)
    return False


def replace_forward(module: nn.Module, kind: type[nn.Module]) -> None:
    """Gives the module a subclass of its own class, with the forward of `kind`."""
    module.__class__ = type(type(module).__name__, (kind, type(module)), {})


def is_rms_norm(norm: Any) -> bool:
    """Whether it is an nn.RMSNorm of the last dimension, with its forward or with that of
    `RMSNorm`."""
    is_unchanged = type(norm).forward is nn.RMSNorm.forward and "forward" not in vars(norm)
    return (isinstance(norm, nn.RMSNorm) and bool(norm.eps)
            and getattr(norm._parameters.get("weight"), "ndim", 0) == 1
            and (is_unchanged or has_code_of(RMSNorm, norm)))


def has_known_norms(attention: Any) -> bool:
    norms = attention.q_norm, attention.k_norm
    are_known = all(isinstance(norm, RMSNorm) or type(norm) is nn.Identity for norm in norms)
    return are_known and len({getattr(norm, "eps", None) for norm in norms}) == 1


def is_known(layer: Any) -> bool:
    """Whether a layer has the forward of `Layer`, with norms that can take a residual sum."""
    return has_code_of(Layer, layer) and all(
        isinstance(norm, RMSNorm)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm))


def is_plain(x: Tensor, module: nn.Module) -> bool:
    """Whether PyTorch has to compute: a kernel records no gradients, and has no float64."""
    return x.dtype == torch.double or torch.is_grad_enabled() and any(
        each.requires_grad for each in (x, *module.parameters()))


def has_few_rows(x: Tensor, linear: Any, *others: Any) -> bool:
    """Whether `few_rows_linear` can do the work of a linear layer, and of others around it."""
    modules = linear, *others
    return (all(isinstance(each, (Linear, RMSNorm, GatedMLP, Attention)) for each in modules)
            and is_for_few_rows(x, linear.weight)
            and not any(each._forward_hooks or each._forward_pre_hooks for each in modules)
            and not any(is_plain(x, each) for each in modules))


class Linear(nn.Module):
    """In place of nn.Linear's own forward, with a kernel for few rows."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if has_few_rows(x, self):
            return few_rows_linear(x, self.weight, self.bias)[1]
        return super().forward(x)


class RMSNorm(nn.Module):
    """In place of:

        def forward(self, x):
            return rms_norm(x, self.weight, self.eps)

        def rms_norm(x, weight, eps):
            numbers = x.float()
            mean = numbers.square().mean(dim=-1, keepdim=True)
            return (numbers * (mean + eps).rsqrt() * weight).to(x.dtype)
    """

    def forward(self: Any, x: Tensor, delta: Tensor | None = None) -> Any:
        """Returns the norm of x; with a delta, x + delta and its norm."""
        is_same = x.dtype == self.weight.dtype and x.shape[-1:] == self.weight.shape
        if delta is None and (not is_same or is_plain(x, self)):
            return super().forward(x)
        total, normed = rms_norm(x, self.weight, self.eps, delta)
        return normed if delta is None else (total, normed)


class GatedMLP(nn.Module):
    """In place of:

        def forward(self, x):
            return self.down_proj(swiglu(self.gate_up_proj(x)))

        def swiglu(gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if is_plain(x, self):
            return super().forward(x)
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Attention(nn.Module):
    """Attention over a paged KV cache.

    It has `head_dim`, `window` (how many keys a query sees; None: all), its part of the `cache`,
    and a `backend`: `paged_attention`, or a function with the same arguments. `q_norm` and `k_norm`
    are RMSNorms with one eps, or nn.Identity. In place of:

        def forward(self, x, angles, step, rows):
            qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
            query, key, value = qkv.split(self.num_heads, dim=1)
            query = rotate(self.q_norm(query), *angles)
            key = rotate(self.k_norm(key), *angles)
            self.cache.flatten(1, 2)[:, step.slot_mapping] = torch.stack((key, value))
            attended = self.backend(query, self.cache, self.window, step)
            return self.o_proj(attended.flatten(1)[rows])

        def rotate(x, cos, sin):
            left, right = x.float().chunk(2, dim=-1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1
                             ).to(x.dtype)
    """

    def forward(self: Any, x: Tensor, angles: Tensor, step: Any,
                rows: Any = slice(None)) -> Tensor:
        """From (T, hidden_size) to (rows, hidden_size).

        angles: (2, T, 1, head_dim / 2), cos and sin for the tokens' positions
        step: see `paged_attention`; and its `slot_mapping` says where K and V of each token go
        rows: those that need an output; K and V are written for all
        """
        return self.after_qkv(self.qkv_proj(x), angles, step, rows)

    def after_qkv(self: Any, qkv: Tensor, angles: Tensor, step: Any, rows: Any) -> Tensor:
        """What follows the first product. qkv: (T, (heads + 2 * kv_heads) * head_dim)"""
        q_weight, k_weight = (getattr(norm, "weight", None) for norm in (self.q_norm, self.k_norm))
        eps = getattr(self.q_norm, "eps", 0.0)
        heads = qkv.unflatten(1, (-1, self.head_dim))
        query = store_heads(heads, q_weight, k_weight, eps, angles, self.cache, step.slot_mapping)
        attended = self.backend(query, self.cache, self.window, step)
        return self.o_proj(attended.flatten(1)[rows])


class Layer(nn.Module):
    """In place of:

        def forward(self, x, angles, step, rows):
            x = x[rows] + self.self_attn(self.input_layernorm(x), angles, step, rows)
            return x + self.mlp(self.post_attention_layernorm(x))
    """

    def forward(self: Any, x: Tensor, delta: Tensor, angles: Tensor, step: Any,
                rows: Any) -> tuple[Tensor, Tensor]:
        """x: the residual stream, to which `delta` has not been added yet. Returns both again.

        With few rows, the norms are part of the products that follow them, and so is SwiGLU.
        """
        norm, attention = self.input_layernorm, self.self_attn
        # another attention or MLP need not have it
        linear: Any = getattr(attention, "qkv_proj", None)
        if has_few_rows(x, linear, norm, attention):
            x, qkv = few_rows_linear(x, linear.weight, linear.bias, norm.weight, norm.eps, delta)
            attended = attention.after_qkv(qkv, angles, step, rows)
        else:
            x, normed = norm(x, delta)
            attended = attention(normed, angles, step, rows)

        x = x[rows]
        norm, mlp = self.post_attention_layernorm, self.mlp
        linear = getattr(mlp, "gate_up_proj", None)
        if has_few_rows(x, linear, norm, mlp):
            x, activated = few_rows_linear(
                x, linear.weight, linear.bias, norm.weight, norm.eps, attended, is_gated=True)
            return x, mlp.down_proj(activated)
        x, normed = norm(x, attended)
        return x, mlp(normed)


class Decoder(nn.Module):
    """Runs the layers, with each residual sum as part of the norm that follows it. In place of:

        def forward(self, token_ids, step):
            x = self.embed_tokens(token_ids)
            angles = self.rope[:, step.positions, None]
            for layer in self.layers:
                is_last = layer is self.layers[-1]
                x = layer(x, angles, step, step.logits_indices if is_last else slice(None))
            return self.norm(x)
    """

    def forward(self: Any, token_ids: Tensor, step: Any) -> Tensor:
        """From (T,) token ids to (rows, hidden_size), of the rows `step.logits_indices`."""
        x = self.embed_tokens(token_ids)
        delta = x.new_zeros(x.shape)
        angles = self.rope[:, step.positions, None]
        for layer in self.layers:
            rows = step.logits_indices if layer is self.layers[-1] else slice(None)
            x, delta = layer(x, delta, angles, step, rows)
        return self.norm(x, delta)[1]
