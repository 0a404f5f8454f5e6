"""`LLM.score`: the log-probabilities of continuations, from the prefix cache and without it."""

import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, check_fault, check_idle, check_refused, for_feature, random_prompts
from safetensors.torch import load_file, save_file
from pieces import KINDS, sentencepiece
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams
from nanoengine_extras.tools import scores
from nanoengine_extras.tools.scores import Score, tokens_after

COMMON, OTHER = random_prompts([50, 33], seed=1)
ENDS = random_prompts([1, 1, 2, 7, 30, 16], seed=2)
EXACT = [
    dict(), dict(run_ahead=True), dict(enable_prefix_caching=False), dict(scheduling="mixed"),
    dict(max_num_batched_tokens=24, max_num_seqs=5), dict(speculation="prompt-lookup"),
    dict(scheduling="mixed", max_num_batched_tokens=9, max_num_seqs=4)]
CLOSE = [dict(attention_backend="gather"), dict(kernels=False),
         dict(tensor_parallel_size=2, max_num_seqs=8)]


def whole_texts(llm: LLM, prompt: list[int], ends: list[list[int]]) -> list[list[float]]:
    """The same from `prompt_logprobs` of whole texts, which read no cache."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([prompt + end for end in ends], params, use_tqdm=False)
    assert not any(output.num_cached_tokens for output in outputs)
    return [[at[token_id].logprob for token_id, at in zip(
        end, output.prompt_logprobs[len(prompt):], strict=True)]
        for end, output in zip(ends, outputs)]


def numbers_in(groups: list[list[list[float]]]) -> list[float]:
    return [number for group in groups for logprobs in group for number in logprobs]


@pytest.fixture(scope="module")
def expected(make_llm) -> list[list[list[float]]]:
    with make_llm(num_kv_blocks=64) as llm:
        return [whole_texts(llm, prompt, ENDS) for prompt in (COMMON, OTHER)]


def run(llm: LLM) -> list[list[list[float]]]:
    found = llm.score([COMMON, OTHER], [ENDS, ENDS], use_tqdm=False)
    assert [[score.token_ids for score in group] for group in found] == [ENDS] * 2
    for score in found[0] + found[1]:
        assert score.cumulative_logprob == sum(score.logprobs)
        assert score.mean == score.cumulative_logprob / len(score.token_ids)
    return [[score.logprobs for score in group] for group in found]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("options", [*EXACT, *CLOSE])
def test_scores_are_those_of_whole_texts(make_llm, expected, options):
    """Bit for bit, but for other kernels and on two ranks."""
    with make_llm(**dict(num_kv_blocks=64) | options) as llm:
        # the second time, all is in the cache
        for _ in range(2):
            found = run(llm)
            if options in EXACT:
                assert found == expected
            assert numbers_in(found) == pytest.approx(numbers_in(expected), abs=1e-4)
        check_idle(llm)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_scores_of_preempted_prompts(make_llm, expected, mode):
    """Others grow beside them, and take their blocks in the middle of a prompt."""
    params = SamplingParams(max_tokens=99, ignore_eos=True, seed=1)
    with make_llm(num_kv_blocks=8, max_num_seqs=7, max_num_batched_tokens=9, scheduling="mixed",
                  preemption_mode=mode, swap_space=0.01, trace=True) as llm:
        llm.add(random_prompts([9, 3, 12, 6], seed=3), params)
        assert run(llm) == expected
        preempted = [seq for record in llm.trace for seq, *_ in record.batch.preempted]
        assert any("scorer" in seq.kept for seq in preempted)
        assert llm.metrics()[f"{mode}_preemptions"]
        # the others have ended, too
        check_idle(llm)


def test_the_common_prompt_is_computed_once(make_llm):
    """In one call; the last token of a text is never computed."""
    ends = random_prompts([1, 2, 5, 18], seed=4)
    for options in (dict(), dict(enable_prefix_caching=False)):
        with make_llm(num_kv_blocks=64, **options) as llm:
            counts = []
            for _ in range(2):
                before = llm.metrics()["computed_tokens"]
                llm.score(COMMON, ends, use_tqdm=False)
                counts.append(llm.metrics()["computed_tokens"] - before)
        # of 50 tokens, blocks of 16 have 48
        rest = sum(2 + len(end) - 1 for end in ends)
        assert counts == ([4 * 48 + rest] * 2 if options else [48 + rest, rest])


def test_the_first_scored_token_needs_the_one_before(make_llm):
    """A prompt of whole blocks: the last one is computed again, for its last token."""
    prompt = COMMON[:32]
    with make_llm(num_kv_blocks=64) as llm:
        wanted = whole_texts(llm, prompt, ENDS)
        before = llm.metrics()["computed_tokens"]
        found = llm.score(prompt, ENDS, use_tqdm=False)
        assert [score.logprobs for score in found] == wanted
        computed = llm.metrics()["computed_tokens"] - before
        assert computed == sum(16 + len(end) - 1 for end in ENDS)


def test_a_text_of_max_model_len(make_llm):
    with make_llm(num_kv_blocks=8) as longer:
        text, = random_prompts([65], seed=5)
        right, = whole_texts(longer, text[:1], [text[1:]])
    # there are no more blocks, either
    with make_llm(num_kv_blocks=4) as llm:
        assert llm.inputs.max_model_len == 64
        for start in (1, 17, 63):
            score, = llm.score(text[:start], [text[start:64]], use_tqdm=False)
            assert score.logprobs == right[start - 1:63]
            with pytest.raises(ValueError, match=r"continuations\[0\] has 65 tokens with its "
                               r"prompt: it must have at most max_model_len=64$"):
                llm.score(text[:start], [text[start:]])
        check_refused(r"the prompt of continuations has 64 tokens", llm.score, text[:64], [[5]])


def test_not_a_number(make_model):
    """A prompt after which the logits are not finite; its neighbours lose nothing."""
    folder, _ = make_model(num_hidden_layers=2)
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=64) as llm:
        right = llm.score([5, 6], [[7, 8], [300]], use_tqdm=False)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.embed_tokens.weight"][300, 5] = math.nan
    save_file(tensors, Path(folder) / "model.safetensors")
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=64) as llm:
        good, bad = llm.score([[5, 6], [5, 300]], [[[7, 8]], [[7, 8], [9]]], use_tqdm=False)
        assert good[0].logprobs[0] == right[0].logprobs[0]
        assert [len(score.logprobs) for score in bad] == [2, 1]
        assert all(math.isnan(number) for score in bad for number in score.logprobs)
        assert math.isnan(bad[0].cumulative_logprob) and math.isnan(bad[0].mean)
        # the last token is not computed
        assert not math.isnan(llm.score([5, 6], [[300]], use_tqdm=False)[0].mean)
        check_idle(llm)


# ------------------------------------------------------------------------------------------ texts


def test_a_choice_in_the_middle_of_a_token(llm):
    """All tokens of a choice count, after the prompt's own tokens."""
    encode = llm.get_tokenizer().encode
    for prompt, choices in (("The fo", ["x", "od", "ur", " x"]),
                            ("Once upon a ti", ["ger", "me", "x"])):
        before = encode(prompt)
        assert encode(prompt + choices[0])[:len(before)] != before
        found = llm.score(prompt, choices, use_tqdm=False)
        decode = llm.get_tokenizer().decode
        assert [decode(score.token_ids) for score in found] == choices
        by_ids = llm.score(before, [score.token_ids for score in found], use_tqdm=False)
        assert found == by_ids and all(score.cumulative_logprob < 0 for score in found)
        assert found == [llm.score(prompt, [choice], use_tqdm=False)[0] for choice in choices]


@pytest.mark.parametrize("kind", ["bundled", *KINDS])
def test_tokens_after_a_text(bundled, kind):
    """They spell the text, without a space at its beginning, and are those of the whole text if
    these begin with those of the text before."""
    tokenizer = (AutoTokenizer.from_pretrained(bundled) if kind == "bundled"
                 else sentencepiece(kind))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    decode = tokenizer.backend_tokenizer.decode
    for before in ("a cat", "the ca", "a", "\n", "日", "c"):
        for text in ("t", " cat", "at.", "cat", "\ncat", "日 cat", " "):
            found = tokens_after(tokenizer, before, text)
            assert decode(encode(before) + found) == decode(encode(before + text))
            assert found, text
            if encode(before + text)[:len(encode(before))] == encode(before):
                assert encode(before) + found == encode(before + text)
        assert tokens_after(tokenizer, before, "") == []


def test_forms(llm):
    text, ids = "The fox", llm.get_tokenizer().encode("The fox")
    one, two = llm.score(text, [" a", " b c"], use_tqdm=False)
    assert isinstance(one, Score) and len(two.token_ids) == len(two.logprobs) == 2
    for prompt in (ids, {"prompt": text}, {"prompt_token_ids": ids}, tuple(ids)):
        assert llm.score(prompt, (" a", " b c"), use_tqdm=False) == [one, two]
    assert llm.score([text, ids], [[" b c"], [two.token_ids, " a"]], use_tqdm=False) == [
        [two], [two, one]]
    assert llm.score(text, []) == [] and llm.score([text, ids], [[], [" a"]]) == [[], [one]]
    assert llm.score([], []) == []
    # a special token can be a continuation
    end = llm.get_tokenizer().eos_token_id
    assert llm.score(text, [[end]], use_tqdm=False)[0].token_ids == [end]


@pytest.mark.parametrize("prompts, continuations, message", [
    ("The", [" a", ""], r"continuations\[1\]='' is not accepted: .* adds a token to its prompt$"),
    ("The", [[]], r"continuations\[0\]=\[\] is not accepted: .* adds a token to its prompt$"),
    (["The", "A"], [["b"], ["b", ""]], r"continuations\[1\]\[1\]='' is not accepted"),
    ("The", "abc", "continuations='abc' is not accepted: it must be a list of strings or lists of"),
    ("The", [5], r"continuations\[0\]=5 is not accepted: it must be a string or a list of token"),
    ("The", [["a"]], r"continuations\[0\]=\['a'\] is not accepted"),
    ("The", [[7], [True, 7]], r"continuations\[1\]=\[True, 7\] is not accepted"),
    *(("The", [each], r"continuations\[0\]=.* is not accepted")
      for each in (None, b"a", {7}, {7: 8}, torch.tensor([7]))),
    ("The", None, "continuations=None is not accepted"),
    (["The"], [], r"continuations=\[\] is not accepted: .*, for each prompt$"),
    (["The"], ["a"], r"continuations=\['a'\] is not accepted: .*, for each prompt$"),
    ("The", [[5], [867]], r"continuations\[1\]: token id 867 is out of vocabulary, 0 to 866"),
    ("The", [[-1]], r"continuations\[0\]: token id -1 is out of vocabulary"),
    ("", ["a"], "the prompt of continuations has 0 tokens"),
    ("The", ["\ud800"], r"continuations\[0\]="),
    *for_feature("running.strict", (5, ["a"], "prompts=5 is not accepted"),
                 (None, ["a"], "prompts=None is not accepted"))])
def test_what_is_refused(llm, prompts, continuations, message):
    before = llm.metrics()
    check_refused(message, llm.score, prompts, continuations)
    assert llm.metrics() == before, "nothing has run"


def test_texts_need_a_tokenizer(make_llm):
    with make_llm(num_kv_blocks=8) as llm:
        check_refused("there is no tokenizer", llm.score, [5, 6], ["a"])
        assert len(llm.score([5, 6], [[7]], use_tqdm=False)) == 1


def test_ranks(llm):
    """1 for what greedy sampling takes."""
    greedy, = llm.generate("12 + 34 =", SamplingParams(temperature=0), use_tqdm=False)
    right, wrong = llm.score("12 + 34 =", [greedy.outputs[0].text, " 45"], use_tqdm=False)
    assert {*right.ranks} == {1} and len(right.ranks) == len(right.token_ids)
    assert wrong.ranks[-1] > 1


def test_what_greedy_sampling_takes_has_rank_1_if_others_are_as_likely(make_model, tmp_path):
    """As is usual in bfloat16. Here, each token has a twin."""
    folder, model = make_model(num_hidden_layers=2, tie_word_embeddings=False)
    weight = model.lm_head.weight.data
    weight[160:] = weight[:160]
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, dtype="float32", block_size=16, num_kv_blocks=64) as llm:
        greedy, = llm.generate(COMMON, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        score, = llm.score(COMMON, [greedy.outputs[0].token_ids], use_tqdm=False)
    assert score.ranks == [1] * 9


# ------------------------------------------------------------------------- python -m nanoengine


def test_the_command(bundled, capsys):
    """The likeliest comes first; --mean divides by the number of tokens."""
    for flags in ([], ["--mean"]):
        scores.main(["47 + 85 =", " 131", " 132", " 122", "--model", bundled, *flags])
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("= ")[1] for line in lines][0] == "132" and len(lines) == 3
        values = [float(line.split()[0]) for line in lines]
        shares = [float(line.split()[1].rstrip("%")) for line in lines]
        assert values == sorted(values, reverse=True) and values[0] <= 0
        assert abs(sum(shares) - 100) < 0.2 and shares == sorted(shares, reverse=True)
    with LLM(bundled) as llm:
        means = [each.mean for each in llm.score("47 + 85 =", [" 131", " 132", " 122"], False)]
    assert values == pytest.approx(sorted(means, reverse=True), abs=1e-3)


@pytest.mark.parametrize("arguments, message", [
    ([], "required: prompt, choices, --model"), (["a", " b"], "required: --model"),
    (["a", "", "--model", "models/tiny-qwen3"], "one that adds a token"),
    (["", "a", "--model", "models/tiny-qwen3"], "has 0 tokens"),
    (["a", " b", "--model", "/no/such"], "model='/no/such' is not accepted")])
def test_faults_of_a_user_are_one_sentence(capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    check_fault(capsys, scores.main, "score", arguments, message)
