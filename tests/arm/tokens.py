"""Greedy tokens of the bundled model, a line for each way to compute them: to compare machines."""

import sys
from pathlib import Path

from nanoengine import LLM, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3"
# a prompt longer than a block and a span of keys, and short ones beside it
PROMPTS = ["Once upon a time", "47 + 85 =", "sort d b e a =", "count 17 to 23 = " * 12]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    for dtype in ("float32", "bfloat16"):
        for backend in ("numba", "gather"):
            with LLM(MODEL, dtype=dtype, attention_backend=backend, num_kv_blocks=64,
                     max_num_seqs=8) as llm:
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            print(dtype, backend, [output.outputs[0].token_ids for output in outputs])
            print(dtype, backend, "done", file=sys.stderr)


if __name__ == "__main__":
    main()
