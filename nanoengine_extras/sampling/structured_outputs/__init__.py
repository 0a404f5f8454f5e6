"""`SamplingParams.structured_outputs`: texts that a grammar describes.

`pip install ".[grammar]"` installs the library that it needs, llguidance.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor

from nanoengine.errors import Condition, naming, rejected
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Sequence
from nanoengine_extras.sampling import send
from nanoengine_extras.sampling.structured_outputs.grammar import (
    Grammar, LLMatcher, permitted, reason_of, to_lark)

CONDITIONS: list[Condition] = [
    ("structured_outputs", lambda p: p.structured_outputs != {},
     "one of {{'json': …}}, {{'regex': …}} and so on")]


def check(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns `wanted`. Raises ValueError if no grammar can be made from it. Needs no tokenizer.

    name: its name for the user
    """
    (kind, value), = wanted.items()
    with naming(name):
        if error := LLMatcher.validate_grammar(to_lark(kind, value)):
            raise ValueError(reason_of(error))
    return wanted


def from_openai(response_format: Any) -> dict[str, Any]:
    """Returns OpenAI's `response_format`, of another type than text, as `structured_outputs`."""
    match response_format:
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return check("response_format", {"json": schema})
    raise rejected("response_format", response_format, "text, json_object or a whole json_schema")


class Grammars(Feature):
    """Keeps the place of a sequence in its grammar: a `Grammar`."""

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        p = seqs[0].params
        if p.structured_outputs is None:
            return
        tokenizer = inputs.get_tokenizer()
        ends = [token for token in {*p.stop_token_ids, *inputs.eos_tokens}
                if token < inputs.vocab_size]
        for seq in seqs:
            seq.kept["grammar"] = Grammar(
                p.structured_outputs, tokenizer, inputs.vocab_size, ends, seq.num_tokens)
            seq.edits += ("Grammars",)
            seq.needs_tokens = True

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        if grammar := seq.kept.get("grammar"):
            copy.kept["grammar"] = grammar.copy()

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        """Forbids the tokens that a sequence's grammar does not permit.

        The masks of all rows cross to the device together. Before `min_tokens`, tokens that end the
        sequence are forbidden, too, unless no other token is left: a complete text may end early.
        """
        grammars = {row: seq.kept["grammar"] for row, seq in enumerate(seqs)
                    if "grammar" in seq.kept}
        for row, grammar in grammars.items():
            grammar.take(seqs[row].token_ids)
        mask = np.ones(tuple(scores.shape), bool)
        mask[[*grammars]] = permitted([*grammars.values()], scores.shape[1])
        scores.masked_fill_(send(~mask, scores.device), -math.inf)
        for row, grammar in grammars.items():
            seq = seqs[row]
            if seq.num_tokens < seq.num_prompt_tokens + seq.params.min_tokens:
                ends = send(np.array(grammar.ends, np.int64), scores.device)
                others = scores[row].index_fill(0, ends, -math.inf)
                scores[row] = others.where(others.amax() > -math.inf, scores[row])
