"""JSON schemas for llguidance, which refuses most keywords that it cannot enforce.

`enforceable` translates or refuses the rest, which it would silently get wrong.
"""

import json
import re
from itertools import combinations, islice
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nanoengine_extras.sampling.structured_outputs.regexes import common_regex

JSON_OPTIONS = {"x-guidance": {
    # with any whitespace, a model could write spaces forever
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    # no \u0061, which could spell the name of a property in another way
    "json_allowed_escapes": 'nrbtf\\"'}}
# `minProperties` has many alternatives at one place
LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
BYTES = LLTokenizer("byte")
# llguidance recurses into each level of a schema, and its stack must not overflow
MOST_LEVELS = 300
TOO_DEEP = f"it has more than {MOST_LEVELS} levels, with those that $ref adds"
# llguidance's dates include 29 February in every year, and the year 0; its times, leap seconds, and
# small letters, which RFC 3339 (5.6) permits only to readers
DAY = r"[1-9]\d{3}-(02-([01].|2[0-8])|(0[^2]|1.)-)"
TIME = "..:..:[0-5].*[^z]$"
FORMATS = {"date": f"^{DAY}", "time": f"^{TIME}", "date-time": f"^{DAY}.*T{TIME}",
           "hostname": "^.{1,253}$", "uuid4": "^.{14}4.{4}[89abAB]"}
# formats of pydantic and OpenAPI that allow any text
PLAIN = ("binary", "password", "path")
# a pattern of one name, or of several
NAMES = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w |-]+)\))\$")


def json_to_lark(schema: Any) -> str:
    """Returns the grammar of a JSON schema: a dict, its text, or a class of pydantic.

    Raises ValueError for a schema that cannot be enforced.
    """
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = {**json.loads(text), **JSON_OPTIONS}
    if schema != {**json.loads(text, parse_int=float), **JSON_OPTIONS}:
        raise ValueError("it has an integer that a float64 would round")
    if num_levels(schema, schema, {}) > MOST_LEVELS:
        raise ValueError(TOO_DEEP)
    open_one = json.dumps(enforceable(schema, schema, closes=False))
    if re.search(r"\\u00([01]|7f)", open_one.replace(r"\\", "")):
        raise ValueError("it has a control character, which JSON must escape as \\u00…")
    # llguidance permits `oneOf` where no value fits two of its schemas. If this holds for open
    # objects, it also holds for closed ones, but not vice versa.
    if error := '"oneOf"' in text and LLMatcher.validate_grammar("start: %json " + open_one):
        raise ValueError(reason_of(error))
    return "start: %json " + json.dumps(
        enforceable(schema, schema, closes=not combines(schema)))


def reason_of(error: str) -> str:
    """Returns the reason alone, without the grammar or the regex that llguidance shows after it."""
    first = error.strip().partition("\n")[0][:500]
    # `to_lark` has added a line
    first = re.sub(r"^(?:at )?(\d+)\(\d+\)", lambda at: f"line {int(at[1]) - 1}", first)
    return " ".join([first, *re.findall(r"(?m)^error: (.*)", error)[:1]])


def target(root: Any, ref: Any) -> Any:
    """Returns what a `$ref` in the schema `root` points to; None if there is nothing."""
    for name in unquote(str(ref).removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        parts = {str(place): each for place, each in enumerate(root or ())}
        root = (root if isinstance(root, dict) else parts).get(name)
    return root


def num_levels(part: Any, root: Any, known: dict[str, int], level: int = 0) -> int:
    """Returns how many levels of lists and dicts are in each other, through every `$ref`.

    known: the levels of each `$ref`, at first empty; a cycle counts once.
    level: that of this part.

    Raises ValueError for too many levels.
    """
    if not isinstance(part, (dict, list)):
        return 0
    if level > MOST_LEVELS:
        raise ValueError(TOO_DEEP)
    ref = part.get("$ref") if isinstance(part, dict) else None
    if isinstance(ref, str) and ref not in known:
        known[ref] = 0
        known[ref] = num_levels(target(root, ref), root, known, level + 1)
    parts = part.values() if isinstance(part, dict) else part
    counts = [num_levels(each, root, known, level + 1) for each in parts]
    return 1 + max([known.get(str(ref), 0), *counts])


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


def enforceable(schema: Any, root: Any, closes: bool) -> Any:
    """Returns a schema that means the same to llguidance as the given one in JSON Schema (draft
    2020-12).

    root: the whole schema.
    closes: an object whose schema names its properties, or patterns of their names, has no others,
        as in vLLM, unless `additionalProperties` permits them. In `allOf`, they can be those of
        another schema.

    Raises ValueError if llguidance would silently do something else.
    """
    if isinstance(schema, list):
        return [enforceable(each, root, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = with_listed_names(schema, root)
    found: dict[str, Any] = {}
    if closes and schema.keys() & {"properties", "patternProperties"}:
        found["additionalProperties"] = False
    for name, value in schema.items():
        if name == "format" and value in PLAIN or name == "uniqueItems" and value is False:
            continue
        if name == "pattern":
            value = common_regex(value)
        elif name in ("properties", "patternProperties", "$defs", "definitions"):
            value = {key: enforceable(each, root, closes) for key, each in value.items()}
        elif name not in ("const", "default", "enum", "examples"):
            value = enforceable(value, root, closes and name != "allOf")
        found[name] = value
    translate_patterns(found, {} if closes else names_in(root))
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


def with_listed_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Returns a schema with `properties` in place of `propertyNames` if they list all names, as for
    `dict[Color, int]` in pydantic."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and [*names] == ["$ref"]:
        names = target(root, names["$ref"])
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return schema
    listed = names.get("enum", [names.get("const")])
    limits = names.keys() - {"title", "description", "type"}
    is_text = names.get("type", "string") == "string" and all(
        isinstance(each, str) for each in listed)
    if not is_text or limits not in ({"enum"}, {"const"}):
        return schema
    others = {name: value for name, value in schema.items() if name != "propertyNames"}
    values = others.get("additionalProperties", {})
    return others | {"additionalProperties": False, "properties": dict.fromkeys(listed, values)}


def names_in(part: Any) -> dict[str, Any]:
    """Returns the names of all properties in a schema, as keys."""
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    found = [names_in(each) for each in parts]
    own = part.get("properties") if isinstance(part, dict) else None
    return dict.fromkeys(name for names in [own or {}, *found] for name in names)


def translate_patterns(found: dict[str, Any], names: dict[str, Any]) -> None:
    """Translates the patterns of an object's schema in place.

    A pattern that lists names becomes properties: then an object has each name once.
    names: those of other schemas, which can be combined with this one.
    """
    patterns = found.pop("patternProperties", {})
    if not patterns:
        return
    properties = found.setdefault("properties", {})
    is_closed = found.get("additionalProperties") is False
    others = {}
    for pattern, value in patterns.items():
        if listed := NAMES.fullmatch(pattern):
            for name in (listed[1] or listed[2]).split("|"):
                properties[name] = {"allOf": [properties.get(name, {}), value]}
        else:
            others[common_regex(pattern)] = value
            if is_closed and not adds_names(common_regex(pattern), properties | names):
                raise ValueError(f"the pattern {pattern!r:.100} permits only names that are in "
                                 "`properties`, too: leave it out")
    # names that only Python, or only JavaScript, finds with a pattern fit none of its schemas
    has_classes = re.search(r"\\[dwsDWS]", "".join(patterns))
    is_plain = all(name.isascii() and not name.endswith("\n") for name in properties)
    if not (is_closed and is_plain) and (has_classes or "$" in "".join(patterns)):
        others[r"[^\x00-\x7f]|\n$" if has_classes else r"\n$"] = False
    found["patternProperties"] = others


def adds_names(pattern: str, properties: dict[str, Any]) -> bool:
    """Whether a pattern permits other names than these. If not, llguidance would lead into a dead
    end, where no token is left."""
    schema = {"type": "object", "properties": dict.fromkeys(properties, {"const": 1}),
              "required": [*properties], "patternProperties": {pattern: {"const": 1}},
              "additionalProperties": False} | JSON_OPTIONS
    matcher = LLMatcher(BYTES, f"start: %json {json.dumps(schema)}", log_level=0, limits=LIMITS)
    text = "".join(f"{json.dumps(name, ensure_ascii=False)}: 1, " for name in properties)
    matcher.consume_tokens([*f"{{{text}".encode()])
    matcher.compute_bitmask()
    return not matcher.is_error()
