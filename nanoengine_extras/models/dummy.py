"""Random weights, for benchmarks without a download: `load_format="dummy"`.

It plugs into `loader.load_model`, and replaces the files of a checkpoint.
"""

import torch
from torch import nn
from transformers import PretrainedConfig


def fill(model: nn.Module, config: PretrainedConfig, device: str) -> None:
    """Fills all parameters with random numbers; on one device, they are always the same."""
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight  # type: ignore
    generator = torch.Generator(device).manual_seed(0)
    for weights in model.parameters():
        drawn = torch.empty_like(weights, device=device)
        # about the spread of trained weights; norms are around 1
        drawn.uniform_(-0.03, 0.03, generator=generator).add_(weights.ndim == 1)
        weights.copy_(drawn)
