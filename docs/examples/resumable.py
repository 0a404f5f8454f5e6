"""A long job that can be stopped at any time: the next start continues where it stopped.

    python docs/examples/resumable.py prompts.txt answers.jsonl

prompts.txt, in UTF-8, has a prompt in each line that is not blank. The number of the line, from 0,
is the prompt's id. Each finished prompt becomes a line of answers.jsonl, in the order in which they
finish. The id is also the seed, so that an answer does not depend on where the job was stopped.

New prompts can be appended. If other prompts, the model or --max-tokens have changed, the job ends
before it writes anything.
"""

import argparse
import json
import os
from pathlib import Path

from nanoengine import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"
BEGIN_OF_ANSWER = b'{"id": '


def read_prompts(file: Path) -> dict[int, str]:
    """Returns the prompts by id. Only newlines, perhaps after carriage returns, end a line."""
    try:
        lines = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{file} cannot be read: {error}") from error
    return {i: line for i, line in enumerate(lines) if line.strip()}


def unanswered(requests: dict[int, dict], answers: Path) -> list[dict]:
    """Returns the requests without an answer in the file. Removes an incomplete last line.

    Exits without changing the file if an answer does not belong to its request.
    """
    missing = requests.copy()
    content = answers.read_bytes() if answers.exists() else b""
    *lines, incomplete = content.split(b"\n")
    if not BEGIN_OF_ANSWER.startswith(incomplete[:len(BEGIN_OF_ANSWER)]):
        # the file is another one
        lines.append(incomplete)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            is_answer = record | missing.pop(record["id"]) == record
        except (ValueError, TypeError, LookupError):
            is_answer = False
        if not is_answer:
            raise SystemExit(
                f"{answers}, line {number} answers none of these prompts with this model and "
                f"max_tokens, or it is a second answer: {line[:60]!r}. Undo what has changed, or "
                "choose a new file for the answers.")
    if incomplete:
        os.truncate(answers, len(content) - len(incomplete))
    return list(missing.values())


def run(llm: LLM, requests: list[dict], answers: Path) -> None:
    """Adds an answer to the file for each request."""
    params = [SamplingParams(temperature=0.8, seed=each["id"], max_tokens=each["max_tokens"])
              for each in requests]
    with answers.open("a") as file:
        for output in llm.stream([each["prompt"] for each in requests], params):
            if output.finished:
                completion = output.outputs[0]
                # output.index counts within this call
                record = requests[output.index] | {
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
    try:
        flags.answers.open("a").close()
    except OSError as error:
        parser.error(f"{flags.answers} cannot be written: {error}")
    common = {"model": str(flags.model), "max_tokens": flags.max_tokens}
    requests = {number: {"id": number, "prompt": prompt} | common
                for number, prompt in read_prompts(flags.prompts).items()}
    missing = unanswered(requests, flags.answers)
    with LLM(flags.model) as llm:
        run(llm, missing, flags.answers)


if __name__ == "__main__":
    main()
