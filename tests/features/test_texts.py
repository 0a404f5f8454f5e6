"""Text: whole characters, stop strings across token boundaries, tokens that are no text."""

import random
from types import SimpleNamespace

import pytest
from conftest import check_refused, complete
from conftest import generate as run
from pieces import KINDS, LLAMA, PIECES, sentencepiece, text_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoengine import LLM, SamplingParams
from nanoengine.observers import Features
from nanoengine.requests import Request
from nanoengine.sequence import Sequence
from nanoengine_extras.sampling.texts import Text, Texts, stop_finder


class Completion(Text):
    """The text of one sequence, and the output of its request."""

    def __init__(self, seq, tokenizer):
        super().__init__(seq, tokenizer)
        self.seq = seq
        if seq.params.detokenize:
            seq.kept["text"] = self

    def update(self):
        return super().update(self.seq)

    def output(self):
        inputs = SimpleNamespace(features=Features(own=[Texts()]), text_of=lambda seq: "")
        return Request(None, [self.seq], inputs=inputs).output().outputs[0]


@pytest.mark.parametrize("options, params, count", [
    ({}, {}, 1), ({}, {"detokenize": False}, 0), ({"skip_tokenizer_init": True}, {}, 0)])
def test_a_model_without_a_tokenizer_is_named_once(tiny, caplog, options, params, count):
    with LLM(tiny, num_kv_blocks=8, **options) as llm:
        for _ in range(2):
            output, = llm.generate([[5, 6]], SamplingParams(max_tokens=2, **params), False)
            assert output.outputs[0].text == ""
    said = [each for each in caplog.messages if each.startswith(f"{tiny} has no tokenizer")]
    assert len(said) == count


def in_letters(text: str) -> str:
    """The bytes of a text in the letters of ByteLevel."""
    return "".join(bytes_to_unicode()[byte] for byte in text.encode())


def byte_level(words=()) -> PreTrainedTokenizerFast:
    """A token for each byte, some more, and a special one, the last."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def byte_tokenizer():
    return byte_level()


def begun(tokenizer, prompt_ids: list[int], **params) -> Completion:
    seq = Sequence("0", [*prompt_ids], len(prompt_ids), 10_000, SamplingParams(**params))
    return Completion(seq, tokenizer)


def feed(completion: Completion, ids: list[int], end: str | None = None) -> list[str]:
    """Adds tokens one by one, as the engine does; returns the texts before the last output, as they
    are streamed."""
    seq, texts = completion.seq, []
    for number, token_id in enumerate(ids, start=1):
        seq.token_ids.append(token_id)
        if number == len(ids):
            seq.finish_reason = end
        stop = completion.update()
        if stop is not None:
            seq.finish_reason, seq.stop_reason = "stop", stop
            break
        texts.append(completion.so_far(seq))
    return texts


def generate(tokenizer, text_or_ids, prompt="the prompt", end="length", **params):
    """Returns the texts of a whole completion as they were streamed, and the last output."""
    is_text = isinstance(text_or_ids, str)
    ids = tokenizer.encode(text_or_ids) if is_text else text_or_ids
    completion = begun(tokenizer, tokenizer.encode(prompt), **params)
    return feed(completion, ids, end), completion.output()


def decoded_whole(tokenizer, prompt_ids, ids, bytes_of) -> list[str]:
    """The texts so far, where all tokens in the middle of a character are decoded each time.

    bytes_of: by token; special tokens have none."""
    context, pending, text, texts = prompt_ids[-6:], [], "", []
    for token_id in ids:
        pending.append(token_id)
        before, after = (tokenizer.backend_tokenizer.decode(each, True)
                         for each in (context, context + pending))
        written = bytes(bytes_of[each] for each in pending if each in bytes_of)
        is_whole = written.endswith("\ufffd".encode())
        if is_whole or not after[len(before):].endswith("\ufffd"):
            text += after[len(before):]
            context, pending = pending if after[len(before):] else context, []
        texts.append(text)
    return texts


def test_many_tokens_in_the_middle_of_a_character(byte_tokenizer):
    """Bytes that begin, go on and never end; characters among them; tokens without a text."""
    rng = random.Random(0)
    for tokenizer in (byte_tokenizer, sentencepiece("whole")):
        eos = tokenizer.eos_token_id
        # no bytes: after a half character, they would be half ones, too
        names = ["cat", "."]
        ids_of = {byte: byte + 3 for byte in range(256)}
        if tokenizer is byte_tokenizer:
            names = ["a", "b"]
            ids_of = {byte: tokenizer.convert_tokens_to_ids(letter)
                      for byte, letter in bytes_to_unicode().items()}
        letters = tokenizer.convert_tokens_to_ids(names)
        for _ in range(150):
            parts = [[ids_of[byte]] for byte in (0xE6, 0x97, 0xA5, 0xF0, 0xFF, 0x80)]
            parts += [[ids_of[byte] for byte in "日🦊é".encode()], [eos] * rng.choice([1, 9])]
            # U+FFFD itself, also with a special token within
            first, *others = (ids_of[byte] for byte in "\ufffd".encode())
            parts += [[first, *others], [first, *[eos] * rng.choice([1, 9]), *others]]
            parts += [[eos], letters[:rng.choice([0, 0, 1])]]
            weights = [rng.choice([0, 0, 1, 5]) for _ in parts]
            weights[rng.randrange(6)] = 20
            ids = sum(rng.choices(parts, weights, k=rng.randint(1, 60)), []) + letters
            prompt_ids = rng.choices(range(256), k=3)
            texts = feed(begun(tokenizer, prompt_ids), ids)
            bytes_of = {token_id: byte for byte, token_id in ids_of.items()}
            bytes_of |= dict(zip(letters, b"ab"))
            assert texts == decoded_whole(tokenizer, prompt_ids, ids, bytes_of)
            assert texts[-1].endswith("".join(names))


def fffd_tokenizer(kind: str) -> tuple:
    """A tokenizer that has a token for U+FFFD, one for two of them, and one for each byte; each way
    to write U+FFFD; the tokens of "é", and of the first byte of "日"."""
    if kind == "ByteLevel":
        one = in_letters("\ufffd")
        tokenizer = byte_level(["Ġ" + one, one, one + one, "a" + one, one[:2], one[1:]])
        ways = [[one], [*one], [one[:2], one[2:]], [one[0], one[1:]]]
        others = [[*in_letters("é")], in_letters("日")[0]]
    else:
        words = ["▁", "a", "b", "▁\ufffd", "\ufffd", "\ufffd\ufffd", "a\ufffd", "é"]
        words += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [],
                                         byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
        ways = [["\ufffd"], ["<0xEF>", "<0xBF>", "<0xBD>"]]
        others = [["é"], "<0xE6>"]
    find = tokenizer.convert_tokens_to_ids
    return tokenizer, [*map(find, ways)], *map(find, others)


def joined_texts(tokenizer, ids: list[int]) -> list[str]:
    """The texts of single tokens."""
    return [text_of(tokenizer.backend_tokenizer, token_id, ids[max(0, place - 12):place])
            for place, token_id in enumerate(ids)]


@pytest.mark.parametrize("kind", ["ByteLevel", "ByteFallback"])
def test_replacement_characters_that_the_model_writes_and_invalid_bytes(kind):
    """They are in the text, also at its end, and the streamed texts are its beginnings. So are the
    texts of the single tokens, joined."""
    tokenizer, ways, more, half = fffd_tokenizer(kind)
    a, b, eos = tokenizer.convert_tokens_to_ids(["a", "b", "<eos>"])
    parts = [([a], "a"), ([b], "b"), (more, "é"), ([eos], ""), ([eos] * 9, "")]
    parts += [(way, "\ufffd") for way in ways] * 2
    parts += [(way * 12, "\ufffd" * 12) for way in ways]
    rng = random.Random(1)
    for _ in range(200):
        chosen = rng.choices(parts, k=rng.randint(1, 8))
        ids = [token_id for part, _ in chosen for token_id in part]
        streamed, output = generate(tokenizer, ids, prompt="a")
        expected = "".join(text for _, text in chosen)
        assert output.text == streamed[-1] == expected
        assert all(each.startswith(before) for before, each in zip(streamed, streamed[1:]))
        # each part is there with its last token
        end, text = 0, ""
        for part, more_text in chosen:
            end += len(part)
            text += more_text
            assert streamed[end - 1] == text
        assert "".join(joined_texts(tokenizer, ids)).replace("<eos>", "") == expected
    # and so are invalid bytes
    for count in range(1, 10):
        ids = [a, *[half] * count, b, a]
        pieces = joined_texts(tokenizer, ids)
        assert pieces == ["a", *[""] * count, "\ufffd" * count + "b", "a"]
        assert generate(tokenizer, ids, prompt="a")[1].text == "".join(pieces)


def test_a_prompt_of_bytes(byte_tokenizer):
    """What is decoded before the text does not begin within a character, which a prompt can end
    in."""
    prompt, ids = map(byte_tokenizer.encode, ("🦊", "abc"))
    assert feed(begun(byte_tokenizer, prompt[:2]), ids)[-1] == "abc"
    ids = [byte + 3 for byte in "日本🦊é".encode()]
    for length in range(1, len("日本🦊é") + 1):
        prompt = [byte + 3 for byte in "日本🦊é"[:length].encode()]
        assert feed(begun(sentencepiece("whole"), prompt), ids)[-1] == "日本🦊é"


# ---------------------------------------------------------- spaces at the beginning of a text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_spaces_after_special_tokens(kind, skip):
    """A text is the whole text without the prompt's, whatever is special in the two."""
    tokenizer = sentencepiece(kind)
    space, *_ = words = tokenizer.convert_tokens_to_ids(PIECES)
    special = tokenizer.all_special_ids
    assert len(special) == 3
    rng = random.Random(0)
    for _ in range(300):
        prompt_ids = rng.choice([
            [special[0]], special * rng.randint(1, 4), rng.choices(words, k=9),
            [special[0], *rng.choices(words, k=rng.randint(1, 4)), *special * rng.randint(1, 4)]])
        ids = rng.choices([*words, *special], [1] * len(words) + [rng.choice([0, 3])] * 3, k=12)
        if rng.random() < 0.5:
            # spaces only, with special tokens between
            ids[:8] = rng.choices([space, *special], k=8)
        decode = tokenizer.backend_tokenizer.decode
        completion = begun(tokenizer, prompt_ids, skip_special_tokens=skip)
        for number, text in enumerate(feed(completion, ids), start=1):
            whole = decode(prompt_ids + ids[:number], skip)
            assert text == whole[len(decode(prompt_ids, skip)):], (prompt_ids, ids)


@pytest.mark.parametrize("kind, ids, text, more, whole", [
    # a character that never ends
    ("bytes", ["æ"] * 500, "", ["b"], "\ufffd" * 500 + "b"),
    # special tokens within a character
    ("bytes", ["Ã", *["<eos>"] * 500], "", ["©"], "é"),
    # special tokens without end; of two spaces the first is cut
    ("spaced", ["▁", *["<s>", "</s>", "<unk>"] * 100], "", ["▁"], " ")])
def test_what_goes_on_and_on_takes_no_more_time_with_each_token(
        byte_tokenizer, kind, ids, text, more, whole):
    tokenizer, prompt = byte_tokenizer, ["a"]
    if kind == "spaced":
        tokenizer = sentencepiece("stripped")
        prompt = tokenizer.all_special_tokens * 100
    completion = begun(tokenizer, tokenizer.convert_tokens_to_ids(prompt))
    decode, lengths = completion.tokenizer.decode, []
    completion.tokenizer = SimpleNamespace(
        decode=lambda ids, skip: lengths.append(len(ids)) or decode(ids, skip),
        id_to_token=completion.tokenizer.id_to_token)
    assert feed(completion, tokenizer.convert_tokens_to_ids(ids))[-1] == text
    assert max(lengths) < 16 and len(lengths) < 520 and sum(lengths) < 20 * len(ids)
    assert feed(completion, tokenizer.convert_tokens_to_ids(more))[-1] == whole


@pytest.mark.parametrize("text, stop, min_tokens, expected, reason", [
    *(("hello world again", *row) for row in (
        (["wor"], 0, "hello ", "wor"), (["xyz", "lo w"], 0, "hel", "lo w"),
        (["world", "lo w"], 0, "hel", "lo w"), (["o"], 0, "hell", "o"),
        (["wo", "wor"], 0, "hello ", "wo"), (["nothing"], 0, "hello world again", None),
        (["lo world"], 0, "hel", "lo world"))),
    # at the first place after so many tokens
    ("ab ab ab", ["ab", "long stop"], 3, "ab ", "ab")])
def test_stop_strings_across_tokens(byte_tokenizer, text, stop, min_tokens, expected, reason):
    options = dict(stop=stop, min_tokens=min_tokens)
    texts, output = generate(byte_tokenizer, text, **options)
    assert (output.text, output.stop_reason) == (expected, reason)
    assert output.finish_reason == ("stop" if reason else "length")
    assert all(expected.startswith(text) for text in texts), "nothing streamed is taken back"
    assert not reason or byte_tokenizer.decode(output.token_ids).endswith(reason)
    _, output = generate(byte_tokenizer, text, include_stop_str_in_output=True, **options)
    assert output.text == expected + (reason or "")


def test_the_search_for_stop_strings_is_that_of_a_loop():
    """The one that ends first, then the first in the list; also with the same ends and twice."""
    rng = random.Random(0)
    for _ in range(500):
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 6))]
        text = "".join(rng.choices("abc ", k=rng.randint(0, 12)))
        num_seen = rng.randint(0, len(text))
        expected = next(((end, stop) for end in range(num_seen + 1, len(text) + 1)
                         for stop in stops if text.endswith(stop, 0, end)), (0, None))
        assert stop_finder(tuple(stops))(text, num_seen) == expected


def test_many_stop_strings_take_no_more_time(byte_tokenizer):
    """The search cuts as many pieces out of a text for thousands of stop strings as for a few."""
    class Counted(str):
        num_cut = 0

        def __getitem__(self, key):
            Counted.num_cut += 1
            return super().__getitem__(key)

    text = Counted("the quick brown fox jumps over the lazy dog " * 5)
    for number in (10, 5000):
        Counted.num_cut = 0
        stops = tuple(f"{place:05d}o" + "!" * (place % 2) for place in range(number))
        assert stop_finder(stops)(text, 0) == (0, None)
        assert Counted.num_cut < 2 * len(text), "two lengths"
    # and they are not kept for each completion
    params = SamplingParams(stop=[str(place) for place in range(1000)], n=3)
    seq = Sequence("0", [1], 1, 100, params)
    first, second = (Text(each, byte_tokenizer) for each in (seq, seq.fork(index=1)))
    assert first.find_stop is second.find_stop


def test_special_tokens_and_the_token_that_ended_it(byte_tokenizer):
    ids = [*byte_tokenizer.encode("ab"), 256, *byte_tokenizer.encode("c")]
    assert generate(byte_tokenizer, ids)[1].text == "abc"
    shown = generate(byte_tokenizer, ids, skip_special_tokens=False)[1]
    assert shown.text == "ab<eos>c"
    ended = generate(byte_tokenizer, ids, end="stop", skip_special_tokens=False)[1]
    assert ended.text == "ab<eos>" and len(ended.token_ids) == 4
    kept = generate(byte_tokenizer, ids, end="stop", include_stop_str_in_output=True)[1]
    assert kept.text == "abc"
    assert generate(byte_tokenizer, ids, detokenize=False)[1].text == ""


def test_what_may_become_a_long_stop_string_is_held_back_from_the_start(byte_tokenizer):
    texts, output = generate(byte_tokenizer, "hello world", stop=["lo world, and more"])
    assert output.text == "hello world"
    assert texts[:-1] == [""] * 10 and texts[-1] == "hello world"


def test_stop_strings_end_the_generation(llm):
    asked = dict(temperature=0, max_tokens=60)
    full = complete(llm, "Once upon a time", **asked).text
    stop = full[20:26]
    cut = complete(llm, "Once upon a time", **asked, stop=[stop, "never in there"])
    assert cut.text == full[:full.index(stop)] and len(cut.token_ids) < 60
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


# ------------------------------------------------------------------------- truncated prompts


def test_a_prompt_is_truncated_to_its_last_tokens(llm):
    """In every form, and however long it was."""
    text = "Once upon a time there was a fox. " * 400
    ids = llm.get_tokenizer().encode(text)
    most = llm.inputs.max_model_len
    assert len(ids) > most
    for given, options, count in ((5, {}, 5), (most - 1, {}, most - 1), (-1, {}, most - 3),
                                  (-1, dict(max_tokens=None), most - 1),
                                  (-1, dict(max_tokens=most - 1), 1)):
        params = SamplingParams(**dict(max_tokens=3) | options, temperature=0,
                                truncate_prompt_tokens=given, logit_bias={0: 1e9})
        outputs = run(llm, [text, ids, {"prompt": text, "prompt_token_ids": ids}], params)
        assert [output.prompt_token_ids for output in outputs] == [ids[-count:]] * 3
        assert [output.prompt for output in outputs] == [text, None, text]
    # a shorter prompt is left as it is
    for given in (7, 99, most, 9999, -1):
        params = SamplingParams(max_tokens=3, truncate_prompt_tokens=given)
        assert run(llm, ids[:7], params)[0].prompt_token_ids == ids[:7]
    # each prompt has its own
    params = [SamplingParams(truncate_prompt_tokens=given) for given in (None, 2, 3)]
    outputs = run(llm, [ids[:9]] * 3, params)
    assert [len(output.prompt_token_ids) for output in outputs] == [9, 2, 3]


def test_a_chat_is_truncated(llm, caplog):
    render = pytest.importorskip("nanoengine_extras.tools.chat").render
    chat = [{"role": "user", "content": "47 + 85 =" * 900}]
    params = SamplingParams(temperature=0, max_tokens=3, truncate_prompt_tokens=-1)
    ids = render(llm.inputs, chat)[0]["prompt_token_ids"]
    check_refused("max_model_len", llm.chat, chat, SamplingParams(max_tokens=3), use_tqdm=False)
    (output,) = llm.chat(chat, params, use_tqdm=False)
    assert output.prompt_token_ids == ids[3 - llm.inputs.max_model_len:]
    *_, last = llm.stream_chat(chat, params)
    assert last.prompt_token_ids == output.prompt_token_ids and last.outputs == output.outputs
    assert "indexing errors" not in caplog.text


@pytest.mark.needs("running.strict")
def test_truncation_that_leaves_nothing(llm):
    most = llm.inputs.max_model_len
    for given, more in ((0, {}), (-1, dict(max_tokens=most))):
        message = (f"truncate_prompt_tokens={given} is not accepted: it must be at least 1, or -1 "
                   f"with max_tokens below max_model_len={most}$")
        params = SamplingParams(truncate_prompt_tokens=given, **more)
        check_refused(message, llm.generate, "a", params)
    check_refused("prompts.0. has 2048 tokens", llm.generate, [1] * 9999,
                  SamplingParams(truncate_prompt_tokens=most))
