"""Layers of models of transformers that are the engine's own: which ones, which stay, and why."""

from importlib import import_module

import compare
import pytest
from conftest import slow
from transformers.models.llama import modeling_llama as llama

from nanoengine import LLM

pytestmark = pytest.mark.needs("models.transformers_models")
# whole decoders, in a dtype in which norms have it, too; some have experts or another activation in
# some layers or in all; then attention only: neighbours are rotated, a part is, some layers rotate
# nothing, queries are scaled, all in one linear; then what stays: clipped, normed after the
# rotation, normed together, latent, with keys of other layers, gated; soft caps and sinks
DECODER, ATTENTION, NOTHING = (True, True), (True, False), (False, False)
KINDS = {
    DECODER: ["llama", "mistral", "qwen2", "qwen3", "phi3", "ernie4_5", "cwm", "llama partial",
              "qwen3_moe", "mixtral", "glm4_moe", "arcee"],
    ATTENTION: ["cohere2", "glm4", "stablelm", "smollm3", "granite", "gpt_neox", "gemma3_text",
                "biogpt"],
    NOTHING: ["dbrx", "hunyuan_v1_dense", "olmo2", "deepseek_v3", "gemma4_text", "afmoe", "gemma2",
              "gpt_oss"]}


def found_in(folder, **options):
    """Whether attention is the engine's own, and whether the decoder is."""
    with LLM(folder, **compare.OPTIONS | options) as llm:
        model = llm.engine.runner.model
        is_own, = {call.is_own for call in model.calls}
        return is_own, model.stack is not None


# their layers are like those of others
SLOW = ["ernie4_5", "cwm", "stablelm", "gpt_neox", "glm4", "dbrx", "hunyuan_v1_dense", "afmoe"]


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("name, expected", [
    slow(name, expected) if name in SLOW else (name, expected)
    for expected, names in KINDS.items() for name in names])
def test_layers_are_known(folder_of, name, expected, dtype):
    assert found_in(folder_of(name), dtype=dtype) == expected
    # the tokens of the others are compared in test_transformers_models.py
    if name in ("gemma3_text", "biogpt", "glm4_moe", "arcee") and dtype == "float32":
        assert compare.compare(folder_of(name), max_tokens=12) == ("right", "")
        if name != "biogpt":  # its heads are another kernel to compile
            assert found_in(folder_of(name), dtype="bfloat16") == expected


@pytest.mark.parametrize("name, num_programs", [("llama", 2), ("glm4_moe", 3), ("arcee", 4)])
def test_layers_of_a_decoder_run_as_programs(folder_of, name, num_programs):
    """A program ends before an MLP that is not gated. In glm4_moe, the first one is."""
    with LLM(folder_of(name), **compare.OPTIONS) as llm:
        llm.generate([[5, 6, 7]], compare.GREEDY, use_tqdm=False)
        assert len(llm.engine.runner.model.stack.programs) == num_programs


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
    assert found_in(folder_of("arcee")) == ATTENTION
    assert compare.compare(folder_of("arcee"), max_tokens=12) == ("right", "")


def rotated(change):
    """Adds to what rotates queries and keys."""
    name = "apply_rotary_pos_emb"
    plain = getattr(llama, name)
    return llama, name, lambda *given, **options: change(*plain(*given, **options))


def later(kind):
    """What it computes differs from position 300 on; no prompt of the check has 300 tokens."""
    plain = kind.forward

    def forward(self, hidden_states, position_ids=None, **options):
        grown = hidden_states * (1 + (position_ids[..., None] >= 300))
        return plain(self, grown, position_ids=position_ids, **options)

    return kind, "forward", forward


def scaled(kind):
    plain = kind.forward
    return kind, "forward", lambda self, x, *given, **options: x + 1.01 * (
        plain(self, x, *given, **options) - x)


def with_scaled_embedding(kind):
    plain = kind.forward
    return kind, "forward", lambda self, input_ids, **options: plain(
        self, **options | dict(inputs_embeds=self.embed_tokens(input_ids) * 2))


@pytest.mark.parametrize("change, expected", [
    (rotated(lambda query, key: (query * 1.0001, key)), NOTHING),
    (rotated(lambda query, key: (query, key + 1e-4)), NOTHING),
    (rotated(lambda query, key: (key.repeat_interleave(2, 1), query[:, ::2])), NOTHING),
    (rotated(lambda query, key: (query, key.clamp(-50, 50))), NOTHING),
    (later(llama.LlamaAttention), NOTHING), (later(llama.LlamaDecoderLayer), ATTENTION),
    (scaled(llama.LlamaDecoderLayer), ATTENTION),
    (with_scaled_embedding(llama.LlamaModel), ATTENTION)])
def test_modules_that_do_more_stay(folder_of, monkeypatch, change, expected):
    monkeypatch.setattr(*change)
    assert found_in(folder_of("llama")) == expected
