"""`SamplingParams.structured_outputs`: texts that a grammar describes, by xgrammar (Dong et al.,
2024, arXiv:2411.15100), which `pip install ".[grammar]"` installs.

`constraints.constrain` asks for a logits processor for each completion. Keywords of a JSON schema
that xgrammar would accept and ignore are refused. So each schema with a limit needs its own `type`,
and `anyOf` stands alone. One exception: xgrammar takes `oneOf` for `anyOf`, unless it can prove
that no value fits two of the schemas.
"""

import json
from functools import lru_cache
from typing import Any

from nanoengine.sampling_params import naming, rejected

ONE_OF = "one of {'json': …}, {'json_object': True}, {'regex': …}, {'choice': […]}, {'grammar': …}"

# The keywords of a JSON schema that xgrammar ignores: always, …
IGNORED = {"contains", "dependencies", "dependentRequired", "dependentSchemas", "if",
           "multipleOf", "not", "uniqueItems"}
# … beside others: of each list, it enforces the first one that is given …
FIRST_COUNTS = [f"untyped $ref const enum anyOf oneOf allOf {limits}".split() for limits in (
    "format pattern minLength, format pattern maxLength, minimum, exclusiveMinimum, maximum, "
    "exclusiveMaximum, properties patternProperties propertyNames, required, prefixItems, items, "
    "propertyNames additionalProperties, minProperties, maxProperties, minItems, maxItems"
    ).split(",")] + ["$ref anyOf oneOf allOf type".split()]
# … and limits of an untyped schema, which has none of these
TYPED = {*FIRST_COUNTS[0][1:7], *"additionalProperties items prefixItems properties type".split()}
# These hold schemas by name.
NAMED = {"properties", "patternProperties", "$defs", "definitions"}


def make_processor(wanted: dict[str, Any], *vocabulary: Any) -> Any:
    """Returns a logits processor that permits only the tokens that the grammar allows next.

    It keeps its place in the grammar, so that each completion needs its own.

    vocabulary: the arguments of `make_compiler`. Raises ValueError for what is not a grammar.
    """
    with naming(rejected("structured_outputs", wanted, ONE_OF)):
        from xgrammar.contrib.hf import LogitsProcessor
        compiler = make_compiler(*vocabulary)
        (kind, value), = [pair for pair in wanted.items() if pair[1] not in (None, False)]
        if kind in ("json", "json_object"):
            schema = value if kind == "json" else {"type": "object"}
            refuse_ignored(json.loads(schema) if isinstance(schema, str) else schema)
            # with any whitespace, a model could write spaces forever
            return LogitsProcessor(compiler.compile_json_schema(schema, any_whitespace=False))
        if kind == "choice" and not isinstance(value, str):
            texts = [json.dumps(text, ensure_ascii=False) for text in value]
            kind, value = "grammar", "root ::= " + " | ".join(texts)
        compilers = {"grammar": compiler.compile_grammar, "regex": compiler.compile_regex}
        return LogitsProcessor(compilers[kind](value))


@lru_cache(maxsize=1)
def make_compiler(tokenizer: Any, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    """Returns a compiler for this vocabulary; it keeps the grammars that it has compiled.

    end_tokens: they are permitted only where the text is complete.
    """
    import xgrammar
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=[*end_tokens] or None))


def refuse_ignored(schema: Any) -> None:
    """Raises ValueError for keywords of a JSON schema, or a list of them, that xgrammar ignores."""
    if isinstance(schema, dict):
        # an empty value limits nothing, but 0 and False can
        given = {n for n, v in schema.items() if v or n == "const" or v == 0 and n not in IGNORED}
        given |= {"untyped"} if given.isdisjoint(TYPED) else set()
        several = {name for name in given & {"allOf", "patternProperties"} if len(schema[name]) > 1}
        beside = {name for names in FIRST_COUNTS for name in [n for n in names if n in given][1:]}
        unknown = {*schema.get("required", ())} - {*schema.get("properties", ())}
        if ignored := sorted(several | beside | given & {*IGNORED, "required" if unknown else ""}):
            raise ValueError(f"xgrammar does not enforce {ignored} in {schema}")
        # the schemas inside it; a property name is always a string
        schema = [[*schema[name].values()] if name in NAMED else {"type": "string"} | schema[name]
                  if name == "propertyNames" else schema.get(name)
                  for name in given - {"const", "default", "enum", "examples"}]
    for part in schema if isinstance(schema, list) else ():
        refuse_ignored(part)
