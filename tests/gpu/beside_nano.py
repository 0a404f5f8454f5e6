"""nano-vllm's own benchmark, by nano-vllm and by nanoengine, on the same weights and one card.

    python3 tests/gpu/beside_nano.py make                  # random weights of Qwen3-0.6B's shape
    python3 tests/gpu/beside_nano.py ours [--repeat 2] [--run-ahead 0] [--ordered 0] …
    python3 tests/gpu/beside_nano.py nano [--repeat 2]

It finds nano-vllm (github.com/GeeeekExplorer/nano-vllm) in the folder .nano of the repository.

256 prompts of 100 to 1024 random tokens, 100 to 1024 new ones each, temperature 0.6, EOS ignored
(its bench.py, seed 0). A warm-up with other lengths comes first. A repetition has other tokens, so
that no prefix cache helps. Neither engine makes text. REHEARSAL=1: ours with a tiny model on a CPU.
"""
import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

DRY = bool(os.environ.get("REHEARSAL"))
ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("/tmp/rehearsal_model" if DRY else "/tmp/model_of_0.6b")
DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.bfloat16


def make() -> None:
    """Writes config.json and model.safetensors, with random weights."""
    import transformers
    config = json.loads((ROOT / "models/qwen3-0.6b/config.json").read_text())
    if DRY:
        config |= dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=32,
                       num_attention_heads=4, num_key_value_heads=2, vocab_size=10_001,
                       layer_types=["full_attention"] * 2)
    # both names: nano-vllm reads `config.dtype`
    config["dtype"] = config["torch_dtype"] = str(DTYPE).removeprefix("torch.")
    torch.manual_seed(0)
    # on a CPU, to draw them takes long
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(**config), dtype=DTYPE)
    model.save_pretrained(FOLDER)
    # as it was, not as transformers writes it now
    (FOLDER / "config.json").write_text(json.dumps(config))
    print(f"== {sum(each.nbytes for each in model.parameters()) / 2**20:,.0f} MiB of weights")


def workload(args, number: int) -> tuple[list[list[int]], list[int]]:
    """In the order of nano-vllm's bench.py; a repetition moves all token ids by some."""
    rng = random.Random(0)
    most_in, most_out = (40, 40) if DRY else (1024, 1024)
    least = 10 if DRY else 100
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(least, most_in))]
               for _ in range(args.num_seqs)]
    lengths = [(not DRY and args.output) or rng.randint(least, most_out) for _ in prompts]
    return [[(token + 17 * number) % 10_001 for token in prompt] for prompt in prompts], lengths


def warm_up(number: int) -> tuple[list[list[int]], list[int]]:
    """Several prompts at once, of other numbers, so that torch.compile sees that shapes change."""
    rng = random.Random(1 + number)
    lengths = ([3, 9, 17, 8] if DRY else [700, 100, 333, 1000, 512, 64, 901, 257])[number:]
    prompts = [[rng.randint(0, 10000) for _ in range(length)] for length in lengths]
    return prompts, [8] * len(lengths)


def run_ours(args) -> None:
    from nanoengine import LLM, SamplingParams
    from nanoengine_extras.running import graphs
    if not args.ordered:
        # as they were before the longest ones came first
        graphs.longest_first = lambda batch: batch
    if not args.few_rows:
        from nanoengine_extras.gpu import few_rows
        few_rows.MOST_ROWS = 0
    backend = "auto" if DRY else args.backend
    options = dict(enforce_eager=bool(args.eager), attention_backend=backend,
                   model_impl=args.model_impl)
    if args.run_ahead is not None:
        options["run_ahead"] = bool(args.run_ahead)
    began = time.perf_counter()
    llm = LLM(FOLDER, max_model_len=200 if DRY else args.max_model_len, device=DEVICE,
              **options)
    print(f"made in {time.perf_counter() - began:.1f} s: {llm.metrics()['attention_backend']}, "
          f"{llm.engine.runner.num_kv_blocks} blocks, "
          f"{len(llm.engine.runner.graphs.captured)} graphs", flush=True)

    def generate(prompts, lengths):
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, top_k=args.top_k,
                                 top_p=args.top_p) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params,
                               use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
    measure(args, generate)
    if DEVICE == "cuda":
        print(f"GPU memory {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved at most")


def run_nano(args) -> None:
    """nano-vllm as it is, but for what this machine does not have."""
    sys.path.insert(0, str(ROOT / ".nano"))
    import transformers
    import torch.distributed as dist
    # 1. no network: a store in this process in place of tcp://localhost:2333
    init = dist.init_process_group
    dist.init_process_group = lambda *_, world_size, rank, **others: init(
        "nccl", store=dist.HashStore(), world_size=world_size, rank=rank)
    # 2. no tokenizer: prompts are token ids, and text costs it no time
    transformers.AutoTokenizer.from_pretrained = lambda *_, **others: SimpleNamespace(
        eos_token_id=151_645, decode=lambda ids: "", encode=lambda text: [1])
    from nanovllm import LLM, SamplingParams
    began = time.perf_counter()
    llm = LLM(str(FOLDER), enforce_eager=bool(args.eager), max_model_len=4096)
    config = llm.model_runner.config
    assert config.hf_config.dtype == DTYPE, config.hf_config.dtype
    print(f"made in {time.perf_counter() - began:.1f} s: {config.num_kvcache_blocks} blocks, "
          f"{len(getattr(llm.model_runner, 'graphs', ()))} graphs", flush=True)

    def generate(prompts, lengths):
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]
    measure(args, generate)


def measure(args, generate) -> None:
    for number in range(3):
        generate(*warm_up(number))
    rates = []
    for number in range(args.repeat):
        prompts, lengths = workload(args, number)
        began = time.perf_counter()
        found = generate(prompts, lengths)
        seconds = time.perf_counter() - began
        assert found == lengths, "not all tokens were generated"
        rates.append(sum(lengths) / seconds)
        print(f"{sum(map(len, prompts)):,} tokens in, {sum(lengths):,} out, {seconds:.2f} s, "
              f"{rates[-1]:.1f} tokens/s", flush=True)
    print(f"== {max(rates):.1f} output tokens/s, the best of {len(rates)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("make", "ours", "nano"))
    parser.add_argument("--num-seqs", type=int, default=6 if DRY else 256)
    parser.add_argument("--output", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=4096, help="of ours")
    parser.add_argument("--run-ahead", type=int)
    parser.add_argument("--eager", type=int, default=0)
    parser.add_argument("--ordered", type=int, default=1, help="0: long decodes in any place")
    parser.add_argument("--few-rows", type=int, default=1, help="0: products by cuBLAS alone")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    args = parser.parse_args()
    if args.what == "make":
        make()
        return
    if not (FOLDER / "model.safetensors").exists():
        make()
    (run_ours if args.what == "ours" else run_nano)(args)


if __name__ == "__main__":
    main()
