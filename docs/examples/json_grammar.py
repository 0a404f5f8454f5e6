"""Answers in JSON with a given schema: a grammar permits only tokens that fit.

    pip install ".[grammar]"                             # llguidance
    python docs/examples/json_grammar.py                      # two chats with the bundled model
    python docs/examples/json_grammar.py "Describe a cat." --model Qwen/Qwen3-0.6B --seed 3

The bundled model never saw JSON: the grammar produces the braces, and the model guesses the rest.
"""

import argparse
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanoengine import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"
QUESTIONS = ["Tell me a story about a fox.", "12 + 34"]


class Animal(BaseModel):
    """The answer's schema. Every field has a bound, so that each answer ends."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog", "fox"]
    age: Annotated[int, Field(ge=0, le=99)]
    friends: Annotated[list[Literal["bear", "mouse", "owl"]], Field(min_length=1, max_length=3)]


# A token has at least one character, so no answer has more tokens than the longest has characters.
LONGEST = '{"kind": "cat", "age": 99, "friends": ["mouse", "mouse", "mouse"]}'


def ask(llm: LLM, questions: list[str], seed: int) -> list[Animal]:
    """Returns an answer for each question."""
    params = [
        SamplingParams(seed=seed + i, max_tokens=len(LONGEST) + 1,
                       structured_outputs={"json": Animal.model_json_schema()})
        for i in range(len(questions))]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [Animal.model_validate_json(output.outputs[0].text) for output in outputs]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    with LLM(flags.model) as llm:
        for question, animal in zip(flags.questions, ask(llm, flags.questions, flags.seed)):
            print(f"{question} -> {animal!r}")


if __name__ == "__main__":
    main()
