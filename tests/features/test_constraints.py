"""Constraints: token ids that a model does not know, the words that are forbidden, and what all of
them do to logits."""

import dataclasses
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from feature_helpers import apply, constrain, forbidden
from conftest import check_refused, generate, random_prompts, token_ids, use_policies
from pieces import KINDS, sentencepiece
from test_sampler import make as make_row
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams
from nanoengine.sequence import Sequence
from nanoengine_extras.sampling import constraints
from nanoengine_extras.sampling.constraints import Constraint, biases_of, spellings

NONE_PENDING = torch.zeros(1, dtype=torch.int32)


def make(prompt: list[int], output=(), **params) -> Sequence:
    return Sequence("7", [*prompt, *output], len(prompt), 100, SamplingParams(**params))


# --------------------------------------------------------------------- tokens of another vocabulary


@pytest.mark.parametrize("beyond", [5, 6, 9])
@pytest.mark.parametrize("name", [
    "ends", "logit_bias", "allowed_token_ids", "repetition_penalty", "presence_penalty"])
def test_no_token_id_reaches_another_row(name, beyond):
    """Whatever ids come: those of another vocabulary are an error."""
    params = dict(logit_bias={beyond: 1.0}, allowed_token_ids=[1, beyond], repetition_penalty=2.0,
                  presence_penalty=1.0)
    first = make([1, beyond], [beyond], **{name: params[name]} if name != "ends" else {})
    first.kept["constraints"] = Constraint(
        *biases_of(first.params), ends=np.array([beyond] * (name == "ends"), int), until=math.inf)
    scores, second = torch.ones(3, 5), make([1], presence_penalty=1.0)
    with pytest.raises(IndexError):
        apply(scores, [first, second, second], NONE_PENDING)
    assert scores.tolist() == [[1.0] * 5] * 3


def test_tokens_that_only_the_tokenizer_knows_change_nothing(wide_llm):
    """Alone, and in a batch, where the next request's row lies behind."""
    biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={20: 0.001})
    expected = token_ids(generate(wide_llm, ["a", "b"], biased))
    extra = [f"<extra{number}>" for number in (*range(0, 860, 200), 336, 283, 285)]
    for options in (dict(min_tokens=2), *(dict(bad_words=[word]) for word in extra)):
        edited = SamplingParams(temperature=0, max_tokens=3, **options)
        assert token_ids(generate(wide_llm, "a", edited)) == expected[:1]
        found = generate(wide_llm, ["a", "b", "b"], [edited, biased, edited])
        assert token_ids(found) == [*expected, expected[1]]
    assert wide_llm.inputs.eos_tokens.keys() == {0, 2}
    check_refused(r"prompts\[0\]: token id 1203 is out of vocabulary", wide_llm.generate,
                  "<extra336>")


# ------------------------------------------------------------------------------------ bad words


@pytest.fixture(scope="module", params=["bundled", *KINDS])
def tokenizer(request, bundled):
    kind = request.param
    return AutoTokenizer.from_pretrained(bundled) if kind == "bundled" else sentencepiece(kind)


def test_what_tokens_spell(tokenizer):
    """After any beginning, the decoder gives the bytes that tokens spell."""
    rng = random.Random(0)
    texts, joined, starts = spellings(tokenizer, len(tokenizer) + 3)
    assert texts[len(tokenizer):] == [b""] * 3
    assert not any(texts[i] for i in tokenizer.all_special_ids)
    assert {bytes([byte]) for byte in range(256)} <= {*texts}
    assert all(joined[start:].startswith(b"\xff" + text) for start, text in zip(starts, texts))
    decode = tokenizer.backend_tokenizer.decode
    for _ in range(300):
        ids = rng.choices(range(len(tokenizer)), k=6)
        letters = [*ids, *tokenizer.encode("日", add_special_tokens=False)[-3:]]
        for tokens in (ids, letters):
            begin = tokenizer.encode("dog", add_special_tokens=False)
            spelled = b"".join(texts[token] for token in begin + tokens)
            # the decoders replace what is no character by different numbers of letters
            if "\ufffd" not in (text := decode(begin + tokens)):
                assert text.lstrip(" ") == spelled.decode().lstrip(" ")


WORDS = ["the", "a", " ", "fox", "o", " cat", "日", "é", "cat.", "Once upon", "s d", "\n"]


def test_exactly_what_completes_a_word_is_forbidden(tokenizer):
    """Against the definition, over the whole vocabulary."""
    rng = random.Random(1)
    vocab_size = len(tokenizer)
    texts, *_ = spellings(tokenizer, vocab_size)
    prompt = tokenizer.encode("o the ca", add_special_tokens=False)
    for _ in range(60):
        words = rng.sample(WORDS, k=rng.randint(1, 3))
        word = rng.choice(words).encode()
        cut = rng.randrange(len(word) + 1)
        # the beginning of a word, byte by byte, behind something else
        output = [rng.randrange(vocab_size), *(texts.index(bytes([byte])) for byte in word[:cut])]
        before = b"".join(texts[token] for token in output)
        expected = {token for token, text in enumerate(texts) if text and any(
            word in (before + text)[max(0, len(before) - len(word) + 1):]
            for word in map(str.encode, words))}
        # some tokens are taken in, one after the other; the last ones can be guesses of a copy
        for num_taken in (0, rng.randrange(len(output) + 1)):
            seq = make(prompt, bad_words=words)
            constrain(seq, [2], tokenizer, vocab_size)
            for token in output[:num_taken]:
                seq.token_ids.append(token)
                seq.kept["constraints"].take_in(seq)
            seq.token_ids = prompt + output
            found = {token for tokens in forbidden(seq) for token in tokens.tolist()}
            assert found == expected and 2 not in found and seq.needs_tokens


def num_calls(function) -> int:
    """How many functions it calls, those of C included."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_step_does_not_grow_with_the_words(bundled):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 9)))
             for _ in range(1000)]
    counts = []
    for some in (words[:20], words):
        seqs = [make([1], [5] * length, bad_words=some) for length in (2000, 2000, 8)]
        constrain(seqs[0], [2], tokenizer, len(tokenizer))
        count = num_calls(lambda seq=seqs[1]: constrain(seq, [2], tokenizer, len(tokenizer)))
        assert count < 3000, "most of it is done once for the list"
        constrain(seqs[2], [2], tokenizer, len(tokenizer))
        for seq in seqs:
            seq.kept["constraints"].take_in(seq)
        scores = torch.zeros(3, len(tokenizer))
        counts.append(num_calls(lambda seqs=seqs, scores=scores: apply(scores, seqs, NONE_PENDING)))
    assert counts[1] < 1.5 * counts[0] < 300


def test_bad_words_of_prompts_and_of_other_vocabularies(tokenizer):
    prompt = tokenizer.encode("the ca", add_special_tokens=False)
    seq = make(prompt, bad_words=["a cat"])
    constrain(seq, [], tokenizer, len(tokenizer))
    (alone,) = forbidden(seq)
    seq.num_prompt_tokens = 0
    assert len([*forbidden(seq)]) > 1 and len(alone) == 0, "the prompt does not count"
    # a special token, which has no text, by its name alone
    end = tokenizer.eos_token_id
    for word, is_there in ((tokenizer.eos_token, True), (tokenizer.eos_token[:-1], False)):
        seq = make(prompt, bad_words=[word])
        constrain(seq, [end], tokenizer, len(tokenizer))
        assert is_there == any(end in tokens for tokens in forbidden(seq))
    # nothing of it is in the vocabulary of the model
    seq = make([1], bad_words=["q"])
    constrain(seq, [], tokenizer, 3)
    assert not seq.needs_tokens and [len(tokens) for tokens in forbidden(seq)] == []


@pytest.mark.parametrize("options", [
    dict(), dict(run_ahead=True), dict(num_kv_blocks=10, block_size=16, max_model_len=128)])
def test_a_bad_word_is_in_no_text(bundled, options):
    """Whatever tokens spell it: single letters, its own, halves of letters."""
    options = dict(dtype="float32", num_kv_blocks=256) | options
    with LLM(bundled, **options) as llm:
        letters = [ids[0] for ids in map(llm.get_tokenizer().encode, "fox the日a")]
        params = []
        for words in (["the"], ["fox", " a"], [" "], ["was a", "e"], ["日"]):
            for allowed in (None, letters + llm.get_tokenizer().encode("日")):
                params.append(SamplingParams(
                    n=5, seed=3, max_tokens=30, temperature=1.5, bad_words=words,
                    allowed_token_ids=allowed, ignore_eos=True, min_tokens=3))
        for output, each in zip(generate(llm, ["Once upon a time"] * len(params), params), params):
            for completion in output.outputs:
                assert not any(word in completion.text for word in each.bad_words)
                assert len(completion.token_ids) == 30
        check_refused(
            "bad_words", lambda: llm.generate("a", SamplingParams(bad_words=["\ud800"])))


# ------------------------------------------------------------------------- biases and penalties


def test_biases_are_made_once_for_a_request(tiny_llm, monkeypatch):
    made = []
    biases_of = constraints.biases_of
    monkeypatch.setattr(constraints, "biases_of", lambda p: made.append(p) or biases_of(p))
    params = SamplingParams(n=3, seed=1, max_tokens=9, logit_bias={5: 2.0, 6: 1.0},
                            allowed_token_ids=[5, 6, 7, 8])
    outputs = generate(tiny_llm, [[1, 2], [3]], params)
    assert len(made) == 2
    assert {id for each in outputs for c in each.outputs for id in c.token_ids} <= {5, 6, 7, 8}


def penalized(seq: Sequence, last_sampled: torch.Tensor) -> torch.Tensor:
    scores = torch.arange(-10.0, 10.0)[None].clone()
    constraints.penalize(scores, [seq], last_sampled)
    return scores[0]


def penalized_token_by_token(p: SamplingParams, prompt: list[int], output: list[int]):
    """The same by the definitions."""
    given, counts = {*prompt, *output}, Counter(output)
    scores = torch.arange(-10.0, 10.0)
    for token in range(20):
        if token in (given if p.repetition_penalty != 1 else ()):
            is_negative = scores[token] < 0
            scores[token] *= p.repetition_penalty if is_negative else 1 / p.repetition_penalty
        scores[token] -= p.presence_penalty * (counts[token] > 0)
        scores[token] -= p.frequency_penalty * counts[token]
    return scores


def test_penalties_take_in_each_token_once():
    """The same as if all were counted anew, whatever was taken in before; pending tokens, and
    guesses, are not."""
    rng = random.Random(0)
    for _ in range(200):
        params = dict(repetition_penalty=rng.choice([1.0, 1.3]),
                      presence_penalty=rng.choice([0.0, 0.7]),
                      frequency_penalty=rng.choice([0.0, -0.4]))
        prompt, output, guesses = (rng.choices(range(20), k=rng.randint(1, 9)) for _ in range(3))
        last = torch.tensor(rng.choices(range(20), k=2), dtype=torch.int32)
        seq = make(prompt, **params)
        seq.kept["constraints"] = constraint = Constraint(*biases_of(seq.params))
        for token in output:
            seq.token_ids.append(token)
            if rng.random() < 0.7:
                constraint.take_in(seq)
                assert constraint.new_tokens(seq) == ([], [])
        for more in ([], guesses, [-1], [-2], [*guesses, -2]):
            longer, fresh = (make(prompt, output + more, **params) for _ in range(2))
            longer.kept["constraints"] = constraint
            found = penalized(longer, last)
            assert torch.equal(found, penalized(fresh, last))
            known = [token if token >= 0 else int(last[-1 - token]) for token in output + more]
            torch.testing.assert_close(
                found, penalized_token_by_token(seq.params, prompt, known))


def test_a_step_looks_at_new_tokens_only(tiny_llm, monkeypatch):
    """Of a long output with penalties."""
    looked_at = []
    new_tokens = Constraint.new_tokens
    monkeypatch.setattr(Constraint, "new_tokens", lambda constraint, seq: looked_at.append(
        len(new_tokens(constraint, seq)[0])) or new_tokens(constraint, seq))
    prompts = random_prompts([30, 12])
    params = SamplingParams(n=2, seed=1, max_tokens=90, ignore_eos=True, repetition_penalty=1.2,
                            frequency_penalty=0.5)
    for run_ahead in (False, True):
        use_policies(tiny_llm, run_ahead=run_ahead)
        looked_at.clear()
        right = token_ids(generate(tiny_llm, prompts, params))
        # at first the prompts, up to three times for each completion; then a token, or none
        assert max(looked_at) == 31 and len(looked_at) > 300
        assert sum(count > 1 for count in looked_at) <= 3 * 4
        alone = [token_ids(generate(tiny_llm, prompt, dataclasses.replace(params, n=1)))
                 for prompt in prompts]
        assert alone == [[ids] for ids in right]


# ------------------------------------------------------------------------------- on logits


def edit(logits: list[float], **options) -> list[float]:
    seq = make_row(**options)
    plain = make_row()
    for seqs in ([seq], [plain, seq, plain]):
        scores = torch.tensor([logits] * len(seqs))
        apply(scores, seqs, NONE_PENDING)
        assert all(row.tolist() == logits for row, each in zip(scores, seqs) if each is plain)
    return scores[1].tolist()


def test_bias_allowed_tokens_and_min_tokens():
    inf = math.inf
    assert edit([0.0, 1.0, 2.0], logit_bias={1: 4.5, 2: -1.0}) == [0.0, 5.5, 1.0]
    assert edit([0.0, 1.0, 2.0], allowed_token_ids=[0, 2]) == [0.0, -inf, 2.0]
    # the last end token is none of the model's
    masked = dict(min_tokens=2, end_tokens=[2, 10**6])
    assert not make_row(**masked).needs_tokens
    assert edit([0.0, 1.0, 2.0], output=[1], **masked) == [0.0, 1.0, -inf]
    assert edit([0.0, 1.0, 2.0], output=[1, 1], **masked) == [0.0, 1.0, 2.0]
