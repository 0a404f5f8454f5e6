"""How much memory is left for the KV cache; for a GPU, the largest step, which is tried; the memory
that a container leaves, from files of Linux that are made up here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nanoengine import LLM
from nanoengine.config import EngineConfig
from nanoengine.cuda_graphs import CudaGraphs
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature, Features
from nanoengine_extras import ALWAYS
from nanoengine_extras.running import free_memory
from nanoengine_extras.running.memory import AllWritten, largest_batch


def test_the_free_memory_of_a_cpu(make_llm, monkeypatch):
    memory = SimpleNamespace(available=2**22, total=2**24)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with make_llm() as llm:
        runner = llm.engine.runner
        assert runner.num_kv_blocks == 2**20 // runner.block_bytes, "a quarter"
    with make_llm(max_num_seqs=2, max_model_len=33) as llm:
        assert llm.engine.runner.num_kv_blocks == 6, "what two sequences of three blocks can use"


@pytest.mark.parametrize("max_num_seqs, max_num_batched_tokens, max_model_len, expected", [
    (8, 8, 600, [8]), (8, 2048, 600, [512] * 4), (2, 8192, 600, [600] * 2), (1, 1, 5, [1]),
    (256, 8192, 40_960, [8192])])
def test_the_largest_step(max_num_seqs, max_num_batched_tokens, max_model_len, expected):
    config = EngineConfig(model="m", max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens)
    runner: Any = object.__new__(ModelRunner)
    runner.config, runner.max_model_len = config, max_model_len
    runner.features = Features(ALWAYS)
    runner.last_sampled = [0] * max_num_seqs
    batch = largest_batch(runner)
    assert batch.num_tokens == expected and len(batch.sampled) == max_num_seqs
    graphs: Any = CudaGraphs(max_num_seqs)
    graphs.captured = {"some": "graphs"}
    assert not graphs.can_replay(batch) or max_num_batched_tokens == 1, "no graph takes it over"
    assert {start + count for start, count in zip(batch.starts, expected)} == {max_model_len}
    (edits,) = {row.seq.edits + row.seq.params.truncations for row in batch.sampled}
    assert edits == ("Logprobs", "Constraints", "min_p", "top_p"), "with a whole sort"
    assert all(type(runner.features[each]) is not Feature for each in ("Logprobs", "Constraints"))
    assert {row.seq.params.logprobs for row in batch.sampled} == {20}


def test_the_largest_step_is_tried_before_the_cache_has_its_size(make_llm, monkeypatch):
    """As on a GPU: what is left beside it is measured."""
    def measure_free_bytes(runner, max_model_len):
        runner.allocate(0, max_model_len)
        batch = largest_batch(runner)
        launched = runner.launch(batch)
        assert len(launched.wait()) == 36 and runner.blocks.nbytes == runner.block_bytes
        return 9 * runner.block_bytes + 1

    monkeypatch.setattr(ModelRunner, "measure_free_bytes", measure_free_bytes)
    with make_llm(max_num_seqs=4) as llm:
        assert llm.engine.runner.num_kv_blocks == 9


def test_all_of_the_cache_is_written_at_the_start(make_llm):
    """An operation on its memory raises the number of its version."""
    versions = []
    for own in ([], [AllWritten()]):
        with make_llm(num_kv_blocks=8, features=own) as llm:
            versions.append(llm.engine.runner.blocks._version)
            assert not llm.engine.runner.blocks.any()
    assert versions[1] == versions[0] + 1


# ------------------------------------------------------------------------------ of a container


GIB = 2**30
HOST = 64 * GIB
# as the kernel writes them: proc_pid_mountinfo(5)
V2 = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = ("30 25 0:27 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n"
      "33 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
      "35 30 0:32 {top} /sys/fs/cgroup/memory rw shared:12 master:3 - cgroup cgroup rw,memory\n")
UNIFIED = "41 30 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
# the limit of a cgroup of version 1 that has none
NO_LIMIT = 9223372036854771712


@pytest.fixture
def system(tmp_path):
    """Makes files; `groups` has folders with a limit, a usage, and bytes of inactive files."""
    def make(cgroup: str, mountinfo: str, groups: dict) -> Path:
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo)
        for name, numbers in groups.items():
            folder = tmp_path / "sys/fs/cgroup" / name
            folder.mkdir(parents=True, exist_ok=True)
            is_old = name.startswith("memory")
            files = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                     if is_old else ("memory.max", "memory.current", "inactive_file"))
            for file, number in zip(files, numbers[:2]):
                if number is not None:
                    (folder / file).write_text(f"{number}\n")
            if len(numbers) > 2:
                # of the group alone, in version 1 another number than that of all below it
                own = f"cache 5\ninactive_file {7 if is_old else numbers[2]}\nactive_file 12345\n"
                more = f"total_cache 9\ntotal_inactive_file {numbers[2]}\n" if is_old else ""
                (folder / "memory.stat").write_text(f"anon 3\ninactive_anon 1\n{own}{more}")
        return tmp_path
    return make


SCOPE = "user.slice/user-0.slice/run-1.scope"


@pytest.mark.parametrize("path, groups, expected", [
    # in a container, its own group looks like the root
    ("", {"": (GIB, 300, 100)}, GIB - 200),
    ("", {"": ("max", 300, 100)}, HOST),
    # files that are missing or empty
    ("", {"": (GIB, 300)}, GIB - 300), ("", {"": (GIB, None, 100)}, GIB + 100),
    ("", {"": (None, 300, 9)}, HOST), ("", {"": ("", 300, 100)}, HOST), ("", {}, HOST),
    # more is in use than the limit, which was lowered
    ("", {"": (GIB, 2 * GIB, 0)}, 0),
    ("", {"": (2 * HOST, 0, 0)}, HOST),
    # on a host: the unit of systemd, and the slices around it; the last is of another process
    *((SCOPE, {"user.slice": (slices, 0, 0), "user.slice/user-0.slice": (of_user, 0, 0),
               SCOPE: (unit, 0, 0), "system.slice": (5, 0, 0)}, expected)
      for slices, of_user, unit, expected in (
          ("max", GIB, 4 * GIB, GIB), (GIB, "max", 4 * GIB, GIB), ("max", "max", GIB, GIB),
          ("max", "max", "max", HOST), (3 * GIB, 2 * GIB, GIB, GIB))),
    # a larger group around it, of which another container takes most
    ("pod/mine", {"pod": (4 * GIB, 3 * GIB + 5, 5), "pod/mine": (2 * GIB, GIB // 2, 0)}, GIB)])
def test_version_2(system, path, groups, expected):
    assert free_memory(HOST, system(f"0::/{path}\n", V2, groups)) == expected


@pytest.mark.parametrize("top, path, group", [
    ("/", "/docker/ab", "memory/docker/ab"), ("/docker/ab", "/docker/ab", "memory"),
    ("/docker/ab", "/docker/ab/init.scope", "memory/init.scope"),
    ("/docker/ab", "/docker/ab/init.scope", "memory"),
    # the file system was mounted elsewhere, or the group is out of sight
    ("/docker/ab", "/", "memory"), ("/", "/../other", "memory"), ("/", "/gone (deleted)", "memory"),
    ("/", "/kubepods/pod1:cri:ab", "memory/kubepods/pod1:cri:ab")])
@pytest.mark.parametrize("line", ["4:memory:{}", "4:hugetlb,memory:{}", "4:memory,hugetlb:{}"])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_version_1(system, top, path, group, line, is_hybrid):
    cgroup = f"12:cpu,cpuacct:/other\n{line.format(path)}\n1:name=systemd:/other\n"
    cgroup += "0::/docker/ab\n" if is_hybrid else ""
    mounts = V1.format(top=top) + (UNIFIED if is_hybrid else "")
    groups = {"memory": (NO_LIMIT, 9, 0), "cpu,cpuacct": (None, None),
              "memory/other": (5, 0, 0), "unified/docker/ab": (None, None)}
    root = system(cgroup, mounts, groups | {group: (GIB, 300, 100)})
    assert free_memory(HOST, root) == GIB - 200


def test_mounted_somewhere_else(system, tmp_path):
    root = system("3:memory:/a\n", V1.format(top="/").replace("/sys/fs/cgroup/memory", "/dev/mem"),
                  {"memory/a": (5, 0, 0)})
    (tmp_path / "dev/mem/a").mkdir(parents=True)
    (tmp_path / "dev/mem/a/memory.limit_in_bytes").write_text("1000\n")
    assert free_memory(HOST, root) == 1000


def test_without_linux_or_its_files(tmp_path, system):
    assert free_memory(HOST, tmp_path) == HOST
    root = system("0::/\n", V2, {"": (GIB, 0, 0)})
    (root / "proc/self/mountinfo").unlink()
    assert free_memory(HOST, root) == HOST
    (root / "proc/self/mountinfo").write_text(V2)
    (root / "proc/self/cgroup").unlink()
    assert free_memory(HOST, root) == GIB, "the group that is mounted"
    # a folder in place of a file cannot be read
    (root / "sys/fs/cgroup/memory.max").unlink()
    (root / "sys/fs/cgroup/memory.max").mkdir()
    assert free_memory(HOST, root) == HOST
    (root / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert free_memory(HOST, root) == HOST


def test_on_this_machine():
    available = psutil.virtual_memory().available
    assert 0 < free_memory(available) <= available


@pytest.fixture
def container(system, monkeypatch):
    """Lets the engine run in a container with this many bytes, on a large host."""
    def enter(size: int) -> None:
        root = system("0::/\n", V2, {"": (size, 0, 0)})
        monkeypatch.setattr(free_memory, "__defaults__", (root,))
        host = SimpleNamespace(available=HOST, total=HOST)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    return enter


OPTIONS = dict(dtype="float32", block_size=16, max_num_seqs=256)


def test_the_cache_takes_a_quarter_of_what_the_container_has_left(tiny, container):
    container(2**25)
    with LLM(tiny, **OPTIONS) as llm:
        runner = llm.engine.runner
        assert runner.num_kv_blocks == 2**23 // runner.block_bytes


@pytest.mark.usefixtures("forked_ranks")
def test_weights_and_the_pool_of_swapping_have_to_fit_the_container(tiny, container):
    container(2**18)
    with pytest.raises(ValueError, match="model='0.00 GiB of weights' .* device 'cpu' has"):
        LLM(tiny, num_kv_blocks=8, **OPTIONS)
    container(2**30)
    for num_ranks, most in ((1, "1.0"), (2, "0.5")):
        options = dict(preemption_mode="swap", block_size=16, num_kv_blocks=8,
                       tensor_parallel_size=num_ranks)
        if num_ranks == 1:
            LLM(tiny, swap_space=0.9, **options).close()
        with pytest.raises(ValueError, match=f"swap_space=1.1 .* at most {most} GiB of memory"):
            LLM(tiny, swap_space=1.1, **options)
