"""All that a GPU has to show, in two calls of a few minutes: see README.md.

    python3 tests/gpu/day.py call1
    python3 tests/gpu/day.py call2 --only NAMES-OF-FAILED-STEPS

A step is a process with a log and a limit of its own: a crash or a hang of one hides nothing of the
others. The steps of a phase run at once, the phases one after the other. A step for which there is
no time is left out, and the table says so. $OUT gets logs.tgz, summary.txt, notes.txt (how many
prompts differ) and bench.json. With REHEARSAL=1 a fake GPU and tiny models take the place of all
that needs one.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
OUT = Path(os.environ.get("OUT", "/tmp/day"))
REHEARSAL = bool(os.environ.get("REHEARSAL"))
# seconds of each call at most, all steps together
SECONDS = {"call1": 235, "call2": 560}
# output tokens a second of steps of call 2; figures.py says what single kernels should take
PREDICTED = {"ours": "23,130, or 1.22 of nano-vllm", "unordered": "22,580", "top-p": "21,200",
             "batch-1": "950", "batch-1-cublas": "600"}


class Step(NamedTuple):
    """limit: in seconds; needed: a file or folder that is brought along."""

    name: str
    limit: float
    command: list[str]
    needed: str = ""


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def tests(which: str, *options: str, file: str = "tests/gpu/test_on_gpu.py") -> list[str]:
    """Runs some of the tests."""
    plugin = ["-p", "rehearsal"] if REHEARSAL and "test_on_gpu" in file else []
    return python("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *plugin,
                  "--tb=short", "-rfE", "--durations=6", *options, file, "-k", which)


def script(name: str, *arguments: str) -> list[str]:
    return python(str(FOLDER / name), *arguments)


BESIDE = "beside_nano.py"
KERNELS = "tests/gpu_kernels/interpreted.py"
CALL1 = [
    [Step("flash", 60, python(".fa/check_flash_attn.py"), ".fa/check_flash_attn.py"),
     Step("kernels", 105, tests("", "--maxfail=12", "-n", "6", file=KERNELS)),
     Step("engine-flash", 105, tests("(backends_graphs or in_flight) and flash")),
     Step("engine-triton", 105, tests("(backends_graphs or in_flight) and (triton or gather)"
                                      " or float32_is_exact")),
     Step("batches", 105, tests("every_batch_size or drawn_tokens", "--maxfail=6")),
     Step("sampler", 105, tests("draws_on_the_gpu or wait_for_nothing")),
     Step("features", 105, tests("preemption_chunks or weights_on_the_host or a_trace"
                                 " or autocast or current_device")),
     Step("transformers", 105, tests("logits_are_those or transformers_computes or experts_in")),
     Step("extensions", 105, tests("features_give")),
     Step("nccl", 40, script("nccl_one.py"))],
    # alone on the card
    [Step("memory", 45, tests("drawn_tokens or cache_gets or out_of_memory or leave_nothing"
                              " and False"))],
    [Step("bench", 60, python("bench.py", "--config", "qwen3-0.6b", "--max-model-len", "4096",
                              "--json", str(OUT / "bench.json")))]]
CALL2 = [
    [Step("make-weights", 30, script(BESIDE, "make"))],
    [Step("figures", 75, script("figures.py"))],
    [Step("kernels-of-steps", 45, script("kernels_of_steps.py"))],
    [Step("ours", 55, script(BESIDE, "ours", "--repeat", "2"))],
    [Step("nano-vllm", 100, script(BESIDE, "nano", "--repeat", "2"), ".nano")],
    [Step("ours-again", 45, script(BESIDE, "ours"))],
    [Step("unordered", 45, script(BESIDE, "ours", "--ordered", "0"))],
    [Step("batch-1", 35, script(BESIDE, "ours", "--num-seqs", "1", "--output", "512"))],
    [Step("batch-1-cublas", 35, script(BESIDE, "ours", "--num-seqs", "1", "--output", "512",
                                       "--few-rows", "0"))],
    # flash-attn splits keys by the width of the block table, and not by the lengths
    [Step("batch-1-wide", 35, script(BESIDE, "ours", "--num-seqs", "1", "--output", "512",
                                     "--max-model-len", "40960"))],
    [Step("nano-batch-1", 60, script(BESIDE, "nano", "--num-seqs", "1", "--output", "512"),
          ".nano")],
    [Step("no-run-ahead", 45, script(BESIDE, "ours", "--run-ahead", "0"))],
    [Step("triton", 45, script(BESIDE, "ours", "--backend", "triton"))],
    [Step("eager", 50, script(BESIDE, "ours", "--eager", "1"))],
    [Step("top-p", 45, script(BESIDE, "ours", "--top-k", "20", "--top-p", "0.95"))],
    [Step("of-transformers", 50, script(BESIDE, "ours", "--model-impl", "transformers"))],
    [Step("shape-06b", 60, tests("06b_shape or leave_nothing and True"))]]


def rehearsed(step: Step) -> Step:
    """What stands for a step where there is no GPU."""
    command = {
        "kernels": ["env", "TRITON_INTERPRET=1",
                    *tests("truncate_nothing or test_swiglu", file=KERNELS)],
        "bench": python("bench.py", "--workload", "small", "--num-seqs", "4", "--json",
                        str(OUT / "bench.json")),
        "nccl": python("-c", "from nanoengine_extras.running.tensor_parallel import Group")}
    return step._replace(command=command.get(step.name, step.command),
                         limit=step.limit * float(os.environ.get("REHEARSAL_TIME", 1)))


def phases_of(call: str, names: set[str]) -> list[list[Step]]:
    """names: the only steps of call 1; in call 2 steps of call 1, which run first."""
    chosen = [[step for step in phase if step.name in names] for phase in CALL1]
    phases = {"call1": chosen if names else CALL1, "call2": [*chosen, *CALL2]}[call]
    if REHEARSAL:
        # one after the other: a machine without a GPU has few cores; nano-vllm needs one
        phases = [[rehearsed(step)] for phase in phases for step in phase
                  if step.needed != ".nano"]
    return [phase for phase in phases if phase]


class Day:
    """A call: its clock, its logs and its table."""

    def __init__(self, call: str, seconds: float) -> None:
        self.call = call
        self.began = time.monotonic()
        self.seconds = seconds
        OUT.mkdir(parents=True, exist_ok=True)
        self.logs = Path(tempfile.mkdtemp())
        self.table: list[tuple[str, str, float, str]] = []

    def run_phase(self, steps: list[Step]) -> None:
        running = []
        for step in steps:
            limit = min(step.limit, self.seconds - (time.monotonic() - self.began) - 6)
            if step.needed and not (ROOT / step.needed).exists():
                self.table.append((step.name, "not here", 0, f"without {step.needed}"))
            # what would not come to its end leaves its time to the next step
            elif limit < max(min(10, step.limit), 0.6 * step.limit):
                self.table.append((step.name, "no time", 0, ""))
            else:
                running.append((step, limit, *self.start(step, is_alone=len(steps) == 1)))
        while running:
            time.sleep(0.1)
            for each in [*running]:
                step, limit, process, log, began = each
                seconds = time.monotonic() - began
                status = process.poll()
                if status is None and seconds > limit:
                    status = end(process)
                if status is not None:
                    running.remove(each)
                    self.report(step.name, status, seconds, log.read_text(errors="replace"))

    def start(self, step: Step, is_alone: bool) -> tuple[subprocess.Popen, Path, float]:
        log = self.logs / f"{step.name}.log"
        shared = {} if is_alone and not REHEARSAL else {"SHARED_GPU": "1"}
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=os.environ | shared, stdin=subprocess.DEVNULL,
            stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)
        return process, log, time.monotonic()

    def report(self, name: str, status: int | str, seconds: float, text: str) -> None:
        """Prints what a step has found, and adds a row to the table."""
        lines = text.splitlines()
        figures = [line for line in lines if line.startswith("== ")]
        counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", "\n".join(lines[-3:]))
        found = ", ".join(counts) or "; ".join(line[3:] for line in figures[-2:])
        if name == "bench":
            names = ("output tokens per second", "limit percent", "idle percent", "decode step ms")
            found = "; ".join(" ".join(line.split()) for line in lines
                              if line.strip().startswith(names))
        if name == "flash":
            found = f"{text.count(chr(10) + 'ok ')} ok, {text.count(chr(10) + 'FAIL')} FAIL"
        if name in PREDICTED:
            found += f"; predicted {PREDICTED[name]}"
        self.table.append((name, "ok" if status == 0 else f"rc {status}", seconds, found))
        print(f"-- {name}: {self.table[-1][1]} after {seconds:.0f} s: {found}")
        shown = figures
        if status != 0:
            failed = [line for line in lines if re.match(r"(FAILED|ERROR|FAIL |E  )", line)]
            shown = [*failed[:14], "…", *lines[-12:]]
        print("\n".join(f"   {line[:240]}" for line in shown), flush=True)

    def finish(self) -> None:
        """Prints the table, last of all; keeps it and all logs."""
        with tarfile.open(OUT / "logs.tgz", "w:gz") as file:
            file.add(self.logs, "logs")
        text = [f"-- {self.call}: {time.monotonic() - self.began:.0f} s --"]
        text += [f"{name:14} {status:9} {seconds:4.0f} s  {found}"
                 for name, status, seconds, found in self.table]
        rates = {name: float(match[1]) for name, *_, found in self.table
                 if (match := re.search(r"([\d.]+) output tokens/s", found))}
        text += [f"{name} / nano-vllm: {rates[name] / rates['nano-vllm']:.3f}"
                 for name in ("ours", "ours-again") if {name, "nano-vllm"} <= rates.keys()]
        (OUT / "summary.txt").write_text("\n".join(text) + "\n")
        print("\n".join(["", *text]), flush=True)


def end(process: subprocess.Popen) -> str:
    """Kills a step and all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        # it hangs in the driver of the GPU
        pass
    return "limit"


def set_environment() -> None:
    """For the steps: what was brought along can be imported."""
    site = tempfile.mkdtemp()
    for wheel in (ROOT / ".whl").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    paths = [FOLDER, ROOT / ".fa/sm90", site, ROOT, ROOT / "tests"]
    os.environ |= {
        "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1" if REHEARSAL else "2", "NOTES": str(OUT / "notes.txt"),
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=SECONDS)
    parser.add_argument("--only", default="", help="names of steps of call 1, with commas between")
    parser.add_argument("--seconds", type=float, help="for all steps; default: 235 and 560")
    args = parser.parse_args(argv)
    names = {*filter(None, args.only.split(","))}
    if unknown := names - {step.name for phase in CALL1 for step in phase}:
        parser.error(f"--only {','.join(unknown)}: names of steps of call 1")
    day = Day(args.call, args.seconds or SECONDS[args.call])
    set_environment()
    try:
        for phase in phases_of(args.call, names):
            day.run_phase(phase)
    finally:
        day.finish()
    return int(any(status != "ok" for _, status, *_ in day.table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
