"""JSON schemas against jsonschema: does every text of their grammars fit?

Each schema is refused, right or wrong: it is wrong if a random walk through its masks ends in a
text that is not JSON or does not fit. Tokens are bytes here, so that every text can be reached.
"""

import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher, LLTokenizer

from nanoengine.errors import naming
from nanoengine_extras.sampling.structured_outputs.grammar import LIMITS, to_lark

BYTES = LLTokenizer("byte")
KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]
VALUES = [0, 1, 2, 3, "a", "ab", 'b"', None, True, False, 1.5, [], [1], {"a": 1}, {}]
PATTERNS = ["^a", "b$", "^[ab]*$", "a", "^.{2}$", '^[^"]$', r"^\W{1,3}$", "^a|b$", r"^[^\\a]*$"]


class ByteGrammar:
    """The grammar of one kind of `structured_outputs`. Raises ValueError if it is refused."""

    def __init__(self, kind: str, value: Any) -> None:
        with naming(kind):
            self.start = LLMatcher(BYTES, to_lark(kind, value), log_level=0, limits=LIMITS)
        self.start.compute_bitmask()
        if self.start.is_error():
            raise ValueError(self.start.get_error())

    def accepts(self, text: str) -> bool:
        matcher = self.start.deep_copy()
        found = [*text.encode()]
        return matcher.try_consume_tokens(found) == len(found) and matcher.is_accepting()

    def walk(self, rng: random.Random, length: int = 60) -> str | None:
        """Returns a random text, which tends to end after some length; None if it does not."""
        matcher = self.start.deep_copy()
        text = bytearray()
        while len(text) < 5 * length:
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:256])
            if matcher.is_error():
                return None
            # most often something plain, or what closes a value
            plain = [byte for byte in allowed if byte in b'ab01{["tn-,:. '] or [*allowed]
            closing = [byte for byte in allowed if byte in b'}]"']
            is_late = len(text) > length
            if matcher.is_accepting() and (not plain or is_late or rng.random() < 0.25):
                return text.decode(errors="replace")
            if closing and rng.random() < (0.9 if is_late else 0.2):
                plain = closing
            byte = int(rng.choice(plain if rng.random() < 0.8 else allowed))
            matcher.consume_token(byte)
            text.append(byte)
        return None


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Returns a random schema, with keywords that often do not belong together."""
    def sub() -> Any:
        return random_schema(rng, depth + 1)

    def names(most: int = 2) -> list[str]:
        return rng.sample(["a", "b", "c"], rng.randint(1, most))

    small = [0, 1, 2, 3]
    numbers = {"minimum": [-1, 0, 1.5, 3], "maximum": [0, 2, 2.5, 10], "multipleOf": [1, 2, 3, 0.5],
               "exclusiveMinimum": [0, 1, 2.5], "exclusiveMaximum": [3, 7, 2.5]}
    strings = {"minLength": small, "maxLength": small, "pattern": PATTERNS, "format": ["date"]}
    nested = depth < 2
    arrays = {"items": [sub], "prefixItems": [lambda: [sub(), sub()]], "minItems": small,
              "maxItems": small, "uniqueItems": [True, False]}
    objects = {"properties": [lambda: {name: sub() for name in names(3)}], "required": [names],
               "additionalProperties": [False, True, sub], "minProperties": small,
               "patternProperties": [lambda: {rng.choice(PATTERNS): sub()}],
               "maxProperties": small, "propertyNames": [{"enum": ["a", "b"]}]}
    limits = {"string": strings, "integer": numbers, "number": numbers,
              "array": arrays if nested else {}, "object": objects if nested else {}}
    kind = rng.choice(KINDS)
    schema: dict[str, Any] = {} if rng.random() < 0.3 else {"type": kind}
    pool = dict(limits.get(kind, {}))
    if rng.random() < 0.1:
        pool = {name: values for each in limits.values() for name, values in each.items()}
    combined = {"enum": [lambda: rng.sample(VALUES, 3)], "const": VALUES, "anyOf": [
        lambda: [sub(), sub()]], "allOf": [lambda: [sub(), sub()]], "oneOf": [
        lambda: [sub(), sub()]], "$ref": ["#/$defs/x", "#/$defs/y"], "not": [sub]}
    chosen = rng.sample([*pool], min(len(pool), rng.randint(0, 3)))
    if nested and rng.random() < 0.35:
        chosen.append(rng.choice([*combined]))
    rng.shuffle(chosen)
    for name in chosen:
        value = rng.choice((pool | combined)[name])
        schema[name] = value() if callable(value) else value
    if depth == 0:
        schema["$defs"] = {"x": sub(), "y": sub()}
    return schema


def verdict(schema: Any, rng: random.Random) -> str:
    """Returns "refused", "right", or what is wrong."""
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    try:
        grammar = ByteGrammar("json", schema)
    except ValueError:
        return "refused"
    texts = [text for text in (grammar.walk(rng) for _ in range(12)) if text is not None]
    # with floats, jsonschema finds that 1271.11 is no multiple of 0.0001
    exact = validator.evolve(schema=json.loads(json.dumps(schema), parse_float=Decimal))
    for text in texts:
        try:
            fits = validator.is_valid(json.loads(text)) or exact.is_valid(
                json.loads(text, parse_float=Decimal))
        except (ValueError, ArithmeticError):
            fits = False
        if not fits:
            return f"wrong: {json.dumps(schema)} permits {text}"
    return "right"
