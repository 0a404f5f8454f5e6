"""OpenAI's format without a server; test_serve.py and test_batch.py have more."""

import json
import shutil

import pytest
from conftest import for_feature
from tokenizers import Tokenizer, decoders, models

from nanoengine import LLM, SamplingParams
from nanoengine_extras.tools.openai_format import (
    CHAT,
    COMPLETION,
    IGNORED,
    KNOWN,
    NEUTRAL,
    Body,
    object_of,
    options_of,
)
from nanoengine_extras.tools.openai_format.logprobs import by_text, bytes_of

pytestmark = pytest.mark.needs(
    "tools.chat", "sampling.constraints", "models.generation_config", "sampling.logprobs",
    "running.strict", "sampling.structured_outputs", "sampling.texts")


def read(llm, body: dict, url: str = COMPLETION) -> Body:
    found = Body(url, "1")
    found.read(body, llm)
    return found


def answer(llm, body: dict, url: str = COMPLETION) -> dict:
    found = read(llm, body, url)
    outputs = llm.generate(found.prompts, found.params, use_tqdm=False)
    # they can end in any order
    return found.response(outputs[::-1], "m")


def test_what_has_no_effect_is_accepted(llm):
    for url, body in ((COMPLETION, {"prompt": "a"}), (CHAT, {"messages": [
            {"role": "user", "content": "a"}]})):
        plain = read(llm, body, url)
        given = dict.fromkeys(IGNORED, "x") | NEUTRAL | dict.fromkeys(KNOWN[url] - body.keys())
        same = read(llm, given | body, url)
        assert vars(same) == vars(plain)
        # vLLM's fields at their defaults
        read(llm, body | {"include_reasoning": True, "spaces_between_special_tokens": True,
                          "return_token_ids": False, "return_tokens_as_token_ids": False,
                          "return_weight_versions": False, "session_id": "a",
                          "return_token_offsets": False, "thinking_token_budget": -1,
                          "truncation_side": "left", "mm_payload": "tensors",
                          "routed_experts_prompt_start": 0}, url)
        with pytest.raises(ValueError, match="return_token_ids=True is not supported .*: omit it"):
            read(llm, body | {"return_token_ids": True}, url)
        # chat templates write special tokens themselves
        read(llm, body | {"add_special_tokens": url == COMPLETION}, url)
        with pytest.raises(ValueError, match="add_special_tokens=.* is not supported .*: omit it"):
            read(llm, body | {"add_special_tokens": url == CHAT}, url)
        # nothing is near enough
        with pytest.raises(ValueError, match="verbosity='low' is not supported .*: omit"):
            read(llm, body | {"verbosity": "low"}, url)


def test_reasoning_effort_turns_thinking_on_or_off(llm):
    body = {"messages": [{"role": "user", "content": "a"}],
            "chat_template": "{{ reasoning_effort }} {{ enable_thinking }}"}
    for further, text in (({}, " "), ({"reasoning_effort": "none"}, "none False"),
                          ({"reasoning_effort": "low"}, "low True"),
                          ({"reasoning_effort": "low",
                            "chat_template_kwargs": {"enable_thinking": False}}, "low False")):
        assert read(llm, body | further, CHAT).prompts[0]["prompt"] == text


@pytest.mark.parametrize("is_echo", [False, True])
def test_several_prompts_in_their_order(llm, is_echo):
    prompts = ["12 + 34 =", "47 + 85 ="]
    found = answer(llm, {"prompt": prompts, "temperature": 0, "echo": is_echo})
    texts = [f"{prompt if is_echo else ''}{text}" for prompt, text in zip(prompts, (" 46", " 132"))]
    assert [choice["text"] for choice in found["choices"]] == texts
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["id"] == "cmpl-1" and found["object"] == "text_completion"


def test_an_echo_of_token_ids_has_their_text(llm):
    """Half characters, too: the tokens, joined, are the text."""
    tokenizer = llm.get_tokenizer()
    for text in ("a 日本 b", "<|im_start|>a", "x"):
        ids = tokenizer.encode(text)
        body = {"echo": True, "max_tokens": 0, "logprobs": 1}
        for prompt in (text, ids):
            choice, = answer(llm, body | {"prompt": prompt})["choices"]
            assert choice["text"] == text and choice["finish_reason"] == "length"
            assert choice["stop_reason"] is None
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"][1:]) in text
            assert len({len(each) for each in logprobs.values()}) == 1
            assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
            json.dumps(choice, allow_nan=False)


def test_an_echo_alone_ends_as_if_nothing_was_generated(llm):
    """Not with the stop token that the engine generates."""
    body = {"prompt": "47 + 85 =", "temperature": 0, "stop_token_ids": [*range(500)]}
    assert answer(llm, body | {"max_tokens": 1})["choices"][0]["finish_reason"] == "stop"
    found = answer(llm, body | {"max_tokens": 0, "echo": True})
    choice, = found["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("entries, most, impl", [
    ({"max_new_tokens": 7}, 7, "native"), ({}, None, "native"),
    *for_feature("models.transformers_models", ({"max_new_tokens": 7}, 7, "transformers"))])
def test_the_most_tokens_of_a_chat(bundled, tmp_path, entries, most, impl):
    """As in vLLM, the model's file has the default of chats, but not that of completions."""
    folder = shutil.copytree(bundled, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(entries))
    body: dict = {"messages": [{"role": "user", "content": "a"}]}
    with LLM(folder, num_kv_blocks=8, model_impl=impl) as llm:
        assert read(llm, body, CHAT).params.max_tokens == most
        for name in ("max_tokens", "max_completion_tokens"):
            assert read(llm, body | {name: 9}, CHAT).params.max_tokens == 9
        # as in OpenAI's API, null is the default; vLLM's server fails there
        for given in ({}, {"max_tokens": None}):
            assert read(llm, {"prompt": "a"} | given).params.max_tokens == 16


def test_an_echo_does_not_change_what_follows(llm):
    body = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 9, "logprobs": 2}
    plain, = answer(llm, body)["choices"]
    echoed, = answer(llm, body | {"echo": True})["choices"]
    assert echoed["text"] == body["prompt"] + plain["text"]
    for name, values in plain["logprobs"].items():
        count = len(values)
        if name != "text_offset":
            assert echoed["logprobs"][name][-count:] == values
    assert echoed["logprobs"]["text_offset"][-1] == len(
        "".join(echoed["logprobs"]["tokens"][:-1]))


def test_names_of_likeliest_tokens(llm):
    params = SamplingParams(temperature=0, logprobs=-1, max_tokens=1)
    output, = llm.generate("日", params, use_tqdm=False)
    found, = output.outputs[0].logprobs
    named = by_text(found)
    assert len(named) == len(found)
    names = [each.decoded_token for each in sorted(found.values(), key=lambda each: each.rank)]
    assert [*named][0] == names[0] == output.outputs[0].text
    assert len({*names}) + sum(name.startswith("token_id:") for name in named) == len(named)


@pytest.mark.parametrize("text", ["", "[]", "5", "{", '{"a": NaN}', '{"a": 1e999}', "null"])
def test_what_is_no_object(text):
    with pytest.raises(ValueError, match="JSON"):
        object_of(text.encode())
    with pytest.raises(ValueError, match="^--options: JSON"):
        options_of(text)
    assert options_of('{"max_num_seqs": 4}') == {"max_num_seqs": 4}


FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                              decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize("decoder, names, expected", [
    # byte-level: each letter is a byte
    (decoders.ByteLevel(), ["Ġa", "ðŁĺ", "Ģ", "ï¿½", "<0xE2>"],
     [b" a", b"\xf0\x9f\x98", b"\x80", "\ufffd".encode(), b"<0xE2>"]),
    (FALLBACK, ["▁a", "b", "<0xE6>", "<0x97>", "<0xA5>", "<0x41>", "日"],
     [b" a", b"b", b"\xe6", b"\x97", b"\xa5", b"A", "日".encode()])])
def test_bytes_of_tokens(decoder, names, expected):
    """Joined, they are the text, also where a character has several tokens."""
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<é|日>"])
    assert [bytes(bytes_of(tokenizer, place)) for place in range(len(names))] == expected
    text = tokenizer.decode([*range(len(names))])
    assert b"".join(expected).decode().strip() == text.strip()
    assert bytes_of(tokenizer, 10**6) == []


def test_bytes_in_answers(llm):
    """Of the chosen tokens, and of the likeliest ones."""
    text = "😀é日 — a"
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3,
            "max_tokens": 60, "structured_outputs": {"choice": [text]}}
    choice, = answer(llm, body, CHAT)["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in entries).startswith(text.encode())
    for each in entries:
        assert each["bytes"] and len(each["top_logprobs"]) == 3
        assert all(top["bytes"] == [*top["token"].encode()] for top in each["top_logprobs"]
                   if "\ufffd" not in top["token"] and top["token"].isascii() and top["token"])
    assert any(not each["token"] for each in entries), "a part of a character"
