"""CUDA graphs of decode steps: without them, a GPU waits for Python in every small step.

Python launches the kernels of a step one by one, which for a small batch takes longer than
running them. A decode step always launches the same kernels over the same memory; only the
numbers in its inputs change. So each kind of decode step is recorded once, and then launched with
one call (a *replay*):

    capture   the inputs of a dummy step in a buffer ──▶ embedding, layers, norm ──▶ hidden states
    replay    a step's numbers into that buffer, one launch, hidden states in the same memory

A graph fixes the number of sequences and the width of the block tables. There are graphs for a few
batch sizes ("buckets"), each with tables for `max_model_len` tokens. A decode step of another size
is padded with dummy sequences, which read and write block 0.

A graph replays a fixed list of kernels, but sampling launches different kernels for different
requests. So a graph ends with the hidden states; logits and sampling come after its replay.
"""

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import StepInputs, StepShape


class CudaGraphs:
    """The graphs of one runner.

    most: the most sequences in a step (`max_num_seqs`).
    sizes: the batch sizes that have a graph: 1, 2, 4, 8, 16, 24, … and `most`.
    captured: for each shape of a step's inputs: a graph, the inputs that it reads, and the hidden
        states that it writes.
    """

    def __init__(self, most: int) -> None:
        usual = [1, 2, 4, *range(8, most, 8)]
        self.sizes = [size for size in usual if size < most] + [most]
        self.captured: dict[StepShape, tuple[Any, StepInputs, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, runner: Any) -> None:
        """Records a graph of each kind."""
        pool = torch.cuda.graph_pool_handle()
        for size, num_keys in self.kinds(runner.max_model_len):
            # Dummy sequences of one token; only the width of their tables matters. After the first
            # graph, `prepare` pads this step, too, which changes nothing: it has the size of a
            # graph.
            buffer, shape = runner.prepare(padded(Batch(), size), num_keys)
            step = StepInputs.from_buffer(buffer.to(runner.device), shape)
            # a first run loads the kernels, which a graph cannot do
            runner.hidden_states(step)
            graph = torch.cuda.CUDAGraph()
            # other threads, such as NCCL's, may query the device meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden = runner.hidden_states(step)
            self.captured[shape] = graph, step, hidden

    def kinds(self, longest: int) -> list[tuple[int, int]]:
        """Returns the batch size of each graph, and the number of keys that its tables hold. The
        largest comes first, so that the others can use its memory.

        longest: the limit, `max_model_len`. graphs.py, a feature, adds narrower tables.
        """
        return [(size, longest) for size in reversed(self.sizes)]

    def can_replay(self, batch: Batch) -> bool:
        """Whether there are graphs, and each sequence computes one token and draws one."""
        if not self.captured or max(batch.num_tokens) > 1:
            return False
        # A graph gives one row for each sequence. A fork that begins needs a second one, and a
        # chunk within a prompt needs none.
        return [row.source for row in batch.sampled] == [*range(len(batch))]

    def fit(self, batch: Batch, num_keys: int, longest: int) -> tuple[Batch, int]:
        """Pads a decode step to the size of the smallest graph that can run it. Returns the padded
        step, and the number of keys that the graph's tables hold.

        num_keys: the keys of its longest sequence, which graphs.py reads; longest: the limit,
            `max_model_len`.
        """
        size = self.sizes[bisect_left(self.sizes, len(batch))]
        return padded(batch, size), longest

    def replay(self, buffer: Tensor, shape: StepShape) -> tuple[StepInputs, Tensor]:
        """Copies a buffer into the inputs of the graph of this shape, and launches the graph.

        Returns the inputs and the hidden states of the step. The next replay overwrites both.
        """
        graph, step, hidden = self.captured[shape]
        step.buffer.copy_(buffer, non_blocking=True)
        graph.replay()
        return step, hidden


def padded(batch: Batch, size: int) -> Batch:
    """Returns a decode step padded with dummy sequences, which use block 0."""
    dummy = Sequence("", [0], 1, 1)
    missing = size - len(batch)
    rows = [Row(index, dummy, 1) for index in range(len(batch), size)]
    return Batch(
        sequences=batch.sequences + [dummy] * missing, starts=batch.starts + [0] * missing,
        num_tokens=[1] * size, sampled=batch.sampled + rows)
