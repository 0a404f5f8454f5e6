"""`logprobs`: the numbers, the texts of single tokens, parts of prompts, and streams."""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from conftest import check_refused, generate, random_prompts, token_ids
from safetensors.torch import load_file, save_file
from pieces import KINDS, PIECES, sentencepiece, text_of
from test_sampler import logprobs, make, sample
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams
from nanoengine_extras.sampling.logprobs import RowLogprobs


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_has_its_spaces_and_a_character_is_one_text(kind):
    tokenizer = sentencepiece(kind).backend_tokenizer
    for piece in PIECES:
        assert text_of(tokenizer, tokenizer.token_to_id(piece), [1]) == piece.replace("▁", " ")
    assert text_of(tokenizer, tokenizer.token_to_id("<0x41>"), []) == "A"
    assert text_of(tokenizer, 2, []) == "</s>"
    cat = tokenizer.token_to_id("▁cat")
    for letter in "é日😀":
        token_ids = [3 + byte for byte in letter.encode()]
        texts = [text_of(tokenizer, token_id, [cat, *token_ids[:place]][-4:])
                 for place, token_id in enumerate(token_ids)]
        assert texts == [""] * (len(token_ids) - 1) + [letter]
        assert text_of(tokenizer, token_ids[-1], []) == "", "its beginning is not known"
        assert text_of(tokenizer, token_ids[-1], [cat]) == ""


def test_halves_of_characters_of_byte_level_tokens(bundled):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    before = tokenizer.encode("a cat")
    for letter in "é日😀":
        token_ids = tokenizer.encode(letter)
        assert len(token_ids) > 1
        texts = [text_of(tokenizer.backend_tokenizer, token_id, (before + token_ids[:place])[-4:])
                 for place, token_id in enumerate(token_ids)]
        assert texts == [""] * (len(token_ids) - 1) + [letter]
    for word in (" the", "he", " ", "\n", "<|im_end|>"):
        (token_id,) = tokenizer.encode(word)
        assert text_of(tokenizer.backend_tokenizer, token_id, before) == word
    # a literal marker is no space
    tokenizer.add_tokens(["▁own"])
    assert text_of(tokenizer.backend_tokenizer, len(tokenizer) - 1, []) == "▁own"


@pytest.fixture(scope="module", params=KINDS)
def spaced_llm(request, make_model, tmp_path_factory):
    tokenizer = sentencepiece(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save_pretrained(folder)
    model, _ = make_model("Llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    with LLM(model, tokenizer=str(folder), dtype="float32", block_size=16,
             num_kv_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize("run_ahead", [False, True])
def test_texts_through_the_engine(spaced_llm, run_ahead, monkeypatch):
    """All entries of a position have a text of their own, and the sampled ones add up."""
    monkeypatch.setitem(vars(spaced_llm.config), "run_ahead", run_ahead)
    ids = spaced_llm.get_tokenizer().convert_tokens_to_ids(
        ["▁cat", "▁日", *(f"<0x{byte:02X}>" for byte in "日".encode()), "cat", "▁", "▁cat"])

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = ids[input_ids.shape[1] - 3]
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([wanted]), 0)

    params = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, logprobs=-1,
                            logits_processors=[force])
    (output,) = generate(spaced_llm, [[1, 5, 9]], params)
    completion = output.outputs[0]
    texts = [found[token_id].decoded_token for token_id, found in zip(ids, completion.logprobs)]
    assert texts == [" cat", " 日", "", "", "日", "cat", " ", " cat"]
    assert completion.text == "".join(texts)
    first = [found.decoded_token for found in completion.logprobs[0].values()]
    for text in (" cat", "cat", " .", "  ", " 日"):
        assert first.count(text) == 1
    # a prompt's own tokens
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = generate(spaced_llm, [[1, *ids]], params)
    found = [at[token_id].decoded_token
             for token_id, at in zip(ids, output.prompt_logprobs[1:])]
    assert found == texts


# ----------------------------------------------------------------------------- parts of a prompt


@pytest.mark.parametrize("options", [
    dict(), dict(enable_prefix_caching=False), dict(max_num_batched_tokens=9, max_num_seqs=4)])
def test_prompt_logprobs_from_a_token_on(make_llm, options):
    """The same bits, and the tokens before come from the cache: whole blocks, and one less."""
    prompt, = random_prompts([40])
    whole = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=0)
    with make_llm(num_kv_blocks=64, **options) as llm:
        (right,) = generate(llm, [prompt], whole)
        for start, cached in ((0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)):
            params = dataclasses.replace(whole, prompt_logprobs_start=start)
            (output,) = generate(llm, [prompt], params)
            first = max(1, start)
            assert output.prompt_logprobs == [None] * first + right.prompt_logprobs[first:]
            assert output.outputs == right.outputs
            assert output.num_cached_tokens == (cached if llm.config.enable_prefix_caching else 0)
            # without log-probabilities of the prompt it has no effect
            (plain,) = generate(
                llm, [prompt], SamplingParams(temperature=0, prompt_logprobs_start=start))
            assert plain.prompt_logprobs is None


@pytest.mark.needs("running.strict")
def test_a_start_that_is_not_in_the_prompt(tiny_llm):
    message = "prompt_logprobs_start=4 is not accepted: it must be at most 3, the length of the pro"
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=4)
    check_refused(message, tiny_llm.generate, [[5, 6, 7]], params)


# ------------------------------------------------------------------------------------- streams


def test_each_is_read_once_in_a_stream(make_llm, monkeypatch):
    """For all outputs together, and no output changes afterwards."""
    read, num_read = RowLogprobs.read, []
    monkeypatch.setattr(RowLogprobs, "read",
                        lambda row, *given: num_read.append(row) or read(row, *given))
    prompts = random_prompts([20, 33])
    params = SamplingParams(n=3, seed=1, max_tokens=25, ignore_eos=True, logprobs=1,
                            prompt_logprobs=1)
    with make_llm(num_kv_blocks=64, max_num_seqs=4) as llm:
        right = generate(llm, prompts, params)
        num_tokens = 2 * 3 * 25 + 19 + 32
        assert len(num_read) == num_tokens
        num_read.clear()
        outputs, copies = [], []
        for output in llm.stream(prompts, params):
            outputs.append(output)
            copies.append(copy.deepcopy(output))
        assert len(num_read) == num_tokens and outputs == copies
    last = {output.index: output for output in outputs}
    for number, each in enumerate(right):
        assert last[number].outputs == each.outputs
        assert last[number].prompt_logprobs == each.prompt_logprobs
        for completion in each.outputs:
            total = 0.0
            for token_id, at in zip(completion.token_ids, completion.logprobs):
                total += at[token_id].logprob
            assert completion.cumulative_logprob == total


def test_a_list_of_the_user_is_his_own(tiny_llm):
    """What he does to it changes no later output."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0,
                            prompt_logprobs=0)
    (right,) = generate(tiny_llm, [[5, 6, 7]], params)
    for output in tiny_llm.stream([[5, 6, 7]], params):
        if not output.finished:
            output.outputs[0].logprobs.clear()
            output.outputs[0].token_ids.append(1)
            output.prompt_logprobs.append(1)
            output.prompt_token_ids.clear()
    assert output.outputs == right.outputs and output.prompt_logprobs == right.prompt_logprobs
    assert output.prompt_token_ids == [5, 6, 7]


def test_those_of_a_prompt_while_it_is_computed(make_llm):
    """In chunks: as far as they are known."""
    prompt, = random_prompts([40])
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    with make_llm(num_kv_blocks=8, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        (right,) = generate(llm, [prompt], params)
        (request,) = llm.add([prompt], params)
        num_known = []
        while not request.is_finished:
            llm.step()
            found = request.output().prompt_logprobs
            known = [each for each in found if each]
            num_known.append(len(known))
            assert found == [None, *known, *[None] * (39 - len(known))]
            assert known == right.prompt_logprobs[1:len(known) + 1]
    assert num_known == [16, 32, 39, 39]


# ------------------------------------------------------------------------------ on logits


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    expected = logits[0].log_softmax(-1)
    seq = make(temperature=0, logprobs=2, logit_bias={0: 50.0})
    tokens, (found,) = sample(logits, [seq])
    assert tokens == [0] and list(found) == [0, 1, 3]
    assert [found[i].logprob for i in (0, 1, 3)] == pytest.approx(
        expected[[0, 1, 3]].tolist(), abs=1e-6)
    assert sample(logits, [make(temperature=0)])[1] == [None]


@pytest.mark.parametrize("token", range(5))
@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 5])
def test_ranks_are_one_to_k_with_ties_too(token, count):
    logits = torch.tensor([5.0, 5.0, 5.0, 1.0, 0.0])
    k = 5 if count == -1 else count
    # the sampled token comes before others that are equally likely
    first = logits + 0.1 * torch.nn.functional.one_hot(torch.tensor(token), 5)
    likeliest = first.double().log_softmax(-1).topk(k).indices.tolist()
    (found,) = logprobs(logits[None], torch.tensor([token]), [make(logprobs=count)])
    assert [*found] == list(dict.fromkeys([token, *likeliest]))
    assert [found[token_id].rank for token_id in likeliest] == [*range(1, k + 1)]
    assert token in likeliest or found[token].rank == {0: 3, 1: 3, 2: 3, 3: 4, 4: 5}[token]
    assert count == 0 or token > 2 or found[token].rank == 1
    assert {each.logprob for each in found.values()} <= {
        *logits.double().log_softmax(-1).tolist()}


# --------------------------------------------------------------------- through the engine


@pytest.mark.parametrize("options", [
    dict(), dict(run_ahead=True), dict(max_num_batched_tokens=40, max_num_seqs=7),
    dict(scheduling="mixed", max_num_batched_tokens=24, max_num_seqs=5),
    dict(num_kv_blocks=8, preemption_mode="swap", max_num_seqs=6), dict(num_kv_blocks=8)])
def test_prompt_logprobs_are_those_of_transformers(make_model, options):
    """In chunks, beside others, preempted, with the prompt in the prefix cache."""
    folder, model = make_model(num_hidden_layers=2)
    prompts = random_prompts([40, 1, 2, 33, 40], seed=4)
    prompts[4] = prompts[0][:35] + prompts[4][:5]
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True,
                             prompt_logprobs=count) for count in (2, 3, 0, None, -1)]
    with LLM(folder, dtype="float32", block_size=16, **options) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, params)
            for prompt, each, output in zip(prompts, params, outputs):
                if each.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                    continue
                assert output.num_cached_tokens == 0 or len(prompt) == 1
                first, *found = output.prompt_logprobs
                assert first is None and len(found) == len(prompt) - 1
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt])).logits[0]
                expected = logits.double().log_softmax(-1)
                for at, row, token_id in zip(found, expected, prompt[1:]):
                    count = 320 if each.prompt_logprobs == -1 else each.prompt_logprobs
                    likeliest = row.topk(count).indices.tolist()
                    likeliest = list(dict.fromkeys([token_id, *likeliest]))
                    assert len(at) == len(likeliest)
                    for ours, theirs in zip(at, likeliest):
                        # two that float32 can hardly tell apart may change places
                        assert ours == theirs or abs(row[ours] - row[theirs]) < 1e-5
                    assert at[token_id].rank == 1 + int((row > row[token_id]).sum())
                    for other, entry in at.items():
                        assert entry.logprob == pytest.approx(row[other].item(), abs=2e-4)
        plain = [dataclasses.replace(each, prompt_logprobs=None) for each in params]
        assert token_ids(generate(llm, prompts, plain)) == token_ids(outputs)


def test_prompt_logprobs_around_nan_do_not_depend_on_the_chunks(make_model):
    """The kernel spreads a NaN over neighbours in its step: no log-probabilities are given then."""
    folder, _ = make_model(num_hidden_layers=2, tie_word_embeddings=False)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = math.nan
    save_file(tensors, Path(folder) / "model.safetensors")
    prompts = [[5, 6, 7, 8, 9, 10, 300, 11], [5, 6, 7, 8, 9, 10, 11, 300], [5, 6, 7, 8, 9, 10, 11]]
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, n=2, seed=1)
    found = []
    for budget in (2048, 4):
        with LLM(folder, dtype="float32", max_num_batched_tokens=budget, block_size=16,
                 num_kv_blocks=16) as llm:
            *bad, good = generate(llm, prompts, params)
            assert [output.prompt_logprobs for output in bad] == [None, None]
            assert all(c.finish_reason == "error" for output in bad for c in output.outputs)
            found.append([[*each] for each in good.prompt_logprobs[1:]])
            assert not any(output.prompt_logprobs for output in llm.stream(prompts[:2], params))
    assert found[0] == found[1] and len(found[0]) == 6
