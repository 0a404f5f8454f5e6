"""The engine's runner with log-probabilities, weights on the host, and a host pool for swapping.

`nanoengine_extensions.llm.LLM` uses it; tensor_parallel.py extends it.
"""

import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoengine.batch import Batch, Copies, Row
from nanoengine.model import Decoder
from nanoengine.model_runner import Launched, ModelRunner
from nanoengine.seams import rejected
from nanoengine.step_inputs import StepInputs, StepShape
from nanoengine_extensions.logprobs import RowLogprobs, find_logprobs
from nanoengine_extensions.options import EngineConfig, SamplingParams


def place_on(model: nn.Module, device: str) -> None:
    """Allocates memory for the weights of a model, or of a part of one.

    Raises ValueError, before it allocates anything, if the device does not have enough memory.
    """
    num_bytes = sum(weights.nbytes for weights in model.parameters())
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else psutil.virtual_memory().total
    if num_bytes > total:
        raise rejected("model", f"{num_bytes / 2**30:.3g} GiB of weights",
                       f"smaller: device {device!r} has {total / 2**30:.1f} GiB of memory")
    model.to_empty(device=device)


def pin(tensor: Tensor) -> Tensor:
    """Lets a GPU copy from and to this memory of the host while both go on; returns the tensor.

    `Tensor.pin_memory` would round its size up to a power of two.
    """
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    weakref.finalize(tensor, cuda.cudaHostUnregister, tensor.data_ptr())
    return tensor


class Runner(ModelRunner):
    """Runs batches on one device. Its `Launched` has three more attributes:

    logprobs: by row; read them after `wait`.
    began, done: the moments when the inputs are on the device, and the tokens on the host: seconds
        of `time.monotonic()` on a CPU, CUDA events on a GPU.
    """

    config: EngineConfig

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        if config.device == "cuda":
            # adds a backend
            import nanoengine_extensions.varlen  # noqa: F401
        self.num_ranks = config.tensor_parallel_size
        super().__init__(config, model_config, folder)
        if config.batch_invariant and not self.is_invariant:
            raise rejected("batch_invariant", True, "False without packed weights and numba")
        if config.preemption_mode == "swap":
            from nanoengine_extensions.swapping import add_host_pool
            add_host_pool(self)

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        load = partial(super().load_model, folder, **options)
        if not self.config.cpu_offload_gb:
            return load(place=place_on)
        from nanoengine_extensions.offload import load_offloaded
        return load_offloaded(self.config.cpu_offload_gb, load)

    def largest_batch(self) -> Batch:
        batch = super().largest_batch()
        for row in batch.sampled:
            row.seq.params = SamplingParams(min_p=0.1, top_p=0.9, logprobs=20,
                                            presence_penalty=1.0, logit_bias={0: 1.0})
        return batch

    def forward(self, copies: Copies, buffer: Tensor,
                shape: StepShape) -> tuple[StepInputs, Tensor]:
        self.began = self.timestamp()
        return super().forward(copies, buffer, shape)

    def sample(self, batch: Batch, step: StepInputs, hidden: Tensor) -> Launched:
        self.logprobs: dict[Row, RowLogprobs] = {}
        launched = super().sample(batch, step, hidden)
        vars(launched).update(logprobs=self.logprobs, began=self.began, done=self.timestamp())
        return launched

    def timestamp(self) -> Any:
        """Returns the current time of a CPU; on a GPU an event after all work that is queued."""
        if self.device == "cpu":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=self.config.trace)
        return torch.cuda.current_stream().record_event(event)

    def observe(self, rows: list[Row], logits: Tensor, tokens: Tensor) -> None:
        # the engine's own parameters have none
        if any(getattr(row.seq.params, "logprobs", None) is not None for row in rows):
            self.logprobs |= find_logprobs(logits, tokens, rows)
