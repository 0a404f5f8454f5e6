"""`EngineConfig`: every option of the engine, its default and its check.

What depends on the model is decided elsewhere: `model_runner.py` works out how many blocks fit and
how long a sequence can be. Nothing writes to a config once it is made.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WrapValidator
from pydantic.dataclasses import dataclass

from nanoengine.sampling_params import STRICT, Count, Float, Int, rejected

# The default of these options depends on the device: None is replaced when a config is made.
CPU_DEFAULTS: dict[str, Any] = {
    "block_size": 128, "max_num_batched_tokens": 2048, "scheduling": "prefill-first",
    "run_ahead": False}
GPU_DEFAULTS: dict[str, Any] = {
    "block_size": 256, "max_num_batched_tokens": 8192, "scheduling": "mixed", "run_ahead": True}
TO_FILL_IN: Any = None
OR_NONE = WrapValidator(lambda value, check: value if value is None else check(value))
BY_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))


@dataclass(config=STRICT | ConfigDict(frozen=True), kw_only=True)
class EngineConfig:
    """The keywords of `LLM`. Raises ValueError with the option, its value and what is accepted.

    model: a folder with config.json and safetensors, or a Hugging Face id.
    tokenizer: the folder or id of the tokenizer, if it is not with the model.
    dtype: of weights and KV cache; "auto": bfloat16 where the device computes in it.
    device: "cpu" or "cuda"; "auto": the GPU if there is one.
    seed: the seeds of requests without one are derived from it.
    load_format: "dummy" makes random weights and needs only a config.json.
    max_model_len: the most tokens of prompt and output together; by default what model and cache
        allow.
    max_num_seqs: the most sequences that run at once; by default 256, or fewer where the token
        budget is smaller.
    max_num_batched_tokens: the token budget: the most tokens that a step computes; at least
        max_num_seqs.
    block_size: the tokens of a block of the KV cache.
    num_kv_blocks: the blocks of the KV cache. The default on a CPU: as many as max_num_seqs
        sequences of max_model_len can fill, within a quarter of the free memory. On a GPU: what
        fits into gpu_memory_utilization of its memory beside everything else that is there.
    enforce_eager: no CUDA graphs for decode steps.
    attention_backend: a name in attention.py's `BACKENDS`; "auto": the fastest that works here.
    run_ahead: launch a step before the tokens of the step before it are known.
    enable_prefix_caching: find blocks again by the hash of their tokens.
    scheduling: "prefill-first" (a step is all prefill or all decode), "mixed" (decodes, and prompts
        in the rest of the step), or "static" (a batch ends before the next one begins).
    scheduling_policy: "fcfs" (in order of arrival) or "priority" (`generate(priority=)` first).
    kv_allocation: a sequence holds blocks for the tokens that it has ("on-demand"), for all that it
        may come to have ("reserve"), or for max_model_len ("max-length").
    preemption_mode: the blocks of a preempted sequence are dropped ("recompute"), or copied to the
        host ("swap"), in a pool of swap_space GiB; when the pool is full, they are dropped.
    preemption_victim: which sequence is preempted, a name in scheduler.py's `VICTIMS`.
    max_waiting: with more sequences waiting than that, a prompt that does not fit may take the
        place of the longest running sequence; a sequence gives way only once.
    batch_invariant: make sure that logits and tokens have the same bits whatever runs beside a
        request, and however it was chunked, preempted or cached. With the numba kernel and packed
        weights they have anyway; elsewhere True is an error.
    trace: keep a record of each step in `LLM.trace`, see model_runner.py's `Launched`.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
                     BY_NAME] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Int = 0
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: Annotated[Int, Field(ge=2)] | None = None
    max_num_seqs: Annotated[Count, OR_NONE] = TO_FILL_IN
    max_num_batched_tokens: Annotated[Count, OR_NONE] = TO_FILL_IN
    block_size: Annotated[Count, OR_NONE] = TO_FILL_IN
    num_kv_blocks: Count | None = None
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: Literal["auto", "numba", "flash-attn", "varlen", "gather"] = "auto"
    run_ahead: Annotated[bool, OR_NONE] = TO_FILL_IN
    scheduling: Annotated[Literal["prefill-first", "mixed", "static"], OR_NONE] = TO_FILL_IN
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    kv_allocation: Literal["on-demand", "reserve", "max-length"] = "on-demand"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    preemption_victim: Literal["youngest", "longest", "lowest-priority", "least-recently-run",
                               "random"] = "youngest"
    max_waiting: Annotated[Int, Field(ge=0)] | None = None
    swap_space: Annotated[Float, Field(ge=0)] = 4.0
    batch_invariant: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        """Fills in what was not given, and checks the two limits of a step together."""
        found = dict(GPU_DEFAULTS if self.device == "cuda" else CPU_DEFAULTS)
        num_tokens = max(found["max_num_batched_tokens"], self.max_num_seqs or 0)
        found["max_num_batched_tokens"] = num_tokens
        found["max_num_seqs"] = min(256, self.max_num_batched_tokens or num_tokens)
        for name in found:
            if getattr(self, name) is None:
                # the one place that may write: the config is frozen
                object.__setattr__(self, name, found[name])
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise rejected("max_num_batched_tokens", self.max_num_batched_tokens,
                           f"at least max_num_seqs={self.max_num_seqs}")
