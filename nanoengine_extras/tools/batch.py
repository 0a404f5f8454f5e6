"""A batch job that survives crashes: a request in each input line, a result in each output line.

    python -m nanoengine batch --model Qwen/Qwen3-0.6B -i requests.jsonl -o results.jsonl

A request is a line of OpenAI's batch format, as for vLLM's `run-batch`, or simply {"prompt": "12 +
34 =", "max_tokens": 8}, or {"messages": …} with parameters. A result is a line of OpenAI's output
format, written as soon as the request has finished. The line number of a request is its id, and its
seed if it has no other; a `custom_id` is only copied, so two lines can have the same one. A bad
line becomes an error with its number; with --strict, the exit status is then 1.

The same command, started again after a crash, a full disk or `kill -9`, computes the missing
results. If you delete a line of the results, it is computed again. Lines can be appended to the
input. If other lines have changed, the job ends before it writes anything; it notices, since each
result contains a hash of its line and of the model. Only a window of the input, and 8 bytes for
each line, are in memory.
"""

import argparse
import codecs
import json
import os
import sys
import traceback
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from nanoengine import LLM
from nanoengine.errors import naming, rejected
from nanoengine.features import extension, optional
from nanoengine_extras.tools import Parser, new_file, options_of

openai = extension("tools.openai_format", "batch")
# absent on Windows, where nothing keeps two jobs from writing to one file
fcntl = optional("fcntl")

BEGIN_OF_RESULT = b'{"id": "line-'


class Line:
    """The request in a line; `read` fills it in."""

    def __init__(self, number: int, line_hash: int = 0) -> None:
        self.number = number
        self.line_hash = line_hash
        self.custom_id: Any = None
        self.body = openai.Body(openai.COMPLETION, f"line-{number}")

    def read(self, line: bytes, llm: LLM, finds_calls: bool = False) -> None:
        """Raises ValueError for a line that is not a request, and for unsupported options.

        finds_calls: whether to look for tool calls in the answer.
        """
        row = openai.object_of(line)
        self.custom_id = row.pop("custom_id", None)
        if "prompt" in row:
            row = {"url": openai.COMPLETION, "body": row}
        elif "messages" in row:
            row = {"url": openai.CHAT, "body": row}
        row = {"method": "POST", "url": None, "body": None} | row
        urls = (openai.CHAT, openai.COMPLETION)
        is_known = row["url"] in urls and row["method"] == "POST" and len(row) == 3
        if not is_known or not isinstance(row["body"], dict):
            raise ValueError('a request is {"prompt": …} or {"messages": …} with its parameters, '
                             f"or has custom_id, method POST, url {' or '.join(urls)}, an object "
                             "as its body, and nothing else")
        self.body.url = row["url"]
        self.body.read(row["body"], llm, finds_calls)
        if len(self.body.prompts) > 1:
            raise ValueError("in a batch, prompt must be one string or one list of token ids")
        if self.body.streams:
            raise ValueError("stream must be false in a batch")
        if self.body.params.seed in (None, -1):
            self.body.params.seed = self.number


def hash_of(number: int, line: bytes, model: str) -> int:
    """Returns the hash that a request shares with its result; 0 for a blank line.

    A byte order mark does not count, nor do spaces and line breaks at the ends of the line.
    """
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    return xxh3_64_intdigest(b"%b\n%b" % (model.encode(), text), number) | 1 if text else 0


def drop_finished(hashes: array, source: Path, results: Path) -> tuple[int, int]:
    """Sets the hashes of the lines that have a result to 0, and removes an incomplete last result.

    Returns the number of results, and how many of them are errors. Exits if a result does not
    belong to its line.
    """
    num_finished = num_errors = num_bytes = 0
    first = ""
    wrong = []
    with results.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not BEGIN_OF_RESULT.startswith(line[:len(BEGIN_OF_RESULT)]):
                sys.exit(f"{results} has a line that is not a result of this job, {line[:60]!r}: "
                         "choose a new --output-file.")
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                number = int(record["id"].removeprefix("line-"))
                line_hash = int(record["line_hash"], 16)
                num_errors += bool(record["error"])
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                sys.exit(f"{results}, line {place} is damaged ({error}): {line[:60]!r}. Delete "
                         "this line: the same command then computes what was in it again.")
            if not 0 < number <= len(hashes) or hashes[number - 1] != line_hash:
                first = first or f"line {place} is not the result of line {number} of {source}"
                wrong.append(place)
                continue
            hashes[number - 1] = 0
            num_finished += 1
            num_bytes += len(line)
    if wrong:
        sys.exit(f"{results}, {first}: one of them was edited, the model has changed, or the "
                 "result is there twice. Undo the change, or choose a new --output-file, or delete "
                 f"all {len(wrong)} such lines of the results, which are then computed again: "
                 + ", ".join(map(str, wrong[:99])) + ", …" * (len(wrong) > 99))
    os.truncate(results, num_bytes)
    return num_finished, num_errors


def unfinished(file: BinaryIO, hashes: array, model: str) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the hash and the text of each line whose hash is not 0.

    Exits if such a line has changed since it was hashed.
    """
    file.seek(0)
    for number, line_hash in enumerate(hashes, 1):
        line = file.readline()
        if line_hash:
            if hash_of(number, line, model) != line_hash:
                sys.exit(f"{file.name}, line {number} changed during the job. The same command "
                         "continues.")
            yield number, line_hash, line


@dataclass
class Job:
    """Keeps the engine full until all lines are done.

    lines: the lines to do, from `unfinished`. results: an unbuffered file for the results.
    finds_calls: whether to look for tool calls in answers.
    active: the lines in the engine, each with the engine's request, by request_id.
    """

    llm: LLM
    model: str
    lines: Iterator[tuple[int, int, bytes]]
    results: BinaryIO
    bar: tqdm
    num_errors: int
    finds_calls: bool
    active: dict[str, tuple[Line, Any]] = field(default_factory=dict)

    def run(self) -> None:
        try:
            self._fill()
            while self.active:
                for queued in self.llm.step():
                    if queued.is_finished:
                        request, _ = self.active.pop(queued.request_id)
                        try:
                            body = request.body.response([queued.output()], self.model)
                            self._write(request, 200, body)
                        except RuntimeError as error:
                            self._write(request, 500, error=f"line {request.number}: {error}")
                self._fill()
        finally:
            self.llm.abort([queued for _, queued in self.active.values()])

    def _fill(self) -> None:
        """Queues twice as many requests as can run: the engine never waits, and memory stays
        bounded."""
        num_free = 2 * self.llm.config.max_num_seqs - len(self.active)
        while num_free > 0 and (found := next(self.lines, None)):
            number, line_hash, line = found
            request = Line(number, line_hash)
            try:
                with naming(f"line {number}"):
                    request.read(line, self.llm, self.finds_calls)
                    queued, = self.llm.add(request.body.prompts, request.body.params)
                self.active[queued.request_id] = request, queued
                num_free -= 1
            except ValueError as error:
                self._write(request, 400, error=str(error))

    def _write(self, request: Line, status: int, body: dict[str, Any] | None = None,
               error: str | None = None) -> None:
        key = f"line-{request.number}"
        # the id comes first, where `drop_finished` looks for it
        record = {"id": key, "custom_id": request.custom_id, "response": {
                      "status_code": status, "request_id": f"batch-{key}", "body": body},
                  "error": error and {"message": error}, "line_hash": f"{request.line_hash:x}"}
        data = json.dumps(record).encode() + b"\n"
        # if the disk is nearly full, only a part is written
        while data:
            data = data[self.results.write(data):]
        self.num_errors += bool(error)
        self.bar.set_postfix_str(f"{self.num_errors} errors", refresh=False)
        self.bar.update()


def run(flags: argparse.Namespace) -> None:
    model = str(flags.model)
    if flags.tool_call_parser:
        extension("tools.tool_calls", "--tool-call-parser")
    with flags.input_file.open("rb") as file, flags.output_file.open("ab", 0) as results:
        if fcntl:
            # held until the file is closed, however the process ends
            fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hashes = array("Q", (hash_of(*each, model) for each in enumerate(file, 1)))
        total = sum(map(bool, hashes))
        num_finished, num_errors = drop_finished(hashes, flags.input_file, flags.output_file)
        with (LLM(model, **options_of(flags)) as llm,
              tqdm(total=total, initial=num_finished, desc="Requests") as bar):
            job = Job(llm, model, unfinished(file, hashes, model), results, bar, num_errors,
                      flags.tool_call_parser is not None)
            job.run()
        has_grown = any(map(bytes.strip, file))
    if job.num_errors:
        print(f"{job.num_errors} of {total} lines failed: their records in {flags.output_file} say "
              "why; delete these records, and run the same command to try again", file=sys.stderr)
    if has_grown:
        sys.exit(f"{flags.input_file} grew during the job. The same command computes the rest.")
    if job.num_errors and flags.strict:
        sys.exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Runs a job, or the rest of it."""
    parser = Parser("python -m nanoengine batch", description="answers a file of requests; the "
                    "same command, started again, computes what is missing")
    parser.add_argument("-i", "--input-file", type=Path, required=True)
    parser.add_argument("-o", "--output-file", type=new_file, required=True)
    parser.add_argument("--tool-call-parser", choices=["hermes"], help="format of tool calls")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a line failed")
    parser.add_llm()
    flags = parser.parse_args(arguments)
    output = flags.output_file
    # raises ValueError without this feature, as a job runs steps by hand
    extension("running.shared_steps", "tools.batch")
    with parser.faults():
        if not flags.input_file.is_file():
            raise rejected("--input-file", f"{flags.input_file}", "a file that exists")
        if output.exists() and not output.is_file():
            raise ValueError(f"{output} is not a file of results that a job can continue: choose "
                             "another")
        try:
            run(flags)
        except ValueError:
            raise
        except BlockingIOError:
            sys.exit(f"{output}: another job is writing to this file: wait for it, or choose "
                     "another")
        except (Exception, KeyboardInterrupt) as error:
            if not isinstance(error, (OSError, KeyboardInterrupt)):
                # the last line still says what to do
                traceback.print_exc()
            sys.exit(f"Stopped by {str(error) or repr(error)}. {output} has the results; run the "
                     "same command to go on.")


if __name__ == "__main__":
    main()
