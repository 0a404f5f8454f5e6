"""Policies for batching, queue order and preemption. Each is a small function with a name in a
table; you can pass your own function instead of a name.

Requests share the device and its memory, and no rule suits every workload: a prompt that goes first
makes others wait for their next token, and one that waits gets its first token late. So each of
these decisions is a function that can be replaced, and the scheduler has only what all rules share.

nanoengine_extras/running/policies.py has more names. A policy of your own that never runs a
sequence would hang the engine, so guards.py raises an error.
"""

from collections.abc import Callable
from typing import Any

from nanoengine.errors import rejected
from nanoengine.features import extension, shown
from nanoengine.sequence import Batch


def prefill_first(scheduler: Any) -> Batch:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    prefills = scheduler.build(begun, admit=True)
    return prefills or scheduler.build([*scheduler.running], admit=False)


def mixed(scheduler: Any) -> Batch:
    """Decodes first; the rest of the budget goes to prompts, in chunks.

    So decodes never wait for a prompt, as in Sarathi-Serve (Agrawal et al., 2024,
    arXiv:2403.02310).
    """
    return scheduler.build([*scheduler.running], admit=True)


# a name in a table, or a function like those in the table
Policy = str | Callable
# fills a step, given the `Scheduler`
BATCHING: dict[str, Callable] = {"prefill-first": prefill_first, "mixed": mixed}
# the rank of a waiting sequence; smaller ranks first, then in order of arrival
ORDERS: dict[str, Callable] = {"fcfs": lambda seq: 0}
# chooses the sequence to preempt from the running ones, which are in order of admission
VICTIMS: dict[str, Callable] = {"youngest": lambda running: running[-1]}
# the table of each of these options of `LLM`
TABLES = {"scheduling": BATCHING, "scheduling_policy": ORDERS, "preemption_victim": VICTIMS}


def find_policy(option: str, policy: Policy) -> Callable:
    """Returns the policy that an option of `LLM` names, or the given function. A policy with state
    is a class in its table; the result is then a new object of this class.

    Raises ValueError for an unknown name.
    """
    if callable(policy):
        return policy
    table = TABLES[option]
    # a list, because the user's value may not be hashable
    if policy not in [*table]:
        more = extension("running.policies", f"{option}={shown(policy)}")
        table = table | more.PARTS[option]
    if policy not in [*table]:
        raise rejected(option, policy, f"one of {[*table]}, or a function like these")
    found = table[policy]
    return found() if isinstance(found, type) else found
