"""film.py of the lab: what is recorded, the films in docs/, and their page in a
real browser."""

import json
import random
import re
import shlex
import sys
import time
from collections import Counter

import pytest
from browser import CHROMIUM, Browser
from conftest import ROOT, check_blocks

sys.path.insert(0, str(ROOT))

from nanoengine_extras.tools.lab import film, simulate  # noqa: E402

COMMANDS = re.findall(
    r"python -m nanoengine_extras\.tools\.lab\.film (.* -o (docs/films/.*\.html))",
    (ROOT / "docs" / "policies.md").read_text())
KEPT = [ROOT / file for _, file in COMMANDS]


def read(file) -> dict:
    return json.loads(re.search(r'id="film">(.*?)</script>', file.read_text())[1])


# ------------------------------------------------------------------------------- recording


@pytest.fixture
def engines(monkeypatch) -> list:
    """The engines that are filmed. The blocks of each are checked at every frame."""
    found = []
    make, frame_of = simulate.make_engine, film.frame_of

    def checked(engine, batch):
        check_blocks(engine.scheduler)
        return frame_of(engine, batch)

    monkeypatch.setattr(simulate, "make_engine", lambda *args, **options: (
        found.append(make(*args, **options)) or found[-1]))
    monkeypatch.setattr(film, "frame_of", checked)
    return found


def random_flags(seed: int) -> list:
    """A comparison and a workload of which many requests have to give way."""
    rng = random.Random(seed)
    comparison = ("preemption", "batching", "victims", "memory", "prefix")[seed % 5]
    return [comparison, "--seed", seed, "--num-seqs", rng.randint(2, 12), "--n", rng.randint(1, 4),
            "--gap", rng.choice((0, 0.5, 1, 3)), "--num-kv-blocks", rng.randint(12, 24),
            "--max-num-batched-tokens", rng.randint(6, 24), "--prefix-length", rng.randint(0, 9),
            "--true-lengths", rng.choice((0.5, 1)), "--scheduling",
            rng.choice(("mixed", "prefill-first"))]


def check_frames(variant: dict) -> None:
    """Each block is free or in a table, a sequence goes on where it was, and at the end all is
    free."""
    computed: dict[str, int] = {}
    for frame in variant["frames"]:
        tables = {key: table for key, _, _, table in frame["running"]}
        used = {block for table in tables.values() for block in table}
        assert sorted([*used, *frame["free"]]) == [*range(1, variant["num_kv_blocks"] + 1)]
        assert all(len(table) == len(set(table)) > 0 for table in tables.values())
        starts = {key: start for key, _, start, _ in frame["running"]}
        sequences, begin, counts, preempted = frame["batch"]
        assert sum(counts) <= variant["max_num_batched_tokens"]
        assert [starts[key] for key in sequences] == begin
        for key, mode in preempted:
            assert key not in sequences and mode in ("swap", "recompute")
            assert bool(dict((row[0], row[4]) for row in frame["waiting"])[key]) == (mode == "swap")
        for key, num_tokens, start, table in frame["running"]:
            assert start < num_tokens and computed.get(key, start) == start
            assert key not in sequences or num_tokens <= len(table) * variant["block_size"]
        # whoever is not here has been preempted or is finished
        computed = starts | {key: start + count
                             for key, start, count in zip(sequences, begin, counts)}
    last = variant["frames"][-1]
    assert not last["running"] and not last["waiting"] and not last["batch"][0]
    assert len(last["free"]) == variant["num_kv_blocks"]


@pytest.mark.parametrize("seed", range(10))
def test_recorded_frames_are_consistent(engines, tmp_path, seed):
    film.main([*map(str, random_flags(seed)), "-o", str(tmp_path / "film.html")])
    variants = read(tmp_path / "film.html")["variants"]
    assert len(engines) == len(variants) > 1
    for engine, variant in zip(engines, variants.values()):
        check_frames(variant)
        counters = engine.features["Metrics"].counters
        assert counters["num_steps"] == len(variant["frames"]) - 1
        assert counters["computed_tokens"] == sum(
            sum(frame["batch"][2]) for frame in variant["frames"])
        assert counters["num_preemptions"] == sum(
            len(frame["batch"][3]) for frame in variant["frames"])


def test_a_lecture_sees_everything():
    """The kept film of preemption is short, and has all that a scheduler does."""
    variants = read(ROOT / "docs" / "films" / "preemption.html")["variants"]
    seen: Counter = Counter()
    for variant in variants.values():
        assert len(variant["frames"]) < 60
        known: dict[str, list[int]] = {}
        hashes: dict[str, int] = {}
        for frame in variant["frames"]:
            running = {row[0]: row for row in frame["running"]}
            sequences, starts, counts, preempted = frame["batch"]
            left = [running[key][1] - start for key, start in zip(sequences, starts)]
            seen["chunk beside decodes"] += 1 in left and left != counts
            seen.update(kind for kind, pairs in frame["copies"].items() if pairs)
            seen.update(mode for _, mode in preempted)
            # more than the common prefix of two blocks
            seen["way back through the cache"] += any(
                key in known and running[key][2] > 8 and not frame["copies"]["swap_in"]
                for key in sequences if known.get(key) == [])
            known = {row[0]: [] if row[0] not in running else row[3]
                     for row in (*frame["waiting"], *frame["running"])}
            seen["eviction"] += any(frame["hashes"].get(block) != found
                                    for block, found in hashes.items())
            hashes = frame["hashes"]
    assert all(seen[event] for event in (
        "chunk beside decodes", "copy_on_write", "swap_out", "swap_in", "recompute", "swap",
        "way back through the cache", "eviction")), seen


@pytest.mark.parametrize("command, file", COMMANDS)
def test_kept_films_are_what_their_commands_write(tmp_path, monkeypatch, command, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    film.main(shlex.split(command))
    assert len(COMMANDS) == 2 and (ROOT / file).stat().st_size < 300_000
    is_same = (tmp_path / file).read_text() == (ROOT / file).read_text()
    assert is_same, f"write it again: python -m nanoengine_extras.tools.lab.film {command}"


# ------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    browser = Browser(str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


@pytest.fixture
def page(browser):
    """A function that opens a film; a test fails if its page has thrown or logged an error."""
    yield lambda file, place="": browser.open(file.as_uri() + place)
    assert not browser.errors


def picture(browser) -> str:
    return browser.evaluate("document.querySelector('main').innerHTML")


def step(browser) -> str:
    return browser.evaluate("document.getElementById('step').textContent")


def states(browser, pane: int) -> set[str]:
    """The states of all blocks of a pane."""
    return set(browser.evaluate(
        f"[...document.querySelectorAll('.pane')][{pane}].querySelector('.device')"
        ".innerText && [...[...document.querySelectorAll('.pane')]"
        f"[{pane}].querySelectorAll('.device .block')].map(block => block.dataset.state)"))


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_stepping_changes_the_picture(browser, page, file):
    page(file)
    num_steps = max(len(variant["frames"]) for variant in
                    [*read(file)["variants"].values()][:2]) - 1
    assert step(browser) == f"step 1 of {num_steps}"
    seen = [picture(browser)]
    shots = [browser.screenshot()]
    for drive in (lambda: browser.press("ArrowRight"), lambda: browser.click("#next"),
                  lambda: browser.click("#last"), lambda: browser.press("ArrowLeft"),
                  lambda: browser.click(".timeline button:nth-child(9)")):
        drive()
        seen.append(picture(browser))
        shots.append(browser.screenshot())
    assert len(set(seen)) == len(seen) and len(set(shots)) == len(shots)
    assert step(browser) == f"step 9 of {num_steps}"
    browser.press("Home")
    assert picture(browser) == seen[0]
    browser.evaluate("controls.time.value = 3; controls.time.dispatchEvent(new Event('input'))")
    assert picture(browser) == seen[2], "dragging"


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_every_frame_is_drawn_and_the_last_shows_everything_free(browser, page, file):
    page(file)
    for name, variant in read(file)["variants"].items():
        for number, frame in enumerate(variant["frames"], 1):
            browser.evaluate(f"panes[0].name = '{name}'; show({number} - 1)")
            text = browser.evaluate("document.querySelector('.pane').innerText")
            used = variant["num_kv_blocks"] - len(frame["free"])
            assert f"{used} used" in text and "undefined" not in text and "NaN" not in text
            assert ("preempted (" in text) == bool(frame["batch"][3])
        assert states(browser, 0) <= {"cached", "blank"} and "blocks are free" in text


def test_switching_the_policy_changes_the_picture(browser, page):
    page(ROOT / "docs" / "films" / "preemption.html", "#step=12")
    seen = [picture(browser)]
    for name in ("reserve", "recompute"):
        browser.evaluate(f"panes[1].select.value = '{name}';"
                         "panes[1].select.dispatchEvent(new Event('change'))")
        seen.append(picture(browser))
        assert step(browser).startswith("step 12 ")
    assert len(set(seen)) == 3
    left, right = browser.evaluate("panes.map(pane => pane.body.innerHTML)")
    assert left == right, "the same policy on both sides"


def test_playing_goes_on_and_pauses(browser, page):
    page(KEPT[0])
    browser.evaluate("controls.speed.value = '350'")
    browser.press(" ")
    limit = time.monotonic() + 60
    while step(browser).startswith("step 1 ") and time.monotonic() < limit:
        time.sleep(0.05)
    browser.press(" ")
    assert not step(browser).startswith("step 1 ")
    assert browser.evaluate("timer === null && controls.play.textContent.includes('Play')")


def test_the_page_counts_as_the_scheduler_does(browser, page, engines, tmp_path):
    for seed in range(5):
        film.main([*map(str, random_flags(seed)), "-o", str(tmp_path / "film.html")])
        page(tmp_path / "film.html")
        counted = browser.evaluate(
            "names.map(name => film.variants[name].frames.at(-1).counters)")
        for found in counted:
            counters = engines.pop(0).features["Metrics"].counters
            assert found == {"computed": counters["computed_tokens"],
                             "again": counters["recomputed_tokens"],
                             "found": counters["prefix_cache_hits"],
                             "preempted": counters["num_preemptions"]}, seed


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (800, "dark"), (400, "light")])
def test_nothing_is_wider_than_the_window(browser, page, width, scheme):
    browser.resize(width, 900, scheme)
    page(KEPT[0], "#step=13")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(22, 24, 27)") == (scheme == "dark")
    browser.resize(1280, 900)
