"""A batch job that survives crashes: a request in each input line, a result in each output line.

    python examples/batch.py --model models/tiny-qwen3 -i requests.jsonl -o results.jsonl

A request is a line of OpenAI's batch format, as for vLLM's `run-batch`, or simply {"prompt": "12 +
34 =", "max_tokens": 8}. A result is a line of OpenAI's output format, written as soon as the
request has finished. The line number of a request is its id, and its seed if it has no other. A bad
line becomes an error with its number; with --strict, the exit status is then 1.

The same command, started again after a crash, a full disk or `kill -9`, computes the missing
results. If you delete a line of the results, it is computed again. Lines can be appended to the
input. If other lines have changed, the job ends before it writes anything: a result has a hash of
its line and of the model. Of the input, a window and eight bytes for each line are in memory.
"""

import argparse
import codecs
import fcntl
import json
import math
import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanoengine.features import naming
from nanoengine_extensions.chat import render

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3"
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"

# the fields of a body
SAMPLING = {each.name for each in fields(SamplingParams)} - {
    "detokenize", "logits_processors", "prompt_logprobs", "prompt_logprobs_start"}
TEMPLATE = {"add_generation_prompt", "chat_template", "chat_template_kwargs",
            "continue_final_message", "tools"}
OF_CHATS = {"messages", "max_completion_tokens", "top_logprobs"}
OF_BOTH = {"response_format", "stream", "stream_options"}
KNOWN = {CHAT: SAMPLING | OF_BOTH | OF_CHATS | TEMPLATE,
         COMPLETION: SAMPLING | OF_BOTH | {"prompt"}}
IGNORED = {"cache_salt", "metadata", "model", "parallel_tool_calls", "prompt_cache_key",
           "request_id", "safety_identifier", "service_tier", "store", "user"}
# the only value without an effect
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "echo": False, "modalities": ["text"], "priority": 0,
    "tool_choice": "none", "use_beam_search": False}

BEGIN_OF_RESULT = b'{"id": "line-'

# -------------------------------------------------------------------------------- one request


@dataclass(eq=False)
class Request:
    """The request in a line; `read` fills in its fields. serve.py uses the rest."""

    number: int
    line_hash: int = 0
    custom_id: Any = None
    url: Any = COMPLETION
    params: SamplingParams = field(default_factory=SamplingParams)
    prompts: list[Any] = field(default_factory=list)
    streams: bool = False
    with_usage: bool = False

    num_completions = property(lambda self: len(self.prompts) * self.params.n)

    def read(self, line: bytes, llm: LLM) -> Any:
        """Reads the line; returns the prompt. Raises an error for unsupported options."""
        row = object_of(line)
        self.custom_id = row.pop("custom_id", None)
        if "prompt" in row:
            row = {"url": COMPLETION, "body": row}
        row = {"method": "POST", "url": None, "body": None} | row
        self.url = row["url"]
        is_known = self.url in (CHAT, COMPLETION) and row["method"] == "POST" and len(row) == 3
        if not is_known or not isinstance(row["body"], dict):
            raise ValueError(f"a request has custom_id, method POST, url {CHAT} or {COMPLETION}, "
                             "an object as its body, and nothing else")
        self.read_body(row["body"], llm)
        if len(self.prompts) > 1:
            raise ValueError("prompt must be one text or list of token ids in a batch")
        if self.streams:
            raise ValueError("stream must be false in a batch")
        if self.params.seed is None:
            self.params.seed = self.number
        return self.prompts[0]

    def read_call(self, data: bytes, llm: LLM, most: int) -> None:
        """Reads the body of a call over HTTP, with at most this many completions, and tokenizes.

        Raises errors as `read_body` does.
        """
        body = object_of(data)
        # the program of a client, and what a client expects to be parsed in the answer
        for name in {"chat_template", "tools"} & body.keys():
            raise ValueError(f"{name} is not supported")
        self.read_body(body, llm)
        if self.num_completions > most:
            raise ValueError(f"n={self.params.n} for {len(self.prompts)} prompts is not accepted: "
                             f"it must be at most {most} completions together")
        with naming("prompt"):
            self.prompts = [
                llm.get_tokenizer().encode(each, verbose=False) if isinstance(each, str) else each
                for each in self.prompts]

    def read_body(self, body: dict[str, Any], llm: LLM) -> None:
        """Reads a body. Raises ValueError, whose message begins with the name of a parameter."""
        # null means the default
        body = {name: value for name, value in body.items() if value is not None}
        for name in body.keys() - KNOWN[self.url] - IGNORED:
            if name not in NEUTRAL or body[name] != NEUTRAL[name]:
                raise ValueError(f"{name}={body[name]!r} is not supported by {self.url}")
        self.streams = body.get("stream", False)
        options = body.get("stream_options", {})
        if self.streams not in (False, True):
            raise ValueError("stream must be true or false")
        if self.streams and body.get("logprobs", False) is not False:
            raise ValueError("logprobs are not supported in a stream")
        if not isinstance(options, dict):
            raise ValueError("stream_options must be an object")
        self.with_usage = options.get("include_usage", False)
        self.params = self._sampling_params(body, llm.get_default_sampling_params())
        if self.url == CHAT:
            options = {name: body[name] for name in TEMPLATE & body.keys()}
            self.prompts = render(llm.inputs, [body.get("messages")], **options)
            return
        prompt = body.get("prompt")
        if not isinstance(prompt, (str, list)) or prompt == []:
            raise ValueError("prompt must be a text, a list of token ids, or a list of these, "
                             "and not empty")
        are_several = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
        self.prompts = prompt if are_several else [prompt]

    def _sampling_params(self, body: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
        given = {"max_tokens": 16} | {name: body[name] for name in SAMPLING & body.keys()}
        if "logit_bias" in given:
            with naming("logit_bias"):
                given["logit_bias"] = {int(key): bias for key, bias in body["logit_bias"].items()}
        if "response_format" in body:
            given["structured_outputs"] = grammar_of(body["response_format"])
        if self.url == CHAT:
            # None: as many as fit
            given["max_tokens"] = body.get("max_tokens")
            if "max_completion_tokens" in body:
                with naming("max_completion_tokens"):
                    most = SamplingParams(max_tokens=body["max_completion_tokens"])
                given["max_tokens"] = most.max_tokens
            has_logprobs = body.get("logprobs", False)
            if has_logprobs not in (False, True) or body.get("top_logprobs") and not has_logprobs:
                raise ValueError("logprobs must be true or false, and true for top_logprobs")
            given["logprobs"] = body.get("top_logprobs", 0) if has_logprobs else None
        return replace(defaults, **given)

    def response(self, outputs: list[RequestOutput], model: str) -> dict[str, Any]:
        """Returns the answer that a server would send, for one prompt or several.

        Raises RuntimeError for a completion that could not go on.
        """
        outputs = sorted(outputs, key=lambda each: each.index)
        pairs = [(each, completion) for each in outputs for completion in each.outputs]
        for _, completion in pairs:
            if completion.finish_reason == "error":
                raise RuntimeError(completion.stop_reason)
        num_prompt_tokens = sum(len(each.prompt_token_ids) for each in outputs)
        num_tokens = sum(len(completion.token_ids) for _, completion in pairs)
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens,
                 "total_tokens": num_prompt_tokens + num_tokens}
        return {
            "id": f"cmpl-line-{self.number}",
            "object": "chat.completion" if self.url == CHAT else "text_completion",
            "created": int(time.time()), "model": model,
            "choices": [self._choice(*pair) for pair in pairs], "usage": usage}

    async def chunks(self, outputs: AsyncIterator[RequestOutput],
                     model: str) -> AsyncIterator[dict[str, Any]]:
        """Yields what is new in each output, as a server would stream it."""
        last: dict[int, RequestOutput] = {}
        # the length of the text and the finish_reason that were sent, by choice
        sent: dict[int, Any] = {}
        head = self.response([], model) | {"usage": None}
        head["object"] += ".chunk" if self.url == CHAT else ""
        async for output in outputs:
            last[output.index] = output
            for choice in self.response([output], model)["choices"]:
                text = choice.pop("message")["content"] if self.url == CHAT else choice["text"]
                before = sent.get(choice["index"])
                now = sent[choice["index"]] = len(text), choice["finish_reason"]
                if now != before:
                    text = text[before[0] if before else 0:]
                    role = {} if before else {"role": "assistant"}
                    is_chat = self.url == CHAT
                    new = {"delta": role | {"content": text}} if is_chat else {"text": text}
                    yield head | {"choices": [choice | new]}
        if self.with_usage:
            yield head | {"usage": self.response([*last.values()], model)["usage"]}

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        pairs = zip(completion.logprobs or [], completion.token_ids)
        entries = [self._logprob(*pair) for pair in pairs]
        content: dict[str, Any] = {"text": completion.text}
        tokens = [entry["token"] for entry in entries]
        logprobs: dict[str, Any] = {
            "tokens": tokens, "text_offset": [0, *accumulate(map(len, tokens))][:-1],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [entry["top_logprobs"] for entry in entries]}
        if self.url == CHAT:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            content, logprobs = {"message": message}, {"content": entries}
        return content | {
            "index": output.index * self.params.n + completion.index,
            "logprobs": logprobs if entries else None,
            "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _logprob(self, found: dict[int, Any], token_id: int) -> dict[str, Any]:
        """Returns OpenAI's entry for a token of a chat. Several likeliest tokens can have the same
        text, so that they are a list for completions, too."""
        count = self.params.logprobs
        likeliest = sorted(found.values(), key=lambda each: each.rank)
        top = [described(each) for each in likeliest if count == -1 or each.rank <= count]
        return described(found[token_id]) | {"top_logprobs": top}


def object_of(data: bytes) -> dict[str, Any]:
    with naming("JSON"):
        row = json.loads(data, parse_float=finite, parse_constant=finite)
    if not isinstance(row, dict):
        raise ValueError("JSON must be an object here")
    return row


def finite(text: str) -> float:
    """Returns the number in a text. Raises an error for what cannot be written as JSON: 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON, or too large")
    return number


def grammar_of(response_format: Any) -> dict[str, Any] | None:
    """Returns OpenAI's `response_format` as `SamplingParams.structured_outputs`."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise ValueError(f"response_format={response_format!r} is not supported")


def described(logprob: Any) -> dict[str, Any]:
    """Returns a token and its log-probability; JSON has no infinity, so it is -9999 as in vLLM."""
    token = logprob.decoded_token or ""
    return {"token": token, "logprob": max(logprob.logprob, -9999.0),
            "bytes": list(token.encode())}


# -------------------------------------------------------------------------------- all requests


def hash_of(number: int, line: bytes, model: str) -> int:
    """Returns what a request must have in common with its result, 0 for a blank line.

    A byte order mark and the characters at the end of the line do not count.
    """
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    return xxh3_64_intdigest(b"%b\n%b" % (model.encode(), text), number) | 1 if text else 0


def drop_finished(hashes: array, source: Path, results: Path) -> tuple[int, int]:
    """Sets the hashes of the lines that have a result to 0, and removes an incomplete last result.

    Returns the number of results, and how many of them are errors. Exits if a result is not that of
    its line.
    """
    num_finished = 0
    num_errors = 0
    num_bytes = 0
    with results.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not BEGIN_OF_RESULT.startswith(line[:len(BEGIN_OF_RESULT)]):
                sys.exit(f"{results} has a line that is no result of this job: {line[:60]!r}")
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                number = int(record["id"].removeprefix("line-"))
                line_hash = int(record["line_hash"], 16)
                num_errors += bool(record["error"])
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                sys.exit(f"{results}, line {place} is damaged ({error}): {line[:60]!r}. Without "
                         "this line, the same command computes what was in it again.")
            if not 0 < number <= len(hashes) or hashes[number - 1] != line_hash:
                sys.exit(f"{results}, line {place} is not the result of line {number} of {source}: "
                         "one of them was edited, or the model is another, or the result is there "
                         "twice. Undo the change, or choose a new --output-file.")
            hashes[number - 1] = 0
            num_finished += 1
            num_bytes += len(line)
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
                sys.exit(f"{file.name}, line {number} has changed while the job runs. The same "
                         "command continues.")
            yield number, line_hash, line


@dataclass
class Job:
    """Keeps the engine full until all lines are done.

    lines: the lines to do, from `unfinished`. results: an unbuffered file for the results.
    active: the requests in the engine, each with the engine's own, by request_id.
    """

    llm: LLM
    model: str
    lines: Iterator[tuple[int, int, bytes]]
    results: BinaryIO
    bar: tqdm
    num_errors: int
    active: dict[str, tuple[Request, Any]] = field(default_factory=dict)

    def run(self) -> None:
        try:
            self._fill()
            while self.active:
                for queued in self.llm.step():
                    if queued.is_finished:
                        request, _ = self.active.pop(queued.request_id)
                        self._finish(request, queued.output())
                self._fill()
        finally:
            self.llm.abort([queued for _, queued in self.active.values()])

    def _fill(self) -> None:
        """Queues twice as many requests as can run: the engine never waits; memory stays
        bounded."""
        num_free = 2 * self.llm.config.max_num_seqs - len(self.active)
        while num_free > 0 and (found := next(self.lines, None)):
            number, line_hash, line = found
            request = Request(number, line_hash)
            try:
                with naming(f"line {number}"):
                    prompt = request.read(line, self.llm)
                    queued, = self.llm.add([prompt], request.params)
                self.active[queued.request_id] = request, queued
                num_free -= 1
            except ValueError as error:
                self._write(request, 400, error=str(error))

    def _finish(self, request: Request, output: RequestOutput) -> None:
        try:
            body = request.response([output], self.model)
        except RuntimeError as error:
            self._write(request, 500, error=f"line {request.number}: {error}")
        else:
            self._write(request, 200, body)

    def _write(self, request: Request, status: int, body: dict[str, Any] | None = None,
               error: str | None = None) -> None:
        key = f"line-{request.number}"
        response = {"status_code": status, "request_id": f"batch-{key}", "body": body}
        # the id comes first, where `drop_finished` looks for it
        record = {"id": key, "custom_id": request.custom_id, "response": response,
                  "error": error and {"message": error}, "line_hash": f"{request.line_hash:x}"}
        data = json.dumps(record).encode() + b"\n"
        # a disk that is nearly full writes only a part
        while data:
            data = data[self.results.write(data):]
        self.num_errors += bool(error)
        self.bar.set_postfix_str(f"{self.num_errors} errors", refresh=False)
        self.bar.update()


def run(flags: argparse.Namespace) -> None:
    model = str(flags.model)
    with flags.input_file.open("rb") as file, flags.output_file.open("ab", 0) as results:
        # held until the file is closed, however the process ends
        fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hashes = array("Q", (hash_of(*each, model) for each in enumerate(file, 1)))
        total = sum(map(bool, hashes))
        num_finished, num_errors = drop_finished(hashes, flags.input_file, flags.output_file)
        with (LLM(model, **flags.options) as llm,
              tqdm(total=total, initial=num_finished, desc="Requests") as bar):
            lines = unfinished(file, hashes, model)
            job = Job(llm, model, lines, results, bar, num_errors)
            job.run()
        has_grown = any(map(bytes.strip, file))
    if job.num_errors:
        print(f"{job.num_errors} of {total} lines failed: their records in {flags.output_file} say "
              "why", file=sys.stderr)
    if has_grown:
        sys.exit(f"{flags.input_file} has grown meanwhile. The same command computes the rest.")
    if job.num_errors and flags.strict:
        sys.exit(1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input-file", type=Path, required=True)
    parser.add_argument("-o", "--output-file", type=Path, required=True)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON",
                        help="""keywords of LLM: '{"max_num_seqs": 64}'""")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a line failed")
    flags = parser.parse_args(arguments)
    output = flags.output_file
    if output.exists() and not output.is_file():
        parser.error(f"{output} is not a file of results that a job can continue")
    try:
        run(flags)
    except BlockingIOError:
        sys.exit(f"{output}: another job is writing to this file")
    except (OSError, KeyboardInterrupt) as error:
        has_results = output.is_file() and output.stat().st_size
        kept = f" {output} has the results; the same command continues." if has_results else ""
        sys.exit(f"Stopped by {str(error) or repr(error)}.{kept}")


if __name__ == "__main__":
    main()
