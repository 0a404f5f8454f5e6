"""Policies to compare with: how engines worked before, and two that were tried.

Importing this adds them to the engine's tables, by name.
"""

from functools import partial
from typing import Any

from nanoengine.policies import BATCHING, KV_ALLOCATION, VICTIMS, highest, mixed, prefill_first


def static(scheduler: Any) -> Any:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    So engines worked before continuous batching (Orca: Yu et al., OSDI 2022).
    """
    is_decoding = getattr(scheduler, "is_decoding", False) and scheduler.running
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    prefills = scheduler.build(begun, admit=not is_decoding)
    scheduler.is_decoding = not prefills
    return prefills or scheduler.build([*scheduler.running], admit=False)


def overtaking(scheduler: Any, base: Any = prefill_first, max_waiting: int = 0) -> Any:
    """With more sequences waiting, a head that does not fit takes the place of the longest.

    The victim goes to the front, right behind the head. A sequence that was preempted before does
    not give way, so that this comes to an end.
    """
    waiting = scheduler.waiting
    if len(waiting) > max_waiting and not scheduler.can_admit_head():
        manager = scheduler.block_manager
        head = waiting[0]
        num_missing = manager.num_blocks_to_hold(head) - manager.num_free_blocks
        victims = [seq for seq in scheduler.running if not seq.num_preempted_tokens
                   and seq.priority >= head.priority and len(seq.block_table) >= num_missing]
        if victims:
            scheduler.preempt(max(victims, key=lambda seq: seq.num_tokens))
            waiting.remove(head)
            waiting.appendleft(head)
    return base(scheduler)


# for all that any sequence may come to have, as engines did before paging
KV_ALLOCATION["max-length"] = lambda seq, max_model_len: max_model_len
BATCHING["static"] = static
BATCHING["overtaking"] = overtaking
BATCHING["mixed-overtaking"] = partial(overtaking, base=mixed)
# whose request has had no token for the longest time
VICTIMS["least-recently-run"] = highest(lambda seq: -seq.metrics.finished_time)
VICTIMS["random"] = highest(lambda seq: hash((seq.seed, seq.num_tokens)))
