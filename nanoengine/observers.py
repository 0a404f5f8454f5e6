"""`Feature`: the methods of an optional feature, and when the engine calls them.

A feature of your own works like those in nanoengine_extras:

    class Print(Feature):
        def scheduled(self, batch):
            print(len(batch), "sequences,", sum(batch.num_tokens), "tokens")

    llm = LLM(model, features=[Print()])
"""

import weakref
from collections.abc import Collection, Iterable
from threading import Lock
from typing import Any

from torch import Tensor

from nanoengine.features import declared, extension, is_installed
from nanoengine.sequence import Batch, Row, Sequence
from nanoengine.step_inputs import Launched


class Feature:
    """An observer of the engine. Each method does nothing here; a feature overrides what it needs.

    A feature keeps its data about a sequence in `Sequence.kept`, under its own name; the data
    disappears with the sequence. A fork begins without it.

    OPTIONS: the names of its options in `SamplingParams(options={…})`; it checks their values in
        `enter`. strict.py refuses other names.
    engine: the `Engine`, a weak reference: a strong one would keep the engine's memory in use.
    """

    OPTIONS: Collection[str] = ()
    engine: Any

    def begin(self, engine: Any) -> None:
        """Called once the `Engine` is complete; not for a feature that a later request loads.
        Raises ValueError for options that it cannot use."""
        self.engine = weakref.proxy(engine)

    def enter(self, seqs: list[Sequence], inputs: Any) -> None:
        """The caller's thread turns these sequences into a request. A feature that edits their
        logits adds the name of its class to the `edits` of each sequence.

        inputs: the `InputProcessor`. Raises ValueError for parameters that it cannot use.
        """

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        """Speculation has made `copy`: the tokens of `seq`, then guesses. The feature gives `copy`
        the data that its `edit` reads. If a feature edits a sequence but lacks this method,
        speculation makes no guesses for that sequence."""

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

        logits: before any edit; after those of `rows` there can be rows of padding. With
            speculation, some rows follow a wrong guess: a later step draws them again, unless the
            sequence has ended before their `position`.
        """

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        """A step is over; these sequences have a new token, or end with an error."""

    def output(self, seqs: list[Sequence], output: Any) -> None:
        """Fills in the `RequestOutput` of the request that has these sequences."""


class Features(dict[str, Feature]):
    """The features of one engine, by class name, in the order in which the engine calls them.

    From the start, every observer of nanoengine_extras has an entry, at first one that does
    nothing: so a feature that is loaded later never resizes the dict under another thread. A user's
    features come last.

    files: the observers to load now; own: a user's features, each of a different class.
    """

    def __init__(self, files: Collection[str] = (), own: Iterable[Feature] = ()) -> None:
        self.lock = Lock()
        super().__init__(dict.fromkeys(declared("OBSERVERS").values(), Feature()))
        self.update({type(feature).__name__: feature for feature in own})
        self.load(files)

    def load(self, files: Collection[str]) -> None:
        """Adds the observers of these files, if they are installed and not there yet."""
        # two threads can load a feature at the same time
        with self.lock:
            self.update({name: getattr(extension(file), name)()
                         for file, name in declared("OBSERVERS").items()
                         if file in files and type(self[name]) is Feature and is_installed(file)})

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of all features."""
        for feature in self.values():
            getattr(feature, method)(*arguments)
