"""Weights that stay on the host, on a GPU that is not there (`fake_gpu.py`)."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import slow
from fake_gpu import FakeGpu, GpuError, storage_of
from safetensors.torch import load_file
from test_gpu_path import (
    BOTH, EXACT, GREEDY, PROMPTS, SMALL, Engines, Patch, check_no_host_reads, check_same,
    make_engine, tokens_of)

from nanoengine import LLM
from nanoengine_extras.running.offload import Offload, choose_layers


@pytest.fixture(scope="module")
def engines():
    return Engines()


@pytest.fixture(scope="module")
def deep(make_model):
    return make_model(num_hidden_layers=5)[0]


def layer_bytes(folder: str, alignment: int = 1) -> int:
    """Of the weights of one layer in bfloat16."""
    tensors = load_file(f"{folder}/model.safetensors")
    sizes = [2 * each.numel() for name, each in tensors.items() if ".layers.0." in name]
    return sum(-(-size // alignment) * alignment for size in sizes)


@pytest.mark.parametrize("count, chosen", [
    (0, []), (1, [4]), (2, [2, 4]), (3, [1, 3, 4]), (4, [1, 2, 3, 4]), (5, [0, 1, 2, 3, 4])])
def test_layers_on_the_host_are_spread(count, chosen):
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5))
    # whole layers, and not less than was asked for
    for num_bytes in (64 * count, 64 * count - 63 if count else 0):
        assert choose_layers(layers, num_bytes) == [layers[index] for index in chosen]
    assert choose_layers(layers, 1e30) == [*layers]


@pytest.mark.parametrize("num_layers, enforce_eager", [
    (0.1, True), (2, False), (3, True), (4, False), (1000, True),
    *(slow(*each)
      for each in ((0.1, False), (2, True), (3, False), (4, True), (1000, False)))])
def test_weights_on_the_host(engines, deep, num_layers, enforce_eager):
    """The same tokens, with nothing that waits, and with so much less on the device."""
    gibibytes = num_layers * layer_bytes(deep) / 2**30
    engine = engines.get(deep, cpu_offload_gb=gibibytes, enforce_eager=enforce_eager)
    outputs = engine.generate(PROMPTS, BOTH)
    check_same(outputs, engines.reference(deep, "both", PROMPTS, BOTH))
    check_no_host_reads(engine.gpu)
    model = engine.llm.engine.runner.model
    storages = {storage_of(each.memory): each.memory.untyped_storage().nbytes()
                for each in model.layers.parameters()}
    count = min(5, math.ceil(num_layers))
    num_rooms = min(2, count)
    expected = layer_bytes(deep) * (5 - count) + layer_bytes(deep, 512) * num_rooms
    assert sum(storages.values()) == expected


def test_weights_from_the_host_are_aligned(deep):
    """As PyTorch aligns all others: by this, cuBLAS chooses how it computes a product. The small
    weights of norms lie between the large ones."""
    engine = make_engine(deep, cpu_offload_gb=1)
    layers = engine.llm.engine.runner.model.layers
    places = [each.storage_offset() * each.itemsize for each in layers.parameters()]
    assert len(places) > 30 and not any(place % 512 for place in places)


def test_float32_weights_on_the_host_are_as_on_a_cpu(engines, deep):
    engine = engines.get(deep, cpu_offload_gb=1.0, **EXACT)
    outputs = engine.generate(PROMPTS, GREEDY)
    expected = engines.get(deep, device="cpu", **EXACT).generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == tokens_of(expected)


def test_more_than_the_memory_of_the_host_or_of_the_gpu(deep, tmp_path):
    """340 layers of 6 GiB are refused before one is made."""
    content = json.loads(Path(deep, "config.json").read_text())
    content |= dict(hidden_size=2**14, intermediate_size=2**16, num_hidden_layers=340)
    content.pop("layer_types", None)
    Path(tmp_path, "config.json").write_text(json.dumps(content))
    options = SMALL | dict(device="cuda", load_format="dummy", skip_tokenizer_init=True)
    for gibibytes, device in ((0, "cuda"), (6, "cuda"), (2000, "cpu")):
        message = f"model=.* GiB of weights.* smaller: device '{device}' has .* GiB"
        with FakeGpu(), pytest.raises(ValueError, match=message):
            LLM(tmp_path, cpu_offload_gb=gibibytes, **options)


def do_not_wait_for_weights(patch: Patch) -> None:
    patch.setattr(Offload, "turn", lambda self, number: self.fetch(number + 1))


def do_not_wait_for_the_room(patch: Patch) -> None:
    def fetch(self: Offload, number: int) -> None:
        if number < len(self.weights):
            with torch.cuda.stream(self.stream):
                self.buffers[number % 2].copy_(self.weights[number], non_blocking=True)

    patch.setattr(Offload, "fetch", fetch)


@pytest.mark.parametrize("enforce_eager, fault, found", [
    (True, do_not_wait_for_weights, "does not wait for another stream"),
    (False, do_not_wait_for_weights, "does not wait for another stream"),
    (True, do_not_wait_for_the_room, "does not wait for another stream"),
    (False, do_not_wait_for_the_room, "does not wait for another stream|graph does not hold")])
def test_faults_with_weights_on_the_host_are_found(
        engines, deep, monkeypatch, enforce_eager, fault, found):
    fault(monkeypatch)
    four_layers = 4 * layer_bytes(deep) / 2**30
    # what is found while the engine is made is the cause of a ValueError
    with pytest.raises((GpuError, ValueError), match=found):
        engine = make_engine(deep, cpu_offload_gb=four_layers, enforce_eager=enforce_eager)
        engine.generate(PROMPTS, BOTH)
