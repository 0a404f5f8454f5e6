"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3.

It reads top to bottom like the papers: Llama (Touvron et al., 2023, arXiv:2302.13971) with
grouped-query attention, rotary positions, RMSNorm and SwiGLU. Hidden states are (tokens of the
step, hidden_size): there is no batch dimension, the attention backend knows which token is whose.
Parameters bear the names of transformers' checkpoints, less "self_attn." and "mlp.";
`loader.py` fills them.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.attention import StepInputs, attend, fused
from nanoengine.sampling_params import rejected


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model that this decoder would not compute exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value, supported in (
        ("architectures", config.architectures,
         [[f"{name}ForCausalLM"] for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]),
        ("hidden_act", getattr(config, "hidden_act", None), ["silu"]),
        ("rope_type", rope.get("rope_type"), ["default", "linear", "llama3", "yarn"]),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0]),
        ("quantization_config", getattr(config, "quantization_config", None), [None]),
        ("layer_types", bool(getattr(config, "layer_types", None)) and config.model_type,
         [False, "qwen2", "qwen3"]),
    ):
        if value not in supported:
            raise rejected(f"the model's {name}", value, " or ".join(map(str, supported)))


def window_of(config: PretrainedConfig, index: int) -> int | None:
    """How many keys back a layer's queries see: `sliding_window` where that layer has one."""
    kind = config.layer_types[index] if config.model_type.startswith("qwen") else config.model_type
    return config.sliding_window if kind in ("sliding_attention", "mistral") else None


def rope_table(config: PretrainedConfig, max_model_len: int) -> Tensor:
    """cos and sin of every position's angles, (2, max_model_len, head_dim / 2) float32.

    For `rotate`; the scaled variants are transformers' own.
    """
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":  # which is linear scaling by 1
        rope_type, config.rope_parameters["factor"] = "linear", 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())) * factor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich, 2019, arXiv:1910.07467. In float32 and in place, for speed."""
    scaled = x.to(torch.float32, copy=True)
    mean = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return scaled.mul_(mean.add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up (Shazeer, 2020, arXiv:2002.05202), gate is overwritten.

    On a CPU in parts that PyTorch gives to one thread each: where it cuts a row in two, it takes
    the last numbers before the cut one by one, with another exp, and other bits, than vectors.
    """
    for part in gate.split(max(1, 2**15 // gate.shape[1]) if gate.is_cpu else len(gate)):
        F.silu(part, inplace=True)
    return gate * up


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return fused(rms_norm, x.is_cuda)(x, self.weight, self.eps)


class Linear(nn.Linear):
    """One or several projections of one input as one product: rows of `parts` (name: size).

    On a CPU its weight is packed, in an order of oneDNN's own: there is nothing left to reorder in
    each product, and a row has the same bits whatever rows are beside it. Fewer than four are
    padded: one alone would be summed up in another order, and two take longer than four.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def pack(self) -> None:
        """Packs the weight, as inductor's freezing does with operators that are private: where this
        torch or this CPU lacks them, it warns, and products stay as they are in PyTorch."""
        plain = self.weight
        try:
            self.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(plain), False)
            self(plain.new_zeros(2, self.in_features))  # not all that can be packed is multiplied
        except (AttributeError, RuntimeError) as error:
            self.weight = plain
            warnings.warn(f"slower products, as weights can't be packed: {error}", stacklevel=2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return super().forward(x)
        rows = F.pad(x, (0, 0, 0, 4 - len(x))) if len(x) < 4 else x
        product = torch.ops.mkldnn._linear_pointwise
        return product(rows, self.weight, self.bias, "none", [], "")[:len(x)]


class DecoderLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, layer_index: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window_of(config, layer_index)
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        mlp_bias = config.model_type == "llama" and config.mlp_bias
        head_norm = RMSNorm if config.model_type == "qwen3" else nn.Identity
        self.input_layernorm = RMSNorm(hidden, eps)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = Linear(hidden, parts, bias or config.model_type == "qwen2")
        self.q_norm = head_norm(config.head_dim, eps)
        self.k_norm = head_norm(config.head_dim, eps)
        self.o_proj = Linear(queries, {"o_proj": hidden}, bias)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, mlp_bias)

    def forward(self, hidden: Tensor, attention: Callable, rows: Tensor | slice) -> Tensor:
        """From (T, hidden_size) to (rows, hidden_size): all K and V, but only these rows go on."""
        qkv = self.qkv_proj(self.input_layernorm(hidden)).unflatten(-1, (-1, self.head_dim))
        attended = attention(qkv, (self.q_norm, self.k_norm), window=self.window)
        hidden = hidden[rows] + self.o_proj(attended.flatten(1)[rows])
        gate_up = self.gate_up_proj(self.post_attention_layernorm(hidden))
        return hidden + self.down_proj(fused(swiglu, hidden.is_cuda)(*gate_up.chunk(2, dim=-1)))


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size})

    def forward(self, token_ids: Tensor, step: StepInputs, rope: Tensor, backend: str,
                caches: Tensor) -> Tensor:
        """Computes the step's T tokens and writes their K and V to the caches, (layers, …).

        token_ids: (T,); rope: (2, max_model_len, head_dim / 2), see `rope_table`.
        Returns the logits of the sampled rows alone, (sampled, vocab_size).
        """
        hidden, angles = self.embed_tokens(token_ids), rope[:, step.positions]
        for layer, layer_cache in zip(self.layers, caches):
            attention = partial(attend, backend, angles=angles, cache=layer_cache, step=step)
            rows = step.sampled_rows if layer is self.layers[-1] else slice(None)
            hidden = layer(hidden, attention, rows)
        return self.lm_head(self.norm(hidden))
