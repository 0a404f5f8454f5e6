"""`cpu_offload_gb`: for weights that do not fit, some layers keep theirs in the host's memory.

The weights of such a layer cross to the GPU before it computes, into one of two buffers that these
layers use in turn. One layer computes from one buffer while the weights of the next are copied into
the other, on a separate stream (ZeRO-Inference; Aminabadi et al., 2022, arXiv:2207.00032):

    side stream   │ weights of 1 │ weights of 3 │ weights of 5 │
    main stream   │ layer 0 ─────│ layers 1, 2 ─│ layers 3, 4 ─│ layer 5

The parameters of a layer are views of its buffer, so the layer knows nothing about this, and CUDA
graphs capture the copies like everything else. `ModelRunner.load_model` asks for `load_offloaded`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoengine.config import EngineConfig
from nanoengine.errors import Condition
from nanoengine.loader import load_model, place_on
from nanoengine.model import Decoder
from nanoengine_extras.running import pin

# in bytes, as in PyTorch's GPU memory: a weight's address can decide how a product is computed
ALIGNMENT = 512
CONDITIONS: list[Condition] = [
    ("cpu_offload_gb", lambda c: c.device != "cpu", "0 on a CPU")]


def load_offloaded(config: EngineConfig, *arguments: Any, **options: Any) -> Decoder:
    """In place of `loader.load_model`: returns a model that keeps layers of `cpu_offload_gb` on the
    host."""
    on_host: list[nn.Module] = []

    def place(model: Decoder, device: str) -> None:
        on_host.extend(choose_layers(model.layers, config.cpu_offload_gb * 2**30))
        modules = [model.embed_tokens, *model.layers, model.norm, model.lm_head]
        place_on(nn.ModuleList(on_host), "cpu")
        place_on(nn.ModuleList(each for each in modules if each not in on_host), device)

    model = load_model(config, *arguments, **options | {"place": place})
    Offload(model, on_host, "cuda")
    return model


def choose_layers(layers: nn.ModuleList, num_bytes: float) -> list[nn.Module]:
    """Returns the layers that stay on the host: whole ones, at least `num_bytes` if possible.

    They are evenly spread, so that weights also cross while the layers between them compute.
    """
    layer_bytes = sum(parameter.nbytes for parameter in layers[0].parameters())
    count = math.ceil(min(len(layers), num_bytes / layer_bytes))
    turns = [index * count // len(layers) for index in range(len(layers) + 1)]
    return [layer for layer, turn, next_turn in zip(layers, turns, turns[1:]) if next_turn > turn]


def padded(weights: Tensor) -> Tensor:
    """Returns all numbers of a tensor, and zeros up to a multiple of the alignment."""
    return F.pad(weights.flatten(), (0, -weights.numel() % (ALIGNMENT // weights.itemsize)))


def pack(layer: nn.Module) -> Tensor:
    """Returns the weights of a layer, each of them aligned."""
    return torch.cat([padded(parameter) for parameter in layer.parameters()])


class Offload:
    """Copies the weights of layers from the host before each layer computes.

    model: the model of these layers; its forward begins with the first copy.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], device: str) -> None:
        self.weights = [pin(pack(layer)) for layer in layers]
        self.buffers = [torch.empty_like(weights, device=device) for weights in self.weights[:2]]
        self.stream = torch.cuda.Stream()
        model.register_forward_pre_hook(lambda *_: self.fetch(0))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self.turn(number))
            self.move_in(layer, self.buffers[number % 2])

    def move_in(self, layer: nn.Module, buffer: Tensor) -> None:
        """Makes the parameters of a layer views of the buffer, in the order of its weights."""
        parts = iter(buffer.split([len(padded(each)) for each in layer.parameters()]))
        for module in layer.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                view = next(parts)[:parameter.numel()].view_as(parameter)
                setattr(module, name, nn.Parameter(view, requires_grad=False))

    def turn(self, number: int) -> None:
        """Makes a layer wait for its weights, and starts the copy of the next layer's."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.fetch(number + 1)

    def fetch(self, number: int) -> None:
        """Copies a layer's weights into its buffer, once the previous layer there has computed."""
        if number < len(self.weights):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.buffers[number % 2].copy_(self.weights[number], non_blocking=True)


PARTS = {"load_model": load_offloaded}
