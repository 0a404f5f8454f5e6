"""Scripts in processes of their own that need not import PyTorch and transformers, which takes
seconds: each is a fork of one process that has imported these two, and nothing of this repository.

What depends on how PyTorch is imported, or on variables of the environment, needs a new process.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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
