"""`Feature`: the methods of an optional feature, and when the engine calls them.

A feature of your own works like those in nanoengine_extras:

    class Print(Feature):
        def scheduled(self, batch):
            print(len(batch), "sequences,", sum(batch.num_tokens), "tokens")

    llm = LLM(model, features=[Print()])
"""

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from nanoengine.features import OBSERVERS, extension, is_installed
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import Launched


class Feature:
    """An observer of the engine. Each method does nothing here; a feature overrides what it needs.

    A feature keeps its data about a sequence in `Sequence.kept`, under its own name; the data
    disappears with the sequence. A fork begins without it.
    """

    def begin(self, engine: Any) -> None:
        """Called once the `Engine` is complete; not for a feature that a later request loads.

        Keep only a weak reference: a strong one would keep the engine's memory in use. Raises
        ValueError for options that it cannot use."""

    def enter(self, seqs: list[Sequence], inputs: Any) -> None:
        """The caller's thread turns these sequences into a request. A feature that edits their
        logits adds the name of its class to the `edits` of each sequence.

        inputs: the `InputProcessor`. Raises ValueError for parameters that it cannot use.
        """

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        """A copy with a few more tokens replaces a sequence in some rows of logits: give it what
        `edit` needs. Only speculation makes such copies. If a feature without this method edits a
        sequence, there are none."""

    def scheduled(self, batch: Batch) -> None:
        """A step has been scheduled; it is empty if no sequence can run. A feature may add rows to
        `batch.sampled`."""

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        """Edits float32 logits in place; there is a row for each sequence.

        This is called if one of these sequences names the feature in `Sequence.edits`.
        last_sampled: the values of pending tokens.
        """

    def drawn(self, rows: list[Row], logits: Tensor, tokens: Tensor) -> None:
        """The tokens of these rows have been drawn. On a GPU, their values are not known yet.

        logits: before any edit. With speculation, some rows follow a wrong guess: a later step
            draws them again, unless the sequence has ended before their `position`.
        """

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        """A step is over; these sequences have a new token, or end with an error."""

    def output(self, seqs: list[Sequence], output: Any) -> None:
        """Fills in the `RequestOutput` of the request that has these sequences."""


class Features(dict[str, Feature]):
    """The features of one engine, by class name, in the order in which the engine calls them.

    From the start, every observer in OBSERVERS has an entry, at first one that does nothing. So
    the keys never change while another thread iterates over them. A user's features come last.

    files: the observers to load now; own: a user's features, each of a different class.
    """

    def __init__(self, files: Collection[str] = (), own: Iterable[Feature] = ()) -> None:
        super().__init__(dict.fromkeys(OBSERVERS.values(), Feature()))
        self.update({type(feature).__name__: feature for feature in own})
        self.loaded: dict[str, Feature] = {}
        self.load(files)

    def load(self, files: Collection[str]) -> None:
        """Adds the observers of these files, if they are installed and not there yet."""
        for file, name in OBSERVERS.items():
            if file in files and is_installed(file) and type(self[name]) is Feature:
                # another thread can load it at the same time: both get the first one
                self[name] = self.loaded.setdefault(name, getattr(extension(file), name)())
