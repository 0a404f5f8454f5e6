"""Attention modules of a model of transformers, as the engine's own `Attention`.

From the hidden states to the output projection, it is what a library of kernels knows as a whole:
one product for queries, keys and values; norms of heads, rotation, the cache and attention as one
kernel; one more product.

A module is known by what it computes, not by its names: its queries, keys and values, and its
output for what attention returns, are those of the engine's own attention with the same linears and
norms. Both run on random hidden states, angles and positions, in float32 and in the dtype of the
model. What differs stays what it is.

Heads can be rotated in other pairs than (i, i + head_dim / 2), and in a part only. Then the rows of
the weights get another order, and what is not rotated gets an angle of 0.
"""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.model import RMSNorm
from nanoengine_extensions.transformers_models.modules import (
    InFloat32, Inputs, Others, are_close, known_part, side_by_side)

# .attend: what computes the attention of the model that this thread runs
# .step, .angles: the inputs of its step, and the angles that it has had so far
current = threading.local()
# in a head: how many angles, and by how many numbers of cos and sin the next one is further on
Turned = tuple[int, int]


class OwnAttention(nn.Module):
    """In place of an attention module of transformers.

    call: the engine's own attention
    places: where the hidden states, and the pair of cos and sin, are among the arguments; None for
        no rotation
    """

    def __init__(self, call: Any, places: tuple[int, int | None], turned: Turned) -> None:
        super().__init__()
        # its modules are those of a call of the model
        vars(self).update(call=call, places=places, turned=turned)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        values = *arguments, *options.values()
        x_at, pair_at = self.places
        angles = self.angles(None if pair_at is None else values[pair_at], values[x_at])
        return self.call(values[x_at][0], angles, current.step, slice(None))[None], None

    def angles(self, pair: tuple[Tensor, Tensor] | None, x: Tensor) -> Tensor:
        """cos and sin for the tokens, (2, T, 1, head_dim / 2): once in a step for all layers.

        They scale queries and keys, too, since backends scale scores by 1 / sqrt(head_dim).
        """
        count, step = self.turned
        key = id(pair), self.turned, self.call.factor, self.call.head_dim
        if key not in current.angles:
            angles = torch.zeros(2, x.shape[1], 1, self.call.head_dim // 2, device=x.device)
            angles[0] = 1
            if pair is not None:
                angles[..., :count] = torch.cat(pair)[:, :, None, ::step][..., :count]
            # together with the pair: no other one can get its id
            current.angles[key] = pair, angles * self.call.factor**0.5
        return current.angles[key][1]


def own_attentions(inputs: Inputs, calls: list[Any], longest: int, dtype: torch.dtype) -> Others:
    """Returns what takes the place of attention modules. Their calls get linears and norms.

    inputs: see `given_inputs`; longest: the most tokens of a sequence
    """
    others: Others = {}
    owners = [call.recorded.owner() for call in calls]
    for call, owner in zip(calls, owners):
        if call.can_be_own and owners.count(owner) == 1 == len(inputs[owner]):
            other = own_attention(call, owner, inputs, longest, dtype)
            if other:
                others[owner] = other
                call.is_own = True
    return others


def own_attention(call: Any, owner: nn.Module, inputs: Inputs, longest: int,
                  dtype: torch.dtype) -> OwnAttention | None:
    arguments, options = inputs[owner][0]
    values = [*arguments, *options.values()]
    x_at = [i for i, each in enumerate(values) if is_floating(each)]
    pair_at = [i for i, each in enumerate(values) if isinstance(each, tuple)]
    if len(x_at) != 1 or len(pair_at) > 1 or any(isinstance(each, (dict, list)) for each in values):
        return None
    linears = [each for each in owner.modules() if type(each) is nn.Linear and inputs[each]]
    first = [each for each in linears if inputs[each][0][0][0] is values[x_at[0]]]
    outer = [each for each in linears if each not in first]
    if [each.in_features for each in outer] != [call.num_heads[0] * call.head_dim]:
        return None
    call.o_proj = outer[0]
    norms = [norm for each in owner.children() if each not in linears
             if isinstance(norm := known_part(each, inputs[each], dtype), RMSNorm)]
    norms = [norm for norm in norms if len(norm.weight) == call.head_dim]
    pairs: Any = [*permutations(norms, 2)] if norms else [(nn.Identity(), nn.Identity())]
    turns: Any = [(None, (0, 1), torch.arange(call.head_dim))]
    if pair_at:
        turned = turned_by(values[pair_at[0]][0])
        turns[:0] = [(pair_at[0], turned, order) for order in orders(turned[0], call.head_dim)]
    trial = Trial(call, values, [*options], x_at[0], longest)
    kinds = torch.float32, dtype
    right = [trial.run(owner, kind) for kind in kinds]
    for (place, turned, order), (each, rows), pair in product(
            turns, arrangements(first, call.num_heads, call.head_dim), pairs):
        call.qkv_proj = reordered(side_by_side(each), rows, call.num_heads, order)
        call.q_norm, call.k_norm = (turned_norm(norm, order) for norm in pair)
        other = OwnAttention(call, (x_at[0], place), turned)
        if all(trial.is_same(other, wanted, order, kind) for wanted, kind in zip(right, kinds)):
            return other
    return None


# ------------------------------------------------------------------------------ candidates


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def turned_by(cos: Tensor) -> Turned:
    """How the angles of cos are repeated: each twice, or all twice, or not."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., ::2], cos[..., 1::2]):
        return half, 2
    return (half if torch.equal(cos[..., :half], cos[..., half:]) else cos.shape[-1]), 1


def orders(count: int, head_dim: int) -> Iterator[Tensor]:
    """Yields the numbers of a head, such that the first ones of both halves are rotated.

    Pairs are halves of what is rotated, or neighbours.
    """
    numbers = torch.arange(head_dim)
    rest = numbers[2 * count:].view(2, -1)
    for pairs in (numbers[:2 * count].view(2, -1), numbers[:2 * count].view(-1, 2).T):
        yield torch.cat((pairs, rest), dim=1).flatten()


def arrangements(linears: list[Any], num_heads: list[int],
                 head_dim: int) -> Iterator[tuple[Any, Tensor]]:
    """Yields linears, and the order of their outputs: queries, keys and values."""
    sizes = [heads * head_dim for heads in num_heads]
    rows = torch.arange(sum(sizes))
    for each in permutations(linears):
        if [linear.out_features for linear in each] == sizes:
            yield each, rows
    if [linear.out_features for linear in linears] == [len(rows)]:
        yield linears, rows
        # for each head of keys: its queries, the key and the value
        groups = rows.view(num_heads[1], -1, head_dim)
        yield linears, torch.cat([part.flatten() for part in groups.split(
            [groups.shape[1] - 2, 1, 1], dim=1)])


def reordered(linear: Any, rows: Tensor, num_heads: list[int], order: Tensor) -> Any:
    """Returns a linear with its outputs in another order: see `arrangements` and `orders`."""
    head_dim = len(order)
    *turned, values = rows.split([heads * head_dim for heads in num_heads])
    turned = [each.view(-1, head_dim)[:, order].flatten() for each in turned]
    rows = torch.cat((*turned, values)).to(linear.weight.device)
    if not torch.equal(rows.sort()[0], rows):
        linear.weight = nn.Parameter(linear.weight[rows], False)
        linear.bias = None if linear.bias is None else nn.Parameter(linear.bias[rows], False)
    return linear


def turned_norm(norm: Any, order: Tensor) -> Any:
    if not isinstance(norm, RMSNorm) or len(norm.weight) != len(order):
        return norm
    other = RMSNorm(len(order), norm.eps)
    other.weight = nn.Parameter(norm.weight[order.to(norm.weight.device)], False)
    return other


# ----------------------------------------------------------------------------------- trial


class Trial:
    """Random arguments of an attention module, and what attention returns.

    Hidden states are small and large. Positions are of all tokens that a sequence can have.
    """

    def __init__(self, call: Any, values: list[Any], options: list[str], x_at: int,
                 longest: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(values[x_at].device)

        def other(value: Any) -> Any:
            if isinstance(value, tuple):
                count, step = turned_by(value[0])
                pair = random(2, *value[0].shape[:-1], count)
                pair = pair.repeat_interleave(2, -1) if step == 2 else torch.cat((pair, pair), -1)
                return (*pair[..., :value[0].shape[-1]].to(value[0].dtype),)
            return torch.randint_like(value, longest) if isinstance(value, Tensor) else value

        x = random(*values[x_at].shape)
        x *= torch.logspace(-3, 3, x.shape[1], device=x.device)[:, None]
        self.values = [x if i == x_at else other(each) for i, each in enumerate(values)]
        self.attended = random(x.shape[1], *call.recorded.query[1::2])
        self.call = call
        self.options = options
        self.x_at = x_at

    def run(self, module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        """Returns queries, keys and values, (T, heads, head_dim), and the output, (T, size)."""
        values = [*self.values]
        values[self.x_at] = x = self.values[self.x_at].to(dtype)
        num_arguments = len(values) - len(self.options)
        attended = self.attended.to(dtype)
        states: list[Tensor] = []

        def attend(owner: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any,
                   **options: Any) -> Tensor:
            states.extend(each[0].transpose(0, 1) for each in (query, key, value))
            return attended[None]

        def backend(query: Tensor, cache: Tensor, *others: Any) -> Tensor:
            states.extend((query, *cache.flatten(1, 2)))
            return attended

        self.call.backend = backend
        self.call.cache = x.new_zeros(2, x.shape[1], 1, self.call.num_heads[1], self.call.head_dim)
        current.attend = attend
        current.angles = {}
        current.step = SimpleNamespace(slot_mapping=torch.arange(x.shape[1], device=x.device))
        with InFloat32() if dtype == torch.float32 else nullcontext():
            out, *others = module(*values[:num_arguments],
                                  **dict(zip(self.options, values[num_arguments:])))
        return [*states, *out] if others == [None] else []

    def is_same(self, other: OwnAttention, right: list[Tensor], order: Tensor,
                dtype: torch.dtype) -> bool:
        """Whether it computes what is right, with heads in another order."""
        if len(right) != 4:
            return False
        *turned, value, out = right
        scale = self.call.factor**0.5
        right = [*(each[..., order] * scale for each in turned), value, out]
        return all(are_close(one, two, dtype) for one, two in zip(right, self.run(other, dtype)))
