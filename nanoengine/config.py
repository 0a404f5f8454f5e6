"""`EngineConfig`: every option of the engine, and its default.

What depends on the model is decided elsewhere: `model_runner.py` works out how many blocks fit and
how long a sequence can be. Nothing writes to a config once it is made.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanoengine.policies import POLICIES, find_policy
from nanoengine.seams import Condition, check, has_extensions, strict

# an option whose default depends on the device
BY_DEVICE: Any = None

CONDITIONS: tuple[Condition, ...] = (
    ("max_num_batched_tokens", lambda c: c.max_num_batched_tokens >= c.max_num_seqs,
     "at least max_num_seqs={max_num_seqs}"),
    ("block_size", lambda c: c.block_size >= 1, "at least 1"),
    ("scheduling_policy", lambda c: c.scheduling_policy in ("fcfs", "priority"),
     "'fcfs' or 'priority'"),
    ("preemption_mode", lambda c: c.preemption_mode in ("recompute", "swap"),
     "'recompute' or 'swap'"),
    ("tensor_parallel_size", lambda c: c.tensor_parallel_size == 1 or has_extensions(), "1"),
    ("cpu_offload_gb", lambda c: not c.cpu_offload_gb or c.device == "cuda", "0 on a CPU"))


@strict
@dataclass(frozen=True)
class EngineConfig:
    """The keywords of `LLM`. Raises ValueError with the option, its value and what is accepted.

    model: a folder with config.json and safetensors, or a Hugging Face id.
    tokenizer: the folder or id of the tokenizer; by default the model's own.
    skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text.
    revision: the branch, tag or commit of a Hugging Face id.
    download_dir: the folder for downloads; by default Hugging Face's own cache.
    dtype: of weights and KV cache: "bfloat16", "float16" or "float32"; "auto": bfloat16, but
        float32 on a CPU without instructions for bfloat16.
    device: "cpu" or "cuda"; "auto": the GPU if there is one.
    seed: the seeds of requests without one are derived from it; None is 0.
    load_format: "dummy" makes random weights and needs only a config.json, for benchmarks; "auto",
        "hf" and "safetensors" read safetensors.
    max_model_len: the most tokens of a prompt and its output together; by default, and for -1, what
        the model and the cache allow.
    max_num_seqs: the most sequences that run at once; by default 256, or fewer where the token
        budget is smaller.
    max_num_batched_tokens: the token budget: the most tokens that a step computes; at least
        max_num_seqs. Longer prompts are computed in chunks.
    block_size: the tokens of a block of the KV cache; the prefix cache finds whole blocks only.
    num_kv_blocks: the blocks of the KV cache. The default on a CPU: as many as max_num_seqs
        sequences of max_model_len can fill, within a quarter of the free memory. On a GPU: what
        fits into gpu_memory_utilization of its memory beside everything else that is there.
    gpu_memory_utilization: the share of a GPU's memory that may be in use, other programs
        included. Weights, the largest step and CUDA graphs are measured; the KV cache gets the
        rest.
    cpu_offload_gb: GiB of weights, in whole layers, that stay in the memory of the host and cross
        to the GPU in each step. If several GPUs share the model, it counts for each GPU. On a CPU
        only 0 is accepted.
    enforce_eager: no CUDA graphs for decode steps, and no torch.compile.
    tensor_parallel_size: how many GPUs, or processes on a CPU, share the model.
    attention_backend: a name in the table `BACKENDS` of attention.py: "numba" on a CPU;
        "flash-attn" or "varlen" on a GPU; "gather" on both; "auto": the fastest that works here.
    run_ahead: launch a step before the tokens of the step before it are known; the tokens are the
        same.
    enable_prefix_caching: reuse cached blocks that hold the same tokens.
    scheduling: "prefill-first" (a step is all prefill or all decode), or "mixed" (decodes first,
        then prompts in the rest of the step). nanoengine_extensions/policies.py adds "static" (a
        batch ends before the next one begins) and `overtaking(...)`, for comparison. Each policy
        can also be a function: see policies.py.
    scheduling_policy: "fcfs" (in order of arrival), or "priority" (in order of
        `generate(priority=)`, smaller numbers first).
    kv_allocation: a sequence holds blocks for the tokens that it has ("on-demand"), for all that it
        may generate ("reserve"), or for max_model_len ("max-length", for comparison).
    preemption_mode: the blocks of a preempted sequence are dropped ("recompute"), or copied to a
        pool on the host ("swap"); when the pool is full, they are dropped.
    preemption_victim: which sequence is preempted: "youngest", "longest" or "lowest-priority"; for
        comparison "least-recently-run" or "random".
    swap_space: GiB of the host's memory for the pool of "swap", for each rank.
    batch_invariant: guarantee that logits and tokens have the same bits whatever runs beside a
        request, and however it was chunked, preempted or cached. On a CPU with packed weights this
        always holds; where it cannot hold, True is an error. All multiples of 32 as block_size give
        the same bits; other sizes may give others, because they group the sums differently.
    trace: keep a record of each step in `LLM.trace`: see `Launched` in model_runner.py.
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    download_dir: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = BY_DEVICE
    max_num_batched_tokens: int = BY_DEVICE
    block_size: int = BY_DEVICE
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_offload_gb: float = 0.0
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    run_ahead: bool = BY_DEVICE
    scheduling: Any = BY_DEVICE
    scheduling_policy: str = "fcfs"
    kv_allocation: Any = "on-demand"
    preemption_mode: str = "recompute"
    preemption_victim: Any = "youngest"
    swap_space: float = 4.0
    batch_invariant: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        """Fills in the defaults that depend on the device, and checks the options."""
        num_seqs = self.max_num_seqs or min(256, self.max_num_batched_tokens or 256)
        defaults: dict[str, Any] = {"max_num_seqs": num_seqs}
        if self.device == "cuda":
            defaults |= dict(block_size=256, max_num_batched_tokens=max(8192, num_seqs),
                             scheduling="mixed", run_ahead=True)
        else:
            defaults |= dict(block_size=32, max_num_batched_tokens=max(2048, num_seqs),
                             scheduling="prefill-first", run_ahead=False)
        given = {name: value for name, value in vars(self).items() if value is not None}
        # a frozen config has no other way to set its fields
        vars(self).update(defaults | given)
        check(self, CONDITIONS)
        for option in POLICIES:
            find_policy(option, getattr(self, option))
