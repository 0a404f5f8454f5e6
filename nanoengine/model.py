"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3.

The models of transformers compute a padded matrix of prompts. An engine needs one that computes
any tokens side by side, and finds their keys and values in blocks; the rest is the same. It reads
top to bottom like the papers: Llama (Touvron et al., 2023, arXiv:2302.13971) with
grouped-query attention, rotary positions, RMSNorm and SwiGLU. Hidden states are (tokens of the
step, hidden_size). There is no batch dimension: the attention backend knows which token belongs to
which sequence. Parameters have the names of transformers' checkpoints; `loader.py` fills them, and
says which models can be loaded.

This is plain PyTorch, and complete. If a kernel library for the device is installed (features.py),
it replaces some of these forwards with faster ones; a comment at each of them says so. It
recognises a forward by its code, so one that you change or override stays. To step through this
file, attention.py and sampler.py with a debugger, or to change functions there that a library
replaces, use LLM(model, kernels=False).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.step_inputs import StepInputs


class Family(NamedTuple):
    """How a family of models differs from the first Llama.

    entries: the entries of config.json, besides the sizes, that change the computation.
    qkv_bias: whether the projections to queries, keys and values have biases.
    head_norm: whether the heads of queries and keys are normalized.
    """

    entries: tuple[str, ...] = ()
    qkv_bias: bool = False
    head_norm: bool = False


# by the `model_type` of config.json
FAMILIES = {
    "llama": Family(("attention_bias", "mlp_bias")),
    "mistral": Family(("sliding_window",)),
    "qwen2": Family(("layer_types",), qkv_bias=True),
    "qwen3": Family(("attention_bias", "layer_types"), head_norm=True)}


def entry_of(config: PretrainedConfig, name: str) -> Any:
    """Returns an entry of config.json; None if models of this family ignore it."""
    return getattr(config, name) if name in FAMILIES[config.model_type].entries else None


class Decoder(nn.Module):
    """From token ids to hidden states; `lm_head` turns them into logits."""

    # whether CUDA graphs can capture a decode step
    has_graphs = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: Any = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def bind(self, rope: Tensor, caches: Tensor, backend: Callable | None) -> None:
        """Gives the model its memory: angles (`rope_table`) and K and V (`make_caches`)."""
        self.rope = rope
        for layer, cache in zip(self.layers, caches):
            layer.self_attn.cache = cache
            layer.self_attn.backend = backend

    # nanoengine_extras.cpu.optimize replaces this forward with one that runs many layers in one
    # call. nanoengine_extras.gpu.optimize replaces it, too: each residual sum is fused into the
    # norm that follows it
    def forward(self, token_ids: Tensor, step: StepInputs) -> Tensor:
        """Computes the T tokens of the step, and writes their K and V to the cache.

        Returns the hidden states of `step.logits_indices` only, (rows, hidden_size).
        """
        x = self.embed_tokens(token_ids)
        angles = self.rope[:, step.positions, None]
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            x = layer(x, angles, step, step.logits_indices if is_last else slice(None))
        return self.norm(x)


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    # nanoengine_extras.gpu.optimize replaces this forward, together with that of the decoder; with
    # few rows, the norms are fused into the products that follow them
    def forward(self, x: Tensor, angles: Tensor, step: StepInputs, rows: Tensor | slice) -> Tensor:
        x = x[rows] + self.self_attn(self.input_layernorm(x), angles, step, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention over the KV cache.

    cache: K and V of this layer; backend: a function of attention.py. `Decoder.bind` sets both.
    """

    cache: Tensor
    backend: Callable[..., Tensor]

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__()
        family = FAMILIES[config.model_type]
        bias = entry_of(config, "attention_bias")
        self.window = window_of(config, index)
        self.head_dim = config.head_dim
        # of queries, keys and values
        self.num_heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        queries, keys, values = (self.head_dim * heads for heads in self.num_heads)
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        self.qkv_proj = FusedLinear(config.hidden_size, qkv, bias or family.qkv_bias)
        head_norm = RMSNorm if family.head_norm else nn.Identity
        self.q_norm = head_norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = head_norm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias)

    # nanoengine_extras.cpu.optimize replaces this forward: one kernel norms the heads, rotates
    # them, writes K and V, and computes attention. nanoengine_extras.gpu.optimize replaces it, too:
    # its kernel does all of this except attention
    def forward(self, x: Tensor, angles: Tensor, step: StepInputs, rows: Tensor | slice) -> Tensor:
        """From (T, hidden_size) to (rows, hidden_size).

        angles: (2, T, 1, head_dim / 2), cos and sin for the tokens' positions
        rows: those that need an output; K and V are written for all
        """
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        query, key, value = qkv.split(self.num_heads, dim=1)
        query = rotate(self.q_norm(query), *angles)
        key = rotate(self.k_norm(key), *angles)
        # seen as one row of slots (a view): slot = block * block_size + place in the block
        self.cache.flatten(1, 2)[:, step.slot_mapping] = torch.stack((key, value))
        attended = self.backend(query, self.cache, self.window, step)
        return self.o_proj(attended.flatten(1)[rows])


def window_of(config: PretrainedConfig, index: int) -> int | None:
    """Returns how many keys the queries of a layer see; None for all."""
    if kinds := entry_of(config, "layer_types"):
        return config.sliding_window if kinds[index] == "sliding_attention" else None
    # one window for all layers
    return entry_of(config, "sliding_window")


class MLP(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        bias = entry_of(config, "mlp_bias")
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = FusedLinear(config.hidden_size, gate_up, bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias)

    # nanoengine_extras.cpu.optimize replaces this forward: SwiGLU is fused into the first product.
    # nanoengine_extras.gpu.optimize replaces it, too: SwiGLU becomes one kernel
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


# nanoengine_extras.cpu.optimize packs the weights of this and of every other nn.Linear, and
# replaces the forward. nanoengine_extras.gpu.optimize replaces it, too: few rows have a kernel of
# their own
class FusedLinear(nn.Linear):
    """Several projections of one input as one product. parts: how many rows of the weight belong to
    each projection, by name."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts


class RMSNorm(nn.RMSNorm):
    # nanoengine_extras.gpu.optimize replaces this forward with one kernel
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


# ------------------------------------------------------------------------------ operations


def rms_norm(x: Tensor, weight: Tensor, eps: Any) -> Tensor:
    """Zhang & Sennrich, 2019, arXiv:1910.07467. In float32."""
    numbers = x.float()
    mean = numbers.square().mean(dim=-1, keepdim=True)
    return (numbers * (mean + eps).rsqrt() * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) of (tokens, heads, head_dim) by its angle.

    RoPE (Su et al., 2021, arXiv:2104.09864). cos, sin: of these angles, (tokens, 1, head_dim / 2).
    """
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up (Shazeer, 2020, arXiv:2002.05202), for gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_table(config: PretrainedConfig, max_model_len: int) -> Tensor:
    """Returns cos and sin for every position, (2, max_model_len, head_dim / 2) float32.

    transformers computes the scaled variants.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        # written into the config, which ROPE_INIT_FUNCTIONS reads; the angles stay the same
        rope |= {"rope_type": "linear", "factor": 1.0}
    # even if the user has set another default device
    with torch.device("cpu") as cpu:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, cpu)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())) * factor
