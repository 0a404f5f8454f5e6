"""How a step is filled: small functions from the scheduler to a batch, in a table by name.

nanoengine_extensions/policies.py adds others: ways to fill a step, which sequence is preempted, how
many blocks a sequence holds, and functions of a user's own.
"""

from typing import Any


def prefill_first(scheduler: Any) -> Any:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    begun = [seq for seq in scheduler.running if len(seq.token_ids) > seq.num_computed_tokens + 1]
    prefills = scheduler.build(begun, admit=True)
    return prefills or scheduler.build([*scheduler.running], admit=False)


def mixed(scheduler: Any) -> Any:
    """Decodes first; the rest of the budget goes to prompts, in chunks.

    So decodes never wait for a prompt, as in Sarathi-Serve (Agrawal et al., 2024,
    arXiv:2403.02310).
    """
    return scheduler.build([*scheduler.running], admit=True)


BATCHING = {"prefill-first": prefill_first, "mixed": mixed}
