"""Rules for what a user gives, by pydantic, and the words of their errors.

EngineConfig, SamplingParams and BeamSearchParams are dataclasses of pydantic, with these types;
`explained` gives their errors the engine's words. This file imports nothing of the engine.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WrapValidator
from pydantic_core import ValidationError

STRICT = ConfigDict(strict=True, extra="forbid", validate_assignment=True)

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
EMPTY_LIST: Any = Field(default_factory=list, kw_only=True)
OR_NONE = WrapValidator(lambda value, check: value if value is None else check(value))
FOLDER = BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)
BY_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
NumLogprobs = Annotated[Int, BeforeValidator(lambda v: 1 if v is True else v), Field(ge=-1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], AS_LIST, DISTINCT]


def one_of(table: dict[str, Any]) -> AfterValidator:
    """Checks for a name in a table of policies, or a function."""
    def check(policy: Any) -> Any:
        if not callable(policy) and policy not in [*table]:
            # adds the names of policies for comparison
            import nanoengine_extensions.policies  # noqa: F401
        if not callable(policy) and policy not in [*table]:
            raise ValueError(f"it must be one of {[*table]}, or a function like these")
        return policy
    return AfterValidator(check)


# --------------------------------------------------------------------------------- errors


def explained(checked: Any) -> Any:
    """Decorates a dataclass of pydantic: its errors get our words."""
    @contextmanager
    def in_our_words() -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise ValueError("; ".join(explain(each, checked) for each in error.errors())) from None

    def assign(self: Any, name: str, value: Any, set_checked: Any = checked.__setattr__) -> None:
        before = dict(vars(self))
        try:
            set_checked(self, name, value)
        except ValueError:
            # a rule over two fields is only checked after the assignment
            vars(self).update(before)
            raise

    checked.__init__ = in_our_words()(checked.__init__)
    checked.__setattr__ = in_our_words()(assign)
    return checked


def explain(found: Any, checked: Any) -> str:
    """Describes a mistake in the arguments of a dataclass, in the style of `rejected`. For an
    unknown keyword, it names the nearest known one."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] in ("unexpected_keyword_argument", "no_such_attribute"):
        known = [*signature(checked).parameters]
        near = get_close_matches(name, known, 1)
        return f"{name} is not known: " + (f"the nearest is {near[0]}" if near else f"{known} are")
    if found["type"] == "missing":
        return f"{name} is missing"
    _, should, rest = found["msg"].partition(" should ")
    message = f"it must {rest}" if should else found["msg"].removeprefix("Value error, ")
    return f"{name}={found['input']!r:.1000} is not accepted: {message}" if name else message


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


@contextmanager
def advising(model: str) -> Iterator[None]:
    """Adds advice to an error of memory, which becomes a ValueError."""
    try:
        yield
    except (MemoryError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(f"{model} cannot be run with these options: {error} Lower "
                         "max_num_batched_tokens or num_kv_blocks to save memory") from error


def one_for_each(num_prompts: int, name: str, value: Any, default: Any) -> list[Any]:
    """Returns a value for each prompt, from one value, a list, or None (the default)."""
    kind = type(default)
    value = default if value is None else value
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_prompts
    is_right = [isinstance(item, kind) and not isinstance(item, bool) for item in values]
    if len(values) != num_prompts or not all(is_right):
        raise ValueError(f"{name}={value!r:.1000} is not accepted: it must be one {kind.__name__}, "
                         f"or {num_prompts} of them")
    return values
