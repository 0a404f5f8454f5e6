"""Options, parameters and arguments of calls: what is refused, and what the message says."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import GREEDY, check_refused
from test_sampler import make as make_row, sample

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.errors import naming
from nanoengine.observers import Feature
from nanoengine_extras.tools.chat import render
from nanoengine_extras.running.strict import Strict

check_call = Strict().call


def beams(**options) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | options)


REFUSED = {
    SamplingParams: [
        ("n", 0, "from 1 to 16384"), ("n", 16385, "from 1 to 16384"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", math.nan, "finite"), ("temperature", "hot", "number"),
        ("top_p", 0, "above 0, and at most 1"), ("top_p", 2, "above 0, and at most 1"),
        ("top_p", math.nan, "finite"), ("top_p", "a", "number"),
        ("top_k", -2, "greater than or equal to -1"), ("top_k", 2**63, "less than 2147483648"),
        ("top_k", torch.tensor([1, 2]), "a valid integer"), ("top_k", 1.5, "integer"),
        ("seed", torch.tensor([1, 2]), "a valid integer"), ("seed", 0.5, "integer"),
        ("min_p", 1.1, "from 0 to 1"),
        ("max_tokens", 0, "at least 1"), ("max_tokens", 2.5, "integer"),
        ("max_tokens", True, "integer"),
        ("min_tokens", 17, "0 to max_tokens=16"), ("min_tokens", -1, "0 to max_tokens=16"),
        ("stop", "", "at least 1 character"), ("stop", ["a", ""], "at least 1 character"),
        ("stop", [3], "string"), ("stop", {"a", "b"}, "list"),
        ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("stop_token_ids", [[1]], "integer"),
        ("bad_words", [{}], "string"), ("bad_words", {"a": None}, "list"),
        ("stop_token_ids", {7: None}, "list"), ("allowed_token_ids", {7: None}, "list"),
        ("logprobs", -2, "greater than or equal to -1"),
        ("prompt_logprobs", -2, "greater than or equal to -1"),
        ("prompt_logprobs_start", -1, "at least 0"), ("prompt_logprobs_start", 1.5, "integer"),
        ("truncate_prompt_tokens", -2, "greater than or equal to -1"),
        ("truncate_prompt_tokens", 1.5, "integer"), ("truncate_prompt_tokens", "1", "integer"),
        ("presence_penalty", 3, "less than or equal to 2"),
        ("repetition_penalty", 0, "greater than 0"),
        ("allowed_token_ids", [], "at least 1 item"),
        ("allowed_token_ids", [-1], "greater than or equal to 0"),
        ("logit_bias", {1: math.nan}, "finite"), ("logits_processors", [3], "callable"),
        ("structured_outputs", 5, "dict"), ("ignore_eos", 2, "boolean"),
        ("temprature", 0.5, "is not known: the nearest is temperature")],
    beams: [
        ("beam_width", 0, "greater than or equal to 1"),
        ("max_tokens", 0, "greater than or equal to 1"), ("max_tokens", None, "integer"),
        ("temperature", -1, "greater than or equal to 0"), ("length_penalty", math.nan, "finite"),
        ("allowed_token_ids", [], "at least 1 item"),
        ("allowed_token_ids", [-1], "greater than or equal to 0"),
        ("early_stopping", True,
         "is not known: leave it out; help(BeamSearchParams) lists the known ones"),
        ("structured_outputs", {"regex": "a"}, "None")],
    LLM: [
        ("scheduling", "mixd", "'prefill-first', 'mixed'"),
        ("scheduling_policy", "lifo", "'fcfs', 'priority'"),
        ("scheduling", 5, "one of ['prefill-first', 'mixed'"),
        ("preemption_victim", ["youngest"], "or a function like these"),
        ("speculation", 5, "or a function like these"),
        ("kv_allocation", "all", "'on-demand', 'reserve'"),
        ("preemption_mode", "drop", "'recompute' or 'swap'"),
        ("preemption_victim", "oldest", "'youngest', 'longest', 'lowest-priority'"),
        ("swap_space", -0.5, "greater than or equal to 0"), ("swap_space", math.inf, "finite"),
        ("trace", 1, "boolean"), ("dtype", "int8", "'float32' or 'float'"),
        ("dtype", torch.float64, "'float32' or 'float'"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"), ("attention_backend", "flash", "'gather'"),
        ("run_ahead", 1, "boolean"), ("load_format", "pickle", "'dummy'"),
        ("block_size", 0, "greater than or equal to 1"), ("num_kv_blocks", 1.5, "integer"),
        ("max_model_len", 1, "greater than or equal to 2"),
        ("max_model_len", -2, "greater than or equal to 2"),
        ("max_model_len", torch.tensor([64, 64]), "integer"),
        ("gpu_memory_utilization", 1.5, "less than or equal to 1"),
        ("enable_prefix_caching", "yes", "boolean"),
        ("enforce_eagr", False, "is not known: the nearest is enforce_eager"),
        ("cpu_offload_gb", 0.5, "0 on a CPU"), ("cpu_offload_gb", -1, "greater than or equal to 0"),
        ("cpu_offload_gb", math.inf, "finite"),
        ("model", None, "a valid string"), ("model", 5, "a valid string"),
        ("tokenizer", 5, "a valid string"),
        # an empty path, as of a variable of the environment, is not the current folder
        ("model", "", "at least 1 character"), ("tokenizer", "", "at least 1 character"),
        ("features", [object()], "list of Feature objects, each of"),
        ("features", [Feature], "list of Feature objects, each of"),
        ("features", [Feature(), Feature()], "list of Feature objects, each of")]}


@pytest.mark.parametrize("make, name, value, accepted", [
    (make, *row) for make, rows in REFUSED.items() for row in rows])
def test_a_bad_option(bundled, monkeypatch, make, name, value, accepted):
    """In one line with the name, the value and what is accepted, and with none of pydantic's words;
    also if the option is assigned later."""
    monkeypatch.chdir(bundled)
    given = {"model": bundled} if make is LLM else {}
    with pytest.raises(ValueError, match=f"(^|: ){name}\\S*[ =]") as error:
        make(**given | {name: value})
    message = str(error.value)
    assert accepted in message and "\n" not in message
    assert "should" not in message and "pydantic" not in message
    if make is LLM:
        return
    options = make()
    check_refused(re.escape(message), setattr, options, name, value)
    assert options == make(), "what was refused is not kept"


def test_a_long_value_is_cut():
    check_refused(r"\A.{,1199}\Z", SamplingParams, top_k="5" * 10**6)


@pytest.mark.parametrize("made, name, value", [
    (dict(n=2), "temperature", 0), (dict(temperature=0), "n", 2),
    (dict(min_tokens=9), "max_tokens", 8), (dict(stop="a"), "detokenize", False),
    (dict(detokenize=False), "stop", "a")])
def test_an_assignment_that_is_refused_changes_nothing(made, name, value):
    params = SamplingParams(**made)
    check_refused(name, setattr, params, name, value)
    assert params == SamplingParams(**made)


FORMS = "a string, a list of token ids, .*, or a list of these"
MESSAGES = {"role": "user", "content": "a"}


@pytest.mark.parametrize("prompts, priority, message", [
    (MESSAGES, None, r"prompts\[0\]=.*; messages are for chat$"),
    ([MESSAGES], None, r"prompts\[0\]=.*; messages are for chat$"),
    ([{"text": "a"}], None, f"prompts.0.=.* {FORMS}$"),
    # as it was given
    (["a", None], None, r"prompts\[1\]=None is not accepted"),
    (["a", {"prompt": None, "mine": 1}], None, r"prompts\[1\]={'prompt': None, 'mine': 1} is not"),
    ([[[7] * 10**5]], None, "prompts.0.: token id .* is out of vocabulary: not an integer$"),
    *((["a", "b"], value, "priority=.*: it must be one int, or 2 of them$") for value in (
        [1, np.float64(1)], [1, np.bool_(True)], [1, True], [1, "1"], [], [1], "", 0.0, {}, True))])
def test_a_bad_call(prompts, priority, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        check_call(prompts, None, priority, None)
    assert len(str(error.value)) < 400


def test_an_option_that_no_feature_has(llm):
    one, two = SamplingParams(options=dict(onse=1)), SamplingParams(options=dict(two=2))
    for params in (one, [GREEDY, two]):
        check_refused(r"options\[.*\]=[12] .* an option of a feature", llm.generate,
                      ["a", "b"], params)


def test_priorities_that_are_accepted(llm):
    one, two = llm.add(["a", "b"], GREEDY, [*np.argsort([3, 1])])
    llm.abort([one, two])
    assert (one.seq.priority, two.seq.priority) == (1, 0)
    assert llm.generate([], GREEDY, priority=[]) == []


@pytest.mark.parametrize("call", [
    lambda llm, text: llm.generate(["a", text], GREEDY),
    lambda llm, text: llm.chat([{"role": "user", "content": text}], GREEDY),
    lambda llm, text: llm.score("a", [text]), lambda llm, text: llm.score(text, ["a"])])
def test_a_text_that_has_no_bytes_in_utf_8(llm, call):
    """Half of a pair, as json.loads makes of an escape that was cut."""
    check_refused(r"half of a surrogate pair, .*: leave it out\)?$", call, llm, "a\ud83d")


def test_an_option_of_a_chat_that_is_not_known():
    advices = dict(tool="the nearest is tools", enable_thinking="leave it out, or if the template",
                   temperature="leave it out, or if the template")
    for name, advice in advices.items():
        with pytest.raises(TypeError, match=f"^{name} is not known: {advice}[^:]*$"):
            render(None, [], **{name: True})


def test_advice_to_save_memory_is_for_errors_of_memory_only():
    """Among them real ones of PyTorch and NumPy."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**45)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**45)
    for error in (of_torch.value, of_numpy.value, MemoryError("5 bytes"), MemoryError(),
                  torch.OutOfMemoryError("no memory.")):
        with pytest.raises(ValueError, match=r"[^.]\. Lower max_num_batched_tokens or"):
            with naming("what"):
                raise error
    for error in (RuntimeError("stack expects each tensor to be of equal size"), KeyError("layers"),
                  ValueError("Lower"), AttributeError("'X' object has no attribute 'y'")):
        with pytest.raises(ValueError) as found:
            with naming("what"):
                raise error
        assert str(found.value) == f"what: {error}"


@pytest.mark.parametrize("given, kept", [
    # duplicates are removed, in order; a tuple has an order
    (dict(stop_token_ids=[42, 7, 42, 9, 7], bad_words=["b", "a", "b"]),
     dict(stop_token_ids=[42, 7, 9], bad_words=["b", "a"])),
    (dict(stop=("b", "a"), stop_token_ids=(7, 9), allowed_token_ids=(7, 9), bad_words=("a", "b")),
     dict(stop=["b", "a"], stop_token_ids=[7, 9], allowed_token_ids=[7, 9], bad_words=["a", "b"])),
    # other collections, where the order means nothing
    (dict(stop_token_ids={7}, allowed_token_ids={7}, bad_words={"a"}),
     dict(stop_token_ids=[7], allowed_token_ids=[7], bad_words=["a"])),
    (dict(stop="a", stop_token_ids=None, max_tokens=np.int64(3), temperature=np.float32(0.5)),
     dict(stop=["a"], stop_token_ids=[], max_tokens=3, temperature=0.5)),
    (dict(logprobs=True, prompt_logprobs=True), dict(logprobs=1, prompt_logprobs=1)),
    (dict(seed=-1), dict(seed=-1)), (dict(seed=-2), dict(seed=-2))])
def test_what_options_become(given, kept):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept
    assert all(type(getattr(params, name)) is type(value) for name, value in kept.items())


def test_a_copy_of_sampling_params_is_its_own():
    params = SamplingParams(n=2, max_tokens=5, stop="a")
    copy = params.clone()
    copy.stop.append("b")
    copy.n = 3
    assert (params.n, params.stop, copy.stop) == (2, ["a"], ["a", "b"])
    assert SamplingParams().stop is not SamplingParams().stop


def test_all_mistakes_at_once():
    message = (r"top_k=-2 is not accepted: it must be [^;]+; "
               r"stop\.1=3 is not accepted: it must be a valid string")
    check_refused(f"^{message}$", SamplingParams, top_k=-2, stop=["a", 3])
    check_refused("^beam_width=0 .*greater than or equal to 1$", BeamSearchParams, 0, 2)


def test_dtypes_by_name_or_object():
    for dtype in ("bfloat16", torch.bfloat16):
        assert EngineConfig(model="m", dtype=dtype).dtype == "bfloat16"
    for length in (-1, "auto", None):
        assert EngineConfig(model="m", max_model_len=length).max_model_len is None


# --------------------------------------------------------------------------- extreme numbers


@pytest.mark.parametrize("options, expected", [
    (dict(logit_bias={7: 1e39}, allowed_token_ids=[5]), {5}),
    (dict(logit_bias={5: -1e39}, allowed_token_ids=[5]), {5}),
    (dict(temperature=1e39, allowed_token_ids=[5, 6]), {5, 6}),
    (dict(temperature=5e-324, allowed_token_ids=[5]), {5}),
    (dict(repetition_penalty=1e-50, allowed_token_ids=[1, 5]), {1}),
    (dict(repetition_penalty=1e300, allowed_token_ids=[1]), {1}),
    (dict(repetition_penalty=1e300, logit_bias={1: -1e300}, allowed_token_ids=[1]), {1}),
    (dict(temperature=1e30, top_p=1e-17), set(range(20))),
    (dict(top_p=5e-324), {3}), (dict(top_p=5e-324, min_p=1.0, top_k=1), {3}),
    (dict(min_p=5e-324, temperature=1e300), set(range(20))),
    (dict(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e39), set(range(20))),
])
def test_every_number_that_is_accepted_can_be_sampled(options, expected):
    torch.manual_seed(0)
    for scale in (0, 1.0, 1e4):
        logits = torch.randn(1, 20) * scale
        logits[0, 1] = scale
        logits[0, 3] = logits.max() + 1
        for seed in range(20):
            (token,), _ = sample(logits, [make_row(prompt=[1], output=[2], seed=seed, **options)])
            assert token in expected or scale != 1.0 and 0 <= token < 20


def test_a_tiny_temperature_and_extreme_penalties_still_give_beams(bundled):
    with LLM(bundled, dtype="float32", num_kv_blocks=64) as llm:
        for more in (dict(temperature=5e-324), dict(temperature=1e300), dict(length_penalty=40),
                     dict(length_penalty=-40)):
            params = BeamSearchParams(beam_width=3, max_tokens=4, **more)
            (output,) = llm.beam_search("Once upon a time", params)
            assert len(output.sequences) == 3
            assert all(math.isfinite(beam.score) for beam in output.sequences)
