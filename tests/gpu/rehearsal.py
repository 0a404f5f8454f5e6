"""pytest -p rehearsal: the tests of this folder on the GPU that is not there, with few tokens.

Real memory and time are not there either: tests of those are left out.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# then: a thread of its own, models of transformers on the device, more than a few tokens
NEEDS_A_GPU = ("cache_gets_what", "out_of_memory", "engines_leave_nothing", "06b_shape",
               "current_device", "float32_is_exact", "logits_are_those", "options4",
               # experts are counted by an operator that takes no integers on a CPU
               "gpt_oss", "mixtral", "deepseek_v3", "experts_in_bfloat16")


def pytest_configure(config) -> None:
    import nanoengine  # noqa: F401
    from fake_gpu import FakeGpu
    from nanoengine.sequence import Batch
    from nanoengine.cuda_graphs import padded
    from nanoengine_extras.models import dummy
    from nanoengine_extras.running import memory
    torch.cuda.set_sync_debug_mode = lambda mode: None
    # the largest step would take a CPU half a minute
    memory.largest_batch = lambda runner: padded(Batch(), runner.config.max_num_seqs)
    dummy.fill = fill
    config.fake_gpu = FakeGpu(num_bytes=2**29)
    config.fake_gpu.__enter__()


def fill(model, *others) -> None:
    """Random weights without a generator on the GPU."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)


def pytest_unconfigure(config) -> None:
    config.fake_gpu.__exit__(None, None, None)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if any(name in item.name for name in NEEDS_A_GPU):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if items and not os.environ.get("REHEARSAL_LONG"):
        module = items[0].module
        # long enough that a few blocks are too few
        module.PROMPTS[:] = [module.PROMPTS[number] for number in (3, 4, 5, 6, 1)]
        module.GREEDY.max_tokens = 5
        module.LONG = 6
