"""Many engines, on one machine or on many: Ray Data gives them the rows of files.

    python docs/examples/ray_data.py -i prompts.jsonl -o answers --replicas 2
    python docs/examples/ray_data.py -i s3://bucket/prompts --input-format parquet \\
        -o s3://bucket/answers --replicas 64 --address auto --model Qwen/Qwen3-0.6B

A row has a `prompt` (a text or a list of token ids) or `messages` (a conversation), and optionally
`sampling_params`, such as {"max_tokens": 8}, and `chat_template_kwargs`. The output has all columns
of the row, and those of RESULT. A bad row comes out with its `error`.

Ray reads and writes the files, and starts the replicas. It replaces a replica that dies, and
repeats its rows. Each replica has its own engine. It gets new rows before the last ones have
finished, so that the engine stays full. A row without a seed gets one made from the row itself, so
that its tokens depend neither on the replica nor on the order.
"""

import argparse
import codecs
import io
import json
import math
import os
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import ray
import xxhash
from ray.data.block import BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.errors import naming
from nanoengine_extras.tools.chat import render

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"
FORMATS = ("jsonl", "parquet")
RESULT = pyarrow.schema({
    "generated_text": pyarrow.string(), "generated_tokens": pyarrow.list_(pyarrow.int32()),
    "finish_reason": pyarrow.string(), "num_input_tokens": pyarrow.int32(),
    "num_generated_tokens": pyarrow.int32(), "error": pyarrow.string()})
NO_COLUMN = {"n", "logprobs", "prompt_logprobs"}  # the output has no columns for these


class Replica:
    """One engine. Ray creates it in its own process, and calls it from several threads at once.

    The rows of all calls run in the same steps.
    """

    def __init__(self, model: str, options: dict[str, Any], sampling: dict[str, Any],
                 output_format: str) -> None:
        self.llm = LLM(model, **options)
        self.sampling = sampling
        self.output_format = output_format

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        is_text = batch.column_names == ["line"]
        rows = [*map(row_of, batch["line"].to_pylist())] if is_text else batch.to_pylist()
        try:
            # all are in the engine before it waits for the first one
            answers = [self._ask(without_nulls(row)) for row in rows]
            results = [*map(result_of, answers)]
        except BaseException:
            # an engine that has failed gets no more rows: Ray starts another process
            traceback.print_exc()
            os._exit(1)
        if self.output_format == "jsonl":
            lines = [json_of(row | result) for row, result in zip(rows, results)]
            return pyarrow.table({"line": map(str.encode, lines)})
        others = batch.drop_columns([name for name in RESULT.names if name in batch.column_names])
        columns = pyarrow.Table.from_pylist(results, RESULT).columns
        return pyarrow.table([*others.columns, *columns], [*others.column_names, *RESULT.names])

    def _ask(self, row: dict[str, Any]) -> Iterator[RequestOutput] | ValueError:
        """Returns an iterator over the outputs of a row (the last one counts), or the row's
        error."""
        try:
            with naming("row"):
                return self.llm.stream(*self._request(row))
        except ValueError as error:
            return error

    def _request(self, row: dict[str, Any]) -> tuple[list[Any], SamplingParams]:
        """Returns prompt and parameters of a row. Raises an error for unsupported ones."""
        if ("prompt" in row) == ("messages" in row):
            raise ValueError("must be an object with either a prompt or messages")
        params = self.sampling | row.get("sampling_params", {})
        if names := NO_COLUMN & params.keys():
            raise ValueError(f"sampling_params: {', '.join(names)} has no column in the output")
        if "logit_bias" in params:
            params["logit_bias"] = {int(key): bias for key, bias in params["logit_bias"].items()}
        text = json.dumps(row, sort_keys=True, default=str)
        params.setdefault("seed", xxhash.xxh64_intdigest(text.encode(), self.llm.config.seed or 0))
        if "messages" in row:
            prompt, = render(self.llm.inputs, row["messages"],
                             chat_template_kwargs=row.get("chat_template_kwargs"))
        elif not isinstance(prompt := row["prompt"], (str, list)):
            raise ValueError("prompt must be a text or a list of token ids")
        return [prompt], replace(self.llm.get_default_sampling_params(), **params)


def row_of(line: bytes) -> dict[str, Any]:
    """Returns the row in a line. Anything else becomes a row without a prompt."""
    try:
        row = json.loads(line, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {"line": line.decode(errors="replace")}


def finite(text: str) -> float:
    """Returns the number in a text. Raises an error for what cannot be written as JSON: 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number, or is too large")
    return number


def json_of(row: dict[str, Any]) -> str:
    """Returns JSON; columns of Parquet can hold NaN and infinity, which become null."""
    text = json.dumps(row, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda _: None))


def without_nulls(value: Any) -> Any:
    """Drops nulls: Arrow gives every object all keys of its column."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def result_of(answer: Iterator[RequestOutput] | ValueError) -> dict[str, Any]:
    """Waits for a row. Returns its values for RESULT."""
    nothing = dict.fromkeys(RESULT.names)
    if isinstance(answer, ValueError):
        return nothing | {"error": str(answer)}
    output = deque(answer, maxlen=1).pop()
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        return nothing | {"error": completion.stop_reason}
    values = [completion.text, completion.token_ids, completion.finish_reason,
              len(output.prompt_token_ids), len(completion.token_ids)]
    return nothing | dict(zip(RESULT.names, values))


class LineSource(FileBasedDatasource):
    """Reads lines unparsed, so that a bad one is an error of its row, not of the job."""

    def _read_stream(self, f: pyarrow.NativeFile, path: str) -> Iterator[pyarrow.Table]:
        file = io.BufferedReader(f)
        while lines := [*islice(file, 1000)]:
            yield pyarrow.table({"line": [
                line for line in lines if line.removeprefix(codecs.BOM_UTF8).strip()]})


class LineSink(BlockBasedFileDatasink):
    """Writes lines unchanged."""

    def write_block_to_file(self, block: BlockAccessor, file: pyarrow.NativeFile) -> None:
        for line in block.to_arrow()["line"].to_pylist():
            file.write(line + b"\n")


def read(path: str, input_format: str, output_format: str) -> ray.data.Dataset:
    """From JSONL to Parquet, each column needs one type, so a bad line ends the job."""
    if input_format == "parquet":
        return ray.data.read_parquet(path, file_extensions=["parquet"])
    if output_format == "parquet":
        return ray.data.read_json(path, file_extensions=["jsonl", "json"])
    return ray.data.read_datasource(LineSource(path, file_extensions=["jsonl", "json"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input", required=True, help="a file, a folder or a URL")
    parser.add_argument("-o", "--output", required=True, help="a new folder, or its URL")
    parser.add_argument("--input-format", choices=FORMATS, help="default: by the input's ending")
    parser.add_argument("--output-format", choices=FORMATS, help="default: that of the input")
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument("--replicas", type=lambda text: [*map(int, text.split(","))], default=[1],
                        metavar="N or MIN,MAX")
    parser.add_argument("--address", default="local", help="auto, or that of a cluster")
    parser.add_argument("--cpus", type=int, help="of a replica; default: its share")
    parser.add_argument("--gpus", type=float, help="of a replica; default: one a rank, if any")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--batch-size", type=int, default=32, help="rows that Ray sends at once")
    parser.add_argument("--rows-per-file", type=int, default=1000)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON",
                        help="""keywords of LLM: '{"max_num_seqs": 64}'""")
    parser.add_argument("--sampling-params", type=json.loads, default={}, metavar="JSON",
                        help="""for all rows: '{"temperature": 0}'""")
    flags = parser.parse_args()

    # 1. a cluster; on this machine, two more CPUs are declared, for reading and writing
    local = {"num_cpus": max(os.cpu_count() or 1, flags.replicas[-1]) + 2}
    ray.init(flags.address, **local if flags.address == "local" else {})
    resources = ray.cluster_resources()
    if flags.gpus is None:
        flags.gpus = flags.tensor_parallel_size if resources.get("GPU") else 0
    if not flags.gpus and not flags.cpus:
        flags.cpus = max(1, int(resources["CPU"] - 2) // flags.replicas[-1])

    # 2. four times as many rows as can run: waiting rows fill the places of finished batches
    options = {"max_num_seqs": 256, "tensor_parallel_size": flags.tensor_parallel_size}
    options |= flags.options
    num_batches = -(-4 * options["max_num_seqs"] // flags.batch_size)
    input_format = flags.input_format or FORMATS[flags.input.endswith(".parquet")]
    output_format = flags.output_format or input_format
    rows = read(flags.input, input_format, output_format)
    rows = rows.repartition(target_num_rows_per_block=flags.batch_size)
    rows = rows.map_batches(
        Replica, batch_size=flags.batch_size, batch_format="pyarrow",
        fn_constructor_args=(flags.model, options, flags.sampling_params, output_format),
        compute=ray.data.ActorPoolStrategy(
            min_size=flags.replicas[0], max_size=flags.replicas[-1],
            max_concurrent_calls_per_actor=num_batches, max_tasks_in_flight_per_actor=num_batches,
            enable_true_multi_threading=True),
        num_cpus=flags.cpus, num_gpus=flags.gpus)
    writing = {"min_rows_per_file": flags.rows_per_file, "mode": ray.data.SaveMode.ERROR}
    if output_format == "parquet":
        rows.write_parquet(flags.output, **writing)
    else:
        rows.write_datasink(LineSink(flags.output, file_format="jsonl", **writing))


if __name__ == "__main__":
    main()
