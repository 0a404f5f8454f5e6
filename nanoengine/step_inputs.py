"""`StepInputs`: the tensors of one step, made from its `Batch`.

A kernel knows nothing about sequences. It needs arrays of numbers: which tokens, at which places of
their sequences, in which blocks. Each copy to a GPU takes some microseconds, however small it is,
so all arrays of a step lie in one buffer, which crosses in one asynchronous copy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.sequence import Batch, Row

# (name, dtype, shape, number of 32-bit words) of each array in a buffer
Layout = tuple[tuple[str, str, tuple[int, ...], int], ...]


class Draws(NamedTuple):
    """The sampling parameters of each row, and the number in [0, 1) that decides its draw, as (R,)
    float64 tensors."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor

    def of(self, rows: slice | Tensor) -> "Draws":
        """Returns the draws of some rows: a slice, or a tensor of indices."""
        return Draws(*(column[rows] for column in self))


class StepShape(NamedTuple):
    """What the host knows about a step's inputs: the layout of their buffer, and numbers that are
    also fields of `StepInputs`. Steps of the same shape can replay the same CUDA graph."""

    layout: Layout
    num_decodes: int
    longest_query: int
    longest_keys: int


@dataclass
class StepInputs:
    """The inputs of one step on the device: T tokens of S sequences, R rows to sample.

    buffer: int32; all tensors below are views of it.
    num_decodes: how many sequences at the start of the batch compute one token each. To a kernel,
        a prompt's chunk of one token is a decode, too.
    longest_query, longest_keys: the most tokens, and keys, of any one sequence (max_seqlen).
    draws: see `Draws`.
    slot_mapping: (T,) int64, where a token's K and V go: block * block_size + place in the block.
    token_ids: (T,); -1 - i means the token that was sampled in row i of the previous step.
    positions: (T,), the place of each token in its sequence.
    sequence_of_token: (T,), rows of `block_tables`.
    query_starts: (S + 1,), where the tokens of each sequence begin, and T (cu_seqlens_q).
    key_starts: (S + 1,), cumulative key counts (cu_seqlens_k).
    lengths: (S,), how many keys each sequence has, including this step's (cache_seqlens).
    block_tables: (S, width), padded with 0.
    logits_indices: (R,), which of the T tokens get logits, to sample the next one.

    The other tensors are int32.

    An example, with blocks of 4 tokens: a decode of sequence 0 (its token 8) and a chunk of
    sequence 1 (its tokens 4 to 6, which are not its last ones).

        token_ids          17 | 51 52 53        query_starts   0  1  4
        positions           8 |  4  5  6        lengths        9  7
        sequence_of_token   0 |  1  1  1        key_starts     0  9 16
        slot_mapping       24 | 32 33 34        block_tables   [5 2 6], [3 8 0]
        logits_indices      0                   num_decodes    1
    """

    buffer: Tensor
    num_decodes: int
    longest_query: int
    longest_keys: int
    draws: Draws
    slot_mapping: Tensor
    token_ids: Tensor
    positions: Tensor
    sequence_of_token: Tensor
    query_starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    logits_indices: Tensor

    @classmethod
    def from_buffer(cls, buffer: Tensor, shape: StepShape) -> "StepInputs":
        """Returns views of the arrays in a buffer (`to_buffer`), on its device."""
        views = {}
        parts = buffer.split([words for *_, words in shape.layout])
        for part, (name, dtype, size, _) in zip(parts, shape.layout):
            views[name] = part.view(getattr(torch, dtype)).view(size)
        draws = Draws(*views.pop("draws"))
        return cls(buffer, shape.num_decodes, shape.longest_query, shape.longest_keys, draws,
                   **views)


@dataclass
class Launched:
    """A step that has been launched.

    tokens: one for each of `batch.sampled`, on the host; read them after `wait`.
    done: on a GPU, the event after which the tokens have arrived; on a CPU, the time
        (`time.monotonic`) at which they were ready.
    """

    batch: Batch
    tokens: Tensor
    done: torch.cuda.Event | float

    def wait(self) -> list[int]:
        """Waits for the tokens, and returns them."""
        if isinstance(self.done, torch.cuda.Event):
            self.done.synchronize()
        return self.tokens.tolist()


def step_arrays(batch: Batch, block_size: int, longest_keys: int) -> dict[str, np.ndarray]:
    """Returns the arrays of `StepInputs`, by the names of its fields. The loops are over sequences
    and rows, not over tokens or blocks.

    longest_keys: block tables are wide enough for this many keys.
    """
    # 1. the tokens of all sequences, side by side
    token_ids: list[int] = []
    for seq, start, count in zip(batch.sequences, batch.starts, batch.num_tokens):
        token_ids += seq.token_ids[start:start + count]
    owners = np.arange(len(batch)).repeat(batch.num_tokens)
    query_starts = np.append(0, np.cumsum(batch.num_tokens))
    # The token at position p of sequence s has index offsets[s] + p in this step. In the example of
    # `StepInputs`, the offsets are 0 - 8 and 1 - 4, so position 6 of sequence 1 has index 3.
    offsets = query_starts[:-1] - batch.starts
    positions = np.arange(len(token_ids)) - offsets[owners]

    # 2. their keys and values: where they go, and where those before them are
    width = -(-longest_keys // block_size)
    tables = []
    for seq in batch.sequences:
        # bytes, since assigning each row to a matrix takes four times as long; missing blocks are 0
        tables.append(seq.block_table[:width].tobytes().ljust(4 * width, b"\0"))
    block_tables = np.frombuffer(b"".join(tables), np.int32).reshape(-1, width)
    blocks = block_tables[owners, positions // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + positions % block_size
    lengths = np.add(batch.starts, batch.num_tokens)

    # 3. the rows to sample
    draws = np.array([draws_of(row) for row in batch.sampled], float)
    # one row for each field of `Draws`, even if there are no rows to sample
    draws = draws.reshape(-1, len(Draws._fields)).T.copy()
    sources = [row.source for row in batch.sampled]
    last_known = [row.position - 1 for row in batch.sampled]

    in_32_bits = dict(
        token_ids=token_ids, positions=positions, sequence_of_token=owners,
        query_starts=query_starts, key_starts=np.append(0, lengths.cumsum()), lengths=lengths,
        block_tables=block_tables, logits_indices=offsets[sources] + last_known)
    # 64-bit numbers come first, so that they are aligned
    return {"draws": draws, "slot_mapping": slot_mapping} | {
        name: np.asarray(numbers, np.int32) for name, numbers in in_32_bits.items()}


def draws_of(row: Row) -> tuple[float, ...]:
    """Returns the fields of `Draws`, in order, for a row of logits."""
    p = row.seq.params
    temperature = 0 if p.is_greedy else p.temperature
    return temperature, p.min_p, p.top_k, p.top_p, row.seq.uniform(row.position)


# --------------------------------------------------------------------------- to the device


def to_buffer(arrays: dict[str, np.ndarray], device: str) -> tuple[Tensor, Layout]:
    """Returns one int32 buffer on the host with all arrays, and its layout.

    For a GPU the buffer is pinned. PyTorch reuses pinned memory only once the copy from it is done,
    so a buffer in flight is never overwritten.
    """
    words = [array.view(np.int32).ravel() for array in arrays.values()]
    buffer = torch.empty(
        sum(map(len, words)), dtype=torch.int32, device="cpu", pin_memory=device == "cuda")
    np.concatenate(words, out=buffer.numpy())
    layout = tuple((name, array.dtype.name, array.shape, array.nbytes // 4)
                   for name, array in arrays.items())
    return buffer, layout


def known_ids(token_ids: Tensor, last_sampled: Tensor) -> Tensor:
    """Replaces -1 - i with the token that was sampled in row i of the previous step."""
    rows = (-1 - token_ids).clamp(min=0)
    return torch.where(token_ids < 0, last_sampled[rows], token_ids)
