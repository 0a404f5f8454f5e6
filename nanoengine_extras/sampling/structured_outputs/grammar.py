"""Texts that a grammar describes, with llguidance (MIT, github.com/guidance-ai/llguidance).

    what a user wants ──to_lark──▶ a text in Lark's syntax ──▶ a `Grammar` for each completion
    the grammars of a step ──permitted──▶ one mask with a row for each

schemas.py and regexes.py translate or refuse what llguidance would silently get wrong. This folder,
but for its __init__, knows neither tensors nor the engine.
"""

import json
import re
from collections.abc import Container
from copy import copy
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import AddedToken, Tokenizer

from nanoengine.errors import naming, rejected
from nanoengine_extras.sampling.structured_outputs.regexes import common_regex
from nanoengine_extras.sampling.structured_outputs.schemas import (
    LIMITS, json_to_lark, reason_of)

ONE_OF = ("one of {'json': …}, {'json_object': True}, {'regex': …}, {'choice': …}, "
          "{'grammar': Lark or EBNF}, {'structural_tag': …}")
# for llguidance, this token ends a text; it is never generated
END = AddedToken("<|end of the grammar|>", special=True)
EXECUTOR = LLExecutor()
# llguidance recurses into rules, and its stack must not overflow: this would end the process
MOST_RULES = 1000
# the name of a rule in EBNF
RULE = r"(?m)^[ \t]*([\w-]+)[ \t]*::="
# a text, a class or a comment there; one that does not end goes on to the end of the grammar, since
# a search for its end from each of its letters would take minutes
NO_NAMES = r'"(?:\\.?|[^"\\])*(?:"|\Z)|\[(?:\\.?|[^]\\])*(?:]|\Z)|#.*'

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

def to_lark(kind: str, value: Any, added: Container[str] = ()) -> str:
    """Returns a grammar in llguidance's variant of Lark's syntax. Raises ValueError for any other
    kind or value.

    added: texts of tokens that were added to the vocabulary, for structural tags.
    """
    if kind == "grammar" and re.search(RULE, value):
        value = ebnf_to_lark(value)
    if kind in ("json", "json_object"):
        lark = json_to_lark({"type": "object"} if kind == "json_object" else value)
    elif kind == "choice" and value and isinstance(value, (list, tuple)):
        # one terminal: llguidance cannot run thousands of alternatives; `join` refuses other types
        lark = "start: TEXT\nTEXT: " + " | ".join(json.dumps("".join([text])) for text in value)
    elif kind == "regex":
        lark = f"start: /{regex_to_lark(common_regex(value), '')}/"
    elif kind == "grammar" and value.count(":") > MOST_RULES:
        raise ValueError(f"a grammar can have at most {MOST_RULES} rules")
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


def ebnf_to_lark(text: str) -> str:
    r"""Translates a grammar in the EBNF of llama.cpp and XGrammar (GBNF) by llguidance's function.

    This makes terminals of all rules but root and recursive ones. Of two terminals in a row, the
    first takes the longest text. So root gets another name here: without recursion, all of the
    grammar is one terminal. A rule named start gets another name, too, since the function calls
    root so. An empty text at the end of each group keeps the parentheses of a group that is only a
    repetition, which the function would drop.

    Raises ValueError for what the function gets wrong: letters such as \u00e9, `.`, sets such as
    [a&&b], and names that differ only in case, or in - and _.
    """
    names = re.findall(RULE, text)
    folded = {name.upper().replace("-", "_") for name in names}
    parts = [part for part in re.findall(NO_NAMES, text) if part[0] != "#"]
    odd = re.findall(r"(?<!\\)(?:\\\\)*(\\[xuU])|(^\[.*(?:&&|--|~~))", "\n".join(parts), re.M)
    if odd or "." in re.sub(NO_NAMES, "", text):
        raise ValueError("EBNF with \\x, \\u, \\U, a point, or &&, -- or ~~ in a class is not "
                         "supported: write Lark")
    if "root" not in names or len(folded) < len(names):
        raise ValueError("EBNF needs a rule with the name root, and each name once, whatever the "
                         "case of its letters, with _ or -")
    # longer than any name
    prefix = f"whole-{max(names, key=len)}-"
    text = re.sub(rf"({NO_NAMES})|(?<![\w-])(root|(?i:start))(?![\w-])|\)",
                  lambda part: part[1] or (prefix + part[2] if part[2] else ' "")'), text)
    return gbnf_to_lark(f"root ::= {prefix}root\n{text}").removeprefix("%llguidance {}")


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
