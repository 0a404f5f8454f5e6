"""Models of transformers over the engine's cache: tokens as `model.generate` gives them, under each
schedule; and what is refused, each for its reason. `tests/models/compare.py` runs all others."""

import gc
import json
import logging
import math
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import compare
import pytest
import schedules
import torch
import transformers
from safetensors.torch import load_file, save_file
from compare import tokens
from conftest import changed, check_refused, slow, use_policies
from fake_gpu import FakeGpu
from test_torch_settings import SETTINGS

from nanoengine import LLM, SamplingParams
from nanoengine.features import is_installed
from nanoengine.model import Decoder, RMSNorm, rms_norm, swiglu
from nanoengine_extras.models.transformers_models import check, modules, watching

GREEDY = compare.GREEDY
# of each kind: windows, soft caps, sinks, no positions, learned positions, other angles, experts,
# one expert each, latent attention, shared keys and values, scales, images, norms after the
# attention, upcast scores, a window that holds all tokens
RUNNING = [
    "mistral", "gemma2", "gpt_oss", "smollm3", "gpt2", "gpt_neox", "qwen3_moe", "mixtral top-1",
    "deepseek_v3", "gemma4_text", "granite", "gemma3 images", "qwen3_vl images", "phi3", "olmo2",
    "gpt2 upcast", "llama partial", "llama gelu", "llama4 chunks", "moshi wide"]
# loops, several calls of a layer, clipped queries; and more of the kinds above
MORE = [
    "cohere2", "opt", "phi", "stablelm", "starcoder2", "mixtral", "olmoe", "deepseek_v2 yarn",
    "hrm_text", "diffllama", "mimo_v2_flash", "mistral3 images", "glm4", "dbrx"]
IS_SLOW = {"llama4 chunks"}
SLIDING, FULL = "sliding_attention", "full_attention"


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **compare.OPTIONS | options)


def are_right(llm: LLM, folder: Path, prompts: Any = ([5, 6, 7, 8],), max_tokens: int = 6) -> bool:
    """Whether greedy tokens are those of transformers."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    reference = compare.load_reference(folder)
    return tokens(llm.generate([*prompts], params, use_tqdm=False)) == [
        [compare.expected_tokens(reference, prompt, max_tokens)] for prompt in prompts]


# ------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("name", [*RUNNING, *map(slow, MORE)])
def test_tokens_are_those_of_transformers(folder_of, name):
    kind, what = compare.compare(folder_of(name), max_tokens=12)
    assert (kind, what) == ("right", "slow attention" if name in IS_SLOW else "")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_are_those_of_the_kernel_only_if_they_mean_the_same(
        folder_of, name, monkeypatch):
    """Here, the cap is one of unscaled scores, and the sink counts twice."""
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    eager = module.eager_attention_forward

    def other(attention, query, key, value, mask, softcap=None, scaling=1.0, **options):
        if softcap is not None:
            options["softcap"] = softcap * scaling
        else:
            sinks = attention.sinks + math.log(2)
            attention = SimpleNamespace(
                sinks=sinks, training=False, num_key_value_groups=attention.num_key_value_groups)
        return eager(attention, query, key, value, mask, scaling=scaling, **options)

    monkeypatch.setattr(module, "eager_attention_forward", other)
    assert compare.compare(folder_of(name)) == ("right", "slow attention")


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt_oss", "dbrx", "deepseek_v3"])
def test_bfloat16_is_checked_in_float32(folder_of, name, monkeypatch, caplog):
    errors = []
    compared = check.compare

    def spy(runner, model, ids, wanted, backend, dtype, most, *has_experts):
        assert wanted.dtype == torch.float32
        errors.append((dtype, most))
        return compared(runner, model, ids, wanted, backend, dtype, most, *has_experts)

    monkeypatch.setattr(check, "compare", spy)
    # each shape of heads is a kernel to compile
    backend = "gather" if name == "deepseek_v3" else "auto"
    caplog.set_level(logging.INFO)
    with make_llm(folder_of(name), dtype="bfloat16", attention_backend=backend) as llm:
        assert errors == [(torch.float32, 1e-3), (torch.bfloat16, 0.5)]
        weights = {each.dtype for each in llm.engine.runner.model.embed_tokens.parameters()}
        assert weights == {torch.bfloat16}
        assert len(tokens(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False))[0][0]) == 24
    # latent attention runs uncompressed: 3 layers of 4 heads of 24 numbers, for K and for V
    is_latent = name == "deepseek_v3"
    assert (f"a token takes {3 * 2 * 4 * 24 * 2} bytes" in caplog.text) == is_latent


PROMPTS = schedules.PROMPTS
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("name, names", [
    *(slow(name, ()) for name in ("cohere2", "deepseek_v3", "mixtral", "gemma2", "gpt_oss")),
    ("gpt_oss", ("mixed", "swap", "speculation"))])
def test_schedules(folder_of, name, names):
    """Tokens, log-probabilities and beams are those of transformers; drawn tokens are the same
    under all schedules."""
    assert schedules.faults(folder_of(name), *names) == ("right", "")


FLASH = dict(device="cuda", attention_backend="flash-attn", dtype="bfloat16", block_size=256,
             max_model_len=200)


@pytest.mark.parametrize("name, has_graphs", [
    *(slow(each, True) for each in ("cohere2", "olmo2", "gpt2", "arcee", "llama partial")),
    ("phi3", True), ("gemma2", True), slow("granite_swa", True), ("llama4 chunks", False)])
def test_graphs_where_no_step_waits_for_the_gpu(folder_of, name, has_graphs, caplog):
    """Own layers or not; soft caps and sinks, with the library's kernel; other attention."""
    caplog.set_level(logging.INFO, "nanoengine")
    results = []
    with FakeGpu() as gpu, make_llm(folder_of(name), **FLASH) as llm:
        runner = llm.engine.runner
        assert runner.backend == "flash-attn" and bool(runner.graphs.captured) == has_graphs
        assert ("no CUDA graphs, since the host waits" in caplog.text) != has_graphs
        for run_ahead, is_eager in ((True, False), (False, False), (True, True)):
            if is_eager:
                runner.graphs.captured.clear()
            use_policies(llm, run_ahead=run_ahead)
            gpu.reset_counters()
            results.append(tokens(llm.generate(PROMPTS[:3], FEW, use_tqdm=False)))
            assert bool(gpu.num_replays) == (has_graphs and not is_eager)
            assert bool(gpu.host_reads) != has_graphs
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("head_dim, options, has_graphs", [
    (16, dict(attention_backend="gather", dtype="float32"), False),
    # flash-attn does not take these heads; the library's kernel does; without it, keys are gathered
    (272, dict(dtype="float16"), True), slow(272, dict(dtype="float16", kernels=False), False),
    (16, dict(dtype="float16", enforce_eager=True), False)])
def test_a_gpu(tmp_path, head_dim, options, has_graphs):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**architectures.GEMMA | dict(head_dim=head_dim))
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with FakeGpu() as gpu, make_llm(tmp_path, **FLASH | options) as llm:
        assert bool(llm.engine.runner.graphs.captured) == has_graphs
        gpu.reset_counters()
        assert are_right(llm, tmp_path, PROMPTS[:3])
        assert has_graphs <= (not gpu.host_reads)


# ------------------------------------------------------------------------------ fast modules


class Norm(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24) * 0.5 + 1, False)
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


class Gated(torch.nn.Module):
    def __init__(self, function=None, bias=True) -> None:
        super().__init__()
        self.one = torch.nn.Linear(24, 40, bias)
        self.two = torch.nn.Linear(24, 40, bias=False)
        self.three = torch.nn.Linear(40, 24, bias)
        self.function = function
        self.requires_grad_(False)

    def forward(self, x):
        if self.function:
            return self.function(self, x)
        return self.three(torch.nn.functional.silu(self.two(x)) * self.one(x))


def found_in(module, dtype=torch.float32):
    """The module that takes the place of one, or None."""
    return others_in(module, torch.randn(1, 5, 24).to(dtype)).get(module)


def others_in(module, x):
    others = {}
    with modules.given_inputs(module) as inputs, torch.inference_mode():
        module(x)
    modules.fast_modules(inputs, x.dtype, others)
    return others


silu = torch.nn.functional.silu
# of each, whether it is known: of norms, also if each half is normed by itself, or large numbers
# are cut
PARTS = [
    (Norm(lambda x, w: rms_norm(x, w, 1e-6)), RMSNorm),
    (Norm(lambda x, w: w * rms_norm(x, torch.ones(24), 3e-5)), RMSNorm),
    (Norm(lambda x, w: rms_norm(x, 1 + w.float(), 1e-6)), RMSNorm),
    (torch.nn.LayerNorm(24, bias=False), None), (torch.nn.LayerNorm(24), None),
    (Norm(lambda x, w: x * w), None), (Norm(lambda x, w: rms_norm(x, w, 1e-6) * 1.001), None),
    (Norm(lambda x, w: rms_norm(x, 2 + w, 1e-6)), None),
    (Norm(lambda x, w: rms_norm(x, w, 1e-6) + 1e-3), None),
    (Norm(lambda x, w: rms_norm(x.unflatten(-1, (2, 12)), w[:12], 1e-6).flatten(-2)), None),
    (Norm(lambda x, w: rms_norm(x.clamp(max=20), w, 1e-6)), None),
    (Gated(), modules.GatedMLP), (Gated(bias=False), modules.GatedMLP),
    (Gated(lambda m, x: m.three(silu(m.one(x)) * m.two(x))), modules.GatedMLP),
    (Gated(lambda m, x: m.three(torch.nn.functional.gelu(m.one(x)) * m.two(x))), None),
    (Gated(lambda m, x: m.three(silu(m.one(x)) * (m.two(x) + 1))), None),
    (Gated(lambda m, x: m.three(silu(m.one(x).clamp(max=7)) * m.two(x))), None),
    (Gated(lambda m, x: x + m.three(silu(m.one(x)) * m.two(x))), None),
    (Gated(lambda m, x: m.three(silu(m.one(x) * 1.01) * m.two(x))), None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(len(PARTS)))
def test_norms_and_gated_mlps_are_known(number, dtype):
    module, kind = PARTS[number]
    module = module.requires_grad_(False).to(dtype)
    other = found_in(module, dtype)
    assert type(other) is (kind or type(None))
    if kind:
        x = torch.randn(3, 24).to(dtype)
        torch.testing.assert_close(other(x), module(x))


@pytest.mark.parametrize("eps", [1e-12, 1e-10, 1e-8, 1e-5, 0.1])
def test_the_eps_of_norms_is_found(eps):
    """It matters for rows of zeros, too, as the embedding of padding is."""
    other = found_in(Norm(lambda x, w: rms_norm(x, w, eps)))
    assert other.eps == eps
    assert torch.equal(other(torch.zeros(2, 24)), torch.zeros(2, 24))


def test_an_mlp_whose_gate_and_up_are_one_linear_is_known():
    mlp = Gated(lambda m, x: m.three(swiglu(m.one(x))))
    mlp.one = torch.nn.Linear(24, 80).requires_grad_(False)
    del mlp.two
    assert found_in(mlp).gate_up_proj is mlp.one
    mlp.function = lambda m, x: m.three(swiglu(m.one(x).roll(40, -1)))
    assert found_in(mlp) is None


@pytest.mark.parametrize("bias", [True, False])
def test_linears_with_the_same_input_are_one_product(bias):
    class Projections(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch.nn.Linear(24, 32, bias)
            self.key = torch.nn.Linear(24, 16, bias=False)
            self.other = torch.nn.Linear(24, 8)

        def forward(self, x):
            return self.query(x), self.key(x), self.other(x * 2)

    model = torch.nn.Sequential(Projections()).requires_grad_(False)
    xs = torch.randn(3, 1, 5, 24)
    expected = [model(x) for x in xs]
    modules.exchange(model, others_in(model, xs[0]))
    query, key, other = model[0].children()
    assert query.linear is key.linear and query.linear.weight.shape == (48, 24)
    assert type(other) is torch.nn.Linear
    products = []
    query.linear.register_forward_hook(lambda *_: products.append(1))
    for x, right in zip(xs, expected):
        assert all(map(torch.allclose, model(x), right))
        assert not query.state[1], "nothing is kept of a step"
    assert len(products) == 3
    # one of them twice, or with another input than the other
    assert torch.allclose(query(xs[0]), query(xs[0])) and torch.allclose(key(xs[1]), expected[1][1])


# how many norms, MLPs and linears of three or four layers are known; what is in attention modules
# that are known as a whole does not count
KNOWN = {"olmo2": (13, 3, 9), "gemma2": (17, 0, 20), "phi3": (7, 3, 0), "gpt2": (0, 0, 0),
         "cohere2": (0, 4, 0), "gpt_oss": (9, 0, 12),
         # each expert is an MLP
         "mixtral": (7, 12 * is_installed("models.experts"), 0)}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_modules_of_models(folder_of, name, dtype):
    with make_llm(folder_of(name), dtype=dtype, attention_backend="gather") as llm:
        found = [*llm.engine.runner.model.layers.modules()]
        kinds = RMSNorm, modules.GatedMLP, modules.Part
        assert tuple(sum(isinstance(each, kind) for each in found) for kind in kinds) == KNOWN[name]


def test_modules_stay_where_a_model_would_compute_something_else(folder_of, caplog, monkeypatch):
    def wrong(linears):
        fused = side_by_side(linears)
        fused.weight = torch.nn.Parameter(fused.weight + 0.01, False)
        return fused

    side_by_side = modules.side_by_side
    monkeypatch.setattr(modules, "side_by_side", wrong)
    monkeypatch.setattr(modules, "is_same", lambda *_: False)
    with caplog.at_level(logging.INFO), make_llm(folder_of("cohere2")) as llm:
        assert "transformers' own modules stay, since with others: its logits" in caplog.text
        kinds = {type(each) for each in llm.engine.runner.model.layers.modules()}
        assert modules.Part not in kinds


# -------------------------------------------------------------------------- which one computes


def test_own_families_stay_native(tiny):
    found = []
    for impl in ("auto", "transformers"):
        with LLM(tiny, dtype="float32", block_size=16, num_kv_blocks=24, model_impl=impl) as llm:
            assert isinstance(llm.engine.runner.model, Decoder) == (impl == "auto")
            found.append(tokens(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)))
    assert found[0] == found[1]
    check_refused("model_impl='vllm' is not accepted", LLM, tiny, model_impl="vllm")


@pytest.mark.parametrize("name, entries", [
    *((name, dict(architectures=[architecture])) for name, architecture in (
        ("exaone", "LlamaForCausalLM"), ("exaone", "ExaoneForCausalLM"),
        ("phimoe", "PhiMoEForCausalLM"), ("ernie4_5", "Ernie4_5_ForCausalLM"))),
    ("gpt2", {}),
    # code on the hub, which transformers does not need
    ("phi3", dict(auto_map={"AutoConfig": "configuration.Other", "AutoModelForCausalLM": "m.O"})),
    ("mistral", dict(sliding_window=3, layer_types=[SLIDING, FULL, SLIDING]))])
def test_auto_takes_what_is_not_native(folder_of, tmp_path, name, entries):
    """transformers knows a family by its model_type. What it saves names its own class, as Llama.
    The class in the config of a Ministral, Mistral's, has one window for all layers."""
    folder = changed(folder_of(name), tmp_path, **entries)
    with make_llm(folder, model_impl="auto", attention_backend="gather") as llm:
        assert are_right(llm, folder)
    if name == "mistral":
        assert type(compare.load_reference(folder)).__name__ == "MinistralForCausalLM"
    else:
        check_refused("is not computed by the engine itself .* model_impl='tr|"
                      "model_type='exaone' is not accepted", make_llm, folder, model_impl="native")


@pytest.mark.parametrize("entries, named", [
    ({}, "hidden_act='gelu'"),
    (dict(hidden_act="silu", rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type='dynamic'"),
    (dict(hidden_act="silu", partial_rotary_factor=0.5), "partial_rotary_factor=0.5")])
def test_auto_says_what_only_transformers_computes(folder_of, tmp_path, entries, named):
    """What the engine refuses of its own families, it does not give to transformers unasked."""
    folder = changed(folder_of("llama gelu"), tmp_path, **entries)
    message = f"has {named}, which the engine itself does not compute: it must be run with model_i"
    for impl in ("auto", "native"):
        check_refused(message, make_llm, folder, model_impl=impl)
    with make_llm(folder, attention_backend="gather") as llm:
        assert are_right(llm, folder)


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name, reason", [
    ("lfm2 conv", r"its layers of kind \['conv'\] keep state outside a KV cache"),
    ("qwen3_next", r"its layers of kind \['linear_attention'\] keep"),
    ("deepseek_v32", r"its layers of kind \['indexed_attention'\] keep"),
    ("bart", "it counts positions by itself"), ("roberta", "its logits in a step differ"),
    ("falcon", "it does not let a library compute its attention"),
    ("xlm", "it does not let a library compute its attention"),
    ("moshi", "transformers contradicts itself: its cache keeps 8 tokens"),
    ("llama4_text", "it counts positions by itself"),
    ("doge", "it changes the masks of its attention")])
def test_what_is_not_computed_the_same_is_refused(folder_of, name, reason):
    check_refused(f"model_type='.*' is not accepted, since {reason}.*: it must be one that "
                  "docs/models.md lists, and its files mu", make_llm, folder_of(name))


@pytest.mark.parametrize("name, entries, reason", [
    # its queries grow from position 8,192 on, by their places in a row of tokens: no short check
    # finds it
    ("llama4_text", dict(floor_scale=8192), "it counts positions by itself"),
    ("gpt2", dict(architectures=["NoneForCausalLM"]), "transformers has no architectures"),
    ("gpt2", dict(n_embd=2**18, n_inner=2**20), "GiB of weights' is not accepted: it must be sm")])
def test_other_configs_are_refused(folder_of, tmp_path, name, entries, reason):
    check_refused(reason, make_llm, changed(folder_of(name), tmp_path, **entries),
                  load_format="dummy")


def test_llama_4_with_images_is_refused_for_the_same(folder_of, tmp_path):
    """It has a whole model for texts, beside one for images."""
    text = json.loads((folder_of("llama4_text") / "config.json").read_text())
    vision = compare.VARIANTS["gemma3 images"][1]["vision_config"] | dict(intermediate_size=128)
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision, architectures=["Llama4ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    check_refused("since it counts positions by itself", make_llm, tmp_path, load_format="dummy")


def test_a_different_expert_in_bfloat16_is_no_fault(make_model):
    """With these weights, one of two tokens gets another expert than in float32."""
    folder, _ = make_model(
        "Mixtral", seed=5, hidden_size=64, intermediate_size=64, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1, initializer_range=0.3)
    LLM(folder, dtype="bfloat16", num_kv_blocks=16, attention_backend="gather").close()


@pytest.mark.parametrize("name", ["olmo2", "qwen3_moe"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_sequences_is_wrong_in_bfloat16(folder_of, monkeypatch, name, which):
    """In the steps that they share, which have 13, 3 and 2 rows. In float32, nothing is."""
    compared = check.compare

    def compare_with_wrong(runner, model, *arguments):
        head = model.lm_head

        def wrong(hidden):
            logits = head(hidden)
            of_first = {13: 5, 3: 1, 2: 1}.get(len(logits), len(logits))
            if of_first < len(logits):
                logits.tensor_split([of_first])[which].neg_()
            return logits

        with monkeypatch.context() as patch:
            if torch.bfloat16 in arguments:
                patch.setattr(model, "lm_head", wrong)
            return compared(runner, model, *arguments)

    monkeypatch.setattr(check, "compare", compare_with_wrong)
    check_refused("its logits in a step differ from those of transformers", make_llm,
                  folder_of(name), dtype="bfloat16")


def test_a_tensor_is_missing_or_left_over(folder_of, tmp_path, caplog):
    folder = changed(folder_of("gpt2"), tmp_path)
    weights = load_file(file := folder / "model.safetensors")
    name = next(each for each in weights if each.endswith("ln_1.weight"))
    other = weights.pop(name)
    size = len(other)
    for tensors, message in (
            ({}, f"its files lack .*{name}"),
            ({name: other[1:].clone()}, rf"its {name} has the shape \[{size - 1}\], and not "
             rf"\[{size}\]: it must .* fit its config.json$")):
        save_file(weights | tensors, file, {"format": "pt"})
        check_refused(message, make_llm, folder)
    more = {"transformer.more.weight": other.clone()}
    save_file(weights | {name: other} | more, file, {"format": "pt"})
    make_llm(folder).close()
    assert "transformers does not use ['transformer.more.weight']" in caplog.text


@pytest.mark.parametrize("options, message", [
    (dict(tensor_parallel_size=2), "tensor_parallel_size=2 is not accepted: it must be 1 for a "),
    (dict(cpu_offload_gb=1), "cpu_offload_gb"),
    (dict(batch_invariant=True), "batch_invariant=True is not accepted"),
    (dict(attention_backend="numba"), "attention_backend='numba' is not accepted")])
def test_options_that_need_an_own_model(folder_of, options, message):
    check_refused(message, make_llm, folder_of("llama4 chunks"), **options)


PARAMS = [SHORT] * 3 + [schedules.DRAWN] * 3


@pytest.mark.parametrize("setting", ["float64", "bfloat16", "meta", "autocast"])
@pytest.mark.parametrize("name", [slow("gpt2"), "gemma2", slow("mixtral"), slow("phi3")])
def test_settings_of_pytorch_change_no_token(folder_of, name, setting):
    """Neither before a model is loaded, nor after."""
    with make_llm(folder_of(name), dtype="float32") as llm:
        expected = tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        with SETTINGS[setting](), make_llm(folder_of(name), dtype="float32") as own:
            for each in (llm, own):
                outputs = each.generate(PROMPTS, PARAMS, use_tqdm=False)
                assert tokens(outputs) == expected
                assert each.engine.runner.model.stack is None or name in ("mixtral", "phi3")


@pytest.mark.parametrize("options", [{}, slow(dict(quantization="int8"))])
def test_the_random_numbers_of_the_caller_stay_the_same(folder_of, options):
    folder = folder_of("phi3")
    torch.manual_seed(5)
    expected = torch.rand(9)
    torch.manual_seed(5)
    with make_llm(folder, **options):
        assert torch.equal(torch.rand(9), expected)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_closed_engine_frees_its_memory(folder_of, name):
    llm = make_llm(folder_of(name))
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    model = llm.engine.runner.model
    left = [weakref.ref(each) for each in (model, model.layers, model.calls[0].cache)]
    del model
    llm.close()
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_a_step_that_is_broken_off_keeps_no_memory(folder_of):
    """Even if the engine is closed without a further step."""
    def interrupt(*_):
        raise KeyboardInterrupt

    llm = make_llm(folder_of("gpt2"))
    model = llm.engine.runner.model
    model.layers.h[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    left = weakref.ref(model.calls[0])
    del model, llm
    gc.collect()
    assert left() is None


def test_the_longest_text_of_whisper(folder_of):
    """Its config.json has another name for it. A position that is too high would end all requests.
    """
    with make_llm(folder_of("whisper")) as llm:
        assert llm.inputs.max_model_len == 448
        output, = llm.generate([[5] * 440], SHORT, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("place", ["top", "text"])
def test_eos_of_a_model_for_images_can_be_in_either_place(folder_of, tmp_path, place):
    text = json.loads((folder_of("gemma3 images") / "config.json").read_text())["text_config"]
    places = dict(top=None, text=None) | {place: [7, 9]}
    folder = changed(folder_of("gemma3 images"), tmp_path, eos_token_id=places["top"],
                     text_config=text | dict(eos_token_id=places["text"]))
    (folder / "generation_config.json").unlink()
    with make_llm(folder) as llm:
        assert {*llm.inputs.eos_tokens} == {7, 9}


@pytest.mark.parametrize("name, longest", [("phi3 longrope", 40), ("llama dynamic", 512)])
def test_angles_that_depend_on_the_longest_sequence(folder_of, caplog, name, longest):
    with make_llm(folder_of(name)) as llm:
        assert llm.inputs.max_model_len == longest
        assert ("max_model_len is at most 40" in caplog.text) == (longest == 40)
    check_refused(f"max_model_len={longest + 1} is not accepted", make_llm, folder_of(name),
                  max_model_len=longest + 1)


@pytest.mark.parametrize("change", ["window", "scale", "kv"])
def test_the_check_finds_what_is_computed_wrong(folder_of, monkeypatch, change):
    """A wrong window, scale, or order of heads, in one call of the first layer."""
    record = check.record

    def wrong(*arguments):
        first, *others = record(*arguments)
        changes = {"window": dict(window=4), "scale": dict(scale=first.scale * 1.1),
                   "kv": dict(scale=-first.scale)}[change]
        return [first._replace(**changes), *others]

    monkeypatch.setattr(check, "record", wrong)
    for dtype in ("float32", "bfloat16"):
        check_refused("its logits in a step differ from those of transf", make_llm,
                      folder_of("qwen3_moe"), dtype=dtype)


# ------------------------------------------------------------------------------- few layers

LAYERS = {
    "llama": (dict(num_hidden_layers=9), {0, 1, 5, 8}),
    # every fourth is another one
    "smollm3": (dict(num_hidden_layers=12, no_rope_layers=[1, 1, 1, 0] * 3,
                     layer_types=[FULL] * 12), {0, 1, 3, 6, 7, 10, 11}),
    "cohere2": (dict(num_hidden_layers=12, layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 3),
                {0, 1, 3, 6, 7, 10, 11}),
    "deepseek_v3": (dict(num_hidden_layers=9, first_k_dense_replace=3), {0, 1, 2, 3, 6, 8})}


@pytest.fixture
def found(monkeypatch) -> list:
    """What is chosen when a model is loaded."""
    results = []
    choose = check.choose

    def spy(*arguments):
        results.append(choose(*arguments))
        return results[0]

    monkeypatch.setattr(check, "choose", spy)
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_a_few_layers_of_each_kind_are_checked(folder_of, tmp_path, found, name):
    entries, expected = LAYERS[name]
    folder = changed(folder_of(name), tmp_path, **entries)
    with make_llm(folder, load_format="dummy") as llm:
        assert len(llm.engine.runner.model.calls) == entries["num_hidden_layers"]
    layers, chosen, numbers = found[0]
    assert chosen == numbers == expected and len(layers) == entries["num_hidden_layers"]
    assert not any("forward" in vars(layer) for layer in layers)


class Same(torch.nn.Module):
    def forward(self, x, *others):
        return x


class Stack(torch.nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.run = run
        self.layers = torch.nn.ModuleList(Same() for _ in range(9))

    def forward(self, x, state):
        for layer in self.layers:
            x = self.run(layer, x, state)


@pytest.mark.parametrize("run, chosen", [
    (lambda layer, x, state: layer(x), {0, 1, 5, 8}),
    # what a layer keeps for others, and other things than hidden states; other arguments
    (lambda layer, x, state: layer(x, state), {*range(9)}),
    (lambda layer, x, state: layer((x, x))[0], {*range(9)}),
    (lambda layer, x, state: layer(x, x * 2), {*range(9)})])
def test_layers_that_do_more_are_all_checked(run, chosen):
    model = Stack(run)
    with modules.given_inputs(model) as inputs:
        model(torch.ones(2), {})
    assert watching.choose(model.layers, inputs, [])[1] == chosen


def test_a_layer_that_does_something_else_is_checked(folder_of, tmp_path, monkeypatch, found):
    """It is in the middle of others that are alike."""
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    plain = kind.forward

    def forward(self, hidden_states, **options):
        out = plain(self, hidden_states, **options)
        return out * 1.5 if self.self_attn.layer_idx == 3 else out

    monkeypatch.setattr(kind, "forward", forward)
    folder = changed(folder_of("llama"), tmp_path, num_hidden_layers=9)
    with make_llm(folder, load_format="dummy"):
        assert found[0][1] == {0, 1, 3, 5, 8}


# ---------------------------------------------------------------------------- counted tokens


def has_counted(function) -> bool:
    with watching.Watch(19, []) as watch:
        function(torch.ones(19, 4))
    return watch.has_counted


@pytest.mark.parametrize("function", [
    lambda x: x * torch.arange(19)[:, None],
    lambda x: x + (torch.arange(19) + 1.0)[:, None],
    lambda x: torch.arange(19, dtype=torch.float32).cos(),
    lambda x: torch.ones(100, 4)[torch.arange(19)],
    lambda x: torch.nn.functional.embedding(torch.arange(19), torch.ones(100, 4)),
    lambda x: torch.where(torch.arange(19) > 8, 1.0, 2.0),
    lambda x: x.masked_fill((torch.arange(19) > 8)[:, None], 0.0),
    lambda x: torch.ones(1, 19, dtype=torch.int64).cumsum(-1).float(),
    lambda x: x * torch.ones(19, dtype=torch.int64).cumsum(0).view(19, 1)])
def test_positions_that_are_counted(function):
    assert has_counted(function)


def sorted_and_back(x):
    order = torch.randperm(19)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(19)
    assert torch.equal(x[order][inverse], x)


@pytest.mark.parametrize("function", [
    sorted_and_back, lambda x: x[torch.arange(19)], lambda x: x * torch.arange(4),
    lambda x: x.index_select(0, torch.arange(19)), lambda x: x[torch.arange(19).flip(0)],
    lambda x: x.new_zeros(19, 4).index_add_(0, torch.arange(19), x)])
def test_rows_that_are_only_moved(function):
    assert not has_counted(function)


# ------------------------------------------------------------------------------------- masks


IMAGES = torch.zeros(1, 19, dtype=torch.int64)


@pytest.mark.parametrize("mask, found", [
    (lambda b, h, q, k: k <= q, (None, True)),
    (lambda b, h, q, k: (k <= q) & (k > q - 8), (8, True)),
    (lambda b, h, q, k: (k <= q) & (k > q - 100), (None, True)),
    (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), (4, False)),
    (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)), (10, False)),
    (lambda b, h, q, k: (k <= q + 1) & (k > q - 8), (8, False)),
    # numbers of the tokens of this step: none belongs to an image, or all do
    (lambda b, h, q, k: (k <= q) & (k > q - 8) | (IMAGES[b, q] * IMAGES[b, k] > 0),
     (8, True)),
    (lambda b, h, q, k: (k <= q) | (IMAGES[b, q] == IMAGES[b, k]), (None, False))])
def test_windows_are_found_by_what_a_mask_says(mask, found):
    assert check.window_of(mask, 100) == found


@pytest.mark.parametrize("size", [16, 100, 1024, 5000])
@pytest.mark.parametrize("dtype, weight_dtype", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32)])
def test_the_kernel_of_norms(dtype, weight_dtype, size):
    row_norms = pytest.importorskip("nanoengine_extras.models.transformers_models.row_norms")
    torch.manual_seed(0)
    norm = RMSNorm(size, 1e-3, dtype=weight_dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    fast = row_norms.RowNorm(norm)
    wide = torch.randn(7, 3, 2 * size).to(dtype)
    with torch.inference_mode():
        for x in (wide[0, 0, :size], wide[..., :size], wide[:, 1, size:], wide[:0, :, :size]):
            numbers = x.double()
            scale = (numbers.square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()
            found, expected = fast(x), (numbers * scale * norm.weight.double()).to(dtype)
            assert found.dtype == dtype and found.shape == x.shape
            torch.testing.assert_close(found, expected)
        rows = torch.randn(40, size).to(dtype)
        assert torch.equal(fast(rows)[[3, 39]], torch.cat((fast(rows[3:4]), fast(rows[39:]))))
