"""What an engine cannot guarantee, and policies that would hang it."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import GREEDY, check_idle, for_feature, generate, random_prompts

from nanoengine import SamplingParams
from nanoengine.observers import Feature
from nanoengine_extras.running.guards import warn_of_slower_attention

PROMPTS = random_prompts([40, 7, 33, 18, 25, 12], seed=5)


def never_decode(scheduler):
    begun = [seq for seq in scheduler.running if seq.num_uncomputed_tokens > 1]
    return scheduler.build(begun, admit=True)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("policy, prompts, message", [
    *((policy, PROMPTS, "scheduling=<function .* runs nothing, although") for policy in (
        lambda scheduler: None, lambda scheduler: scheduler.build([], admit=False),
        lambda scheduler: scheduler.build([*scheduler.running], admit=False))),
    (never_decode, PROMPTS[:1], "0 sequences are waiting"),
    # it would get wrong tokens
    (lambda scheduler: scheduler.build([*scheduler.running] * 2, admit=True), PROMPTS,
     "must give `build` each sequence once")])
def test_a_policy_that_would_hang_or_corrupt_ends_the_call(
        make_llm, policy, prompts, message, run_ahead):
    with make_llm(num_kv_blocks=40, scheduling=policy, run_ahead=run_ahead) as llm:
        with pytest.raises(RuntimeError, match=message):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        check_idle(llm)


@pytest.mark.parametrize("options", for_feature(
    "sampling.speculation", (dict(speculation="prompt-lookup"),)) + [dict()])
@pytest.mark.parametrize("place", [0, -1])
def test_edits_of_a_feature_that_does_not_exist_are_refused(make_llm, options, place):
    """A name that is spelled wrong would edit nothing. Other requests do not end."""
    class Ban(Feature):
        def enter(self, seqs, inputs):
            if len(seqs) == 2:
                seqs[place].edits += ("Bann",)

    with make_llm(num_kv_blocks=32, features=[Ban()], **options) as llm:
        good, = llm.add(PROMPTS[1], GREEDY)
        llm.step()
        with pytest.raises(ValueError, match="edits='Bann' is not accepted: .*'Ban'"):
            llm.generate(PROMPTS[1], SamplingParams(n=2), use_tqdm=False)
        while not good.is_finished:
            llm.step()
        assert good.output().outputs[0].finish_reason == "length"
        check_idle(llm)


@pytest.mark.parametrize("options, is_warned", [
    (dict(dtype="float16"), True), (dict(dtype="float16", attention_backend="gather"), False),
    (dict(kernels=False), False), (dict(), False)])
def test_slow_attention_is_told_where_it_was_not_asked_for(make_llm, caplog, options, is_warned):
    with caplog.at_level(logging.WARNING), make_llm(num_kv_blocks=8, **options) as llm:
        generate(llm, PROMPTS[1:2])
    found = [message for message in caplog.messages if message.startswith("slow attention for ")]
    assert len(found) == is_warned


@pytest.mark.parametrize("content, message", [
    ("raise ImportError('undefined symbol: of a torch')", "undefined symbol: of a torch"),
    ("import no_such_package", "No module named 'no_such_package'"),
    # flash-attn 4 is a package of this name, and has other functions
    ("", "module 'flash_attn' has no attribute 'flash_attn_with_kvcache'")])
def test_it_is_told_why_flash_attn_is_not_used(monkeypatch, caplog, tmp_path, content, message):
    (tmp_path / "flash_attn.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    for dtype, expected in ((torch.bfloat16, [f"flash-attn is not used: {message}"]),
                            (torch.float32, [])):
        caplog.clear()
        warn_of_slower_attention(SimpleNamespace(device="cuda", dtype=dtype, backend="triton"))
        assert caplog.messages == expected
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
