"""GGUF files of families that transformers computes: what llama.cpp's converter writes of them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import greedy_reference
from quantizing import GREEDY, OPTIONS, PROMPTS, add_sizes, generated, gguf_name, in_gguf

from nanoengine import LLM
from nanoengine_extras.models.gguf import families as gguf_families
from nanoengine_extras.models.gguf import tokenizers as gguf_tokenizers
from nanoengine_extras.models.gguf import files as gguf_files
from nanoengine_extras.models.gguf import header as gguf_header
from nanoengine_extras.cpu.packed import QuantizedLinear

SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=320, max_position_embeddings=512, pad_token_id=0)
GEMMA = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
             query_pre_attn_scalar=64)
PHI = dict(bos_token_id=1, eos_token_id=2, original_max_position_embeddings=512)
LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.25, factor=8.0,
            original_max_position_embeddings=64, short_factor=[1.0 + i / 8 for i in range(8)],
            long_factor=[2.0 + i for i in range(8)])
SCALED = dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
              sliding_attention=dict(rope_type="default", rope_theta=1e4))
SLOW: Any = dict(marks=pytest.mark.slow)
MODELS = [
    pytest.param("gemma2", dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0), **SLOW),
    pytest.param("gemma3", dict(num_hidden_layers=7), **SLOW),
    ("gemma3", dict(num_hidden_layers=7, rope_parameters=SCALED, final_logit_softcapping=2.0)),
    pytest.param("phi3", dict(sliding_window=9), **SLOW),
    ("phi3", dict(tie_word_embeddings=True, rope_parameters=LONG,
                  original_max_position_embeddings=64))]


def names_of(arch: str) -> dict[str, str]:
    return {own: name for name, own in gguf_families.FAMILIES[arch].names.items()}


def name_in(arch: str, name: str) -> str:
    """llama.cpp's name of a tensor."""
    for own, other in names_of(arch).items():
        if f".{own}." in name:
            return name.replace("model.layers.", "blk.").replace(own, other)
    return gguf_name(name)


def make(arch: str, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    kinds: Any = {"gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
                  "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
                  "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM)}[arch]
    config, model = kinds
    made = model(config(**SIZES | (PHI if arch == "phi3" else GEMMA) | changes)).eval()
    for name, parameter in made.named_parameters():
        size = 0.3 if parameter.ndim == 1 else 0.15
        parameter.data = torch.randn_like(parameter) * size + (arch == "phi3" and "norm" in name)
    return made


def write(model: Any, arch: str, path: Path, kind: str, entries: dict[str, Any]) -> None:
    """As llama.cpp's converter; matrices get the dequantized numbers of the file."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    add_sizes(writer, config)
    writer.add_sliding_window(config.sliding_window or 0)
    rope = config.rope_parameters
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_dimension_count(int(64 * rope.get("partial_rotary_factor", 1)))
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(1.5**0.5)
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if arch != "phi3" and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    for name, value in entries.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{arch}.{name}", value)
    for number, (name, weight) in enumerate(model.state_dict().items()):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        is_norm = name.endswith("norm.weight") and arch != "phi3"
        numbers = weight.numpy() + np.float32(is_norm)
        stored_as = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        stored = in_gguf(numbers, stored_as.name, number)
        writer.add_tensor(name_in(arch, name), stored, raw_dtype=stored_as)
        weight.copy_(torch.from_numpy(gguf.dequantize(stored, stored_as) - np.float32(is_norm)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make_file(tmp_path):
    def made(arch: str, kind: str = "Q8_0", entries: Any = (), **changes: Any) -> tuple[Path, Any]:
        model = make(arch, **changes)
        with torch.no_grad():
            write(model, arch, path := tmp_path / "model.gguf", kind, dict(entries))
        return path, model
    return made


@pytest.mark.parametrize("arch, changes", MODELS)
def test_tokens_are_those_of_the_model(make_file, arch, changes):
    path, model = make_file(arch, **changes)
    # the first chunk, and what follows it, are longer than a window
    found = generated(path, max_num_batched_tokens=24, max_num_seqs=2)
    assert found == [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("arch, changes", MODELS)
def test_the_config_is_that_of_the_model(make_file, arch, changes):
    """What llama.cpp's converter leaves out is known."""
    path, model = make_file(arch, "F32", **changes)
    gguf_files.write_folder([path], None, path.parent, has_tokenizer=False)
    config = transformers.AutoConfig.from_pretrained(path.parent)
    assert type(config) is type(model.config)
    found, expected = config.to_dict(), model.config.to_dict()
    # neither changes what is computed
    for name in ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id",
                 "quantization_config", "transformers_version", "_name_or_path", "mlp_bias",
                 "attention_bias", "head_dim"):
        found.pop(name, None)
        expected.pop(name, None)
    # a file has it in float32
    assert found.pop("rms_norm_eps") == np.float32(expected.pop("rms_norm_eps"))
    if scale := found["rope_parameters"].pop("attention_factor", None):
        assert scale == np.float32(1.5**0.5)
    assert found == expected


@pytest.mark.slow
def test_weights_stay_packed(make_file):
    """Those of fused projections, too."""
    for arch in ("gemma3", "phi3"):
        path, model = make_file(arch, "Q4_0")
        with LLM(path, **OPTIONS) as llm:
            modules = llm.engine.runner.model.layers.modules()
            linears = [each for each in modules if isinstance(each, torch.nn.Linear)]
            assert len(linears) >= 6
            assert all(isinstance(each, QuantizedLinear) and each.is_quantized for each in linears)
            assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == (
                greedy_reference(model, PROMPTS[0], 12))


@pytest.mark.parametrize("arch, layers, scale", [
    ("gemma2", 46, 128), ("gemma2", 45, 64), ("gemma3", 62, 128), ("gemma3", 61, 64)])
def test_the_largest_models_scale_scores_in_another_way(make_file, arch, layers, scale):
    path, _ = make_file(arch)
    header = gguf_header.Header([path])
    fields = {"block_count": layers}
    header.of_model = lambda name, default=None, known=header.of_model: (
        fields.get(name) or known(name, default))
    assert header.config()["query_pre_attn_scalar"] == scale


@pytest.mark.parametrize("arch, entries, message", [
    ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0 .* one of .0.0."),
    ("phi3", {"final_logit_softcapping": 3.0}, "final_logit_softcapping=3.0 .* one of .0.0."),
    ("phi3", {"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor=1.5 .* one of .1.0."),
    ("phi3", {"rope.scaling.factor": 2.0}, "rope.scaling.factor=2.0 .* one of .1.0."),
    ("phi3", {"expert_count": 4}, "expert_count=4 .* one of .0.")])
def test_what_a_family_does_not_have(make_file, arch, entries, message):
    path, _ = make_file(arch, entries=entries)
    with pytest.raises(ValueError, match=f"^model='{path}': the file's {message}"):
        LLM(path)


def test_the_engine_says_that_it_has_no_such_model(make_file):
    """The message has the name of the file, not of the folder that is made of it."""
    path, _ = make_file("phi3")
    with pytest.raises(ValueError, match=f"^model='{path}' .* model_impl='transformers'"):
        LLM(path, model_impl="native")


TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "  ",
          *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]


@pytest.mark.parametrize("arch, has_prefix, expected", [
    ("gemma3", False, ["<bos>", "ab", "▁a", "▁▁", "b"]),
    ("phi3", None, ["<bos>", "▁ab", "▁a", "  ", "▁", "b"])])
def test_tokenizers(tmp_path, arch, has_prefix, expected):
    """Gemma begins a text without a space, and has tokens of several."""
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 262 + [-1.0 - place for place in range(6)])
    writer.add_token_types([3, 3, 3, 2, 3, 4, *[6] * 256, *[1] * 6])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    if has_prefix is not None:
        writer.add_add_space_prefix(has_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizers.read(gguf_header.Header([path]).find, path)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert each.convert_ids_to_tokens(each("ab a  b").input_ids) == expected
        assert each("<start_of_turn>").input_ids == [2, 4]
