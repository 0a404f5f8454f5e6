"""nanoengine: a minimal, fast engine for offline LLM generation.

A map, in an order to read it:

    llm.py              what a user calls: `generate` with its loop, streams, threads
    seams.py            the way to what is outside: optional features, libraries of kernels
    sampling_params.py  how a request is sampled
    config.py           the options of an engine
    requests.py         prompts and parameters, checked, as requests with sequences
    sequence.py         the tokens of one completion, and its blocks
    batch.py            one step: the message from scheduler to runner
    engine.py           the one loop that runs steps, plain or running ahead
    scheduler.py        two queues, one batch a step, preemption
    policies.py         two ways to fill a step, as small functions
    block_manager.py    the life of a block: tables, references, prefix hashes, forks
    model_runner.py     from a batch to tokens, on a CPU or a GPU
    step_inputs.py      the numbers of a step, in one buffer
    cuda_graphs.py      decode steps, recorded once and replayed
    model.py            one decoder for the Llama family
    attention.py        attention over the paged cache: in plain PyTorch, and with flash-attn
    sampler.py          from logits to tokens
    loader.py           from a folder to a model with its weights
    outputs.py          from tokens to text, and the results

The engine needs no other package of this repository.
"""

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.seams import extension, has_extensions

__version__ = "0.2.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

if has_extensions():
    # an LLM with more methods, and what beam search takes and returns
    globals().update(extension("llm").EXPORTS)
