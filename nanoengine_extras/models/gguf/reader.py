"""Opens a GGUF file: nothing that it says about its sizes is believed before it is checked. And the
tokens that end a text.
"""

import math
from typing import Any

import gguf
import numpy as np

# the tokens that end a text or a turn, by their texts, as in llama.cpp: a file names only one
ENDS = (
    "<|eot_id|> <|eom_id|> <|eot|> <|eom|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <eos> "
    "<end_of_turn> </s> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <｜end▁of▁sentence｜> [e~[ "
    "<|return|> <|call|> <|calls|> <|flush|> <turn|> <|tool_response> "
    # after a piece of code: padding, the next repository or file
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|> "
    # these only as in MORE_ENDS
    "<|user|> <|observation|> <|assistant|>").split()
# where another one is a token, as in generation_config.json of GLM-4 and Phi-3
MORE_ENDS = {"<|user|>": "[gMASK]", "<|observation|>": "[gMASK]",
             "<|assistant|>": "<|placeholder1|>"}
# those that are none where one of the others is a token: gpt-oss and Solar Open write several
# messages in a turn, and "</s>" is a tag of HTML for Gemma
NO_ENDS = {"<|end|>": ("<|return|>", "<|flush|>"), "</s>": ("<end_of_turn>", "<|tool_response>")}


def ends_of(tokens: list[str]) -> list[str]:
    """Returns the tokens of a vocabulary that end a text or a turn."""
    known = {*tokens}
    return [end for end in ENDS if end in known and MORE_ENDS.get(end, end) in known
            and not known.intersection(NO_ENDS.get(end, ()))]


class Reader(gguf.GGUFReader):
    """Reads a header in a third of the time: slices of a mapped file are slower than those of an
    array, and a large vocabulary needs a million. Raises ValueError for what lies outside of the
    file, before any of it is read."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: Any = 1,
             override_order: Any = None) -> np.ndarray:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if not 0 <= offset <= end <= len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, and its header needs byte {end}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple:
        """An array of numbers is one part: a part for each takes a hundred times its bytes."""
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            if kind == gguf.GGUFValueType.ARRAY:
                raise ValueError("it must have no array of arrays")
            if kind in self.gguf_scalar_to_np:
                count = self._get(orig_offs + 4, np.uint64)[0]
                found = self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], count)
                return 12 + found.nbytes, [found], [0], [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list) -> None:
        """Raises ValueError for tensors that lie outside of the file, or on each other."""
        super()._build_tensors(start_offs, fields)
        last = start_offs
        for tensor in sorted(self.tensors, key=lambda tensor: int(tensor.field.parts[5][0])):
            # in Python's integers, which do not overflow
            first = start_offs + int(tensor.field.parts[5][0])
            block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            num_bytes = math.prod(tensor.shape.tolist()) * size // block
            if first < last or first + num_bytes > len(self.data):
                raise ValueError(f"{tensor.name} must have {num_bytes} bytes of its own in the "
                                 f"file, which has {len(self.data)}")
            last = first + num_bytes
