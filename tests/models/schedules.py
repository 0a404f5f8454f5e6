"""Models of transformers under each schedule: chunks, preemption, swapping, forks and so on.

    python tests/models/schedules.py [names…]

Each gets a tiny model with random weights (architectures.py), in float32. Greedy tokens are those
of `model.generate`, and log-probabilities of prompts those of transformers; drawn tokens and beams
are the same under all schedules. Without names, the script runs NAMES, in some ten minutes. It
fails if one is wrong.
"""

import sys
from pathlib import Path
from typing import Any

import compare
import torch
from compare import tokens

from nanoengine import LLM, BeamSearchParams, SamplingParams

# of each kind of attention, positions, norms, experts and MLPs
NAMES = [
    "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "codegen", "cohere", "cohere2",
    "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "exaone4", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granite_swa", "helium", "jetmoe", "llama", "longcat_flash", "mimo_v2_flash", "minicpm3",
    "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen3_moe",
    "smollm3", "stablelm", "starcoder2", "vaultgemma", "whisper", "llama4 chunks", "gemma3 images"]
PROMPTS = compare.random_prompts((3, 21, 37, 11, 50))
# a prefix of another one
PROMPTS.append(PROMPTS[4][:33])
FEW: dict[str, Any] = dict(num_kv_blocks=7, max_model_len=90)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {}, "chunks": dict(max_num_batched_tokens=9), "ahead": dict(run_ahead=True),
    "mixed": dict(max_num_batched_tokens=8, scheduling="mixed"), "recompute": FEW,
    "swap": FEW | dict(preemption_mode="swap", swap_space=0.01),
    "gather": dict(attention_backend="gather", block_size=8),
    "speculation": dict(speculation="prompt-lookup")}
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, n=3, seed=7, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)


def worst_score(outputs: list[Any], reference: Any) -> float:
    """By how much log-probabilities of prompts differ from those of transformers."""
    worst = 0.0
    for output in outputs:
        prompt = output.prompt_token_ids
        given = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:])]
        error = torch.tensor(given).double() - compare.scores_of(reference, prompt)
        worst = max(worst, float(error.abs().max()))
    return worst


def faults(folder: Path, *names: str) -> tuple[str, str]:
    """Returns "right" or "wrong", and what is wrong with a model under these schedules, or all."""
    reference = compare.load_reference(folder)
    expected = [[compare.expected_tokens(reference, prompt)] for prompt in PROMPTS]
    found = []
    others: list[Any] = []
    for schedule in names or SCHEDULES:
        with LLM(folder, **compare.OPTIONS | SCHEDULES[schedule]) as llm:
            outputs = llm.generate(PROMPTS, compare.GREEDY, use_tqdm=False)
            counts = llm.metrics()
            again = llm.generate(PROMPTS, compare.GREEDY, use_tqdm=False)
            alone = [llm.generate([prompt], compare.GREEDY, use_tqdm=False)[0]
                     for prompt in PROMPTS[:3]]
            drawn = tokens(llm.generate(PROMPTS[:4], DRAWN, use_tqdm=False))
            scored = worst_score(llm.generate(PROMPTS, SCORED, use_tqdm=False), reference)
            searched = [output.sequences for output in llm.beam_search(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]], BEAMS)]
        beams = [[beam.tokens for beam in each] for each in searched]
        error = max(abs(best.cum_logprob - float(
            compare.scores_of(reference, best.tokens)[len(prompt) - 1:].sum()))
            for prompt, (best, *_) in zip(PROMPTS, searched))
        preempted = sum(value for name, value in counts.items() if "preempt" in name)
        checks = {
            "tokens": tokens(outputs) == expected, "prefix cache": tokens(again) == expected,
            "no hits": any(output.num_cached_tokens for output in again),
            "alone": tokens(alone) == expected[:3], f"scores by {scored:.2g}": scored < 1e-3,
            f"beams by {error:.2g}": error < 1e-3,
            "preemption": bool(preempted) == (schedule in ("recompute", "swap")),
            "drawn or beams": (drawn, beams) == (others or [(drawn, beams)])[0]}
        others.append((drawn, beams))
        found += [f"{schedule}: {what}" for what, is_right in checks.items() if not is_right]
    return "wrong" if found else "right", ", ".join(found)


if __name__ == "__main__":
    sys.exit(compare.is_wrong(compare.run(sys.argv[1:] or NAMES, faults)))
