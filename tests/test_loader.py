"""Checkpoints: sharded, fused and tied ones load; what is missing or left over is an error."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Raises, changed, check_refused, greedy_reference, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from nanoengine import LLM, SamplingParams
from nanoengine.loader import load_config

PROMPTS = random_prompts([5, 30])


def tokens(folder) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", block_size=16, num_kv_blocks=8) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reference(folder) -> list[list[int]]:
    """What transformers generates greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [greedy_reference(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_or_not_is_decided_as_in_transformers(make_model, architecture, is_tied):
    """By config.json, unless the checkpoint has two matrices that differ."""
    options = dict(head_dim=None) if architecture == "Qwen2" else {}
    folder = Path(make_model(architecture, tie_word_embeddings=is_tied, **options)[0])
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    # none, the same, and another matrix
    others = [None, embedding.clone(), torch.roll(embedding, 1, 0)]
    for head in others:
        if head is None and not is_tied:
            continue
        rewrite(folder, lambda t, head=head: t.pop("lm_head.weight", None) if head is None
                else t.update({"lm_head.weight": head}))
        assert tokens(folder) == reference(folder)
    if is_tied:
        # only the other name
        rewrite(folder, lambda t: t.pop("model.embed_tokens.weight"))
        assert tokens(folder) == reference(folder)


def test_only_files_that_count_are_read(make_model, tmp_path):
    """model.safetensors, or the shards that the index names, as in transformers."""
    folder, model = make_model()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    expected = tokens(folder)
    make_model(seed=1)[1].save_pretrained(tmp_path / "other", max_shard_size="100KB")
    for file in (tmp_path / "other").glob("model-*.safetensors"):
        shutil.copy(file, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.fp16.safetensors").write_bytes(b"not read")
    assert tokens(tmp_path / "sharded") == expected
    model.save_pretrained(tmp_path / "whole")
    for file in (tmp_path / "other").glob("model*"):
        shutil.copy(file, tmp_path / "whole")
    assert tokens(tmp_path / "whole") == expected
    for file in (tmp_path / "sharded").glob("model-00002-*"):
        file.unlink()
    check_refused(r"lack \d+ tensors: .*weight", LLM, str(tmp_path / "sharded"))


def test_an_index_of_files_with_other_names(copy):
    expected = tokens(copy)
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    names = dict.fromkeys(load_file(copy / "weights.safetensors"), "weights.safetensors")
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert tokens(copy) == expected
    (copy.parent / "outside.safetensors").hardlink_to(copy / "weights.safetensors")
    (copy / "link.safetensors").symlink_to(copy.parent / "outside.safetensors")
    (copy / "up").symlink_to(copy.parent)
    outside = (5, None, ["a"], {}, "n" * 10_000, "\u00e9" * 200, "a\0b", "/proc/self/mem",
               "../outside.safetensors", str(copy.parent / "outside.safetensors"),
               "link.safetensors", "up/outside.safetensors")
    maps = [{"weight_map": {"a": "weights.safetensors", "b": name}} for name in outside]
    for wrong in ("{}", "[]", '{"weight_map": 5}', "no JSON", *map(json.dumps, maps)):
        index.write_text(wrong)
        with pytest.raises(ValueError, match="model.safetensors.index.json") as error:
            LLM(str(copy), num_kv_blocks=8)
        assert len(str(error.value)) < 1000


def test_a_snapshot_in_the_cache_links_to_its_blobs(copy, tmp_path):
    """The layout of Hugging Face's cache; a blob of another model is outside."""
    expected = tokens(copy)
    snapshot, blobs = (tmp_path / "hub" / "models--a--b" / name for name in ("snapshots", "blobs"))
    snapshot = snapshot / "main"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(copy.iterdir()):
        file.rename(blobs / str(number))
        name = "model-1.safetensors" if file.suffix == ".safetensors" else file.name
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    names = dict.fromkeys(load_file(snapshot / "model-1.safetensors"), "model-1.safetensors")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert tokens(snapshot) == expected
    snapshot.parent.rename(tmp_path / "other")
    check_refused("index.json", LLM, str(tmp_path / "other" / "main"))


@pytest.mark.parametrize("value", ["n" * 10_000, "n/" * 5_000, "a\0b", Raises(), [Raises()],
                                   type("Text", (Raises, str), {})("a")],
                         ids=["letters", "folders", "zero", "object", "list", "subclass"])
def test_names_and_prompts_that_nothing_can_read(tiny, value):
    for option in ("model", "tokenizer"):
        check_refused(rf"(?s)^(?=.*{option}).{{,2500}}$", LLM, num_kv_blocks=8,
                      **{"model": tiny, option: value})


def test_a_tokenizer_of_another_folder(text_copy):
    """transformers would read it in place of tokenizer.json."""
    shutil.copy(text_copy / "tokenizer.json", text_copy.parent / "tokenizer.4.0.json")
    file = text_copy / "tokenizer_config.json"
    entries = json.loads(file.read_text()) | {"fast_tokenizer_files": ["../tokenizer.4.0.json"]}
    file.write_text(json.dumps(entries))
    check_refused("tokenizer.*'../tokenizer.4.0.json'", LLM, str(text_copy))


def test_a_prompt_in_the_lengthened_context(make_model):
    folder, _ = make_model("Llama", max_position_embeddings=64, rope_parameters={
        "rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0})
    prompt = random_prompts([200])
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=20, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        found = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert found == greedy_reference(model, prompt[0], 6)


def test_the_rope_table_is_as_long_as_the_context_that_fits(make_model):
    folder, _ = make_model("Llama", max_position_embeddings=4_000_000)
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=8) as llm:
        assert llm.inputs.max_model_len == 128
        assert llm.engine.runner.model.rope.shape[1] == 128


def test_a_tokenizer_in_python_is_refused_at_the_start(copy):
    ByT5Tokenizer().save_pretrained(copy)
    check_refused("must have a tokenizer.json .*ByT5Tokenizer", LLM, str(copy), num_kv_blocks=8)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "lack 1 tensors: .*1.self_attn.k"),
    (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}),
     "no tensor .*layers.9"),
    (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"norm.weight=.* \(63,\)"),
    (lambda t: t.update({"norm.weight": torch.ones(64)}), "no tensor 'norm.weight', or .* twice"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), "I32.* must be floats"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64).bool()}), "BOOL.* must be floats"),
])
def test_tensors_missing_left_over_twice_or_misshapen(copy, change, message):
    rewrite(copy, change)
    check_refused(message, LLM, str(copy))


def test_files_absent_or_truncated(copy):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-100], content[:50], b"no safetensors at all", None):
        file.unlink(missing_ok=True)
        if broken is not None:
            file.write_bytes(broken)
        check_refused("model.safetensors: .*header" if broken else "lack", LLM, str(copy))


# ---------------------------------------------------------------------- files beside the weights


@pytest.mark.parametrize("file, content, message", [
    ("generation_config.json", "{", "generation_config.json: "),
    ("generation_config.json", "[1]", "generation_config.json: "),
    ("generation_config.json", "\0\xff", "generation_config.json: "),
    ("tokenizer_config.json", '{"model_max_length": "2048"}', "tokenizer"),
    ("tokenizer.json", "{", "tokenizer.json"), ("tokenizer.json", "[]", "tokenizer.json"),
    ("tokenizer.json", "5", "tokenizer.json"), ("tokenizer.json", "", "tokenizer.json"),
    ("tokenizer_config.json", "{", "tokenizer"), ("tokenizer_config.json", "[1]", "tokenizer"),
    ("config.json", "{", "config.json"), ("config.json", "[1]", "config.json"),
    ("config.json", "", "config.json"), ("config.json", "null", "config.json"),
    ("config.json", '{"model_type": ["llama"]}', "config.json"),
    ("config.json", '{"model_type": "qwen3", "auto_map": {"AutoConfig": "a.B"}}', "architectures"),
    ("config.json", '{"model_type": "new", "auto_map": {"AutoConfig": "a.B"}}', "config.json")])
def test_damaged_files_are_named(text_copy, monkeypatch, file, content, message):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked on standard input"))
    (text_copy / file).write_text(content)
    check_refused(message, LLM, str(text_copy))


@pytest.mark.parametrize("changes", [
    dict(hidden_act="gelu"), dict(layer_types=["a"] * 2),
    dict(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=2),
    dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})], ids=str)
def test_entries_that_change_what_is_computed(tiny, tmp_path, changes):
    """The engine itself refuses them; test_model.py has the words of explain.py, and more."""
    name = "rope_type" if "rope_parameters" in changes else [*changes][0]
    check_refused(name, load_config, changed(tiny, tmp_path, **changes))


def test_entries_and_files_that_change_nothing(tiny, tmp_path):
    folder = changed(tiny, tmp_path, is_causal=True, quantization_config=None, sliding_window=0,
                     use_cache=False, auto_map={"AutoConfig": "a.B"},
                     layer_types=["full_attention"] * 2)
    for name in ("model.gguf", "adapter_config.json", "modules.json", "pytorch_model.bin",
                 "model_index.json"):
        (folder / name).write_text("{}")
    assert tokens(folder) == tokens(tiny)
