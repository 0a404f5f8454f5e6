"""The scheduler's policies: small functions, in tables by name.

Your own policy is a function like those here. Pass it to `LLM` in place of a name, or add it to a
table under a new name.

    LLM(model, scheduling="mixed", preemption_victim=lambda running: running[0])

nanoengine_extensions/policies.py adds more policies: other victims, and some for comparison.
"""

from typing import Any
from nanoengine.seams import extension, has_extensions, rejected



def prefill_first(scheduler: Any) -> Any:
    """Prompts before anything else: a step is all prefill or all decode, as in nano-vllm."""
    begun = [seq for seq in scheduler.running if len(seq.token_ids) > seq.num_computed_tokens + 1]
    prefills = scheduler.build(begun, admit=True)
    return prefills or scheduler.build([*scheduler.running], admit=False)


def mixed(scheduler: Any) -> Any:
    """Decodes first; the rest of the budget goes to prompts, in chunks.

    So decodes never wait for a prompt, only for new forks: Sarathi-Serve (Agrawal et al., 2024,
    arXiv:2403.02310).
    """
    return scheduler.build([*scheduler.running], admit=True)


# from the scheduler to the batch of a step
BATCHING = {"prefill-first": prefill_first, "mixed": mixed}

# which running sequence is preempted; `running` is in the order of admission
VICTIMS: dict[str, Any] = {"youngest": lambda running: running[-1]}

# The least number of tokens for which a sequence holds blocks from its admission on: those that it
# has (then it can be preempted), or all that it can ever have.
KV_ALLOCATION = {
    "on-demand": lambda seq, max_model_len: 0,
    "reserve": lambda seq, max_model_len: seq.max_num_tokens}

# by the option of `LLM`
POLICIES: dict[str, dict[str, Any]] = {
    "scheduling": BATCHING, "preemption_victim": VICTIMS, "kv_allocation": KV_ALLOCATION}


def find_policy(option: str, policy: Any) -> Any:
    """Returns the function of a name, or the function that was given.

    Raises ValueError for any other name.
    """
    if callable(policy):
        return policy
    table = POLICIES[option]
    # a list: what a user gives need not be hashable
    if policy not in [*table] and has_extensions():
        # it adds its policies to the tables
        extension("policies")
    if policy not in [*table]:
        raise rejected(option, policy, f"one of {[*table]}, or a function like these")
    return table[policy]
