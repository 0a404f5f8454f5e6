"""`EngineConfig`: every option of the engine, and its default.

Values that depend on the model are decided elsewhere: `model_runner.py` works out how many blocks
fit and how long a sequence can be. A config never changes once it is made.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nanoengine.errors import Condition, Options
from nanoengine.features import of
from nanoengine.policies import TABLES, Policy, find_policy

# an option whose default depends on the device
BY_DEVICE: Any = None

CONDITIONS: list[Condition] = [
    ("max_num_batched_tokens", lambda c: c.max_num_batched_tokens >= c.max_num_seqs >= 1,
     "at least max_num_seqs={max_num_seqs}; both at least 1"),
    ("block_size", lambda c: c.block_size >= 1, "at least 1")]


@dataclass(frozen=True)
class EngineConfig(Options):
    """The keywords of `LLM`. Raises ValueError with the option, its value and what is accepted.

    Options that are declared with `of` belong to an optional feature: see features.py.

    model: a folder with config.json and safetensors, a GGUF file, or a Hugging Face id.
    tokenizer: the folder or id of the tokenizer; by default the model's own.
    skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text.
    revision: the branch, tag or commit of a Hugging Face id.
    download_dir: the folder for downloads; by default Hugging Face's own cache.
    dtype: the type of weights and KV cache: "bfloat16", "float16" or "float32"; "auto": bfloat16,
        but float32 on a CPU without instructions for bfloat16, and on a CPU without kernels.
    quantization: "int8" or "int4" rounds the weights to 8 or 4 bits when they are loaded, in groups
        of 32; None leaves them as they are. A model that is already quantized (GGUF, AWQ, GPTQ,
        FP8 and others) needs no option.
    device: "cpu" or "cuda"; "auto": the GPU if there is one.
    seed: a request without a seed gets one that is derived from this; None means 0.
    load_format: "dummy" makes random weights for benchmarks, from a config.json alone; "auto", "hf"
        and "safetensors" read safetensors.
    model_impl: "native": the engine's own model; "transformers": any causal language model in
        transformers, with the engine's cache; "auto": the engine's own if it has the architecture.
    max_model_len: the most tokens that a prompt and its output can have together; by default what
        the model and the cache allow.
    max_num_seqs: the most sequences that run at once; by default 256, or fewer where the token
        budget is smaller.
    max_num_batched_tokens: the token budget: the most tokens that a step computes; at least
        max_num_seqs. Longer prompts are computed in chunks.
    kv_cache_dtype: "auto": the KV cache has the model's dtype; "fp8" (e4m3) or "int8": K and V are
        rounded to 8 bits, with a scale for each head of each token. Twice as many tokens as in
        bfloat16 fit into the same memory. Generated tokens differ: see docs/quantization.md.
    block_size: tokens per block of the KV cache; the prefix cache reuses only whole blocks.
    num_kv_blocks: the number of blocks in the KV cache. By default, on a CPU: enough for
        max_num_seqs sequences of max_model_len, but at most a quarter of the free memory; on a GPU:
        what gpu_memory_utilization leaves after everything else; without memory.py: 1 GiB.
    gpu_memory_utilization: the share of a GPU's memory that may be in use, other programs
        included. Weights, the largest step and CUDA graphs are measured; the KV cache gets the
        rest.
    enforce_eager: no CUDA graphs for decode steps.
    attention_backend: "numba" on a CPU; "flash-attn", "triton" or "varlen" on a GPU; "gather" on
        both; or a name that you add to the table `BACKENDS` of attention.py; "auto": the fastest
        that works here.
    kernels: if False, only the plain PyTorch code of model.py, attention.py and sampler.py runs.
        It is slow, but a debugger can stop at any line that you read.
    run_ahead: launch a step before the previous step's tokens are known; results do not change.
    enable_prefix_caching: reuse cached blocks that hold the same tokens.
    batch_invariant: guarantee that a request's logits and tokens have the same bits whatever runs
        with it, and however it was chunked, preempted or cached. On a CPU with packed weights this
        always holds; where it cannot be kept, True is an error. Use a block_size divisible by 32:
        all of these give the same bits.
    scheduling: "prefill-first" (a step is all prefill or all decode), or "mixed" (decodes first,
        then prompts in the rest of the step); for comparison, "static" (a batch ends before the
        next one begins) or `overtaking(...)`. This option and the next three also take your own
        function, with the arguments of those in nanoengine/policies.py or
        nanoengine_extras/running/policies.py.
    scheduling_policy: "fcfs" (in order of arrival), or "priority" (in order of
        `generate(priority=)`, smaller numbers first).
    preemption_victim: which sequence is preempted: "youngest", "longest" or "lowest-priority"; for
        comparison "least-recently-run" or "random".
    kv_allocation: a sequence holds blocks for the tokens that it has ("on-demand"), or for all that
        it may generate ("reserve"); for comparison, for max_model_len tokens ("max-length").
    preemption_mode: whether the blocks of a preempted sequence are dropped ("recompute"), or copied
        to a pool on the host ("swap"); when the pool is full, they are dropped.
    swap_space: GiB of host memory for the pool of "swap", on each rank.
    speculation: a decode step also checks guesses at the next tokens, and keeps the right ones,
        so that the same tokens take fewer steps. "prompt-lookup" guesses that text continues
        as it did before. A function from a `Sequence` to token ids can guess instead. Speculation
        needs a CPU and run_ahead=False. The number of guesses depends on how long steps take; the
        generated tokens do not, except with kernels=False or float16, where tokens with nearly
        equal logits can change places.
    cpu_offload_gb: GiB of weights, in whole layers, that stay in host memory and cross to the GPU
        in each step. With several GPUs, each offloads that much. On a CPU it must be 0.
    tensor_parallel_size: how many GPUs, or processes on a CPU, share the model.
    trace: keep a record of each step in `LLM.trace`: see nanoengine_extras/running/metrics.py.
    features: your own features, instances of subclasses of `Feature`: see observers.py.
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = of("models.hub", None)
    download_dir: str | None = of("models.hub", None)
    dtype: str = "auto"
    quantization: str | None = of("models.quantized", None)
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    model_impl: str = of("models.sources", "auto")
    max_model_len: int | None = None
    max_num_seqs: int = BY_DEVICE
    max_num_batched_tokens: int = BY_DEVICE
    kv_cache_dtype: str = of("running.kv_cache", "auto")
    block_size: int = BY_DEVICE
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = of("running.memory", 0.9)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    kernels: bool = True
    run_ahead: bool = BY_DEVICE
    batch_invariant: bool = of("running.guards", False)
    scheduling: Policy = BY_DEVICE
    scheduling_policy: Policy = "fcfs"
    preemption_victim: Policy = "youngest"
    kv_allocation: Policy = of("running.policies", "on-demand")
    preemption_mode: str = of("running.swapping", "recompute")
    swap_space: float = of("running.swapping", 4.0)
    speculation: Policy = of("sampling.speculation", "none")
    cpu_offload_gb: float = of("running.offload", 0.0)
    tensor_parallel_size: int = of("running.tensor_parallel", 1)
    trace: bool = of("running.metrics", False)
    features: list = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fills in the defaults that depend on the device, and checks the options."""
        super().__post_init__()
        on_gpu = self.device == "cuda"
        num_seqs = self.max_num_seqs or min(256, self.max_num_batched_tokens or 256)
        num_tokens = max(8192 if on_gpu else 2048, num_seqs)
        defaults = dict(
            max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, seed=0, run_ahead=on_gpu,
            block_size=256 if on_gpu else 32, scheduling="mixed" if on_gpu else "prefill-first")
        given = {name: value for name, value in vars(self).items() if value is not None}
        # all other backends use kernels
        if not self.kernels and self.attention_backend == "auto":
            given["attention_backend"] = "gather"
        # a frozen dataclass refuses plain assignment to its fields
        vars(self).update(defaults | given)
        self.check(CONDITIONS)
        for option in TABLES:
            find_policy(option, getattr(self, option))
