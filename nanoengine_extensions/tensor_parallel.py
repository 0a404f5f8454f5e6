"""`tensor_parallel_size`: one model on several devices (Megatron-LM: Shoeybi et al., 2019,
arXiv:1909.08053).

    rank 0: the user's process                          rank 1, rank 2, …: processes
    scheduler, block tables, sampling ──── message ───▶ nothing but a runner
    its part of the model ◀── sums, parts of logits ──▶ its part of the model

Each rank has the decoder with its share of the heads, of the inner size and of the rows of
`lm_head`, and K and V of its heads; embeddings and norms it has whole. All that it gets for a step
is one message: the buffer of inputs, its shape and the block copies. Only rank 0 samples.

What it plugs into: `make_runner` (model_runner.py) makes a `TensorParallelRunner`. The engine calls
it as it calls any other; the model has hooks, and knows no rank.
"""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoengine.batch import Batch, Copies
from nanoengine.config import EngineConfig
from nanoengine.model import Decoder
from nanoengine.model_runner import Launched, ModelRunner
from nanoengine.sampling_params import rejected
from nanoengine.step_inputs import StepShape


class Group:
    """What the ranks of one engine compute together. All of them call the same, in one order.

    port: where rank 0 is found; rank 0 itself takes one that is free.
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
        # counts those that have come
        self.store.add("ranks", 1)
        kinds: Any = torch.distributed
        place = self.store, self.rank, self.size
        if device == "cuda":
            self.backend = kinds.ProcessGroupNCCL(*place, kinds.ProcessGroupNCCL.Options())
        else:
            self.backend = kinds.ProcessGroupGloo(*place)

    def abort(self) -> None:
        """Ends the kernels of NCCL, which wait for ever for a rank that has died. Gloo notices."""
        if self.backend and self.device == "cuda":
            self.backend.abort()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        self.backend.allreduce([x]).wait()
        return x

    def join(self, x: Tensor) -> Tensor:
        """The columns of all ranks' x, side by side."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=1)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self.join(torch.tensor([[number]], device=self.device)).min())

    def share(self, x: Tensor) -> None:
        """Rank 0's x becomes that of all."""
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
    return part


def read_part(tensor: Any, target: Tensor, group: Group) -> Tensor:
    """A rank's part of a checkpoint's tensor, where that is larger than its target."""
    return tensor[part_of(tensor.get_shape(), target, group)]


def part_of(shape: list[int], target: Tensor, group: Group) -> tuple[slice, ...]:
    """A rank's part in each dimension. What does not fit either is read, and refused, whole."""
    return tuple(
        slice(group.rank * own, (group.rank + 1) * own) if own * group.size == size else slice(None)
        for size, own in zip(shape, target.shape))


def parallelize(model: Decoder, group: Group) -> None:
    """Hooks on a rank's part of the model, behind which all ranks have the same."""
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.register_forward_hook(lambda module, inputs, output: group.sum(output))
            # what all ranks add up has the bias of one
            if group.rank:
                linear.bias = None
    # the vocabulary is padded for the last rank
    vocab_size = len(model.lm_head.weight)
    size = -(-vocab_size // group.size)
    rows = model.lm_head.weight[group.rank * size:][:size]
    padded = F.pad(rows, (0, 0, 0, size - len(rows)))
    model.lm_head.weight = nn.Parameter(padded, requires_grad=False)
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: group.join(logits)[:, :vocab_size])


# --------------------------------------------------------------------------------- the runner


class RankRunner(ModelRunner):
    """A rank's part in running batches. part: the config of its part of the model."""

    def __init__(self, config: EngineConfig, part: PretrainedConfig, folder: Path,
                 group: Group) -> None:
        self.group = group
        group.connect(config.device)
        super().__init__(config, part, folder)
        # all ranks have come so far
        group.least(0)

    def load_model(self, folder: Path, **options: Any) -> Decoder:
        model = super().load_model(folder, read=partial(read_part, group=self.group), **options)
        parallelize(model, self.group)
        return model

    def measure_free_bytes(self) -> int:
        return self.group.least(super().measure_free_bytes())

    @torch.inference_mode()
    def follow(self, copies: Copies, numbers: np.ndarray, shape: StepShape) -> None:
        """What another rank does for a step that rank 0 launches: all but sampling."""
        _, parts = self.forward(copies, torch.from_numpy(numbers), shape)
        for part in parts:
            # no rows are a part, too, of which rank 0 makes no logits
            if len(part):
                self.logits(part)
        self.group.share(self.last_sampled)


class TensorParallelRunner(RankRunner):
    """The runner of rank 0. It starts the other ranks, tells them each step, and samples."""

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        size = config.tensor_parallel_size
        part = shard(model_config, size)
        num_gpus = torch.cuda.device_count()
        if config.device == "cuda" and size > max(1, num_gpus):
            raise rejected("tensor_parallel_size", size, f"at most {num_gpus}, the GPUs there are")
        if config.batch_invariant:
            raise rejected("batch_invariant", True, "False with several ranks")
        group = Group(size)
        self.ranks = Ranks(group)
        with self.ranks.together():
            self.ranks.start(without_functions(config), part, folder)
            super().__init__(config, part, folder, group)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Begins a step on all ranks."""
        buffer, shape = self.prepare(batch)
        with uninterrupted(), self.ranks.together():
            self.ranks.send(batch.copies, buffer.numpy(), shape)
            step, parts = self.forward(batch.copies, buffer, shape)
            launched = self.sample(batch, step, parts)
            self.group.share(self.last_sampled)
        return LaunchedOnRanks(**vars(launched), ranks=self.ranks)

    def close(self) -> None:
        self.ranks.close()


def on_device(kind: type[RankRunner], device: str) -> Any:
    """A kind of runner; for a GPU it is also a `GpuRunner`."""
    if device == "cpu":
        return kind
    from nanoengine_gpu.runner import GpuRunner
    return type(kind.__name__, (kind, GpuRunner), {})


def without_functions(config: EngineConfig) -> EngineConfig:
    """The config for ranks that schedule nothing: a script's policies could not be sent to them."""
    found = {name: value for name, value in vars(config).items() if not callable(value)}
    return EngineConfig(**found)


@dataclass
class LaunchedOnRanks(Launched):
    """ranks: those that have a part in it."""

    ranks: "Ranks"

    def wait(self) -> list[int]:
        with uninterrupted(), self.ranks.together():
            return super().wait()


# ------------------------------------------------------------------------------- the processes


class Ranks:
    """The processes of ranks 1, 2, …, on rank 0. They end with this process, however it ends.

    error: what has ended them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.have_ended = threading.Event()
        self.error: BaseException = RuntimeError("the ranks of the engine have been closed")
        self.processes = [start_process(rank, group) for rank in range(1, group.size)]
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: Any) -> None:
        """Notes why a rank has ended, and frees a device that waits for it."""
        process.wait()
        if not self.have_ended.is_set():
            self.error = RuntimeError(f"rank {rank} of the engine has died")
            if self.group.store.check([f"error {rank}"]):
                self.error = pickle.loads(self.group.store.get(f"error {rank}"))
            self.have_ended.set()
            self.group.abort()

    def start(self, *arguments: Any) -> None:
        """Lets each rank make its `RankRunner` of these arguments.

        Waits until all have begun: `Group.connect` would not notice one that has died before it.
        """
        self.send(*arguments)
        while self.group.store.add("ranks", 0) < len(self.processes):
            self.check(timeout=0.1)

    def check(self, timeout: float = 0) -> None:
        """Raises what has ended a rank, if one has ended, or does so within these seconds."""
        if self.have_ended.wait(timeout):
            self.close()
            raise self.error

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done together with the other ranks, which are ended if it fails: they would wait.

        An error that may come of another rank's end is replaced by the error of that rank, or by a
        RuntimeError that names it.
        """
        try:
            yield
            # a GPU does not notice that a rank has died, and has computed rubbish then
            self.check()
        except BaseException as error:
            if isinstance(error, (RuntimeError, OSError)):
                self.check(timeout=5)
            self.error = error
            self.close()
            raise

    def send(self, *message: Any) -> None:
        """The same for all."""
        self.check()
        content = pickle.dumps(message)
        for process in self.processes:
            process.stdin.write(content)
            process.stdin.flush()

    def close(self) -> None:
        """Ends the ranks: each does so, whatever it is doing, when it has nothing more to read."""
        self.have_ended.set()
        for process in self.processes:
            # closes its input, and waits
            process.communicate()


def start_process(rank: int, group: Group) -> Any:
    """A new Python that runs `main`, and reads messages from its standard input.

    One of multiprocessing's would run the user's script again, which need not be a file at all.
    """
    code = "from nanoengine_extensions import tensor_parallel; tensor_parallel.main()"
    place = group.size, rank, group.store.port
    environment = {"PYTHONPATH": os.pathsep.join(sys.path),
                   "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # in a session of its own, as Ctrl-C is for rank 0
    return subprocess.Popen([sys.executable, "-c", code, *map(str, place)], stdin=subprocess.PIPE,
                            env=os.environ | environment, start_new_session=True)


def main() -> None:
    """The process of a rank: does what rank 0 says."""
    group = Group(*map(int, sys.argv[1:]))
    messages: SimpleQueue = SimpleQueue()
    threading.Thread(target=read_ahead, args=(messages,), daemon=True).start()
    try:
        config, part, folder = messages.get()
        if config.device == "cuda":
            torch.cuda.set_device(group.rank)
        runner = on_device(RankRunner, config.device)(config, part, folder, group)
        while True:
            runner.follow(*messages.get())
    except Exception as error:
        group.store.set(f"error {group.rank}", pickle.dumps(error))
        raise


def read_ahead(messages: SimpleQueue) -> None:
    """Reads what rank 0 says. This process ends with it, whatever it is doing then."""
    try:
        while True:
            messages.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts behind it: the other ranks would wait for what has been left out.

    Only the main thread gets Ctrl-C. A handler that C code has installed, for which Python has
    None, stays: it could not be put back.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
