"""Strict checks of user input, and vLLM's shorthands: fills the slot "checks".

pydantic checks the types of `EngineConfig`, `SamplingParams` and `BeamSearchParams`: the declared
ones, or those in RULES. A broken rule is a ValueError that names the argument, the value and what
is accepted. The engine's own conditions come after it.
"""

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from numbers import Integral
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Literal

import psutil
import torch
from pydantic import (
    AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model)
from torch import Tensor

from nanoengine.errors import rejected
from nanoengine.features import shown
from nanoengine.observers import Feature
from nanoengine.policies import TABLES
from nanoengine.requests import InputProcessor, one_for_each
from nanoengine.sampling_params import SamplingParams
from nanoengine_extras import OBSERVERS
from nanoengine_extras.running import free_memory

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

# ---------------------------------------------------------------------------------- types


def plain(value: Any) -> Any:
    """Returns Python's number for one of NumPy or PyTorch, the text of a path or of a dtype, and
    other values as they are."""
    if isinstance(value, (Path, torch.dtype)):
        return str(value).removeprefix("torch.")
    return value.item() if getattr(value, "ndim", None) == 0 else value


def as_list(value: Any) -> Any:
    """vLLM's shorthands: a string means a list with this string, None an empty list. A tuple has an
    order, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else [*value] if type(value) is tuple else value


def of_own_names(features: list[Any]) -> list[Feature]:
    """Features are kept by the names of their classes, beside those of the engine."""
    names = {type(each).__name__ for each in features if isinstance(each, Feature)}
    if len(names - {*OBSERVERS.values()}) < len(features):
        raise ValueError("it must be a list of Feature objects, each of a different class")
    return features


AS_LIST = BeforeValidator(as_list)
DISTINCT = AfterValidator(lambda v: [*dict.fromkeys(v)])
# 0, or between 1e-18 and 1e18 in size: products and sums with a logit then fit into float32
Moderate = Annotated[float, BeforeValidator(plain), AfterValidator(
    lambda v: v and math.copysign(min(max(abs(v), 1e-18), 1e18), v))]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
Amount = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, BeforeValidator(plain), Field(ge=0)]
NumLogprobs = Annotated[int, BeforeValidator(lambda v: 1 if v is True else v), Field(ge=-1)]
Texts = Annotated[list[Name], AS_LIST, DISTINCT]

# by the name of a field, which has one meaning in all classes
RULES: dict[str, Any] = {
    "seed": int | None,
    "temperature": Annotated[Moderate, Field(ge=0)],
    "top_k": Annotated[int, Field(ge=-1, lt=2**31)],
    "stop": Texts,
    # as in vLLM, tuples and sets are accepted where the order means nothing: strict=False
    "stop_token_ids": Annotated[list[TokenId], Field(strict=False), AS_LIST, DISTINCT],
    "logprobs": NumLogprobs | None,
    "prompt_logprobs": NumLogprobs | None,
    "truncate_prompt_tokens": Annotated[int, Field(ge=-1)] | None,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "repetition_penalty": Annotated[Moderate, Field(gt=0)],
    "bad_words": Annotated[Texts, Field(strict=False)],
    "allowed_token_ids": Annotated[list[TokenId], Field(min_length=1, strict=False)] | None,
    # JSON has only texts as keys
    "logit_bias": dict[Annotated[TokenId, Field(strict=False)], Moderate] | None,
    "logits_processors": Annotated[list[Callable], AS_LIST],
    # an empty path would be the current folder
    "model": Name,
    "tokenizer": Name | None,
    "dtype": Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
    "device": Literal["auto", "cpu", "cuda"],
    "load_format": Literal["auto", "safetensors", "hf", "dummy"],
    "model_impl": Literal["auto", "native", "transformers"],
    "preemption_mode": Literal["recompute", "swap"],
    # vLLM's -1 and "auto"
    "max_model_len": Annotated[Annotated[int, Field(ge=2)] | None, BeforeValidator(
        lambda v: None if isinstance(v, (int, str)) and v in (-1, "auto") else v)],
    **dict.fromkeys(
        ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"), Size | None),
    "gpu_memory_utilization": Annotated[float, Field(gt=0, le=1)],
    "cpu_offload_gb": Amount,
    "swap_space": Amount,
    "tensor_parallel_size": Count,
    "run_ahead": bool | None,
    "features": Annotated[list, AfterValidator(of_own_names)],
    # these are checked where policies are found
    **dict.fromkeys((*TABLES, "speculation", "kv_allocation"), Any),
    "beam_width": Count,
    "BeamSearchParams.max_tokens": Count,
    "length_penalty": Annotated[Moderate, Field(ge=-40, le=40)]}

@cache
def rules_of(kind: Any) -> type[BaseModel]:
    """Returns the rules for the fields of a dataclass."""
    rules = {each.name: RULES.get(f"{kind.__name__}.{each.name}", RULES.get(each.name, each.type))
             for each in fields(kind)}
    checked: Any = {name: (rule, ...) for name, rule in rules.items()}
    return create_model(kind.__name__, __config__=STRICT, **checked)


# --------------------------------------------------------------------------------- the checks


class Strict:
    """The checks that the engine also makes if this file is installed."""

    def names(self, kind: Any, arguments: tuple, options: dict) -> None:
        """Raises ValueError for keywords that a class of options does not have."""
        # a subclass with an `__init__` of its own can take other arguments
        if "__init__" in vars(kind) and "__dataclass_fields__" not in vars(kind):
            return
        known = rules_of(kind).model_fields
        for name in options.keys() - known:
            near = [f"the nearest is {each}" for each in get_close_matches(name, known, 1)]
            last = f"leave it out; help({kind.__name__}) lists the known ones"
            raise ValueError(f"{name} is not known: {[*near, last][0]}")

    def values(self, options: Any) -> None:
        """Checks the types of options, and writes out shorthands."""
        given = {each.name: plain(getattr(options, each.name)) for each in fields(options)}
        try:
            found = rules_of(options.__class__).model_validate(given)
        except ValidationError as error:
            raise ValueError("; ".join(map(explain, error.errors()))) from None
        vars(options).update(vars(found))
        if isinstance(options, SamplingParams) and options.n > 1 and not options.temperature:
            # in vLLM's words, which scripts may look for
            raise rejected("n", options.n, "1 with temperature=0 (n must be 1 when using greedy "
                           "sampling)")

    def assigned(self, options: Any, name: str, value: Any) -> Any:
        """Returns the value for an option that is assigned later, or raises ValueError."""
        # during __init__ some fields are missing
        if vars(options).keys() >= rules_of(options.__class__).model_fields.keys():
            value = getattr(replace(options, **{name: value}), name)
        return value

    def call(self, prompts: Any, params: Any, priority: Any, inputs: InputProcessor) -> None:
        """Checks the form of the arguments of `LLM.generate`, and the names of options that belong
        to features."""
        if not isinstance(prompts, (str, dict, list, tuple)):
            raise rejected("prompts", prompts, FORMS)
        if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
            prompts = [prompts]
        for place, prompt in enumerate(prompts):
            check_prompt(f"prompts[{place}]", prompt)
        for name, value, of in (("sampling_params", params, SamplingParams),
                                ("priority", priority, int)):
            values = one_for_each(value, len(prompts))
            accepted = Integral if of is int else of
            are_right = all(isinstance(each, accepted) and type(each) is not bool
                            for each in values)
            if value is not None and not (are_right and len(values) == len(prompts)):
                found = f"a list of {len(values)}" if are_right else value
                raise rejected(name, found, f"one {of.__name__}, or {len(prompts)} of them")
        known = [name for feature in inputs.features.values() for name in feature.OPTIONS]
        for each in one_for_each(params or [], 1):
            inputs.check_vocabulary("stop_token_ids", each.stop_token_ids)
            for name in each.options.keys() - known:
                raise rejected(f"options[{name!r}]", each.options[name],
                               f"an option of a feature: {known}")

    def memory(self, weights: Iterable[Tensor], device: str) -> None:
        """Raises ValueError if weights do not fit a device, before anything is allocated: the
        kernel would kill the process."""
        num_bytes = sum(each.nbytes for each in weights)
        most = (torch.cuda.mem_get_info()[1] if device == "cuda"
                else free_memory(psutil.virtual_memory().total))
        if num_bytes > most:
            raise rejected("model", f"{num_bytes / 2**30:.2f} GiB of weights", "smaller: device "
                           f"{device!r} has {most / 2**30:.2f} GiB of memory")

    def message(self, error: Exception, message: str) -> str:
        """Returns the message of an error inside `naming`, with advice if memory ran out. Raises
        the error itself if it comes from a signal handler, since it then has nothing to do with
        the user's input."""
        if is_from_signal(error):
            raise error
        # the message of tokenizers for a text that UTF-8 cannot encode
        if message.startswith("TextEncodeInput"):
            return "the text has half of a surrogate pair, not a whole character: leave it out"
        # PyTorch's error on a CPU has no separate class
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if is_memory or "can't allocate memory" in message:
            advice = ". Lower max_num_batched_tokens or num_kv_blocks to save memory"
            return message.removesuffix(".") + advice
        return message


# --------------------------------------------------------------------------------- errors


FORMS = "a string, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these"


def check_prompt(name: str, prompt: Any) -> None:
    """Raises ValueError for a prompt that is neither a text nor token ids, in any form."""
    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    given = prompt if isinstance(prompt, dict) else given
    token_ids = given.get("prompt_token_ids")
    text = given.get("prompt")
    has_text = token_ids is None and isinstance(text, str)
    is_known = given.keys() <= {"prompt", "prompt_token_ids"} and isinstance(text, str | None)
    if not is_known or not (has_text or isinstance(token_ids, (list, tuple))):
        chats = "; messages are for chat" if "role" in given else ""
        raise rejected(name, prompt, FORMS + chats)
    for token_id in token_ids or ():
        # most are `int`, which is recognized faster
        if type(token_id) is bool or not isinstance(token_id, (int, Integral)):
            raise ValueError(
                f"{name}: token id {shown(token_id)} is out of vocabulary: not an integer")


def explain(found: Any) -> str:
    """Describes a mistake in the arguments of a dataclass, in the style of `rejected`."""
    # pydantic marks a key of a dict by "[key]"
    name = ".".join(str(each) for each in found["loc"] if each != "[key]")
    _, should, rest = found["msg"].partition(" should ")
    message = f"it must {rest}" if should else found["msg"].removeprefix("Value error, ")
    return f"{name}={shown(found['input'])} is not accepted: {message}" if name else message


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


PARTS = {"checks": Strict()}
