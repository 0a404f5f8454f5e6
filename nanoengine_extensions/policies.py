"""Policies to compare with: those of engines before paging and continuous batching, and some more.

They plug into the tables of nanoengine/policies.py. The engine looks for a name here that its
tables lack (`one_of` in nanoengine/config.py), so that `LLM(model, scheduling="static")` works;
whoever wants to see all names in the tables imports this.
"""

from functools import partial
from typing import Annotated, Any

from pydantic import Field, validate_call

from nanoengine.config import one_of
from nanoengine.policies import BATCHING, KV_ALLOCATION, VICTIMS, highest
from nanoengine.sampling_params import STRICT, Int


def static(scheduler: Any) -> Any:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    So engines worked before continuous batching (Orca: Yu et al., OSDI 2022).
    """
    is_decoding = getattr(scheduler, "is_decoding", False) and scheduler.running
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    prefills = scheduler.build(begun, admit=not is_decoding)
    scheduler.is_decoding = not prefills
    return prefills or scheduler.build([*scheduler.running], admit=False)


@validate_call(config=STRICT)
def overtaking(base: Annotated[Any, one_of(BATCHING)] = "prefill-first",
               max_waiting: Annotated[Int, Field(ge=0)] = 0) -> Any:
    """Another policy, with one more rule: in a long queue, the head may take another's place.

    With more than `max_waiting` sequences waiting, a head that does not fit takes the place of the
    longest running sequence, which goes to the front, right behind the head. A sequence gives way
    to another only once, so that this comes to an end.

        LLM(model, scheduling=overtaking("mixed", max_waiting=8))

    base: the other policy, a name or a function. Raises ValueError for what is neither.
    """
    def choose_batch(scheduler: Any) -> Any:
        # the base policy finds it in place of `Scheduler.build`
        scheduler.build = partial(build, scheduler, max_waiting)
        return BATCHING.get(base, base)(scheduler)
    return choose_batch


def build(scheduler: Any, max_waiting: int, candidates: list[Any], admit: bool) -> Any:
    """`Scheduler.build`, with the rule of `overtaking` between its first two phases."""
    admit = scheduler.make_room(candidates) and admit
    if admit and len(scheduler.waiting) > max_waiting:
        overtake(scheduler)
    left = [seq for seq in candidates if seq.is_running]
    return type(scheduler).build(scheduler, left, admit)


def overtake(scheduler: Any) -> None:
    """Preempts the longest of the sequences whose blocks are enough for a head that lacks some."""
    manager = scheduler.block_manager
    head = scheduler.waiting[0]
    # a head whose last token is awaited does not lack room
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
# for all that any sequence may come to have
KV_ALLOCATION["max-length"] = lambda seq, max_model_len: max_model_len
VICTIMS["least-recently-run"] = highest(lambda seq: -seq.metrics.last_run_time)
# the same in every run with the same seeds
VICTIMS["random"] = highest(lambda seq: hash((seq.seed, seq.num_tokens)))
