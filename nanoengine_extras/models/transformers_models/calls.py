"""The calls of the attention function in a step, as modules.

transformers gives each call its queries, keys and values, and a mask. `Recorded` describes a call,
`Call` computes it with the engine's cache.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine.attention import flash_attention, gather_attention
from nanoengine.model import Attention
from nanoengine.step_inputs import StepInputs


class NotComputed(ValueError):
    """Why a model is refused."""


class Mask:
    """Stands in for a mask: transformers' function of the positions of queries and keys."""

    def __init__(self, mask_function: Callable, **options: Any) -> None:
        self.function = mask_function

    # some models cut their masks to the number of keys
    def __getitem__(self, index: Any) -> "Mask":
        return self

    def __getattr__(self, name: str) -> Any:
        raise NotComputed("it changes the masks of its attention")


class Recorded(NamedTuple):
    """A call of the attention function, the same in all steps.

    query, key, value: (1, heads, tokens, head_dim) of each. scale: of the scores. mask: see `Mask`.
    window: how many keys a query sees; None for all. soft_cap: scores, scaled, become soft_cap *
    tanh(score / soft_cap); None for none. sinks: (heads,) float32, one more score of each query
    head, whose weight is dropped; None for none. is_plain: whether it is causal attention with this
    window, cap and sinks, and nothing else. owner: a weak reference to the module that calls.
    """

    query: torch.Size
    key: torch.Size
    value: torch.Size
    scale: float
    mask: Callable
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    is_plain: bool
    owner: Any


def eager_of(module: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns transformers' own attention function of a module."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]


class Call(Attention):
    """A call of the attention function.

    The forward is that of the engine's own attention, with projections that do nothing, and no head
    norms. All calls share the shape of the cache: heads are repeated, and padded with zeros.

    soft_cap, sinks: see `Recorded`. Only the kernels of our libraries compute them.
    is_own: whether it has the linears and norms of its module: see own_layers.py
    """

    is_own = property(lambda self: type(self.qkv_proj) is not nn.Identity)

    def __init__(self, recorded: Recorded, kv_heads: int, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.recorded = recorded
        self.window = recorded.window
        self.soft_cap = recorded.soft_cap
        self.sinks = recorded.sinks
        self.is_soft = recorded.soft_cap is not None or recorded.sinks is not None
        self.head_dim = head_dim
        self.num_heads = [recorded.query[1], kv_heads, kv_heads]
        self.num_repeats = kv_heads // recorded.key[1]
        # backends scale by 1 / sqrt(head_dim)
        self.factor = recorded.scale * math.sqrt(head_dim)
        nothing: Any = nn.Identity()
        # libraries read the number of heads from it
        nothing.in_features = recorded.query[1] * head_dim
        self.qkv_proj = self.q_norm = self.k_norm = self.o_proj = nothing

    def bind(self, cache: Tensor, backend: Any, other: Callable | None) -> None:
        """Gives the call its memory. other: a backend that can do more, or None"""
        self.cache = cache
        self.backend = backend
        if backend is flash_attention and (self.head_dim > 256 or self.head_dim % 8):
            self.backend = other or gather_attention
        # of all backends, only `other` and the kernel for a CPU (None) have soft caps and sinks
        self.is_gathered = self.is_soft and backend is not None and other is None
        if self.is_soft and backend and other:
            self.backend = partial(other, soft_cap=self.soft_cap, sinks=self.sinks)

    @property
    def can_be_own(self) -> bool:
        """Whether the engine's own attention could take its place, with the same cache."""
        sizes = {each[3] for each in self.recorded[:3]}
        return (type(self) is Call and not self.is_soft and sizes == {self.head_dim}
                and self.num_repeats == 1 and self.factor > 0)

    def in_cache(self, x: Tensor) -> Tensor:
        """Pads heads, from (1, heads, T, head_dim) to (T, heads, head_dim) of the cache."""
        missing = self.head_dim - x.shape[3]
        return (F.pad(x, (0, missing)) if missing else x)[0].transpose(0, 1)

    def attend(self, step: StepInputs, angles: Tensor, module: nn.Module, query: Tensor,
               key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """From (1, heads, T, head_dim) each to (1, T, heads, head_dim of the values).

        angles: rotate nothing. module, options: the caller of attention, and its other arguments
        """
        if self.is_gathered:
            return self.gather(step, angles, module, query, key, value, options)
        if self.factor != 1:
            query = query * self.factor
        if self.num_repeats > 1:
            key, value = (each.repeat_interleave(self.num_repeats, 1) for each in (key, value))
        qkv = torch.cat([self.in_cache(each) for each in (query, key, value)], dim=1)
        out = self(qkv.flatten(1), angles, step, slice(None))
        return out.view(1, len(out), -1, self.head_dim)[..., :value.shape[3]]

    def gather(self, step: StepInputs, angles: Tensor, module: nn.Module, query: Tensor,
               key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """The same with transformers' own function, over gathered keys."""
        eager = eager_of(module)
        pair = [self.in_cache(each.repeat_interleave(self.num_repeats, 1)) for each in (key, value)]
        self.cache.flatten(1, 2)[:, step.slot_mapping] = torch.stack(pair)
        out = []
        starts = step.query_starts.tolist()
        for seq, length in enumerate(step.lengths.tolist()):
            gathered = self.cache[:, step.block_tables[seq]].flatten(1, 2)[:, :length]
            # (1, heads, keys, head_dim)
            keys, values = gathered[:, None, :, ::self.num_repeats].transpose(2, 3)
            places = torch.arange(length, device=query.device)
            # 256 queries at a time, as in `gather_attention`
            for first in range(starts[seq], starts[seq + 1], 256):
                part = slice(first, min(first + 256, starts[seq + 1]))
                positions = step.positions[part, None].long()
                is_seen = self.recorded.mask(0, 0, positions, places) & (places <= positions)
                mask = query.new_zeros(1, 1, *is_seen.shape)
                mask.masked_fill_(~is_seen, torch.finfo(mask.dtype).min)
                out.append(eager(module, query[:, :, part], keys[..., :key.shape[3]],
                                 values[..., :value.shape[3]], mask, **options)[0])
        return torch.cat(out, dim=1)


class OtherCall(Call):
    """A call that needs more than a `Call` can do, such as a mask that is not a window."""

    attend = Call.gather
    # so that no library mistakes it for the engine's own
    forward = attend  # type: ignore[assignment]
