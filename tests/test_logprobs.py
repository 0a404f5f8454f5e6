"""The texts of single tokens in `logprobs`."""

import pytest
import torch
from conftest import generate
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams
from nanoengine_extensions.logprobs import text_of

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
