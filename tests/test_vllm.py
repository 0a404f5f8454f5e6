"""vLLM's interface: what a script written for it may use."""

import dataclasses
import re
import subprocess
import sys

import pytest
from conftest import ROOT, check_idle, random_prompts, token_ids

import nanoengine
from nanoengine.config import EngineConfig
from nanoengine_extensions import vllm
from nanoengine_extensions.vllm import (
    LLM,
    NEUTRAL,
    OFF,
    WITHOUT_EFFECT,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    without,
)

GREEDY = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", max_num_seqs=8, num_kv_blocks=128) as llm:
        yield llm
        check_idle(llm)


def generate(llm, prompts, params=GREEDY, **options) -> list:
    return llm.generate(prompts, params, use_tqdm=False, **options)


# vLLM's examples/offline_inference/basic, in short
SCRIPT = """if True:
    from nanoengine_extensions.vllm import LLM, SamplingParams
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL, trust_remote_code=False, enforce_eager=True)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    conversation = [{"role": "system", "content": "You are helpful"},
                    {"role": "user", "content": [{"type": "text", "text": "12 + 34"}]}]
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 5
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print(len(outputs[0].outputs[0].token_ids) <= 5, outputs[0].finished)
"""


def test_a_script_written_for_vllm(bundled):
    done = subprocess.run([sys.executable, "-c", SCRIPT.replace("MODEL", repr(bundled))],
                          capture_output=True, text=True, check=True, cwd=ROOT)
    first, second, chat = done.stdout.splitlines()
    assert first.startswith("Prompt: 'Hello, my name is', Generated text: '")
    assert second.startswith("Prompt: 'The future of AI is', Generated text: '")
    assert chat == "True True"


def test_it_changes_nothing_of_the_engines_own():
    script = """if True:
        import nanoengine
        before = {cls: set(dir(cls)) for cls in vars(nanoengine).values() if isinstance(cls, type)}
        import nanoengine_extensions.vllm
        assert before and all(set(dir(cls)) == names for cls, names in before.items())"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# -------------------------------------------------------------------------------- keywords


def test_keywords_that_change_nothing_are_accepted(tiny):
    assert {str(value) for value in (False, 0, 1, {}, "auto")} <= NEUTRAL
    for value in (None, False, 0, 1, {}, "auto"):
        assert without(dict.fromkeys(OFF, value) | dict(seed=3)) == dict(seed=3)
    assert without(dict(seed=None, tokenization_kwargs=None, dtype="auto")) == dict(dtype="auto")
    for value in (True, 2, "other", ["a"], {"a": 1}):
        assert without(dict.fromkeys(WITHOUT_EFFECT, value)) == {}
        for name in OFF:
            with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not accepted")):
                LLM(tiny, **{name: value})
    assert not (OFF | WITHOUT_EFFECT) & {field.name for field in dataclasses.fields(EngineConfig)}
    neutral = dict.fromkeys(OFF) | dict.fromkeys(WITHOUT_EFFECT, True)
    with LLM(tiny, num_kv_blocks=16, **neutral, seed=None, max_model_len=-1) as llm:
        assert llm.config.seed == 0 and llm.inputs.max_model_len == 512


@pytest.mark.parametrize("name, value, accepted", [
    ("pipeline_parallel_size", 2, "this engine has nothing like it"),
    ("quantization", "awq", "this engine has nothing like it"),
    ("enable_lora", True, "this engine has nothing like it"),
    ("trust_remote_kode", False, "trust_remote_kode"),
    ("block_size", 0, "greater than or equal to 1")])
def test_bad_keywords(bundled, name, value, accepted):
    with pytest.raises(ValueError) as error:
        LLM(bundled, **{name: value})
    assert name in str(error.value) and accepted in str(error.value)


def test_generation_config_of_vllm_gives_neutral_defaults(bundled):
    with LLM(bundled, num_kv_blocks=16, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == nanoengine.SamplingParams()
        assert len(llm.generate("Once", use_tqdm=False)[0].outputs[0].token_ids) <= 16
        assert llm.generate("Once", nanoengine.SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.beam_search("Once", vllm.BeamSearchParams(beam_width=2, max_tokens=2))
    with LLM(bundled, num_kv_blocks=16, generation_config="auto") as llm:
        assert llm.get_default_sampling_params() != nanoengine.SamplingParams()


def test_keywords_of_calls(llm):
    chat = [{"role": "user", "content": ["12 + ", {"type": "text", "text": "34"}]}]
    neutral = dict(lora_request=None, chat_template_content_format="string")
    assert token_ids(generate(llm, "47 + 85 =", **neutral)) == token_ids(generate(llm, "47 + 85 ="))
    assert token_ids(llm.chat(chat, GREEDY, False, **neutral)) == token_ids(
        llm.chat(chat, GREEDY, False))
    for call in (llm.generate, llm.chat):
        with pytest.raises(ValueError, match="lora_request='mine' .*nothing like it"):
            call("a" if call != llm.chat else chat, GREEDY, lora_request="mine")
        with pytest.raises(TypeError, match="lora_requests"):
            call("a" if call != llm.chat else chat, GREEDY, lora_requests="mine")
    beams = vllm.BeamSearchParams(beam_width=2, max_tokens=2)
    assert llm.beam_search("a", beams, lora_request=None, concurrency_limit=3) == llm.beam_search(
        "a", beams)
    for bad in (dict(lora_request="mine"), dict(lora_requests="mine")):
        with pytest.raises((ValueError, TypeError), match=[*bad][0]):
            llm.beam_search("a", beams, **bad)


# ------------------------------------------------------------------- parameters and prompts


def test_sampling_params():
    params = SamplingParams.from_optional(n=2, temperature=None, stop=None, max_tokens=5)
    assert params == SamplingParams(n=2, max_tokens=5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional() == SamplingParams() == SamplingParams(
        temperature=None, seed=None, extra_args=None, structured_outputs=None, skip_clone=None)
    assert SamplingParams(max_tokens=None).max_tokens is None
    with pytest.raises(ValueError, match="structured_outputs='json'"):
        SamplingParams(structured_outputs="json")
    copy = params.clone()
    copy.stop.append("b")
    assert (params.stop, copy.stop, type(copy)) == ([], ["b"], SamplingParams)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2)
    final = SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True, max_tokens=5)
    assert final == SamplingParams(max_tokens=5) and RequestOutputKind.DELTA.value == 1
    with pytest.raises(ValueError, match="temprature .*temperature"):
        SamplingParams(temprature=1)


def test_extra_args_are_kept(llm):
    extra = {"mine": [object(), {"x": 2**64}]}
    params = SamplingParams(extra_args=extra, temperature=0, max_tokens=9)
    assert params.extra_args is extra and SamplingParams().extra_args is None
    assert SamplingParams.from_optional(extra_args=extra).extra_args is extra
    assert token_ids(generate(llm, "Once", params)) == token_ids(generate(llm, "Once"))


def test_params_of_the_engine_serve_too(llm):
    own = nanoengine.SamplingParams(temperature=0, max_tokens=9)
    assert token_ids(generate(llm, "Once", own)) == token_ids(generate(llm, "Once"))
    streamed = [token_ids([output])[0] for output in llm.stream("Once", own)]
    assert streamed == [token_ids([output])[0] for output in llm.stream("Once", GREEDY)]
    assert len(streamed) > 3


def test_prompts_as_typed_dicts(llm):
    ids = llm.get_tokenizer().encode("47 + 85 =")
    prompts = [TextPrompt(prompt="47 + 85 ="), TokensPrompt(prompt_token_ids=ids),
               TokensPrompt(prompt_token_ids=ids, prompt="mine")]
    outputs = generate(llm, prompts)
    assert len({tuple(ids) for ids in token_ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["47 + 85 =", None, "mine"]


def test_logprobs_have_no_limit(tiny):
    with LLM(tiny, max_logprobs=2, num_kv_blocks=8) as llm:
        (output,) = generate(llm, [[1, 2]], SamplingParams(logprobs=-1, max_tokens=1))
        assert len(output.outputs[0].logprobs[0]) == 320


def test_metrics_and_engine(llm):
    requests = llm.add(["Once", "Twice"], GREEDY)
    assert llm.llm_engine.get_num_unfinished_requests() == 2
    llm.abort(requests)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    configs = llm.llm_engine.vllm_config
    assert configs.cache_config.enable_prefix_caching
    assert configs.model_config.max_model_len == llm.inputs.max_model_len
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:generation_tokens"] == llm.metrics()["generation_tokens"] > 0
    assert metrics["vllm:num_requests_running"] == 0
    with pytest.raises(vllm.VLLMValidationError, match="vocabulary"):
        generate(llm, [[10**6]])


# --------------------------------------------------------------------------- what comes back


def test_what_comes_back(llm):
    prompts = ["Once upon a time", "47 + 85 ="]
    params = SamplingParams(n=2, seed=1, max_tokens=4, logprobs=1, prompt_logprobs=0)
    plain = nanoengine.LLM.generate(llm, prompts, params, use_tqdm=False)
    for output, expected in zip(generate(llm, prompts, params), plain):
        for name, value in vars(expected).items():
            if name not in ("request_id", "metrics", "num_cached_tokens"):
                assert getattr(output, name) == value, name
        assert output.metrics.first_token_time > 0
    assert isinstance(llm.chat([{"role": "user", "content": "12"}], GREEDY, False)[0],
                      RequestOutput)


def test_structured_outputs(llm):
    digits = vllm.StructuredOutputsParams(regex="[0-9]{3}", json=None)
    either = vllm.GuidedDecodingParams(
        choice=["12", "7"], backend="xgrammar", disable_any_whitespace=True)
    for params in (SamplingParams(structured_outputs=digits, n=3),
                   SamplingParams(structured_outputs=None, guided_decoding=either)):
        for output in generate(llm, ["Once", "12 + 34 ="], params):
            for completion in output.outputs:
                assert completion.text.isdigit() and completion.finish_reason == "stop"


def test_beam_search(tiny):
    prompts = random_prompts([5, 9])
    with LLM(tiny, dtype="float32", num_kv_blocks=64) as llm:
        outputs = llm.beam_search([TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                                  vllm.BeamSearchParams(beam_width=3, max_tokens=6),
                                  use_tqdm=False)
    assert all(isinstance(output, vllm.BeamSearchOutput) for output in outputs)
    for output, prompt in zip(outputs, prompts):
        assert len(output.sequences) == 3
        for beam in output.sequences:
            assert isinstance(beam, vllm.BeamSearchSequence)
            assert beam.tokens[:len(prompt)] == prompt and beam.cum_logprob < 0
