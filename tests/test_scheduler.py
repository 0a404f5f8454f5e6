"""The scheduler, the block manager and the engine's loop without a model, over hundreds of random
workloads.

A shadow cache records which token prefix each slot holds, and follows block copies. Before every
"attention" it is asked for each slot that a sequence would read; the tokens "sampled" are a
function of the whole prefix, so a schedule that mixes anything up also generates something else.
"""

import itertools
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from conftest import check_blocks, overtaking, policies_of

from nanoengine import SamplingParams
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.observers import Features
from nanoengine.requests import Request
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import NO_TOKEN, Batch, Copies, Sequence
from nanoengine_extras.sampling.beam_search import BeamSearch, BeamSearchParams, make_way
from nanoengine_extras.running.guards import Guards
from nanoengine_extras.sampling.logprobs import Logprobs, RowLogprobs
from nanoengine_extras.running.metrics import Metrics
from nanoengine_extras.running.shared_steps import abort_sequences, end_request

EOS = 0
VOCABULARY = 4  # small, so that prompts share prefixes and blocks by accident as well
POLICIES = {
    "scheduling": [*policies_of("scheduling"), overtaking(), overtaking("mixed", 2),
                   overtaking("static", 1)],
    "kv_allocation": ["on-demand", *policies_of("kv_allocation")],
    "preemption_mode": ["recompute", "swap"],
    "preemption_victim": list(policies_of("preemption_victim")),
    "scheduling_policy": ["fcfs", "priority"]}
ORDER_OF_COPIES = ("swap_out", "copy_on_write", "swap_in")


def next_token(token_ids: list[int], seq: Sequence) -> int:
    """The "model": now and then EOS or none, else any token; a function of all tokens so far."""
    value = hash((seq.seed, *token_ids))
    if value % 61 == 1 and seq.end_tokens:
        return NO_TOKEN
    return EOS if value % 17 == 0 else 1 + value // 17 % (VOCABULARY - 1)


def next_entries(token_ids: list[int]) -> RowLogprobs:
    """For beams: a log-probability of each token, behind that of the sampled one."""
    logprobs = [-1 - hash((token_id, *token_ids)) % 10_007 / 1000 for token_id in range(VOCABULARY)]
    entries = [[0, logprobs[0], 0], *([i, each, 0] for i, each in enumerate(logprobs))]
    return RowLogprobs(torch.tensor(entries))


def is_beam(seq: Sequence) -> bool:
    return seq.params.logprobs is not None


def expected_output(seq: Sequence) -> tuple[list[int], str]:
    """All tokens of a sequence, and how it ends."""
    token_ids = seq.token_ids[:seq.num_prompt_tokens]
    while len(token_ids) < seq.max_num_tokens:
        token_id = next_token(token_ids, seq)
        if token_id == NO_TOKEN:
            return token_ids, "error"
        token_ids.append(token_id)
        if token_id in seq.end_tokens:
            return token_ids, "stop"
    return token_ids, "length"


def prefixes_of(token_ids: list[int]) -> list[int]:
    """For each token, what stands for it and all before it."""
    return list(itertools.accumulate(token_ids, lambda *pair: hash(pair)))


def make_sequence(prompt: list[int], max_tokens: int, name: str = "", n: int = 1,
                  priority: int = 0, **params) -> Sequence:
    first = Sequence(name, list(prompt), len(prompt), len(prompt) + max_tokens,
                     SamplingParams(**params), end_tokens={EOS: None}, priority=priority)
    first.forks = [first.fork(seed=index, index=index) for index in range(1, n)]
    return first


@dataclass
class ShadowCache:
    """For each slot, the tokens up to and including the one whose K and V it holds."""

    block_size: int
    order: tuple[str, ...] = ORDER_OF_COPIES
    sampled: list[int] = field(default_factory=list)  # in the last step
    slots: dict[int, int] = field(default_factory=dict)
    host_slots: dict[int, int] = field(default_factory=dict)

    def run(self, batch: Batch) -> list[int]:
        self.copy(batch.copies)
        tokens = {seq: self.tokens(seq) for seq in batch.sequences}
        slots = {seq: self.slots_of(seq, start + count) for seq, start, count
                 in zip(batch.sequences, batch.starts, batch.num_tokens)}
        prefixes = {seq: prefixes_of(tokens[seq]) for seq in batch.sequences}
        written = set()
        for seq, start in zip(batch.sequences, batch.starts):
            for slot, prefix in zip(slots[seq][start:], prefixes[seq][start:]):
                assert slot not in written, "two write to one slot"
                written.add(slot)
                self.slots[slot] = prefix
        for seq in batch.sequences:
            held = [self.slots.get(slot) for slot in slots[seq]]
            assert held == prefixes[seq][:len(held)], "reads another's K and V"
        self.sampled = [next_token(tokens[batch.sequences[index]][:position], seq)
                        for index, seq, position in batch.sampled]
        return self.sampled

    def tokens(self, seq: Sequence) -> list[int]:
        """What the device knows: what it has sampled in the step before is there already."""
        *known, last = seq.token_ids
        if last < 0:
            last = max(0, self.sampled[-1 - last])
        return [*known, last]

    def copy(self, copies: Copies) -> None:
        device, host = self.slots, self.host_slots
        ends = {"swap_out": (device, host), "copy_on_write": (device, device),
                "swap_in": (host, device)}
        for name in self.order:
            source, target = ends[name]
            target.update({new * self.block_size + i: source.get(old * self.block_size + i)
                           for new, old in getattr(copies, name).items()
                           for i in range(self.block_size)})

    def slots_of(self, seq: Sequence, num_tokens: int) -> list[int]:
        assert 0 not in seq.block_table
        slots = [block * self.block_size + i for block in seq.block_table
                 for i in range(self.block_size)]
        assert num_tokens <= len(slots)
        return slots[:num_tokens]


class ShadowRunner:
    """A runner for `Engine`: it launches a step on a shadow cache.

    One step at most is in flight when another is launched, and a pending token stands for the one
    that the step in flight samples for this very sequence.
    """

    block_bytes, backend = 1, "shadow"
    model_config = SimpleNamespace(vocab_size=VOCABULARY)
    last_sampled = torch.zeros(0)

    def __init__(self, cache: ShadowCache, num_kv_blocks: int, num_host_blocks: int,
                 max_model_len: int, max_num_seqs: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.num_kv_blocks = num_kv_blocks
        self.copier = SimpleNamespace(host_blocks=range(num_host_blocks))
        self.max_model_len = max_model_len
        self.in_flight: list[Batch] = []

    def launch(self, batch: Batch) -> SimpleNamespace:
        assert len(self.in_flight) <= 1
        for seq in batch.sequences:
            row = -1 - seq.token_ids[-1]
            assert row < self.max_num_seqs, "no more can be looked up"
            assert row < 0 or self.in_flight[0].sampled[row].seq is seq
        self.in_flight.append(batch)
        tokens = self.cache.run(batch)
        scored = [row for row in batch.sampled if "is_scorer" in row.seq.kept]
        for row in batch.sampled:
            if is_beam(row.seq) and row not in scored:
                found = row.seq.kept.setdefault("logprobs", {})
                found[row.position] = next_entries(row.seq.token_ids)
        for row, score in zip(scored, self.score(batch, scored)):
            row.seq.kept["logprobs"][row.position] = score

        def wait() -> list[int]:
            assert self.in_flight.pop(0) is batch
            return tokens

        return SimpleNamespace(batch=batch, wait=wait, done=1.0)

    def score(self, batch: Batch, scored: list) -> list[int]:
        """For each token to be scored, what stands for it and all before it."""
        for index, scorer, position in scored:
            start = batch.starts[index]
            assert start < position <= start + batch.num_tokens[index], "it has no logits"
            assert batch.sequences[index].kept["scorer"] is scorer
        return [prefixes_of(row.seq.kept["tokens"][:row.position])[-1] for row in scored]


def contents(batch: Batch) -> list:
    """A deep copy of all that a batch says, but for the sequences, which go on."""
    return [batch.sequences[:], batch.starts[:], batch.num_tokens[:], batch.sampled[:],
            [list(pairs.items()) for pairs in vars(batch.copies).values()], batch.preempted[:],
            batch.budget]


class CheckedScheduler(Scheduler):
    """Counts its steps, and scores prompts, as an engine does. It checks each batch that it
    schedules, and that none of them changes afterwards."""

    has_decoded = False  # whether a static batch has

    def observe(self, engine: Engine) -> None:
        self.guards, self.metrics, self.logprobs = Guards(), Metrics(lambda: 1.0), Logprobs()
        self.guards.engine = engine
        self.metrics.begin(engine)
        self.scheduled: list[tuple[Batch, list]] = []

    counters = property(lambda self: self.metrics.counters)

    def add(self, seq: Sequence) -> None:
        for feature in (self.guards, self.metrics, self.logprobs):
            feature.enter([seq, *seq.forks], SimpleNamespace(tokenizer=None))
        self.enqueue(seq)

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list:
        taken = super().postprocess(batch, token_ids)
        self.metrics.done(SimpleNamespace(batch=batch, done=1.0), taken)
        return taken

    def schedule(self) -> Batch:
        running, waiting = list(self.running), list(self.waiting)
        decodes = [seq for seq in running if seq.num_uncomputed_tokens == 1]
        batch = super().schedule()
        if not batch:
            assert any(seq.num_uncomputed_tokens == 0 for seq in [*self.running, *self.waiting])
            return batch
        self.metrics.scheduled(batch)
        self.logprobs.scheduled(batch)
        self.check_batch(batch, running, waiting)
        self.check_decodes(batch, decodes)
        self.scheduled.append((batch, contents(batch)))
        return batch

    def check_batch(self, batch: Batch, running_before: list, waiting_before: list) -> None:
        config = self.config
        assert 0 < sum(batch.num_tokens) <= config.max_num_batched_tokens
        assert batch.budget == config.max_num_batched_tokens - sum(batch.num_tokens)
        assert len(self.running) <= config.max_num_seqs
        assert len(set(batch.sequences)) == len(batch)
        assert all(seq in self.running for seq in batch.sequences)
        sampled = {row.source for row in batch.sampled if "is_scorer" not in row.seq.kept}
        for index, seq in enumerate(batch.sequences):
            assert batch.starts[index] == seq.num_computed_tokens
            assert 0 < batch.num_tokens[index] <= seq.num_uncomputed_tokens
            assert (index in sampled) == (batch.num_tokens[index] == seq.num_uncomputed_tokens)
            assert len(seq.block_table) == self.block_manager.num_blocks_to_hold(seq)
        assert not any(seq.needs_tokens and seq.token_ids[-1] < 0 for seq in batch.sequences)
        victims = [seq for seq in running_before if seq not in self.running]
        admitted = [seq for seq in waiting_before if seq in self.running]
        priorities = [seq.priority for seq in self.waiting]
        assert priorities == sorted(priorities)
        is_overtaking = "overtaking" in str(config.scheduling).lower()
        if victims and not is_overtaking:
            assert not admitted
            if config.scheduling_policy == "fcfs":
                assert set(list(self.waiting)[:len(victims)]) == set(victims), "to the front"
        if config.kv_allocation != "on-demand":
            assert all("gave_way" in seq.kept for seq in victims), (
                "only overtaking can preempt a sequence that holds all that it may need")
            # beams also give way where all that run stand still
            assert all("gave_way" in seq.kept for seq, *_ in batch.preempted if not is_beam(seq))
        if config.preemption_victim == "youngest" and not is_overtaking:
            assert victims == running_before[len(running_before) - len(victims):]
        decoded = [seq.num_uncomputed_tokens == 1 for seq in batch.sequences
                   if seq in running_before]
        if config.scheduling == "prefill-first":
            assert all(decoded) or not any(decoded)
            assert len(decoded) == len(batch) or not all(decoded) or not decoded
        if config.scheduling == "static" and admitted and running_before:
            assert not self.has_decoded, "a static batch that decodes admits no sequence"
        self.has_decoded = bool(running_before) and (
            self.has_decoded or not admitted and all(decoded))

    def check_decodes(self, batch: Batch, decodes: list[Sequence]) -> None:
        if self.config.scheduling == "mixed":
            left = [seq for seq in decodes if seq not in {seq for seq, *_ in batch.preempted}]
            assert batch.sequences[:len(left)] == left, "a decode waits for a prompt"
            assert batch.num_tokens[:len(left)] == [1] * len(left)

    def check_scheduled(self) -> None:
        for batch, before in self.scheduled:
            assert contents(batch) == before, "a batch has changed since it was scheduled"


# the tests of speculation give it guesses
engine_of = Engine


def make_engine(cache: ShadowCache, num_blocks, max_num_seqs, max_num_batched_tokens, caching=True,
                num_host_blocks=0, max_model_len=1000, **options) -> Engine:
    config = EngineConfig(
        model="none", device="cpu", block_size=cache.block_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=caching, **options)
    runner = ShadowRunner(cache, num_blocks, num_host_blocks, max_model_len, max_num_seqs)
    engine = engine_of(config, runner, Features())
    engine.scheduler.__class__ = CheckedScheduler
    engine.scheduler.observe(engine)
    engine.add = engine.scheduler.add
    return engine


def make_scheduler(num_blocks, block_size, *sizes, **options) -> CheckedScheduler:
    return make_engine(ShadowCache(block_size), num_blocks, *sizes, **options).scheduler


class Call:
    """A call of `beam_search` in one of several threads, which run their steps by turns.

    It sees what steps of others have brought its searches when its turn comes, as `LLM.run` does.
    """

    def __init__(self, engine: Engine, rng: random.Random | None = None) -> None:
        self.engine = engine
        self.rng = rng
        self.searches: list[BeamSearch] = []
        self.has_news = False
        self.num_steps = 0

    def take_turn(self, calls: list["Call"]) -> None:
        scheduler = self.engine.scheduler
        if not self.has_news:
            for seq in self.engine.step():
                # as another client of the engine might
                if self.rng and self.rng.random() < 0.02 and not self.engine.in_flight:
                    for beam in list(filter(is_beam, scheduler.running))[:1]:
                        scheduler.preempt(beam)
                assert min(seq.token_ids) >= 0, "a pending token is handed out"
                for call in calls:
                    for search in call.searches:
                        if search.request_id == seq.request_id:
                            search.update(seq)
                            call.has_news = True
        if not self.has_news and self.num_steps == scheduler.counters["num_steps"]:
            num_running = len(scheduler.running)
            make_way(scheduler)
            scheduler.counters["ways_made"] += len(scheduler.running) < num_running
        self.has_news = False
        self.num_steps = scheduler.counters["num_steps"]


def begin_search(seq: Sequence, params: BeamSearchParams, engine: Engine) -> BeamSearch:
    return BeamSearch(Request(None, [seq]), params, engine.scheduler)


def beams_alone(seq: Sequence, params: BeamSearchParams) -> list:
    engine = make_engine(ShadowCache(4), 100, 8, 500)
    seq = make_sequence(seq.token_ids, params.max_tokens, logprobs=seq.params.logprobs)
    call = Call(engine)
    call.searches = [begin_search(seq, params, engine)]
    engine.add(seq)
    while engine.has_unfinished():
        call.take_turn([call])
        assert engine.scheduler.counters["num_steps"] < 1000, "it goes on for ever"
    assert not engine.scheduler.counters["ways_made"]
    return call.searches[0].finished


def run_workload(seed: int, order=ORDER_OF_COPIES, widths=(0, 0, 2, 3), **policies) -> Counter[str]:
    """Random sequences and beam searches, in an engine with random options.

    widths: the beams of a request, of which one is chosen; 0 for a request without beams.
    """
    rng = random.Random(seed)
    policies = {name: rng.choice(values) for name, values in POLICIES.items()} | policies
    block_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(8, 60)
    fits = -(-max_model_len // block_size)
    max_num_seqs = rng.randint(1, 8)
    engine = make_engine(
        ShadowCache(block_size, order), fits + rng.randint(0, 2 * fits), max_num_seqs,
        max_num_seqs + rng.choice([0, 3, 20, 100]), rng.random() < 0.8, rng.randint(0, 2 * fits),
        max_model_len, **{"run_ahead": rng.random() < 0.5} | policies)
    scheduler = engine.scheduler
    manager = scheduler.block_manager
    stems = [[rng.randrange(1, VOCABULARY) for _ in range(max_model_len)] for _ in range(3)]
    arriving, searches, wanted = [], {}, {}
    calls = [Call(engine, rng) for _ in range(rng.choice([1, 1, 3]))]
    for number in range(rng.randint(1, 12)):
        length = rng.randint(1, max_model_len - 1)
        own = rng.randint(0, length)
        prompt = rng.choice(stems)[:length - own] + rng.choices(range(1, VOCABULARY), k=own)
        max_tokens, name = rng.randint(1, max_model_len - length), str(number)
        priority = rng.choice([0, 0, 1, -1]) * (policies["scheduling_policy"] == "priority")
        width = rng.choice(widths)
        # of the tokens that so many beams may have, as many as there can be
        room = min(max_model_len, manager.num_blocks // max(1, width) * block_size)
        is_possible = room == max_model_len or policies["kv_allocation"] != "max-length"
        if width and length < room and is_possible:
            max_tokens = rng.choice([room - length, rng.randint(1, room - length)])
            params = BeamSearchParams(width, max_tokens, length_penalty=rng.choice([0.0, 1.0, 2.0]))
            seq = make_sequence(prompt, max_tokens, name, logprobs=2 * width)
            searches[name] = begin_search(seq, params, engine)
            wanted[name] = beams_alone(seq, params)
        else:
            seq = make_sequence(prompt, max_tokens, name, rng.choice([1, 1, 1, 3]), priority,
                                prompt_logprobs=rng.choice([None, None, None, 0]))
            for each in (seq, *seq.forks):
                each.needs_tokens = number % 5 == 4
        arriving.append(seq)
    everyone = [completion for seq in arriving for completion in (seq, *seq.forks)]
    aborted: set[str] = set()
    abort_rate = rng.choice([0, 0.02])
    num_turns = 0

    while arriving or engine.has_unfinished():
        while arriving and (rng.random() < 0.3 or not engine.has_unfinished()):
            engine.add(arriving[0])
            if search := searches.get(arriving.pop(0).request_id):
                rng.choice(calls).searches.append(search)
        if rng.random() < abort_rate and scheduler.has_unfinished():
            victim = rng.choice([*scheduler.waiting, *scheduler.running])
            aborted.add(victim.request_id)
            abort_sequences(engine, {victim.request_id})
            assert scheduler.has_unfinished() or not engine.in_flight
            if not engine.in_flight:
                engine.runner.in_flight.clear()
            if victim.request_id in searches:
                end_request(searches[victim.request_id], None)
            for seq in everyone:  # and forks that have yet to begin
                if seq.request_id == victim.request_id:
                    seq.finish_reason = seq.finish_reason or "abort"
            check_blocks(scheduler)
            continue
        rng.choice(calls).take_turn(calls)
        num_turns += 1
        assert all(seq.token_ids[-1] >= 0 for seq in everyone)
        assert engine.config.run_ahead or not engine.in_flight
        check_blocks(scheduler)
        assert num_turns < 1500, "a deadlock, or a livelock"
    assert not engine.in_flight
    scheduler.check_scheduled()
    scheduler.counters["most_turns"] = num_turns
    assert manager.num_free_blocks == manager.num_blocks
    assert not getattr(manager, "host_tables", None)
    for seq in everyone:
        if seq.request_id in wanted:
            assert seq.request_id in aborted or (
                searches[seq.request_id].finished == wanted[seq.request_id])
        elif seq.request_id not in aborted:
            assert (seq.token_ids, seq.finish_reason) == expected_output(seq)
            wanted_scores = prefixes_of(seq.token_ids[:seq.num_prompt_tokens - 1])
            found = seq.kept.get("logprobs", {})
            assert seq.index or found == dict(enumerate(
                wanted_scores * (seq.params.prompt_logprobs is not None), 1))
            scheduler.counters["errors"] += seq.finish_reason == "error"
            scheduler.counters["scored"] += len(found)
    if not searches:
        num_generated = sum(seq.num_tokens - seq.num_prompt_tokens for seq in everyone)
        assert scheduler.counters["generation_tokens"] == num_generated
    if policies["preemption_mode"] == "recompute":
        assert not scheduler.counters["swap_preemptions"], "the pool is not to be used"
    return scheduler.counters


def test_random_workloads(monkeypatch):
    """With all combinations of policies. No pending token is ever hashed, handed out or counted."""
    make_hash = BlockManager._hash

    def checked_hash(manager, seq, index):
        assert min(seq.token_ids[:(index + 1) * manager.block_size]) >= 0
        assert seq.num_known_tokens >= (index + 1) * manager.block_size
        return make_hash(manager, seq, index)

    monkeypatch.setattr(BlockManager, "_hash", checked_hash)
    combinations = [dict(zip(POLICIES, values)) for values in itertools.product(*POLICIES.values())]
    totals: Counter[str] = Counter()
    for seed, policies in enumerate(combinations):
        totals.update(run_workload(seed, **policies))
    # the workloads are worth something only if all of this happened, and often
    for name in ("recompute_preemptions", "swap_preemptions", "shared_blocks", "swap_in_blocks",
                 "copy_on_write_blocks"):
        assert totals[name] > 300, name
    assert totals["prefix_cache_hits"] > 3000 and totals["recomputed_tokens"] > 3000
    assert totals["errors"] > 100 and totals["scored"] > 3000 and totals["ways_made"] > 100


def test_searches_always_go_on():
    """Many beams of several calls, and few others, where only one search is sure to fit."""
    totals: Counter[str] = Counter()
    for seed in range(200):
        totals.update(run_workload(seed, widths=(2, 3, 4, 5, 0)))
    assert totals["ways_made"] > 100 and totals["swap_preemptions"] > 200


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_the_blocks_of_a_sequence_that_fails_are_forgotten(max_tokens):
    """Its K and V may be NaN. Those of others stay, but for what a fork has from its parent."""
    scheduler = make_scheduler(10, 128, 4, 1000)
    manager = scheduler.block_manager
    good, parent = make_sequence([1] * 300, max_tokens), make_sequence([2] * 300, max_tokens, n=2)
    (bad,) = parent.forks
    for seq in (good, parent):
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert len(manager.hash_of_block) == 4
    scheduler.postprocess(batch, [3, NO_TOKEN, 3])
    check_blocks(scheduler)
    assert [bad.finish_reason, len(bad.token_ids)] == ["error", 300]
    assert {tokens for _, tokens in manager.blocks_by_hash} == {array("i", [1] * 128).tobytes()}


def run_to_end(scheduler: Scheduler) -> None:
    cache = ShadowCache(scheduler.block_manager.block_size)
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        scheduler.postprocess(batch, cache.run(batch))
        check_blocks(scheduler)


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    for policies in (dict(), dict(kv_allocation="reserve"), dict(kv_allocation="max-length")):
        scheduler = make_scheduler(4, 16, 8, 64, max_model_len=64, **policies)
        with pytest.raises(ValueError, match="65 tokens .*num_kv_blocks=4, block_size=16"):
            scheduler.add(make_sequence([1] * 60, 5, n=2))
        assert not scheduler.has_unfinished()
        scheduler.add(make_sequence([1] * 60, 4, n=2))
        run_to_end(scheduler)


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


def test_identical_prompts_in_one_step_are_computed_once():
    """And tokens from the cache do not count against the budget."""
    scheduler = make_scheduler(40, 4, 4, 21)
    prompts = [make_sequence([1, 2, 3] * 5, 3) for _ in range(3)]
    for seq in prompts:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch.num_tokens == [15, 3, 3]
    assert [seq.kept["metrics"].num_cached_tokens for seq in prompts] == [0, 12, 12]
    scheduler.postprocess(batch, ShadowCache(4).run(batch))
    check_blocks(scheduler)
    assert len({tuple(seq.block_table[:3]) for seq in prompts}) == 1
    assert len({seq.block_table[3] for seq in prompts}) == 3


def test_completions_share_the_prompt_even_where_they_end_at_once(monkeypatch):
    scheduler = make_scheduler(9, 4, 4, 100)
    allocate = scheduler.block_manager.allocate
    num_shared: list[int] = []
    monkeypatch.setattr(scheduler.block_manager, "allocate",
                        lambda *seqs: num_shared.append(allocate(*seqs)) or num_shared[-1])
    first = make_sequence([1, 2, 3, 1, 2, 3, 1, 2, 3], 1, n=3)
    forks = first.forks
    scheduler.add(first)
    batch = scheduler.schedule()
    assert [row[:2] for row in batch.sampled] == [(0, forks[0]), (0, forks[1]), (0, first)]
    assert not first.forks
    scheduler.postprocess(batch, [1, 2, 3])
    assert num_shared == [0, 8, 8] and not scheduler.has_unfinished()
    assert [seq.token_ids[9:] for seq in (*forks, first)] == [[1], [2], [3]]


def test_completions_that_find_no_room_wait_before_all_others():
    scheduler = make_scheduler(40, 4, 2, 100)
    first = make_sequence([1, 2, 3], 9, n=4)
    forks, other = first.forks, make_sequence([3, 2, 1], 9)
    scheduler.add(first)
    scheduler.add(other)
    batch = scheduler.schedule()
    assert batch.sequences == [first, other]
    last = make_sequence([2, 2, 2], 9)
    scheduler.add(last)
    scheduler.postprocess(batch, [1] * len(batch.sampled))
    assert set(scheduler.waiting) == {*forks, last} and scheduler.waiting[-1] is last
