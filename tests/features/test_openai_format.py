"""OpenAI's format: requests, what is refused, and answers; test_serve.py and test_batch.py send
them."""

import json
import re
import shutil
import time

import pytest
from conftest import check_refused, for_feature
from tokenizers import Tokenizer, decoders, models

from nanoengine import LLM
from nanoengine_extras.tools.openai_format import (
    CHAT, COMPLETION, IGNORED, KNOWN, NEUTRAL, Body, error_of, object_of)
from nanoengine_extras.tools.openai_format.logprobs import bytes_in

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


def chat(content: object = "12 + 34", **more: object) -> dict:
    return {"messages": [{"role": "user", "content": content}]} | more


def test_what_has_no_effect_is_accepted(llm):
    for url, body in ((COMPLETION, {"prompt": "a"}), (CHAT, chat())):
        plain = read(llm, body, url)
        given = dict.fromkeys(IGNORED, "x") | NEUTRAL | dict.fromkeys(KNOWN[url] - body.keys())
        same = read(llm, given | body, url)
        assert vars(same) | {"reasoning": 0} == vars(plain) | {"reasoning": 0}
        # vLLM's fields at their defaults
        read(llm, body | {"include_reasoning": True, "spaces_between_special_tokens": True,
                          "return_token_ids": False, "return_tokens_as_token_ids": False,
                          "return_weight_versions": False, "session_id": "a",
                          "return_token_offsets": False, "thinking_token_budget": -1,
                          "truncation_side": "left", "mm_payload": "tensors",
                          "routed_experts_prompt_start": 0,
                          # chat templates write special tokens themselves
                          "add_special_tokens": url == COMPLETION}, url)


# ------------------------------------------------------------------------------ what is asked for


EVERYTHING = dict(
    n=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=4, max_tokens=3, min_tokens=1,
    stop=["x"], stop_token_ids=[9], include_stop_str_in_output=True, ignore_eos=True,
    logprobs=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
    bad_words=["y"], allowed_token_ids=[5, 6, 7], skip_special_tokens=False)


@pytest.mark.parametrize("body, expected", [
    ({"prompt": "a", "logit_bias": {"5": 1.5}} | EVERYTHING, EVERYTHING | {"logit_bias": {5: 1.5}}),
    # of the model's generation_config.json, which says nothing else
    ({"prompt": "a", "max_tokens": None}, {"max_tokens": 16, "top_k": 50}),
    (chat(temperature=0), {"max_tokens": None, "logprobs": None, "temperature": 0}),
    (chat(max_tokens=5, max_completion_tokens=1), {"max_tokens": 1}),
    (chat(max_tokens=2, logprobs=True, top_logprobs=3), {"max_tokens": 2, "logprobs": 3}),
    (chat(logprobs=True), {"logprobs": 0})])
def test_parameters_reach_the_engine(llm, body, expected):
    params = read(llm, body, CHAT if "messages" in body else COMPLETION).params
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.seed == expected.get("seed")


THINKS = {"chat_template": "{{ reasoning_effort }} {{ enable_thinking }}"}


@pytest.mark.parametrize("more, prompt", [
    (THINKS, " "), (THINKS | {"reasoning_effort": "none"}, "none False"),
    (THINKS | {"reasoning_effort": "low"}, "low True"),
    (THINKS | {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
     "low False"),
    (dict(chat_template="{{ x }}{{ messages[0].content }}{{ tools[0].type }}{{ reasoning_effort }}",
          chat_template_kwargs={"x": "<"}, reasoning_effort="low", tool_choice="none",
          tools=[{"type": "function"}]), "<12 + 34functionlow"),
    (dict(add_generation_prompt=False, continue_final_message=True), "<|im_start|>user\n12 + 34"),
    (dict(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
          add_generation_prompt=False), "<|im_start|>user\na\nb<|im_end|>\n")])
def test_options_of_templates(llm, more, prompt):
    assert read(llm, chat() | more, CHAT).prompts[0]["prompt"] == prompt


def schema_of(kind: str) -> dict:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": kind}}}


# what is refused: a change of a good body, the parameter that the message begins with, and what it
# says
BAD = [
    ({"add_special_tokens": False}, "add_special_tokens", "omit it"),
    ({"prompt": None}, "prompt", ""), ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "has 0 tokens"), ({"prompt": 5}, "prompt", ""),
    ({"prompt": ["a", 5]}, "prompt", ""), ({"prompt": "\ud800"}, "prompt", ""),
    ({"prompt": [5] * 5000}, "prompt", "max_model_len"),
    ({"prompt": "word " * 5000}, "prompt", "max_model_len"),
    ({"prompt": [99999]}, "prompt", "vocabulary"),
    # test_strict.py has more bad values
    ({"temperature": -1}, "temperature", "-1 is"), ({"bad_words": ["\ud800"]}, "bad_words", ""),
    ({"n": 2, "temperature": 0}, "n", "temperature=0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"), ({"logit_bias": [1]}, "logit_bias", "list"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ({"response_format": {"type": "xml"}}, "response_format", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format", ""),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format", ""),
    ({"response_format": schema_of("foo")}, "response_format", "line 1: failed to"),
    ({"response_format": schema_of("object"), "structured_outputs": {"regex": "a"}},
     "response_format", "must be left out"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs", "unclosed group"),
    ({"stream": "yes"}, "stream", ""), ({"stream_options": 5}, "stream_options", ""),
    ({"stream": True, "stream_options": {"include_usage": "no"}}, "include_usage", ""),
    ({"stream_options": {"continuous_usage_stats": 5}}, "continuous_usage_stats", ""),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options", ""),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream=true"),
    ({"echo": 5}, "echo", ""), ({"echo": True, "logprobs": -2}, "logprobs", ""),
    ({"echo": True, "max_tokens": -1}, "max_tokens", ""), ({"suffix": "x"}, "suffix", "omit it"),
    ({"best_of": 2}, "best_of", "omit it"), ({"self": 1}, "self", ""), ({"\ud800": 1}, None, ""),
    ({"messages": []}, "messages", ""), ({"prompt_logprobs": 1}, "prompt_logprobs", ""),
    ({"temperatur": 1}, "temperatur", "completions: the nearest is temperature"),
    ({"max_token": 1}, "max_token", "nearest is max_tokens"),
    ({"max_completion_tokens": 1}, "max_completion_tokens", ""),
    *(({f"guided_{name}": 5}, f"guided_{name}", "the nearest is structured_outputs")
      for name in ("json", "choice", "regex", "grammar"))]
BAD_CHATS = [
    ({"add_special_tokens": True}, "add_special_tokens", "omit it"),
    *(({"messages": each}, "messages", "") for each in (
        None, [], "x", ["x"], [[], []], [{"content": "x"}], [{"role": 5, "content": "x"}])),
    (chat(5), "messages", "content="), (chat([{"type": "image_url"}]), "messages", "content="),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_tokens=-1"),
    ({"max_completion_token": 1}, "max_completion_token", "nearest is max_completion_tokens"),
    ({"logprobs": 5}, "logprobs", ""), ({"top_logprobs": 2}, "logprobs", "for top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "logprobs=-2"),
    ({"logprobs": True, "top_logprobs": "x"}, "top_logprobs", "logprobs"),
    ({"response_format": schema_of("foo")}, "response_format", "line 1: failed to"),
    ({"prompt": "x"}, "prompt", ""), ({"echo": True}, "echo", ""),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "dict"),
    ({"chat_template_kwargs": 5, "reasoning_effort": "low"}, "chat_template_kwargs", "=5"),
    *(({"chat_template": each}, "chat_template", "") for each in ("{% x %}", 5)),
    ({"continue_final_message": True}, "continue_final_message", ""),
    *(({name: "false"}, name, "True or False")
      for name in ("continue_final_message", "add_generation_prompt")),
    ({"tool_choice": "auto"}, "tool_choice", ""), ({"tools": [5]}, "tools", "")]


@pytest.mark.parametrize("url, good, bad", [
    (COMPLETION, {"prompt": "12 + 34 ="}, BAD), (CHAT, chat(), BAD_CHATS)])
def test_bad_input_is_named(llm, url, good, bad):
    # nothing is near enough to these
    of_both = [({"return_token_ids": True}, "return_token_ids", "omit it"),
               ({"verbosity": "low"}, "verbosity", f"='low' is not supported by {url}: omit it")]
    for change, name, words in bad + of_both:
        with pytest.raises(ValueError) as found:
            body = read(llm, good | change, url)
            llm.add(body.prompts, body.params)
        message = str(found.value).encode(errors="replace").decode()
        error = error_of(message, 400, url)["error"]
        assert error == {"message": message, "type": "invalid_request_error", "param": name,
                         "code": None}, change
        assert words in message, (change, message)
    assert not llm.active


# ---------------------------------------------------------------------------------------- answers


def test_a_whole_answer(llm):
    found = answer(llm, chat(temperature=0), CHAT)
    count = len(read(llm, chat(), CHAT).prompts[0]["prompt_token_ids"])
    assert abs(found.pop("created") - time.time()) < 60
    assert found == {
        "id": "cmpl-1", "object": "chat.completion", "model": "m", "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "46", "refusal": None},
            "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": count, "completion_tokens": 3, "total_tokens": count + 3}}


def test_several_prompts_in_their_order(llm):
    prompts = ["12 + 34 =", "47 + 85 ="]
    asked = {"prompt": prompts, "temperature": 0, "stop": "3"}
    for is_echo, texts in ((False, [" 46", " 1"]), (True, ["12 + 34 = 46", "47 + 85 = 1"])):
        found = answer(llm, asked | {"echo": is_echo})
        assert [(choice["index"], choice["text"], choice["finish_reason"], choice["stop_reason"])
                for choice in found["choices"]] == [
            (0, texts[0], "stop", 0), (1, texts[1], "stop", "3")]
        assert found["object"] == "text_completion"


def test_structured_outputs(llm):
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
              "required": ["age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": schema}}
    for choice in answer(llm, chat(response_format=form, n=2, seed=1), CHAT)["choices"]:
        assert json.loads(choice["message"]["content"])["age"] <= 99
    plain = {"response_format": {"type": "text", "json_schema": None}}
    animals = {"structured_outputs": {"choice": ["cat", "dog"]}}
    for more, pattern in ((animals, "cat|dog"), (plain | animals, "cat|dog"), (plain, " 46"),
                          ({"response_format": {"type": "json_object"}}, r"\{(?s:.)*")):
        body = {"prompt": "12 + 34 =", "temperature": 0} | more
        assert re.fullmatch(pattern, answer(llm, body)["choices"][0]["text"])


def test_an_echo_scores_the_prompt(llm):
    """As the engine scores it. Joined, the tokens are the text, half characters and all."""
    tokenizer = llm.get_tokenizer()
    every_token = [*range(llm.inputs.vocab_size)]
    for text in ("12 + 34 = 46", "a 日本 b", "<|im_start|>a", "x"):
        ids = tokenizer.encode(text)
        scores = llm.score(ids[:1], [ids[1:]], use_tqdm=False) if ids[1:] else []
        for prompt in (text, ids):
            for most in (0, 1):
                # not with the stop token that the engine generates for an echo alone
                found = answer(llm, {"prompt": prompt, "echo": True, "max_tokens": most,
                                     "logprobs": 1, "stop_token_ids": every_token})
                choice, = found["choices"]
                logprobs = choice["logprobs"]
                assert choice["text"].startswith(text)
                assert choice["finish_reason"] == ("stop" if most else "length")
                assert (choice["stop_reason"] is None) == (most == 0)
                assert found["usage"] == {"prompt_tokens": len(ids), "completion_tokens": most,
                                          "total_tokens": len(ids) + most}
                assert {len(each) for each in logprobs.values()} == {len(ids) + most}
                assert "".join(logprobs["tokens"][1:len(ids)]) in text
                assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
                for score in scores:
                    assert logprobs["token_logprobs"][1:len(ids)] == pytest.approx(
                        score.logprobs, abs=1e-5)
                for value, top in [*zip(*(logprobs[name] for name in (
                        "token_logprobs", "top_logprobs")))][1:]:
                    assert value in top.values() and 1 <= len(top) <= 2
                json.dumps(choice, allow_nan=False)


def test_an_echo_does_not_change_what_follows(llm):
    body = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 9, "logprobs": 2}
    plain, = answer(llm, body)["choices"]
    echoed, = answer(llm, body | {"echo": True})["choices"]
    assert echoed["text"] == body["prompt"] + plain["text"]
    assert plain["text"] == "".join(plain["logprobs"]["tokens"])
    assert [2 <= len(top) <= 3 for top in plain["logprobs"]["top_logprobs"]] == [True] * 9
    for name, values in plain["logprobs"].items():
        if name != "text_offset":
            assert echoed["logprobs"][name][-len(values):] == values
    assert echoed["logprobs"]["text_offset"][-1] == len(
        "".join(echoed["logprobs"]["tokens"][:-1]))


def test_tokens_with_the_same_text_are_different_entries(llm):
    """The likeliest one has the text as its name; the others have their number."""
    body = {"prompt": "日", "logprobs": -1, "max_tokens": 1, "temperature": 0}
    choice, = answer(llm, body)["choices"]
    top, = choice["logprobs"]["top_logprobs"]
    assert len(top) == llm.model_config.vocab_size and [*top][0] == choice["text"]
    assert [*top.values()] == sorted(top.values(), reverse=True)
    named = [name for name in top if name.startswith("token_id:")]
    assert 100 < len(named) < len(top) - 100, "halves have no text"


@pytest.mark.parametrize("entries, most, impl", [
    ({"max_new_tokens": 7}, 7, "native"), ({}, None, "native"),
    *for_feature("models.transformers_models", ({"max_new_tokens": 7}, 7, "transformers"))])
def test_the_most_tokens_of_a_chat(bundled, tmp_path, entries, most, impl):
    """As in vLLM, the model's file has the default of chats, but not that of completions."""
    folder = shutil.copytree(bundled, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(entries))
    with LLM(folder, num_kv_blocks=8, model_impl=impl) as llm:
        assert read(llm, chat(), CHAT).params.max_tokens == most
        for name in ("max_tokens", "max_completion_tokens"):
            assert read(llm, chat() | {name: 9}, CHAT).params.max_tokens == 9
        # as in OpenAI's API, null is the default; vLLM's server fails there
        for given in ({}, {"max_tokens": None}):
            assert read(llm, {"prompt": "a"} | given).params.max_tokens == 16


@pytest.mark.parametrize("data", [
    b"", b"[]", b"[1]", b"5", b"{", b'{"a": NaN}', b'{"a": 1e999}', b"null", b"\xff",
    b"[" * 100_000], ids=lambda data: str(data[:9]))
def test_what_is_no_object(data):
    check_refused("JSON", object_of, data)


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
    assert [bytes(bytes_in(tokenizer, place)) for place in range(len(names))] == expected
    text = tokenizer.decode([*range(len(names))])
    assert b"".join(expected).decode().strip() == text.strip()
    assert bytes_in(tokenizer, 10**6) == []


def test_bytes_in_answers(llm):
    """Of the chosen tokens, and of the likeliest ones."""
    text = "😀é日 — a"
    body = chat(logprobs=True, top_logprobs=3, max_tokens=60, structured_outputs={"choice": [text]})
    choice, = answer(llm, body, CHAT)["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in entries).startswith(text.encode())
    for each in entries:
        assert each["bytes"] and len(each["top_logprobs"]) == 3
        assert all(top["bytes"] == [*top["token"].encode()] for top in each["top_logprobs"]
                   if "\ufffd" not in top["token"] and top["token"].isascii() and top["token"])
    assert any(not each["token"] for each in entries), "a part of a character"
