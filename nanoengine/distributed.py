"""Tensor parallelism: one model on several devices (Megatron-LM: Shoeybi et al., 2019,
arXiv:1909.08053).

    rank 0: the user's process                          rank 1, rank 2, …: processes
    scheduler, block tables, sampling ──── message ───▶ nothing but a ModelRunner
    its part of the model ◀── sums, parts of logits ──▶ its part of the model

Each rank has the decoder with its share of the heads, of the inner size and of the vocabulary, and
K and V of its heads. All that it gets for a step is one message: the buffer of inputs, its shape
and the block copies. Only rank 0 samples.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

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
            self.store = torch.distributed.TCPStore(
                "127.0.0.1", port, size, rank == 0, TIMEOUT, wait_for_workers=False)

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


# a model on one device
ALONE = Group()


class Ranks:
    """The processes of ranks 1, 2, …, on rank 0. They end with this process, however it ends."""

    def __init__(self, group: Group, *setup: Any) -> None:
        self.processes: list[subprocess.Popen] = []
        self.connections: list[Connection] = []
        # what has ended them
        self.error: Exception | None = None
        code = ("from nanoengine import distributed, model_runner; "
                "distributed.main(model_runner.ModelRunner)")
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
    # None: a handler of another language, which could not be put back
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if before is not None:
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def main(make_runner: Callable[..., Any]) -> None:
    """The process of a rank: does what rank 0 says until that has gone.

    make_runner: the class ModelRunner, which stands below this file.
    """
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
        runner = make_runner(config, model_config, folder, group)
        while True:
            runner.follow(*messages.get())
    except Exception as error:
        connection.send(error)
        raise


