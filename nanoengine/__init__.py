"""nanoengine: a minimal, fast engine for offline LLM generation.

A map. To learn how the engine works, read these eleven files, in this order (the chapters in
docs/tutorial/README.md follow one request instead):

    sequence.py         the tokens and blocks of one completion; the description of one step
    scheduler.py        two queues, one batch a step, preemption
    policies.py         batching, queue order and victims, as small functions
    block_manager.py    the life of a block: tables, references, prefix hashes, forks
    engine.py           the step loop, plain or running ahead
    step_inputs.py      the inputs of a step, in one buffer
    model_runner.py     from a batch to tokens, on a CPU or a GPU
    model.py            one decoder for the Llama family
    attention.py        attention over the paged cache: in plain PyTorch, and with flash-attn
    sampler.py          from logits to tokens
    cuda_graphs.py      decode steps, recorded once and replayed

The rest is input, options and results:

    llm.py              what a user calls: `generate` with its loop, and streams
    requests.py         checks prompts and parameters; makes requests and results
    sampling_params.py  how a request is sampled
    config.py           the options of an engine
    loader.py           from a folder to a config, a tokenizer and a model with its weights
    errors.py           checks of options, and the errors for bad input
    features.py         how optional features and libraries of kernels are found
    observers.py        what an optional feature can do, and when
    __main__.py         `python -m nanoengine` starts the terminal of nanoengine_extras

The engine needs no other package in this repository. A file that is named in comments but not here,
such as guards.py, is an optional feature in nanoengine_extras.
"""

import os

# OpenMP's threads spin while they wait for each other, by default for milliseconds. If they spin a
# tenth as long, steps alongside another busy program are more than twice as fast. PyTorch reads
# this when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

from nanoengine.features import declared
from nanoengine.llm import LLM
from nanoengine.requests import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams

__version__ = "0.3.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

# `from nanoengine import BeamSearchParams` finds this class in its feature's file
if exported := declared("exported"):
    __getattr__ = exported
