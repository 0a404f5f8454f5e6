"""`LLM`: the calls of a user. `Driver`: the loop of a call.

`requests.py` turns prompts into requests, and new tokens into results; `engine.py` runs the
sequences of the requests.

    requests = make_requests(prompts)            checked, before any of them runs
    engine.add(each sequence)                    they wait in the engine's queue
    while not all have ended:
        engine.step()                            the sequences that have a new token
    return [request.output() for request in requests]
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import naming
from nanoengine.features import asked_by, declared, part
from nanoengine.loader import Tokenizer, find_folder, load_config
from nanoengine.model_runner import ModelRunner, choose_device
from nanoengine.observers import Features
from nanoengine.requests import InputProcessor, Params, Prompts, Request, RequestOutput
from nanoengine.sampling_params import SamplingParams


class Driver:
    """Runs the steps of one call at a time, whatever its thread.

    If nanoengine_extras/running/shared_steps.py is installed, its driver takes the place of this
    one: then any thread can call at any time, and all calls share their steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: list[Request],
            look: Callable = lambda request: request) -> Generator[list]:
        """Runs steps until all requests of a call have ended.

        It first queues them, and yields an empty list. After each step, it yields `look(request)`,
        by default the request itself, for each request with a new token, or raises the error of a
        request. However this ends, the engine is empty afterwards, and all blocks are free.
        """
        if self.engine.has_unfinished():
            raise RuntimeError("another call has not ended: calls can share steps only with "
                               "nanoengine_extras/running/shared_steps.py")
        by_id = {request.request_id: request for request in requests}
        num_left = len(requests)
        try:
            for request in requests:
                self.engine.add(request.seq)
            yield []
            while num_left:
                # a dict has each request once, even if several completions have a new token
                updated = {by_id[seq.request_id]: None for seq in self.engine.step()}
                if self.engine.in_flight and not self.engine.scheduler.has_unfinished():
                    # all have ended, but a step with their sequences is still in flight
                    self.engine.step()
                num_left -= sum(request.is_finished for request in updated)
                for request in updated:
                    if request.error:
                        raise request.error
                yield [look(request) for request in updated]
        finally:
            # after an error, Ctrl-C, or if a user drops a stream
            if num_left:
                self.engine.reset()

    def change(self, work: Callable) -> Any:
        """Does some work that changes the engine, between two steps; returns its result."""
        return work()


# `LLM` inherits the methods of features, such as `chat`; without nanoengine_extras, there are none
Calls: Any = declared("Calls") or object


class LLM(AbstractContextManager, Calls):
    """An engine for offline generation.

        llm = LLM("models/tiny-qwen3")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    The keywords are those of `EngineConfig`. Raises ValueError for an option, a model or a
    checkpoint that it cannot use.

    An error in a request, or one that breaks a step, such as Ctrl-C or running out of memory, ends
    the call and leaves the engine with all blocks free, and an empty prefix cache. With the feature
    shared_steps, any thread can call at any time: see nanoengine_extras/running/shared_steps.py.
    """

    # for help() and notebooks
    __signature__ = signature(EngineConfig)

    def __init__(self, model: str | Path, **options: Any) -> None:
        options["device"] = choose_device(options.get("device", "auto"))
        self.config = config = EngineConfig(**{"model": model, **options})
        # raises an error where a computation in a forked process would hang
        part("check_process", None, lambda config: None)(config)
        features = Features([*declared("ALWAYS"), *asked_by(config)], config.features)
        folder = part("find_model", None, find_folder)(config.model, config, "model")
        self.model_config = part("load_config", config, load_config)(folder, config)
        self.inputs = InputProcessor(config, self.model_config, folder, features)
        # errors such as a size of 0 in config.json, or a model too large for the memory
        with naming(f"{config.model} cannot be run with these options"):
            runner = part("runner", config, ModelRunner)(
                config, self.model_config, folder, features)
        self.inputs.max_model_len = runner.max_model_len
        self.engine = part("engine", config, Engine)(config, runner, features)
        self.driver = part("driver", config, Driver)(self.engine)

    # ------------------------------------------------------------------------ generating

    def generate(self, prompts: Prompts, sampling_params: Params = None,
                 use_tqdm: bool | Callable = True,
                 priority: int | list[int] | None = None) -> list[RequestOutput]:
        """Completes one prompt or a list of them; returns the outputs in the order of the prompts.

        prompts: each a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": ids}.
        sampling_params: one for all or one for each; None: `get_default_sampling_params()`.
        use_tqdm: show a progress bar; as in vLLM, it can be a function that makes one.
        priority: one for all or one for each, smaller numbers first; as in vLLM, it has an effect
            only with scheduling_policy="priority".

        Raises ValueError for bad input before anything is generated, and RuntimeError if the engine
        is closed, if an error in another call breaks a shared step, or, without the feature
        shared_steps, if another call has not ended.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        bar_of = part("progress_bar", self.config, lambda engine: tqdm)(self.engine)
        make_bar = use_tqdm if callable(use_tqdm) else partial(bar_of, disable=not use_tqdm)
        bar = make_bar(total=len(requests), desc="Generating")
        with bar, closing(self.driver.run(requests)) as steps:
            for updated in steps:
                bar.update(sum(request.is_finished for request in updated))
        return [request.output() for request in requests]

    def stream(self, prompts: Prompts, sampling_params: Params = None,
               priority: int | list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it has new tokens.

        `.finished` marks the last output of a request. Dropping the iterator frees its requests.
        """
        requests = self.inputs.make_requests(prompts, sampling_params, priority)
        steps = self.driver.run(requests, Request.output)
        # up to its first yield: the requests are queued now
        next(steps)
        return (output for outputs in steps for output in outputs)

    # ------------------------------------------------------------------------------ the rest

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `sampling_params=None` stands for: see
        generation_config.py."""
        return self.inputs.default_params.clone()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the transformers tokenizer, a copy of the engine's own. Raises ValueError if the
        model has none."""
        return self.inputs.tokenizer_of_user

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; blocks in use stay in use. Returns True, as in vLLM."""
        manager = self.engine.scheduler.block_manager
        self.driver.change(lambda: manager.forget([*manager.blocks_by_hash]))
        return True

    def close(self) -> None:
        """Frees the weights and the KV cache. The engine cannot generate afterwards."""
        self.driver.change(self.engine.close)

    def __exit__(self, *exception: object) -> None:
        self.close()
