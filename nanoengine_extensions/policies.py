"""Policies for comparison: those of engines before paging and continuous batching, and others.

They extend the tables of nanoengine/policies.py. The engine imports this file for a name that its
tables do not have (`find_policy`), so that `LLM(model, scheduling="static")` works. Import it to
see all names in the tables.
"""

from collections.abc import Callable
from typing import Any

from nanoengine.policies import BATCHING, KV_ALLOCATION, VICTIMS, find_policy
from nanoengine.seams import naming, rejected


def highest(rank: Callable[[Any], float]) -> Callable[[Any], Any]:
    """Picks the running sequence with the highest rank; the youngest if there are several."""
    return lambda running: max(reversed(running), key=rank)


def static(scheduler: Any) -> Any:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    Engines worked like this before continuous batching (Orca: Yu et al., OSDI 2022).
    """
    is_decoding = getattr(scheduler, "is_decoding", False) and scheduler.running
    begun = [seq for seq in scheduler.running if seq.num_tokens > seq.num_computed_tokens + 1]
    prefills = scheduler.build(begun, admit=not is_decoding)
    scheduler.is_decoding = not prefills
    return prefills or scheduler.build([*scheduler.running], admit=False)


def overtaking(base: Any = "prefill-first", max_waiting: int = 0) -> Any:
    """Adds a rule to a policy: in a long queue, the head can take another sequence's place.

    With more than `max_waiting` sequences waiting, a head that does not fit takes the place of the
    longest running sequence, which goes to the front of the queue, right after the head. Each
    sequence is overtaken at most once, so that this ends.

        LLM(model, scheduling=overtaking("mixed", max_waiting=8))

    base: the other policy, a name or a function. Raises ValueError for anything else.
    """
    with naming("overtaking(base=…)"):
        choose = find_policy("scheduling", base)
    if type(max_waiting) is not int or max_waiting < 0:
        raise rejected("max_waiting", max_waiting, "an integer, at least 0")

    def choose_batch(scheduler: Any) -> Any:
        # the base policy calls it in place of `Scheduler.build`
        scheduler.build = lambda candidates, admit: build(scheduler, max_waiting, candidates, admit)
        return choose(scheduler)
    return choose_batch


def build(scheduler: Any, max_waiting: int, candidates: list[Any], admit: bool) -> Any:
    """`Scheduler.build`, with the rule of `overtaking` between its first two phases."""
    admit = scheduler.make_room(candidates) and admit
    if admit and len(scheduler.waiting) > max_waiting:
        overtake(scheduler)
    left = [seq for seq in candidates if seq.is_running]
    return type(scheduler).build(scheduler, left, admit)


def overtake(scheduler: Any) -> None:
    """Preempts the longest sequence with enough blocks for a head that does not fit."""
    manager = scheduler.block_manager
    head = scheduler.waiting[0]
    # a head whose last token is awaited does not wait for blocks
    if head.is_awaited or scheduler.can_admit_head():
        return
    num_missing = manager.num_blocks_to_hold(head) - manager.num_free_blocks
    gave_way = getattr(scheduler, "gave_way", ())
    victims = [seq for seq in scheduler.running if seq not in gave_way
               and seq.priority >= head.priority and len(seq.block_table) >= num_missing]
    if victims:
        victim = max(victims, key=lambda seq: seq.num_tokens)
        scheduler.gave_way = {victim, *(seq for seq in gave_way if not seq.finish_reason)}
        scheduler.waiting.popleft()
        scheduler.preempt(victim)
        scheduler.waiting.appendleft(head)


BATCHING["static"] = static
# for the most tokens that any sequence can have
KV_ALLOCATION["max-length"] = lambda seq, max_model_len: max_model_len
VICTIMS["longest"] = highest(lambda seq: seq.num_tokens)
VICTIMS["lowest-priority"] = highest(lambda seq: seq.priority)
VICTIMS["least-recently-run"] = highest(lambda seq: -seq.metrics.last_run_time)
# equal in every run with the same seeds
VICTIMS["random"] = highest(lambda seq: hash((seq.seed, seq.num_tokens)))
