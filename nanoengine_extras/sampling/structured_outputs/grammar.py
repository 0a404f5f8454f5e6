"""Texts that a grammar describes, with llguidance (MIT, github.com/guidance-ai/llguidance).

    what a user wants ──to_lark──▶ a text in Lark's syntax ──▶ a `Grammar` for each completion
    the grammars of a step ──permitted──▶ one mask with a row for each

llguidance itself refuses most keywords of a JSON schema that it cannot enforce. `enforceable` and
regexes.py translate or refuse the rest, which it would silently get wrong. This file knows neither
tensors nor the engine.
"""

import json
import re
from collections.abc import Container
from copy import copy
from functools import lru_cache
from itertools import combinations, islice, takewhile
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import AddedToken, Tokenizer

from nanoengine.errors import naming, rejected
from nanoengine_extras.sampling.structured_outputs.regexes import common_regex

ONE_OF = ("one of {'json': …}, {'json_object': True}, {'regex': …}, {'choice': …}, "
          "{'grammar': Lark}, {'structural_tag': …}")
# for llguidance, this token ends a text; it is never generated
END = AddedToken("<|end of the grammar|>", special=True)
EXECUTOR = LLExecutor()
# `minProperties` has many alternatives at one place
LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)

# ------------------------------------------------------------------------- tokens


class Grammar:
    """The place of one completion in its grammar.

    ends: token ids that end the text, all below vocab_size. A sequence that ignores EOS
        continues with it after a complete text.

    Raises ValueError for an invalid grammar, and for a tokenizer that cannot spell all texts.
    """

    def __init__(self, wanted: dict[str, Any], tokenizer: Any, vocab_size: int,
                 end_tokens: list[int], num_tokens: int) -> None:
        with naming(rejected("structured_outputs", wanted, ONE_OF)):
            asked = [pair for pair in wanted.items() if pair[1] not in (None, False)]
            if len(asked) != 1:
                raise ValueError(f"it has {len(asked)} of them")
            kind, value = asked[0]
            self.vocabulary = make_vocabulary(tokenizer, vocab_size)
            lark = to_lark(kind, value, tokenizer.get_added_vocab())
            self.matcher = make_matcher(lark, self.vocabulary).deep_copy()
        eos = tokenizer.eos_token_id
        self.ends = end_tokens + [eos] if eos is not None and eos < vocab_size else end_tokens
        self.num_taken = num_tokens

    def copy(self) -> "Grammar":
        """Returns a copy at the same place. Neither moves the other."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def forced(self, token_ids: list[int], vocabulary: range) -> list[int]:
        """Returns tokens that spell the text that must come next, in one of several possible ways.

        vocabulary: the tokens that the model has; a tokenizer can have more
        """
        self.take(token_ids)
        # a copy, since this moves it to the end of the text, where it may not be able to continue
        text = self.matcher.deep_copy().compute_ff_bytes()
        tokens = self.vocabulary.tokenize_bytes(text[:256])
        return [*takewhile(vocabulary.__contains__, tokens)]

    def take(self, token_ids: list[int]) -> None:
        """Moves on to the end of the sequence. An end token that was ignored changes nothing."""
        letters = [token for token in token_ids[self.num_taken:] if token not in self.ends]
        self.matcher.consume_tokens(letters)
        self.num_taken = len(token_ids)


def permitted(grammars: list[Grammar], vocab_size: int) -> np.ndarray:
    """Returns the tokens that may come next: (grammars, vocab_size) bool, False in a whole row
    whose grammar is too complex to continue.

    llguidance makes all rows together, in its own threads and without Python's lock. End tokens are
    permitted where the text is complete, and nowhere else, even if they are words of the grammar.
    """
    vocabulary = grammars[0].vocabulary
    bits = np.zeros((len(grammars), -(-vocabulary.vocab_size // 32)), np.int32)
    matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
    fill_next_token_bitmask_par(EXECUTOR, matchers, bits)
    mask = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").view(bool)
    mask[:, vocabulary.eos_token] = False
    for row, grammar in zip(mask, grammars):
        row[grammar.ends] = grammar.matcher.is_accepting()
        row &= not grammar.matcher.is_error()
    return mask[:, :vocab_size]


@lru_cache(maxsize=32)
def make_matcher(lark: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the beginning of a grammar.

    Raises ValueError for an invalid grammar, and for one that permits no text.
    """
    matcher = LLMatcher(vocabulary, lark, log_level=0, limits=LIMITS)
    # the first mask finds more errors, and copies share it
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"Invalid grammar specification: {reason_of(matcher.get_error())}")
    return matcher


def reason_of(error: str) -> str:
    """Returns the reason alone, without the grammar or the regex that llguidance shows after it."""
    first = error.strip().partition("\n")[0][:500]
    # `to_lark` has added a line
    first = re.sub(r"^(?:at )?(\d+)\(\d+\)", lambda at: f"line {int(at[1]) - 1}", first)
    return " ".join([first, *re.findall(r"(?m)^error: (.*)", error)[:1]])


@lru_cache(maxsize=1)
def make_vocabulary(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Returns a tokenizer for llguidance with the tokenizer's tokens and END, and at least
    vocab_size tokens. Special tokens have no letters there.

    Raises ValueError for a tokenizer with neither ByteLevel nor ByteFallback.
    """
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.add_special_tokens([END])
    size = max(vocab_size, copy.get_vocab_size())
    with naming("the tokenizer has neither ByteLevel nor ByteFallback, and cannot spell all texts"):
        return LLTokenizer(copy.to_str(), n_vocab=size, eos_token=copy.token_to_id(END.content))


# ------------------------------------------------------------------------ grammars

JSON_OPTIONS = {"x-guidance": {
    # with any whitespace, a model could write spaces forever
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    # no \u0061, which could spell the name of a property in another way
    "json_allowed_escapes": 'nrbtf\\"'}}
# llguidance's dates include 29 February in every year, and the year 0; its times, leap seconds
DAY = r"[1-9]\d{3}-(02-([01].|2[0-8])|(0[^2]|1.)-)"
TIME = "..:..:[0-5]"
FORMATS = {"date": f"^{DAY}", "time": f"^{TIME}", "date-time": f"^{DAY}.*[tT]{TIME}",
           "uuid4": "^.{14}4.{4}[89abAB]"}
# formats of pydantic and OpenAPI that allow any text
PLAIN = ("binary", "password", "path")


def to_lark(kind: str, value: Any, added: Container[str] = ()) -> str:
    """Returns a grammar in llguidance's variant of Lark's syntax. Raises ValueError for any other
    kind or value.

    added: texts of tokens that were added to the vocabulary, for structural tags.
    """
    if kind in ("json", "json_object"):
        lark = json_to_lark({"type": "object"} if kind == "json_object" else value)
    elif kind == "choice" and value and isinstance(value, (list, tuple)):
        # one terminal: llguidance cannot run thousands of alternatives; `join` refuses other types
        lark = "start: TEXT\nTEXT: " + " | ".join(json.dumps("".join([text])) for text in value)
    elif kind == "regex":
        lark = f"start: /{regex_to_lark(common_regex(value), '')}/"
    elif kind == "grammar" and re.search(r"(?m)^\s*[\w-]+\s*::=", value):
        raise ValueError("GBNF and EBNF ('::=') are not supported: write 'name: …' in Lark")
    elif kind == "structural_tag":
        lark = tags_to_lark(json.loads(value) if isinstance(value, str) else value, added)
    elif kind == "grammar" and "%json" not in value:
        lark = value
    elif kind not in ("choice", "grammar"):
        raise ValueError(f"{kind!r} is not known")
    else:
        raise ValueError(f"{kind} cannot be {value!r}")
    # with forcing, only one of the ways to tokenize a text would be permitted
    return '%llguidance {"no_forcing": true}\n' + lark


def json_to_lark(schema: Any) -> str:
    """Returns the grammar of a JSON schema: a dict, its text, or a class of pydantic."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = {**json.loads(text), **JSON_OPTIONS}
    if schema != {**json.loads(text, parse_int=float), **JSON_OPTIONS}:
        raise ValueError("it has an integer that a float64 would round")
    definitions = schema.get("$defs")
    open_one = json.dumps(enforceable(schema, definitions, closes=False))
    if re.search(r"\\u00([01]|7f)", open_one.replace(r"\\", "")):
        raise ValueError("it has a control character, which JSON must escape as \\u00…")
    # llguidance permits `oneOf` where no value fits two of its schemas. If this holds for open
    # objects, it also holds for closed ones, but not vice versa.
    if error := '"oneOf"' in text and LLMatcher.validate_grammar("start: %json " + open_one):
        raise ValueError(reason_of(error))
    return "start: %json " + json.dumps(
        enforceable(schema, definitions, closes=not combines(schema)))


def combines(schema: Any) -> bool:
    """Whether several schemas name properties of one object. If one of them closed the object, the
    others could add nothing. These schemas can be definitions, so no object is closed."""
    if not isinstance(schema, dict):
        return isinstance(schema, list) and any(map(combines, schema))
    groups = [{name: schema[name]} for name in ("$ref", "anyOf", "oneOf", "properties")
              if name in schema]
    texts = map(json.dumps, [*schema.get("allOf", ()), *groups])
    num_groups = sum('"properties"' in text or '"$ref"' in text for text in texts)
    return num_groups > 1 or any(map(combines, schema.values()))


def tags_to_lark(value: Any, added: Container[str]) -> str:
    """Returns the grammar of a structural tag, in vLLM's and XGrammar's format
    `tags_with_separator`: values of JSON schemas, each between a begin and an end tag."""
    match value:
        case {"type": "structural_tag", "format": {
                "type": "tags_with_separator", "tags": [_, *_] as tags, "separator": str(separator),
                **options}} if options.keys() <= {"at_least_one", "stop_after_first"}:
            pass
        case _:
            raise ValueError('its format must be {"type": "tags_with_separator", "tags": […], '
                             '"separator": …, "at_least_one": …, "stop_after_first": …}')
    rules = []
    for number, tag in enumerate(tags):
        match tag:
            case {"begin": str(begin), "end": str(end), "content": {
                    "type": "json_schema", "json_schema": dict(schema)}}:
                rules.append(f"tag{number}: {spelled(begin, added)} value{number} "
                             f"{spelled(end, added)}")
                rules.append(json_to_lark(schema).replace("start", f"value{number}", 1))
            case _:
                raise ValueError('each of its tags must be {"type": "tag", "begin": text, "end": '
                                 'text, "content": {"type": "json_schema", "json_schema": …}}')
    rules.append("tag: " + " | ".join(f"tag{number}" for number in range(len(tags))))
    more = "" if options.get("stop_after_first") else f"({spelled(separator, added)} tag)*"
    none = "" if options.get("at_least_one") else "?"
    return "\n".join([f"start: (tag {more}){none}", *rules])


def spelled(text: str, added: Container[str]) -> str:
    """Returns a text in Lark, in which <tags> can be single tokens. A model that was trained with
    such a token expects it; for llguidance, the token has no letters."""
    parts = [json.dumps(part) for part in re.split(r"(<[\w|/]+>)", text) if part]
    return " ".join(f"({part} | {part[1:-1]})" if part[1:-1] in added else part
                    for part in parts) or '""'


def enforceable(schema: Any, definitions: Any, closes: bool) -> Any:
    """Returns a schema that means the same to llguidance as the given one in JSON Schema (draft
    2020-12).

    definitions: the `$defs` of the whole schema.
    closes: an object whose schema names its properties, or patterns of their names, has no others,
        as in vLLM, unless `additionalProperties` permits them. In `allOf`, they can be those of
        another schema.

    Raises ValueError if llguidance would silently do something else.
    """
    if isinstance(schema, list):
        return [enforceable(each, definitions, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = with_patterns(schema, definitions)
    found: dict[str, Any] = {}
    if closes and schema.keys() & {"properties", "patternProperties"}:
        found["additionalProperties"] = False
    for name, value in schema.items():
        if name == "format" and value in PLAIN or name == "uniqueItems" and value is False:
            continue
        if name == "pattern":
            value = common_regex(value)
        elif name in ("properties", "patternProperties", "$defs", "definitions"):
            rename = common_regex if name == "patternProperties" else str
            value = {rename(key): enforceable(each, definitions, closes)
                     for key, each in value.items()}
        elif name not in ("const", "default", "enum", "examples"):
            value = enforceable(value, definitions, closes and name != "allOf")
        found[name] = value
    limits = found.get("allOf", [])
    if (kind := found.get("format")) in FORMATS:
        limits.append({"pattern": FORMATS[kind]})
        found["format"] = kind.removesuffix("4")
    if found.get("minProperties", 0) > 1:
        # if an object has a name twice, llguidance would count it twice
        groups = combinations(found.get("properties", ()), found.pop("minProperties"))
        options = [{"required": names} for names in islice(groups, 1001)]
        if len(options) not in range(1, 1001):
            raise ValueError("minProperties is not supported with this number of properties")
        limits.append({"anyOf": options})
    return found | {"allOf": limits} if limits else found


def with_patterns(schema: dict[str, Any], definitions: Any) -> dict[str, Any]:
    """Returns a schema with `patternProperties` in place of `propertyNames` if they list all names,
    as for `dict[Color, int]` in pydantic. definitions: see `enforceable`"""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and isinstance(definitions, dict) and [*names] == ["$ref"]:
        names = definitions.get(str(names["$ref"]).removeprefix("#/$defs/"))
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return schema
    listed = names.get("enum", [names.get("const")])
    limits = names.keys() - {"title", "description", "type"}
    is_text = names.get("type", "string") == "string" and all(
        isinstance(each, str) for each in listed)
    if not is_text or limits not in ({"enum"}, {"const"}):
        return schema
    others = {name: value for name, value in schema.items() if name != "propertyNames"}
    pattern = f"^({'|'.join(map(re.escape, listed))})$"
    values = others.get("additionalProperties", {})
    return others | {"additionalProperties": False, "patternProperties": {pattern: values}}
