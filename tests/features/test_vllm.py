"""vLLM's names: a script that keeps to those of vLLM's that are there."""

import pytest
from conftest import check_idle, check_refused, generate, token_ids
from forks import run_in_fork

import nanoengine
from nanoengine_extras.tools import vllm
from nanoengine_extras.tools.vllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", max_num_seqs=8, num_kv_blocks=128) as llm:
        yield llm
        check_idle(llm)


# vLLM's examples/offline_inference/basic, in short
SCRIPT = """if True:
    import nanoengine
    before = {cls: set(dir(cls)) for cls in vars(nanoengine).values() if isinstance(cls, type)}
    from nanoengine_extras.tools.vllm import LLM, SamplingParams
    # of the engine's own classes, nothing has changed
    assert before and all(set(dir(cls)) == names for cls, names in before.items())
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL, enforce_eager=True, num_gpu_blocks_override=64)
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
    done = run_in_fork(SCRIPT.replace("MODEL", repr(bundled)))
    assert done.returncode == 0, done.stderr
    first, second, chat = done.stdout.splitlines()
    assert first.startswith("Prompt: 'Hello, my name is', Generated text: '")
    assert second.startswith("Prompt: 'The future of AI is', Generated text: '")
    assert chat == "True True"


@pytest.mark.needs("running.strict")
@pytest.mark.parametrize("options, message", [
    ({"trust_remote_code": True}, "trust_remote_code is not known: "),
    ({"enable_lora": True}, "enable_lora is not known: "),
    ({"max_model_length": 5}, "max_model_length is not known: the nearest is max_model_len"),
    *(({"speculative_config": config}, "it must be {'method': 'ngram'}") for config in (
        {"method": "eagle", "model": "a"}, {"model": "a"})),
    ({"generation_config": "a/folder"}, "it must be 'auto' or 'vllm'"),
    ({"override_generation_config": {"eos_token_id": 5}}, "eos_token_id"),
    ({"override_generation_config": {"temperature": -1}}, "temperature"),
    ({"num_gpu_blocks_override": 0}, "num_kv_blocks"),
    ({"block_size": 0}, "greater than or equal to 1")])
def test_bad_keywords(bundled, options, message):
    check_refused(message, LLM, bundled, **options)


def test_keywords_of_calls(llm):
    """None is a default; another keyword is refused by its name."""
    chat = [{"role": "user", "content": "12 + 34"}]
    for call, prompts in ((llm.generate, "47 + 85 ="), (llm.chat, chat)):
        assert token_ids(call(prompts, GREEDY, use_tqdm=False, lora_request=None)) == token_ids(
            call(prompts, GREEDY, use_tqdm=False))
        with pytest.raises(TypeError, match="lora_request"):
            call(prompts, GREEDY, lora_request="mine")


def test_keywords_of_beam_search(llm):
    params = nanoengine.BeamSearchParams(beam_width=2, max_tokens=4)
    prompt = vllm.TextPrompt(prompt="47 + 85 =", multi_modal_data=None)
    expected = llm.beam_search(["47 + 85 ="] * 3, params)
    for limit in (None, 2):
        assert expected == llm.beam_search(
            [prompt] * 3, params, lora_request=None, use_tqdm=False, concurrency_limit=limit)
    with pytest.raises(TypeError, match="lora_request"):
        llm.beam_search([prompt], params, lora_request="mine")


@pytest.mark.parametrize("method", [{"method": "ngram", "prompt_lookup_max": 5},
                                    {"model": "[ngram]"}])
def test_guesses_from_the_prompt_by_their_name_in_vllm(bundled, llm, method):
    prompt = "47 + 85 = 132 47 + 85 = 132 47 + 85 ="
    with LLM(bundled, dtype="float32", num_kv_blocks=16,
             speculative_config=method | {"num_speculative_tokens": 5}) as other:
        assert other.config.speculation == "prompt-lookup"
        assert token_ids(generate(other, prompt)) == token_ids(generate(llm, prompt))


@pytest.mark.needs("running.strict")
def test_sampling_params():
    params = SamplingParams.from_optional(n=2, temperature=None, stop=None, max_tokens=5)
    assert params == SamplingParams(n=2, max_tokens=5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional() == SamplingParams() == SamplingParams(
        temperature=None, seed=None, structured_outputs=None)
    copy = params.clone()
    copy.stop.append("b")
    assert (params.stop, copy.stop, type(copy)) == ([], ["b"], SamplingParams)
    # as JSON spells it
    assert SamplingParams.from_optional(logit_bias={"5": 1}).logit_bias == {5: 1.0}
    digits = vllm.StructuredOutputsParams(regex="[0-9]{3}", json=None)
    assert SamplingParams(structured_outputs=digits).structured_outputs == {"regex": "[0-9]{3}"}
    for name in ("BeamSearchParams", "CompletionOutput", "RequestOutput"):
        assert getattr(vllm, name) is getattr(nanoengine, name)


@pytest.mark.needs("running.strict")
@pytest.mark.parametrize("options, message", [
    *(({"logit_bias": bias}, "^logit_bias.[x5-]") for bias in (
        {"x": 1}, {"-5": 1}, {"5": "x"}, {5.5: 1})),
    ({"structured_outputs": "json"}, "structured_outputs='json'"), ({"top_p": 2}, "top_p"),
    ({"structured_outputs": {"json": None}}, "structured_outputs={}"),
    ({"temprature": 1}, "temprature .*temperature")])
def test_bad_params(options, message):
    check_refused(message, SamplingParams, **options)


@pytest.mark.needs("running.strict")
def test_keys_of_prompts_that_are_none(llm):
    expected = token_ids(generate(llm, ["Once", "a"]))
    ids = vllm.TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode("Once"))
    for given in (vllm.TextPrompt(prompt="Once", multi_modal_data=None), {"prompt": "Once"}, ids):
        assert token_ids(generate(llm, given)) == expected[:1]
        assert token_ids(generate(llm, [given, "a"])) == expected
    for wrong, name in (({"prompt": None}, "prompts"), ({"prompt": "a", "mine": 1}, "mine")):
        check_refused(name, generate, llm, wrong)


@pytest.mark.needs("models.generation_config")
def test_keywords_that_set_others(bundled):
    changes = {"temperature": 0.25, "max_new_tokens": 5}
    with LLM(bundled, num_gpu_blocks_override=11, generation_config="auto", dtype=None,
             override_generation_config=changes, async_scheduling=True,
             disable_log_stats=False) as llm:
        assert (llm.config.num_kv_blocks, llm.config.run_ahead) == (11, True)
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens, params.top_k) == (0.25, 5, 50)
        assert len(generate(llm, "Once", None)[0].outputs[0].token_ids) <= 5
    for more, expected in (({"override_generation_config": changes},
                            dict(temperature=0.25, max_tokens=5)), ({}, {})):
        with LLM(bundled, num_kv_blocks=16, generation_config="vllm", **more) as llm:
            assert llm.get_default_sampling_params() == SamplingParams(**expected)
            assert llm.generate("Once", nanoengine.SamplingParams(max_tokens=2), use_tqdm=False)


def test_metrics_and_errors(llm):
    generate(llm, "Once")
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:generation_tokens"] == llm.metrics()["generation_tokens"] > 0
    assert metrics["vllm:spec_decode_num_draft_tokens"] == llm.metrics()["guessed_tokens"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == llm.metrics()["right_guesses"]
    with pytest.raises(vllm.VLLMValidationError, match="vocabulary"):
        generate(llm, [[10**6]])
