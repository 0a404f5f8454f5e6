"""CUDA graphs that keep all cores of a GPU busy: fills the slot "graphs".

A GPU divides the work of attention among its cores by sequences and, if there are few, by parts of
their keys. The graphs of this file avoid two causes of idle cores:

    narrow tables     With few sequences, FlashAttention 2 splits the keys in parts that depend on
                      the width of the block table. Short sequences in a wide table would leave
                      most cores idle, so small sizes have more graphs, with narrower tables.
    longest first     A GPU begins to compute sequences in the order of the batch. If a long one
                      came last, most cores would wait for it.

Results do not change: the rows of a step do not depend on each other.
"""

from dataclasses import replace

from nanoengine.cuda_graphs import CudaGraphs
from nanoengine.sequence import Batch


class BusyGraphs(CudaGraphs):
    """Graphs with narrow tables, whose steps begin with the longest sequences."""

    def kinds(self, longest: int) -> list[tuple[int, int]]:
        return [(size, width) for size, _ in super().kinds(longest)
                for width in widths(size, longest)]

    def fit(self, batch: Batch, num_keys: int, longest: int) -> tuple[Batch, int]:
        full, _ = super().fit(batch, num_keys, longest)
        wide_enough = [width for width in widths(len(full), longest) if width >= num_keys]
        return longest_first(full), min(wide_enough)


def widths(size: int, longest: int) -> list[int]:
    """Returns the table widths, in keys, that have a graph for `size` sequences."""
    narrow = [8192, 2048] if size < 32 else []
    return [longest, *(width for width in narrow if width < longest)]


def longest_first(batch: Batch) -> Batch:
    """Returns a decode step with its sequences in another order. Its rows to sample keep theirs."""
    order = sorted(range(len(batch)), key=batch.starts.__getitem__, reverse=True)
    # the inverse: where each sequence has gone
    places = sorted(range(len(batch)), key=order.__getitem__)
    return replace(
        batch, sequences=[batch.sequences[index] for index in order],
        starts=[batch.starts[index] for index in order],
        sampled=[row._replace(source=place) for place, row in zip(places, batch.sampled)])


PARTS = {"graphs": BusyGraphs}
