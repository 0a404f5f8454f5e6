"""Strict types for a user's options, vLLM's shorthands, and errors that name the nearest keyword.

The dataclasses of options use it as a decorator: see options.py. A broken rule is a ValueError that
names the argument, the value and what is accepted. The rules use pydantic.
"""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import wraps
from inspect import getdoc, signature
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import ValidationError

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

# ---------------------------------------------------------------------------------- types

# vLLM's shorthands: one text means a list of it, None an empty list
AS_LIST = BeforeValidator(lambda v: [] if v is None else [v] if isinstance(v, str) else v)
DISTINCT = AfterValidator(lambda v: [*dict.fromkeys(v)])
# numbers of NumPy, and of PyTorch, count as Python's
NUMPY = BeforeValidator(lambda v: v.item() if getattr(v, "ndim", None) == 0 else v)
Int = Annotated[int, NUMPY]
Float = Annotated[float, NUMPY, Field(allow_inf_nan=False)]
# 0, or between 1e-18 and 1e18 in size: no product or sum with a logit then leaves float32
Moderate = Annotated[
    Float, AfterValidator(lambda v: v and math.copysign(min(max(abs(v), 1e-18), 1e18), v))]
Count = Annotated[Int, Field(ge=1)]
Size = Annotated[Int, Field(ge=1, lt=2**31)]
TokenId = Annotated[Int, Field(ge=0)]
NumLogprobs = Annotated[Int, BeforeValidator(lambda v: 1 if v is True else v), Field(ge=-1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], AS_LIST, DISTINCT]
Folder = Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)]

# By the name of a field, which means the same in each class. Others have the type that is declared.
RULES: dict[str, Any] = {
    "n": Annotated[Count, Field(le=16384)],
    "temperature": Annotated[Moderate, Field(ge=0)],
    "top_k": Annotated[Int, Field(ge=-1, lt=2**31)],
    "top_p": Annotated[Float, Field(gt=0, le=1)],
    "min_p": Annotated[Float, Field(ge=0, le=1)],
    "min_tokens": Int,
    "stop": Texts,
    "stop_token_ids": Annotated[list[TokenId], AS_LIST, DISTINCT],
    "logprobs": NumLogprobs | None,
    "prompt_logprobs": NumLogprobs | None,
    "presence_penalty": Annotated[Float, Field(ge=-2, le=2)],
    "frequency_penalty": Annotated[Float, Field(ge=-2, le=2)],
    "repetition_penalty": Annotated[Moderate, Field(gt=0)],
    "bad_words": Texts,
    "allowed_token_ids": Annotated[list[TokenId], Field(min_length=1)] | None,
    "logit_bias": dict[TokenId, Moderate] | None,
    "logits_processors": Annotated[list[Callable], AS_LIST],
    "model": Folder,
    "tokenizer": Folder | None,
    "download_dir": Folder | None,
    "dtype": Annotated[Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
                       BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))],
    "device": Literal["auto", "cpu", "cuda"],
    "load_format": Literal["auto", "safetensors", "hf", "dummy"],
    "max_model_len": Annotated[Annotated[Int, Field(ge=2)] | None,
                               BeforeValidator(lambda v: None if v == -1 else v)],
    "max_num_seqs": Size | None,
    "max_num_batched_tokens": Size | None,
    "block_size": Size | None,
    "num_kv_blocks": Size | None,
    "gpu_memory_utilization": Annotated[Float, Field(gt=0, le=1)],
    "cpu_offload_gb": Annotated[Float, Field(ge=0)],
    "tensor_parallel_size": Count,
    "run_ahead": bool | None,
    "scheduling_policy": Literal["fcfs", "priority"],
    "preemption_mode": Literal["recompute", "swap"],
    "swap_space": Annotated[Float, Field(ge=0)],
    "beam_width": Count,
    "length_penalty": Annotated[Moderate, Field(ge=-40, le=40)]}
# those that differ between the classes
OWN_RULES: dict[str, Any] = {
    "SamplingParams": {
        "max_tokens": Count | None,
        "seed": Annotated[Int | None, AfterValidator(lambda v: None if v == -1 else v)]},
    "EngineConfig": {"seed": Annotated[Int, BeforeValidator(lambda v: 0 if v is None else v)]},
    "BeamSearchParams": {"max_tokens": Count}}


def strict(kind: Any) -> Any:
    """Decorates a dataclass: its arguments are checked, and what is assigned to it later."""
    rules = RULES | OWN_RULES[kind.__name__]
    checked: Any = {
        each.name: (rules.get(each.name, each.type),
                    ... if each.default is each.default_factory is MISSING else None)
        for each in fields(kind)}
    rule = create_model(kind.__name__, __config__=STRICT, **checked).__pydantic_validator__
    known = signature(kind)
    initialize = kind.__init__

    @wraps(initialize)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        given = known.bind_partial(*arguments).arguments | options
        try:
            values = rule.validate_python(given)
        except ValidationError as error:
            found = "; ".join(explain(each, [*known.parameters]) for each in error.errors())
            raise ValueError(found) from None
        initialize(self, **{name: getattr(values, name) for name in given})

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # during __init__ some fields are missing; after it, the rules over two fields count as well
        if vars(self).keys() >= set(checked):
            others = {each: vars(self)[each] for each in checked}
            value = getattr(kind(**others | {name: value}), name)
        object.__setattr__(self, name, value)

    kind.__init__ = __init__
    # for help(); python -OO leaves it out
    if kind.__doc__ and kind.__base__ is not object:
        kind.__doc__ = f"{getdoc(kind)}\n\nThose of the engine:\n\n{getdoc(kind.__base__)}"
    if not kind.__dataclass_params__.frozen:
        kind.__setattr__ = __setattr__
    return kind


# --------------------------------------------------------------------------------- errors


def not_known(name: str, known: list[str]) -> str:
    """Returns the message for an unknown keyword: it names the nearest known one, or all."""
    near = get_close_matches(name, known, 1)
    return f"{name} is not known: " + (
        f"the nearest is {near[0]}" if near else f"it can be {known}")


def explain(found: Any, known: list[str]) -> str:
    """Describes a mistake in the arguments of a dataclass, in the style of `rejected`."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        return not_known(name, known)
    if found["type"] == "missing":
        return f"{name} is missing"
    _, should, rest = found["msg"].partition(" should ")
    message = f"it must {rest}" if should else found["msg"].removeprefix("Value error, ")
    return f"{name}={found['input']!r:.1000} is not accepted: {message}" if name else message


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Turns an error that a library or a user's function raises for some input into a ValueError
    that names the input. The first error is its cause. What the handler of a signal raises, such as
    a time limit, is not about the input."""
    try:
        yield
    except Exception as error:
        if is_from_signal(error):
            raise
        raise ValueError(f"{what}: {str(error) or repr(error)}") from error


def is_from_signal(error: BaseException | None) -> bool:
    """Whether an error, or the one that caused it, was raised by a Python handler of a signal."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(each, "func", each) for each in handlers if callable(each)]
    codes = {getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None)
             for each in functions} - {None}
    while error:
        if any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False
