"""`logprobs`: the texts of single tokens, parts of prompts, and streams.

The numbers are tested in test_llm.py and test_model.py.
"""

import copy
import dataclasses

import pytest
import torch
from conftest import generate, random_prompts
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams
from nanoengine_extensions.logprobs import RowLogprobs, text_of

PIECES = ["▁", "▁▁", "▁cat", "cat", "▁.", ".", "日", "▁日", "\n", "▁<b>", "a▁b"]


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with pieces, and a token for each byte, as Llama 2 or Mistral has."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokenizer = Tokenizer(models.BPE(
        {word: place for place, word in enumerate(words)}, [], unk_token="<unk>",
        byte_fallback=True))
    if kind == "Metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([
            decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence([
            normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if kind == "stripped" else []
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = ["Metaspace", "stripped", "whole"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_has_its_spaces(kind):
    tokenizer = sentencepiece(kind).backend_tokenizer
    for piece in PIECES:
        assert text_of(tokenizer, tokenizer.token_to_id(piece), [1]) == piece.replace("▁", " ")
    assert text_of(tokenizer, tokenizer.token_to_id("<0x41>"), []) == "A"
    assert text_of(tokenizer, 2, []) == "</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_character(kind):
    tokenizer = sentencepiece(kind).backend_tokenizer
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


def test_a_literal_marker_is_no_space(bundled):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    tokenizer.add_tokens(["▁own"])
    assert text_of(tokenizer.backend_tokenizer, len(tokenizer) - 1, []) == "▁own"


@pytest.fixture(scope="module", params=KINDS)
def llm(request, make_model, tmp_path_factory):
    tokenizer = sentencepiece(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save_pretrained(folder)
    model, _ = make_model("Llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    with LLM(model, tokenizer=str(folder), dtype="float32", num_kv_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize("run_ahead", [False, True])
def test_texts_through_the_engine(llm, run_ahead, monkeypatch):
    """All entries of a position have a text of their own, and the sampled ones add up."""
    monkeypatch.setitem(vars(llm.config), "run_ahead", run_ahead)
    ids = llm.get_tokenizer().convert_tokens_to_ids(
        ["▁cat", "▁日", *(f"<0x{byte:02X}>" for byte in "日".encode()), "cat", "▁", "▁cat"])

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = ids[input_ids.shape[1] - 3]
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([wanted]), 0)

    params = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, logprobs=-1,
                            logits_processors=[force])
    (output,) = generate(llm, [[1, 5, 9]], params)
    completion = output.outputs[0]
    texts = [found[token_id].decoded_token for token_id, found in zip(ids, completion.logprobs)]
    assert texts == [" cat", " 日", "", "", "日", "cat", " ", " cat"]
    assert completion.text == "".join(texts)
    first = [found.decoded_token for found in completion.logprobs[0].values()]
    for text in (" cat", "cat", " .", "  ", " 日"):
        assert first.count(text) == 1
    # a prompt's own tokens
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = generate(llm, [[1, *ids]], params)
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


def test_a_start_that_is_not_in_the_prompt(make_llm):
    with make_llm(num_kv_blocks=8) as llm:
        with pytest.raises(ValueError, match="prompt_logprobs_start=4 is not accepted: it must be "
                           "at most 3, the tokens of the prompt"):
            llm.generate([[5, 6, 7]], SamplingParams(prompt_logprobs=0, prompt_logprobs_start=4))
    for wrong in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="^prompt_logprobs_start="):
            SamplingParams(prompt_logprobs_start=wrong)


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


def test_a_list_of_the_user_is_his_own(make_llm):
    """What he does to it changes no later output."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0,
                            prompt_logprobs=0)
    with make_llm(num_kv_blocks=8) as llm:
        (right,) = generate(llm, [[5, 6, 7]], params)
        for output in llm.stream([[5, 6, 7]], params):
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
