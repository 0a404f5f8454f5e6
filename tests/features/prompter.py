"""A model that writes given texts, at the cost of a real one: to measure speculation.

    python tests/features/prompter.py                 # the texts below, with and without
    python tests/features/prompter.py --tokenizer tokenizer.json --runs 5 --folder /tmp/prompter

Speculation pays as often as guesses are right, and random weights write nothing that resembles a
text. A prompter has the shape of any Qwen3 model, and computes all of it, but what it writes is
given: it repeats what stands `distance` tokens before the next one. So a prompt of this length
begins with the text, enciphered:

    prompt    the text, enciphered | what a user would write: a task, a document …
    output    the text

Enciphered tokens have ids of their own. So a lookup finds the text nowhere in the prompt, unless it
is in the part of the user.

How it works: the first head of the first layer attends to the token that stands `distance` before
the next one. Its queries and keys are the same for all tokens; only the rotation (RoPE) makes them
differ, by their distance. Its values are codes of tokens, and the output matrix finds the token of
a code. All other outputs of attention and MLPs are 0.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine_extras.sampling.speculation import PromptLookup

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).parent / "texts"
# the numbers of a code, and how many pairs of a head tell the distance
CODE, PAIRS = 128, 16
Encode = Callable[[str], list[int]]


@torch.no_grad()
def save_prompter(folder: Path, config: dict[str, Any], tasks: dict[str, Any]) -> None:
    """Saves a prompter for tasks, see `make_tasks`, in bfloat16. head_dim must be 128."""
    config = config | {"tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    # The input is the code of the token and a constant; the norms change nothing.
    cipher = {token: place for task in tasks.values()
              for place, token in zip(task["prompt"], task["text"])}
    plain, enciphered = torch.tensor([*cipher]), torch.tensor([*cipher.values()])
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    unit = (config["hidden_size"] / 2) ** 0.5
    codes = F.normalize(torch.randn(len(cipher), CODE))
    embedding.zero_()
    embedding[plain, :CODE] = embedding[enciphered, :CODE] = (codes * unit).bfloat16()
    embedding[:, -1] = unit
    # what attention writes has its place after the input's code
    head.zero_()
    head[plain, CODE:2 * CODE] = codes.bfloat16()

    attention = model.model.layers[0].self_attn
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    half = config["head_dim"] // 2
    q[:2 * half] = k[:2 * half] = v[:2 * half] = 0
    # A query is turned back, so that the key at this distance lies in its direction. The next
    # places get scores that are at least 40 lower.
    distance = len(next(iter(tasks.values()))["prompt"])
    turns = (distance - 1) * config["rope_theta"] ** (-torch.arange(PAIRS) / half)
    q[:PAIRS, -1], q[half:half + PAIRS, -1] = turns.cos(), -turns.sin()
    k[:PAIRS, -1] = 1
    attention.q_norm.weight.fill_(6.5)
    attention.k_norm.weight.fill_(6.5)
    v[:CODE, :CODE] = o[CODE:2 * CODE, :CODE] = torch.eye(CODE)
    model.save_pretrained(folder)


def make_tasks(encode: Encode, vocab_size: int, visible: int, written: int) -> dict[str, Any]:
    """Returns prompts, with `visible` tokens after the enciphered text, and texts of `written`."""
    code = (ROOT / "nanoengine/scheduler.py").read_text()
    code = code[code.index("class Scheduler"):]
    config = (ROOT / "models/qwen3-0.6b/config.json").read_text()
    larger = json.loads(config) | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_hidden_layers": 36, "max_window_layers": 36, "tie_word_embeddings": False}
    before, after, stories = [(TEXTS / name).read_text()
                              for name in ("before.md", "after.md", "stories.txt")]
    prose = encode((ROOT / "docs/tutorial/03-scheduling.md").read_text())

    def edited(old: list[int], request: str, new: str) -> tuple[list[int], list[int]]:
        asked = encode(f"\n\n{request}\n\n")
        return prose[:visible] + old[:visible - len(asked)] + asked, encode(new)

    def continued(text: list[int]) -> tuple[list[int], list[int]]:
        return text[:visible], text[visible:]

    tasks = {
        "code, a name replaced": edited(encode(code), "With `request` in place of `seq`:",
                                        re.sub(r"\bseq\b", "request", code)),
        "JSON, some values changed": edited(encode(config), "The same for the model with 8B:",
                                            json.dumps(larger, indent=2)),
        "a document, corrected": edited(encode(before), "With better sentences:", after),
        "stories, one after another": continued(encode(stories)),
        "code, continued": continued(encode(code)),
        "prose, continued": continued(prose)}
    texts = {name: text[:written] for name, (_, text) in tasks.items()}
    used = sorted({token for text in texts.values() for token in text})
    cipher = {token: vocab_size - len(used) + place for place, token in enumerate(used)}
    return {name: {"prompt": [*map(cipher.get, texts[name]), *prompt[-visible:]],
                   "text": texts[name]} for name, (prompt, _) in tasks.items()}


def write(llm: LLM, task: dict[str, Any]) -> tuple[float, int]:
    """Returns the seconds and the steps that a text takes, without its prompt."""
    engine: Any = llm.engine
    # the seconds of steps stay known, but no text and no odds
    engine.guess, engine.all_odds = PromptLookup(), {}
    found = []
    for length in (1, len(task["text"])):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        started, steps = time.perf_counter(), llm.metrics()["num_steps"]
        (output,) = llm.generate([task["prompt"]], params, use_tqdm=False)
        found.append((time.perf_counter() - started, llm.metrics()["num_steps"] - steps))
        assert output.outputs[0].token_ids == task["text"][:length]
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=ROOT / "models/tiny-qwen3/tokenizer.json")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--visible", type=int, default=768)
    parser.add_argument("--written", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="is kept, with tasks.json, for other engines")
    args = parser.parse_args()
    # 1.5 GB, removed at the end
    temporary = tempfile.TemporaryDirectory()
    folder = args.folder or Path(temporary.name)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "models/qwen3-0.6b/config.json").read_text())
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    tasks = make_tasks(lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
                       config["vocab_size"], args.visible, args.written)
    save_prompter(folder, config, tasks)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    options = {"dtype": "bfloat16", "num_kv_blocks": 40, "max_model_len": 2048, "block_size": 128}
    plain = LLM(str(folder), **options)
    guessing = LLM(str(folder), speculation="prompt-lookup", **options)
    print(f"{'text':30}{'plain':>9}{'guessing':>9}{'ratio':>7}{'tokens a step':>15}")
    for name, task in tasks.items():
        # in turn; the first run does not count
        runs = [[write(llm, task) for llm in (plain, guessing)] for _ in range(args.runs + 1)][1:]
        before, after, steps = [statistics.median(run[i][j] for run in runs)
                                for i, j in ((0, 0), (1, 0), (1, 1))]
        ratio = statistics.median(first[0] / second[0] for first, second in runs)
        print(f"{name:30}{before:9.2f}{after:9.2f}{ratio:7.2f}"
              f"{(len(task['text']) - 1) / steps:15.2f}", flush=True)


if __name__ == "__main__":
    main()
