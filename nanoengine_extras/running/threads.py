"""Ends idle OpenMP threads, which would slow down other threads, and refuses steps that would hang.

An observer of steps. Each thread that calls the engine has its own OpenMP threads, which spin for a
while after a step. They slow down the steps of other callers, and all that a program does after a
call. A process that was forked after the engine was made lacks them, and a step would wait for them
forever.
"""

import threading

from nanoengine.engine import Engine
from nanoengine.features import kernels
from nanoengine.observers import Feature
from nanoengine.requests import InputProcessor
from nanoengine.sequence import Batch, Sequence
from nanoengine.step_inputs import Launched
from nanoengine_extras.running import check_process


class Threads(Feature):
    """callers: the threads that have made requests since the engine had none."""

    def __init__(self) -> None:
        self.callers: set[int] = set()

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        library = kernels(engine.config.device, engine.config.kernels)
        self.end_threads = getattr(library, "end_threads", lambda: None)
        self.check_process = check_process(engine.config)
        # the threads that loaded the model
        self.end_threads()

    def enter(self, seqs: list[Sequence], inputs: InputProcessor) -> None:
        self.check_process()
        self.callers.add(threading.get_ident())

    def scheduled(self, batch: Batch) -> None:
        self.check_process()

    def done(self, step: Launched, seqs: list[Sequence]) -> None:
        """Runs in the thread that ran the step."""
        if not self.engine.has_unfinished():
            self.callers.clear()
        if len(self.callers) != 1:
            self.end_threads()


PARTS = {"check_process": check_process}
