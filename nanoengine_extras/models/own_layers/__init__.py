"""Replaces layers of a transformers model with the engine's own, which the kernel libraries know.

    attention   from the hidden states to the output projection: one product for queries, keys and
                values; norms of heads, rotation, the cache and attention as one kernel; one product
    a layer     attention and an MLP, each after a norm and with a residual connection; an MLP that
                is not gated, such as one with experts, stays transformers' own
    all layers  if each is one of those: then the engine's own `Decoder` runs them, at its speed

A module is recognised by what it computes, not by its names. It is compared with the engine's own
module, with the same linears and norms: both must have the same queries, keys and values, and the
same output for one result of attention. Both run on random hidden states, angles and positions, in
float32 and in the dtype of the model. A module that differs stays as it is. Without this file, all
modules stay transformers' own.

Heads can be rotated in pairs other than (i, i + head_dim / 2), or only in part. Then the rows of
the weights are reordered, and numbers that are not rotated get an angle of 0.
"""

import copy
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nanoengine.model import Decoder, DecoderLayer, RMSNorm
from nanoengine_extras.models.own_layers.trial import (
    is_same, reversing, states_and_angles, turned_by)
from nanoengine_extras.models.transformers_models.modules import (
    GatedMLP, Inputs, Others, current, is_linear, is_quantized, known_part, layers_of,
    only_tensors, side_by_side)


class Own(nn.Module):
    """Takes the place of a transformers module: `part` is the engine's own attention or layer.

    call: its attention
    count, step: how many angles a head has, and how far apart they are in what the module gets
    order: the module's order of the numbers of a head
    """

    def __init__(self, part: Any, call: Any, count: int, step: int, order: Tensor) -> None:
        super().__init__()
        turned = count, step, call.factor, call.head_dim
        # not as a submodule: the modules of `call` belong to the model
        vars(self).update(part=part, call=call, turned=turned, order=order)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        [x], pairs = states_and_angles(arguments, options)
        angles = self.angles(pairs[0] if pairs else None, x)
        return self.part(x[0], angles, current.step, slice(None))[None]  # type: ignore[operator]

    def angles(self, pair: Any, x: Tensor) -> Tensor:
        """cos and sin for the tokens, (2, T, 1, head_dim / 2), computed once a step for all layers.

        A factor in them also scales queries and keys, since backends scale scores by 1 /
        sqrt(head_dim).
        """
        count, step, factor, head_dim = self.turned  # type: ignore[misc]
        key = self.turned, id(pair) if count else None
        if key not in current.angles:
            angles = x.new_zeros(2, x.shape[1], 1, head_dim // 2, dtype=torch.float32)
            angles[0] = 1
            if count:
                angles[..., :count] = torch.cat(pair)[:, :, None, ::step][..., :count]
            # the pair is kept, so that no other one can get its id
            current.angles[key] = angles * factor**0.5, pair
        return current.angles[key][0]


class OwnAttention(Own):
    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return super().forward(*arguments, **options), None


class OtherMLP(nn.Module):
    """A module of transformers in place of an MLP, such as experts and their router."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # not as a submodule: it belongs to the model
        vars(self)["module"] = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x[None])[0]  # type: ignore[operator]


class OwnLayer(DecoderLayer):
    """The engine's own layer, made of existing parts."""

    def __init__(self, attention: Any, mlp: Any, norms: Any) -> None:
        nn.Module.__init__(self)
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp


class OwnDecoder(Decoder):
    """The engine's own decoder, made of existing layers.

    rope: for each position, the angles that transformers computes
    """

    def __init__(self, embed_tokens: Any, layers: list[Any], norm: nn.Module, rope: Any) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm: Any = norm
        self.rope = rope


class Rope:
    """Takes the place of a table of angles.

    module: returns cos and sin; given: its arguments and options, with positions
    """

    def __init__(self, module: Any, given: Any, own: Any) -> None:
        self.module = module
        self.given = given
        self.own = own

    def __getitem__(self, index: Any) -> Tensor:
        positions = index[1][None].long()
        arguments, options = tree_map(
            lambda each: each if not torch.is_tensor(each) or each.is_floating_point()
            else positions, self.given)
        current.angles = {}
        pair = self.module(*arguments, **options)
        angles = self.own.angles(pair, pair[0])
        return angles if len(index) == 3 else angles[:, :, 0]


def own_attentions(inputs: Inputs, calls: list[Any], longest: int, dtype: torch.dtype) -> Others:
    """Returns the replacements of attention modules. Their calls get linears and norms.

    inputs: see `given_inputs`; longest: the most tokens of a sequence
    """
    others: Others = {}
    owners = [call.recorded.owner() for call in calls]
    for call, owner in zip(calls, owners):
        if call.can_be_own and owners.count(owner) == 1 == len(inputs[owner]):
            same = (other for other in candidates(call, owner, inputs, dtype)
                    if is_same(other, owner, inputs[owner][0], longest, dtype))
            if found := next(same, None):
                others[owner] = found
    return others


def own_decoder(model: Any, inputs: Inputs, others: Others, longest: int, dtype: Any) -> Any:
    """Returns the replacement of all modules that compute hidden states, or None.

    others: the replacements of modules, with attention and norms
    """
    layers = layers_of(model.layers, inputs)
    found = [own_layer(layer, inputs, others, longest, dtype) for layer in layers]
    norms = [others[each] for each in model.layers.children() if type(others.get(each)) is RMSNorm]
    given_ids = inputs[model.embed_tokens]
    if not found or None in found or len(norms) != 1 or len(given_ids) != 1:
        return None
    states = [states_and_angles(*inputs[layer][0]) for layer in layers]
    [x], pairs = states[0]
    # all are rotated by the same angles
    is_same_turn = len({(own.turned, *map(id, each)) for own, (_, each) in zip(found, states)}) == 1
    if not pairs or not is_same_turn or not torch.equal(model.embed_tokens(*given_ids[0][0]), x):
        return None
    for module, [given, *_] in inputs.items():
        out = None if [*module.parameters()] else module(*given[0], **given[1])
        if isinstance(out, tuple) and len(out) == 2 and all(map(torch.equal, out, pairs[0])):
            return OwnDecoder(model.embed_tokens, [own.part for own in found], norms[0],
                              Rope(module, given, found[0]))
    return None


def own_layer(layer: Any, inputs: Inputs, others: Others, longest: int, dtype: Any) -> Any:
    parts: Any = [others.get(each) for each in layer.children()]
    kinds: Any = OwnAttention, GatedMLP, RMSNorm
    attention, mlps, norms = ([each for each in parts if isinstance(each, kind)] for kind in kinds)
    rest = [each for each, other in zip(layer.children(), parts) if other is None]
    is_other = not mlps and [len(only_tensors(inputs[each])) for each in rest] == [1]
    mlps = [OtherMLP(rest[0])] if is_other else mlps
    if (len(attention), len(mlps), len(norms)) != (1, 1, 2):
        return None
    own: Any = attention[0]
    given = own.call, own.turned[0], own.turned[1], own.order
    same = (Own(OwnLayer(own.call, mlps[0], each), *given) for each in permutations(norms))
    try:
        with reversing(rest if is_other else []):
            return next((each for each in same
                         if is_same(each, layer, inputs[layer][0], longest, dtype)), None)
    except (TypeError, ValueError):
        # the layer needs more from its MLP than hidden states
        return None


# ------------------------------------------------------------------------------ candidates


def candidates(call: Any, owner: Any, inputs: Inputs, dtype: torch.dtype) -> Iterator[Any]:
    """Yields replacements that may compute the same as `owner`, after giving the call their linears
    and norms."""
    states, pairs = states_and_angles(*inputs[owner][0])
    if len(states) != 1 or len(pairs) > 1:
        return
    linears = [each for each in owner.modules() if is_linear(each) and inputs[each]]
    first = [each for each in linears if inputs[each][0][0][0] is states[0]]
    outer = [each for each in linears if each not in first]
    sizes = [heads * call.head_dim for heads in call.num_heads]
    if [each.in_features for each in outer] != sizes[:1]:
        return
    norms = [known_part(each, inputs[each], dtype) for each in owner.children()]
    norms = [each for each in norms if isinstance(each, RMSNorm)
             and len(each.weight) == call.head_dim] or [nn.Identity(), nn.Identity()]
    turns = [(*turned_by(cos), order) for cos, _ in pairs if cos.shape[:2] == states[0].shape[:2]
             for order in orders(turned_by(cos)[0], call.head_dim)]
    turns.append((0, 1, torch.arange(call.head_dim)))
    nothing = call.qkv_proj
    is_packed = any(map(is_quantized, first))
    for (count, step, order), (each, rows), two in product(
            turns, arrangements(first, sizes, call.head_dim), permutations(norms, 2)):
        *turned, values = rows.split(sizes)
        turned = [part.view(-1, len(order))[:, order].flatten() for part in turned]
        rows = torch.cat((*turned, values))
        # packed rows cannot be reordered
        is_fit = not is_packed or torch.equal(rows, rows.sort()[0])
        fused = side_by_side(each) if is_fit else None
        if not fused:
            continue
        call.qkv_proj = reordered(fused, rows)
        call.q_norm, call.k_norm = (reordered(copy.deepcopy(norm), order) for norm in two)
        call.o_proj = outer[0]
        yield OwnAttention(call, call, count, step, order)
    call.qkv_proj = call.q_norm = call.k_norm = call.o_proj = nothing


def orders(count: int, head_dim: int) -> Iterator[Tensor]:
    """Yields orders of the numbers of a head in which the rotated pairs come first in the two
    halves. The module's pairs are the halves of its rotated part, or neighbours."""
    numbers = torch.arange(head_dim)
    rest = numbers[2 * count:].view(2, -1)
    for pairs in (numbers[:2 * count].view(2, -1), numbers[:2 * count].view(-1, 2).T):
        yield torch.cat((pairs, rest), dim=1).flatten()


def arrangements(linears: list[Any], sizes: list[int],
                 head_dim: int) -> Iterator[tuple[Any, Tensor]]:
    """Yields linears, and the order of their outputs: queries, keys and values."""
    rows = torch.arange(sum(sizes))
    for each in permutations(linears):
        if [linear.out_features for linear in each] in (sizes, [len(rows)]):
            yield each, rows
    if len(linears) == 1 and linears[0].out_features == len(rows):
        # for each head of keys: its queries, the key and the value
        queries, *others = rows.view(sizes[1] // head_dim, -1, head_dim).split(
            [sizes[0] // sizes[1], 1, 1], dim=1)
        yield linears, torch.cat([part.flatten() for part in (queries, *others)])


def reordered(module: nn.Module, rows: Tensor) -> Any:
    """Reorders the parameters of a module."""
    for name, each in [*module.named_parameters()]:
        if not torch.equal(rows, rows.sort()[0]):
            setattr(module, name, nn.Parameter(each[rows.to(each.device)], False))
    return module
