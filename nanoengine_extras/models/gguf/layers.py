"""What a file says of its model's layers: which of them see all keys, and how positions turn
queries and keys (`rope_parameters`)."""

from typing import Any

import numpy as np
import torch

from nanoengine.errors import rejected


def windows(header: Any, period: int) -> dict[str, Any]:
    """Returns which layers see all keys: without a window, all. If the file does not say it, these
    are the layers whose number, counted from 1, is a multiple of the period."""
    window = header.entry("attention.sliding_window") or None
    of_layers = header.entry("attention.sliding_window_pattern")
    if window is None:
        of_layers = [False] * header.num_layers
    elif not isinstance(of_layers, list):
        period = header.number("attention.sliding_window_pattern", period)
        of_layers = [(index + 1) % period != 0 for index in range(header.num_layers)]
    return {"sliding_window": window, "layer_types": [
        "sliding_attention" if is_local else "full_attention" for is_local in of_layers]}


def by_layer(header: Any, name: str) -> list[Any]:
    """Returns an entry's value for each layer."""
    found = header.entry(name)
    if isinstance(found, list):
        return found
    return [header.number(name)] * header.number("block_count")


def rope(header: Any) -> dict[str, Any]:
    """Returns the `rope_parameters`. As in llama.cpp, a factor without a type is "linear"."""
    theta = header.number("rope.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = header.entry("rope.scaling.type", "linear")
    header.accept("rope.scaling.type", kind, ["none", "linear", "yarn"])
    # the second name is that of old files
    factor = header.number("rope.scaling.factor", header.number("rope.scale_linear", 1.0))
    if kind != "none" and factor != 1:
        found |= {"rope_type": kind, "factor": factor}
    if found["rope_type"] == "yarn":
        found |= {
            "original_max_position_embeddings": header.number(
                "rope.scaling.original_context_length", header.number("context_length")),
            "beta_fast": header.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": header.number("rope.scaling.yarn_beta_slow", 1.0)}
    if "rope_freqs.weight" in header.tensors:
        found |= llama3(header, theta)
    if header.family.is_partial:
        found["partial_rotary_factor"] = rotated(header)
    return found


def rotated(header: Any) -> float:
    """Returns which part of each head is rotated: its first numbers."""
    return header.number("rope.dimension_count", header.head_dim()) / header.head_dim()


def local_and_global(header: Any, theta: float) -> dict[str, Any]:
    """Layers with a window have their own angles, which are not scaled."""
    local = header.number("rope.freq_base_swa", theta)
    return {"rope_parameters": {
        "full_attention": rope(header),
        "sliding_attention": {"rope_type": "default", "rope_theta": local}}}


def llama3(header: Any, theta: float) -> dict[str, Any]:
    """Returns the parameters from which the factors of the frequencies were made.

    llama.cpp's converter stores only the factors, one for each pair of numbers of a head.
    The models of Llama 3 differ only in the largest factor.
    """
    given = torch.from_numpy(header.tensor("rope_freqs.weight").data.astype(np.float32))
    factor = float(given.max())
    size = header.head_dim()
    firsts = torch.arange(0, size, 2, dtype=torch.float64, device="cpu")
    waves = 2 * torch.pi * theta ** (firsts / size)
    smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    if given.shape != factors.shape or not torch.allclose(given.double(), factors, rtol=1e-4):
        raise rejected("the file's rope_freqs.weight", given.tolist(), "those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
