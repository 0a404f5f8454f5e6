"""What `sampling_params=None` stands for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import check_refused, for_feature

from nanoengine import LLM, SamplingParams
from nanoengine.loader import load_eos
from nanoengine_extras.models.generation_config import load_defaults


@pytest.mark.parametrize("content, message", [
    ('{"eos_token_id": "x"}', "generation_config.json: eos_token_id='x'"),
    ('{"eos_token_id": [1, null]}', "eos_token_id=.1, None"),
    ('{"eos_token_id": true}', "eos_token_id=True"),
    *for_feature("running.strict",
                 ('{"temperature": "hot"}', "(?s)generation_config.*temperature"),
                 ('{"top_k": 1.5}', "(?s)generation_config.json: .*top_k"))])
def test_wrong_values_are_named(text_copy, content, message):
    (text_copy / "generation_config.json").write_text(content)
    check_refused(message, LLM, str(text_copy))


def defaults_of(folder: Path, content, tokenizer=None):
    (folder / "generation_config.json").write_text(json.dumps(content))
    config: Any = SimpleNamespace(eos_token_id=9, vocab_size=99)
    return load_defaults(folder), load_eos(folder, config, tokenizer)


def test_what_counts_of_the_generation_config_is_what_counts_in_vllm(text_copy, caplog):
    counts = dict(temperature=0.6, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1,
                  presence_penalty=0.2, frequency_penalty=0.3, skip_special_tokens=False)
    content = counts | dict(max_new_tokens=7, do_sample=True, eos_token_id=[2, 5], top_h=None,
                            pad_token_id=0, transformers_version="5", num_beams=1, max_length=None)
    params, eos_tokens = defaults_of(text_copy, content)
    assert params == SamplingParams(**counts, max_tokens=7) and eos_tokens == {2: 2, 5: 5}
    assert defaults_of(text_copy, {}) == (SamplingParams(), {9: 9})
    # a tokenizer may know more tokens than the model, which it can never sample
    for eos, expected in ((98, {9: 9, 98: None}), (99, {9: 9}), (None, {9: 9})):
        tokenizer = SimpleNamespace(eos_token_id=eos)
        assert defaults_of(text_copy, {}, tokenizer)[1] == expected
    own = SimpleNamespace(eos_token_id=5)
    assert defaults_of(text_copy, content, own)[1] == {2: 2, 5: None}
    assert defaults_of(text_copy, {"eos_token_id": 4}, own)[1] == {4: 4, 5: None}
    assert defaults_of(text_copy, {"eos_token_id": [-1, 3, 99, 10**30]})[1] == {3: 3}
    (text_copy / "generation_config.json").write_text(json.dumps(content))
    with LLM(str(text_copy), num_kv_blocks=8) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == params
        defaults.max_tokens = 1
        outputs = llm.generate("Once", use_tqdm=False)[0].outputs
        assert len(outputs[0].token_ids) <= 7 and llm.get_default_sampling_params() == params
        (request,) = llm.add("Once")
        llm.abort([request])
        assert request.seq.params == params
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("content, names", [
    (dict(num_beams=4, temperature=0.5), "num_beams"), (dict(do_sample=False), "do_sample"),
    (dict(no_repeat_ngram_size=3, typical_p=0.9), "no_repeat_ngram_size', 'typical_p"),
    (dict(suppress_tokens=[1], max_length=99), "max_length', 'suppress_tokens"),
    (dict(no_repeat_ngram_size=1, foo=5, early_stopping=False), "foo', 'no_repeat_ngram_size")])
def test_what_does_not_count_is_named_in_a_warning(text_copy, caplog, content, names):
    defaults_of(text_copy, content)
    message, = caplog.messages
    assert message.endswith(f"generation_config.json: ['{names}'] have no effect here")
