"""The policies of the extension, which are there to be compared with the engine's own."""

import random
import re
from collections import Counter

import pytest
from conftest import ROOT, check_blocks, check_refused
from test_scheduler import ShadowCache, make_engine, make_sequence

from nanoengine.policies import BATCHING, prefill_first
from nanoengine_extras.running.policies import MORE_VICTIMS, overtaking


def run(engine, seqs) -> list:
    """The batches in which sequences run to their end."""
    for seq in seqs:
        seq.end_tokens = {}
        engine.add(seq)
    while engine.has_unfinished():
        engine.step()
        check_blocks(engine.scheduler)
    return [batch for batch, _ in engine.scheduler.scheduled]


def test_a_static_batch_is_filled_until_its_first_decode():
    engine = make_engine(ShadowCache(4), 40, 3, 8, scheduling="static")
    seqs = [make_sequence([number] * 6, 2 + number, str(number)) for number in range(5)]
    batches = [[seq.request_id for seq in batch.sequences] for batch in run(engine, seqs)]
    first_decode = batches.index(["0", "1", "2"])
    assert {number for batch in batches[:first_decode] for number in batch} == {"0", "1", "2"}
    begin_of_second = next(i for i, batch in enumerate(batches) if "3" in batch)
    assert all({"0", "1", "2"} >= set(batch) for batch in batches[:begin_of_second])
    assert all({"3", "4"} >= set(batch) for batch in batches[begin_of_second:])


def crowded(**options):
    """A sequence that holds most of 9 blocks of 4 tokens, and two others that want some."""
    engine = make_engine(ShadowCache(4), 9, 4, 100, False, max_model_len=36,
                         kv_allocation="reserve", **options)
    seqs = [make_sequence([number + 1] * 5, most, str(number))
            for number, most in enumerate([23, 9, 9])]
    for seq in seqs:
        seq.end_tokens = {}
    return engine, seqs


@pytest.mark.parametrize("base", ["prefill-first", "mixed", prefill_first])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_head_that_does_not_fit_overtakes_in_one_step(base, run_ahead):
    engine, seqs = crowded(scheduling=overtaking(base, max_waiting=1), run_ahead=run_ahead)
    scheduler = engine.scheduler
    engine.add(seqs[0])
    engine.step()
    engine.add(seqs[1])
    engine.step()
    assert [*scheduler.waiting] == [seqs[1]], "one may wait"
    engine.add(seqs[2])
    engine.step()
    overtaken = scheduler.scheduled[-1][0]
    assert [seq for seq, *_ in overtaken.preempted] == [seqs[0]]
    assert [seq for seq, _ in overtaken.admitted] == [seqs[1], seqs[2]][:len(overtaken.admitted)]
    assert seqs[0] not in overtaken.sequences and seqs[1] in overtaken.sequences
    assert scheduler.waiting[0] is seqs[0], "to the front"
    batches = run(engine, [])
    assert sum(len(batch.preempted) for batch in batches) <= 3
    assert Counter(seq for batch in batches for seq, *_ in batch.preempted).most_common()[0][1] == 1


def test_a_static_batch_that_decodes_gives_way_to_nobody():
    engine, seqs = crowded(scheduling=overtaking("static"))
    engine.add(seqs[0])
    for _ in range(3):
        engine.step()
    assert not any(batch.preempted for batch in run(engine, seqs[1:]))


def test_overtaking_keeps_to_priorities():
    engine, seqs = crowded(scheduling=overtaking(), scheduling_policy="priority")
    seqs[0].priority = -1
    engine.add(seqs[0])
    engine.step()
    assert not any(batch.preempted for batch in run(engine, seqs[1:]))


@pytest.mark.parametrize("changes, message", [
    (dict(base="fair"), "'prefill-first', 'mixed', 'static'"), (dict(base=3), "'static'"),
    (dict(base=None), "'static'"), (dict(max_waiting=-1), "at least 0"),
    (dict(max_waiting=1.5), "integer"), (dict(max_waiting=None), "integer"),
    (dict(base=[]), "'static'")])
def test_bad_arguments_of_overtaking(changes, message):
    (name,) = changes
    check_refused(f"{name}.*{message}", overtaking, **changes)


def test_the_least_recently_run_is_the_one_that_has_paused_longest_then_the_youngest(monkeypatch):
    chosen = []

    class Checked(MORE_VICTIMS["least-recently-run"]):
        def __call__(self, running):
            victim = super().__call__(running)
            last_step = {seq: number for number, (batch, _) in enumerate(engine.scheduler.scheduled)
                         for seq in batch.sequences}
            oldest = min(last_step[seq] for seq in running)
            chosen.append(len({last_step[seq] for seq in running}))
            assert victim is [seq for seq in running if last_step[seq] == oldest][-1]
            return victim

    monkeypatch.setitem(MORE_VICTIMS, "least-recently-run", Checked)
    for seed in range(200):
        rng = random.Random(seed)
        engine = make_engine(ShadowCache(2), 12, 6, 10, preemption_victim="least-recently-run")
        run(engine, [make_sequence([number + 1] * rng.randint(1, 9), 10, str(number))
                     for number in range(8)])
    assert len(chosen) > 300 and max(chosen) > 1


def test_the_random_victim_is_the_same_in_every_run():
    running = [make_sequence([1, 2, 3], 9, str(number)) for number in range(20)]
    for number, seq in enumerate(running):
        seq.seed = number
    found = [MORE_VICTIMS["random"](running[:count]) for count in range(1, 20)]
    assert found == [MORE_VICTIMS["random"](running[:count]) for count in range(1, 20)]
    assert len(set(found)) > 2


def test_the_snippets_of_the_page_about_policies(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    # forgets what the page adds
    monkeypatch.setitem(BATCHING, "shortest-first", None)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "policies.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(snippets) == 4
    names: dict = {}
    printed = []
    for code in snippets:
        exec(code, names)
        printed += capsys.readouterr().out.splitlines()
        names["llm"].close()
    assert printed and all(f"prints `{line}`" in page for line in printed)
    assert (tmp_path / "steps.png").stat().st_size > 10_000
