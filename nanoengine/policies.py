"""The scheduler's policies: small functions, in tables by name.

A policy of your own is a function like those here. Give it to `LLM` in place of a name, or put it
into a table, under a name of its own.

    LLM(model, scheduling="mixed", preemption_victim=lambda running: running[0])

nanoengine_extensions/policies.py has more of them, to compare with.
"""

from collections.abc import Callable
from typing import Any


def prefill_first(scheduler: Any) -> Any:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    begun = [seq for seq in scheduler.running if len(seq.token_ids) > seq.num_computed_tokens + 1]
    prefills = scheduler.build(begun, admit=True)
    return prefills or scheduler.build([*scheduler.running], admit=False)


def mixed(scheduler: Any) -> Any:
    """Decodes first; what is left of the budget goes to prompts, in chunks.

    So decodes never wait for a prompt, but for a fork that begins: Sarathi-Serve (Agrawal et al.,
    2024, arXiv:2403.02310).
    """
    return scheduler.build([*scheduler.running], admit=True)


def highest(rank: Callable[[Any], float]) -> Callable[[Any], Any]:
    """Of the running sequences the one with the highest rank; of several, the youngest."""
    return lambda running: max(reversed(running), key=rank)


# from the scheduler to the batch of a step
BATCHING = {"prefill-first": prefill_first, "mixed": mixed}

# which running sequence is preempted; `running` is in the order of admission
VICTIMS = {
    "youngest": lambda running: running[-1],
    "longest": highest(lambda seq: seq.num_tokens),
    "lowest-priority": highest(lambda seq: seq.priority)}

# For how many tokens a sequence holds blocks at least, from its admission on: for those that it
# has, and then it may have to be preempted, or for all that it may come to have.
KV_ALLOCATION = {
    "on-demand": lambda seq, max_model_len: 0,
    "reserve": lambda seq, max_model_len: seq.max_num_tokens}
