"""Tokenizers with the pieces of SentencePiece, whose decoders treat spaces in three ways."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoengine_extras.sampling.texts import texts_of_tokens

# of tokenizers
KINDS = ["Metaspace", "stripped", "whole"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
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
        tokenizer.decoder = decoders.Sequence([*LLAMA, *strip])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text_of(tokenizer: Tokenizer, token_id: int, before: list[int]) -> str | None:
    return texts_of_tokens([token_id], before, tokenizer)[0]
