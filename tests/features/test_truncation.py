"""`truncate_prompt_tokens`: the end of a prompt that is too long."""

import pytest
from conftest import generate

from nanoengine import SamplingParams
from nanoengine_extras.tools.chat import render


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
        outputs = generate(llm, [text, ids, {"prompt": text, "prompt_token_ids": ids}], params)
        assert [output.prompt_token_ids for output in outputs] == [ids[-count:]] * 3
        assert [output.prompt for output in outputs] == [text, None, text]
    # a shorter prompt is left as it is
    for given in (7, 99, most, 9999, -1):
        params = SamplingParams(max_tokens=3, truncate_prompt_tokens=given)
        assert generate(llm, ids[:7], params)[0].prompt_token_ids == ids[:7]
    # each prompt has its own
    params = [SamplingParams(truncate_prompt_tokens=given) for given in (None, 2, 3)]
    outputs = generate(llm, [ids[:9]] * 3, params)
    assert [len(output.prompt_token_ids) for output in outputs] == [9, 2, 3]


def test_a_chat_is_truncated(llm, caplog):
    chat = [{"role": "user", "content": "47 + 85 =" * 900}]
    params = SamplingParams(temperature=0, max_tokens=3, truncate_prompt_tokens=-1)
    ids = render(llm.inputs, chat)[0]["prompt_token_ids"]
    with pytest.raises(ValueError, match="max_model_len"):
        llm.chat(chat, SamplingParams(max_tokens=3), use_tqdm=False)
    (output,) = llm.chat(chat, params, use_tqdm=False)
    assert output.prompt_token_ids == ids[3 - llm.inputs.max_model_len:]
    *_, last = llm.stream_chat(chat, params)
    assert last.prompt_token_ids == output.prompt_token_ids and last.outputs == output.outputs
    assert "indexing errors" not in caplog.text


@pytest.mark.needs("running.strict")
def test_truncation_that_leaves_nothing(llm):
    most = llm.inputs.max_model_len
    for options in (dict(truncate_prompt_tokens=0),
                    dict(truncate_prompt_tokens=-1, max_tokens=most)):
        with pytest.raises(ValueError, match=(
                f"truncate_prompt_tokens={options['truncate_prompt_tokens']} is not accepted: it "
                f"must be at least 1, or -1 with max_tokens below max_model_len={most}$")):
            llm.generate("a", SamplingParams(**options))
    with pytest.raises(ValueError, match="prompts.0. has 2048 tokens"):
        llm.generate([1] * 9999, SamplingParams(truncate_prompt_tokens=most))
    for wrong in (-2, 1.5, "1"):
        with pytest.raises(ValueError, match="^truncate_prompt_tokens="):
            SamplingParams(truncate_prompt_tokens=wrong)
