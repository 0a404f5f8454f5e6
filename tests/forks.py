"""Scripts in processes of their own that need not import PyTorch and transformers, which takes
seconds: each is a fork of one process that has imported these two, and nothing of this repository.
The ranks of an engine can be forks, too, of a process that has also imported the engine.

What depends on how PyTorch is imported, or on variables of the environment, needs a new process.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent

TEMPLATE = """
import json, os, sys
import torch._dynamo, transformers
transformers.AutoConfig, transformers.AutoTokenizer  # they are imported once named
for line in sys.stdin:
    script, folder, *files = json.loads(line)
    if (process := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
for number, file in enumerate(files):
    os.dup2(os.open(file, os.O_WRONLY if number else os.O_RDONLY), number)
sys.stdin = open(0)
os.chdir(folder)
exec(script, {"__name__": "__main__"})
"""


@functools.cache
def template() -> subprocess.Popen:
    """It ends when its input is closed: at the latest with this process."""
    return subprocess.Popen([sys.executable, "-c", TEMPLATE], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run_in_fork(script: str, text: str = "", folder: Path = ROOT) -> subprocess.CompletedProcess:
    """As `subprocess.run([sys.executable, "-c", script], input=text, cwd=folder, text=True,
    capture_output=True)`."""
    process = template()
    with tempfile.TemporaryDirectory() as streams:
        files = [Path(streams) / name for name in ("stdin", "stdout", "stderr")]
        for file in files:
            file.write_text("")
        files[0].write_text(text)
        print(json.dumps([script, str(folder), *map(str, files)]), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(script, code, files[1].read_text(),
                                           files[2].read_text())


def is_compiled_once(script: str) -> bool:
    """Whether a second process finds on disk all kernels that a script has made in a first one."""
    script = f"""
from numba.core.event import install_recorder
with install_recorder("numba:run_pass") as seen:
    exec({script!r})
print(len(seen.buffer))"""
    first, second = run_in_fork(script), run_in_fork(script)
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    return second.stdout == "0\n"


# ------------------------------------------------------------------------- ranks of an engine

RANKS = """
import os, signal, socket, sys
import torch._dynamo, transformers
transformers.AutoConfig, transformers.AutoTokenizer
from nanoengine_extras.running import tensor_parallel
try:
    import nanoengine_extras.cpu
except ImportError:
    pass
link = socket.socket(fileno=int(sys.argv[1]))
# nobody waits for the forks
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    script, files, *_ = socket.recv_fds(link, 10**5, 3)
    if not script:
        sys.exit()
    if (process := os.fork()) == 0:
        break
    link.send(str(process).encode())
    for file in files:
        os.close(file)
link.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.setsid()
os.dup2(files[0], 0)
os.dup2(files[1], 2)
sys.stdin = open(0)
exec(script, {"__name__": "__main__"})
"""


@functools.cache
def template_of_ranks() -> socket.socket:
    """The link to a process that ends when this is closed: at the latest with this process."""
    link, other = socket.socketpair()
    with other:
        subprocess.Popen([sys.executable, "-c", RANKS, str(other.fileno())], cwd=ROOT,
                         pass_fds=[other.fileno()], env=os.environ | {"PYTHONPATH": str(ROOT)})
    return link


class ForkedRank:
    """A fork that runs a script, with what an engine uses of a `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, script: str) -> None:
        link = template_of_ranks()
        at_end, end = os.pipe()
        at_input, to_input = os.pipe()
        # the fork alone holds `end`: it is closed when the fork ends, however it ends
        socket.send_fds(link, [script.encode()], [at_input, 2, end])
        self.pid = int(link.recv(100))
        os.close(at_input)
        os.close(end)
        self.end, self.stdin = open(at_end, "rb", buffering=0), open(to_input, "wb")

    def wait(self) -> int:
        self.end.read(1)
        self.returncode = 0
        return 0

    def communicate(self) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start_rank(rank: int, group: Any, lines: str = "") -> ForkedRank:
    """In place of `tensor_parallel.start_process`. lines: what the rank runs first"""
    return ForkedRank(f"""
import torch
from nanoengine_extras.running.tensor_parallel import main
torch.set_num_threads({torch.get_num_threads()})
{lines}
main{group.size, rank, group.store.port}
""")
