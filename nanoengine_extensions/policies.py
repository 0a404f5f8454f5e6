"""The scheduler's policies beyond the engine's own: in tables by name, or a user's functions.

    LLM(model, scheduling="mixed", preemption_victim=lambda running: running[0])

Your own policy is a function like those here. Pass it to `LLM` in place of a name, or add it to a
table under a new name. "static", "max-length", "least-recently-run", "random" and `overtaking` are
there for comparison: engines before paging and continuous batching worked like the first two.

`PolicyScheduler` and `HoldingBlockManager` put them into the engine's scheduler and block manager.
"""

from bisect import insort_left, insort_right
from collections import OrderedDict
from collections.abc import Callable
from itertools import cycle
from operator import attrgetter
from typing import Any

from nanoengine.block_manager import BlockManager
from nanoengine.policies import BATCHING
from nanoengine.scheduler import Scheduler
from nanoengine.seams import naming, rejected
from nanoengine.sequence import Sequence

BY_PRIORITY = attrgetter("priority")


def highest(rank: Callable[[Any], float]) -> Callable[[Any], Any]:
    """Picks the running sequence with the highest rank; the youngest if there are several."""
    return lambda running: max(reversed(running), key=rank)


def static(scheduler: Any) -> Any:
    """A batch is filled until its first decode; the next one begins when all of it has finished.

    Engines worked like this before continuous batching (Orca: Yu et al., OSDI 2022).
    """
    is_decoding = getattr(scheduler, "is_decoding", False) and scheduler.running
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
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

# which running sequence is preempted; `running` is in the order of admission
VICTIMS: dict[str, Callable[[Any], Any]] = {
    "youngest": lambda running: running[-1],
    "longest": highest(lambda seq: seq.num_tokens),
    "lowest-priority": highest(lambda seq: seq.priority),
    "least-recently-run": highest(lambda seq: -seq.metrics.last_run_time),
    # equal in every run with the same seeds
    "random": highest(lambda seq: hash((seq.seed, seq.num_tokens)))}

# The least number of tokens for which a sequence holds blocks from its admission on: those that it
# has (then it can be preempted), all that it can ever have, or all that any sequence can have.
KV_ALLOCATION: dict[str, Callable[[Any, int], int]] = {
    "on-demand": lambda seq, max_model_len: 0,
    "reserve": lambda seq, max_model_len: seq.max_num_tokens,
    "max-length": lambda seq, max_model_len: max_model_len}

# from a sequence to a guess of its next tokens; each engine makes a `PromptLookup` of its own
SPECULATION: dict[str, Any] = {"none": None, "prompt-lookup": None}

# by the option of `LLM`
POLICIES: dict[str, dict[str, Any]] = {
    "scheduling": BATCHING, "preemption_victim": VICTIMS, "kv_allocation": KV_ALLOCATION,
    "speculation": SPECULATION}


def find_policy(option: str, policy: Any) -> Any:
    """Returns the function of a name, or the function that was given.

    Raises ValueError for any other name.
    """
    table = POLICIES[option]
    # a list: what a user gives need not be hashable
    if not callable(policy) and policy not in [*table]:
        raise rejected(option, policy, f"one of {[*table]}, or a function like these")
    return policy if callable(policy) else table[policy]


class PromptLookup:
    """Guesses that a text goes on as the last text did with the same tokens before, eight or fewer
    (prompt lookup decoding: Saxena, 2023): the sequence itself, or any other, also one that has
    ended. Each token is indexed once, when its sequence is looked at.

    seen: from a few tokens to the text with the place after them; only the newest entries.
    indexed: how many tokens of a sequence are.
    kind: how many tokens the last guess was found by. More of them are right more often.
    """

    SIZES = (8, 4, 2, 1)

    def __init__(self) -> None:
        self.seen: OrderedDict[tuple[int, ...], tuple[list[int], int]] = OrderedDict()
        self.indexed: dict[Sequence, int] = {}

    def __call__(self, seq: Sequence) -> Any:
        text = seq.token_ids
        # most of them have ended; the others are indexed anew
        if len(self.indexed) > 2000:
            self.indexed.clear()
        for place in range(self.indexed.get(seq, 1), len(text)):
            for size in self.SIZES:
                self.seen[tuple(text[max(0, place - size):place])] = text, place
        self.indexed[seq] = len(text)
        while len(self.seen) > 2**17:
            self.seen.popitem(last=False)
        ends = [tuple(text[-size:]) for size in self.SIZES]
        end = next((end for end in ends if end in self.seen), ())
        self.kind = len(end)
        found, place = self.seen.get(end, ([], 0))
        # a repetition goes on for ever
        return cycle(found[place:place + 32])


def num_of_prompt(seq: Sequence) -> int | None:
    """Returns its `prompt_logprobs`; the engine's own parameters have none."""
    return getattr(seq.params, "prompt_logprobs", None)


class HoldingBlockManager(BlockManager):
    """Blocks are held for later tokens. hold: one of `KV_ALLOCATION`."""

    def __init__(self, *sizes: Any, hold: Callable[[Any, int], int] = KV_ALLOCATION["on-demand"],
                 max_model_len: int = 0) -> None:
        self.hold = hold
        self.max_model_len = max_model_len
        # by forks, since the start
        self.num_shared_blocks = 0
        super().__init__(*sizes)

    def num_held_tokens(self, seq: Sequence) -> int:
        return min(self.hold(seq, self.max_model_len), self.max_model_len)

    def num_blocks_to_hold(self, seq: Sequence) -> int:
        return max(super().num_blocks_to_hold(seq), self.num_blocks_for(self.num_held_tokens(seq)))

    def allocate(self, seq: Sequence, parent: Sequence | None = None) -> int:
        num_tokens = super().allocate(seq, parent)
        self.num_shared_blocks += num_tokens // self.block_size if parent else 0
        return num_tokens

    def find_shared(self, seq: Sequence, parent: Sequence | None = None) -> list[int]:
        """A prompt that is scored shares no cached block: it needs the logits of all its tokens."""
        if num_of_prompt(seq) is not None and not parent:
            return []
        return super().find_shared(seq, parent)

    def most_tokens(self, seq: Sequence) -> int:
        return max(super().most_tokens(seq), self.num_held_tokens(seq))


class PolicyScheduler(Scheduler):
    """A scheduler with any policies, which sorts waiting sequences by priority, then by arrival."""

    config: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.choose_batch = find_policy("scheduling", self.config.scheduling)
        self.policy = find_policy("preemption_victim", self.config.preemption_victim)

    def choose_victim(self) -> Sequence:
        victim = self.policy(self.running)
        if victim not in self.running:
            raise rejected("preemption_victim", self.config.preemption_victim,
                           f"one that returns a running sequence, not {victim!r}")
        return victim

    def enqueue(self, seq: Sequence, in_front: bool = False) -> None:
        (insort_left if in_front else insort_right)(self.waiting, seq, key=BY_PRIORITY)
