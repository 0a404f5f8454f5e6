"""More attention for a GPU, on a GPU that is not there (`fake_gpu.py`). What it computes has tests
in test_attention.py and test_gpu_path.py."""

import pytest
import torch
from conftest import random_prompts
from fake_gpu import GpuError, splits_of_keys
from test_gpu_path import GREEDY, make_engine, needs

from nanoengine_extras.running import backends


@pytest.mark.parametrize("prompts", [[129, 300], [64] * 8])
def test_varlen_keeps_the_keys_of_each_sequence_in_one_piece(tiny, monkeypatch, prompts):
    """PyTorch 2.13 would split those of several sequences, and lose results."""
    needs("varlen")
    assert splits_of_keys(2 * 16, 300, 300, 128) > 1 and splits_of_keys(33 * 16, 1, 4000, 128) == 1
    engine = make_engine(tiny, attention_backend="varlen", enforce_eager=True)
    engine.generate(random_prompts(prompts), GREEDY)
    if torch.__version__ >= "2.13":
        monkeypatch.setattr(backends, "splits_of", lambda *arguments: {})
        with pytest.raises(GpuError, match="the keys of several sequences are split"):
            engine.generate(random_prompts([390, 300, 350]), GREEDY)
