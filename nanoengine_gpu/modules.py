"""`optimize`: makes a finished decoder fast on a GPU, in place."""

from typing import Any

from torch import Tensor, nn

from nanoengine_gpu.norms import rms_norm, store_heads, swiglu


def optimize(model: nn.Module, has_attention: bool = False) -> bool:
    """Gives modules that it knows a forward of few kernels; parameters, hooks and names stay.

        nn.RMSNorm, with a weight and an eps
        an MLP: a module with `gate_up_proj` and `down_proj`
        attention: a module with `qkv_proj`, `o_proj`, `q_norm` and `k_norm`, see `Attention`
        a decoder: a module with `embed_tokens`, `layers`, `norm` and `rope`, see `Decoder`

    The others stay as they are. Each module is called as a module, so that hooks of any of them
    run; the head norms are the exception, since one kernel does their work with the rotation.

    has_attention: without effect, as attention calls the `backend` of its module; a library whose
        attention has a cache of its own asks for it

    Returns whether a row has the same bits whatever rows are beside it: False.
    """
    # a decoder comes after its norms
    for module in reversed(list[Any](model.modules())):
        if isinstance(module, nn.RMSNorm) and module.weight is not None and module.eps:
            replace_forward(module, RMSNorm)
        elif hasattr(module, "gate_up_proj"):
            replace_forward(module, GatedMLP)
        elif hasattr(module, "qkv_proj"):
            replace_forward(module, Attention)
        elif hasattr(module, "embed_tokens") and all(map(is_known, [module, *module.layers])):
            replace_forward(module, Decoder)
            for layer in module.layers:
                replace_forward(layer, Layer)
    return False


def replace_forward(module: nn.Module, kind: type[nn.Module]) -> None:
    """Makes the module's class a subclass of its own, with the forward of `kind`."""
    own = type(module)
    if not issubclass(own, kind):
        module.__class__ = type(own.__name__, (kind, own), {})


def is_known(module: Any) -> bool:
    """Whether all norms of a decoder or of a layer can take a residual sum."""
    names = {"input_layernorm", "post_attention_layernorm", "norm"} & {*module._modules}
    return bool(names) and all(isinstance(getattr(module, name), RMSNorm) for name in names)


class RMSNorm(nn.Module):
    def forward(self: Any, x: Tensor, delta: Tensor | None = None) -> Any:
        """Returns the norm of x; with a delta, x + delta and its norm."""
        total, normed = rms_norm(x, self.weight, self.eps, delta)
        return normed if delta is None else (total, normed)


class GatedMLP(nn.Module):
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Attention(nn.Module):
    """Attention whose keys and values lie in blocks.

    It has `head_dim`, `window` (how many keys a query sees; None: all), its part of the `cache`,
    and a `backend`: `paged_attention`, or a function with the same arguments.
    """

    def forward(self: Any, x: Tensor, angles: Tensor, step: Any,
                rows: Any = slice(None)) -> Tensor:
        """From (T, hidden_size) to (rows, hidden_size).

        angles: (2, T, 1, head_dim / 2), cos and sin for the tokens' positions
        step: see `paged_attention`; and its `slot_mapping` says where K and V of each token go
        rows: those that need an output; K and V are written for all
        """
        qkv = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))
        q_weight, k_weight = (getattr(norm, "weight", None) for norm in (self.q_norm, self.k_norm))
        eps = getattr(self.q_norm, "eps", 0.0)
        query = store_heads(qkv, q_weight, k_weight, eps, angles, self.cache, step.slot_mapping)
        attended = self.backend(query, self.cache, self.window, step)
        return self.o_proj(attended.flatten(1)[rows])


class Layer(nn.Module):
    def forward(self: Any, x: Tensor, delta: Tensor, angles: Tensor, step: Any,
                rows: Any) -> tuple[Tensor, Tensor]:
        """x: the residual stream, to which `delta` has not been added yet. Returns both again."""
        x, normed = self.input_layernorm(x, delta)
        attended = self.self_attn(normed, angles, step, rows)
        x, normed = self.post_attention_layernorm(x[rows], attended)
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """Runs the layers such that each residual sum is part of the norm that follows it."""

    def forward(self: Any, token_ids: Tensor, step: Any) -> Tensor:
        """From (T,) token ids to (rows, hidden_size), of the rows `step.logits_indices`."""
        x = self.embed_tokens(token_ids)
        delta = x.new_zeros(x.shape)
        angles = self.rope[:, step.positions, None]
        for layer in self.layers:
            rows = step.logits_indices if layer is self.layers[-1] else slice(None)
            x, delta = layer(x, delta, angles, step, rows)
        return self.norm(x, delta)[1]
