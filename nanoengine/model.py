"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3.

It reads top to bottom like the papers: Llama (Touvron et al., 2023, arXiv:2302.13971) with
grouped-query attention, rotary positions, RMSNorm and SwiGLU. Hidden states are (tokens of the step,
hidden_size): there is no batch dimension, the attention backend knows which token is whose.
Modules bear the names of transformers' checkpoints; `loader.py` fills them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.attention import CPUAttention, StepInputs
from nanoengine.sampling_params import rejected

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]  # (query, key, value, window)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model that this decoder would not compute exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value, supported in (
        ("architectures", tuple(config.architectures or ()), [(name,) for name in ARCHITECTURES]),
        ("hidden_act", getattr(config, "hidden_act", None), ["silu"]),
        ("rope_type", rope.get("rope_type"), ROPE_TYPES),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0]),
        ("quantization_config", getattr(config, "quantization_config", None), [None]),
    ):
        if value not in supported:
            raise rejected(f"the model's {name}", value, " or ".join(map(str, supported)))


def window_of(config: PretrainedConfig, layer_index: int) -> int | None:
    """How many keys back a layer's queries see: `sliding_window` where that layer has one."""
    if config.model_type == "mistral":
        return config.sliding_window
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * (layer_index + 1)
    return config.sliding_window if layer_types[layer_index] == "sliding_attention" else None


def rotary_table(config: PretrainedConfig, max_model_len: int) -> Tensor:
    """cos and sin of every position's angles, (2, max_model_len, head_dim / 2) float32.

    RoPE (Su et al., 2021, arXiv:2104.09864); its scaled variants are transformers' own.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies, factor = 1.0 / rope["rope_theta"] ** exponents, 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())) * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) of (tokens, heads, head_dim) by its angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class FusedLinear(nn.Linear):
    """Several projections of one input as one product: rows of `parts` (name: size), stacked."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).split(list(self.parts.values()), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, layer_index: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window_of(config, layer_index)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = getattr(config, "attention_bias", False)
        parts = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias or config.model_type == "qwen2")
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias)
        self.has_qk_norm = config.model_type == "qwen3"
        if self.has_qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        parts = self.qkv_proj(hidden)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return self.o_proj(attend(query, key, value, self.window).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, step: StepInputs, rotary: Tensor, attention: CPUAttention,
                caches: list[Tensor]) -> Tensor:
        """Computes the step's T tokens and writes their K and V to the caches, one for each layer.

        rotary: (2, max_model_len, head_dim / 2), see `rotary_table`.
        Returns the logits of the sampled rows alone, (sampled, vocab_size).
        """
        cos, sin = rotary[:, step.positions, None]
        hidden = self.embed_tokens(step.token_ids)
        for layer, cache in zip(self.layers, caches):
            hidden = layer(hidden, cos, sin, partial(attention, cache=cache, step=step))
        return self.lm_head(self.norm(hidden[step.sampled_rows]))
