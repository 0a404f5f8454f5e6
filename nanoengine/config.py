"""`EngineConfig`: every option of the engine, its default and its check.

It knows what the options mean but nothing of a model: what depends on one (how many blocks fit, how
long a sequence can be) is decided in `model_runner.py`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nanoengine.sampling_params import STRICT, Count, Float, Int, rejected

BY_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
GPU_DEFAULTS = dict(block_size=256, max_num_batched_tokens=8192, scheduling="mixed", run_ahead=True)


@dataclass(config=STRICT, kw_only=True)
class EngineConfig:
    """The keywords of `LLM`. Raises ValueError with the option, its value and what is accepted.

    model: a folder with config.json and safetensors, or a Hugging Face id.
    tokenizer: where the tokenizer is, if not with the model.
    dtype: of weights and KV cache; "auto": bfloat16 where the device computes in it.
    device: "cpu" or "cuda"; "auto": the GPU if there is one.
    seed: what the seeds of requests without one are derived from.
    load_format: "dummy" makes random weights and needs only a config.json.
    max_model_len: tokens of prompt and output together; by default what model and cache allow.
    max_num_seqs: how many sequences are running at most; by default 256, or fewer where the
        token budget is smaller.
    max_num_batched_tokens: how many tokens a step computes at most; at least max_num_seqs.
    block_size: tokens of a block of the KV cache.
    num_kv_blocks: blocks to hand out; by default on a CPU as many as max_num_seqs sequences of
        max_model_len can fill, within a quarter of the free memory; on a GPU what fits into
        gpu_memory_utilization of its memory, beside everything else that was there or is ours.
    enforce_eager: no CUDA graphs for decode steps.
    attention_backend: a function of attention.py by its name; "auto": the fastest that there is.
    run_ahead: launch a step before the tokens of the one before it are known.
    enable_prefix_caching: whether blocks are found again by the hash of their tokens.
    scheduling: "prefill-first" (a step is all prefill or all decode), "mixed" (decodes, and prompts
        in the rest of the step), or "static" (nobody joins until all have finished).
    scheduling_policy: "fcfs" or "priority": waiting requests in order of `generate(priority=)`.
    kv_allocation: a request holds blocks for the tokens it has ("on-demand"), for those it may
        come to have ("reserve"), or for max_model_len ("max-length").
    preemption_mode: blocks of a preempted request are dropped ("recompute") or kept on the host
        ("swap"), in a pool of swap_space GiB; where that is full, they are dropped.
    preemption_victim: who gives way when blocks run out, a name in scheduler.py's `VICTIMS`.
    max_waiting: with more waiting than that, a prompt that does not fit may take the place of the
        longest running request, once.
    batch_invariant: make sure that logits and tokens have the same bits whatever runs beside a
        request, and however it was chunked, preempted or cached. With the numba
        kernel and packed weights it is so anyway; elsewhere True is an error.
    trace: keep a record of each step in `LLM.trace`: when it began and ended (seconds of
        `time.monotonic()`), its `Batch`, and what `metrics()` gave behind it.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
                     BY_NAME] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Int = 0
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: Annotated[Int, Field(ge=2)] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    block_size: Count = 128
    num_kv_blocks: Count | None = None
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: Literal["auto", "numba", "flash-attn", "varlen", "gather"] = "auto"
    run_ahead: bool = False
    scheduling: Literal["prefill-first", "mixed", "static"] = "prefill-first"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    kv_allocation: Literal["on-demand", "reserve", "max-length"] = "on-demand"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    preemption_victim: Literal["youngest", "longest", "lowest-priority", "least-recently-run",
                               "random"] = "youngest"
    max_waiting: Annotated[Int, Field(ge=0)] | None = None
    swap_space: Annotated[Float, Field(ge=0)] = 4.0
    batch_invariant: bool = False
    trace: bool = False

    def limits(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens), where one that is not given follows the other."""
        num_tokens = self.max_num_batched_tokens or max(2048, self.max_num_seqs or 0)
        max_num_seqs = self.max_num_seqs or min(256, num_tokens)
        if num_tokens < max_num_seqs:
            raise rejected("max_num_batched_tokens", num_tokens, f"at least {max_num_seqs=}")
        return max_num_seqs, num_tokens
