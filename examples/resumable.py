"""A long job that can be stopped at any time: the next start continues where it stopped.

    python examples/resumable.py prompts.txt answers.jsonl

prompts.txt, in UTF-8, has a prompt in each line that is not blank. The number of the line, from 0,
is the prompt's id. Each finished prompt becomes a line of answers.jsonl, in the order in which they
finish. The id is also the seed, so that an answer does not depend on where the job was stopped.
"""

import argparse
import json
import os
from pathlib import Path

from nanoengine import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3"


def read_prompts(file: Path) -> dict[int, str]:
    """Returns the prompts by id. Only newlines, perhaps after carriage returns, end a line."""
    try:
        lines = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{file} cannot be read: {error}") from error
    return {i: line for i, line in enumerate(lines) if line.strip()}


def finished_ids(answers: Path) -> set[int]:
    """Returns the ids in the file. Removes an incomplete last line."""
    if not answers.exists():
        return set()
    content = answers.read_bytes()
    whole = content[:content.rfind(b"\n") + 1]
    os.truncate(answers, len(whole))
    try:
        return {json.loads(line)["id"] for line in whole.splitlines() if line}
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{answers} has a line without an id: {error!r}") from error


def run(llm: LLM, prompts: dict[int, str], answers: Path, max_tokens: int) -> None:
    """Writes an answer for each prompt that has none in the file."""
    finished = finished_ids(answers)
    missing = [i for i in prompts if i not in finished]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=max_tokens) for i in missing]
    with answers.open("a") as file:
        for output in llm.stream([prompts[i] for i in missing], params):
            if output.finished:
                completion = output.outputs[0]
                # output.index counts within this call
                record = {"id": missing[output.index], "prompt": output.prompt,
                          "text": completion.text, "finish_reason": completion.finish_reason}
                file.write(json.dumps(record) + "\n")
                file.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--max-tokens", type=int, default=64)
    flags = parser.parse_args(arguments)
    prompts = read_prompts(flags.prompts)
    with LLM(flags.model) as llm:
        run(llm, prompts, flags.answers, flags.max_tokens)


if __name__ == "__main__":
    main()
