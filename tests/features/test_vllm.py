"""vLLM's interface: what a script written for it may use."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import check_idle, random_prompts, token_ids
from forks import run_in_fork
from tqdm import tqdm

import nanoengine
from nanoengine.config import EngineConfig
from nanoengine_extras.tools import vllm
from nanoengine_extras.tools.vllm import (
    LLM,
    METHODS,
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
SIZES = {name for name in OFF if name.endswith(("nnodes", "parallel_size"))}
# keywords that only set others
RENAMED = {"num_gpu_blocks_override", "override_generation_config"}


@pytest.fixture(scope="module")
def llm(bundled):
    with LLM(bundled, dtype="float32", max_num_seqs=8, num_kv_blocks=128) as llm:
        yield llm
        check_idle(llm)


def generate(llm, prompts, params=GREEDY, **options) -> list:
    return llm.generate(prompts, params, **{"use_tqdm": False} | options)


# vLLM's examples/offline_inference/basic, in short
SCRIPT = """if True:
    from nanoengine_extras.tools.vllm import LLM, SamplingParams
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL, trust_remote_code=False, enforce_eager=True,
              num_gpu_blocks_override=64)
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


def test_it_changes_nothing_of_the_engines_own():
    script = """if True:
        import nanoengine
        before = {cls: set(dir(cls)) for cls in vars(nanoengine).values() if isinstance(cls, type)}
        import nanoengine_extras.tools.vllm
        assert before and all(set(dir(cls)) == names for cls, names in before.items())"""
    done = run_in_fork(script)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------- keywords


@pytest.mark.needs("running.strict")
def test_keywords_that_change_nothing_are_accepted(tiny):
    for value in (None, False, 0, 0.0, -1, {}, [], set(), "auto"):
        assert without(dict.fromkeys(OFF - SIZES, value) | dict(seed=3)) == dict(seed=3)
    assert without(dict.fromkeys(SIZES, 1)) == without(dict.fromkeys(SIZES, 0)) == {}
    assert without(dict(seed=None, tokenization_kwargs=None, dtype="auto")) == dict(dtype="auto")
    for value in (True, 2, "other", ["a"], {"a": 1}):
        assert without(dict.fromkeys(WITHOUT_EFFECT, value)) == {}
        # True == 1
        for name in OFF - (SIZES if value is True else set()):
            with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not accepted")):
                without({name: value})
    assert not (OFF | WITHOUT_EFFECT) & {f.name for f in dataclasses.fields(EngineConfig)}
    assert not OFF & WITHOUT_EFFECT
    # of older versions
    assert without(dict(guided_decoding_disable_any_whitespace=True, max_num_partial_prefills=4,
                        disable_sliding_window=False, rope_theta=None)) == {}
    # rare ones of version 0.33
    assert without(dict(ubatch_size=2, use_replayssm=True, mamba_backend="flashinfer",
                        long_prefill_token_threshold_adaptive=True, numa_bind_nodes=[0],
                        per_request_spec_decode_metrics="none", model_weights="",
                        kv_cache_dtype_skip_layers=[], tokens_only=False)) == {}
    # what vLLM's LLM has by default
    assert without(dict(nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=29501,
                        max_loras=1, max_lora_rank=16, lora_dtype="auto", mamba_cache_dtype="auto",
                        all2all_backend="allgather_reducescatter", monokernel=False,
                        sleep_mode_backend="cumem", watchdog_config={},
                        kv_sharing_fast_prefill=False)) == {}
    neutral = dict.fromkeys(OFF) | dict.fromkeys(WITHOUT_EFFECT, True)
    with LLM(tiny, block_size=16, num_kv_blocks=32, **neutral, seed=None,
             max_model_len=-1) as llm:
        assert llm.config.seed == 0 and llm.inputs.max_model_len == 512


@pytest.mark.parametrize("name", sorted(OFF))
def test_a_number_turns_on_as_true_does(tiny, name):
    """1 is a size, but no flag, no name and no list."""
    if name in SIZES:
        assert without({name: 1}) == {}
        number = 2
    else:
        number = 1
    with pytest.raises(ValueError, match=f"{name}={number} is not accepted"):
        LLM(tiny, **{name: number})


@pytest.mark.needs("running.strict")
@pytest.mark.parametrize("name, value, accepted", [
    ("pipeline_parallel_size", 2, "this engine has nothing like it"),
    ("enable_lora", True, "this engine has nothing like it"),
    ("trust_remote_kode", False, "trust_remote_kode"),
    ("logprobs_mode", "processed_logits", "this engine has nothing like it"),
    ("speculative_config", {"method": "eagle", "model": "a"}, "left out: use speculation"),
    ("speculative_config", {"model": "a"}, "left out: use speculation"),
    ("spec_method", "eagle", "left out: use speculation"),
    ("kv_cache_memory_bytes", 2**30, "left out: use num_kv_blocks"),
    ("tokenizer_revision", "main", "left out: use revision"),
    ("device_ids", [0], "left out: use CUDA_VISIBLE_DEVICES"),
    ("tokens_only", True, "left out: use skip_tokenizer_init"),
    ("mm_encoder_only", True, "this engine has nothing like it"),
    ("offload_group_size", 1, "this engine has nothing like it"),
    ("chat_template", "no/such.jinja", "No such file"),
    ("chat_template", 5, "not int"),
    ("logits_processors", ["my.Processor"], "functions in SamplingParams"),
    ("override_generation_config", {"eos_token_id": 5}, "eos_token_id"),
    ("override_generation_config", {"temperature": -1}, "temperature"),
    ("num_gpu_blocks_override", 0, "num_kv_blocks"),
    ("structured_outputs_config", {"disable_additional_properties": True}, "nothing like it"),
    ("structured_outputs_config", {"reasoning_parser": "qwen3"}, "nothing like it"),
    ("structured_outputs_config", {"own": 1}, "own=1 is not accepted"),
    ("structured_outputs_config", 5, "'int' object"),
    ("block_size", 0, "greater than or equal to 1")])
def test_bad_keywords(bundled, name, value, accepted):
    with pytest.raises(ValueError) as error:
        LLM(bundled, **{name: value})
    assert accepted in str(error.value)
    assert name in str(error.value) or name in RENAMED


@pytest.mark.needs("models.generation_config")
def test_generation_config_of_vllm_gives_neutral_defaults(bundled):
    with LLM(bundled, num_kv_blocks=16, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert len(llm.generate("Once", use_tqdm=False)[0].outputs[0].token_ids) <= 16
        assert llm.generate("Once", nanoengine.SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.beam_search("Once", vllm.BeamSearchParams(beam_width=2, max_tokens=2))
    with LLM(bundled, num_kv_blocks=16, generation_config="auto") as llm:
        assert llm.get_default_sampling_params() != SamplingParams()


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


@pytest.mark.parametrize("options", [
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5,
                            "prompt_lookup_max": 5}},
    {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 5}},
    {"spec_method": "ngram", "spec_tokens": 5}])
def test_guesses_from_the_prompt_by_their_name_in_vllm(bundled, llm, options):
    prompt = "47 + 85 = 132 47 + 85 = 132 47 + 85 ="
    with LLM(bundled, dtype="float32", num_kv_blocks=16, **options) as other:
        assert other.config.speculation == "prompt-lookup"
        assert token_ids(generate(other, prompt)) == token_ids(generate(llm, prompt))


def test_a_chat_template_of_the_engine(bundled, llm, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    chat = [{"role": "user", "content": "12"}]

    def prompt_of(llm, **options) -> str:
        return llm.chat(chat, GREEDY, use_tqdm=False, **options)[0].prompt

    for template in (file, str(file), "<{{ messages[0].content }}>"):
        with LLM(bundled, num_kv_blocks=16, chat_template=template) as other:
            assert prompt_of(other) == prompt_of(other, chat_template=None) == "<12>"
            assert prompt_of(other, chat_template="{{ messages[0].content }}!") == "12!"
            other.enqueue_chat(chat, GREEDY)
            assert [output.prompt for output in other.wait_for_completion()] == ["<12>"]
    assert prompt_of(llm) == prompt_of(llm, chat_template=None) != "<12>"


# ------------------------------------------------------------------- parameters and prompts


@pytest.mark.needs("running.strict")
def test_sampling_params():
    params = SamplingParams.from_optional(n=2, temperature=None, stop=None, max_tokens=5)
    assert params == SamplingParams(n=2, max_tokens=5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    # as JSON spells it
    assert SamplingParams.from_optional(logit_bias={"5": 1}).logit_bias == {5: 1.0}
    for bias in ({"x": 1}, {"-5": 1}, {"5": "x"}, {5.5: 1}):
        with pytest.raises(ValueError, match="^logit_bias.[x5-]"):
            SamplingParams.from_optional(logit_bias=bias)
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
    final = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=5)
    assert final == SamplingParams(max_tokens=5) and RequestOutputKind.DELTA.value == 1
    with pytest.raises(ValueError, match="temprature .*temperature"):
        SamplingParams(temprature=1)
    neutral = dict(watermarking=False, thinking_token_budget=-1, logprob_token_ids=None,
                   stream_interval=4, skip_reading_prefix_cache=True)
    assert SamplingParams(**neutral) == SamplingParams()


@pytest.mark.parametrize("name, value, advice", [
    ("logprob_token_ids", [1, 2], "use logprobs"),
    ("prompt_logprob_token_ids", np.array([[1, 2]]), "use prompt_logprobs"),
    ("prompt_logprob_start", 3, "use prompt_logprobs_start"),
    ("repetition_detection", {"max_pattern_size": 3, "min_count": 2}, "nothing like it"),
    ("thinking_token_budget", 5, "nothing like it"),
    ("tokenization_kwargs", {"truncate_prompt_tokens": 3}, "use truncate_prompt_tokens"),
    ("trace_decode_token_ids", [1], "nothing like it"), ("watermarking", True, "nothing like it")])
def test_params_that_would_turn_something_on(name, value, advice):
    with pytest.raises(ValueError, match=f"^{name}=.* is not accepted: .*left out: .*{advice}$"):
        SamplingParams(**{name: value})


def test_extra_args_are_kept(llm):
    extra = {"mine": [object(), {"x": 2**64}]}
    params = SamplingParams(extra_args=extra, temperature=0, max_tokens=9)
    assert params.extra_args is extra and SamplingParams().extra_args is None
    assert SamplingParams.from_optional(extra_args=extra).extra_args is extra
    assert token_ids(generate(llm, "Once", params)) == token_ids(generate(llm, "Once"))
    copy = params.clone()
    assert copy == params and copy.extra_args == extra and copy.extra_args is not extra
    assert SamplingParams().clone().extra_args is None and type(copy) is SamplingParams


@pytest.mark.needs("running.strict")
def test_what_is_assigned_later_is_what_the_constructor_takes(llm):
    grammar = vllm.GuidedDecodingParams(regex="[0-9]{3}", disable_any_whitespace=True)
    for params in (SamplingParams(max_tokens=9), llm.get_default_sampling_params()):
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.extra_args = {"mine": 1}
        params.skip_clone = params.thinking_token_budget = None
        params.guided_decoding = grammar
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        assert params.clone().extra_args == {"mine": 1}
        assert generate(llm, "Once", params)[0].outputs[0].text.isdigit()
        with pytest.raises(ValueError, match="watermarking=True .*nothing like it"):
            params.watermarking = True
        with pytest.raises(ValueError, match="temprature .*temperature"):
            params.temprature = 1
    fields = {field.name for field in dataclasses.fields(nanoengine.SamplingParams)}
    assert not (WITHOUT_EFFECT | OFF) & fields


def test_params_of_the_engine_serve_too(llm):
    own = nanoengine.SamplingParams(temperature=0, max_tokens=9)
    assert token_ids(generate(llm, "Once", own)) == token_ids(generate(llm, "Once"))
    streamed = [token_ids([output])[0] for output in llm.stream("Once", own)]
    assert streamed == [token_ids([output])[0] for output in llm.stream("Once", GREEDY)]
    assert len(streamed) > 3


def test_prompts_as_typed_dicts(llm):
    ids = llm.get_tokenizer().encode("47 + 85 =")
    prompts = [
        TextPrompt(prompt="47 + 85 ="), TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt="mine")]
    assert vllm.PromptType is dict
    outputs = generate(llm, prompts)
    assert len({tuple(ids) for ids in token_ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["47 + 85 =", None, "mine"]


@pytest.mark.needs("running.strict")
def test_other_keys_of_prompts(llm):
    """vLLM's prompts can have further keys. Those that are None change nothing."""
    ids = llm.get_tokenizer().encode("Once")
    neutral = dict(multi_modal_data=None, mm_processor_kwargs=None, cache_salt=None)
    prompts = [TokensPrompt(prompt_token_ids=ids, **neutral), "Once",
               TextPrompt(prompt="Once", **neutral)]
    assert len({tuple(ids) for ids in token_ids(generate(llm, prompts))}) == 1
    assert token_ids(generate(llm, prompts[0])) == token_ids(generate(llm, ["Once"]))
    beams = vllm.BeamSearchParams(beam_width=2, max_tokens=2)
    assert llm.beam_search(prompts[2:], beams) == llm.beam_search("Once", beams)
    calls = (llm.generate, llm.enqueue, lambda prompts: llm.beam_search(prompts, beams))
    for call in calls:
        for name, value in (("multi_modal_data", {"image": 1}), ("cache_salt", "mine"),
                            ("prompt_embeds", np.zeros((2, 3)))):
            for given in ({"prompt": "Once", name: value}, ["Once", {"prompt": "a", name: value}]):
                with pytest.raises(ValueError, match=f"{name}=(.|\n)*nothing like it"):
                    call(given)
        with pytest.raises(ValueError, match="prompts"):
            call({"prompt": None})
        with pytest.raises(ValueError, match="mine"):
            call({"prompt": "Once", "mine": 1})


def test_a_bar_of_ones_own(llm):
    made = []

    def bar_of(**options):
        made.append(tqdm(disable=True, **options))
        made[-1].update = lambda count: steps.append(count)
        return made[-1]

    steps = []
    assert token_ids(generate(llm, ["Once", "Twice"], use_tqdm=bar_of)) == token_ids(
        generate(llm, ["Once", "Twice"]))
    assert (made.pop().total, sum(steps)) == (2, 2)
    chat = [{"role": "user", "content": "12"}]
    assert token_ids(llm.chat(chat, GREEDY, bar_of)) == token_ids(llm.chat(chat, GREEDY, False))
    assert (made.pop().total, sum(steps)) == (1, 3)
    nanoengine.LLM.generate(llm, "Once", GREEDY, use_tqdm=bar_of)
    assert (made.pop().total, sum(steps)) == (1, 4)
    for bad, error in ((dict(mine=1), TypeError), (dict(lora_request="a"), ValueError)):
        with pytest.raises(error, match=[*bad][0]):
            generate(llm, "Once", use_tqdm=bar_of, **bad)
    assert made == []


def test_requests_that_wait(llm):
    """`enqueue` runs nothing, and `wait_for_completion` returns each output once, in order."""
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    num_steps = llm.metrics()["num_steps"]
    assert llm.wait_for_completion() == []
    first = llm.enqueue(["Once", "47 + 85 ="], [long, GREEDY], use_tqdm=False)
    second = llm.enqueue("12 + 34 =", GREEDY, lora_request=None, priority=1)
    assert llm.metrics()["num_steps"] == num_steps
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    assert llm.llm_engine.has_unfinished_requests()
    # a call in between returns its own outputs only
    expected = token_ids(generate(llm, "Once", long)) + token_ids(generate(llm, "47 + 85 ="))
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert token_ids(outputs[:2]) == expected and all(output.finished for output in outputs)
    assert llm.wait_for_completion() == [] and not llm.llm_engine.has_unfinished_requests()
    for bad, error in ((dict(mine=1), TypeError), (dict(lora_request="a"), ValueError)):
        with pytest.raises(error, match=[*bad][0]):
            llm.enqueue("Once", GREEDY, **bad)


def test_chats_that_wait(llm):
    chats = [[{"role": "user", "content": text}] for text in ("12 + 34", "Once")]
    numbers = llm.enqueue_chat(chats, GREEDY, lora_request=None, chat_template=None)
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == numbers
    assert token_ids(outputs) == token_ids(llm.chat(chats, GREEDY, use_tqdm=False))
    for bad, error in ((dict(mine=1), TypeError), (dict(lora_request="a"), ValueError)):
        with pytest.raises(error, match=[*bad][0]):
            llm.enqueue_chat(chats, GREEDY, **bad)


def test_max_logprobs_is_a_limit(tiny):
    for most, allowed, refused in ((2, [0, 1, 2], [-1, 3]), (None, [-1, 320], []),
                                   (-1, [-1, 320], []), (0, [0], [-1, 1])):
        with LLM(tiny, max_logprobs=most, block_size=16, num_kv_blocks=8) as llm:
            for count in allowed:
                for name in ("logprobs", "prompt_logprobs"):
                    params = SamplingParams(**{name: count}, max_tokens=1)
                    assert generate(llm, [[1, 2]], params)
            for count in refused:
                for name in ("logprobs", "prompt_logprobs"):
                    params = [GREEDY, SamplingParams(**{name: count})]
                    with pytest.raises(ValueError, match=f"{name}={count} .*max_logprobs={most}"):
                        generate(llm, [[1, 2], [3]], params)
                    with pytest.raises(ValueError, match=f"{name}={count} .*max_logprobs={most}"):
                        llm.enqueue([[1, 2], [3]], params)


@pytest.mark.needs("models.generation_config")
def test_keywords_that_set_others(bundled):
    changes = {"temperature": 0.25, "max_new_tokens": 5}
    with LLM(bundled, num_gpu_blocks_override=11, override_generation_config=changes,
             structured_outputs_config={"backend": "auto", "disable_any_whitespace": True,
                                        "disable_additional_properties": False}) as llm:
        assert llm.config.num_kv_blocks == 11
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens, params.top_k) == (0.25, 5, 50)
        assert len(generate(llm, "Once", None)[0].outputs[0].token_ids) <= 5
    with LLM(bundled, num_kv_blocks=16, generation_config="vllm",
             override_generation_config=changes) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, max_tokens=5)


@pytest.mark.needs("running.strict")
def test_prompts_by_their_former_name(llm):
    ids = [llm.get_tokenizer().encode(text) for text in ("Once", "47 + 85 =")]
    assert token_ids(llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)) == token_ids(
        generate(llm, ids))
    assert token_ids(llm.generate(prompt_token_ids=ids[0], sampling_params=GREEDY)) == token_ids(
        generate(llm, ids[:1]))
    with pytest.raises(ValueError, match="prompt_token_ids=.*left out if prompts are given"):
        llm.generate("Once", GREEDY, prompt_token_ids=ids)
    with pytest.raises(ValueError, match="prompts=None"):
        llm.generate()


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_refused_by_name(llm, name):
    with pytest.raises(ValueError, match=f"LLM.{name} is not supported"):
        getattr(llm, name)("a", "b", use_tqdm=False, name="c")
    with pytest.raises(AttributeError, match=f"my_{name}"):
        getattr(llm, f"my_{name}")
    assert not hasattr(llm, f"__{name}__")


def test_advice_in_place_of_a_method(llm):
    with pytest.raises(ValueError, match=r"^LLM.set_tokenizer is not supported: use LLM\(tokeni"):
        llm.set_tokenizer(llm.get_tokenizer())


def test_timestamps(llm):
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    outputs = [*generate(llm, ["Once", "Twice"], params),
               *llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)]
    for output in outputs:
        found = output.metrics
        assert 0 < found.arrival_time <= found.queued_ts <= found.scheduled_ts
        assert found.scheduled_ts < found.first_token_ts < found.last_token_ts
        assert found.first_token_latency == found.first_token_ts - found.arrival_time > 0
        assert found.num_generation_tokens == 8


def test_metrics_and_engine(llm):
    requests = llm.add(["Once", "Twice"], GREEDY)
    assert not requests[0].output().outputs[0].finished()
    assert llm.llm_engine.get_num_unfinished_requests() == 2
    llm.abort(requests)
    assert requests[0].output().outputs[0].finished()
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    configs = llm.llm_engine.vllm_config
    assert configs.cache_config.enable_prefix_caching is True
    assert llm.llm_engine.cache_config is configs.cache_config
    assert configs.model_config.max_model_len == llm.inputs.max_model_len
    assert configs.model_config.get_vocab_size() == llm.inputs.vocab_size
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is True
    for name in ("add_request", "step", "tokenizer"):
        with pytest.raises(AttributeError, match=f"^llm_engine.{name} is not supported: use "):
            getattr(llm.llm_engine, name)
    generate(llm, ["Once"])
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:generation_tokens"] == llm.metrics()["generation_tokens"] > 0
    assert metrics["vllm:num_requests_running"] == 0
    with pytest.raises(vllm.VLLMValidationError, match="vocabulary"):
        generate(llm, [[10**6]])


def test_an_engine_of_arguments_and_its_end(tiny):
    llm = LLM.from_engine_args(SimpleNamespace(
        model=tiny, dtype="float32", block_size=16, num_kv_blocks=8, enable_lora=False))
    assert llm.config.num_kv_blocks == 8
    # as scripts do, to free the memory
    llm.llm_engine.engine_core.shutdown(timeout=None)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1, 2]])


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


def test_features_that_are_no_list(bundled):
    with pytest.raises(ValueError, match="features=5 is not accepted: it must be a list"):
        LLM(bundled, features=5)


def test_flat_logprobs(llm):
    """As vLLM's class of this name has them: the same dicts, and columns."""
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1,
                            flat_logprobs=True)
    flat, = generate(llm, "47 + 85 =", params)
    params.flat_logprobs = False
    usual, = generate(llm, "47 + 85 =", params)
    assert flat.prompt_logprobs[0] == {} and flat.prompt_logprobs[1:] == usual.prompt_logprobs[1:]
    assert (usual.prompt_logprobs[0], type(usual.prompt_logprobs)) == (None, list)
    pairs = [(flat.prompt_logprobs, flat.prompt_token_ids, 1)]
    for ours, theirs in zip(flat.outputs, usual.outputs):
        assert ours.logprobs == theirs.logprobs and type(theirs.logprobs) is list
        pairs.append((ours.logprobs, ours.token_ids, 2))
    for columns, own, count in pairs:
        num_empty = len(own) - sum(map(bool, columns))
        starts, ends = columns.start_indices, columns.end_indices
        assert starts == [0] * num_empty + [*range(0, ends[-1], count + 1)]
        assert ends == [0] * num_empty + [start + count + 1 for start in starts[num_empty:]]
        for token_id, found, start, end in zip(own, columns, starts, ends):
            assert not found or columns.token_ids[start] == token_id
            rows = zip(columns.logprobs[start:end], columns.ranks[start:end],
                       columns.decoded_tokens[start:end])
            for its, row in zip(columns.token_ids[start:end], rows, strict=True):
                assert row == tuple(vars(found[its]).values())
            assert columns.ranks[start + 1:end] == [*range(1, end - start)]
    copy = SamplingParams(flat_logprobs=True, logprobs=-1, temperature=0, max_tokens=1).clone()
    everything = generate(llm, "Once", copy)[0].outputs[0].logprobs
    assert len(everything.token_ids) == llm.inputs.vocab_size + 1


def test_structured_outputs(llm):
    digits = vllm.StructuredOutputsParams(regex="[0-9]{3}", json=None)
    either = vllm.GuidedDecodingParams(
        choice=["12", "7"], backend="xgrammar", disable_any_whitespace=True)
    for params in (SamplingParams(structured_outputs=digits, n=3),
                   SamplingParams(structured_outputs=None, guided_decoding=either)):
        for output in generate(llm, ["Once", "12 + 34 ="], params):
            for completion in output.outputs:
                assert completion.text.isdigit() and completion.finish_reason == "stop"


@pytest.mark.needs("running.strict", "sampling.structured_outputs")
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_a_grammar_that_is_none(name):
    for wanted in ({}, {"json": None}, {"backend": "xgrammar"}):
        with pytest.raises(ValueError, match="structured_outputs={}"):
            SamplingParams(**{name: wanted})
    for option in ("disable_additional_properties", "whitespace_pattern"):
        with pytest.raises(ValueError, match=f"{option}='x' is not accepted"):
            SamplingParams(**{name: {"regex": "a", option: "x"}})
    with pytest.raises(ValueError, match="guided_decoding"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "b"})


@pytest.mark.needs("running.strict")
def test_beam_search_by_priority(tiny):
    """Two beams of one prompt fill the engine. The last prompt is the most urgent one."""
    prompts = random_prompts([5, 9, 7])
    params = vllm.BeamSearchParams(beam_width=2, max_tokens=3)
    with LLM(tiny, dtype="float32", block_size=16, num_kv_blocks=64, max_num_seqs=2,
             enable_prefix_caching=False, scheduling_policy="priority") as llm:
        expected = llm.beam_search(prompts, params)
        batches, launch = [], llm.engine.runner.launch
        llm.engine.runner.launch = lambda batch: batches.append(batch) or launch(batch)
        assert llm.beam_search(prompts, params, None, False, priority=[2, 2, 1]) == expected
        assert nanoengine.LLM.beam_search(llm, prompts, params, priority=[2, 2, 1]) == expected
        order = [int(seq.request_id) for batch in batches for seq in batch.sequences]
        # of both calls: the last prompt of each comes first
        assert list(dict.fromkeys(order))[::3] == [5, 8]
        for priority in ([1], [1, 2, 3, 4], "a"):
            with pytest.raises(ValueError, match="priority"):
                llm.beam_search(prompts, params, priority=priority)
        with pytest.raises(ValueError, match="lora_request='a'"):
            llm.beam_search(prompts, params, "a")


def test_beam_search(tiny):
    prompts = random_prompts([5, 9])
    with LLM(tiny, dtype="float32", block_size=16, num_kv_blocks=64) as llm:
        outputs = llm.beam_search([TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                                  vllm.BeamSearchParams(beam_width=3, max_tokens=6,
                                                        structured_outputs=None),
                                  use_tqdm=False)
    assert all(isinstance(output, vllm.BeamSearchOutput) for output in outputs)
    for output, prompt in zip(outputs, prompts):
        assert len(output.sequences) == 3
        for beam in output.sequences:
            assert isinstance(beam, vllm.BeamSearchSequence)
            assert beam.tokens[:len(prompt)] == prompt and beam.cum_logprob < 0
