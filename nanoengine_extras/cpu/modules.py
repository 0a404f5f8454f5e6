"""`optimize`: makes a finished decoder fast on a CPU, in place."""

from collections import Counter
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.modules import module as torch_modules

from nanoengine_extras.cpu import attention, products
from nanoengine_extras.cpu.compiling import Program, bits_of_number, run_call, warn_once
from nanoengine_extras.cpu.memory import limit_threads
from nanoengine_extras.known import has_code_of

# Counts assignments to any module: of parameters, modules and caches. `weights` does not count
# modules that are put into a list, as some models do in each step.
changes = Counter[str]()
torch_modules.register_module_parameter_registration_hook(
    lambda *_: changes.update(all=1, weights=1))
torch_modules.register_module_module_registration_hook(
    lambda module, *_: changes.update(all=1, weights=not isinstance(module, nn.ModuleList)))


def optimize(model: nn.Module, has_attention: bool = True) -> bool:
    """Gives each module that it knows a faster class; everything else in the module stays.

        nn.Linear, or a class with its forward
        an MLP, see `GatedMLP`
        attention, see `PagedAttention`
        a decoder, see `Layers`

    The last three are known by the code of their forward, which the docstrings show (known.py).
    A module with other code keeps its forward, but its linears become fast. If one attention of a
    model keeps its forward, all do, since they share a cache. The attention kernel also norms the
    heads, so hooks on these norms do not run.

    Attributes that are set later take effect: `module.weight = …`, `module.down_proj = …`. In-place
    changes of a weight or a bias do not.

    has_attention: False for a cache that `empty_cache` has not made

    Returns whether a row has the same bits whatever other rows there are. It does if all weights
    are packed, and all MLPs, attention and decoders are known.
    """
    limit_threads()
    has_attention = has_attention and knows_attention(model)
    for module in [*model.modules()]:
        kind = kind_of(module)
        if kind in (PackedLinear, GatedMLP) or (kind and has_attention):
            own = type(module)
            module.__class__ = type(own.__name__, (kind, own), {})
        if kind is GatedMLP and kind_of(module.gate_up_proj) is PackedLinear:
            # its own turn comes later
            vars(module.gate_up_proj).update(halves=2, is_fused=True)
        elif kind is PackedLinear:
            kind.pack(module)
    # hooks run in the thread that computes
    model.register_forward_pre_hook(limit_threads)
    return has_attention and all(map(is_invariant, model.modules()))


def knows_attention(model: nn.Module) -> bool:
    """Whether `optimize` replaces all attention of a model, which then needs an `empty_cache`."""
    return all(isinstance(module, PagedAttention) or kind_of(module)
               for module in model.modules() if hasattr(module, "qkv_proj"))


def kind_of(module: Any) -> Any:
    """The class that makes a module fast, or None."""
    if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
        # no parametrization, no weight of some library
        is_plain = module._parameters.keys() == {"weight", "bias"}
        return PackedLinear if is_plain and type(module.weight) is nn.Parameter else None
    for name, kind in KINDS.items():
        if hasattr(module, name) and has_code_of(kind, module):
            return kind if kind is not PagedAttention or has_known_norms(module) else None
    return None


def is_rms_norm(norm: Any) -> bool:
    """Whether it is an nn.RMSNorm, with a weight and an eps, or computes it. In place of:

        def forward(self, x):
            return rms_norm(x, self.weight, self.eps)

        def rms_norm(x, weight, eps):
            numbers = x.float()
            mean = numbers.square().mean(dim=-1, keepdim=True)
            return (numbers * (mean + eps).rsqrt() * weight).to(x.dtype)
    """
    is_unchanged = type(norm).forward is nn.RMSNorm.forward and "forward" not in vars(norm)
    return (isinstance(norm, nn.RMSNorm) and bool(norm.eps)
            and getattr(norm._parameters.get("weight"), "ndim", 0) == 1
            and (is_unchanged or has_code_of(is_rms_norm, norm)))


def has_known_norms(attention: Any) -> bool:
    norms = attention.q_norm, attention.k_norm
    if all(map(is_rms_norm, norms)):
        # OLMo 2 norms all heads together
        have_size = all(norm.weight.shape == (attention.head_dim,) for norm in norms)
        return have_size and attention.q_norm.eps == attention.k_norm.eps
    return all(type(norm) is nn.Identity for norm in norms)


def is_invariant(module: Any) -> bool:
    is_fast = all(isinstance(module, KINDS[name]) for name in KINDS if hasattr(module, name))
    has_matrix = any(each.ndim > 1 for each in module.parameters(recurse=False))
    return is_fast and (not has_matrix or isinstance(module, nn.Embedding)
                        or getattr(module, "is_packed", False))


def plainly(name: str) -> Any:
    """The method of nn.Linear with this name, called while the weight is not packed."""
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        was_packed = self.is_packed
        if was_packed:
            self._parameters["weight"] = nn.Parameter(self.weight, self.weight.requires_grad)
        result = getattr(nn.Linear, name)(self, *arguments, **options)
        if was_packed:
            self.pack()
        return result
    return method


class PackedLinear(nn.Linear):
    """Its weight is packed in the order in which `products.py` reads it. So a row has the same bits
    whatever other rows there are. PyTorch computes what the kernel does not support.

    weight: a copy, in the order of nn.Linear
    halves: 2 if the first half of the outputs are gates, the second one ups; a packed weight then
        gives SwiGLU of them.
    is_fused: its MLP gets SwiGLU, from `multiply`; any other caller gets the plain product.
    padding: how many extra inputs the packed weight has; these inputs are 0.
    """

    halves = 1
    is_fused = False
    is_packed = property(lambda self: self._parameters["weight"].ndim == 3)
    _apply, _save_to_state_dict, _load_from_state_dict = map(
        plainly, ("_apply", "_save_to_state_dict", "_load_from_state_dict"))

    @property
    def weight(self) -> Any:  # type: ignore[override]
        weight: Any = super().__getattr__("weight")
        sizes = self.out_features, self.in_features, self.halves
        return products.unpack(weight, *sizes) if self.is_packed else weight

    def pack(self: Any) -> None:
        """Packs the weight; where there is no kernel for it, it warns."""
        weight = self.weight
        # a module can have a different weight from the one that it was made with
        self.out_features, self.in_features = weight.shape
        try:
            packed, self.packed_bias = products.pack(weight, self.bias, self.halves)
        except ValueError as error:
            return warn_once(f"products are slower: {error}")
        # the kernel is compiled now, and not when it is first needed
        self.kernel = products.product(packed.dtype, products.has_uppers(packed))
        self.weight = nn.Parameter(packed, weight.requires_grad)
        self.padding = packed.shape[1] * 4 // packed.itemsize - self.in_features

    def takes(self: Any, x: Tensor) -> bool:
        """Whether the kernel computes the product, which equals PyTorch's up to the last bits."""
        packed = self._parameters["weight"]
        has_gradient = x.requires_grad or packed.requires_grad or (
            self.bias is not None and self.bias.requires_grad)
        return (self.is_packed and type(x) in (Tensor, nn.Parameter) and torch._C._has_storage(x)
                and (x.dtype, x.device, x.layout) == (packed.dtype, packed.device, packed.layout)
                and x.shape[-1:] == (self.in_features,) and not x.is_neg()
                and not (has_gradient and torch.is_grad_enabled())
                and unpack_dual(x).tangent is None
                and not torch.is_autocast_enabled("cpu"))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused or not self.takes(x):
            return F.linear(x, self.weight, self.bias)
        return self.multiply(x)

    def multiply(self: Any, x: Tensor) -> Tensor:
        """The product, or SwiGLU of it: (…, in_features) to (…, out_features / halves)."""
        rows = x.reshape(-1, self.in_features)
        rows = F.pad(rows, (0, self.padding)) if self.padding else rows.contiguous()
        count = rows.shape[0]
        out = rows.new_empty(count, self.out_features // self.halves)
        run_call(self.call(rows.data_ptr(), 0, out.data_ptr(), count))
        return out.view(*x.shape[:-1], out.shape[1])

    def call(self: Any, x: int, residual: int, out: int, rows: int, norm: Any = None) -> list[int]:
        """The call of the kernel, see `products.product`. x, residual, out: addresses

        norm: an nn.RMSNorm of the inputs, or None
        """
        norm_at, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        packed = self._parameters["weight"]
        return self.kernel(
            norm_at, packed.data_ptr(), self.packed_bias.data_ptr(), packed.shape[1],
            self.out_features // self.halves, self.halves, bits_of_number(eps), x, residual, out,
            rows)


class GatedMLP(nn.Module):
    """In place of:

        def forward(self, x):
            return self.down_proj(swiglu(self.gate_up_proj(x)))

        def swiglu(gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.gate_up_proj
        has_hooks = first._forward_hooks or first._forward_pre_hooks or "forward" in vars(first)
        if getattr(first, "is_fused", False) and first.takes(x) and not has_hooks:
            return self.down_proj(first.multiply(x))
        gate, up = first(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class PagedAttention(nn.Module):
    """Attention over a paged KV cache.

    It has `head_dim`, `window` (how many keys a query sees; None: all) and its part of the `cache`.
    `q_norm` and `k_norm` are RMSNorms with one eps, or nn.Identity. It can have a `soft_cap` and
    `sinks`, see `paged_attention`, if its `backend` uses them as well. In place of:

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

    soft_cap = sinks = None

    @cached_property
    def head_norms(self: Any) -> tuple[Tensor, float]:
        """Returns weights and eps. They are kept, because calls contain the weights' address."""
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
        rows: those that need an output
        """
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        attended = attention.paged_attention(
            qkv, *self.head_norms, angles, self.cache, self.window, *tensors_of(step),
            soft_cap=self.soft_cap, sinks=self.sinks)
        return self.o_proj(attended.flatten(1)[rows])

    def call(self: Any, *step: int) -> list[int]:
        """The call of the kernel. step: see `step_numbers`"""
        num_queries = self.o_proj.in_features // self.head_dim
        return attention.call_attention(
            self.cache, num_queries, *self.head_norms, self.window, self.soft_cap, self.sinks,
            *step)


def tensors_of(step: Any) -> tuple[Tensor, ...]:
    return step.slot_mapping, step.block_tables, step.sequence_of_token, step.positions


# ------------------------------------------------------------------------ many layers in one call

# The arguments of a program in each run: the number of rows; the addresses of the hidden states and
# of the results that are computed from them; and the numbers of the step for attention.
ROWS, X, MIDDLE, ACTIVATED, QKV, ATTENDED, *OF_STEP = range(-1, -15, -1)


class Layers(nn.Module):
    """Runs the layers of a decoder as programs. One ends with the last attention: what follows it
    is computed only for the rows that need an output. A program also ends before each MLP of an
    unknown kind, which is then called. So there are two programs if all MLPs are known.

    Calling each kernel from Python would take up to a fifth of the time of a decode. A program
    contains the addresses of weights and caches, and is made again when they change. If a module
    has hooks, or if another part of a layer is of an unknown kind, the layers are called one by
    one, as before. In place of:

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
        # a copy of a decoder needs its own programs
        if getattr(self, "version", None) != (changes["all"], id(self)):
            self.make_programs()
        if not self.programs or any(self.hooks):
            return super().forward(token_ids, step)
        x = self.embed_tokens(token_ids)
        # rows can repeat
        most = max(len(x), len(step.logits_indices))
        middle, activated, qkv, attended = [x.new_empty(most, size) for size in self.sizes]
        angles = self.rope[:, step.positions]
        numbers = attention.step_numbers(qkv, attended, angles, *tensors_of(step))
        for number, (program, layer) in enumerate(self.programs):
            if number == len(self.programs) - 1:
                x, attended = x[step.logits_indices], attended[step.logits_indices]
                numbers[1] = attended.data_ptr()
            program.run(len(x), *map(Tensor.data_ptr, (x, middle, activated)), *numbers)
            if layer:
                summed = middle[:len(x)]
                torch.add(summed, layer.mlp(layer.post_attention_layernorm(summed)), out=x)
        return self.norm(x)

    def make_programs(self: Any) -> None:
        self.hooks = [torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks]
        for module in self.modules():
            # a weight that was set
            if not getattr(module, "is_packed", True):
                module.pack()
        # of MLPs that no program can run
        others = {module for layer in self.layers if not is_known_mlp(layer.mlp)
                  for module in layer.mlp.modules()}
        known = [module for module in self.modules() if module not in others]
        for module in known[1:]:
            self.hooks += module._forward_hooks, module._forward_pre_hooks
        self.programs = []
        has_own = any("forward" in vars(module) for module in known)
        is_known = not has_own and all(map(is_known_layer, self.layers))
        dtypes = {each.dtype for module in known for each in module.parameters(recurse=False)}
        if is_known and len(dtypes) == 1:
            parts: list[tuple[list, Any]] = []
            calls: list[list[int]] = []
            for layer in self.layers:
                calls += calls_before(layer)
                if layer is self.layers[-1]:
                    parts.append((calls, None))
                    calls = []
                calls += calls_after(layer)
                if layer.mlp in others:
                    parts.append((calls, layer))
                    calls = []
            parts += [(calls, None)] if calls else []
            self.programs = [(Program(*calls), layer) for calls, layer in parts]
            attention = self.layers[0].self_attn
            inner = [each.mlp.down_proj.in_features for each in self.layers
                     if each.mlp not in others]
            self.sizes = (attention.qkv_proj.in_features, max(inner, default=0),
                          attention.qkv_proj.out_features, attention.o_proj.in_features)
        self.version = changes["all"], id(self)


def is_known_mlp(mlp: Any) -> bool:
    """Whether programs can run an MLP."""
    linears: Any = (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, GatedMLP) else ()
    return bool(linears) and are_packed(*linears) and linears[0].is_fused


def are_packed(*linears: Any) -> bool:
    return all(getattr(each, "is_packed", False) and not each.padding for each in linears)


def is_known_layer(layer: Any) -> bool:
    """Whether programs can run a layer, its MLP apart. In place of:

        def forward(self, x, angles, step, rows):
            x = x[rows] + self.self_attn(self.input_layernorm(x), angles, step, rows)
            return x + self.mlp(self.post_attention_layernorm(x))
    """
    if not has_code_of(is_known_layer, layer):
        return False
    attention = layer.self_attn
    return (isinstance(attention, PagedAttention)
            and is_rms_norm(layer.input_layernorm) and is_rms_norm(layer.post_attention_layernorm)
            and are_packed(attention.qkv_proj, attention.o_proj))


def calls_before(layer: Any) -> list[list[int]]:
    """The calls of a layer that end with attention."""
    attention = layer.self_attn
    # the norms may have been replaced
    attention.__dict__.pop("head_norms", None)
    return [attention.qkv_proj.call(X, 0, QKV, ROWS, layer.input_layernorm),
            attention.call(QKV, ATTENDED, *OF_STEP)]


def calls_after(layer: Any) -> list[list[int]]:
    """The other calls of a layer. Those of an MLP of an unknown kind are left out."""
    mlp = layer.mlp
    calls = [layer.self_attn.o_proj.call(ATTENDED, X, MIDDLE, ROWS)]
    if is_known_mlp(mlp):
        calls += [
            mlp.gate_up_proj.call(MIDDLE, 0, ACTIVATED, ROWS, layer.post_attention_layernorm),
            mlp.down_proj.call(ACTIVATED, MIDDLE, X, ROWS)]
    return calls


# by the name of a part
KINDS: dict[str, type[nn.Module]] = {
    "gate_up_proj": GatedMLP, "qkv_proj": PagedAttention, "embed_tokens": Layers}
