"""Strict checks of user input, and vLLM's shorthands. The rules use pydantic.

features.py calls it for `EngineConfig`, `SamplingParams` and `BeamSearchParams`, and
`InputProcessor` for the arguments of each call. A broken rule is a ValueError that names the
argument, the value and what is accepted.
"""

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Literal

import psutil
import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import ValidationError
from torch import Tensor

from nanoengine.features import (
    OBSERVERS, Condition, check, extension, is_installed, rejected)

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

# ---------------------------------------------------------------------------------- types

# vLLM's shorthands: a string means a list with this string, None an empty list; a tuple has an
# order, as a list
AS_LIST = BeforeValidator(
    lambda v: [] if v is None else [v] if isinstance(v, str) else [*v] if type(v) is tuple else v)
DISTINCT = AfterValidator(lambda v: [*dict.fromkeys(v)])
# NumPy's and PyTorch's numbers are accepted like Python's
NUMPY = BeforeValidator(lambda v: v.item() if getattr(v, "ndim", None) == 0 else v)
Int = Annotated[int, NUMPY]
Float = Annotated[float, NUMPY, Field(allow_inf_nan=False)]
# 0, or between 1e-18 and 1e18 in size: products and sums with a logit then fit into float32
Moderate = Annotated[
    Float, AfterValidator(lambda v: v and math.copysign(min(max(abs(v), 1e-18), 1e18), v))]
Count = Annotated[Int, Field(ge=1)]
Size = Annotated[Int, Field(ge=1, lt=2**31)]
TokenId = Annotated[Int, Field(ge=0)]
NumLogprobs = Annotated[Int, BeforeValidator(lambda v: 1 if v is True else v), Field(ge=-1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], AS_LIST, DISTINCT]
Folder = Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)]

# By the name of a field, which has one meaning in all classes. Others have their declared type.
RULES: dict[str, Any] = {
    "n": Count,
    "temperature": Annotated[Moderate, Field(ge=0)],
    "top_k": Annotated[Int, Field(ge=-1, lt=2**31)],
    "top_p": Annotated[Float, Field(gt=0, le=1)],
    "min_p": Annotated[Float, Field(ge=0, le=1)],
    "min_tokens": Int,
    "stop": Texts,
    # as in vLLM, tuples and sets are accepted where the order means nothing: strict=False
    "stop_token_ids": Annotated[list[TokenId], Field(strict=False), AS_LIST, DISTINCT],
    **dict.fromkeys(("logprobs", "prompt_logprobs"), NumLogprobs | None),
    "prompt_logprobs_start": Int,
    "truncate_prompt_tokens": Annotated[Int, Field(ge=-1)] | None,
    "presence_penalty": Annotated[Float, Field(ge=-2, le=2)],
    "frequency_penalty": Annotated[Float, Field(ge=-2, le=2)],
    "repetition_penalty": Annotated[Moderate, Field(gt=0)],
    "bad_words": Annotated[Texts, Field(strict=False)],
    "allowed_token_ids": Annotated[list[TokenId], Field(min_length=1, strict=False)] | None,
    # JSON has only texts as keys
    "logit_bias": dict[Annotated[TokenId, Field(strict=False)], Moderate] | None,
    "logits_processors": Annotated[list[Callable], AS_LIST],
    "model": Folder,
    "tokenizer": Folder | None,
    "download_dir": Folder | None,
    "dtype": Annotated[Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
                       BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))],
    "device": Literal["auto", "cpu", "cuda"],
    "load_format": Literal["auto", "safetensors", "hf", "dummy"],
    "model_impl": Literal["auto", "native", "transformers"],
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
    # these are checked where policies are found
    **dict.fromkeys(("scheduling", "scheduling_policy", "preemption_victim", "kv_allocation",
                     "speculation"), Any),
    "preemption_mode": Literal["recompute", "swap"],
    "swap_space": Annotated[Float, Field(ge=0)],
    "beam_width": Count,
    "length_penalty": Annotated[Moderate, Field(ge=-40, le=40)]}
# fields whose rules differ between the classes
OWN_RULES: dict[str, Any] = {
    "SamplingParams": {
        "max_tokens": Count | None,
        "seed": Annotated[Int | None, AfterValidator(lambda v: None if v == -1 else v)]},
    "EngineConfig": {"seed": Annotated[Int, BeforeValidator(lambda v: 0 if v is None else v)]},
    "BeamSearchParams": {"max_tokens": Count}}

# conditions on several options, as in `features.check`
CONDITIONS: dict[str, list[Condition]] = {
    "EngineConfig": [
        # an empty path would be the current folder
        ("model", lambda c: c.model != "", "a folder, a GGUF file or a Hugging Face id"),
        ("tokenizer", lambda c: c.tokenizer != "", "a folder, a Hugging Face id or None"),
        ("kernels", lambda c: c.kernels or c.attention_backend not in ("numba", "triton"),
         "True for attention_backend={attention_backend!r}"),
        ("features", lambda c: are_features(c.features),
         "a list of Feature objects, each of a different class")]}


def are_features(given: list[Any]) -> bool:
    """Whether these are features, each with a name other than those of the engine."""
    # imported here, since this module is imported while the options are defined
    from nanoengine.observers import Feature
    names = [type(each).__name__ for each in given]
    is_new = len({*names, *OBSERVERS.values()}) == len(names) + len(OBSERVERS)
    return is_new and all(isinstance(each, Feature) for each in given)


@cache
def rules_of(kind: Any) -> Any:
    """Returns the validator of a dataclass."""
    rules = RULES | OWN_RULES.get(kind.__name__, {})
    checked: Any = {each.name: (rules.get(each.name, each.type), ...) for each in fields(kind)}
    return create_model(kind.__name__, __config__=STRICT, **checked).__pydantic_validator__


def values_of(options: Any) -> dict[str, Any]:
    """Returns the values of a dataclass, checked, and with shorthands written out."""
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    try:
        values = rules_of(options.__class__).validate_python(given)
    except ValidationError as error:
        raise ValueError("; ".join(explain(each) for each in error.errors())) from None
    return {name: getattr(values, name) for name in given}


def checked_options(kind: Any) -> Any:
    """Decorates a dataclass: unknown and missing keywords are ValueErrors, which name the nearest
    known one. Types are checked, and shorthands written out, before `__post_init__`. A value
    that is assigned later is checked like an argument."""
    known = [each.name for each in fields(kind)]
    needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    complete = {*known}
    initialize = kind.__init__
    complete_it = getattr(kind, "__post_init__", lambda self: None)

    def refuse_unknown(names: Iterable[str]) -> None:
        for name in names:
            near = [f"the nearest is {each}" for each in get_close_matches(name, known, 1)]
            last = f"leave it out; help({kind.__name__}) lists the known ones"
            raise ValueError(f"{name} is not known: {[*near, last][0]}")

    @wraps(initialize)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        refuse_unknown(options.keys() - complete)
        if missing := [name for name in needed[len(arguments):] if name not in options]:
            raise ValueError("; ".join(f"{name} is missing" for name in missing))
        initialize(self, *arguments, **options)

    def __post_init__(self: Any) -> None:
        vars(self).update(values_of(self))
        complete_it(self)
        check(self, CONDITIONS.get(kind.__name__, []))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # during __init__ some fields are missing
        if vars(self).keys() >= complete:
            refuse_unknown({name} - complete)
            others = {each: vars(self)[each] for each in known}
            value = getattr(kind(**others | {name: value}), name)
        object.__setattr__(self, name, value)

    kind.__init__ = __init__
    kind.__post_init__ = __post_init__
    if not kind.__dataclass_params__.frozen:
        kind.__setattr__ = __setattr__
    return kind


def check_memory(weights: Iterable[Tensor], device: str) -> None:
    """Raises ValueError, before anything is allocated, if weights do not fit a device."""
    num_bytes = sum(each.nbytes for each in weights)
    most = psutil.virtual_memory().total
    if device == "cuda":
        most = torch.cuda.mem_get_info()[1]
    elif is_installed("running.containers"):
        # where the kernel would kill the process without an error
        most = extension("running.containers").free_memory(most)
    if num_bytes > most:
        raise rejected("model", f"{num_bytes / 2**30:.2f} GiB of weights", f"smaller: device "
                       f"{device!r} has {most / 2**30:.2f} GiB of memory")


# --------------------------------------------------------------------------- arguments of calls


FORMS = "a string, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these"


def check_call(prompts: Any, params: Any, priority: Any, kind: type) -> None:
    """Raises ValueError for badly formed arguments of `LLM.generate`. kind: the class of the
    params."""
    if not isinstance(prompts, (str, dict, list, tuple)):
        raise rejected("prompts", prompts, FORMS)
    if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
        prompts = [prompts]
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        token_ids = prompt.get("prompt_token_ids")
        has_text = token_ids is None and isinstance(prompt.get("prompt"), str)
        is_known = not {*prompt} - {"prompt", "prompt_token_ids"}
        if not is_known or not (has_text or isinstance(token_ids, (list, tuple))):
            chats = "; messages are for chat" if "role" in prompt else ""
            raise rejected(f"prompts[{place}]", prompts[place], FORMS + chats)
        for token_id in token_ids or ():
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise ValueError(f"prompts[{place}]: token id {token_id!r:.200} is out of "
                                 "vocabulary: not an integer")
    for name, value, of in (("sampling_params", params, kind), ("priority", priority, int)):
        is_list = isinstance(value, (list, tuple))
        are_right = [isinstance(each, Integral if of is int else of) and not isinstance(each, bool)
                     for each in (value if is_list else () if value is None else [value])]
        if not all(are_right) or (is_list and len(value) != len(prompts)):
            shown = f"a list of {len(value)}" if all(are_right) else value
            raise rejected(name, shown, f"one {of.__name__}, or {len(prompts)} of them")


# --------------------------------------------------------------------------------- errors


def explain(found: Any) -> str:
    """Describes a mistake in the arguments of a dataclass, in the style of `rejected`."""
    # pydantic marks a key of a dict by "[key]"
    name = ".".join(str(each) for each in found["loc"] if each != "[key]")
    _, should, rest = found["msg"].partition(" should ")
    message = f"it must {rest}" if should else found["msg"].removeprefix("Value error, ")
    return f"{name}={found['input']!r:.1000} is not accepted: {message}" if name else message


def message_of(error: Exception, message: str) -> str:
    """Returns the message of an error, with advice if memory ran out. Raises the error itself if it
    comes from a signal handler, since it then has nothing to do with the user's input."""
    if is_from_signal(error):
        raise error
    # the message of tokenizers for a text that UTF-8 cannot encode
    if message.startswith("TextEncodeInput"):
        return "the text has half of a surrogate pair, not a whole character: leave it out"
    # PyTorch's error on a CPU has no separate class
    if (isinstance(error, (MemoryError, torch.OutOfMemoryError))
            or isinstance(error, RuntimeError) and "can't allocate memory" in message):
        message = (message.removesuffix(".") +
                   ". Lower max_num_batched_tokens or num_kv_blocks to save memory")
    return message


def is_from_signal(error: BaseException | None) -> bool:
    """Whether an error, or the one that caused it, was raised by a signal handler in Python."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(each, "func", each) for each in handlers if callable(each)]
    codes = {getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None)
             for each in functions} - {None}
    while error:
        if any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False
