"""The options of an engine and the parameters of a request, with those of optional features.

`from nanoengine import SamplingParams` is the class here, and `LLM` takes the options here, where
the extensions are installed. All are checked strictly: see checks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nanoengine.config
import nanoengine.sampling_params
from nanoengine.seams import rejected
from nanoengine_extensions.checks import strict
from nanoengine_extensions.policies import find_policy


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig(nanoengine.config.EngineConfig):
    """The keywords of `LLM`: those of the engine, and these:

    cpu_offload_gb: GiB of weights, in whole layers, that stay in the memory of the host and cross
        to the GPU in each step. If several GPUs share the model, it counts for each GPU. On a CPU
        only 0 is accepted.
    tensor_parallel_size: how many GPUs, or processes on a CPU, share the model.
    scheduling_policy: "fcfs" (in order of arrival), or "priority" (in order of
        `generate(priority=)`, smaller numbers first).
    kv_allocation: a sequence holds blocks for the tokens that it has ("on-demand"), for all that it
        may generate ("reserve"), or for max_model_len ("max-length", for comparison).
    preemption_mode: the blocks of a preempted sequence are dropped ("recompute"), or copied to a
        pool on the host ("swap"); when the pool is full, they are dropped.
    preemption_victim: which sequence is preempted: "youngest", "longest" or "lowest-priority"; for
        comparison "least-recently-run" or "random".
    swap_space: GiB of the host's memory for the pool of "swap", for each rank.
    speculation: a decode step also computes guesses of the next tokens, and keeps the right ones:
        the tokens are the same, in fewer steps. "prompt-lookup" guesses that a text goes on as it
        did before; or a function from a `Sequence` to an iterable of token ids. It works on a CPU,
        and needs run_ahead=False. How much is guessed depends on the time that steps take, the
        tokens do not.
    batch_invariant: guarantee that logits and tokens have the same bits whatever runs beside a
        request, and however it was chunked, preempted or cached. On a CPU with packed weights this
        always holds; where it cannot hold, True is an error. All multiples of 32 as block_size give
        the same bits; other sizes may give others, because they group the sums differently.
    trace: keep a record of each step in `LLM.trace`: see `Launched` in model_runner.py.
    """

    cpu_offload_gb: float = 0.0
    tensor_parallel_size: int = 1
    scheduling_policy: str = "fcfs"
    kv_allocation: Any = "on-demand"
    preemption_mode: str = "recompute"
    preemption_victim: Any = "youngest"
    swap_space: float = 4.0
    speculation: Any = "none"
    batch_invariant: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if self.scheduling is not None:
            find_policy("scheduling", self.scheduling)
        super().__post_init__()
        if self.cpu_offload_gb and self.device == "cpu":
            raise rejected("cpu_offload_gb", self.cpu_offload_gb, "0 on a CPU")
        for option in ("kv_allocation", "preemption_victim", "speculation"):
            find_policy(option, getattr(self, option))
        if self.speculation != "none" and self.device == "cuda":
            raise rejected("speculation", self.speculation, "'none' on a GPU")
        if self.speculation != "none" and self.run_ahead:
            raise rejected("run_ahead", True, "False with speculation, which needs each token")


@strict
@dataclass(kw_only=True)
class SamplingParams(nanoengine.sampling_params.SamplingParams):
    """How one request is sampled and when it ends: the engine's parameters, and these:

    logprobs: return the log-probabilities (log-softmax of the raw logits) of this many of the
        likeliest tokens at each position, and of the sampled token. 0: only of that; -1: of all.
    prompt_logprobs: the same for each token of the prompt except the first, in
        `RequestOutput.prompt_logprobs`. The prompt is then computed anew, whatever is cached.
    presence_penalty: subtracted from the logits of tokens that were generated before.
    frequency_penalty: the same, once for each time that the token was generated.
    repetition_penalty: divides positive and multiplies negative logits of all tokens in prompt or
        output (Keskar et al., 2019, arXiv:1909.05858).
    bad_words: texts that are never generated; the prompt does not count.
    allowed_token_ids: the only tokens that may be generated.
    logit_bias: numbers to add to logits, by token id.
    logits_processors: a list of functions `(input_ids, scores) -> scores` on tensors of shape (1,
        tokens so far) and (1, vocab_size), as in transformers; they run after all of the above.
    structured_outputs: what the text must be, one of {"json": schema}, {"json_object": True},
        {"regex": text}, {"choice": list of texts} and {"grammar": text in Lark}: see
        structured_outputs.py.

    Temperature, repetition_penalty and biases are clamped in magnitude to 1e-18 … 1e18; 0 stays 0.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: list[str] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: list[Callable] = field(default_factory=list)
    structured_outputs: dict[str, Any] | None = None

    @property
    def is_constrained(self) -> bool:
        return bool(
            self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
            or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
            or self.logits_processors or self.structured_outputs is not None)
