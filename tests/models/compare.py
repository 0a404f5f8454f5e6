"""Which models of transformers run: for each architecture, its tokens and those of transformers.

    python tests/models/compare.py [names…]

Each gets a tiny model with random weights (architectures.py). "right": all tokens of four prompts
are those of `model.generate`, alone, in float32, with eager attention. "refused": a ValueError says
why. Without names, the script runs all, and writes the table of docs/models.md; it fails if one is
wrong, or ends with another error. It takes some minutes.
"""

import logging
import re
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES, VARIANTS, VOCAB_SIZE, make
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nanoengine import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LENGTHS = (3, 21, 37, 11)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(skip_tokenizer_init=True, dtype="float32", block_size=16,
                               num_kv_blocks=40, max_num_seqs=8, model_impl="transformers")
# seconds for one model
MOST_SECONDS = 100


def random_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def load_reference(folder: Path) -> Any:
    """Returns the model that transformers itself chooses for a folder, in float32."""
    config = type(transformers.AutoConfig.from_pretrained(folder))
    kind: Any = transformers.AutoModelForCausalLM
    if config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def expected_tokens(model: Any, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
                            pad_token_id=0)
    return output[0, len(prompt):].tolist()


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def scores_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Returns the log-probability of each token after the first one."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
    return logits.log_softmax(-1)[range(len(token_ids) - 1), token_ids[1:]]


def reason_of(error: ValueError) -> str:
    """Returns why a model is refused, without its folder."""
    message = str(error)
    since = re.search(r"is not accepted, since (.*): it must be", message)
    return since[1] if since else re.sub(r".*model='[^']*' ", "", message).partition(": it must")[0]


def compare(folder: Path, max_tokens: int = MAX_TOKENS) -> tuple[str, str]:
    """Returns "right", "wrong" or "refused", and details."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    try:
        llm = LLM(folder, **OPTIONS)
    except ValueError as error:
        return "refused", reason_of(error)
    with llm:
        model = load_reference(folder)
        prompts = [prompt for prompt in random_prompts()
                   if len(prompt) + max_tokens <= llm.inputs.max_model_len]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        same = [output.outputs[0].token_ids == expected_tokens(model, prompt, max_tokens)
                for prompt, output in zip(prompts, outputs)]
        if not all(same):
            return "wrong", f"{same.count(False)} of {len(same)} prompts"
        return "right", "" if all(call.recorded.is_plain for call in llm.engine.runner.model.calls
                                  ) else "slow attention"


def run(names: list[str], check: Any) -> dict[str, tuple[str, str]]:
    """Makes the model of each name, and checks its folder. Returns what `check` does."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("nanoengine").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too slow")))
    found = {}
    for name in names:
        began = time.monotonic()
        signal.alarm(MOST_SECONDS)
        what = "not made"
        with tempfile.TemporaryDirectory() as folder:
            try:
                make(name, Path(folder))
                what = "error"
                found[name] = check(Path(folder))
            except Exception as error:
                found[name] = what, f"{type(error).__name__}: {error}".partition("\n")[0]
            finally:
                signal.alarm(0)
        print(f"{name:24} {found[name][0]:9} {found[name][1]:.160}  "
              f"{time.monotonic() - began:.1f} s", flush=True)
    print(Counter(kind for kind, _ in found.values()))
    return found


def is_wrong(found: dict[str, tuple[str, str]]) -> bool:
    return any(kind in ("wrong", "error") for kind, _ in found.values())


def table_of(found: dict[str, tuple[str, str]]) -> str:
    """The right ones in a list, and a row for each reason of the others."""
    right = [f"`{name}`" + ("\\*" if what else "") for name, (kind, what) in found.items()
             if kind == "right"]
    reasons: dict[str, list[str]] = {}
    for name, (kind, what) in found.items():
        if kind == "refused":
            what = re.sub(r" by \d[\d.e-]*$", "", what)
            what = re.sub(r"^its layers of kind \[.*\]", "some of its layers", what)
            reasons.setdefault(what.replace("|", "\\|"), []).append(f"`{name}`")
    rows = [f"| {what} | {', '.join(names)} |" for what, names in sorted(reasons.items())]
    num_refused = sum(map(len, reasons.values()))
    return "\n".join([
        f"With transformers {transformers.__version__}, {len(right)} run, and {num_refused} are "
        "refused. A star: attention in plain PyTorch, which is slow.", "",
        textwrap.fill(", ".join(right) + ".", 124, break_on_hyphens=False),
        "", "| refused, since | |", "| --- | --- |", *rows])


def main(names: list[str]) -> int:
    found = run(names or [*ARCHITECTURES, *VARIANTS], compare)
    if not names:
        before, begin, rest = PAGE.read_text().partition("<!-- table -->\n")
        after = rest.partition("<!-- end -->")
        PAGE.write_text(before + begin + table_of(found) + "\n" + "".join(after[1:]))
    return is_wrong(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
