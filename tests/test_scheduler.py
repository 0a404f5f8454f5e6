"""The scheduler and the block manager without a model, over thousands of random workloads.

A shadow cache records which token prefix each slot holds, and follows block copies. Before every
"attention" it is asked for each slot that a sequence would read; the tokens "sampled" are a
function of the whole prefix, so a schedule that mixes anything up also generates something else.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from conftest import check_blocks

from nanoengine.beam_search import BeamSearch
from nanoengine.block_manager import BlockManager, num_held_tokens
from nanoengine.config import EngineConfig
from nanoengine.sampler import Logprob
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from nanoengine.scheduler import BATCHING, VICTIMS, Batch, Scheduler
from nanoengine.sequence import PendingToken, Sequence

EOS = 0
VOCABULARY = 4  # small, so that prompts share prefixes and blocks by accident as well
POLICIES = {
    "scheduling": list(BATCHING), "kv_allocation": ["on-demand", "reserve", "max-length"],
    "preemption_mode": ["recompute", "swap"], "preemption_victim": list(VICTIMS),
    "scheduling_policy": ["fcfs", "priority"], "max_waiting": [None, 0, 2]}


def next_token(token_ids: list[int], seed: int) -> int:
    """The "model": EOS now and then, else any token; a function of all tokens so far."""
    value = hash((seed, *token_ids))
    return EOS if value % 17 == 0 else 1 + value // 17 % (VOCABULARY - 1)


def next_logprobs(token_ids: list[int]) -> dict[int, Logprob]:
    """For beams: a log-probability for each token."""
    return {token_id: Logprob(-1 - hash((token_id, *token_ids)) % 10_007 / 1000, 0)
            for token_id in range(VOCABULARY)}


def expected_output(seq: Sequence) -> list[int]:
    token_ids = seq.token_ids[:seq.num_prompt_tokens]
    while len(token_ids) < seq.max_num_tokens and token_ids[seq.num_prompt_tokens:][-1:] != [EOS]:
        token_ids.append(next_token(token_ids, seq.seed))
    return token_ids


def make_sequence(prompt: list[int], max_tokens: int, name: str = "", n: int = 1,
                  priority: int = 0, held: int = 0, **params) -> Sequence:
    first, *forks = (
        Sequence(name, list(prompt), len(prompt), len(prompt) + max_tokens,
                 SamplingParams(**params), seed, end_tokens={EOS: None}, priority=priority,
                 num_held_tokens=held, index=seed) for seed in range(n))
    first.forks = forks
    return first


def make_scheduler(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, caching=True,
                   num_host_blocks=0, **policies) -> Scheduler:
    num_host_blocks *= policies.get("preemption_mode") == "swap"
    manager = BlockManager(num_blocks, block_size, caching, num_host_blocks)
    config = EngineConfig(model="none", max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens, **policies)
    return Scheduler(manager, config)


@dataclass
class ShadowCache:
    """For each slot, the tokens up to and including the one whose K and V it holds."""

    block_size: int
    sampled: list[int] = field(default_factory=list)  # in the last step
    slots: dict[int, int] = field(default_factory=dict)
    host_slots: dict[int, int] = field(default_factory=dict)

    def run(self, batch: Batch) -> list[int]:
        copies = batch.copies
        self.copy(copies.swap_out, self.slots, self.host_slots)
        self.copy(copies.copy_on_write, self.slots, self.slots)
        self.copy(copies.swap_in, self.host_slots, self.slots)
        ends = [seq.num_computed_tokens + n for seq, n in zip(batch.sequences, batch.num_tokens)]
        written = set()
        tokens = {seq: self.tokens(seq) for seq in batch.sequences}
        for seq, end in zip(batch.sequences, ends):
            for position in range(seq.num_computed_tokens, end):
                slot = self.slot(seq, position)
                assert slot not in written, "two write to one slot"
                written.add(slot)
                self.slots[slot] = hash(tuple(tokens[seq][:position + 1]))
        for seq, end in zip(batch.sequences, ends):
            for position in range(end):
                held = self.slots.get(self.slot(seq, position))
                assert held == hash(tuple(tokens[seq][:position + 1])), "reads another's K and V"
        self.sampled = [next_token(tokens[batch.sequences[index]], seq.seed)
                        for index, seq in batch.sampled]
        return self.sampled

    def tokens(self, seq: Sequence) -> list[int]:
        """What the device knows: what it has sampled in the step before is there already."""
        *known, last = seq.token_ids
        return [*known, self.sampled[last.row] if isinstance(last, PendingToken) else last]

    def copy(self, blocks: dict[int, int], source: dict[int, int], target: dict[int, int]) -> None:
        target.update({new * self.block_size + i: source.get(old * self.block_size + i)
                       for new, old in blocks.items() for i in range(self.block_size)})

    def slot(self, seq: Sequence, position: int) -> int:
        block = seq.block_table[position // self.block_size]
        assert block != 0
        return block * self.block_size + position % self.block_size


def check_batch(scheduler: Scheduler, batch: Batch, running_before: list, waiting_before: list,
                batch_has_decoded: bool) -> bool:
    """Returns whether a static batch has decoded by now."""
    config = scheduler.config
    assert 0 < sum(batch.num_tokens) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({id(seq) for seq in batch.sequences}) == len(batch)
    assert all(seq in scheduler.running for seq in batch.sequences)
    for index, (seq, num_tokens) in enumerate(zip(batch.sequences, batch.num_tokens)):
        assert 0 < num_tokens <= seq.num_uncomputed_tokens
        is_sampled = index in [row for row, _ in batch.sampled]
        assert is_sampled == (num_tokens == seq.num_uncomputed_tokens)
        assert len(seq.block_table) == scheduler.block_manager.num_blocks_to_hold(seq)
    victims = [seq for seq in running_before if seq not in scheduler.running]
    admitted = [seq for seq in waiting_before if seq in scheduler.running]
    priorities = [seq.priority for seq in scheduler.waiting]
    assert priorities == sorted(priorities)
    if victims and not any(seq.gave_way for seq in victims):
        assert not admitted
        if config.scheduling_policy == "fcfs":
            assert set(list(scheduler.waiting)[:len(victims)]) == set(victims), "to the front"
    if victims and config.kv_allocation != "on-demand" and config.max_waiting is None:
        assert any(seq.group for seq in victims), "whoever holds all it may need is safe"
    alone = all(len(seq.members) == 1 for seq in victims)
    if config.preemption_victim == "youngest" and config.max_waiting is None and alone:
        assert victims == running_before[len(running_before) - len(victims):]
    decoded = [seq.num_uncomputed_tokens == 1 for seq in batch.sequences if seq in running_before]
    if config.scheduling == "prefill-first" and config.max_waiting is None:
        assert all(decoded) or not any(decoded)
        assert len(decoded) == len(batch) or not all(decoded) or not decoded
    if config.scheduling == "static" and admitted and running_before:
        assert not batch_has_decoded, "nobody joins a static batch that decodes"
    return bool(running_before) and (batch_has_decoded or not admitted and all(decoded))


def update_beams(searches: dict[str, BeamSearch], batch: Batch) -> None:
    for _, seq in batch.sampled:
        if seq.group:
            searches[seq.request_id].update(seq, next_logprobs(seq.token_ids))


def beams_alone(prompt: list[int], params: BeamSearchParams) -> list:
    scheduler = make_scheduler(500, 4, 16, 500)
    seq = make_sequence(prompt, params.max_tokens, logprobs=2 * params.beam_width)
    search = BeamSearch(seq, params, scheduler)
    scheduler.add(seq)
    cache = ShadowCache(4)
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        scheduler.postprocess(batch, cache.run(batch))
        update_beams({"": search}, batch)
    return search.finished


def run_workload(seed: int, **policies) -> dict[str, int]:
    rng = random.Random(seed)
    policies = {name: rng.choice(values) for name, values in POLICIES.items()} | policies
    block_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(8, 60)
    fits = -(-max_model_len // block_size)
    max_num_seqs = rng.randint(1, 8)
    scheduler = make_scheduler(
        fits + rng.randint(0, 2 * fits), block_size, max_num_seqs,
        max_num_seqs + rng.choice([0, 3, 20, 100]), rng.random() < 0.8, rng.randint(0, 2 * fits),
        **policies)
    manager, cache = scheduler.block_manager, ShadowCache(block_size)
    stems = [[rng.randrange(1, VOCABULARY) for _ in range(max_model_len)] for _ in range(3)]
    arriving, searches, wanted = [], {}, {}
    for number in range(rng.randint(1, 12)):
        length = rng.randint(1, max_model_len - 1)
        own = rng.randint(0, length)
        prompt = rng.choice(stems)[:length - own] + rng.choices(range(1, VOCABULARY), k=own)
        max_tokens, name = rng.randint(1, max_model_len - length), str(number)
        priority = rng.choice([0, 0, 1, -1]) * (policies["scheduling_policy"] == "priority")
        width = rng.choice([0, 0, 2, 3])
        held = num_held_tokens(policies["kv_allocation"], length + max_tokens, max_model_len)
        num_blocks = manager.num_blocks_for(max(held, length + max_tokens))
        if 0 < width <= max_num_seqs and width * num_blocks <= manager.num_blocks:
            penalty = rng.choice([0.0, 1.0, 2.0])
            params = BeamSearchParams(width, max_tokens, length_penalty=penalty)
            seq = make_sequence(prompt, max_tokens, name, held=held, logprobs=2 * width)
            searches[name], wanted[name] = BeamSearch(seq, params, scheduler), beams_alone(
                prompt, params)
        else:
            seq = make_sequence(prompt, max_tokens, name, rng.choice([1, 1, 1, 3]), priority, held)
        arriving.append(seq)
    everyone = [completion for seq in arriving for completion in (seq, *seq.forks)]
    aborted: set[str] = set()
    has_decoded, run_ahead, in_flight = False, rng.random() < 0.5, None

    def take_in(batch: Batch, tokens: list[int]) -> None:
        scheduler.postprocess(batch, tokens)
        update_beams(searches, batch)

    while arriving or scheduler.has_unfinished() or in_flight:
        while arriving and (rng.random() < 0.3 or not scheduler.has_unfinished()):
            scheduler.add(arriving.pop(0))
        if rng.random() < 0.02 and scheduler.has_unfinished():
            victim = rng.choice([*scheduler.waiting, *scheduler.running])
            aborted.add(victim.request_id)
            for seq in [*scheduler.waiting, *scheduler.running]:
                if seq.request_id == victim.request_id:
                    scheduler.finish(seq, "abort")
            searches.pop(victim.request_id, None)
            check_blocks(scheduler)
            continue
        if in_flight:
            scheduler.advance(in_flight[0])
        before, launched = (list(scheduler.running), list(scheduler.waiting)), None
        if scheduler.has_unfinished():
            batch = scheduler.schedule()
            has_decoded = check_batch(scheduler, batch, *before, has_decoded)
            launched = batch, cache.run(batch)
        if in_flight:
            take_in(*in_flight)
        in_flight = launched
        if in_flight and (batch.is_awaited or not run_ahead):
            take_in(*in_flight)
            in_flight = None
        assert not any(isinstance(seq.token_ids[-1], PendingToken) for seq in everyone)
        check_blocks(scheduler)
        assert scheduler.counters["num_steps"] < 20_000, "a livelock"
    assert manager.num_free_blocks == manager.num_blocks
    assert len(manager.free_host_blocks) == manager.num_host_blocks
    for seq in everyone:
        if seq.request_id in searches:
            assert searches[seq.request_id].finished == wanted[seq.request_id]
        elif seq.request_id not in aborted:
            assert seq.token_ids == expected_output(seq)
            assert seq.finish_reason == ("stop" if seq.token_ids[-1] == EOS else "length")
    return scheduler.counters


def test_random_workloads():
    totals: dict[str, int] = {}
    for seed in range(2500):
        for name, value in run_workload(seed).items():
            totals[name] = totals.get(name, 0) + value
    # the workloads are worth something only if all of this happened, and often
    for name in ("recompute_preemptions", "swap_preemptions", "shared_blocks", "swap_in_blocks",
                 "copy_on_write_blocks"):
        assert totals[name] > 1000, name
    assert totals["prefix_cache_hits"] > 10_000
    assert totals["recomputed_tokens"] > 10_000


def test_no_combination_of_policies_livelocks():
    for values in itertools.product(*POLICIES.values()):
        for seed in (1, 2, 3):
            run_workload(seed, **dict(zip(POLICIES, values)))


def run_to_end(scheduler: Scheduler) -> None:
    cache = ShadowCache(scheduler.block_manager.block_size)
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        scheduler.postprocess(batch, cache.run(batch))
        check_blocks(scheduler)


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(4, 16, 8, 64)
    with pytest.raises(ValueError, match="65 tokens .* 4 blocks of 16 tokens"):
        scheduler.add(make_sequence([1] * 60, 5))
    assert not scheduler.has_unfinished()
    scheduler.add(make_sequence([1] * 60, 4))
    run_to_end(scheduler)


def test_mixed_decodes_first_and_gives_the_rest_of_the_budget_to_a_prompt():
    scheduler = make_scheduler(40, 4, 4, 8, scheduling="mixed")
    first = make_sequence([1, 2, 3], 20)
    scheduler.add(first)
    scheduler.postprocess(scheduler.schedule(), [1])
    second = make_sequence([2] * 15, 2)
    scheduler.add(second)
    chunks = []
    while second.num_computed_tokens < 15:
        batch = scheduler.schedule()
        assert batch.sequences == [first, second] and batch.num_tokens[0] == 1
        chunks.append(batch.num_tokens[1])
        scheduler.postprocess(batch, [1] * len(batch.sampled))
    assert chunks == [7, 7, 1]


def test_prefill_first_chunks_a_prompt_before_anybody_decodes():
    scheduler = make_scheduler(40, 4, 4, 8)
    first, second = make_sequence([1, 2, 3], 20), make_sequence([2] * 20, 2)
    scheduler.add(first)
    scheduler.postprocess(scheduler.schedule(), [1])
    scheduler.add(second)
    batches = []
    for _ in range(4):
        batches.append(scheduler.schedule())
        scheduler.postprocess(batches[-1], [1] * len(batches[-1].sampled))
    assert [batch.num_tokens for batch in batches] == [[8], [8], [4], [1, 1]]


def test_cached_tokens_do_not_count_against_the_budget():
    scheduler = make_scheduler(40, 4, 4, 8)
    prompt = [1, 2, 3, 1, 3, 2, 1, 1, 2]
    scheduler.add(make_sequence(prompt, 1))
    run_to_end(scheduler)
    both = [make_sequence(prompt, 1), make_sequence([3] + prompt[:6], 1)]
    for seq in both:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch.sequences == both and batch.num_tokens == [1, 7]


def test_identical_prompts_in_one_step_are_computed_once():
    scheduler = make_scheduler(40, 4, 4, 100)
    prompts = [make_sequence([1, 2, 3] * 5, 3) for _ in range(3)]
    for seq in prompts:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch.num_tokens == [15, 3, 3]
    assert [seq.metrics.num_cached_tokens for seq in prompts] == [0, 12, 12]
    scheduler.postprocess(batch, ShadowCache(4).run(batch))
    check_blocks(scheduler)
    assert len({tuple(seq.block_table[:3]) for seq in prompts}) == 1
    assert len({seq.block_table[3] for seq in prompts}) == 3


def test_a_preempted_sequence_comes_back_through_the_prefix_cache():
    scheduler = make_scheduler(9, 4, 2, 100)
    old, young = make_sequence([1, 2, 3] * 5, 10), make_sequence([3, 2] * 8, 8)
    cache = ShadowCache(4)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.counters["recompute_preemptions"]:
        batch = scheduler.schedule()
        scheduler.postprocess(batch, [1] * len(cache.run(batch)))
    assert scheduler.waiting[0] is young and young.num_computed_tokens == 0
    while not young.block_table:
        batch = scheduler.schedule()
        scheduler.postprocess(batch, [1] * len(cache.run(batch)))
    assert scheduler.counters["prefix_cache_hits"] >= 4
    assert young.metrics.num_cached_tokens == 0, "not cached when it first came"
