"""Replaces layers of a transformers model with the engine's own, which the kernel libraries know.

    attention   from the hidden states to the output projection: one product for queries, keys and
                values; norms of heads, rotation, the cache and attention as one kernel; one product
    a layer     attention and an MLP, each after a norm and with a residual connection; an MLP that
                is not gated, such as one with experts, stays transformers' own
    all layers  if each is one of those: then the engine's own `Decoder` runs them, at its speed

A module is recognised by what it computes (transformers_models/trial.py). It is compared with the
engine's own module, with the same linears and norms: both must have the same queries, keys and
values, and the same output for one result of attention. Positions are random, up to the model's
limit. A module that differs stays as it is. Without this file, all modules stay transformers' own.

Heads can be rotated in pairs other than (i, i + head_dim / 2), or only in part. Then the rows of
the weights are reordered, and numbers that are not rotated get an angle of 0.
"""

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nanoengine.model import Decoder, DecoderLayer, RMSNorm
from nanoengine_extras.models.transformers_models.modules import (
    GatedMLP, Inputs, Others, Run, current, in_order, is_linear, is_quantized, known_part,
    layers_of, only_tensors, side_by_side)
from nanoengine_extras.models.transformers_models.trial import is_same, random_rows
from nanoengine_extras.models.transformers_models.watching import replaced


class Own(nn.Module):
    """Takes the place of a transformers module: `part` is the engine's own attention or layer.

    call: its attention
    turn: how the module rotates a head: how many angles it has, how far apart they are in what the
        module gets, and the module's numbers in the order of the engine's
    """

    def __init__(self, part: Any, call: Any, turn: tuple[int, int, Any]) -> None:
        super().__init__()
        # not as submodules: those of `call` belong to the model
        vars(self).update(part=part, call=call, turn=turn, factor=call.factor)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        [x], pairs = states_and_angles(Run(arguments, options))
        key = self.turn, self.factor, *map(id, pairs)
        if key not in current.angles:
            # the pairs are kept, so that no other one can get its id
            current.angles[key] = self.angles(pairs, x), pairs
        return self.part(x[0], current.angles[key][0], current.step, slice(None))[None]

    def angles(self: Any, pairs: list[tuple], x: Tensor) -> Tensor:
        """cos and sin for the tokens, (2, T, 1, head_dim / 2).

        A factor in them also scales queries and keys, since backends scale scores by 1 /
        sqrt(head_dim).
        """
        count, step, order = self.turn
        angles = x.new_zeros(2, x.shape[1], 1, len(order) // 2, dtype=torch.float32)
        angles[0] = 1
        if count:
            angles[..., :count] = torch.cat(pairs[0])[:, :, None, ::step][..., :count]
        return angles * self.factor**0.5


class OwnAttention(Own):
    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return super().forward(*arguments, **options), None


class OtherMLP(nn.Module):
    """A module of transformers in place of an MLP, such as experts and their router."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # not as a submodule: it belongs to the model
        vars(self)["module"] = module

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.module(x[None])[0]


class OwnDecoder(Decoder):
    """The engine's own decoder, made of existing layers.

    angles: from positions, (1, T), to cos and sin, (2, T, head_dim / 2), as transformers computes
        them
    """

    def bind(self: Any, rope: Tensor, caches: Tensor, backend: Any) -> None:
        """Replaces the angles. The model gives its calls their memory."""
        self.rope = self.angles(torch.arange(rope.shape[1], device=rope.device)[None])


def made(kind: Any, **parts: Any) -> Any:
    """Returns a module of a class of the engine, made of existing parts."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def own_attentions(inputs: Inputs, calls: list[Any], longest: int, dtype: torch.dtype) -> Others:
    """Returns the replacements of attention modules. Their calls get linears and norms.

    inputs: see `given_inputs`; longest: the most tokens of a sequence
    """
    others: Others = {}
    owners = [call.recorded.owner() for call in calls]
    for call, owner in zip(calls, owners):
        if call.can_be_own and owners.count(owner) == 1 == len(inputs[owner]):
            found = candidates(call, owner, inputs, dtype)
            if own := first_same(owner, found, inputs, longest, dtype):
                others[owner] = own
    return others


def own_decoder(model: Any, inputs: Inputs, others: Others, longest: int, dtype: Any) -> Any:
    """Returns the replacement of all modules that compute hidden states, or None.

    others: the replacements of modules, with attention and norms
    """
    layers = layers_of(model.layers, inputs)
    found = [own_layer(layer, inputs, others, longest, dtype) for layer in layers]
    norms = [others[each] for each in model.layers.children() if type(others.get(each)) is RMSNorm]
    embedded = [run.output for run in inputs[model.embed_tokens]]
    if not found or None in found or len(norms) != 1 or len(embedded) != 1:
        return None
    states = [states_and_angles(inputs[layer][0]) for layer in layers]
    [x], pairs = states[0]
    # all are rotated by the same angles
    turns = {(own.turn, own.factor, *map(id, each)) for own, (_, each) in zip(found, states)}
    makers = [(module, run) for module, runs in inputs.items() for run in runs
              if pairs and run.output is pairs[0]]
    if not makers or len(turns) > 1 or not torch.equal(embedded[0], x):
        return None
    return made(OwnDecoder, embed_tokens=model.embed_tokens, norm=norms[0],
                layers=nn.ModuleList([own.part for own in found]),
                angles=partial(angles_at, found[0], *makers[-1]))


def angles_at(own: Own, module: nn.Module, run: Run, positions: Tensor) -> Tensor:
    """Returns the angles of positions. module: computed some in a run"""
    arguments, options = tree_map(
        lambda each: positions if torch.is_tensor(each) and not each.is_floating_point() else each,
        (run.arguments, run.options))
    with torch.inference_mode(), torch.autocast(positions.device.type, enabled=False):
        pair = module(*arguments, **options)
        return own.angles([pair], positions)[:, :, 0]


def own_layer(layer: Any, inputs: Inputs, others: Others, longest: int, dtype: Any) -> Any:
    parts = {each: others.get(each) for each in in_order(layer.children(), inputs)}
    kinds: Any = OwnAttention, GatedMLP, RMSNorm
    attention, mlps, norms = ([each for each in parts.values() if isinstance(each, kind)]
                              for kind in kinds)
    rest: list[Any] = [] if mlps else [each for each, other in parts.items() if other is None]
    if [len(only_tensors(inputs[each])) for each in rest] == [1]:
        mlps = [OtherMLP(rest[0])]
    if (len(attention), len(mlps), len(norms)) != (1, 1, 2):
        return None
    own = attention[0]
    part = made(DecoderLayer, self_attn=own.call, mlp=mlps[0], input_layernorm=norms[0],
                post_attention_layernorm=norms[1])
    # with different rounding, a token could get other experts
    with replaced(rest, lambda x: x.flip(-1)):
        return first_same(layer, [Own(part, own.call, own.turn)], inputs, longest, dtype)


# ------------------------------------------------------------------------------ candidates


def states_and_angles(run: Run) -> tuple[list[Tensor], list[tuple]]:
    """Returns the hidden states, and the pairs of cos and sin, that a module gets."""
    values = *run.arguments, *run.options.values()
    states = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    return states, [each for each in values if isinstance(each, tuple) and len(each) == 2]


def candidates(call: Any, owner: Any, inputs: Inputs, dtype: torch.dtype) -> Iterator[Any]:
    """Yields replacements that may compute the same as `owner`, after giving the call their linears
    and norms."""
    states, pairs = states_and_angles(inputs[owner][0])
    if len(states) != 1 or len(pairs) > 1:
        return
    linears = [each for each in in_order(owner.modules(), inputs) if is_linear(each)]
    first = [each for each in linears if inputs[each][0].arguments[0] is states[0]]
    outer = [each for each in linears if each not in first]
    sizes = [heads * call.head_dim for heads in call.num_heads]
    if [each.in_features for each in outer] != sizes[:1]:
        return
    found = [known_part(each, inputs[each], dtype) for each in in_order(owner.children(), inputs)]
    norms: list[Any] = [each for each in found if isinstance(each, RMSNorm)
                        and len(each.weight) == call.head_dim] or [nn.Identity(), nn.Identity()]
    nothing = call.qkv_proj
    for (count, step, order), rows in product(
            turns(states[0], pairs, call.head_dim), arrangements(first, sizes, call.head_dim)):
        turned = rows[:-sizes[2]].view(-1, call.head_dim)[:, order]
        rows = torch.cat((turned.flatten(), rows[-sizes[2]:]))
        # packed rows cannot be reordered
        is_fit = not any(map(is_quantized, first)) or torch.equal(rows, rows.sort()[0])
        fused = side_by_side(first) if is_fit else None
        if fused and len(norms) == 2:
            call.qkv_proj = reordered(fused, rows)
            call.q_norm, call.k_norm = (
                reordered(copy.deepcopy(norm), torch.tensor(order)) for norm in norms)
            call.o_proj = outer[0]
            yield OwnAttention(call, call, (count, step, order))
    call.qkv_proj = call.q_norm = call.k_norm = call.o_proj = nothing


def turns(x: Tensor, pairs: list[tuple], head_dim: int) -> Iterator[tuple[int, int, Any]]:
    """Yields how a module may rotate a head: see `Own`. The module's pairs are the halves of its
    rotated part, or neighbours; in the order, they come first in the two halves. The last turn
    rotates nothing."""
    numbers = torch.arange(head_dim)
    for cos, _ in pairs:
        if cos.shape[:2] == x.shape[:2]:
            count, step = turned_by(cos)
            turned, rest = numbers.split([2 * count, head_dim - 2 * count])
            for two in (turned.view(2, -1), turned.view(-1, 2).T):
                order = torch.cat((two, rest.view(2, -1)), dim=1)
                yield count, step, (*order.flatten().tolist(),)
    yield 0, 1, (*range(head_dim),)


def turned_by(cos: Tensor) -> tuple[int, int]:
    """How many angles `cos` has, and the distance to the next one: each can occur twice."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., ::2], cos[..., 1::2]):
        return half, 2
    return (half if torch.equal(cos[..., :half], cos[..., half:]) else cos.shape[-1]), 1


def arrangements(linears: list[Any], sizes: list[int], head_dim: int) -> Iterator[Tensor]:
    """Yields orders of the outputs of linears: queries, keys and values."""
    rows = torch.arange(sum(sizes))
    outputs = [each.out_features for each in linears]
    if outputs in (sizes, [len(rows)]):
        yield rows
    if outputs == [len(rows)]:
        # for each head of keys: its queries, the key and the value
        parts = rows.view(sizes[1] // head_dim, -1, head_dim).split(
            [sizes[0] // sizes[1], 1, 1], dim=1)
        yield torch.cat([part.flatten() for part in parts])


def reordered(module: nn.Module, rows: Tensor) -> Any:
    """Reorders the parameters of a module."""
    for name, each in [*module.named_parameters()]:
        if not torch.equal(rows, rows.sort()[0]):
            setattr(module, name, nn.Parameter(each[rows.to(each.device)], False))
    return module


def first_same(owner: nn.Module, others: Iterable[Any], inputs: Inputs, longest: int,
               dtype: torch.dtype) -> Any:
    """Returns the first of others that computes the same as a module, or None. Compared are
    queries, keys and values, (T, heads, head_dim), and the output for one result of attention.

    others: each an `Own`; longest: positions are below it
    """
    given = inputs[owner][0]
    (state, *_), _ = states_and_angles(given)
    _, length, size = state.shape
    generator = torch.Generator().manual_seed(0)

    def random(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return torch.randint_like(value, longest)
        if value is state:
            return random_rows(length, size, largest=1e3)[None].to(value)
        # angles that occur twice stay the same
        return value + torch.randn(*value.shape[:-1], 1, generator=generator).to(value)

    given = tree_map(random, given._replace(output=None, log=None))
    (x, *_), _ = states_and_angles(given)

    def results(own: Any, module: Any, kind: torch.dtype) -> list[Tensor]:
        call = own.call
        found: list[Tensor] = []
        attended = random_rows(length, call.num_heads[0] * call.head_dim, largest=1.0)
        attended = attended.view(length, -1, call.head_dim).to(x.device, kind)

        def attend(caller: Any, *arguments: Any, **options: Any) -> Tensor:
            found.extend(each[0].transpose(0, 1) for each in arguments[:3])
            return attended[None]

        def backend(query: Tensor, cache: Tensor, *others: Any) -> Tensor:
            back = torch.tensor(own.turn[2]).argsort()
            key, value = cache.flatten(1, 2)
            found.extend(each[..., back] / own.factor**0.5 for each in (query, key))
            found.append(value)
            return attended

        call.backend = backend
        call.cache = attended.new_zeros(2, length, 1, call.num_heads[1], call.head_dim)
        current.attend, current.angles = attend, {}
        current.step = SimpleNamespace(slot_mapping=torch.arange(length, device=x.device))
        run = tree_map(lambda each: each.to(kind) if each is x else each, given)
        out = module(*run.arguments, **run.options)
        out, *more = out if isinstance(out, tuple) else (out,)
        # not of another form
        return [*found, out[0]] if more in ([], [None]) else []

    return next((own for own in others if is_same(owner, own, partial(results, own), dtype)), None)
