"""Layers of models of transformers that are the engine's own: which ones, which stay, and why."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import use_policies
from fake_gpu import FakeGpu
from transformers.models.llama import modeling_llama as llama

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

import compare  # noqa: E402

from nanoengine import LLM, SamplingParams  # noqa: E402

pytestmark = pytest.mark.needs("models.transformers_models")
# whole decoders, in a dtype in which norms have it, too; some have experts or another activation in
# some layers or in all; then attention only: neighbours are rotated, a part is, some layers rotate
# nothing, queries are scaled, all in one linear
DECODERS = ["llama", "mistral", "qwen2", "qwen3", "phi3", "ernie4_5", "cwm",
            "llama partial", "qwen3_moe", "mixtral", "glm4_moe", "arcee"]
ATTENTION = ["cohere2", "glm4", "stablelm", "smollm3", "granite", "gpt_neox", "gemma3_text",
             "biogpt"]
# clipped, normed after the rotation, normed together, latent, with keys of other layers, gated;
# soft caps and sinks
STAYING = ["dbrx", "hunyuan_v1_dense", "olmo2", "deepseek_v3", "gemma4_text", "afmoe", "gemma2",
           "gpt_oss"]


def found_in(folder, **options):
    """How many calls of attention there are, how many are own, and whether the decoder is."""
    with LLM(folder, **compare.OPTIONS | options) as llm:
        model = llm.engine.runner.model
        return len(model.calls), sum(call.is_own for call in model.calls), model.stack is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_known(folder_of, name, dtype):
    calls, own, has_decoder = found_in(folder_of(name), dtype=dtype)
    assert own == calls and has_decoder


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_known(folder_of, name):
    calls, own, has_decoder = found_in(folder_of(name))
    assert own == calls and not has_decoder
    # the tokens of the others are compared in test_transformers_models.py
    if name in ("gemma3_text", "biogpt"):
        assert compare.compare(folder_of(name), max_tokens=12) == ("right", "")


@pytest.mark.parametrize("name", STAYING)
def test_other_attention_stays(folder_of, name):
    calls, own, has_decoder = found_in(folder_of(name))
    assert not own and not has_decoder


@pytest.mark.parametrize("name, has_decoder", [
    ("phi3", True), ("granite", False), ("arcee", True),
    *(pytest.param(*each, marks=pytest.mark.slow)
      for each in (("llama partial", True), ("gemma3_text", False)))])
def test_cuda_graphs_hold_own_layers(folder_of, name, has_decoder):
    """On a GPU that is not there: a whole decoder, and attention between scales and other norms."""
    options = compare.OPTIONS | dict(device="cuda", attention_backend="flash-attn", block_size=256,
                                     dtype="bfloat16", max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    results = []
    with FakeGpu() as gpu, LLM(folder_of(name), **options) as llm:
        runner = llm.engine.runner
        assert all(call.is_own for call in runner.model.calls)
        assert (runner.model.stack is not None) == has_decoder and runner.graphs.captured
        for run_ahead, has_graphs in ((True, True), (False, True), (True, False)):
            if not has_graphs:
                runner.graphs.captured.clear()
            use_policies(llm, run_ahead=run_ahead)
            gpu.reset_counters()
            outputs = llm.generate(compare.random_prompts()[:3], params, use_tqdm=False)
            assert bool(gpu.num_replays) == has_graphs and not gpu.host_reads
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name, num_programs", [("llama", 2), ("glm4_moe", 3), ("arcee", 4)])
def test_layers_of_a_decoder_run_as_programs(folder_of, name, num_programs):
    """A program ends before an MLP that is not gated. In glm4_moe, the first one is."""
    with LLM(folder_of(name), **compare.OPTIONS) as llm:
        llm.generate([[5, 6, 7]], compare.GREEDY, use_tqdm=False)
        assert len(llm.engine.runner.model.stack.programs) == num_programs
    if num_programs > 2:
        assert compare.compare(folder_of(name), max_tokens=12) == ("right", "")


def test_a_failed_trial_leaves_a_module_as_it_was(folder_of, monkeypatch):
    """An MLP that returns more than hidden states: its layers stay, but attention is the engine's
    own."""
    arcee = import_module("transformers.models.arcee.modeling_arcee")
    plain = arcee.ArceeMLP.forward
    monkeypatch.setattr(arcee.ArceeMLP, "forward", lambda self, x: (plain(self, x), None))
    layer = arcee.ArceeDecoderLayer

    def forward(self, hidden_states, position_embeddings=None, **options):
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(normed, position_embeddings=position_embeddings, **options)
        hidden_states = hidden_states + attended
        out, _ = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + out

    monkeypatch.setattr(layer, "forward", forward)
    calls, own, has_decoder = found_in(folder_of("arcee"))
    assert own == calls and not has_decoder
    assert compare.compare(folder_of("arcee"), max_tokens=12) == ("right", "")


def rotated(change):
    plain = llama.apply_rotary_pos_emb

    def rotate(query, key, cos, sin, **options):
        return change(*plain(query, key, cos, sin, **options))

    return "apply_rotary_pos_emb", rotate


def changed_forward(kind, change):
    plain = kind.forward

    def forward(self, hidden_states, *arguments, **options):
        return change(plain, self, hidden_states, *arguments, **options)

    return kind, forward


@pytest.mark.parametrize("change", [
    lambda query, key: (query * 1.0001, key), lambda query, key: (query, key + 1e-4),
    lambda query, key: (key.repeat_interleave(2, 1), query[:, ::2]),
    lambda query, key: (query, key.clamp(-50, 50))])
def test_rotations_that_do_more_stay(folder_of, monkeypatch, change):
    monkeypatch.setattr(llama, *rotated(change))
    calls, own, has_decoder = found_in(folder_of("llama"))
    assert not own and not has_decoder


def later(plain, self, x, *arguments, position_ids=None, **options):
    """What it computes differs from position 300 on."""
    options["position_ids"] = position_ids
    return plain(self, x * (1 + (position_ids[..., None] >= 300)), *arguments, **options)


def scaled(plain, self, x, *arguments, **options):
    return x + 1.01 * (plain(self, x, *arguments, **options) - x)


@pytest.mark.parametrize("kind, change, has_own", [
    (llama.LlamaAttention, later, False), (llama.LlamaDecoderLayer, scaled, True)])
def test_modules_that_do_more_stay(folder_of, monkeypatch, kind, change, has_own):
    """No prompt of the check has 300 tokens."""
    monkeypatch.setattr(kind, "forward", changed_forward(kind, change)[1])
    calls, own, has_decoder = found_in(folder_of("llama"))
    assert own == (calls if has_own else 0) and not has_decoder


def test_a_decoder_with_more_between_its_layers_stays(folder_of, monkeypatch):
    """An embedding that is scaled."""
    plain = llama.LlamaModel.forward

    def forward(self, input_ids, **options):
        embeds = self.embed_tokens(input_ids) * 2
        return plain(self, **options | dict(inputs_embeds=embeds))

    monkeypatch.setattr(llama.LlamaModel, "forward", forward)
    calls, own, has_decoder = found_in(folder_of("llama"))
    assert own == calls and not has_decoder
