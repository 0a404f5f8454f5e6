"""The tokenizer that a GGUF file describes, in the form of transformers.

transformers makes the tokenizers of Llama 2, whose tokens have scores. Byte-level BPE tokenizers
are made here. If transformers made them, tokens such as DeepSeek's <｜User｜> would be spelled in
bytes, and so never found in a text; and for an unknown `tokenizer.ggml.pre`, text would be split as
in GPT-2.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2

from nanoengine.errors import naming, rejected
from nanoengine_extras.models.gguf.reader import ends_of

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
          r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = TEKKEN.replace(r"\p{M}]+|", r"\p{M}]+" + ENDINGS + "|").replace(
    r"\p{M}]*|", r"\p{M}]*" + ENDINGS + "|").replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Chinese characters are words of their own
KIMI = r"\p{Han}+|" + GPT_4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("n/]", "n]")
SEED = QWEN_2.replace(r"]+[\r\n]*|", "]+|")
HUNYUAN = [
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
# the letters of DeepSeek
LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-"
    "ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-"
    "ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")
DEEPSEEK = ["[\r\n]", rf"\s?[{LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$",
            "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}+"]
CODER = [DEEPSEEK[0], r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK[4], r"\p{N}"]
# by `tokenizer.ggml.pre`: the patterns that split a text into words, applied in turn
CUTS = {name: cuts for names, cuts in (
    ("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 dbrx smaug-bpe glm4", [LLAMA_3]),
    ("qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan", [QWEN_2]),
    ("gpt-2 phi-2 mpt olmo jais trillion mellum exaone4", [GPT_2]),
    ("smollm starcoder refact command-r codeshell minerva-7b exaone", [r"\p{N}", GPT_2]),
    ("tekken", [TEKKEN]), ("gpt-4o", [GPT_4O]), ("kimi-k2", [KIMI]), ("seed-coder", [SEED]),
    ("deepseek-llm", DEEPSEEK), ("deepseek-coder", CODER), ("hunyuan-dense deepseek-v3", HUNYUAN))
    for name in names.split()}
# for these, as in llama.cpp, BOS comes first
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
# for these, a word that is a token stays whole, whatever the merges are
WHOLE = (*BEGUN, "glm4", "hunyuan", "kimi-k2")
# for these, and with Qwen's pattern, a letter and its accent become one character
COMPOSED = "command-r", "olmo", "mpt"
# `tokenizer.ggml.token_type` of tokens that are found in a text before it is split
CONTROL = 3
USER_DEFINED = 4
# Phi 3's tokens that keep the white space after them
FOLLOWED = "<unk>", "<s>", "<|endoftext|>"


def read(find: Any, file: Path) -> Any:
    """Returns the tokenizer of a file, which must be the first one of its model. Raises ValueError
    for a tokenizer that cannot be read exactly.

    find: `Header.find`, which returns the value of an entry, or a default
    """
    kind = find("tokenizer.ggml.model")
    with naming(ValueError("its tokenizer is not read: it must be replaced by tokenizer=…")):
        if kind == "gpt2":
            found = of_bytes(find)
        else:
            # elsewhere, since transformers prefers a tokenizer in the file's own folder
            with TemporaryDirectory() as folder:
                (Path(folder) / file.name).symlink_to(file.absolute())
                found = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name)
    # as in llama.cpp, tokens that end a turn are special, whatever an old file says
    ends = ends_of(find("tokenizer.ggml.tokens", []))
    found.backend_tokenizer.add_special_tokens(
        [AddedToken(end, special=True, normalized=False) for end in ends])
    if kind == "llama":
        set_spaces(found.backend_tokenizer, find("tokenizer.ggml.add_space_prefix", True),
                   find("general.architecture") == "phi3")
    # releases of transformers differ in how they read it
    found.chat_template = templates(find)
    bos = found.bos_token
    is_usual = kind == "llama" or find("tokenizer.ggml.pre") in BEGUN
    # files of Gemma 4 wrongly deny it; llama.cpp corrects this, too
    if bos and (kind == "gemma4" or find("tokenizer.ggml.add_bos_token", is_usual)):
        found.backend_tokenizer.post_processor = TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, found.bos_token_id)])
    return found


def templates(find: Any) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name, as transformers has them: for example, one
    named "tool_use"."""
    default = find("tokenizer.chat_template")
    found = {name: find(f"tokenizer.chat_template.{name}")
             for name in find("tokenizer.chat_templates", [])}
    if not found:
        return default
    return found if default is None else found | {"default": default}


def set_spaces(backend: Any, has_prefix: bool, is_phi: bool) -> None:
    """Replaces spaces as llama.cpp does.

    has_prefix: whether one is put before a text, and before what follows a token such as "</s>"
    is_phi: whether white space after such a token is left out, which files do not say
    """
    tokens = backend.get_added_tokens_decoder().values() if is_phi else []
    backend.add_tokens([
        AddedToken(each.content, rstrip=True, special=each.special, normalized=False)
        for each in tokens if each.content not in FOLLOWED])
    first = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    last = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def of_bytes(find: Any) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer."""
    pre = find("tokenizer.ggml.pre")
    if pre not in CUTS:
        raise rejected("the file's tokenizer.ggml.pre", pre, f"one of {[*CUTS]}")
    tokens = find("tokenizer.ggml.tokens")
    backend = Tokenizer(BPE(
        {token: place for place, token in enumerate(tokens)},
        [tuple(merge.split(" ")) for merge in find("tokenizer.ggml.merges")],
        ignore_merges=pre in WHOLE))
    splits = [Split(Regex(each), "isolated") for each in CUTS[pre]]
    backend.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    if CUTS[pre] == [QWEN_2] or pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    kinds = find("tokenizer.ggml.token_type", [])
    backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)
                        for token, kind in zip(tokens, kinds) if kind in (CONTROL, USER_DEFINED)])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    places = {name: find(f"tokenizer.ggml.{kind}_token_id", -1) for name, kind in names.items()}
    special = {name: tokens[at] for name, at in places.items() if at in range(len(tokens))}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
