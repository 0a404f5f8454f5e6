"""The scheduler and the block manager without a model, over thousands of random workloads.

A shadow cache records which token prefix each slot holds. Before every "attention" it is asked for
each slot that a sequence would read; the tokens "sampled" are a function of the whole prefix, so a
schedule that mixes anything up also generates something else.
"""

import random
from dataclasses import dataclass, field

import pytest

from nanoengine.block_manager import BlockManager
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Batch, Scheduler
from nanoengine.sequence import Sequence

EOS = 0
VOCABULARY = 4  # small, so that prompts share prefixes and blocks by accident as well


def next_token(token_ids: list[int]) -> int:
    """The "model": EOS now and then, else any token; a function of all tokens so far."""
    value = hash(tuple(token_ids))
    return EOS if value % 17 == 0 else 1 + value // 17 % (VOCABULARY - 1)


def expected_output(seq: Sequence) -> list[int]:
    token_ids = seq.token_ids[:seq.num_prompt_tokens]
    while len(token_ids) < seq.max_num_tokens and token_ids[seq.num_prompt_tokens:][-1:] != [EOS]:
        token_ids.append(next_token(token_ids))
    return token_ids


def make_sequence(prompt: list[int], max_tokens: int, name: str = "") -> Sequence:
    return Sequence(name, list(prompt), len(prompt), len(prompt) + max_tokens, SamplingParams(),
                    end_tokens={EOS: None})


@dataclass
class ShadowCache:
    """For each slot, the tokens up to and including the one whose K and V it holds."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)

    def run(self, batch: Batch) -> list[int]:
        ends = [seq.num_computed_tokens + n for seq, n in zip(batch.sequences, batch.num_tokens)]
        for seq, end in zip(batch.sequences, ends):
            for position in range(seq.num_computed_tokens, end):
                self.slots[self.slot(seq, position)] = hash(tuple(seq.token_ids[:position + 1]))
        for seq, end in zip(batch.sequences, ends):
            for position in range(end):
                held = self.slots.get(self.slot(seq, position))
                assert held == hash(tuple(seq.token_ids[:position + 1])), "reads another's K and V"
        return [next_token(batch.sequences[index].token_ids) for index in batch.sampled]

    def slot(self, seq: Sequence, position: int) -> int:
        block = seq.block_table[position // self.block_size]
        assert block != 0
        return block * self.block_size + position % self.block_size


def check_batch(scheduler: Scheduler, batch: Batch, before: tuple[list, list], name: str) -> None:
    running_before, waiting_before = before
    assert 0 < sum(batch.num_tokens) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({id(seq) for seq in batch.sequences}) == len(batch)
    assert all(seq in scheduler.running for seq in batch.sequences)
    for index, (seq, num_tokens) in enumerate(zip(batch.sequences, batch.num_tokens)):
        assert 0 < num_tokens <= seq.num_uncomputed_tokens
        assert (index in batch.sampled) == (num_tokens == seq.num_uncomputed_tokens)
    victims = [seq for seq in running_before if seq not in scheduler.running]
    if victims:
        assert victims == running_before[-len(victims):], "the youngest give way"
        assert list(scheduler.waiting) == victims + waiting_before, "to the front, nobody admitted"
    decoded = [seq.num_uncomputed_tokens == 1 for seq in batch.sequences if seq in running_before]
    if name == "prefill-first":
        assert all(decoded) or not any(decoded)
        assert len(decoded) == len(batch) or not all(decoded) or not decoded


def run_workload(seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(8, 60)
    fits = -(-max_model_len // block_size)
    name = rng.choice(["prefill-first", "mixed"])
    max_num_seqs = rng.randint(1, 8)
    manager = BlockManager(fits + rng.randint(0, fits), block_size, rng.random() < 0.8)
    scheduler = Scheduler(manager, max_num_seqs, max_num_seqs + rng.choice([0, 3, 20, 100]), name)
    cache = ShadowCache(block_size)
    stems = [[rng.randrange(1, VOCABULARY) for _ in range(max_model_len)] for _ in range(3)]
    arriving, everyone = [], []
    for number in range(rng.randint(1, 12)):
        length = rng.randint(1, max_model_len - 1)
        own = rng.randint(0, length)
        prompt = rng.choice(stems)[:length - own] + rng.choices(range(1, VOCABULARY), k=own)
        arriving.append(make_sequence(prompt, rng.randint(1, max_model_len - length), str(number)))
    everyone = list(arriving)
    aborted = set()
    num_steps = 0
    while arriving or scheduler.has_unfinished():
        while arriving and (rng.random() < 0.3 or not scheduler.has_unfinished()):
            scheduler.add(arriving.pop(0))
        if rng.random() < 0.02:
            victim = rng.choice([*scheduler.waiting, *scheduler.running])
            scheduler.finish(victim, "abort")
            aborted.add(victim.request_id)
            manager.check(scheduler.running)
            continue
        before = list(scheduler.running), list(scheduler.waiting)
        batch = scheduler.schedule()
        check_batch(scheduler, batch, before, name)
        finished = scheduler.postprocess(batch, cache.run(batch))
        assert all(seq.is_finished and seq not in scheduler.running for seq in finished)
        manager.check(scheduler.running)
        num_steps += 1
        assert num_steps < 20_000, "a livelock"
    assert manager.num_free_blocks == manager.num_blocks
    for seq in everyone:
        if seq.request_id not in aborted:
            assert seq.token_ids == expected_output(seq)
            assert seq.finish_reason == ("stop" if seq.token_ids[-1] == EOS else "length")
    return scheduler.counters


def test_random_workloads():
    totals: dict[str, int] = {}
    for seed in range(2500):
        for name, value in run_workload(seed).items():
            totals[name] = totals.get(name, 0) + value
    # the workloads are worth something only if all of this happened, and often
    assert totals["num_preemptions"] > 1000
    assert totals["prefix_cache_hits"] > 10_000
    assert totals["preempted_tokens"] > 10_000


def run_to_end(scheduler: Scheduler) -> None:
    cache = ShadowCache(scheduler.block_manager.block_size)
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        scheduler.postprocess(batch, cache.run(batch))
        scheduler.block_manager.check(scheduler.running)


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    scheduler = Scheduler(BlockManager(4, 16), 8, 64)
    with pytest.raises(ValueError, match="65 tokens .* 4 blocks of 16"):
        scheduler.add(make_sequence([1] * 60, 5))
    assert not scheduler.has_unfinished()
    scheduler.add(make_sequence([1] * 60, 4))
    run_to_end(scheduler)


def test_mixed_decodes_first_and_gives_the_rest_of_the_budget_to_a_prompt():
    scheduler = Scheduler(BlockManager(40, 4), 4, 8, "mixed")
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
    scheduler = Scheduler(BlockManager(40, 4), 4, 8)
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
    scheduler = Scheduler(BlockManager(40, 4), 4, 8)
    prompt = [1, 2, 3, 1, 3, 2, 1, 1, 2]
    scheduler.add(make_sequence(prompt, 1))
    run_to_end(scheduler)
    both = [make_sequence(prompt, 1), make_sequence([3] + prompt[:6], 1)]
    for seq in both:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch.sequences == both and batch.num_tokens == [1, 7]


def test_identical_prompts_in_one_step_are_computed_once():
    scheduler = Scheduler(BlockManager(40, 4), 4, 100)
    prompts = [make_sequence([1, 2, 3] * 5, 3) for _ in range(3)]
    for seq in prompts:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch.num_tokens == [15, 3, 3]
    assert [seq.num_cached_tokens for seq in prompts] == [0, 12, 12]
    scheduler.postprocess(batch, ShadowCache(4).run(batch))
    scheduler.block_manager.check(scheduler.running)
    assert len({tuple(seq.block_table[:3]) for seq in prompts}) == 1
    assert len({seq.block_table[3] for seq in prompts}) == 3


def test_a_preempted_sequence_comes_back_through_the_prefix_cache():
    scheduler = Scheduler(BlockManager(9, 4), 2, 100)
    old, young = make_sequence([1, 2, 3] * 5, 10), make_sequence([3, 2] * 8, 8)
    cache = ShadowCache(4)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.counters["num_preemptions"]:
        batch = scheduler.schedule()
        scheduler.postprocess(batch, [1] * len(cache.run(batch)))
    assert scheduler.waiting[0] is young and young.num_computed_tokens == 0
    while not young.block_table:
        batch = scheduler.schedule()
        scheduler.postprocess(batch, [1] * len(cache.run(batch)))
    assert scheduler.counters["prefix_cache_hits"] >= 4
    assert young.num_cached_tokens == 0, "the prompt itself was not cached when it first came"
