"""What several features share: the bytes that a token spells."""

import re

from transformers.convert_slow_tokenizer import bytes_to_unicode


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
