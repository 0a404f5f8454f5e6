"""What several features share: the size of a copy of logits, numbers for the device, and the bytes
that a token spells."""

import re

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

# The most logits in one copy. On a CPU it fits in the cores' caches; on a GPU it is small compared
# with the KV cache.
MATRIX_SIZE = {"cpu": 2**19, "cuda": 2**26}


def max_rows(logits: Tensor) -> int:
    """Returns the most rows that a copy can have."""
    return max(1, MATRIX_SIZE[logits.device.type] // logits.shape[1])


def send(numbers: list | np.ndarray, device: torch.device) -> Tensor:
    """Copies some numbers to the device, asynchronously."""
    on_host = torch.from_numpy(np.asarray(numbers))
    pinned = on_host.pin_memory() if device.type == "cuda" else on_host
    return pinned.to(device, non_blocking=True)


def bytes_of(name: str, text: str) -> bytes:
    """Returns the bytes of a token, in UTF-8. If it is a part of a character, its text has a
    replacement character, and its name in the vocabulary spells the bytes.

    text: what the token adds to a text
    """
    if "\ufffd" in text:
        # byte fallback
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        # byte-level BPE: a letter for each byte
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        if byte_of.keys() >= {*name}:
            return bytes(byte_of[letter] for letter in name)
    return text.encode()
