"""Checks whether a transformers model gives the same results in the engine's steps as alone.

    record   runs a few tokens, and notes each call of the attention function; refuses what
             attention over a paged cache cannot do, and models that count their tokens
    compare  runs two prompts in chunks and decodes, side by side, and compares all logits with
             those of transformers alone: in float32, in which right models differ by 1e-6 and wrong
             ones by 5e-3 or more; and then as the engine runs it, in its dtype and with its
             kernels. A few layers of each kind run: see watching.py

The compared model has its faster modules (modules.py), unless they make it differ. A model that
computes something else is refused, and never runs.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from nanoengine.attention import backends, make_caches
from nanoengine.errors import logger
from nanoengine.features import extension, is_installed, part
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import StepInputs
from nanoengine_extras.models.transformers_models.calls import (
    Call, Mask, NotComputed, OtherCall, Recorded, eager_of)
from nanoengine_extras.models.transformers_models.modules import (
    Inputs, Others, exchange, fast_modules, given_inputs, layers_of, optimize_modules)
from nanoengine_extras.models.transformers_models.trial import InFloat32
from nanoengine_extras.models.transformers_models.watching import (
    LikeLast, Watch, choose, noted_waits, only)

# options of a call that change nothing: it is still causal attention in a window
PLAIN = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions",
         "output_router_logits", "cache_position", "position_embeddings"}
# options that change it, and that a kernel supports
SOFT = {"softcap", "s_aux"}
# how much logits may differ, relative to their norm: in float32, and in the engine's dtype
MOST_IN_FLOAT32, MOST = 1e-3, 0.5
# functions that choose experts
CHOOSING = {"topk", "argmax"}
# how many tokens are recorded; a number that is unlikely to be any size of a model
NUM_RECORDED = 19
# the chunks of each step: (prompt, its first token, after its last token); the last one decodes
STEPS = [(0, 0, 4)], [(0, 4, 9), (1, 0, 8)], [(0, 9, 10), (1, 8, 10)], [(0, 10, 11), (1, 10, 11)]


# --------------------------------------------------------------------------------- recording


def record(model: Any, token_ids: Tensor, longest: int, log: list[Any]) -> list[Recorded]:
    """Returns the calls of the attention function in a step of these tokens.

    longest: the most tokens of a sequence; log: collects the calls of functions, with their numbers
    """
    calls: list[Recorded] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
               scaling: float | None = None, **options: Any) -> Tensor:
        if options.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise NotComputed("it has attention that is not causal")
        if query.shape[2] != key.shape[2] or not isinstance(attention_mask, Mask):
            raise NotComputed("its attention does not cover all tokens so far, or has its own mask")
        mask = attention_mask.function
        window, is_window = window_of(mask, longest, token_ids.device)
        is_plain = all(options[name] is None for name in options.keys() - PLAIN - SOFT)
        scale = query.shape[3]**-0.5 if scaling is None else scaling
        sinks = options.get("s_aux")
        sinks = None if sinks is None else sinks.detach().float()
        call = Recorded(query.shape, key.shape, value.shape, scale, mask, window,
                        options.get("softcap"), sinks, is_window and is_plain, weakref.ref(module))
        is_known = call.is_plain and is_computed(call, module, options, query.device)
        calls.append(call._replace(is_plain=is_known))
        log.append(calls[-1]._replace(sinks=None, owner=None))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    positions = torch.arange(len(token_ids), device=token_ids.device)
    with Watch(len(token_ids), log) as watch:
        model.compute(token_ids, positions, attend)
    if not calls:
        raise NotComputed("it does not let a library compute its attention")
    if watch.has_counted:
        raise NotComputed("it counts positions by itself")
    return calls


def is_computed(call: Recorded, module: Any, options: dict[str, Any],
                device: torch.device) -> bool:
    """Tests with random keys whether a soft cap and sinks mean what `Recorded` says."""
    if call.soft_cap is None and call.sinks is None:
        return True
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
                         for shape in call[:3])
    # small scores for sinks, large ones for soft caps
    query *= torch.linspace(0, 50, query.shape[2], device=device)[:, None]
    # of all keys
    unmasked = query.new_zeros(1, 1, query.shape[2], query.shape[2])
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * call.scale
    if call.soft_cap is not None:
        scores = (scores / call.soft_cap).tanh() * call.soft_cap
    total = scores.logsumexp(3, keepdim=True)
    if call.sinks is not None:
        total = total.logaddexp(call.sinks[:, None, None])
    weights = (scores - total).exp()
    expected = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    with InFloat32():
        out, _ = eager_of(module)(
            module, query, key, value, unmasked, scaling=call.scale, **options)
    return torch.allclose(out.transpose(1, 2), expected, rtol=1e-3, atol=1e-3)


@lru_cache(maxsize=4)
def window_of(mask: Callable, length: int,
              device: torch.device | str = "cpu") -> tuple[int | None, bool]:
    """Returns the window of a mask, None for all keys, and whether the mask is just this window."""
    keys = torch.arange(length, device=device)

    def seen(query: int) -> Tensor:
        with LikeLast():
            return mask(0, 0, keys[query, None, None], keys[None]).expand(1, length)[0]

    window = int(seen(length - 1).sum())
    queries = {0, window - 1, window, 2 * window + 1, length // 3, length - 1}
    is_window = all(torch.equal(seen(query), (keys <= query) & (keys > query - window))
                    for query in queries if query < length)
    return None if window == length else window, is_window


# ---------------------------------------------------------------------------------- checking


def check_model(runner: Any, model: Any, causal: Any) -> None:
    """Gives a model its calls and fast products. Raises NotComputed if its results are not right.

    causal: transformers' model with its head
    """
    described = runner.model_config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(described.vocab_size, (2, 11), generator=generator).to(runner.device)
    causal.set_attn_implementation("nanoengine")
    longest = described.max_position_embeddings
    log: list[Any] = []
    with given_inputs(model.layers, log) as inputs:
        calls = record(model, ids.flatten()[:NUM_RECORDED], longest, log)
    has_experts = any(each[0] in CHOOSING for each in log)
    few = choose(layers_of(model.layers, inputs), inputs, [call.owner() for call in calls])
    causal.set_attn_implementation("eager")
    with only(model, *few), InFloat32():
        wanted = causal(input_ids=ids, use_cache=False).logits
    causal.set_attn_implementation("nanoengine")
    check_windows(model, calls, longest)
    kv_heads = math.lcm(*(call.key[1] for call in calls))
    head_dim = max(max(call.key[3], call.value[3]) for call in calls)
    # the kernel for a CPU needs an even number
    head_dim += head_dim % 2
    vars(described).update(
        num_hidden_layers=len(calls), num_key_value_heads=kv_heads, head_dim=head_dim)
    for is_fast in (True, False):
        model.calls = nn.ModuleList(
            (Call if call.is_plain else OtherCall)(call, kv_heads, head_dim) for call in calls)
        model.stack = None
        others: Others = {}
        try:
            if is_fast:
                find_fast(runner, model, inputs, others, longest)
            exchange(causal, others)
            with only(model, *few), InFloat32():
                compare(runner, model, ids, wanted, "gather", torch.float32, MOST_IN_FLOAT32)
            break
        except Exception as error:
            if not is_fast:
                raise
            logger.info(f"transformers' own modules stay, since with others: {error}")
            exchange(causal, {new: old for old, new in others.items()})
    # frees their memory
    inputs.clear()
    others.clear()
    optimize_modules(causal, runner)
    backend = runner.backend
    # the runner makes the same choice afterwards
    is_in_model = backends()[backend].is_in_model
    if is_in_model and not runner.kernels.knows_attention(model):
        backend, is_in_model = "gather", False
    if runner.kernels:
        runner.kernels.optimize(model, has_attention=is_in_model)
    with only(model, *few):
        make = part("make_caches", runner.config, make_caches)
        token_bytes = compare(
            runner, model, ids, wanted, backend, runner.dtype, MOST, has_experts, make)
    for place in model.waits[:1]:
        logger.info(f"there are no CUDA graphs, since the host waits for the GPU at {place}")
    logger.info(
        f"transformers computes the model: a token takes {token_bytes} bytes of the KV cache, "
        f"{kv_heads} heads of {head_dim} in each of {len(calls)} calls")


def find_fast(runner: Any, model: Any, inputs: Inputs, others: Others, longest: int) -> None:
    """Adds the replacements of modules."""
    if is_installed("models.experts") and hasattr(runner.kernels, "empty_cache"):
        experts = extension("models.experts")
        others |= {each: experts.build(each) for each in inputs if experts.kind_of(each)}
    own = extension("models.own_layers") if is_installed("models.own_layers") else None
    if own:
        others |= own.own_attentions(inputs, [*model.calls], longest, runner.dtype)
    fast_modules(inputs, runner.dtype, others)
    if own:
        model.stack = own.own_decoder(model, inputs, others, longest, runner.dtype)


def check_windows(model: Any, calls: list[Recorded], longest: int) -> None:
    """Raises NotComputed if transformers' own cache keeps fewer keys than its layers see: then
    `generate` and a forward give different tokens, as in Moshi."""
    windows = {call.window if call.is_plain else longest for call in calls}
    for layer in DynamicCache(config=model.layers.config).layers:
        window = getattr(layer, "sliding_window", longest)
        if window < longest and window not in windows and longest not in windows:
            raise NotComputed(f"transformers contradicts itself: its cache keeps {window} tokens, "
                              "its attention sees all")


def difference(logits: Tensor, right: Tensor) -> Tensor:
    """Returns how much each row differs, relative to its norm."""
    # embeddings of zeros can give logits of zeros
    return (logits - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)


def compare(runner: Any, model: Any, ids: Tensor, wanted: Tensor, backend: str,
            dtype: torch.dtype, most: float, has_experts: bool = False,
            make: Callable = make_caches) -> int:
    """Runs two prompts in STEPS, and compares their logits. Returns the bytes of a token's K and V.

    ids: (2, tokens); wanted: their logits, (2, tokens, vocab_size)
    most: by how much the logits of a step may differ, relative to their norm
    has_experts: some tokens may get other experts than with `wanted`: it is enough if the logits of
        half of each prompt's tokens do not differ
    make: makes the KV cache
    """
    errors: dict[Any, list[float]] = defaultdict(list)
    size = runner.config.block_size
    length = ids.shape[1]
    num_blocks = 2 * -(-length // size)
    chosen = backends()[backend]
    caches = make(runner.config, runner.model_config, num_blocks + 1, dtype, chosen)
    model.bind(torch.empty(2, length, device=runner.device), caches, chosen.attend)
    seqs = [Sequence("", row, length, length) for row in ids.tolist()]
    for number, seq in enumerate(seqs):
        # the two sequences take blocks in turn, from the last block backwards
        seq.block_table.extend(range(num_blocks - number, 0, -2))
    for number, parts in enumerate(STEPS):
        which, starts, stops = zip(*parts)
        rows = [Row(row, seqs[i], place + 1) for row, (i, start, stop) in enumerate(parts)
                for place in range(start, stop)]
        batch = Batch(sequences=[seqs[i] for i in which], starts=[*starts], sampled=rows,
                      num_tokens=[stop - start for _, start, stop in parts])
        buffer, shape = runner.prepare(batch)
        step = StepInputs.from_buffer(buffer.to(runner.device), shape)
        with noted_waits(runner.device) as model.waits:
            hidden = model(step.token_ids, step)
        logits = model.lm_head(hidden).float()
        right = torch.cat([wanted[i, start:stop] for i, start, stop in parts])
        if has_experts:
            for row, error in zip(rows, difference(logits, right).tolist()):
                errors[row.seq].append(error)
        else:
            errors[number] = [float(difference(logits.flatten(), right.flatten()))]
    for found in errors.values():
        wrong = [error for error in found if not error < most]
        if 2 * len(wrong) > len(found):
            raise NotComputed(
                f"its logits in a step differ from those of transformers by {wrong[0]:.2g}")
    return caches.nbytes // ((num_blocks + 1) * size)
