"""Options, parameters and arguments of calls: what is refused, and what the message says."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import GREEDY
from test_sampler import make as make_row, sample

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.errors import naming
from nanoengine.observers import Feature
from nanoengine_extras.tools.chat import render
from nanoengine_extras.running.strict import Strict

check_call = Strict().call


def config(**options) -> EngineConfig:
    return EngineConfig(**{"model": "m"} | options)


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
        ("stop", [3], "string"), ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("logprobs", -2, "greater than or equal to -1"),
        ("prompt_logprobs", -2, "greater than or equal to -1"),
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
        ("early_stopping", True, "not known: leave it out"),
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
        ("gpu_memory_utilization", 1.5, "less than or equal to 1"),
        ("enable_prefix_caching", "yes", "boolean"),
        ("enforce_eagr", False, "is not known: the nearest is enforce_eager"),
        ("cpu_offload_gb", 0.5, "0 on a CPU"), ("cpu_offload_gb", -1, "greater than or equal to 0"),
        ("cpu_offload_gb", math.inf, "finite"),
        ("model", None, "a valid string"), ("model", 5, "a valid string"),
        ("tokenizer", 5, "a valid string"),
        # an empty path, as of a variable of the environment, is not the current folder
        ("model", "", "a folder"), ("tokenizer", "", "a folder"),
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
    with pytest.raises(ValueError, match=re.escape(message)):
        setattr(options, name, value)
    assert options == make(), "what was refused is not kept"


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(ValueError, match="^beam_width is missing; max_tokens is missing$"):
        BeamSearchParams(ignore_eos=True)
    with pytest.raises(ValueError, match="^max_tokens is missing$"):
        BeamSearchParams(3)
    with pytest.raises(ValueError, match="^temprature is not known: the nearest is temperature$"):
        SamplingParams().temprature = 1


def test_a_long_value_is_cut():
    with pytest.raises(ValueError) as error:
        SamplingParams(top_k="5" * 10**6)
    assert len(str(error.value)) < 1200


@pytest.mark.parametrize("made, name, value", [
    (dict(n=2), "temperature", 0), (dict(temperature=0), "n", 2), (dict(), "min_tokens", 17),
    (dict(min_tokens=9), "max_tokens", 8), (dict(stop="a"), "detokenize", False),
    (dict(detokenize=False), "stop", "a"), (dict(), "top_p", 2)])
def test_an_assignment_that_is_refused_changes_nothing(made, name, value):
    params = SamplingParams(**made)
    with pytest.raises(ValueError):
        setattr(params, name, value)
    assert params == SamplingParams(**made)


@pytest.mark.parametrize("make, advices", [
    (config, {"max_num_seq": "the nearest is max_num_seqs",
              "zzz": "leave it out; help(EngineConfig) lists the known ones"}),
    (SamplingParams, {"max_new_tokens": "the nearest is max_tokens",
                      "best_of": "leave it out; help(SamplingParams) lists the known ones"}),
    (beams, {"width": "the nearest is beam_width",
             "do_sample": "leave it out; help(BeamSearchParams) lists the known ones"})])
def test_a_keyword_that_is_not_known(make, advices):
    """One sentence, whose last words say what to do; no list of all keywords."""
    for name, advice in advices.items():
        with pytest.raises(ValueError) as error:
            make(**{name: "awq"})
        assert str(error.value) == f"{name} is not known: {advice}"


def test_messages_are_no_prompt():
    """The error says which call takes them."""
    for prompts in ({"role": "user", "content": "a"}, [{"role": "user", "content": "a"}]):
        with pytest.raises(ValueError, match=r"^prompts\[0\]=.*; messages are for chat$"):
            check_call(prompts, None, None, SamplingParams)
    with pytest.raises(ValueError, match="or a list of these$"):
        check_call([{"text": "a"}], None, None, SamplingParams)


@pytest.mark.parametrize("prompt", [None, 5, {"prompt": None, "mine": 1}])
def test_a_prompt_in_an_error_is_as_it_was_given(prompt):
    with pytest.raises(ValueError) as error:
        check_call(["a", prompt], None, None, SamplingParams)
    assert str(error.value).startswith(f"prompts[1]={prompt!r} is not accepted")


def test_a_value_in_place_of_a_token_id_is_cut():
    with pytest.raises(ValueError, match="^prompts.0.: token id .* is out of vocabulary") as error:
        check_call([[[7] * 10**5]], None, None, SamplingParams)
    assert len(str(error.value)) < 300


def test_numbers_of_numpy_are_priorities(llm):
    one, two = llm.add(["a", "b"], GREEDY, [*np.argsort([3, 1])])
    llm.abort([one, two])
    assert (one.seq.priority, two.seq.priority) == (1, 0)
    for value in (np.float64(1), np.bool_(True), True, "1"):
        with pytest.raises(ValueError, match="^priority=.*: it must be one int, or 2 of them$"):
            check_call(["a", "b"], None, [1, value], SamplingParams)


@pytest.mark.parametrize("call", [
    lambda llm, text: llm.generate(["a", text], GREEDY),
    lambda llm, text: llm.chat([{"role": "user", "content": text}], GREEDY),
    lambda llm, text: llm.score("a", [text]), lambda llm, text: llm.score(text, ["a"])])
def test_a_text_that_has_no_bytes_in_utf_8(llm, call):
    """Half of a pair, as json.loads makes of an escape that was cut."""
    with pytest.raises(ValueError, match=r"half of a surrogate pair, .*: leave it out\)?$"):
        call(llm, "a\ud83d")


def test_an_option_of_a_chat_that_is_not_known():
    advices = dict(tool="the nearest is tools", enable_thinking="leave it out, or if the template",
                   temperature="leave it out, or if the template")
    for name, advice in advices.items():
        with pytest.raises(TypeError, match=f"^{name} is not known: {advice}[^:]*$"):
            render(None, [], **{name: True})


def errors_of_memory() -> list[Exception]:
    """Among them real ones of PyTorch and NumPy."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**45)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**45)
    return [error.value, of_numpy.value, MemoryError("5 bytes"), MemoryError(),
            torch.OutOfMemoryError("no memory.")]


def test_advice_to_save_memory_is_for_errors_of_memory_only():
    for error in errors_of_memory():
        with pytest.raises(ValueError, match=r"[^.]\. Lower max_num_batched_tokens or"):
            with naming("what"):
                raise error
    for error in (RuntimeError("stack expects each tensor to be of equal size"), KeyError("layers"),
                  ValueError("Lower"), AttributeError("'X' object has no attribute 'y'")):
        with pytest.raises(ValueError) as found:
            with naming("what"):
                raise error
        assert str(found.value) == f"what: {error}"




def test_duplicates_are_removed_in_order():
    params = SamplingParams(stop_token_ids=[42, 7, 42, 9, 7], bad_words=["b", "a", "b"])
    assert (params.stop_token_ids, params.bad_words) == ([42, 7, 9], ["b", "a"])
    for name, bad in (("stop_token_ids", [[1], [1]]), ("bad_words", [{}, {}])):
        with pytest.raises(ValueError, match=name + r"\.0=.* is not accepted"):
            SamplingParams(**{name: bad})


@pytest.mark.parametrize("name, values", [
    ("stop_token_ids", [7, 9]), ("allowed_token_ids", [7, 9]), ("bad_words", ["a", "b"])])
def test_other_collections_where_the_order_means_nothing(name, values):
    for given in (tuple(values), {*values}):
        assert sorted(getattr(SamplingParams(**{name: given}), name)) == values
    with pytest.raises(ValueError, match=f"{name}=.*valid list"):
        SamplingParams(**{name: dict.fromkeys(values)})
    with pytest.raises(ValueError, match="stop=.*valid list"):
        SamplingParams(stop={"a", "b"})
    # a tuple has an order
    assert SamplingParams(stop=("b", "a")).stop == ["b", "a"]


def test_shorthands_and_numpy_numbers():
    params = SamplingParams(stop="a", stop_token_ids=None, max_tokens=np.int64(3),
                            temperature=np.float32(0.5))
    assert params.stop == ["a"] and params.stop_token_ids == []
    assert type(params.max_tokens) is int and params.temperature == 0.5
    assert SamplingParams().stop is not SamplingParams().stop
    assert SamplingParams(seed=-1).seed == -1 and SamplingParams(seed=-2).seed == -2


def test_a_copy_of_sampling_params_is_its_own():
    params = SamplingParams(n=2, max_tokens=5, stop="a")
    copy = params.clone()
    copy.stop.append("b")
    copy.n = 3
    assert (params.n, params.stop, copy.stop) == (2, ["a"], ["a", "b"])
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(
        logprobs=1, prompt_logprobs=1)
    for positional in ((2,), (2, 0.5), ("x",), ([],)):
        with pytest.raises((TypeError, ValueError)):
            SamplingParams(*positional)


def test_all_mistakes_at_once():
    message = (r"top_k=-2 is not accepted: it must be [^;]+; "
               r"stop\.1=3 is not accepted: it must be a valid string")
    with pytest.raises(ValueError, match=f"^{message}$"):
        SamplingParams(top_k=-2, stop=["a", 3])
    with pytest.raises(ValueError, match="^beam_width=0 .*greater than or equal to 1$"):
        BeamSearchParams(0, 2)


def test_dtypes_by_name_or_object():
    for dtype in ("bfloat16", torch.bfloat16):
        assert EngineConfig(model="m", dtype=dtype).dtype == "bfloat16"


# -------------------------------------------------------------------- arguments of calls


def test_priorities_are_one_for_each(make_llm):
    with make_llm(scheduling_policy="priority") as llm:
        for bad in ([], [1], "", 0.0, {}):
            with pytest.raises(ValueError, match="priority=.* must be one int, or 2 of them"):
                llm.generate([[1], [2]], GREEDY, priority=bad)
        assert llm.generate([], GREEDY, priority=[]) == []


def test_priorities_are_numbers(llm):
    for priority in (True, [False]):
        with pytest.raises(ValueError, match="priority=.* is not accepted: it must be one int"):
            llm.generate(["a"], GREEDY, priority=priority)


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
