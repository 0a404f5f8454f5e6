"""`tensor_parallel_size`: one model on several devices (Megatron-LM: Shoeybi et al., 2019,
arXiv:1909.08053).

    rank 0: the user's process                          rank 1, rank 2, …: processes
    scheduler, block tables, sampling ──── message ───▶ nothing but a ModelRunner
    its part of the model ◀── sums, parts of logits ──▶ its part of the model

Each rank has the decoder with its share of the heads, of the inner size and of the vocabulary, and
K and V of its heads. All that it gets for a step is one message: the buffer of inputs, its shape
and the block copies. Only rank 0 samples.
"""

import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from nanoengine.batch import Batch, Copies
from nanoengine.config import EngineConfig
from nanoengine.model import Decoder
from nanoengine.model_runner import Launched, ModelRunner
from nanoengine.sampling_params import rejected
from nanoengine.step_inputs import StepInputs, StepShape

TIMEOUT = timedelta(minutes=10)


class Group:
    """What the ranks of one engine compute together. All of them call the same, in one order.

    port: where rank 0 is found; 0 on rank 0 itself, which takes one that is free.
    """

    def __init__(self, rank: int = 0, size: int = 1, port: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.store: Any = None
        self.backend: Any = None
        if size > 1:
            is_first = rank == 0
            self.store = torch.distributed.TCPStore(
                "127.0.0.1", port, size, is_first, TIMEOUT, wait_for_workers=False)

    def connect(self, device: str) -> None:
        """Waits for all ranks. PyTorch's default group stays free for the user."""
        self.device = device
        kinds = torch.distributed.distributed_c10d
        place = self.store, self.rank, self.size
        if self.size > 1 and device == "cuda":
            self.backend = kinds.ProcessGroupNCCL(*place, kinds.ProcessGroupNCCL.Options())
        elif self.size > 1:
            self.backend = kinds.ProcessGroupGloo(*place, TIMEOUT)

    def abort(self) -> None:
        """Ends the kernels of NCCL, which wait for ever for a rank that has died. Gloo notices."""
        if self.backend and self.device == "cuda":
            self.backend.abort()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        if self.backend:
            self.backend.allreduce([x]).wait()
        return x

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return min(self.join(torch.tensor([[number]], device=self.device))[0].tolist())

    def join(self, x: Tensor) -> Tensor:
        """The columns of all ranks' x, side by side."""
        if not self.backend:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=1)

    def share(self, x: Tensor) -> None:
        """Rank 0's x becomes that of all."""
        if self.backend:
            self.backend.broadcast([x]).wait()


# ------------------------------------------------------------------------- a part of the model


def shard(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """The config of what each of `size` ranks has. Raises ValueError for what cannot be divided."""
    part = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole = getattr(config, name)
        if whole % size:
            raise rejected("tensor_parallel_size", size, f"a divisor of {name}={whole}")
        setattr(part, name, whole // size)
    part.vocab_size = -(-config.vocab_size // size)
    return part


def read_share(tensor: Any, target: Tensor, group: Group) -> Tensor:
    """A rank's share of a checkpoint's tensor, where that is larger than its target."""
    part = part_of(tensor.get_shape(), target, group)
    rows = tensor[part]
    # the last part of a vocabulary may be shorter
    missing = len(target) - len(rows) if part[0] != slice(None) else 0
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))


def part_of(shape: list[int], target: Tensor, group: Group) -> tuple[slice, ...]:
    return tuple(
        slice(group.rank * own, (group.rank + 1) * own)
        if own != size and own == -(-size // group.size) else slice(None)
        for size, own in zip(shape, target.shape))


def parallelize(model: Decoder, group: Group, vocab_size: int) -> None:
    """Hooks on a rank's part of the model, behind which all ranks have the same."""
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.register_forward_hook(lambda module, inputs, output: group.sum(output))
            # what all ranks add up has the bias of one
            if group.rank and linear.bias is not None:
                linear.bias.zero_()
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: group.join(output)[:, :vocab_size])

    def embed(token_ids: Tensor) -> Tensor:
        """Each rank has the rows of its part of the vocabulary."""
        weight = model.embed_tokens.weight
        own_ids = token_ids - group.rank * len(weight)
        is_here = (own_ids >= 0) & (own_ids < len(weight))
        found = F.embedding(own_ids.clamp(0, len(weight) - 1), weight)
        return group.sum(torch.where(is_here[:, None], found, 0))

    model.embed_tokens.forward = embed


# --------------------------------------------------------------------------------- the runner


@dataclass
class LaunchedOnRanks(Launched):
    """check: raises an error if a rank that had a part in it has died."""

    check: Callable[[], None] = lambda: None

    def wait(self) -> Any:
        if self.done:
            self.done.synchronize()
        self.check()
        return super().wait()


class TensorParallelRunner(ModelRunner):
    """A rank's part in running batches: rank 0 launches them, the others follow."""

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 group: Group | None = None) -> None:
        size = config.tensor_parallel_size
        num_gpus = torch.cuda.device_count()
        part = shard(model_config, size)
        if config.device == "cuda" and size > max(1, num_gpus):
            raise rejected("tensor_parallel_size", size, f"at most {num_gpus}, the GPUs there are")
        if config.batch_invariant:
            raise rejected("batch_invariant", True, "False with several ranks")
        self.vocab_size = model_config.vocab_size
        self.group = group or Group(size=size)
        self.ranks = Ranks(self.group, config, model_config, folder)
        try:
            with self.ranks.explained():
                self.group.connect(config.device)
                super().__init__(config, part, folder)
                # all ranks have come so far
                self.group.least(0)
        except BaseException:
            self.ranks.close()
            raise

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        read = partial(read_share, group=self.group)
        model = super().load_model(folder, read=read, **options)
        parallelize(model, self.group, self.vocab_size)
        return model

    def measure_free_bytes(self) -> int:
        free_bytes = super().measure_free_bytes()
        if not self.is_gpu:
            available = psutil.virtual_memory().available
            free_bytes = min(free_bytes, available // 4 // self.group.size)
        return self.group.least(free_bytes)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Begins a step on all ranks."""
        buffer, shape = self.prepare(batch)
        with uninterrupted(), self.ranks.explained():
            self.ranks.send(batch.copies, buffer.numpy(), shape)
            step, parts = self.forward(batch.copies, buffer, shape)
            launched = self.sample(batch, step, parts)
        return LaunchedOnRanks(**vars(launched), check=self.ranks.check)

    @torch.inference_mode()
    def follow(self, copies: Copies, numbers: np.ndarray, shape: StepShape) -> None:
        """What another rank does for a step that rank 0 launches: all but sampling."""
        _, parts = self.forward(copies, torch.from_numpy(numbers), shape)
        self.end_step(parts)

    def sample(self, batch: Batch, step: StepInputs, parts: list[Any]) -> Launched:
        try:
            return super().sample(batch, step, parts)
        finally:
            self.end_step(parts)

    def end_step(self, parts: list[Any]) -> None:
        """Takes part in the logits of the parts that are left, and in what the next step reads.

        On rank 0 some are left where an error has kept it from sampling: all ranks make the logits
        of all parts, or the others would wait for it.
        """
        while parts:
            self.logits(parts.pop(0))
        if self.config.run_ahead:
            self.group.share(self.last_sampled)

    def close(self) -> None:
        self.ranks.close()


# ------------------------------------------------------------------------------- the processes


class Ranks:
    """The processes of ranks 1, 2, …, on rank 0. They end with this process, however it ends."""

    def __init__(self, group: Group, *setup: Any) -> None:
        self.processes: list[subprocess.Popen] = []
        self.connections: list[Connection] = []
        # what has ended them
        self.error: Exception | None = None
        code = "from nanoengine_extensions import tensor_parallel; tensor_parallel.main()"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path),
                                    "OMP_NUM_THREADS": str(torch.get_num_threads())}
        for rank in range(1, group.size if group.rank == 0 else 0):
            ours, theirs = socket.socketpair()
            with theirs:
                number = theirs.fileno()
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-c", code, str(number)], pass_fds=[number], env=environment))
            self.connections.append(Connection(ours.detach()))
            self.connections[-1].send((rank, group.size, group.store.port, *setup))
            threading.Thread(target=self._watch, args=(group, self.processes[-1]),
                             daemon=True).start()

    def _watch(self, group: Group, process: subprocess.Popen) -> None:
        """Frees a device that waits for a rank which has died. What it computes then is rubbish."""
        process.wait()
        # not if `close` has ended it
        if self.connections or self.error:
            group.abort()

    def check(self) -> None:
        """Raises what has ended the ranks, if they have ended."""
        if self.error:
            raise self.error
        with self.explained():
            if any(process.poll() is not None for process in self.processes):
                raise EOFError

    def send(self, *message: Any) -> None:
        """The same for all."""
        self.check()
        content = pickle.dumps(message) if self.connections else b""
        for connection in self.connections:
            connection.send_bytes(content)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What is done together with the other ranks.

        An error that comes of another rank's end is replaced by the error of that rank, or by a
        RuntimeError that names it; all ranks are ended then.
        """
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            ended = wait(self.connections, timeout=5) if self.connections else []
            for rank, connection in enumerate(self.connections, 1):
                if connection in ended:
                    self.error = RuntimeError(f"rank {rank} of the engine has died")
                    with suppress(EOFError, OSError):
                        self.error = connection.recv()
                    self.close()
                    raise self.error from error
            raise

    def close(self) -> None:
        """Ends the ranks: each does so when its connection is closed."""
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.close()
        for process in self.processes:
            process.wait()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts behind it: the other ranks would wait for what has been left out."""
    interrupts: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before: Any = None
    if is_main:
        before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def main() -> None:
    """The process of a rank: does what rank 0 says until that has gone."""
    # Ctrl-C is for rank 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    rank, size, port, config, model_config, folder = connection.recv()
    messages: SimpleQueue = SimpleQueue()

    def read() -> None:
        # whatever the rank is doing then
        with suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    try:
        if config.device == "cuda":
            torch.cuda.set_device(rank)
        group = Group(rank, size, port)
        runner = TensorParallelRunner(config, model_config, folder, group)
        while True:
            runner.follow(*messages.get())
    except Exception as error:
        connection.send(error)
        raise
