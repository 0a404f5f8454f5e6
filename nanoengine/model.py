"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3.

It reads top to bottom like the papers: Llama (Touvron et al., 2023, arXiv:2302.13971) with
grouped-query attention, rotary positions, RMSNorm and SwiGLU. Hidden states are (tokens of the
step, hidden_size). There is no batch dimension: the attention backend knows which token belongs to
which sequence. Parameters bear the names of transformers' checkpoints, less "self_attn." and
"mlp."; `loader.py` fills them. A new model of the family is a row in `FAMILIES`.
"""

import copy
import ctypes
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numba import get_num_threads
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.attention import StepInputs, cpu_attention
from nanoengine.distributed import ALONE, Group
from nanoengine.kernels import products
from nanoengine.kernels import rows as row_kernels
from nanoengine.kernels.tiles import HAS_TILES
from nanoengine.sampling_params import rejected

# -------------------------------------------------------------------------------- families


class Family(NamedTuple):
    """What one family of models has and another lacks.

    qkv_bias, o_bias, mlp_bias: whether these projections have a bias: "always", "never", or as the
        switch of that name in the model's config says.
    head_norms: whether each head of queries and keys has an RMSNorm.
    windows: whether a layer sees only the last `sliding_window` keys: "always", "never", or where
        the config's "layer_types" say "sliding_attention".
    """

    qkv_bias: str = "never"
    o_bias: str = "never"
    mlp_bias: str = "never"
    head_norms: bool = False
    windows: str = "never"


FAMILIES = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family(windows="always"),
    "qwen2": Family("always", windows="layer_types"),
    "qwen3": Family("attention_bias", "attention_bias", head_norms=True, windows="layer_types")}


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model that this decoder would not compute exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    window = getattr(config, "sliding_window", None)
    has_types = FAMILIES.get(config.model_type, Family()).windows == "layer_types"
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings")
    checks: Iterable[tuple[str, Any, Any]] = (
        ("architectures", config.architectures, [[f"{n.title()}ForCausalLM"] for n in FAMILIES]),
        ("model_type", config.model_type, list(FAMILIES)),
        ("hidden_act", getattr(config, "hidden_act", None), ["silu"]),
        ("rope_type", rope.get("rope_type"), ["default", "linear", "llama3", "yarn"]),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0]),
        ("quantization_config", getattr(config, "quantization_config", None), [None]),
        ("layer_types", not has_types and getattr(config, "layer_types", None), [False, None, []]),
        *((size, getattr(config, size), range(1, 2**31)) for size in sizes),
        ("num_attention_heads % num_key_value_heads", heads % max(1, kv_heads), [0]),
        ("head_dim % 2", config.head_dim % 2, [0]),
        ("sliding_window", 1 if window is None else window, range(1, 2**31)),
        ("0 <= rms_norm_eps < 1", 0 <= config.rms_norm_eps < 1, [True]))
    for name, value, supported in checks:
        if value not in supported:
            raise rejected(f"the model's {name}", value, f"one of {supported}")
    rope_table(config, max_model_len=1)


def window_of(config: PretrainedConfig, layer_index: int) -> int | None:
    """How many keys back the queries of a layer see; None for all."""
    windows = FAMILIES[config.model_type].windows
    kind = config.layer_types[layer_index] if windows == "layer_types" else windows
    return config.sliding_window if kind in ("always", "sliding_attention") else None


# ------------------------------------------------------------------------------ operations


def fused(*token_dims: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """On a GPU torch.compile makes one kernel of the function; on a CPU it runs as it stands.

    token_dims: the dimension of each tensor that counts tokens. All others are constants of a
        model: each gets kernels of its own, for one token and for several.
    """
    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = functools.cache(lambda: torch.compile(function, dynamic=False))

        @functools.wraps(function)
        def run(x: Tensor, *arguments: Any) -> Tensor:
            if not x.is_cuda:
                return function(x, *arguments)
            for tensor, dim in zip((x, *arguments), token_dims):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            return compiled()(x, *arguments)
        return run
    return decorate


def has_kernel(x: Tensor) -> bool:
    """Whether `kernels/rows.py` computes these rows."""
    is_known = x.dtype in (torch.float32, torch.bfloat16)
    return is_known and not x.is_cuda and x.ndim == 2 and x.is_contiguous()


@fused(0)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich, 2019, arXiv:1910.07467. In float32."""
    if has_kernel(x):
        out = torch.empty_like(x)
        kernel = row_kernels.rms_norm(32 - 8 * x.itemsize)
        kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out
    scaled = x.to(torch.float32, copy=True)
    mean = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return scaled.mul_(mean.add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


@fused(0, 1)
def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) of (tokens, heads, head_dim) by its angle.

    RoPE (Su et al., 2021, arXiv:2104.09864). angles: cos and sin, (2, tokens, head_dim / 2).
    """
    cos, sin = angles[:, :, None]
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


@fused(0)
def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up (Shazeer, 2020, arXiv:2002.05202), from both side by side."""
    if has_kernel(gate_up):
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernel = row_kernels.swiglu(32 - 8 * out.itemsize)
        kernel(gate_up.data_ptr(), out.data_ptr(), *out.shape)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_table(config: PretrainedConfig, max_model_len: int) -> Tensor:
    """cos and sin of the angles of every position, (2, max_model_len, head_dim / 2) float32.

    The scaled variants are transformers' own. Raises ValueError for parameters that give none.
    """
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        frequencies, factor = 1 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if not (frequencies > 0).all() or not frequencies.isfinite().all():
        raise rejected("the model's rope_parameters", config.rope_parameters, "positive and finite")
    angles = torch.arange(max_model_len, device="cpu")[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())) * factor


def shard(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """The config of what each of `size` ranks has. Raises ValueError for what cannot be divided."""
    part = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole = getattr(config, name)
        if whole % size:
            raise rejected("tensor_parallel_size", size, f"a divisor of {name}={whole}")
        setattr(part, name, whole // size)
    part.vocab_size = -(-config.vocab_size // size)
    return part


def num_weights(config: PretrainedConfig) -> int:
    """How many numbers the matrices have, tied ones counted once."""
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = 2 * heads * config.head_dim + 3 * config.intermediate_size
    return config.hidden_size * (config.vocab_size + config.num_hidden_layers * layer)


# --------------------------------------------------------------------------------- modules


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """One or several projections of one input as one product: rows of `parts` (name: size).

    On a CPU its weight is packed, in an order of oneDNN's own: there is nothing left to reorder in
    each product, and a row has the same bits whatever rows are beside it. Fewer than four are
    padded: one alone would be summed up in another order, and two take longer than four.

    With AMX and bfloat16 oneDNN is slower, and its order depends on the number of rows. So up to
    MOST_INPUTS inputs are multiplied by `kernels/products.py`, with the same packed weight.
    """

    uses_amx = False

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def pack(self) -> None:
        """Packs the weight, as inductor's freezing does with operators that are private: where this
        torch or this CPU lacks them, it warns, and products stay as they are in PyTorch."""
        plain = self.weight
        try:
            self.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(plain), False)
            # some weights can be packed, but not multiplied
            Linear.forward(self, plain.new_zeros(2, self.in_features))
            is_narrow = self.in_features <= products.MOST_INPUTS
            if HAS_TILES and is_narrow and is_in_blocks(plain, self.weight):
                self.uses_amx = True
                bias = plain.new_zeros(self.out_features) if self.bias is None else self.bias
                self.padded_bias = F.pad(bias.float(), (0, -self.out_features % products.BLOCK))
        except (AttributeError, RuntimeError) as error:
            self.weight = plain
            warnings.warn(f"slower products, as weights can't be packed: {error}", stacklevel=2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return super().forward(x)
        if self.uses_amx and len(x):
            return self.multiply(x)
        rows = F.pad(x, (0, 0, 0, 4 - len(x))) if len(x) < 4 else x
        product = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product if rows is x else product[:len(x)]

    def multiply(self, x: Tensor, halves: int = 1) -> Tensor:
        """The product by our own kernel; with two halves, SwiGLU of them."""
        padding = -self.in_features % products.BLOCK
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        out = x.new_empty(len(x), self.out_features // halves)
        weight = torch.ops.mkldnn.data_ptr(self.weight)
        products.product()(x.data_ptr(), weight, self.padded_bias.data_ptr(), out.data_ptr(),
                           len(x), x.shape[1] // 2, out.shape[1], halves, get_num_threads())
        return out


class GatedLinear(Linear):
    """Gates and ups as one product, and SwiGLU of both: in one pass, if they are in whole blocks of
    our own product."""

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_amx and len(x) and self.out_features % (2 * products.BLOCK) == 0:
            return self.multiply(x, 2)
        return swiglu(super().forward(x))


def is_in_blocks(plain: Tensor, packed: Tensor) -> bool:
    """Whether oneDNN has packed a weight as `products.py` reads it.

    That is no documented order. So the first and the last block are compared with the weight.
    """
    size = products.BLOCK
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    shape = [-(-len(plain) // size), -(-plain.shape[1] // size) * size // 2, size, 2]
    if plain.dtype != torch.bfloat16 or num_bytes != 2 * math.prod(shape):
        return False
    memory = (ctypes.c_byte * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks = torch.frombuffer(memory, dtype=plain.dtype).view(shape)
    for index in (0, len(blocks) - 1):
        rows = plain[index * size:][:size]
        rows = F.pad(rows, (0, -rows.shape[1] % size, 0, -len(rows) % size))
        if not torch.equal(blocks[index], rows.unflatten(1, (-1, 2)).transpose(0, 1)):
            return False
    return True


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each behind a norm and with a residual connection."""

    def __init__(self, config: PretrainedConfig, layer_index: int, group: Group = ALONE) -> None:
        super().__init__()
        self.group = group
        family = FAMILIES[config.model_type]
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.window = window_of(config, layer_index)
        self.head_dim = config.head_dim
        self.num_heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        queries, keys, values = (self.head_dim * heads for heads in self.num_heads)
        qkv_bias, o_bias, mlp_bias = (
            switch == "always" or getattr(config, switch, False) for switch in family[:3])
        head_norm = RMSNorm if family.head_norms else nn.Identity

        self.input_layernorm = RMSNorm(hidden, eps)
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        self.qkv_proj = Linear(hidden, qkv, qkv_bias)
        self.q_norm = head_norm(self.head_dim, eps)
        self.k_norm = head_norm(self.head_dim, eps)
        self.o_proj = Linear(queries, {"o_proj": hidden}, o_bias)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.gate_up_proj = GatedLinear(hidden, {"gate_proj": inner, "up_proj": inner}, mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, mlp_bias)

    @functools.cached_property
    def head_norms(self) -> tuple[Tensor, float]:
        """The norms of query heads and key heads as `cpu_attention` takes them."""
        ones = torch.ones(self.head_dim, device="cpu")
        weights = [getattr(norm, "weight", ones).float() for norm in (self.q_norm, self.k_norm)]
        return torch.stack(weights), getattr(self.q_norm, "eps", -1.0)

    def forward(self, hidden: Tensor, angles: Tensor, cache: Tensor, step: StepInputs,
                backend: Callable, rows: Tensor | None) -> Tensor:
        """From (T, hidden_size) to (rows, hidden_size).

        K and V of all T tokens are written to the cache; only `rows` go on behind attention.
        """
        attended = self.attend(self.input_layernorm(hidden), angles, cache, step, backend)
        attended = attended.flatten(1)
        if rows is not None:
            hidden = hidden[rows]
            attended = attended[rows]
        hidden = hidden + self.group.sum(self.o_proj(attended))
        activated = self.gate_up_proj(self.post_attention_layernorm(hidden))
        return hidden + self.group.sum(self.down_proj(activated))

    def attend(self, hidden: Tensor, angles: Tensor, cache: Tensor, step: StepInputs,
               backend: Callable) -> Tensor:
        """From (T, hidden_size) to (T, heads, head_dim).

        angles: (2, T, head_dim / 2), of the tokens' positions; cache: K and V of this layer.
        """
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        # one kernel for all the steps below
        if backend is cpu_attention:
            return cpu_attention(qkv, *self.head_norms, angles, cache, self.window, step)
        query, key, value = qkv.split(self.num_heads, dim=1)
        query = rotate(self.q_norm(query), angles)
        key = rotate(self.k_norm(key), angles)
        cache[:, step.slot_blocks, step.slot_offsets] = torch.stack((key, value))
        return backend(query, cache, self.window, step)


class Decoder(nn.Module):
    """Token ids to hidden states; `lm_head` makes logits of them."""

    def __init__(self, config: PretrainedConfig, group: Group = ALONE) -> None:
        super().__init__()
        self.group = group
        # from_pretrained: nn.Embedding itself would first draw its numbers, which takes a second
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(weight)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, group) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size})

    def forward(self, token_ids: Tensor, step: StepInputs, rope: Tensor, caches: Tensor,
                backend: Callable) -> Tensor:
        """Computes the step's T tokens and writes their K and V to the caches.

        token_ids: (T,); rope: (2, max_model_len, head_dim / 2), see `rope_table`; caches: see
        `make_caches`; backend: one of attention.py's. Returns the hidden states of
        `step.sampled_rows` alone, (rows, hidden_size).
        """
        hidden = self.embed(token_ids)
        angles = rope[:, step.positions]
        for layer, cache in zip(self.layers, caches):
            rows = step.sampled_rows if layer is self.layers[-1] else None
            hidden = layer(hidden, angles, cache, step, backend, rows)
        return self.norm(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Each rank has the rows of its part of the vocabulary."""
        if self.group.size == 1:
            return self.embed_tokens(token_ids)
        rows = len(self.embed_tokens.weight)
        own_ids = token_ids - self.group.rank * rows
        is_here = (own_ids >= 0) & (own_ids < rows)
        found = self.embed_tokens(own_ids.clamp(0, rows - 1))
        return self.group.sum(torch.where(is_here[:, None], found, 0))
