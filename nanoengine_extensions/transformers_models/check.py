"""Whether a model of transformers computes the same in the engine's steps as by itself.

    record   runs a few tokens, and notes the shape of each call of the attention function; refuses
             what attention over a paged cache cannot do, and models that count their tokens
    check    runs two prompts in chunks and decodes, side by side, and compares all logits with
             those of transformers alone: in float32, in which right models differ by 1e-6 and wrong
             ones by 5e-3 or more; and then as the engine runs it, in its dtype and with its kernels

What is computed in another way is refused, and never run.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from nanoengine.attention import BACKENDS, make_caches
from nanoengine.batch import Batch, Row
from nanoengine.checks import rejected
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import StepInputs, StepShape, step_arrays, to_buffer

# options of a call that say what the mask, the module or the shapes say already
KNOWN = {"dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
         "output_attentions", "output_router_logits", "cache_position", "position_embeddings"}
# functions that count, and functions that only move rows of their first argument
COUNTING = {"arange", "cumsum"}
MOVING = {"__getitem__", "__setitem__", "index_select", "gather", "index_add", "index_add_"}
# by how much logits may differ, relative to their norm: in float32, and in the engine's dtype, in
# which an expert of a right model can be another one
MOST_IN_FLOAT32, MOST = 1e-3, 0.5
# the checked chunks of each step: (sequence, its first token, after its last token)
STEPS = ([(0, 0, 4)], [(0, 4, 7), (1, 0, 9)], [(0, 7, 8), (1, 9, 11)], [(0, 8, 11)])


class NotComputed(ValueError):
    """Why a model is refused."""


class Mask:
    """In place of a mask, a call gets transformers' function of the places of a query and a key."""

    def __init__(self, mask_function: Callable, **options: Any) -> None:
        self.function = mask_function

    # eager models cut their masks to the number of keys
    def __getitem__(self, index: Any) -> "Mask":
        return self


@dataclass(frozen=True)
class CallShape:
    """What is the same in all steps for a call of the attention function.

    scale: of the scores. softcap, sinks: as in Gemma 2 and in gpt-oss, or None.
    mask: a function of queries' and keys' positions; None if it is a window.
    window: how many keys a query sees; None for all.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    sinks: Tensor | None
    mask: Callable | None
    window: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.mask is None


# --------------------------------------------------------------------------------- recording


def record(model: Any, token_ids: Tensor) -> list[CallShape]:
    """Returns the shape of each call of the attention function in a step of these tokens."""
    shapes = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor,
               attention_mask: Any, scaling: float | None = None, **options: Any) -> Tensor:
        others = [name for name in options.keys() - KNOWN if options[name] is not None]
        if others:
            raise NotComputed(f"its attention has {others}")
        if options.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise NotComputed("it has attention that is not causal")
        if query.shape[2] != key.shape[2] or not isinstance(attention_mask, Mask):
            raise NotComputed("its attention is not over the tokens so far, or has a mask of its own")
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        shapes.append(CallShape(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], scale,
            options.get("softcap"), options.get("s_aux"), attention_mask.function))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    positions = torch.arange(len(token_ids), device=token_ids.device)
    with Watch(len(token_ids)):
        model.compute(token_ids, positions, attend)
    if not shapes:
        raise NotComputed("it does not use the attention interface of transformers")
    return shapes


class Watch(TorchFunctionMode):
    """Refuses a model that counts its tokens: it would take their places in a step for positions.

    No check of a few tokens finds that in Llama 4, where it matters from position 8,192 on. Counts
    may be indices of rows of the step, as where tokens are sorted by their experts. They must not
    become numbers of a computation, or indices of a table of positions.

    num_tokens: of the step; no other size of the model should be the same.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.counts: list[Tensor] = []

    def is_count(self, value: Any) -> bool:
        return any(value is each for each in self.counts)

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if any(map(self.is_count, tree_leaves((args, kwargs)))):
            # what is written to has counts, too
            written = args[0] if name.startswith("__set") else result
            self.follow(name, args[0], written)
        elif name in COUNTING and result.shape[-1:] == (self.num_tokens,):
            self.counts.append(result)
        return result

    def follow(self, name: str, table: Any, written: Any) -> None:
        """Keeps integers that counts became; refuses numbers of a computation."""
        is_step = isinstance(table, Tensor) and table.shape[:1] == (self.num_tokens,)
        moves_rows = name in MOVING and is_step and not self.is_count(table)
        for each in tree_leaves(written):
            if isinstance(each, Tensor) and not each.is_floating_point():
                self.counts.append(each)
            elif isinstance(each, Tensor) and not moves_rows:
                raise NotComputed("it counts positions by itself")


def window_of(mask: Callable, length: int) -> tuple[int | None, bool]:
    """Returns the window of a mask, None for all keys, and whether it is no other mask."""
    keys = torch.arange(length)

    def seen(query: int) -> Tensor:
        return mask(0, 0, torch.tensor([[query]]), keys[None]).expand(1, length)[0]

    window = int(seen(length - 1).sum())
    queries = {0, window - 1, window, 2 * window + 1, length // 3, length - 1}
    is_window = all(torch.equal(seen(query), (keys <= query) & (keys > query - window))
                    for query in queries if query < length)
    return None if window == length else window, is_window


# ---------------------------------------------------------------------------------- checking


def fit_and_check(runner: Any, model: Any, causal: Any, plain: type, other: type) -> None:
    """Gives a model its calls, makes it fast, and checks it.

    causal: transformers' model with its head; plain, other: the classes of calls.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(runner.model_config.vocab_size, (2, 11), generator=generator)
    ids = ids.to(runner.device)
    with in_float32(causal):
        wanted = causal(input_ids=ids, use_cache=False).logits
        causal.set_attn_implementation("nanoengine")
        if model.layers.config._attn_implementation != "nanoengine":
            raise NotComputed("it does not use the attention interface of transformers")
        # no other size of a model is likely to be 19
        shapes = record(model, ids.flatten()[:19])
        fit(runner, model, shapes, plain, other)
        check(runner, model, ids, wanted, "gather", torch.float32, MOST_IN_FLOAT32)
    linears = [each for each in causal.modules() if type(each) is nn.Linear]
    runner.kernels.optimize(nn.ModuleList(linears), has_attention=False)
    runner.kernels.optimize(model, has_attention=BACKENDS[runner.backend].attend is None)
    check(runner, model, ids, wanted, runner.backend, runner.dtype, MOST)


def fit(runner: Any, model: Any, shapes: list[CallShape], plain: type, other: type) -> None:
    """Finds the shape of the cache, and a backend that can do all calls."""
    described = runner.model_config
    kv_heads = math.lcm(*(shape.kv_heads for shape in shapes))
    # the kernel for a CPU needs an even number
    head_dim = 2 * math.ceil(max(max(each.key_dim, each.value_dim) for each in shapes) / 2)
    vars(described).update(
        num_hidden_layers=len(shapes), num_key_value_heads=kv_heads, head_dim=head_dim)
    windows: dict[Any, Any] = {}
    for shape in shapes:
        if shape.mask not in windows:
            windows[shape.mask] = window_of(shape.mask, described.max_position_embeddings)
        window, is_window = windows[shape.mask]
        shape = replace(shape, window=window, mask=None if is_window else shape.mask)
        kind = plain if shape.is_plain else other
        model.calls.append(kind(shape, kv_heads, head_dim))
    check_windows(model, described.max_position_embeddings)
    if not all(call.shape.is_plain for call in model.calls) and runner.backend != "gather":
        if runner.config.attention_backend != "auto":
            raise rejected("attention_backend", runner.backend, "'gather' or 'auto' for a model "
                           "with soft caps, sinks, or masks that are no windows")
        logging.getLogger("nanoengine").warning(
            "attention is slow: it has soft caps, sinks, or masks that are no windows")
        runner.backend = "gather"


def check_windows(model: Any, longest: int) -> None:
    """Raises NotComputed if transformers' own cache keeps fewer keys than its layers attend to: then
    `generate` and a forward without a cache give different tokens, as in Moshi."""
    windows = {call.window for call in model.calls}
    for layer in DynamicCache(config=model.layers.config).layers:
        window = getattr(layer, "sliding_window", longest)
        if window < longest and window not in windows and all(c.shape.is_plain for c in model.calls):
            raise NotComputed(f"transformers contradicts itself: its cache has a window of {window} "
                              "tokens, its attention has none")


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Lets each module compute in float32: its weights are converted before it computes, and put
    back after it."""
    saved: dict[nn.Module, Any] = {}

    def widen(module: Any, *_: Any) -> None:
        saved[module] = {**module._parameters}
        module._parameters = {
            name: each if each is None else nn.Parameter(each.float(), requires_grad=False)
            for name, each in saved[module].items()}

    def restore(module: Any, *_: Any) -> None:
        module._parameters = saved.pop(module)

    narrow = [each for each in model.modules() if any(
        p.dtype in (torch.half, torch.bfloat16) for p in each.parameters(recurse=False))]
    hooks = [hook for each in narrow for hook in (
        each.register_forward_pre_hook(widen), each.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check(runner: Any, model: Any, ids: Tensor, wanted: Tensor, backend: str,
          dtype: torch.dtype, most: float) -> None:
    """Runs two prompts in STEPS, and compares their logits.

    ids: (2, tokens); wanted: their logits, (2, tokens, vocab_size)
    most: by how much logits may differ, relative to their norm
    """
    size = runner.config.block_size
    length = ids.shape[1]
    width = -(-length // size)
    caches = make_caches(runner.model_config, 2 * width + 1, size, dtype, runner.device, backend)
    model.bind(caches, caches, BACKENDS[backend].attend)
    seqs = [Sequence("", row, length, length) for row in ids.tolist()]
    for number, seq in enumerate(seqs):
        # the blocks of both, in turn, from the last one on
        seq.block_table.extend(range(2 * width - number, 0, -2))
    for parts in STEPS:
        which, starts, stops = zip(*parts)
        counts = [stop - start for _, start, stop in parts]
        rows = [Row(row, seqs[i], place + 1) for row, (i, start, stop) in enumerate(parts)
                for place in range(start, stop)]
        batch = Batch(sequences=[seqs[i] for i in which], starts=[*starts], num_tokens=counts,
                      sampled=rows)
        buffer, layout = to_buffer(step_arrays(batch, size, length), runner.device)
        num_decodes = [count > 1 for count in (*counts, 2)].index(True)
        shape = StepShape(layout, num_decodes, max(counts), length)
        step = StepInputs.from_buffer(buffer.to(runner.device), shape)
        logits = model.lm_head(model(step.token_ids, step)).float()
        right = torch.cat([wanted[i, start:stop] for i, start, stop in parts])
        error = float((logits - right).norm() / right.norm())
        if not error < most:
            raise NotComputed(
                f"its logits in a step differ from those of transformers by {error:.2g}")
