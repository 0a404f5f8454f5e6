"""Policies from outside: a function or a table entry of one's own."""

from collections import Counter

import pytest
from conftest import (
    GREEDY, check_idle, check_refused, for_feature, generate, policies_of, random_prompts,
    token_ids)

from nanoengine.policies import TABLES

PROMPTS = random_prompts([40, 7, 33, 18, 25, 12], seed=5)

FEW_BLOCKS = dict(num_kv_blocks=9, max_num_seqs=6)

OPTIONS = ["scheduling", "preemption_victim", "kv_allocation"]


@pytest.fixture(scope="module")
def expected(make_llm):
    with make_llm() as llm:
        return token_ids(generate(llm, PROMPTS))


class Own:
    """A policy of each kind, as a user might write it, and how often it was asked."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def scheduling(self, scheduler):
        """One prompt at a time, between two decodes."""
        self.calls["scheduling"] += 1
        waiting = scheduler.waiting
        later = [waiting.pop() for _ in range(len(waiting) - 1)]
        batch = scheduler.build([*scheduler.running], admit=True)
        waiting.extend(reversed(later))
        return batch

    def preemption_victim(self, running):
        self.calls["preemption_victim"] += 1
        return running[0]

    def kv_allocation(self, seq, max_model_len):
        self.calls["kv_allocation"] += 1
        return seq.num_prompt_tokens + 4


@pytest.mark.parametrize("name, is_in_table", [
    *((name, False) for name in OPTIONS), *((name, True) for name in OPTIONS[:2])])
def test_a_policy_of_ones_own(make_llm, expected, monkeypatch, name, is_in_table):
    """As a function, and as an entry of a table."""
    own = Own()
    policy = getattr(own, name)
    if is_in_table:
        monkeypatch.setitem(TABLES[name], "own", policy)
        policy = "own"
    with make_llm(**FEW_BLOCKS, **{name: policy}) as llm:
        assert token_ids(generate(llm, PROMPTS)) == expected
        assert llm.metrics()["num_preemptions"] > 0
    assert own.calls[name] > 0


@pytest.mark.parametrize("num_kv_blocks", [9, 100])
def test_candidates_that_wait_are_left_out(make_llm, expected, num_kv_blocks):
    def all_of_them(scheduler):
        return scheduler.build([*scheduler.waiting, *scheduler.running], admit=True)

    with make_llm(num_kv_blocks=num_kv_blocks, max_num_seqs=4, scheduling=all_of_them) as llm:
        assert token_ids(generate(llm, PROMPTS)) == expected
        check_idle(llm)


@pytest.mark.parametrize("num_tokens", [10**6, 10**12])
def test_an_allocation_of_more_than_there_is_reserves_all(make_llm, expected, num_tokens):
    with make_llm(**FEW_BLOCKS, kv_allocation=lambda seq, max_model_len: num_tokens) as llm:
        assert token_ids(generate(llm, PROMPTS)) == expected
        assert llm.metrics()["mean_batch"] == 1 and llm.metrics()["num_preemptions"] == 0


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", ["fair", 7, ["youngest"], {}, ("mixed",), b"mixed"])
def test_what_is_neither_a_name_nor_a_function(make_llm, name, value):
    known = "".join(f"(?=.*{each!r})" for each in policies_of(name))
    check_refused(f"(?s){name}{known}.*or a function", make_llm, **{name: value})


@pytest.mark.parametrize("name, policy, message", [
    *(("preemption_victim", lambda running, victim=victim: victim, "must return a running")
      for victim in (None, "youngest", 3)),
    # when a request is made, before a step, and although no other waits
    *for_feature("running.guards", *(
        ("kv_allocation", lambda seq, max_model_len, value=value: value,
         "one that returns an int") for value in (1.5, None, "5"))),
    *for_feature("running.guards", *(
        ("scheduling_policy", lambda seq, rank=rank: rank, "one whose ranks can be compared")
        for rank in (None, {}, 1j)))])
def test_what_a_function_must_not_return_is_named(make_llm, name, policy, message):
    with make_llm(**FEW_BLOCKS, **{name: policy}) as llm:
        prompts = PROMPTS[:1] if name == "scheduling_policy" else PROMPTS
        check_refused(f"{name}=.*{message}", llm.generate, prompts, GREEDY, use_tqdm=False)
        check_idle(llm)
