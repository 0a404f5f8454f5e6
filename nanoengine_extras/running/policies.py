"""More policies, besides those of nanoengine/policies.py, and `kv_allocation`.

"static", "max-length", "least-recently-run", "random" and `overtaking` are for comparison: engines
worked like the first two before paging and continuous batching.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, index
from types import SimpleNamespace
from typing import Any

from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.errors import Condition, naming, rejected
from nanoengine.model_runner import ModelRunner
from nanoengine.observers import Feature
from nanoengine.policies import find_policy
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Batch, Sequence


def highest(rank: Callable[[Any], float]) -> Callable[[Any], Any]:
    """Picks the running sequence with the highest rank; the youngest if there are several."""
    return lambda running: max(reversed(running), key=rank)


class LeastRecentlyRun(Feature):
    """Picks the sequence that has gone longest without a step; of several, the youngest. It also
    observes the steps, and keeps the number of each sequence's last step."""

    num_steps = 0

    def scheduled(self, batch: Batch) -> None:
        for seq in batch.sequences:
            seq.kept["last_step"] = self.num_steps
        self.num_steps += bool(batch)

    def __call__(self, running: Any) -> Sequence:
        return max(reversed(running), key=lambda seq: -seq.kept.get("last_step", 0))


class Static:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    Engines worked like this before continuous batching (Orca: Yu et al., OSDI 2022).
    """

    is_decoding = False

    def __call__(self, scheduler: Scheduler) -> Batch:
        is_decoding = self.is_decoding and scheduler.running
        begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
        prefills = scheduler.build(begun, admit=not is_decoding)
        self.is_decoding = not prefills
        return prefills or scheduler.build([*scheduler.running], admit=False)


@dataclass
class Overtaking:
    """Adds a rule to a policy: in a long queue, the head can take another sequence's place.

    With more than `max_waiting` sequences waiting, a head that does not fit takes the place of the
    running sequence with the most tokens, which goes to the front of the queue, right after the
    head. Each sequence is overtaken at most once, so that this ends: it is marked, it gave way.

        LLM(model, scheduling=overtaking("mixed", max_waiting=8))

    base: the other policy, a name or a function. Raises ValueError for anything else.
    """

    base: Any = "prefill-first"
    max_waiting: int = 0

    def __post_init__(self) -> None:
        with naming("overtaking(base=…)"):
            self.choose = find_policy("scheduling", self.base)
        if type(self.max_waiting) is not int or self.max_waiting < 0:
            raise rejected("max_waiting", self.max_waiting, "an integer, at least 0")

    def __call__(self, scheduler: Scheduler) -> Batch:
        # the other policy sees a scheduler whose `build` has one more phase
        return self.choose(SimpleNamespace(running=scheduler.running, waiting=scheduler.waiting,
                                           build=partial(self.build, scheduler)))

    def build(self, scheduler: Scheduler, candidates: list[Sequence], admit: bool) -> Batch:
        """`Scheduler.build`, with the rule of this policy between its first two phases."""
        admit = scheduler.make_room(candidates) and admit
        if admit and len(scheduler.waiting) > self.max_waiting:
            self.overtake(scheduler)
        return scheduler.build([seq for seq in candidates if seq.is_running], admit)

    def overtake(self, scheduler: Scheduler) -> None:
        """Preempts the longest sequence with enough blocks for a head that does not fit."""
        manager = scheduler.block_manager
        head = scheduler.waiting[0]
        if scheduler.can_admit_head():
            return
        num_missing = manager.num_blocks_to_hold(head) - manager.num_free_blocks
        victims = [seq for seq in scheduler.running if "gave_way" not in seq.kept
                   and seq.priority >= head.priority and len(seq.block_table) >= num_missing]
        if victims:
            victim = max(victims, key=lambda seq: seq.num_tokens)
            victim.kept["gave_way"] = True
            scheduler.waiting.popleft()
            scheduler.preempt(victim)
            scheduler.enqueue(head, in_front=True)


overtaking = Overtaking
# blocks for as many tokens: of a sequence now, or the most that this one, or any, can have
KV_ALLOCATION: dict[str, Callable[[Sequence, int], int]] = {
    "on-demand": lambda seq, max_model_len: 0,
    "reserve": lambda seq, max_model_len: seq.max_num_tokens,
    "max-length": lambda seq, max_model_len: max_model_len}

CONDITIONS: list[Condition] = [
    ("kv_allocation", lambda c: callable(c.kv_allocation) or c.kv_allocation in [*KV_ALLOCATION],
     f"one of {[*KV_ALLOCATION]}, or a function like these")]


class HoldingBlockManager(BlockManager):
    """A block manager for `kv_allocation`: an admitted sequence has blocks for at least as many
    tokens as the policy says.

    policy: returns how many, given a sequence and max_model_len.
    """

    policy: Any = "on-demand"
    max_model_len = 0

    @classmethod
    def of(cls, config: EngineConfig, runner: ModelRunner) -> Any:
        manager = super().of(config, runner)
        manager.policy = config.kv_allocation
        manager.max_model_len = runner.max_model_len
        return manager

    def num_blocks_to_hold(self, seq: Sequence) -> int:
        choose = self.policy if callable(self.policy) else KV_ALLOCATION[self.policy]
        with naming(rejected("kv_allocation", self.policy, "one that returns an int, the tokens")):
            held = min(index(choose(seq, self.max_model_len)), self.max_model_len)
        return max(super().num_blocks_to_hold(seq), self.num_blocks_for(held))


MORE_BATCHING: dict[str, Callable] = {"static": Static}
MORE_ORDERS: dict[str, Callable] = {"priority": attrgetter("priority")}
MORE_VICTIMS: dict[str, Callable] = {
    "longest": highest(lambda seq: seq.num_tokens),
    "lowest-priority": highest(lambda seq: seq.priority),
    "least-recently-run": LeastRecentlyRun,
    # equal in every run with the same seeds
    "random": highest(lambda seq: hash((seq.seed, seq.num_tokens)))}
PARTS = {"scheduling": MORE_BATCHING, "scheduling_policy": MORE_ORDERS,
         "preemption_victim": MORE_VICTIMS, "block_manager": HoldingBlockManager}
