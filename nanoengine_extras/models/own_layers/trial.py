"""Tests whether a module computes the same as one of transformers: both get random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nanoengine_extras.models.transformers_models.modules import InFloat32, are_close, current


def states_and_angles(arguments: Any, options: Any) -> tuple[list[Tensor], list[tuple]]:
    """Returns the hidden states, and the pairs of cos and sin, that a module gets."""
    values = *arguments, *options.values()
    states = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    return states, [each for each in values if isinstance(each, tuple) and len(each) == 2]


def turned_by(cos: Tensor) -> tuple[int, int]:
    """How many angles `cos` has, and the distance to the next one: each can occur twice."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., ::2], cos[..., 1::2]):
        return half, 2
    return (half if torch.equal(cos[..., :half], cos[..., half:]) else cos.shape[-1]), 1


@contextmanager
def reversing(modules: list[Any]) -> Iterator[None]:
    """Makes modules reverse the numbers of each token, and do nothing else. With different
    rounding, a token could get other experts."""
    for module in modules:
        module.forward = lambda x: x.flip(-1)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def is_same(other: Any, owner: nn.Module, given: Any, longest: int, dtype: torch.dtype) -> bool:
    """Whether a module computes the same as another one.

    given: arguments and options. Random ones are used in their place: hidden states are small and
        large; positions are below `longest`
    """
    generator = torch.Generator().manual_seed(0)
    states, _ = states_and_angles(*given)

    def random(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return torch.randint_like(value, longest)
        numbers = torch.randn(value.shape, generator=generator).to(value)
        if value is states[0]:
            return numbers * torch.logspace(-3, 3, value.shape[1]).to(value)[:, None]
        count, step = turned_by(value)
        places = torch.arange(value.shape[-1], device=value.device)
        return numbers[..., places // step % count * step]

    given = tree_map(random, given)
    heads, head_dim = other.call.num_heads[0], other.call.head_dim
    attended = torch.randn(states[0].shape[1], heads, head_dim, generator=generator)
    for kind in (torch.float32, dtype):
        right, found = (computed(module, other.call, given, attended, kind)
                        for module in (owner, other))
        scaled = [each[..., other.order] * other.call.factor**0.5 for each in right[:2]]
        if len(right) != 4 or not all(map(are_close, [*scaled, *right[2:]], found, [kind] * 4)):
            return False
    return True


def computed(module: nn.Module, call: Any, given: Any, attended: Tensor,
             dtype: torch.dtype) -> list[Tensor]:
    """Returns queries, keys and values of a module, (T, heads, head_dim), and its output; nothing
    if its result has another form. attended: what attention returns"""
    states: list[Tensor] = []
    x = states_and_angles(*given)[0][0]
    attended = attended.to(x.device, dtype)

    def attend(owner: Any, *arguments: Any, **options: Any) -> Tensor:
        states.extend(each[0].transpose(0, 1) for each in arguments[:3])
        return attended[None]

    def backend(query: Tensor, cache: Tensor, *others: Any) -> Tensor:
        states.extend((query, *cache.flatten(1, 2)))
        return attended

    call.backend = backend
    call.cache = attended.new_zeros(2, len(attended), 1, call.num_heads[1], call.head_dim)
    current.attend, current.angles = attend, {}
    current.step = SimpleNamespace(slot_mapping=torch.arange(len(attended), device=x.device))
    arguments, options = tree_map(lambda each: each.to(dtype) if each is x else each, given)
    with InFloat32() if dtype == torch.float32 else nullcontext():
        out = module(*arguments, **options)
    outs = out if isinstance(out, tuple) else (out,)
    return [*states, outs[0][0]] if outs[1:] in ((), (None,)) else []
