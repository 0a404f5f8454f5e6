"""Tokenizers of GGUF files: words, tokens that are found in a text, and BOS, as the file says or as
llama.cpp has them."""

import random
import struct
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import pre_tokenizers

from nanoengine_extras.models.gguf import tokenizers as gguf_tokenizers
from nanoengine_extras.tools import chat
from nanoengine_extras.models.gguf import header as gguf_header

# of DeepSeek-R1's distillations: one is a character that is no byte of GPT-2's
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
CHATML = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>"]


def bytes_gguf(path: Path, pre: str | None, control: list[str], merges=("Ċ Ċ", "Ġ Ġ"), eos=1,
               templates=(), kinds=()):
    """Writes a header with a tokenizer of bytes; the last of `control` is a user's token, if
    `kinds` does not have all of their types."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = control + alphabet + [merge.replace(" ", "") for merge in merges]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [*kinds] or [3] * (len(control) - 1) + [4]
    writer.add_token_types(kinds + [1] * (len(tokens) - len(kinds)))
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    if templates:
        writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_header.Header([path])


@pytest.mark.parametrize("pre", ["deepseek-r1-qwen", "llama-bpe", "qwen2"])
def test_tokens_that_are_no_bytes(tmp_path, pre):
    """They keep their numbers, and are found in a text."""
    header = bytes_gguf(path := tmp_path / "a.gguf", pre, DEEPSEEK)
    gguf_tokenizers.read(header.find, path).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(header.find("tokenizer.ggml.tokens"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    parts = [DEEPSEEK[2], "a", DEEPSEEK[3], "b", DEEPSEEK[1]]
    ids = tokenizer("".join(parts), add_special_tokens=False).input_ids
    assert [ids[0], ids[2], ids[4]] == [2, 3, 1]
    assert tokenizer.convert_ids_to_tokens(ids) == parts
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<｜Assistant｜>b"


@pytest.mark.parametrize("pre, text, words", [
    ("smollm", "\n\n12", ["ĊĊ", "1", "2"]), ("smollm", "  1", ["ĠĠ", "1"]),
    ("gpt-2", "\n\n12", ["Ċ", "Ċ", "12"]), ("gpt-2", "  1", ["Ġ", "Ġ", "1"]),
    ("qwen2", "\n\n123", ["ĊĊ", "1", "2", "3"]), ("llama-bpe", "1234", ["12", "3", "4"]),
    ("tekken", "aB12", ["a", "B", "1", "2"]), ("qwen2", "aB", ["aB"]),
    ("qwen2", "!\n", ["!Ċ"]), ("seed-coder", "!\n", ["!", "Ċ"]),
    ("hunyuan-dense", "(aB", ["(aB"]), ("exaone4", "(aB", ["(", "aB"]),
    ("hunyuan-dense", "!\n1234", ["!Ċ", "12", "3", "4"]), ("glm4", "1234", ["12", "3", "4"]),
    ("kimi-k2", "a一1234", ["a", "ä", "¸", "Ģ", "12", "3", "4"]), ("kimi-k2", "!\n", ["!Ċ"]),
    ("gpt-4o", "a一", ["aä", "¸", "Ģ"]),
    ("deepseek-coder", "\n\n12", ["Ċ", "Ċ", "1", "2"]), ("deepseek-coder", "(aB", ["(", "aB"]),
    ("hunyuan", "\n\n12", ["ĊĊ", "1", "2"]),
    # as transformers' own: an accent and its letter become one character
    *((pre, "e\u0301", ["Ã", "©"]) for pre in ("qwen2", "hunyuan", "command-r", "olmo", "mpt")),
    ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]), ("kimi-k2", "e\u0301", ["e", "Ì", "ģ"])])
def test_where_a_text_is_cut(tmp_path, pre, text, words):
    merges = ("Ċ Ċ", "Ġ Ġ", "1 2", "a B", "! Ċ", "( aB", "a ä")
    header = bytes_gguf(path := tmp_path / "a.gguf", pre, CHATML, merges)
    tokenizer = gguf_tokenizers.read(header.find, path)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert unicodedata.normalize("NFC", tokenizer.decode(ids)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("pre", [None, "default", "minimax-m2"])
def test_an_unknown_way_to_cut_a_text(tmp_path, pre):
    """No text is cut in another way than the model has learned."""
    header = bytes_gguf(path := tmp_path / "a.gguf", pre, CHATML)
    with pytest.raises(ValueError, match="must be replaced by tokenizer=….*tokenizer.ggml.pre="
                       f"{pre!r} is not accepted: it must be one of .'llama3'"):
        gguf_tokenizers.read(header.find, path)


@pytest.mark.parametrize("tokens, eos, ends", [
    (CHATML, 0, ["<|endoftext|>", "<|im_end|>"]), (CHATML, 99999, ["<|endoftext|>", "<|im_end|>"]),
    (["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "x"], 3,
     ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "x"], 1,
     ["<|endoftext|>", "<|return|>", "<|call|>"]),
    (["<|endoftext|>", "<|assistant|>", "<|end|>", "x"], 2, ["<|endoftext|>", "<|end|>"]),
    (["<eos>", "<end_of_turn>", "</s>", "x"], 0, ["<eos>", "<end_of_turn>"]),
    (["<eos>", "<turn|>", "<|tool_response>", "</s>", "x"], 0,
     ["<eos>", "<turn|>", "<|tool_response>"]),
    (["<s>", "</s>", "<|im_end|>", "x"], 2, ["</s>", "<|im_end|>"]),
    (["[EOS]", "[EOT]", "x"], 0, ["[EOS]", "[EOT]"]),
    (["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<|assistant|>", "x"], 0,
     ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    (["<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|end|>", "<|user|>", "x"], 0,
     ["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    (["<|endoftext|>", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "x"], 0,
     ["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"])])
def test_tokens_that_end_a_text(tmp_path, tokens, eos, ends):
    """By their texts, if the file names only one; a number that is no token is none."""
    header = bytes_gguf(tmp_path / "a.gguf", "qwen2", tokens, eos=eos)
    assert sorted(header.eos()) == sorted(map(tokens.index, ends))


def test_a_list_of_tokens_that_end_a_text(tmp_path):
    header = bytes_gguf(tmp_path / "a.gguf", "qwen2", ["a", "b", "c", "d"], eos=0)
    entries = {"tokenizer.ggml.eos_token_ids": [1, 99999], "tokenizer.ggml.eot_token_id": 3}
    find = header.find
    header.find = lambda name, default=None: entries.get(name, find(name, default))
    assert header.eos() == [0, 3, 1]


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
def test_types_of_tokens(tmp_path, kind):
    """A token that ends a turn is special, whatever the file says; a user's token is found in a
    text and shown; others that are not special are texts."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<own>", "x"]
    header = bytes_gguf(path := tmp_path / "a.gguf", "qwen2", tokens, kinds=[3, kind, kind, 4])
    gguf_tokenizers.read(header.find, path).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("a<|im_end|>b<own>").input_ids
    assert ids.count(1) == 1 and ids.count(2) == (kind in (3, 4))
    own = "" if kind == 3 else "<own>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"ab{own}"


NAME = struct.pack("<Q1s", 1, b"x")


@pytest.mark.parametrize("num_tensors, num_entries, content", [
    (2**40, 0, b""), (0, 2**40, b""), (0, 1, struct.pack("<Q", 2**63)),
    (0, 1, NAME + struct.pack("<IIQ", 9, 4, 2**40)), (0, 1, NAME + struct.pack("<IQ", 8, 2**50)),
    (0, 1, NAME + struct.pack("<IIQ", 9, 8, 2**40) + b"a"),
    (0, 1, NAME + struct.pack("<IIQIQ", 9, 9, 2**30, 4, 2**40)),
    (0, 1, NAME + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    (1, 0, NAME + struct.pack("<I", 2**31)),
    (1, 0, NAME + struct.pack("<IQQIQ", 2, 2**33, 2**33, 0, 0)),
    (1, 0, NAME + struct.pack("<IQIQ", 1, 4, 0, 2**64 - 32)),
    (2, 0, NAME + struct.pack("<IQIQ", 1, 4, 0, 0) + NAME.replace(b"x", b"y") + struct.pack(
        "<IQIQ", 1, 4, 0, 8))])
def test_a_header_that_lies_about_sizes(tmp_path, num_tensors, num_entries, content):
    """Counts, lengths and places are compared with the size of the file before anything is read."""
    file = tmp_path / "a.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)
    file.write_bytes(head + content + bytes(64))
    with pytest.raises(ValueError, match="not a GGUF file: download it again"):
        gguf_header.Header([file])


def test_an_array_takes_little_memory(tmp_path):
    """It is read as a whole."""
    file, numbers = tmp_path / "a.gguf", bytes(range(256)) * 2000
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + NAME + struct.pack(
        "<IIQ", 9, 0, len(numbers)) + numbers + bytes(64))
    tracemalloc.start()
    header = gguf_header.Header([file])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * len(numbers) and header.find("x") == [*numbers]


def test_damaged_files_are_refused(tmp_path):
    """Wherever a bit or a number differs, or the file ends: no error but ValueError."""
    bytes_gguf(file := tmp_path / "a.gguf", "qwen2", CHATML)
    whole, draw = file.read_bytes(), random.Random(0)
    found = set()
    for _ in range(120):
        place, content = draw.randrange(len(whole)), bytearray(whole)
        content[place] ^= 1 << draw.randrange(8)
        wide = struct.pack("<Q", draw.choice([0, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        for each in (content, whole[:place], whole[:place] + wide + whole[place + 8:]):
            file.write_bytes(each)
            try:
                found.add(type(gguf_header.Header([file])))
            except ValueError as error:
                found.add(type(error))
    assert found == {ValueError, gguf_header.Header}


@pytest.mark.parametrize("count", [-1, 2**31, "many"])
def test_more_layers_than_a_file_can_have(tmp_path, count):
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_key_value("llama.block_count", count, (
        gguf.GGUFValueType.STRING if isinstance(count, str) else gguf.GGUFValueType.INT64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"block_count={count!r} is not accepted: it must be a nu"):
        gguf_header.Header([file])


def pieces_gguf(path: Path, architecture: str, has_prefix: bool | None) -> tuple[Any, list[str]]:
    """Writes a header with a SentencePiece tokenizer; returns the tokenizer, and its tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b",
              "▁a", "ab", "▁ab", "<|end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-1.0 - place for place in range(7)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 6, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("of Llama 2")
    if has_prefix is not None:
        writer.add_add_space_prefix(has_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizers.read(gguf_header.Header([path]).find, path), tokens


@pytest.mark.parametrize("architecture, kept", [("phi3", []), ("llama", ["▁", "<0x0A>"])])
def test_white_space_after_a_token(tmp_path, architecture, kept):
    """In Phi 3 it is left out, as in llama.cpp, but not after BOS."""
    tokenizer, tokens = pieces_gguf(tmp_path / "a.gguf", architecture, None)
    for token in ("<|end|>", "</s>"):
        found = [tokens[each] for each in tokenizer(f"{token}\nab").input_ids]
        assert found == ["<s>", token, *(kept + ["ab"] if kept else ["▁ab"])]
    assert tokenizer("<s> ab", add_special_tokens=False).input_ids == [
        1, tokens.index("▁"), tokens.index("▁ab")]


@pytest.mark.parametrize("has_prefix", [None, True, False])
def test_a_sentencepiece_tokenizer_of_a_gguf(tmp_path, has_prefix):
    """Of Llama 2: BOS comes first, then a space, if the file does not say otherwise. A tokenizer
    beside the file is not read."""
    (tmp_path / "tokenizer.json").write_text("of another model")
    (tmp_path / "tokenizer.model").write_text("of another model")
    tokenizer, tokens = pieces_gguf(tmp_path / "a.gguf", "llama", has_prefix)
    first = "ab" if has_prefix is False else "▁ab"
    assert tokenizer("ab ab").input_ids == [1, tokens.index(first), tokens.index("▁ab")]
    # as in llama.cpp, a prefix is not left out after a token, or before a space
    assert tokenizer("</s>ab").tokens() == ["<s>", "</s>", first]
    assert tokenizer(" ab").tokens() == ["<s>", *["▁"] * (has_prefix is not False), "▁ab"]
    for text in ("ab", " ab", "a  b\n"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == "of Llama 2"
    assert again("ab a").input_ids == tokenizer("ab a").input_ids
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("pre, flag, has_bos", [
    ("llama-bpe", None, True), ("llama-bpe", True, True), ("llama-bpe", False, False),
    ("tekken", None, True), ("glm4", None, False), ("kimi-k2", None, False),
    ("hunyuan", None, False),
    ("qwen2", None, False), ("qwen2", True, True)])
def test_a_tokenizer_of_llama_3(tmp_path, pre, flag, has_bos):
    """llama.cpp does not write down that BOS comes first, and that a token needs no merges."""
    tokens = ["<bos>", "<eos>", "a", "b", "c", "ab", "abc"]
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
    # none to "abc"
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if flag is not None:
        writer.add_add_bos_token(flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf_tokenizers.read(gguf_header.Header([path]).find, path).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = [5, 4] if pre == "qwen2" else [6]
    assert tokenizer("abc").input_ids == [0] * has_bos + ids
    assert tokenizer("abc", add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize("flag", [None, False])
def test_a_tokenizer_of_gemma_4(tmp_path, flag):
    """BOS comes first, whatever the file says."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "ab", "▁ab"]
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens + [f"<0x{byte:02X}>" for byte in range(256)])
    writer.add_token_types([3, 3, 3, 2, *[1] * 5, *[6] * 256])
    writer.add_token_merges(["a b", "▁ ab"])
    writer.add_token_scores([0.0] * 265)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    if flag is not None:
        writer.add_add_bos_token(flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizers.read(gguf_header.Header([path]).find, path)
    assert tokenizer("ab ab").input_ids == [2, 7, 8]


def test_several_chat_templates(tmp_path):
    """By their names, as transformers has them. Without a default, they are named."""
    named = [dict(name="tool_use", template="with tools"), dict(name="rag", template="of texts")]
    default = dict(name="default", template="plain")
    found = []
    for given in ("plain", [default], [default, *named], named):
        header = bytes_gguf(path := tmp_path / "a.gguf", "qwen2", CHATML, templates=given)
        folder = tmp_path / str(len(found))
        gguf_tokenizers.read(header.find, path).save_pretrained(folder)
        found.append(transformers.AutoTokenizer.from_pretrained(folder))
    for each in found[:3]:
        assert chat.find_template(each, None, None) == "plain"
    assert chat.find_template(found[2], None, [{}]) == "with tools"
    assert chat.find_template(found[3], "rag", None) == "of texts"
    with pytest.raises(ValueError, match=r"^chat_template: .* no default .*'rag', 'tool_use'"):
        chat.find_template(found[3], None, None)
