"""Headers of GGUF files, and their tokenizers: words, tokens that are found in a text, and BOS, as
the file says or as llama.cpp has them. Damaged headers are refused."""

import random
import struct
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from conftest import check_refused
from quantizing import close
from tokenizers import pre_tokenizers

from nanoengine_extras.models.gguf.header import Header
from nanoengine_extras.models.gguf.reader import Reader
from nanoengine_extras.models.gguf.tokenizers import read
from nanoengine_extras.tools import chat

# of DeepSeek-R1's distillations: one is a character that is no byte of GPT-2's
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
CHATML = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write(path: Path, model: str, tokens: list[str], kinds: list[int], arch: str = "llama",
          eos_token_id: int = 1, **entries: Any) -> Header:
    """Writes a header with a tokenizer. kinds: the types of the first tokens, before normal ones.
    entries: by their names in the writer; None: not in the file."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [1] * (len(tokens) - len(kinds)))
    writer.add_eos_token_id(eos_token_id)
    for name, value in entries.items():
        if value is not None:
            getattr(writer, f"add_{name}")(*value if isinstance(value, tuple) else [value])
    close(writer)
    return Header([path])


def of_bytes(path: Path, pre: str | None, control: list[str], merges=("Ċ Ċ", "Ġ Ġ"), kinds=(),
             **entries: Any) -> Header:
    """The header of a tokenizer of bytes; the last of `control` is a user's token, if `kinds` does
    not have all of their types."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = control + alphabet + [merge.replace(" ", "") for merge in merges]
    kinds = [*kinds] or [3] * (len(control) - 1) + [4]
    return write(path, "gpt2", tokens, kinds, tokenizer_pre=pre, token_merges=list(merges),
                 bos_token_id=0, **entries)


def saved(header: Header, path: Path) -> Any:
    """Its tokenizer, as it is read again from a folder."""
    read(header.find, path).save_pretrained(path.parent)
    return transformers.AutoTokenizer.from_pretrained(path.parent)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a.gguf"


@pytest.mark.parametrize("pre", ["deepseek-r1-qwen", "llama-bpe", "qwen2"])
def test_tokens_that_are_no_bytes(path, pre):
    """They keep their numbers, and are found in a text."""
    header = of_bytes(path, pre, DEEPSEEK)
    tokenizer = saved(header, path)
    assert len(tokenizer) == len(header.find("tokenizer.ggml.tokens"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    parts = [DEEPSEEK[2], "a", DEEPSEEK[3], "b", DEEPSEEK[1]]
    ids = tokenizer("".join(parts), add_special_tokens=False).input_ids
    assert [ids[0], ids[2], ids[4]] == [2, 3, 1]
    assert tokenizer.convert_ids_to_tokens(ids) == parts
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<｜Assistant｜>b"


@pytest.mark.parametrize("pre, text, words", [
    ("smollm", "\n\n12", "ĊĊ 1 2"), ("smollm", "  1", "ĠĠ 1"),
    ("gpt-2", "\n\n12", "Ċ Ċ 12"), ("gpt-2", "  1", "Ġ Ġ 1"),
    ("qwen2", "\n\n123", "ĊĊ 1 2 3"), ("llama-bpe", "1234", "12 3 4"),
    ("tekken", "aB12", "a B 1 2"), ("qwen2", "aB", "aB"),
    ("qwen2", "!\n", "!Ċ"), ("seed-coder", "!\n", "! Ċ"),
    ("hunyuan-dense", "(aB", "(aB"), ("exaone4", "(aB", "( aB"),
    ("hunyuan-dense", "!\n1234", "!Ċ 12 3 4"), ("glm4", "1234", "12 3 4"),
    ("kimi-k2", "a一1234", "a ä ¸ Ģ 12 3 4"), ("kimi-k2", "!\n", "!Ċ"),
    ("gpt-4o", "a一", "aä ¸ Ģ"), ("hunyuan", "\n\n12", "ĊĊ 1 2"),
    ("deepseek-coder", "\n\n12", "Ċ Ċ 1 2"), ("deepseek-coder", "(aB", "( aB"),
    # as transformers' own: an accent and its letter become one character
    *((pre, "e\u0301", "Ã ©") for pre in ("qwen2", "hunyuan", "command-r", "olmo", "mpt")),
    ("gpt-2", "e\u0301", "e Ì ģ"), ("kimi-k2", "e\u0301", "e Ì ģ")])
def test_where_a_text_is_cut(path, pre, text, words):
    merges = ("Ċ Ċ", "Ġ Ġ", "1 2", "a B", "! Ċ", "( aB", "a ä")
    tokenizer = read(of_bytes(path, pre, CHATML, merges).find, path)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == words.split()
    assert unicodedata.normalize("NFC", tokenizer.decode(ids)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("pre", [None, "default", "minimax-m2"])
def test_an_unknown_way_to_cut_a_text(path, pre):
    """No text is cut in another way than the model has learned."""
    header = of_bytes(path, pre, CHATML)
    check_refused("must be replaced by tokenizer=….*tokenizer.ggml.pre="
                  f"{pre!r} is not accepted: it must be one of .'llama3'", read, header.find, path)


@pytest.mark.parametrize("tokens, eos, ends", [
    (" ".join(CHATML), 0, "<|endoftext|> <|im_end|>"),
    (" ".join(CHATML), 99999, "<|endoftext|> <|im_end|>"),
    ("<|begin_of_text|> <|end_of_text|> <|eom_id|> <|eot_id|> x", 3,
     "<|end_of_text|> <|eom_id|> <|eot_id|>"),
    ("<|endoftext|> <|return|> <|end|> <|call|> x", 1, "<|endoftext|> <|return|> <|call|>"),
    ("<|endoftext|> <|assistant|> <|end|> x", 2, "<|endoftext|> <|end|>"),
    ("<eos> <end_of_turn> </s> x", 0, "<eos> <end_of_turn>"),
    ("<eos> <turn|> <|tool_response> </s> x", 0, "<eos> <turn|> <|tool_response>"),
    ("<s> </s> <|im_end|> x", 2, "</s> <|im_end|>"),
    ("[EOS] [EOT] x", 0, "[EOS] [EOT]"),
    ("<|endoftext|> [gMASK] <|user|> <|observation|> <|assistant|> x", 0,
     "<|endoftext|> <|user|> <|observation|>"),
    ("<|endoftext|> <|assistant|> <|placeholder1|> <|end|> <|user|> x", 0,
     "<|endoftext|> <|assistant|> <|end|>"),
    ("<|endoftext|> <|fim_prefix|> <|fim_pad|> <|repo_name|> <|file_sep|> x", 0,
     "<|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|>")])
def test_tokens_that_end_a_text(path, tokens, eos, ends):
    """By their texts, if the file names only one; a number that is no token is none."""
    header = of_bytes(path, "qwen2", tokens.split(), eos_token_id=eos)
    assert sorted(header.eos()) == sorted(map(tokens.split().index, ends.split()))


def test_a_list_of_tokens_that_end_a_text(path):
    header = of_bytes(path, "qwen2", ["a", "b", "c", "d"], eos_token_id=0, eot_token_id=3,
                      array=("tokenizer.ggml.eos_token_ids", [1, 99999]))
    assert header.eos() == [0, 3, 1]


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
def test_types_of_tokens(path, kind):
    """A token that ends a turn is special, whatever the file says; a user's token is found in a
    text and shown; others that are not special are texts."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<own>", "x"]
    tokenizer = saved(of_bytes(path, "qwen2", tokens, kinds=[3, kind, kind, 4]), path)
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
def test_a_header_that_lies_about_sizes(path, num_tensors, num_entries, content):
    """Counts, lengths and places are compared with the size of the file before anything is read."""
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)
    path.write_bytes(head + content + bytes(64))
    check_refused("not a GGUF file: download it again", Header, [path])


def test_an_array_takes_little_memory(path):
    """It is read as a whole."""
    numbers = bytes(range(256)) * 2000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + NAME + struct.pack(
        "<IIQ", 9, 0, len(numbers)) + numbers + bytes(64))
    tracemalloc.start()
    reader = Reader(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * len(numbers) and reader.fields["x"].contents() == [*numbers]


def test_damaged_files_are_refused(path):
    """Wherever a bit or a number differs, or the file ends: no error but ValueError."""
    of_bytes(path, "qwen2", CHATML)
    whole, draw = path.read_bytes(), random.Random(0)
    found = set()
    for _ in range(120):
        place, content = draw.randrange(len(whole)), bytearray(whole)
        content[place] ^= 1 << draw.randrange(8)
        wide = struct.pack("<Q", draw.choice([0, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        for each in (content, whole[:place], whole[:place] + wide + whole[place + 8:]):
            path.write_bytes(each)
            try:
                found.add(type(Header([path])))
            except ValueError as error:
                found.add(type(error))
    assert found == {ValueError, Header}


@pytest.mark.parametrize("count", [-1, 2**31, "many"])
def test_more_layers_than_a_file_can_have(path, count):
    kind = gguf.GGUFValueType.STRING if isinstance(count, str) else gguf.GGUFValueType.INT64
    check_refused(f"block_count={count!r} is not accepted: it must be a nu", write, path, "gpt2",
                  ["a"], [], key_value=("llama.block_count", count, kind))


def of_pieces(path: Path, tokens: list[str], kinds: list[int], arch: str, **entries: Any) -> Any:
    """A SentencePiece tokenizer, in which later tokens are less likely."""
    scores = [-1.0 - place for place in range(len(tokens))]
    header = write(path, "llama", tokens, kinds, arch, token_scores=scores, **entries)
    return read(header.find, path)


def of_llama_2(path: Path, arch: str, has_prefix: bool | None) -> tuple[Any, list[str]]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "ab", "▁ab", "<|end|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6, 3]
    return of_pieces(path, tokens, kinds, arch, bos_token_id=1, eos_token_id=2,
                     chat_template="of Llama 2", add_space_prefix=has_prefix), tokens


@pytest.mark.parametrize("architecture, kept", [("phi3", []), ("llama", ["▁", "<0x0A>"])])
def test_white_space_after_a_token(path, architecture, kept):
    """In Phi 3 it is left out, as in llama.cpp, but not after BOS."""
    tokenizer, tokens = of_llama_2(path, architecture, None)
    for token in ("<|end|>", "</s>"):
        found = [tokens[each] for each in tokenizer(f"{token}\nab").input_ids]
        assert found == ["<s>", token, *(kept + ["ab"] if kept else ["▁ab"])]
    assert tokenizer("<s> ab", add_special_tokens=False).input_ids == [
        1, tokens.index("▁"), tokens.index("▁ab")]


@pytest.mark.parametrize("has_prefix", [None, True, False])
def test_a_sentencepiece_tokenizer_of_a_gguf(path, has_prefix):
    """Of Llama 2: BOS comes first, then a space, if the file does not say otherwise. A tokenizer
    beside the file is not read."""
    for name in ("tokenizer.json", "tokenizer.model"):
        path.with_name(name).write_text("of another model")
    tokenizer, tokens = of_llama_2(path, "llama", has_prefix)
    first = "ab" if has_prefix is False else "▁ab"
    assert tokenizer("ab ab").input_ids == [1, tokens.index(first), tokens.index("▁ab")]
    # as in llama.cpp, a prefix is not left out after a token, or before a space
    assert tokenizer("</s>ab").tokens() == ["<s>", "</s>", first]
    assert tokenizer(" ab").tokens() == ["<s>", *["▁"] * (has_prefix is not False), "▁ab"]
    for text in ("ab", " ab", "a  b\n"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(path.parent)
    again = transformers.AutoTokenizer.from_pretrained(path.parent)
    assert again.chat_template == "of Llama 2"
    assert again("ab a").input_ids == tokenizer("ab a").input_ids
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("arch, has_prefix, expected", [
    ("gemma3", False, ["<bos>", "ab", "▁a", "▁▁", "b"]),
    ("phi3", None, ["<bos>", "▁ab", "▁a", "  ", "▁", "b"])])
def test_tokens_of_several_spaces(path, arch, has_prefix, expected):
    """Gemma begins a text without a space, and has tokens of several."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "  ", *BYTES, "▁", "a", "b",
              "▁a", "ab", "▁ab"]
    tokenizer = of_pieces(path, tokens, [3, 3, 3, 2, 3, 4, *[6] * 256], arch, bos_token_id=2,
                          add_space_prefix=has_prefix)
    tokenizer.save_pretrained(path.parent)
    for each in (tokenizer, transformers.AutoTokenizer.from_pretrained(path.parent)):
        assert each.convert_ids_to_tokens(each("ab a  b").input_ids) == expected
        assert each("<start_of_turn>").input_ids == [2, 4]


@pytest.mark.parametrize("pre, flag, has_bos", [
    ("llama-bpe", None, True), ("llama-bpe", True, True), ("llama-bpe", False, False),
    ("tekken", None, True), ("glm4", None, False), ("kimi-k2", None, False),
    ("hunyuan", None, False), ("qwen2", None, False), ("qwen2", True, True)])
def test_a_tokenizer_of_llama_3(path, pre, flag, has_bos):
    """llama.cpp does not write down that BOS comes first, and that a token needs no merges."""
    tokens = ["<bos>", "<eos>", "a", "b", "c", "ab", "abc"]
    # there is no merge to "abc"
    tokenizer = saved(write(path, "gpt2", tokens, [3, 3], tokenizer_pre=pre, token_merges=["a b"],
                            bos_token_id=0, add_bos_token=flag), path)
    ids = [5, 4] if pre == "qwen2" else [6]
    assert tokenizer("abc").input_ids == [0] * has_bos + ids
    assert tokenizer("abc", add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize("flag", [None, False])
def test_a_tokenizer_of_gemma_4(path, flag):
    """BOS comes first, whatever the file says."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "ab", "▁ab", *BYTES]
    header = write(path, "gemma4", tokens, [3, 3, 3, 2, *[1] * 5, *[6] * 256], "gemma4",
                   token_merges=["a b", "▁ ab"], token_scores=[0.0] * 265, bos_token_id=2,
                   unk_token_id=3, add_space_prefix=False, add_bos_token=flag)
    assert read(header.find, path)("ab ab").input_ids == [2, 7, 8]


def test_several_chat_templates(path):
    """By their names, as transformers has them. Without a default, they are named."""
    named = [dict(name="tool_use", template="with tools"), dict(name="rag", template="of texts")]
    default = dict(name="default", template="plain")
    found = []
    for given in ("plain", [default], [default, *named], named):
        header = of_bytes(path, "qwen2", CHATML, chat_template=given)
        folder = path.with_name(str(len(found)))
        read(header.find, path).save_pretrained(folder)
        found.append(transformers.AutoTokenizer.from_pretrained(folder))
    for each in found[:3]:
        assert chat.find_template(each, None, None) == "plain"
    assert chat.find_template(found[2], None, [{}]) == "with tools"
    assert chat.find_template(found[3], "rag", None) == "of texts"
    with pytest.raises(ValueError, match=r"^chat_template: .* no default .*'rag', 'tool_use'"):
        chat.find_template(found[3], None, None)
