"""What an optional feature can do: the methods of `Feature`, and when the engine calls them."""

from typing import Any

from torch import Tensor

from nanoengine.batch import Batch, Row
from nanoengine.features import OBSERVERS, extension, is_installed
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import Sequence
from nanoengine.step_inputs import Launched


class Feature:
    """An observer of the engine. Each method does nothing here; a feature overrides what it needs.

    What a feature knows of a sequence, it keeps in `Sequence.kept`, under its own name: so it is
    gone with the sequence. A fork begins without it.

    most: the parameters of a request for which it needs the most memory in a step.
    """

    most: dict[str, Any] = {}

    def begin(self, engine: Any) -> None:
        """The engine is complete. A feature can wrap its `launch` and its scheduler's `fill`. It
        must not keep the engine alive."""

    def enter(self, seqs: list[Sequence], inputs: Any) -> None:
        """A request is made, of these sequences. Raises ValueError for what it cannot use.

        inputs: the `InputProcessor`.
        """

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        """A copy, which has a few tokens more, stands for a sequence in a row of logits."""

    def scheduled(self, batch: Batch) -> None:
        """A step is decided. A feature may add rows to `batch.sampled`."""

    def edit(self, scores: Tensor, seqs: list[Sequence], last_sampled: Tensor) -> None:
        """Edits float32 logits in place; there is a row for each sequence.

        It is called if the parameters of one of these sequences ask for this feature.
        last_sampled: the values of pending tokens.
        """

    def drawn(self, rows: list[Row], logits: Tensor, tokens: Tensor) -> None:
        """Tokens are drawn for these rows, from raw logits; on a GPU, they are not there yet."""

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        """A step is over; these sequences have a new token, or end with an error."""

    def output(self, seqs: list[Sequence], output: RequestOutput) -> None:
        """Fills in an output of the request of these sequences."""


def load_observers() -> dict[str, Feature]:
    """Returns a new observer of each kind, by its name, for one engine."""
    installed = [name for name in OBSERVERS if is_installed(name)]
    return {name: getattr(extension(name), OBSERVERS[name])() for name in installed}
