"""`tensor_parallel_size`: one model on several devices (Megatron-LM: Shoeybi et al., 2019,
arXiv:1909.08053).

    rank 0: the user's process                          rank 1, rank 2, …: processes
    scheduler, block tables, sampling ──── message ───▶ nothing but a runner
    its part of the model ◀── sums, parts of logits ──▶ its part of the model

Each rank has a decoder with its share of the heads, of the inner size and of the rows of `lm_head`,
with K and V of its heads, and with all embeddings and norms. For each step it gets one message: the
buffer of inputs, its shape and the block copies. Only rank 0 samples; it shares the tokens, from
which the next step continues.

`LLM` makes a `TensorParallelRunner`, which the engine calls like any other runner. The model has
hooks, and knows nothing about ranks.
"""

import copy
import ctypes
import os
import pickle
import subprocess
import sys
import threading
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoengine.config import EngineConfig
from nanoengine.errors import Condition, rejected
from nanoengine.model import FAMILIES, Decoder
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Features
from nanoengine.sequence import Batch, Copies
from nanoengine.step_inputs import Launched, StepShape


class Group:
    """All ranks, as one rank sees them: its collective operations, and its part of a checkpoint.

    All ranks call the same collective operations in the same order.

    port: the port of rank 0; rank 0 itself takes a free one.
    """

    def __init__(self, size: int, rank: int = 0, port: int = 0) -> None:
        self.size = size
        self.rank = rank
        self.store: Any = torch.distributed.TCPStore(
            "127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
        self.backend: Any = None

    def connect(self, device: str) -> None:
        """Waits for all ranks. PyTorch's default group stays free for the user."""
        self.device = device
        # counts the ranks that have arrived
        self.store.add("ranks", 1)
        self.kind = "ProcessGroupNCCL" if device == "cuda" else "ProcessGroupGloo"
        self.backend = getattr(torch.distributed, self.kind)(self.store, self.rank, self.size)

    def check(self, timeout: float = 0) -> None:
        """Does nothing here: only rank 0 needs to know whether a rank has ended. The others end
        with rank 0."""

    def finish(self, work: Any) -> None:
        """Waits for an operation on a CPU; on a GPU, its stream waits.

        Gloo may not notice that a rank has died, and would wait for half an hour.
        """
        while self.kind == "ProcessGroupGloo" and not work.is_completed():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=1))
            self.check()
        work.wait()

    def sum(self, x: Tensor) -> Tensor:
        """Sums x over all ranks, in place."""
        self.finish(self.backend.allreduce([x]))
        return x

    def join(self, x: Tensor) -> Tensor:
        """Returns the columns of all ranks' x, side by side."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.finish(self.backend.allgather([parts], [x]))
        return torch.cat(parts, dim=1)

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers."""
        return int(self.join(torch.tensor([[number]], device=self.device)).min())

    def read_part(self, tensor: Any, target: Tensor) -> Tensor:
        """Reads this rank's part of a checkpoint's tensor that is larger than its target.

        A tensor that does not fit is read whole, and the loader refuses it.
        """
        pairs = zip(tensor.get_shape(), target.shape)
        return tensor[tuple(slice(self.rank * own, (self.rank + 1) * own)
                            if size == self.size * own else slice(None) for size, own in pairs)]


CONDITIONS: list[Condition] = [
    ("batch_invariant", lambda c: not c.batch_invariant, "False with several ranks")]

# ------------------------------------------------------------------------- a part of the model


def shard(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """Returns the config of each of `size` ranks. Raises ValueError for sizes it cannot divide."""
    if config.model_type not in FAMILIES:
        raise rejected("tensor_parallel_size", size, "1 for a model that transformers computes")
    part = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole = getattr(config, name)
        if whole % size:
            raise rejected("tensor_parallel_size", size, f"a divisor of {name}={whole}")
        setattr(part, name, whole // size)
    return part


def parallelize(model: Decoder, group: Group) -> Decoder:
    """Adds hooks to a rank's part of the model. After each hook, all ranks have the same values."""
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.register_forward_hook(lambda module, inputs, output: group.sum(output))
            # the sum over all ranks has the bias of rank 0 only
            if group.rank:
                linear.bias = None
    # the vocabulary is padded for the last rank
    vocab_size = len(model.lm_head.weight)
    size = -(-vocab_size // group.size)
    rows = model.lm_head.weight[group.rank * size:][:size]
    padded = nn.functional.pad(rows, (0, 0, 0, size - len(rows)))
    model.lm_head.weight = nn.Parameter(padded, requires_grad=False)
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: group.join(logits)[:, :vocab_size])
    return model


# --------------------------------------------------------------------------------- the runner


class RankRunner(ModelRunner):
    """Runs one rank's part of each batch. part: the config of its part of the model."""

    def __init__(self, config: EngineConfig, part: PretrainedConfig, folder: Path,
                 features: Features, group: Group) -> None:
        self.group = group
        group.connect(config.device)
        super().__init__(config, part, folder, features)
        # waits until all ranks are here
        group.least(0)

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        part = super().load_model(folder, read=self.group.read_part, **options)
        return parallelize(part, self.group)

    def measure_free_bytes(self, max_model_len: int) -> int:
        return self.group.least(super().measure_free_bytes(max_model_len))

    @torch.inference_mode()
    def follow(self, copies: Copies, numbers: Any, shape: StepShape) -> None:
        """Computes this rank's part of a step that rank 0 launches: everything except sampling."""
        buffer = torch.from_numpy(numbers)
        pinned = buffer.pin_memory() if self.device == "cuda" else buffer
        _, hidden = self.forward(copies, pinned, shape)
        # an empty chunk gets no logits, as on rank 0
        for part in filter(len, hidden.split(len(self.last_sampled))):
            self.model.lm_head(part)
        # from rank 0
        self.group.finish(self.group.backend.broadcast([self.last_sampled]))


class TensorParallelRunner(RankRunner):
    """The runner of rank 0. It starts the other ranks, sends them each step, and samples."""

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 features: Features) -> None:
        size = config.tensor_parallel_size
        part = shard(model_config, size)
        if config.device == "cuda" and size > max(1, num_gpus := torch.cuda.device_count()):
            raise rejected("tensor_parallel_size", size, f"at most {num_gpus}, the number of GPUs")
        # rank 1 takes GPU 1, and so on
        if config.device == "cuda" and (current := torch.cuda.current_device()):
            raise rejected("torch.cuda.current_device()", current, "0 with several ranks")
        # a script's own functions and classes cannot be sent
        options = {name: value for name, value in vars(config).items()
                   if not callable(value) and name != "features"}
        with Ranks(size) as self.ranks:
            self.ranks.send(options, part, folder)
            super().__init__(config, part, folder, features, self.ranks)
        # also when the script ends; NCCL waits for graphs that use its communicator
        self.end = weakref.finalize(self, end, self.graphs.captured, self.ranks)

    def launch(self, batch: Batch) -> Launched:
        """Begins a step on all ranks."""
        buffer, shape = self.prepare(batch)
        with self.ranks:
            self.ranks.send(batch.copies, buffer.numpy(), shape)
            step = self.run(batch, buffer, shape)
            # to the other ranks
            self.group.finish(self.group.backend.broadcast([self.last_sampled]))
        return LaunchedOnRanks(step.batch, step.tokens, step.done, self.ranks)

    def close(self) -> None:
        self.end()


def end(graphs: dict, ranks: "Ranks") -> None:
    """Destroys the graphs, and then ends the ranks."""
    graphs.clear()
    ranks.close()


@dataclass
class LaunchedOnRanks(Launched):
    """ranks: the ranks that compute this step."""

    ranks: "Ranks"

    def wait(self) -> list[int]:
        tokens = super().wait()
        # a GPU does not notice that a rank has died, and goes on computing garbage
        self.ranks.check()
        return tokens


# ------------------------------------------------------------------------------- the processes


class Ranks(Group, AbstractContextManager):
    """Rank 0's group, with the processes of ranks 1, 2, …

    The processes end with this process, however it ends. `with ranks:` wraps joint work. If the
    work fails, or Ctrl-C interrupts it, the processes are ended: they would wait forever.

    error: why the ranks have ended.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.have_ended = threading.Event()
        self.error = RuntimeError("the ranks of the engine have been closed")
        self.processes = [start_process(rank, self) for rank in range(1, size)]
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: Any) -> None:
        """Records why a rank has ended, and frees a device that is waiting for it."""
        process.wait()
        if not self.have_ended.is_set():
            self.error = RuntimeError(f"rank {rank} of the engine has died: see stderr")
            self.have_ended.set()
        # the kernels of NCCL would wait forever for a dead rank
        if self.backend and self.device == "cuda":
            self.backend.abort()

    def check(self, timeout: float = 0) -> None:
        """Raises the error of a rank that has ended, or ends within these seconds."""
        if self.have_ended.wait(timeout):
            self.close()
            raise self.error

    def connect(self, device: str) -> None:
        """Waits in a thread until all ranks are connected: Gloo does not notice if one dies."""
        connecting = threading.Thread(target=super().connect, args=(device,), daemon=True)
        connecting.start()
        while connecting.is_alive() or self.store.add("ranks", 0) < self.size:
            self.check(timeout=0.1)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """If a rank has died, a RuntimeError that names it replaces any other error: the death of
        the rank can cause that error a moment before the death itself is noticed."""
        if error:
            # never destroyed: the destructor would wait for an operation that Gloo has lost
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))
        self.check(timeout=5 * isinstance(error, (RuntimeError, OSError)))
        if error:
            self.error = RuntimeError(f"the ranks of the engine were ended after {error!r}")
            self.close()

    def send(self, *message: Any) -> None:
        """Sends all ranks the same message."""
        self.check()
        for process in self.processes:
            pickle.dump(message, process.stdin)
            process.stdin.flush()

    def close(self) -> None:
        """Ends the ranks. A rank ends when its input is closed, whatever it is doing."""
        self.have_ended.set()
        for process in self.processes:
            # closes its input, and waits
            process.communicate()


def start_process(rank: int, group: Group) -> Any:
    """A new Python that runs `main`, and reads messages from its standard input.

    A process of multiprocessing would run the user's script again, which need not be a file.
    """
    code = f"from {__name__} import main; main{group.size, rank, group.store.port}"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path),
                   "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # in its own session, since Ctrl-C is for rank 0
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                            env=os.environ | environment, start_new_session=True)


def main(*place: int) -> None:
    """The process of a rank: runs the steps that rank 0 sends. place: see `Group`."""
    group = Group(*place)
    messages: SimpleQueue = SimpleQueue()
    threading.Thread(target=read_ahead, args=(messages,), daemon=True).start()
    options, part, folder = messages.get()
    config = EngineConfig(**options)
    if config.device == "cuda":
        torch.cuda.set_device(group.rank)
    runner = RankRunner(config, part, folder, Features(), group)
    while True:
        runner.follow(*messages.get())


def read_ahead(messages: SimpleQueue) -> None:
    """Reads messages from rank 0. This process ends when rank 0 does."""
    try:
        while True:
            messages.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


PARTS = {"runner": TensorParallelRunner}
